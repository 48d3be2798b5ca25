//! What the target names: a folder, a Unix socket or an address.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};

use crate::mount::{Kind, Remote, kind};
use crate::{Error, Options, Shared, Stop, errno_text};

/// A target that can be checked.
#[derive(Debug)]
pub(crate) enum Target {
    Folder(PathBuf),
    Nbd(Address),
}

/// Where an NBD server listens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Address {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

/// Finds out what the target is. An agent looks, so that a mount that does not answer is an error and not a hang.
pub(crate) fn resolve(options: &Options) -> Result<Target, Error> {
    let text = options.target.to_string_lossy().into_owned();
    if text.is_empty() {
        return Err(Error::Usage("the target is empty: give a folder, a Unix socket or host:port".into()));
    }
    let path = Path::new(&options.target);
    let shared = Shared::new(options);
    let here = std::env::current_dir().map_err(|error| Error::Target(format!("the current folder: {error}")))?;
    let mut agent = Remote::start(&options.agent, &here, 0, &shared)
        .map_err(|error| Error::Target(format!("an agent process cannot be started: {error}")))?;
    let stat = super::mount::Op::Stat { name: text.clone() };
    match agent.attempt(&stat, &[]) {
        Err(Stop::Fail(reason) | Stop::Skip(reason)) => Err(Error::Target(reason)),
        Ok(Err(libc::ENOENT)) => match address(&text)? {
            Some(address) => Ok(Target::Nbd(address)),
            None => Err(Error::Usage(format!(
                "{text}: no such file or directory; give a folder of a mount, the Unix socket of an NBD server, or its host:port"
            ))),
        },
        Ok(Err(errno)) => Err(Error::Usage(format!("{text}: {}", errno_text(errno)))),
        Ok(Ok((_, found))) => {
            let mode = postcard::from_bytes::<super::mount::Found>(&found).map_or(0, |found| found.mode);
            match kind(mode) {
                Kind::Folder => Ok(Target::Folder(here.join(path))),
                Kind::Socket => Ok(Target::Nbd(Address::Unix(here.join(path)))),
                Kind::Other => Err(Error::Usage(format!(
                    "{text}: is neither a folder nor a socket; give a folder of a mount, or the socket of an NBD server"
                ))),
            }
        }
    }
}

/// `host:port`; `None` when the text does not look like that.
fn address(text: &str) -> Result<Option<Address>, Error> {
    let Some((host, port)) = text.rsplit_once(':') else { return Ok(None) };
    if host.is_empty() || host.contains('/') || port.parse::<u16>().is_err() {
        return Ok(None);
    }
    let mut found = text.to_socket_addrs().map_err(|error| Error::Usage(format!("{text}: {error}")))?;
    Ok(found.next().map(Address::Tcp))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_told_from_paths() {
        let v4 = Address::Tcp("127.0.0.1:10809".parse().unwrap());
        assert_eq!(address("127.0.0.1:10809").unwrap(), Some(v4));
        assert!(matches!(address("[::1]:5"), Ok(Some(Address::Tcp(_)))));
        for path in ["/mnt/x:5", "name", "host:", ":1", "host:99999"] {
            assert_eq!(address(path).unwrap(), None, "{path}");
        }
    }
}
