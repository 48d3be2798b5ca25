//! Copying objects from a running server into a folder: what has data as data, holes as holes.

use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;
use std::time::{Duration, Instant};

use impresario_client::{ClientError, Op, exchange};
use impresario_config::MovesTo;
use impresario_store::ObjectStore;
use impresario_wire::{Answer, Call, Fault, FileKey, ObjectInfo, SeekTo};

use super::{MoveError, Source, Step, Watcher, failed_to_write};
use crate::pace::Pace;

/// Bytes of one read, and reads under way at once.
const PIECE_BYTES: u32 = 1 << 20;
const PIECES: usize = 4;
/// How often it is told how far the copy is.
const TELL_EVERY: Duration = Duration::from_secs(1);
/// Objects that are named when they cannot be read.
const NAMED_MAX: usize = 20;

pub(super) struct Copier<'a> {
    source: &'a Source,
    here: &'a ObjectStore,
    to: &'a MovesTo,
    piece_bytes: u32,
    pace: Pace,
    told: Instant,
    deadline: Option<Instant>,
    objects: u64,
    /// Bytes copied.
    pub(super) bytes: u64,
    /// Copied and not durable yet.
    unsynced: Vec<u64>,
    /// Objects that the server cannot read, and why.
    pub(super) unreadable: Vec<String>,
}

impl<'a> Copier<'a> {
    pub(super) fn new(
        source: &'a Source,
        here: &'a ObjectStore,
        to: &'a MovesTo,
        payload_max: u32,
        rate_bytes: u64,
    ) -> Copier<'a> {
        Copier {
            source,
            here,
            to,
            piece_bytes: PIECE_BYTES.min(payload_max).max(1),
            pace: Pace::new(rate_bytes, 0),
            told: Instant::now(),
            deadline: None,
            objects: 0,
            bytes: 0,
            unsynced: Vec::new(),
            unreadable: Vec::new(),
        }
    }

    /// Copies no longer than until then: later it fails with [`MoveError::Busy`].
    pub(super) fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    pub(super) fn set_rate(&mut self, rate_bytes: u64) {
        self.pace = Pace::new(rate_bytes, self.bytes);
    }

    /// Copies a page of the objects and makes it durable; gives where the next begins.
    pub(super) fn page(&mut self, from: u64, max: u32, watcher: &mut dyn Watcher) -> Result<Option<u64>, MoveError> {
        let answer = self.source.link.ask(Call::ListObjects { from: FileKey(from), max })?;
        let Answer::Objects { objects, next, .. } = answer else { return Err(self.source.unexpected().into()) };
        for entry in objects {
            self.object(entry.file.0, std::slice::from_ref(&(0..u64::MAX)), watcher)?;
            self.objects += 1;
        }
        self.sync()?;
        Ok(next.map(|key| key.0))
    }

    /// Makes what was copied durable.
    pub(super) fn sync(&mut self) -> Result<(), MoveError> {
        let keys = std::mem::take(&mut self.unsynced);
        keys.into_iter().try_for_each(|key| self.here.sync(key)).map_err(failed_to_write(self.to))
    }

    /// Brings ranges of an object to the state of the server's. A range with the end `u64::MAX` was cut off first.
    pub(super) fn object(
        &mut self,
        key: u64,
        ranges: &[Range<u64>],
        watcher: &mut dyn Watcher,
    ) -> Result<(), MoveError> {
        match self.try_object(key, ranges, watcher) {
            Err(MoveError::Server(ClientError::Fault { fault: Fault { errno: libc::EIO, message }, .. })) => {
                if self.unreadable.len() < NAMED_MAX {
                    self.unreadable.push(format!("object {key:016x} ({message})"));
                }
                Ok(())
            }
            Err(MoveError::Server(ClientError::Fault { fault: Fault { errno: libc::EIDRM, .. }, .. })) => {
                self.gone(key)
            }
            done => done,
        }
    }

    /// An object was removed, and for ever: keys are not used twice.
    fn gone(&self, key: u64) -> Result<(), MoveError> {
        let write = failed_to_write(self.to);
        let had = self.here.look(key).map_err(&write)?;
        if had.is_some() { self.here.unlink(key).map_err(&write) } else { Ok(()) }
    }

    fn try_object(&mut self, key: u64, ranges: &[Range<u64>], watcher: &mut dyn Watcher) -> Result<(), MoveError> {
        self.check(watcher)?;
        let write = failed_to_write(self.to);
        let (_, object) = self.seek(key, 0, SeekTo::Data)?;
        let had = self.here.look(key).map_err(&write)?;
        if object.made == 0 {
            return self.gone(key);
        }
        self.unsynced.push(key);
        let had_bytes = had.map_or(0, |state| state.size);
        let cut = ranges.iter().filter(|range| range.end == u64::MAX).map(|range| range.start).min();
        let kept = had_bytes.min(cut.unwrap_or(u64::MAX)).min(object.size);
        if had.is_none() && object.size == 0 {
            // An object of no bytes is another thing than none.
            self.here.truncate(key, 1).map_err(&write)?;
        }
        if kept < had_bytes {
            self.here.truncate(key, kept).map_err(&write)?;
        }
        self.here.truncate(key, object.size).map_err(&write)?;
        for range in ranges {
            self.range(key, range.start..range.end.min(object.size), kept, watcher)?;
        }
        self.here.set_mtime(key, object.mtime.secs, object.mtime.nanos).map_err(&write)
    }

    /// Copies the data of a range; what lies behind `kept` is a hole here.
    fn range(&mut self, key: u64, range: Range<u64>, kept: u64, watcher: &mut dyn Watcher) -> Result<(), MoveError> {
        let mut at = range.start;
        while at < range.end {
            let data = self.seek(key, at, SeekTo::Data)?.0.unwrap_or(range.end).min(range.end);
            if at < data.min(kept) {
                self.here.punch(key, at..data.min(kept)).map_err(failed_to_write(self.to))?;
            }
            if data >= range.end {
                return Ok(());
            }
            let hole = self.seek(key, data, SeekTo::Hole)?.0.unwrap_or(range.end).min(range.end);
            self.data(key, data..hole, watcher)?;
            at = hole.max(data + 1);
        }
        Ok(())
    }

    /// Copies a range that has data.
    fn data(&mut self, key: u64, range: Range<u64>, watcher: &mut dyn Watcher) -> Result<(), MoveError> {
        let piece = u64::from(self.piece_bytes);
        let mut buffers = vec![vec![0; piece as usize]; PIECES.min((range.end - range.start).div_ceil(piece) as usize)];
        let mut at = range.start;
        while at < range.end {
            let starts: Vec<u64> = (at..range.end).step_by(piece as usize).take(PIECES).collect();
            let lens: Vec<usize> = starts.iter().map(|start| piece.min(range.end - start) as usize).collect();
            let mut slices: Vec<_> = buffers
                .iter_mut()
                .zip(&lens)
                .map(|(buffer, len)| [IoSliceMut::new(buffer.get_mut(..*len).unwrap_or(&mut []))])
                .collect();
            let (who, file) = (self.source.link.identity().who(), FileKey(key));
            let ops = slices.iter_mut().zip(starts.iter().zip(&lens)).map(|(slice, (start, len))| {
                let call = Call::Read { who, file, lane_offset: *start, len: *len as u32 };
                Op { link: &self.source.link, call, payload: &[], into: Some(slice) }
            });
            let replies = exchange(ops.collect(), Instant::now() + self.source.timeout());
            drop(slices);
            for (((reply, start), len), buffer) in replies.into_iter().zip(&starts).zip(&lens).zip(&buffers) {
                let reply = reply?;
                if reply.answer != Answer::Data {
                    return Err(self.source.unexpected().into());
                }
                let got = buffer.get(..reply.len.min(*len)).unwrap_or_default();
                let written = self.here.write_vectored(key, *start, &[IoSlice::new(got)]);
                written.map_err(|error| failed_to_write(self.to)(error.source))?;
                self.bytes += got.len() as u64;
                if got.len() < *len {
                    // It was cut meanwhile, which comes with the changes.
                    return Ok(());
                }
                at = start + *len as u64;
            }
            let mut unsettled = Ok(());
            self.here.relieve(|_, error| unsettled = Err(error));
            unsettled.map_err(failed_to_write(self.to))?;
            self.pace.wait(self.bytes);
            self.check(watcher)?;
        }
        Ok(())
    }

    /// Tells how far it is now and then; an error when it is to stop.
    fn check(&mut self, watcher: &mut dyn Watcher) -> Result<(), MoveError> {
        if self.told.elapsed() >= TELL_EVERY {
            self.told = Instant::now();
            watcher.tell(Step::Copying { objects: self.objects, bytes: self.bytes });
        }
        if watcher.is_stopped() {
            return Err(MoveError::Stopped);
        }
        match self.deadline {
            Some(deadline) if Instant::now() >= deadline => Err(MoveError::Busy(self.source.link.peer().name)),
            _ => Ok(()),
        }
    }

    fn seek(&self, key: u64, from: u64, to: SeekTo) -> Result<(Option<u64>, ObjectInfo), MoveError> {
        match self.source.link.ask(Call::ObjectSeek { file: FileKey(key), from, to })? {
            Answer::Sought(sought) => Ok((sought.at, sought.object)),
            _ => Err(self.source.unexpected().into()),
        }
    }
}
