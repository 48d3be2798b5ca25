//! What is known of a file without reading it, and which files are of one kind by that.

use std::ffi::OsStr;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// First bytes of a file that tell its format.
pub const MAGIC_BYTES: usize = 8;
/// Minimum first bytes that files must share to identify a format.
const MAGIC_BYTES_MIN: usize = 4;
/// The longest suffix; a longer one is part of the name.
const SUFFIX_BYTES_MAX: usize = 16;
/// Sizes that differ by less than this factor, as a power of two, are of one class.
const CLASS_BITS: u32 = 4;

/// What is known of one file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Facts {
    /// Behind the last dot, in small letters, or `#` for a number; empty where there is none.
    pub suffix: String,
    /// The name, with `#` for numbers.
    pub name: String,
    /// The name of its folder, with `#` for numbers.
    pub folder: String,
    /// Its length.
    pub size_bytes: u64,
    /// Its first bytes, where they are known.
    pub magic: Option<Vec<u8>>,
}

impl Facts {
    /// Of a path.
    pub fn of(path: &Path, size_bytes: u64, magic: Option<&[u8]>) -> Facts {
        let text = |name: Option<&OsStr>| name.unwrap_or_default().to_string_lossy().into_owned();
        let name = text(path.file_name());
        let parts = name.rsplit_once('.').filter(|(stem, suffix)| !stem.is_empty() && suffix.len() <= SUFFIX_BYTES_MAX);
        // `h5` is a suffix, and `0001` is a number.
        let suffix = match parts.map(|(_, suffix)| suffix.to_lowercase()) {
            Some(number) if number.bytes().all(|b| b.is_ascii_digit()) => without_numbers(&number),
            suffix => suffix.unwrap_or_default(),
        };
        let name = match parts {
            Some((stem, _)) => format!("{}.{suffix}", without_numbers(stem)),
            None => without_numbers(&name),
        };
        let magic = magic.map(|magic| magic[..magic.len().min(MAGIC_BYTES)].to_vec());
        Facts {
            suffix,
            folder: without_numbers(&text(path.parent().and_then(Path::file_name))),
            name,
            size_bytes,
            magic,
        }
    }

    /// The class of its size: from 16ⁿ bytes to 16 times as much.
    fn class(&self) -> (u64, u64) {
        let exponent = self.size_bytes.max(1).ilog2() / CLASS_BITS * CLASS_BITS;
        let low = 1u64 << exponent;
        (low, low.checked_mul(1 << CLASS_BITS).map_or(u64::MAX, |above| above - 1))
    }
}

/// A name with `#` in the place of each number, so that `run0815` and `run7` are alike.
fn without_numbers(name: &str) -> String {
    let mut plain = String::with_capacity(name.len());
    for c in name.chars() {
        match c.is_ascii_digit() {
            true if plain.ends_with('#') => {}
            true => plain.push('#'),
            false => plain.push(c),
        }
    }
    plain
}

/// Which files are of a kind: those of which all that is said here is true.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Files {
    /// The suffix; empty for files that have none.
    pub suffix: String,
    /// The first bytes, as hexadecimal digits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub magic: Option<String>,
    /// The name, with `#` for numbers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The name of the folder, with `#` for numbers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub folder: Option<String>,
    /// The least and the largest size in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<(u64, u64)>,
}

impl Files {
    /// Whether a file is of this kind. First bytes that are not known say nothing against it, unless there is nothing but
    /// them to go by.
    pub fn hold(&self, facts: &Facts) -> bool {
        let is_named = |wanted: &Option<String>, is: &str| wanted.as_deref().is_none_or(|wanted| wanted == is);
        let by_magic_alone = self.suffix.is_empty() && self.name.is_none();
        let is_format = match (&self.magic, &facts.magic) {
            (None, _) => !by_magic_alone,
            (Some(_), None) => !by_magic_alone,
            (Some(wanted), Some(is)) => hex(is).starts_with(wanted.as_str()),
        };
        self.suffix == facts.suffix
            && is_format
            && is_named(&self.name, &facts.name)
            && is_named(&self.folder, &facts.folder)
            && self.size_bytes.is_none_or(|(least, most)| (least..=most).contains(&facts.size_bytes))
    }

    /// How much is said.
    pub fn conditions(&self) -> usize {
        let options = [self.magic.is_some(), self.name.is_some(), self.folder.is_some(), self.size_bytes.is_some()];
        options.into_iter().filter(|is| *is).count()
    }

    /// For people.
    pub fn words(&self) -> String {
        let mut words = match (&self.name, self.suffix.as_str()) {
            (Some(name), _) => name.clone(),
            (None, "") => "files without a suffix".into(),
            (None, suffix) => format!("*.{suffix}"),
        };
        if let Some(folder) = &self.folder {
            words = format!("{folder}/{words}");
        }
        if let Some((least, most)) = self.size_bytes {
            let [least, above] = [least, most.saturating_add(1)].map(|b| impresario_base::units::show_bytes(b as f64));
            words += &format!(" of {least} to {above}");
        }
        if let Some(magic) = &self.magic {
            words += &format!(" that begin with {magic}");
        }
        words
    }
}

/// Ways to tell files with one suffix apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Split {
    Name,
    Folder,
    Magic,
    Size,
}

impl Split {
    pub(super) const ALL: [Split; 4] = [Split::Name, Split::Magic, Split::Folder, Split::Size];

    /// What these files are when they are told apart by this; `None` where it is not known.
    pub(super) fn of(self, files: &Files, facts: &Facts) -> Option<Files> {
        let mut files = files.clone();
        match self {
            Split::Name => files.name = Some(facts.name.clone()),
            Split::Folder => files.folder = Some(facts.folder.clone()),
            Split::Magic => files.magic = Some(hex(facts.magic.as_deref()?.get(..MAGIC_BYTES_MIN)?)),
            Split::Size => files.size_bytes = Some(facts.class()),
        }
        Some(files)
    }
}

/// What all of these files have in common before any are told apart: by suffix, or where there is none, by the first bytes,
/// or where these are not known, by name.
pub(super) fn kind_of(facts: &Facts) -> Files {
    let plain = Files { suffix: facts.suffix.clone(), ..Files::default() };
    if !facts.suffix.is_empty() {
        return plain;
    }
    Split::Magic.of(&plain, facts).unwrap_or(Files { name: Some(facts.name.clone()), ..plain })
}

/// The first bytes that all of them have, if they tell a format.
pub(super) fn common_magic<'a>(facts: impl Iterator<Item = &'a Facts>) -> Option<String> {
    let common = facts
        .map(|f| f.magic.clone().unwrap_or_default())
        .reduce(|common, other| common.iter().zip(&other).take_while(|(a, b)| a == b).map(|(a, _)| *a).collect())?;
    (common.len() >= MAGIC_BYTES_MIN && common.iter().any(|b| *b != 0)).then(|| hex(&common))
}

/// As hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Of hexadecimal digits.
pub(super) fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |b: u8| (b as char).to_digit(16).map(|d| d as u8);
    let pair = |pair: &[u8]| Some(digit(*pair.first()?)? << 4 | digit(*pair.get(1)?)?);
    text.as_bytes().chunks(2).map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(path: &str, size_bytes: u64, magic: Option<&[u8]>) -> Facts {
        Facts::of(Path::new(path), size_bytes, magic)
    }

    #[test]
    fn numbers_in_names_do_not_count() {
        let one = facts("/data/run0815/hits_3.ROOT", 5000, Some(b"root\0\0\x01\x02more"));
        assert_eq!((one.suffix.as_str(), one.name.as_str(), one.folder.as_str()), ("root", "hits_#.root", "run#"));
        assert_eq!(one.magic.as_deref(), Some(&b"root\0\0\x01\x02"[..]));
        assert_eq!((one.class(), facts("x", 0, None).class()), ((4096, 65_535), (1, 15)));
        assert_eq!(facts("x", u64::MAX, None).class(), (1 << 60, u64::MAX));
        for (path, suffix) in [("/a/b", ""), ("/a/.hidden", ""), ("/a/b.0001", "#"), ("/a/b.c.tar", "tar"), ("/", "")] {
            assert_eq!(facts(path, 1, None).suffix, suffix, "{path}");
        }
    }

    #[test]
    fn a_kind_holds_the_files_of_which_it_is_true() {
        let one = facts("/data/run7/hits.h5", 5 << 20, Some(b"\x89HDF\r\n\x1a\n"));
        let kind = Files { suffix: "h5".into(), magic: common_magic([&one].into_iter()), ..Files::default() };
        assert_eq!(kind.magic.as_deref(), Some("894844460d0a1a0a"));
        assert!(kind.hold(&one) && kind.hold(&facts("/elsewhere/x.H5", 1, None)));
        assert!(!kind.hold(&facts("/x.h5", 1, Some(b"something"))) && !kind.hold(&facts("/x.hdf", 1, None)));
        for split in Split::ALL {
            let narrow = split.of(&kind, &one).unwrap();
            assert!(narrow.hold(&one) && narrow.conditions() >= kind.conditions(), "{split:?}");
        }
        let sized = Split::Size.of(&kind, &one).unwrap();
        assert!(!sized.hold(&facts("/data/run7/hits.h5", 50 << 20, None)));
        assert_eq!(sized.words(), "*.h5 of 1 MiB to 16 MiB that begin with 894844460d0a1a0a");
    }

    #[test]
    fn without_a_suffix_the_first_bytes_decide() {
        let one = facts("/data/table", 100, Some(b"TBL1....."));
        let kind = kind_of(&one);
        assert_eq!((kind.magic.as_deref(), kind.name.as_deref()), (Some("54424c31"), None));
        assert!(kind.hold(&facts("/other", 100, Some(b"TBL1!"))) && !kind.hold(&facts("/other", 100, None)));
        let unknown = kind_of(&facts("/data/table7", 100, None));
        assert!(unknown.hold(&facts("/other/table12", 5, None)) && !unknown.hold(&facts("/other/x", 5, None)));
        assert!(common_magic([&facts("a", 1, Some(&[0; 8]))].into_iter()).is_none(), "zeros are no format");
    }

    #[test]
    fn hexadecimal_there_and_back() {
        assert_eq!((unhex(&hex(&[0, 255, 16])), unhex("0"), unhex("zz")), (Some(vec![0, 255, 16]), None, None));
    }
}
