//! Which open files have been told of lost data: each is, once, whichever of them found out.

use impresario_base::lock::Mutex;
use impresario_wire::FileKey;
use rustc_hash::FxHashMap;

use crate::error::ClientError;

/// Files of which losses are remembered; beyond it all open files are told of one.
const FILES_MAX: usize = 4096;

/// The losses of this client's files.
#[derive(Default)]
pub struct Told(Mutex<State>);

#[derive(Default)]
struct State {
    last: u64,
    /// The last loss of files that are not remembered.
    forgotten: (u64, Option<ClientError>),
    files: FxHashMap<FileKey, (u64, ClientError)>,
}

impl Told {
    /// A sync found that data of a file may be lost.
    pub fn lost(&self, file: FileKey, error: &ClientError) {
        let mut state = self.0.lock();
        state.last += 1;
        let last = state.last;
        if state.files.len() >= FILES_MAX {
            state.files.clear();
            state.forgotten = (last, Some(error.clone()));
        }
        state.files.insert(file, (last, error.clone()));
    }

    /// The number of a file's last loss: what a new open file need not be told.
    pub fn last(&self, file: FileKey) -> u64 {
        let state = self.0.lock();
        state.files.get(&file).map_or(state.forgotten.0, |(loss, _)| *loss)
    }

    /// What an open file has not been told since loss `told`.
    pub fn news(&self, file: FileKey, told: u64) -> Option<(u64, ClientError)> {
        let state = self.0.lock();
        let (loss, error) = match state.files.get(&file) {
            Some((loss, error)) => (*loss, error.clone()),
            None => (state.forgotten.0, state.forgotten.1.clone()?),
        };
        (loss > told).then_some((loss, error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_open_file_is_told_once_and_what_is_forgotten_is_told_to_all() {
        let told = Told::default();
        let error = ClientError::invalid("lost");
        let file = FileKey(1);
        let before = told.last(file);
        assert!(told.news(file, before).is_none());
        told.lost(file, &error);
        let (loss, _) = told.news(file, before).unwrap();
        assert!(told.news(file, loss).is_none() && told.news(FileKey(2), 0).is_none());
        assert_eq!(told.last(file), loss, "opened afterwards");
        (10..10 + FILES_MAX as u64).for_each(|key| told.lost(FileKey(key), &error));
        assert!(told.news(file, loss).is_some() && told.0.lock().files.len() <= FILES_MAX);
    }
}
