//! Which files a program opens next when it goes through a tree of folders: an archiver, a copy, a search, a data set of many
//! small files.
//!
//! Programs follow one of three orders within a folder: as the folder lists its names, by inode number (what tools of GNU do
//! on disks), or by name. The order that the last opens agree on predicts the next ones. From folder to folder the order is
//! agreed on apart from that, depth first, and only where a change of folders has shown it; nothing above the folders seen is
//! predicted. Listing folders is the caller's matter, so this is a state machine without I/O.

use std::collections::{HashMap, VecDeque};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Orders that are known.
const ORDERS: usize = 3;
/// Opens in a row that must follow an order.
const AGREE: u32 = 2;
/// Files passed over that still follow it.
const SKIPPED: usize = 3;
/// Files predicted at most.
pub const FILES_AHEAD_MAX: usize = 128;
/// Files predicted: at first, and at most; doubled as predictions prove right.
const AHEAD: (usize, usize) = (8, FILES_AHEAD_MAX);
/// How far up a next folder is looked for, and how many folders without files are passed over.
const CLIMB: usize = 8;
const EMPTY_FOLDERS_MAX: usize = 64;
/// Listings that are remembered.
const LISTINGS_MAX: usize = 64;

/// A name in a folder.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Name {
    /// As the folder has it.
    pub name: OsString,
    /// Its inode.
    pub inode: u64,
    /// A folder; what is neither a folder nor a regular file is left out of a listing.
    pub is_folder: bool,
}

/// Lists a folder, in the order in which the system does; `None` where it cannot, or it holds too many names.
pub type List<'a> = dyn FnMut(&Path) -> Option<Vec<Name>> + 'a;

#[derive(Debug, Default)]
struct Side {
    in_order: [Vec<OsString>; ORDERS],
    places: HashMap<OsString, [usize; ORDERS]>,
}

impl Side {
    fn new(names: Vec<&Name>) -> Side {
        let mut side = Side::default();
        let (mut by_inode, mut by_name) = (names.clone(), names.clone());
        by_inode.sort_by_key(|n| n.inode);
        by_name.sort_by(|a, b| a.name.cmp(&b.name));
        for (order, names) in [names, by_inode, by_name].into_iter().enumerate() {
            for (place, name) in names.iter().enumerate() {
                side.places.entry(name.name.clone()).or_default()[order] = place;
            }
            side.in_order[order] = names.into_iter().map(|n| n.name.clone()).collect();
        }
        side
    }

    fn after(&self, name: Option<&OsStr>, order: usize) -> &[OsString] {
        let from = match name {
            Some(name) => self.places.get(name).map_or(usize::MAX, |places| places[order] + 1),
            None => 0,
        };
        self.in_order[order].get(from..).unwrap_or_default()
    }

    /// Whether `next` comes soon after `name`, by order.
    fn follows(&self, name: &OsStr, next: &OsStr) -> [bool; ORDERS] {
        let (Some(at), Some(to)) = (self.places.get(name), self.places.get(next)) else { return [false; ORDERS] };
        std::array::from_fn(|order| to[order] > at[order] && to[order] - at[order] <= 1 + SKIPPED)
    }
}

#[derive(Debug)]
struct Folder {
    files: Side,
    folders: Side,
}

/// How many times in a row each order was followed.
#[derive(Clone, Copy, Debug, Default)]
struct Votes([u32; ORDERS]);

impl Votes {
    fn add(&mut self, followed: [bool; ORDERS]) {
        for (votes, followed) in self.0.iter_mut().zip(followed) {
            *votes = if followed { votes.saturating_add(1) } else { 0 };
        }
    }

    /// The order with the most votes, if it has enough; of equal ones the first.
    fn best(&self, least: u32) -> Option<usize> {
        let (order, votes) = self.0.iter().enumerate().max_by_key(|(order, v)| (**v, ORDERS - order))?;
        (*votes >= least).then_some(order)
    }
}

/// One way through a tree.
#[derive(Debug, Default)]
pub struct Walk {
    folder: PathBuf,
    last: Option<OsString>,
    files: Votes,
    folders: Votes,
    /// The highest folder within which the way has gone.
    top: Option<PathBuf>,
    /// How many files are predicted; 0 until the first is opened.
    ahead: usize,
    /// Files that were predicted and not opened yet.
    predicted: VecDeque<PathBuf>,
    listings: HashMap<PathBuf, Option<Arc<Folder>>>,
}

impl Walk {
    /// Whether a file most likely belongs to this way: it was predicted, or lies in the folder where it is, or in one
    /// beside or below that.
    pub fn is_near(&self, path: &Path) -> bool {
        let Some(folder) = path.parent() else { return false };
        let beside = self.folder.parent().is_some_and(|above| above.parent().is_some() && folder.starts_with(above));
        folder == self.folder || beside || folder.starts_with(&self.folder) || self.predicted.iter().any(|p| p == path)
    }

    /// Whether files are predicted now.
    pub fn is_known(&self) -> bool {
        self.files.best(AGREE).is_some()
    }

    /// A file was opened. The files to bring in now, nearest first: those that were not predicted before.
    pub fn opened(&mut self, path: &Path, list: &mut List<'_>) -> Vec<PathBuf> {
        let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else { return Vec::new() };
        if folder == self.folder && self.last.as_deref() == Some(name) {
            return Vec::new();
        }
        self.ahead = self.ahead.max(AHEAD.0);
        let right = self.predicted.iter().position(|p| p == path);
        if let Some(place) = right {
            self.predicted.drain(..=place);
            self.ahead = (self.ahead * 2).min(AHEAD.1);
        }
        if folder == self.folder {
            let here = self.listing(folder, list);
            if let (Some(here), Some(last)) = (&here, &self.last) {
                self.files.add(here.files.follows(last, name));
            }
        } else {
            self.change(folder, list);
        }
        self.last = Some(name.into());
        let Some(order) = self.files.best(AGREE) else {
            // What was predicted is not what came.
            self.predicted.clear();
            self.ahead = AHEAD.0;
            return Vec::new();
        };
        self.predict(order, list)
    }

    fn change(&mut self, folder: &Path, list: &mut List<'_>) {
        let from = std::mem::replace(&mut self.folder, folder.into());
        if from.as_os_str().is_empty() {
            return;
        }
        let followed =
            std::array::from_fn(|order| self.next_folder(&from, order, None, list).as_deref() == Some(folder));
        self.folders.add(followed);
        if !followed.contains(&true) {
            self.top = None;
            self.files = Votes::default();
            return;
        }
        let common: PathBuf =
            from.components().zip(folder.components()).take_while(|(a, b)| a == b).map(|(a, _)| a).collect();
        if self.top.as_ref().is_none_or(|top| !common.starts_with(top)) {
            self.top = Some(common);
        }
    }

    fn predict(&mut self, order: usize, list: &mut List<'_>) -> Vec<PathBuf> {
        let (mut wanted, mut new) = (0, Vec::new());
        // Looked for again when half of them have come.
        if self.predicted.len() > self.ahead / 2 {
            return new;
        }
        let (mut folder, mut last) = (self.folder.clone(), self.last.clone());
        for _ in 0..EMPTY_FOLDERS_MAX {
            let Some(here) = self.listing(&folder, list) else { break };
            for name in here.files.after(last.as_deref(), order).iter().take(self.ahead - wanted) {
                wanted += 1;
                let path = folder.join(name);
                if !self.predicted.contains(&path) {
                    self.predicted.push_back(path.clone());
                    new.push(path);
                }
            }
            let (Some(over), Some(top)) = (self.folders.best(1), self.top.clone()) else { break };
            if wanted >= self.ahead {
                break;
            }
            let Some(next) = self.next_folder(&folder, over, Some(&top), list) else { break };
            (folder, last) = (next, None);
        }
        new
    }

    /// The folder after this one, depth first, that has files; not above `top`.
    fn next_folder(&mut self, from: &Path, order: usize, top: Option<&Path>, list: &mut List<'_>) -> Option<PathBuf> {
        let mut at = from.to_path_buf();
        for _ in 0..EMPTY_FOLDERS_MAX {
            at = self.step(&at, order, top, list)?;
            if !self.listing(&at, list)?.files.places.is_empty() {
                return Some(at);
            }
        }
        None
    }

    fn step(&mut self, from: &Path, order: usize, top: Option<&Path>, list: &mut List<'_>) -> Option<PathBuf> {
        if let Some(below) = self.listing(from, list)?.folders.in_order[order].first() {
            return Some(from.join(below));
        }
        let mut at = from;
        for _ in 0..CLIMB {
            let above = at.parent().filter(|above| top.is_none_or(|top| above.starts_with(top)))?;
            let beside = self.listing(above, list)?;
            if let Some(next) = beside.folders.after(at.file_name(), order).first() {
                return Some(above.join(next));
            }
            at = above;
        }
        None
    }

    fn listing(&mut self, folder: &Path, list: &mut List<'_>) -> Option<Arc<Folder>> {
        if let Some(known) = self.listings.get(folder) {
            return known.clone();
        }
        if self.listings.len() >= LISTINGS_MAX {
            self.listings.clear();
        }
        let listed = list(folder).map(|names| {
            let (folders, files): (Vec<&Name>, Vec<&Name>) = names.iter().partition(|name| name.is_folder);
            Arc::new(Folder { files: Side::new(files), folders: Side::new(folders) })
        });
        self.listings.insert(folder.into(), listed.clone());
        listed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(name: &str, inode: u64) -> Name {
        let is_folder = name.ends_with('/');
        Name { name: name.trim_end_matches('/').into(), inode, is_folder }
    }

    /// Three folders of ten files; `/t/b` holds a folder of its own.
    fn tree(folder: &Path) -> Option<Vec<Name>> {
        let files =
            |seed: u64| (0..10u64).map(move |i| name(&format!("f{}", (i * 7 + seed) % 10), (i * 3 + seed) % 10));
        match folder.to_str()? {
            "/t" => Some(vec![name("c/", 1), name("a/", 2), name("b/", 3)]),
            "/t/b" => Some([name("in/", 50)].into_iter().chain(files(1)).collect()),
            "/t/b/in" | "/t/a" | "/t/c" => Some(files(2).collect()),
            "/" => Some(vec![name("t/", 1), name("u/", 2)]),
            _ => None,
        }
    }

    fn in_order(folder: &str, order: usize) -> Vec<PathBuf> {
        let names = tree(Path::new(folder)).unwrap();
        let side = Side::new(names.iter().filter(|n| !n.is_folder).collect());
        side.in_order[order].iter().map(|n| Path::new(folder).join(n)).collect()
    }

    #[test]
    fn each_order_is_found_and_followed_to_the_next_folders() {
        for order in 0..ORDERS {
            let folders = [
                ["/t/c", "/t/a", "/t/b", "/t/b/in"],
                ["/t/c", "/t/a", "/t/b", "/t/b/in"],
                ["/t/a", "/t/b", "/t/b/in", "/t/c"],
            ][order];
            let way: Vec<PathBuf> = folders.iter().flat_map(|f| in_order(f, order)).collect();
            let (mut walk, mut brought) = (Walk::default(), Vec::new());
            let mut late = 0;
            for path in &way {
                late += usize::from(!brought.contains(path));
                brought.extend(walk.opened(path, &mut tree));
            }
            assert!(late <= 5, "order {order}: three to find it, and the first of the second folder: {late}");
            assert!(brought.iter().all(|p| way.contains(p)), "nothing outside is brought in: {brought:?}");
            let mut once = brought.clone();
            once.sort();
            once.dedup();
            assert_eq!(once.len(), brought.len(), "nothing twice");
        }
    }

    #[test]
    fn no_order_predicts_nothing() {
        let mut walk = Walk::default();
        let files = in_order("/t/a", 2);
        let brought: usize =
            [9, 0, 5, 2, 8, 1, 9, 4].iter().map(|i: &usize| walk.opened(&files[*i], &mut tree).len()).sum();
        assert_eq!((brought, walk.is_known()), (0, false));
        // A folder that cannot be listed.
        assert!((0..9).all(|i| walk.opened(Path::new(&format!("/v/{i}")), &mut tree).is_empty()));
    }

    #[test]
    fn files_passed_over_and_opened_again_end_nothing() {
        let (mut walk, files) = (Walk::default(), in_order("/t/a", 1));
        for i in [0, 1, 1, 2, 4, 4] {
            walk.opened(&files[i], &mut tree);
        }
        assert!(walk.is_known() && walk.is_near(&files[9]) && !walk.is_near(Path::new("/x/y")));
    }
}
