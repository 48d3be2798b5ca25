//! Hints that a program gives itself, and what it reads itself for the manager: the protocol on the connection opened with
//! [`Helper`](crate::message::ToManager::Helper). One order or answer per packet; each order is answered before the
//! next is sent. Numbers are little-endian, of four bytes unless stated otherwise; the first is the kind and the second
//! the [version](crate::message::VERSION).
//!
//! | kind | packet | goes to | after the version | descriptors |
//! |---|---|---|---|---|
//! | 33 | Ranges | program | how many to bring in, to give back; each: block (8 bytes), start, length | the file |
//! | 34 | Free | program | start, bytes (8 bytes each) | the file |
//! | 35 | Cancel | program | – | the file |
//! | 36 | Read | program | start (8 bytes), bytes | the file |
//! | 49 | Answer | manager | errno or 0, how many ranges were taken on, or bytes read | – |
//!
//! The descriptor is the program's own open file, as registered: whatever the program has done with its number since,
//! the hint is for that file. The program builds the call itself, so a manager can request only these hints and reads whose
//! bytes nobody gets.

use impresario_gpfs::{BlockRange, Hint, RANGES_MAX, Ranges};

use crate::message::{Malformed, VERSION};

/// Bytes of the longest order.
pub const ORDER_BYTES_MAX: usize = 16 + 2 * RANGES_MAX * RANGE_BYTES;
/// Bytes of an answer.
pub const ANSWER_BYTES: usize = 16;

/// Bytes of the longest read of one order.
pub const READ_BYTES_MAX: u32 = 2 << 20;

const RANGE_BYTES: usize = 16;
const RANGES: u32 = 33;
const FREE: u32 = 34;
const CANCEL: u32 = 35;
const READ: u32 = 36;
const ANSWER: u32 = 49;

/// What a program is asked to do.
#[allow(
    clippy::large_enum_variant,
    reason = "it lives on the stack for one call; in a program nothing is allocated for it"
)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// To give a hint.
    Hint(Hint),
    /// To read a range into the page cache, which is charged to the program then.
    Read {
        /// First byte.
        start: i64,
        /// Bytes, 1 to [`READ_BYTES_MAX`].
        bytes: u32,
    },
}

/// An encoded order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    bytes: [u8; ORDER_BYTES_MAX],
    len: usize,
}

impl Order {
    /// The bytes to send.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    fn add(&mut self, number: &[u8]) {
        self.bytes[self.len..self.len + number.len()].copy_from_slice(number);
        self.len += number.len();
    }
}

/// Encodes the order to do this.
pub fn encode(task: &Task) -> Order {
    let mut order = Order { bytes: [0; ORDER_BYTES_MAX], len: 0 };
    let kind = match task {
        Task::Hint(Hint::Ranges { .. }) => RANGES,
        Task::Hint(Hint::Free { .. }) => FREE,
        Task::Hint(Hint::Cancel) => CANCEL,
        Task::Read { .. } => READ,
    };
    order.add(&kind.to_le_bytes());
    order.add(&VERSION.to_le_bytes());
    match task {
        Task::Hint(Hint::Ranges { access, release }) => {
            order.add(&(access.len() as u32).to_le_bytes());
            order.add(&(release.len() as u32).to_le_bytes());
            for range in access.iter().chain(&**release) {
                order.add(&range.block.to_le_bytes());
                order.add(&range.start.to_le_bytes());
                order.add(&range.length.to_le_bytes());
            }
        }
        Task::Hint(Hint::Free { start, bytes }) => {
            order.add(&start.to_le_bytes());
            order.add(&bytes.to_le_bytes());
        }
        Task::Hint(Hint::Cancel) => {}
        Task::Read { start, bytes } => {
            order.add(&start.to_le_bytes());
            order.add(&bytes.to_le_bytes());
        }
    }
    order
}

/// Decodes an order.
///
/// # Errors
/// [`Malformed`]: disconnect from this manager.
pub fn decode(bytes: &[u8]) -> Result<Task, Malformed> {
    let mut rest = Rest { bytes, all: bytes.len() };
    let kind = rest.u32()?;
    match rest.u32()? {
        VERSION => {}
        other => return Err(Malformed::Version(other)),
    }
    let task = match kind {
        RANGES => {
            let (access, release) = (rest.count()?, rest.count()?);
            Task::Hint(Hint::Ranges { access: rest.ranges(access)?, release: rest.ranges(release)? })
        }
        FREE => Task::Hint(Hint::Free { start: rest.not_negative()?, bytes: rest.not_negative()? }),
        CANCEL => Task::Hint(Hint::Cancel),
        READ => match (rest.not_negative()?, rest.u32()?) {
            (start, bytes @ 1..=READ_BYTES_MAX) => Task::Read { start, bytes },
            (_, bytes) => return Err(Malformed::Value(bytes)),
        },
        other => return Err(Malformed::Kind(other)),
    };
    if rest.bytes.is_empty() { Ok(task) } else { Err(Malformed::Length(bytes.len())) }
}

struct Rest<'a> {
    bytes: &'a [u8],
    all: usize,
}

impl Rest<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (first, rest) = self.bytes.split_first_chunk().ok_or(Malformed::Length(self.all))?;
        self.bytes = rest;
        Ok(*first)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        self.take().map(u32::from_le_bytes)
    }

    fn not_negative(&mut self) -> Result<i64, Malformed> {
        match self.take().map(i64::from_le_bytes)? {
            negative @ ..0 => Err(Malformed::Value(negative as u32)),
            number => Ok(number),
        }
    }

    fn count(&mut self) -> Result<usize, Malformed> {
        match self.u32()? {
            count if count as usize <= RANGES_MAX => Ok(count as usize),
            more => Err(Malformed::Value(more)),
        }
    }

    fn ranges(&mut self, count: usize) -> Result<Ranges, Malformed> {
        let mut all = [BlockRange::default(); RANGES_MAX];
        for place in &mut all[..count] {
            let block = self.not_negative()?;
            let (start, length) = (self.take().map(i32::from_le_bytes)?, self.take().map(i32::from_le_bytes)?);
            if start < 0 || length <= 0 {
                return Err(Malformed::Value(start.min(length) as u32));
            }
            *place = BlockRange::new(block, start, length);
        }
        Ok(all.into_iter().take(count).collect())
    }
}

/// The result of an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// 0, or the errno.
    pub errno: u32,
    /// How many of the ranges to prefetch were accepted; of a read, its bytes.
    pub accepted: u32,
}

impl Answer {
    /// Encodes it as a packet.
    pub fn encode(self) -> [u8; ANSWER_BYTES] {
        let mut bytes = [0; ANSWER_BYTES];
        for (place, number) in bytes.chunks_exact_mut(4).zip([ANSWER, VERSION, self.errno, self.accepted]) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    /// Decodes an answer.
    ///
    /// # Errors
    /// [`Malformed`]: send no more orders.
    pub fn decode(bytes: &[u8]) -> Result<Answer, Malformed> {
        let mut rest = Rest { bytes, all: bytes.len() };
        match (rest.u32()?, rest.u32()?) {
            (ANSWER, VERSION) => {}
            (ANSWER, other) => return Err(Malformed::Version(other)),
            (other, _) => return Err(Malformed::Kind(other)),
        }
        let answer = Answer { errno: rest.u32()?, accepted: rest.u32()? };
        if rest.bytes.is_empty() { Ok(answer) } else { Err(Malformed::Length(bytes.len())) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ranges() -> impl Strategy<Value = Ranges> {
        let range = (0..=i64::MAX, 0..=i32::MAX, 1..=i32::MAX).prop_map(|(b, s, l)| BlockRange::new(b, s, l));
        proptest::collection::vec(range, 0..=RANGES_MAX).prop_map(|all| all.into_iter().collect())
    }

    fn task() -> impl Strategy<Value = Task> {
        prop_oneof![
            (ranges(), ranges()).prop_map(|(access, release)| Task::Hint(Hint::Ranges { access, release })),
            (0..=i64::MAX, 0..=i64::MAX).prop_map(|(start, bytes)| Task::Hint(Hint::Free { start, bytes })),
            Just(Task::Hint(Hint::Cancel)),
            (0..=i64::MAX, 1..=READ_BYTES_MAX).prop_map(|(start, bytes)| Task::Read { start, bytes }),
        ]
    }

    proptest! {
        #[test]
        fn orders_and_answers_arrive_as_they_were(task in task(), errno: u32, accepted: u32,
                                                  cut in 0..ORDER_BYTES_MAX) {
            let order = encode(&task);
            prop_assert_eq!(decode(order.as_bytes()), Ok(task));
            prop_assert!(decode(&[order.as_bytes(), &[0]].concat()).is_err());
            if cut < order.as_bytes().len() {
                prop_assert!(decode(&order.as_bytes()[..cut]).is_err());
            }
            let answer = Answer { errno, accepted };
            prop_assert_eq!(Answer::decode(&answer.encode()), Ok(answer));
            prop_assert!(Answer::decode(order.as_bytes()).is_err() && decode(&answer.encode()).is_err());
        }

        #[test]
        fn any_bytes_are_an_order_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..80),
                                             kind in 32u32..50) {
            let likely = [&kind.to_le_bytes()[..], &VERSION.to_le_bytes(), &bytes].concat();
            let _ = (decode(&bytes), Answer::decode(&bytes), Answer::decode(&likely));
            if let Ok(task) = decode(&likely) {
                let again = encode(&task);
                prop_assert_eq!(again.as_bytes(), &likely[..]);
            }
        }
    }

    #[test]
    fn impossible_ranges_are_refused() {
        let order = |start, length| {
            let access = [BlockRange::new(0, start, length)].into_iter().collect();
            decode(encode(&Task::Hint(Hint::Ranges { access, release: Ranges::default() })).as_bytes())
        };
        assert!(order(0, 1).is_ok() && order(-1, 1).is_err() && order(0, 0).is_err());
        let many = [RANGES, VERSION, 9, 0].map(u32::to_le_bytes).concat();
        assert_eq!(decode(&many), Err(Malformed::Value(9)));
        for (bytes, is_right) in [(0, false), (1, true), (READ_BYTES_MAX, true), (READ_BYTES_MAX + 1, false)] {
            assert_eq!(decode(encode(&Task::Read { start: 0, bytes }).as_bytes()).is_ok(), is_right, "{bytes}");
        }
    }
}
