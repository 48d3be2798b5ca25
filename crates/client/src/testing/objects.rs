//! A data server's objects in memory.

use std::collections::HashMap;

use impresario_base::lock::Mutex;
use impresario_wire::{Answer, Call, ClientKey, Fault, FileKey, ObjectInfo, SpaceChange, Time, Who};

use super::{Flow, Serve, refuse};

/// The objects of one data server.
#[derive(Default)]
pub struct FakeObjects {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    objects: HashMap<FileKey, Vec<u8>>,
    epochs: HashMap<ClientKey, u32>,
    log: Vec<Call>,
    syncs: usize,
    /// Writes fail so; 0: they do not.
    refuses: i32,
    /// The last loss of each object, and whether its next sync fails.
    losses: HashMap<FileKey, (u32, bool)>,
}

impl State {
    /// The answer to a change of an object of which data were lost before.
    fn after_loss(&self, file: FileKey, written: u32) -> Option<Answer> {
        let (loss, is_due) = *self.losses.get(&file)?;
        (!is_due).then_some(Answer::AfterLoss { written, loss, errno: 0 })
    }

    fn write(&mut self, file: FileKey, offset: u64, bytes: &[u8]) {
        let (from, to) = (offset as usize, offset as usize + bytes.len());
        let object = self.objects.entry(file).or_default();
        object.resize(object.len().max(to), 0);
        if let Some(place) = object.get_mut(from..to) {
            place.copy_from_slice(bytes);
        }
    }
}

impl FakeObjects {
    /// The content of an object, if there is one.
    pub fn object(&self, file: FileKey) -> Option<Vec<u8>> {
        self.state.lock().objects.get(&file).cloned()
    }

    /// The calls that arrived, in order.
    pub fn log(&self) -> Vec<Call> {
        self.state.lock().log.clone()
    }

    /// The next sync of an object fails, and what was written to it before is lost.
    pub fn fail_next_sync(&self, file: FileKey) {
        let mut state = self.state.lock();
        let loss = state.losses.values().map(|(loss, _)| loss).max().unwrap_or(&0) + 1;
        state.losses.insert(file, (loss, true));
    }

    /// From now on all writes fail with this errno, or with 0 none.
    pub fn refuse_writes(&self, errno: i32) {
        self.state.lock().refuses = errno;
    }

    /// Syncs that were done.
    pub fn syncs(&self) -> usize {
        self.state.lock().syncs
    }

    /// Size of an object.
    pub fn info(&self, file: FileKey) -> ObjectInfo {
        let object = self.state.lock().objects.get(&file).map(|object| object.len() as u64);
        let (size, made) = (object.unwrap_or(0), u64::from(object.is_some()));
        ObjectInfo { size, mtime: Time { secs: size.min(1) as i64, nanos: 0 }, used_bytes: size, made }
    }

    /// Does one call; older epochs are fenced.
    pub fn apply(&self, call: &Call, payload: &[u8]) -> (Answer, Vec<u8>) {
        let mut state = self.state.lock();
        if state.log.len() < 100_000 {
            state.log.push(call.clone());
        }
        if let Some(Who { client, epoch, .. }) = call.who() {
            let seen = state.epochs.entry(*client).or_default();
            *seen = (*seen).max(*epoch);
            if epoch < seen {
                return (refuse(Fault::FENCED, "older epoch"), Vec::new());
            }
        }
        let answer = match call {
            Call::Read { file, lane_offset, len, .. } => {
                let object = state.objects.get(file).map_or(&[][..], |object| object.as_slice());
                let from = (*lane_offset).min(object.len() as u64) as usize;
                let to = (from + *len as usize).min(object.len());
                return (Answer::Data, object.get(from..to).unwrap_or(&[]).to_vec());
            }
            // Up to the first byte that is not there.
            Call::ReadList { file, extents, .. } => {
                let object = state.objects.get(file).map_or(&[][..], |object| object.as_slice());
                let mut bytes = Vec::new();
                for (offset, len) in extents.iter() {
                    let (from, to) = (offset as usize, offset as usize + len as usize);
                    bytes.extend_from_slice(object.get(from..to.min(object.len())).unwrap_or(&[]));
                    if to > object.len() {
                        break;
                    }
                }
                return (Answer::Data, bytes);
            }
            Call::Write { .. } | Call::WriteMerged { .. } | Call::WriteList { .. } if state.refuses != 0 => {
                refuse(state.refuses, "it was told to")
            }
            Call::Write { file, lane_offset, .. } | Call::WriteMerged { file, lane_offset, .. } => {
                state.write(*file, *lane_offset, payload);
                let written = payload.len() as u32;
                state.after_loss(*file, written).unwrap_or(Answer::Written(written))
            }
            Call::WriteList { file, extents, .. } => {
                if extents.check(u64::MAX) != Ok(payload.len() as u64) {
                    return (refuse(libc::EINVAL, "the extents are not those of the payload"), Vec::new());
                }
                let mut rest = payload;
                for (offset, len) in extents.iter() {
                    let (mine, later) = rest.split_at(len as usize);
                    state.write(*file, offset, mine);
                    rest = later;
                }
                let written = payload.len() as u32;
                state.after_loss(*file, written).unwrap_or(Answer::Written(written))
            }
            Call::Sync { file, .. } => {
                state.syncs += 1;
                match state.losses.get_mut(file) {
                    Some((loss, fails)) => {
                        let errno = if std::mem::take(fails) { libc::EIO } else { 0 };
                        Answer::AfterLoss { written: 0, loss: *loss, errno }
                    }
                    None => Answer::Done,
                }
            }
            Call::Truncate { file, len, .. } => {
                if *len > 0 || state.objects.contains_key(file) {
                    state.objects.entry(*file).or_default().resize(*len as usize, 0);
                }
                state.after_loss(*file, 0).unwrap_or(Answer::Done)
            }
            Call::ChangeSpace { file, change, lane_offset, len, .. } => {
                let (start, end) = (*lane_offset as usize, (lane_offset + len) as usize);
                if change.extends() {
                    let object = state.objects.entry(*file).or_default();
                    object.resize(object.len().max(end), 0);
                }
                if let (Some(object), false) =
                    (state.objects.get_mut(file), matches!(change, SpaceChange::Allocate { .. }))
                {
                    let within = start.min(object.len())..end.min(object.len());
                    object.get_mut(within).into_iter().for_each(|bytes| bytes.fill(0));
                }
                state.after_loss(*file, 0).unwrap_or(Answer::Written(0))
            }
            Call::Unlink { file, .. } => {
                state.objects.remove(file);
                Answer::Done
            }
            Call::ObjectStat { file } => {
                drop(state);
                Answer::Object(self.info(*file))
            }
            Call::Prefetch { file, extents, .. } => {
                let end = state.objects.get(file).map_or(0, |object| object.len() as u64);
                let of = |(at, len): (u64, u32)| (at + u64::from(len)).min(end).saturating_sub(at);
                Answer::Accepted(extents.iter().map(of).sum())
            }
            Call::Status => Answer::Text("{}".into()),
            _ => refuse(libc::ENOSYS, "not a call for a data server"),
        };
        (answer, Vec::new())
    }

    /// Serves a connection.
    pub fn serve(self: &std::sync::Arc<Self>) -> Serve {
        let objects = self.clone();
        Box::new(move |connection, call| {
            let (answer, payload) = objects.apply(&call.call, &call.payload);
            connection.answer(call.id, &answer, &payload);
            Flow::Continue
        })
    }
}
