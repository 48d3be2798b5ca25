//! The exchange of two names: each is given to what had the other, in one step.
//!
//! The file system below does it in one transaction, so a crash leaves it done or not done. An exchange that is done twice
//! is undone. So what `from` named is noted before ([`Changes::note_exchange`]), and a server that finds an exchange begun
//! and not ended sees by that which of the two it is.
//!
//! [`Changes::note_exchange`]: super::changes::Changes::note_exchange

use impresario_wire::message::NodeKind;
use rustix::io::Errno;

use super::changes::{By, Undone};
use super::fault::{Explain, Outcome, show};
use super::service::Meta;
use super::tree::kind_of;

impl Meta {
    /// Exchanges what two paths name.
    pub(super) fn exchange(&self, by: By<'_>, from: &[u8], to: &[u8]) -> Outcome<()> {
        let (doing, disk) = ("exchange", &self.dir.disk);
        let one = self.dir.entry(from).and_then(|entry| entry.ok_or(Errno::BUSY)).explain(doing, from)?;
        let other = self.dir.entry_beside(&one, to).and_then(|entry| entry.ok_or(Errno::BUSY)).explain(doing, to)?;
        let _names = self.names.hold_both(&one, &other).explain(doing, from)?;
        let stat = one.stat().explain(doing, from)?;
        let other_stat = other.stat().explain(doing, to)?;
        if stat.st_ino == other_stat.st_ino {
            return self.changes.begin(&self.dir, by, 0).map(Undone::done);
        }
        let is_special = |kind| !matches!(kind, Some(NodeKind::File | NodeKind::Dir | NodeKind::Symlink));
        // Before the lock for specials: it may open files.
        let _walked = self.walks.rename(disk, &[(&one, &stat), (&other, &other_stat)], &*self.options.skipped);
        let _special = (is_special(kind_of(&stat)) || is_special(kind_of(&other_stat))).then(|| disk.with_specials());
        let undone = self.changes.note_exchange(&self.dir, by, stat.st_ino).explain("note the exchange of", from)?;
        disk.exchange(one.directory(), one.name, other.directory(), other.name).explain(doing, from).map_err(
            |mut fault| {
                fault.message = format!("{} (the other name is {})", fault.message, show(to));
                fault
            },
        )?;
        undone.done();
        self.opens.moved(stat.st_ino, to);
        self.opens.moved(other_stat.st_ino, from);
        Ok(())
    }
}
