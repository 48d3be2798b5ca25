//! Arbitrary bytes as the XDR of NFS, MOUNT and RPC: no panic, nothing beyond the bytes, and what is accepted survives being
//! written and read again.
#![no_main]

use impresario_nfs::handles::HandleKey;
use impresario_nfs::protocol::{Stability, read_attr, read_set, read_time, write_set, write_time};
use impresario_nfs::rpc::{CallHead, read_reply};
use impresario_nfs::xdr::{Reader, Writer};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let mut reader = Reader::new(bytes);
    if let Ok(head) = CallHead::read(&mut reader) {
        assert!(reader.rest().len() <= bytes.len());
        let _ = head.refusal();
    }
    let _ = read_reply(&mut Reader::new(bytes));
    let _ = Stability::read(&mut Reader::new(bytes));
    let _ = read_attr(&mut Reader::new(bytes));
    if let Ok(set) = read_set(&mut Reader::new(bytes)) {
        let mut out = Writer::default();
        write_set(&mut out, &set);
        let again = out.into_bytes();
        let mut out = Writer::default();
        write_set(&mut out, &read_set(&mut Reader::new(&again)).expect("what was written"));
        assert_eq!(out.into_bytes(), again);
    }
    if let Ok(time) = read_time(&mut Reader::new(bytes)) {
        let mut out = Writer::default();
        write_time(&mut out, time);
        assert_eq!(read_time(&mut Reader::new(&out.into_bytes())), Ok(time));
    }
    for most in [0, 3, 64, usize::MAX] {
        if let Ok(text) = Reader::new(bytes).opaque(most) {
            assert!(text.len() <= most);
        }
    }
    // A handle that this key did not make.
    if let Ok(key) = HandleKey::random() {
        assert!(key.open(bytes).is_err());
    }
});
