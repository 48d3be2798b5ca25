//! Appends of several clients to one file: the metadata server assigns each a range of its own behind the end.
//!
//! The end is that of the objects, or of the last assigned range where that is not written yet. Of a file that is being
//! written the local file's length is of no other use, so it holds the end of the assigned ranges: it survives a crash of
//! the server. A crash of its machine may lose it, but then no append is still under way when the server is back. The
//! length becomes the objects' again when the file is settled, and is cut after the objects are. That they are being cut is noted
//! before ([`super::changes`]): a server that is stopped between the two finds its note, and objects of the new length.
//!
//! A range that its client never writes is zeros once something is appended behind it. A range that was assigned before the
//! file was cut is still its writer's: what others append after the cut may lie over it.

use impresario_node::append::{Appends, Earlier};
use impresario_wire::message::{SetTime, Who};
use rustix::io::Errno;

use super::disk::mtime_of;
use super::fault::{Explain, Outcome, data_fault, fault, show};
use super::opens::{OpenFile, Pin};
use super::service::Meta;

impl Meta {
    /// Assigns the next range of a pinned file that its caller has open for writing.
    pub(super) fn assign(&self, who: &Who, pin: &Pin<'_>, len_bytes: u64) -> Outcome<u64> {
        let (doing, path) = ("append to", self.opens.path_of(pin.ino));
        let _gate = self.enter(pin, doing, &path)?;
        let (client, sequence) = (who.client.0, who.sequence);
        let closed = || fault(Errno::BADF, format!("{} was closed before the append began", show(&path)));
        // A call that waited at the gate may come after the close of its file.
        let may_have_copies = who.since != who.epoch;
        let earlier = |appends: &mut Appends| appends.earlier(client, sequence, len_bytes, may_have_copies);
        match self.opens.with_appends(pin, earlier).ok_or_else(closed)? {
            // A caller without a key does not repeat itself.
            _ if client == 0 => {}
            Earlier::None if may_have_copies => {
                if let Some(offset) = self.changes.range_of(who, len_bytes) {
                    return Ok(offset);
                }
            }
            Earlier::None => {}
            Earlier::At(offset) => return Ok(offset),
            Earlier::Forgotten => {
                let why = "its client has asked before, and what it was answered is not known any more";
                return Err(fault(Errno::IO, format!("cannot {doing} {}: {why}", show(&path))));
            }
        }
        // The local size is not the file's from now on.
        self.opens.note_written(pin.ino);
        let objects = self.ask(pin).map_err(|error| data_fault(&error, doing, &path))?;
        // It may have waited for the gate, and for data servers, while its lease ended: then the lock is another's, who is to find
        // no range of it behind the end.
        let _held = if client == 0 { None } else { Some(self.hold_epoch(who)?) };
        let end = objects.size.max(self.assigned_end(pin, objects.size).explain(doing, &path)?);
        let assigned = self.opens.with_appends(pin, |appends| appends.assign(client, sequence, end, len_bytes));
        let offset = assigned.ok_or_else(closed)?.ok_or(Errno::FBIG).explain(doing, &path)?;
        if let Err(errno) = self.note_assigned(pin, offset.saturating_add(len_bytes)) {
            self.opens.with_appends(pin, |appends| appends.take_back(client, sequence));
            return Err(errno).explain(doing, &path);
        }
        self.changes.note_range(&self.dir, who, offset, len_bytes);
        Ok(offset)
    }

    /// End of the ranges assigned of a marked file, whose objects end at `end`, if it is behind that. Call under the file's gate.
    pub(super) fn assigned_end(&self, file: &OpenFile, end: u64) -> rustix::io::Result<u64> {
        if let Some(len_bytes) = self.changes.cut_of(file.key) {
            // An earlier run has cut the objects, and was killed before it took the ranges back; or it had not begun to.
            if end == len_bytes {
                self.cut_assigned(file, len_bytes)?;
            }
            self.changes.end_cut(&self.dir, file.key);
        }
        self.local_len(file)
    }

    fn local_len(&self, file: &OpenFile) -> rustix::io::Result<u64> {
        Ok(u64::try_from(rustix::fs::fstat(&file.fd)?.st_size).unwrap_or(0))
    }

    /// After the objects were cut: no range behind `len_bytes` counts as assigned. Call under the file's gate.
    pub(super) fn cut_assigned(&self, file: &OpenFile, len_bytes: u64) -> rustix::io::Result<()> {
        if self.local_len(file)? > len_bytes { self.note_assigned(file, len_bytes) } else { Ok(()) }
    }

    /// Sets the local length, and keeps the local modification time, which is the file's until it is written.
    fn note_assigned(&self, file: &OpenFile, end: u64) -> rustix::io::Result<()> {
        let mtime = mtime_of(&rustix::fs::fstat(&file.fd)?);
        self.dir.disk.set_len(&file.fd, end)?;
        self.dir.disk.set_times(&file.fd, None, Some(SetTime::At(mtime)))
    }
}
