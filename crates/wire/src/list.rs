//! Lists of extents in one request: (offset, length) pairs, or the compact form of a strided access.

use serde::{Deserialize, Serialize};

/// Most extents of one list.
pub const LIST_EXTENTS_MAX: usize = 1024;

/// The extents of a list request, in the order of their bytes in the answer. They may overlap and come in any order.
/// What arrives is untrusted: [`Extents::check`] it before anything else is done with it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Extents {
    /// (offset, length) of each, bytes.
    Pairs(Vec<(u64, u32)>),
    /// Extents of equal length at equal distances.
    Strided {
        /// Offset of the first, bytes.
        offset: u64,
        /// Length of each, bytes.
        len: u32,
        /// From one extent's start to the next, bytes.
        stride: u64,
        /// How many.
        count: u32,
    },
}

/// Why a list is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BadList {
    /// No extents, or too many.
    #[error("a list of {0} extents was sent; 1 to {LIST_EXTENTS_MAX} are allowed")]
    Count(u64),
    /// An extent without bytes.
    #[error("extent {0} of the list has no bytes")]
    Empty(usize),
    /// An extent that no file can have.
    #[error("extent {0} of the list lies beyond the largest possible file")]
    Beyond(usize),
    /// More bytes than an answer may have.
    #[error("the list asks for {bytes} bytes at once; at most {max} (max_payload_bytes) are given")]
    TooLong {
        /// Bytes asked for.
        bytes: u64,
        /// Bytes allowed.
        max: u64,
    },
}

impl Extents {
    /// The shortest form of a list.
    pub fn of(list: &[(u64, u32)]) -> Extents {
        if let [(offset, len), (second, _), ..] = *list
            && let Some(stride) = second.checked_sub(offset)
            && list.windows(2).all(|w| w[1].0.checked_sub(w[0].0) == Some(stride))
            && list.iter().all(|extent| extent.1 == len)
        {
            return Extents::Strided { offset, len, stride, count: list.len() as u32 };
        }
        Extents::Pairs(list.to_vec())
    }

    /// Number of extents.
    pub fn count(&self) -> u64 {
        match self {
            Extents::Pairs(pairs) => pairs.len() as u64,
            Extents::Strided { count, .. } => (*count).into(),
        }
    }

    /// Accepts a list of 1 to [`LIST_EXTENTS_MAX`] extents, each with bytes that a file can have and `max_bytes` in all
    /// at most; returns the bytes in all. Costs at most as many steps as a list may have extents.
    pub fn check(&self, max_bytes: u64) -> Result<u64, BadList> {
        if !(1..=LIST_EXTENTS_MAX as u64).contains(&self.count()) {
            return Err(BadList::Count(self.count()));
        }
        let mut bytes = 0u64;
        for n in 0..self.count() as usize {
            let (offset, len) = self.get(n).ok_or(BadList::Beyond(n))?;
            if len == 0 {
                return Err(BadList::Empty(n));
            }
            offset.checked_add(len.into()).filter(|end| *end <= i64::MAX as u64).ok_or(BadList::Beyond(n))?;
            bytes += u64::from(len);
        }
        if bytes > max_bytes { Err(BadList::TooLong { bytes, max: max_bytes }) } else { Ok(bytes) }
    }

    /// The extents in order, of a list that was accepted.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u32)> + '_ {
        (0..self.count() as usize).map_while(|n| self.get(n))
    }

    fn get(&self, n: usize) -> Option<(u64, u32)> {
        match self {
            Extents::Pairs(pairs) => pairs.get(n).copied(),
            Extents::Strided { offset, len, stride, .. } => {
                Some((offset.checked_add(stride.checked_mul(n as u64)?)?, *len))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_strided_list_is_sent_in_its_compact_form() {
        let list: Vec<_> = (0..10).map(|i| (100 + i * 1000, 10)).collect();
        let extents = Extents::of(&list);
        assert_eq!(extents, Extents::Strided { offset: 100, len: 10, stride: 1000, count: 10 });
        assert_eq!(extents.iter().collect::<Vec<_>>(), list);
        for list in [vec![(5, 1), (3, 1)], vec![(0, 1), (10, 2)], vec![(7, 7)], vec![(0, 1), (10, 1), (30, 1)]] {
            assert_eq!(Extents::of(&list), Extents::Pairs(list));
        }
    }

    #[test]
    fn hostile_lists_are_refused() {
        let strided = |offset, len, stride, count| Extents::Strided { offset, len, stride, count }.check(1 << 20);
        assert_eq!(Extents::Pairs(vec![]).check(10), Err(BadList::Count(0)));
        assert_eq!(Extents::Pairs(vec![(0, 1); LIST_EXTENTS_MAX + 1]).check(1 << 20), Err(BadList::Count(1025)));
        assert_eq!(strided(0, 1, 1, u32::MAX), Err(BadList::Count(u32::MAX.into())));
        assert_eq!(strided(0, 0, 1, 4), Err(BadList::Empty(0)));
        assert_eq!(strided(0, 1, u64::MAX, 4), Err(BadList::Beyond(1)));
        assert_eq!(strided(0, 1, u64::MAX / 2 + 1, 4), Err(BadList::Beyond(1)));
        assert_eq!(strided(i64::MAX as u64, 1, 0, 1), Err(BadList::Beyond(0)));
        assert_eq!(strided(0, u32::MAX, 0, 1024), Err(BadList::TooLong { bytes: 1024 * 0xffff_ffff, max: 1 << 20 }));
        assert_eq!(Extents::Pairs(vec![(u64::MAX, 1)]).check(10), Err(BadList::Beyond(0)));
        assert_eq!(strided(5, 1024, 0, 1024), Ok(1 << 20));
    }

    proptest! {
        #[test]
        fn an_accepted_list_is_what_was_sent(
            list in prop_oneof![
                proptest::collection::vec((0u64..1 << 40, 1u32..1000), 1..50),
                (0u64..1 << 40, 1u32..1000, 0u64..1 << 30, 1u64..50)
                    .prop_map(|(at, len, stride, n)| (0..n).map(|i| (at + i * stride, len)).collect()),
            ],
        ) {
            let extents = Extents::of(&list);
            prop_assert_eq!(extents.check(u64::MAX), Ok(list.iter().map(|e| u64::from(e.1)).sum()));
            prop_assert_eq!(extents.iter().collect::<Vec<_>>(), list);
        }

        /// Nothing that a peer may claim overflows or runs on.
        #[test]
        fn any_list_is_judged(offset: u64, len: u32, stride: u64, count: u32, max: u64) {
            let extents = Extents::Strided { offset, len, stride, count };
            if let Ok(bytes) = extents.check(max) {
                prop_assert!(bytes <= max && extents.iter().count() == count as usize);
                prop_assert!(extents.iter().all(|(at, len)| at + u64::from(len) <= i64::MAX as u64));
            }
        }
    }
}
