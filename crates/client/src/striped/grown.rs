//! The links to a cluster's data servers, of which there may come more while they are used.
//!
//! Servers are added behind the others and never taken away, so a number means the same server for ever and a link stays where
//! it is.

use std::sync::{Arc, OnceLock};

use impresario_base::lock::Mutex;

use crate::error::ClientError;
use crate::link::Link;

/// Gives the links of the servers behind the first so many that the cluster has by now.
pub(crate) type Growth = dyn Fn(usize) -> Result<Vec<Arc<Link>>, ClientError> + Send + Sync;

/// Links in the order of the configuration.
pub(super) struct Servers {
    links: Vec<Arc<Link>>,
    /// Those that came later.
    more: OnceLock<Box<Servers>>,
    /// Held while the cluster is looked at.
    looking: Mutex<()>,
}

impl Servers {
    pub(super) fn new(links: Vec<Arc<Link>>) -> Servers {
        Servers { links, more: OnceLock::new(), looking: Mutex::default() }
    }

    /// Those that were known from the start.
    pub(super) fn first(&self) -> &[Arc<Link>] {
        &self.links
    }

    pub(super) fn len(&self) -> usize {
        self.links.len() + self.more.get().map_or(0, |more| more.len())
    }

    pub(super) fn get(&self, number: usize) -> Option<&Link> {
        match number.checked_sub(self.links.len()) {
            None => self.links.get(number).map(|link| &**link),
            Some(further) => self.more.get()?.get(further),
        }
    }

    /// Looks for further servers until there are so many. An error is one of the configuration.
    pub(super) fn grow(&self, wanted: usize, growth: &Growth) -> Result<(), ClientError> {
        let _looking = self.looking.lock();
        let known = self.len();
        if known >= wanted {
            return Ok(());
        }
        let links = growth(known)?;
        let mut last = self;
        while let Some(more) = last.more.get() {
            last = more;
        }
        if !links.is_empty() {
            // Under the lock nobody else adds any.
            let _ = last.more.set(Box::new(Servers::new(links)));
        }
        Ok(())
    }
}
