//! Who a client is: its key, epoch and request numbers, and what it has sent.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use impresario_base::machine;
use impresario_node::session::Epoch;
use impresario_transport::Membership;
use impresario_wire::{ClientKey, Who};

use crate::caller::Caller;
use crate::error::{ClientError, Errno};
use crate::leases::Leases;
use crate::passes::Passes;

/// A client as its servers know it; shared by all its links.
#[derive(Debug)]
pub struct Identity {
    client: ClientKey,
    epoch: Epoch,
    sequence: AtomicU64,
    job: u64,
    user: u32,
    /// The user that the program runs as.
    own_uid: u32,
    /// The cluster that its servers must be of.
    membership: Arc<Membership>,
    /// The file locks of this client.
    pub(crate) leases: Leases,
    /// What it shows for the files that it has open.
    pub(crate) passes: Passes,
    /// What left this client.
    pub traffic: Traffic,
}

impl Identity {
    /// A new client with a key drawn at random.
    pub fn draw(job: u64, user: u32) -> Result<Identity, ClientError> {
        let key = machine::random_number().map_err(|error| ClientError::System {
            what: "drawing a random client key".into(),
            errno: Errno(error.raw_os_error().unwrap_or(libc::EIO)),
        })?;
        let who = Who { client: ClientKey(key), job, user, ..Who::default() };
        Ok(Identity::of(who))
    }

    /// The program that runs, as a client of its own.
    pub fn of_program() -> Result<Identity, ClientError> {
        Identity::draw(0, whoami().0)
    }

    /// A given client; for servers that speak for another.
    pub fn of(who: Who) -> Identity {
        Identity {
            client: who.client,
            epoch: Epoch::new(who.epoch),
            sequence: AtomicU64::new(who.sequence),
            job: who.job,
            user: who.user,
            own_uid: rustix::process::geteuid().as_raw(),
            membership: Arc::default(),
            leases: Leases::default(),
            passes: Passes::default(),
            traffic: Traffic::default(),
        }
    }

    /// The same client, of a cluster that others know too.
    pub fn with_membership(self, membership: Arc<Membership>) -> Identity {
        Identity { membership, ..self }
    }

    /// The cluster that its servers must be of; learnt from the first of them where it was not known.
    pub fn membership(&self) -> &Arc<Membership> {
        &self.membership
    }

    /// The client's key.
    pub fn client(&self) -> ClientKey {
        self.client
    }

    /// The sender of a new request: numbered, under the present epoch.
    pub fn who(&self) -> Who {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed) + 1;
        let epoch = self.epoch();
        Who { client: self.client, epoch, since: epoch, sequence, job: self.job, user: self.user, ..Who::default() }
    }

    /// The same of a request to the metadata server: for the user for whom this thread asks.
    pub(crate) fn asker(&self) -> Who {
        Who { user: Caller::now().map_or(self.own_uid, |caller| caller.uid), ..self.who() }
    }

    /// The present epoch.
    pub fn epoch(&self) -> u32 {
        self.epoch.now()
    }

    /// The epoch itself, for the machines that begin new ones.
    pub(crate) fn epochs(&self) -> &Epoch {
        &self.epoch
    }
}

/// Data requests that were sent, counted once each time they leave.
#[derive(Debug, Default)]
pub struct Traffic {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
}

/// [`Traffic`] at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct TrafficCount {
    /// Read requests.
    pub reads: u64,
    /// Bytes they asked for.
    pub read_bytes: u64,
    /// Write requests.
    pub writes: u64,
    /// Bytes they carried.
    pub written_bytes: u64,
}

impl TrafficCount {
    /// Data requests in all.
    pub fn requests(&self) -> u64 {
        self.reads + self.writes
    }

    /// Mean request leaving the client, bytes; 0 when there was none.
    pub fn mean_request_bytes(&self) -> f64 {
        match self.requests() {
            0 => 0.0,
            requests => (self.read_bytes + self.written_bytes) as f64 / requests as f64,
        }
    }
}

impl Traffic {
    /// A read of `bytes` is sent.
    pub fn count_read(&self, bytes: u64) {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.read_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// A write of `bytes` is sent.
    pub fn count_write(&self, bytes: u64) {
        self.writes.fetch_add(1, Ordering::Relaxed);
        self.written_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// The counts now.
    pub fn now(&self) -> TrafficCount {
        TrafficCount {
            reads: self.reads.load(Ordering::Relaxed),
            read_bytes: self.read_bytes.load(Ordering::Relaxed),
            writes: self.writes.load(Ordering::Relaxed),
            written_bytes: self.written_bytes.load(Ordering::Relaxed),
        }
    }
}

/// The user's number, and a name for logs: program, process and host, e.g. `cp[4711]@node3`.
pub fn whoami() -> (u32, String) {
    let program = std::env::current_exe().ok();
    let program =
        program.as_deref().and_then(|path| path.file_name()).map_or("?".into(), |name| name.to_string_lossy());
    (rustix::process::getuid().as_raw(), format!("{program}[{}]@{}", std::process::id(), machine::host_name()))
}
