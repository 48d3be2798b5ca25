//! A plan: what clients do to a few objects, and what goes wrong meanwhile. All of it follows from a seed, and a part of a plan
//! is a plan, so that one that fails can be made smaller.

use impresario_base::Random;

pub(super) const CLIENTS: usize = 3;
/// Times that a client has an object open.
pub(super) const HANDLES: usize = 2;
pub(super) const OBJECTS: usize = 2;
/// Of an object that plans use, each written as a whole or not by a device.
pub(super) const SECTORS: usize = 24;
pub(super) const SECTOR_BYTES: u64 = 512;
/// Steps that a client waits for the answers to a sync, at most.
const LATE_MAX: usize = 6;
/// Of a device that is soon full: it has room for the notes and the marks of syncs, some 132 KiB, and not for all of the objects.
const SMALL_BYTES: u64 = 148 << 10;

/// Sectors of an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Span {
    pub(super) object: usize,
    pub(super) first: usize,
    pub(super) count: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    Write {
        client: usize,
        span: Span,
        /// A client syncs the object through one of its open files between two parts of the write, as the scheduler may
        /// have it.
        between: Option<(usize, usize)>,
    },
    /// The metadata server cuts an object, or extends it, to so many sectors, in the name of a client.
    Cut {
        client: usize,
        object: usize,
        sectors: usize,
    },
    Punch {
        client: usize,
        span: Span,
    },
    /// Through one of the client's open files. The server answers at once, and the client has all answers that it needs after so
    /// many more steps: those of other servers may be late.
    Sync {
        client: usize,
        object: usize,
        handle: usize,
        late: usize,
    },
    Read {
        object: usize,
    },
    /// A client closes a file and opens it again.
    Reopen {
        client: usize,
        object: usize,
        handle: usize,
    },
    /// A client gives something up.
    NewEpoch {
        client: usize,
    },
    /// The server settles checksums in the background.
    Settle,
    /// The system writes some of what is dirty by itself, or fails to.
    WriteBack {
        seed: u64,
        fails: bool,
    },
    /// What the next syncs are to write cannot be written, or can again.
    SyncsFail(bool),
    /// After so many changes of the disk one fails, or all do until the machine is started again.
    Fail {
        after: u64,
        errno: i32,
        lasts: bool,
    },
    /// The server is killed in the next call, after so many changes of the disk, and started again.
    KillIn {
        after: u64,
    },
    /// The server is killed between two calls.
    Kill,
    /// The machine loses its power; what is not durable survives or not by a draw from the seed.
    Crash {
        seed: u64,
    },
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Plan {
    pub(super) checksums: bool,
    /// Of the device.
    pub(super) capacity_bytes: u64,
    pub(super) steps: Vec<Step>,
}

impl Plan {
    pub(super) fn of_seed(seed: u64) -> Plan {
        let mut draws = Random::new(seed ^ 0x6469_736b);
        let count = 10 + draws.below(60);
        let is_small = draws.below(5) == 0;
        // Faults are seldom or frequent.
        let faults = 2 + draws.below(30);
        Plan {
            checksums: draws.below(3) == 0,
            capacity_bytes: if is_small { SMALL_BYTES } else { 1 << 20 },
            steps: (0..count).map(|_| Step::draw(&mut draws, faults)).collect(),
        }
    }

    /// The same with no answer late.
    pub(super) fn with_prompt_answers(mut self) -> Plan {
        for step in &mut self.steps {
            if let Step::Sync { late, .. } = step {
                *late = 0;
            }
        }
        self
    }

    /// The same with every write done at once.
    pub(super) fn with_whole_writes(mut self) -> Plan {
        for step in &mut self.steps {
            if let Step::Write { between, .. } = step {
                *between = None;
            }
        }
        self
    }

    /// Plans with less in them, those that lack most first.
    pub(super) fn smaller(&self) -> Vec<Plan> {
        let len = self.steps.len();
        let mut found = Vec::new();
        let mut size = len / 2;
        while size > 0 {
            for start in (0..len).step_by(size) {
                let mut plan = self.clone();
                plan.steps.drain(start..(start + size).min(len));
                found.push(plan);
            }
            size /= 2;
        }
        for plan in [self.clone().with_prompt_answers(), self.clone().with_whole_writes()] {
            found.extend((plan != *self).then_some(plan));
        }
        found.extend(self.checksums.then(|| Plan { checksums: false, ..self.clone() }));
        found
    }
}

impl Step {
    fn draw(draws: &mut Random, faults: u64) -> Step {
        let mut below = |n: usize| draws.below(n as u64) as usize;
        let (client, object, handle) = (below(CLIENTS), below(OBJECTS), below(HANDLES));
        let first = below(SECTORS);
        let span = Span { object, first, count: 1 + below(SECTORS - first).min(below(9)) };
        if draws.below(100) < faults {
            return match draws.below(10) {
                0..3 => Step::WriteBack { seed: draws.next_u64(), fails: draws.below(3) > 0 },
                3 => Step::SyncsFail(draws.below(2) == 0),
                4 => {
                    let errno = [libc::EIO, libc::ENOSPC, libc::EROFS][draws.below(3) as usize];
                    Step::Fail { after: draws.below(6), errno, lasts: draws.below(4) == 0 }
                }
                5..7 => Step::KillIn { after: draws.below(6) },
                7 => Step::Kill,
                _ => Step::Crash { seed: draws.next_u64() },
            };
        }
        match draws.below(100) {
            draw @ 0..40 => {
                let by = ((client + draw as usize) % CLIENTS, handle);
                Step::Write { client, span, between: (draw < 8 && span.count > 1).then_some(by) }
            }
            40..46 => Step::Cut { client, object, sectors: first },
            46..52 => Step::Punch { client, span },
            52..80 => Step::Sync { client, object, handle, late: first.saturating_sub(SECTORS - LATE_MAX - 1) },
            80..90 => Step::Read { object },
            90..94 => Step::Reopen { client, object, handle },
            94..96 => Step::NewEpoch { client },
            96..98 => Step::Settle,
            _ => Step::WriteBack { seed: draws.next_u64(), fails: false },
        }
    }
}
