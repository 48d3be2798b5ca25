//! Acting as the caller: who the calling thread is to the file system while it makes one call.
//!
//! Linux keeps the identity of file-system calls for each thread: user and group by setfsuid(2) and setfsgid(2), further
//! groups by the system call setgroups (the C library's function of that name changes every thread), and the
//! capabilities by capset(2). [`Identity::act_as`] changes them and gives a guard that changes them back. As a user other
//! than root a thread has no capability at all, so that nothing of the server's rights overrides the user's.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::{Caller, Errno, Result};

/// capset(2), `_LINUX_CAPABILITY_VERSION_3`.
const VERSION_3: u32 = 0x2008_0522;
const CAP_SETGID: u32 = 6;
const CAP_SETUID: u32 = 7;
const CAP_DAC_READ_SEARCH: u32 = 2;
const CAP_FOWNER: u32 = 3;
const CAP_FSETID: u32 = 4;
/// How often a thread tries to become itself again before it gives up: only a kernel without memory refuses it.
const RESTORE_TRIES: usize = 1000;

#[repr(C)]
#[derive(Clone, Copy)]
struct Header {
    version: u32,
    pid: i32,
}

/// `struct __user_cap_data_struct` of capset(2).
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
struct Set {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Who the server is, and whether it may act as others.
#[derive(Debug)]
pub(super) struct Identity {
    own: Caller,
    capabilities: [Set; 2],
    may_switch: bool,
    complained: AtomicBool,
}

/// While it lives, the thread is the caller.
pub(super) struct Acting<'a> {
    restore: Option<&'a Identity>,
    /// The identity is the thread's: the guard must not leave it.
    _thread: PhantomData<*const ()>,
}

impl Identity {
    /// The identity of this process.
    pub(super) fn of_process() -> Result<Identity> {
        let own = Caller { uid: current_uid(), gid: current_gid(), groups: current_groups()? };
        let capabilities = get_capabilities()?;
        let identity = Identity { own, capabilities, may_switch: false, complained: AtomicBool::new(false) };
        let may_switch = identity.has(CAP_SETUID) && identity.has(CAP_SETGID);
        Ok(Identity { may_switch, ..identity })
    }

    /// True when handles of the kernel may be opened.
    pub(super) fn may_open_by_handle(&self) -> bool {
        self.has(CAP_DAC_READ_SEARCH)
    }

    /// True when the server may change the mode of others' files, and keeps their set-group-id.
    pub(super) fn sets_modes(&self) -> bool {
        self.has(CAP_FOWNER) && self.has(CAP_FSETID)
    }

    /// True when the kernel leaves set-user-id and set-group-id where the server writes.
    pub(super) fn leaves_set_id(&self) -> bool {
        self.has(CAP_FSETID)
    }

    /// The identity of the server itself.
    pub(super) fn own(&self) -> &Caller {
        &self.own
    }

    fn has(&self, capability: u32) -> bool {
        self.capabilities[0].effective & 1 << capability != 0
    }

    /// Makes the thread the caller until the guard is dropped. `EACCES` when the server may not.
    pub(super) fn act_as(&self, caller: &Caller) -> Result<Acting<'_>> {
        let acting = |restore| Acting { restore, _thread: PhantomData };
        if !self.may_switch {
            if caller.uid == self.own.uid {
                return Ok(acting(None));
            }
            if !self.complained.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    user = caller.uid,
                    own = self.own.uid,
                    "only the user that the server runs as is served; run it as root, or with the capabilities \
                     cap_setuid and cap_setgid, to serve others"
                );
            }
            return Err(Errno(libc::EACCES));
        }
        if *caller == self.own {
            return Ok(acting(None));
        }
        // From here on the guard changes back whatever was changed.
        let guard = acting(Some(self));
        set_groups(&caller.groups)?;
        set_gid(caller.gid)?;
        set_uid(caller.uid)?;
        if caller.uid != 0 {
            let nothing = self.capabilities.map(|set| Set { effective: 0, ..set });
            set_capabilities(&nothing)?;
        }
        Ok(guard)
    }

    fn restore(&self) -> Result<()> {
        // To its own user and group a thread may always return. That makes root's capabilities of files effective, so
        // the exact set is written after it, and before the groups, which need one of them.
        set_uid(self.own.uid)?;
        set_gid(self.own.gid)?;
        set_capabilities(&self.capabilities)?;
        set_groups(&self.own.groups)
    }
}

impl Drop for Acting<'_> {
    fn drop(&mut self) {
        let Some(identity) = self.restore else { return };
        for _ in 0..RESTORE_TRIES {
            if identity.restore().is_ok() {
                return;
            }
            std::thread::yield_now();
        }
        // A thread that went on under another identity would give that user others' files.
        eprintln!("impresario: a thread could not return to the server's own user; stopping");
        std::process::abort();
    }
}

fn current_uid() -> u32 {
    // SAFETY: setfsuid takes a number; an impossible one changes nothing, and the present one is returned.
    unsafe { libc::setfsuid(u32::MAX) as u32 }
}

fn current_gid() -> u32 {
    // SAFETY: as setfsuid.
    unsafe { libc::setfsgid(u32::MAX) as u32 }
}

/// setfsuid(2) reports no error: the present user is asked for.
fn set_uid(uid: u32) -> Result<()> {
    // SAFETY: setfsuid takes a number and changes this thread only.
    unsafe { libc::setfsuid(uid) };
    if current_uid() == uid { Ok(()) } else { Err(Errno(libc::EACCES)) }
}

fn set_gid(gid: u32) -> Result<()> {
    // SAFETY: setfsgid takes a number and changes this thread only.
    unsafe { libc::setfsgid(gid) };
    if current_gid() == gid { Ok(()) } else { Err(Errno(libc::EACCES)) }
}

fn current_groups() -> Result<Vec<u32>> {
    let groups = rustix::process::getgroups()?;
    Ok(groups.into_iter().map(rustix::process::Gid::as_raw).collect())
}

fn set_groups(groups: &[u32]) -> Result<()> {
    // SAFETY: the call reads as many numbers as it is told from the slice. As a raw system call it changes this thread only.
    check(unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) })
}

fn get_capabilities() -> Result<[Set; 2]> {
    let header = Header { version: VERSION_3, pid: 0 };
    let mut sets = [Set::default(); 2];
    // SAFETY: version 3 writes two sets; both pointers are to live values of the kernel's layout.
    check(unsafe { libc::syscall(libc::SYS_capget, &raw const header, sets.as_mut_ptr()) })?;
    Ok(sets)
}

fn set_capabilities(sets: &[Set; 2]) -> Result<()> {
    let header = Header { version: VERSION_3, pid: 0 };
    // SAFETY: version 3 reads two sets; both pointers are to live values of the kernel's layout. Changes this thread only.
    check(unsafe { libc::syscall(libc::SYS_capset, &raw const header, sets.as_ptr()) })
}

fn check(answer: libc::c_long) -> Result<()> {
    if answer == 0 { Ok(()) } else { Err(std::io::Error::last_os_error().into()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use impresario_testing::require;

    #[test]
    fn a_thread_is_the_caller_only_while_the_guard_lives() {
        if !require("root") {
            return;
        }
        let identity = Identity::of_process().unwrap();
        let caller = Caller { uid: 4711, gid: 4712, groups: vec![7, 8] };
        let before = get_capabilities().unwrap();
        let (ask, asked) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || asked.recv().map(|()| current_uid()));
        {
            let _acting = identity.act_as(&caller).unwrap();
            assert_eq!((current_uid(), current_gid(), current_groups().unwrap()), (4711, 4712, vec![7, 8]));
            assert!(get_capabilities().unwrap().iter().all(|set| set.effective == 0));
            ask.send(()).unwrap();
            assert_eq!(other.join().unwrap().unwrap(), identity.own.uid, "other threads are still the server");
        }
        assert_eq!((current_uid(), current_gid()), (identity.own.uid, identity.own.gid));
        assert_eq!(current_groups().unwrap(), identity.own.groups);
        for (a, b) in before.iter().zip(&get_capabilities().unwrap()) {
            assert_eq!((a.effective, a.permitted), (b.effective, b.permitted));
        }
    }

    #[test]
    fn a_server_without_the_right_serves_its_own_user_only() {
        let mut identity = Identity::of_process().unwrap();
        identity.may_switch = false;
        let own = identity.own.clone();
        assert!(identity.act_as(&own).is_ok());
        let other = Caller { uid: own.uid + 1, ..own };
        assert_eq!(identity.act_as(&other).err(), Some(Errno(libc::EACCES)));
        assert!(identity.complained.load(Ordering::Relaxed));
    }
}
