//! On whose behalf a request is made.

use super::super::Op;
use super::{BLOCK_BYTES, CREATE, verify_all, write};
use crate::mount::{Remote, Site, teams};
use crate::stamp::Image;
use crate::{Checking, Stop, fault};

/// Users that need not exist.
const FIRST_USER: u32 = 65_101;
const USERS: u32 = 4;
/// Files that each user makes beside the others.
const FILES: u32 = 20;

/// Several users make files at the same time, and try one another's.
pub(super) fn identity(site: &mut Site) -> Checking {
    let mut users: Vec<Remote> = Vec::new();
    for n in 0..USERS {
        let mut user = site.agent()?;
        let id = FIRST_USER + n;
        match user.attempt(&Op::Become { uid: id, gid: id }, &[])? {
            Ok(_) => {}
            Err(libc::EPERM) => return Err(Stop::Skip("needs root, to act for several users".into())),
            Err(errno) => return fault(format!("becoming user {id}: {}", crate::errno_text(errno))),
        }
        users.push(user);
    }
    let folder = site.name("");
    if users[0].attempt(&Op::Stat { name: folder.clone() }, &[])? == Err(libc::EACCES) {
        return Err(Stop::Skip(format!("other users may not enter {folder}: the mount is for one user only")));
    }
    let stamps: Vec<_> = (0..USERS * FILES).map(|_| site.stamps()).collect();
    let prefix = site.name("user");
    let file = |user: u32, n: u32| format!("{prefix}-{user}-{n}");
    teams(&mut users, 1, |user, team| {
        for n in 0..FILES {
            let slot = team[0].open(&file(user as u32, n), CREATE)?;
            let mut image = Image::new(stamps[user * FILES as usize + n as usize]);
            write(&mut team[0], slot, &mut image, 0, BLOCK_BYTES as usize)?;
            verify_all(&mut team[0], slot, &image)?;
            team[0].close(slot)?;
        }
        Ok(())
    })?;
    for (user, n) in (0..USERS).flat_map(|user| (0..FILES).map(move |n| (user, n))) {
        let (name, id) = (file(user, n), FIRST_USER + user);
        let found = site.crew[0].stat(&name)?.uid;
        if found != id {
            return fault(format!("{name}: made by user {id}, belongs to user {found}"));
        }
    }
    // All at once: each to its right-hand neighbour's files.
    let closed = |n: u32| if n.is_multiple_of(2) { 0o600 } else { 0o644 };
    teams(&mut users, 1, |user, team| {
        (0..FILES)
            .try_for_each(|n| team[0].call(&Op::Mode { name: file(user as u32, n), mode: closed(n) }, &[]).map(drop))
    })?;
    teams(&mut users, 1, |user, team| {
        let (agent, other) = (&mut team[0], (user as u32 + 1) % USERS);
        for n in 0..FILES {
            let open = |flags| Op::Open { slot: 1 << 20, name: file(other, n), flags, direct: false };
            agent.refused(&open(libc::O_RDWR), &[], &[libc::EACCES, libc::EPERM])?;
            agent.refused(&Op::Mode { name: file(other, n), mode: 0o777 }, &[], &[libc::EPERM, libc::EACCES])?;
            match closed(n) {
                0o600 => agent.refused(&open(libc::O_RDONLY), &[], &[libc::EACCES, libc::EPERM])?,
                _ => agent.call(&open(libc::O_RDONLY), &[]).map(drop)?,
            }
        }
        Ok(())
    })?;
    // What was opened before the permission went keeps working.
    teams(&mut users, 1, |user, team| {
        for name in (0..FILES).map(|n| file(user as u32, n)) {
            let slot = team[0].open(&name, libc::O_RDWR)?;
            team[0].call(&Op::Mode { name, mode: 0 }, &[])?;
            team[0].write(slot, 0, &[1; 512])?;
            team[0].read(slot, 0, 512)?;
            team[0].close(slot)?;
        }
        Ok(())
    })
    .map(drop)
}
