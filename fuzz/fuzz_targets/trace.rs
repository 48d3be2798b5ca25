//! Arbitrary bytes as a request trace and as its blocks: no panic, no memory beyond what the bytes can hold.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| impresario_trace::codec::exercise::decode_everything(bytes));
