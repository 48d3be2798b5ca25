//! Writes over several data servers that one of them fails: what is told, what the file then holds, and how long it is.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use crate::support::{Cluster, SmallDisk, pattern};
use impresario_client::{Client, ClientError, ClientOptions, CreateOptions, File, Via};
use impresario_config::Config;
use impresario_server::Started;

const STRIP: usize = 64 << 10;
const MIB: usize = 1 << 20;

/// Four data servers and a metadata server; the second data server has little space, or damages what it stores.
struct Bed {
    cluster: Cluster,
    _meta: Started,
    _io: Vec<Started>,
    // Unmounted last.
    _small: Option<SmallDisk>,
}

impl Bed {
    fn start(small: Option<SmallDisk>, adjust: impl FnOnce(&mut Config)) -> Bed {
        let cluster = Cluster::start(4, |config| {
            config.cluster.stripe_bytes = STRIP as u32;
            if let Some(small) = &small {
                config.data[1].dir = small.at("objects");
            }
            adjust(config);
        });
        let meta = impresario_server::start(&cluster.config, "meta").unwrap();
        Bed { cluster, _meta: meta, _io: Vec::new(), _small: small }
    }

    fn small() -> Option<Bed> {
        Some(Bed::start(Some(SmallDisk::mount(c"size=2m")?), |_| {}))
    }

    fn client(&self) -> Arc<Client> {
        Client::connect(&self.cluster.config, ClientOptions { via: Via::Direct, ..Default::default() }).unwrap()
    }

    /// The length that every client sees, and the contents.
    fn content(&self, name: &str) -> Vec<u8> {
        let client = self.client();
        let mut bytes = vec![1; client.stat(name).unwrap().size as usize];
        assert_eq!(client.open(name, false).unwrap().read_at(&mut bytes, 0).unwrap(), bytes.len());
        bytes
    }
}

fn create(client: &Arc<Client>, name: &str) -> File {
    // The first strip is the first data server's.
    let layout = impresario_wire::LayoutRequest { base: Some(0), pcount: Some(4), ssize_bytes: Some(STRIP as u32) };
    client.create(name, CreateOptions { layout: Some(layout), ..CreateOptions::default() }).unwrap()
}

fn errno<T: std::fmt::Debug>(result: Result<T, ClientError>) -> i32 {
    result.unwrap_err().errno()
}

#[test]
fn a_full_data_server_gives_a_short_write_and_the_file_is_as_long_as_that() {
    let Some(bed) = Bed::small() else { return };
    let client = bed.client();
    let file = create(&client, "f");
    let bytes = pattern(1, 16 * MIB);
    // The second strip is the full server's, which takes none of its strips or not all.
    let written = file.write_some_at(&bytes, 0).unwrap();
    assert_eq!(written, STRIP);
    assert!(bed.content("f") == bytes[..STRIP]);
    // What is tried again fails, and leaves the file alone; elsewhere there is space.
    assert_eq!(errno(file.write_some_at(&bytes[STRIP..], STRIP as u64)), libc::ENOSPC);
    assert_eq!(errno(file.write_at(&bytes, 0)), libc::ENOSPC);
    assert!(bed.content("f") == bytes[..STRIP]);
    assert_eq!(file.write_some_at(&bytes[..MIB], 0).unwrap(), MIB);
    file.sync().unwrap();
    file.close().unwrap();
    assert!(bed.content("f") == bytes[..MIB]);
}

#[test]
fn a_file_that_was_longer_stays_so() {
    let Some(bed) = Bed::small() else { return };
    let client = bed.client();
    let file = create(&client, "f");
    let bytes = pattern(2, 16 * MIB);
    file.set_len(20 * MIB as u64).unwrap();
    assert_eq!(errno(file.write_some_at(&bytes, STRIP as u64)), libc::ENOSPC);
    assert_eq!(client.stat("f").unwrap().size, 20 * MIB as u64);
    file.set_len(0).unwrap();
    assert_eq!(file.write_some_at(&bytes[..MIB], 0).unwrap(), MIB);
    assert_eq!(errno(file.write_some_at(&bytes, STRIP as u64)), libc::ENOSPC);
    let content = bed.content("f");
    assert_eq!(content.len(), MIB);
    // The full server holds old bytes or new ones, the others new ones.
    for (nth, strip) in content.chunks(STRIP).enumerate() {
        let (old, new) = (&bytes[nth * STRIP..][..STRIP], &bytes[nth.saturating_sub(1) * STRIP..][..STRIP]);
        assert!(strip == new || strip == old || nth % 4 == 1, "strip {nth}");
    }
}

#[test]
fn what_others_may_have_written_is_not_cut_off() {
    let Some(bed) = Bed::small() else { return };
    let (one, other) = (bed.client(), bed.client());
    let file = create(&one, "f");
    let bytes = pattern(3, 16 * MIB);
    let theirs = other.open("f", true).unwrap();
    theirs.write_at(b"theirs", 10 * MIB as u64).unwrap();
    assert_eq!(file.write_some_at(&bytes[..8 * MIB], 0).unwrap(), STRIP);
    let content = bed.content("f");
    assert!(content.len() == 10 * MIB + 6 && content.ends_with(b"theirs"));
    // It is over, but what it has written is not known here.
    theirs.close().unwrap();
    assert_eq!(file.write_some_at(&bytes, 0).unwrap(), STRIP);
    assert!(bed.content("f").len() >= 10 * MIB + 6);
    file.close().unwrap();
    // Cut by its path: that is no open.
    let file = create(&one, "g");
    let set = impresario_wire::SetAttr { size: Some(3 * MIB as u64), ..Default::default() };
    other.set_attr("g", set).unwrap();
    assert_eq!(file.write_some_at(&bytes, 0).unwrap(), STRIP);
    assert!(bed.content("g").len() >= 3 * MIB);
}

#[test]
fn writes_of_several_threads_are_not_cut_off() {
    let Some(bed) = Bed::small() else { return };
    let client = bed.client();
    let file = create(&client, "f");
    let bytes = pattern(4, 12 * MIB);
    // Small writes into the first strip of each row, which the first server has, beside large ones that fail.
    std::thread::scope(|scope| {
        scope.spawn(|| (0..8).for_each(|_| drop(file.write_some_at(&bytes, 0))));
        scope.spawn(|| {
            for row in 48..96 {
                let at = row * 4 * STRIP;
                assert_eq!(file.write_some_at(&[row as u8; 100], at as u64).unwrap(), 100);
            }
        });
    });
    let content = bed.content("f");
    for row in 48..96 {
        assert!(content[row * 4 * STRIP..][..100] == [row as u8; 100], "row {row}");
    }
}

/// Through I/O nodes an error may come instead of a short write: the good part then ends with a request.
#[test]
fn through_io_nodes_too_the_file_is_no_longer() {
    let Some(mut bed) = Bed::small() else { return };
    for split in [false, true] {
        let io = bed.cluster.start_io(|io| io.split = split);
        bed._io.push(io);
    }
    for node in [0, 1] {
        let options = ClientOptions { via: Via::IoNode(node), ..Default::default() };
        let client = Client::connect(&bed.cluster.config, options).unwrap();
        let name = format!("f{node}");
        let file = create(&client, &name);
        let bytes = pattern(5, 32 * MIB);
        file.write_at(&bytes[..100], 0).unwrap();
        let written = file.write_some_at(&bytes, 0);
        let good = match &written {
            Ok(good) => *good,
            Err(error) => {
                assert_eq!(error.errno(), libc::ENOSPC, "{error}");
                100
            }
        };
        let content = bed.content(&name);
        assert_eq!(content.len(), good, "{written:?}");
        assert!(content[..100] == bytes[..100]);
        file.set_len(0).unwrap();
    }
}

/// A block that is damaged cannot be changed in part: the data server fails such a write with EIO.
fn damage(data: &Path, at: u64) {
    let object = |folder: std::fs::DirEntry| std::fs::read_dir(folder.path()).unwrap().next();
    let path = std::fs::read_dir(data.join("objects")).unwrap().filter_map(|folder| object(folder.unwrap()));
    let path = path.map(|entry| entry.unwrap().path()).next().unwrap();
    let path = path.with_extension("");
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
}

#[test]
fn a_data_server_that_fails_with_eio_leaves_the_length_too() {
    let bed = Bed::start(None, |config| config.data.iter_mut().for_each(|data| data.checksums = true));
    let client = bed.client();
    let file = create(&client, "f");
    let bytes = pattern(6, MIB);
    file.write_at(&bytes[..STRIP + 2000], 0).unwrap();
    file.sync().unwrap();
    file.close().unwrap();
    damage(&bed.cluster.config.data[1].dir, 100);
    let file = client.open("f", true).unwrap();
    // From within the damaged block on: nothing is good, and three servers have taken their strips.
    let from = STRIP + 1000;
    assert_eq!(errno(file.write_some_at(&bytes[from..], from as u64)), libc::EIO);
    assert_eq!(client.stat("f").unwrap().size, STRIP as u64 + 2000);
    // As far as the damaged block: it would have to be changed in part.
    let written = file.write_some_at(&bytes[STRIP - 5000..STRIP + 1000], (STRIP - 5000) as u64).unwrap();
    assert_eq!(written, 5000);
    assert_eq!(client.stat("f").unwrap().size, STRIP as u64 + 2000);
    // Written as a whole it is good again.
    file.write_at(&bytes[STRIP..], STRIP as u64).unwrap();
    file.close().unwrap();
    assert!(bed.content("f") == bytes);
}
