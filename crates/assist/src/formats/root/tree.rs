//! TTree: one object, in which each branch lists its baskets in three arrays.
//!
//! How it is laid out depends on the classes that wrote it. A branch is therefore not reached through the tree: the object is
//! searched for what looks like one from its version to its last array, so trees of any version, split objects and branches
//! in branches are all found.

use super::super::{Fields, Track};
use super::{counted, text};

const BASKETS_MAX: u64 = impresario_foresight::EXTENTS_MAX as u64;

/// The baskets of every branch in a tree's object.
pub(super) fn branches(object: &[u8], tracks: &mut Vec<Track>) {
    let (mut at, mut left) = (0, BASKETS_MAX);
    while let Some(here) = object.get(at..).filter(|here| here.len() > 6) {
        at += 1;
        // A length below 16 MiB, and a version: few places look so.
        if here[0] != 0x40 || here[4] != 0 || !(10..=13).contains(&here[5]) {
            continue;
        }
        tracks.extend(branch(here, &mut left).filter(|track| !track.is_empty()));
    }
}

/// A branch that begins here; `None` where none does. It may look at so many baskets, those without a place among them.
fn branch(bytes: &[u8], left: &mut u64) -> Option<Track> {
    let (version, mut fields) = counted(&mut Fields::new(bytes))?;
    // Its name: an object with a number and flags, and two texts.
    let (1, mut name) = counted(&mut fields)? else { return None };
    name.big(2).filter(|version| *version == 1)?;
    name.take(4 + 4)?;
    text(&mut name)?;
    text(&mut name)?;
    // How it is drawn.
    counted(&mut fields)?;
    // Compression, sizes of baskets and of their offsets.
    fields.take(4 + 4 + 4)?;
    let used = fields.big(4)?;
    fields.take(8)?;
    if version >= 13 {
        // How it is stored.
        counted(&mut fields)?;
    }
    fields.take(4)?;
    let count = fields.big(4)?;
    // A level, numbers of entries and of bytes.
    fields.take(4 + if version >= 11 { 4 * 8 } else { 3 * 8 })?;
    // Branches below, leaves, and baskets in memory.
    for _ in 0..3 {
        counted(&mut fields)?;
    }
    let mut array = |width: u64| {
        fields.big(1)?;
        fields.take(count.checked_mul(width)?)
    };
    let (lengths, _, places) = (array(4)?, array(8)?, array(8)?);
    // The name of another file with the baskets.
    if !text(&mut fields)?.is_empty() || used > count {
        return None;
    }
    let (mut lengths, mut places) = (Fields::new(lengths), Fields::new(places));
    let mut basket = || {
        let (len, at) = (lengths.big(4)?, places.big(8)?);
        (len > 0 && at > 0).then_some(at..at.checked_add(len)?)
    };
    let looked_at = used.min(*left);
    *left -= looked_at;
    // Of those in memory there is no place.
    Some((0..looked_at).filter_map(|_| basket()).collect())
}
