//! Exports: what is offered, to whom, with which rights, and as whom clients' users act.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use impresario_backend::{Attr, Backend, Caller, Errno, Handle, Kind};
use impresario_base::lock::{Mutex, RwLock};
pub use impresario_config::{AccessRules, Network, Squash};

use crate::handles::export_number;
use crate::protocol::Status;
use crate::rpc::Credential;

/// Directories above one another at most, when it is looked for an export's folder above one.
const DEPTH_MAX: usize = 4096;

/// The rules of an export.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rules {
    /// Who may use it, and as whom; nobody else even sees it.
    pub access: AccessRules,
    /// Clients must call from a port below 1024, which only root gets on most machines.
    pub privileged_ports: bool,
    /// Changes of names and attributes are on stable storage before they are answered.
    pub stable_names: bool,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules { access: AccessRules::default(), privileged_ports: true, stable_names: true }
    }
}

impl Rules {
    /// True when a client at this address and port may use the export.
    pub fn admits(&self, address: IpAddr, port: u16) -> bool {
        (!self.privileged_ports || port < 1024) && self.access.admits(address)
    }

    /// As whom a call is made.
    pub fn caller(&self, credential: &Credential) -> Caller {
        let access = &self.access;
        let Credential::Sys { uid, gid, groups } = credential else {
            return Caller { uid: access.anonymous_uid, gid: access.anonymous_gid, groups: Vec::new() };
        };
        let (uid, gid) = access.acts_as(*uid, *gid);
        Caller { uid, gid, groups: access.groups(groups) }
    }
}

/// Opens a file system again, whose folder was removed and made anew. Asked at most once a second.
pub type Reopen = Box<dyn Fn() -> Result<Arc<dyn Backend>, String> + Send + Sync>;

/// What is to be exported.
pub struct ExportSettings {
    /// The path that clients mount, for example `/data`.
    pub name: String,
    /// The file system.
    pub backend: Arc<dyn Backend>,
    /// The folder of it that is the export's root; empty: its own.
    pub folder: String,
    /// The rules.
    pub rules: Rules,
    /// How to serve what took the folder's place; `None`: it is stale until the server is started again.
    pub reopen: Option<Reopen>,
}

/// An export.
pub struct Export {
    /// The path that clients mount.
    pub name: String,
    /// Its number in handles.
    pub number: u32,
    /// The file system.
    pub backend: Arc<dyn Backend>,
    /// Its lane of the scheduler: exports of one file system share it, those of different ones do not wait for one another.
    pub lane: u16,
    /// The directory that is its root.
    pub root: Handle,
    /// It is below the file system's own.
    pub is_below: bool,
    /// The rules.
    pub rules: Rules,
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Export").field("name", &self.name).field("rules", &self.rules).finish_non_exhaustive()
    }
}

impl Export {
    /// Whether a directory of its file system lies in the export's folder, however it came there.
    pub(crate) fn contains(&self, mut dir: Handle) -> Result<bool, Errno> {
        for _ in 0..DEPTH_MAX {
            if dir == self.root {
                return Ok(true);
            }
            let (above, _) = self.backend.lookup(&server(), &dir, b"..")?;
            if above == dir {
                return Ok(false);
            }
            dir = above;
        }
        Ok(false)
    }
}

/// The user that the server itself is.
pub fn server() -> Caller {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    Caller { uid, gid, groups: Vec::new() }
}

/// All exports. Their names differ.
pub struct Exports(Vec<Slot>);

impl fmt::Debug for Exports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// How long what was found in the place of a root that is no more holds for those who ask next.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

struct Slot {
    number: u32,
    now: RwLock<Arc<Export>>,
    folder: String,
    /// That of the first root: an export stays on it.
    fsid: u64,
    reopen: Option<Reopen>,
    /// Held while it is opened again.
    renewing: Mutex<Renewing>,
}

/// A root that is no more.
#[derive(Default)]
struct Renewing {
    /// When a new one was looked for.
    looked: Option<Instant>,
    /// Why there was none, as the log has it.
    told: Option<String>,
}

impl Exports {
    /// Finds the roots and checks the names.
    pub fn new(settings: Vec<ExportSettings>) -> Result<Exports, String> {
        if settings.is_empty() {
            return Err("there is nothing to export; name a folder with --export, or add an [[nfs.export]]".into());
        }
        let (mut exports, mut file_systems) = (Exports(Vec::new()), Vec::new());
        for ExportSettings { name, backend, folder, rules, reopen } in settings {
            if !name.starts_with('/') || name.len() > 1 && name.ends_with('/') || name.contains("//") {
                return Err(format!("the export {name} needs a name such as /data: a path without a slash at its end"));
            }
            let number = export_number(&name);
            if let Some(other) = exports.by_number(number) {
                return Err(format!("the exports {name} and {} have one name or number; rename one", other.name));
            }
            let (root, attr) = find(&*backend, &folder).map_err(|why| format!("the export {name}: {why}"))?;
            let is_below = backend.root().is_ok_and(|own| own != root);
            let lane = file_systems.iter().position(|known| *known == attr.fsid).unwrap_or(file_systems.len());
            if lane == file_systems.len() {
                file_systems.push(attr.fsid);
            }
            let lane = u16::try_from(lane).ok().filter(|lane| *lane < u16::MAX);
            let lane = lane.ok_or("the exports are of more than 65,535 file systems; let another server offer some")?;
            let now = RwLock::new(Arc::new(Export { name, number, backend, lane, root, is_below, rules }));
            exports.0.push(Slot { number, now, folder, fsid: attr.fsid, reopen, renewing: Mutex::default() });
        }
        Ok(exports)
    }

    /// The export, or the one in its place where its root is no more.
    pub(crate) fn present(&self, export: Arc<Export>) -> Result<Arc<Export>, Status> {
        match export.backend.attr(&export.root) {
            Err(error) if error.0 == libc::ESTALE => return self.renewed(&export),
            // The log tells when it is no more again.
            Ok(_) => {
                let renewing = self.slot(export.number).and_then(|slot| slot.renewing.try_lock());
                renewing.into_iter().for_each(|mut renewing| *renewing = Renewing::default());
            }
            Err(_) => {}
        }
        Ok(export)
    }

    /// The export in the place of one whose root is no more: of the folder that was made anew on the same file system. `NOENT`:
    /// there is none, or was none a moment ago. `JUKEBOX`: another call is looking for it.
    fn renewed(&self, gone: &Arc<Export>) -> Result<Arc<Export>, Status> {
        let slot = self.slot(gone.number).ok_or(Status::NOENT)?;
        let reopen = slot.reopen.as_ref().ok_or(Status::NOENT)?;
        // To open it may take as long as its file system hangs.
        let mut renewing = slot.renewing.try_lock().ok_or(Status::JUKEBOX)?;
        let now = slot.now.read().clone();
        if !Arc::ptr_eq(&now, gone) {
            return Ok(now);
        }
        if renewing.looked.is_some_and(|looked| looked.elapsed() < LOOK_AGAIN) {
            return Err(Status::NOENT);
        }
        let opened = reopen().and_then(|backend| Ok((find(&*backend, &slot.folder)?, backend)));
        // A root is stale, too, whose file system went away below it. What is seen then is the folder below the mount point,
        // which no client may be led to.
        let opened = opened.and_then(|((root, attr), backend)| match attr.fsid == slot.fsid {
            true => Ok((root, backend)),
            false => Err("what is there now is on another file system; restart the server to serve that".into()),
        });
        renewing.looked = Some(Instant::now());
        let (root, backend) = opened.map_err(|why: String| {
            if renewing.told.as_ref() != Some(&why) {
                tracing::warn!(export = gone.name, "its folder is no more, and there is no new one: {why}");
                renewing.told = Some(why);
            }
            Status::NOENT
        })?;
        tracing::warn!(
            export = gone.name,
            "its folder was removed and made anew; clients that have it mounted mount it again"
        );
        let (name, rules) = (gone.name.clone(), gone.rules.clone());
        let export = Arc::new(Export {
            name,
            number: gone.number,
            backend,
            lane: gone.lane,
            root,
            is_below: gone.is_below,
            rules,
        });
        *slot.now.write() = export.clone();
        *renewing = Renewing::default();
        Ok(export)
    }

    /// Number of lanes: one for each file system.
    pub fn lanes(&self) -> u16 {
        self.iter().map(|export| export.lane + 1).max().unwrap_or(1)
    }

    /// In the order of the configuration.
    pub fn iter(&self) -> impl Iterator<Item = Arc<Export>> {
        self.0.iter().map(|slot| slot.now.read().clone())
    }

    /// The export of that number.
    pub fn by_number(&self, number: u32) -> Option<Arc<Export>> {
        self.slot(number).map(|slot| slot.now.read().clone())
    }

    fn slot(&self, number: u32) -> Option<&Slot> {
        self.0.iter().find(|slot| slot.number == number)
    }

    /// The export that a path to mount lies in: the one with the longest name, and the names below it.
    pub fn by_path<'a>(&self, path: &'a str) -> Option<(Arc<Export>, &'a str)> {
        let path = path.trim_end_matches('/');
        let below = |export: &Arc<Export>| {
            let rest = path.strip_prefix(export.name.trim_end_matches('/'))?;
            (rest.is_empty() || rest.starts_with('/')).then_some(rest)
        };
        let found = self.iter().filter_map(|export| below(&export).map(|rest| (export, rest)));
        found.max_by_key(|(export, _)| export.name.len())
    }
}

/// The directory of that path below a file system's root, which must be there.
fn find(backend: &dyn Backend, folder: &str) -> Result<(Handle, Attr), String> {
    let mut at = backend.root().map_err(|error| format!("its file system has no root: {error}"))?;
    for name in folder.split('/').filter(|name| !name.is_empty()) {
        if name == "." || name == ".." {
            return Err(format!("its folder {folder} may not contain {name}"));
        }
        let (node, attr) = backend
            .lookup(&server(), &at, name.as_bytes())
            .map_err(|error| format!("its folder {folder} cannot be found at {name}: {error}"))?;
        if attr.kind != Kind::Directory {
            return Err(format!("its folder {folder} is none: {name} is a {:?}", attr.kind));
        }
        at = node;
    }
    let attr = backend.attr(&at).map_err(|error| format!("its root is unknown: {error}"))?;
    Ok((at, attr))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::testing::MemoryTree;

    #[test]
    fn users_are_squashed_as_the_rules_say() {
        let sys = |uid, gid, groups: &[u32]| Credential::Sys { uid, gid, groups: groups.to_vec() };
        let rules = |squash| Rules { access: AccessRules { squash, ..AccessRules::default() }, ..Rules::default() };
        let caller = |uid, gid, groups: &[u32]| Caller { uid, gid, groups: groups.to_vec() };
        let nobody = caller(65534, 65534, &[]);
        assert_eq!(rules(Squash::Root).caller(&sys(0, 0, &[0, 4])), caller(65534, 65534, &[4]));
        assert_eq!(rules(Squash::Root).caller(&sys(7, 0, &[])), caller(7, 65534, &[]));
        assert_eq!(rules(Squash::Root).caller(&sys(7, 8, &[9])), caller(7, 8, &[9]));
        assert_eq!(rules(Squash::All).caller(&sys(7, 8, &[9])), nobody);
        assert_eq!(rules(Squash::None).caller(&sys(0, 0, &[0])), caller(0, 0, &[0]));
        assert_eq!(rules(Squash::None).caller(&Credential::None), nobody);
    }

    #[test]
    fn paths_to_mount_are_found_in_the_deepest_export() {
        let backend = MemoryTree::new();
        let export = |name: &str| ExportSettings {
            name: name.into(),
            backend: backend.clone(),
            folder: String::new(),
            rules: Rules::default(),
            reopen: None,
        };
        let exports = Exports::new(vec![export("/a"), export("/a/b"), export("/")]).unwrap();
        let found = |path| exports.by_path(path).map(|(export, rest)| (export.name.clone(), rest));
        assert_eq!(found("/a/c"), Some(("/a".into(), "/c")));
        assert_eq!(found("/a/b"), Some(("/a/b".into(), "")));
        assert_eq!(found("/a/b/"), Some(("/a/b".into(), "")));
        assert_eq!(found("/ab"), Some(("/".into(), "/ab")));
        assert!(Exports::new(vec![export("/a"), export("/a")]).unwrap_err().contains("rename"));
        assert!(Exports::new(vec![export("a")]).is_err() && Exports::new(vec![]).is_err());
        let lost = ExportSettings { folder: "x/y".into(), ..export("/a") };
        assert!(Exports::new(vec![lost]).unwrap_err().contains("x/y"));
    }

    /// An export whose folder is in the memory of a tree, and how often it was opened again.
    fn reopened(
        open: impl Fn() -> Result<Arc<MemoryTree>, String> + Send + Sync + 'static,
    ) -> (Exports, Arc<AtomicU32>) {
        let opened = Arc::new(AtomicU32::new(0));
        let count = opened.clone();
        let reopen: Reopen = Box::new(move || {
            count.fetch_add(1, Ordering::SeqCst);
            open().map(|tree| tree as Arc<dyn Backend>)
        });
        let (backend, rules) = (MemoryTree::new(), Rules::default());
        let export = ExportSettings { name: "/a".into(), backend, folder: String::new(), rules, reopen: Some(reopen) };
        (Exports::new(vec![export]).unwrap(), opened)
    }

    #[test]
    fn a_folder_that_was_made_anew_takes_the_place_of_the_former() {
        let (exports, opened) = reopened(|| Ok(MemoryTree::new()));
        let gone = exports.iter().next().unwrap();
        let new = exports.renewed(&gone).unwrap();
        assert!(!Arc::ptr_eq(&new, &gone) && Arc::ptr_eq(&new, &exports.by_number(gone.number).unwrap()));
        assert!(Arc::ptr_eq(&new, &exports.renewed(&gone).unwrap()), "for those who saw the former one");
        assert_eq!(opened.load(Ordering::SeqCst), 1);
    }

    /// Such as the one below a mount point.
    #[test]
    fn what_is_on_another_file_system_takes_no_place() {
        let (exports, _) = reopened(|| Ok(MemoryTree::on_another_device()));
        let gone = exports.iter().next().unwrap();
        assert_eq!(exports.renewed(&gone).unwrap_err(), Status::NOENT);
        assert!(Arc::ptr_eq(&gone, &exports.by_number(gone.number).unwrap()));
        assert!(exports.0[0].renewing.lock().told.as_ref().unwrap().contains("restart the server"));
    }

    #[test]
    fn a_missing_folder_is_looked_for_once_a_second_at_most() {
        let (exports, opened) = reopened(|| Err("it is not there".into()));
        let (gone, began) = (exports.iter().next().unwrap(), Instant::now());
        for _ in 0..1000 {
            assert_eq!(exports.renewed(&gone).unwrap_err(), Status::NOENT);
        }
        let seconds = began.elapsed().as_secs_f64() / LOOK_AGAIN.as_secs_f64();
        assert!(f64::from(opened.load(Ordering::SeqCst)) <= 1.0 + seconds, "{opened:?} in {seconds} s");
    }

    #[test]
    fn nobody_waits_behind_a_file_system_that_hangs() {
        let (entered, on) = std::sync::mpsc::channel();
        let (go, may_go) = std::sync::mpsc::channel::<()>();
        let (entered, may_go) = (Mutex::new(entered), Mutex::new(may_go));
        let (exports, opened) = reopened(move || {
            entered.lock().send(()).unwrap();
            // Until the other end is gone.
            let _ = may_go.lock().recv();
            Ok(MemoryTree::new())
        });
        let gone = exports.iter().next().unwrap();
        std::thread::scope(|threads| {
            let hanging = threads.spawn(|| exports.renewed(&gone).map(|new| new.number));
            on.recv().unwrap();
            let other = threads.spawn(|| exports.renewed(&gone).map(|new| new.number));
            let began = Instant::now();
            while !other.is_finished() && began.elapsed() < Duration::from_secs(20) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let waits = !other.is_finished();
            drop(go);
            assert!(!waits, "behind one that hangs");
            assert_eq!(other.join().unwrap(), Err(Status::JUKEBOX));
            assert_eq!(hanging.join().unwrap(), Ok(gone.number));
        });
        assert_eq!(opened.load(Ordering::SeqCst), 1);
    }
}
