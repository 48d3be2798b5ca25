//! The bytes of messages under [`PROTOCOL_VERSION`] 16, recorded: whoever changes them changes the version too.

use impresario_layout::{Layout, Skipped};
use impresario_wire::frame::encode;
use impresario_wire::*;

fn who() -> Who {
    Who { client: ClientKey(300), epoch: 2, sequence: 70_000, since: 1, job: 9, user: 1000, folders: [70_000, 5, 0, 0] }
}

fn lock() -> FileLock {
    FileLock { owner: 5, pid: 77, start: 0, end: u64::MAX, exclusive: true }
}

/// The body of a frame in hexadecimal digits.
fn body(kind: Kind, message: &impl serde::Serialize) -> String {
    encode(kind, 1, message, 0).unwrap()[HEADER_BYTES..].iter().map(|byte| format!("{byte:02x}")).collect()
}

fn call(call: Call) -> String {
    let body_of = body(Kind::Call, &call);
    let frame = encode(Kind::Call, 1, &call, 0).unwrap();
    assert_eq!(decode_body::<Call>(&frame[HEADER_BYTES..]), Ok(call));
    body_of
}

fn meta(call_of: MetaCall) -> String {
    call(Call::Meta { who: who(), call: call_of })
}

fn answer(answer: Answer) -> String {
    body(Kind::Answer, &answer)
}

#[test]
fn the_bytes_of_messages_stay_those_of_the_version() {
    assert_eq!(PROTOCOL_VERSION, 16, "record the new version's bytes");
    let layout = Layout::new(1, 3, 65536, 4).unwrap();
    let file = FileKey(600);
    let time = Time { secs: -3, nanos: 500 };
    let attr = Attr {
        ino: 8,
        kind: NodeKind::Character(Device { major: 4, minor: 1 }),
        mode: 0o4755,
        nlink: 2,
        uid: 10,
        gid: 11,
        size: 1 << 40,
        used_bytes: 4096,
        atime: time,
        mtime: Time { secs: 1, nanos: 2 },
        ctime: Time { secs: 3, nanos: 4 },
        labelled: true,
    };
    let object = ObjectInfo { size: 1000, mtime: time, used_bytes: 4096, made: 5 };
    let hello = Hello {
        version: 13,
        who: who(),
        role: Role::Io,
        name: "cli".into(),
        cluster: ClusterId(400),
        credential: b"MUNGE".to_vec(),
    };
    let welcome = Welcome {
        version: 13,
        name: "data-1".into(),
        incarnation: 1 << 33,
        max_payload_bytes: 1 << 20,
        cluster: ClusterId(400),
        store: 12,
        number: Some(300),
        keys: HeldKeys { by_prefix: vec![(200, 1 << 16)], others: 7 },
    };
    let offer = KeyOffer { version: 13, key: 1, role: KeyRole::Server, noise: vec![1, 2, 3] };
    let seen = [
        body(Kind::Hello, &hello),
        body(Kind::Welcome, &welcome),
        body(Kind::Key, &offer),
        call(Call::ChangeSpace {
            who: who(),
            file,
            change: SpaceChange::Allocate { keep_size: true },
            lane_offset: 128,
            len: 5000,
        }),
        call(Call::FileChangeSpace { who: who(), file, layout, change: SpaceChange::Punch, offset: 1, len: 2 }),
        call(Call::ObjectSeek { file, from: 300, to: SeekTo::Hole }),
        call(Call::FileSeek { file, layout, made: 5, from: 300, to: SeekTo::Data }),
        meta(MetaCall::Create {
            path: b"a/b".to_vec(),
            mode: 0o644,
            uid: 1,
            gid: 2,
            exclusive: true,
            layout: Some(LayoutRequest { base: None, pcount: Some(3), ssize_bytes: Some(4096) }),
        }),
        meta(MetaCall::SetAttr {
            target: Target::Handle(9),
            set: SetAttr {
                size: Some(300),
                mtime: Some(SetTime::At(time)),
                atime: Some(SetTime::Now),
                ..SetAttr::default()
            },
        }),
        meta(MetaCall::Examine(Examine::Unnamed { removed: true, after: b"x".to_vec(), max: 10 })),
        meta(MetaCall::Lock(LockCall { lease: 4, wish: LockWish::Set { file, lock: lock(), wait: true } })),
        meta(MetaCall::Lock(LockCall { lease: 0, wish: LockWish::Restore { file, owner: 5, locks: vec![lock()] } })),
        meta(MetaCall::Close { handle: 3, wrote: true }),
        meta(MetaCall::CutBack { handle: 3, len: 100, end: 200 }),
        meta(MetaCall::Restrict(Restriction {
            squashed: Some(Squashed { all: true, proven: false, uid: 300, gid: 301 }),
            proves: true,
            uids: vec![(1000, 1999)],
        })),
        meta(MetaCall::Prove { credential: b"MUNGE".to_vec() }),
        meta(MetaCall::SyncAll),
        answer(Answer::Attr(attr)),
        answer(Answer::Opened(Opened { handle: 1, file, layout, made: 1, attr })),
        answer(Answer::Lock(LockAnswer {
            lease: 4,
            lease_ms: 30_000,
            said: LockSaid::Held { lock: lock(), own: false },
        })),
        answer(Answer::Sought(Sought { at: Some(700), object })),
        answer(Answer::Statfs(Statfs { total_bytes: 1, free_bytes: 2, files: 3, files_free: 4 })),
        answer(Answer::Fault(Fault { errno: Fault::FENCED, message: "late".into() })),
        answer(Answer::Cut { attr, file, lanes: vec![LaneState::new(2, 1 << 33, 7)] }),
        answer(Answer::AllSynced {
            lane: LaneState::new(0, 1 << 33, 0),
            run: 300,
            lost: Some(vec![file]),
            any_lost: 2,
        }),
        answer(Answer::Alive),
        call(Call::Members),
        call(Call::WriteList {
            who: who(),
            others: vec![Sender { client: ClientKey(301), epoch: 3, sequence: 5000 }],
            file,
            extents: Extents::of(&[(128, 5000), (70_000, 16)]),
        }),
        answer(Answer::Members(MembersView {
            number: 2,
            from_shared_ns: 1 << 33,
            nodes: vec![0, 300],
            absent: vec![1],
            hung: vec![4],
        })),
        call(Call::Explain { job: 9, user: 1000, client: 300, file: 0, op: "open".into(), folders: [0, 5, 0, 0] }),
        answer(Answer::Withheld { calls: vec![3, 300], unread_from: None }),
        answer(Answer::Withheld { calls: vec![3], unread_from: Some(301) }),
        call(Call::GiveUp { calls: vec![3, 300] }),
    ];
    let seen: Vec<&str> = seen.iter().map(String::as_str).collect();
    assert_eq!(seen, RECORDED);
}

const RECORDED: &[&str] = &[
    "0dac0202f0a2040109e807f0a2040500000203636c699003054d554e4745",
    "0d06646174612d31808080802080804090030c01ac0201c80180800407",
    "0d010203010203",
    "1aac0202f0a2040109e807f0a204050000d804000180018827",
    "1bac0202f0a2040109e807f0a204050000d80401038080040400010102",
    "1cd804ac0201",
    "1dd8040103808004040005ac0200",
    "0cac0202f0a2040109e807f0a2040500000203612f62a40301020101000103018020",
    "0cac0202f0a2040109e807f0a2040500000101090000000001ac020100010105f403",
    "0cac0202f0a2040109e807f0a20405000018020101780a",
    "0cac0202f0a2040109e807f0a204050000190400d804054d00ffffffffffffffffff010101",
    "0cac0202f0a2040109e807f0a204050000190003d8040501054d00ffffffffffffffffff0101",
    "0cac0202f0a2040109e807f0a204050000050301",
    "0cac0202f0a2040109e807f0a2040500001a0364c801",
    "0cac0202f0a2040109e807f0a2040500001c010100ac02ad020101e807cf0f",
    "0cac0202f0a2040109e807f0a2040500001d054d554e4745",
    "0cac0202f0a2040109e807f0a2040500001e",
    "0908050401ed13020a0b808080808020802005f4030202060401",
    "0a01d804010380800404000108050401ed13020a0b808080808020802005f4030202060401",
    "1704b0ea0101054d00ffffffffffffffffff010100",
    "1801bc05e80705f403802005",
    "0f01020304",
    "11e801046c617465",
    "1c08050401ed13020a0b808080808020802005f4030202060401d80401028780808020",
    "1d008080808020ac020101d80402",
    "1e",
    "1f",
    "20ac0202f0a2040109e807f0a20405000001ad02038827d804000280018827f0a20410",
    "1f0280808080200200ac0201010104",
    "0f09e807ac0200046f70656e00050000",
    "200203ac0200",
    "20010301ad02",
    "210203ac02",
];

#[test]
fn what_lays_a_file_out_anew_is_read_back() {
    let skipped = Skipped::of([0, 4]).unwrap();
    let layout = Layout::new(1, 3, 65536, 5).unwrap().without(skipped).unwrap();
    let body = call(Call::FileStat { file: FileKey(600), layout });
    assert!(body.ends_with("010380800405020004"), "{body}");
    // Too many, twice, and not in order.
    for bad in [&[17u8][..], &[2, 4, 4], &[2, 4, 0]] {
        let bytes = [&[1, 3, 0x80, 0x80, 4, 5], bad, &[9; 16]].concat();
        let error = decode_body::<(Layout, [u8; 16])>(&bytes).unwrap_err();
        assert!(!error.to_string().is_empty());
    }
    let objects = relay::Objects { file: FileKey(601), layout };
    let begun = Relaid::Begun { handle: 1, from: objects, made: 7, size: 9, to: objects };
    let frame = encode(Kind::Answer, 1, &Answer::Relaid(begun.clone()), 0).unwrap();
    assert_eq!(decode_body::<Answer>(&frame[HEADER_BYTES..]), Ok(Answer::Relaid(begun)));
    meta(MetaCall::Relay(RelayCall::Begin { path: b"a/b".to_vec() }));
}
