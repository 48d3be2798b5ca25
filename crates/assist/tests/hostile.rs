//! Programs that break the rules: each is cut off or ignored, and nobody else notices.

use std::cell::Cell;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::support::*;
use impresario_assist::manager::{Handle, Manager, Options};
use impresario_base::random::Random;
use impresario_ring::message::ToManager;
use impresario_ring::{HEADER_BYTES, Op, Producer, SLOTS, ring_bytes};
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, SealFlags};

/// A program that behaves.
struct Witness {
    program: Program,
    number: u32,
    told: Cell<u64>,
}

impl Witness {
    /// Starts a manager with one file and a program that behaves.
    fn start(dir: &Path) -> (Handle, Witness) {
        let (path, file) = cold_file(dir, "witness", MIB);
        let manager = Manager::start(Options::new(hints(vec![window(&path)])), &dir.join("socket")).unwrap();
        let mut program = Program::start(manager.socket());
        let number = program.register(&file);
        (manager, Witness { program, number, told: Cell::new(0) })
    }

    /// It is still served, and another one is still welcome.
    fn is_well(&self, manager: &Handle) {
        let before = manager.report().unwrap().total().reads;
        self.told.set(self.told.get() + 1);
        self.program.tell(self.number, self.told.get() * 1000 % MIB, 10);
        until("the witness is heard", || manager.report().unwrap().total().reads > before);
        drop(Program::start(manager.socket()));
    }
}

fn memory(bytes: u64, seals: SealFlags) -> OwnedFd {
    let memory = rustix::fs::memfd_create(c"x", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&memory, bytes).unwrap();
    rustix::fs::fcntl_add_seals(&memory, seals).unwrap();
    memory
}

fn good_ring() -> OwnedFd {
    Producer::create(SLOTS).unwrap().1
}

#[test]
fn bad_hellos_are_cut_off() {
    let dir = folder();
    let (manager, witness) = Witness::start(dir.path());
    let sealed = SealFlags::SHRINK | SealFlags::GROW;
    let size = ring_bytes(SLOTS) as u64;
    let (pipe, _end) = std::io::pipe().unwrap();
    let pipe: OwnedFd = pipe.into();
    let plain: OwnedFd = File::open(dir.path().join("witness")).unwrap().into();
    let null: OwnedFd = File::options().read(true).write(true).open("/dev/null").unwrap().into();
    let rings = [
        memory(size, sealed),
        memory(size, SealFlags::empty()),
        memory(size - 1, sealed),
        memory(0, sealed),
        memory(1 << 40, sealed),
        pipe.try_clone().unwrap(),
        plain,
        null.try_clone().unwrap(),
        eventfd(),
    ];
    let mut cut = 0;
    for ring in &rings {
        let socket = connect(manager.socket()).unwrap();
        send(&socket, hello().encode().as_bytes(), &[ring.as_fd(), eventfd().as_fd()]).unwrap();
        assert!(answer(&socket).is_none());
        cut += 1;
        witness.is_well(&manager);
    }
    for event in [&pipe, &null, &good_ring()] {
        let socket = connect(manager.socket()).unwrap();
        send(&socket, hello().encode().as_bytes(), &[good_ring().as_fd(), event.as_fd()]).unwrap();
        assert!(answer(&socket).is_none());
        cut += 1;
        witness.is_well(&manager);
    }
    assert_eq!(manager.report().unwrap().cut_off, cut);
}

#[test]
fn bad_messages_are_cut_off() {
    let dir = folder();
    let (manager, witness) = Witness::start(dir.path());
    let (ring, event) = (good_ring(), eventfd());
    let both = [ring.as_fd(), event.as_fd()];
    let register = ToManager::Register { file: 1, flags: 1 }.encode();
    let (hi, unregister) = (hello().encode(), ToManager::Unregister { file: 1 }.encode());
    let long = vec![1u8; 5000];
    let four = [both[0], both[1], both[1], both[1]];
    let first: Vec<(&[u8], &[BorrowedFd<'_>])> = vec![
        (b"", &[]),
        (b"x", &[]),
        (&[0xff; 16], &[]),
        (&long, &[]),
        (register.as_bytes(), &both[..1]),
        (hi.as_bytes(), &both[..1]),
        (hi.as_bytes(), &[]),
        (hi.as_bytes(), &four),
        (unregister.as_bytes(), &[]),
    ];
    for (bytes, descriptors) in first {
        let socket = connect(manager.socket()).unwrap();
        send(&socket, bytes, descriptors).unwrap();
        assert!(answer(&socket).is_none(), "{bytes:?}");
        witness.is_well(&manager);
    }
    // After a good beginning.
    for bytes in [hi.as_bytes(), register.as_bytes(), &[9; 12]] {
        let program = Program::start(manager.socket());
        let descriptors: &[_] = if bytes == hi.as_bytes() { &both } else { &[] };
        send(&program.socket, bytes, descriptors).unwrap();
        assert!(answer(&program.socket).is_none(), "{bytes:?}");
        witness.is_well(&manager);
    }
}

#[test]
fn nobody_takes_the_orders_of_another_program() {
    let dir = folder();
    let (manager, witness) = Witness::start(dir.path());
    // Numbers of nobody, and its own.
    let numbers = [0, 2, 99, u64::MAX];
    for client in numbers {
        let socket = connect(manager.socket()).unwrap();
        send(&socket, ToManager::Helper { client }.encode().as_bytes(), &[]).unwrap();
        assert!(answer(&socket).is_none(), "{client}");
    }
    until("all are cut off", || manager.report().unwrap().cut_off == numbers.len() as u64);
    // After Hello it is too late.
    let late = Program::start(manager.socket());
    send(&late.socket, ToManager::Helper { client: 1 }.encode().as_bytes(), &[]).unwrap();
    assert!(answer(&late.socket).is_none());
    // For a process of its own it may; then it hangs up.
    let helper = connect(manager.socket()).unwrap();
    send(&helper, ToManager::Helper { client: 1 }.encode().as_bytes(), &[]).unwrap();
    until("it is taken", || manager.report().unwrap().programs == 1);
    drop(helper);
    witness.is_well(&manager);
    // Of another process, though of the same user.
    // SAFETY: the child makes system calls only, and leaves by _exit.
    match unsafe { libc::fork() } {
        0 => {
            let refused = connect(manager.socket()).is_ok_and(|other| {
                let packet = ToManager::Helper { client: 1 }.encode();
                rustix::net::send(&other, packet.as_bytes(), rustix::net::SendFlags::NOSIGNAL).is_ok()
                    && rustix::net::recv(&other, &mut [0u8; 8][..], rustix::net::RecvFlags::empty())
                        .is_ok_and(|r| r.0 == 0)
            });
            // SAFETY: ends the child without running anything else.
            unsafe { libc::_exit(if refused { 0 } else { 1 }) }
        }
        child => {
            let mut status = -1;
            // SAFETY: waits for the child made above.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            assert_eq!(status, 0);
        }
    }
    witness.is_well(&manager);
}

#[test]
fn descriptors_that_are_no_readable_files_are_ignored() {
    let dir = folder();
    let (manager, witness) = Witness::start(dir.path());
    let path = dir.path().join("witness");
    let mut program = Program::start(manager.socket());
    let (pipe, _end) = std::io::pipe().unwrap();
    let open = |how: &mut std::fs::OpenOptions| OwnedFd::from(how.open(&path).unwrap());
    let odd: [OwnedFd; 9] = [
        pipe.into(),
        File::open(dir.path()).unwrap().into(),
        File::open("/dev/zero").unwrap().into(),
        open(File::options().write(true)),
        open(File::options().read(true).custom_flags(libc::O_PATH)),
        open(File::options().read(true).custom_flags(libc::O_DIRECT)),
        eventfd(),
        connect(manager.socket()).unwrap(),
        program.socket.try_clone().unwrap(),
    ];
    for fd in &odd {
        let number = program.register(fd);
        program.tell(number, 0, 1 << 30);
        program.push(access(number, Op::Mmap, i64::MAX as u64 - 10, 10, 0));
        witness.is_well(&manager);
    }
    let report = manager.report().unwrap();
    assert_eq!((report.files.len(), report.files[0].open), (1, 1), "the witness alone is looked after");
}

/// Closing the last descriptor of a lingering connection waits until its peer has taken everything, as closing a file of a
/// user-space file system waits for that.
#[test]
fn descriptors_whose_closing_blocks_delay_nobody() {
    let dir = folder();
    let (manager, witness) = Witness::start(dir.path());
    let mut program = Program::start(manager.socket());
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut peers = Vec::new();
    for _ in 0..3 {
        let mut slow = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        peers.push(listener.accept().unwrap());
        slow.set_nonblocking(true).unwrap();
        while std::io::Write::write(&mut slow, &[0; 1 << 16]).is_ok() {}
        slow.set_nonblocking(false).unwrap();
        let linger = Some(2 * PATIENCE);
        rustix::net::sockopt::set_socket_linger(&slow, linger).unwrap();
        program.register(&slow);
        // Whoever closes it last waits; here that may be us.
        std::thread::spawn(move || drop(slow));
        witness.is_well(&manager);
    }
    drop(peers);
}

#[test]
fn thousands_of_registrations_are_bounded() {
    let dir = folder();
    let (path, file) = cold_file(dir.path(), "f", MIB);
    let mut hints = hints(vec![window(&path)]);
    hints.limits.files_per_program = 100;
    let manager = Manager::start(Options::new(hints), &dir.path().join("socket")).unwrap();
    let mut program = Program::start(manager.socket());
    (0..5000).for_each(|_| _ = program.register(&file));
    program.tell(1, 0, 1);
    program.tell(100, 0, 1);
    program.tell(101, 0, 1);
    until("those within the limit are heard", || manager.report().unwrap().total().reads == 2);
    // The others are closed beside the service.
    until("no more are kept open", || descriptors_of(&path) == 101);
    // Numbers that are used again change nothing.
    let message = ToManager::Register { file: 1, flags: 1 };
    send(&program.socket, message.encode().as_bytes(), &[file.as_fd()]).unwrap();
    drop(program);
    until("all are let go", || manager.report().unwrap().total().open == 0 && descriptors_of(&path) == 1);
}

/// Bytes written anywhere in a ring, and what is then pushed: the manager lives, and serves others.
#[test]
fn rings_full_of_lies() {
    let dir = folder();
    let (manager, witness) = Witness::start(dir.path());
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig { cases: 60, ..ProptestConfig::default() });
    let lies = prop::collection::vec((0usize..HEADER_BYTES + 4000, any::<u64>()), 0..40);
    runner
        .run(&(lies, any::<bool>()), |(lies, in_head)| {
            let socket = connect(manager.socket()).unwrap();
            let (producer, memory) = Producer::create(64).unwrap();
            let event = eventfd();
            send(&socket, hello().encode().as_bytes(), &[memory.as_fd(), event.as_fd()]).unwrap();
            prop_assert!(answer(&socket).is_some());
            let file = File::open(dir.path().join("witness")).unwrap();
            let register = ToManager::Register { file: 1, flags: 1 };
            send(&socket, register.encode().as_bytes(), &[file.as_fd()]).unwrap();
            for (at, value) in lies {
                let at = if in_head { 128 } else { at.min(ring_bytes(64) - 8) & !7 };
                rustix::io::pwrite(&memory, &value.to_ne_bytes(), at as u64).unwrap();
                let _ = producer.push(access(1, Op::Read, value >> 1, 4096, u32::MAX));
                rustix::io::write(&event, &1u64.to_ne_bytes()).unwrap();
            }
            witness.is_well(&manager);
            Ok(())
        })
        .unwrap();
    until("all are gone", || manager.report().unwrap().programs == 1);
}

#[test]
fn a_program_that_is_never_done_leaves_time_for_others() {
    let dir = folder();
    let (path, file) = cold_file(dir.path(), "f", MIB);
    let manager = Manager::start(Options::new(hints(vec![window(&path)])), &dir.path().join("socket")).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut program = Program::start(manager.socket());
                let number = program.register(&file);
                let mut random = Random::new(0);
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let _ = program.ring.push(access(number, Op::Read, random.below(1 << 28), 4096, 1));
                    let _ = rustix::io::write(&program.event, &1u64.to_ne_bytes());
                }
            });
        }
        for _ in 0..20 {
            drop(Program::start(manager.socket()));
            assert!(manager.report().is_ok());
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    manager.stop().unwrap();
}
