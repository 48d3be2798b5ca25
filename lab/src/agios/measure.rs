//! One measurement of a library with the interface of AGIOS, version 2, in this process, which ends with it.

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

type Callback = extern "C" fn(i64) -> *mut c_void;
type Init = unsafe extern "C" fn(Callback, *const c_void, *const c_char, i32) -> bool;
type Add = unsafe extern "C" fn(*const c_char, i32, i64, i64, i64, i32) -> bool;
type Release = unsafe extern "C" fn(*const c_char, i32, i64, i64) -> bool;

struct Functions {
    init: Init,
    add: Add,
    release: Release,
}

/// Servers or applications.
pub const QUEUES: u64 = 4;
/// Files where a case names no number.
const FILES: u64 = 64;
/// Requests are strided: no two touch.
const STRIDE_BYTES: u64 = 32_768;
const LEN_BYTES: u64 = 16_384;
/// Requests that producers have pending at most.
const WINDOW: u64 = 20_000;
/// How long a producer that is ahead by the window pauses: briefly beside the time that a window takes, and seldom enough
/// that waking producers is not what is measured.
const PAUSE: Duration = Duration::from_micros(500);
/// A measurement ends after this time with the results so far.
const PATIENCE: Duration = Duration::from_secs(8);
/// Between init and the first request, for every library: the public one's thread chooses its algorithm meanwhile, and a
/// request that comes before it has would spin for ever where the compiler optimises.
const SETTLING: Duration = Duration::from_millis(200);

static FUNCTIONS: OnceLock<Functions> = OnceLock::new();
static NAMES: OnceLock<Vec<CString>> = OnceLock::new();
static SERVED: AtomicU64 = AtomicU64::new(0);
/// The next request that a callback adds; callbacks run one at a time.
static NEXT: AtomicU64 = AtomicU64::new(0);
/// Each callback adds a request for the one that it serves.
static REFILL: AtomicBool = AtomicBool::new(false);
static BLOCKED: AtomicBool = AtomicBool::new(false);
static ENTERED: AtomicBool = AtomicBool::new(false);

const BLOCKER: i64 = -1;

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Case {
    pub load: Load,
    /// Requests are of this many files.
    pub files: u64,
}

/// What happens to the library.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Load {
    /// This many threads add, the library's thread calls back, callbacks release.
    Producers(u64),
    /// This many are pending; each callback releases its request and adds another.
    Pending(u64),
    /// The library is idle.
    Idle,
}

impl Case {
    /// From `producers-N`, `pending-N` or `idle`, each with `-in-FILES` or without.
    pub fn parse(text: &str) -> Option<Case> {
        let (load, files) = match text.split_once("-in-") {
            Some((load, files)) => (load, files.parse().ok().filter(|files| *files > 0)?),
            None => (text, FILES),
        };
        let number = |text: &str| text.parse().ok().filter(|n| *n > 0);
        let load = match load.split_once('-') {
            Some(("producers", n)) => Load::Producers(number(n)?),
            Some(("pending", n)) => Load::Pending(number(n)?),
            _ => (load == "idle").then_some(Load::Idle)?,
        };
        Some(Case { load, files })
    }
}

/// A result.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Measured {
    /// Requests a second.
    pub per_second: f64,
    /// Processor time of the whole process per request, µs; when idle, µs per second.
    pub cpu_us: f64,
    /// Memory of a pending request, bytes.
    pub bytes: f64,
}

/// Loads a library and measures it under a configuration.
pub fn measure(library: &Path, config: &Path, case: Case, requests: u64) -> Result<Measured> {
    let functions = load(library)?;
    FUNCTIONS.set(functions).ok().context("one measurement a process")?;
    NAMES.get_or_init(|| (0..case.files).map(|n| CString::new(format!("/file/{n:03}")).unwrap_or_default()).collect());
    let config = CString::new(config.as_os_str().as_encoded_bytes())?;
    let functions = FUNCTIONS.get().context("loaded")?;
    let memory = allocated_bytes();
    // SAFETY: the function that the header of AGIOS declares, with its arguments.
    ensure!(unsafe { (functions.init)(serve, std::ptr::null(), config.as_ptr(), QUEUES as i32) }, "agios_init failed");
    std::thread::sleep(SETTLING);
    match case.load {
        Load::Producers(threads) => producers(threads, requests),
        Load::Pending(depth) => pending(depth, requests, memory),
        Load::Idle => {
            let (cpu, begun) = (cpu_us(), Instant::now());
            std::thread::sleep(Duration::from_secs(2));
            let seconds = begun.elapsed().as_secs_f64();
            Ok(Measured { per_second: 0.0, cpu_us: (cpu_us() - cpu) / seconds, bytes: 0.0 })
        }
    }
}

fn load(library: &Path) -> Result<Functions> {
    let path = CString::new(library.as_os_str().as_encoded_bytes())?;
    // SAFETY: loading runs the library's initialisers; it stays loaded.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if handle.is_null() {
        // SAFETY: the last error of this thread, a string.
        let why = unsafe { CStr::from_ptr(libc::dlerror()) };
        bail!("{} cannot be loaded: {}", library.display(), why.to_string_lossy());
    }
    let find = |name: &CStr| {
        // SAFETY: a handle that was just opened.
        let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
        ensure!(!address.is_null(), "{} has no {}", library.display(), name.to_string_lossy());
        Ok(address)
    };
    let (init, add) = (find(c"agios_init")?, find(c"agios_add_request")?);
    let release = find(c"agios_release_request")?;
    // SAFETY: functions of these types in version 2 of the interface.
    unsafe {
        Ok(Functions {
            init: std::mem::transmute::<*mut c_void, Init>(init),
            add: std::mem::transmute::<*mut c_void, Add>(add),
            release: std::mem::transmute::<*mut c_void, Release>(release),
        })
    }
}

/// File, offset and queue of a request.
fn request(n: u64) -> (*const c_char, i64, i32) {
    let names = NAMES.get().map_or(&[][..], Vec::as_slice);
    let files = names.len() as u64;
    (names[(n % files) as usize].as_ptr(), (n / files * STRIDE_BYTES) as i64, (n / 7 % QUEUES) as i32)
}

fn add(n: u64) {
    let (file, offset, queue) = request(n);
    if let Some(functions) = FUNCTIONS.get() {
        // SAFETY: as AGIOS declares it; the name lives for ever.
        let added = unsafe { (functions.add)(file, 0, offset, LEN_BYTES as i64, n as i64, queue) };
        assert!(added, "request {n} is refused");
    }
}

extern "C" fn serve(identifier: i64) -> *mut c_void {
    if identifier == BLOCKER {
        ENTERED.store(true, Relaxed);
        while BLOCKED.load(Relaxed) {
            std::thread::sleep(Duration::from_micros(200));
        }
        return std::ptr::null_mut();
    }
    let (file, offset, _) = request(identifier as u64);
    if let Some(functions) = FUNCTIONS.get() {
        // SAFETY: as AGIOS declares it.
        unsafe { (functions.release)(file, 0, LEN_BYTES as i64, offset) };
    }
    // NOOP calls back on several threads.
    SERVED.fetch_add(1, Relaxed);
    if REFILL.load(Relaxed) {
        add(NEXT.fetch_add(1, Relaxed));
    }
    std::ptr::null_mut()
}

fn producers(threads: u64, requests: u64) -> Result<Measured> {
    let (begun, cpu) = (Instant::now(), cpu_us());
    let share = requests / threads;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                for k in 0..share {
                    if k % 64 == 0 {
                        while k * threads > SERVED.load(Relaxed) + WINDOW && begun.elapsed() < PATIENCE {
                            std::thread::sleep(PAUSE);
                        }
                        if begun.elapsed() >= PATIENCE {
                            return;
                        }
                    }
                    add(thread + k * threads);
                }
            });
        }
    });
    while SERVED.load(Relaxed) < share * threads && begun.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_micros(50));
    }
    let (served, seconds) = (SERVED.load(Relaxed).max(1) as f64, begun.elapsed().as_secs_f64());
    Ok(Measured { per_second: served / seconds, cpu_us: (cpu_us() - cpu) / served, bytes: 0.0 })
}

fn pending(depth: u64, requests: u64, memory: u64) -> Result<Measured> {
    BLOCKED.store(true, Relaxed);
    if let Some(functions) = FUNCTIONS.get() {
        // SAFETY: as AGIOS declares it.
        unsafe { (functions.add)(c"blocker".as_ptr(), 0, 0, 1, BLOCKER, 0) };
    }
    let begun = Instant::now();
    while !ENTERED.load(Relaxed) {
        ensure!(begun.elapsed() < PATIENCE, "the library serves nothing");
        std::thread::sleep(Duration::from_micros(200));
    }
    (0..depth).for_each(add);
    NEXT.store(depth, Relaxed);
    REFILL.store(true, Relaxed);
    let (begun, cpu) = (Instant::now(), cpu_us());
    BLOCKED.store(false, Relaxed);
    while SERVED.load(Relaxed) < requests && begun.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_micros(500));
    }
    let (cpu, seconds) = (cpu_us() - cpu, begun.elapsed().as_secs_f64());
    let served = SERVED.load(Relaxed).max(1) as f64;
    let bytes = allocated_bytes().saturating_sub(memory) as f64 / depth as f64;
    Ok(Measured { per_second: served / seconds, cpu_us: cpu / served, bytes })
}

/// Processor time of this process, µs.
fn cpu_us() -> f64 {
    // SAFETY: all-zero bytes are a structure to be filled in.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let of = |t: libc::timeval| t.tv_sec as f64 * 1e6 + t.tv_usec as f64;
    of(usage.ru_utime) + of(usage.ru_stime)
}

#[cfg(target_env = "gnu")]
fn allocated_bytes() -> u64 {
    // SAFETY: mallinfo2 only fills the structure that it returns.
    let info = unsafe { libc::mallinfo2() };
    info.uordblks as u64 + info.hblkhd as u64
}

#[cfg(not(target_env = "gnu"))]
fn allocated_bytes() -> u64 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_have_a_load_and_files() {
        let parsed = |text| Case::parse(text).map(|case| (case.load, case.files));
        assert_eq!(parsed("producers-4"), Some((Load::Producers(4), 64)));
        assert_eq!(parsed("pending-10000-in-10000"), Some((Load::Pending(10_000), 10_000)));
        assert_eq!(parsed("idle"), Some((Load::Idle, 64)));
        for wrong in ["", "producers", "pending-x", "pending-5-in-0", "idle-3", "producers-0"] {
            assert_eq!(parsed(wrong), None, "{wrong}");
        }
    }
}
