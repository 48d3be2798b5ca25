//! Which programs are connected, by name, and what is known of them.

use std::sync::Arc;

use impresario_ring::message::Mode;
use rustc_hash::FxHashMap;

use super::KindsOf;
use crate::learn::{Kind, program_of_process};

/// Programs of which what is known is kept; of more nothing is.
const KNOWN_MAX: usize = 256;

/// The names of programs.
pub(super) struct Programs {
    /// The one that is started.
    started: Arc<str>,
    load: Option<KindsOf>,
    known: FxHashMap<Arc<str>, Arc<[Kind]>>,
    /// Whether names are needed.
    is_asked: bool,
}

impl Programs {
    /// Names are needed where accesses are recorded and where something is known of programs.
    pub(super) fn new(started: Option<String>, load: Option<KindsOf>, mode: Mode) -> Programs {
        let is_asked = load.is_some() || mode == Mode::Record;
        Programs { started: started.unwrap_or_default().into(), load, known: FxHashMap::default(), is_asked }
    }

    /// The name of the program that is started; empty when it is not known.
    pub(super) fn started(&self) -> Arc<str> {
        self.started.clone()
    }

    /// The name of a process's program, or else of the one that is started.
    pub(super) fn name_of(&self, pid: u32) -> Arc<str> {
        let own = if self.is_asked { program_of_process(pid) } else { None };
        own.map_or_else(|| self.started(), Arc::from)
    }

    /// What is known of a program.
    pub(super) fn kinds_of(&mut self, name: &Arc<str>) -> Arc<[Kind]> {
        let Some(load) = self.load.as_ref().filter(|_| !name.is_empty()) else { return Arc::default() };
        if let Some(known) = self.known.get(name) {
            return known.clone();
        }
        if self.known.len() >= KNOWN_MAX {
            return Arc::default();
        }
        let kinds: Arc<[Kind]> = load(name).into();
        self.known.insert(name.clone(), kinds.clone());
        kinds
    }
}
