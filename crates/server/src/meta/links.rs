//! Hard links: how a node gets another name, and how many it has.
//!
//! Key, layout, attributes and times belong to the local inode, so another name is another local name: one `linkat`, which
//! is done or not done whenever the server stops. The name that is linked from is held under its lock, so it means the
//! same node when the new name appears; the file's `links` lock keeps it from losing its last name meanwhile.
//!
//! The local link count includes our own names of a file, in `writers/` and `orphans/`. [`Meta::names_of`] takes them off
//! without asking data servers.

use impresario_wire::message::{Attr, LINKS_MAX, NodeKind};
use rustix::fs::Stat;
use rustix::io::Errno;

use super::changes::By;
use super::fault::{Explain, Outcome, fault, show};
use super::opens::{Found, Pin};
use super::permissions::User;
use super::removal::links;
use super::service::Meta;
use super::tree::{EntryRef, kind_of, local_attr};

/// How often names are counted while they change.
const COUNTS: usize = 100;

impl Meta {
    /// Gives the node at `from` the name `to` too, for this user if a client's own kernel is not believed.
    pub(super) fn link(&self, by: By<'_>, from: &[u8], to: &[u8], user: Option<&User>) -> Outcome<Attr> {
        let doing = "link";
        let source = self.dir.entry(from).explain(doing, from)?;
        // Data servers are asked before anything is held, locked or done.
        let attr = source.as_ref().map(|source| self.attr_at(source)).transpose()?;
        let _held = self.permit_link_still(user, from, to)?;
        let source = if user.is_some() { self.dir.entry(from).explain(doing, from)? } else { source };
        let target = self.dir.entry(to).and_then(|entry| entry.ok_or(Errno::EXIST)).explain("link to", to)?;
        let is_there = || target.stat().is_ok();
        let (Some(source), Some(attr)) = (source, attr) else {
            return refuse(if is_there() { Errno::EXIST } else { Errno::PERM }, from, to);
        };
        let _names = self.names.hold_both(&source, &target).explain(doing, from)?;
        let stat = source.stat().or_else(|errno| refuse(errno, from, to))?;
        // While they are held: another link to the same file would look like this one.
        if is_there() {
            return refuse(Errno::EXIST, from, to);
        }
        let undone = self.changes.begin(&self.dir, by, stat.st_ino)?;
        // A walk through all directories may have been where the new name is, and not yet where the old one was.
        let _walked = self.walks.rename(&self.dir.disk, &[(&source, &stat)], &*self.options.skipped);
        let local = match kind_of(&stat) {
            Some(NodeKind::Dir) | None => Err(Errno::PERM),
            Some(NodeKind::File) => self.link_file(&self.pin_at(&source, doing)?, &source, &target),
            Some(kind) => {
                let _special = (kind != NodeKind::Symlink).then(|| self.dir.disk.with_specials());
                self.link_names(&source, &target, links(&stat)).and_then(|()| local_attr(&target.stat()?))
            }
        };
        let local = local.or_else(|errno| refuse(errno, from, to))?;
        undone.done();
        match attr.ino == local.ino {
            true => Ok(Attr { nlink: local.nlink, ctime: attr.ctime.max(local.ctime), ..attr }),
            // The name was given to another node between the two questions.
            false => Ok(local),
        }
    }

    /// Links a pinned file; its local attributes, without our own names.
    fn link_file(&self, pin: &Pin<'_>, source: &EntryRef<'_>, target: &EntryRef<'_>) -> rustix::io::Result<Attr> {
        let _links = pin.links.lock();
        let stat = source.stat()?;
        // Both were kept from changing by the lock of the name, but not from a directory above being moved.
        if stat.st_ino != pin.ino || self.opens.is_removed(pin.ino) {
            return Err(Errno::NOENT);
        }
        let ours = u64::from(self.opens.mark_of(pin.ino).is_some());
        self.link_names(source, target, links(&stat).saturating_sub(ours))?;
        let mut attr = local_attr(&rustix::fs::fstat(&pin.fd)?)?;
        attr.nlink = attr.nlink.saturating_sub(ours as u32).max(1);
        Ok(attr)
    }

    fn link_names(&self, source: &EntryRef<'_>, target: &EntryRef<'_>, names: u64) -> rustix::io::Result<()> {
        if names >= u64::from(LINKS_MAX) {
            // What is there already comes first.
            return Err(if target.stat().is_ok() { Errno::EXIST } else { Errno::MLINK });
        }
        self.dir.disk.link(source.directory(), source.name, target.directory(), target.name)
    }

    /// The number of names of a file that was seen with this link count, of which some may be ours; `look` sees it again.
    pub(super) fn names_of(&self, seen: &Attr, look: impl Fn() -> rustix::io::Result<Stat>) -> u32 {
        let mut links = seen.nlink;
        for _ in 0..COUNTS {
            match self.pin(seen.ino, false) {
                Found::Pinned(pin) => return self.local_attr_of(&pin, b"").map_or(links, |attr| attr.nlink),
                // Its last name is being removed.
                Found::Removed => break,
                Found::Absent => {}
            }
            let ours = u32::from(self.opens.mark_of(seen.ino).is_some());
            let again = look().and_then(|stat| local_attr(&stat));
            let Ok(again) = again else { break };
            // The name means another file by now.
            if again.ino != seen.ino {
                break;
            }
            let is_still = ours == u32::from(self.opens.mark_of(seen.ino).is_some());
            if again.nlink == links && is_still {
                return links.saturating_sub(ours).max(1);
            }
            links = again.nlink;
        }
        links.max(1)
    }
}

fn refuse<T>(errno: Errno, from: &[u8], to: &[u8]) -> Outcome<T> {
    let why = match errno {
        Errno::PERM => "directories have one name only".to_string(),
        Errno::MLINK => format!("it has {LINKS_MAX} names, or as many as the metadata server's file system takes"),
        _ => {
            return Err(errno).explain("link", from).map_err(|mut fault| {
                fault.message = format!("{} (the new name is {})", fault.message, show(to));
                fault
            });
        }
    };
    Err(fault(errno, format!("cannot link {}: {why}", show(from))))
}
