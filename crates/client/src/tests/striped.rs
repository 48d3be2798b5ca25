//! Striped data against a reference.

use std::io::IoSlice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use impresario_layout::Layout;
use impresario_testing::{free_address, until};
use impresario_wire::{ClientKey, Extents, FileKey, Sender, SpaceChange};
use proptest::prelude::*;

use super::*;
use crate::Striped;
use crate::testing::{FakeCall, FakeConnection, FakeObjects, MAX_PAYLOAD_BYTES};

struct Bed {
    objects: Vec<Arc<FakeObjects>>,
    _servers: Vec<FakeServer>,
    striped: Striped,
    who: Who,
}

fn bed(servers: usize, call_max: u32, piece_max: Option<u32>) -> Bed {
    let identity = Arc::new(Identity::draw(1, 2).unwrap());
    let objects: Vec<Arc<FakeObjects>> = (0..servers).map(|_| Arc::default()).collect();
    let fakes: Vec<FakeServer> = objects
        .iter()
        .map(|objects| {
            let objects = objects.clone();
            FakeServer::start(FakeGreeting::of("data"), move || objects.serve()).unwrap()
        })
        .collect();
    let links = fakes.iter().map(|fake| {
        let options = LinkOptions { timeout: Duration::from_secs(5), ..LinkOptions::new(Role::Data, call_max) };
        Arc::new(Link::new(&[("data", fake.address())], identity.clone(), options).unwrap())
    });
    let striped = Striped::new(links.collect(), Duration::from_secs(5)).with_piece_max(piece_max);
    Bed { objects, _servers: fakes, striped, who: identity.who() }
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, usize),
    Read(u64, usize),
    /// On a server that refuses it.
    HalfWrite(u64, usize, usize),
    /// Disjoint extents: how far each is from the end of the one before, and its length.
    WriteList(Vec<(u64, usize)>),
    Space(SpaceChange, u64, u64),
    Truncate(u64),
    Sync,
    Unlink,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0u64..60_000, 0usize..30_000).prop_map(|(offset, len)| Step::Write(offset, len)),
        5 => (0u64..90_000, 0usize..60_000).prop_map(|(offset, len)| Step::Read(offset, len)),
        2 => (0u64..60_000, 0usize..30_000, 0usize..4).prop_map(|(offset, len, bad)| Step::HalfWrite(offset, len, bad)),
        2 => proptest::collection::vec((0u64..9_000, 0usize..6_000), 1..12).prop_map(Step::WriteList),
        2 => (0u8..5, 0u64..60_000, 0u64..30_000).prop_map(|(kind, offset, len)| {
            let keep_size = kind % 2 == 0;
            let change = match kind {
                0 | 1 => SpaceChange::Allocate { keep_size },
                2 | 3 => SpaceChange::Zero { keep_size },
                _ => SpaceChange::Punch,
            };
            Step::Space(change, offset, len)
        }),
        2 => (0u64..80_000).prop_map(Step::Truncate),
        1 => Just(Step::Sync),
        1 => Just(Step::Unlink),
    ];
    proptest::collection::vec(step, 1..25)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn a_striped_file_is_a_file(
        (base, pcount) in (0u16..4, 1u16..=4),
        ssize in prop_oneof![Just(512u32), Just(1000), Just(4096), Just(65536)],
        call_max in prop_oneof![Just(4096u32), Just(5000), Just(MAX_PAYLOAD_BYTES)],
        piece_max in prop_oneof![Just(None), Just(Some(8192u32)), Just(Some(777))],
        steps in steps(),
    ) {
        let bed = bed(4, call_max, piece_max);
        let (who, file) = (&bed.who, FileKey(9));
        let layout = Layout::new(base, pcount, ssize, 4).unwrap();
        let mut reference: Vec<u8> = Vec::new();
        for (number, step) in steps.into_iter().enumerate() {
            match step {
                Step::Write(offset, len) => {
                    let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + number * 31 + 1) as u8).collect();
                    prop_assert_eq!(bed.striped.write(who, file, &layout, offset, &bytes).unwrap(), len);
                    if len > 0 {
                        let end = offset as usize + len;
                        reference.resize(reference.len().max(end), 0);
                        reference[offset as usize..end].copy_from_slice(&bytes);
                    }
                }
                Step::Read(offset, len) => {
                    let mut bytes = vec![0xaa; len];
                    let got = bed.striped.read(who, file, &layout, 0, offset, &mut bytes).unwrap();
                    let from = reference.len().min(offset as usize);
                    let to = reference.len().min(offset as usize + len);
                    prop_assert_eq!(got, to - from);
                    prop_assert!(bytes[..got] == reference[from..to]);
                }
                Step::WriteList(gaps) => {
                    let mut at = 0;
                    let extents: Vec<(u64, usize)> = gaps
                        .iter()
                        .map(|(gap, len)| {
                            let offset = at + gap;
                            at = offset + *len as u64;
                            (offset, *len)
                        })
                        .collect();
                    let len = extents.iter().map(|extent| extent.1).sum();
                    let bytes: Vec<u8> = (0..len).map(|i| (i * 3 + number * 29 + 1) as u8).collect();
                    let whos = [*who, Who { client: ClientKey(77), ..*who }];
                    bed.striped.write_list(&whos, file, &layout, &extents, &bytes).unwrap();
                    let mut rest = &bytes[..];
                    for (offset, len) in extents {
                        let (mine, later) = rest.split_at(len);
                        rest = later;
                        if len > 0 {
                            let end = offset as usize + len;
                            reference.resize(reference.len().max(end), 0);
                            reference[offset as usize..end].copy_from_slice(mine);
                        }
                    }
                }
                Step::HalfWrite(offset, len, bad) => {
                    let bytes: Vec<u8> = (0..len).map(|i| (i * 5 + number * 37 + 1) as u8).collect();
                    bed.objects[bad].refuse_writes(libc::EROFS);
                    let written = bed.striped.write_some(who, file, &layout, offset, &bytes).unwrap();
                    bed.objects[bad].refuse_writes(0);
                    // Up to the first strip of the server that refuses.
                    let good = layout.pieces(offset, len as u64).take_while(|piece| usize::from(piece.server) != bad);
                    prop_assert_eq!(written.bytes as u64, good.map(|piece| piece.len).sum::<u64>());
                    prop_assert_eq!(written.error.is_some(), written.bytes < len);
                    prop_assert!(written.error.is_none_or(|error| error.errno() == libc::EROFS));
                    // Others hold their strips: what the range has behind the good part is theirs or is as before.
                    let end = offset as usize + written.bytes;
                    if written.bytes > 0 {
                        reference.resize(reference.len().max(end), 0);
                        reference[offset as usize..end].copy_from_slice(&bytes[..written.bytes]);
                    }
                    let size = bed.striped.stat(file, &layout).unwrap().size as usize;
                    prop_assert!(size <= reference.len().max(offset as usize + len) && size >= reference.len());
                    let mut rest = vec![0; size];
                    bed.striped.read(who, file, &layout, 0, 0, &mut rest).unwrap();
                    let before = reference.len();
                    reference.resize(size, 0);
                    for at in 0..size {
                        let is_new = (end..offset as usize + len).contains(&at) && rest[at] == bytes[at - offset as usize];
                        prop_assert!(rest[at] == reference[at] || is_new, "byte {} of {}, {}", at, size, before);
                    }
                    reference = rest;
                }
                Step::Space(change, offset, len) => {
                    bed.striped.change_own_space(who, file, &layout, change, (offset, len)).unwrap();
                    let (start, end) = (offset as usize, (offset + len) as usize);
                    if change.extends() && len > 0 {
                        reference.resize(reference.len().max(end), 0);
                    }
                    if !matches!(change, SpaceChange::Allocate { .. }) {
                        let within = start.min(reference.len())..end.min(reference.len());
                        reference[within].fill(0);
                    }
                }
                Step::Truncate(len) => {
                    bed.striped.truncate(who, file, &layout, len).unwrap();
                    reference.resize(len as usize, 0);
                }
                Step::Sync => bed.striped.sync(who, file, &layout).unwrap(),
                Step::Unlink => {
                    bed.striped.unlink(who, file, &layout).unwrap();
                    reference.clear();
                    prop_assert!(bed.objects.iter().all(|o| o.object(file).is_none()));
                }
            }
            prop_assert_eq!(bed.striped.stat(file, &layout).unwrap().size, reference.len() as u64);
        }
    }
}

#[test]
fn a_request_is_one_call_per_server_and_pieces_are_sent_as_asked() {
    let bed = bed(4, MAX_PAYLOAD_BYTES, None);
    let layout = Layout::new(0, 4, 65536, 4).unwrap();
    let bytes = content(0, 1 << 20);
    bed.striped.write(&bed.who, FileKey(1), &layout, 0, &bytes).unwrap();
    let mut back = vec![0; 1 << 20];
    bed.striped.read(&bed.who, FileKey(1), &layout, 0, 0, &mut back).unwrap();
    assert!(back == bytes);
    for objects in &bed.objects {
        assert_eq!(objects.log().len(), 2, "one write, one read of 256 KiB each");
    }
    let pieces = self::bed(4, MAX_PAYLOAD_BYTES, Some(8192));
    pieces.striped.write(&pieces.who, FileKey(1), &layout, 0, &bytes).unwrap();
    assert_eq!(pieces.objects.iter().map(|o| o.log().len()).sum::<usize>(), 128);
}

#[test]
fn what_looked_like_a_hole_but_was_being_written_is_read_again() {
    // Lane 0 answers its first read before, and everything else after, another client has written both lanes.
    let objects: Vec<Arc<FakeObjects>> = (0..2).map(|_| Arc::default()).collect();
    let layout = Layout::new(0, 2, 4096, 2).unwrap();
    let all = content(0, 8192);
    let servers: Vec<FakeServer> = (0..2)
        .map(|lane| {
            let objects = objects.clone();
            let all = all.clone();
            FakeServer::start(FakeGreeting::of("data"), move || {
                let (objects, all) = (objects.clone(), all.clone());
                Box::new(move |connection, call| {
                    let (answer, payload) = objects[lane].apply(&call.call, &call.payload);
                    if lane == 0 && matches!(call.call, Call::Read { .. }) && payload.is_empty() {
                        for (lane, part) in all.chunks(4096).enumerate() {
                            let who = Who::default();
                            objects[lane].apply(&Call::Write { who, file: FileKey(1), lane_offset: 0 }, part);
                        }
                    }
                    connection.answer(call.id, &answer, &payload);
                    Flow::Continue
                })
            })
            .unwrap()
        })
        .collect();
    let identity = Arc::new(Identity::draw(0, 0).unwrap());
    let links = servers.iter().map(|server| {
        let options = LinkOptions::new(Role::Data, 1 << 20);
        Arc::new(Link::new(&[("data", server.address())], identity.clone(), options).unwrap())
    });
    let striped = Striped::new(links.collect(), Duration::from_secs(5));
    let mut bytes = vec![0xaa; 8192];
    assert_eq!(striped.read(&identity.who(), FileKey(1), &layout, 0, 0, &mut bytes).unwrap(), 8192);
    assert!(bytes == all, "zeros were returned that were never in the file");
}

#[test]
fn a_sync_after_the_machine_restarted_fails_once() {
    let objects = Arc::new(FakeObjects::default());
    let start = |address: &str, incarnation| {
        let objects = objects.clone();
        let greeting = FakeGreeting { incarnation, ..FakeGreeting::of("data") };
        FakeServer::start_at(address, greeting, move || objects.serve()).unwrap()
    };
    let address = free_address();
    let server = start(&address, 1 << 32);
    let identity = Arc::new(Identity::draw(0, 0).unwrap());
    let options = LinkOptions { timeout: Duration::from_secs(5), ..LinkOptions::new(Role::Data, 1 << 20) };
    let link = Arc::new(Link::new(&[("data", &address)], identity.clone(), options).unwrap());
    let striped = Striped::new(vec![link], Duration::from_secs(5));
    let layout = Layout::over_all(1).unwrap();
    let write = || striped.write(&identity.who(), FileKey(1), &layout, 0, b"abc").unwrap();
    let sync = || striped.sync(&identity.who(), FileKey(1), &layout);
    write();
    server.kill();
    let server = start(&address, 1 << 32 | 5);
    sync().unwrap();
    write();
    server.kill();
    let _server = start(&address, 2 << 32);
    let error = sync().unwrap_err();
    assert!(error.to_string().contains("restarted before a sync"), "{error}");
    assert_eq!(error.errno(), libc::EIO);
    sync().unwrap();
}

/// One lane's answer to a sync is long in coming. What the other server acknowledges meanwhile, having synced, is lost when its
/// machine fails, and the next sync tells.
#[test]
fn a_sync_does_not_cover_what_was_written_while_it_was_under_way() {
    let objects: Vec<Arc<FakeObjects>> = (0..2).map(|_| Arc::default()).collect();
    let is_held = Arc::new(AtomicBool::new(true));
    let start = |lane: usize, address: &str, incarnation| {
        let (objects, is_held) = (objects[lane].clone(), is_held.clone());
        let greeting = FakeGreeting { incarnation, ..FakeGreeting::of("data") };
        let serve = move || {
            let (objects, is_held) = (objects.clone(), is_held.clone());
            Box::new(move |connection: &FakeConnection, call: FakeCall| {
                let (answer, payload) = objects.apply(&call.call, &call.payload);
                if lane == 1 && matches!(call.call, Call::Sync { .. }) {
                    until("the answer to the sync is let go", || !is_held.load(Ordering::Acquire));
                }
                connection.answer(call.id, &answer, &payload);
                Flow::Continue
            }) as Serve
        };
        FakeServer::start_at(address, greeting, serve).unwrap()
    };
    let addresses = [free_address(), free_address()];
    let mut servers: Vec<_> = (0..2).map(|lane| start(lane, &addresses[lane], 1 << 32)).collect();
    let identity = Arc::new(Identity::draw(0, 0).unwrap());
    let timeout = Duration::from_secs(60);
    let links = addresses.iter().map(|address| {
        let options = LinkOptions { timeout, ..LinkOptions::new(Role::Data, 1 << 20) };
        Arc::new(Link::new(&[("data", address)], identity.clone(), options).unwrap())
    });
    let striped = Striped::new(links.collect(), timeout);
    let layout = Layout::new(0, 2, 4096, 2).unwrap();
    let write = || striped.write(&identity.who(), FileKey(1), &layout, 0, b"on the first server").unwrap();
    let sync = || striped.sync(&identity.who(), FileKey(1), &layout);
    write();
    std::thread::scope(|threads| {
        let syncing = threads.spawn(sync);
        until("both servers have synced", || objects.iter().all(|server| server.syncs() == 1));
        write();
        is_held.store(false, Ordering::Release);
        syncing.join().unwrap().expect("what was written before is there");
    });
    servers.remove(0).kill();
    servers.insert(0, start(0, &addresses[0], 2 << 32));
    let error = sync().expect_err("what was acknowledged during the first sync is lost");
    assert!(error.to_string().contains("restarted before a sync"), "{error}");
    sync().expect("it was told of");
}

#[test]
fn lists_of_one_object_are_one_call() {
    let bed = bed(2, 4096, None);
    let (who, file) = (&bed.who, FileKey(1));
    let others = [*who, Who { client: ClientKey(5), epoch: 3, ..*who }];
    let extents: Vec<(u64, usize)> = (0..8).map(|n| (100 + n * 1000, 10)).collect();
    let bytes: Vec<u8> = (0..80).collect();
    let pieces = [&bytes[..30], &bytes[30..]].map(IoSlice::new);
    let lanes = bed.striped.lane_write_list(&others, 1, file, &extents, &pieces).unwrap();
    assert_eq!(lanes.iter().map(|lane| lane.server).collect::<Vec<_>>(), [1]);
    let mut back = [0; 80];
    assert!(bed.striped.lane_read_list(who, 1, file, &extents, &mut back).unwrap());
    assert_eq!(back[..], bytes);
    let strided = Extents::Strided { offset: 100, len: 10, stride: 1000, count: 8 };
    let asked = [
        Call::WriteList { who: *who, others: vec![Sender::from(&others[1])], file, extents: strided.clone() },
        Call::ReadList { who: *who, file, extents: strided },
    ];
    assert_eq!(bed.objects[1].log(), asked);
    assert_eq!(bed.objects[1].object(file).map(|object| object.len()), Some(7110));
    // The object ends in one of them, or before it.
    for (offset, len) in [(7105, 10), (9000, 1)] {
        assert!(!bed.striped.lane_read_list(who, 1, file, &[(0, 5), (offset, len)], &mut vec![0; 5 + len]).unwrap());
    }
    // What is too much for one call is read by several, and not written.
    let long = [(0, 3000), (4000, 3000)];
    assert!(bed.striped.lane_read_list(who, 1, file, &long, &mut [0; 6000]).unwrap());
    let error = bed.striped.lane_write_list(&others, 1, file, &long, &[IoSlice::new(&[1; 6000])]).unwrap_err();
    assert!(error.to_string().contains("too many for one call"), "{error}");
    bed.objects[1].refuse_writes(libc::ENOSPC);
    let error = bed.striped.lane_write_list(&others, 1, file, &extents, &pieces).unwrap_err();
    assert_eq!(error.errno(), libc::ENOSPC);
}

#[test]
fn impossible_requests_are_refused() {
    let bed = bed(2, 4096, None);
    let (who, file) = (&bed.who, FileKey(1));
    let layout = Layout::over_all(2).unwrap();
    let error = bed.striped.read(who, file, &Layout { servers: 3, pcount: 3, ..layout }, 0, 0, &mut [0]).unwrap_err();
    assert!(error.to_string().contains("3 data servers, the configuration here has 2"), "{error}");
    let error = bed.striped.read(who, file, &Layout { pcount: 0, ..layout }, 0, 0, &mut [0]).unwrap_err();
    assert!(error.to_string().contains("damaged"), "{error}");
    assert_eq!(bed.striped.write(who, file, &layout, i64::MAX as u64, b"ab").unwrap_err().errno(), libc::EFBIG);
    assert_eq!(bed.striped.write(who, file, &layout, u64::MAX, b"ab").unwrap_err().errno(), libc::EFBIG);
    assert_eq!(bed.striped.read(who, file, &layout, 0, 0, &mut []).unwrap(), 0);
    assert!(bed.striped.lane_read(who, 5, file, 0, &mut []).is_err());
    let mut bytes = [0; 5000];
    let error = bed.striped.lane_read(who, 0, file, 0, &mut [std::io::IoSliceMut::new(&mut bytes)]).unwrap_err();
    assert!(error.to_string().contains("too many for one call"), "{error}");
}

/// A server that is away uses up the time of a call to several; what the others answered is received nevertheless, the
/// error is that server's, and the connections of the others are not given up.
#[test]
fn a_server_that_is_away_is_the_one_that_is_named() {
    let objects = Arc::new(FakeObjects::default());
    let alive = {
        let objects = objects.clone();
        FakeServer::start(FakeGreeting::of("alive"), move || objects.serve()).unwrap()
    };
    let away = server(|_, _| Flow::Continue);
    let identity = Arc::new(Identity::draw(1, 2).unwrap());
    let timeout = Duration::from_millis(600);
    let link = |name: &str, fake: &FakeServer| {
        let options = LinkOptions { timeout, ..LinkOptions::new(Role::Data, 1 << 20) };
        Arc::new(Link::new(&[(name, fake.address())], identity.clone(), options).unwrap())
    };
    let striped = Striped::new(vec![link("away", &away), link("alive", &alive)], timeout);
    let layout = Layout::new(0, 2, 65536, 2).unwrap();
    for _ in 0..2 {
        let error = striped.write(&identity.who(), FileKey(1), &layout, 0, &[7; 2 * 65536]).unwrap_err();
        assert!(error.to_string().contains("away"), "{error}");
    }
    let written = striped.write(&identity.who(), FileKey(1), &layout, 65536, &[8; 65536]);
    assert!(written.is_ok(), "the other server is as well as ever: {written:?}");
}
