//! A read under way that no thread waits for: one that waited would have to be woken for the request, and again for the
//! answer. What one client has asked for is passed on in parts, before the rest of it is here.

use std::ops::Range;
use std::sync::Arc;

use impresario_client::{End, Job, Task};
use impresario_sched::Request;
use impresario_wire::{Answer, Fault};
use smallvec::smallvec;

use super::family::Short;
use super::forward::{Begun, Forwarded, Forwarder, Joined, complete, fail_all, is_of_one};
use super::storage::Target;
use super::{Answering, Item};
use crate::owed::{Came, Owed, PART_MAX_BYTES, Run, send_parts};
use crate::payload::{Buffer, Slice};

pub(super) struct Reading {
    forwarder: Arc<Forwarder>,
    load: Joined,
    /// Its place among what is under way.
    begun: Begun,
    target: Target,
    /// What is read.
    range: Range<u64>,
    /// Length of each buffer but the last, bytes.
    part_bytes: usize,
    /// Made when their bytes come, gone when these are passed on.
    buffers: Vec<Option<Buffer>>,
    /// So many bytes from the start on have come.
    here: usize,
    /// So many of them are passed on: whole buffers.
    passed: usize,
}

impl Reading {
    pub(super) fn new(
        forwarder: &Arc<Forwarder>,
        load: Joined,
        begun: Begun,
        target: Target,
        range: Range<u64>,
    ) -> Reading {
        let len = (range.end - range.start) as usize;
        let is_lone = matches!(&load.parts[..], [(_, Item { answer: Answering::Read(_), .. })]);
        let part_bytes = if is_lone { PART_MAX_BYTES as usize } else { len.max(1) };
        let mut buffers = Vec::new();
        buffers.resize_with(len.div_ceil(part_bytes), || None);
        Reading { forwarder: forwarder.clone(), load, begun, target, range, part_bytes, buffers, here: 0, passed: 0 }
    }

    /// The answer that one client gets for all of it.
    fn lone(&mut self) -> Option<(&mut Request, &mut Owed)> {
        match &mut self.load.parts[..] {
            [(request, Item { answer: Answering::Read(owed), .. })] => Some((request, owed)),
            _ => None,
        }
    }

    /// Forgets what is passed on: only the rest is still owed.
    fn forget_passed(&mut self) {
        let (passed, len) = (std::mem::take(&mut self.passed) as u64, self.len_bytes() as u64);
        if passed == 0 {
            return;
        }
        if let Some((request, owed)) = self.lone() {
            *owed = owed.piece(passed, len - passed);
            request.extent.advance(passed);
        }
        self.range.start += passed;
        self.buffers.drain(..passed as usize / self.part_bytes);
    }

    /// All of what is owed is here, or all but what is behind the end of the object.
    fn came(mut self, got: usize) {
        let is_short = got < self.len_bytes() && self.forwarder.splits();
        let mut buffers = std::mem::take(&mut self.buffers);
        let (mut forwarded, forwarder) = (Forwarded::default(), self.forwarder.clone());
        match self.lone() {
            Some((request, owed)) if !is_short => {
                let (mut left, mut buffers) = (got, buffers.into_iter());
                send_parts((0, request.extent.len), owed, &mut Run::default(), |(_, part)| {
                    let have = left.min(part as usize);
                    left -= have;
                    let buffer = buffers.next().flatten().unwrap_or_else(|| forwarder.buffer(0));
                    Some(Slice::new(Arc::new(buffer), 0..have))
                });
            }
            Some((request, owed)) => {
                let short = Short { offset: request.extent.file_offset, len: request.extent.len, owed: owed.take() };
                forwarded.shorts.push((self.target, short));
            }
            None => {
                let parts = std::mem::take(&mut self.load.parts);
                let buffer = buffers.pop().flatten().unwrap_or_else(|| forwarder.buffer(0));
                let came = (buffer, smallvec![(self.range.clone(), 0..got)]);
                forwarder.answer_reads(&self.target, parts, came, &mut forwarded);
            }
        }
        self.end(forwarded);
    }

    fn end(self, forwarded: Forwarded) {
        let Reading { forwarder, load, begun, .. } = self;
        complete(load.tickets, |_| 0, begun.started);
        if !forwarded.shorts.is_empty() {
            forwarder.resolve_later(forwarded.shorts);
        }
        begun.end(true);
    }

    /// What is missing may be a hole. To find out takes other servers.
    fn read_on(mut self, got: usize) {
        let mut whole = self.forwarder.buffer(self.len_bytes());
        for (part, buffer) in whole.chunks_mut(self.part_bytes).zip(std::mem::take(&mut self.buffers)) {
            if let Some(buffer) = buffer {
                part.copy_from_slice(&buffer);
            }
        }
        let read_on = || self.forwarder.read_on(&self.target, self.range.start, &mut whole, got);
        let got = match self.begun.watched.attend(read_on) {
            Ok(got) => got,
            Err(fault) if is_of_one(&fault, self.begun.started, &self.load.parts) => return self.again(),
            Err(fault) => return self.failed(&fault),
        };
        let mut forwarded = Forwarded::default();
        let parts = std::mem::take(&mut self.load.parts);
        let came = (whole, smallvec![(self.range.clone(), 0..got)]);
        self.forwarder.answer_reads(&self.target, parts, came, &mut forwarded);
        self.end(forwarded);
    }

    /// Has it forwarded by a thread that waits.
    fn again(self) {
        let Reading { forwarder, load, begun, .. } = self;
        forwarder.forward_later(&forwarder, load, begun);
    }

    fn failed(self, fault: &Fault) {
        let Reading { forwarder, load, begun, .. } = self;
        forwarder.has_failed();
        let errno = fail_all(load.parts, fault);
        complete(load.tickets, |_| errno, begun.started);
        begun.end(fault.errno != libc::EIO);
    }
}

impl Task for Reading {
    fn len_bytes(&self) -> usize {
        (self.range.end - self.range.start) as usize
    }

    fn place(&mut self, at: usize) -> &mut [u8] {
        let (len, part_bytes) = (self.len_bytes(), self.part_bytes);
        let index = at / part_bytes;
        let Some(buffer) = self.buffers.get_mut(index).filter(|_| at >= self.passed) else { return &mut [] };
        let size = part_bytes.min(len - index * part_bytes);
        buffer.get_or_insert_with(|| self.forwarder.buffer(size)).get_mut(at % part_bytes..).unwrap_or_default()
    }

    fn came(&mut self, range: Range<usize>) -> Option<Job> {
        if range.start != self.here {
            return None;
        }
        self.here = range.end;
        let (part_bytes, here) = (self.part_bytes, self.here);
        let mut passed = self.passed;
        let mut buffers: Vec<Buffer> = Vec::new();
        while passed + part_bytes <= here {
            buffers.extend(self.buffers.get_mut(passed / part_bytes).and_then(Option::take));
            passed += part_bytes;
        }
        let from = std::mem::replace(&mut self.passed, passed) as u64;
        let (_, owed) = self.lone().filter(|_| !buffers.is_empty())?;
        let parts: Vec<Owed> =
            (0..buffers.len() as u64).map(|n| owed.piece(from + n * PART_MAX_BYTES, PART_MAX_BYTES)).collect();
        Some(Box::new(move || {
            for (owed, buffer) in parts.into_iter().zip(buffers) {
                let len = buffer.len();
                owed.fulfil(Came::Read(Slice::new(Arc::new(buffer), 0..len)));
            }
        }))
    }

    fn ended(mut self: Box<Self>, end: End) {
        let passed = self.passed;
        self.forget_passed();
        match end {
            End::Answered(Answer::Data, got) => {
                let got = got.saturating_sub(passed);
                if self.forwarder.splits() || got == self.len_bytes() {
                    return self.came(got);
                }
                self.forwarder.clone().on_a_thread(move || self.read_on(got));
            }
            End::Late(error) => self.failed(&error.to_fault()),
            // A thread that waits may ask again, elsewhere or later, and for each part alone.
            End::Answered(..) | End::Lost => self.again(),
        }
    }
}
