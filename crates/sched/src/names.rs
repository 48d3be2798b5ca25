//! The stable keys behind interned identities, which rules, weights and explanations use.

use impresario_base::folders::Folders;

use crate::types::{ClientId, FileId, JobId, Op, UserId};

/// The key of each identity in use. An identity that was never named is its own key.
#[derive(Clone, Debug, Default)]
pub struct Names {
    files: Vec<u64>,
    clients: Vec<u64>,
    jobs: Vec<u64>,
    users: Vec<u64>,
}

fn set(keys: &mut Vec<u64>, id: u32, key: u64) {
    let at = id as usize;
    while keys.len() <= at {
        keys.push(keys.len() as u64);
    }
    keys[at] = key;
}

fn get(keys: &[u64], id: u32) -> u64 {
    keys.get(id as usize).copied().unwrap_or(u64::from(id))
}

impl Names {
    /// Names a file. Interned identities are small and reused, so the table stays as large as what is outstanding.
    pub fn name_file(&mut self, id: FileId, key: u64) {
        set(&mut self.files, id.0, key);
    }

    /// Names a client.
    pub fn name_client(&mut self, id: ClientId, key: u64) {
        set(&mut self.clients, id.0, key);
    }

    /// Names an application.
    pub fn name_job(&mut self, id: JobId, key: u64) {
        set(&mut self.jobs, id.0, key);
    }

    /// Names a user.
    pub fn name_user(&mut self, id: UserId, key: u64) {
        set(&mut self.users, id.0, key);
    }

    /// Key of a file.
    pub fn file(&self, id: FileId) -> u64 {
        get(&self.files, id.0)
    }

    /// Key of a client.
    pub fn client(&self, id: ClientId) -> u64 {
        get(&self.clients, id.0)
    }

    /// Key of an application.
    pub fn job(&self, id: JobId) -> u64 {
        get(&self.jobs, id.0)
    }

    /// Key of a user.
    pub fn user(&self, id: UserId) -> u64 {
        get(&self.users, id.0)
    }
}

/// What a call on names does. Such calls carry no data; a metadata server limits how many go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum NameOp {
    /// Looks at attributes or links, or asks for totals.
    Stat,
    /// Opens a file.
    Open,
    /// Lists a directory.
    List,
    /// Makes a file, directory, link or special file.
    Create,
    /// Removes a name or a directory.
    Remove,
    /// Moves or exchanges names.
    Rename,
    /// Changes attributes, lengths or layouts.
    Change,
}

/// What a request does, to data or to names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Does {
    /// It reads or writes a file, or what else is done to one.
    Data(Op),
    /// It is a call on names.
    Names(NameOp),
}

impl Does {
    /// What rules, commands and explanations have words for, with these.
    pub const ALL: [(&'static str, Does); 9] = [
        ("read", Does::Data(Op::Read)),
        ("write", Does::Data(Op::Write)),
        ("stat", Does::Names(NameOp::Stat)),
        ("open", Does::Names(NameOp::Open)),
        ("list", Does::Names(NameOp::List)),
        ("create", Does::Names(NameOp::Create)),
        ("remove", Does::Names(NameOp::Remove)),
        ("rename", Does::Names(NameOp::Rename)),
        ("change", Does::Names(NameOp::Change)),
    ];

    /// What that word says.
    pub fn named(word: &str) -> Option<Does> {
        Does::ALL.iter().find(|(known, _)| *known == word).map(|(_, does)| *does)
    }

    /// The word for it, if there is one.
    pub fn word(self) -> Option<&'static str> {
        Does::ALL.iter().find(|(_, does)| *does == self).map(|(word, _)| *word)
    }

    /// As a request has it. The operation of a call on names means nothing.
    pub fn parts(self) -> (Op, Option<NameOp>) {
        match self {
            Does::Data(op) => (op, None),
            Does::Names(call) => (Op::Read, Some(call)),
        }
    }
}

/// What is known of a request beside its extent and its identities.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Naming {
    /// It is a call on names; its extent and its operation then mean nothing.
    pub call: Option<NameOp>,
    /// The folders that the path leads through by which it was asked for, or its file was opened.
    pub folders: Folders,
}

/// The identities and operation of a request, by stable keys: what rules match against.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Who {
    /// Application.
    pub job: u64,
    /// User.
    pub user: u64,
    /// Client.
    pub client: u64,
    /// File.
    pub file: u64,
    /// Operation.
    pub op: Op,
    /// What else is known of it.
    pub naming: Naming,
}

impl Who {
    /// What it does.
    pub fn does(&self) -> Does {
        self.naming.call.map_or(Does::Data(self.op), Does::Names)
    }
}
