//! The program MOUNT (RFC 1813, appendix I): from an export's path to the handle of its root.

use std::collections::VecDeque;
use std::net::IpAddr;

use impresario_backend::Kind;
use impresario_base::lock::Mutex;

use crate::protocol::Status;
use crate::service::Asker;
use crate::xdr::{Garbage, Reader, Writer};

/// Longest path, bytes (RFC 1813, 5.1.4).
const PATH_MAX_BYTES: usize = 1024;
/// Mounts remembered for DUMP; the oldest are forgotten. The list is for people: nothing depends on it.
const MOUNTS_MAX: usize = 1024;
/// AUTH_SYS; calls with AUTH_NONE act as the anonymous user and are not offered.
const FLAVOR: u32 = 1;

/// Who has mounted what, as far as is known.
#[derive(Default)]
pub struct Mounts(Mutex<VecDeque<(IpAddr, String)>>);

impl Mounts {
    fn add(&self, client: IpAddr, path: &str) {
        let (mut mounts, one) = (self.0.lock(), (client, path.to_string()));
        mounts.retain(|known| *known != one);
        if mounts.len() >= MOUNTS_MAX {
            mounts.pop_front();
        }
        mounts.push_back(one);
    }

    fn remove(&self, client: IpAddr, path: Option<&str>) {
        self.0.lock().retain(|(who, what)| *who != client || path.is_some_and(|path| path != what));
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.lock().len()
    }
}

/// Serves a call: writes its results, and gives its status.
pub fn serve(asker: &Asker<'_>, procedure: u32, args: &mut Reader<'_>, out: &mut Writer) -> Result<Status, Garbage> {
    const MNT: u32 = 1;
    const DUMP: u32 = 2;
    const UMNT: u32 = 3;
    const UMNTALL: u32 = 4;
    const EXPORT: u32 = 5;
    let (mounts, client) = (&asker.service.mounts, asker.peer.ip());
    let path = if procedure == MNT || procedure == UMNT { args.opaque(PATH_MAX_BYTES)? } else { b"" };
    args.end()?;
    let text = std::str::from_utf8(path);
    match procedure {
        MNT => match text.map_err(|_| Status::NOENT).and_then(|path| find(asker, path).map(|found| (path, found))) {
            Ok((path, sealed)) => {
                mounts.add(client, path);
                out.u32(0).opaque(&sealed).u32(1).u32(FLAVOR);
            }
            Err(status) => {
                // The numbers are the same, but there are fewer.
                let known =
                    [Status::PERM, Status::NOENT, Status::IO, Status::ACCES, Status::NOTDIR, Status::NAMETOOLONG];
                let status = if known.contains(&status) { status } else { Status::SERVERFAULT };
                out.u32(status.0);
                return Ok(status);
            }
        },
        DUMP => {
            for (who, what) in mounts.0.lock().iter() {
                out.bool(true).opaque(who.to_string().as_bytes()).opaque(what.as_bytes());
            }
            out.bool(false);
        }
        UMNT => text.iter().for_each(|path| mounts.remove(client, Some(path))),
        UMNTALL => mounts.remove(client, None),
        EXPORT => {
            let admitted = |rules: &crate::Rules| rules.access.admits(client);
            for export in asker.service.exports.iter().filter(|export| admitted(&export.rules)) {
                out.bool(true).opaque(export.name.as_bytes());
                for network in &export.rules.access.networks {
                    out.bool(true).opaque(network.to_string().as_bytes());
                }
                out.bool(false);
            }
            out.bool(false);
        }
        _ => {}
    }
    Ok(Status::OK)
}

/// The handle of a directory in an export; links are not followed.
fn find(asker: &Asker<'_>, path: &str) -> Result<Vec<u8>, Status> {
    let (export, below) = asker.service.exports.by_path(path).ok_or(Status::NOENT)?;
    if !export.rules.access.admits(asker.peer.ip()) {
        // To others it is not there.
        return Err(Status::NOENT);
    }
    if !export.rules.admits(asker.peer.ip(), asker.peer.port()) {
        return Err(Status::ACCES);
    }
    // It may have been removed, and made anew.
    let export = asker.service.exports.present(export)?;
    let server = crate::exports::server();
    let mut at = export.root;
    for name in below.split('/').filter(|name| !name.is_empty()) {
        if name == "." || name == ".." {
            return Err(Status::NOENT);
        }
        let (node, attr) = export.backend.lookup(&server, &at, name.as_bytes())?;
        if attr.kind != Kind::Directory {
            return Err(Status::NOTDIR);
        }
        at = node;
    }
    // Says whether it is still there.
    export.backend.attr(&at)?;
    Ok(asker.service.key.seal(export.number, &at))
}
