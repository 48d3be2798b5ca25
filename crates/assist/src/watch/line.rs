//! A line of the kernel's trace, as the events of its page cache print it.

/// A read of a file that the kernel saw: whole pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seen {
    /// Thread that read.
    pub thread: u32,
    /// Device of the file, `major` and `minor`.
    pub device: (u32, u32),
    /// Inode of the file.
    pub inode: u64,
    /// First byte, a multiple of the page size.
    pub offset: u64,
    /// Length, bytes.
    pub len: u64,
    /// Through a memory map.
    pub mapped: bool,
}

/// Reads a line of `trace_pipe`; nothing of lines that tell of something else.
///
/// The lines are `COMMAND-THREAD [CPU] FLAGS TIME: EVENT: dev=MAJOR:MINOR ino=HEX ofs=FIRST-LAST` for
/// `mm_filemap_get_pages` and the same with `ofs=FIRST` for `mm_filemap_fault`. A command may hold any character, so
/// the line is read from its end.
pub fn parse(line: &str, page_bytes: u64) -> Option<Seen> {
    let (mapped, at, name) = match (line.rfind(": mm_filemap_get_pages: "), line.rfind(": mm_filemap_fault: ")) {
        (Some(at), None) => (false, at, ": mm_filemap_get_pages: "),
        (None, Some(at)) => (true, at, ": mm_filemap_fault: "),
        _ => return None,
    };
    let (head, fields) = (&line[..at], &line[at + name.len()..]);
    // "python3-1234    [001] d..1.  52.123456"
    let (before_cpu, _) = head.rsplit_once(" [")?;
    let thread = before_cpu.trim_end().rsplit_once('-')?.1.parse().ok()?;
    let mut words = fields.split_ascii_whitespace();
    let (major, minor) = words.next()?.strip_prefix("dev=")?.split_once(':')?;
    let inode = u64::from_str_radix(words.next()?.strip_prefix("ino=")?, 16).ok()?;
    let range = words.next()?.strip_prefix("ofs=")?;
    let (first, last): (u64, u64) = match range.split_once('-') {
        Some((first, last)) => (first.parse().ok()?, last.parse().ok()?),
        None => {
            let first: u64 = range.parse().ok()?;
            (first, first.checked_add(page_bytes)?.checked_sub(1)?)
        }
    };
    let len = last.checked_sub(first)?.checked_add(1)?;
    Some(Seen { thread, device: (major.parse().ok()?, minor.parse().ok()?), inode, offset: first, len, mapped })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_faults_are_understood() {
        let line = "          python3-4242    [001] .....  1234.567890: mm_filemap_get_pages: dev=254:0 ino=1a2b ofs=8192-16383";
        let seen = Seen { thread: 4242, device: (254, 0), inode: 0x1a2b, offset: 8192, len: 8192, mapped: false };
        assert_eq!(parse(line, 4096), Some(seen));
        let line = " a [000] odd-name-77      [000] ..... 1.5: mm_filemap_fault: dev=7:1 ino=ff ofs=4096";
        let seen = Seen { thread: 77, device: (7, 1), inode: 255, offset: 4096, len: 4096, mapped: true };
        assert_eq!(parse(line, 4096), Some(seen));
    }

    #[test]
    fn other_and_broken_lines_are_passed_over() {
        for line in [
            "",
            "CPU:0 [LOST 123 EVENTS]",
            "x-1 [000] ..... 1.5: mm_filemap_fault: dev=7:1",
            "x-1 [000] ..... 1.5: mm_filemap_fault: dev=7:1 ino=zz ofs=0",
            "x-1 [000] ..... 1.5: mm_filemap_get_pages: dev=7:1 ino=1 ofs=9-3",
            "x-1 [000] ..... 1.5: mm_filemap_fault: dev=7:1 ino=1 ofs=18446744073709551615",
            "x-1 [000] ..... 1.5: sched_switch: prev=1",
            "x-y [000] ..... 1.5: mm_filemap_fault: dev=7:1 ino=1 ofs=0",
        ] {
            assert_eq!(parse(line, 4096), None, "{line}");
        }
    }
}
