//! The session machines against a reference model: one client, two I/O nodes, a data server and a metadata server, over
//! links that delay, break, lose and recover. Servers restart with what they stored, and forget clients they have not
//! heard from for long.
//!
//! Each I/O node has an ordered connection to the client, and one to the servers. Messages on a connection that the
//! client gave up still arrive, arbitrarily late. The metadata server must do each change at most once; the data server
//! must never let an older write undo a newer acknowledged one; and every call must end in time.

use std::collections::{BTreeMap, VecDeque};

use impresario_node::session::{
    Admission, Call, Epoch, Failure, Fence, Next, Patience, Replies, Rights, Routes, Sign, Silence, Stamp, Step,
    Verdict,
};
use impresario_sched::Nanos;
use proptest::prelude::*;

const MS: u64 = 1_000_000;
const TIMEOUT: Nanos = Nanos(1000 * MS);
const ROUTES: usize = 2;
/// Capacity of the servers' memory: small, so that they forget.
const FENCED: usize = 2;
const CLIENTS: usize = 4;
const REPLIES: usize = 8;
const RIGHTS: Rights = Rights { repeat: true, ours: true, bound: false, again_when_busy: true, changes: true };

/// The kinds of calls.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Kind {
    /// A namespace change: increments a counter.
    Change,
    /// A write of the only block: its sequence.
    Write,
}

/// A copy of a call in flight.
#[derive(Clone, Copy, Debug)]
struct Copy {
    call: usize,
    kind: Kind,
    sequence: u64,
    epoch: u32,
    since: u32,
    connection: u64,
}

/// What the fuzzer does to a link for a while.
#[derive(Clone, Copy, Debug)]
enum Weather {
    Fair,
    /// Messages are delayed, none is lost.
    Stuck,
    /// Connections break, new ones are refused.
    Down,
    /// Requests arrive, answers are lost.
    Deaf,
}

/// The client's side of a connection.
struct Connection {
    number: u64,
    route: usize,
    silence: Silence,
    answered: bool,
    /// Unanswered copies sent on it, including those of calls that have failed since.
    unanswered: u32,
}

struct Flying {
    call: Call,
    kind: Kind,
    sequence: u64,
    began: u64,
    /// Sent on this connection at; otherwise waiting until.
    sent: Option<(u64, u64)>,
    at: u64,
}

struct Model {
    now: u64,
    weather: [Weather; ROUTES],
    epoch: Epoch,
    routes: Routes,
    connection: Option<Connection>,
    connections: u64,
    sequence: u64,
    flying: BTreeMap<usize, Flying>,
    calls: usize,
    /// To the servers, by I/O node; each connection keeps its order.
    there: [VecDeque<Copy>; ROUTES],
    /// Copies on connections that were given up: they arrive in any order.
    stray: Vec<Copy>,
    back: [VecDeque<(Copy, Verdict)>; ROUTES],
    // The servers, and what they did.
    fence: Fence,
    replies: Replies<()>,
    strangers: u64,
    /// Changes in progress, with their end times.
    serving: Vec<(u64, usize, Copy)>,
    done: BTreeMap<u64, u32>,
    block: u64,
    acknowledged: u64,
    ended: Vec<Result<(), Failure>>,
}

impl Model {
    fn new() -> Model {
        Model {
            now: 0,
            weather: [Weather::Fair; ROUTES],
            epoch: Epoch::default(),
            routes: Routes::new(ROUTES, 0),
            connection: None,
            connections: 0,
            sequence: 0,
            flying: BTreeMap::new(),
            calls: 0,
            there: Default::default(),
            stray: Vec::new(),
            back: Default::default(),
            fence: Fence::new(FENCED),
            replies: Replies::new(CLIENTS, REPLIES),
            strangers: 100,
            serving: Vec::new(),
            done: BTreeMap::new(),
            block: 0,
            acknowledged: 0,
            ended: Vec::new(),
        }
    }

    // The client

    fn submit(&mut self, kind: Kind) {
        // One write at a time, so that the block's order is that of sequences.
        if kind == Kind::Write && self.flying.values().any(|f| f.kind == Kind::Write) {
            return;
        }
        self.sequence += 1;
        let call = Call::new(RIGHTS, Nanos(self.now + TIMEOUT.0));
        let flying = Flying { call, kind, sequence: self.sequence, began: self.now, sent: None, at: self.now };
        self.flying.insert(self.calls, flying);
        self.calls += 1;
    }

    fn end(&mut self, number: usize, outcome: Result<(), Failure>) {
        let Some(flying) = self.flying.remove(&number) else { return };
        // Allow for a connection given up at a deadline, and for the clock's steps.
        assert!(self.now <= flying.began + TIMEOUT.0 + 20 * MS, "a call took {} ms", (self.now - flying.began) / MS);
        if outcome.is_err() {
            flying.call.given_up(&self.epoch);
        }
        if outcome.is_ok() {
            match flying.kind {
                Kind::Change => assert_eq!(self.done.get(&flying.sequence), Some(&1), "acknowledged"),
                Kind::Write => {
                    assert!(self.block >= flying.sequence, "acknowledged and not there");
                    self.acknowledged = self.acknowledged.max(flying.sequence);
                }
            }
        }
        self.ended.push(outcome);
    }

    fn break_off(&mut self) {
        let Some(connection) = self.connection.take() else { return };
        // Before anything is repeated.
        if connection.unanswered > 0 {
            self.epoch.give_up();
        }
        self.routes.lost(Nanos(self.now), connection.answered);
        let strays = std::mem::take(&mut self.there[connection.route]);
        match self.weather[connection.route] {
            Weather::Down => {}
            _ => self.stray.extend(strays),
        }
        let numbers: Vec<usize> = self.flying.keys().copied().collect();
        for number in numbers {
            let Some(flying) = self.flying.get_mut(&number).filter(|f| f.sent.is_some()) else { continue };
            flying.sent = None;
            if let Step::Fail(failure) = flying.call.lost(Nanos(self.now), false) {
                self.end(number, Err(failure));
            }
        }
    }

    fn client(&mut self) {
        let now = Nanos(self.now);
        let numbers: Vec<usize> = self.flying.keys().copied().collect();
        for number in numbers {
            let Some(flying) = self.flying.get_mut(&number) else { continue };
            let is_late = now >= flying.call.deadline();
            if let Some((_, sent)) = flying.sent {
                let patience = Patience::new(TIMEOUT, true);
                let Some(connection) = &mut self.connection else { continue };
                match connection.silence.judge(now, Nanos(sent), is_late, &patience) {
                    Sign::GiveUp(_) => self.break_off(),
                    Sign::Ping if matches!(self.weather[connection.route], Weather::Fair) => {
                        connection.silence.heard(now);
                    }
                    Sign::Ping | Sign::Wait => {}
                }
                if is_late {
                    self.end(number, Err(Failure::Late));
                }
                continue;
            }
            if is_late {
                self.end(number, Err(Failure::Late));
            } else if self.now >= flying.at {
                self.send(number);
            }
        }
    }

    fn send(&mut self, number: usize) {
        let now = Nanos(self.now);
        let Some(deadline) = self.flying.get(&number).map(|f| f.call.deadline()) else { return };
        while self.connection.is_none() {
            match self.routes.next(now, deadline, TIMEOUT) {
                Next::Connect { route, .. } if matches!(self.weather[route], Weather::Fair | Weather::Deaf) => {
                    self.routes.opened();
                    self.connections += 1;
                    let silence = Silence::new(now);
                    self.back[route].clear();
                    self.connection =
                        Some(Connection { number: self.connections, route, silence, answered: false, unanswered: 0 });
                }
                Next::Connect { .. } => self.routes.refused(now),
                Next::Wait { .. } | Next::Late => return,
            }
        }
        let (Some(connection), Some(flying)) = (&mut self.connection, self.flying.get_mut(&number)) else { return };
        connection.unanswered += 1;
        let epoch = flying.call.stamp(&self.epoch);
        flying.sent = Some((connection.number, self.now));
        let (kind, sequence) = (flying.kind, flying.sequence);
        let since = flying.call.since();
        let copy = Copy { call: number, kind, sequence, epoch, since, connection: connection.number };
        self.there[connection.route].push_back(copy);
    }

    fn answered(&mut self, copy: Copy, verdict: Verdict) {
        let Some(connection) = self.connection.as_mut().filter(|c| c.number == copy.connection) else { return };
        connection.answered = true;
        connection.unanswered -= 1;
        connection.silence.heard(Nanos(self.now));
        let Some(flying) = self.flying.get_mut(&copy.call).filter(|f| f.sent.is_some()) else { return };
        match flying.call.answered(Nanos(self.now), verdict, &self.epoch) {
            // Forgotten: the error says that it may have been done.
            Step::Answer if verdict == Verdict::Doubtful => self.end(copy.call, Err(Failure::Lost)),
            Step::Answer => self.end(copy.call, Ok(())),
            Step::Again { at, .. } => (flying.sent, flying.at) = (None, at.0),
            Step::Fail(failure) => self.end(copy.call, Err(failure)),
        }
    }

    // The servers

    /// A copy arrives at its server by this route; `None` if its connection is gone.
    fn serve(&mut self, copy: Copy, route: Option<usize>, takes: u64) {
        match copy.kind {
            Kind::Write => {
                let verdict = if self.fence.admit(1, copy.epoch) {
                    assert!(
                        copy.sequence >= self.acknowledged,
                        "write {} undoes write {}, which was acknowledged",
                        copy.sequence,
                        self.acknowledged
                    );
                    self.block = copy.sequence;
                    Verdict::Final
                } else {
                    Verdict::Fenced
                };
                self.reply(copy, route, verdict);
            }
            Kind::Change => {
                let verdict = match self.replies.begin(stamp(1, &copy)) {
                    Admission::New => {
                        let older = self.serving.iter().any(|(_, _, other)| other.epoch < copy.epoch);
                        assert!(!older, "begun while a change of an epoch that was given up is under way");
                        return self.serving.push((self.now + takes, route.unwrap_or(ROUTES), copy));
                    }
                    Admission::Done(()) => Verdict::Final,
                    Admission::Busy => Verdict::Busy,
                    Admission::Fenced => Verdict::Fenced,
                    Admission::Forgotten => Verdict::Doubtful,
                };
                self.reply(copy, route, verdict);
            }
        }
    }

    fn reply(&mut self, copy: Copy, route: Option<usize>, verdict: Verdict) {
        if let Some(back) = route.and_then(|route| self.back.get_mut(route)) {
            back.push_back((copy, verdict));
        }
    }

    fn finish_changes(&mut self) {
        let (over, serving) = std::mem::take(&mut self.serving).into_iter().partition(|(at, ..)| *at <= self.now);
        self.serving = serving;
        let over: Vec<(u64, usize, Copy)> = over;
        for (_, route, copy) in over {
            let times = self.done.entry(copy.sequence).or_insert(0);
            *times += 1;
            assert_eq!(*times, 1, "change {} was done twice", copy.sequence);
            self.replies.end(1, copy.sequence, Some(()));
            self.reply(copy, Some(route), Verdict::Final);
        }
    }

    /// Restarts the data server, and the metadata server with its changes in progress done.
    fn restart(&mut self) {
        let mut fence = Fence::new(FENCED);
        fence.raise_base(self.fence.base());
        self.fence.remembered().for_each(|(client, epoch)| fence.remember(client, epoch));
        self.fence = fence;
        self.serving.iter_mut().for_each(|(at, ..)| *at = self.now);
        self.finish_changes();
        let mut replies = Replies::new(CLIENTS, REPLIES);
        self.replies.kept().for_each(|kept| replies.restore(kept));
        self.replies = replies;
    }

    /// Other clients, which have given something up before, begin epochs until one is accepted.
    fn crowd(&mut self, strangers: u64) {
        for client in self.strangers..self.strangers + strangers {
            self.fence.admit(client, self.fence.base() + u32::from(client % 3 == 0));
            let epoch = self.replies.epoch_of(client);
            let change = Stamp { client, epoch, since: epoch, sequence: 1 };
            if self.replies.begin(change) == Admission::New {
                self.replies.end(client, 1, Some(()));
            }
        }
        self.strangers += strangers;
    }

    // The network

    fn carry(&mut self, takes: u64) {
        for route in 0..ROUTES {
            let weather = self.weather[route];
            if matches!(weather, Weather::Down) && self.connection.as_ref().is_some_and(|c| c.route == route) {
                self.break_off();
            }
            if matches!(weather, Weather::Fair | Weather::Deaf)
                && let Some(copy) = self.there[route].pop_front()
            {
                self.serve(copy, Some(route), takes);
            }
            match weather {
                Weather::Fair => {
                    if let Some((copy, verdict)) = self.back[route].pop_front() {
                        self.answered(copy, verdict);
                    }
                }
                Weather::Deaf | Weather::Down => self.back[route].clear(),
                Weather::Stuck => {}
            }
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Input {
    Submit(Kind),
    Weather(usize, Weather),
    /// A copy on a connection that was given up arrives now.
    Stray(usize),
    /// The servers restart.
    Restart,
    /// This many other clients arrive.
    Crowd(u64),
    /// Time passes, milliseconds; a change takes this long.
    Pass(u64, u64),
}

fn stamp(client: u64, copy: &Copy) -> Stamp {
    Stamp { client, epoch: copy.epoch, since: copy.since, sequence: copy.sequence }
}

fn inputs() -> impl Strategy<Value = Vec<Input>> {
    let kind = prop_oneof![Just(Kind::Change), Just(Kind::Write)];
    let weather = prop_oneof![
        4 => Just(Weather::Fair),
        2 => Just(Weather::Stuck),
        1 => Just(Weather::Down),
        1 => Just(Weather::Deaf)
    ];
    let input = prop_oneof![
        4 => kind.prop_map(Input::Submit),
        2 => (0..ROUTES, weather).prop_map(|(route, weather)| Input::Weather(route, weather)),
        3 => any::<usize>().prop_map(Input::Stray),
        1 => Just(Input::Restart),
        1 => (1u64..15).prop_map(Input::Crowd),
        5 => (1u64..700, 1u64..300).prop_map(|(ms, takes)| Input::Pass(ms, takes)),
    ];
    proptest::collection::vec(input, 1..120)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn changes_are_done_once_writes_never_go_back_and_calls_end_in_time(inputs in inputs()) {
        let mut model = Model::new();
        let pass = |model: &mut Model, ms: u64, takes: u64| {
            for _ in 0..ms.div_ceil(5) {
                model.now += 5 * MS;
                model.carry(takes * MS);
                model.finish_changes();
                model.client();
            }
        };
        for input in inputs {
            match input {
                Input::Submit(kind) => model.submit(kind),
                Input::Weather(route, weather) => model.weather[route] = weather,
                Input::Stray(which) if !model.stray.is_empty() => {
                    let copy = model.stray.swap_remove(which % model.stray.len());
                    model.serve(copy, None, 50 * MS);
                }
                Input::Stray(_) => {}
                Input::Restart => model.restart(),
                Input::Crowd(strangers) => model.crowd(strangers),
                Input::Pass(ms, takes) => pass(&mut model, ms, takes),
            }
        }
        // In the end all copies in flight arrive, and no call hangs.
        while let Some(copy) = model.stray.pop() {
            model.serve(copy, None, 0);
        }
        pass(&mut model, 1200, 1);
        prop_assert!(model.flying.is_empty(), "a call has not ended");
        prop_assert!(model.done.values().all(|times| *times == 1));
        // On healthy links calls succeed.
        model.weather = [Weather::Fair; ROUTES];
        model.submit(Kind::Change);
        model.submit(Kind::Write);
        pass(&mut model, 1200, 1);
        let last = &model.ended[model.ended.len().saturating_sub(2)..];
        prop_assert!(last.iter().all(Result::is_ok), "{last:?}");
    }
}
