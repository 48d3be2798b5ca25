//! The loads of aioli-2006 ("Evaluations"), scaled down: what each process does, and the files that must be there.

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
    /// Every call is one collective call of all its processes.
    pub collective: bool,
    pub delay_ms: u64,
}

/// Applications that run at once.
#[derive(Clone, PartialEq, Debug)]
pub struct Load {
    pub name: String,
    pub applications: Vec<Application>,
}

fn application(name: &str, processes: u64, writes: bool, request_bytes: u64, file_bytes: u64) -> Application {
    // Whole rounds of requests, at least one.
    let round = processes * request_bytes;
    let file_bytes = (file_bytes / round).max(1) * round;
    Application { name: name.into(), processes, writes, request_bytes, file_bytes, collective: false, delay_ms: 0 }
}

/// All loads; `bytes` is the size of the file that is taken apart (4 GB in the paper).
pub fn loads(bytes: u64, processes: u64) -> Vec<Load> {
    let mut loads = Vec::new();
    for request_kib in [8, 64, 128] {
        for collective in [false, true] {
            let how = if collective { "collective" } else { "POSIX" };
            let whole = application("decomposition", processes, false, request_kib << 10, bytes);
            loads.push(Load {
                name: format!("decomposition, {request_kib} KiB, {how}"),
                applications: vec![Application { collective, ..whole }],
            });
        }
    }
    loads.push(Load {
        name: "cat beside a decomposition".into(),
        applications: vec![
            application("decomposition", processes, false, 64 << 10, bytes),
            Application { delay_ms: 300, ..cat(bytes) },
        ],
    });
    loads.push(Load { name: "cat alone".into(), applications: vec![cat(bytes)] });
    loads.push(Load { name: "ten applications".into(), applications: ten(bytes) });
    loads
}

/// A small file read from start to end (16 MB in the paper beside 4 GB; not less than 2 MiB here).
fn cat(bytes: u64) -> Application {
    application("cat", 1, false, 32 << 10, (bytes / 256).max(2 << 20))
}

/// The paper's ten, with files in the ratio of `bytes` to 4 GB.
fn ten(bytes: u64) -> Vec<Application> {
    const GB: u64 = 1 << 30;
    [
        ("read decomposition 2 GB", 32, false, 128 << 10, 2 * GB),
        ("write decomposition 2 GB", 32, true, 128 << 10, 2 * GB),
        ("read decomposition 256 MB", 16, false, 8 << 10, GB / 4),
        ("write decomposition 128 MB", 8, true, 64 << 10, GB / 8),
        ("read sequential 1 GB", 1, false, 1 << 20, GB),
        ("write sequential 512 MB", 1, true, 1 << 20, GB / 2),
        ("read sequential 32 MB", 1, false, 4 << 10, GB / 32),
        ("write sequential 32 MB", 1, true, 4 << 10, GB / 32),
        ("read sequential 4 MB", 1, false, 32 << 10, GB / 256),
        ("write sequential 4 MB", 1, true, 32 << 10, GB / 256),
    ]
    .map(|(name, processes, writes, request, size)| {
        let size = (u128::from(size) * u128::from(bytes) / u128::from(4 * GB)) as u64;
        application(name, processes, writes, request, size)
    })
    .into()
}

impl Load {
    /// The name of an application's file.
    fn file(&self, nth: usize) -> String {
        let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
        format!("{}-{nth}", self.name.chars().map(plain).collect::<String>())
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
                let (stride, op) = (a.processes * a.request_bytes, if a.writes { 'w' } else { 'r' });
                lines += &format!(
                    "{nth} {op} /{} {} {} {} {stride} {} {} {}\n",
                    self.file(nth),
                    self.key(nth, generation),
                    a.delay_ms,
                    process * a.request_bytes,
                    a.request_bytes,
                    a.file_bytes / stride,
                    u8::from(a.collective),
                );
            }
        }
        lines
    }

    /// Writes the files of generation 0 into the exported folder.
    pub fn prepare(&self, export: &Path) -> Result<()> {
        for (nth, a) in self.applications.iter().enumerate() {
            let path = export.join(self.file(nth));
            let mut file = std::fs::File::create(&path).with_context(|| path.display().to_string())?;
            for offset in (0..a.file_bytes).step_by(PIECE) {
                file.write_all(&piece(offset, a.file_bytes, self.key(nth, 0)))?;
            }
            file.sync_all()?;
        }
        Ok(())
    }

    /// Compares what the applications of a run wrote.
    pub fn verify(&self, export: &Path, generation: u64) -> Result<()> {
        for (nth, a) in self.applications.iter().enumerate().filter(|(_, a)| a.writes) {
            let path = export.join(self.file(nth));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_take_a_file_apart_without_a_gap() {
        for load in loads(64 << 20, 32) {
            let mut covered = vec![Vec::new(); load.applications.len()];
            for line in load.lines(3).lines() {
                let words: Vec<&str> = line.split(' ').collect();
                assert_eq!(words.len(), 10, "{line}");
                let number = |at: usize| words[at].parse::<u64>().unwrap();
                let (start, stride, bytes, count) = (number(5), number(6), number(7), number(8));
                covered[number(0) as usize].extend((0..count).map(|i| (start + i * stride, bytes)));
            }
            for (extents, application) in covered.iter_mut().zip(&load.applications) {
                extents.sort_unstable();
                let end =
                    extents.iter().fold(0, |end, (start, len)| if *start == end { end + len } else { u64::MAX / 2 });
                assert_eq!(end, application.file_bytes, "{}", load.name);
            }
        }
        assert_eq!(ten(4 << 30)[2].file_bytes, 256 << 20);
    }

    #[test]
    fn wrong_content_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let load = Load { name: "w".into(), applications: vec![application("w", 2, true, 4096, 64 << 10)] };
        load.prepare(dir.path()).unwrap();
        load.verify(dir.path(), 0).unwrap();
        assert!(load.verify(dir.path(), 1).is_err());
        let path = dir.path().join(load.file(0));
        std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(100).unwrap();
        assert!(format!("{:#}", load.verify(dir.path(), 0).unwrap_err()).contains("size"));
    }
}
