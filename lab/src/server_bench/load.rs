//! What each process of a load does, and the files that must be there.

use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

use anyhow::{Context, Result, ensure};

/// One application.
#[derive(Clone, PartialEq, Debug)]
pub struct Application {
    /// For people.
    pub name: String,
    pub processes: u64,
    pub writes: bool,
    /// Bytes of a call.
    pub request_bytes: u64,
    /// Bytes of its file, shared by its processes in turns of one request each.
    pub file_bytes: u64,
    /// Every process has a part of the file of its own, one behind the other.
    pub apart: bool,
    /// Every call is one collective call of all its processes.
    pub collective: bool,
    pub delay_ms: u64,
    /// Number of its user.
    pub user: u32,
    /// For another name of its file.
    pub variant: u32,
}

/// Applications that run at once.
#[derive(Clone, PartialEq, Debug)]
pub struct Load {
    pub name: String,
    pub applications: Vec<Application>,
}

impl Application {
    /// An application whose processes share a file of about `file_bytes`: whole rounds of requests, at least one.
    pub fn new(name: &str, processes: u64, writes: bool, request_bytes: u64, file_bytes: u64) -> Application {
        let round = processes * request_bytes;
        let file_bytes = (file_bytes / round).max(1) * round;
        Application {
            name: name.into(),
            processes,
            writes,
            request_bytes,
            file_bytes,
            apart: false,
            collective: false,
            delay_ms: 0,
            user: 0,
            variant: 0,
        }
    }
}

impl Load {
    /// Applications that each have a file of `bytes`: 256 KiB at a time one behind the other, and 16 KiB in turns, reading and writing.
    pub fn contiguous_and_strided(applications: u64, processes: u64, bytes: u64) -> Vec<Load> {
        let kinds = [("256 KiB contiguous", 256 << 10, true), ("16 KiB strided", 16 << 10, false)];
        let mut loads = Vec::new();
        for (kind, request_bytes, apart) in kinds {
            for (verb, writes) in [("read", false), ("write", true)] {
                let one =
                    Application { apart, ..Application::new("application", processes, writes, request_bytes, bytes) };
                loads.push(Load { name: format!("{kind} {verb}"), applications: vec![one; applications as usize] });
            }
        }
        loads
    }

    /// The name of an application's file.
    pub fn file(&self, nth: usize) -> String {
        let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
        let variant = match self.applications[nth].variant {
            0 => String::new(),
            n => format!("-{n}"),
        };
        format!("{}-{nth}{variant}", self.name.chars().map(plain).collect::<String>())
    }

    /// Key of a file's content; what is written differs in every run.
    fn key(&self, nth: usize, generation: u64) -> u64 {
        let generation = if self.applications[nth].writes { generation } else { 0 };
        (nth as u64 + 1) << 40 | self.applications[nth].file_bytes ^ generation << 52
    }

    /// The clients' standard input: a line for each process.
    pub fn lines(&self, generation: u64) -> String {
        let mut lines = String::new();
        for (nth, a) in self.applications.iter().enumerate() {
            for process in 0..a.processes {
                let (round, op) = (a.processes * a.request_bytes, if a.writes { 'w' } else { 'r' });
                let (start, stride) = match a.apart {
                    true => (process * (a.file_bytes / a.processes), a.request_bytes),
                    false => (process * a.request_bytes, round),
                };
                lines += &format!(
                    "{nth} {} {op} /{} {} {} {start} {stride} {} {} {}\n",
                    a.user,
                    self.file(nth),
                    self.key(nth, generation),
                    a.delay_ms,
                    a.request_bytes,
                    a.file_bytes / round,
                    u8::from(a.collective),
                );
            }
        }
        lines
    }

    /// Writes the files of generation 0 into a folder.
    pub fn prepare(&self, folder: &Path) -> Result<()> {
        for (nth, a) in self.applications.iter().enumerate() {
            let path = folder.join(self.file(nth));
            let mut file = std::fs::File::create(&path).with_context(|| path.display().to_string())?;
            for offset in (0..a.file_bytes).step_by(PIECE) {
                file.write_all(&piece(offset, a.file_bytes, self.key(nth, 0)))?;
            }
            file.sync_all()?;
        }
        Ok(())
    }

    /// Compares what the applications of a run wrote.
    pub fn verify(&self, folder: &Path, generation: u64) -> Result<()> {
        for (nth, a) in self.applications.iter().enumerate().filter(|(_, a)| a.writes) {
            let path = folder.join(self.file(nth));
            let mut file = std::fs::File::open(&path).with_context(|| path.display().to_string())?;
            ensure!(file.seek(SeekFrom::End(0))? == a.file_bytes, "{} has another size", path.display());
            file.rewind()?;
            for offset in (0..a.file_bytes).step_by(PIECE) {
                let want = piece(offset, a.file_bytes, self.key(nth, generation));
                let mut got = vec![0; want.len()];
                file.read_exact(&mut got)?;
                ensure!(got == want, "{} holds what was not written, near {offset}", path.display());
            }
        }
        Ok(())
    }
}

const PIECE: usize = 1 << 20;

/// The content from `offset` on; `clients.c` has the same rule.
fn piece(offset: u64, end: u64, key: u64) -> Vec<u8> {
    let words = (end - offset).min(PIECE as u64) / 8;
    let word = |i: u64| ((offset / 8 + i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ key).to_le_bytes();
    (0..words).flat_map(word).collect()
}

/// The processes of each application touch every byte of its file once.
#[cfg(test)]
pub fn covers(load: &Load) {
    let mut covered = vec![Vec::new(); load.applications.len()];
    for line in load.lines(3).lines() {
        let words: Vec<&str> = line.split(' ').collect();
        assert_eq!(words.len(), 11, "{line}");
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        let (start, stride, bytes, count) = (number(6), number(7), number(8), number(9));
        covered[number(0) as usize].extend((0..count).map(|i| (start + i * stride, bytes)));
    }
    for (extents, application) in covered.iter_mut().zip(&load.applications) {
        extents.sort_unstable();
        let end = extents.iter().fold(0, |end, (start, len)| if *start == end { end + len } else { u64::MAX / 2 });
        assert_eq!(end, application.file_bytes, "{}", load.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_take_a_file_apart_without_a_gap() {
        let in_turns = Application::new("turns", 8, false, 16 << 10, 4 << 20);
        let apart = Application { apart: true, ..Application::new("apart", 8, true, 256 << 10, 4 << 20) };
        covers(&Load { name: "l".into(), applications: vec![in_turns, apart] });
        let loads = Load::contiguous_and_strided(3, 4, 8 << 20);
        assert_eq!(loads.len(), 4);
        loads.iter().for_each(covers);
    }

    #[test]
    fn wrong_content_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let load = Load { name: "w".into(), applications: vec![Application::new("w", 2, true, 4096, 64 << 10)] };
        load.prepare(dir.path()).unwrap();
        load.verify(dir.path(), 0).unwrap();
        assert!(load.verify(dir.path(), 1).is_err());
        let path = dir.path().join(load.file(0));
        std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(100).unwrap();
        assert!(format!("{:#}", load.verify(dir.path(), 0).unwrap_err()).contains("size"));
    }
}
