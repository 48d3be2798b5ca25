//! Which user a process is, as the MUNGE daemon of its machine vouches for it: credentials, which the daemon of another
//! machine with the same key can check.
//!
//! The daemon sees to their age, and to that each is taken once on a machine. The library is loaded at run time.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::OnceLock;

use impresario_base::loader::Library;
use impresario_wire::ClientKey;

/// How long a credential is good, seconds: it is used at once, but clocks differ.
const GOOD_FOR_S: c_int = 60;
/// Longest credential that is looked at, bytes.
const CREDENTIAL_MAX_BYTES: usize = 2048;
/// Numbers of the header `munge.h`.
const SUCCESS: c_int = 0;
const SOCKET_ERROR: c_int = 6;
const EXPIRED: c_int = 15;
const REWOUND: c_int = 16;
const REPLAYED: c_int = 17;
const OPT_TTL: c_int = 4;
const OPT_SOCKET: c_int = 8;

type Context = *mut c_void;

/// The library's functions, as its header documents them.
struct Api {
    encode: Encode,
    decode: Decode,
    error: ErrorText,
    create: Create,
    destroy: Destroy,
    set: Set,
    context_error: ContextErrorText,
}

type Encode = unsafe extern "C" fn(*mut *mut c_char, Context, *const c_void, c_int) -> c_int;
type Decode = unsafe extern "C" fn(*const c_char, Context, *mut *mut c_void, *mut c_int, *mut u32, *mut u32) -> c_int;
type ErrorText = unsafe extern "C" fn(c_int) -> *const c_char;
type Create = unsafe extern "C" fn() -> Context;
type Destroy = unsafe extern "C" fn(Context);
type Set = unsafe extern "C" fn(Context, c_int, ...) -> c_int;
type ContextErrorText = unsafe extern "C" fn(Context) -> *const c_char;

impl Api {
    fn load() -> Result<Api, String> {
        let library = Library::load(c"libmunge.so.2")
            .map_err(|why| format!("the library of MUNGE cannot be loaded (Debian: libmunge2): {why}"))?;
        let find = |name: &CStr| library.symbol(name, None);
        // SAFETY: the functions of these names have these signatures.
        unsafe {
            Ok(Api {
                encode: std::mem::transmute::<*mut c_void, Encode>(find(c"munge_encode")?),
                decode: std::mem::transmute::<*mut c_void, Decode>(find(c"munge_decode")?),
                error: std::mem::transmute::<*mut c_void, ErrorText>(find(c"munge_strerror")?),
                create: std::mem::transmute::<*mut c_void, Create>(find(c"munge_ctx_create")?),
                destroy: std::mem::transmute::<*mut c_void, Destroy>(find(c"munge_ctx_destroy")?),
                set: std::mem::transmute::<*mut c_void, Set>(find(c"munge_ctx_set")?),
                context_error: std::mem::transmute::<*mut c_void, ContextErrorText>(find(c"munge_ctx_strerror")?),
            })
        }
    }

    fn get() -> Result<&'static Api, String> {
        static API: OnceLock<Result<Api, String>> = OnceLock::new();
        API.get_or_init(Api::load).as_ref().map_err(Clone::clone)
    }
}

/// The MUNGE daemon of this machine.
#[derive(Clone, Debug, Default)]
pub struct Munge {
    socket: Option<CString>,
}

/// A user who has proved to be that.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Proven {
    /// Number of the user.
    pub uid: u32,
    /// Number of its group.
    pub gid: u32,
}

impl Munge {
    /// The daemon behind this socket; `None`: the one that the library knows.
    pub fn at(socket: Option<&Path>) -> Munge {
        // A path with a NUL is no path: the library then says that nothing listens at the rest of it.
        let text =
            |path: &Path| CString::new(path.as_os_str().as_bytes().split(|b| *b == 0).next().unwrap_or_default());
        Munge { socket: socket.and_then(|path| text(path).ok()) }
    }

    /// A credential of this process's user, for the connections of a client. May take seconds if the daemon does not answer.
    pub fn prove(&self, client: ClientKey) -> Result<Vec<u8>, String> {
        let api = Api::get()?;
        let context = self.context(api)?;
        let about = about(client);
        let mut credential = std::ptr::null_mut();
        // SAFETY: a context that lives, a buffer of that length, and a place for the answer.
        let answer = unsafe {
            (api.set)(context.raw, OPT_TTL, GOOD_FOR_S);
            (api.encode)(&mut credential, context.raw, about.as_ptr().cast(), about.len() as c_int)
        };
        if answer != SUCCESS || credential.is_null() {
            return Err(context.explain(answer));
        }
        // SAFETY: the library has given a terminated string, which is ours to free.
        unsafe {
            let bytes = CStr::from_ptr(credential).to_bytes().to_vec();
            libc::free(credential.cast());
            Ok(bytes)
        }
    }

    /// The same for another user than root, by a program of root. A thread of its own asks the daemon with the rights of that user.
    pub fn prove_as(&self, user: Proven, client: ClientKey) -> Result<Vec<u8>, String> {
        let munge = self.clone();
        let thread = std::thread::Builder::new().name("credential".into()).stack_size(256 << 10);
        let asked = thread.spawn(move || take_rights_of(user).and_then(|()| munge.prove(client)));
        let asked = asked.map_err(|error| format!("no thread to ask munged with ({error})"))?;
        asked.join().unwrap_or_else(|_| Err("asking munged panicked".into()))
    }

    /// The user whose credential this is, if it was made for connections of this client and has not been shown to this machine
    /// before. May take seconds if the daemon does not answer.
    pub fn verify(&self, credential: &[u8], client: ClientKey) -> Result<Proven, String> {
        let api = Api::get()?;
        if credential.len() > CREDENTIAL_MAX_BYTES {
            return Err(format!("it has {} bytes, which no credential has", credential.len()));
        }
        let text = CString::new(credential).map_err(|_| "it is no credential of MUNGE".to_string())?;
        let context = self.context(api)?;
        let (mut content, mut len) = (std::ptr::null_mut(), 0);
        let (mut uid, mut gid) = (u32::MAX, u32::MAX);
        // SAFETY: a terminated string, a context that lives, and places for the answers.
        let answer = unsafe { (api.decode)(text.as_ptr(), context.raw, &mut content, &mut len, &mut uid, &mut gid) };
        // SAFETY: where the library has given a content it has that length and is ours to free.
        let is_ours = unsafe {
            let is_ours = !content.is_null()
                && std::slice::from_raw_parts(content.cast::<u8>(), usize::try_from(len).unwrap_or(0)) == about(client);
            libc::free(content);
            is_ours
        };
        match answer {
            SUCCESS if is_ours => Ok(Proven { uid, gid }),
            SUCCESS => Err("it was made for another client or purpose".into()),
            other => Err(context.explain(other)),
        }
    }

    fn context(&self, api: &'static Api) -> Result<Made, String> {
        // SAFETY: no arguments.
        let raw = unsafe { (api.create)() };
        if raw.is_null() {
            return Err("MUNGE has no memory".into());
        }
        let made = Made { api, raw };
        if let Some(socket) = &self.socket {
            // SAFETY: a context that lives; the option's argument is a terminated string, which is copied.
            unsafe { (api.set)(raw, OPT_SOCKET, socket.as_ptr()) };
        }
        Ok(made)
    }
}

/// Gives this thread, and no other, the rights of a user, with no further groups. Its real user stays root's: the user can neither
/// signal nor trace it.
fn take_rights_of(user: Proven) -> Result<(), String> {
    const KEPT: libc::c_long = -1;
    let (uid, gid) = (libc::c_long::from(user.uid), libc::c_long::from(user.gid));
    // To the kernel the last number means that nothing changes.
    if user.uid == 0 || user.uid == u32::MAX || user.gid == u32::MAX {
        return Err(format!("user {} with group {} has no credential of its own", user.uid, user.gid));
    }
    // SAFETY: system calls that take numbers, and no groups from nowhere. The functions of the C library would change all threads.
    let is_done = unsafe {
        libc::syscall(libc::SYS_setgroups, 0usize, std::ptr::null::<libc::gid_t>()) == 0
            && libc::syscall(libc::SYS_setresgid, KEPT, gid, KEPT) == 0
            && libc::syscall(libc::SYS_setresuid, KEPT, uid, KEPT) == 0
    };
    let why = || format!("this program cannot act as user {}: {}", user.uid, std::io::Error::last_os_error());
    is_done.then_some(()).ok_or_else(why)
}

/// A context of the library.
struct Made {
    api: &'static Api,
    raw: Context,
}

impl Made {
    /// What the library says of an error, with the remedy.
    fn explain(&self, error: c_int) -> String {
        // SAFETY: a context that lives; the strings are the library's, terminated, and copied at once.
        let says = unsafe {
            let of_context = (self.api.context_error)(self.raw);
            let text = if of_context.is_null() { (self.api.error)(error) } else { of_context };
            if text.is_null() { format!("error {error}") } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
        };
        let remedy = match error {
            SOCKET_ERROR => "start munged there, or set `munge_socket` in [cluster]",
            EXPIRED | REWOUND => "set the clock that is wrong",
            REPLAYED => "it was used before: somebody may have copied it",
            _ => "all machines of the cluster need the same munge.key",
        };
        format!("{says}; {remedy}")
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        // SAFETY: made by the library, and used by nobody any more.
        unsafe { (self.api.destroy)(self.raw) }
    }
}

/// What a credential is about: it is of no use to other programs that use MUNGE, or to other clients.
fn about(client: ClientKey) -> Vec<u8> {
    [b"impresario client ".as_slice(), &client.0.to_le_bytes()].concat()
}
