//! The value that more than half of a list agree on.

/// Boyer and Moore's vote, then a count: `None` when no value has more than half.
pub(crate) fn majority(values: impl Iterator<Item = i64> + Clone) -> Option<i64> {
    let (mut candidate, mut votes) = (0, 0u32);
    for value in values.clone() {
        match votes {
            0 => (candidate, votes) = (value, 1),
            _ if value == candidate => votes += 1,
            _ => votes -= 1,
        }
    }
    let (mut agree, mut all) = (0usize, 0usize);
    for value in values {
        all += 1;
        agree += usize::from(value == candidate);
    }
    (agree * 2 > all).then_some(candidate)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn agrees_with_counting(values in prop::collection::vec(0i64..4, 0..20)) {
            let counted = (0..4).find(|v| values.iter().filter(|x| *x == v).count() * 2 > values.len());
            prop_assert_eq!(majority(values.iter().copied()), counted);
        }
    }
}
