//! The credentials of a program that connects to servers.

use std::sync::Arc;

use impresario_config::{Address, Config, Protect, Security, Users};
use impresario_wire::{ClientKey, Hello, KeyRole, Role};

use crate::{Certificates, KeyError, Keyring, Munge, Proven};

/// What a program proves itself with, if it has anything.
#[derive(Clone, Debug)]
pub struct Access {
    security: Security,
    /// The minimum protection of frames that the program requires.
    pub(crate) protect: Protect,
    proof: Option<Proof>,
    /// Why there is none.
    missing: Option<Arc<KeyError>>,
    /// What vouches for the program's user, if some [[export]] asks for that.
    munge: Option<Munge>,
}

/// What a program proves itself with.
#[derive(Clone, Debug)]
pub(crate) enum Proof {
    Keys(Arc<Keyring>),
    Certificates(Arc<Certificates>),
}

impl Default for Access {
    /// Without keys.
    fn default() -> Self {
        Access { security: Security::None, protect: Protect::default(), proof: None, missing: None, munge: None }
    }
}

impl Access {
    /// For a program of a cluster in this role. Missing keys or certificates are an error only if a server requires them.
    pub fn of(config: &Config, role: KeyRole) -> Access {
        let cluster = &config.cluster;
        let wanted = config.servers().any(|server| cluster.security.needs_key(server.address()));
        let found = wanted.then(|| match cluster.security {
            Security::Tls => Certificates::of(config, role).map(|found| Proof::Certificates(Arc::new(found))),
            _ => Keyring::find(&cluster.key_dir, role).map(|found| Proof::Keys(Arc::new(found))),
        });
        let (proof, missing) = match found {
            Some(Ok(proof)) => (Some(proof), None),
            Some(Err(error)) => (None, Some(Arc::new(error))),
            None => (None, None),
        };
        let is_asked = role == KeyRole::Client && config.export.iter().any(|export| export.users == Users::Munge);
        let munge = is_asked.then(|| Munge::at(cluster.munge_socket.as_deref()));
        Access { security: cluster.security, protect: cluster.protect, proof, missing, munge }
    }

    /// A credential of the program's user for a connection to a server of names, if that may ask for it.
    pub(crate) fn credential(&self, hello: &Hello) -> Result<Vec<u8>, String> {
        match (&self.munge, hello.role) {
            (Some(munge), Role::Meta | Role::Io) => munge.prove(hello.who.client),
            _ => Ok(Vec::new()),
        }
    }

    /// A credential of a user for whom the program acts, for the connections of a client. May take seconds if the daemon does not
    /// answer.
    pub fn credential_of(&self, user: Proven, client: ClientKey) -> Result<Vec<u8>, String> {
        let munge =
            self.munge.as_ref().ok_or("this program's configuration has no [[export]] with `users = \"munge\"`")?;
        munge.prove_as(user, client)
    }

    /// What to prove to a server at this address; `None` if it requires nothing.
    pub(crate) fn proof_for(&self, address: &Address) -> Result<Option<&Proof>, String> {
        if !self.security.needs_key(&address.to_string()) {
            return Ok(None);
        }
        let what = if self.security == Security::Tls { "certificate" } else { "key" };
        match (&self.proof, &self.missing) {
            (Some(proof), _) => Ok(Some(proof)),
            (None, Some(missing)) => Err(format!("it takes a {what} (`security`), and {missing}")),
            (None, None) => Err(format!("it takes a {what} (`security`), and this program has none")),
        }
    }
}
