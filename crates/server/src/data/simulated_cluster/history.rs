//! What happened and what clients were told, as histories of names and of the strips of files, and whether these can be explained.
//! Times are numbers of what was recorded: everything happens in one thread, one thing after another.

use std::collections::{BTreeMap, BTreeSet};

use impresario_layout::Layout;
use impresario_testing::linear::{Event, Model, Verdict, check};
use impresario_wire::FileKey;

use super::model::{NameOp, NameSpace, Named, Names, Register, Seen, Strip, StripOp};
use super::plan::{DATA_SERVERS, STRIP_BYTES, STRIPS};
use super::world::Copies;

/// Configurations that the check of one history may come to.
const CONFIGURATIONS_MAX: usize = 200_000;
/// Strips of a file that are watched: what is appended lies behind those that are written.
const WATCHED: u64 = 4 * STRIPS as u64;

/// Of what was sent more often, so many copies are taken to be under way: more would make histories too large to be checked.
const COPIES_MAX: u64 = 3;

/// Why a history is wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Wrong {
    /// No order of the operations explains what was told of names.
    Names(String),
    /// Nor what was read of a strip, or what a power failure left of it.
    Bytes(String),
    /// Two appends got the same range.
    Appended(String),
    /// An object of a removed file is there, or one of a file that has a name is removed.
    Removed(String),
}

/// What was checked.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Checked {
    pub(super) events: u64,
    pub(super) undecided: u64,
}

/// An operation that may have been done or not, or may be done yet.
struct Doubtful {
    of: Of,
    client: usize,
    epoch: u32,
    /// At which server it ends.
    server: usize,
}

#[derive(Clone, Copy)]
enum Of {
    Name(usize),
    Strip(FileKey, u64, usize),
}

/// A write that was sent more than once and is done: should its server's machine fail before a sync, it forgets that older
/// copies are refused, and what a client that must be told has written may come back.
struct Repeated {
    file: FileKey,
    strip: u64,
    value: u64,
    server: usize,
    at: u64,
}

#[derive(Default)]
pub(super) struct History {
    clock: u64,
    names: Vec<Event<Named>>,
    strips: BTreeMap<FileKey, Vec<Vec<Event<StripOp>>>>,
    layouts: BTreeMap<FileKey, Layout>,
    doubtful: Vec<Doubtful>,
    repeated: Vec<Repeated>,
    /// When a data server made something durable last, its notes too.
    synced: [u64; DATA_SERVERS],
    assigned: BTreeSet<(FileKey, u64)>,
    pub(super) wrong: Option<Wrong>,
    /// Files of which a client was told that they are removed.
    told_removed: BTreeSet<FileKey>,
    /// Files that were cut, or whose server's machine failed: their end has moved back.
    shortened: BTreeSet<FileKey>,
}

impl History {
    pub(super) fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// From now on the strips of this file are watched.
    pub(super) fn knows(&mut self, file: FileKey, layout: Layout) {
        self.layouts.insert(file, layout);
        self.strips.entry(file).or_insert_with(|| (0..WATCHED).map(|_| Vec::new()).collect());
    }

    pub(super) fn files(&self) -> Vec<(FileKey, Layout)> {
        self.layouts.iter().map(|(file, layout)| (*file, *layout)).collect()
    }

    pub(super) fn name(&mut self, id: u64, op: NameOp, seen: Seen, called: u64, doubt: (usize, u32, usize)) {
        let is_certain = seen != Seen::Unknown;
        let ended = is_certain.then(|| self.tick());
        if !is_certain {
            let (client, epoch, server) = doubt;
            self.doubtful.push(Doubtful { of: Of::Name(self.names.len()), client, epoch, server });
        }
        self.names.push(Event { operation: Named { id, op, seen }, called, ended, is_certain });
    }

    fn server_of(&self, file: FileKey, strip: u64) -> usize {
        self.layouts.get(&file).map_or(0, |layout| usize::from(layout.locate(strip * STRIP_BYTES).0))
    }

    fn push(&mut self, file: FileKey, strip: u64, event: Event<StripOp>) -> Option<usize> {
        let events = self.strips.get_mut(&file)?.get_mut(strip as usize)?;
        events.push(event);
        Some(events.len() - 1)
    }

    /// A client was told of something that was done to a strip.
    pub(super) fn strip(&mut self, file: FileKey, strip: u64, operation: StripOp, called: u64) {
        let ended = Some(self.tick());
        self.push(file, strip, Event { operation, called, ended, is_certain: true });
    }

    /// A write was done that may have been sent more than once.
    pub(super) fn written(
        &mut self,
        file: FileKey,
        strip: u64,
        (value, client): (u64, usize),
        called: u64,
        copies: Copies,
    ) {
        self.strip(file, strip, StripOp::Write { value, by: Some(client) }, called);
        if copies.sent > 1 {
            if !copies.one_run {
                // Several copies may have been done, each before the write has returned.
                self.maybe_written(file, strip, value, called, None);
            }
            let (server, at) = (self.server_of(file, strip), self.clock);
            self.repeated.push(Repeated { file, strip, value, server, at });
        }
    }

    /// A strip may have got a value; with a client and its epoch it may get it yet.
    pub(super) fn maybe_written(
        &mut self,
        file: FileKey,
        strip: u64,
        value: u64,
        called: u64,
        sender: Option<(usize, u32)>,
    ) {
        let ended = if sender.is_none() { Some(self.tick()) } else { None };
        let operation = StripOp::Write { value, by: None };
        let server = self.server_of(file, strip);
        let event = self.push(file, strip, Event { operation, called, ended, is_certain: false });
        if let (Some(event), Some((client, epoch))) = (event, sender) {
            self.doubtful.push(Doubtful { of: Of::Strip(file, strip, event), client, epoch, server });
        }
    }

    /// The same of something that was sent more than once: each copy may be done yet.
    pub(super) fn copies_maybe_written(
        &mut self,
        file: FileKey,
        strip: u64,
        (value, copies): (u64, u64),
        called: u64,
        sender: Option<(usize, u32)>,
    ) {
        (0..copies.clamp(1, COPIES_MAX)).for_each(|_| self.maybe_written(file, strip, value, called, sender));
    }

    /// A file is being cut: ranges behind its end may be assigned again.
    pub(super) fn shortens(&mut self, file: FileKey) {
        self.shortened.insert(file);
    }

    /// A file was cut, or with a sender may be or have been.
    pub(super) fn cut(
        &mut self,
        file: FileKey,
        strips: u64,
        (client, copies): (usize, u64),
        called: u64,
        sender: Option<(usize, u32)>,
    ) {
        for strip in strips..WATCHED {
            match sender {
                None => {
                    self.strip(file, strip, StripOp::Write { value: 0, by: Some(client) }, called);
                    if copies > 1 {
                        // Of an earlier copy that some data server did not answer.
                        self.maybe_written(file, strip, 0, called, None);
                    }
                }
                Some(_) => self.copies_maybe_written(file, strip, (0, copies), called, sender),
            }
        }
    }

    /// Something is true of all strips of a file.
    pub(super) fn all_strips(&mut self, file: FileKey, operation: StripOp, called: u64) {
        (0..WATCHED).for_each(|strip| self.strip(file, strip, operation, called));
    }

    /// A server has answered a client's request of this epoch: what the client gave up in older ones is done by now, or never.
    pub(super) fn revoked(&mut self, client: usize, epoch: u32, server: usize) {
        let now = self.clock;
        let is_over = |one: &mut Doubtful| one.client == client && one.epoch < epoch && one.server == server;
        let over: Vec<Doubtful> = self.doubtful.extract_if(.., is_over).collect();
        for Doubtful { of, .. } in over {
            match of {
                Of::Name(event) => self.names[event].ended = Some(now),
                Of::Strip(file, strip, event) => {
                    if let Some(events) = self.strips.get_mut(&file).and_then(|all| all.get_mut(strip as usize)) {
                        events[event].ended = Some(now);
                    }
                }
            }
        }
    }

    /// A data server has made something durable.
    pub(super) fn synced(&mut self, server: usize) {
        self.synced[server] = self.tick();
    }

    pub(super) fn told_removed(&mut self, file: FileKey) {
        self.told_removed.insert(file);
    }

    /// The metadata server has given an append this range.
    pub(super) fn assigned(&mut self, file: FileKey, offset: u64) {
        if !self.assigned.insert((file, offset)) && !self.shortened.contains(&file) {
            self.wrong.get_or_insert(Wrong::Appended(format!("{offset} of {file:?} was assigned twice")));
        }
    }

    /// The machine of a data server has failed, and its device has these values.
    pub(super) fn power_failed(&mut self, server: usize, value: impl Fn(FileKey, u64) -> Option<u64>) {
        let (now, since) = (self.tick(), self.synced[server]);
        for (file, layout) in self.files() {
            self.shortened.insert(file);
            for strip in 0..WATCHED {
                let (at, lane_offset) = layout.locate(strip * STRIP_BYTES);
                if usize::from(at) != server {
                    continue;
                }
                // It has forgotten what it was told to refuse after the last sync.
                let events = self.strips.get_mut(&file).and_then(|all| all.get_mut(strip as usize));
                for event in events.into_iter().flatten().filter(|event| !event.is_certain) {
                    if event.ended.is_some_and(|ended| ended > since) {
                        event.ended = None;
                    }
                }
                let Some(value) = value(file, lane_offset) else { continue };
                let operation = StripOp::PowerFailed { value };
                self.push(file, strip, Event { operation, called: now, ended: Some(now), is_certain: true });
            }
        }
        let forgotten = self.repeated.extract_if(.., |one| one.server == server && one.at > since);
        for Repeated { file, strip, value, .. } in forgotten.collect::<Vec<_>>() {
            let operation = StripOp::Write { value, by: None };
            self.push(file, strip, Event { operation, called: now, ended: None, is_certain: false });
        }
    }

    /// Files that have names at the end.
    pub(super) fn judge_removed(&mut self, named: &BTreeSet<FileKey>, has: impl Fn(usize, FileKey) -> bool) {
        let files = self.files();
        let left = files.iter().find_map(|(file, _)| {
            let server = (0..DATA_SERVERS).find(|server| has(*server, *file))?;
            (!named.contains(file)).then(|| format!("data.{server} has an object of {file:?}, which is removed"))
        });
        let lost = self.told_removed.intersection(named).next();
        let lost = lost.map(|file| format!("{file:?} has a name, and its objects are removed"));
        if let Some(why) = left.or(lost) {
            self.wrong.get_or_insert(Wrong::Removed(why));
        }
    }

    /// Whether everything can be explained.
    pub(super) fn check(mut self, may_fail: bool) -> Result<Checked, Wrong> {
        if let Some(wrong) = self.wrong.take() {
            return Err(wrong);
        }
        let mut checked = Checked::default();
        explained(&NameSpace { may_fail }, &Names::default(), &self.names, &mut checked).map_err(Wrong::Names)?;
        for (file, strips) in &self.strips {
            for (strip, events) in strips.iter().enumerate() {
                // Nothing but zeros.
                if events.iter().all(|event| matches!(event.operation, StripOp::Synced { .. } | StripOp::Told { .. })) {
                    continue;
                }
                explained(&Register, &Strip::default(), events, &mut checked)
                    .map_err(|why| Wrong::Bytes(format!("strip {strip} of {file:?}:\n{why}")))?;
            }
        }
        Ok(checked)
    }
}

fn explained<M: Model>(
    model: &M,
    start: &M::State,
    events: &[Event<M::Operation>],
    checked: &mut Checked,
) -> Result<(), String>
where
    M::Operation: std::fmt::Debug,
{
    checked.events += events.len() as u64;
    let lines = |of: &[usize]| {
        let line = |at: &usize| {
            let Event { operation, called, ended, is_certain } = &events[*at];
            let until = ended.map_or("?".into(), |ended| ended.to_string());
            format!("  {called} to {until}: {operation:?}{}", if *is_certain { "" } else { ", perhaps" })
        };
        of.iter().map(line).collect::<Vec<_>>().join("\n")
    };
    match check(model, start, events, CONFIGURATIONS_MAX) {
        Verdict::Linearizable(_) => Ok(()),
        Verdict::Undecided => {
            checked.undecided += 1;
            Ok(())
        }
        Verdict::Broken { order, next } => {
            Err(format!("as far as it goes:\n{}\nwhat cannot come next:\n{}", lines(&order), lines(&next)))
        }
    }
}
