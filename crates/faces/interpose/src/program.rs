//! Whether the dynamic loader will load the library into a program.

use std::ffi::CString;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// What [`check_program`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The library will be loaded.
    Ok,
    /// The program gains rights when it is executed (set-user-id, set-group-id or file capabilities), and the loader
    /// ignores preloaded libraries. Run as the user whose rights it gains it would do.
    SetUserId,
    /// Statically linked: there is no loader. `assist daemon --watch` sees such programs.
    Static,
    /// A script: what counts is the interpreter, which see.
    Script(PathBuf),
    /// Made for another machine than the library, or for 32 bits.
    OtherMachine,
    /// Loaded by another loader than the GNU C library's, which may refuse to run the program with the library.
    OtherLoader(PathBuf),
    /// Not a program of this system: no ELF file and no script.
    NotElf,
    /// It cannot be read: the text says why.
    Unreadable(String),
}

/// Looks at a program by its path (not by `PATH`); follows symbolic links, but not a script's interpreter.
pub fn check_program(path: &Path) -> Verdict {
    match look(path) {
        Ok(verdict) => verdict,
        Err(e) => Verdict::Unreadable(format!("{}: {e}", path.display())),
    }
}

const ELF_HEADER: usize = 64;
const SEGMENT: u64 = 56;
const PT_INTERP: u32 = 3;
#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = 62;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = 183;

fn look(path: &Path) -> std::io::Result<Verdict> {
    let mut file = File::open(path)?;
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Ok(Verdict::NotElf);
    }
    let mut start = Vec::new();
    (&mut file).take(256).read_to_end(&mut start)?;
    if let Some(line) = start.strip_prefix(b"#!") {
        return Ok(script(line));
    }
    // A script gains no rights; a program does.
    if gains_rights(path, &meta) {
        return Ok(Verdict::SetUserId);
    }
    elf(&file, &start)
}

fn script(line: &[u8]) -> Verdict {
    let line = line.split(|b| *b == b'\n').next().unwrap_or(&[]);
    let mut words = line.split(|b| matches!(b, b' ' | b'\t' | b'\r')).filter(|w| !w.is_empty());
    match words.next() {
        Some(interpreter) => Verdict::Script(PathBuf::from(std::ffi::OsStr::from_bytes(interpreter))),
        None => Verdict::NotElf,
    }
}

fn gains_rights(path: &Path, meta: &std::fs::Metadata) -> bool {
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let real = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let set_user = meta.mode() & 0o4000 != 0 && (meta.uid() != user || real.0 != meta.uid());
    // Without the right to execute for the group, the bit means mandatory locking.
    let set_group = meta.mode() & 0o2010 == 0o2010 && (meta.gid() != group || real.1 != meta.gid());
    let capabilities = || {
        let Ok(name) = CString::new(path.as_os_str().as_bytes()) else { return false };
        rustix::fs::getxattr(&name, c"security.capability", &mut [0u8; 64][..]).is_ok_and(|len| len > 0)
    };
    set_user || set_group || (user != 0 && capabilities())
}

/// Little-endian numbers at a place, 0 beyond the end.
fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
    bytes.get(at..at + len).map_or(0, |b| b.iter().rev().fold(0, |n, byte| n << 8 | u64::from(*byte)))
}

fn elf(file: &File, start: &[u8]) -> std::io::Result<Verdict> {
    if !start.starts_with(b"\x7fELF") || start.len() < ELF_HEADER {
        return Ok(Verdict::NotElf);
    }
    // Class 64 bits, little-endian; then the kind (2 program, 3 position-independent) and the machine.
    if start[4] != 2 || start[5] != 1 || number(start, 18, 2) as u16 != MACHINE {
        return Ok(Verdict::OtherMachine);
    }
    if !matches!(number(start, 16, 2), 2 | 3) {
        return Ok(Verdict::NotElf);
    }
    let (segments, count) = (number(start, 32, 8), number(start, 56, 2));
    for i in 0..count {
        let mut segment = [0; SEGMENT as usize];
        let Some(at) = segments.checked_add(i * SEGMENT) else { break };
        if file.read_exact_at(&mut segment, at).is_err() {
            break;
        }
        if number(&segment, 0, 4) as u32 == PT_INTERP {
            let mut name = vec![0; number(&segment, 32, 8).min(4096) as usize];
            let len = file.read_at(&mut name, number(&segment, 8, 8))?;
            let name = name[..len].split(|b| *b == 0).next().unwrap_or(&[]);
            return Ok(loader(Path::new(std::ffi::OsStr::from_bytes(name))));
        }
    }
    // Without an interpreter: static, whether position-independent or not.
    Ok(Verdict::Static)
}

fn loader(path: &Path) -> Verdict {
    let name = path.file_name().map(|n| n.as_bytes().to_vec()).unwrap_or_default();
    match name.starts_with(b"ld-linux-") || name.starts_with(b"ld64.so") {
        true => Verdict::Ok,
        false => Verdict::OtherLoader(path.to_path_buf()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        file
    }

    fn verdict(bytes: &[u8]) -> Verdict {
        check_program(file(bytes).path())
    }

    #[test]
    fn scripts_name_their_interpreter() {
        assert_eq!(verdict(b"#!/bin/sh\necho"), Verdict::Script("/bin/sh".into()));
        assert_eq!(verdict(b"#! /usr/bin/env python3\n"), Verdict::Script("/usr/bin/env".into()));
        assert_eq!(verdict(b"#!\n/bin/sh"), Verdict::NotElf);
    }

    #[test]
    fn this_program_and_broken_copies_of_it() {
        let me = std::env::current_exe().unwrap();
        assert_eq!(check_program(&me), Verdict::Ok);
        let mut start = vec![0; 4096];
        File::open(&me).unwrap().read_exact(&mut start).unwrap();
        assert_eq!(verdict(&start), Verdict::Ok);
        assert_eq!(verdict(&start[..40]), Verdict::NotElf);
        // Every byte of the header broken in turn: an answer, never a panic.
        for at in 0..ELF_HEADER + SEGMENT as usize * 4 {
            for value in [0, 1, 0x7f, 0xff] {
                let mut broken = start.clone();
                broken[at] = value;
                let _ = verdict(&broken);
            }
        }
        let mut other = start.clone();
        other[18] = 40;
        assert_eq!(verdict(&other), Verdict::OtherMachine);
        other = start.clone();
        other[4] = 1;
        assert_eq!(verdict(&other), Verdict::OtherMachine);
        // No segments: static.
        other = start.clone();
        other[56..58].fill(0);
        assert_eq!(verdict(&other), Verdict::Static);
        let at =
            start.windows(10).position(|w| w == b"ld-linux-x").or(start.windows(10).position(|w| w == b"ld-linux-a"));
        other = start.clone();
        other[at.unwrap()..][..9].copy_from_slice(b"ld-musl-x");
        assert!(matches!(verdict(&other), Verdict::OtherLoader(p) if p.to_str().unwrap().contains("ld-musl-")));
    }

    #[test]
    fn a_program_that_gains_rights_is_said_to() {
        let program = tempfile::NamedTempFile::new().unwrap();
        std::fs::copy("/bin/true", program.path()).unwrap();
        let mode = |bits| std::fs::set_permissions(program.path(), PermissionsExt::from_mode(bits)).unwrap();
        mode(0o4755);
        // Set-user-id to whom we are already gains nothing.
        assert_eq!(check_program(program.path()), Verdict::Ok);
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(program.path(), Some(1), Some(1)).unwrap();
            mode(0o4755);
            assert_eq!(check_program(program.path()), Verdict::SetUserId);
            mode(0o2755);
            assert_eq!(check_program(program.path()), Verdict::SetUserId);
            mode(0o2745);
            assert_eq!(check_program(program.path()), Verdict::Ok);
        }
    }

    #[test]
    fn what_is_no_program_is_said_to_be_none() {
        assert_eq!(verdict(b""), Verdict::NotElf);
        assert_eq!(verdict(b"hello"), Verdict::NotElf);
        assert_eq!(check_program(Path::new("/")), Verdict::NotElf);
        let Verdict::Unreadable(why) = check_program(Path::new("/nowhere/at/all")) else { panic!() };
        assert!(why.contains("/nowhere/at/all"));
    }
}
