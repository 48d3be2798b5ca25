//! Reads and changes of objects whose blocks have checksums, and the reading of a whole object to find damage.

use std::io::{self, IoSlice, IoSliceMut};
use std::ops::Range;
use std::sync::atomic::Ordering;

use crate::checks::{BLOCK_BYTES, Checked, Checks, Corrupt, piece_end, read_full, sum_of, sums_of, touched};
use crate::error::WriteError;
use crate::filesystem::FileSystem;
use crate::objects::ObjectStore;

/// What a scrub found in a part of an object.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Scrubbed {
    /// Bytes read.
    pub read_bytes: u64,
    /// Blocks that fit their checksums.
    pub good_blocks: u64,
    /// Blocks that had no checksum and have one now: written before there were checksums, or shortly before a crash.
    pub learnt_blocks: u64,
    /// Blocks that have no checksum: holes and zeros, and those of an object of which a sync failed.
    pub unknown_blocks: u64,
    /// Where blocks begin that do not fit their checksums, or that the device cannot read.
    pub corrupt: Vec<u64>,
    /// Where to go on; `None` at the end of the object.
    pub next: Option<u64>,
}

impl<F: FileSystem> ObjectStore<F> {
    /// Reads and checks; from memory alone if `cached`, then `None` if that might wait or does not fit.
    pub(crate) fn read_checked(
        &self,
        checks: &Checks<F::File>,
        (key, file): (u64, &F::File),
        offset: u64,
        buf: &mut [u8],
        cached: bool,
    ) -> io::Result<Option<usize>> {
        if cached {
            let Some(checked) = self.checked_if_loaded(checks, key) else { return Ok(None) };
            let read = self.try_read((checks, &checked), (key, file), offset, buf, true)?;
            return Ok(read.and_then(Result::ok));
        }
        let checked = self.checked(checks, key)?;
        if let Some(Ok(len)) = self.try_read((checks, &checked), (key, file), offset, buf, false)? {
            return Ok(Some(len));
        }
        // It may have been written meanwhile; now nothing is.
        let _writing = checked.writing.lock();
        match self.try_read((checks, &checked), (key, file), offset, buf, false)? {
            Some(Err(block)) => Err(self.corrupt(checks, key, block)),
            Some(Ok(len)) => Ok(Some(len)),
            None => Ok(None),
        }
    }

    /// Reads and checks once; `Err` is a block that does not fit.
    fn try_read(
        &self,
        (checks, checked): (&Checks<F::File>, &Checked),
        (key, file): (u64, &F::File),
        offset: u64,
        buf: &mut [u8],
        cached: bool,
    ) -> io::Result<Option<Result<usize, u64>>> {
        let wanted = offset..offset.saturating_add(buf.len() as u64);
        let done = match cached {
            true => match self.read_plain_cached(file, offset, &mut [IoSliceMut::new(buf)])? {
                Some(done) => done,
                None => return Ok(None),
            },
            false => read_full(&self.fs, file, offset, buf)?,
        };
        let (end, is_end) = (offset + done as u64, done < buf.len());
        let blocks = touched(&wanted);
        let Some(sums) = self.sums(checks, checked, key, &blocks, cached)? else { return Ok(None) };
        for (block, sum) in blocks.zip(sums).filter(|(_, sum)| *sum != 0) {
            let (start, stop) = (block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES);
            let part = (start.max(offset).min(end) - offset) as usize..(stop.min(end).max(offset) - offset) as usize;
            let Some(part) = buf.get_mut(part) else { continue };
            let is_whole = start >= offset && (stop <= end || is_end);
            let found = if is_whole {
                sum_of(part)
            } else {
                let mut whole = [0; BLOCK_BYTES as usize];
                match cached {
                    true => match self.read_plain_cached(file, start, &mut [IoSliceMut::new(&mut whole)])? {
                        Some(_) => {}
                        None => return Ok(None),
                    },
                    false => drop(read_full(&self.fs, file, start, &mut whole)?),
                }
                // What is returned is what was checked.
                let from = (start.max(offset) - start) as usize;
                whole.get(from..from + part.len()).into_iter().for_each(|bytes| part.copy_from_slice(bytes));
                sum_of(&whole)
            };
            if found != sum {
                return Ok(Some(Err(block)));
            }
        }
        Ok(Some(Ok(done)))
    }

    fn corrupt(&self, checks: &Checks<F::File>, key: u64, block: u64) -> io::Error {
        checks.corrupt.fetch_add(1, Ordering::Relaxed);
        let corrupt = Corrupt { server: self.identity().server.clone(), key, offset: block * BLOCK_BYTES };
        self.complaints.about("corrupt", &format!("{key:016x}/{block}"), |times| tracing::error!(times, "{corrupt}"));
        io::Error::other(corrupt)
    }

    /// Whether a write of an object whose blocks have checksums may wait for the device.
    pub fn write_waits(&self, key: u64, offset: u64, len: u64) -> bool {
        let Some(checks) = &self.checks else { return false };
        if checks.is_full() {
            return true;
        }
        let range = offset..offset.saturating_add(len);
        let Some(checked) = self.checked_if_loaded(checks, key) else { return true };
        if checked.is_unsure() || !range.start.is_multiple_of(BLOCK_BYTES) || !range.end.is_multiple_of(BLOCK_BYTES) {
            return true;
        }
        self.settled_len(checks, &checked, key).map_or(true, |settled| touched(&range).start < settled)
    }

    pub(crate) fn write_checked(
        &self,
        checks: &Checks<F::File>,
        (key, file): (u64, &F::File),
        offset: u64,
        bufs: &[IoSlice<'_>],
        wanted: usize,
    ) -> Result<usize, WriteError> {
        let failed = |source| WriteError { written: 0, source };
        let (first, sums) = sums_of(offset, bufs);
        let range = offset..offset + wanted as u64;
        let checked = self.checked(checks, key).map_err(failed)?;
        let _writing = checked.writing.lock();
        let edges = self.before_change((checks, &checked), (key, file), &range).map_err(failed)?;
        let written = self.write_plain(file, offset, bufs, wanted);
        let end = offset + written.as_ref().map_or_else(|error| error.written, |written| *written) as u64;
        let whole = (first..).zip(sums).filter(|(block, _)| (block + 1) * BLOCK_BYTES <= end);
        let edges = if written.is_ok() { self.edge_sums(file, &edges) } else { Vec::new() };
        self.changed(checks, &checked, &touched(&range), whole.chain(edges));
        written
    }

    /// Changes a range of an object by `act`, after which its inside has no checksums, and the blocks at its edges new ones.
    pub(crate) fn change_checked(
        &self,
        checks: &Checks<F::File>,
        (key, file): (u64, &F::File),
        range: Range<u64>,
        act: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let checked = self.checked(checks, key)?;
        let _writing = checked.writing.lock();
        let edges = self.before_change((checks, &checked), (key, file), &range)?;
        let done = act();
        let edges = if done.is_ok() { self.edge_sums(file, &edges) } else { Vec::new() };
        self.changed(checks, &checked, &touched(&range), edges.into_iter());
        done
    }

    /// Prepares the change of a range: the blocks that it changes partly are good, and no checksum of the others counts.
    /// Gives those of the former whose content will be known.
    fn before_change(
        &self,
        (checks, checked): (&Checks<F::File>, &Checked),
        (key, file): (u64, &F::File),
        range: &Range<u64>,
    ) -> io::Result<Vec<u64>> {
        let blocks = touched(range);
        let mut edges = Vec::new();
        if !range.start.is_multiple_of(BLOCK_BYTES) {
            edges.push(blocks.start);
        }
        if range.end != u64::MAX && !range.end.is_multiple_of(BLOCK_BYTES) && edges != [blocks.end - 1] {
            edges.push(blocks.end - 1);
        }
        if !edges.is_empty() {
            let size = self.fs.stat(file)?.size;
            let mut trusted = Vec::new();
            for block in edges {
                let sum = self.sums(checks, checked, key, &(block..block + 1), false)?;
                let sum = sum.and_then(|sums| sums.first().copied()).unwrap_or(0);
                let mut whole = [0; BLOCK_BYTES as usize];
                if sum != 0 {
                    read_full(&self.fs, file, block * BLOCK_BYTES, &mut whole)?;
                    if sum_of(&whole) != sum {
                        return Err(self.corrupt(checks, key, block));
                    }
                }
                if sum != 0 || block * BLOCK_BYTES >= size || !checked.is_distrusted() {
                    trusted.push(block);
                }
            }
            edges = trusted;
        }
        self.unsettle(checks, checked, key, blocks)?;
        Ok(edges)
    }

    /// The checksums of blocks as they are; those that cannot be read have none.
    fn edge_sums(&self, file: &F::File, edges: &[u64]) -> Vec<(u64, u32)> {
        let sum = |block: &u64| {
            let mut whole = [0; BLOCK_BYTES as usize];
            read_full(&self.fs, file, block * BLOCK_BYTES, &mut whole).ok().map(|_| (*block, sum_of(&whole)))
        };
        edges.iter().filter_map(sum).collect()
    }

    /// Reads a part of an object from its device, from `offset` on up to [`piece_end`], and compares it with the checksums; gives
    /// checksums to blocks that have none. `None` if there is no such object.
    ///
    /// What the device cannot read is damage, too; without checksums nothing else is.
    pub fn scrub(&self, key: u64, offset: u64, max_bytes: u64) -> io::Result<Option<Scrubbed>> {
        let Some(file) = self.existing(key)? else { return Ok(None) };
        let size = self.fs.stat(&file)?.size;
        let first = offset / BLOCK_BYTES;
        let range = first * BLOCK_BYTES..piece_end(offset, max_bytes);
        let mut buf = vec![0; (range.end - range.start) as usize];
        // What memory holds says nothing of the device.
        self.fs.forget(&file, range.clone());
        let mut found = Scrubbed { next: Some(range.end), ..Scrubbed::default() };
        let checks = self.checks.as_ref().map(|checks| Ok::<_, io::Error>((checks, self.checked(checks, key)?)));
        let checks = checks.transpose()?;
        let mut end = size.div_ceil(BLOCK_BYTES);
        if let Some((checks, checked)) = &checks {
            // A checksum behind the end tells of bytes that are missing.
            end = end.max(self.settled_len(checks, checked, key)?);
        }
        // A hole that has no checksums has nothing that could be damaged.
        let data = self.fs.next_data(&file, range.start)?.map(|at| at / BLOCK_BYTES);
        let sums = match &checks {
            Some((checks, checked)) => self.next_settled(checks, checked, key, first)?,
            None => None,
        };
        let next = [data, sums].into_iter().flatten().min();
        if next.is_none_or(|next| next >= touched(&range).end) {
            let next = next.filter(|next| *next < end).map(|next| next * BLOCK_BYTES);
            return Ok(Some(Scrubbed { next, ..Scrubbed::default() }));
        }
        let blocks = first..touched(&range).end.min(end).max(first);
        found.next = found.next.filter(|next| next / BLOCK_BYTES < end);
        let read = self.read_scrubbed(&file, first, &mut buf)?;
        let sums = match &checks {
            Some((checks, checked)) => self.sums(checks, checked, key, &blocks, false)?.unwrap_or_default(),
            None => vec![0; (blocks.end - blocks.start) as usize],
        };
        for (((block, sum), bytes), len) in blocks.zip(sums).zip(buf.chunks(BLOCK_BYTES as usize)).zip(read) {
            let Some(len) = len else {
                found.corrupt.push(block * BLOCK_BYTES);
                continue;
            };
            found.read_bytes += len as u64;
            match &checks {
                None => found.unknown_blocks += 1,
                Some((_, checked)) if sum == 0 && (checked.is_distrusted() || bytes.iter().all(|byte| *byte == 0)) => {
                    found.unknown_blocks += 1;
                }
                Some(_) if sum != 0 && sum_of(bytes) == sum => found.good_blocks += 1,
                Some((checks, checked)) => self.look_again((checks, checked), (key, &file), block, &mut found)?,
            }
        }
        Ok(Some(found))
    }

    /// Reads blocks; gives the bytes read of each, `None` where the device cannot read.
    fn read_scrubbed(&self, file: &F::File, first: u64, buf: &mut [u8]) -> io::Result<Vec<Option<usize>>> {
        let block_len = BLOCK_BYTES as usize;
        let is_unreadable = |error: &io::Error| error.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error());
        match read_full(&self.fs, file, first * BLOCK_BYTES, buf) {
            Ok(len) => {
                Ok((0..buf.len()).step_by(block_len).map(|at| Some(len.saturating_sub(at).min(block_len))).collect())
            }
            Err(error) if !is_unreadable(&error) => Err(error),
            Err(_) => {
                let blocks = (first..).zip(buf.chunks_mut(block_len));
                let read = blocks.map(|(block, bytes)| match read_full(&self.fs, file, block * BLOCK_BYTES, bytes) {
                    Err(error) if is_unreadable(&error) => Ok(None),
                    len => len.map(Some),
                });
                read.collect()
            }
        }
    }

    /// Judges a block while nothing writes it, and learns its checksum if it has none.
    fn look_again(
        &self,
        (checks, checked): (&Checks<F::File>, &Checked),
        (key, file): (u64, &F::File),
        block: u64,
        found: &mut Scrubbed,
    ) -> io::Result<()> {
        let _writing = checked.writing.lock();
        let mut whole = [0; BLOCK_BYTES as usize];
        let len = read_full(&self.fs, file, block * BLOCK_BYTES, &mut whole)?;
        let sums = self.sums(checks, checked, key, &(block..block + 1), false)?;
        match sums.and_then(|sums| sums.first().copied()).unwrap_or(0) {
            0 if len == 0 || checked.is_distrusted() => found.unknown_blocks += 1,
            0 => {
                self.changed(checks, checked, &(block..block + 1), std::iter::once((block, sum_of(&whole))));
                found.learnt_blocks += 1;
            }
            sum if sum_of(&whole) == sum => found.good_blocks += 1,
            _ => {
                drop(self.corrupt(checks, key, block));
                found.corrupt.push(block * BLOCK_BYTES);
            }
        }
        Ok(())
    }
}
