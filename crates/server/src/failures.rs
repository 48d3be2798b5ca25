//! What is said of the file system below a server while it fails: of each kind of failure a line a minute and a count, so that an
//! administrator learns which folder it is, and a device that fails every call does not fill the log.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::time::Instant;

use impresario_base::complaints::Complaints;
use impresario_base::lock::Mutex;
use serde_json::{Value, json};

/// The failures that are the file system's or its device's, not the caller's.
const KINDS: [(i32, &str); 12] = [
    (libc::EIO, "EIO"),
    (libc::EROFS, "EROFS"),
    (libc::EUCLEAN, "EUCLEAN"),
    (libc::EBADMSG, "EBADMSG"),
    (libc::ENODEV, "ENODEV"),
    (libc::ENOMEDIUM, "ENOMEDIUM"),
    (libc::EREMOTEIO, "EREMOTEIO"),
    (libc::ETIMEDOUT, "ETIMEDOUT"),
    (libc::ENOTCONN, "ENOTCONN"),
    (libc::ECONNABORTED, "ECONNABORTED"),
    (libc::ENOLINK, "ENOLINK"),
    (libc::EHOSTDOWN, "EHOSTDOWN"),
];

/// The failures of the file system below a server.
pub(crate) struct Failures {
    server: String,
    /// The folder, or what else the server keeps its files in; empty: nothing.
    place: String,
    kinds: Mutex<BTreeMap<&'static str, Failed>>,
    complaints: Complaints,
}

struct Failed {
    count: u64,
    last: Instant,
}

impl Failures {
    /// Of the server of this name, which keeps its files in `place`.
    pub(crate) fn new(server: &str, place: &str) -> Failures {
        Failures {
            server: server.into(),
            place: place.into(),
            kinds: Mutex::default(),
            complaints: Complaints::default(),
        }
    }

    /// Whether this number says that a file system fails.
    pub(crate) fn has_kind(errno: i32) -> bool {
        KINDS.iter().any(|(number, _)| *number == errno)
    }

    /// The file system has failed a call with this number, if it is one of those that say so.
    pub(crate) fn note(&self, errno: i32, error: &dyn Display) {
        let Some((_, kind)) = KINDS.iter().find(|(number, _)| *number == errno) else { return };
        if let Some(count) = self.is_due(kind, Instant::now()) {
            let Failures { server, place, .. } = self;
            tracing::error!(
                server,
                kind,
                count,
                "the file system of {place} fails: {error}; see the log of the kernel (dmesg) and the device below it; calls \
                 fail until it works again"
            );
        }
    }

    /// Counts a failure; how many there were, if that is to be told.
    fn is_due(&self, kind: &'static str, now: Instant) -> Option<u64> {
        let mut kinds = self.kinds.lock();
        let failed = kinds.entry(kind).or_insert(Failed { count: 0, last: now });
        (failed.count, failed.last) = (failed.count + 1, now);
        self.complaints.is_due(kind, now).then_some(failed.count)
    }

    /// For the status; `None` while there were none.
    pub(crate) fn as_json(&self) -> Option<Value> {
        let kinds = self.kinds.lock();
        let kind = |(kind, failed): (&&str, &Failed)| {
            (kind.to_string(), json!({ "count": failed.count, "last_s": failed.last.elapsed().as_secs_f64() }))
        };
        let told: serde_json::Map<String, Value> = kinds.iter().map(kind).collect();
        (!told.is_empty()).then(|| json!({ "place": self.place, "kinds": told }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use impresario_base::complaints::QUIET;

    #[test]
    fn each_kind_is_told_once_a_minute_and_counted() {
        let failures = Failures::new("data.0", "/srv/data.0");
        assert_eq!(failures.as_json(), None);
        failures.note(libc::ENOENT, &"the caller's");
        assert_eq!(failures.as_json(), None);
        let now = Instant::now();
        assert_eq!(failures.is_due("EIO", now), Some(1));
        assert_eq!(failures.is_due("EIO", now + QUIET / 2), None);
        assert_eq!(failures.is_due("EROFS", now + QUIET / 2), Some(1));
        assert_eq!(failures.is_due("EIO", now + QUIET), Some(3));
        failures.note(libc::EIO, &"again");
        let told = failures.as_json().unwrap();
        assert_eq!(
            (&told["kinds"]["EIO"]["count"], &told["kinds"]["EROFS"]["count"]),
            (&json!(4), &json!(1)),
            "{told}"
        );
        assert_eq!(told["place"], "/srv/data.0");
    }
}
