//! The binary form of a layout, in messages: four numbers, as before files could skip servers. With skipped servers the first
//! number has a mark, which a peer that does not know it takes for a server that is not there, and a count and these servers
//! follow.

use serde::de::{Error, SeqAccess, Visitor};
use serde::ser::SerializeTuple;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{Layout, Skipped};

/// Mark of a layout with skipped servers; clusters have fewer servers.
const SKIPS: u16 = 1 << 15;
const ELEMENTS: usize = 4;

impl Serialize for Layout {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let skipped = self.skipped.servers();
        let further = if skipped.is_empty() { 0 } else { 1 + skipped.len() };
        let mut out = to.serialize_tuple(ELEMENTS + further)?;
        out.serialize_element(&(self.base | if skipped.is_empty() { 0 } else { SKIPS }))?;
        out.serialize_element(&self.pcount)?;
        out.serialize_element(&self.ssize_bytes)?;
        out.serialize_element(&self.servers)?;
        if !skipped.is_empty() {
            out.serialize_element(&(skipped.len() as u8))?;
            skipped.iter().try_for_each(|server| out.serialize_element(server))?;
        }
        out.end()
    }
}

impl<'de> Deserialize<'de> for Layout {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Layout, D::Error> {
        from.deserialize_tuple(ELEMENTS + 1 + Skipped::MAX, Elements)
    }
}

struct Elements;

impl<'de> Visitor<'de> for Elements {
    type Value = Layout;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a layout")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Layout, A::Error> {
        let missing = || A::Error::custom("a layout ends early");
        let base: u16 = from.next_element()?.ok_or_else(missing)?;
        let pcount = from.next_element()?.ok_or_else(missing)?;
        let ssize_bytes = from.next_element()?.ok_or_else(missing)?;
        let servers = from.next_element()?.ok_or_else(missing)?;
        let mut skipped = Skipped::NONE;
        if base & SKIPS != 0 {
            let count: u8 = from.next_element()?.ok_or_else(missing)?;
            let mut given = [0; Skipped::MAX];
            let given = given
                .get_mut(..usize::from(count))
                .ok_or_else(|| A::Error::custom(format!("a layout skips {count} servers")))?;
            for server in given.iter_mut() {
                *server = from.next_element()?.ok_or_else(missing)?;
            }
            skipped = Skipped::of(given.iter().copied()).unwrap_or_default();
        }
        Ok(Layout { base: base & !SKIPS, pcount, ssize_bytes, servers, skipped })
    }
}
