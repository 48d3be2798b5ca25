//! Tests of the inode table: cases by hand, and random trees against a plain model.

use super::*;
use proptest::prelude::*;

fn attr(ino: u64, kind: NodeKind) -> Attr {
    Attr {
        ino,
        kind,
        mode: 0o644,
        nlink: 1,
        uid: 0,
        gid: 0,
        size: 0,
        atime: Default::default(),
        mtime: Default::default(),
        ctime: Default::default(),
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
    inodes.renamed((10, b"b"), (ROOT, b"c"));
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
    inodes.renamed((11, b"f"), (11, b"g"));
    assert_eq!(path(&inodes, 12).as_deref(), Some("a/b/g"));
    assert_eq!(path(&inodes, 13), None);
    assert_eq!(inodes.open_handle(13), Some(5), "it is still reached by its open handle");
    inodes.renamed((11, b"g"), (11, b"g"));
    assert_eq!(path(&inodes, 12).as_deref(), Some("a/b/g"), "renaming to itself changes nothing");
}

#[test]
fn a_number_used_again_gets_another_generation() {
    let inodes = small_tree();
    assert!(inodes.opened(12, FileKey(1), 5));
    inodes.removed(11, b"f");
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
    inodes.removed(11, b"f");
    let second = enter(&inodes, ROOT, "n", 12, NodeKind::File);
    assert_ne!(second.number, 12);
    assert_eq!(inodes.number_for(12), second.number);
    assert_eq!(path(&inodes, second.number).as_deref(), Some("n"));
    assert!(inodes.opened(second.number, FileKey(2), 6));
    let again = enter(&inodes, ROOT, "n", 12, NodeKind::File);
    assert_eq!((again.number, again.generation), (second.number, second.generation));

    inodes.removed(ROOT, b"n");
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

#[test]
fn an_answer_older_than_a_rename_does_not_undo_it() {
    let inodes = small_tree();
    let before = inodes.changes();
    inodes.renamed((11, b"f"), (ROOT, b"moved"));
    inodes.enter(11, b"f", &attr(12, NodeKind::File), before);
    assert_eq!(path(&inodes, 12).as_deref(), Some("moved"));

    let before = inodes.changes();
    inodes.removed(ROOT, b"moved");
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
    inodes.renamed((ROOT, b"a"), (11, b"a"));
    assert_eq!(path(&inodes, 12), None, "a rename that cannot be leaves no loop behind");
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

/// A change of the tree; numbers index the lists of existing nodes.
#[derive(Clone, Debug)]
enum Step {
    Make { parent: usize, name: u8, dir: bool },
    LookUp { number: usize },
    Rename { number: usize, parent: usize, name: u8 },
    Remove { number: usize },
    Forget { number: usize },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        (any::<usize>(), 0u8..6, any::<bool>()).prop_map(|(parent, name, dir)| Step::Make { parent, name, dir }),
        any::<usize>().prop_map(|number| Step::LookUp { number }),
        (any::<usize>(), any::<usize>(), 0u8..6).prop_map(|(number, parent, name)| Step::Rename {
            number,
            parent,
            name
        }),
        any::<usize>().prop_map(|number| Step::Remove { number }),
        any::<usize>().prop_map(|number| Step::Forget { number }),
    ];
    proptest::collection::vec(step, 0..120)
}

/// A plain tree on which the kernel and the server agree.
#[derive(Default)]
struct Model {
    /// number → (parent, name, is a directory)
    places: std::collections::BTreeMap<u64, (u64, u8, bool)>,
    /// Look-ups of what the kernel holds, with or without a name.
    held: std::collections::BTreeMap<u64, u64>,
}

impl Model {
    fn path(&self, number: u64) -> Option<Vec<u8>> {
        if number == ROOT {
            return Some(Vec::new());
        }
        let (parent, name, _) = self.places.get(&number)?;
        let mut path = self.path(*parent)?;
        if !path.is_empty() {
            path.push(b'/');
        }
        path.push(b'a' + name);
        Some(path)
    }

    fn named(&self, parent: u64, name: u8) -> Option<u64> {
        self.places.iter().find(|(_, entry)| (entry.0, entry.1) == (parent, name)).map(|(number, _)| *number)
    }

    fn below(&self, number: u64) -> bool {
        self.places.values().any(|entry| entry.0 == number)
    }

    fn is_at_or_above(&self, upper: u64, lower: u64) -> bool {
        upper == lower || self.places.get(&lower).is_some_and(|entry| self.is_at_or_above(upper, entry.0))
    }

    /// Directories that the kernel holds, the root first.
    fn directories(&self) -> Vec<u64> {
        let held = self.places.iter().filter(|(number, entry)| entry.2 && self.held.contains_key(number));
        std::iter::once(ROOT).chain(held.map(|(number, _)| *number)).collect()
    }

    fn pick(&self, number: usize) -> Option<u64> {
        (!self.places.is_empty()).then(|| *self.places.keys().nth(number % self.places.len()).unwrap())
    }
}

proptest! {
    #[test]
    fn paths_are_those_of_a_plain_tree(steps in steps()) {
        let (inodes, mut model) = (Inodes::new(), Model::default());
        let mut next = 100;
        let tell = |model: &mut Model, number: u64| {
            let (parent, name, dir) = model.places[&number];
            if parent == ROOT || model.held.contains_key(&parent) {
                enter(&inodes, parent, &char::from(b'a' + name).to_string(), number, if dir { NodeKind::Dir } else { NodeKind::File });
                *model.held.entry(number).or_default() += 1;
            }
        };
        for step in steps {
            match step {
                Step::Make { parent, name, dir } => {
                    let directories = model.directories();
                    let parent = directories[parent % directories.len()];
                    if model.named(parent, name).is_none() {
                        next += 1;
                        model.places.insert(next, (parent, name, dir));
                        tell(&mut model, next);
                    }
                }
                Step::LookUp { number } => {
                    if let Some(number) = model.pick(number) {
                        tell(&mut model, number);
                    }
                }
                Step::Rename { number, parent, name } => {
                    let directories = model.directories();
                    let parent = directories[parent % directories.len()];
                    let Some(number) = model.pick(number) else { continue };
                    let old = model.places[&number];
                    let target = model.named(parent, name);
                    let replaces_a_tree = target.is_some_and(|target| target == number || model.below(target));
                    if model.is_at_or_above(number, parent) || replaces_a_tree {
                        continue;
                    }
                    if let Some(target) = target {
                        model.places.remove(&target);
                    }
                    model.places.insert(number, (parent, name, old.2));
                    inodes.renamed((old.0, &[b'a' + old.1]), (parent, &[b'a' + name]));
                }
                Step::Remove { number } => {
                    if let Some(number) = model.pick(number).filter(|number| !model.below(*number)) {
                        let entry = model.places.remove(&number).unwrap();
                        inodes.removed(entry.0, &[b'a' + entry.1]);
                    }
                }
                Step::Forget { number } => {
                    // The kernel keeps a directory as long as it keeps anything in it.
                    let held: Vec<u64> = model.held.keys().copied().collect();
                    let Some(number) = held.get(number % held.len().max(1)).copied() else { continue };
                    if !model.places.iter().any(|(child, entry)| entry.0 == number && model.held.contains_key(child)) {
                        inodes.forget(number, model.held.remove(&number).unwrap());
                    }
                }
            }
            for number in model.held.keys() {
                prop_assert_eq!(inodes.path(*number), model.path(*number), "of {}", number);
            }
        }
        for (number, lookups) in model.held {
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
                0 => inodes.removed(parent, &name),
                1 => inodes.renamed((parent, &name), (ino, b"a")),
                2 => _ = inodes.opened(number_of(ino), FileKey(parent), 1),
                _ => {
                    let kind = if step == 3 { NodeKind::Dir } else { NodeKind::File };
                    held.push(inodes.enter(parent, &name, &attr(ino, kind), inodes.changes()).number);
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
