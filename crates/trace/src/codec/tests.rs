use impresario_base::random::Random;
use proptest::prelude::*;

use super::*;

/// A decoded trace and how it ends.
#[derive(Debug, PartialEq)]
struct Read {
    header: Header,
    files: Vec<FileInfo>,
    origins: Vec<Origin>,
    records: Vec<Record>,
    ending: Ending,
}

fn read(bytes: &[u8]) -> Result<Read, DecodeError> {
    let mut decoder = Decoder::new();
    let mut records = Vec::new();
    let mut rest = bytes;
    let ending = loop {
        match decoder.step(rest, &mut records) {
            Ok(Step::Used(n) | Step::Closed(n)) => {
                assert!(n > 0);
                rest = &rest[n..];
            }
            Ok(Step::Need(n)) => {
                assert!(n > rest.len(), "it asks for what it has");
                break decoder.ending(rest, None).unwrap();
            }
            Err(e) => break decoder.ending(rest, Some(&e)).ok_or(e)?,
        }
    };
    Ok(Read {
        header: decoder.header().cloned().unwrap_or_default(),
        files: decoder.files().to_vec(),
        origins: decoder.origins().to_vec(),
        records,
        ending,
    })
}

fn write(header: &Header, files: &[FileInfo], origins: &[Origin], records: &[Record]) -> Vec<u8> {
    let mut encoder = Encoder::new(header);
    files.iter().for_each(|f| _ = encoder.define_file(f).unwrap());
    origins.iter().for_each(|o| _ = encoder.define_origin(o).unwrap());
    records.iter().for_each(|r| encoder.push(r).unwrap());
    encoder.finish();
    encoder.sealed().to_vec()
}

fn file(path: &[u8]) -> FileInfo {
    FileInfo { path: path.to_vec(), ..FileInfo::default() }
}

fn simple(records: &[Record]) -> Vec<u8> {
    write(&Header::default(), &[file(b"/f")], &[Origin::default()], records)
}

/// Bytes per record, without the trace's fixed part.
fn bytes_per_record(records: &[Record]) -> f64 {
    let all = simple(records);
    assert_eq!(read(&all).unwrap().records, records);
    (all.len() - simple(&[]).len()) as f64 / records.len() as f64
}

/// One process with `next` of a request's offset and length, half a millisecond of computing, a busy disk.
fn synchronous(n: u64, next: impl Fn(u64) -> (u64, u64)) -> Vec<Record> {
    let mut at = 1_000_000_000;
    let mut random = Random::new(12345);
    (0..n)
        .map(|i| {
            let (offset, len) = next(i);
            let took = 5_000_000 + random.below(3_000_000);
            let record =
                Record { duration: Some(Nanos(took)), ..Record::new(TraceOp::Read, FileId(0), offset, len, Nanos(at)) };
            at += took + 500_000 + random.below(4_000);
            record
        })
        .collect()
}

#[test]
fn common_patterns_take_few_bytes() {
    let sequential = bytes_per_record(&synchronous(20_000, |i| (i << 20, 1 << 20)));
    let strided = bytes_per_record(&synchronous(20_000, |i| (i * 512_000, 256_000)));
    let random = bytes_per_record(&synchronous(20_000, |i| (i.wrapping_mul(0x9e37_79b9) % (1 << 17) * 4096, 4096)));
    assert!(sequential <= 9.1, "{sequential}");
    assert!(strided <= 9.1, "{strided}");
    assert!(random <= 12.1, "{random}");
    // Many processes, each sequential in its own part of one file, as a server sees them.
    let origins: Vec<Origin> = (0..64).map(|process| Origin { process, ..Origin::default() }).collect();
    let mut records = Vec::new();
    for i in 0..20_000u64 {
        let mut r =
            Record::new(TraceOp::Write, FileId(0), ((i % 64) << 30) + ((i / 64) << 15), 1 << 15, Nanos(i * 50_000));
        (r.origin, r.duration) = (OriginId((i % 64) as u32), Some(Nanos(3_000_000 + i % 1000)));
        records.push(r);
    }
    let bytes = write(&Header::default(), &[file(b"/f")], &origins, &records);
    let each = bytes.len() as f64 / records.len() as f64;
    assert!(each <= 9.5, "{each}");
}

/// After kill -9 at any moment, sealed records are read and no wrong ones.
#[test]
fn a_torn_tail_costs_the_last_block() {
    let records = synchronous(20_000, |i| (i * 512_000, 256_000));
    let bytes = simple(&records);
    let whole = read(&bytes).unwrap();
    assert_eq!((whole.records.len(), whole.ending), (20_000, Ending::Closed));
    for cut in (0..bytes.len()).step_by(997).chain([0, 1, 7, 8, 9, bytes.len() - 1]) {
        let got = read(&bytes[..cut]).unwrap();
        assert!(got.ending != Ending::Closed);
        assert_eq!(got.records[..], records[..got.records.len()]);
        let left = cut.saturating_sub(BLOCK_BYTES + 1024 + 64);
        assert!(got.records.len() as f64 >= (left as f64 / 9.2).floor(), "{cut}: {}", got.records.len());
    }
    // The same with garbage or zeros at the end, as after a machine crash.
    let mut torn = bytes[..bytes.len() - 40].to_vec();
    let cut = torn.len();
    torn[cut - 1] ^= 1;
    assert!(matches!(read(&torn).unwrap().ending, Ending::Torn { .. }));
    let mut zeros = simple(&records[..100]);
    zeros.truncate(zeros.len() - (FRAME_BYTES + 1));
    zeros.extend([0; 5000]);
    let got = read(&zeros).unwrap();
    assert_eq!((got.records.len(), got.ending), (100, Ending::Torn { lost_bytes: 5000 }));
}

#[test]
fn damage_in_the_middle_is_reported() {
    let mut bytes = simple(&synchronous(20_000, |i| (i * 512_000, 256_000)));
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    assert!(matches!(read(&bytes), Err(DecodeError::Checksum(_))));
    assert_eq!(read(b"not a trace at all"), Err(DecodeError::Magic));
    assert_eq!(read(b"IMTRACE\x02rest"), Err(DecodeError::Version(2)));
    let mut twice = simple(&[]);
    twice.extend_from_slice(&simple(&[])[8..]);
    assert_eq!(read(&twice), Err(DecodeError::Order(BLOCK_HEADER)));
}

/// Extensions are ignored: optional blocks and fields with unknown tags.
#[test]
fn extensions_are_ignored() {
    let mut encoder = Encoder::new(&Header::default());
    let mut bytes = encoder.sealed().to_vec();
    encoder.written();
    let payload = b"from the future";
    let frame = [BLOCK_OPTIONAL | 5, payload.len() as u8, 0, 0];
    bytes.extend(frame);
    bytes.extend(encode::checksum(&frame, payload).to_le_bytes());
    bytes.extend(payload);
    encoder.define_file(&file(b"/f")).unwrap();
    encoder.define_origin(&Origin::default()).unwrap();
    encoder.push(&Record::new(TraceOp::Open, FileId(0), 0, 0, Nanos(7))).unwrap();
    encoder.finish();
    bytes.extend(encoder.sealed());
    let got = read(&bytes).unwrap();
    assert_eq!((got.records.len(), got.ending), (1, Ending::Closed));
}

/// No trace is written that readers refuse: the encoder counts names as they do.
#[test]
fn more_names_than_readers_keep_are_refused() {
    let mut encoder = Encoder::new(&Header::default());
    let long = file(&vec![b'x'; PATH_BYTES_MAX]);
    let mut defined = 0_usize;
    let refused = loop {
        match encoder.define_file(&long) {
            Ok(_) => defined += 1,
            Err(refused) => break refused,
        }
        encoder.written();
        assert!(defined * PATH_BYTES_MAX < DEFINITIONS_BYTES_MAX, "{defined} names");
    };
    assert_eq!(refused, EncodeError::Definitions);
    assert!((defined + 2) * PATH_BYTES_MAX > DEFINITIONS_BYTES_MAX - defined * 128, "{defined} names");
    assert_eq!(
        refused.to_string(),
        "the names of a trace's files and threads take at most 256 MiB; begin another trace"
    );
}

#[test]
fn unencodable_values_are_refused() {
    let mut encoder = Encoder::new(&Header { command: "ü".repeat(TEXT_BYTES_MAX), ..Header::default() });
    let record = Record::new(TraceOp::Read, FileId(0), 0, 1, Nanos(0));
    assert_eq!(encoder.push(&record), Err(EncodeError::File(FileId(0))));
    encoder.define_file(&file(b"/f")).unwrap();
    assert_eq!(encoder.push(&record), Err(EncodeError::Origin(OriginId(0))));
    encoder.define_origin(&Origin::default()).unwrap();
    encoder.push(&record).unwrap();
    let long = file(&vec![b'x'; PATH_BYTES_MAX + 1]);
    assert_eq!(encoder.define_file(&long), Err(EncodeError::Name(PATH_BYTES_MAX + 1)));
    encoder.finish();
    assert_eq!(encoder.push(&record), Err(EncodeError::Closed));
    let got = read(encoder.sealed()).unwrap();
    assert_eq!(got.header.command.len(), TEXT_BYTES_MAX, "cut, and still a text");
}

#[test]
fn names_and_codes_agree() {
    for (code, op) in TraceOp::ALL.into_iter().enumerate() {
        assert_eq!(op as usize, code);
        assert_eq!(TraceOp::from_code(code as u8), Some(op));
        assert_eq!(TraceOp::from_name(op.name()), Some(op));
        assert!(op.scheduled().is_none_or(|o| TraceOp::from(o) == op));
    }
    assert_eq!(TraceOp::from_code(9), None);
}

fn any_number() -> impl Strategy<Value = u64> {
    prop_oneof![0..10u64, 0..1u64 << 30, any::<u64>(), Just(u64::MAX), (0..1u64 << 20).prop_map(|n| n * 512)]
}

fn any_record(files: u32, origins: u32) -> impl Strategy<Value = Record> {
    let outcome = prop_oneof![
        4 => Just(Outcome::Whole),
        1 => any_number().prop_map(Outcome::Short),
        1 => any::<u32>().prop_map(Outcome::Failed)
    ];
    let who = (0..files, 0..origins, prop_oneof![3 => Just(0u16), 1 => any::<u16>()]);
    let times = (any_number(), prop::option::of(any_number()));
    (0..9u8, who, any_number(), any_number(), times, outcome).prop_map(
        |(op, (file, origin, lane), offset, len, (arrival, duration), outcome)| Record {
            op: TraceOp::from_code(op).unwrap(),
            file: FileId(file),
            origin: OriginId(origin),
            lane: LaneId(lane),
            offset,
            len,
            arrival: Nanos(arrival),
            duration: duration.map(Nanos),
            outcome,
        },
    )
}

fn any_trace() -> impl Strategy<Value = (Header, Vec<FileInfo>, Vec<Origin>, Vec<Record>)> {
    let header = (prop::option::of(any::<u64>()), ".{0,20}", ".{0,20}", any::<bool>()).prop_map(
        |(clock_unix_ns, host, command, lane)| Header {
            clock_unix_ns,
            host,
            source: "test".into(),
            command,
            space: if lane { Space::Lane } else { Space::File },
        },
    );
    let file = (prop::collection::vec(any::<u8>(), 0..40), any::<u64>(), prop::option::of(any::<u64>()))
        .prop_map(|(path, key, size_bytes)| FileInfo { path, key, size_bytes });
    let origin = (".{0,9}", any::<[u32; 3]>(), ".{0,9}", ".{0,9}")
        .prop_map(|(host, [process, thread, user], job, label)| Origin { host, process, thread, user, job, label });
    let named = (prop::collection::vec(file, 1..5), prop::collection::vec(origin, 1..5));
    (header, named).prop_flat_map(|(header, (files, origins))| {
        let records = prop::collection::vec(any_record(files.len() as u32, origins.len() as u32), 0..200);
        (Just(header), Just(files), Just(origins), records)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Any values survive, with blocks sealed anywhere.
    #[test]
    fn written_records_are_read_back((header, files, origins, records) in any_trace(), seal in 1..50usize) {
        let mut encoder = Encoder::new(&header);
        files.iter().for_each(|f| _ = encoder.define_file(f).unwrap());
        origins.iter().for_each(|o| _ = encoder.define_origin(o).unwrap());
        for (i, record) in records.iter().enumerate() {
            encoder.push(record).unwrap();
            if i % seal == 0 {
                encoder.seal();
            }
        }
        encoder.finish();
        let got = read(encoder.sealed()).unwrap();
        prop_assert_eq!(got, Read { header, files, origins, records, ending: Ending::Closed });
    }

    /// Changed bytes are found by checksums; nothing panics.
    #[test]
    fn damage_is_never_read_as_valid(
        (header, files, origins, records) in any_trace(),
        at in any::<prop::sample::Index>(),
        change in 1..=255u8,
    ) {
        let mut bytes = write(&header, &files, &origins, &records);
        let at = at.index(bytes.len());
        bytes[at] ^= change;
        if let Ok(got) = read(&bytes) {
            prop_assert_ne!(got.ending, Ending::Closed);
            prop_assert_eq!(&got.records[..], &records[..got.records.len()]);
        }
    }

    /// Noise, and faulty or hostile writers with correct checksums, cause no panic, endless loop or unbounded memory.
    #[test]
    fn noise_and_hostile_blocks_do_no_harm(
        bytes in prop::collection::vec(any::<u8>(), 0..2000),
        payloads in prop::collection::vec((0..4u8, prop::collection::vec(any::<u8>(), 0..300)), 0..6),
    ) {
        exercise::decode_everything(&bytes);
        let mut blocks = Vec::new();
        for (kind, payload) in payloads {
            blocks.extend([kind, payload.len() as u8, (payload.len() >> 8) as u8]);
            blocks.extend(payload);
        }
        exercise::decode_everything(&blocks);
    }

    /// A trace without its frames, with some bytes changed.
    #[test]
    fn mutated_traces_do_no_harm(
        (header, files, origins, records) in any_trace(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
    ) {
        let bytes = write(&header, &files, &origins, &records);
        let (mut blocks, mut rest) = (Vec::new(), &bytes[8..]);
        while !rest.is_empty() {
            let len = usize::from(u16::from_le_bytes([rest[1], rest[2]]));
            blocks.extend(&rest[..3]);
            blocks.extend(&rest[8..8 + len]);
            rest = &rest[8 + len..];
        }
        // Its own header makes one too many.
        blocks.drain(..3 + usize::from(u16::from_le_bytes([blocks[1], blocks[2]])));
        for (at, to) in changes {
            if !blocks.is_empty() {
                let at = at.index(blocks.len());
                blocks[at] = to;
            }
        }
        exercise::decode_everything(&blocks);
    }
}
