//! `impresario assist` as people use it: real programs under the real library and manager, on files of this machine.
//! Parts that need root, the kernel's trace or a static C library say "not run: …" where these are missing.

mod support;

#[path = "assist/advice.rs"]
mod advice;
#[path = "assist/batch.rs"]
mod batch;
#[path = "assist/charged.rs"]
mod charged;
#[path = "assist/formats.rs"]
mod formats;
#[path = "assist/hung.rs"]
mod hung;
#[path = "assist/hung_mount.rs"]
mod hung_mount;
#[path = "assist/inside.rs"]
mod inside;
#[path = "assist/kinds.rs"]
mod kinds;
#[path = "assist/learnt.rs"]
mod learnt;
#[path = "assist/mistakes.rs"]
mod mistakes;
#[path = "assist/node.rs"]
mod node;
#[path = "assist/nodes.rs"]
mod nodes;
#[path = "assist/one_program.rs"]
mod one_program;
#[path = "assist/reports.rs"]
mod reports;
#[cfg(target_arch = "x86_64")]
#[path = "assist/rings.rs"]
mod rings;
#[path = "assist/runtimes.rs"]
mod runtimes;
#[path = "assist/selftest.rs"]
mod selftest;
#[path = "assist/start.rs"]
mod start;
#[path = "assist/survey.rs"]
mod survey;
#[path = "assist/switch.rs"]
mod switch;
#[path = "assist/tools.rs"]
mod tools;
#[path = "assist/trouble.rs"]
mod trouble;
#[path = "assist/watched.rs"]
mod watched;
#[path = "assist/workers.rs"]
mod workers;
#[path = "assist/xrootd.rs"]
mod xrootd;
