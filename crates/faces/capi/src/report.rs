//! Statistics as a struct and as JSON; policies and their parameters.

use std::ffi::{CString, c_char, c_int};
use std::mem::size_of;
use std::sync::OnceLock;

use impresario_sched::policy::POLICIES;
use serde_json::json;

use crate::handles::Handle;
use crate::structs::StatsC;
use crate::{Refusal, on, run};

/// Fills in a struct that starts with its size, up to the size that the program has set.
///
/// # Safety
/// `to` is NULL or points to as many writable bytes as its first member says.
unsafe fn fill<T: Copy>(to: *mut T, value: T, what: &str) -> Result<(), Refusal> {
    if to.is_null() {
        return Err(Refusal::invalid(format!("{what} is NULL; give the address of a struct")));
    }
    // SAFETY: the first member is a size_t, by the layout of every struct of the header.
    let room = unsafe { to.cast::<usize>().read_unaligned() };
    let head = size_of::<usize>();
    if !(head..=4096).contains(&room) {
        return Err(Refusal::invalid(format!("{what}: size is {room}; set it to sizeof the struct")));
    }
    let len = room.min(size_of::<T>()) - head;
    // SAFETY: `room` bytes are there, as the caller promises; the size itself stays.
    unsafe { std::ptr::copy_nonoverlapping((&raw const value).cast::<u8>().add(head), to.cast::<u8>().add(head), len) };
    Ok(())
}

/// Fills in the statistics.
///
/// # Safety
/// `stats` is NULL or points to a struct with a correct `size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn impresario_stats(scheduler: *mut Handle, stats: *mut StatsC) -> c_int {
    on(scheduler, |s| {
        let status = s.status();
        let report = status.statistics;
        let (ahead, ahead_read_bytes) = s.read_ahead().unwrap_or_default();
        let trace = s.trace_status();
        let report = StatsC {
            size: 0,
            accepted: report.accepted,
            completed: report.completed,
            failed: report.failed,
            cancelled: report.cancelled,
            blocked: report.blocked,
            batches: report.batches,
            read_bytes: report.read_bytes,
            write_bytes: report.write_bytes,
            queued: u64::from(status.queued) + u64::from(status.blocked),
            in_flight: u64::from(status.in_flight_batches),
            file_switches: report.file_switches,
            queue_ns: [report.queue_ns.p50, report.queue_ns.p99, report.queue_ns.max],
            service_ns: [report.service_ns.p50, report.service_ns.p99, report.service_ns.max],
            requests_per_batch: report.batch_requests.mean,
            bytes_per_batch: report.batch_bytes.mean,
            offset_distance_bytes: report.offset_distance_bytes.mean,
            ahead_predicted_bytes: ahead.predicted_bytes,
            ahead_read_bytes,
            ahead_hit_bytes: ahead.hit_bytes,
            ahead_wasted_bytes: ahead.wasted_bytes,
            ahead_outstanding_bytes: ahead.outstanding_bytes,
            ahead_withheld_bytes: ahead.withheld_bytes,
            ahead_stops: ahead.stops,
            traced_requests: trace.as_ref().map_or(0, |trace| trace.requests),
            untraced_requests: trace.as_ref().map_or(0, |trace| trace.not_traced),
            predicted_requests: s.foretold().map_or(0, |foretold| foretold.requests as u64),
        };
        // SAFETY: as this function's caller promises.
        unsafe { fill(stats, report, "stats") }?;
        Ok(0)
    })
}

/// All statistics as JSON.
///
/// # Safety
/// `text` is NULL or points to `size` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn impresario_stats_json(scheduler: *mut Handle, text: *mut c_char, size: usize) -> c_int {
    on(scheduler, |s| {
        let mut status = serde_json::to_value(s.status()).map_err(|e| format!("JSON failed: {e}"))?;
        let more = [
            ("read_ahead", s.describe_read_ahead()),
            ("trace", s.trace_status().map(|trace| json!(trace))),
            (
                "recorded_runs",
                s.foretold().map(|foretold| {
                    json!({
                        "traces": foretold.traces.iter().map(|path| path.display().to_string()).collect::<Vec<_>>(),
                        "requests": foretold.requests,
                        "files": foretold.files,
                        "passed_over": foretold.passed_over,
                    })
                }),
            ),
        ];
        if let Some(status) = status.as_object_mut() {
            status.extend(more.into_iter().filter_map(|(name, part)| Some((name.to_string(), part?))));
        }
        let json = status.to_string();
        if size > 0 && !text.is_null() {
            let len = json.len().min(size - 1);
            // SAFETY: `size` bytes are there, as the caller promises, and `len` + 1 of them are written.
            unsafe {
                std::ptr::copy_nonoverlapping(json.as_ptr(), text.cast::<u8>(), len);
                text.add(len).write(0);
            }
        }
        Ok(c_int::try_from(json.len()).unwrap_or(c_int::MAX))
    })
}

/// Zeroes the statistics.
#[unsafe(no_mangle)]
pub extern "C" fn impresario_reset_stats(scheduler: *mut Handle) -> c_int {
    on(scheduler, |s| {
        s.reset_statistics();
        Ok(0)
    })
}

/// `impresario_policy_info_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PolicyInfoC {
    pub(crate) size: usize,
    pub(crate) name: *const c_char,
    pub(crate) summary: *const c_char,
    pub(crate) source: *const c_char,
    pub(crate) params: usize,
}

/// `impresario_param_info_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ParamInfoC {
    pub(crate) size: usize,
    pub(crate) name: *const c_char,
    pub(crate) default_value: *const c_char,
    pub(crate) range: *const c_char,
    pub(crate) summary: *const c_char,
}

struct Texts {
    policy: [CString; 3],
    params: Vec<[CString; 4]>,
}

/// The policies' texts as C strings, created once.
fn texts() -> &'static [Texts] {
    static TEXTS: OnceLock<Vec<Texts>> = OnceLock::new();
    let c = |text: &str| CString::new(text).unwrap_or_default();
    TEXTS.get_or_init(|| {
        let params = |p: &impresario_sched::policy::PolicyInfo| {
            let all = p.params.iter().map(|i| [c(i.name), c(i.default), c(&i.range.to_string()), c(i.doc)]);
            all.collect()
        };
        POLICIES.iter().map(|p| Texts { policy: [c(p.name), c(p.summary), c(p.source)], params: params(p) }).collect()
    })
}

/// Describes a policy.
///
/// # Safety
/// `info` is NULL or points to a struct with a correct `size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn impresario_policy(index: usize, info: *mut PolicyInfoC) -> c_int {
    run(|| {
        let texts = texts();
        let Some(Texts { policy: [name, summary, source], params }) = texts.get(index) else {
            return Err(Refusal(libc::ENOENT, format!("there are {} policies, counted from 0", texts.len())));
        };
        let (name, summary, source) = (name.as_ptr(), summary.as_ptr(), source.as_ptr());
        let report = PolicyInfoC { size: 0, name, summary, source, params: params.len() };
        // SAFETY: as this function's caller promises.
        unsafe { fill(info, report, "info") }?;
        Ok(0)
    })
}

/// Describes a parameter of a policy.
///
/// # Safety
/// `info` is NULL or points to a struct with a correct `size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn impresario_policy_param(index: usize, param: usize, info: *mut ParamInfoC) -> c_int {
    run(|| {
        let Some([name, default_value, range, summary]) = texts().get(index).and_then(|p| p.params.get(param)) else {
            return Err(Refusal(libc::ENOENT, format!("policy {index} has no parameter {param}")));
        };
        let report = ParamInfoC {
            size: 0,
            name: name.as_ptr(),
            default_value: default_value.as_ptr(),
            range: range.as_ptr(),
            summary: summary.as_ptr(),
        };
        // SAFETY: as this function's caller promises.
        unsafe { fill(info, report, "info") }?;
        Ok(0)
    })
}
