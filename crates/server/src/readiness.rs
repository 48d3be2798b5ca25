//! Reports to the scheduler which connections can take data. The rule is `node::Readiness`; what is on its way to a
//! client is what waits in the outbox and, under a policy that asks, what the kernel has not sent yet.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use impresario_base::lock::Mutex;
use impresario_node::{READY_MAX_BYTES, Readiness as Rule};
use impresario_sched::{PolicySpec, policy};

/// Whether a server's policy asks about connections. Then the kernel holds no more than [`READY_MAX_BYTES`] of
/// unsent answers for each, so that an answer waits where the scheduler sees it; otherwise it takes what it likes.
#[derive(Default)]
pub(crate) struct MindsConnections(AtomicBool);

impl MindsConnections {
    pub(crate) fn new(policy: &PolicySpec) -> Arc<MindsConnections> {
        let asked = MindsConnections::default();
        asked.follow(policy);
        Arc::new(asked)
    }

    /// Takes note of the policy in force.
    pub(crate) fn follow(&self, policy: &PolicySpec) {
        self.0.store(policy::minds_connections(policy), Ordering::Release);
    }

    fn get(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Receives changes.
pub(crate) trait Listener: Send + Sync {
    /// The connection can take data, or cannot. Called with a lock held: it must not send anything.
    fn changed(&self, ready: bool);
    /// After a change to ready, without a lock: what waited for it may go.
    fn go_on(&self);
}

/// One connection's readiness. Several threads may notice changes; the listener's last report is the truth.
#[derive(Default)]
pub(crate) struct Readiness {
    listener: OnceLock<(Box<dyn Listener>, Arc<MindsConnections>)>,
    /// The kernel's limit is set.
    limited: AtomicBool,
    rule: Mutex<Rule>,
}

impl Readiness {
    /// Names the listener, once.
    pub(crate) fn listen(&self, asked: Arc<MindsConnections>, listener: Box<dyn Listener>) {
        let _ = self.listener.set((listener, asked));
    }

    /// True when the policy asks about this connection. Sets or lifts the kernel's limit when that has changed.
    pub(crate) fn is_asked(&self, socket: &impl AsFd) -> bool {
        let asked = self.listener.get().is_some_and(|(_, asked)| asked.get());
        if asked != self.limited.load(Ordering::Relaxed) && self.limited.swap(asked, Ordering::AcqRel) != asked {
            limit_unsent(socket, if asked { READY_MAX_BYTES as u32 } else { u32::MAX });
        }
        asked
    }

    /// What was reported last.
    pub(crate) fn is_ready(&self) -> bool {
        self.rule.lock().is_ready()
    }

    /// Something may have changed; `look` returns the bytes under way now. Looking and reporting are one step, so that
    /// reports come in the order of what they say. What the listener starts may send on this very connection, so that
    /// is done without the lock.
    pub(crate) fn changed(&self, look: impl FnOnce() -> u64) {
        let Some((listener, _)) = self.listener.get() else { return };
        let changed = {
            let mut rule = self.rule.lock();
            let changed = rule.observe(look(), READY_MAX_BYTES);
            changed.inspect(|ready| listener.changed(*ready));
            changed
        };
        if changed == Some(true) {
            listener.go_on();
        }
    }
}

/// Bytes that the kernel holds of what was sent on a socket: those that have not left (TCP) or were not read (Unix).
pub(crate) fn unsent_bytes(socket: &impl AsFd) -> u64 {
    const SIOCOUTQNSD: libc::c_ulong = 0x894b;
    let fd = socket.as_fd().as_raw_fd();
    for request in [SIOCOUTQNSD, libc::TIOCOUTQ] {
        let mut bytes: libc::c_int = 0;
        // SAFETY: both requests write one int to the address given, which is that of a live local one.
        if unsafe { libc::ioctl(fd, request, &mut bytes) } == 0 {
            return u64::try_from(bytes).unwrap_or(0);
        }
    }
    0
}

/// Bounds what the kernel takes on a TCP socket before it has sent it. Sockets of other kinds have a small buffer.
fn limit_unsent(socket: &impl AsFd, bytes: u32) {
    let size = std::mem::size_of_val(&bytes) as libc::socklen_t;
    let value = std::ptr::from_ref(&bytes).cast();
    // SAFETY: the option is an unsigned int; `value` points to a live one of that size.
    unsafe {
        libc::setsockopt(socket.as_fd().as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, value, size);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Heard(Arc<AtomicBool>);
    impl Listener for Heard {
        fn changed(&self, ready: bool) {
            self.0.store(ready, Ordering::SeqCst);
        }
        fn go_on(&self) {}
    }

    /// Whatever threads notice in whatever order, the listener ends with the truth.
    #[test]
    fn the_last_report_is_the_truth() {
        let (truth, told) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicBool::new(true)));
        let readiness = Arc::new(Readiness::default());
        readiness.listen(MindsConnections::new(&PolicySpec::named("stream")), Box::new(Heard(told.clone())));
        let under_way = |truth: &AtomicBool| if truth.load(Ordering::SeqCst) { 0 } else { READY_MAX_BYTES + 1 };
        let threads: Vec<_> = (0..4)
            .map(|t| {
                let (truth, readiness) = (truth.clone(), readiness.clone());
                std::thread::spawn(move || {
                    for i in 0..2_000 {
                        truth.store((i + t) % 3 == 0, Ordering::SeqCst);
                        readiness.changed(|| under_way(&truth));
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
        readiness.changed(|| under_way(&truth));
        assert_eq!(told.load(Ordering::SeqCst), truth.load(Ordering::SeqCst));
    }

    #[test]
    fn the_kernel_reports_what_it_holds() {
        use std::io::Write;
        use std::os::unix::net::UnixStream;
        let (mut ours, _theirs) = UnixStream::pair().unwrap();
        assert_eq!(unsent_bytes(&ours), 0);
        ours.write_all(&[1; 10_000]).unwrap();
        assert!(unsent_bytes(&ours) >= 10_000);
    }
}
