//! Which of Sequential, Random and Normal an open file gets as the program moves through its regions.
//!
//! The kernel applies these three to the whole open file and ignores ranges, and every program that shares the open
//! file is under them. So they follow where the file is being read now: the advice of the place where the last read
//! ended is given once two reads in a row asked for it, so that programs that share an open file in different regions do not make it
//! flutter.

use crate::config::ReadAhead;
use crate::regions::RegionMap;

/// Reads in a row that must agree before the advice changes.
const AGREE: u8 = 2;

/// The advice in force on one open file.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenFile {
    /// `None` while the kernel's default was never changed.
    in_force: Option<ReadAhead>,
    candidate: ReadAhead,
    votes: u8,
}

impl OpenFile {
    /// The advice in force, as far as it was given here.
    pub fn in_force(&self) -> ReadAhead {
        self.in_force.unwrap_or_default()
    }

    /// The file was opened: programs begin at its beginning. The advice to give, if any.
    pub fn opened(&mut self, regions: &RegionMap) -> Option<ReadAhead> {
        self.change(regions.read_ahead_at(0))
    }

    /// A read ended before byte `end`. The advice to give, if it changes.
    pub fn read(&mut self, end: u64, regions: &RegionMap) -> Option<ReadAhead> {
        if !regions.has_modes() {
            return None;
        }
        let wanted = regions.read_ahead_at(end);
        if wanted == self.in_force() {
            self.votes = 0;
            return None;
        }
        self.votes = if self.candidate == wanted { self.votes + 1 } else { 1 };
        self.candidate = wanted;
        if self.votes < AGREE { None } else { self.change(wanted) }
    }

    fn change(&mut self, wanted: ReadAhead) -> Option<ReadAhead> {
        if wanted == self.in_force() {
            return None;
        }
        self.in_force = Some(wanted);
        self.votes = 0;
        Some(wanted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Entry, Region};

    fn regions() -> RegionMap {
        let sequential = vec![Region { offset: 0, length: 100 }];
        let random = vec![Region { offset: 100, length: 100 }];
        RegionMap::of(&Entry { sequential, random, ..Entry::new("/f") })
    }

    #[test]
    fn advice_follows_the_program() {
        let (regions, mut file) = (regions(), OpenFile::default());
        assert_eq!(file.opened(&regions), Some(ReadAhead::Sequential));
        let said: Vec<_> = [50, 99, 100, 150, 160, 199, 200, 250, 10, 20].map(|end| file.read(end, &regions)).into();
        let mut expected = vec![None; 10];
        expected[3] = Some(ReadAhead::Random);
        expected[7] = Some(ReadAhead::Normal);
        expected[9] = Some(ReadAhead::Sequential);
        assert_eq!(said, expected);
    }

    #[test]
    fn two_programs_in_two_regions_do_not_make_it_flutter() {
        let (regions, mut file) = (regions(), OpenFile::default());
        file.opened(&regions);
        for _ in 0..100 {
            assert_eq!(file.read(150, &regions), None);
            assert_eq!(file.read(50, &regions), None);
        }
    }

    #[test]
    fn without_regions_the_program_s_own_advice_stands() {
        let (none, mut file) = (RegionMap::of(&Entry::new("/f")), OpenFile::default());
        assert_eq!((file.opened(&none), file.read(1, &none), file.read(2, &none)), (None, None, None));
    }
}
