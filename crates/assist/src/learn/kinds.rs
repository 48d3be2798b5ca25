//! From the files that a program read to the kinds among them: the plainest description of files that predicts what is read
//! of one that was held out.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use impresario_foresight::{Sample, Score, Shape, ShapePiece, ShapeStep, held_out};
use serde::{Deserialize, Serialize};

use super::facts::{Facts, Files, Split, common_magic, hex, kind_of, unhex};

/// Of what a kind predicts of a file that was held out, the part that must be read; below this it is not used.
pub const PRECISION_MIN: f64 = 0.9;
/// Kinds that predict so much of what is read are not looked at more closely.
const RECALL_PLENTY: f64 = 0.9;
/// What telling files apart must gain.
const SPLIT_GAIN_MIN: f64 = 0.05;
/// How often files of one suffix are told apart.
const SPLITS_MAX: u32 = 2;
/// Files that a kind is learnt from, at most: the newest ones.
pub const KIND_FILES_MAX: usize = 8;

/// A file of which a run showed what is read.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Observation {
    /// Its path; bytes that are no UTF-8 are replaced.
    pub path: PathBuf,
    /// Its first bytes as hexadecimal digits, where they were known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub magic: Option<String>,
    /// When the run was, in seconds since 1970; 0 where that is not known.
    pub seen_unix_s: u64,
    /// More was read than the sample tells: there was no room for it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_cut: bool,
    /// What was read.
    pub sample: Sample,
}

impl Observation {
    /// Of a file whose first bytes are these.
    pub fn new(path: &Path, magic: Option<&[u8]>, seen_unix_s: u64, sample: Sample) -> Observation {
        let path = PathBuf::from(path.to_string_lossy().into_owned());
        Observation { path, magic: magic.map(hex), seen_unix_s, is_cut: false, sample }
    }

    /// Keeps no more than so many lines of what was read, the first ones; whether there were more.
    pub(super) fn cut(&mut self, lines: usize) -> bool {
        let is_longer = self.sample.series.len() > lines;
        self.sample.series.truncate(lines);
        self.is_cut |= is_longer;
        is_longer
    }

    /// What is known of the file without its contents.
    pub(super) fn facts(&self) -> Facts {
        let magic = self.magic.as_deref().and_then(unhex);
        Facts::of(&self.path, self.sample.size_bytes, magic.as_deref())
    }

    /// Whether both are of one file: a second run of the same file shows nothing of others.
    pub fn is_same_file(&self, other: &Observation) -> bool {
        self.file() == other.file()
    }

    /// What tells it from other files.
    pub(super) fn file(&self) -> (&Path, u64) {
        (&self.path, self.sample.size_bytes)
    }

    /// Whether both runs read the same of the file, as far as both tell.
    pub(super) fn agrees(&self, other: &Observation) -> bool {
        let (one, other_lines) = (&self.sample.series, &other.sample.series);
        let lines = if self.is_cut || other.is_cut { one.len().min(other_lines.len()) } else { usize::MAX };
        one.iter().take(lines).eq(other_lines.iter().take(lines))
    }
}

/// How a program reads files of one kind.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kind {
    /// Which files.
    pub files: Files,
    /// What it reads of them. Open files share it.
    #[serde(with = "shared")]
    pub shape: Arc<Shape>,
    /// From how many files this was learnt, whatever the number of runs.
    pub learnt_from: u64,
    /// What the others predicted of each of them; `None` where there was one only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_out: Option<Score>,
}

/// A shape behind a reference, as text.
mod shared {
    use std::sync::Arc;

    use impresario_foresight::Shape;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(shape: &Arc<Shape>, to: S) -> Result<S::Ok, S::Error> {
        Shape::serialize(shape, to)
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<Arc<Shape>, D::Error> {
        Shape::deserialize(from).map(Arc::new)
    }
}

impl Kind {
    /// The memory that it takes, about.
    pub(crate) fn bytes(&self) -> usize {
        let of = |step: &ShapeStep| size_of::<ShapeStep>() + step.group.len() * size_of::<ShapePiece>();
        let texts =
            [Some(&self.files.suffix), self.files.magic.as_ref(), self.files.name.as_ref(), self.files.folder.as_ref()];
        let texts: usize = texts.into_iter().flatten().map(String::len).sum();
        size_of::<Kind>() + texts + self.shape.steps.iter().map(of).sum::<usize>()
    }

    /// Why no hints come of it; `None` when they do.
    pub fn why_unused(&self) -> Option<String> {
        let Some(score) = self.held_out else {
            return Some("seen in one file only, so nothing was held out; record another file of this kind".into());
        };
        if self.shape.steps.is_empty() || score.right_bytes == 0 {
            return Some("its files have nothing in common that predicts a new one".into());
        }
        (score.precision() < PRECISION_MIN).then(|| {
            let percent = 100.0 * score.precision();
            format!(
                "{percent:.0} % of what was predicted of files held out was read, less than {:.0} %",
                100.0 * PRECISION_MIN
            )
        })
    }

    /// Whether hints come of it.
    pub fn is_used(&self) -> bool {
        self.why_unused().is_none()
    }
}

/// The kinds among these files.
pub fn kinds_of(observed: &[Observation]) -> Vec<Kind> {
    let mut groups: BTreeMap<String, (Files, Vec<&Observation>)> = BTreeMap::new();
    for one in observed {
        let files = kind_of(&one.facts());
        let key = format!("{files:?}");
        groups.entry(key).or_insert_with(|| (files, Vec::new())).1.push(one);
    }
    groups.into_values().flat_map(|(files, of)| told_apart(files, &of, SPLITS_MAX)).collect()
}

/// One kind, or several if that predicts more.
fn told_apart(files: Files, of: &[&Observation], splits: u32) -> Vec<Kind> {
    let one = kind(files.clone(), of);
    let enough = one.is_used() && one.held_out.is_some_and(|score| score.recall() >= RECALL_PLENTY);
    if enough || splits == 0 || of.len() < 2 {
        return vec![one];
    }
    let mut best = (value(std::slice::from_ref(&one)) + SPLIT_GAIN_MIN, vec![one]);
    for split in Split::ALL {
        let mut parts: BTreeMap<String, (Files, Vec<&Observation>)> = BTreeMap::new();
        for one in of {
            let Some(narrow) = split.of(&files, &one.facts()) else { continue };
            parts.entry(format!("{narrow:?}")).or_insert_with(|| (narrow, Vec::new())).1.push(one);
        }
        let left_out = parts.values().map(|(_, of)| of.len()).sum::<usize>() < of.len();
        if parts.len() < 2 || left_out {
            continue;
        }
        let kinds: Vec<Kind> =
            parts.into_values().flat_map(|(narrow, of)| told_apart(narrow, &of, splits - 1)).collect();
        if value(&kinds) > best.0 {
            best = (value(&kinds), kinds);
        }
    }
    best.1
}

fn kind(files: Files, of: &[&Observation]) -> Kind {
    let mut newest = of.to_vec();
    newest.sort_by_key(|one| std::cmp::Reverse(one.seen_unix_s));
    let mut by_file: Vec<Vec<&Observation>> = Vec::new();
    for one in newest {
        match by_file.iter().position(|runs| runs[0].is_same_file(one)) {
            Some(file) => by_file[file].push(one),
            None if by_file.len() < KIND_FILES_MAX => by_file.push(vec![one]),
            None => {}
        }
    }
    let facts: Vec<Facts> = by_file.iter().map(|runs| runs[0].facts()).collect();
    let samples: Vec<Vec<&Sample>> = by_file.iter().map(|runs| runs.iter().map(|one| &one.sample).collect()).collect();
    let magic = files.magic.clone().or_else(|| common_magic(facts.iter()));
    Kind {
        files: Files { magic, ..files },
        shape: Shape::learn(&samples.concat()).into(),
        learnt_from: samples.len() as u64,
        held_out: held_out(&samples),
    }
}

/// The mean share of a file that is predicted by kinds that are used.
fn value(kinds: &[Kind]) -> f64 {
    let files: u64 = kinds.iter().map(|kind| kind.learnt_from).sum();
    let used = kinds.iter().filter(|kind| kind.is_used());
    let right: f64 = used.filter_map(|kind| Some(kind.held_out?.both() * kind.learnt_from as f64)).sum();
    if files == 0 { 0.0 } else { right / files as f64 }
}

/// The kind that a file is of, of those that are used: the one of which most is said, and of these the one that was right most.
pub fn find<'a>(kinds: &'a [Kind], facts: &Facts) -> Option<&'a Kind> {
    let precision = |kind: &Kind| kind.held_out.map_or(0.0, |score| score.precision());
    let held = kinds.iter().filter(|kind| kind.is_used() && kind.files.hold(facts));
    held.max_by(|a, b| {
        a.files.conditions().cmp(&b.files.conditions()).then_with(|| precision(a).total_cmp(&precision(b)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn observed(path: &str, size: u64, reads: impl Fn(u64) -> Vec<(u64, u64)>) -> Observation {
        let sample = Sample::of(size, reads(size).into_iter().map(|(at, len)| at..at + len)).unwrap();
        Observation::new(Path::new(path), Some(b"TEST1234"), size, sample)
    }

    fn whole(size: u64) -> Vec<(u64, u64)> {
        vec![(0, size)]
    }

    fn strided(size: u64) -> Vec<(u64, u64)> {
        (0..size / MIB).map(|i| (i * MIB, 65_536)).collect()
    }

    fn words(kinds: &[Kind]) -> Vec<(String, bool)> {
        kinds.iter().map(|kind| (kind.files.words(), kind.is_used())).collect()
    }

    #[test]
    fn files_of_one_suffix_are_one_kind() {
        let files = [observed("/a/1.h5", 10 * MIB, strided), observed("/b/2.h5", 31 * MIB, strided)];
        let kinds = kinds_of(&files);
        assert_eq!(words(&kinds), [("*.h5 that begin with 5445535431323334".into(), true)]);
        assert_eq!(
            kinds[0].held_out.map(|score| (score.files, score.precision(), score.recall())),
            Some((2, 1.0, 1.0))
        );
        let new = Facts::of(Path::new("/c/new.h5"), 200 * MIB, None);
        assert_eq!(find(&kinds, &new).unwrap().shape.predict(200 * MIB).len(), 200);
        assert!(find(&kinds, &Facts::of(Path::new("/c/new.h5"), MIB, Some(b"OTHER"))).is_none());
    }

    #[test]
    fn one_file_is_kept_and_not_used() {
        let kinds = kinds_of(&[observed("/a/1.h5", 10 * MIB, strided)]);
        assert!(kinds[0].why_unused().unwrap().contains("one file only"), "{kinds:?}");
        assert!(find(&kinds, &Facts::of(Path::new("/a/2.h5"), 10 * MIB, None)).is_none());
    }

    #[test]
    fn files_that_are_read_differently_are_told_apart() {
        let by_name = [
            observed("/a/index1.dat", 10 * MIB, whole),
            observed("/a/index2.dat", 14 * MIB, whole),
            observed("/a/hits1.dat", 20 * MIB, strided),
            observed("/a/hits2.dat", 50 * MIB, strided),
        ];
        let magic = " that begin with 5445535431323334";
        assert_eq!(
            words(&kinds_of(&by_name)),
            ["hits#.dat", "index#.dat"].map(|name| (format!("{name}{magic}"), true))
        );
        let by_size = [
            observed("/a/b.dat", 2 * MIB, whole),
            observed("/a/c.dat", 3 * MIB, whole),
            observed("/a/d.dat", 200 * MIB, strided),
            observed("/a/e.dat", 250 * MIB, strided),
        ];
        let kinds = kinds_of(&by_size);
        assert!(kinds.len() == 2 && kinds.iter().all(Kind::is_used), "{:?}", words(&kinds));
        let large = Facts::of(Path::new("/z/z.dat"), 150 * MIB, None);
        assert_eq!(find(&kinds, &large).unwrap().shape.predict(150 * MIB).len(), 150);
    }

    #[test]
    fn what_was_wrong_of_held_out_files_is_not_used() {
        let odd = |n: u64| move |size: u64| vec![(size / n / 8192 * 8192, 16_384 * n), (size / (n + 3), 5000 * n)];
        let files: Vec<_> = (2..6).map(|n| observed(&format!("/a/{n}.x"), n * 7 * MIB + n * 4096, odd(n))).collect();
        let kinds = kinds_of(&files);
        assert!(kinds.iter().all(|kind| !kind.is_used()), "{kinds:?}");
    }
}
