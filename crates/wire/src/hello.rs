//! Who speaks to whom: identities, and the first frames on a connection.

use serde::{Deserialize, Serialize};

#[cfg(doc)]
use crate::message::Call;

/// Version of the protocol; both sides must speak the same.
pub const PROTOCOL_VERSION: u32 = 16;

/// A cluster's identity, drawn at random when its metadata folder is made; every folder of the cluster bears it. 0: not
/// known yet.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug, Serialize, Deserialize)]
pub struct ClusterId(pub u64);

impl std::fmt::Display for ClusterId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl std::str::FromStr for ClusterId {
    type Err = String;

    fn from_str(text: &str) -> Result<ClusterId, String> {
        let digits = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let id = digits.then(|| u64::from_str_radix(text, 16).ok()).flatten().filter(|id| *id != 0);
        id.map(ClusterId).ok_or_else(|| {
            format!("{text:?} is not the identity of a cluster, which has 16 hexadecimal digits: see `impresario store show`")
        })
    }
}

/// A client's identity, drawn at random when it starts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug, Serialize, Deserialize)]
pub struct ClientKey(pub u64);

/// Who a request is from; on every request, so that it survives forwarding.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug, Serialize, Deserialize)]
pub struct Who {
    /// The client.
    pub client: ClientKey,
    /// Raised by the client whenever it gives up a path to a server; older epochs are fenced.
    pub epoch: u32,
    /// Number of the request within the client; a retry keeps it.
    pub sequence: u64,
    /// The oldest epoch under which a copy of the request was sent that may have been done; `epoch` when there is none.
    pub since: u32,
    /// The application (job of the batch system); 0 when unknown.
    pub job: u64,
    /// The user's number.
    pub user: u32,
    /// The folders that lead to the file that the request is about, as the client opened it, by number
    /// (`impresario_base::folders`); zeros where that is not known.
    pub folders: [u32; 4],
}

impl Who {
    /// An earlier copy of the request may have been done.
    pub fn is_copy(&self) -> bool {
        self.since < self.epoch
    }
}

/// Who has sent some of the bytes of a request that an I/O node has put together from several.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug, Serialize, Deserialize)]
pub struct Sender {
    /// The client.
    pub client: ClientKey,
    /// The epoch under which it sent them.
    pub epoch: u32,
    /// The number of its request, as in [`Who::sequence`].
    pub sequence: u64,
}

impl From<&Who> for Sender {
    fn from(who: &Who) -> Sender {
        Sender { client: who.client, epoch: who.epoch, sequence: who.sequence }
    }
}

/// What kind of server is spoken to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Role {
    /// The metadata server.
    Meta,
    /// A data server.
    Data,
    /// An I/O node.
    Io,
    /// Whatever listens there: for questions that every server answers, such as [`Call::Status`].
    Any,
}

impl Role {
    /// True when a server of this role may welcome a peer that wished to speak to `wished`.
    pub fn serves(self, wished: Role) -> bool {
        wished == self || wished == Role::Any
    }
}

/// What the holder of a key may do; see [`may_send`](crate::may_send).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum KeyRole {
    /// Uses files and reads the state of servers.
    Client,
    /// The same, and changes how servers behave.
    Admin,
    /// Is a server: speaks for clients.
    Server,
}

impl KeyRole {
    /// All roles.
    pub const ALL: [KeyRole; 3] = [KeyRole::Client, KeyRole::Admin, KeyRole::Server];

    /// Its name, in files and messages.
    pub fn name(self) -> &'static str {
        match self {
            KeyRole::Client => "client",
            KeyRole::Admin => "admin",
            KeyRole::Server => "server",
        }
    }
}

impl std::fmt::Display for KeyRole {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Where keys are used: first frame on a connection, from the side that opened it. The hello follows once both sides have
/// proved their keys.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct KeyOffer {
    /// [`PROTOCOL_VERSION`] of the sender.
    pub version: u32,
    /// The number of the key.
    pub key: u64,
    /// The role that it gives.
    pub role: KeyRole,
    /// First message of the Noise hand-shake.
    pub noise: Vec<u8>,
}

/// The server's reply to a [`KeyOffer`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct KeyProof {
    /// Second message of the Noise hand-shake.
    pub noise: Vec<u8>,
}

/// First frame on a connection, from the side that opened it; after the keys, where these are used.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL_VERSION`] of the sender.
    pub version: u32,
    /// The sender.
    pub who: Who,
    /// The role that the sender believes it speaks to.
    pub role: Role,
    /// For logs: program and host of the sender, cut to 256 bytes.
    pub name: String,
    /// The cluster that the sender belongs to, as far as it knows.
    pub cluster: ClusterId,
    /// A credential of MUNGE that says which user the sender's is, where that has to be proved; otherwise empty.
    pub credential: Vec<u8>,
}

/// The server's answer to [`Hello`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Welcome {
    /// [`PROTOCOL_VERSION`] of the server.
    pub version: u32,
    /// The server's name in the configuration.
    pub name: String,
    /// Drawn anew at each start of the server: tells a restart from a broken connection. The upper 32 bits name the
    /// boot of its machine.
    pub incarnation: u64,
    /// Largest payload of one request or reply, bytes.
    pub max_payload_bytes: u32,
    /// The cluster that the server belongs to, as far as it knows.
    pub cluster: ClusterId,
    /// The identity of its folder, drawn at random when the folder was made; 0 where it has none.
    pub store: u64,
    /// Of a data server: its number among those of its cluster, by which the layouts of files name it.
    pub number: Option<u16>,
    /// Of a data server: below which keys it has, or had, objects.
    pub keys: HeldKeys,
}

/// Below which keys a data server has, or had, objects. A key consists of the number of a metadata folder in its upper bits, the
/// prefix, and of a count below it.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct HeldKeys {
    /// Prefixes, with the count below which there may be objects.
    pub by_prefix: Vec<(u32, u64)>,
    /// The count for all other prefixes.
    pub others: u64,
}

impl HeldKeys {
    /// The count below which there may be objects with keys of this prefix.
    pub fn below(&self, prefix: u64) -> u64 {
        let found = self.by_prefix.iter().find(|(known, _)| u64::from(*known) == prefix);
        found.map_or(self.others, |(_, below)| *below)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_identity_of_a_cluster_is_read_back_and_others_are_not() {
        let id = ClusterId(0xab);
        assert_eq!(id.to_string(), "00000000000000ab");
        assert_eq!(id.to_string().parse(), Ok(id));
        for bad in ["", "ab", "00000000000000zz", "0000000000000000", "+0000000000000ab"] {
            assert!(bad.parse::<ClusterId>().unwrap_err().contains("16 hexadecimal digits"), "{bad}");
        }
    }
}
