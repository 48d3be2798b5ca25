//! List reads over real sockets: the same bytes as separate reads of each extent, whatever the list.

use crate::support;
use crate::support::Cluster;
use impresario_client::{Client, ClientOptions, Via};
use impresario_layout::Layout;
use impresario_sched::PolicySpec;
use impresario_wire::FileKey;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

const SERVERS: u16 = 3;

/// A file with holes: what is written of it, each at an offset with a length.
fn writes() -> impl Strategy<Value = Vec<(u64, usize)>> {
    proptest::collection::vec((0u64..60_000, 1usize..9_000), 0..6)
}

/// Lists in any order, overlapping, over the end and far behind it; some strided.
fn lists() -> impl Strategy<Value = Vec<(u64, usize)>> {
    let any = proptest::collection::vec((0u64..90_000, 0usize..5_000), 1..40);
    let strided = (0u64..50_000, 1usize..3_000, 0u64..6_000, 1u64..30)
        .prop_map(|(at, len, stride, count)| (0..count).map(|i| (at + i * stride, len)).collect());
    let far = proptest::collection::vec((0u64..1 << 40, 1usize..100), 1..5);
    prop_oneof![any, strided, far]
}

fn compare(client: &Client, key: u64, written: &[(u64, usize)], list: &[(u64, usize)]) -> Result<(), TestCaseError> {
    let (file, layout) = (FileKey(key), Layout::new((key % 3) as u16, SERVERS, 1024, SERVERS).unwrap());
    let mut content: Vec<u8> = Vec::new();
    for (n, (offset, len)) in written.iter().enumerate() {
        let bytes = support::pattern(key * 31 + n as u64, *len);
        client.write(file, &layout, *offset, &bytes).unwrap();
        let end = *offset as usize + len;
        content.resize(content.len().max(end), 0);
        content[*offset as usize..end].copy_from_slice(&bytes);
    }
    let mut into = vec![0xee; list.iter().map(|extent| extent.1).sum()];
    let got = client.read_list(file, &layout, list, &mut into).unwrap();
    prop_assert_eq!(got.len(), list.len());
    let mut rest = &into[..];
    for ((offset, len), got) in list.iter().zip(got) {
        let (mine, later) = rest.split_at(*len);
        rest = later;
        let mut alone = vec![0xdd; *len];
        prop_assert_eq!(client.read(file, &layout, *offset, &mut alone).unwrap(), got);
        prop_assert_eq!(&alone[..got], &mine[..got]);
        let start = content.len().min(*offset as usize);
        prop_assert_eq!(&mine[..got], &content[start..content.len().min(start + len)]);
    }
    Ok(())
}

#[test]
fn a_list_read_is_the_separate_reads() {
    for (policy, io_node, max_payload_bytes) in
        [("mlf", false, 4096), ("stream", false, 1 << 20), ("mlf", true, 65_536)]
    {
        let mut cluster = Cluster::start(SERVERS.into(), |config| {
            config.cluster.max_payload_bytes = max_payload_bytes;
            config.data.iter_mut().for_each(|data| data.policy = PolicySpec::named(policy));
        });
        let _meta = impresario_server::start(&cluster.config, impresario_config::META_NAME).unwrap();
        let _io = io_node.then(|| cluster.start_io(|io| io.split = true));
        let options = ClientOptions { via: Via::Auto, ..ClientOptions::default() };
        let client = Client::connect(&cluster.config, options).unwrap();
        let key = std::cell::Cell::new(0);
        let mut runner = TestRunner::new(Config::with_cases(60));
        runner
            .run(&(writes(), lists()), |(written, list)| {
                key.set(key.get() + 1);
                compare(&client, key.get(), &written, &list)
            })
            .unwrap_or_else(|failure| panic!("{policy}, I/O node: {io_node}: {failure}"));
    }
}

#[test]
fn a_list_that_does_not_fit_its_buffer_or_a_file_is_refused() {
    let cluster = Cluster::start(1, |_| {});
    let _meta = impresario_server::start(&cluster.config, impresario_config::META_NAME).unwrap();
    let client = Client::connect(&cluster.config, ClientOptions::default()).unwrap();
    let layout = Layout::new(0, 1, 65_536, 1).unwrap();
    let read = |list: &[(u64, usize)], len| client.read_list(FileKey(1), &layout, list, &mut vec![0; len]);
    assert!(read(&[(0, 10), (5, 10)], 19).unwrap_err().to_string().contains("20 bytes"));
    assert!(read(&[(u64::MAX, 1)], 1).is_err());
    assert_eq!(read(&[], 0).unwrap(), [] as [usize; 0]);
    assert_eq!(read(&[(7, 0), (0, 5)], 5).unwrap(), [0, 0]);
    // More extents than one request may have.
    let layout = Layout::new(0, 1, 65_536, 1).unwrap();
    let bytes = support::pattern(1, 200_000);
    client.write(FileKey(1), &layout, 0, &bytes).unwrap();
    let list: Vec<_> = (0..5000).map(|i| (i * 37 % 199_000, 3)).collect();
    let mut into = vec![0; 15_000];
    assert_eq!(client.read_list(FileKey(1), &layout, &list, &mut into).unwrap(), [3; 5000]);
    for ((offset, len), got) in list.iter().zip(into.chunks(3)) {
        assert_eq!(&bytes[*offset as usize..][..*len], got);
    }
}
