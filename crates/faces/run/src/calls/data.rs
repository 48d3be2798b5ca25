//! Calls on the contents of open files: reads, writes, positions, advice and space.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use impresario_base::lock::Mutex;
use impresario_client::{seek_to, space_change};
use impresario_interpose::served::protocol::{AT_POSITION, READ_AHEAD, Request};

use super::{APPENDS, Calls, Incoming, Stop};
use crate::ahead::HasRead;
use crate::open::Node;

impl Calls {
    pub(super) fn read(&self, asked: &Incoming<'_>, room: usize, out: &mut Vec<u8>) -> Result<i64, Stop> {
        let open = self.opens.get(asked.numbers.open)?;
        if !open.may_read() {
            return Err(libc::EBADF.into());
        }
        let file = open.file()?;
        out.resize(room, 0);
        let ahead = self.ahead.as_ref().filter(|_| open.is_foreseen.load(Relaxed));
        let began = ahead.map(|_| Instant::now());
        let (offset, len) = match asked.numbers.a {
            AT_POSITION => {
                let mut position = open.position.lock();
                let (offset, len) = (*position, file.read_at(out, *position)?);
                *position += len as u64;
                (offset, len)
            }
            offset => {
                let offset = u64::try_from(offset).map_err(|_| libc::EINVAL)?;
                (offset, file.read_at(out, offset)?)
            }
        };
        out.truncate(len);
        if let Some((ahead, began)) = ahead.zip(began).filter(|_| len > 0) {
            let (number, pid, ended) = (asked.numbers.open, asked.peer.pid, Instant::now());
            let bytes = offset..offset.saturating_add(len as u64);
            ahead.read(HasRead { number, pid, bytes, took: ended - began, ended });
        }
        Ok(len as i64)
    }

    /// The program says what it will do with a part of a file. What it will read the data servers bring into memory meanwhile: it
    /// does not wait for them. Nothing is kept here that other advice could change.
    pub(super) fn advise(&self, asked: &Incoming<'_>) -> Result<i64, Stop> {
        let Request { open, a: offset, b: len, c: advice, .. } = asked.numbers;
        let open = self.opens.get(open)?;
        let reads_ahead = advice == READ_AHEAD;
        // In the order in which the kernel looks.
        let refusal = match &open.node {
            _ if *open.flags.lock() & libc::O_PATH != 0 => libc::EBADF,
            _ if reads_ahead && !open.may_read() => libc::EBADF,
            Node::Directory if reads_ahead => libc::EINVAL,
            _ if len < 0 => libc::EINVAL,
            _ if !reads_ahead && !(0..=libc::POSIX_FADV_NOREUSE.into()).contains(&advice) => libc::EINVAL,
            _ => 0,
        };
        if refusal != 0 {
            return Err(refusal.into());
        }
        let is_wanted = reads_ahead && len > 0 || advice == libc::POSIX_FADV_WILLNEED.into();
        let Ok(from) = u64::try_from(offset) else { return Ok(0) };
        if let Node::File(file) = &open.node
            && is_wanted
            && open.may_read()
        {
            file.will_need(from, if len == 0 { u64::MAX } else { len as u64 });
        }
        Ok(0)
    }

    pub(super) fn write(&self, asked: &Incoming<'_>) -> Result<i64, Stop> {
        let open = self.opens.get(asked.numbers.open)?;
        if !open.may_write() {
            return Err(libc::EBADF.into());
        }
        let (file, at, data) = (open.file()?, asked.numbers.a, asked.data);
        if at != AT_POSITION && at < 0 {
            return Err(libc::EINVAL.into());
        }
        if data.is_empty() {
            return Ok(0);
        }
        self.take_set_id(&open)?;
        let mut position = (at == AT_POSITION).then(|| open.position.lock());
        let flags = *open.flags.lock();
        let is_append = flags & libc::O_APPEND != 0;
        let appended = if is_append { file.append(data)? } else { None };
        let (offset, len) = match appended {
            Some(appended) => appended,
            None => {
                // What cannot say where an append goes (a folder of another file system) has the end that it says.
                let _turn = is_append.then(|| self.appends.get(open.ino as usize % APPENDS).map(Mutex::lock));
                let offset = match &position {
                    _ if is_append => file.attr()?.size,
                    Some(position) => **position,
                    None => at as u64,
                };
                if offset.checked_add(data.len() as u64).is_none_or(|end| end > i64::MAX as u64) {
                    return Err(libc::EFBIG.into());
                }
                (offset, file.write_some_at(data, offset)?)
            }
        };
        // O_SYNC has the bit of O_DSYNC, too. The position moves only if that succeeds.
        if len > 0 && flags & libc::O_DSYNC != 0 {
            if flags & libc::O_SYNC == libc::O_SYNC { file.sync()? } else { file.sync_data()? }
        }
        if let Some(position) = &mut position {
            **position = offset + len as u64;
        }
        Ok(len as i64)
    }

    pub(super) fn seek(&self, asked: &Incoming<'_>) -> Result<i64, Stop> {
        let Request { open, a: offset, b: whence, .. } = asked.numbers;
        let open = self.opens.get(open)?;
        if *open.flags.lock() & libc::O_PATH != 0 {
            return Err(libc::EBADF.into());
        }
        let mut position = open.position.lock();
        let size = || -> Result<i64, Stop> {
            Ok(match &open.node {
                Node::File(file) => file.attr()?.size as i64,
                Node::Directory => return Err(libc::EINVAL.into()),
            })
        };
        let now = match whence as i32 {
            libc::SEEK_SET => offset,
            libc::SEEK_CUR => (*position as i64).checked_add(offset).ok_or(libc::EOVERFLOW)?,
            libc::SEEK_END => size()?.checked_add(offset).ok_or(libc::EOVERFLOW)?,
            whence => {
                let to = seek_to(whence).ok_or(libc::EINVAL)?;
                let Node::File(file) = &open.node else { return Err(libc::EINVAL.into()) };
                let from = u64::try_from(offset).map_err(|_| libc::ENXIO)?;
                file.seek(from, to)?.and_then(|at| i64::try_from(at).ok()).ok_or(libc::ENXIO)?
            }
        };
        *position = u64::try_from(now).map_err(|_| libc::EINVAL)?;
        Ok(now)
    }

    pub(super) fn change_space(&self, asked: &Incoming<'_>) -> Result<i64, Stop> {
        let Request { open, a: offset, b: len, c: mode, .. } = asked.numbers;
        let open = self.opens.get(open)?;
        let (Ok(offset), Ok(len @ 1..)) = (u64::try_from(offset), u64::try_from(len)) else {
            return Err(libc::EINVAL.into());
        };
        let change = i32::try_from(mode).ok().and_then(space_change).ok_or(libc::EOPNOTSUPP)?;
        if !open.may_write() {
            return Err(libc::EBADF.into());
        }
        if offset.checked_add(len).is_none_or(|end| end > i64::MAX as u64) {
            return Err(libc::EFBIG.into());
        }
        self.take_set_id(&open)?;
        open.file()?.change_space(change, offset, len)?;
        Ok(0)
    }
}
