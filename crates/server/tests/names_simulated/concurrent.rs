//! Threads that call the metadata server at the same time. Their calls overlap in it, which in virtual time they do not.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};

use impresario_base::Random;
use impresario_base::lock::Mutex;
use impresario_server::meta::{Fate, MetaOptions, StepHook};
use impresario_testing::linear::Event;
use impresario_wire::message::{Answer, ClientKey, NodeKind, Who};

use crate::meta_support;
use crate::model::Told;
use crate::plan::{Op, kind_of};
use crate::world::{History, folder};

const THREADS: u64 = 4;
const OPERATIONS: u64 = 12;

pub fn run(seed: u64) -> History {
    let dir = folder();
    let objects = Arc::default();
    let hook: StepHook = Arc::new(|step| if step.starts_with("sync") { Fate::LeftOut } else { Fate::Done });
    let options = MetaOptions { before_step: Some(hook), ..MetaOptions::new(dir.path(), meta_support::SERVERS) };
    let server = meta_support::start_with(options, objects);
    let (clock, history) = (AtomicU64::new(0), Mutex::new(History::new()));
    let begin = Barrier::new(THREADS as usize);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (server, clock, history, begin) = (&server, &clock, &history, &begin);
            scope.spawn(move || {
                let mut draws = Random::new(seed.wrapping_mul(THREADS) + thread);
                let session = server.service.open_session(Who::default()).expect("a session");
                begin.wait();
                for sequence in 1..=OPERATIONS {
                    let op = loop {
                        match Op::draw(&mut draws) {
                            // What is made in a directory that is renamed at that moment may be in it under its new name.
                            Op::Rename { from, .. } | Op::Exchange { from, .. } if kind_of(from) == NodeKind::Dir => {}
                            op @ (Op::Create { .. }
                            | Op::Open { .. }
                            | Op::Unlink { .. }
                            | Op::Rename { .. }
                            | Op::Exchange { .. }
                            | Op::Mkdir { .. }
                            | Op::Rmdir { .. }) => break op,
                            // As in every local file system, a listing is not of one instant, and neither is what begins with a
                            // name and goes on with what it named.
                            _ => {}
                        }
                    };
                    let who = Who { client: ClientKey(7 + thread), sequence, ..Who::default() };
                    let called = clock.fetch_add(1, Ordering::SeqCst);
                    let answer = loop {
                        match server.service.call_from(session, who, op.call()) {
                            Answer::Fault(busy) if busy.errno == libc::EBUSY => std::thread::yield_now(),
                            answer => break answer,
                        }
                    };
                    let ended = Some(clock.fetch_add(1, Ordering::SeqCst));
                    let id = thread * OPERATIONS + sequence;
                    let mut history = history.lock();
                    let seen = history.note(id, op, answer);
                    history.events.push(Event { operation: Told { id, op, seen }, called, ended, is_certain: true });
                }
                server.service.close_session(session);
            });
        }
    });
    let mut history = history.into_inner();
    history.look_at_all(&server.service, clock.into_inner());
    let objects = server.objects.clone();
    drop(server);
    history.look_at_folder(dir.path(), &objects);
    history
}
