//! What a decoder must survive: one function that the fuzzer, the property tests and the regression tests share.

use crate::frame::{FrameHeader, HEADER_BYTES, Kind, Limits, decode_body, encode_frame};
use crate::{Answer, Call, Hello, KeyOffer, KeyProof, LIST_EXTENTS_MAX, Pass, Welcome};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Debug;

/// Decodes arbitrary bytes as a header and as every kind of body.
///
/// # Panics
/// When the decoder breaks a promise: an accepted header beyond its limits, or a message that does not survive being
/// encoded and decoded again.
pub fn decode_everything(bytes: &[u8]) {
    for max_payload_bytes in [0, 4096, u32::MAX] {
        if let Ok(header) = FrameHeader::decode(bytes, &Limits::of_client(max_payload_bytes)) {
            assert!(header.payload_len <= max_payload_bytes);
            assert!(header.body_len <= header.kind.body_max_bytes());
            assert_eq!(header.encode(), bytes[..HEADER_BYTES]);
        }
    }
    for body in [bytes, bytes.get(HEADER_BYTES..).unwrap_or(&[])] {
        there_and_back::<Hello>(Kind::Hello, body);
        there_and_back::<Welcome>(Kind::Welcome, body);
        there_and_back::<Call>(Kind::Call, body);
        there_and_back::<(Pass, Call)>(Kind::PassedCall, body);
        there_and_back::<KeyOffer>(Kind::Key, body);
        there_and_back::<KeyProof>(Kind::Key, body);
        judge_list(body);
        there_and_back::<Answer>(Kind::Answer, body);
    }
}

/// A list that is accepted holds what was checked and nothing else.
fn judge_list(body: &[u8]) {
    let (extents, max) = match decode_body::<Call>(body) {
        Ok(Call::ReadList { extents, .. } | Call::WriteList { extents, .. }) => (extents, 1 << 26),
        Ok(Call::Prefetch { extents, .. }) => (extents, u64::MAX),
        _ => return,
    };
    if let Ok(bytes) = extents.check(max) {
        assert!(bytes <= max && (1..=LIST_EXTENTS_MAX as u64).contains(&extents.count()));
        assert_eq!(extents.iter().map(|extent| u64::from(extent.1)).sum::<u64>(), bytes);
        assert!(extents.iter().all(|(at, len)| len > 0 && at + u64::from(len) <= i64::MAX as u64));
    }
}

fn there_and_back<T: Serialize + DeserializeOwned + PartialEq + Debug>(kind: Kind, body: &[u8]) {
    let Ok(message) = decode_body::<T>(body) else { return };
    let mut frame = Vec::new();
    // An unusual body may be over the limit; everything else must come back unchanged.
    if encode_frame(kind, 7, &message, 0, &mut frame).is_ok() {
        let again = decode_body::<T>(&frame[HEADER_BYTES..]);
        assert_eq!(again.as_ref(), Ok(&message));
    }
}
