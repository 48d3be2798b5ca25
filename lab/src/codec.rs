//! Measures what encoding and decoding a frame costs: `impresario-lab codec`.

use std::hint::black_box;
use std::process::ExitCode;
use std::time::Instant;

use impresario_layout::Layout;
use impresario_wire::*;

const ROUNDS: u32 = 2_000_000;

fn ns_each(what: &str, mut act: impl FnMut()) {
    // The best of five: disturbances only add time.
    let best = (0..5)
        .map(|_| {
            let started = Instant::now();
            (0..ROUNDS / 5).for_each(|_| act());
            started.elapsed().as_nanos() as f64 / f64::from(ROUNDS / 5)
        })
        .fold(f64::INFINITY, f64::min);
    println!("{what:<28} {best:>7.1} ns");
}

fn measure(name: &str, kind: Kind, call: &(impl serde::Serialize + serde::de::DeserializeOwned)) {
    let mut out = Vec::with_capacity(256);
    encode_frame(kind, 7, call, 4096, &mut out).expect("a message of ours");
    let frame = out.clone();
    ns_each(&format!("{name} encode ({} B)", frame.len()), || {
        out.clear();
        encode_frame(kind, 7, black_box(call), 4096, &mut out).expect("as before");
        black_box(&out);
    });
    let limits = Limits::of_client(1 << 20);
    fn decode<T: serde::de::DeserializeOwned>(_: &T, body: &[u8]) -> T {
        decode_body(body).expect("a message of ours")
    }
    ns_each(&format!("{name} decode"), || {
        let header = FrameHeader::decode(black_box(&frame), &limits).expect("a frame of ours");
        black_box(decode(call, &frame[HEADER_BYTES..HEADER_BYTES + header.body_len as usize]));
    });
}

/// Prints the cost of each kind of frame, ns.
pub fn run() -> anyhow::Result<ExitCode> {
    let who = Who {
        client: ClientKey(0xfedc_ba98_7654_3210),
        epoch: 3,
        since: 3,
        sequence: 1_000_000,
        job: 4711,
        user: 1000,
        folders: [0x1695_d31c, 0x0bad_cafe, 0, 0],
    };
    let (file, lane_offset) = (FileKey(0x1234_5678_9abc_def0), 123_456_789);
    let layout = Layout::new(1, 4, 65536, 4).expect("a possible layout");
    measure("Read", Kind::Call, &Call::Read { who, file, lane_offset, len: 4096 });
    measure("Write", Kind::Call, &Call::Write { who, file, lane_offset });
    measure("FileRead", Kind::Call, &Call::FileRead { who, file, layout, made: 0, offset: lane_offset, len: 4096 });
    measure("Data", Kind::Answer, &Answer::Data);
    measure("Written", Kind::Answer, &Answer::Written(4096));
    Ok(ExitCode::SUCCESS)
}
