//! The kernel's advice: `posix_fadvise`, cut to what it takes in one call, and looked after.
//!
//! Each `WILLNEED` call is silently cut to a size that depends on the device ([`DeviceLimits::call_bytes`]). Hints are split to
//! it; after each the page cache is asked whether the data came. If less came than was asked for, the rest is asked for in
//! smaller pieces, and later hints, too. If nothing came where something came before, the device has as much under way as it
//! takes: FUSE drops what is read ahead beyond that without a word. It is asked again a little later, so that hints come in order
//! and without gaps: a program's own read in a gap would come behind all hints that were taken. If nothing came several times,
//! the file system ignores advice.

use std::io;
use std::num::NonZero;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use rustix::fs::{Advice, AtFlags, StatxFlags};

use super::cachestat::{cached_pages, page_bytes};
use super::forced_read::overtaken;
use super::{Brought, HintBackend, HintedFile, pieces};
use impresario_base::lock::Mutex;
use impresario_device::{DeviceLimits, device_limits_of};

/// Hints are never split smaller.
const SMALLEST_BYTES: u64 = 128 << 10;
/// Where nothing came, the same is asked for again after this time, after twice it, and so on up to the second,
const ASK_AGAIN_AFTER: Duration = Duration::from_micros(250);
const ASK_AGAIN_EVERY: Duration = Duration::from_millis(4);
/// for no longer than this since the hint began: a worker waits for it.
const ASK_AGAIN_WITHIN: Duration = Duration::from_millis(200);
/// Calls in a row that brought nothing at all, after which advice counts as ignored.
const IGNORED_CALLS: u32 = 4;

#[derive(Clone, Copy, Debug)]
struct Device {
    limits: DeviceLimits,
    /// As the limits say, or less where that was seen not to come.
    call_bytes: u64,
    /// Something came of the last call, or may come of the next one.
    takes: bool,
    brought_nothing: u32,
}

/// One hint under way.
struct Hint {
    /// Nothing is asked for again after this.
    end: Instant,
    /// Some of it came.
    brought: bool,
}

/// `posix_fadvise`.
#[derive(Debug)]
pub struct Fadvise {
    sysfs: PathBuf,
    devices: Mutex<FxHashMap<u64, Device>>,
}

impl Fadvise {
    /// With the tree that describes devices, `/sys`.
    pub fn new(sysfs: &Path) -> Fadvise {
        Fadvise { sysfs: sysfs.into(), devices: Mutex::default() }
    }

    /// Whether the file system of a device has been seen to ignore advice.
    pub fn ignored(&self, dev: u64) -> bool {
        let devices = self.devices.lock();
        devices.get(&dev).is_some_and(|d| d.brought_nothing >= IGNORED_CALLS)
    }

    /// What a file's device takes at once.
    pub fn limits(&self, file: HintedFile<'_>) -> DeviceLimits {
        self.with_device(file, |d| d.limits)
    }

    fn with_device<T>(&self, file: HintedFile<'_>, act: impl FnOnce(&mut Device) -> T) -> T {
        let mut devices = self.devices.lock();
        let device = devices.entry(file.id.dev).or_insert_with(|| {
            let limits = device_limits_of(&self.sysfs, file.id.dev, file.fd);
            Device { limits, call_bytes: limits.call_bytes, takes: false, brought_nothing: 0 }
        });
        act(device)
    }

    /// Asks for one piece that is not wholly in memory, `cached` pages of it, as long as the hint may where the device takes none at
    /// first.
    fn ask(
        &self,
        file: HintedFile<'_>,
        piece: Range<u64>,
        cached: Option<u64>,
        hint: &mut Hint,
    ) -> io::Result<Brought> {
        let bytes = piece.end - piece.start;
        let mut brought = Brought { asked_bytes: bytes, ..Brought::default() };
        let mut pause = ASK_AGAIN_AFTER;
        loop {
            will_need_call(file, piece.clone())?;
            brought.calls += 1;
            let Some(before) = cached else { return Ok(brought) };
            let Ok(after) = cached_pages(file.fd, piece.clone()) else { return Ok(brought) };
            let (came, wanted) = (after.cached.saturating_sub(before), after.all.saturating_sub(before));
            if came > 0 {
                self.with_device(file, |d| (d.takes, d.brought_nothing) = (true, 0));
                hint.brought = true;
                if came * 10 < wanted * 9 && bytes > SMALLEST_BYTES && piece.end <= length(file) {
                    return self.ask_in_parts(file, piece, brought, hint);
                }
            } else if wanted > 0 && piece.start < length(file) && self.takes_later(file, &piece, hint) {
                std::thread::sleep(pause.min(hint.end.saturating_duration_since(Instant::now())));
                pause = ASK_AGAIN_EVERY.min(pause * 2);
                continue;
            }
            brought.missed_bytes = ((wanted.saturating_sub(came)) * page_bytes()).min(bytes);
            return Ok(brought);
        }
    }

    /// Nothing came. Whether the device may take the same a little later. One that took the beginning of a long hint and is still
    /// busy with it does not ignore advice.
    fn takes_later(&self, file: HintedFile<'_>, piece: &Range<u64>, hint: &Hint) -> bool {
        if file.has_ended() || overtaken(file, piece) {
            return false;
        }
        self.with_device(file, |d| {
            let takes = d.takes && Instant::now() < hint.end;
            d.takes = takes || hint.brought;
            d.brought_nothing += u32::from(!d.takes);
            takes
        })
    }

    /// Less came of a call than was asked for: the rest in halves, and later calls, too, if these are taken at once.
    fn ask_in_parts(
        &self,
        file: HintedFile<'_>,
        piece: Range<u64>,
        mut brought: Brought,
        hint: &mut Hint,
    ) -> io::Result<Brought> {
        let bytes = piece.end - piece.start;
        let part_bytes = (bytes / 2).next_multiple_of(page_bytes()).max(SMALLEST_BYTES);
        let (mut parts, calls) = (0, brought.calls);
        for part in pieces(piece, part_bytes) {
            let cached = cached_pages(file.fd, part.clone())?;
            if !cached.complete() {
                let more = self.ask(file, part, Some(cached.cached), hint)?;
                brought.calls += more.calls;
                brought.missed_bytes += more.missed_bytes;
                parts += 1;
            }
        }
        if parts > 0 && brought.calls - calls == parts && brought.missed_bytes == 0 {
            let smaller = |d: &mut Device| (d.call_bytes / 2).max(SMALLEST_BYTES).min(d.call_bytes);
            self.with_device(file, |d| d.call_bytes = if bytes < d.call_bytes { d.call_bytes } else { smaller(d) });
        }
        Ok(brought)
    }
}

/// As far as is known without asking the file system: one that was cut off has nothing to bring in.
fn length(file: HintedFile<'_>) -> u64 {
    let how = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    rustix::fs::statx(file.fd, c"", how, StatxFlags::SIZE).map_or(0, |stat| stat.stx_size)
}

fn will_need_call(file: HintedFile<'_>, piece: Range<u64>) -> io::Result<()> {
    let Some(len) = NonZero::new(piece.end - piece.start) else { return Ok(()) };
    Ok(rustix::fs::fadvise(file.fd, piece.start, Some(len), Advice::WillNeed)?)
}

impl HintBackend for Fadvise {
    fn name(&self) -> &'static str {
        "fadvise"
    }

    fn waits(&self) -> bool {
        false
    }

    fn will_need(&self, file: HintedFile<'_>, range: Range<u64>) -> io::Result<Brought> {
        let call_bytes = self.with_device(file, |d| d.call_bytes);
        let mut brought = Brought::default();
        let mut hint = Hint { end: Instant::now() + ASK_AGAIN_WITHIN, brought: false };
        for piece in calls(&range, call_bytes).take_while(|_| !file.has_ended()) {
            let cached = brought.look(file.fd, &piece);
            if cached.is_some_and(|cached| cached.complete()) {
                continue;
            }
            brought.add(self.ask(file, piece, cached.map(|c| c.cached), &mut hint)?);
        }
        // Whole pages were asked about.
        brought.found_bytes = brought.found_bytes.min(range.end - range.start);
        Ok(brought)
    }
}

/// What is asked for call by call. The kernel counts pages, also those of which a range has a part: a call that begins within a
/// page would be cut by its last one, for which the program then waits.
fn calls(range: &Range<u64>, call_bytes: u64) -> impl Iterator<Item = Range<u64>> {
    pieces(range.start / page_bytes() * page_bytes()..range.end, call_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_call_touches_more_pages_than_the_kernel_takes() {
        let most = 128 << 10;
        for range in [2048..2048 + most, 0..most, 4095..4096 + 2 * most, 100..200, 4096..4096] {
            let calls: Vec<_> = calls(&range, most).collect();
            let touched = |call: &Range<u64>| call.end.div_ceil(page_bytes()) - call.start / page_bytes();
            assert!(calls.iter().all(|call| touched(call) <= most / page_bytes()), "{range:?}: {calls:?}");
            assert!(calls.iter().map(touched).sum::<u64>() >= touched(&range), "{range:?}: {calls:?}");
            assert!(calls.windows(2).all(|pair| pair[0].end == pair[1].start), "{range:?}: {calls:?}");
        }
    }
}
