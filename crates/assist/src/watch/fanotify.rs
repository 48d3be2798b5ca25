//! Reads of chosen files, announced before they happen. The program waits for our answer (8 to 11 µs), so this is for
//! those who ask for it. Needs root, Linux 6.14 or later and ext4, xfs or btrfs.
//!
//! A thread of its own allows every access at once and tells of it afterwards: it waits for nothing else, so no program
//! waits for the advice. When this process dies the kernel allows what was pending.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};

use super::line::Seen;

// From the kernel's interface, linux/fanotify.h; the C library of older systems does not name them.
const FAN_CLASS_PRE_CONTENT: u32 = 0x8;
const FAN_CLOEXEC: u32 = 0x1;
const FAN_PRE_ACCESS: u64 = 0x0010_0000;
const FAN_MARK_ADD: u32 = 0x1;
const FAN_MARK_REMOVE: u32 = 0x2;
const FAN_MARK_FLUSH: u32 = 0x80;
const FAN_ALLOW: u32 = 0x1;
const FAN_EVENT_INFO_TYPE_RANGE: u8 = 6;
/// Size of `struct fanotify_event_metadata`.
const METADATA_BYTES: usize = 24;
/// Accesses that wait to be looked at; more are allowed and not told.
const TOLD_MAX: usize = 8192;
/// After an access that could not be looked at.
const PAUSE: Duration = Duration::from_millis(1);

/// Announced reads of some files. Dropping it ends the thread and removes all marks.
#[derive(Debug)]
pub struct Fanotify {
    group: OwnedFd,
    told: Receiver<Seen>,
    lost: Arc<AtomicU64>,
    disturbed: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Fanotify {
    /// Begins to listen; no file is marked yet.
    pub fn new() -> io::Result<Fanotify> {
        // SAFETY: a plain system call without pointers.
        let fd = unsafe {
            libc::fanotify_init(
                FAN_CLASS_PRE_CONTENT | FAN_CLOEXEC,
                (libc::O_RDONLY | libc::O_CLOEXEC | libc::O_LARGEFILE) as u32,
            )
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call above gave us this descriptor and nothing else owns it.
        let group = unsafe { OwnedFd::from_raw_fd(fd) };
        let (tell, told) = sync_channel(TOLD_MAX);
        let (lost, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let disturbed = Arc::new(AtomicBool::new(false));
        let answers = Answers {
            group: File::from(group.try_clone()?),
            tell,
            lost: lost.clone(),
            disturbed: disturbed.clone(),
            stop: stop.clone(),
        };
        let thread = std::thread::Builder::new().name("pre-access".into()).spawn(move || answers.run())?;
        Ok(Fanotify { group, told, lost, disturbed, stop, thread: Some(thread) })
    }

    /// From now on, reads of this open file are announced.
    pub fn add(&self, file: impl AsFd) -> io::Result<()> {
        self.mark(FAN_MARK_ADD, file)
    }

    /// No longer.
    pub fn remove(&self, file: impl AsFd) -> io::Result<()> {
        self.mark(FAN_MARK_REMOVE, file)
    }

    fn mark(&self, what: u32, file: impl AsFd) -> io::Result<()> {
        // A path of null and a descriptor: the file that the descriptor is open on.
        let path = format!("/proc/self/fd/{}\0", file.as_fd().as_raw_fd());
        // SAFETY: `path` ends with a zero byte and lives through the call.
        let result = unsafe {
            libc::fanotify_mark(self.group.as_raw_fd(), what, FAN_PRE_ACCESS, libc::AT_FDCWD, path.as_ptr().cast())
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Tells of what was announced since the last call, without waiting.
    pub fn drain(&self, events_max: usize, mut tell: impl FnMut(Seen)) -> usize {
        let mut n = 0;
        while n < events_max {
            let Ok(seen) = self.told.try_recv() else { break };
            tell(seen);
            n += 1;
        }
        n
    }

    /// Whether all marks were removed since the last call, as an access could not be looked at: the files are to be added again.
    pub fn was_disturbed(&self) -> bool {
        self.disturbed.swap(false, Ordering::Relaxed)
    }

    /// Accesses that were not reported because the queue was not drained, or because their file could not be opened.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }
}

impl Drop for Fanotify {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Answers {
    group: File,
    tell: SyncSender<Seen>,
    lost: Arc<AtomicU64>,
    disturbed: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
}

impl Answers {
    fn run(mut self) {
        let mut buffer = vec![0; 16 << 10];
        while !self.stop.load(Ordering::Relaxed) {
            let patience = rustix::time::Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
            let mut fds = [PollFd::new(&self.group, PollFlags::IN)];
            if !matches!(poll(&mut fds, Some(&patience)), Ok(1..)) {
                continue;
            }
            match self.group.read(&mut buffer) {
                Ok(n) if n > 0 => self.events(&buffer[..n]),
                Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
                // The file of the event could not be opened, for lack of descriptors, and the kernel has refused the access. Later ones
                // wait for this thread, and must not be refused: nothing is announced until the files are marked again.
                failed => {
                    self.lost.fetch_add(1, Ordering::Relaxed);
                    self.flush();
                    let error = failed.err();
                    if !self.disturbed.swap(true, Ordering::Relaxed) {
                        tracing::warn!(
                            ?error,
                            "an access of a watched file was refused, as its file could not be opened here"
                        );
                    }
                    std::thread::sleep(PAUSE);
                }
            }
        }
    }

    /// Removes all marks.
    fn flush(&self) {
        // SAFETY: a plain system call; no path is looked up.
        unsafe { libc::fanotify_mark(self.group.as_raw_fd(), FAN_MARK_FLUSH, 0, libc::AT_FDCWD, std::ptr::null()) };
    }

    fn events(&mut self, mut bytes: &[u8]) {
        while let Some(event) = Event::split(&mut bytes) {
            let Some(fd) = event.fd else { continue };
            let mut answer = [0; 8];
            answer[..4].copy_from_slice(&fd.as_raw_fd().to_ne_bytes());
            answer[4..].copy_from_slice(&FAN_ALLOW.to_ne_bytes());
            // First the program goes on, then we look.
            let _ = self.group.write_all(&answer);
            if event.process == std::process::id() {
                continue;
            }
            let Ok(meta) = File::from(fd).metadata() else { continue };
            let seen = Seen {
                thread: event.process,
                device: (libc::major(meta.dev()), libc::minor(meta.dev())),
                inode: meta.ino(),
                offset: event.offset,
                len: event.len,
                mapped: false,
            };
            if self.tell.try_send(seen).is_err() {
                self.lost.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// One event of the group.
struct Event {
    fd: Option<OwnedFd>,
    process: u32,
    offset: u64,
    len: u64,
}

impl Event {
    /// Takes the first event off; nothing at the end or where the bytes make no sense.
    fn split(bytes: &mut &[u8]) -> Option<Event> {
        let number = |at: usize| -> Option<u32> { Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?)) };
        let event_len = number(0)? as usize;
        let metadata_len = u16::from_ne_bytes(bytes.get(6..8)?.try_into().ok()?) as usize;
        let (fd, process) = (number(16)? as i32, number(20)?);
        if metadata_len < METADATA_BYTES || event_len < metadata_len || event_len > bytes.len() {
            return None;
        }
        let (event, rest) = bytes.split_at(event_len);
        *bytes = rest;
        // SAFETY: the kernel opened this descriptor for us with the event, and it is told once.
        let fd = (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) });
        let (offset, len) = range(&event[metadata_len..]).unwrap_or((0, 0));
        Some(Event { fd, process, offset, len })
    }
}

/// The range among an event's further information: offset and length.
fn range(mut infos: &[u8]) -> Option<(u64, u64)> {
    loop {
        let len = u16::from_ne_bytes(infos.get(2..4)?.try_into().ok()?) as usize;
        if len < 4 || len > infos.len() {
            return None;
        }
        if infos[0] == FAN_EVENT_INFO_TYPE_RANGE {
            let number = |at: usize| Some(u64::from_ne_bytes(infos.get(at..at + 8)?.try_into().ok()?));
            return Some((number(8)?, number(16)?));
        }
        infos = &infos[len..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(kind: u8, offset: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![kind, 0];
        bytes.extend_from_slice(&24u16.to_ne_bytes());
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(&offset.to_ne_bytes());
        bytes.extend_from_slice(&len.to_ne_bytes());
        bytes
    }

    #[test]
    fn the_range_is_found_among_other_information() {
        let bytes = [info(1, 9, 9), info(FAN_EVENT_INFO_TYPE_RANGE, 4096, 8192)].concat();
        assert_eq!(range(&bytes), Some((4096, 8192)));
        assert_eq!(range(&info(1, 1, 1)), None);
        assert_eq!(range(&[6, 0, 0, 0, 0]), None, "a length of zero would loop for ever");
        assert_eq!(range(&[6, 0, 255, 0, 0]), None);
        assert_eq!(range(&[]), None);
    }

    fn event(fd: i32, process: u32) -> Vec<u8> {
        let mut event = Vec::new();
        event.extend_from_slice(&48u32.to_ne_bytes());
        event.extend_from_slice(&[3, 0]);
        event.extend_from_slice(&24u16.to_ne_bytes());
        event.extend_from_slice(&FAN_PRE_ACCESS.to_ne_bytes());
        event.extend_from_slice(&fd.to_ne_bytes());
        event.extend_from_slice(&process.to_ne_bytes());
        event.extend_from_slice(&info(FAN_EVENT_INFO_TYPE_RANGE, 1, 2));
        event
    }

    /// A socket whose first read fails takes the place of a group that cannot open a file.
    #[test]
    fn accesses_are_allowed_after_one_that_could_not_be_read() {
        use std::net::UdpSocket;
        // An address that no other test takes a port of.
        let [_, a, b, c] = (std::process::id() | 1 << 23).to_be_bytes();
        let mine = format!("127.{a}.{b}.{c}:0");
        let (ours, theirs) = (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind(mine).unwrap());
        let address = theirs.local_addr().unwrap();
        ours.connect(address).unwrap();
        drop(theirs);
        ours.send(b"nobody is there").unwrap();
        let (tell, told) = sync_channel(1);
        let (lost, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let to = ours.local_addr().unwrap();
        let group = File::from(OwnedFd::from(ours));
        let disturbed = Arc::new(AtomicBool::new(false));
        let answers = Answers { group, tell, lost: lost.clone(), disturbed: disturbed.clone(), stop: stop.clone() };
        let thread = std::thread::spawn(move || answers.run());
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        while lost.load(Ordering::Relaxed) == 0 {
            assert!(std::time::Instant::now() < deadline, "the read that fails was not met");
            std::thread::sleep(PAUSE);
        }
        let theirs = UdpSocket::bind(address).unwrap();
        theirs.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let fd = std::os::fd::IntoRawFd::into_raw_fd(tempfile::tempfile().unwrap());
        theirs.send_to(&event(fd, u32::MAX), to).unwrap();
        let mut answer = [0; 8];
        theirs.recv(&mut answer).unwrap();
        assert_eq!(answer, [fd.to_ne_bytes(), FAN_ALLOW.to_ne_bytes()].concat()[..]);
        assert_eq!(told.recv_timeout(Duration::from_secs(20)).unwrap().offset, 1);
        assert!(disturbed.load(Ordering::Relaxed));
        stop.store(true, Ordering::Relaxed);
        thread.join().unwrap();
    }

    #[test]
    fn events_without_a_descriptor_and_torn_ones_are_passed_over() {
        let event = event(-1, 77);
        let mut bytes = &event[..];
        let e = Event::split(&mut bytes).unwrap();
        assert_eq!((e.fd.is_none(), e.process, e.offset, e.len, bytes.len()), (true, 77, 1, 2, 0));
        for cut in 0..event.len() {
            let mut bytes = &event[..cut];
            assert!(Event::split(&mut bytes).is_none());
        }
    }
}
