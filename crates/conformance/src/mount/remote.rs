//! The checker's side of an agent: requests with a deadline, and errors that name the request.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::protocol::{Answer, Found, Op, receive, send};
use crate::{Checking, Shared, Stop, errno_text};

/// How long a killed agent may take to be gone. One that waits in the kernel for a server that does not answer stays.
const GONE_WITHIN: Duration = Duration::from_secs(2);

/// An agent process.
pub(crate) struct Remote {
    /// From 1; also the writer's number in stamps.
    pub number: u32,
    child: Child,
    socket: UnixStream,
    pub shared: Arc<Shared>,
    /// Names of open slots, for messages.
    names: HashMap<u32, String>,
    slots: u32,
    lost: bool,
}

impl Remote {
    /// Starts one that works in `folder`. `command` is a program and its arguments; it must call [`crate::serve_agent`].
    pub fn start(command: &[OsString], folder: &Path, number: u32, shared: &Arc<Shared>) -> io::Result<Remote> {
        let [program, words @ ..] = command else { return Err(io::Error::other("no program for the agents")) };
        let (mut ours, theirs) = UnixStream::pair()?;
        ours.set_read_timeout(Some(shared.patience))?;
        ours.set_write_timeout(Some(shared.patience))?;
        let mut command = Command::new(program);
        command.args(words).stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null());
        let child = command.spawn()?;
        let folder = folder.as_os_str().as_encoded_bytes();
        send(&mut ours, &(), folder)?;
        let (names, shared) = (HashMap::new(), shared.clone());
        Ok(Remote { number, child, socket: ours, shared, names, slots: 0, lost: false })
    }

    /// Whether it can be used again.
    pub fn is_lost(&self) -> bool {
        self.lost
    }

    /// One request: what it returned, or its errno. A request without an answer, or an agent that is gone, ends the check.
    pub fn attempt(&mut self, op: &Op, payload: &[u8]) -> Checking<Result<(u64, Vec<u8>), i32>> {
        if self.lost {
            return Err(Stop::Fail(format!("agent {} was given up before", self.number)));
        }
        self.shared.count();
        let asked = Instant::now();
        let sent = send(&mut self.socket, op, payload);
        match sent.and_then(|()| receive::<Answer>(&mut self.socket)) {
            Ok((answer, bytes)) => Ok(answer.map(|number| (number, bytes))),
            Err(error) => {
                self.lost = true;
                let what = self.describe(op, payload.len());
                Err(Stop::Fail(match error.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                        format!("{what}: no answer within {:.0} s", asked.elapsed().as_secs_f64())
                    }
                    _ => format!("{what}: the process that made it ended ({error})"),
                }))
            }
        }
    }

    /// One request that must succeed.
    pub fn call(&mut self, op: &Op, payload: &[u8]) -> Checking<(u64, Vec<u8>)> {
        self.attempt(op, payload)?
            .map_err(|errno| Stop::Fail(format!("{}: {}", self.describe(op, payload.len()), errno_text(errno))))
    }

    /// One request that must fail with one of these errors.
    pub fn refused(&mut self, op: &Op, payload: &[u8], expected: &[i32]) -> Checking {
        let what = self.describe(op, payload.len());
        let wanted = expected.iter().map(|&errno| errno_text(errno)).collect::<Vec<_>>().join(" or ");
        match self.attempt(op, payload)? {
            Err(errno) if expected.contains(&errno) => Ok(()),
            Err(errno) => Err(Stop::Fail(format!("{what}: expected {wanted}, found {}", errno_text(errno)))),
            Ok(_) => Err(Stop::Fail(format!("{what}: expected {wanted}, found success"))),
        }
    }

    /// Opens a file; its slot.
    pub fn open(&mut self, name: &str, flags: i32) -> Checking<u32> {
        self.open_as(name, flags, false)
    }

    /// Opens a file, past the page cache if `direct`.
    pub fn open_as(&mut self, name: &str, flags: i32, direct: bool) -> Checking<u32> {
        self.slots += 1;
        let slot = self.slots;
        self.call(&Op::Open { slot, name: name.into(), flags, direct }, &[])?;
        self.names.insert(slot, if direct { format!("{name} (O_DIRECT)") } else { name.into() });
        Ok(slot)
    }

    /// Closes a slot.
    pub fn close(&mut self, slot: u32) -> Checking {
        self.call(&Op::Close { slot }, &[])?;
        self.names.remove(&slot);
        Ok(())
    }

    /// Reads up to the end of the file.
    pub fn read(&mut self, slot: u32, offset: u64, len: usize) -> Checking<Vec<u8>> {
        Ok(self.call(&Op::Read { slot, offset, len: len as u32 }, &[])?.1)
    }

    /// Writes all of `bytes` by one call.
    pub fn write(&mut self, slot: u32, offset: u64, bytes: &[u8]) -> Checking {
        let op = Op::Write { slot, offset };
        let (written, _) = self.call(&op, bytes)?;
        if written != bytes.len() as u64 {
            return Err(Stop::Fail(format!("{}: wrote {written} bytes", self.describe(&op, bytes.len()))));
        }
        Ok(())
    }

    /// The size by fstat(2).
    pub fn size(&mut self, slot: u32) -> Checking<u64> {
        Ok(self.call(&Op::Size { slot }, &[])?.0)
    }

    /// Attributes by name.
    pub fn stat(&mut self, name: &str) -> Checking<Found> {
        let (_, found) = self.call(&Op::Stat { name: name.into() }, &[])?;
        postcard::from_bytes(&found).map_err(|error| Stop::Fail(format!("stat of {name}: {error}")))
    }

    /// The name behind a slot.
    pub fn name(&self, slot: u32) -> &str {
        self.names.get(&slot).map_or("a closed file", String::as_str)
    }

    /// A request as messages name it.
    fn describe(&self, op: &Op, payload_bytes: usize) -> String {
        let name = |slot: &u32| self.name(*slot);
        let what = match op {
            Op::Open { name, direct, .. } => format!("open of {name}{}", if *direct { " (O_DIRECT)" } else { "" }),
            Op::Close { slot } => format!("close of {}", name(slot)),
            Op::Read { slot, offset, len } => format!("read of {len} bytes at {offset} in {}", name(slot)),
            Op::Interrupted { slot, offset, len } => {
                format!("interrupted read of {len} bytes at {offset} in {}", name(slot))
            }
            Op::Write { slot, offset } => format!("write of {payload_bytes} bytes at {offset} in {}", name(slot)),
            Op::CloseDuring { slot, offset } => {
                format!("close of {} during a write of {payload_bytes} bytes at {offset}", name(slot))
            }
            Op::Append { slot } => format!("append of {payload_bytes} bytes to {}", name(slot)),
            Op::Sync { slot, data_only } => {
                format!("{} of {}", if *data_only { "fdatasync" } else { "fsync" }, name(slot))
            }
            Op::Truncate { slot, len } => format!("ftruncate of {} to {len} bytes", name(slot)),
            Op::Size { slot } => format!("fstat of {}", name(slot)),
            Op::Stat { name } => format!("stat of {name}"),
            Op::Mode { name, .. } => format!("chmod of {name}"),
            Op::Unlink { name } => format!("unlink of {name}"),
            Op::Rename { from, to } => format!("rename of {from} to {to}"),
            Op::MakeFolder { name } => format!("mkdir of {name}"),
            Op::RemoveFolder { name } => format!("rmdir of {name}"),
            Op::RemoveAll { name } => format!("removal of {name}"),
            Op::Become { uid, .. } => format!("becoming user {uid}"),
            Op::CloseAll => "closing all files".into(),
            Op::Storm { name, .. } => format!("the first requests of a storm on {name}"),
        };
        format!("agent {}: {what}", self.number)
    }

    /// Kills it (SIGKILL). Whether it is gone.
    pub fn kill(&mut self) -> bool {
        self.lost = true;
        let _ = self.child.kill();
        let deadline = Instant::now() + GONE_WITHIN.max(self.shared.patience);
        self.gone_by(deadline)
    }

    fn gone_by(&mut self, deadline: Instant) -> bool {
        loop {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return true;
            }
            if Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        // Closing its files may take requests of its own: a healthy agent is gone before the deadline.
        let _ = self.child.kill();
        self.gone_by(Instant::now() + GONE_WITHIN);
    }
}

/// Runs `f` for each team of `size` agents, all at the same time; the first error.
pub(crate) fn teams<T: Send>(
    crew: &mut [Remote],
    size: usize,
    f: impl Fn(usize, &mut [Remote]) -> Checking<T> + Sync,
) -> Checking<Vec<T>> {
    let f = &f;
    std::thread::scope(|scope| {
        let running: Vec<_> =
            crew.chunks_mut(size).enumerate().map(|(n, team)| scope.spawn(move || f(n, team))).collect();
        let joined: Vec<_> = running.into_iter().map(|running| running.join()).collect();
        joined.into_iter().map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}
