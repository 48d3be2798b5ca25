//! Where a server listens: `host:port` or `unix:/path`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// A server's address as in the configuration. Host names are resolved when connecting.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Address {
    /// TCP. An IPv6 host is without its brackets here.
    Tcp {
        /// Name or number of the host.
        host: String,
        /// Port, not 0: clients must be able to find it.
        port: u16,
    },
    /// A Unix socket of this machine.
    Unix(PathBuf),
}

impl Address {
    /// True when only programs on this machine can reach it: a Unix socket, or a loopback address. Goes by the text: what
    /// another name than `localhost` resolves to is not asked.
    pub fn is_of_this_machine(&self) -> bool {
        match self {
            Address::Unix(_) => true,
            Address::Tcp { host, .. } => is_loopback(host),
        }
    }
}

/// True for `localhost` and for numbers of the loopback network, with or without brackets.
pub(crate) fn is_loopback(host: &str) -> bool {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    host == "localhost" || bare.parse::<std::net::IpAddr>().is_ok_and(|number| number.to_canonical().is_loopback())
}

/// Size of the path in the kernel's `sockaddr_un`, including the closing NUL.
const UNIX_PATH_MAX_BYTES: usize = 107;

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return match path.len() {
                _ if !path.starts_with('/') => {
                    Err("a Unix socket needs an absolute path, such as unix:/run/data.0".into())
                }
                n if n > UNIX_PATH_MAX_BYTES => {
                    Err(format!("the socket's path has {n} bytes; the system allows {UNIX_PATH_MAX_BYTES}"))
                }
                _ => Ok(Address::Unix(path.into())),
            };
        }
        let form = "write host:port, such as 127.0.0.1:7000 or [::1]:7000, or unix:/path";
        let (host, port) = text.rsplit_once(':').ok_or(form)?;
        let bare = match host.strip_prefix('[') {
            Some(rest) => rest.strip_suffix(']').filter(|h| h.parse::<std::net::Ipv6Addr>().is_ok()).ok_or(form)?,
            None if host.contains(':') => return Err("put an IPv6 address in brackets, such as [::1]:7000".into()),
            None => host,
        };
        if bare.is_empty() || bare.contains(|c: char| c.is_whitespace() || c.is_control() || c == '/') {
            return Err(form.into());
        }
        match port.parse::<u16>() {
            Ok(port) if port > 0 => Ok(Address::Tcp { host: bare.into(), port }),
            _ => Err(format!("the port {port:?} is not between 1 and 65535")),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Address::Tcp { host, port } => write!(f, "{host}:{port}"),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_addresses_read_and_write_the_same() {
        for text in ["127.0.0.1:7000", "storage-3.example:1", "[::1]:65535", "unix:/run/impresario/data.0"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_only_this_machine_can_reach_needs_no_key() {
        use crate::Security;
        for here in ["127.0.0.1:7000", "127.9.9.9:1", "localhost:7000", "[::1]:7000", "[::ffff:127.0.0.1]:7", "unix:/s"]
        {
            assert!(!Security::Auto.needs_key(here) && Security::Key.needs_key(here), "{here}");
        }
        for beyond in
            ["0.0.0.0:7000", "[::]:7000", "10.0.0.1:7000", "storage:7000", "localhost.example:7000", "nonsense"]
        {
            assert!(Security::Auto.needs_key(beyond) && !Security::None.needs_key(beyond), "{beyond}");
        }
        assert!(!Security::Auto.needs_key("127.0.0.1:0") && Security::Auto.needs_key("10.0.0.1:0"));
    }

    #[test]
    fn bad_addresses_say_what_to_write() {
        for (text, remedy) in [
            ("", "host:port"),
            ("localhost", "host:port"),
            (":7000", "host:port"),
            ("a b:7000", "host:port"),
            ("::1:7000", "brackets"),
            ("[nonsense]:7000", "host:port"),
            ("localhost:0", "between 1 and 65535"),
            ("localhost:70000", "between 1 and 65535"),
            ("unix:data.0", "absolute path"),
        ] {
            let error = text.parse::<Address>().unwrap_err();
            assert!(error.contains(remedy), "{text}: {error}");
        }
        let long = format!("unix:/{}", "x".repeat(200));
        assert!(long.parse::<Address>().unwrap_err().contains("201 bytes"));
    }
}
