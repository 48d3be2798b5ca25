//! Checks with the system's compiler that every struct of `impresario.h` has the same layout in C and in Rust.

use std::mem::{offset_of, size_of};
use std::path::Path;
use std::process::Command;

use impresario_embed::{Batch, Member};

use crate::{OptionsC, ParamInfoC, PolicyInfoC, StatsC, SubmissionC};

/// C code that prints the size of each struct and the offset of each member.
macro_rules! layout {
    ($c:literal, $rust:ty, $($member:ident $(as $name:literal)?),* $(,)?) => {
        (
            concat!("T(", $c, ")\n", $(layout!(@line $c, $member $(, $name)?)),*),
            vec![size_of::<$rust>(), $(offset_of!($rust, $member)),*],
        )
    };
    (@line $c:literal, $member:ident) => { concat!("M(", $c, ", ", stringify!($member), ")\n") };
    (@line $c:literal, $member:ident, $name:literal) => { concat!("M(", $c, ", ", $name, ")\n") };
}

#[test]
fn c_and_rust_agree_on_every_struct() {
    let all = [
        layout!(
            "impresario_submission_t",
            SubmissionC,
            size,
            file,
            offset,
            len,
            token,
            client,
            job,
            lane_offset,
            connection,
            user,
            op,
            lane,
            flags,
            reserved
        ),
        layout!(
            "impresario_request_t",
            Member,
            id,
            batch,
            token,
            file,
            offset,
            len,
            client,
            job,
            lane_offset,
            arrival_ns,
            connection,
            user,
            member,
            lane,
            op,
            flags
        ),
        layout!(
            "impresario_batch_t",
            Batch,
            id,
            file,
            offset,
            len,
            lane_offset,
            handed_ns,
            requests,
            count,
            lane,
            op,
            flags
        ),
        layout!(
            "impresario_options_t",
            OptionsC,
            size,
            policy,
            on_request,
            on_batch,
            arg,
            lanes,
            lane_requests,
            lane_bytes,
            total_requests,
            queue_requests,
            node_rank,
            shared_space,
            submit_timeout_ms,
            dispatch_threads,
            read_ahead_bytes,
            may_read_ahead,
            ahead_dropped,
            in_memory,
            lane_speculations,
            sorted_below
        ),
        layout!("impresario_stats_t", StatsC, size, accepted, completed, failed, cancelled, blocked, batches, read_bytes,
            write_bytes, queued, in_flight, file_switches, queue_ns as "queue_ns_p50", service_ns as "service_ns_p50",
            requests_per_batch, bytes_per_batch, offset_distance_bytes, ahead_predicted_bytes, ahead_read_bytes,
            ahead_hit_bytes, ahead_wasted_bytes, ahead_outstanding_bytes, ahead_withheld_bytes, ahead_stops,
            traced_requests, untraced_requests, predicted_requests),
        layout!("impresario_policy_info_t", PolicyInfoC, size, name, summary, source, params),
        layout!("impresario_param_info_t", ParamInfoC, size, name, default_value, range, summary),
    ];
    let lines: String = all.iter().map(|(lines, _)| *lines).collect();
    let text = format!(
        "#include <impresario.h>\n#include <stdio.h>\n#define T(t) printf(\"%zu\\n\", sizeof(t));\n\
         #define M(t, m) printf(\"%zu\\n\", offsetof(t, m));\nint main(void) {{\n{lines}return 0; }}\n"
    );
    let dir = tempfile::tempdir().unwrap();
    let (source, program) = (dir.path().join("layout.c"), dir.path().join("layout"));
    std::fs::write(&source, text).unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let made = Command::new("cc").arg("-I").arg(include).arg("-o").arg(&program).arg(&source).status();
    assert!(made.unwrap().success());
    let said = String::from_utf8(Command::new(program).output().unwrap().stdout).unwrap();
    let c: Vec<usize> = said.lines().map(|l| l.parse().unwrap()).collect();
    let rust: Vec<usize> = all.iter().flat_map(|(_, numbers)| numbers.iter().copied()).collect();
    let what: Vec<&str> = lines.lines().collect();
    assert_eq!((c.len(), rust.len()), (what.len(), what.len()));
    for ((what, c), rust) in what.iter().zip(c).zip(rust) {
        assert_eq!(c, rust, "{what}");
    }
}
