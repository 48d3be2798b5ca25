//! How names come into being: files, folders and symbolic links appear whole or not at all; and how new files
//! are striped.
//!
//! A file is born as its own mark, `writers/<key>`: its record, owner and mode are set there, then it is linked
//! into place. So it has a record before it has a name, and its first writer needs no further mark; cut short,
//! it is found in `writers/` without a name. Folders and links are made in `staging/` and renamed into place.

use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use impresario_layout::Layout;
use impresario_wire::message::{Attr, LayoutRequest, Opened, Time};
use rustix::fs::Mode;
use rustix::io::Errno;

use super::disk::PLACE_FLAGS;
use super::fault::{Explain, Outcome, fault, show};
use super::home::key_name;
use super::opens::{Found, OpenFile, Pin, Session};
use super::record::{FILE_ATTRIBUTE, LAYOUT_ATTRIBUTE, Record, WISH_BYTES, decode_wish, encode_wish};
use super::removal::TRIES;
use super::service::Meta;
use super::tree::{Place, local_attr};

const SETGID: u32 = 0o2000;
/// Longest text of a symbolic link, bytes.
const LINK_MAX_BYTES: usize = 4095;

impl Meta {
    /// Makes a file and opens it for writing; `owned` are mode, uid and gid.
    pub(super) fn create(
        &self,
        session: &Session,
        path: &[u8],
        owned: [u32; 3],
        exclusive: bool,
        wish: Option<LayoutRequest>,
    ) -> Outcome<Opened> {
        session.check_room()?;
        let doing = "create";
        let root = if exclusive { Errno::EXIST } else { Errno::ISDIR };
        let place = self.home.place(path).and_then(|place| place.ok_or(root)).explain(doing, path)?;
        for _ in 0..TRIES {
            match place.stat() {
                Ok(_) if exclusive => return Err(Errno::EXIST).explain(doing, path),
                Ok(_) => match self.pin_at(&place, "open") {
                    Err(gone) if gone.errno == Errno::NOENT.raw_os_error() => continue,
                    pin => return self.open_pinned(session, pin?, true, path),
                },
                Err(Errno::NOENT) => {}
                Err(errno) => return Err(errno).explain(doing, path),
            }
            let layout = self.layout_for(&place, wish)?;
            match self.make_file(&place, layout, owned)? {
                Some(pin) => return self.hand_out(session, pin, true, true, path),
                None if exclusive => return Err(Errno::EXIST).explain(doing, path),
                None => {}
            }
        }
        Err(Errno::BUSY).explain(doing, path)
    }

    /// A new file with one writer; none when the name was taken meanwhile.
    fn make_file(&self, place: &Place<'_>, layout: Layout, owned: [u32; 3]) -> Outcome<Option<Pin<'_>>> {
        let doing = "create";
        let (disk, writers) = (&self.home.disk, &self.home.writers);
        let key = self.home.new_key().explain(doing, place.path)?;
        let name = key_name(key);
        let fd = disk.make_file(writers, &name).explain(doing, place.path)?;
        let record = Record { key, layout, seen: Time::default() };
        let dressed = disk
            .set_attribute(&fd, FILE_ATTRIBUTE, &record.encode())
            .and_then(|()| self.dress(&fd, place, owned, 0))
            .and_then(|()| rustix::fs::fstat(&fd));
        let undo = |errno| {
            let _ = disk.unlink(writers, name.as_bytes());
            Err(errno)
        };
        let ino = dressed.or_else(undo).explain(doing, place.path)?.st_ino;
        let file = OpenFile {
            ino,
            key,
            layout,
            fd,
            gate: Mutex::default(),
            links: Mutex::default(),
            seen: Mutex::new(record.seen),
        };
        // In the table, marked and with its writer before anybody can find it.
        self.opens.set_mark(ino, key);
        let pin = match self.bring(file, place.path, false) {
            Found::Pinned(pin) => pin,
            Found::Removed | Found::Absent => return Err(Errno::BUSY).explain(doing, place.path),
        };
        let admitted = self.opens.admit(ino, true);
        let linked = match admitted {
            Ok(()) => disk.link(writers, name.as_bytes(), place.folder(), place.name),
            Err(full) => {
                let _ = disk.unlink(writers, name.as_bytes());
                self.opens.clear_mark(ino);
                return Err(full);
            }
        };
        if let Err(errno) = linked {
            self.opens.leave(ino, true, false);
            disk.unlink(writers, name.as_bytes()).explain("undo the creation of", place.path)?;
            self.opens.clear_mark(ino);
            return if errno == Errno::EXIST { Ok(None) } else { Err(errno).explain(doing, place.path) };
        }
        Ok(Some(pin))
    }

    /// Gives a new node its owner and mode. `extra`: mode bits it gets in a folder that hands on its group.
    fn dress(&self, node: &OwnedFd, place: &Place<'_>, owned: [u32; 3], extra: u32) -> rustix::io::Result<()> {
        let [mode, uid, gid] = owned;
        let folder = rustix::fs::fstat(place.folder())?;
        let inherits = folder.st_mode & SETGID != 0;
        // Without root's rights everything belongs to the user that the server runs as.
        if self.home.disk.root {
            let gid = if inherits { folder.st_gid } else { gid };
            self.home.disk.set_owner(node, Some(uid), Some(gid))?;
        }
        self.home.disk.set_mode(node, if inherits { mode | extra } else { mode })
    }

    /// Makes a folder; it stripes as its parent does.
    pub(super) fn mkdir(&self, path: &[u8], mode: u32, uid: u32, gid: u32) -> Outcome<Attr> {
        let doing = "make the folder";
        let place = self.home.place(path).and_then(|place| place.ok_or(Errno::EXIST)).explain(doing, path)?;
        let wish = self.wish_of(&place)?;
        let (disk, staging, name) = (&self.home.disk, &self.home.staging, self.staging_name());
        let made = disk.make_dir(staging, &name).and_then(|()| {
            let dressed = disk.open_dir_in(staging, &name).and_then(|node| {
                if let Some(wish) = wish {
                    disk.set_attribute(&node, LAYOUT_ATTRIBUTE, &encode_wish(&wish))?;
                }
                self.dress(&node, &place, [mode, uid, gid], SETGID)?;
                disk.rename(staging, name.as_bytes(), place.folder(), place.name, true)?;
                local_attr(&rustix::fs::fstat(&node)?)
            });
            dressed.inspect_err(|_| {
                let _ = disk.remove_dir(staging, name.as_bytes());
            })
        });
        made.explain(doing, path)
    }

    /// Makes a symbolic link.
    pub(super) fn symlink(&self, path: &[u8], target: &[u8], uid: u32, gid: u32) -> Outcome<Attr> {
        let doing = "make the link";
        let wrong = match target {
            [] => Some((Errno::NOENT, "is empty")),
            _ if target.len() > LINK_MAX_BYTES => Some((Errno::NAMETOOLONG, "is longer than 4095 bytes")),
            _ if target.contains(&0) => Some((Errno::INVAL, "has a NUL byte")),
            _ => None,
        };
        if let Some((errno, wrong)) = wrong {
            return Err(fault(errno, format!("cannot {doing} {}: what it should say {wrong}", show(path))));
        }
        let place = self.home.place(path).and_then(|place| place.ok_or(Errno::EXIST)).explain(doing, path)?;
        let (disk, staging, name) = (&self.home.disk, &self.home.staging, self.staging_name());
        let made = disk.make_symlink(target, staging, &name).and_then(|()| {
            let dressed = rustix::fs::openat(staging, &name, PLACE_FLAGS, Mode::empty()).and_then(|node| {
                if disk.root {
                    let folder = rustix::fs::fstat(place.folder())?;
                    let gid = if folder.st_mode & SETGID != 0 { folder.st_gid } else { gid };
                    disk.set_owner(&node, Some(uid), Some(gid))?;
                }
                disk.rename(staging, name.as_bytes(), place.folder(), place.name, true)?;
                local_attr(&rustix::fs::fstat(&node)?)
            });
            dressed.inspect_err(|_| {
                let _ = disk.unlink(staging, name.as_bytes());
            })
        });
        made.explain(doing, path)
    }

    fn staging_name(&self) -> String {
        format!("{:x}", self.staged.fetch_add(1, Ordering::Relaxed))
    }

    /// How a file made at a place is striped: as asked, else as its folder says, else as the cluster does.
    fn layout_for(&self, place: &Place<'_>, asked: Option<LayoutRequest>) -> Outcome<Layout> {
        let folder = self.wish_of(place)?.unwrap_or_default();
        let asked = asked.unwrap_or_default();
        let wish = LayoutRequest {
            base: asked.base.or(folder.base),
            pcount: asked.pcount.or(folder.pcount),
            ssize_bytes: asked.ssize_bytes.or(folder.ssize_bytes),
        };
        self.resolve(&wish, || self.dealt.fetch_add(1, Ordering::Relaxed), place.path)
    }

    fn resolve(&self, wish: &LayoutRequest, deal: impl FnOnce() -> u64, path: &[u8]) -> Outcome<Layout> {
        let options = &self.options;
        let base = wish.base.unwrap_or_else(|| (deal() % u64::from(options.data_servers.max(1))) as u16);
        let pcount = wish.pcount.unwrap_or(options.stripe_count);
        let ssize_bytes = wish.ssize_bytes.unwrap_or(options.stripe_bytes);
        Layout::new(base, pcount, ssize_bytes, options.data_servers)
            .map_err(|error| fault(Errno::INVAL, format!("cannot stripe {}: {error}", show(path))))
    }

    /// What the folder of a place wishes for new files.
    fn wish_of(&self, place: &Place<'_>) -> Outcome<Option<LayoutRequest>> {
        let mut bytes = [0; 2 * WISH_BYTES];
        let len = match self.home.disk.attribute(place.folder(), LAYOUT_ATTRIBUTE, &mut bytes) {
            Err(Errno::NODATA) => return Ok(None),
            Err(Errno::RANGE) => 0,
            other => other.explain("read the striping of the folder of", place.path)?,
        };
        bytes.get(..len).and_then(decode_wish).map(Some).ok_or_else(|| {
            let why = "its folder's record of striping is none that this program understands; set it anew";
            fault(Errno::IO, format!("cannot stripe {}: {why}", show(place.path)))
        })
    }

    /// Says how files made in a folder are striped.
    pub(super) fn set_layout(&self, path: &[u8], wish: Option<LayoutRequest>) -> Outcome<()> {
        let doing = "set the striping of";
        let folder = self.home.open_folder(path).explain(doing, path)?;
        match wish {
            None => self.home.disk.remove_attribute(&folder, LAYOUT_ATTRIBUTE).explain(doing, path),
            Some(wish) => {
                self.resolve(&wish, || 0, path)?;
                self.home.disk.set_attribute(&folder, LAYOUT_ATTRIBUTE, &encode_wish(&wish)).explain(doing, path)
            }
        }
    }
}
