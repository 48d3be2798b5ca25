//! What travels over the manager's `SOCK_SEQPACKET` socket: one message a packet, little-endian numbers of four bytes, the
//! first the kind and the second the [`VERSION`]. Descriptors travel with a packet by `SCM_RIGHTS`.
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
//! A client says Hello once and does not wait. The manager answers once and then says nothing; closing the socket ends
//! everything. A file number is registered once in a connection and never used again.
//!
//! A program that is asked to give hints itself opens a second connection and says Helper in the place of Hello; what
//! travels there from then on is in [`order`](crate::order). An older client never looks for that wish, and an older
//! manager never utters it, so that the version is still the first.

/// Version of the messages.
pub const VERSION: u32 = 1;
/// Longest packet, in bytes. Longer ones are broken.
pub const MESSAGE_BYTES_MAX: usize = 4096;
/// Bytes of the longest message of this version.
pub const MESSAGE_BYTES: usize = 16;
/// Most descriptors that travel with a packet.
pub const DESCRIPTORS_MAX: usize = 2;

/// Bits of [`ToManager::Register`]'s flags. Unknown bits are ignored.
pub mod register {
    /// Open for reading.
    pub const READ: u32 = 1;
    /// Open for writing.
    pub const WRITE: u32 = 2;
    /// Not opened by this program, or opened before the connection: inherited, or met again after a restart.
    pub const FOUND: u32 = 4;
    /// The descriptor is another open file of the same file, for reading: the program's own can write. Advice on the open
    /// file (Sequential, Random, Normal) does not reach the program; advice on ranges does.
    pub const REOPENED: u32 = 8;
}

/// From a client to the manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToManager {
    /// The first message, with two descriptors: the ring's memory and an event descriptor. The credentials that count are
    /// the socket's.
    Hello {
        /// The process, as it names itself; other process name spaces know it by other numbers.
        pid: u32,
        /// Size of the ring's memory in bytes.
        ring_bytes: u32,
    },
    /// A file of interest, with its descriptor. Accesses in the ring name it by `file`; some may be drained before this
    /// message is read.
    Register {
        /// Number of the open file in this connection.
        file: u32,
        /// Bits of [`register`].
        flags: u32,
    },
    /// The first message of another connection of a client's process, which takes [orders](crate::order).
    Helper {
        /// The client's number, as the manager wrote it in the ring's header.
        client: u64,
    },
    /// The program closed the file. Accesses may still wait in the ring, before its [`Op::Close`](crate::Op::Close).
    Unregister {
        /// Number of the open file.
        file: u32,
    },
}

/// From the manager to a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToClient {
    /// The client is served; with one descriptor: memory that holds the [patterns](crate::patterns).
    Welcome {
        /// What the manager wants to hear.
        mode: Mode,
        /// Bytes of the patterns.
        patterns_len: u32,
    },
    /// The client is not served.
    Refused {
        /// Why, as an errno.
        errno: u32,
    },
}

/// What the manager wants to hear of files that match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Mode {
    /// Reads and maps of files that are open for reading.
    Advise = 0,
    /// Everything, writes and moves of the position too.
    Record = 1,
}

/// A packet that is no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// Its length, in bytes, is not that of its kind.
    Length(usize),
    /// Its version is another.
    Version(u32),
    /// Its kind is unknown here.
    Kind(u32),
    /// A number in it has no meaning.
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

/// A message as it travels.
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

/// The kind and the (at most two) numbers after the version; missing ones are 0, and how many there are.
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
    /// The packet that carries it.
    pub fn encode(&self) -> Packet {
        match *self {
            ToManager::Hello { pid, ring_bytes } => Packet::new(1, &[pid, ring_bytes]),
            ToManager::Register { file, flags } => Packet::new(2, &[file, flags]),
            ToManager::Unregister { file } => Packet::new(3, &[file]),
            ToManager::Helper { client } => Packet::new(4, &[client as u32, (client >> 32) as u32]),
        }
    }

    /// Reads a packet.
    ///
    /// # Errors
    /// [`Malformed`]: cut the client off.
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

    /// How many descriptors must come with it.
    pub fn descriptors(&self) -> usize {
        match self {
            ToManager::Hello { .. } => 2,
            ToManager::Register { .. } => 1,
            ToManager::Unregister { .. } | ToManager::Helper { .. } => 0,
        }
    }
}

impl ToClient {
    /// The packet that carries it.
    pub fn encode(&self) -> Packet {
        match *self {
            ToClient::Welcome { mode, patterns_len } => Packet::new(17, &[mode as u32, patterns_len]),
            ToClient::Refused { errno } => Packet::new(18, &[errno]),
        }
    }

    /// Reads a packet.
    ///
    /// # Errors
    /// [`Malformed`]: leave this manager alone.
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
    fn what_is_wrong_is_said() {
        assert_eq!(ToManager::decode(&[]), Err(Malformed::Length(0)));
        let version = [1u32, 2, 0, 0].map(u32::to_le_bytes).concat();
        assert_eq!(ToManager::decode(&version), Err(Malformed::Version(2)));
        let mode = [17u32, 1, 9, 0].map(u32::to_le_bytes).concat();
        assert_eq!(ToClient::decode(&mode), Err(Malformed::Value(9)));
        let texts = [Malformed::Length(3), Malformed::Version(2), Malformed::Kind(7), Malformed::Value(9)];
        assert!(texts.iter().all(|m| m.to_string().contains(|c: char| c.is_ascii_digit())));
    }
}
