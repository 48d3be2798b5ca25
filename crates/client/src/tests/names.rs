//! A metadata server's name space in memory.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use impresario_base::lock::Mutex;
use impresario_layout::Layout;
use impresario_wire::{
    Answer, Attr, Call, ClientKey, Entry, FileKey, LaneState, MetaCall, NodeKind, Opened, SetAttr, Statfs, Target,
    Time, Who, XattrMode, masked_mode,
};

use crate::testing::{FakeGreeting, FakeObjects, Flow, Serve, refuse};

/// A name space.
pub struct FakeNames {
    data: Vec<Arc<FakeObjects>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    nodes: BTreeMap<Vec<u8>, Node>,
    /// Extended attributes, by the number of their node.
    xattrs: BTreeMap<(u64, Vec<u8>), Vec<u8>>,
    next: u64,
    log: Vec<MetaCall>,
    /// Changes that were done, by client and sequence.
    done: HashMap<(ClientKey, u64), Answer>,
}

#[derive(Clone)]
struct Node {
    attr: Attr,
    key: FileKey,
    layout: Layout,
    target: Vec<u8>,
}

/// What one connection has open: key and layout by handle. Gone with it.
#[derive(Default)]
struct Session {
    open: HashMap<u64, Node>,
}

impl FakeNames {
    /// An empty name space over data servers.
    pub fn new(data: Vec<Arc<FakeObjects>>) -> FakeNames {
        let names = FakeNames { data, state: Mutex::default() };
        names.insert(&mut names.state.lock(), b"", NodeKind::Dir, 0o755, 0, 0, b"");
        names
    }

    /// The calls that arrived, in order.
    pub fn log(&self) -> Vec<MetaCall> {
        self.state.lock().log.clone()
    }

    /// Serves a connection.
    pub fn serve(self: &Arc<Self>) -> Serve {
        let (names, mut session) = (self.clone(), Session::default());
        Box::new(move |connection, call| {
            let answer = match &call.call {
                Call::Meta { who, call } => names.apply(&mut session, who, call),
                Call::Status => Answer::Text("{}".into()),
                _ => refuse(libc::ENOSYS, "not a call for a metadata server"),
            };
            connection.answer(call.id, &answer, &[]);
            Flow::Continue
        })
    }

    fn apply(&self, session: &mut Session, who: &Who, call: &MetaCall) -> Answer {
        let mut state = self.state.lock();
        state.log.push(call.clone());
        let once = (who.client, who.sequence);
        match (state.done.get(&once).cloned(), call) {
            // A handle is of the connection that it was made on.
            (Some(Answer::Opened(_)), MetaCall::Create { path, .. }) => self.open(&mut state, session, path),
            (Some(answer), _) => Ok(answer),
            (None, _) => self.done(&mut state, session, call).inspect(|answer| {
                let changes =
                    !matches!(answer, Answer::Entries(_) | Answer::Link(_) | Answer::Xattr(_) | Answer::Statfs(_));
                if changes && !matches!(call, MetaCall::Open { .. } | MetaCall::Reopen { .. } | MetaCall::Close { .. })
                {
                    state.done.insert(once, answer.clone());
                }
            }),
        }
        .unwrap_or_else(|errno| refuse(errno, "the name space says no"))
    }

    fn done(&self, state: &mut State, session: &mut Session, call: &MetaCall) -> Result<Answer, i32> {
        Ok(match call {
            MetaCall::GetAttr { target } => Answer::Attr(self.attr(&node(state, session, target)?)),
            MetaCall::SetAttr { target, set } => {
                let SetAttr { mode, uid, gid, size, .. } = *set;
                let found = node(state, session, target)?;
                for node in state.nodes.values_mut().filter(|node| node.attr.ino == found.attr.ino) {
                    node.attr.mode = mode.unwrap_or(node.attr.mode);
                    node.attr.uid = uid.unwrap_or(node.attr.uid);
                    node.attr.gid = gid.unwrap_or(node.attr.gid);
                }
                let mut lanes = Vec::new();
                for (k, objects) in (0..found.layout.pcount).map(|k| (k, self.objects(&found.layout, k))) {
                    if let (Some(size), Some(objects)) = (size, objects) {
                        let len = found.layout.lane_len(k, size);
                        let cut = objects.apply(&Call::Truncate { who: Who::default(), file: found.key, len }, &[]);
                        let loss = if let Answer::AfterLoss { loss, .. } = cut.0 { loss } else { 0 };
                        lanes.push(LaneState::new(found.layout.server_at(k), FakeGreeting::INCARNATION, loss));
                    }
                }
                let attr = self.attr(&node(state, session, target)?);
                match lanes.is_empty() {
                    true => Answer::Attr(attr),
                    false => Answer::Cut { attr, file: found.key, lanes },
                }
            }
            MetaCall::Create { path, exclusive: true, .. } if state.nodes.contains_key(path) => {
                return Err(libc::EEXIST);
            }
            MetaCall::Create { path, .. } if state.nodes.contains_key(path) => self.open(state, session, path)?,
            MetaCall::Create { path, mode, uid, gid, .. } => {
                self.insert(state, path, NodeKind::File, masked_mode(*mode), *uid, *gid, b"");
                self.open(state, session, path)?
            }
            MetaCall::Open { path, .. } => self.open(state, session, path)?,
            MetaCall::Reopen { path, file, .. } => match state.nodes.get(path) {
                Some(node) if node.key == *file => self.open(state, session, path)?,
                _ => return Err(libc::EIDRM),
            },
            MetaCall::Close { handle, .. } => session.open.remove(handle).map(|_| Answer::Done).ok_or(libc::EBADF)?,
            MetaCall::Append { .. } | MetaCall::CutBack { .. } => return Err(libc::EOPNOTSUPP),
            MetaCall::Fsync { handle } => session.open.get(handle).map(|_| Answer::Done).ok_or(libc::EBADF)?,
            MetaCall::Mkdir { path, .. } | MetaCall::Symlink { path, .. } | MetaCall::Mknod { path, .. }
                if state.nodes.contains_key(path) =>
            {
                return Err(libc::EEXIST);
            }
            MetaCall::Mkdir { path, mode, uid, gid } => {
                Answer::Attr(self.insert(state, path, NodeKind::Dir, masked_mode(*mode), *uid, *gid, b""))
            }
            MetaCall::Symlink { path, target, uid, gid } => {
                Answer::Attr(self.insert(state, path, NodeKind::Symlink, 0o777, *uid, *gid, target))
            }
            MetaCall::Mknod { path, kind, mode, uid, gid } => {
                Answer::Attr(self.insert(state, path, *kind, masked_mode(*mode), *uid, *gid, b""))
            }
            MetaCall::Readlink { path } => Answer::Link(state.nodes.get(path).ok_or(libc::ENOENT)?.target.clone()),
            MetaCall::Rmdir { path } if children(state, path).next().is_some() => return Err(libc::ENOTEMPTY),
            MetaCall::Rmdir { path } => state.nodes.remove(path).map(|_| Answer::Done).ok_or(libc::ENOENT)?,
            MetaCall::Unlink { path } => {
                let ino = state.nodes.remove(path).ok_or(libc::ENOENT)?.attr.ino;
                Answer::Removed { links: count_names(state, ino) }
            }
            MetaCall::Link { to, .. } if state.nodes.contains_key(to) => return Err(libc::EEXIST),
            MetaCall::Link { from, to } => {
                let node = state.nodes.get(from).cloned().ok_or(libc::ENOENT)?;
                if node.attr.kind == NodeKind::Dir {
                    return Err(libc::EPERM);
                }
                let ino = node.attr.ino;
                state.nodes.insert(to.clone(), node);
                count_names(state, ino);
                Answer::Attr(self.attr(state.nodes.get(to).ok_or(libc::ENOENT)?))
            }
            MetaCall::Rename { to, no_replace: true, .. } if state.nodes.contains_key(to) => return Err(libc::EEXIST),
            MetaCall::Rename { from, to, .. } => {
                let node = state.nodes.remove(from).ok_or(libc::ENOENT)?;
                let below: Vec<_> =
                    state.nodes.keys().filter(|p| p.starts_with(&[from, &b"/"[..]].concat())).cloned().collect();
                for path in below {
                    if let (Some(node), Some(rest)) = (state.nodes.remove(&path), path.strip_prefix(from.as_slice())) {
                        state.nodes.insert([to, rest].concat(), node);
                    }
                }
                match state.nodes.insert(to.clone(), node).filter(|old| old.attr.kind != NodeKind::Dir) {
                    Some(replaced) => Answer::Removed { links: count_names(state, replaced.attr.ino) },
                    None => Answer::Done,
                }
            }
            MetaCall::Exchange { from, to } => {
                if !(state.nodes.contains_key(from) && state.nodes.contains_key(to)) {
                    return Err(libc::ENOENT);
                }
                let all = std::mem::take(&mut state.nodes);
                let moved = all.into_iter().map(|(path, node)| {
                    let other = [(from, to), (to, from)].into_iter().find_map(|(from, to)| {
                        let rest = path.strip_prefix(from.as_slice())?;
                        (rest.is_empty() || rest.starts_with(b"/")).then(|| [to, rest].concat())
                    });
                    (other.unwrap_or(path), node)
                });
                state.nodes = moved.collect();
                Answer::Done
            }
            MetaCall::Readdir { path, after, max } => {
                let entries = children(state, path).filter(|(name, _)| *name > after.as_slice()).take(*max as usize);
                Answer::Entries(entries.map(|(name, n)| Entry { name: name.to_vec(), attr: self.attr(n) }).collect())
            }
            MetaCall::Statfs => {
                Answer::Statfs(Statfs { total_bytes: 1 << 40, free_bytes: 1 << 39, files: 1000, files_free: 900 })
            }
            MetaCall::FsyncDir { .. } | MetaCall::SetLayout { .. } => Answer::Done,
            MetaCall::GetXattr { target, name } => {
                let ino = node(state, session, target)?.attr.ino;
                Answer::Xattr(state.xattrs.get(&(ino, name.clone())).cloned().ok_or(libc::ENODATA)?)
            }
            MetaCall::ListXattr { target } => {
                let ino = node(state, session, target)?.attr.ino;
                let names = state.xattrs.keys().filter(|key| key.0 == ino).flat_map(|key| [&key.1[..], b"\0"].concat());
                Answer::Xattr(names.collect())
            }
            MetaCall::SetXattr { target, name, value, mode } => {
                let key = (node(state, session, target)?.attr.ino, name.clone());
                match (state.xattrs.contains_key(&key), mode, value) {
                    (true, XattrMode::Create, Some(_)) => return Err(libc::EEXIST),
                    (false, XattrMode::Replace, _) | (false, _, None) => return Err(libc::ENODATA),
                    (_, _, Some(value)) => drop(state.xattrs.insert(key, value.clone())),
                    (_, _, None) => drop(state.xattrs.remove(&key)),
                }
                Answer::Done
            }
            MetaCall::Lock(_) | MetaCall::SyncAll => return Err(libc::EOPNOTSUPP),
            MetaCall::Examine(_) | MetaCall::Relay(_) | MetaCall::Restrict(_) | MetaCall::Prove { .. } => {
                return Err(libc::ENOSYS);
            }
        })
    }

    #[allow(clippy::too_many_arguments)]
    fn insert(
        &self,
        state: &mut State,
        path: &[u8],
        kind: NodeKind,
        mode: u32,
        uid: u32,
        gid: u32,
        says: &[u8],
    ) -> Attr {
        state.next += 1;
        let time = Time { secs: 1, nanos: 0 };
        let (ino, size) = (state.next, says.len() as u64);
        let attr = Attr {
            ino,
            kind,
            mode,
            nlink: 1,
            uid,
            gid,
            size,
            used_bytes: size,
            atime: time,
            mtime: time,
            ctime: time,
            labelled: false,
        };
        let servers = self.data.len().max(1) as u16;
        let base = (ino % u64::from(servers)) as u16;
        let skipped = impresario_layout::Skipped::NONE;
        let layout = Layout { base, pcount: servers, ssize_bytes: 4096, servers, skipped };
        state.nodes.insert(path.to_vec(), Node { attr, key: FileKey(ino), layout, target: says.to_vec() });
        attr
    }

    fn open(&self, state: &mut State, session: &mut Session, path: &[u8]) -> Result<Answer, i32> {
        let node = state.nodes.get(path).ok_or(libc::ENOENT)?.clone();
        state.next += 1;
        session.open.insert(state.next, node.clone());
        let (handle, attr) = (state.next, self.attr(&node));
        Ok(Answer::Opened(Opened { handle, file: node.key, layout: node.layout, made: 0, attr }))
    }

    fn objects(&self, layout: &Layout, k: u16) -> Option<&Arc<FakeObjects>> {
        self.data.get(usize::from(layout.server_at(k)))
    }

    fn attr(&self, node: &Node) -> Attr {
        let lanes =
            (0..node.layout.pcount).filter_map(|k| Some((k, self.objects(&node.layout, k)?.info(node.key).size)));
        match node.attr.kind {
            NodeKind::File => {
                Attr { size: lanes.map(|(k, len)| node.layout.file_len(k, len)).max().unwrap_or(0), ..node.attr }
            }
            _ => node.attr,
        }
    }
}

fn node(state: &State, session: &Session, target: &Target) -> Result<Node, i32> {
    match target {
        Target::Path(path) => state.nodes.get(path).cloned().ok_or(libc::ENOENT),
        Target::Handle(handle) => session.open.get(handle).cloned().ok_or(libc::EBADF),
    }
}

/// Notes with all names of a node how many there are.
fn count_names(state: &mut State, ino: u64) -> u32 {
    let of_it = |node: &&mut Node| node.attr.ino == ino;
    let count = state.nodes.values_mut().filter(of_it).count() as u32;
    state.nodes.values_mut().filter(of_it).for_each(|node| node.attr.nlink = count);
    count
}

fn children<'a>(state: &'a State, path: &'a [u8]) -> impl Iterator<Item = (&'a [u8], &'a Node)> {
    let prefix = if path.is_empty() { Vec::new() } else { [path, b"/"].concat() };
    state.nodes.iter().filter_map(move |(name, node)| {
        let name = name.strip_prefix(prefix.as_slice())?;
        (!name.is_empty() && !name.contains(&b'/')).then_some((name, node))
    })
}
