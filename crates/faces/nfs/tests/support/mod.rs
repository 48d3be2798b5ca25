//! A server over a file system in memory, for the tests.

use std::sync::Arc;

use impresario_nfs::testing::{Client, MemoryTree};
use impresario_nfs::{AccessRules, ExportSettings, Rules, Running, Settings, Squash, start};
use impresario_sched::PolicySpec;

/// A server and its file system.
pub struct Served {
    pub running: Running,
    pub tree: Arc<MemoryTree>,
}

/// Rules under which tests call: from any port, root is root.
pub fn open_rules() -> Rules {
    let access = AccessRules { squash: Squash::None, ..AccessRules::default() };
    Rules { access, privileged_ports: false, ..Rules::default() }
}

/// The same with changed access.
pub fn with_access(change: impl FnOnce(&mut AccessRules)) -> Rules {
    let mut rules = open_rules();
    change(&mut rules.access);
    rules
}

pub fn export(name: &str, tree: &Arc<MemoryTree>, rules: Rules) -> ExportSettings {
    ExportSettings { name: name.into(), backend: tree.clone(), folder: String::new(), rules, reopen: None }
}

/// A server of `/data`, changed as a test likes.
pub fn serve(tree: &Arc<MemoryTree>, change: impl FnOnce(&mut Settings)) -> Served {
    let mut settings = Settings::new(vec![export("/data", tree, open_rules())]).unwrap();
    settings.policy = PolicySpec::named("fifo");
    change(&mut settings);
    Served { running: start(settings).unwrap(), tree: tree.clone() }
}

impl Served {
    pub fn new() -> Served {
        serve(&MemoryTree::new(), |_| ())
    }

    pub fn client(&self) -> Client {
        Client::connect(self.running.addresses()[0]).unwrap()
    }

    /// A client and the handle of the export's root.
    pub fn mounted(&self) -> (Client, Vec<u8>) {
        let mut client = self.client();
        let root = client.mount("/data").unwrap();
        (client, root)
    }
}
