//! Servers that a file does not use.

use serde::{Deserialize, Serialize};

/// A few data servers, in the order of their numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug, Serialize, Deserialize)]
#[serde(into = "Vec<u16>", try_from = "Vec<u16>")]
pub struct Skipped {
    count: u8,
    /// Zeros behind the first `count`.
    servers: [u16; Skipped::MAX],
}

impl Skipped {
    /// The maximum number of servers.
    pub const MAX: usize = 16;
    /// No server.
    pub const NONE: Skipped = Skipped { count: 0, servers: [0; Skipped::MAX] };

    /// These servers, in any order; `None` if there are more than [`MAX`](Skipped::MAX).
    pub fn of(servers: impl IntoIterator<Item = u16>) -> Option<Skipped> {
        let mut skipped = Skipped::NONE;
        for server in servers {
            if !skipped.contains(server) {
                *skipped.servers.get_mut(usize::from(skipped.count))? = server;
                skipped.count += 1;
                skipped.servers[..usize::from(skipped.count)].sort_unstable();
            }
        }
        Some(skipped)
    }

    /// The servers, in the order of their numbers.
    pub fn servers(&self) -> &[u16] {
        self.servers.get(..usize::from(self.count)).unwrap_or_default()
    }

    /// How many there are.
    pub fn len(&self) -> u16 {
        self.count.into()
    }

    /// True for [`NONE`](Skipped::NONE).
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether the server is one of them.
    pub fn contains(&self, server: u16) -> bool {
        self.servers().contains(&server)
    }

    /// Those with a number below `servers`.
    pub fn below(&self, servers: u16) -> Skipped {
        let below = self.servers().iter().copied().filter(|server| *server < servers);
        Skipped::of(below).unwrap_or_default()
    }

    /// How many have a number below that of the server.
    pub fn below_count(&self, server: u16) -> u16 {
        self.servers().iter().filter(|skipped| **skipped < server).count() as u16
    }

    /// The `n`th number, from 0 on, that is none of them.
    pub fn nth_other(&self, n: u16) -> u16 {
        self.servers().iter().fold(n, |number, skipped| number + u16::from(*skipped <= number))
    }
}

impl From<Skipped> for Vec<u16> {
    fn from(skipped: Skipped) -> Vec<u16> {
        skipped.servers().to_vec()
    }
}

/// A list of servers that is too long, not in order, or names one twice.
#[derive(Debug, thiserror::Error)]
#[error("a layout may skip {} servers, each named once and in order", Skipped::MAX)]
pub struct BadSkipped;

impl TryFrom<Vec<u16>> for Skipped {
    type Error = BadSkipped;

    fn try_from(servers: Vec<u16>) -> Result<Skipped, BadSkipped> {
        Skipped::of(servers.iter().copied()).filter(|skipped| skipped.servers() == servers).ok_or(BadSkipped)
    }
}
