//! A program's connection to a cluster: which servers it speaks to, and through which of them.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use impresario_base::folders::Folders;
use impresario_base::lock::{Mutex, RwLock};
use impresario_config::Config;
use impresario_layout::Layout;
use impresario_wire::{Answer, Attr, Call, FileKey, KeyRole, MetaCall, ObjectInfo, SeekTo, Sought, SpaceChange, Who};

use crate::error::{ClientError, Peer};
use crate::file::DROP_WAIT_MAX;
use crate::identity::{Identity, TrafficCount};
use crate::link::Link;
use crate::locks::Orders;
use crate::opens::Opens;
use crate::pending::{Op, Reply, exchange};
use crate::striped::{ROUND_BYTES, Written, accepted, check_list, check_range, unasked, unexpected};
use crate::unsynced::Unsynced;
use crate::way::{DataPath, Way};
use crate::will_need::Hints;

/// Which way a client's requests go.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub enum Via {
    /// Through the I/O nodes that the configuration gives it (`[allocation]`); directly where it gives it none.
    #[default]
    Auto,
    /// Straight to the metadata server and the data servers.
    Direct,
    /// Through the I/O node of this index.
    IoNode(usize),
}

/// Who a client is and how it behaves.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// The application (job of the batch system); 0: unknown.
    pub job: u64,
    /// The user's number.
    pub user: u32,
    /// Program and host, for the servers' logs.
    pub name: String,
    /// Which way requests go.
    pub via: Via,
    /// Largest request on the wire, bytes: what an application asks for is cut into such pieces, all sent at once.
    /// `None`: as large as the servers take.
    pub wire_max_bytes: Option<u32>,
    /// Spreads clients over the I/O nodes, where nothing else does: consecutive numbers go to consecutive nodes.
    pub placement_seed: u64,
    /// Which key it shows to servers that want one.
    pub role: KeyRole,
}

impl Default for ClientOptions {
    fn default() -> Self {
        let (user, name) = crate::whoami();
        ClientOptions {
            job: 0,
            user,
            name,
            via: Via::Auto,
            wire_max_bytes: None,
            placement_seed: std::process::id().into(),
            role: KeyRole::Client,
        }
    }
}

/// A client of a cluster; many threads may use it at once.
pub struct Client {
    pub(crate) identity: Arc<Identity>,
    timeout: Duration,
    pub(crate) options: ClientOptions,
    pub(crate) is_of_tree: bool,
    /// The way of new requests.
    pub(crate) way: RwLock<Arc<Way>>,
    pub(crate) opens: Opens,
    pub(crate) hints: Hints,
    /// Of what was written, whichever way it went.
    pub(crate) unsynced: Arc<Unsynced>,
    pub(crate) lock_orders: Orders,
    /// Held while a lease begins or is given up.
    pub(crate) beginning_lease: Mutex<()>,
    /// Itself, for the thread that renews the lease.
    pub(crate) own: Weak<Client>,
}

impl Client {
    /// Connects to the metadata server, or to an I/O node and through it; fails after the cluster's
    /// `request_timeout_ms`. Data servers are connected when they are needed.
    pub fn connect(config: &Config, options: ClientOptions) -> Result<Arc<Client>, ClientError> {
        let identity = Arc::new(Identity::draw(options.job, options.user)?);
        let timeout = Duration::from_millis(config.cluster.request_timeout_ms);
        let unsynced = Arc::default();
        let way = Way::new(config, &options, &identity, &unsynced)?;
        way.meta.session(Instant::now() + timeout)?;
        let client = Arc::new_cyclic(|own| Client {
            identity,
            timeout,
            options,
            is_of_tree: config.tree.is_some(),
            way: RwLock::new(Arc::new(way)),
            opens: Opens::default(),
            hints: Hints::default(),
            unsynced,
            lock_orders: Orders::default(),
            beginning_lease: Mutex::default(),
            own: own.clone(),
        });
        Ok(client)
    }

    /// A metadata call. It is repeated when its connection is lost; the metadata server does it once.
    pub fn meta(&self, call: MetaCall) -> Result<Answer, ClientError> {
        self.ask(call).map(|reply| reply.answer)
    }

    /// Reads from a file's data. Short only at the end of the file; holes are zeros.
    pub fn read(&self, file: FileKey, layout: &Layout, offset: u64, into: &mut [u8]) -> Result<usize, ClientError> {
        self.read_made(Folders::default(), file, layout, 0, offset, into)
    }

    /// The same of a file that was opened in these folders, and is known to have the objects `made` ([`ObjectInfo::made`]): that one of
    /// them is missing is an error, not a hole.
    pub fn read_made(
        &self,
        folders: Folders,
        file: FileKey,
        layout: &Layout,
        made: u64,
        offset: u64,
        into: &mut [u8],
    ) -> Result<usize, ClientError> {
        let way = self.way();
        let piece_max = match &way.data {
            DataPath::Direct(striped) => {
                return striped.read(&self.who_in(folders), file, layout, made, offset, into);
            }
            DataPath::IoNode { piece_max_bytes } => *piece_max_bytes,
        };
        check_range(offset, into.len())?;
        let mut done = 0;
        for round in into.chunks_mut(ROUND_BYTES) {
            let (deadline, round_len) = (self.deadline(), round.len());
            let mut pieces: Vec<_> =
                round.chunks_mut(piece_max).map(|piece| [std::io::IoSliceMut::new(piece)]).collect();
            let lens: Vec<usize> = pieces.iter().map(|[piece]| piece.len()).collect();
            let mut at = offset + done as u64;
            let ops = pieces.iter_mut().map(|piece| {
                let len = piece.iter().map(|p| p.len()).sum::<usize>() as u32;
                let call = Call::FileRead { who: self.who_in(folders), file, layout: *layout, made, offset: at, len };
                at += u64::from(len);
                Op { link: &way.meta, call, payload: &[], into: Some(piece) }
            });
            let mut got = 0;
            let mut has_ended = false;
            for (reply, len) in exchange(ops.collect(), deadline).into_iter().zip(lens) {
                let reply = reply?;
                if reply.answer != Answer::Data {
                    return Err(unexpected(&reply));
                }
                // What a later piece brought was appended after an earlier one had met the end.
                if !has_ended {
                    got += reply.len;
                    has_ended = reply.len < len;
                }
            }
            done += got;
            if got < round_len {
                break;
            }
        }
        Ok(done)
    }

    /// Reads extents (offset, length) of a file into `into`, back to back. They may overlap and come in any order.
    /// Returns the bytes of each that lie before the end of the file; holes are zeros. Without I/O nodes it is one list
    /// request to each data server; I/O nodes get a request for each extent, all sent together.
    pub fn read_list(
        &self,
        file: FileKey,
        layout: &Layout,
        extents: &[(u64, usize)],
        into: &mut [u8],
    ) -> Result<Vec<usize>, ClientError> {
        self.read_list_made(Folders::default(), file, layout, 0, extents, into)
    }

    /// As [`Client::read_made`].
    pub(crate) fn read_list_made(
        &self,
        folders: Folders,
        file: FileKey,
        layout: &Layout,
        made: u64,
        extents: &[(u64, usize)],
        into: &mut [u8],
    ) -> Result<Vec<usize>, ClientError> {
        let way = self.way();
        let piece_max = match &way.data {
            DataPath::Direct(striped) => {
                return striped.read_list(&self.who_in(folders), file, layout, made, extents, into);
            }
            DataPath::IoNode { piece_max_bytes } => *piece_max_bytes,
        };
        check_list(extents, into.len())?;
        let mut parts = Vec::with_capacity(extents.len());
        let mut rest = into;
        for (index, (offset, len)) in extents.iter().enumerate() {
            let (mine, later) = rest.split_at_mut((*len).min(rest.len()));
            rest = later;
            let pieces = mine.chunks_mut(piece_max).zip((*offset..).step_by(piece_max));
            parts.extend(pieces.map(|(piece, at)| (index, at, piece.len(), [std::io::IoSliceMut::new(piece)])));
        }
        let mut got = vec![0; extents.len()];
        // An extent ends where its first short piece does.
        let mut ended = vec![false; extents.len()];
        for round in parts.chunks_mut((ROUND_BYTES / piece_max).max(1)) {
            let deadline = self.deadline();
            let places: Vec<_> = round.iter().map(|(index, _, len, _)| (*index, *len)).collect();
            let ops = round.iter_mut().map(|(_, offset, len, piece)| {
                let (who, layout, offset, len) = (self.who_in(folders), *layout, *offset, *len as u32);
                let call = Call::FileRead { who, file, layout, made, offset, len };
                Op { link: &way.meta, call, payload: &[], into: Some(piece) }
            });
            for (reply, (index, len)) in exchange(ops.collect(), deadline).into_iter().zip(places) {
                let reply = reply?;
                if reply.answer != Answer::Data {
                    return Err(unexpected(&reply));
                }
                if let (Some(got), Some(ended)) = (got.get_mut(index), ended.get_mut(index))
                    && !*ended
                {
                    *got += reply.len;
                    *ended = reply.len < len;
                }
            }
        }
        Ok(got)
    }

    /// Writes all bytes into a file's data. When it fails, some of them may have been written.
    pub fn write(&self, file: FileKey, layout: &Layout, offset: u64, bytes: &[u8]) -> Result<usize, ClientError> {
        let written = self.write_some(Folders::default(), file, layout, offset, bytes)?;
        written.error.map_or(Ok(written.bytes), Err)
    }

    /// The same; tells how many bytes are good.
    pub(crate) fn write_some(
        &self,
        folders: Folders,
        file: FileKey,
        layout: &Layout,
        offset: u64,
        bytes: &[u8],
    ) -> Result<Written, ClientError> {
        let way = self.way();
        let piece_max = match &way.data {
            DataPath::Direct(striped) => return striped.write_some(&self.who_in(folders), file, layout, offset, bytes),
            DataPath::IoNode { piece_max_bytes } => *piece_max_bytes,
        };
        check_range(offset, bytes.len())?;
        let mut at = offset;
        let mut good = 0;
        for round in bytes.chunks(ROUND_BYTES) {
            let deadline = self.deadline();
            let pieces: Vec<_> = round.chunks(piece_max).map(|piece| [std::io::IoSlice::new(piece)]).collect();
            let ops = pieces.iter().map(|piece| {
                let call = Call::FileWrite { who: self.who_in(folders), file, layout: *layout, offset: at };
                at += piece.iter().map(|p| p.len() as u64).sum::<u64>();
                Op { link: &way.meta, call, payload: piece, into: None }
            });
            // Every answer is taken: what was written is to be synced, whatever became of the rest.
            let mut failed = None;
            for (reply, [piece]) in exchange(ops.collect(), deadline).into_iter().zip(&pieces) {
                let written = reply.and_then(|reply| match &reply.answer {
                    Answer::FileWritten { bytes, lanes } if *bytes as usize == piece.len() => {
                        lanes.iter().for_each(|lane| self.unsynced.note_write(file, *lane));
                        Ok(piece.len())
                    }
                    _ => Err(unexpected(&reply)),
                });
                match written {
                    Ok(len) if failed.is_none() => good += len,
                    Ok(_) => {}
                    Err(error) => failed = failed.or(Some(error)),
                }
            }
            if failed.is_some() {
                return Ok(Written { bytes: good, error: failed });
            }
        }
        Ok(Written { bytes: good, error: None })
    }

    /// Changes the space of a range (offset, length) of a file. When it fails, some of it may have been done, but the end has
    /// not moved.
    pub fn change_space(
        &self,
        file: FileKey,
        layout: &Layout,
        change: SpaceChange,
        (offset, len): (u64, u64),
    ) -> Result<(), ClientError> {
        let who = self.identity.who();
        match &self.way().data {
            DataPath::Direct(striped) => striped.change_own_space(&who, file, layout, change, (offset, len)),
            DataPath::IoNode { .. } => {
                let call = Call::FileChangeSpace { who, file, layout: *layout, change, offset, len };
                let reply = self.io(call)?;
                let Answer::FileWritten { lanes, .. } = &reply.answer else { return Err(unexpected(&reply)) };
                lanes.iter().for_each(|lane| self.unsynced.note_write(file, *lane));
                Ok(())
            }
        }
    }

    /// Looks in a file, which is known to have the objects `made`, for data or a hole.
    pub fn seek(
        &self,
        file: FileKey,
        layout: &Layout,
        made: u64,
        from: u64,
        to: SeekTo,
    ) -> Result<Sought, ClientError> {
        match &self.way().data {
            DataPath::Direct(striped) => striped.seek(file, layout, made, from, to),
            DataPath::IoNode { .. } => {
                let reply = self.io(Call::FileSeek { file, layout: *layout, made, from, to })?;
                if let Answer::Sought(sought) = reply.answer { Ok(sought) } else { Err(unexpected(&reply)) }
            }
        }
    }

    /// Tells the data servers that `len` bytes of a file from `offset` on will be read. Returns how many of them are, or are
    /// going to be, in their memory; see [`File::prefetch`](crate::File::prefetch).
    pub fn prefetch(
        &self,
        folders: Folders,
        file: FileKey,
        layout: &Layout,
        offset: u64,
        len: u64,
    ) -> Result<u64, ClientError> {
        let who = self.who_in(folders);
        match &self.way().data {
            DataPath::Direct(striped) => striped.prefetch(&who, file, layout, offset, len),
            DataPath::IoNode { .. } => {
                accepted(&self.io(Call::FilePrefetch { who, file, layout: *layout, offset, len })?)
            }
        }
    }

    /// The sender of a request for a file that was opened in these folders.
    fn who_in(&self, folders: Folders) -> Who {
        Who { folders, ..self.identity.who() }
    }

    /// Makes a file's data durable. Its size and name are the metadata server's: see [`File::sync`](crate::File::sync).
    pub fn sync_data(&self, file: FileKey, layout: &Layout) -> Result<(), ClientError> {
        let who = self.identity.who();
        match &self.way().data {
            DataPath::Direct(striped) => striped.sync(&who, file, layout),
            DataPath::IoNode { .. } => {
                let mark = self.unsynced.writes();
                let reply = self.io(Call::FileSync { who, file, layout: *layout })?;
                let Answer::FileSynced { lanes, errno } = &reply.answer else { return Err(unexpected(&reply)) };
                self.unsynced.judge(file, mark, lanes, *errno, |_| Ok(reply.peer.clone()))
            }
        }
    }

    /// Length, last modification and storage used of a file, as its objects have them.
    pub fn stat_data(&self, file: FileKey, layout: &Layout) -> Result<ObjectInfo, ClientError> {
        match &self.way().data {
            DataPath::Direct(striped) => striped.stat(file, layout),
            DataPath::IoNode { .. } => {
                let reply = self.io(Call::FileStat { file, layout: *layout })?;
                if let Answer::Object(info) = reply.answer { Ok(info) } else { Err(unexpected(&reply)) }
            }
        }
    }

    /// The attributes in the answer of a server. What was cut is to be synced like what was written.
    pub(crate) fn attributes(&self, answer: Answer, peer: impl FnOnce() -> Peer) -> Result<Attr, ClientError> {
        match answer {
            Answer::Attr(attr) => Ok(attr),
            Answer::Cut { attr, file, lanes } => {
                lanes.into_iter().for_each(|lane| self.unsynced.note_write(file, lane));
                Ok(attr)
            }
            other => Err(unasked(peer(), &other)),
        }
    }

    /// Whether its requests go straight to the servers now.
    pub fn is_direct(&self) -> bool {
        matches!(self.way().data, DataPath::Direct(_))
    }

    /// Who this client is.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Data requests that left this client so far.
    pub fn traffic(&self) -> TrafficCount {
        self.identity.traffic.now()
    }

    /// After this time without an answer an operation fails.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The way that a new request takes, to its end.
    pub(crate) fn way(&self) -> Arc<Way> {
        self.way.read().clone()
    }

    pub(crate) fn meta_link(&self) -> Arc<Link> {
        self.way.read().meta.clone()
    }

    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    fn io(&self, call: Call) -> Result<Reply, ClientError> {
        self.meta_link().call(call, &[], None, self.deadline())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // What is not served before its connection ends would leave files open for the time that a client may take to come back.
        let wait = DROP_WAIT_MAX.min(self.timeout);
        self.opens.await_answers(self, wait, wait);
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("server", &self.meta_link().peer()).finish_non_exhaustive()
    }
}
