//! Arbitrary bytes as a file of every format that guided I/O reads: no panic, no read outside, no more than can be listed.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| impresario_assist::formats::exercise::read_everything(bytes));
