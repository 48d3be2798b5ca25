//! The messages on the manager's `SOCK_SEQPACKET` socket: one per packet, little-endian numbers of four bytes, the
//! first the kind and the second the [`VERSION`]. Descriptors accompany a packet as `SCM_RIGHTS`.
//!
//! | kind | message | direction | numbers after the version | descriptors |
//! |---|---|---|---|---|
//! | 1 | Hello | to the manager | pid, ring bytes | the ring's memory, an eventfd |
//! | 2 | Register | to the manager | file, flags | the program's open file |
//! | 3 | Unregister | to the manager | file | – |
//! | 4 | Helper | to the manager | the client's number, its lower half first | – |
//! | 17 | Welcome | to the client | mode, bytes of patterns | a memory file with the patterns |
//! | 18 | Refused | to the client | errno | – |
//!
//! A client sends one Hello and does not wait. The manager answers once and then sends nothing; closing the socket ends
//! the connection. A file number is registered once per connection and never reused.
//!
//! A program asked to give hints itself opens a second connection and sends Helper instead of Hello;
//! [`order`](crate::order) describes what follows there. An older client ignores that request, and an older manager
//! never makes it, so the version is still 1.

/// Version of the messages.
pub const VERSION: u32 = 1;
/// Longest packet, in bytes. Longer ones are malformed.
pub const MESSAGE_BYTES_MAX: usize = 4096;
/// Bytes of the longest message of this version.
pub const MESSAGE_BYTES: usize = 16;
/// Maximum descriptors of a packet.
pub const DESCRIPTORS_MAX: usize = 2;

/// Bits of [`ToManager::Register`]'s flags. Unknown bits are ignored.
pub mod register {
    /// Open for reading.
    pub const READ: u32 = 1;
    /// Open for writing.
    pub const WRITE: u32 = 2;
    /// Not opened by this program, or opened before the connection: inherited, or found after a restart.
    pub const FOUND: u32 = 4;
    /// The descriptor is a separate read-only open file of the same file, because the program's own can write. Advice
    /// on the open file (Sequential, Random, Normal) does not affect the program; advice on ranges does.
    pub const REOPENED: u32 = 8;
}

/// From a client to the manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToManager {
    /// The first message, with two descriptors: the ring's memory and an event descriptor. The socket's credentials are
    /// authoritative.
    Hello {
        /// The process id in its own name space.
        pid: u32,
        /// Size of the ring's memory in bytes.
        ring_bytes: u32,
    },
    /// A file of interest, with its descriptor. Accesses in the ring refer to `file`; some may be drained before this
    /// message is read.
    Register {
        /// Number of the open file in this connection.
        file: u32,
        /// Bits of [`register`].
        flags: u32,
    },
    /// The first message on a second connection of a client's process, which receives [orders](crate::order).
    Helper {
        /// The client's number, as the manager wrote it to the ring's header.
        client: u64,
    },
    /// The program closed the file. The ring may still hold accesses before its [`Op::Close`](crate::Op::Close).
    Unregister {
        /// Number of the open file.
        file: u32,
    },
}

/// From the manager to a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToClient {
    /// The client is accepted; with one descriptor: memory that holds the [patterns](crate::patterns).
    Welcome {
        /// Which accesses the manager wants.
        mode: Mode,
        /// Bytes of the patterns.
        patterns_len: u32,
    },
    /// The client is rejected.
    Refused {
        /// Why, as an errno.
        errno: u32,
    },
}

/// Which accesses to matching files the manager wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Mode {
    /// Reads and maps of files open for reading.
    Advise = 0,
    /// Everything, including writes and seeks.
    Record = 1,
}

/// A packet that is not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// Its length, in bytes, does not match its kind.
    Length(usize),
    /// It has another version.
    Version(u32),
    /// Its kind is unknown.
    Kind(u32),
    /// It contains an invalid number.
    Value(u32),
}

impl std::fmt::Display for Malformed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Malformed::Length(bytes) => write!(f, "a packet of {bytes} bytes is no message"),
            Malformed::Version(v) => write!(f, "a message of version {v}, not {VERSION}"),
            Malformed::Kind(kind) => write!(f, "a message of unknown kind {kind}"),
            Malformed::Value(value) => write!(f, "a message with the meaningless number {value}"),
        }
    }
}

impl std::error::Error for Malformed {}

/// An encoded message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    bytes: [u8; MESSAGE_BYTES],
    len: usize,
}

impl Packet {
    fn new(kind: u32, numbers: &[u32]) -> Packet {
        let mut packet = Packet { bytes: [0; MESSAGE_BYTES], len: 0 };
        for number in [kind, VERSION].iter().chain(numbers) {
            packet.bytes[packet.len..packet.len + 4].copy_from_slice(&number.to_le_bytes());
            packet.len += 4;
        }
        packet
    }

    /// The bytes to send.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// The kind and the (at most two) numbers after the version, with their count; missing ones are 0.
fn numbers(bytes: &[u8]) -> Result<(u32, [u32; 2], usize), Malformed> {
    let wrong = Malformed::Length(bytes.len());
    if !(8..=MESSAGE_BYTES).contains(&bytes.len()) || !bytes.len().is_multiple_of(4) {
        return Err(wrong);
    }
    let mut all = [0u32; MESSAGE_BYTES / 4];
    for (number, four) in all.iter_mut().zip(bytes.chunks_exact(4)) {
        *number = u32::from_le_bytes(four.try_into().map_err(|_| wrong)?);
    }
    if all[1] != VERSION {
        return Err(Malformed::Version(all[1]));
    }
    Ok((all[0], [all[2], all[3]], bytes.len() / 4 - 2))
}

fn expect(there: usize, wanted: usize, bytes: &[u8]) -> Result<(), Malformed> {
    if there == wanted { Ok(()) } else { Err(Malformed::Length(bytes.len())) }
}

impl ToManager {
    /// Encodes it as a packet.
    pub fn encode(&self) -> Packet {
        match *self {
            ToManager::Hello { pid, ring_bytes } => Packet::new(1, &[pid, ring_bytes]),
            ToManager::Register { file, flags } => Packet::new(2, &[file, flags]),
            ToManager::Unregister { file } => Packet::new(3, &[file]),
            ToManager::Helper { client } => Packet::new(4, &[client as u32, (client >> 32) as u32]),
        }
    }

    /// Decodes a packet.
    ///
    /// # Errors
    /// [`Malformed`]: disconnect the client.
    pub fn decode(bytes: &[u8]) -> Result<ToManager, Malformed> {
        let (kind, [first, second], there) = numbers(bytes)?;
        let (wanted, message) = match kind {
            1 => (2, ToManager::Hello { pid: first, ring_bytes: second }),
            2 => (2, ToManager::Register { file: first, flags: second }),
            3 => (1, ToManager::Unregister { file: first }),
            4 => (2, ToManager::Helper { client: u64::from(first) | u64::from(second) << 32 }),
            _ => return Err(Malformed::Kind(kind)),
        };
        expect(there, wanted, bytes)?;
        Ok(message)
    }

    /// The number of descriptors that must accompany it.
    pub fn descriptors(&self) -> usize {
        match self {
            ToManager::Hello { .. } => 2,
            ToManager::Register { .. } => 1,
            ToManager::Unregister { .. } | ToManager::Helper { .. } => 0,
        }
    }
}

impl ToClient {
    /// Encodes it as a packet.
    pub fn encode(&self) -> Packet {
        match *self {
            ToClient::Welcome { mode, patterns_len } => Packet::new(17, &[mode as u32, patterns_len]),
            ToClient::Refused { errno } => Packet::new(18, &[errno]),
        }
    }

    /// Decodes a packet.
    ///
    /// # Errors
    /// [`Malformed`]: disconnect from this manager.
    pub fn decode(bytes: &[u8]) -> Result<ToClient, Malformed> {
        let (kind, [first, second], there) = numbers(bytes)?;
        match kind {
            17 => {
                expect(there, 2, bytes)?;
                let mode = match first {
                    0 => Mode::Advise,
                    1 => Mode::Record,
                    other => return Err(Malformed::Value(other)),
                };
                Ok(ToClient::Welcome { mode, patterns_len: second })
            }
            18 => {
                expect(there, 1, bytes)?;
                Ok(ToClient::Refused { errno: first })
            }
            _ => Err(Malformed::Kind(kind)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn to_manager() -> impl Strategy<Value = ToManager> {
        prop_oneof![
            any::<(u32, u32)>().prop_map(|(pid, ring_bytes)| ToManager::Hello { pid, ring_bytes }),
            any::<(u32, u32)>().prop_map(|(file, flags)| ToManager::Register { file, flags }),
            any::<u32>().prop_map(|file| ToManager::Unregister { file }),
            any::<u64>().prop_map(|client| ToManager::Helper { client }),
        ]
    }

    fn to_client() -> impl Strategy<Value = ToClient> {
        let mode = prop_oneof![Just(Mode::Advise), Just(Mode::Record)];
        prop_oneof![
            (mode, any::<u32>()).prop_map(|(mode, patterns_len)| ToClient::Welcome { mode, patterns_len }),
            any::<u32>().prop_map(|errno| ToClient::Refused { errno }),
        ]
    }

    proptest! {
        #[test]
        fn messages_arrive_as_they_were(up in to_manager(), down in to_client()) {
            prop_assert_eq!(ToManager::decode(up.encode().as_bytes()), Ok(up));
            prop_assert_eq!(ToClient::decode(down.encode().as_bytes()), Ok(down));
            prop_assert!(ToClient::decode(up.encode().as_bytes()).is_err());
            prop_assert!(ToManager::decode(down.encode().as_bytes()).is_err());
        }

        #[test]
        fn cut_or_padded_messages_are_refused(up in to_manager(), cut in 0usize..16) {
            let packet = up.encode();
            let bytes = packet.as_bytes();
            if cut < bytes.len() {
                prop_assert!(ToManager::decode(&bytes[..cut]).is_err());
            }
            prop_assert!(ToManager::decode(&[bytes, &[0; 4]].concat()).is_err());
        }

        #[test]
        fn any_bytes_are_a_message_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..40), kind in 0u32..20) {
            let _ = (ToManager::decode(&bytes), ToClient::decode(&bytes));
            let mut likely = [kind.to_le_bytes(), VERSION.to_le_bytes()].concat();
            likely.extend(&bytes);
            if let Ok(message) = ToManager::decode(&likely) {
                let again = message.encode();
                prop_assert_eq!(again.as_bytes(), &likely[..]);
            }
            if let Ok(message) = ToClient::decode(&likely) {
                let again = message.encode();
                prop_assert_eq!(again.as_bytes(), &likely[..]);
            }
        }
    }

    #[test]
    fn errors_name_the_problem() {
        assert_eq!(ToManager::decode(&[]), Err(Malformed::Length(0)));
        let version = [1u32, 2, 0, 0].map(u32::to_le_bytes).concat();
        assert_eq!(ToManager::decode(&version), Err(Malformed::Version(2)));
        let mode = [17u32, 1, 9, 0].map(u32::to_le_bytes).concat();
        assert_eq!(ToClient::decode(&mode), Err(Malformed::Value(9)));
        let texts = [Malformed::Length(3), Malformed::Version(2), Malformed::Kind(7), Malformed::Value(9)];
        assert!(texts.iter().all(|m| m.to_string().contains(|c: char| c.is_ascii_digit())));
    }
}
