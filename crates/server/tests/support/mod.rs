//! A peer that speaks the protocol by hand, well or badly, for the tests of the servers.
#![allow(dead_code, reason = "each test program uses its own part")]

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use impresario_node::pieces::Gathering;
use impresario_testing::free_address;
use impresario_wire::{
    Answer, Call, ClientKey, FileKey, Hello, Kind, PROTOCOL_VERSION, Role, SpaceChange, Welcome, Who, decode_body,
    frame,
};

pub trait Pipe: Read + Write + Send {
    fn patience(&self, patience: Duration);
    fn shutdown_write(&self);
}

impl Pipe for TcpStream {
    fn patience(&self, patience: Duration) {
        self.set_read_timeout(Some(patience)).unwrap();
        self.set_write_timeout(Some(patience)).unwrap();
    }
    fn shutdown_write(&self) {
        self.shutdown(std::net::Shutdown::Write).unwrap();
    }
}

impl Pipe for UnixStream {
    fn patience(&self, patience: Duration) {
        self.set_read_timeout(Some(patience)).unwrap();
        self.set_write_timeout(Some(patience)).unwrap();
    }
    fn shutdown_write(&self) {
        self.shutdown(std::net::Shutdown::Write).unwrap();
    }
}

/// A connection.
pub struct Peer {
    pub pipe: Box<dyn Pipe>,
    pub next_id: u64,
    /// Answers that come in pieces.
    gathered: std::collections::HashMap<u64, (Gathering, Vec<u8>, bool)>,
    /// Pieces that came, in order: (id, offset in the answer, bytes).
    pub pieces: Vec<(u64, u32, usize)>,
}

pub fn who(client: u64) -> Who {
    Who { client: ClientKey(client), epoch: 1, since: 1, job: 1, ..Who::default() }
}

pub fn hello(role: Role, client: u64) -> Hello {
    Hello {
        version: PROTOCOL_VERSION,
        who: who(client),
        role,
        name: "test".into(),
        cluster: Default::default(),
        credential: vec![],
    }
}

/// A frame without its payload.
pub fn encode(kind: Kind, id: u64, body: &impl serde::Serialize, payload_bytes: usize) -> Vec<u8> {
    frame::encode(kind, id, body, payload_bytes as u32).unwrap()
}

impl Peer {
    /// Connects without a greeting.
    pub fn raw(address: &str) -> Peer {
        let pipe: Box<dyn Pipe> = match address.strip_prefix("unix:") {
            Some(path) => Box::new(UnixStream::connect(path).unwrap()),
            None => {
                let stream = TcpStream::connect(address).unwrap();
                stream.set_nodelay(true).unwrap();
                Box::new(stream)
            }
        };
        pipe.patience(Duration::from_secs(20));
        Peer { pipe, next_id: 1, gathered: Default::default(), pieces: Vec::new() }
    }

    /// The same from another address of this machine.
    pub fn raw_from(source: [u8; 4], address: &str) -> Peer {
        use rustix::net::{AddressFamily, SocketAddrV4, SocketType, bind, connect, socket};
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        bind(&socket, &SocketAddrV4::new(source.into(), 0)).unwrap();
        connect(&socket, &address.parse::<SocketAddrV4>().unwrap()).unwrap();
        let pipe: Box<dyn Pipe> = Box::new(TcpStream::from(socket));
        pipe.patience(Duration::from_secs(20));
        Peer { pipe, next_id: 1, gathered: Default::default(), pieces: Vec::new() }
    }

    /// Connects and greets.
    pub fn connect(address: &str, role: Role, client: u64) -> Peer {
        let mut peer = Peer::raw(address);
        peer.greet(&hello(role, client)).expect("welcome");
        peer
    }

    pub fn greet(&mut self, hello: &Hello) -> Result<Welcome, Box<Answer>> {
        self.pipe.write_all(&encode(Kind::Hello, 0, hello, 0)).unwrap();
        let (kind, _, body, _) = self.frame().expect("an answer to the hello");
        match kind {
            Kind::Welcome => Ok(decode_body(&body).unwrap()),
            _ => Err(Box::new(decode_body(&body).unwrap())),
        }
    }

    /// Sends a call; returns its id.
    pub fn send(&mut self, call: &Call, payload: &[u8]) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        let want = call.answer_bytes().unwrap_or(0);
        if want > 0 {
            let is_list = matches!(call, Call::ReadList { .. });
            self.gathered.insert(id, (Gathering::new(want), vec![0; want.min(64 << 20) as usize], is_list));
        }
        let mut bytes = encode(Kind::Call, id, call, payload.len());
        bytes.extend_from_slice(payload);
        self.pipe.write_all(&bytes).unwrap();
        id
    }

    /// The next frame: (kind, id, body, payload).
    pub fn frame(&mut self) -> io::Result<(Kind, u64, Vec<u8>, Vec<u8>)> {
        let mut head = [0; frame::HEADER_BYTES];
        self.pipe.read_exact(&mut head)?;
        let header = frame::FrameHeader::decode(&head, &frame::Limits::of_client(64 << 20)).unwrap();
        let mut body = vec![0; header.body_len as usize];
        self.pipe.read_exact(&mut body)?;
        let mut payload = vec![0; header.payload_len as usize];
        self.pipe.read_exact(&mut payload)?;
        Ok((header.kind, header.id, body, payload))
    }

    /// The next answer: (id, answer, payload). Pieces are put together; bytes of a list that the object does not have are
    /// zeros, those at the end of an answer are cut off.
    pub fn answer(&mut self) -> io::Result<(u64, Answer, Vec<u8>)> {
        loop {
            let (kind, id, body, payload) = self.frame()?;
            assert_eq!(kind, Kind::Answer);
            let answer = decode_body(&body).unwrap();
            if matches!(answer, Answer::Alive | Answer::Withheld { .. }) {
                continue;
            }
            let Answer::Piece { at, missing } = answer else {
                self.gathered.remove(&id);
                // What I/O nodes say more than data servers is not looked at.
                let answer = match answer {
                    Answer::FileWritten { bytes, .. } => Answer::Written(bytes),
                    Answer::FileSynced { errno: 0, .. } => Answer::Done,
                    other => other,
                };
                return Ok((id, answer, payload));
            };
            self.pieces.push((id, at, payload.len()));
            let (gathering, bytes, is_list) = self.gathered.get_mut(&id).expect("a piece of what was asked for");
            gathering.piece(at.into(), payload.len() as u64, missing.into()).expect("a piece that has its place");
            bytes[at as usize..][..payload.len()].copy_from_slice(&payload);
            if gathering.is_complete() {
                if !*is_list {
                    bytes.truncate(gathering.whole_bytes() as usize);
                }
                let bytes = std::mem::take(bytes);
                self.gathered.remove(&id);
                return Ok((id, Answer::Data, bytes));
            }
        }
    }

    /// Sends a call and awaits its answer; nothing else may be under way.
    pub fn call(&mut self, call: &Call, payload: &[u8]) -> (Answer, Vec<u8>) {
        let id = self.send(call, payload);
        let (answered, answer, payload) = self.answer().expect("an answer");
        assert_eq!(answered, id);
        (answer, payload)
    }

    pub fn write(&mut self, client: u64, file: u64, lane_offset: u64, bytes: &[u8]) -> Answer {
        self.call(&Call::Write { who: who(client), file: FileKey(file), lane_offset }, bytes).0
    }

    pub fn read(&mut self, client: u64, file: u64, lane_offset: u64, len: u32) -> Vec<u8> {
        let (answer, bytes) = self.call(&Call::Read { who: who(client), file: FileKey(file), lane_offset, len }, &[]);
        assert_eq!(answer, Answer::Data);
        bytes
    }

    pub fn status(&mut self) -> serde_json::Value {
        match self.call(&Call::Status, &[]).0 {
            Answer::Text(text) => serde_json::from_str(&text).unwrap(),
            other => panic!("{other:?}"),
        }
    }

    /// True when the server has closed (after the answers that are still to come).
    pub fn is_closed(&mut self) -> bool {
        let mut rest = Vec::new();
        match self.pipe.read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut),
        }
    }
}

/// The message of a fault.
pub fn fault(answer: Answer) -> (i32, String) {
    match answer {
        Answer::Fault(fault) => (fault.errno, fault.message),
        other => panic!("not a fault: {other:?}"),
    }
}

/// Bytes that tell where they belong.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (seed.wrapping_mul(31).wrapping_add(i * 7 + (i >> 8) * 13) & 0xff) as u8).collect()
}

/// Of file 1 or another, for client 1.
pub fn sync(file: u64) -> Call {
    Call::Sync { who: who(1), file: FileKey(file) }
}

/// Of file 1, for client 1.
pub fn change(change: SpaceChange, lane_offset: u64, len: u64) -> Call {
    Call::ChangeSpace { who: who(1), file: FileKey(1), change, lane_offset, len }
}

/// A small file system in memory.
pub struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    /// `options`: of tmpfs. `None` without the right to mount it, which is recorded.
    pub fn mount(options: &std::ffi::CStr) -> Option<SmallDisk> {
        let dir = tempfile::tempdir().unwrap();
        match rustix::mount::mount("tmpfs", dir.path(), "tmpfs", rustix::mount::MountFlags::empty(), options) {
            Ok(()) => Some(SmallDisk(dir)),
            Err(_) => {
                impresario_testing::skip("root", "a small tmpfs cannot be mounted");
                None
            }
        }
    }

    /// Where a folder of this name is, or can be.
    pub fn at(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0.path(), rustix::mount::UnmountFlags::DETACH);
    }
}

/// Data servers on ports of this machine that are theirs also while they are down, with their configuration.
pub struct Cluster {
    pub dir: tempfile::TempDir,
    _objects: tempfile::TempDir,
    pub config: impresario_config::Config,
    pub data: Vec<Option<impresario_server::Started>>,
}

impl Cluster {
    /// Starts `count` data servers; `adjust` may change the configuration first.
    pub fn start(count: usize, adjust: impl FnOnce(&mut impresario_config::Config)) -> Cluster {
        use impresario_config::{Config, Data, Meta};
        let dir = tempfile::tempdir().unwrap();
        // In memory where that can be had: making and removing the folders is most of what these tests do to disks.
        let objects = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let folder = |i: usize| objects.path().join(format!("d{i}"));
        let data = (0..count).map(|i| Data::new(format!("data.{i}"), free_address(), folder(i)));
        let mut config = Config {
            meta: Meta { address: free_address(), dir: dir.path().join("meta"), ..Meta::default() },
            data: data.collect(),
            ..Config::default()
        };
        adjust(&mut config);
        impresario_server::folders::make_all(&config).unwrap();
        let mut cluster = Cluster { dir, _objects: objects, config, data: Vec::new() };
        for index in 0..count {
            cluster.data.push(None);
            cluster.start_data(index);
        }
        cluster
    }

    /// Starts a data server, perhaps again.
    pub fn start_data(&mut self, index: usize) {
        let name = self.config.data[index].name.clone();
        let started = impresario_server::start(&self.config, &name).unwrap();
        self.data[index] = Some(started);
    }

    pub fn stop_data(&mut self, index: usize) {
        self.data[index] = None;
    }

    pub fn address(&self, index: usize) -> &str {
        &self.config.data[index].address
    }

    pub fn peer(&self, index: usize, client: u64) -> Peer {
        Peer::connect(self.address(index), Role::Data, client)
    }

    /// Starts an I/O node in front of them.
    pub fn start_io(&mut self, adjust: impl FnOnce(&mut impresario_config::Io)) -> impresario_server::Started {
        let mut io = impresario_config::Io::new(format!("io.{}", self.config.io.len()), free_address());
        adjust(&mut io);
        let name = io.name.clone();
        self.config.io.push(io);
        impresario_server::start(&self.config, &name).unwrap()
    }
}

/// A data server whose folder lies on a device, with object 1 of 8 MiB, which is not in memory. `None` where the build's
/// folder is in memory itself.
pub fn cold_object(
    adjust: impl FnOnce(&mut impresario_config::Data),
) -> Option<(Cluster, Peer, tempfile::TempDir, Vec<u8>)> {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let cluster = Cluster::start(1, |config| {
        config.data[0].dir = folder.path().into();
        adjust(&mut config.data[0]);
    });
    let mut peer = cluster.peer(0, 1);
    let bytes = pattern(7, 8 << 20);
    for (i, part) in bytes.chunks(1 << 20).enumerate() {
        assert_eq!(peer.write(1, 1, (i as u64) << 20, part), Answer::Written(1 << 20));
    }
    assert_eq!(peer.call(&sync(1), &[]).0, Answer::Done);
    cool(folder.path());
    let in_memory = peer.status()["store"]["in_memory"] == true;
    (!in_memory).then_some((cluster, peer, folder, bytes))
}

/// Object 1 of a data server's folder leaves memory.
pub fn cool(folder: &std::path::Path) {
    let object = std::fs::File::open(folder.join("objects/01/0000000000000001")).unwrap();
    rustix::fs::fadvise(&object, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}
