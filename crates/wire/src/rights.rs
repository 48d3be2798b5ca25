//! Which role may send which call: the one table.
//!
//! It is exhaustive on purpose: a call that is added has to be entered here before anything compiles.

use crate::{Call, KeyRole, MetaCall};

/// Who may send a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Right {
    /// Every role.
    Anyone,
    /// Administrators, and no other role.
    Admin,
    /// Administrators and servers.
    NotClients,
    /// Servers, and no other role.
    Server,
}

impl Right {
    /// True when the role has the right.
    pub fn is_of(self, role: KeyRole) -> bool {
        match self {
            Right::Anyone => true,
            Right::Admin => role == KeyRole::Admin,
            Right::NotClients => role != KeyRole::Client,
            Right::Server => role == KeyRole::Server,
        }
    }
}

/// The right that a call needs, and what the call is called in messages.
pub fn right_for(call: &Call) -> (Right, &'static str) {
    match call {
        Call::Status => (Right::Anyone, "asking for the state"),
        Call::Explain { .. } => (Right::Anyone, "asking what the policy does"),
        Call::Read { .. } => (Right::Anyone, "reading an object"),
        Call::ReadList { .. } => (Right::Anyone, "reading extents of an object"),
        Call::Write { .. } => (Right::Anyone, "writing into an object"),
        Call::ChangeSpace { .. } => (Right::Anyone, "changing the space of an object"),
        Call::ObjectSeek { .. } => (Right::Anyone, "looking for holes of an object"),
        Call::FileChangeSpace { .. } => (Right::Anyone, "changing the space of a file"),
        Call::FileSeek { .. } => (Right::Anyone, "looking for holes of a file"),
        Call::Sync { .. } => (Right::Anyone, "syncing an object"),
        Call::ObjectStat { .. } => (Right::Anyone, "looking at an object"),
        Call::Prefetch { .. } => (Right::Anyone, "hinting at an object"),
        Call::GiveUp { .. } => (Right::Anyone, "giving up calls"),
        Call::FileRead { .. } => (Right::Anyone, "reading a file"),
        Call::FileWrite { .. } => (Right::Anyone, "writing into a file"),
        Call::FileSync { .. } => (Right::Anyone, "syncing a file"),
        Call::FileStat { .. } => (Right::Anyone, "looking at a file"),
        Call::FilePrefetch { .. } => (Right::Anyone, "hinting at a file"),
        Call::Meta { call, .. } => right_for_meta(call),
        // Clients change lengths and remove files through the metadata server, which knows who has them open.
        // An administrator measures a data server with an object of its own.
        Call::Truncate { .. } => (Right::NotClients, "cutting an object"),
        Call::Unlink { .. } => (Right::NotClients, "removing an object"),
        // A check of the cluster is an administrator's.
        Call::ListObjects { .. } => (Right::NotClients, "listing objects"),
        Call::Scrub { .. } => (Right::Admin, "scrubbing an object"),
        Call::Move(_) => (Right::Admin, "moving the server"),
        Call::SetAside { .. } => (Right::NotClients, "setting an object aside"),
        Call::Grants => (Right::NotClients, "asking what limits granted"),
        Call::Members => (Right::NotClients, "asking which nodes take turns"),
        // They name the epochs of several clients.
        Call::WriteMerged { .. } | Call::WriteList { .. } => (Right::Server, "writing for several clients"),
        Call::SetPolicy { .. } => (Right::Admin, "switching the policy"),
        Call::ResetStatistics => (Right::Admin, "resetting the statistics"),
        Call::SetDiskOrder { .. } => (Right::Admin, "changing the order of a disk"),
        Call::Trace { .. } => (Right::Admin, "beginning or ending a trace"),
        Call::EarlierRuns { .. } => (Right::Admin, "loading or forgetting earlier runs"),
    }
}

fn right_for_meta(call: &MetaCall) -> (Right, &'static str) {
    match call {
        MetaCall::GetAttr { .. }
        | MetaCall::SetAttr { .. }
        | MetaCall::Create { .. }
        | MetaCall::Open { .. }
        | MetaCall::Reopen { .. }
        | MetaCall::Close { .. }
        | MetaCall::Fsync { .. }
        | MetaCall::FsyncDir { .. }
        | MetaCall::Mkdir { .. }
        | MetaCall::Rmdir { .. }
        | MetaCall::Unlink { .. }
        | MetaCall::Append { .. }
        | MetaCall::CutBack { .. }
        | MetaCall::Rename { .. }
        | MetaCall::Exchange { .. }
        | MetaCall::Symlink { .. }
        | MetaCall::Mknod { .. }
        | MetaCall::GetXattr { .. }
        | MetaCall::ListXattr { .. }
        | MetaCall::SetXattr { .. }
        | MetaCall::Link { .. }
        | MetaCall::Readlink { .. }
        | MetaCall::Readdir { .. }
        | MetaCall::Statfs
        | MetaCall::SyncAll
        | MetaCall::Lock(_)
        | MetaCall::Prove { .. }
        | MetaCall::SetLayout { .. } => (Right::Anyone, "a call of the name space"),
        MetaCall::Examine(_) => (Right::NotClients, "examining the name space"),
        MetaCall::Relay(_) => (Right::Admin, "laying out a file anew"),
        MetaCall::Restrict(_) => (Right::Server, "saying as whom a client's users act"),
    }
}

/// Whether a peer of this role that called itself `client` in its hello may send the call; the error says why not, and
/// which key it takes.
///
/// Only servers speak for others: a client that named another one could have that one's requests refused, by a newer epoch
/// of it, or pass its own requests off as the other's.
pub fn may_send(role: KeyRole, client: crate::ClientKey, call: &Call) -> Result<(), String> {
    let (right, what) = right_for(call);
    if !right.is_of(role) {
        let needed = match right {
            Right::Admin => "the admin key",
            Right::NotClients => "the admin or the server key",
            Right::Server | Right::Anyone => "the server key",
        };
        return Err(format!("{what} takes {needed} or certificate; the caller has shown that of role {role}"));
    }
    if role != KeyRole::Server && call.who().is_some_and(|who| who.client != client) {
        return Err(format!("{what} was asked for in the name of another client, which takes the server key"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ClientKey, Examine, Extents, FileKey, LockCall, LockWish, MoveCall, SeekTo, SpaceChange, Who};
    use impresario_layout::Layout;

    const OWN: ClientKey = ClientKey(7);

    /// One of each call, with the letters of the roles that may send it: client, admin, server.
    fn table() -> Vec<(&'static str, Call)> {
        let (who, file) = (Who { client: OWN, ..Who::default() }, FileKey(1));
        let (layout, extents) = (Layout::new(0, 1, 65536, 1).unwrap(), Extents::of(&[(0, 1)]));
        vec![
            ("cas", Call::Read { who, file, lane_offset: 0, len: 1 }),
            ("cas", Call::ReadList { who, file, extents: extents.clone() }),
            ("cas", Call::Write { who, file, lane_offset: 0 }),
            ("s", Call::WriteMerged { who, others: vec![crate::Sender::default()], file, lane_offset: 0 }),
            ("s", Call::WriteList { who, others: Vec::new(), file, extents: extents.clone() }),
            ("cas", Call::Sync { who, file }),
            ("as", Call::Truncate { who, file, len: 0 }),
            ("as", Call::Unlink { who, file }),
            ("cas", Call::ObjectStat { file }),
            ("cas", Call::FileRead { who, file, layout, made: 0, offset: 0, len: 1 }),
            ("cas", Call::FileWrite { who, file, layout, offset: 0 }),
            ("cas", Call::FileSync { who, file, layout }),
            ("cas", Call::FileStat { file, layout }),
            ("cas", Call::Meta { who, call: MetaCall::Statfs }),
            ("cas", Call::Meta { who, call: MetaCall::SyncAll }),
            ("cas", Call::Meta { who, call: MetaCall::Lock(LockCall { lease: 0, wish: LockWish::End }) }),
            ("as", Call::ListObjects { from: FileKey(0), max: 1 }),
            ("as", Call::SetAside { who, file }),
            ("a", Call::Scrub { file, offset: 0, max_bytes: 1 }),
            ("as", Call::Grants),
            ("as", Call::Members),
            ("a", Call::Meta { who, call: MetaCall::Relay(crate::RelayCall::Commit { handle: 1 }) }),
            (
                "s",
                Call::Meta {
                    who,
                    call: MetaCall::Restrict(crate::Restriction { squashed: None, proves: true, uids: vec![] }),
                },
            ),
            ("cas", Call::Meta { who, call: MetaCall::Prove { credential: vec![] } }),
            ("as", Call::Meta { who, call: MetaCall::Examine(Examine::File { path: vec![] }) }),
            ("cas", Call::Status),
            ("a", Call::SetPolicy { name: "fifo".into(), params: vec![], at_shared_ns: 0 }),
            ("cas", Call::Explain { job: 0, user: 0, client: 0, file: 0, op: "read".into(), folders: [0; 4] }),
            ("a", Call::ResetStatistics),
            ("a", Call::SetDiskOrder { order: "arrival".into() }),
            ("a", Call::Trace { on: true }),
            ("cas", Call::ChangeSpace { who, file, change: SpaceChange::Punch, lane_offset: 0, len: 1 }),
            ("cas", Call::FileChangeSpace { who, file, layout, change: SpaceChange::Punch, offset: 0, len: 1 }),
            ("cas", Call::ObjectSeek { file, from: 0, to: SeekTo::Hole }),
            ("cas", Call::FileSeek { file, layout, made: 0, from: 0, to: SeekTo::Data }),
            ("cas", Call::Prefetch { who, file, extents }),
            ("cas", Call::FilePrefetch { who, file, layout, offset: 0, len: 1 }),
            ("a", Call::EarlierRuns { runs: None }),
            ("a", Call::Move(MoveCall::End { number: 1 })),
        ]
    }

    #[test]
    fn each_role_may_send_what_the_table_says() {
        for (allowed, call) in table() {
            for role in KeyRole::ALL {
                let letter = &role.name()[..1];
                let judged = may_send(role, OWN, &call);
                assert_eq!(judged.is_ok(), allowed.contains(letter), "{role}: {call:?}: {judged:?}");
                if let Err(why) = judged {
                    assert!(why.contains("takes the") && why.contains("key"), "{why}");
                }
            }
        }
    }

    #[test]
    fn only_servers_speak_for_others() {
        for (allowed, call) in table().into_iter().filter(|(_, call)| call.who().is_some()) {
            assert!(may_send(KeyRole::Client, ClientKey(8), &call).is_err(), "{call:?}");
            assert!(may_send(KeyRole::Admin, ClientKey(8), &call).is_err(), "{call:?}");
            assert_eq!(may_send(KeyRole::Server, ClientKey(8), &call).is_ok(), allowed.contains('s'), "{call:?}");
        }
    }
}
