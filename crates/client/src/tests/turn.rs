//! One thread sends for the others.

use std::time::{Duration, Instant};

use crate::turn::{Outgoing, Put};

/// Beyond this a queue is full, bytes.
const QUEUE_MAX_BYTES: usize = 256 << 10;

fn put(outgoing: &Outgoing, bytes: &[u8]) -> Option<Vec<u8>> {
    match outgoing.put(bytes, Instant::now()) {
        Put::Queued => None,
        Put::Turn(mut turn) => {
            let mut all = turn.batch.clone();
            while turn.next() {
                all.extend_from_slice(&turn.batch);
            }
            Some(all)
        }
        Put::Late => panic!("nothing waits"),
    }
}

#[test]
fn who_has_the_turn_sends_for_the_others() {
    let outgoing = Outgoing::default();
    assert_eq!(put(&outgoing, b"a").unwrap(), b"a");
    let mut turn = outgoing.take(Instant::now()).unwrap();
    assert!(put(&outgoing, b"b").is_none() && put(&outgoing, b"c").is_none());
    assert!(outgoing.take(Instant::now() + Duration::from_millis(20)).is_none());
    assert!(turn.next());
    assert_eq!(turn.batch, b"bc");
    assert!(!turn.next());
    assert_eq!(put(&outgoing, b"d").unwrap(), b"d");
}

#[test]
fn a_turn_that_fails_takes_the_queue_with_it() {
    let outgoing = Outgoing::default();
    let turn = outgoing.take(Instant::now()).unwrap();
    assert!(put(&outgoing, b"lost").is_none());
    drop(turn);
    assert_eq!(put(&outgoing, b"next").unwrap(), b"next");
}

#[test]
fn the_queue_is_bounded() {
    let outgoing = Outgoing::default();
    let turn = outgoing.take(Instant::now()).unwrap();
    assert!(put(&outgoing, &vec![0; QUEUE_MAX_BYTES + 1]).is_none());
    assert!(matches!(outgoing.put(b"x", Instant::now()), Put::Late));
    drop(turn);
}

#[test]
fn what_is_queued_leaves_when_asked_for_or_with_the_next() {
    let outgoing = Outgoing::default();
    assert!(outgoing.take_queued().is_none());
    assert!(outgoing.queue(b"a") && outgoing.queue(b"b"));
    let mut turn = outgoing.take_queued().unwrap();
    assert_eq!(turn.batch, b"ab");
    // Another thread sends it: the one that has the turn.
    assert!(outgoing.queue(b"c") && outgoing.take_queued().is_none());
    assert!(turn.next());
    assert_eq!(turn.batch, b"c");
    assert!(!turn.next());
    assert!(outgoing.queue(b"d"));
    assert_eq!(put(&outgoing, b"e").unwrap(), b"ed");
    assert!(outgoing.queue(&vec![0; QUEUE_MAX_BYTES + 1]) && !outgoing.queue(b"x"));
}
