//! The rules that a server's clients are under: which networks may connect, whether they may change anything, which folder is
//! their root, and as whom their users act.
//!
//! A connection is under the rule of its address from its hello to its end. Whatever its peer sends goes through
//! [`Export::apply`] before the server's service sees it, and every answer through [`Export::answer`]. Administrators and
//! servers are under no rule.
//!
//! A client that may not use every file, because its root is a folder or its users are squashed, may use those that it has
//! opened: servers of names give it a *pass* with each, which it shows wherever it names the file by its key. A pass is good
//! for a client, a file, an export, and reading or writing; it is signed with a key that only servers have.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use impresario_config::{AccessRules, Config, Squash, Users};
use impresario_transport::{Keyring, Munge, Proven};
use impresario_wire::{Answer, Call, ClientKey, Fault, FileKey, Hello, MetaCall, Pass, Restriction, Role, Squashed};

/// The exports of a cluster.
#[derive(Debug)]
pub struct Exports(Vec<Arc<Export>>);

/// An export.
#[derive(Debug)]
pub struct Export {
    rules: AccessRules,
    /// A path without slashes at its ends; empty: the whole name space.
    folder: Vec<u8>,
    /// Clients prove their users.
    proves_users: bool,
    /// See [`Restriction::uids`].
    uids: Vec<(u32, u32)>,
}

impl Exports {
    /// Those of a configuration; `None` if it has none, and no client is under a rule.
    pub fn of(config: &Config) -> Result<Option<Arc<Exports>>, String> {
        let export = |export: &impresario_config::Export| {
            let (rules, folder) = (export.rules()?, export.folder.clone().into_bytes());
            let (proves_users, uids) = (export.users == Users::Munge, export.uid_ranges()?);
            Ok(Arc::new(Export { rules, folder, proves_users, uids }))
        };
        let all = config.export.iter().map(export).collect::<Result<Vec<_>, String>>()?;
        Ok((!all.is_empty()).then(|| Arc::new(Exports(all))))
    }

    /// True if users of some clients act as others, or only as themselves.
    pub fn squash(&self) -> bool {
        self.0.iter().any(|export| export.squashed().is_some() || export.proves_users)
    }

    /// True if clients are given passes for the files that they open.
    pub fn give_passes(&self) -> bool {
        self.0.iter().any(|export| export.needs_passes())
    }

    /// The export of a client at this address, `ip:port`, or on a Unix socket.
    pub(crate) fn of_peer(&self, peer: &str) -> Option<&Arc<Export>> {
        let here = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let address = peer.parse::<SocketAddr>().map_or(here, |address| address.ip());
        self.0.iter().find(|export| export.rules.admits(address))
    }
}

/// Who asks, and what it shows.
pub(crate) struct Asker<'a> {
    pub(crate) client: ClientKey,
    pub(crate) pass: Option<Pass>,
    /// Keys of the server.
    pub(crate) keys: Option<&'a Keyring>,
}

impl Export {
    /// As whom its clients' users act; `None`: as themselves.
    pub(crate) fn squashed(&self) -> Option<Squashed> {
        let (uid, gid) = (self.rules.anonymous_uid, self.rules.anonymous_gid);
        let all = self.rules.squash == Squash::All;
        (self.rules.squash != Squash::None).then_some(Squashed { all, proven: false, uid, gid })
    }

    /// The user that a client proves to be with its hello; `None` where it need not.
    pub(crate) fn user(&self, hello: &Hello, munge: &Munge) -> Result<Option<Proven>, Fault> {
        // Data servers go by passes, and who only asks for a server's state is nobody to it.
        if !self.proves_users || !matches!(hello.role, Role::Meta | Role::Io) {
            return Ok(None);
        }
        let refused = |why: &str| {
            let message =
                format!("users of this client have to prove who they are (`users` of its [[export]]), and {why}");
            Fault { errno: libc::EACCES, message }
        };
        if hello.credential.is_empty() {
            return Err(refused("no credential of MUNGE was shown"));
        }
        let proven = munge.verify(&hello.credential, hello.who.client);
        let proven = proven.map_err(|why| refused(&format!("its credential is not accepted: {why}")))?;
        // A client of root is there for the users of its machine, each of whom proves itself.
        if proven.uid != 0 && !self.each_proves(None).admits(proven.uid) {
            return Err(refused(&format!("user {} is none of its `uids`", proven.uid)));
        }
        Ok(Some(proven))
    }

    fn each_proves(&self, squashed: Option<Squashed>) -> Restriction {
        Restriction { squashed, proves: true, uids: self.uids.clone() }
    }

    /// What the users of a client are to the servers of names that has proved to be `user`; `None`: what its calls say.
    pub(crate) fn restriction(&self, user: Option<Proven>) -> Option<Restriction> {
        let one = |squashed| Some(Restriction { squashed: Some(squashed), proves: false, uids: Vec::new() });
        let (uid, gid) = (self.rules.anonymous_uid, self.rules.anonymous_gid);
        let anonymous = Squashed { all: true, proven: false, uid, gid };
        match (self.proves_users, user) {
            (false, _) => self.squashed().and_then(one),
            (true, None) => one(anonymous),
            _ if self.rules.squash == Squash::All => one(anonymous),
            (true, Some(Proven { uid: 0, .. })) => {
                Some(self.each_proves((self.rules.squash == Squash::Root).then_some(anonymous)))
            }
            (true, Some(Proven { uid, gid })) => one(Squashed { all: true, proven: true, uid, gid }),
        }
    }

    /// Makes of a client's call what it is under the rules, or refuses it.
    pub(crate) fn apply(&self, call: &mut Call, asker: &Asker<'_>) -> Result<(), Fault> {
        if self.rules.read_only && call.needs_write() {
            let message = "clients of this network may only read (`read_only` of its [[export]])".to_string();
            return Err(Fault { errno: libc::EROFS, message });
        }
        if let Some(file) = call.file().filter(|_| self.needs_passes()) {
            let writes = call.needs_write();
            let is_good = |pass: &Pass, write| {
                asker.keys.is_some_and(|keys| keys.recognises_pass(&self.about(asker.client, file, write), pass))
            };
            // Who may write may read.
            if !asker.pass.as_ref().is_some_and(|pass| is_good(pass, writes) || (!writes && is_good(pass, true))) {
                let message = format!(
                    "the client has not opened file {:016x} for {} by a name that its [[export]] gives it, or all keys were \
                     replaced since: it must open it again",
                    file.0,
                    if writes { "writing" } else { "reading" }
                );
                return Err(Fault { errno: libc::EACCES, message });
            }
        }
        if self.folder.is_empty() {
            return Ok(());
        }
        let Call::Meta { call, .. } = call else { return Ok(()) };
        let of_names = call.is_of_names();
        for path in call.paths_mut() {
            match path.is_empty() {
                // What makes or removes a name has none to act on: neither may the folder's own be made or removed.
                true if of_names => {}
                true => path.clone_from(&self.folder),
                false => {
                    path.splice(..0, self.folder.iter().copied().chain([b'/']));
                }
            }
        }
        Ok(())
    }

    /// Makes of an answer to a client what it is under the rules, if that differs; `write`: to a call that opens for writing.
    pub(crate) fn answer(&self, answer: &Answer, write: bool, asker: &Asker<'_>) -> Option<Answer> {
        let Answer::Opened(opened) = answer else { return None };
        let keys = asker.keys.filter(|_| self.needs_passes())?;
        let pass = keys.issue_pass(&self.about(asker.client, opened.file, write))?;
        Some(Answer::Admitted { opened: Box::new(*opened), write, pass })
    }

    /// Its clients may not use every file.
    fn needs_passes(&self) -> bool {
        !self.folder.is_empty() || self.squashed().is_some() || self.proves_users
    }

    /// What a pass is about.
    fn about(&self, client: ClientKey, file: FileKey, write: bool) -> Vec<u8> {
        let nobody = Squashed { all: false, proven: false, uid: 0, gid: 0 };
        let Squashed { all, uid, gid, .. } = self.squashed().unwrap_or(nobody);
        let flags = [write.into(), all.into(), self.proves_users.into()];
        let numbers = [uid.to_le_bytes(), gid.to_le_bytes()].concat();
        [&client.0.to_le_bytes()[..], &file.0.to_le_bytes(), &flags, &numbers, &self.folder].concat()
    }
}

/// The first call of an I/O node for a client whose users act as others, or prove themselves.
pub(crate) fn restricting(restriction: Restriction) -> Call {
    Call::Meta { who: Default::default(), call: MetaCall::Restrict(restriction) }
}
