//! Which parts of a file a process has in its page table: what it touched through a memory map.
//!
//! `/proc/PID/maps` tells where the file is mapped, `/proc/PID/pagemap` which pages are there. Both take a lock of the process that a
//! fault of it may hold while its file system hangs, so a worker asks, not the manager's thread. Who may ask is who may look into
//! the process: its user, as a rule.

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;

use impresario_base::machine::path_of;
use impresario_base::mounts::{mount_of, mounts};
use rustc_hash::FxHashSet;

use super::FileId;

/// Of the list of a process's maps no more is read.
const LIST_BYTES_MAX: u64 = 4 << 20;
/// An entry of the page map, and how many are read at once.
const ENTRY_BYTES: u64 = 8;
const ENTRIES_MAX: u64 = 1024;
/// The page is in memory, and in the page table.
const PRESENT: u64 = 1 << 63;

/// A part of a file that is mapped.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Map {
    address: u64,
    bytes: Range<u64>,
}

/// For each of these files that are open here, whether the process has a part of it mapped; in doubt it has. Fails where the process is
/// gone or may not be looked into.
pub fn are_mapped<'a>(pid: u32, files: impl Iterator<Item = (FileId, BorrowedFd<'a>)>) -> io::Result<Vec<bool>> {
    let list = list_of(pid)?;
    if list.len() as u64 == LIST_BYTES_MAX {
        return Err(io::Error::other("too long a list of maps"));
    }
    let lines = list.split(|byte| *byte == b'\n').filter_map(inode_and_name);
    let (inodes, names): (FxHashSet<u64>, FxHashSet<&[u8]>) = lines.unzip();
    // File systems in layers may name another inode there, or another file: one of both is right.
    let is_mapped = |(id, open): (FileId, BorrowedFd<'_>)| {
        let name = rustix::fs::readlink(path_of(open), Vec::new());
        inodes.contains(&id.ino) || name.map_or(true, |name| names.contains(name.as_bytes()))
    };
    Ok(files.map(is_mapped).collect())
}

/// The list of a process's maps.
fn list_of(pid: u32) -> io::Result<Vec<u8>> {
    let mut list = Vec::new();
    File::open(format!("/proc/{pid}/maps"))?.take(LIST_BYTES_MAX).read_to_end(&mut list)?;
    Ok(list)
}

/// Which file a line of the list is of: see [`map_of`].
fn inode_and_name(line: &[u8]) -> Option<(u64, &[u8])> {
    let mut words = line.splitn(6, |byte| *byte == b' ');
    let inode = std::str::from_utf8(words.nth(4)?).ok()?.parse().ok()?;
    Some((inode, words.next().unwrap_or_default().trim_ascii_start()))
}

/// For each of these parts of a file that is open here, in order and without overlap, whether the process has a page of it in its
/// page table. Fails where the process is gone or may not be looked into.
pub fn parts_in_page_table(pid: u32, id: FileId, open: BorrowedFd<'_>, parts: &[Range<u64>]) -> io::Result<Vec<bool>> {
    let list = list_of(pid)?;
    let table = File::open(format!("/proc/{pid}/pagemap"))?;
    let page_bytes = rustix::param::page_size() as u64;
    let mut found = vec![false; parts.len()];
    let maps_of = |id: FileId| list.split(|byte| *byte == b'\n').filter_map(|line| map_of(line, id)).collect();
    let mut maps: Vec<Map> = maps_of(id);
    if maps.is_empty() && libc::major(id.dev) == 0 {
        // The list has the mount's device, which on btrfs no file has.
        let mounts = mounts();
        let device = mount_of(open, &mounts).map(|mount| libc::makedev(mount.device.0, mount.device.1));
        maps = device.map(|dev| maps_of(FileId { dev, ..id })).unwrap_or_default();
    }
    for map in maps {
        let mut at = 0;
        while let Some(first) = parts.get(at) {
            // Parts that follow one another are asked about together.
            let mut next = at + 1;
            while parts.get(next).is_some_and(|part| {
                part.start == parts[next - 1].end && part.end - first.start <= ENTRIES_MAX * page_bytes
            }) {
                next += 1;
            }
            let (start, end) = (first.start.max(map.bytes.start), parts[next - 1].end.min(map.bytes.end));
            if start < end {
                let address = map.address + (start - map.bytes.start);
                for page in pages_there(&table, address..address + (end - start), page_bytes)? {
                    let in_file = map.bytes.start + (page - map.address);
                    let within = |part: &Range<u64>| part.start < in_file + page_bytes && in_file < part.end;
                    (at..next).filter(|i| within(&parts[*i])).for_each(|i| found[i] = true);
                }
            }
            at = next;
        }
    }
    Ok(found)
}

/// The addresses of a range's pages that are in the page table.
fn pages_there(table: &File, addresses: Range<u64>, page_bytes: u64) -> io::Result<Vec<u64>> {
    let (first, end) = (addresses.start / page_bytes, addresses.end.div_ceil(page_bytes));
    let mut there = Vec::new();
    let mut entries = [0; (ENTRIES_MAX * ENTRY_BYTES) as usize];
    let mut at = first;
    while at < end {
        let count = (end - at).min(ENTRIES_MAX);
        let entries = &mut entries[..(count * ENTRY_BYTES) as usize];
        table.read_exact_at(entries, at * ENTRY_BYTES)?;
        let present = entries.chunks_exact(ENTRY_BYTES as usize).zip(at..).filter(|(entry, _)| {
            u64::from_ne_bytes(<[u8; ENTRY_BYTES as usize]>::try_from(*entry).unwrap_or_default()) & PRESENT != 0
        });
        there.extend(present.map(|(_, page)| page * page_bytes));
        at += count;
    }
    Ok(there)
}

/// A line of the list, if it is of this file: `address-end rights offset major:minor inode name`.
fn map_of(line: &[u8], id: FileId) -> Option<Map> {
    let mut words = line.split(|byte| *byte == b' ').filter(|word| !word.is_empty());
    let mut word = || std::str::from_utf8(words.next()?).ok();
    let hexadecimal = |text: &str| u64::from_str_radix(text, 16).ok();
    let (address, end) = word()?.split_once('-')?;
    let (_, offset, device, inode) = (word()?, word()?, word()?, word()?);
    let (major, minor) = device.split_once(':')?;
    let dev = rustix::fs::makedev(hexadecimal(major)?.try_into().ok()?, hexadecimal(minor)?.try_into().ok()?);
    if (dev, inode.parse().ok()?) != (id.dev, id.ino) {
        return None;
    }
    let (address, offset) = (hexadecimal(address)?, hexadecimal(offset)?);
    let len = hexadecimal(end)?.checked_sub(address)?;
    Some(Map { address, bytes: offset..offset.checked_add(len)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::{AsFd, AsRawFd};
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn lines_of_the_list_are_read_and_others_passed_over() {
        let id = FileId { dev: rustix::fs::makedev(0xfd, 1), ino: 77 };
        let line = b"7f00001000-7f00003000 r--s 00005000 fd:01 77     /a file";
        assert_eq!(map_of(line, id), Some(Map { address: 0x7f_0000_1000, bytes: 0x5000..0x7000 }));
        for other in [
            &b"7f00001000-7f00003000 r--s 00005000 fd:01 78 /b"[..],
            b"7f00001000-7f00003000 r--s 00005000 fd:02 77 /b",
            b"7f00003000-7f00001000 r--s 00005000 fd:01 77 /b",
            b"7f00001000-7f00003000 r--s ffffffffffffffff fd:01 77 /b",
            b"7f00001000-7f00003000 r--s 00005000 ffffffffff:01 77 /b",
            b"7f00001000 r--s 00005000 fd:01 77 /b",
            b"\xff\xfe-\xff",
            b"",
        ] {
            assert_eq!(map_of(other, id), None, "{}", String::from_utf8_lossy(other));
        }
        assert_eq!(inode_and_name(line), Some((77, &b"/a file"[..])));
        assert_eq!(inode_and_name(b"7f00001000-7f00003000 rw-p 00000000 00:00 0 "), Some((0, &b""[..])));
        assert_eq!(inode_and_name(b"7f00001000-7f00003000 rw-p"), None);
    }

    #[test]
    fn touched_parts_of_a_map_are_told_from_others() {
        let len = 4 << 20;
        let mut file = tempfile::tempfile().unwrap();
        // In single pages, since the kernel maps a large one at once.
        (0..len / 4096).for_each(|_| file.write_all(&[1; 4096]).unwrap());
        let id = file.metadata().map(|meta| FileId { dev: meta.dev(), ino: meta.ino() }).unwrap();
        let parts: Vec<Range<u64>> = (0..32).filter(|i| i % 8 != 7).map(|i| i << 17..(i + 1) << 17).collect();
        let ask_of = |id| parts_in_page_table(std::process::id(), id, file.as_fd(), &parts).unwrap();
        let ask = || ask_of(id);
        let is_mapped = || are_mapped(std::process::id(), [(id, file.as_fd())].into_iter()).unwrap() == [true];
        assert!(!is_mapped());
        assert!(ask().iter().all(|touched| !touched), "it is not mapped");
        // SAFETY: a new map of an open file, checked below, and unmapped at the end.
        let map = unsafe {
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0).cast::<u8>()
        };
        assert!(!map.is_null() && map as isize != -1);
        assert!(is_mapped());
        if ask().iter().any(|touched| *touched) {
            return impresario_testing::skip("pagemap", "this file system fills page tables at once");
        }
        for part in [2u64, 20] {
            // SAFETY: within the map, which nobody writes to.
            let byte = unsafe { map.add((part << 17) as usize + 70_000).read_volatile() };
            assert_eq!(byte, 1);
        }
        let touched: Vec<u64> =
            parts.iter().zip(ask()).filter(|(_, touched)| *touched).map(|(p, _)| p.start >> 17).collect();
        let made_up = FileId { dev: rustix::fs::makedev(0, 99_999), ..id };
        assert_eq!(ask_of(made_up), ask(), "as on btrfs");
        // SAFETY: mapped above with this length.
        unsafe { libc::munmap(map.cast(), len) };
        assert!(!is_mapped());
        if touched != [2, 20] && touched.contains(&2) && touched.contains(&20) {
            return impresario_testing::skip("pagemap", "large pages");
        }
        assert_eq!(touched, [2, 20]);
        assert!(parts_in_page_table(u32::MAX, id, file.as_fd(), &parts).is_err());
    }
}
