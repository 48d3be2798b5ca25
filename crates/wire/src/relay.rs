//! What the metadata server is asked while a file is laid out anew over other data servers. All of it comes from the program
//! that copies it.

use impresario_layout::Layout;
use serde::{Deserialize, Serialize};

#[cfg(doc)]
use crate::message::Answer;
use crate::message::FileKey;
#[cfg(doc)]
use crate::names::Examine;

/// A step of laying a file out anew. Answer: [`Answer::Relaid`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum RelayCall {
    /// Say where the file is to lie, and remember that it is being copied. Whatever changes it ends that.
    Begin {
        /// Path.
        path: Vec<u8>,
    },
    /// All its bytes are durable in the new objects: it lies there from now on, and the old ones are removed. EBUSY: it
    /// was changed or opened meanwhile, and nothing has happened. Ends what was begun, also when it fails.
    Commit {
        /// From [`Relaid::Begun`].
        handle: u64,
    },
    /// No file is striped over this data server, which is draining: a walk has met none. Noted, durably, unless the walk may
    /// have missed one; the server may be retired then.
    Emptied {
        /// Its name.
        server: String,
        /// Its place among the data servers.
        number: u16,
        /// From [`Examine::BeginWalk`]; it ends.
        walk: u64,
    },
}

/// Where a file lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Objects {
    /// Key of the objects.
    pub file: FileKey,
    /// Their layout.
    pub layout: Layout,
}

/// What the metadata server says to a [`RelayCall`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Relaid {
    /// It is done, or nothing was to be done.
    Done,
    /// The file cannot be laid out anew now.
    InUse {
        /// Why.
        why: String,
    },
    /// It is to be copied.
    Begun {
        /// Names the copy until it is committed or the connection ends.
        handle: u64,
        /// What it has.
        from: Objects,
        /// The objects that it had when they were last asked for.
        made: u64,
        /// Its length, bytes.
        size: u64,
        /// What it is to have.
        to: Objects,
    },
}
