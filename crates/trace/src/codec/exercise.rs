//! The decoder's robustness check, shared by the fuzzer and the property tests.

use super::encode::checksum;
use super::*;

/// Decodes arbitrary bytes: as a trace, as the continuation of a trace, and as blocks with correct checksums, each
/// preceded by a byte for its kind and two for its length.
///
/// # Panics
/// If the decoder breaks a promise: it makes no progress, returns more than the bytes can hold, refers to undefined
/// files or origins, or returns what cannot be written and read again.
pub fn decode_everything(bytes: &[u8]) {
    decode(bytes);
    let mut begun = MAGIC.to_vec();
    begun.push(VERSION);
    begun.extend(bytes);
    decode(&begun);
    let mut blocks = Encoder::new(&Header::default()).sealed().to_vec();
    let mut rest = bytes;
    while let Some((&[kind, low, high], after)) = rest.split_first_chunk() {
        let len = usize::from(u16::from_le_bytes([low, high])).min(after.len());
        let (payload, after) = after.split_at(len);
        let frame = [kind, len as u8, (len >> 8) as u8, 0];
        blocks.extend(frame);
        blocks.extend(checksum(&frame, payload).to_le_bytes());
        blocks.extend(payload);
        rest = after;
    }
    decode(&blocks);
}

fn decode(bytes: &[u8]) {
    let mut decoder = Decoder::new();
    let mut records = Vec::new();
    let mut rest = bytes;
    loop {
        let before = records.len();
        match decoder.step(rest, &mut records) {
            Ok(Step::Used(n) | Step::Closed(n)) => {
                assert!(n > 0 && n <= rest.len(), "it goes no further");
                rest = &rest[n..];
            }
            Ok(Step::Need(n)) => {
                assert!(n > rest.len(), "it asks for what it has");
                break;
            }
            Err(_) => {
                assert_eq!(records.len(), before, "it gives records of a block that it refuses");
                break;
            }
        }
    }
    // A record or a definition takes at least two bytes.
    let (files, origins) = (decoder.files(), decoder.origins());
    assert!(records.len() + files.len() + origins.len() <= bytes.len() / 2);
    let known = |r: &Record| (r.file.0 as usize) < files.len() && (r.origin.0 as usize) < origins.len();
    assert!(records.iter().all(known), "a record of a file or origin that was not defined");
    there_and_back(&records);
}

/// Decoded records survive encoding and decoding.
fn there_and_back(records: &[Record]) {
    let mut encoder = Encoder::new(&Header::default());
    let most = |number: fn(&Record) -> u32| records.iter().map(number).max().map_or(0, |most| most + 1);
    for n in 0..most(|r| r.file.0) {
        let file = FileInfo { key: u64::from(n) + 1, ..FileInfo::default() };
        assert!(encoder.define_file(&file).is_ok());
    }
    for n in 0..most(|r| r.origin.0) {
        let origin = Origin { process: n, ..Origin::default() };
        assert!(encoder.define_origin(&origin).is_ok());
    }
    let written = records.iter().take_while(|record| encoder.push(record).is_ok()).count();
    encoder.finish();
    let (mut decoder, mut again, mut rest) = (Decoder::new(), Vec::new(), encoder.sealed());
    while !decoder.is_closed() {
        match decoder.step(rest, &mut again) {
            Ok(Step::Used(n) | Step::Closed(n)) => rest = &rest[n..],
            other => panic!("what was written is not read: {other:?}"),
        }
    }
    assert_eq!(again, records[..written]);
}
