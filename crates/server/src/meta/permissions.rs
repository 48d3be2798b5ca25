//! What a session whose users act as others may do with names and files: the permissions that a local file system checks, here
//! for clients whose own kernel is not believed.
//!
//! Calls do not say which user of a client's machine asks: the machine vouches for its users, except for those that are
//! squashed. So with root squashed a call is permitted if *some* user other than root may do it, and with all squashed if the
//! anonymous user may. What root alone may do, such a machine cannot do, whatever it sends. A client that has proved to be a user
//! is one all of whose users are that one. Where users prove themselves, a client of root has each of its users prove itself, and
//! says with each call which of them asks ([`Users::Each`]).
//!
//! Permissions are checked on the nodes that a path leads to. So that the same nodes are changed, no name is moved between the
//! check and the change ([`Meta::hold_names`]). Nobody waits for data servers meanwhile: moves would wait for that, and all changes
//! for the moves. So what is opened, made, cut, listed or looked at, or whose attributes or striping change, holds names at most while its path is walked
//! ([`Meta::entry_for`]): the file is checked itself when it is found, and the directory of a new one where it is made. What is asked
//! for by a handle needs no hold.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use impresario_base::generations::Generations;
use impresario_base::lock::{Mutex, RwLockReadGuard, RwLockWriteGuard};
use impresario_node::acl::Acl;
use impresario_transport::Proven;
use impresario_wire::message::{
    ACL_ACCESS, MetaCall, NodeKind, Opened, Restriction, SetAttr, SetTime, Squashed, Target,
};
use rustix::fs::FileType;
use rustix::io::Errno;

use super::disk::PATH_FLAGS;
use super::fault::{Explain, Outcome, fault, show};
use super::labels::{SECURITY, is_acl};
use super::opens::{Pin, Session};
use super::service::Meta;
use super::tree::{EntryRef, kind_of, split};

const READ: u32 = 4;
const WRITE: u32 = 2;
const SEARCH: u32 = 1;
const STICKY: u32 = 0o1000;
const SET_ID: u32 = 0o6000;
/// What a change of a list does, for messages.
pub(super) const ACL_CHANGE: &str = "change the access control list of";
/// The same of a directory's striping.
pub(super) const LAYOUT_CHANGE: &str = "lay out";
/// What a program may do that root may.
const CAPABILITY: &[u8] = b"security.capability";
/// Users of a session that are known at least; with older ones there are at most twice as many.
const USERS_MAX: usize = 4096;
/// How long a user is known: changes of its groups count after that.
const PROVEN_FOR: Duration = Duration::from_secs(600);
/// The group of users of whom no other is known.
const NOBODYS_GROUP: u32 = 65534;
/// Most groups of a user that count.
const GROUPS_MAX: usize = 1024;

/// Keeps names where they are, or others from looking at them.
pub(super) enum NamesHeld<'a> {
    /// Not at all.
    No,
    /// Nothing is moved.
    Still(#[allow(dead_code, reason = "held")] RwLockReadGuard<'a, ()>),
    /// Only the holder moves something.
    Moving(#[allow(dead_code, reason = "held")] RwLockWriteGuard<'a, ()>),
}

/// As whom the users of a session act.
#[derive(Clone, Debug)]
pub(super) struct User {
    /// All act as this user; otherwise root alone.
    all: bool,
    /// It has proved to be this user.
    proven: bool,
    uid: u32,
    gid: u32,
    /// Further groups of the user.
    groups: Vec<u32>,
}

impl From<Squashed> for User {
    /// Asks the machine for a user's groups, which may take long.
    fn from(squashed: Squashed) -> User {
        let Squashed { all, proven, uid, gid } = squashed;
        let groups = if proven { account_of(uid).map(|account| account.groups_with(gid)) } else { None };
        User { all, proven, uid, gid, groups: groups.unwrap_or_default() }
    }
}

/// Who asks for a change of attributes; and where it does so by an open file, whether that is open for writing.
pub(super) type Asker<'a> = (&'a User, Option<bool>);

/// What the users of a session are.
pub(super) enum Users {
    /// All of them, or root alone, act as this one.
    One(Arc<User>),
    /// Each proves itself.
    Each(Each),
}

/// The users of a session who have proved themselves.
pub(super) struct Each {
    /// As whom root acts; `None`: as root.
    root: Option<Arc<User>>,
    rule: Restriction,
    known: Mutex<Generations<u32, (Arc<User>, Instant)>>,
}

impl From<Restriction> for Users {
    fn from(rule: Restriction) -> Users {
        let squashed = rule.squashed.map(|squashed| Arc::new(User::from(squashed)));
        match (squashed, rule.proves) {
            (Some(user), false) => Users::One(user),
            (root, _) => Users::Each(Each { root, rule, known: Mutex::new(Generations::new(USERS_MAX)) }),
        }
    }
}

impl Users {
    /// As whom a call is served; `None`: as root.
    pub(super) fn of(&self, uid: u32, call: &MetaCall) -> Outcome<Option<Arc<User>>> {
        let each = match self {
            Users::One(user) => return Ok(Some(user.clone())),
            // Whoever has a file open may do these with it.
            Users::Each(_) if !depends_on_user(call) => return Ok(None),
            Users::Each(each) if uid == 0 => return Ok(each.root.clone()),
            Users::Each(each) => each,
        };
        let mut known = each.known.lock();
        match known.get(&uid) {
            Some((user, proved)) if proved.elapsed() < PROVEN_FOR => Ok(Some(user.clone())),
            _ => {
                let message = format!("user {uid} has to prove who it is (`users` of its [[export]])");
                Err(impresario_wire::Fault { errno: impresario_wire::Fault::UNPROVEN, message })
            }
        }
    }
}

/// Whether it matters for whom a call is made, beyond that its client has opened a file.
fn depends_on_user(call: &MetaCall) -> bool {
    !matches!(
        call,
        MetaCall::Prove { .. }
            | MetaCall::Close { .. }
            | MetaCall::Fsync { .. }
            | MetaCall::Append { .. }
            | MetaCall::CutBack { .. }
            | MetaCall::Lock(_)
            | MetaCall::Statfs
    )
}

impl User {
    /// A user for whom root of another machine vouches. Of its groups those count that this machine knows; the group that was
    /// claimed, if it is one of them. Asks the machine, which may take long.
    fn vouched_for(Proven { uid, gid }: Proven) -> User {
        let (gid, groups) = match account_of(uid) {
            Some(account) => {
                let groups = account.groups_with(account.gid);
                (if groups.contains(&gid) { gid } else { account.gid }, groups)
            }
            // Root's group is squashed like root.
            None => (if gid == 0 { NOBODYS_GROUP } else { gid }, Vec::new()),
        };
        User { all: true, proven: true, uid, gid, groups }
    }

    /// Whether it may be a group of theirs.
    fn may_be_in(&self, gid: u32) -> bool {
        if self.all { gid == self.gid || self.groups.contains(&gid) } else { gid != 0 }
    }
}

/// Who owns a node, and what others may do with it.
struct Owned {
    uid: u32,
    gid: u32,
    /// With its kind.
    mode: u32,
    /// What its mode says, or more.
    acl: Acl,
}

/// Whether it is a node of theirs.
fn owns(user: &User, node: &Owned) -> bool {
    if user.all { node.uid == user.uid } else { node.uid != 0 }
}

/// Whether they may read, write or search it. Who owns a node may give themselves the right.
fn may(user: &User, node: &Owned, wanted: u32) -> bool {
    if owns(user, node) {
        return true;
    }
    let owner = (node.uid, node.gid);
    if user.all {
        return node.acl.permits(owner, |uid| uid == user.uid, |gid| user.may_be_in(gid), wanted);
    }
    let permits = |uid: Option<u32>, gid: Option<u32>| {
        node.acl.permits(owner, |of| uid == Some(of), |of| gid == Some(of), wanted)
    };
    // Some user is one that the list names, some other is in one of its groups, and some other is in none.
    let (mut users, groups) = node.acl.named();
    let mut groups = groups.chain([node.gid]).filter(|group| *group != 0);
    users.any(|uid| uid != 0 && permits(Some(uid), None))
        || groups.any(|group| permits(None, Some(group)))
        || permits(None, None)
}

/// A user as this machine knows it.
struct Account {
    name: CString,
    /// Its own group.
    gid: u32,
}

/// `None`: this machine does not know the user.
fn account_of(uid: u32) -> Option<Account> {
    let mut text = vec![0; 16 << 10];
    // SAFETY: all zeros is a value of the structure, which is filled below.
    let (mut entry, mut found) = (unsafe { std::mem::zeroed::<libc::passwd>() }, std::ptr::null_mut());
    // SAFETY: places for the entry, its texts, and whether there is one.
    let failed = unsafe { libc::getpwuid_r(uid, &mut entry, text.as_mut_ptr(), text.len(), &mut found) };
    if failed != 0 || found.is_null() {
        return None;
    }
    // SAFETY: the name is a terminated string in `text`.
    Some(Account { name: unsafe { CStr::from_ptr(entry.pw_name) }.to_owned(), gid: entry.pw_gid })
}

impl Account {
    /// This group, and those that the user is in.
    fn groups_with(&self, gid: u32) -> Vec<u32> {
        let mut groups = vec![0; GROUPS_MAX];
        let mut count = GROUPS_MAX as libc::c_int;
        // SAFETY: the name is a terminated string, and there is room for `count` groups.
        let given = unsafe { libc::getgrouplist(self.name.as_ptr(), gid, groups.as_mut_ptr(), &mut count) };
        // With more groups than fit the first ones count.
        groups.truncate(if given < 0 { GROUPS_MAX } else { usize::try_from(count).unwrap_or(0) });
        groups
    }
}

pub(super) fn denied(user: &User, doing: &str, path: &[u8]) -> impresario_wire::Fault {
    let why = match user.proven {
        true => format!("user {} has no permission", user.uid),
        false => "no user of this client may, as its [[export]] squashes them (`squash`)".into(),
    };
    fault(Errno::ACCESS, format!("cannot {doing} {}: {why}", show(path)))
}

pub(super) fn not_owned(user: &User, doing: &str, path: &[u8]) -> impresario_wire::Fault {
    let why = match user.proven {
        true => format!("it takes root or its owner, and this client's user is {}", user.uid),
        false => "it takes root, or an owner that this client's [[export]] squashes (`squash`)".into(),
    };
    fault(Errno::PERM, format!("cannot {doing} {}: {why}", show(path)))
}

impl Meta {
    /// A user of a session proves itself.
    pub(super) fn prove(&self, session: &Session, credential: &[u8]) -> Outcome<()> {
        let Some(Users::Each(each)) = session.users.get() else {
            return Err(fault(Errno::PERM, "the users of this client have nothing to prove, or act as one"));
        };
        let refused = |why: String| fault(Errno::ACCESS, format!("the credential of a user is not accepted: {why}"));
        let proven = self.options.munge.verify(credential, session.client()).map_err(refused)?;
        if proven.uid == 0 || !each.rule.admits(proven.uid) {
            return Err(refused(format!("user {} is none of the `uids` of its [[export]]", proven.uid)));
        }
        let user = Arc::new(User::vouched_for(proven));
        each.known.lock().put(proven.uid, (user, Instant::now()));
        Ok(())
    }

    /// Holds the names for a call, where users of some client are squashed. To be taken before [`Meta::permit`].
    pub(super) fn hold_names(&self, user: Option<&User>, call: &MetaCall) -> NamesHeld<'_> {
        if !self.options.squashes {
            return NamesHeld::No;
        }
        match call {
            MetaCall::Rename { .. } | MetaCall::Exchange { .. } => NamesHeld::Moving(self.moves.write()),
            // What may wait for data servers holds names while its path is walked ([`Meta::entry_for`]), and is checked on the
            // node that was found there.
            MetaCall::Create { .. } | MetaCall::Open { .. } => NamesHeld::No,
            MetaCall::SetAttr { .. } | MetaCall::SetLayout { .. } | MetaCall::CutBack { .. } => NamesHeld::No,
            MetaCall::SetXattr { target: Target::Handle(_), .. } => NamesHeld::No,
            // When the data servers have been asked.
            MetaCall::Link { .. } => NamesHeld::No,
            MetaCall::GetXattr { target: Target::Path(_), .. } | MetaCall::ListXattr { target: Target::Path(_) } => {
                self.hold_names_still(user)
            }
            call if call.is_change() => self.hold_names_still(user),
            _ => NamesHeld::No,
        }
    }

    /// The same for a call that moves nothing, whatever it is.
    pub(super) fn hold_names_still(&self, user: Option<&User>) -> NamesHeld<'_> {
        let holds = self.options.squashes && user.is_some();
        if holds { NamesHeld::Still(self.moves.read()) } else { NamesHeld::No }
    }

    /// Refuses what no user of the session may do, and has what the call makes belong to those that it may belong to.
    pub(super) fn permit(&self, session: &Session, user: &User, call: &mut MetaCall) -> Outcome<()> {
        call.paths().try_for_each(|path| self.check_search(user, path))?;
        match call {
            // Whether they may make it is checked where it is made: what is there already is opened, and checked like any.
            MetaCall::Create { uid, gid, .. } => map_owner(user, uid, gid),
            MetaCall::Mkdir { path, uid, gid, .. } => {
                map_owner(user, uid, gid);
                self.check_directory(user, path, "make")?;
            }
            MetaCall::Symlink { path, uid, gid, .. } => {
                map_owner(user, uid, gid);
                self.check_directory(user, path, "make")?;
            }
            MetaCall::Mknod { path, kind, uid, gid, .. } => {
                if matches!(kind, NodeKind::Character(_) | NodeKind::Block(_)) {
                    return Err(not_owned(user, "make the device", path));
                }
                map_owner(user, uid, gid);
                self.check_directory(user, path, "make")?;
            }
            MetaCall::Rmdir { path } | MetaCall::Unlink { path } => self.check_removal(user, path, "remove")?,
            MetaCall::Rename { from, to, .. } | MetaCall::Exchange { from, to } => {
                self.check_removal(user, from, "rename")?;
                match self.node_at(to, "replace") {
                    Ok(_) => self.check_removal(user, to, "replace")?,
                    Err(_) => self.check_directory(user, to, "rename to")?,
                }
            }
            MetaCall::Link { from, to } => self.permit_link(user, from, to)?,
            MetaCall::SetAttr { target, set } => {
                let node = self.node_of(session, target, "change")?;
                let opened = match target {
                    Target::Handle(handle) => Some(session.check_writes(*handle)),
                    Target::Path(_) => None,
                };
                check_set(user, &node, set, path_of(target), opened.as_ref().map(Result::is_ok))?;
                if set.size.is_some() {
                    opened.transpose()?;
                }
            }
            MetaCall::SetXattr { target, name, .. } if is_acl(name) => {
                self.check_owner(user, session, target, ACL_CHANGE)?;
            }
            // A write takes it away, whoever writes.
            MetaCall::SetXattr { target: Target::Handle(handle), name, value: None, .. } if name == CAPABILITY => {
                session.check_writes(*handle)?;
            }
            MetaCall::SetXattr { target, name, .. } if name.starts_with(SECURITY) => {
                return Err(not_owned(user, "label", path_of(target)));
            }
            // Who may go there may look at these.
            MetaCall::GetXattr { name, .. } if is_acl(name) || name.starts_with(SECURITY) => {}
            MetaCall::SetXattr { target: target @ Target::Path(_), .. } => {
                self.check_node(user, session, target, WRITE, "set an extended attribute of")?;
            }
            MetaCall::SetXattr { target: Target::Handle(handle), .. } => session.check_writes(*handle)?,
            MetaCall::GetXattr { target: target @ Target::Path(_), .. }
            | MetaCall::ListXattr { target: target @ Target::Path(_) } => {
                self.check_node(user, session, target, READ, "read an extended attribute of")?;
            }
            MetaCall::SetLayout { path, .. } => {
                let node = self.node_at(path, LAYOUT_CHANGE)?;
                if !owns(user, &node) {
                    return Err(not_owned(user, LAYOUT_CHANGE, path));
                }
            }
            // Those that open are checked by what they opened, and what is listed where it is; the others act on what is open, or
            // show attributes.
            _ => {}
        }
        Ok(())
    }

    /// Refuses a link that no user of the session may make, on a path that they may search.
    fn permit_link(&self, user: &User, from: &[u8], to: &[u8]) -> Outcome<()> {
        // Or a link to what they may not read could be kept until somebody changes its mode.
        let node = self.node_at(from, "link to")?;
        if !may(user, &node, READ | WRITE) {
            return Err(not_owned(user, "link to", from));
        }
        self.check_directory(user, to, "link")
    }

    /// The same while no name is moved; names that were looked up before may have been moved since.
    pub(super) fn permit_link_still(&self, user: Option<&User>, from: &[u8], to: &[u8]) -> Outcome<NamesHeld<'_>> {
        let held = self.hold_names_still(user);
        if let Some(user) = user {
            [from, to].into_iter().try_for_each(|path| self.check_search(user, path))?;
            self.permit_link(user, from, to)?;
        }
        Ok(held)
    }

    /// Refuses an open file that no user of the session may open so.
    pub(super) fn permit_opened(
        &self,
        session: &Session,
        user: &User,
        opened: &Opened,
        write: bool,
        path: &[u8],
    ) -> Outcome<()> {
        let wanted = if write { READ | WRITE } else { READ };
        let node = self.node_of(session, &Target::Handle(opened.handle), "open")?;
        // Who may execute a file reads it through its kernel.
        let executes = !write && may(user, &node, SEARCH);
        if may(user, &node, wanted) || executes { Ok(()) } else { Err(denied(user, "open", path)) }
    }

    /// Refuses a path through a directory that they may not search.
    fn check_search(&self, user: &User, path: &[u8]) -> Outcome<()> {
        let ends = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
        let directories = (!path.is_empty()).then_some(0).into_iter().chain(ends);
        for end in directories {
            let directory = path.get(..end).unwrap_or_default();
            match self.node_at(directory, "search") {
                Ok(node) if !may(user, &node, SEARCH) => return Err(denied(user, "search", directory)),
                Ok(_) => {}
                // The call itself says what is wrong with its path.
                Err(_) => return Ok(()),
            }
        }
        Ok(())
    }

    /// The entry of a path that they may take, for a call during which names move ([`Meta::hold_names`]), which must hold none
    /// itself; `None` for the root.
    pub(super) fn entry_for<'a>(
        &'a self,
        user: Option<&User>,
        path: &'a [u8],
        doing: &str,
    ) -> Outcome<Option<EntryRef<'a>>> {
        let _still = user.map(|user| (self.moves.read(), user));
        if let Some((_, user)) = &_still {
            self.check_search(user, path)?;
        }
        self.dir.entry(path).explain(doing, path)
    }

    /// The same of a directory that is to be listed.
    pub(super) fn directory_for(&self, user: Option<&User>, path: &[u8]) -> Outcome<OwnedFd> {
        let _still = user.map(|user| (self.moves.read(), user));
        if let Some((_, user)) = &_still {
            self.check_search(user, path)?;
        }
        let directory = self.dir.open_dir_by_path(path).explain("list", path)?;
        if let Some(user) = user
            && !may(user, &self.owned(&directory).explain("list", path)?, READ)
        {
            return Err(denied(user, "list", path));
        }
        Ok(directory)
    }

    /// Refuses a new name in a directory that they may not change: this one, wherever it is by now.
    pub(super) fn permit_new(&self, user: &User, entry: &EntryRef<'_>, doing: &str) -> Outcome<()> {
        let directory = self.owned(entry.directory()).explain(doing, entry.path)?;
        if may(user, &directory, WRITE | SEARCH) { Ok(()) } else { Err(denied(user, doing, entry.path)) }
    }

    /// Refuses a new name in a directory that they may not change.
    fn check_directory(&self, user: &User, path: &[u8], doing: &str) -> Outcome<()> {
        let Some((directory, _)) = split(path) else { return Ok(()) };
        let node = self.node_at(directory, doing)?;
        if may(user, &node, WRITE | SEARCH) { Ok(()) } else { Err(denied(user, doing, path)) }
    }

    /// The same for a name that goes.
    fn check_removal(&self, user: &User, path: &[u8], doing: &str) -> Outcome<()> {
        self.check_directory(user, path, doing)?;
        let Some((directory, _)) = split(path) else { return Ok(()) };
        let (directory, node) = (self.node_at(directory, doing)?, self.node_at(path, doing)?);
        let is_kept = directory.mode & STICKY != 0 && !owns(user, &directory) && !owns(user, &node);
        if is_kept { Err(not_owned(user, doing, path)) } else { Ok(()) }
    }

    fn check_node(&self, user: &User, session: &Session, target: &Target, wanted: u32, doing: &str) -> Outcome<()> {
        let node = self.node_of(session, target, doing)?;
        if may(user, &node, wanted) { Ok(()) } else { Err(denied(user, doing, path_of(target))) }
    }

    fn check_owner(&self, user: &User, session: &Session, target: &Target, doing: &str) -> Outcome<()> {
        let node = self.node_of(session, target, doing)?;
        if owns(user, &node) { Ok(()) } else { Err(not_owned(user, doing, path_of(target))) }
    }

    fn node_of(&self, session: &Session, target: &Target, doing: &str) -> Outcome<Owned> {
        match target {
            Target::Path(path) => self.node_at(path, doing),
            Target::Handle(handle) => {
                let pin = self.pin_handle(session, *handle)?;
                self.owned(&pin.fd).explain(doing, b"an open file")
            }
        }
    }

    fn node_at(&self, path: &[u8], doing: &str) -> Outcome<Owned> {
        let node = self.dir.walk(path, PATH_FLAGS).explain(doing, path)?;
        self.owned(&node).explain(doing, path)
    }

    fn owned(&self, node: impl AsFd) -> rustix::io::Result<Owned> {
        let stat = rustix::fs::fstat(&node)?;
        kind_of(&stat).ok_or(Errno::OPNOTSUPP)?;
        let acl = self.acl_of(node, ACL_ACCESS)?.unwrap_or_else(|| Acl::of_mode(stat.st_mode));
        Ok(Owned { uid: stat.st_uid, gid: stat.st_gid, mode: stat.st_mode, acl })
    }

    /// Whether it is a node of theirs. To be called while its owner does not change.
    pub(super) fn is_owned_by(&self, user: &User, node: impl AsFd) -> rustix::io::Result<bool> {
        Ok(owns(user, &self.owned(node)?))
    }

    /// Whether they may write it. To be called while neither owner nor mode change.
    pub(super) fn may_write(&self, user: &User, node: impl AsFd) -> rustix::io::Result<bool> {
        Ok(may(user, &self.owned(node)?, WRITE))
    }

    /// Refuses a change of attributes of a file that is pinned: it is the one that will change.
    pub(super) fn permit_pinned(&self, user: &User, pin: &Pin<'_>, set: &SetAttr, path: &[u8]) -> Outcome<()> {
        check_set(user, &self.owned(&pin.fd).explain("change", path)?, set, path, None)
    }

    /// Refuses a change of a node's owner, mode or times. To be called while neither owner nor mode change.
    pub(super) fn permit_node(
        &self,
        (user, opened): Asker<'_>,
        node: impl AsFd,
        set: &SetAttr,
        path: &[u8],
    ) -> Outcome<()> {
        // A file may be cut until then by whoever could when that began.
        let set = SetAttr { size: None, ..set.clone() };
        check_set(user, &self.owned(node).explain("change", path)?, &set, path, opened)
    }
}

pub(super) fn path_of(target: &Target) -> &[u8] {
    match target {
        Target::Path(path) => path,
        Target::Handle(_) => b"an open file",
    }
}

/// The owner of what they make.
fn map_owner(user: &User, uid: &mut u32, gid: &mut u32) {
    if user.all || *uid == 0 {
        *uid = user.uid;
    }
    if !user.may_be_in(*gid) {
        *gid = user.gid;
    }
}

/// Refuses a change of attributes of a node. `opened`: by an open file, and whether it is open for writing.
fn check_set(user: &User, node: &Owned, set: &SetAttr, path: &[u8], opened: Option<bool>) -> Outcome<()> {
    let is_theirs = owns(user, node);
    let may_write = || opened == Some(true) || may(user, node, WRITE);
    // Whoever changes the bytes takes these away. Those of a directory say which group new nodes get.
    let is_file = FileType::from_raw_mode(node.mode) == FileType::RegularFile;
    let takes_set_id = || is_file && set.takes & !SET_ID == 0 && may_write();
    let sets_mode = set.mode.is_some() || set.takes != 0 && !takes_set_id();
    let gives_away = set.uid.is_some_and(|uid| uid != node.uid);
    let group = set.gid.filter(|gid| *gid != node.gid);
    let is_strange_group = group.is_some_and(|gid| !user.may_be_in(gid));
    if gives_away || is_strange_group || (group.is_some() || sets_mode) && !is_theirs {
        return Err(not_owned(user, "change the owner, group or mode of", path));
    }
    let sets_now = |time: Option<SetTime>| time.is_none_or(|time| time == SetTime::Now);
    let now_only = sets_now(set.atime) && sets_now(set.mtime);
    let sets_times = set.atime.is_some() || set.mtime.is_some();
    if sets_times && !is_theirs && !(now_only && may(user, node, WRITE)) {
        return Err(not_owned(user, "set the times of", path));
    }
    if set.size.is_some() && opened.is_none() && !may(user, node, WRITE) {
        return Err(denied(user, "set the length of", path));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &User = &User { all: false, proven: false, uid: 65534, gid: 65534, groups: Vec::new() };
    const ALL: &User = &User { all: true, proven: false, uid: 99, gid: 98, groups: Vec::new() };

    #[test]
    fn bits_count_for_those_whom_a_client_may_speak_for() {
        let node = |uid, gid, mode| Owned { uid, gid, mode, acl: Acl::of_mode(mode) };
        let may = |user, node: Owned, wanted| may(user, &node, wanted);
        // Root's own things, and what root lets others do.
        assert!(!may(ROOT, node(0, 0, 0o770), READ) && !may(ROOT, node(0, 0, 0o644), WRITE));
        assert!(may(ROOT, node(0, 0, 0o644), READ) && may(ROOT, node(0, 5, 0o660), WRITE));
        assert!(may(ROOT, node(7, 0, 0), READ | WRITE), "its owner may be a user there");
        assert!(!may(ALL, node(7, 5, 0o770), READ) && may(ALL, node(7, 5, 0o774), READ));
        assert!(may(ALL, node(99, 5, 0), WRITE) && may(ALL, node(7, 98, 0o020), WRITE));
        assert!(!may(ALL, node(7, 98, 0o702), WRITE), "the group's bits count for its members");
        let proven = &User { groups: vec![5, 6], ..ALL.clone() };
        assert!(may(proven, node(7, 5, 0o770), READ) && !may(proven, node(7, 4, 0o770), READ));
    }

    /// The list that names user 5, whom it lets read and write, user 6, whom it lets nothing, and group 9, whom it lets read.
    fn naming(mode: u32) -> Acl {
        let mut bytes = vec![2, 0, 0, 0];
        let entries =
            [(1, 7, u32::MAX), (2, 6, 5), (2, 0, 6), (4, 1, u32::MAX), (8, 4, 9), (16, 7, u32::MAX), (32, 0, u32::MAX)];
        for (tag, rights, id) in entries {
            bytes.extend([tag, 0, rights, 0]);
            bytes.extend(u32::to_le_bytes(id));
        }
        Acl::decode(&bytes).unwrap().unwrap().with_mode(mode)
    }

    #[test]
    fn lists_count_for_those_whom_a_client_may_speak_for() {
        let node = |uid, gid, mode| Owned { uid, gid, mode, acl: naming(mode) };
        // Some user of the machine may be number 5, and some may be in group 9.
        assert!(may(ROOT, &node(0, 0, 0o770), READ | WRITE) && !may(ROOT, &node(0, 0, 0o770), SEARCH));
        assert!(!may(ROOT, &node(0, 0, 0o700), READ), "the mask");
        assert!(may(ROOT, &node(0, 3, 0o770), SEARCH), "the owning group's own entry");
        let user = |uid, gid| User { uid, gid, ..ALL.clone() };
        assert!(may(&user(5, 1), &node(0, 0, 0o770), READ | WRITE) && !may(&user(5, 1), &node(0, 0, 0o750), WRITE));
        assert!(!may(&user(6, 9), &node(0, 0, 0o774), READ), "the entry of a user comes before those of groups");
        assert!(may(&user(7, 9), &node(0, 0, 0o770), READ) && !may(&user(7, 9), &node(0, 0, 0o770), WRITE));
        assert!(may(&user(7, 8), &node(0, 0, 0o774), READ) && !may(&user(7, 8), &node(0, 0, 0o770), READ));
    }

    #[test]
    fn owners_are_those_that_may_be() {
        let mapped = |user, mut uid, mut gid| {
            map_owner(user, &mut uid, &mut gid);
            (uid, gid)
        };
        assert_eq!((mapped(ROOT, 0, 0), mapped(ROOT, 7, 8)), ((65534, 65534), (7, 8)));
        assert_eq!(mapped(ALL, 7, 8), (99, 98));
        assert_eq!(mapped(&User { groups: vec![8], ..ALL.clone() }, 7, 8), (99, 8));
        let set = |node: &Owned, set: SetAttr| check_set(ROOT, node, &set, b"f", None);
        let node = |uid, gid, mode| Owned { uid, gid, mode, acl: Acl::of_mode(mode) };
        let (theirs, roots) = (&node(7, 8, 0o644), &node(0, 0, 0o666));
        set(theirs, SetAttr { mode: Some(0o4755), uid: Some(7), gid: Some(9), ..SetAttr::default() }).unwrap();
        for bad in [
            SetAttr { uid: Some(0), ..SetAttr::default() },
            SetAttr { uid: Some(9), ..SetAttr::default() },
            SetAttr { gid: Some(0), ..SetAttr::default() },
        ] {
            assert_eq!(set(theirs, bad).unwrap_err().errno, 1);
        }
        assert!(set(roots, SetAttr { mode: Some(0o666), ..SetAttr::default() }).is_err());
        // Who may write takes set-id bits away, and nothing else.
        let file = |mode| node(0, 0, libc::S_IFREG | mode);
        let roots_set_id = &file(0o6666);
        let mode = |mode| SetAttr { mode: Some(mode), ..SetAttr::default() };
        let takes = |takes| SetAttr { takes, ..SetAttr::default() };
        assert!([0o6000, 0o4000, 0o2000].into_iter().all(|bits| set(roots_set_id, takes(bits)).is_ok()));
        assert!([0o7000, 0o6001, 0o22].into_iter().all(|bits| set(roots_set_id, takes(bits)).is_err()));
        assert!(set(roots_set_id, mode(0o666)).is_err());
        assert!(set(&file(0o6644), takes(0o6000)).is_err());
        let through = |write| check_set(ROOT, &file(0o6644), &takes(0o6000), b"f", Some(write));
        assert!(through(true).is_ok() && through(false).is_err(), "it is open for writing, or not");
        for kind in [libc::S_IFDIR, libc::S_IFIFO, libc::S_IFSOCK, libc::S_IFCHR] {
            assert!(set(&node(0, 0, kind | 0o2777), takes(0o2000)).is_err(), "a folder of a group stays so");
        }
        set(roots, SetAttr { size: Some(0), mtime: Some(SetTime::Now), ..SetAttr::default() }).unwrap();
        let past = SetTime::At(impresario_wire::message::Time { secs: 1, nanos: 0 });
        assert!(set(roots, SetAttr { mtime: Some(past), ..SetAttr::default() }).is_err());
    }

    #[test]
    fn users_are_known_for_a_while_and_in_bounded_number() {
        let rule = Restriction { squashed: None, proves: true, uids: Vec::new() };
        let users = Users::from(rule);
        let Users::Each(each) = &users else { panic!("one") };
        let (look, close) = (
            MetaCall::Readdir { path: Vec::new(), after: Vec::new(), max: 1 },
            MetaCall::Close { handle: 1, wrote: true },
        );
        let prove = |uid: u32, at: Instant| {
            let user = User { uid, gid: uid, proven: true, ..ALL.clone() };
            each.known.lock().put(uid, (Arc::new(user), at));
        };
        let now = Instant::now();
        for uid in 1..=10_000 {
            let unproven = users.of(uid, &look).unwrap_err();
            assert_eq!(unproven.errno, impresario_wire::Fault::UNPROVEN);
            assert!(users.of(uid, &close).unwrap().is_none(), "closing is anybody's");
            prove(uid, now);
            assert_eq!(users.of(uid, &look).unwrap().unwrap().uid, uid);
            assert_eq!(users.of(1, &look).unwrap().unwrap().uid, 1, "who is active stays known");
            assert!(each.known.lock().len() <= 2 * USERS_MAX + 1);
        }
        assert!(users.of(0, &look).unwrap().is_none(), "root is not squashed");
        // What was proved long ago is proved again, also by who is active all the time.
        prove(7, now.checked_sub(PROVEN_FOR).unwrap());
        assert_eq!(users.of(7, &look).unwrap_err().errno, impresario_wire::Fault::UNPROVEN);
        prove(7, now);
        assert!(users.of(7, &look).is_ok());
    }

    /// Root of a client's machine names any group; those count that the metadata server's machine knows for the user.
    #[test]
    fn a_claimed_group_counts_only_where_it_is_known_or_nothing_is() {
        let user = |uid, gid| User::vouched_for(Proven { uid, gid });
        let unknown = 3_999_999_999;
        assert_eq!(user(unknown, 77).gid, 77);
        assert_eq!((user(unknown, 0).gid, user(unknown, 0).may_be_in(0)), (NOBODYS_GROUP, false));
        let text = std::fs::read_to_string("/etc/passwd").unwrap();
        let entry = |line: &str| {
            let mut fields = line.split(':').skip(2).map(|field| field.parse::<u32>().ok());
            Some((fields.next()??, fields.next()??))
        };
        let (uid, gid) = text.lines().filter_map(entry).find(|(uid, gid)| *uid != 0 && *gid != 0).unwrap();
        for claimed in [0, gid, 3_999_999_998] {
            let user = user(uid, claimed);
            assert!(user.gid == gid || user.groups.contains(&claimed), "{claimed}");
            assert!(user.may_be_in(gid) && !user.may_be_in(3_999_999_998));
        }
        // Where somebody is in further groups, these count.
        let groups = std::fs::read_to_string("/etc/group").unwrap();
        let member = groups.lines().find_map(|line| {
            let fields: Vec<&str> = line.split(':').collect();
            let name = fields.get(3)?.split(',').find(|name| !matches!(*name, "" | "root"))?;
            let account = text.lines().find(|line| line.split(':').next() == Some(name)).and_then(entry)?;
            Some((account, fields.get(2)?.parse::<u32>().ok()?))
        });
        if let Some(((uid, gid), group)) = member {
            assert!(user(uid, gid).may_be_in(group) && user(uid, group).gid == group);
        }
    }
}
