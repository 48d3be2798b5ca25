//! Where a path of the program leads: into the cluster, or elsewhere.
//!
//! The prefix is looked for in the words of the path; a symbolic link of the machine that leads to the prefix is not
//! followed. Inside, `..` and links are the agent's to follow. A relative path begins at an open directory of the cluster
//! or at the working directory, which for a directory of the cluster is a folder of the agent that has its path.

use std::ffi::CStr;

use impresario_ring::patterns::Kind;

use super::protocol::{Op, PATH_MAX, Request};
use super::{Run, Served};

/// Room for a path and the zero at its end.
pub struct Room {
    bytes: [u8; PATH_MAX + 1],
    len: usize,
}

impl Default for Room {
    fn default() -> Self {
        Room::new()
    }
}

impl Room {
    /// An empty path.
    #[inline]
    pub fn new() -> Room {
        Room { bytes: [0; PATH_MAX + 1], len: 0 }
    }

    /// The path.
    pub fn path(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or(&[])
    }

    /// The path for the C library.
    pub fn c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or(c"")
    }

    /// Takes another path.
    pub fn set(&mut self, path: &[u8]) -> Result<(), i32> {
        self.len = 0;
        self.add(path)
    }

    /// Appends.
    pub fn add(&mut self, more: &[u8]) -> Result<(), i32> {
        let end = self.len + more.len();
        if end >= PATH_MAX {
            return Err(libc::ENAMETOOLONG);
        }
        self.bytes[self.len..end].copy_from_slice(more);
        self.bytes[end] = 0;
        self.len = end;
        Ok(())
    }

    fn cut(&mut self, len: usize) {
        self.len = len.min(self.len);
        self.bytes[self.len] = 0;
    }

    /// Takes the words of a path one by one: `.` and empty ones are left out, `..` removes the one before.
    fn walk(&mut self, path: &[u8]) -> Result<(), i32> {
        for word in path.split(|b| *b == b'/') {
            self.step(word)?;
        }
        Ok(())
    }

    /// Goes up by the `..` at the beginning of a path, at most to the root; returns the rest of the path.
    fn ascend<'a>(&mut self, mut path: &'a [u8]) -> &'a [u8] {
        while self.len > 0 {
            let Some(rest) = path.strip_prefix(b"..").filter(|rest| rest.is_empty() || rest.starts_with(b"/")) else {
                break;
            };
            path = rest.get(rest.iter().take_while(|byte| **byte == b'/').count()..).unwrap_or(&[]);
            let parent = self.path().iter().rposition(|byte| *byte == b'/').unwrap_or(0);
            self.cut(parent);
        }
        path
    }

    fn step(&mut self, word: &[u8]) -> Result<(), i32> {
        match word {
            b"" | b"." => Ok(()),
            b".." => {
                let parent = self.path().iter().rposition(|b| *b == b'/').unwrap_or(0);
                self.cut(parent);
                Ok(())
            }
            word => {
                self.add(b"/")?;
                self.add(word)
            }
        }
    }
}

/// Where a path leads. The path itself is in the [`Room`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Elsewhere, as the program said it.
    Foreign,
    /// Elsewhere, by the absolute path in the room: the program's began in the cluster.
    Outside,
    /// Into the cluster, by the path in the room from its root.
    Inside,
}

impl Served {
    /// Where `path` leads that begins at `dir` (as for `openat`). The error is an errno.
    pub fn place(&self, dir: i32, mut path: &[u8], room: &mut Room) -> Result<Route, i32> {
        let Some(run) = self.run() else { return Ok(Route::Foreign) };
        if path.is_empty() {
            return Ok(Route::Foreign);
        }
        room.cut(0);
        if path.starts_with(b"/") {
            return run.absolute(path, room);
        }
        // Where the path begins: from the root of the cluster, or on the machine above the prefix.
        let mut begin = [0u8; PATH_MAX];
        if dir == libc::AT_FDCWD {
            let Some(now) = current_or_gone(&mut begin) else { return Ok(Route::Foreign) };
            let Some(below) = below(now, &run.directories) else { return run.beginning_at(now, path, room) };
            room.set(below)?;
            // That path has no links, and what it leads to may be gone.
            path = room.ascend(path);
        } else {
            let Some(open) = self.open_file(dir) else {
                let Some(now) = of_descriptor(dir, &mut begin) else { return Ok(Route::Foreign) };
                return run.beginning_at(now, path, room);
            };
            self.path_of(open, room)?;
        }
        room.add(b"/")?;
        room.add(path)?;
        run.inside(room)
    }

    /// The path of an open file, from the root of the cluster.
    pub fn path_of(&self, open: u64, room: &mut Room) -> Result<(), i32> {
        let mut path = [0; PATH_MAX];
        let got = self.call(Request { open, ..Request::new(Op::PathOf) }, b"", b"", b"", &mut path)?;
        room.set(path.get(..got.len).unwrap_or(&[]))
    }

    /// The program's working directory from the root of the cluster; false when it is elsewhere.
    pub fn working_directory(&self, room: &mut Room) -> Result<bool, i32> {
        let Some(run) = self.run() else { return Ok(false) };
        let mut bytes = [0u8; PATH_MAX];
        let Some(now) = current(&mut bytes) else { return Ok(false) };
        let Some(path) = below(now, &run.directories) else { return Ok(false) };
        room.set(path)?;
        Ok(true)
    }

    /// The path under which the program knows one of the cluster.
    pub fn name_of(&self, inside: &[u8], room: &mut Room) -> Result<(), i32> {
        let Some(run) = self.run() else { return Err(libc::ENOENT) };
        room.set(&run.at)?;
        if inside.iter().all(|b| *b == b'/') { Ok(()) } else { room.add(inside) }
    }
}

/// The kernel's working directory.
fn current(bytes: &mut [u8; PATH_MAX]) -> Option<&[u8]> {
    // SAFETY: the kernel writes a path of at most that length and a zero into the place.
    let len = unsafe { libc::syscall(libc::SYS_getcwd, bytes.as_mut_ptr(), bytes.len()) };
    bytes.get(..usize::try_from(len).ok()?.checked_sub(1)?)
}

/// The same, also of one that was removed. The kernel marks its path, so that it leads nowhere, and what is above it is right.
fn current_or_gone(bytes: &mut [u8; PATH_MAX]) -> Option<&[u8]> {
    let len = current(bytes).map(<[u8]>::len);
    match len {
        Some(len) => bytes.get(..len),
        None => link(c"/proc/self/cwd", bytes),
    }
}

/// The path of a descriptor of the machine.
fn of_descriptor(fd: i32, bytes: &mut [u8; PATH_MAX]) -> Option<&[u8]> {
    link(crate::paths::ProcName::new(fd).as_c_str(), bytes)
}

/// What a symbolic link says.
fn link<'a>(path: &CStr, bytes: &'a mut [u8; PATH_MAX]) -> Option<&'a [u8]> {
    let (path, room) = (path.as_ptr(), bytes.len());
    // SAFETY: the kernel writes at most that many bytes into the place.
    let len = unsafe { libc::syscall(libc::SYS_readlinkat, libc::AT_FDCWD, path, bytes.as_mut_ptr(), room) };
    bytes.get(..usize::try_from(len).ok()?)
}

/// What is behind `prefix` in `path`, empty or with a slash before it.
fn below<'a>(path: &'a [u8], prefix: &[u8]) -> Option<&'a [u8]> {
    path.strip_prefix(prefix).filter(|rest| rest.is_empty() || rest.starts_with(b"/"))
}

impl Run {
    /// An absolute path: inside as soon as its words lead to the prefix.
    fn absolute(&self, path: &[u8], room: &mut Room) -> Result<Route, i32> {
        let mut rest = path;
        loop {
            if room.path() == &self.at[..] {
                room.set(rest)?;
                return self.inside(room);
            }
            let from = rest.iter().position(|b| *b != b'/').unwrap_or(rest.len());
            let word = &rest[from..];
            if word.is_empty() {
                return Ok(Route::Foreign);
            }
            let end = word.iter().position(|b| *b == b'/').unwrap_or(word.len());
            if room.step(&word[..end]).is_err() {
                return Ok(Route::Foreign);
            }
            rest = &word[end..];
        }
    }

    /// A path that begins at a directory of the machine, above the prefix perhaps.
    fn beginning_at(&self, begin: &[u8], path: &[u8], room: &mut Room) -> Result<Route, i32> {
        let mut whole = Room::new();
        if !begin.starts_with(b"/") || [begin, b"/", path].iter().any(|part| whole.add(part).is_err()) {
            return Ok(Route::Foreign);
        }
        // Where it only passes through the prefix, it is the machine's as it is: the prefix is not there.
        self.absolute(whole.path(), room)
    }

    /// The room holds a path from the root of the cluster, which may leave it again by `..`.
    fn inside(&self, room: &mut Room) -> Result<Route, i32> {
        let mut depth = 0i32;
        let mut leaves = false;
        for word in room.path().split(|b| *b == b'/') {
            match word {
                b"" | b"." => {}
                b".." => depth -= 1,
                _ => depth += 1,
            }
            leaves |= depth < 0;
        }
        if !leaves && self.bypass.is_empty() {
            return Ok(Route::Inside);
        }
        let mut whole = Room::new();
        whole.set(&self.at)?;
        whole.walk(room.path())?;
        let rest = below(whole.path(), &self.at);
        let is_passed = self.bypass.iter().any(|pattern| Kind::Glob.matches(pattern, whole.path()));
        match rest {
            Some(rest) if !is_passed => {
                if leaves {
                    room.set(rest)?;
                }
                Ok(Route::Inside)
            }
            _ => {
                room.set(if whole.path().is_empty() { b"/" } else { whole.path() })?;
                Ok(Route::Outside)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served(bypass: &[u8]) -> Served {
        let served = Served::new();
        served.start(b"/nowhere", b"/data/x", b"0123456789abcdef", bypass);
        served
    }

    #[track_caller]
    fn check(served: &Served, path: &str, place: Route, is: &str) {
        let mut room = Room::new();
        assert_eq!(served.place(libc::AT_FDCWD, path.as_bytes(), &mut room), Ok(place), "{path}");
        if place != Route::Foreign {
            assert_eq!(String::from_utf8_lossy(room.path()), is, "{path}");
        }
    }

    #[test]
    fn paths_below_the_prefix_are_inside() {
        let served = served(b"");
        check(&served, "/data/x", Route::Inside, "");
        check(&served, "/data/x/", Route::Inside, "/");
        check(&served, "//data/./y/../x//a/b", Route::Inside, "//a/b");
        check(&served, "/data/x/a/../b", Route::Inside, "/a/../b");
        check(&served, "/data/x/../x/b", Route::Inside, "/b");
        for foreign in ["/", "/data", "/data/xy", "/data/y/x", "relative", "", "/../data/y"] {
            check(&served, foreign, Route::Foreign, "");
        }
    }

    #[test]
    fn a_path_that_leaves_the_prefix_is_outside() {
        let served = served(b"");
        check(&served, "/data/x/..", Route::Outside, "/data");
        check(&served, "/data/x/../../etc/passwd", Route::Outside, "/etc/passwd");
        check(&served, "/data/x/a/../../..", Route::Outside, "/");
    }

    #[test]
    fn a_relative_path_may_lead_to_the_prefix() {
        use std::os::fd::AsRawFd;
        let served = served(b"");
        let root = std::fs::File::open("/").unwrap();
        let mut room = Room::new();
        let mut at = |path: &str| {
            served.place(root.as_raw_fd(), path.as_bytes(), &mut room).map(|place| (place, room.path().to_vec()))
        };
        assert_eq!(at("data/x/a"), Ok((Route::Inside, b"/a".to_vec())));
        assert_eq!(at("../data//x"), Ok((Route::Inside, b"".to_vec())));
        assert_eq!(at("data/y").map(|found| found.0), Ok(Route::Foreign));
    }

    #[test]
    fn bypassed_paths_are_left_to_the_machine() {
        let served = served(b"/data/x/local/*\n/data/x/*.lock");
        check(&served, "/data/x/local/a", Route::Outside, "/data/x/local/a");
        check(&served, "/data/x/b/../local/a", Route::Outside, "/data/x/local/a");
        check(&served, "/data/x/a.lock", Route::Outside, "/data/x/a.lock");
        check(&served, "/data/x/other", Route::Inside, "/other");
    }

    #[test]
    fn paths_go_up_from_where_they_begin() {
        let up = |begin: &str, path: &str| {
            let mut room = Room::new();
            room.set(begin.as_bytes()).unwrap();
            let rest = room.ascend(path.as_bytes()).to_vec();
            (String::from_utf8(room.path().to_vec()).unwrap(), String::from_utf8(rest).unwrap())
        };
        let told = |path: &str, rest: &str| (path.to_string(), rest.to_string());
        assert_eq!(up("/a/b", "../../c"), told("", "c"));
        assert_eq!(up("/a/b", "..//x/../y"), told("/a", "x/../y"));
        assert_eq!(up("/a", ".."), told("", ""));
        assert_eq!(up("/a", "../../x"), told("", "../x"), "out of the cluster");
        assert_eq!(up("/a/b", "..x"), told("/a/b", "..x"));
        assert_eq!(up("/a/b", "./.."), told("/a/b", "./.."));
    }

    #[test]
    fn a_path_that_is_too_long_is_refused() {
        let served = served(b"");
        let path = format!("/data/x/{}", "a/".repeat(PATH_MAX / 2));
        let mut room = Room::new();
        assert_eq!(served.place(libc::AT_FDCWD, path.as_bytes(), &mut room), Err(libc::ENAMETOOLONG));
        let path = format!("/{}", "a/".repeat(PATH_MAX));
        assert_eq!(served.place(libc::AT_FDCWD, path.as_bytes(), &mut room), Ok(Route::Foreign));
    }
}
