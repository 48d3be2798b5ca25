//! The credentials of a program that connects to servers.

use std::sync::Arc;

use impresario_config::{Address, Config, Protect, Security};
use impresario_wire::KeyRole;

use crate::{KeyError, Keyring};

/// A program's keys, if it has any.
#[derive(Clone, Debug)]
pub struct Access {
    security: Security,
    /// The minimum protection of frames that the program requires.
    pub(crate) protect: Protect,
    keys: Option<Arc<Keyring>>,
    /// Why there are no keys.
    missing: Option<Arc<KeyError>>,
}

impl Default for Access {
    /// Without keys.
    fn default() -> Self {
        Access { security: Security::None, protect: Protect::default(), keys: None, missing: None }
    }
}

impl Access {
    /// For a program of a cluster in this role. Missing keys are an error only if a server requires them.
    pub fn of(config: &Config, role: KeyRole) -> Access {
        let cluster = &config.cluster;
        let wanted = config.servers().any(|server| cluster.security.needs_key(server.address()));
        let found = wanted.then(|| Keyring::find(&cluster.key_dir, role));
        let (keys, missing) = match found {
            Some(Ok(keys)) => (Some(Arc::new(keys)), None),
            Some(Err(error)) => (None, Some(Arc::new(error))),
            None => (None, None),
        };
        Access { security: cluster.security, protect: cluster.protect, keys, missing }
    }

    /// The keys for a server at this address; `None` if it requires none.
    pub(crate) fn keys_for(&self, address: &Address) -> Result<Option<&Keyring>, String> {
        if !self.security.needs_key(&address.to_string()) {
            return Ok(None);
        }
        match (&self.keys, &self.missing) {
            (Some(keys), _) => Ok(Some(keys)),
            (None, Some(missing)) => Err(format!("it takes a key (`security`), and {missing}")),
            (None, None) => Err("it takes a key (`security`), and this program has none".into()),
        }
    }
}
