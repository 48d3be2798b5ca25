//! The stable keys behind interned identities, which rules, weights and explanations use.

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
}
