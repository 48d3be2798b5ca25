//! What stands behind the interposed C library (`libimpresario_assist.so`, in `preload/`): one [`Table`] of the
//! program's descriptors, whose [`Consumer`] is told what the program does with them, and [`Assist`], the consumer that
//! tells the advice manager. Another consumer takes the same place.
//!
//! Nothing here exports a C symbol, so that programs can link this crate: [`check_program`] says whether the library will
//! be loaded into a program at all, and [`empty_library`] is for programs that it must leave alone.
//!
//! Rules of every function that a hook calls: no waiting, no output, no allocation, errno left as it was, and failure
//! means that the program runs on unobserved. A recorded program alone may wait for the manager, within a bound.

mod beside;
mod consumer;
mod empty;
mod locks;
mod log;
mod own;
mod paths;
mod process;
mod program;
pub mod served;
mod session;
mod socket;
mod table;

pub use beside::{leave, name_thread};
pub use consumer::{Claim, Consumer, Event, Occasion};
pub use empty::{Machine, empty_library};
pub use process::{quietly, stand_apart};
pub use program::{Verdict, check_program};
pub use session::{Assist, State};
pub use table::{DESCRIPTORS, Table, Watched};
