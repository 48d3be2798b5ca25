//! Arbitrary bytes as what an interposed program and the advice manager send each other: messages, orders, answers and lists of
//! patterns. No panic, and what is accepted survives being encoded and decoded again.
#![no_main]

use impresario_ring::message::{ToClient, ToManager};
use impresario_ring::order;
use impresario_ring::patterns::Patterns;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(message) = ToManager::decode(bytes) {
        assert_eq!(ToManager::decode(message.encode().as_bytes()), Ok(message));
        assert!(message.descriptors() <= 2);
    }
    if let Ok(message) = ToClient::decode(bytes) {
        assert_eq!(ToClient::decode(message.encode().as_bytes()), Ok(message));
    }
    if let Ok(task) = order::decode(bytes) {
        assert_eq!(order::decode(order::encode(&task).as_bytes()).as_ref(), Ok(&task));
    }
    if let Ok(answer) = order::Answer::decode(bytes) {
        assert_eq!(order::Answer::decode(&answer.encode()), Ok(answer));
    }
    // The list first, a path after its first byte: 0 to 255 bytes of it.
    let Some((len, rest)) = bytes.split_first() else { return };
    let (path, list) = rest.split_at(usize::from(*len).min(rest.len()));
    for list in [list, bytes] {
        let Some(patterns) = Patterns::parse(list) else { continue };
        let mut patterns_seen = 0;
        patterns.for_each(|_, pattern| {
            assert!(pattern.len() <= list.len());
            patterns_seen += 1;
        });
        assert!(patterns.first_match(path).is_none_or(|at| at < patterns_seen));
        assert_eq!(patterns.matches(path), patterns.first_match(path).is_some());
        let _ = (patterns.of_small_files(), patterns.match_everything());
    }
});
