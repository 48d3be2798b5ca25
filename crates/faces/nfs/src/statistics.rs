//! What is counted: calls and their times by procedure, and who loads the server, in bounded memory.

use std::hash::Hash;
use std::net::IpAddr;

use impresario_base::Histogram;
use impresario_base::lock::Mutex;
use impresario_engine::now;
use impresario_sched::loads::{Load, Loads, Party};
use impresario_sched::{Nanos, Op};
use serde_json::{Value, json};

use crate::protocol::PROCEDURES;

/// Numbers of the rows: the procedures of NFS, then those of MOUNT.
pub const ROWS: usize = PROCEDURES.len() + MOUNT_PROCEDURES.len();
/// Names of MOUNT's procedures, by number.
pub const MOUNT_PROCEDURES: [&str; 6] = ["null", "mnt", "dump", "umnt", "umntall", "export"];

#[derive(Default)]
struct Row {
    took_ns: Histogram<3>,
    failed: u64,
    postponed: u64,
}

/// All of it.
pub struct Statistics {
    rows: [Mutex<Row>; ROWS],
    clients: Mutex<Loads<IpAddr>>,
    users: Mutex<Loads<u32>>,
}

impl Default for Statistics {
    fn default() -> Self {
        Statistics {
            rows: std::array::from_fn(|_| Mutex::default()),
            clients: Mutex::default(),
            users: Mutex::default(),
        }
    }
}

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It was carried out.
    Done,
    /// It failed.
    Failed,
    /// Its client is to ask again.
    Postponed,
}

/// A call that has been answered.
#[derive(Clone, Copy)]
pub struct Answered {
    /// Its row.
    pub row: usize,
    /// From its arrival to its answer.
    pub took_ns: u64,
    /// How it ended.
    pub ended: Ended,
    /// The client.
    pub client: IpAddr,
    /// Its user, if it named one.
    pub user: Option<u32>,
    /// Bytes of files that it read.
    pub read_bytes: u64,
    /// Bytes of files that it wrote.
    pub written_bytes: u64,
}

/// Those that load the server most now, for its status.
fn describe<K: Hash + Eq + Copy + Ord + ToString>(loads: &mut Loads<K>, what: &str) -> Value {
    let told = Party::list(loads, now()).into_iter().map(|party| {
        json!({
            what: party.key,
            "calls": party.requests,
            "read_bytes": party.read_bytes,
            "written_bytes": party.write_bytes,
            "took_s": party.time_s,
            "recent_share": party.recent_share,
        })
    });
    told.collect()
}

impl Answered {
    fn load(&self) -> Load {
        let mut load = Load::of(Op::Read, self.read_bytes, Nanos(self.took_ns));
        load.write_bytes = self.written_bytes;
        load
    }
}

impl Statistics {
    /// A call was answered.
    pub fn count(&self, answered: &Answered) {
        if let Some(row) = self.rows.get(answered.row) {
            let mut row = row.lock();
            row.took_ns.record(answered.took_ns);
            row.failed += u64::from(answered.ended == Ended::Failed);
            row.postponed += u64::from(answered.ended == Ended::Postponed);
        }
        let (now, load) = (now(), answered.load());
        self.clients.lock().count(answered.client, now, &load);
        if let Some(user) = answered.user {
            self.users.lock().count(user, now, &load);
        }
    }

    /// For the server's status: only procedures that were called.
    pub fn describe(&self) -> Value {
        let names = PROCEDURES.iter().map(|name| name.to_string());
        let names = names.chain(MOUNT_PROCEDURES.iter().map(|name| format!("mount.{name}")));
        let rows = names.zip(&self.rows).filter_map(|(name, row)| {
            let row = row.lock();
            let (us, took) = (|ns: u64| ns as f64 / 1e3, &row.took_ns);
            let told = json!({
                "calls": took.count(),
                "failed": row.failed,
                "postponed": row.postponed,
                "mean_us": took.mean() / 1e3,
                "p50_us": us(took.quantile(0.5)),
                "p99_us": us(took.quantile(0.99)),
                "p999_us": us(took.quantile(0.999)),
                "max_us": us(took.max()),
                "histogram_ns": took.cumulative(11, 36),
            });
            (took.count() > 0).then_some((name, told))
        });
        let rows: serde_json::Map<String, Value> = rows.collect();
        json!({
            "procedures": rows,
            "clients": describe(&mut self.clients.lock(), "client"),
            "users": describe(&mut self.users.lock(), "user"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_loads_the_server_is_told_in_bounded_memory() {
        let statistics = Statistics::default();
        for n in 0..5000u32 {
            statistics.count(&Answered {
                row: 6,
                took_ns: u64::from(5000 - n),
                ended: if n == 0 { Ended::Postponed } else { Ended::Done },
                client: IpAddr::from(n.to_be_bytes()),
                user: Some(n),
                read_bytes: 1,
                written_bytes: 0,
            });
        }
        let told = statistics.describe();
        assert_eq!(told["procedures"]["read"]["calls"], 5000);
        assert_eq!(told["procedures"]["read"]["postponed"], 1);
        assert!(told["procedures"].get("write").is_none());
        let clients = told["clients"].as_array().unwrap();
        assert_eq!((clients.len(), &clients[0]["client"]), (Party::LISTED_MAX + 1, &json!("0.0.0.0")));
        let bytes: u64 = clients.iter().filter_map(|c| c["read_bytes"].as_u64()).sum();
        assert_eq!(bytes, 5000);
    }
}
