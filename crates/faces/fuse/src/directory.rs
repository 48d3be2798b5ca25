//! The position of a directory reader: from the kernel's offsets to the name after which to resume.
//!
//! The server resumes after a *name*, which is robust: names added or removed meanwhile shift nothing. The kernel
//! counts, so an open directory remembers the names it has returned: all recent ones, older ones at intervals, so that
//! memory stays bounded. A reader may seek among them as it likes; those behind a place are forgotten only when another name
//! comes there than before. Seeking back further than [`RECENT`] names counts forward again from the nearest remembered
//! name.

use std::collections::VecDeque;

/// Recent names, all remembered.
const RECENT: usize = 16 * 1024;
/// Of older names, every `STEP`-th is remembered.
const STEP: u64 = 1024;

/// The names returned so far.
#[derive(Debug, Default)]
pub(crate) struct Cursor {
    /// Position of the first name in `recent`.
    first: u64,
    recent: VecDeque<Vec<u8>>,
    /// How many names of `recent` are before the position of the reader.
    read: usize,
    /// (position, name before it), ascending, all before `first`.
    marks: Vec<(u64, Vec<u8>)>,
    /// Where the end was found.
    end: Option<u64>,
    /// Number of names that fitted into the last reply.
    pub(crate) last_fit: u32,
}

/// Where to resume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Resume {
    /// After this name; empty: from the start.
    pub after: Vec<u8>,
    /// Then skip this many names.
    pub skip: u64,
}

impl Cursor {
    /// Moves to `position` (names returned before it).
    pub(crate) fn seek(&mut self, position: u64) -> Resume {
        let is_start = position == 0 && self.first == 0;
        if is_start || position > self.first && position <= self.first + self.recent.len() as u64 {
            let read = (position - self.first) as usize;
            if is_start || read != self.read {
                self.end = None;
            }
            self.read = read;
            let before = read.checked_sub(1).and_then(|last| self.recent.get(last));
            return Resume { after: before.cloned().unwrap_or_default(), skip: 0 };
        }
        self.end = None;
        self.recent.clear();
        self.read = 0;
        self.marks.retain(|(at, _)| *at <= position);
        self.first = position;
        match self.marks.last() {
            Some((at, name)) => Resume { after: name.clone(), skip: position - at },
            None => Resume { after: Vec::new(), skip: position },
        }
    }

    /// Records the next name as returned.
    pub(crate) fn gave(&mut self, name: Vec<u8>) {
        if self.recent.get(self.read) == Some(&name) {
            self.read += 1;
            return;
        }
        self.recent.truncate(self.read);
        self.recent.push_back(name);
        if self.recent.len() > RECENT
            && let Some(oldest) = self.recent.pop_front()
        {
            self.first += 1;
            if self.first.is_multiple_of(STEP) {
                self.marks.push((self.first, oldest));
            }
        }
        self.read = self.recent.len();
    }

    /// Number of names before the position of the reader.
    pub(crate) fn position(&self) -> u64 {
        self.first + self.read as u64
    }

    /// The server has no name after the current position.
    pub(crate) fn ended(&mut self) {
        self.end = Some(self.position());
    }

    /// Whether the end is at the current position.
    pub(crate) fn at_end(&self) -> bool {
        self.end == Some(self.position())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(i: u64) -> Vec<u8> {
        format!("n{i:08}").into_bytes()
    }

    /// A cursor that returned `count` names from the start.
    fn read(count: u64) -> Cursor {
        let mut cursor = Cursor::default();
        cursor.seek(0);
        (0..count).for_each(|i| cursor.gave(name(i)));
        cursor
    }

    #[test]
    fn resumes_after_the_name_before_the_position() {
        let mut cursor = read(10);
        assert_eq!(cursor.seek(10), Resume { after: name(9), skip: 0 });
        assert_eq!(cursor.seek(4), Resume { after: name(3), skip: 0 });
        assert_eq!(cursor.position(), 4);
        cursor.gave(b"other".to_vec());
        assert_eq!(cursor.seek(5), Resume { after: b"other".to_vec(), skip: 0 });
        assert_eq!(cursor.seek(0), Resume { after: Vec::new(), skip: 0 });
    }

    #[test]
    fn names_are_remembered_until_another_one_comes_in_their_place() {
        let mut cursor = read(10);
        for position in [7, 2, 0, 9, 10, 1] {
            let after = if position == 0 { Vec::new() } else { name(position - 1) };
            assert_eq!(cursor.seek(position), Resume { after, skip: 0 }, "{position}");
        }
        cursor.gave(name(1));
        assert_eq!(cursor.seek(10), Resume { after: name(9), skip: 0 }, "the same name as before");
        cursor.seek(2);
        cursor.gave(name(3));
        assert_eq!(cursor.position(), 3);
        assert_eq!(cursor.seek(10), Resume { after: Vec::new(), skip: 10 }, "a name was removed meanwhile");
    }

    #[test]
    fn the_end_is_remembered_until_moved_back() {
        let mut cursor = read(3);
        assert!(!cursor.at_end());
        cursor.ended();
        cursor.seek(3);
        assert!(cursor.at_end());
        cursor.seek(2);
        assert!(!cursor.at_end());
    }

    #[test]
    fn far_back_counts_from_a_remembered_name_and_memory_is_bounded() {
        let count = RECENT as u64 + 10 * STEP + 5;
        let mut cursor = read(count);
        assert_eq!(cursor.recent.len(), RECENT);
        assert_eq!(cursor.marks.len(), 10);
        assert_eq!(cursor.seek(count), Resume { after: name(count - 1), skip: 0 });
        assert_eq!(cursor.seek(3 * STEP + 7), Resume { after: name(3 * STEP - 1), skip: 7 });
        assert_eq!(cursor.position(), 3 * STEP + 7);
        cursor.gave(name(3 * STEP + 7));
        assert_eq!(cursor.seek(3 * STEP + 8), Resume { after: name(3 * STEP + 7), skip: 0 });
        assert_eq!(cursor.seek(20), Resume { after: Vec::new(), skip: 20 });
    }

    #[test]
    fn a_position_never_given_counts_from_the_start() {
        assert_eq!(Cursor::default().seek(9), Resume { after: Vec::new(), skip: 9 });
    }
}
