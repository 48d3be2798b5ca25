//! A GlusterFS volume as a backend, through libgfapi: bricks on this machine.

use impresario_backend::gluster::{Options, Source};
use impresario_backend::suite::Suite;
use impresario_backend::{Backend, Caller, Errno, GlusterVolume, Make, SetAttr};
use impresario_testing::gluster::GlusterBricks;
use impresario_testing::skip;

/// The bricks' volume; `None` where the library is not there: the test is then skipped.
#[track_caller]
fn open(bricks: &GlusterBricks) -> Option<GlusterVolume> {
    match GlusterVolume::open("test", &Source::File(bricks.volume_file()), Options::default()) {
        Ok(volume) => Some(volume),
        Err(error) if error.to_string().contains("libgfapi.so.0: cannot open") => {
            skip("libgfapi", error);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn root() -> Caller {
    Caller { uid: 0, gid: 0, groups: vec![] }
}

#[test]
fn the_contract_holds() {
    let Some(bricks) = GlusterBricks::start(4, None) else { return };
    let Some(volume) = open(&bricks) else { return };
    Suite { backend: &volume, caller: root(), others: true, entries: 600 }.run();
}

#[test]
fn the_contract_holds_with_shards() {
    let Some(bricks) = GlusterBricks::start(4, Some("4MB")) else { return };
    let Some(volume) = open(&bricks) else { return };
    Suite { backend: &volume, caller: root(), others: true, entries: 300 }.run();
}
