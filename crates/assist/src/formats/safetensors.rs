//! safetensors: eight bytes of length, a header in JSON with the place of each tensor, the tensors.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};

use super::{Format, Source, Track};

/// The reader.
pub struct Safetensors;

/// Longer headers are not read.
const HEADER_BYTES_MAX: u64 = 4 << 20;

/// What a header says of a tensor, or of the file. What else it says is passed over: kept in memory it would be many times as long.
#[derive(Deserialize)]
struct Entry {
    #[serde(default)]
    data_offsets: Option<(u64, u64)>,
}

/// The places of all tensors, from the first byte behind the header on.
struct Places(Track);

impl<'de> Deserialize<'de> for Places {
    fn deserialize<D: Deserializer<'de>>(header: D) -> Result<Places, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Places;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("tensors by their names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Places, A::Error> {
                let mut places = Track::new();
                while let Some((IgnoredAny, entry)) = map.next_entry::<_, Entry>()? {
                    places.extend(entry.data_offsets.map(|(from, to)| from..to));
                }
                Ok(Places(places))
            }
        }
        header.deserialize_map(Entries)
    }
}

impl Format for Safetensors {
    fn name(&self) -> &'static str {
        "safetensors"
    }

    fn suffixes(&self) -> &'static [&'static str] {
        &["safetensors"]
    }

    /// One track: the tensors in the order of the file, in which writers put them and loaders take them.
    fn tracks(&self, file: &mut Source<'_>) -> Option<Vec<Track>> {
        file.beginning();
        let header_bytes = u64::from_le_bytes(file.bytes(0, 8)?.try_into().ok()?);
        let header = file.bytes(8, Some(header_bytes).filter(|bytes| *bytes <= HEADER_BYTES_MAX)?)?;
        let Places(places) = serde_json::from_slice(&header).ok()?;
        let data = 8 + header_bytes;
        let in_file = |place: std::ops::Range<u64>| Some(data.checked_add(place.start)?..data.checked_add(place.end)?);
        let mut track: Track = places.into_iter().filter_map(in_file).collect();
        track.sort_unstable_by_key(|extent| extent.start);
        Some(vec![track])
    }
}
