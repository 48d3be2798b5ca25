//! safetensors: eight bytes of length, a header in JSON with the place of each tensor, the tensors.

use std::collections::HashMap;

use serde::Deserialize;

use super::{Format, Source, Track};

/// The reader.
pub struct Safetensors;

#[derive(Deserialize)]
#[serde(untagged)]
enum Entry {
    Tensor { data_offsets: (u64, u64) },
    Other(serde::de::IgnoredAny),
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
        let header = file.bytes(8, header_bytes)?;
        let entries: HashMap<String, Entry> = serde_json::from_slice(&header).ok()?;
        let data = 8 + header_bytes;
        let mut track: Track = entries
            .values()
            .filter_map(|entry| match entry {
                Entry::Tensor { data_offsets: (from, to) } => Some(data.checked_add(*from)?..data.checked_add(*to)?),
                Entry::Other(_) => None,
            })
            .collect();
        track.sort_unstable_by_key(|extent| extent.start);
        Some(vec![track])
    }
}
