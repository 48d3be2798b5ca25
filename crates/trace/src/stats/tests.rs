use impresario_sched::Nanos;

use super::*;
use crate::testing::read_at;

fn figures(records: &[Record]) -> (Stats, Vec<Stats>) {
    let mut collector = Collector::new();
    records.iter().for_each(|r| collector.add(r));
    let file = |n: u8| FileInfo { path: vec![b'/', b'a' + n], ..FileInfo::default() };
    collector.finish(&[file(0), file(1)])
}

#[test]
fn strided_reads_of_one_thread() {
    // 250 KiB every 500 KiB; each takes 4 ms, then 1 ms of computing.
    let records: Vec<Record> =
        (0..100).map(|i| read_at(0, i * 512_000, 256_000, i * 5_000_000, Some(4_000_000))).collect();
    let (whole, files) = figures(&records);
    let s = &files[0];
    assert_eq!((s.path.as_str(), s.data_requests(), s.read_bytes), ("/a", 100, 25_600_000));
    assert_eq!((s.sequential, s.backward, s.followed), (0, 0, 99));
    assert_eq!(s.common_strides.above(0.5), vec![(512_000, 1.0)]);
    assert_eq!(s.common_sizes.above(0.5), vec![(256_000, 1.0)]);
    assert_eq!(s.offset_distance_bytes, Some(512_000.0));
    assert_eq!((s.in_flight_max, s.busy_ns, s.waited_ns), (1, 400_000_000, 400_000_000));
    assert_eq!(s.gaps_ns.range(), Some((5_000_000, 5_000_000)));
    assert!((s.span_s() - 0.499).abs() < 1e-9);
    assert!((whole.bandwidth().unwrap() - 25_600_000.0 / 0.499).abs() < 1.0);
    let text = s.text();
    assert!(text.contains("250 KiB") && text.contains("500 KiB 100 %"), "{text}");
}

/// Table II of twins-2017: contiguous processes make the file's distances large, strided ones small.
#[test]
fn offset_distance_is_of_the_file_not_of_the_thread() {
    let by = |offset: &dyn Fn(u64, u64) -> u64| {
        let mut records = Vec::new();
        for i in 0..64 {
            for p in 0..4u32 {
                let mut r = read_at(0, offset(i, p.into()), 32 << 10, (i * 4 + u64::from(p)) * 1000, Some(500));
                r.origin = OriginId(p);
                records.push(r);
            }
        }
        figures(&records).1.remove(0)
    };
    let contiguous = by(&|i, p| (p << 30) + (i << 15));
    let strided = by(&|i, p| (i * 4 + p) << 15);
    assert_eq!(contiguous.sequentiality(), Some(1.0));
    assert_eq!(strided.sequentiality(), Some(0.0));
    assert_eq!((contiguous.threads, strided.threads), (4, 4));
    assert!(contiguous.offset_distance_bytes.unwrap() > 1e9);
    assert_eq!(strided.offset_distance_bytes, Some(32768.0));
}

#[test]
fn concurrency_and_bandwidth() {
    // Three at once for 10 ms, a pause of 10 ms, then one for 10 ms.
    let mut records: Vec<Record> = (0..3).map(|i| read_at(0, i << 20, 1 << 20, i, Some(10_000_000 - i))).collect();
    records.push(read_at(1, 0, 1 << 20, 20_000_000, Some(10_000_000)));
    records.push(Record { outcome: Outcome::Failed(5), ..read_at(1, 0, 10, 30_000_000, None) });
    records.push(Record { outcome: Outcome::Short(1), ..read_at(1, 0, 10, 30_000_000, Some(0)) });
    records.push(Record::new(TraceOp::Close, FileId(1), 0, 0, Nanos(30_000_000)));
    let (whole, files) = figures(&records);
    assert_eq!(files.len(), 2);
    assert_eq!((whole.in_flight_max, whole.busy_ns, whole.last_ns), (3, 20_000_000, 30_000_000));
    assert!((whole.in_flight_mean - (40.0 - 3e-6) / 30.0).abs() < 1e-6, "{}", whole.in_flight_mean);
    assert_eq!((whole.failed, whole.short, whole.open_ended), (1, 1, 2));
    assert_eq!(whole.bytes(), (4 << 20) + 1);
    assert_eq!(whole.ops[TraceOp::Close as usize], 1);
    assert!((whole.busy_bandwidth().unwrap() / whole.bandwidth().unwrap() - 1.5).abs() < 1e-6);
}

#[test]
fn an_empty_trace_has_statistics() {
    let (whole, files) = figures(&[]);
    assert!(files.is_empty());
    assert_eq!((whole.bandwidth(), whole.sequentiality(), whole.offset_distance_bytes), (None, None, None));
    assert!(!whole.text().is_empty());
    serde_json::to_string(&whole).unwrap();
}
