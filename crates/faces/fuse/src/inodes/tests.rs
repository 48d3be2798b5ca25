//! Tests of the inode table: cases by hand, and random trees against a plain model.

use super::*;
use proptest::prelude::*;

impl Inodes {
    fn path(&self, number: u64) -> Option<Vec<u8>> {
        self.ways([super::Target::Node(number)]).map(|Ways { paths: [path], .. }| path)
    }

    fn path_in(&self, parent: u64, name: &[u8]) -> Option<Vec<u8>> {
        self.ways([super::Target::Name(parent, name)]).map(|Ways { paths: [path], .. }| path)
    }
}

fn attr(ino: u64, kind: NodeKind) -> Attr {
    Attr {
        ino,
        kind,
        mode: 0o644,
        nlink: 1,
        uid: 0,
        gid: 0,
        size: 0,
        used_bytes: 0,
        atime: Default::default(),
        mtime: Default::default(),
        ctime: Default::default(),
        labelled: false,
    }
}

fn enter(inodes: &Inodes, parent: u64, name: &str, ino: u64, kind: NodeKind) -> Entered {
    inodes.enter(parent, name.as_bytes(), &attr(ino, kind), inodes.changes())
}

fn path(inodes: &Inodes, number: u64) -> Option<String> {
    inodes.path(number).map(|path| String::from_utf8(path).unwrap())
}

/// Root, `a` (10), `a/b` (11), `a/b/f` (12).
fn small_tree() -> Inodes {
    let inodes = Inodes::new();
    enter(&inodes, ROOT, "a", 10, NodeKind::Dir);
    enter(&inodes, 10, "b", 11, NodeKind::Dir);
    enter(&inodes, 11, "f", 12, NodeKind::File);
    inodes
}

/// The kernel refuses attributes with such a length, so it goes on with those that it has.
#[test]
fn attributes_without_a_length_are_not_taken_for_the_kernels() {
    let inodes = Inodes::new();
    let listed = |size, mode| {
        let attr = Attr { size, mode, ..attr(12, NodeKind::File) };
        inodes.enter(ROOT, b"f", &attr, inodes.changes()).fresh.mode()
    };
    assert_eq!(listed(10, 0o644), 0o644);
    assert_eq!(listed(Entry::UNKNOWN_SIZE, 0o600), 0o644);
    assert_eq!(listed(20, 0o600), 0o600);
}

#[test]
fn paths_follow_the_tree() {
    let inodes = small_tree();
    assert_eq!(path(&inodes, ROOT).as_deref(), Some(""));
    assert_eq!(path(&inodes, 12).as_deref(), Some("a/b/f"));
    assert_eq!(inodes.path_in(ROOT, b"x").unwrap(), b"x");
    assert_eq!(inodes.path_in(11, b"x").unwrap(), b"a/b/x");
    assert_eq!(path(&inodes, 99), None);
    assert_eq!(inodes.parent(12), 11);
    assert_eq!(inodes.parent(10), ROOT);
}

#[test]
fn exchanged_names_take_along_what_is_below() {
    let inodes = small_tree();
    enter(&inodes, ROOT, "g", 20, NodeKind::File);
    inodes.exchanged((10, b"b"), (ROOT, b"g"));
    assert_eq!(path(&inodes, 12).as_deref(), Some("g/f"));
    assert_eq!(path(&inodes, 20).as_deref(), Some("a/b"));
    inodes.exchanged((ROOT, b"unknown"), (ROOT, b"g"));
    assert_eq!(path(&inodes, 12).as_deref(), Some("unknown/f"), "one that the kernel never looked up");
    inodes.exchanged((ROOT, b"unknown"), (ROOT, b"unknown"));
    assert_eq!(path(&inodes, 12).as_deref(), Some("unknown/f"));
    // Our view of the tree may be older than another node's renames.
    inodes.exchanged((ROOT, b"a"), (10, b"b"));
    assert_eq!(path(&inodes, 10), None, "it would be below itself");
    for (number, lookups) in [(10, 1), (11, 1), (12, 1), (20, 1)] {
        inodes.forget(number, lookups);
    }
    assert_eq!(inodes.len(), 1, "only the root is left");
}

#[test]
fn forgetting_frees_an_entry_and_what_it_alone_held() {
    let inodes = small_tree();
    inodes.forget(10, 1);
    inodes.forget(11, 1);
    assert_eq!(path(&inodes, 12).as_deref(), Some("a/b/f"), "a child holds its parents");
    enter(&inodes, 11, "f", 12, NodeKind::File);
    inodes.forget(12, 1);
    assert_eq!(inodes.len(), 4, "two look-ups, one taken back");
    inodes.forget(12, 1);
    assert_eq!(inodes.len(), 1, "only the root is left");
    inodes.forget(12, 7);
    inodes.forget(ROOT, 100);
    assert_eq!(path(&inodes, ROOT).as_deref(), Some(""));
}

#[test]
fn renaming_a_directory_moves_what_is_below() {
    let inodes = small_tree();
    inodes.renamed((10, b"b"), (ROOT, b"c"), None);
    assert_eq!(path(&inodes, 12).as_deref(), Some("c/f"));
    for number in [10, 11, 12] {
        inodes.forget(number, 1);
    }
    assert_eq!(inodes.len(), 1);
}

#[test]
fn renaming_over_a_name_takes_it_from_its_owner() {
    let inodes = small_tree();
    enter(&inodes, 11, "g", 13, NodeKind::File);
    assert!(inodes.opened(13, FileKey(13), 5));
    inodes.renamed((11, b"f"), (11, b"g"), None);
    assert_eq!(path(&inodes, 12).as_deref(), Some("a/b/g"));
    assert_eq!(path(&inodes, 13), None);
    assert_eq!(inodes.open_handle(13), Some(5), "it is still reached by its open handle");
    inodes.renamed((11, b"g"), (11, b"g"), None);
    assert_eq!(path(&inodes, 12).as_deref(), Some("a/b/g"), "renaming to itself changes nothing");
}

#[test]
fn a_number_used_again_gets_another_generation() {
    let inodes = small_tree();
    assert!(inodes.opened(12, FileKey(1), 5));
    inodes.removed(11, b"f", None);
    inodes.forget(12, 1);
    let other = enter(&inodes, ROOT, "n", 12, NodeKind::File);
    assert_eq!((other.number, other.generation), (12, 1));
    assert!(inodes.opened(12, FileKey(2), 6), "the new file has its own key");
    inodes.forget(12, 1);
    assert_eq!(inodes.open_handle(12), Some(6), "an open holds the entry");
    inodes.closed(12, 6);
    assert_eq!(path(&inodes, 12), None);
}

/// The kernel breaks an inode whose number returns with another generation: what has it open fails with EIO.
#[test]
fn a_number_that_the_kernel_holds_goes_to_no_other_file() {
    let inodes = small_tree();
    assert!(inodes.opened(12, FileKey(1), 5));
    inodes.removed(11, b"f", None);
    let second = enter(&inodes, ROOT, "n", 12, NodeKind::File);
    assert_ne!(second.number, 12);
    assert_eq!(inodes.number_for(12), second.number);
    assert_eq!(path(&inodes, second.number).as_deref(), Some("n"));
    assert!(inodes.opened(second.number, FileKey(2), 6));
    let again = enter(&inodes, ROOT, "n", 12, NodeKind::File);
    assert_eq!((again.number, again.generation), (second.number, second.generation));

    inodes.removed(ROOT, b"n", None);
    let third = enter(&inodes, ROOT, "n", 12, NodeKind::File);
    assert!(![12, second.number].contains(&third.number));
    inodes.closed(second.number, 6);
    inodes.forget(second.number, 2);
    assert_eq!(inodes.number_for(12), third.number, "the newest stand-in counts");

    inodes.closed(12, 5);
    inodes.forget(12, 1);
    assert_eq!(inodes.number_for(12), third.number, "the kernel knows the file by it");
    inodes.forget(third.number, 1);
    assert_eq!(inodes.number_for(12), 12);
    assert_eq!(inodes.len(), 3, "root, a and b");
}

#[test]
fn another_kind_under_the_same_number_is_another_file() {
    let inodes = small_tree();
    assert_ne!(enter(&inodes, 11, "f", 12, NodeKind::Symlink).number, 12);
}

#[test]
fn an_open_of_another_file_is_noticed() {
    let inodes = small_tree();
    assert!(inodes.opened(12, FileKey(1), 5));
    assert!(!inodes.opened(12, FileKey(2), 6), "another node replaced the file");
    assert_ne!(enter(&inodes, 11, "f", 12, NodeKind::File).number, 12);
}

/// The kernel would try an exclusive creation again, and find the file that it made.
#[test]
fn a_file_made_under_the_number_of_one_removed_elsewhere_is_another() {
    let inodes = small_tree();
    assert!(inodes.opened(12, FileKey(1), 5));
    let made = inodes.enter_made(ROOT, b"n", &attr(12, NodeKind::File), inodes.changes(), FileKey(2));
    assert_ne!(made.number, 12);
    assert!(inodes.opened(made.number, FileKey(2), 6));
    assert_eq!(path(&inodes, made.number).as_deref(), Some("n"));
    let again = inodes.enter_made(ROOT, b"n", &attr(12, NodeKind::File), inodes.changes(), FileKey(2));
    assert_eq!(again.number, made.number, "looked up meanwhile");
}

#[test]
fn an_answer_older_than_a_rename_does_not_undo_it() {
    let inodes = small_tree();
    let before = inodes.changes();
    inodes.renamed((11, b"f"), (ROOT, b"moved"), None);
    inodes.enter(11, b"f", &attr(12, NodeKind::File), before);
    assert_eq!(path(&inodes, 12).as_deref(), Some("moved"));

    let before = inodes.changes();
    inodes.removed(ROOT, b"moved", None);
    let late = inodes.enter(ROOT, b"moved", &attr(12, NodeKind::File), before);
    assert_eq!((late.generation, path(&inodes, 12)), (0, None), "a removed file stays removed");
}

#[test]
fn a_name_that_means_something_else_now_leaves_the_old_number_without_one() {
    let inodes = small_tree();
    enter(&inodes, 11, "f", 20, NodeKind::File);
    assert_eq!(path(&inodes, 12), None);
    assert_eq!(path(&inodes, 20).as_deref(), Some("a/b/f"));
}

#[test]
fn nothing_becomes_its_own_ancestor() {
    let inodes = small_tree();
    enter(&inodes, 11, "x", 10, NodeKind::Dir);
    enter(&inodes, 11, "x", 11, NodeKind::Dir);
    assert_eq!(path(&inodes, 12).as_deref(), Some("a/b/f"));
    enter(&inodes, 77, "x", 30, NodeKind::Dir);
    assert_eq!(path(&inodes, 30), None, "an unknown parent");
    inodes.renamed((ROOT, b"a"), (11, b"a"), None);
    assert_eq!(path(&inodes, 12), None, "a rename that cannot be leaves no loop behind");
}

fn enter_linked(inodes: &Inodes, parent: u64, name: &str, ino: u64, links: u32) -> Entered {
    let attr = Attr { nlink: links, ..attr(ino, NodeKind::File) };
    inodes.enter(parent, name.as_bytes(), &attr, inodes.changes())
}

#[test]
fn a_file_has_the_path_of_the_name_used_last() {
    let inodes = small_tree();
    assert_eq!(enter_linked(&inodes, ROOT, "g", 12, 2).number, 12);
    assert_eq!(path(&inodes, 12).as_deref(), Some("g"));
    enter_linked(&inodes, 11, "f", 12, 2);
    assert_eq!(path(&inodes, 12).as_deref(), Some("a/b/f"));
    assert_eq!(inodes.entries(12), [(11, Name::from(&b"f"[..])), (ROOT, Name::from(&b"g"[..]))]);
    inodes.removed(11, b"f", Some(1));
    assert_eq!(path(&inodes, 12).as_deref(), Some("g"));
    assert_eq!(enter(&inodes, ROOT, "g", 12, NodeKind::File).number, 12, "it is still the same file");
    inodes.removed(ROOT, b"g", Some(0));
    assert_eq!(path(&inodes, 12), None);
    assert_ne!(enter(&inodes, ROOT, "g", 12, NodeKind::File).number, 12, "another file");
}

#[test]
fn a_file_whose_known_name_is_removed_is_found_by_another() {
    let inodes = small_tree();
    assert!(inodes.opened(12, FileKey(1), 5));
    // Another node gave it a name.
    inodes.removed(11, b"f", Some(1));
    assert_eq!(path(&inodes, 12), None);
    assert_eq!(inodes.open_handle(12), Some(5));
    assert_eq!(enter(&inodes, ROOT, "g", 12, NodeKind::File).number, 12);
    assert!(inodes.opened(12, FileKey(1), 6));
    // The server did not say how many are left: by the last answer none.
    inodes.removed(ROOT, b"g", None);
    assert_ne!(enter(&inodes, ROOT, "h", 12, NodeKind::File).number, 12);
}

#[test]
fn a_rename_moves_one_name_and_takes_one_from_what_it_replaces() {
    let inodes = small_tree();
    enter_linked(&inodes, ROOT, "g", 12, 2);
    enter_linked(&inodes, ROOT, "x", 13, 2);
    enter_linked(&inodes, 10, "y", 13, 2);
    inodes.renamed((ROOT, b"g"), (ROOT, b"x"), Some(1));
    assert_eq!((path(&inodes, 12).as_deref(), path(&inodes, 13).as_deref()), (Some("x"), Some("a/y")));
    inodes.renamed((ROOT, b"x"), (11, b"f"), None);
    assert_eq!(path(&inodes, 12).as_deref(), Some("x"), "two names of one file: both stay");
    inodes.removed(ROOT, b"x", Some(1));
    assert_eq!(path(&inodes, 12).as_deref(), Some("a/b/f"));
    inodes.renamed((11, b"f"), (10, b"y"), Some(0));
    assert_eq!((path(&inodes, 12).as_deref(), path(&inodes, 13)), (Some("a/y"), None));
}

#[test]
fn an_answer_with_one_name_replaces_those_known_before() {
    let inodes = small_tree();
    enter_linked(&inodes, ROOT, "g", 12, 2);
    enter(&inodes, ROOT, "g", 12, NodeKind::File);
    assert_eq!(inodes.entries(12).len(), 1);
    // Asked before this mount linked it.
    let asked = inodes.changes();
    enter_linked(&inodes, ROOT, "h", 12, 2);
    inodes.linked();
    inodes.enter(ROOT, b"g", &attr(12, NodeKind::File), asked);
    assert_eq!(inodes.entries(12).len(), 2);
}

#[test]
fn known_names_are_bounded_and_all_of_them_hold_their_directories() {
    let inodes = small_tree();
    for name in 0..100 {
        enter_linked(&inodes, if name % 2 == 0 { 11 } else { 10 }, &format!("n{name}"), 12, 101);
    }
    assert_eq!(inodes.entries(12).len(), 1 + OTHERS_MAX);
    inodes.forget(10, 1);
    inodes.forget(11, 1);
    assert_eq!(path(&inodes, 12).as_deref(), Some("a/n99"));
    inodes.forget(12, 101);
    assert_eq!(inodes.len(), 1);
}

#[test]
fn the_special_numbers_are_kept_free() {
    assert_eq!(number_of(5), 5);
    assert!(number_of(0) > ROOT && number_of(1) > ROOT && number_of(0) != number_of(1));
    let inodes = Inodes::new();
    let entered = enter(&inodes, ROOT, "one", 1, NodeKind::Dir);
    assert_ne!(entered.number, ROOT);
    assert_eq!(path(&inodes, entered.number).as_deref(), Some("one"));
}

/// A change of the tree; numbers index the lists of existing nodes, and of the names of one.
#[derive(Clone, Debug)]
enum Step {
    Make { parent: usize, name: u8, dir: bool },
    Link { number: usize, parent: usize, name: u8 },
    LookUp { number: usize, which: usize },
    Rename { number: usize, which: usize, parent: usize, name: u8 },
    Remove { number: usize, which: usize },
    Forget { number: usize },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let (any, name) = (any::<usize>, 0u8..6);
    let step = prop_oneof![
        (any(), name.clone(), proptest::bool::ANY).prop_map(|(parent, name, dir)| Step::Make { parent, name, dir }),
        (any(), any(), name.clone()).prop_map(|(number, parent, name)| Step::Link { number, parent, name }),
        (any(), any()).prop_map(|(number, which)| Step::LookUp { number, which }),
        (any(), any(), any(), name).prop_map(|(number, which, parent, name)| Step::Rename {
            number,
            which,
            parent,
            name
        }),
        (any(), any()).prop_map(|(number, which)| Step::Remove { number, which }),
        any().prop_map(|number| Step::Forget { number }),
    ];
    proptest::collection::vec(step, 0..120)
}

type DirectoryName = (u64, u8);

/// What the server has.
struct Made {
    names: Vec<DirectoryName>,
    dir: bool,
}

/// A plain tree on which the kernel and the server agree.
#[derive(Default)]
struct Model {
    made: std::collections::BTreeMap<u64, Made>,
    /// Of what the kernel holds: its look-ups, and the names that it knows and that are there, the latest last.
    held: std::collections::BTreeMap<u64, (u64, Vec<DirectoryName>)>,
}

impl Model {
    fn path(&self, number: u64) -> Option<Vec<u8>> {
        if number == ROOT {
            return Some(Vec::new());
        }
        let (parent, name) = self.held.get(&number)?.1.last()?;
        let mut path = self.path(*parent)?;
        if !path.is_empty() {
            path.push(b'/');
        }
        path.push(b'a' + name);
        Some(path)
    }

    fn named(&self, place: DirectoryName) -> Option<u64> {
        self.made.iter().find(|(_, made)| made.names.contains(&place)).map(|(number, _)| *number)
    }

    fn below(&self, number: u64) -> bool {
        self.made.values().any(|made| made.names.iter().any(|place| place.0 == number))
    }

    fn is_at_or_above(&self, upper: u64, lower: u64) -> bool {
        let above = |made: &Made| made.dir && self.is_at_or_above(upper, made.names[0].0);
        upper == lower || self.made.get(&lower).is_some_and(above)
    }

    fn holds(&self, directory: u64) -> bool {
        directory == ROOT || self.held.contains_key(&directory)
    }

    /// Directories that the kernel holds, the root first.
    fn directories(&self) -> Vec<u64> {
        let held = self.made.iter().filter(|(number, made)| made.dir && self.holds(**number));
        std::iter::once(ROOT).chain(held.map(|(number, _)| *number)).collect()
    }

    /// A node, and one of its names in a directory that the kernel holds.
    fn pick(&self, number: usize, which: usize) -> Option<(u64, DirectoryName)> {
        let (number, made) = self.made.iter().nth(number % self.made.len().max(1))?;
        let place = made.names[which % made.names.len()];
        self.holds(place.0).then_some((*number, place))
    }

    /// A node loses a name; how many it has left.
    fn lose(&mut self, number: u64, place: DirectoryName) -> u32 {
        let made = self.made.get_mut(&number).unwrap();
        made.names.retain(|name| *name != place);
        let left = made.names.len() as u32;
        if let Some((_, known)) = self.held.get_mut(&number) {
            known.retain(|name| *name != place);
        }
        if left == 0 {
            self.made.remove(&number);
        }
        left
    }

    /// The kernel looks a name up.
    fn tell(&mut self, inodes: &Inodes, number: u64, place: DirectoryName) {
        let made = &self.made[&number];
        let kind = if made.dir { NodeKind::Dir } else { NodeKind::File };
        let attr = Attr { nlink: made.names.len() as u32, ..attr(number, kind) };
        assert_eq!(inodes.enter(place.0, &[b'a' + place.1], &attr, inodes.changes()).number, number);
        let (lookups, known) = self.held.entry(number).or_default();
        *lookups += 1;
        known.retain(|name| *name != place);
        known.push(place);
    }
}

proptest! {
    #[test]
    fn paths_are_those_of_a_plain_tree(steps in steps()) {
        let (inodes, mut model) = (Inodes::new(), Model::default());
        let mut next = 100;
        for step in steps {
            let directory = |model: &Model, which: usize| model.directories()[which % model.directories().len()];
            match step {
                Step::Make { parent, name, dir } => {
                    let place = (directory(&model, parent), name);
                    if model.named(place).is_none() {
                        next += 1;
                        model.made.insert(next, Made { names: vec![place], dir });
                        model.tell(&inodes, next, place);
                    }
                }
                Step::Link { number, parent, name } => {
                    let place = (directory(&model, parent), name);
                    let Some((number, from)) = model.pick(number, 0) else { continue };
                    let made = &model.made[&number];
                    if made.dir || made.names.len() > OTHERS_MAX || model.named(place).is_some() {
                        continue;
                    }
                    model.tell(&inodes, number, from);
                    model.made.get_mut(&number).unwrap().names.push(place);
                    model.tell(&inodes, number, place);
                    inodes.linked();
                }
                Step::LookUp { number, which } => {
                    if let Some((number, place)) = model.pick(number, which) {
                        model.tell(&inodes, number, place);
                    }
                }
                Step::Rename { number, which, parent, name } => {
                    let to = (directory(&model, parent), name);
                    let Some((number, from)) = model.pick(number, which) else { continue };
                    let target = model.named(to);
                    let replaces_a_tree = target.is_some_and(|target| target == number || model.below(target));
                    if model.is_at_or_above(number, to.0) || replaces_a_tree {
                        continue;
                    }
                    model.tell(&inodes, number, from);
                    let left = target.map(|target| model.lose(target, to));
                    model.made.get_mut(&number).unwrap().names.iter_mut().filter(|name| **name == from).for_each(|name| *name = to);
                    let known = &mut model.held.get_mut(&number).unwrap().1;
                    known.retain(|name| *name != from);
                    known.push(to);
                    inodes.renamed((from.0, &[b'a' + from.1]), (to.0, &[b'a' + to.1]), left);
                }
                Step::Remove { number, which } => {
                    if let Some((number, place)) = model.pick(number, which).filter(|(number, _)| !model.below(*number)) {
                        let left = model.lose(number, place);
                        inodes.removed(place.0, &[b'a' + place.1], Some(left));
                    }
                }
                Step::Forget { number } => {
                    // The kernel keeps a directory as long as it keeps anything in it.
                    let held: Vec<u64> = model.held.keys().copied().collect();
                    let Some(number) = held.get(number % held.len().max(1)).copied() else { continue };
                    if !model.held.values().any(|(_, known)| known.iter().any(|place| place.0 == number)) {
                        inodes.forget(number, model.held.remove(&number).unwrap().0);
                    }
                }
            }
            for number in model.held.keys() {
                prop_assert_eq!(inodes.path(*number), model.path(*number), "of {}", number);
            }
        }
        for (number, (lookups, _)) in model.held {
            inodes.forget(number, lookups);
        }
        prop_assert_eq!(inodes.len(), 1, "nothing is left");
    }

    /// For any answers of a server: no loop, no panic, and the table empties when the kernel forgets.
    #[test]
    fn strange_answers_do_no_harm(answers in proptest::collection::vec((0u64..8, 0u8..3, 0u64..8, 0u8..5), 0..80)) {
        let inodes = Inodes::new();
        let mut held = Vec::new();
        for (parent, name, ino, step) in answers {
            let name = [b'a' + name];
            match step {
                0 => inodes.removed(parent, &name, [None, Some(0), Some(1)][ino as usize % 3]),
                1 => inodes.renamed((parent, &name), (ino, b"a"), [None, Some(0), Some(1)][ino as usize % 3]),
                2 => _ = inodes.opened(number_of(ino), FileKey(parent), 1),
                _ => {
                    let kind = if step == 3 { NodeKind::Dir } else { NodeKind::File };
                    let attr = Attr { nlink: (parent % 3) as u32, ..attr(ino, kind) };
                    held.push(inodes.enter(parent, &name, &attr, inodes.changes()).number);
                }
            }
            (0..8).for_each(|number| _ = (inodes.path(number_of(number)), inodes.path_in(number, b"x")));
        }
        for number in held {
            inodes.closed(number, 1);
            inodes.forget(number, 1);
        }
        prop_assert_eq!(inodes.len(), 1);
    }
}

/// A node falls back on an older name when it loses its latest. If a server that tells nonsense has put that one below it meanwhile,
/// the tree would have a loop, in which the mount would look for a path for ever.
#[test]
fn a_name_below_the_node_itself_is_not_fallen_back_on() {
    let inodes = Inodes::new();
    let enter = |parent, name: &[u8], ino, kind| {
        let attr = Attr { nlink: 3, ..attr(ino, kind) };
        inodes.enter(parent, name, &attr, inodes.changes()).number
    };
    let file = enter(ROOT, b"a", 12, NodeKind::File);
    let directory = enter(ROOT, b"b", 13, NodeKind::Dir);
    enter(directory, b"a", 12, NodeKind::File);
    enter(ROOT, b"c", 12, NodeKind::File);
    enter(file, b"x", 13, NodeKind::Dir);
    inodes.removed(ROOT, b"c", Some(2));
    assert_eq!((inodes.path(file), inodes.path(directory)), (Some(b"b/a".to_vec()), Some(b"b".to_vec())));
    enter(directory, b"d", 14, NodeKind::File);
    for (number, lookups) in [(file, 3), (directory, 2), (14, 1)] {
        inodes.forget(number, lookups);
    }
    assert_eq!(inodes.len(), 1);
}

#[test]
fn the_retry_of_an_open_is_that_of_its_thread() {
    let inodes = Inodes::new();
    let name = |name: &str| -> EntryKey { (ROOT, name.as_bytes().into()) };
    inodes.spare(7, vec![name("f"), name("g")]);
    assert!(!inodes.is_spared(8, &[name("f")]) && !inodes.is_spared(7, &[name("h")]));
    assert!(inodes.is_spared(7, &[name("h"), name("g")]), "by any of its names");
    assert!(!inodes.is_spared(7, &[name("f")]), "there is one retry");
    for thread in 0..2 * SPARED_MAX as u32 {
        inodes.spare(thread, vec![name("f")]);
    }
    assert!(!inodes.is_spared(0, &[name("f")]) && inodes.is_spared(2 * SPARED_MAX as u32 - 1, &[name("f")]));
}

#[test]
fn an_open_learns_that_this_mount_moved_its_file() {
    let inodes = Inodes::new();
    enter(&inodes, ROOT, "a", 11, NodeKind::File);
    enter(&inodes, ROOT, "other", 12, NodeKind::File);
    let names = inodes.entries(11);
    let (never, long) = (Duration::ZERO, Duration::from_secs(60));
    assert!(!inodes.has_moved(11, &names, long), "nothing moves");
    // The server has made the move, and the table learns of it while the open asks.
    std::thread::scope(|scope| {
        let moves = inodes.moves([(ROOT, b"a"), (ROOT, b"b")]);
        let asked = scope.spawn(|| inodes.has_moved(11, &names, long));
        inodes.renamed((ROOT, b"a"), (ROOT, b"b"), None);
        drop(moves);
        assert!(asked.join().unwrap());
    });
    assert!(!inodes.has_moved(11, &inodes.entries(11), long), "no move is under way any more");
    let _lasts = inodes.moves([(ROOT, b"b"), (ROOT, b"new")]);
    assert!(!inodes.has_moved(11, &inodes.entries(11), never), "a move that does not end is not waited for");
    assert!(!inodes.has_moved(12, &inodes.entries(12), long), "nor is another's");
}
