//! Options that a server must answer, and clients that do not keep to the protocol.

use super::Site;
use super::data::after;
use super::link::{Link, OPT_ABORT, OPT_EXPORT_NAME, OPT_GO, OPTION_MAGIC, READ, REP_ACK, REP_ERR};
use crate::{Checking, fault};

/// An option that the protocol does not have.
const UNKNOWN_OPTION: u32 = 0x1234_5678;
/// Connections that say nothing.
const SILENT: usize = 8;

pub(super) fn handshake(site: &mut Site) -> Checking {
    let mut link = greet(site)?;
    for (option, data) in [(UNKNOWN_OPTION, &b""[..]), (UNKNOWN_OPTION, &[7; 1000]), (OPT_GO, &[0xff; 7])] {
        let kind = link.option(option, data)?;
        if kind & REP_ERR == 0 {
            return fault(format!(
                "option {option:#x} with {} bytes: expected an error, found reply {kind}",
                data.len()
            ));
        }
    }
    // The connection goes on after each.
    if link.option(OPT_ABORT, &[])? != REP_ACK {
        return fault("NBD_OPT_ABORT is not acknowledged");
    }
    if !link.is_closed() {
        return fault("after NBD_OPT_ABORT the server does not close the connection");
    }
    served(site, "after NBD_OPT_ABORT")?;

    // Clients that say nothing, in every phase.
    let mut silent = Vec::new();
    for _ in 0..SILENT {
        silent.push(greet(site)?);
        let mut half = greet(site)?;
        half.send_option(OPTION_MAGIC, OPT_GO, 64, &[0; 8])?;
        silent.push(half);
    }
    served(site, "beside clients that say nothing")?;
    drop(silent);
    served(site, "after clients that ended in the middle of an option")?;

    // What can only be refused: whatever the server answers, the next client is served.
    for (magic, option, len, what) in [
        (0x4141_4141_4141_4141, OPT_GO, 0, "an option with a wrong magic number"),
        (OPTION_MAGIC, OPT_GO, u32::MAX, "an option of 4 GiB"),
        (OPTION_MAGIC, OPT_EXPORT_NAME, 1 << 20, "an export's name of 1 MiB"),
        (OPTION_MAGIC, UNKNOWN_OPTION, u32::MAX, "an unknown option of 4 GiB"),
    ] {
        let mut bad = greet(site)?;
        bad.send_option(magic, option, len, &[0x41; 4096])?;
        served(site, &format!("beside {what}"))?;
        bad.cut();
    }
    served(site, "after damaged options")
}

fn greet(site: &Site) -> Checking<Link> {
    Link::greet(&site.address, &site.shared)
}

/// Whether a new client gets through.
fn served(site: &Site, when: &str) -> Checking {
    let through = site.link().and_then(|mut link| link.call(READ, 0, 0, site.grain as u32, &[]));
    through.map(drop).map_err(|stop| after(stop, when))
}
