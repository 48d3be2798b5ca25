//! The agent's socket and what comes by it: a program has one connection for each thread that is asking.

use std::io::{IoSlice, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use impresario_base::machine::random_number;
use impresario_client::Client;
use impresario_interpose::served::peer_pid;
use impresario_interpose::served::protocol::{DIRECTORIES, REQUEST_BYTES, Reply, Request, SOCKET};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    connect, socket_with,
};

use crate::ahead::Foresees;
use crate::calls::{Calls, Done, Incoming, Stop};
use crate::connections::{Connection, Connections};
use crate::left;
use crate::locks::Peer;
use crate::mirror::{Mirror, open_all};

/// Connections of all programs at most; further ones wait.
const CONNECTIONS_MAX: usize = 4096;
const STACK_BYTES: usize = 256 << 10;
/// What the names of runs' folders begin with.
const PREFIX: &str = "impresario-run-";
/// Folders of other runs that a run looks at before it starts.
const STALE_MAX: usize = 64;

/// Why there is no agent.
#[derive(Debug, thiserror::Error)]
#[error("{what} in {}, the folder for temporary files (TMPDIR): {source}", place.display())]
pub struct AgentError {
    what: &'static str,
    place: PathBuf,
    source: std::io::Error,
}

/// An agent that serves programs. Its folder is removed when it is dropped; its threads end with the process.
pub struct Agent {
    folder: tempfile::TempDir,
    token: String,
    calls: Arc<Calls>,
    connections: Arc<Connections>,
}

impl Agent {
    /// Starts to serve the cluster of `client` to programs that know it as `at`. What they will read is asked for by `foresees`.
    pub fn start(client: Arc<Client>, at: &Path, foresees: Option<Box<dyn Foresees>>) -> Result<Agent, AgentError> {
        let place = &std::env::temp_dir();
        remove_stale(place);
        let failed = |what| move |source| AgentError { what, place: place.clone(), source };
        let folder = private_folder(place).map_err(failed("making the run's folder"))?;
        let token = format!("{:016x}", random_number().map_err(failed("drawing the run's token"))?);
        let mirror = Mirror::new(folder.path().join(DIRECTORIES)).map_err(failed("making the run's folder"))?;
        let at = at.as_os_str().as_bytes().to_vec();
        let patience = client.timeout();
        let calls = Calls::new(client, at, mirror, &token, foresees).map_err(failed("preparing to serve programs"))?;
        let (calls, connections) = (Arc::new(calls), Arc::new(Connections::new(CONNECTIONS_MAX, patience)));
        let listener = listen(folder.path()).map_err(failed("listening for programs"))?;
        let thread = |name: &str| std::thread::Builder::new().name(name.into()).stack_size(STACK_BYTES);
        let watching = calls.clone();
        thread("closes").spawn(move || watching.opens.watch()).map_err(failed("starting a thread"))?;
        let watching = connections.clone();
        thread("withheld").spawn(move || watching.watch()).map_err(failed("starting a thread"))?;
        let (serving, accepting) = (calls.clone(), connections.clone());
        let serve = Arc::new(move |connections: &Connections, connection: &Connection| {
            if let Err(error) = serve(connections, connection, |asked, out| serving.call(asked, out)) {
                tracing::debug!(%error, "a program's connection");
            }
        });
        let accepts = move || accepting.accept(&listener, &serve);
        thread("programs").spawn(accepts).map_err(failed("starting a thread"))?;
        Ok(Agent { folder, token, calls, connections })
    }

    /// The folder with the socket, for the programs' environment.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// What the names of this run's placeholders have.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// Whether there is a program that may still ask, though it has not yet.
    pub fn has_programs(&self) -> bool {
        left::is_any_left(&self.token)
    }

    /// Whether a program is still connected or has a file open.
    pub fn is_used(&self) -> bool {
        !self.connections.is_empty() || !self.calls.opens.is_empty()
    }
}

/// A folder into which only this user can go, whatever the umask: what is in it acts with this user's rights.
fn private_folder(place: &Path) -> std::io::Result<tempfile::TempDir> {
    // The kernel tells a working directory without symbolic links, and it is compared with this folder.
    let place = place.canonicalize()?;
    let only_ours = std::fs::Permissions::from_mode(0o700);
    tempfile::Builder::new().prefix(PREFIX).permissions(only_ours).tempdir_in(place)
}

/// Listens in a run's folder. The socket has its name only once it listens: to another run that starts at this moment, a socket
/// without a listener is that of a run that was killed, whose folder it removes.
fn listen(folder: &Path) -> std::io::Result<UnixListener> {
    let nameless = folder.join("new");
    let listener = UnixListener::bind(&nameless)?;
    std::fs::rename(&nameless, folder.join(SOCKET))?;
    Ok(listener)
}

/// Removes folders of this user's runs that were killed: nobody accepts connections there any more.
fn remove_stale(place: &Path) {
    let me = rustix::process::geteuid().as_raw();
    let entries = std::fs::read_dir(place).into_iter().flatten().flatten();
    let runs = entries.filter(|entry| entry.file_name().as_bytes().starts_with(PREFIX.as_bytes()));
    for folder in runs.map(|entry| entry.path()).take(STALE_MAX) {
        let is_ours = folder.symlink_metadata().is_ok_and(|about| about.is_dir() && about.uid() == me);
        if is_ours && is_refused(&folder.join(SOCKET)) {
            open_all(&folder);
            let _ = std::fs::remove_dir_all(&folder);
        }
    }
}

/// Whether a socket has no listener. Does not wait for one that has.
fn is_refused(path: &Path) -> bool {
    let connected = || {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?)
    };
    connected() == Err(Errno::CONNREFUSED)
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.calls.mirror.open();
    }
}

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agent").field("folder", &self.folder).finish_non_exhaustive()
    }
}

/// What is kept of a buffer between calls.
const KEPT_BYTES: usize = 1 << 20;

/// Gives up what a long call needed: the program may not call again for hours.
fn keep_little(buffer: &mut Vec<u8>) {
    buffer.clear();
    buffer.shrink_to(KEPT_BYTES);
}

/// Does what comes by a connection until that ends.
fn serve(
    connections: &Connections,
    connection: &Connection,
    call: impl Fn(&Incoming<'_>, &mut Vec<u8>) -> Result<Done, Stop>,
) -> std::io::Result<()> {
    let (mut body, mut out) = (Vec::new(), Vec::new());
    let mut stream = &connection.stream;
    let pid = peer_pid(stream);
    loop {
        let mut head = [0; REQUEST_BYTES];
        match stream.read_exact(&mut head) {
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(()),
            read => read?,
        }
        let numbers = Request::decode(&head).ok_or(std::io::ErrorKind::InvalidData)?;
        let under_way = connections.begin(connection, numbers.may_wait());
        let lens = [numbers.path_len, numbers.other_len, numbers.data_len].map(|len| len as usize);
        body.resize(lens.iter().sum(), 0);
        stream.read_exact(&mut body)?;
        let (path, rest) = body.split_at(lens[0]);
        let (other, data) = rest.split_at(lens[1]);
        out.clear();
        let peer = Peer { pid, stream };
        let asked = Incoming { peer: &peer, numbers, path, other, data };
        let done = match under_way {
            Some(_) => connection.watch.attend(|| call(&asked, &mut out)),
            None => Err(libc::ENOLCK.into()),
        };
        let (result, fd, is_outside) = match done {
            Ok(Done { result, fd }) => (result, fd, false),
            Err(Stop::Errno(errno)) => {
                out.clear();
                (-i64::from(errno), None, false)
            }
            Err(Stop::Outside(path)) => {
                let fits = path.len() <= numbers.room as usize;
                out.clear();
                out.extend(if fits { &path[..] } else { &[] });
                (if fits { 0 } else { -i64::from(libc::EXDEV) }, None, fits)
            }
        };
        send(stream, Reply { result, data_len: out.len() as u32, is_outside }, fd, &out)?;
        drop(under_way);
        keep_little(&mut body);
        keep_little(&mut out);
    }
}

fn send(mut stream: &UnixStream, reply: Reply, fd: Option<OwnedFd>, data: &[u8]) -> std::io::Result<()> {
    let head = reply.encode();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = fd.as_ref().map(|fd| [fd.as_fd()]);
    if let Some(fds) = &fds {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let parts = [IoSlice::new(&head), IoSlice::new(data)];
    let sent = rustix::net::sendmsg(stream, &parts, &mut control, SendFlags::NOSIGNAL)?;
    if sent < head.len() {
        stream.write_all(&head[sent..])?;
    }
    stream.write_all(data.get(sent.saturating_sub(head.len())..).unwrap_or(&[]))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use impresario_interpose::served::Served;
    use impresario_interpose::served::protocol::Op;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    /// An agent of at most `max` connections whose calls take a moment, and answer with what was sent. A lock that is waited for
    /// comes when the program gives up.
    fn echoes(max: usize) -> (tempfile::TempDir, Arc<Connections>) {
        let folder = tempfile::tempdir().unwrap();
        let (listener, connections) = (listen(folder.path()).unwrap(), Arc::new(Connections::new(max, PATIENCE)));
        let answer = |asked: &Incoming<'_>, out: &mut Vec<u8>| {
            out.extend(asked.data);
            while asked.numbers.may_wait() && !asked.peer.gives_up(None, Duration::from_secs(60)) {}
            std::thread::sleep(Duration::from_micros(300));
            Ok(Done::from(asked.numbers.a))
        };
        let answers = Arc::new(move |all: &Connections, one: &Connection| drop(serve(all, one, answer)));
        let accepting = connections.clone();
        // It ends with the tests, as an agent does with its process.
        std::thread::spawn(move || accepting.accept(&listener, &answers));
        (folder, connections)
    }

    fn program(folder: &Path) -> Box<Served> {
        let served = Box::new(Served::new());
        served.start(folder.as_os_str().as_bytes(), b"/at", b"0123456789abcdef", b"");
        served
    }

    /// Asks for `a` with data that only this request has.
    fn ask(served: &Served, a: u32) -> Result<(), i32> {
        let data = a.to_ne_bytes().repeat(1 + a as usize % 50_000);
        let mut into = vec![0; data.len()];
        let request = Request { a: a.into(), ..Request::new(Op::Write) };
        let got = served.call(request, b"", b"", &data, &mut into)?;
        assert!(got.result == i64::from(a) && into == data, "another request's reply");
        Ok(())
    }

    #[test]
    fn more_threads_than_there_may_be_connections_wait_and_are_all_served() {
        let (folder, connections) = echoes(4);
        let programs: Vec<_> = (0..3).map(|_| program(folder.path())).collect();
        std::thread::scope(|scope| {
            for thread in 0..15 {
                let served = &programs[thread % 3];
                scope.spawn(move || {
                    for turn in 0..40 {
                        assert_eq!(ask(served, (thread * 1000 + turn * 7919) as u32), Ok(()), "{thread} {turn}");
                    }
                });
            }
        });
        // Idle connections of programs that do not ask are in nobody's way.
        for served in (0..10).map(|_| program(folder.path())).chain(programs) {
            assert_eq!(ask(&served, 5), Ok(()));
        }
        assert!(!connections.is_empty());
    }

    #[test]
    fn programs_that_wait_for_locks_leave_connections_for_those_that_give_them_up() {
        let (folder, connections) = echoes(4);
        let waits = |_| {
            let mut stream = UnixStream::connect(folder.path().join(SOCKET)).unwrap();
            stream.write_all(&Request { a: 2, ..Request::new(Op::Flock) }.encode()).unwrap();
            stream
        };
        let waiting: Vec<_> = (0..3).map(waits).collect();
        impresario_testing::until("three wait", || connections.locking() == 3);
        let served = program(folder.path());
        let refused = served.call(Request { a: 2, ..Request::new(Op::Flock) }, b"", b"", b"", &mut []);
        assert_eq!(refused.map(|got| got.result), Err(libc::ENOLCK));
        for turn in 0..20 {
            assert_eq!(ask(&served, turn), Ok(()));
        }
        drop(waiting);
        impresario_testing::until("they have given up", || connections.locking() == 0);
    }

    #[test]
    fn an_idle_connection_keeps_little() {
        let mut buffer = vec![1; 4 * KEPT_BYTES];
        keep_little(&mut buffer);
        assert!(buffer.is_empty() && buffer.capacity() <= KEPT_BYTES, "{}", buffer.capacity());
    }

    #[test]
    fn the_folder_is_named_as_the_kernel_does() {
        let place = tempfile::tempdir().unwrap();
        let link = place.path().join("link");
        std::os::unix::fs::symlink(".", &link).unwrap();
        let folder = private_folder(&link).unwrap();
        assert_eq!(folder.path(), folder.path().canonicalize().unwrap());
    }

    #[test]
    fn folders_of_killed_runs_are_removed() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(format!("{PREFIX}{name}"));
        for name in ["killed", "running", "starting"] {
            std::fs::create_dir(at(name)).unwrap();
        }
        std::fs::create_dir_all(at("killed").join(DIRECTORIES).join("closed")).unwrap();
        std::fs::set_permissions(at("killed").join(DIRECTORIES), std::fs::Permissions::from_mode(0o100)).unwrap();
        drop(UnixListener::bind(at("killed").join(SOCKET)).unwrap());
        let _listener = UnixListener::bind(at("running").join(SOCKET)).unwrap();
        remove_stale(place.path());
        assert!(!at("killed").exists() && at("running").exists() && at("starting").exists());
    }

    /// Eight ranks start at once, each with a run of its own: a socket that does not listen yet must not have the name by which
    /// another run would take it for that of one that was killed.
    #[test]
    fn a_run_that_starts_is_never_taken_for_one_that_was_killed() {
        use rustix::fs::inotify;
        let folder = tempfile::tempdir().unwrap();
        let notify = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK).unwrap();
        let made = inotify::WatchFlags::CREATE | inotify::WatchFlags::MOVED_TO;
        inotify::add_watch(&notify, folder.path(), made).unwrap();
        let _listener = listen(folder.path()).unwrap();
        let mut space = [std::mem::MaybeUninit::uninit(); 4096];
        let (mut events, mut named) = (inotify::Reader::new(&notify, &mut space), Vec::new());
        while let Ok(event) = events.next() {
            if event.file_name().is_some_and(|name| name.to_bytes() == SOCKET.as_bytes()) {
                named.push(event.events());
            }
        }
        assert_eq!(named, [inotify::ReadFlags::MOVED_TO], "it is made under another name");
        assert!(!is_refused(&folder.path().join(SOCKET)));
        UnixStream::connect(folder.path().join(SOCKET)).unwrap();
    }

    #[test]
    fn the_folder_is_its_owners_alone() {
        let place = tempfile::tempdir().unwrap();
        let before = rustix::process::umask(rustix::fs::Mode::empty());
        let folder = private_folder(place.path());
        rustix::process::umask(before);
        assert_eq!(folder.unwrap().path().metadata().unwrap().permissions().mode() & 0o7777, 0o700);
    }
}
