//! From a path to a node: symbolic links, `..`, and the right to search. The servers follow no links, so this does.

use impresario_client::Client;
use impresario_wire::{Attr, NodeKind};

use crate::rights::User;

/// Links followed on a path, as in the kernel.
const LINKS_MAX: usize = 40;

/// Where a path led.
#[derive(Debug)]
pub(crate) enum Found {
    /// Into the cluster.
    Inside(Named),
    /// Out of it, to this absolute path.
    Outside(Vec<u8>),
}

/// A name in the cluster, whether there is something or not.
#[derive(Debug)]
pub(crate) struct Named {
    /// From the root, without links on the way; empty: the root.
    pub(crate) path: Vec<u8>,
    /// What has the name.
    pub(crate) attr: Option<Attr>,
}

impl Named {
    pub(crate) fn attr(&self) -> Result<&Attr, i32> {
        self.attr.as_ref().ok_or(libc::ENOENT)
    }

    /// The directory that the name is in.
    pub(crate) fn parent(&self) -> &[u8] {
        let end = self.path.iter().rposition(|b| *b == b'/').unwrap_or(0);
        self.path.get(..end).unwrap_or(&[])
    }
}

pub(crate) fn errno(error: &impresario_client::ClientError) -> i32 {
    if !matches!(error, impresario_client::ClientError::Fault { .. }) {
        tracing::warn!(%error, "a call of a program failed");
    }
    error.errno()
}

/// Where `path` leads, from the root of the cluster, which programs know as `at`. A link at its end is followed if `follow`,
/// or if a slash is behind it, or a slash and a dot.
pub(crate) fn walk(client: &Client, user: &User, at: &[u8], path: &[u8], follow: bool) -> Result<Found, i32> {
    let (is_directory, mut by_link) = (names_directory(path), false);
    match find(client, user, at, path, follow || is_directory, &mut by_link)? {
        Found::Inside(Named { attr: Some(attr), .. }) if (is_directory || by_link) && attr.kind != NodeKind::Dir => {
            Err(libc::ENOTDIR)
        }
        // No file is made there.
        Found::Inside(Named { attr: None, .. }) if by_link => Err(libc::ENOENT),
        found => Ok(found),
    }
}

/// What ends so is a directory, or nothing.
fn names_directory(path: &[u8]) -> bool {
    path.ends_with(b"/") || path.ends_with(b"/.")
}

/// `by_link` becomes true where a link at the end says that it leads to a directory.
fn find(client: &Client, user: &User, at: &[u8], path: &[u8], follow: bool, by_link: &mut bool) -> Result<Found, i32> {
    if let Some(named) = at_once(client, user, path, follow)? {
        return Ok(Found::Inside(named));
    }
    let mut rest: Vec<Vec<u8>> = words(path);
    let mut done: Vec<Vec<u8>> = Vec::new();
    let mut links = 0;
    let mut attr = stat(client, b"")?;
    while let Some(word) = rest.pop() {
        let Some(directory) = attr else { return Err(libc::ENOENT) };
        if directory.kind != NodeKind::Dir {
            return Err(libc::ENOTDIR);
        }
        user.may_at(client, &joined(&done), &directory, libc::X_OK)?;
        if word == b".." {
            if done.pop().is_none() {
                let mut outside = at.to_vec();
                outside.truncate(at.iter().rposition(|b| *b == b'/').unwrap_or(0));
                rest.iter().rev().for_each(|word| outside = [&outside[..], b"/", word].concat());
                return Ok(Found::Outside(if outside.is_empty() { b"/".to_vec() } else { outside }));
            }
            attr = stat(client, &joined(&done))?;
            continue;
        }
        if word.len() > 255 {
            return Err(libc::ENAMETOOLONG);
        }
        done.push(word);
        let path = joined(&done);
        attr = stat(client, &path)?;
        let is_link = attr.is_some_and(|attr| attr.kind == NodeKind::Symlink);
        if !is_link || (rest.is_empty() && !follow) {
            continue;
        }
        links += 1;
        if links > LINKS_MAX {
            return Err(libc::ELOOP);
        }
        let target = client.readlink(&path).map_err(|error| errno(&error))?;
        done.pop();
        *by_link |= rest.is_empty() && names_directory(&target);
        if target.starts_with(b"/") {
            let below = target.strip_prefix(at).filter(|rest| rest.is_empty() || rest.starts_with(b"/"));
            let Some(below) = below else {
                let mut outside = target;
                rest.iter().rev().for_each(|word| outside = [&outside[..], b"/", word].concat());
                return Ok(Found::Outside(outside));
            };
            done.clear();
            rest.extend(words(below));
        } else {
            rest.extend(words(&target));
        }
        if rest.len() > 4096 {
            return Err(libc::ENAMETOOLONG);
        }
        attr = stat(client, &joined(&done))?;
    }
    Ok(Found::Inside(Named { path: joined(&done), attr }))
}

/// For root, to whom every directory is open, most paths need one question, and new names two.
fn at_once(client: &Client, user: &User, path: &[u8], follow: bool) -> Result<Option<Named>, i32> {
    let words = words(path);
    if !user.is_root() || words.iter().any(|word| word == b".." || word.len() > 255) {
        return Ok(None);
    }
    let path: Vec<u8> = words.into_iter().rev().flat_map(|word| [b"/".to_vec(), word].concat()).collect();
    let ends_at = |attr: &Attr| attr.kind != NodeKind::Symlink || !follow;
    match client.stat(&path) {
        Ok(attr) => Ok(ends_at(&attr).then_some(Named { path, attr: Some(attr) })),
        Err(error) if error.errno() == libc::ENOENT => {
            let named = Named { path, attr: None };
            let is_here = client.stat(named.parent()).is_ok_and(|parent| parent.kind == NodeKind::Dir);
            Ok(is_here.then_some(named))
        }
        Err(_) => Ok(None),
    }
}

/// What has a path; `None`: nothing.
pub(crate) fn stat(client: &Client, path: &[u8]) -> Result<Option<Attr>, i32> {
    match client.stat(path) {
        Ok(attr) => Ok(Some(attr)),
        Err(error) if error.errno() == libc::ENOENT => Ok(None),
        Err(error) => Err(errno(&error)),
    }
}

/// What a path ends with, without slashes behind it.
pub(crate) fn last_word(path: &[u8]) -> &[u8] {
    path.rsplit(|byte| *byte == b'/').find(|word| !word.is_empty()).unwrap_or_default()
}

/// The words of a path, the last one first.
fn words(path: &[u8]) -> Vec<Vec<u8>> {
    path.split(|b| *b == b'/').filter(|word| !matches!(*word, b"" | b".")).rev().map(<[u8]>::to_vec).collect()
}

fn joined(words: &[Vec<u8>]) -> Vec<u8> {
    words.iter().flat_map(|word| [b"/", &word[..]].concat()).collect()
}
