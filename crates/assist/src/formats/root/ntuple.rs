//! RNTuple, version 1: an anchor leads to a header and a footer, the footer to lists of pages, in which each cluster lists
//! the pages of each column. All of these are "envelopes" with a type, a length and a sum of their own, and are packed as
//! other objects are.
//!
//! What a column means is of no interest here, only where its pages lie. Everything that is not understood, a feature flag, a
//! kind of locator, a sum that is wrong, leaves out the whole ntuple. Not known: versions before the first public one (ROOT
//! 6.34), sharded clusters, and envelopes that are spread over several keys.

use twox_hash::XxHash3_64;

use super::super::{Fields, Source, Track};
use super::{counted, unpack};

const COLUMNS_MAX: usize = 1 << 14;
const CLUSTER_GROUPS_MAX: usize = 4096;
/// Behind a page, where its list says so.
const SUM_BYTES: u64 = 8;

const HEADER: u64 = 1;
const FOOTER: u64 = 2;
const PAGE_LIST: u64 = 3;

/// Where an envelope lies, and how long it is when unpacked.
struct Link {
    at: u64,
    bytes: u64,
    unpacked_bytes: u64,
}

/// What ROOT's keys lead to.
pub(super) struct Anchor {
    header: Link,
    footer: Link,
}

impl Anchor {
    /// From the object behind the key, which counts from the most significant byte as ROOT does, other than all else here.
    pub(super) fn read(object: &[u8]) -> Option<Anchor> {
        let mut fields = Fields::new(object);
        let (_, mut anchor) = counted(&mut fields)?;
        if fields.big(8)? != XxHash3_64::oneshot(anchor.rest()) || anchor.big(2)? != 1 {
            return None;
        }
        anchor.take(3 * 2)?;
        let mut link = || Some(Link { at: anchor.big(8)?, bytes: anchor.big(8)?, unpacked_bytes: anchor.big(8)? });
        let (header, footer) = (link()?, link()?);
        // What is longer than that is in several pieces; 0 is no bound.
        let key_bytes_max = anchor.big(8).map(|most| if most == 0 { u64::MAX } else { most })?;
        (header.bytes.max(footer.bytes) <= key_bytes_max).then_some(Anchor { header, footer })
    }
}

/// A track for each column that has pages, of all ntuples; `left` bytes may be unpacked.
pub(super) fn columns(file: &mut Source<'_>, anchors: &[Anchor], left: &mut u64, tracks: &mut Vec<Track>) {
    file.ahead(anchors.iter().flat_map(|anchor| [&anchor.header, &anchor.footer]).map(|link| (link.at, link.bytes)));
    for anchor in anchors {
        tracks.extend(ntuple(file, anchor, left).into_iter().flatten().filter(|track| !track.is_empty()));
    }
}

fn ntuple(file: &mut Source<'_>, anchor: &Anchor, left: &mut u64) -> Option<Vec<Track>> {
    let header = Envelope::read(file, &anchor.header, HEADER, left)?;
    if header.fields().little(8)? != 0 {
        return None;
    }
    let footer = Envelope::read(file, &anchor.footer, FOOTER, left)?;
    let mut fields = footer.fields();
    if fields.little(8)? != 0 || fields.little(8)? != header.sum {
        return None;
    }
    // Fields and columns that came later: their pages are listed like those of others.
    frame(&mut fields)?;
    let (mut groups, count) = list(&mut fields)?;
    let mut lists = Vec::new();
    for _ in 0..count.min(CLUSTER_GROUPS_MAX as u64) {
        let mut group = record(&mut groups)?;
        // Its entries, and how many clusters it has.
        group.take(8 + 8 + 4)?;
        let unpacked_bytes = group.little(8)?;
        let (at, bytes) = locator(&mut group)?;
        lists.push(Link { at, bytes, unpacked_bytes });
    }
    file.ahead(lists.iter().map(|list| (list.at, list.bytes)));
    let mut columns = Vec::new();
    for list in lists {
        let list = Envelope::read(file, &list, PAGE_LIST, left)?;
        pages(&mut list.fields(), header.sum, &mut columns)?;
    }
    Some(columns)
}

/// Adds the pages of a list to their columns.
fn pages(fields: &mut Fields<'_>, header_sum: u64, columns: &mut Vec<Track>) -> Option<()> {
    if fields.little(8)? != header_sum {
        return None;
    }
    let (mut summaries, count) = list(fields)?;
    for _ in 0..count {
        let mut summary = record(&mut summaries)?;
        summary.take(8 + 7)?;
        // Parts of a sharded cluster stand elsewhere.
        summary.little(1).filter(|flags| flags & 1 == 0)?;
    }
    let (mut clusters, count) = list(fields)?;
    for _ in 0..count {
        let (mut cluster, count) = list(&mut clusters)?;
        let count = usize::try_from(count).ok().filter(|count| *count <= COLUMNS_MAX)?;
        for column in 0..count {
            // Behind the pages stand the number of the first element and how they are packed.
            let (mut pages, count) = list(&mut cluster)?;
            if columns.len() <= column {
                columns.push(Track::new());
            }
            for _ in 0..count {
                let has_sum = pages.little(4)? >> 31 != 0;
                let (at, bytes) = locator(&mut pages)?;
                columns[column].push(at..at.checked_add(bytes)?.checked_add(if has_sum { SUM_BYTES } else { 0 })?);
            }
        }
    }
    Some(())
}

/// An envelope that was unpacked and whose sum is right.
struct Envelope {
    bytes: Vec<u8>,
    sum: u64,
}

impl Envelope {
    fn read(file: &mut Source<'_>, link: &Link, kind: u64, left: &mut u64) -> Option<Envelope> {
        *left = left.checked_sub(link.unpacked_bytes)?;
        let mut bytes = file.bytes(link.at, link.bytes)?;
        if link.bytes != link.unpacked_bytes {
            bytes = unpack::blocks(&bytes, usize::try_from(link.unpacked_bytes).ok()?)?;
        }
        let (before, sum) = bytes.split_last_chunk()?;
        let (sum, head) = (u64::from_le_bytes(*sum), Fields::new(before).little(8)?);
        let is_whole = head == link.unpacked_bytes << 16 | kind && sum == XxHash3_64::oneshot(before);
        bytes.truncate(bytes.len() - 8);
        is_whole.then_some(Envelope { bytes, sum })
    }

    /// What stands behind its head.
    fn fields(&self) -> Fields<'_> {
        Fields::new(self.bytes.get(8..).unwrap_or_default())
    }
}

/// What is in a frame, and of how many items the list is made, if it is one. A frame may have more than is known of it.
fn frame<'a>(fields: &mut Fields<'a>) -> Option<(Fields<'a>, Option<u64>)> {
    let size = fields.little(8)? as i64;
    let mut inside = Fields::new(fields.take(size.unsigned_abs().checked_sub(8)?)?);
    let items = if size < 0 { Some(inside.little(4)?) } else { None };
    Some((inside, items))
}

fn record<'a>(fields: &mut Fields<'a>) -> Option<Fields<'a>> {
    let (inside, items) = frame(fields)?;
    items.is_none().then_some(inside)
}

fn list<'a>(fields: &mut Fields<'a>) -> Option<(Fields<'a>, u64)> {
    let (inside, items) = frame(fields)?;
    Some((inside, items?))
}

/// A place in the file: its first byte, and how many there are.
fn locator(fields: &mut Fields<'_>) -> Option<(u64, u64)> {
    let size = fields.little(4)? as u32 as i32;
    if size >= 0 {
        return Some((fields.little(8)?, u64::from(size.unsigned_abs())));
    }
    let head = size.unsigned_abs();
    let mut payload = Fields::new(fields.take(u64::from(head & 0xffff).checked_sub(4)?)?);
    // One for what 31 bits cannot count.
    (head >> 24 == 1).then_some(())?;
    let bytes = payload.little(8)?;
    Some((payload.little(8)?, bytes))
}
