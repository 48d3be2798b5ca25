//! The files that clients have open, by the key that every node over the folder computes alike.

use std::sync::Arc;

use impresario_backend::{Backend, Handle, Placement};
use impresario_base::durable::Durable;
use impresario_base::lock::Mutex;
use impresario_layout::Layout;
use impresario_wire::FileKey;
use rustc_hash::FxHashMap;

use super::super::storage::Striping;

/// A file that a client has open.
pub(crate) struct OpenFile {
    pub(super) key: FileKey,
    pub(super) handle: Handle,
    pub(super) striping: Striping,
    /// The directory that a sync must make durable too: the file was made in it and not synced since.
    pub(super) made_in: Mutex<Option<Handle>>,
    /// What was changed here beside its bytes. A client syncs the bytes before the rest of a file, which is mostly durable by that.
    pub(super) attributes: Durable,
}

/// All of them, each with the number of its opens.
#[derive(Default)]
pub(super) struct Files {
    by_key: Mutex<FxHashMap<FileKey, (Arc<OpenFile>, usize)>>,
}

impl Files {
    pub(super) fn get(&self, key: FileKey) -> Option<Arc<OpenFile>> {
        self.by_key.lock().get(&key).map(|(file, _)| file.clone())
    }

    pub(super) fn count(&self) -> usize {
        self.by_key.lock().len()
    }

    /// Opens a file once more; [`Files::close`] must follow. `striping` says how a file is striped that is not open yet.
    pub(super) fn open(
        &self,
        backend: &dyn Backend,
        handle: Handle,
        striping: impl FnOnce() -> Striping,
    ) -> impresario_backend::Result<Arc<OpenFile>> {
        let key = key_of(&handle);
        backend.hold(&handle)?;
        if let Some((file, opens)) = self.by_key.lock().get_mut(&key) {
            *opens += 1;
            return Ok(file.clone());
        }
        let file = Arc::new(OpenFile {
            key,
            handle,
            striping: striping(),
            made_in: Mutex::default(),
            attributes: Durable::default(),
        });
        let mut by_key = self.by_key.lock();
        let (file, opens) = by_key.entry(key).or_insert((file, 0));
        *opens += 1;
        Ok(file.clone())
    }

    /// Ends one open of a file.
    pub(super) fn close(&self, backend: &dyn Backend, file: &OpenFile) {
        let mut by_key = self.by_key.lock();
        if let Some((_, opens)) = by_key.get_mut(&file.key) {
            *opens -= 1;
            if *opens == 0 {
                by_key.remove(&file.key);
            }
        }
        drop(by_key);
        backend.release(&file.handle);
    }
}

/// The key of a file: a hash of its permanent handle, FNV-1a with a final mix, so that each bit of the handle counts.
pub(super) fn key_of(handle: &Handle) -> FileKey {
    FileKey(impresario_base::random::mix(impresario_base::fnv::hash(handle.as_bytes())))
}

/// How a file is striped over `lanes` lanes of the scheduler. With `distinct` no two of its data servers may share one,
/// because their objects would be taken for one; where they would, the whole file is in one lane.
pub(super) fn striping(placement: &Placement, lanes: u16, distinct: bool) -> Striping {
    let layout = placement.layout;
    let lane = |server: u16| {
        let number = placement.servers.get(usize::from(server)).copied().unwrap_or(0);
        (number % u32::from(lanes.max(1))) as u16
    };
    let mut used: Vec<u16> = (0..layout.pcount).map(|k| lane(layout.server_at(k))).collect();
    used.sort_unstable();
    used.dedup();
    if distinct && used.len() < usize::from(layout.pcount) {
        let one = Placement::one(0).layout;
        return Striping { layout: one, lanes: Some(Arc::new([lane(layout.base)])) };
    }
    Striping { layout, lanes: Some((0..layout.servers).map(lane).collect()) }
}

/// Striping that says nothing: one lane, drawn from the key.
pub(super) fn anywhere(handle: &Handle, lanes: u16) -> Striping {
    let lane = key_of(handle).0 % u64::from(lanes.max(1));
    Striping { layout: whole(), lanes: Some(Arc::new([lane as u16])) }
}

fn whole() -> Layout {
    Placement::one(0).layout
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_servers_are_lanes() {
        let layout = Layout::new(0, 3, 1 << 20, 3).unwrap();
        let placement = Placement { layout, servers: Arc::new([7, 2, 4]) };
        let lanes = |striping: &Striping| (0..3).map(|server| striping.lane(server)).collect::<Vec<_>>();
        let striped = striping(&placement, 8, true);
        assert_eq!((lanes(&striped), striped.layout), (vec![7, 2, 4], layout));
        // Two of them would share a lane.
        let shared = striping(&placement, 2, true);
        assert_eq!((shared.layout.pcount, shared.lane(0)), (1, 1));
        assert_eq!(lanes(&striping(&placement, 2, false)), [1, 0, 0]);
    }
}
