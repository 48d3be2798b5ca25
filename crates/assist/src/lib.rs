//! Guided I/O: faster reads for unmodified programs, from one configuration file.
//!
//! - [`config`]: the file, which regions of which files are read how; [`regions`] decides its overlaps.
//! - [`cache`]: which blocks of a file are brought in and released as its readers move.
//! - [`advice`]: which of Sequential, Random and Normal an open file gets.
//! - [`judge`]: whether hints pay; [`advisor`]: all of these for one file.
//! - [`backend`]: how hints are given to the file system.
//! - [`manager`]: takes accesses from programs and gives hints; [`report`] says what it did, [`jobs`] what came of it for the
//!   jobs of a site, [`coverage`] what was not seen.
//! - [`record`] records a run; [`plan`]: from it to hints, each with its reason and expected gain.
//! - [`learn`]: what programs do with kinds of files, from recorded runs, for files that were never read before.
//! - [`formats`]: files that list their own extents, one reader for each format.
//! - [`survey`]: what it could be worth to programs of which there are only Darshan logs.
//! - [`walk`]: which files a program opens next when it goes through a tree of folders.
//! - [`zarr`]: which chunks of an array come next, each a file of its own.
//! - [`watch`]: programs without the library, seen through the kernel.
//!
//! What a program will read next, by its strides, by a recorded run or by a known order, is the `foresight` room's.

pub mod advice;
pub mod advisor;
pub mod backend;
pub mod cache;
pub mod config;
pub mod coverage;
pub mod formats;
pub mod jobs;
pub mod judge;
pub mod learn;
pub mod manager;
mod online;
pub mod plan;
pub mod record;
pub mod regions;
pub mod report;
pub mod survey;
pub mod walk;
pub mod watch;
pub mod zarr;
