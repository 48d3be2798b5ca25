//! Arbitrary bytes as a frame's header and as every message: no panic, no memory beyond the limits.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| impresario_wire::exercise::decode_everything(bytes));
