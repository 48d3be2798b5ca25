//! A client's operations on the name space.
//!
//! Paths are bytes, from the root of the name space; a leading `/` is allowed. No symbolic link is followed.
//!
//! A change whose answer is lost with its connection is asked for again, with the same sequence number: the metadata
//! server does it once and repeats its answer.

use std::sync::Arc;

use impresario_wire::{
    Answer, Attr, Call, Entry, LayoutRequest, MetaCall, NodeKind, Opened, SetAttr, Statfs, Target, XattrMode,
};

use crate::client::Client;
use crate::error::ClientError;
use crate::file::File;
use crate::pending::Reply;
use crate::striped::{expect_done, unexpected};

/// How a file is to be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CreateOptions {
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Fail when it exists; otherwise an existing file is opened.
    pub exclusive: bool,
    /// How to stripe it; `None`: as its directory says.
    pub layout: Option<LayoutRequest>,
}

impl Default for CreateOptions {
    /// A file of the caller's user and group, mode 0644.
    fn default() -> Self {
        let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        CreateOptions { mode: 0o644, uid, gid, exclusive: false, layout: None }
    }
}

impl Client {
    /// Attributes of what a path names.
    pub fn stat(&self, path: impl AsRef<[u8]>) -> Result<Attr, ClientError> {
        attr(self.ask(MetaCall::GetAttr { target: at(path) })?)
    }

    /// Changes attributes of what a path names.
    pub fn set_attr(&self, path: impl AsRef<[u8]>, set: SetAttr) -> Result<Attr, ClientError> {
        let Reply { answer, peer, .. } = self.ask(MetaCall::SetAttr { target: at(path), set })?;
        self.attributes(answer, || peer)
    }

    /// Makes a file and opens it for reading and writing.
    pub fn create(self: &Arc<Self>, path: impl AsRef<[u8]>, options: CreateOptions) -> Result<File, ClientError> {
        self.create_with_attr(path, options).map(|(file, _)| file)
    }

    /// The same, with the file's attributes.
    pub fn create_with_attr(
        self: &Arc<Self>,
        path: impl AsRef<[u8]>,
        options: CreateOptions,
    ) -> Result<(File, Attr), ClientError> {
        let path = clean(path);
        let CreateOptions { mode, uid, gid, exclusive, layout } = options;
        let call = MetaCall::Create { path: path.clone(), mode, uid, gid, exclusive, layout };
        let _changing = self.opens.changing();
        let (reply, opened) = opened(self.ask(call)?)?;
        Ok((File::new(self, path, true, &opened, reply.session), opened.attr))
    }

    /// Opens a file.
    pub fn open(self: &Arc<Self>, path: impl AsRef<[u8]>, write: bool) -> Result<File, ClientError> {
        self.open_with_attr(path, write).map(|(file, _)| file)
    }

    /// The same, with the file's attributes.
    pub fn open_with_attr(self: &Arc<Self>, path: impl AsRef<[u8]>, write: bool) -> Result<(File, Attr), ClientError> {
        let path = clean(path);
        let _changing = self.opens.changing();
        let (reply, opened) = opened(self.ask(MetaCall::Open { path: path.clone(), write })?)?;
        Ok((File::new(self, path, write, &opened, reply.session), opened.attr))
    }

    /// An extended attribute of a file or directory.
    pub fn xattr(&self, path: impl AsRef<[u8]>, name: impl AsRef<[u8]>) -> Result<Vec<u8>, ClientError> {
        xattr(self.ask(MetaCall::GetXattr { target: at(path), name: name.as_ref().to_vec() })?)
    }

    /// The names of all extended attributes, each with a NUL byte behind it.
    pub fn list_xattr(&self, path: impl AsRef<[u8]>) -> Result<Vec<u8>, ClientError> {
        xattr(self.ask(MetaCall::ListXattr { target: at(path) })?)
    }

    /// Sets an extended attribute; `None` removes it.
    pub fn set_xattr(
        &self,
        path: impl AsRef<[u8]>,
        name: impl AsRef<[u8]>,
        value: Option<&[u8]>,
        mode: XattrMode,
    ) -> Result<(), ClientError> {
        let (name, value) = (name.as_ref().to_vec(), value.map(<[u8]>::to_vec));
        expect_done(&self.ask(MetaCall::SetXattr { target: at(path), name, value, mode })?)
    }

    /// Removes a name of anything but a directory.
    pub fn unlink(&self, path: impl AsRef<[u8]>) -> Result<(), ClientError> {
        self.remove_name(path).map(drop)
    }

    /// The same. Returns how many names its node has left; `None`: the server cannot say.
    pub fn remove_name(&self, path: impl AsRef<[u8]>) -> Result<Option<u32>, ClientError> {
        let path = clean(path);
        let left = removed(&self.ask(MetaCall::Unlink { path: path.clone() })?)?;
        self.opens.paths.removed(&path);
        Ok(left)
    }

    /// Gives what `from` names, unless it is a directory, the name `to` too. Returns its attributes.
    pub fn link(&self, from: impl AsRef<[u8]>, to: impl AsRef<[u8]>) -> Result<Attr, ClientError> {
        let (from, to) = (clean(from), clean(to));
        let attr = attr(self.ask(MetaCall::Link { from: from.clone(), to: to.clone() })?)?;
        self.opens.paths.linked(&from, &to);
        Ok(attr)
    }

    /// Makes a directory.
    pub fn mkdir(&self, path: impl AsRef<[u8]>, mode: u32, uid: u32, gid: u32) -> Result<Attr, ClientError> {
        attr(self.ask(MetaCall::Mkdir { path: clean(path), mode, uid, gid })?)
    }

    /// Removes an empty directory.
    pub fn rmdir(&self, path: impl AsRef<[u8]>) -> Result<(), ClientError> {
        expect_done(&self.ask(MetaCall::Rmdir { path: clean(path) })?)
    }

    /// Renames, atomically replacing what was there, unless `no_replace`.
    pub fn rename(&self, from: impl AsRef<[u8]>, to: impl AsRef<[u8]>, no_replace: bool) -> Result<(), ClientError> {
        self.replace_name(from, to, no_replace, false).map(drop)
    }

    /// The same; with `whiteout` the old name becomes that of a device 0/0, as overlay file systems use it. Returns how many names
    /// are left of what was replaced; `None`: nothing was, or the server cannot say.
    pub fn replace_name(
        &self,
        from: impl AsRef<[u8]>,
        to: impl AsRef<[u8]>,
        no_replace: bool,
        whiteout: bool,
    ) -> Result<Option<u32>, ClientError> {
        let (from, to) = (clean(from), clean(to));
        let call = MetaCall::Rename { from: from.clone(), to: to.clone(), no_replace, whiteout };
        let left = removed(&self.ask(call)?)?;
        self.opens.paths.renamed(&from, &to);
        Ok(left)
    }

    /// Exchanges what two paths name, in one step.
    pub fn exchange(&self, from: impl AsRef<[u8]>, to: impl AsRef<[u8]>) -> Result<(), ClientError> {
        let (from, to) = (clean(from), clean(to));
        expect_done(&self.ask(MetaCall::Exchange { from: from.clone(), to: to.clone() })?)?;
        self.opens.paths.exchanged(&from, &to);
        Ok(())
    }

    /// Makes a symbolic link that says `target`.
    pub fn symlink(
        &self,
        path: impl AsRef<[u8]>,
        target: impl AsRef<[u8]>,
        uid: u32,
        gid: u32,
    ) -> Result<Attr, ClientError> {
        attr(self.ask(MetaCall::Symlink { path: clean(path), target: target.as_ref().to_vec(), uid, gid })?)
    }

    /// Makes a pipe, a socket or a device.
    pub fn mknod(
        &self,
        path: impl AsRef<[u8]>,
        kind: NodeKind,
        mode: u32,
        uid: u32,
        gid: u32,
    ) -> Result<Attr, ClientError> {
        attr(self.ask(MetaCall::Mknod { path: clean(path), kind, mode, uid, gid })?)
    }

    /// What a symbolic link says.
    pub fn readlink(&self, path: impl AsRef<[u8]>) -> Result<Vec<u8>, ClientError> {
        let reply = self.ask(MetaCall::Readlink { path: clean(path) })?;
        if let Answer::Link(target) = reply.answer { Ok(target) } else { Err(unexpected(&reply)) }
    }

    /// A slice of a directory in byte order: at most `max` entries behind the name `after` (empty: from the start).
    /// Empty at its end.
    pub fn readdir(
        &self,
        path: impl AsRef<[u8]>,
        after: impl AsRef<[u8]>,
        max: u32,
    ) -> Result<Vec<Entry>, ClientError> {
        let after = after.as_ref().to_vec();
        let reply = self.ask(MetaCall::Readdir { path: clean(path), after, max })?;
        if let Answer::Entries(entries) = reply.answer { Ok(entries) } else { Err(unexpected(&reply)) }
    }

    /// A whole directory.
    pub fn list(&self, path: impl AsRef<[u8]>) -> Result<Vec<Entry>, ClientError> {
        let mut all: Vec<Entry> = Vec::new();
        loop {
            let after = all.last().map(|entry| entry.name.clone()).unwrap_or_default();
            let more = self.readdir(&path, &after, 1024)?;
            // A server that repeats itself must not keep us here for ever.
            if more.first().is_none_or(|first| !all.is_empty() && first.name <= after) {
                return Ok(all);
            }
            all.extend(more);
        }
    }

    /// Totals over the data servers.
    pub fn statfs(&self) -> Result<Statfs, ClientError> {
        let reply = self.ask(MetaCall::Statfs)?;
        if let Answer::Statfs(statfs) = reply.answer { Ok(statfs) } else { Err(unexpected(&reply)) }
    }

    /// Makes the names in a directory durable.
    pub fn sync_dir(&self, path: impl AsRef<[u8]>) -> Result<(), ClientError> {
        expect_done(&self.ask(MetaCall::FsyncDir { path: clean(path) })?)
    }

    /// How files made in a directory will be striped; `None`: as its parent says.
    pub fn set_layout(&self, path: impl AsRef<[u8]>, layout: Option<LayoutRequest>) -> Result<(), ClientError> {
        expect_done(&self.ask(MetaCall::SetLayout { path: clean(path), layout })?)
    }

    pub(crate) fn ask(&self, call: MetaCall) -> Result<Reply, ClientError> {
        let call = Call::Meta { who: self.identity().asker(), call };
        self.meta_link().call(call, &[], None, self.deadline())
    }
}

fn clean(path: impl AsRef<[u8]>) -> Vec<u8> {
    let path = path.as_ref();
    let from = path.iter().position(|byte| *byte != b'/').unwrap_or(path.len());
    path.get(from..).unwrap_or(&[]).to_vec()
}

fn at(path: impl AsRef<[u8]>) -> Target {
    Target::Path(clean(path))
}

fn attr(reply: Reply) -> Result<Attr, ClientError> {
    if let Answer::Attr(attr) = reply.answer { Ok(attr) } else { Err(unexpected(&reply)) }
}

fn removed(reply: &Reply) -> Result<Option<u32>, ClientError> {
    match reply.answer {
        Answer::Removed { links } => Ok(Some(links)),
        _ => expect_done(reply).map(|()| None),
    }
}

fn xattr(reply: Reply) -> Result<Vec<u8>, ClientError> {
    if let Answer::Xattr(bytes) = reply.answer { Ok(bytes) } else { Err(unexpected(&reply)) }
}

fn opened(reply: Reply) -> Result<(Reply, Opened), ClientError> {
    if let Answer::Opened(opened) = reply.answer { Ok((reply, opened)) } else { Err(unexpected(&reply)) }
}
