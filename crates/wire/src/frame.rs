//! Frames: how messages are cut out of a byte stream.
//!
//! A frame is a header of 24 bytes, a body (one message, encoded with postcard) and a payload (bulk data, passed on
//! as it is). Numbers are little-endian:
//!
//! | bytes | field |
//! |---|---|
//! | 0–3 | magic, `IMP1` |
//! | 4 | kind |
//! | 5–7 | reserved, zero |
//! | 8–15 | id: an answer carries the id of its call |
//! | 16–19 | length of the body |
//! | 20–23 | length of the payload |
//!
//! Everything here is a pure function of bytes. Lengths are checked before anything is allocated or awaited, so a
//! frame that claims 4 GiB costs its sender the connection and the receiver no memory.

use serde::Serialize;
use serde::de::DeserializeOwned;

/// First four bytes of every frame.
pub const MAGIC: [u8; 4] = *b"IMP1";
/// Length of a header, bytes.
pub const HEADER_BYTES: usize = 24;
/// Longest body of a frame that is not an answer, bytes.
pub const BODY_MAX_BYTES: u32 = 64 << 10;
/// Longest body of a frame of the hand-shake, bytes: what a peer may send before it has proved anything.
pub const HANDSHAKE_BODY_MAX_BYTES: u32 = 4 << 10;
/// Longest body of an answer, bytes: directories and statistics are longer than any call.
pub const ANSWER_BODY_MAX_BYTES: u32 = 1 << 20;

/// What the body of a frame is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Kind {
    /// A [`Hello`](crate::Hello).
    Hello = 1,
    /// A [`Welcome`](crate::Welcome).
    Welcome = 2,
    /// A [`Call`](crate::Call).
    Call = 3,
    /// An [`Answer`](crate::Answer).
    Answer = 4,
    /// A [`KeyOffer`](crate::KeyOffer), or a [`KeyProof`](crate::KeyProof) in reply.
    Key = 5,
    /// A [`Pass`](crate::Pass) and the [`Call`](crate::Call) that it is shown with.
    PassedCall = 6,
}

impl Kind {
    /// Longest body of a frame of this kind, bytes.
    pub fn body_max_bytes(self) -> u32 {
        match self {
            Kind::Answer => ANSWER_BODY_MAX_BYTES,
            Kind::Call | Kind::PassedCall => BODY_MAX_BYTES,
            Kind::Hello | Kind::Welcome | Kind::Key => HANDSHAKE_BODY_MAX_BYTES,
        }
    }

    fn of(byte: u8) -> Option<Kind> {
        match byte {
            1 => Some(Kind::Hello),
            2 => Some(Kind::Welcome),
            3 => Some(Kind::Call),
            4 => Some(Kind::Answer),
            5 => Some(Kind::Key),
            6 => Some(Kind::PassedCall),
            _ => None,
        }
    }
}

/// Why bytes are not a frame of ours, or a message cannot be put into one.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FrameError {
    /// The stream does not begin with our magic.
    #[error(
        "this is not an Impresario peer: its frame begins with {found:02x?}, not {:02x?} (\"IMP1\"); check the address",
        MAGIC
    )]
    BadMagic {
        /// The first four bytes.
        found: [u8; 4],
    },
    /// No such kind.
    #[error("frame kind {kind} is unknown; the peer may speak another version")]
    UnknownKind {
        /// The kind byte.
        kind: u8,
    },
    /// Bytes 5 to 7 of a header are not zero.
    #[error("the reserved bytes of a frame header are {found:02x?}, not zero; the peer may speak another version")]
    Reserved {
        /// The bytes.
        found: [u8; 3],
    },
    /// The body is longer than its kind or the reader allows.
    #[error("the body of a {kind:?} frame claims {claimed} bytes, but {limit} is the limit")]
    BodyTooLong {
        /// Kind of the frame.
        kind: Kind,
        /// Length claimed, bytes.
        claimed: u64,
        /// Limit, bytes.
        limit: u32,
    },
    /// The payload is longer than agreed.
    #[error("the payload of a {kind:?} frame claims {claimed} bytes, but {limit} is the limit")]
    PayloadTooLong {
        /// Kind of the frame.
        kind: Kind,
        /// Length claimed, bytes.
        claimed: u64,
        /// Limit, bytes.
        limit: u32,
    },
    /// Bytes are missing.
    #[error("the frame is truncated: {got} of {wanted} bytes")]
    Truncated {
        /// Bytes needed at least.
        wanted: usize,
        /// Bytes there are.
        got: usize,
    },
    /// The body ends before its message does.
    #[error("the body of {len} bytes ends before its message does")]
    BodyTruncated {
        /// Length of the body, bytes.
        len: usize,
    },
    /// The body goes on after its message.
    #[error("the body has {extra} trailing bytes after its message")]
    TrailingBytes {
        /// Bytes too many.
        extra: usize,
    },
    /// The body is no message of the expected type.
    #[error("the body is not a valid message ({what})")]
    BadBody {
        /// What the decoder said.
        what: String,
    },
    /// A frame of another kind was due.
    #[error("a {expected:?} frame was expected, not {found:?}")]
    UnexpectedKind {
        /// The kind that was due.
        expected: Kind,
        /// The kind that came.
        found: Kind,
    },
}

/// What a reader accepts. A peer says in a header how much is to be awaited: what its reader has no use for is refused then.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Longest body, bytes; that of a frame's kind holds too ([`Kind::body_max_bytes`]).
    pub max_body_bytes: u32,
    /// Longest payload of a call or an answer, bytes. Hand-shake frames have none.
    pub max_payload_bytes: u32,
}

impl Limits {
    /// Those of a client, which awaits answers, with payloads of at most `max_payload_bytes`.
    pub const fn of_client(max_payload_bytes: u32) -> Limits {
        Limits { max_body_bytes: ANSWER_BODY_MAX_BYTES, max_payload_bytes }
    }

    /// Those of a server, which awaits calls, with payloads of at most `max_payload_bytes`.
    pub const fn of_server(max_payload_bytes: u32) -> Limits {
        Limits { max_body_bytes: BODY_MAX_BYTES, max_payload_bytes }
    }

    /// The same before the peer has proved anything.
    pub const fn in_handshake(self) -> Limits {
        Limits { max_body_bytes: HANDSHAKE_BODY_MAX_BYTES, ..self }
    }
}

/// Judges the first bytes of a stream, however few: nonsense need not be awaited to the end of a header.
pub fn check_start(bytes: &[u8]) -> Result<(), FrameError> {
    let seen = bytes.len().min(MAGIC.len());
    if bytes.get(..seen) == MAGIC.get(..seen) {
        return Ok(());
    }
    let mut found = [0; 4];
    found.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    Err(FrameError::BadMagic { found })
}

/// The header of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameHeader {
    /// What the body is.
    pub kind: Kind,
    /// Pairs an answer with its call; drawn by the caller, unique among its unanswered calls on the connection.
    pub id: u64,
    /// Length of the body, bytes.
    pub body_len: u32,
    /// Length of the payload, bytes.
    pub payload_len: u32,
}

impl FrameHeader {
    /// The header's bytes.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = self.kind as u8;
        bytes[8..16].copy_from_slice(&self.id.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.body_len.to_le_bytes());
        bytes[20..].copy_from_slice(&self.payload_len.to_le_bytes());
        bytes
    }

    /// Reads a header from the beginning of `bytes`.
    pub fn decode(bytes: &[u8], limits: &Limits) -> Result<FrameHeader, FrameError> {
        check_start(bytes)?;
        let Some(bytes) = bytes.first_chunk::<HEADER_BYTES>() else {
            return Err(FrameError::Truncated { wanted: HEADER_BYTES, got: bytes.len() });
        };
        let [_, _, _, _, kind, r0, r1, r2, id @ .., b0, b1, b2, b3, p0, p1, p2, p3] = *bytes;
        let kind = Kind::of(kind).ok_or(FrameError::UnknownKind { kind })?;
        if [r0, r1, r2] != [0; 3] {
            return Err(FrameError::Reserved { found: [r0, r1, r2] });
        }
        let header = FrameHeader {
            kind,
            id: u64::from_le_bytes(id),
            body_len: u32::from_le_bytes([b0, b1, b2, b3]),
            payload_len: u32::from_le_bytes([p0, p1, p2, p3]),
        };
        let limit = kind.body_max_bytes().min(limits.max_body_bytes);
        if header.body_len > limit {
            return Err(FrameError::BodyTooLong { kind, claimed: header.body_len.into(), limit });
        }
        let limit = if matches!(kind, Kind::Hello | Kind::Welcome | Kind::Key) { 0 } else { limits.max_payload_bytes };
        if header.payload_len > limit {
            return Err(FrameError::PayloadTooLong { kind, claimed: header.payload_len.into(), limit });
        }
        Ok(header)
    }

    /// The same header, if it is of the kind that is due.
    pub fn expect(self, expected: Kind) -> Result<FrameHeader, FrameError> {
        match self.kind {
            found if found == expected => Ok(self),
            found => Err(FrameError::UnexpectedKind { expected, found }),
        }
    }
}

/// Appends a frame's header and body to `out`; the payload, `payload_len` bytes, is to be sent right after them.
/// `out` is as before when it fails.
pub fn encode_frame(
    kind: Kind,
    id: u64,
    body: &impl Serialize,
    payload_len: u32,
    out: &mut Vec<u8>,
) -> Result<(), FrameError> {
    let start = out.len();
    let limit = kind.body_max_bytes();
    out.extend_from_slice(&[0; HEADER_BYTES]);
    let sink = Sink { out, end_max: start + HEADER_BYTES + limit as usize };
    if let Err(error) = postcard::serialize_with_flavor::<_, _, usize>(body, sink) {
        out.truncate(start);
        return Err(match error {
            postcard::Error::SerializeBufferFull => {
                FrameError::BodyTooLong { kind, claimed: u64::from(limit) + 1, limit }
            }
            other => FrameError::BadBody { what: other.to_string() },
        });
    }
    let body_len = (out.len() - start - HEADER_BYTES) as u32;
    out[start..start + HEADER_BYTES].copy_from_slice(&FrameHeader { kind, id, body_len, payload_len }.encode());
    Ok(())
}

/// [`encode_frame`] into a buffer of its own.
pub fn encode(kind: Kind, id: u64, body: &impl Serialize, payload_len: u32) -> Result<Vec<u8>, FrameError> {
    let mut out = Vec::with_capacity(128);
    encode_frame(kind, id, body, payload_len, &mut out)?;
    Ok(out)
}

/// Reads a message from a body, which must hold it and nothing else.
pub fn decode_body<T: DeserializeOwned>(body: &[u8]) -> Result<T, FrameError> {
    match postcard::take_from_bytes(body) {
        Ok((message, [])) => Ok(message),
        Ok((_, extra)) => Err(FrameError::TrailingBytes { extra: extra.len() }),
        Err(postcard::Error::DeserializeUnexpectedEnd) => Err(FrameError::BodyTruncated { len: body.len() }),
        Err(error) => Err(FrameError::BadBody { what: error.to_string() }),
    }
}

/// The version that a [`Hello`](crate::Hello) or [`Welcome`](crate::Welcome) begins with: whatever follows may be of a
/// version that this program does not know.
pub fn decode_version(body: &[u8]) -> Result<u32, FrameError> {
    postcard::take_from_bytes(body)
        .map(|(version, _)| version)
        .map_err(|_| FrameError::BodyTruncated { len: body.len() })
}

/// Where postcard writes a body: a reused buffer, up to the longest body.
struct Sink<'a> {
    out: &'a mut Vec<u8>,
    end_max: usize,
}

impl postcard::ser_flavors::Flavor for Sink<'_> {
    type Output = usize;

    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.try_extend(&[byte])
    }

    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        if self.out.len() + bytes.len() > self.end_max {
            return Err(postcard::Error::SerializeBufferFull);
        }
        self.out.extend_from_slice(bytes);
        Ok(())
    }

    fn finalize(self) -> postcard::Result<usize> {
        Ok(self.out.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exercise::decode_everything;
    use crate::*;
    use impresario_layout::Layout;
    use proptest::prelude::*;

    const LIMITS: Limits = Limits::of_client(4096);

    fn header(kind: Kind, body_len: u32, payload_len: u32) -> [u8; HEADER_BYTES] {
        FrameHeader { kind, id: 0x0102_0304_0506_0708, body_len, payload_len }.encode()
    }

    #[test]
    fn the_header_is_laid_out_as_documented() {
        let bytes = header(Kind::Answer, 0x0a0b, 0x0c0d);
        assert_eq!(bytes[..8], *b"IMP1\x04\0\0\0");
        assert_eq!(bytes[8..], [8, 7, 6, 5, 4, 3, 2, 1, 0x0b, 0x0a, 0, 0, 0x0d, 0x0c, 0, 0]);
        let decoded = FrameHeader::decode(&bytes, &LIMITS).unwrap();
        assert_eq!((decoded.kind, decoded.body_len, decoded.payload_len), (Kind::Answer, 0x0a0b, 0x0c0d));
    }

    #[test]
    fn each_complaint_names_what_was_wrong() {
        let complaint = |bytes: &[u8]| FrameHeader::decode(bytes, &LIMITS).unwrap_err().to_string();
        assert!(complaint(b"GET / HTTP/1.1\r\nHost: x\r\n").contains("not an Impresario peer"));
        assert!(complaint(b"GE").contains("not an Impresario peer"), "two bytes are enough to tell");
        assert_eq!(complaint(b"IMP1"), "the frame is truncated: 4 of 24 bytes");
        let mut bytes = header(Kind::Call, 0, 0);
        bytes[4] = 9;
        assert!(complaint(&bytes).contains("kind 9 is unknown"));
        bytes = header(Kind::Call, 0, 0);
        bytes[6] = 1;
        assert!(complaint(&bytes).contains("[00, 01, 00]"));
        assert!(
            complaint(&header(Kind::Call, u32::MAX, 0)).contains("claims 4294967295 bytes, but 65536 is the limit")
        );
        assert!(complaint(&header(Kind::Call, 0, u32::MAX)).contains("claims 4294967295 bytes, but 4096 is the limit"));
        assert!(complaint(&header(Kind::Hello, 0, 1)).contains("but 0 is the limit"));
        assert!(FrameHeader::decode(&header(Kind::Answer, 1 << 20, 4096), &LIMITS).is_ok());
        assert!(FrameHeader::decode(&header(Kind::Answer, (1 << 20) + 1, 0), &LIMITS).is_err());
        let server = Limits::of_server(4096);
        for (limits, kind, longest) in [
            (server, Kind::Call, 64 << 10),
            (server, Kind::Answer, 64 << 10),
            (server, Kind::Hello, 4 << 10),
            (server.in_handshake(), Kind::Answer, 4 << 10),
            (server.in_handshake(), Kind::PassedCall, 4 << 10),
        ] {
            assert!(FrameHeader::decode(&header(kind, longest, 0), &limits).is_ok());
            let error = FrameHeader::decode(&header(kind, longest + 1, 0), &limits).unwrap_err();
            assert!(matches!(error, FrameError::BodyTooLong { limit, .. } if limit == longest), "{error}");
        }
    }

    #[test]
    fn bodies_hold_one_message_and_nothing_else() {
        let frame = encode(Kind::Answer, 1, &Answer::Written(70_000), 0).unwrap();
        let body = &frame[HEADER_BYTES..];
        assert_eq!(decode_body::<Answer>(body), Ok(Answer::Written(70_000)));
        let longer = [body, &[0, 0]].concat();
        assert_eq!(decode_body::<Answer>(&longer), Err(FrameError::TrailingBytes { extra: 2 }));
        let shorter = &body[..body.len() - 1];
        assert_eq!(decode_body::<Answer>(shorter), Err(FrameError::BodyTruncated { len: shorter.len() }));
        assert!(matches!(decode_body::<Answer>(&[100]), Err(FrameError::BadBody { .. })));
    }

    #[test]
    fn a_body_over_the_limit_is_refused_and_leaves_the_buffer_alone() {
        let mut out = b"before".to_vec();
        let call = Call::Meta { who: Who::default(), call: MetaCall::Unlink { path: vec![b'x'; 70_000] } };
        let error = encode_frame(Kind::Call, 1, &call, 0, &mut out).unwrap_err();
        assert!(matches!(error, FrameError::BodyTooLong { limit: BODY_MAX_BYTES, .. }), "{error}");
        assert_eq!(out, b"before");
    }

    #[test]
    fn a_claimed_length_costs_no_memory() {
        // A string, a vector of bytes and a vector of entries that claim 2^63 elements.
        for tag in 0..12u8 {
            let mut body = vec![tag];
            body.extend([0xff; 9]);
            body.push(1);
            decode_everything(&body);
            // An offset may be any number.
            let answer = decode_body::<Answer>(&body);
            assert!(matches!(answer, Err(_) | Ok(Answer::Assigned { .. })), "{answer:?}");
        }
    }

    fn who() -> impl Strategy<Value = Who> {
        (any::<u64>(), any::<u32>(), any::<u64>(), any::<u64>(), any::<u32>()).prop_map(
            |(c, epoch, sequence, job, user)| Who {
                client: ClientKey(c),
                epoch,
                since: epoch / 2,
                sequence,
                job,
                user,
                folders: [0, user, 1, epoch],
            },
        )
    }

    fn messages() -> impl Strategy<Value = Vec<u8>> {
        let bytes = || proptest::collection::vec(any::<u8>(), 0..40);
        let layout = Layout::new(1, 3, 65536, 4).unwrap();
        let calls = prop_oneof![
            (who(), any::<u64>(), any::<u64>(), any::<u32>()).prop_map(|(who, f, lane_offset, len)| Call::Read {
                who,
                file: FileKey(f),
                lane_offset,
                len
            }),
            (who(), any::<u64>(), proptest::collection::vec((any::<u64>(), any::<u32>()), 0..20))
                .prop_map(|(who, f, pairs)| Call::ReadList { who, file: FileKey(f), extents: Extents::of(&pairs) }),
            (who(), any::<u64>(), proptest::collection::vec(any::<(u64, u32)>(), 0..20))
                .prop_map(|(who, f, pairs)| Call::Prefetch { who, file: FileKey(f), extents: Extents::of(&pairs) }),
            (who(), any::<u64>(), any::<u64>()).prop_map(move |(who, offset, len)| Call::FilePrefetch {
                who,
                file: FileKey(7),
                layout,
                offset,
                len,
            }),
            (who(), any::<u64>(), any::<u64>(), any::<bool>()).prop_map(|(who, lane_offset, len, keep_size)| {
                let change = crate::SpaceChange::Zero { keep_size };
                Call::ChangeSpace { who, file: FileKey(7), change, lane_offset, len }
            }),
            (who(), any::<u64>(), any::<u64>()).prop_map(move |(who, f, offset)| Call::FileWrite {
                who,
                file: FileKey(f),
                layout,
                offset
            }),
            (bytes(), any::<u32>(), any::<bool>()).prop_map(|(path, mode, exclusive)| {
                Call::Meta {
                    who: Who::default(),
                    call: MetaCall::Create { path, mode, uid: 1, gid: 2, exclusive, layout: None },
                }
            }),
            (any::<u64>(), any::<u32>(), any::<bool>()).prop_map(|(job, user, write)| Call::Explain {
                job,
                user,
                client: job ^ 7,
                file: job / 3,
                op: if write { "write" } else { "stat" }.into(),
                folders: [user; 4],
            }),
            ("[a-z]{0,9}", "[ -~]{0,9}", any::<i64>()).prop_map(|(n, v, at_shared_ns)| Call::SetPolicy {
                name: n.clone(),
                params: vec![(n, v)],
                at_shared_ns
            }),
        ]
        .prop_map(|call| encode(Kind::Call, 1, &call, 0).unwrap());
        let answers = prop_oneof![
            any::<u32>().prop_map(Answer::Written),
            (any::<u32>(), any::<u32>()).prop_map(|(at, missing)| Answer::Piece { at, missing }),
            (any::<u64>(), any::<i64>(), 0u32..1_000_000_000).prop_map(|(size, secs, nanos)| {
                Answer::Object(ObjectInfo { size, mtime: Time { secs, nanos }, used_bytes: size, made: size })
            }),
            any::<Option<u64>>().prop_map(|at| Answer::Sought(crate::Sought { at, object: ObjectInfo::default() })),
            bytes().prop_map(Answer::Link),
            ("[ -~]{0,40}", any::<i32>()).prop_map(|(message, errno)| Answer::Fault(Fault { errno, message })),
        ]
        .prop_map(|answer| encode(Kind::Answer, 2, &answer, 9).unwrap());
        let hellos = (who(), "[ -~]{0,40}").prop_map(|(who, name)| {
            encode(
                Kind::Hello,
                3,
                &Hello {
                    version: PROTOCOL_VERSION,
                    who,
                    role: Role::Any,
                    name,
                    cluster: ClusterId(9),
                    credential: vec![1, 2],
                },
                0,
            )
            .unwrap()
        });
        prop_oneof![calls, answers, hellos]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn random_bytes_break_no_promise(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            decode_everything(&bytes);
        }

        #[test]
        fn frames_come_back_and_mutated_ones_break_no_promise(
            frame in messages(),
            changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..5),
            cut in any::<prop::sample::Index>(),
        ) {
            let header = FrameHeader::decode(&frame, &LIMITS).unwrap();
            prop_assert_eq!(header.body_len as usize, frame.len() - HEADER_BYTES);
            decode_everything(&frame);
            let mut mutated = frame.clone();
            for (at, byte) in changes {
                let at = at.index(mutated.len());
                mutated[at] = byte;
            }
            mutated.truncate(cut.index(mutated.len()) + 1);
            decode_everything(&mutated);
        }
    }
}
