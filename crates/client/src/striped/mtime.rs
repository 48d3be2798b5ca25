//! The modification time of a file as its objects tell it.

use impresario_base::random::mix;
use impresario_wire::Time;

/// How far below the latest of the objects' times the file's may be: nanoseconds.
const SPREAD_NS: u64 = 1_000_000;

/// The modification time of a file with these times of its objects, in order of position.
///
/// It differs whenever one of them does, although the data servers' clocks may not agree: were it their maximum, an overwrite on a
/// server whose clock is behind would move nothing, and readers would keep what they have cached. So of several objects
/// the file's time is up to a millisecond before the latest, by a number drawn from all of them; that two states of
/// the same latest time look alike has a chance of one in a million.
pub(super) fn joint_mtime(objects: &[Time]) -> Time {
    let latest = objects.iter().copied().max().unwrap_or_default();
    if objects.len() < 2 || latest == Time::default() {
        return latest;
    }
    let drawn = objects.iter().fold(0, |drawn, time| mix(mix(drawn ^ time.secs as u64) ^ u64::from(time.nanos)));
    let before = (drawn % SPREAD_NS) as u32;
    match latest.nanos.checked_sub(before) {
        Some(nanos) => Time { nanos, ..latest },
        None => Time { secs: latest.secs.saturating_sub(1), nanos: latest.nanos + 1_000_000_000 - before },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn time() -> impl Strategy<Value = Time> {
        (-10i64..10, 0u32..1_000_000_000).prop_map(|(secs, nanos)| Time { secs, nanos })
    }

    fn ns(time: Time) -> i128 {
        i128::from(time.secs) * 1_000_000_000 + i128::from(time.nanos)
    }

    proptest! {
        #[test]
        fn it_is_at_most_a_millisecond_before_the_latest(objects in prop::collection::vec(time(), 1..9)) {
            let (joint, latest) = (joint_mtime(&objects), objects.iter().copied().max().unwrap());
            prop_assert!(joint.nanos < 1_000_000_000);
            prop_assert!((0..1_000_000).contains(&(ns(latest) - ns(joint))), "{joint:?} of {objects:?}");
        }
    }

    /// Always the same cases: it is a matter of chance, of one in a million for each.
    #[test]
    fn a_change_below_the_latest_shows() {
        let latest = Time { secs: 100, nanos: 0 };
        for servers in 2..6 {
            for place in 0..servers - 1 {
                let mut objects = vec![Time { secs: 50, nanos: 1_000 }; servers];
                objects[servers - 1] = latest;
                let mut before = joint_mtime(&objects);
                for tick in 1..1000 {
                    objects[place].nanos += 4_000_000 * (tick % 2) + 1;
                    let after = joint_mtime(&objects);
                    assert_ne!(after, before, "{objects:?}");
                    before = after;
                }
            }
        }
    }

    #[test]
    fn one_object_has_its_own_time_and_none_has_none() {
        let time = Time { secs: 7, nanos: 12_345 };
        assert_eq!(joint_mtime(&[time]), time);
        assert_eq!(joint_mtime(&[]), Time::default());
        assert_eq!(joint_mtime(&[Time::default(); 3]), Time::default());
    }
}
