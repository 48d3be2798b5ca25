//! The interposed functions, by family. They are called by programs under their C names, with the contracts of the C
//! library's manual; so none has documentation of its own, and what is unsafe about them is what is unsafe there.
#![allow(missing_docs, clippy::missing_safety_doc)]

mod aio;
mod attributes;
mod closing;
mod copies;
mod devices;
mod directories;
mod folders;
mod maps;
mod names;
mod numbers;
mod opening;
mod patterns;
mod positions;
mod reads;
mod sandbox;
mod stdio;
pub mod streams;
mod temporary;
mod times;
pub mod uring;
mod watches;
mod writes;
mod xattrs;
