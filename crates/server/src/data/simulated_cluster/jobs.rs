//! What a thread does for one step: one call after another, or several at once, and what it makes of the answers.

use impresario_client::Peer;
use impresario_layout::Layout;
use impresario_testing::plans::Step;
use impresario_wire::{Answer, FileKey, LayoutRequest, MetaCall, SetAttr, Target};

use super::model::{NameOp, Seen, StripOp};
use super::plan::{DATA_SERVERS, META, Op, STRIP_BYTES, STRIPS};
use super::servers::{Ask, Told};
use super::world::{Copies, Outcome, Query, Slot, World};

/// A step under way.
pub(super) struct Job {
    step: Step<Op>,
    /// When it began, by the history's clock.
    called: u64,
    /// The file is registered in the present session first.
    is_registering: bool,
    /// Where an append goes, in strips.
    assigned: Option<u64>,
    /// What is written, by part.
    values: Vec<u64>,
    /// The client's writes when a sync was sent.
    mark: u64,
    answers: Vec<Option<(Outcome, u32, Copies)>>,
}

impl World<'_> {
    pub(super) fn begin(&mut self, thread: usize, step: Step<Op>) {
        let called = self.history.tick();
        // A file that is open is closed first; one that is not needs none of this.
        let op = match step.op {
            Op::Open { slot, .. } if self.slots[thread][slot].is_some() => Op::Close { slot },
            op => op,
        };
        let step = Step { op, ..step };
        let slot = match op {
            Op::Close { slot }
            | Op::Write { slot, .. }
            | Op::Append { slot }
            | Op::Cut { slot, .. }
            | Op::Sync { slot }
            | Op::Read { slot } => Some(slot),
            Op::Open { .. } | Op::Unlink { .. } | Op::Rename { .. } => None,
        };
        let open = slot.and_then(|slot| self.slots[thread][slot]);
        if slot.is_some() && open.is_none() {
            return self.think(thread);
        }
        let client = self.plan.threads[thread].client;
        let needs_handle = matches!(op, Op::Close { .. } | Op::Append { .. } | Op::Cut { .. });
        let is_registering = open.is_some_and(|open| needs_handle && Some(open.on) != self.clients[client].connection);
        self.jobs[thread] = Some(Job {
            step,
            called,
            is_registering,
            assigned: None,
            values: Vec::new(),
            mark: 0,
            answers: Vec::new(),
        });
        match open.filter(|_| is_registering) {
            Some(Slot { path, file, .. }) => {
                let call = MetaCall::Reopen { path: path.into(), file, write: true };
                self.ask_all(thread, vec![Query::Meta { call, is_bound: false }]);
            }
            None => self.go_on(thread),
        }
    }

    fn ask_all(&mut self, thread: usize, queries: Vec<Query>) {
        let Some(job) = &mut self.jobs[thread] else { return };
        job.answers = queries.iter().map(|_| None).collect();
        // Registering, and the write of an append, have messages of their own.
        let id = job.step.id * 4 + if job.is_registering { 1 } else { 2 * u64::from(job.assigned.is_some()) };
        for (part, query) in queries.into_iter().enumerate() {
            self.submit(thread, id, part, query);
        }
    }

    /// The calls of the step itself.
    fn go_on(&mut self, thread: usize) {
        let Some(job) = &self.jobs[thread] else { return };
        let (op, assigned) = (job.step.op, job.assigned);
        let open = |slot: usize| self.slots[thread][slot];
        let bound = |call: MetaCall| vec![Query::Meta { call, is_bound: true }];
        let free = |call: MetaCall| vec![Query::Meta { call, is_bound: false }];
        let queries = match op {
            Op::Open { path, create: false, .. } => free(MetaCall::Open { path: path.into(), write: true }),
            Op::Open { path, create: true, .. } => {
                let layout = LayoutRequest {
                    base: None,
                    pcount: Some(DATA_SERVERS as u16),
                    ssize_bytes: Some(STRIP_BYTES as u32),
                };
                let path = path.into();
                free(MetaCall::Create { path, mode: 0o644, uid: 0, gid: 0, exclusive: false, layout: Some(layout) })
            }
            Op::Unlink { path } => free(MetaCall::Unlink { path: path.into() }),
            Op::Rename { from, to } => {
                free(MetaCall::Rename { from: from.into(), to: to.into(), no_replace: false, whiteout: false })
            }
            Op::Close { slot } => {
                let Some(Slot { handle, has_written, .. }) = open(slot) else { return self.think(thread) };
                bound(MetaCall::Close { handle, wrote: has_written })
            }
            Op::Append { slot } if assigned.is_none() => {
                let Some(Slot { handle, .. }) = open(slot) else { return self.think(thread) };
                bound(MetaCall::Append { handle, len_bytes: STRIP_BYTES })
            }
            Op::Cut { slot, strips } => {
                let Some(Slot { file, handle, .. }) = open(slot) else { return self.think(thread) };
                self.history.shortens(file);
                let set = SetAttr { size: Some(strips as u64 * STRIP_BYTES), ..SetAttr::default() };
                bound(MetaCall::SetAttr { target: Target::Handle(handle), set })
            }
            Op::Write { slot, .. } | Op::Append { slot } => {
                let Some(Slot { file, layout, .. }) = open(slot) else { return self.think(thread) };
                let strips = written(op, assigned);
                let first = self.value + 1;
                self.value += strips.len() as u64;
                if let (Some(job), Some(open)) = (&mut self.jobs[thread], &mut self.slots[thread][slot]) {
                    job.values = (first..=self.value).collect();
                    open.has_written = true;
                }
                let part = |(strip, value)| data(file, &layout, strip, |at| Ask::Write { at, value });
                strips.into_iter().zip(first..).map(part).collect()
            }
            Op::Read { slot } => {
                let Some(Slot { file, layout, .. }) = open(slot) else { return self.think(thread) };
                (0..STRIPS as u64).map(|strip| data(file, &layout, strip, |at| Ask::Read { at })).collect()
            }
            Op::Sync { slot } => {
                let Some(Slot { file, .. }) = open(slot) else { return self.think(thread) };
                let client = self.plan.threads[thread].client;
                let mark = self.clients[client].unsynced.writes();
                if let Some(job) = &mut self.jobs[thread] {
                    job.mark = mark;
                }
                (0..DATA_SERVERS).map(|server| Query::Data { server, file, ask: Ask::Sync }).collect()
            }
        };
        self.ask_all(thread, queries);
    }

    /// A call has ended.
    pub(super) fn part_ended(&mut self, thread: usize, part: usize, outcome: Outcome, sent: (u32, Copies)) {
        let client = self.plan.threads[thread].client;
        let Some(job) = &mut self.jobs[thread] else { return };
        // The client notes an acknowledged write when it has the answer to it.
        if let (Outcome::Data(Told::Written(state)), Op::Write { slot, .. } | Op::Append { slot }) =
            (&outcome, job.step.op)
            && let Some(open) = self.slots[thread][slot]
        {
            self.clients[client].unsynced.note_write(open.file, *state);
        }
        job.answers[part] = Some((outcome, sent.0, sent.1));
        if job.answers.iter().all(Option::is_some) {
            let answers: Vec<(Outcome, u32, Copies)> = job.answers.drain(..).flatten().collect();
            self.ended(thread, answers);
        }
    }

    fn ended(&mut self, thread: usize, answers: Vec<(Outcome, u32, Copies)>) {
        let Some(job) = &mut self.jobs[thread] else { return };
        let (Step { id, op, .. }, called, client) = (job.step, job.called, self.plan.threads[thread].client);
        let Some((first, epoch, _)) = answers.first().cloned() else { return self.think(thread) };
        if std::mem::replace(&mut job.is_registering, false) {
            let slot = match op {
                Op::Close { slot } | Op::Append { slot } | Op::Cut { slot, .. } => slot,
                _ => return self.think(thread),
            };
            return self.registered(thread, slot, &first);
        }
        match op {
            Op::Open { slot, path, .. } => {
                self.named(id, op, &first, called, (client, epoch, META));
                if let Outcome::Meta(answer) = &first
                    && let Answer::Opened(opened) = &**answer
                {
                    let told = self.clients[client].unsynced.losses().last(opened.file);
                    let (file, layout, handle) = (opened.file, opened.layout, opened.handle);
                    let on = self.clients[client].connection.unwrap_or(usize::MAX);
                    self.slots[thread][slot] = Some(Slot { path, file, layout, handle, on, told, has_written: false });
                }
            }
            Op::Unlink { .. } | Op::Rename { .. } => self.named(id, op, &first, called, (client, epoch, META)),
            Op::Close { slot } => self.slots[thread][slot] = None,
            Op::Append { slot } if job.assigned.is_none() => {
                if let Outcome::Meta(answer) = &first
                    && let Answer::Assigned { offset } = &**answer
                    && let Some(open) = self.slots[thread][slot]
                {
                    self.history.assigned(open.file, *offset);
                    // An end that is no multiple of a strip is nobody's: every write and cut here is of whole strips.
                    job.assigned = Some(*offset / STRIP_BYTES);
                    return self.go_on(thread);
                }
            }
            Op::Write { slot, .. } | Op::Append { slot } => {
                let (strips, values) = (written(op, job.assigned), std::mem::take(&mut job.values));
                let Some(Slot { file, .. }) = self.slots[thread][slot] else { return self.think(thread) };
                for ((strip, value), (outcome, epoch, copies)) in strips.into_iter().zip(values).zip(answers) {
                    match outcome {
                        Outcome::Data(Told::Written(_)) => {
                            self.history.written(file, strip, (value, client), called, copies);
                        }
                        Outcome::Data(Told::Fault(fault)) if fault.errno == libc::EIDRM => {
                            self.history.told_removed(file);
                        }
                        _ => {
                            let sender = Some((client, epoch));
                            self.history.copies_maybe_written(file, strip, (value, copies.sent), called, sender);
                        }
                    }
                }
            }
            Op::Cut { slot, strips } => self.cut(thread, slot, strips as u64, &answers[0], called),
            Op::Read { slot } => {
                let Some(Slot { file, .. }) = self.slots[thread][slot] else { return self.think(thread) };
                for (strip, (outcome, ..)) in (0..).zip(answers) {
                    match outcome {
                        Outcome::Data(Told::Value(value)) => {
                            self.history.strip(file, strip, StripOp::Read { value }, called);
                        }
                        Outcome::Data(Told::Fault(fault)) if fault.errno == libc::EIDRM => {
                            self.history.told_removed(file);
                        }
                        _ => {}
                    }
                }
            }
            Op::Sync { slot } => self.synced(thread, slot, answers),
        }
        self.think(thread);
    }

    fn registered(&mut self, thread: usize, slot: usize, answer: &Outcome) {
        let client = self.plan.threads[thread].client;
        if let Outcome::Meta(answer) = answer
            && let Answer::Opened(opened) = &**answer
            && let Some(open) = &mut self.slots[thread][slot]
            && open.file == opened.file
        {
            (open.handle, open.on) = (opened.handle, self.clients[client].connection.unwrap_or(usize::MAX));
            return self.go_on(thread);
        }
        // The file is gone, or the server: what is open is of no use.
        self.slots[thread][slot] = None;
        self.think(thread);
    }

    /// What was told of an operation on names.
    pub(super) fn named(&mut self, id: u64, op: Op, outcome: &Outcome, called: u64, doubt: (usize, u32, usize)) {
        let op = match op {
            Op::Open { path, create, .. } => NameOp::Open { path, create },
            Op::Unlink { path } => NameOp::Unlink { path },
            Op::Rename { from, to } => NameOp::Rename { from, to },
            _ => return,
        };
        let seen = match outcome {
            Outcome::Meta(answer) => match &**answer {
                Answer::Opened(opened) => {
                    self.history.knows(opened.file, opened.layout);
                    Seen::File(opened.file.0)
                }
                // A file that was made by an earlier copy and is gone since.
                Answer::Fault(fault) if [libc::EIO, libc::ESTALE].contains(&fault.errno) => Seen::Unknown,
                Answer::Fault(fault) => Seen::Failed(fault.errno),
                _ => Seen::Done,
            },
            _ => Seen::Unknown,
        };
        let changes = !matches!(op, NameOp::Open { create: false, .. });
        if changes || seen != Seen::Unknown {
            self.history.name(id, op, seen, called, doubt);
        }
    }

    fn cut(&mut self, thread: usize, slot: usize, strips: u64, answer: &(Outcome, u32, Copies), called: u64) {
        let (outcome, epoch, copies) = answer;
        let client = self.plan.threads[thread].client;
        let Some(Slot { file, .. }) = self.slots[thread][slot] else { return };
        let done = match outcome {
            Outcome::Meta(answer) => match &**answer {
                Answer::Cut { lanes, .. } => {
                    for lane in lanes {
                        self.clients[client].unsynced.note_write(file, *lane);
                    }
                    true
                }
                // It was refused before anything was done, unless an earlier copy was under way.
                Answer::Fault(fault) if copies.sent == 1 && [libc::EBADF, libc::ESTALE].contains(&fault.errno) => {
                    return;
                }
                Answer::Fault(_) => false,
                _ => true,
            },
            _ => false,
        };
        let sender = (!done).then_some((client, *epoch));
        self.history.cut(file, strips, (client, copies.sent), called, sender);
    }

    fn synced(&mut self, thread: usize, slot: usize, answers: Vec<(Outcome, u32, Copies)>) {
        let client = self.plan.threads[thread].client;
        let (Some(Slot { file, told, .. }), Some(job)) = (self.slots[thread][slot], &self.jobs[thread]) else { return };
        let (called, mark) = (job.called, job.mark);
        let (mut states, mut errno) = (Vec::new(), 0);
        for (outcome, ..) in answers {
            match outcome {
                Outcome::Data(Told::Synced(state, failed)) => {
                    states.push(state);
                    errno = if errno == 0 { failed } else { errno };
                }
                Outcome::Data(Told::Fault(fault)) if fault.errno == libc::EIDRM => {
                    return self.history.told_removed(file);
                }
                // The program is told that the sync has failed, and syncs again.
                _ => return,
            }
        }
        let peer = |_| Ok(Peer { name: String::new(), address: String::new() });
        let unsynced = &self.clients[client].unsynced;
        let judged = unsynced.judge(file, mark, &states, errno, peer);
        let news = unsynced.losses().news(file, told).map(|(loss, _)| loss);
        if let (Some(loss), Some(open)) = (news, &mut self.slots[thread][slot]) {
            open.told = loss;
        }
        match judged.is_err() || news.is_some() {
            true => self.history.all_strips(file, StripOp::Told { client }, called),
            false => self.history.all_strips(file, StripOp::Synced { client }, called),
        }
    }

    /// Reads what there is at the end.
    pub(super) fn look_at_strips(&mut self, file: FileKey, layout: Layout, value: impl Fn(usize, u64) -> Option<u64>) {
        for strip in 0..STRIPS as u64 {
            let (server, at) = layout.locate(strip * STRIP_BYTES);
            let called = self.history.tick();
            if let Some(value) = value(usize::from(server), at) {
                self.history.strip(file, strip, StripOp::Read { value }, called);
            }
        }
    }
}

/// The strips that a write or an append writes.
fn written(op: Op, assigned: Option<u64>) -> Vec<u64> {
    match op {
        Op::Write { first, count, .. } => (first as u64..(first + count) as u64).collect(),
        _ => assigned.into_iter().collect(),
    }
}

/// A call for one strip.
fn data(file: FileKey, layout: &Layout, strip: u64, ask: impl Fn(u64) -> Ask) -> Query {
    let (server, at) = layout.locate(strip * STRIP_BYTES);
    Query::Data { server: usize::from(server), file, ask: ask(at) }
}
