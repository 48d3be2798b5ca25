//! Who is told what a program does with its descriptors.

use impresario_ring::{Op, Unseen};
use rustix::fs::Stat;

/// What a consumer says of a descriptor that it is asked about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// Not of interest until it is closed.
    Ignore,
    /// Accesses are wanted, under this number; from [`Claim::FIRST`] on, below `u32::MAX`, and never used twice in a
    /// generation.
    Watch(u32),
    /// Of a descriptor just opened: ask again at the first access that [`Consumer::passes_over`] does not pass over.
    PassOver,
    /// Cannot be said now: ask again at the next use.
    Later,
}

/// How a descriptor came to be asked about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occasion {
    /// The program has just opened it.
    Opened,
    /// The program uses it.
    Used,
    /// The program writes to a file that was passed over when it was opened: an output, told of once and then left.
    Written,
}

impl Claim {
    /// The smallest number for [`Claim::Watch`].
    pub const FIRST: u32 = 2;
}

/// One thing that a program did with a watched descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What it did.
    pub op: Op,
    /// Bits of [`impresario_ring::flag`].
    pub flags: u8,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes.
    pub len_bytes: u64,
    /// When the call began, in nanoseconds of the monotonic clock.
    pub start_ns: u64,
    /// How long it took.
    pub duration_ns: u64,
}

/// The one who is told. Its functions are called from any thread and from signal handlers, at any time.
pub trait Consumer: Sync {
    /// The generation of its interest: 0 while it wants nothing; another number when all descriptors must be asked about
    /// anew. This is read at every call of the program: one load.
    fn generation(&self) -> u32;

    /// Called at a use of any descriptor while the generation is 0.
    fn idle(&self);

    /// Whether accesses of this kind are wanted at all, so that others need not be timed.
    fn wants(&self, op: Op) -> bool;

    /// Whether it can say anything of descriptors now. Asked first, at every use of a descriptor that is unknown: cheap.
    fn answers(&self) -> bool;

    /// Whether this descriptor, of which the kernel says `stat`, is of interest.
    fn claim(&self, fd: i32, stat: &Stat, occasion: Occasion) -> Claim;

    /// Whether it has claimed this file so that its open file is not shared with anybody.
    fn is_apart(&self, _file: u32) -> bool {
        false
    }

    /// Whether it is still of interest when its open file must not be shared with anybody, as when it carries a lock.
    fn claim_apart(&self, _fd: i32) -> Claim {
        Claim::Ignore
    }

    /// The program did something with a file claimed in this generation.
    fn tell(&self, generation: u32, file: u32, event: Event);

    /// Whether this access to a descriptor of [`Claim::PassOver`] need not be told. If so, the consumer has counted it.
    fn passes_over(&self, _event: Event) -> bool {
        true
    }

    /// The program did something that is known not to be told.
    fn unseen(&self, _what: Unseen) {}

    /// The program did so many things of which it was seen only that they were done.
    fn missed(&self, _accesses: u64) {}

    /// The descriptor of this file is about to be closed.
    fn release(&self, generation: u32, file: u32);

    /// Whether the calling process is the one that the table is of. A child made by `vfork` runs in its parent's memory
    /// with descriptors of its own: what it closes and opens must not be noted.
    fn here(&self) -> bool;
}
