//! Whether a server's folder is still where it was opened: a thread of its own looks every few seconds.
//!
//! A server keeps its folder open. When that is moved away or replaced, or a file system is mounted over it or taken away from
//! below it, calls would go on to succeed, and what they acknowledge nobody would find. Such a server serves no further call.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use impresario_base::lock::Mutex;
use impresario_base::presence::Anchor;

use crate::listener::Vitals;

/// How often it looks: what is acknowledged in between may be lost.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// A folder that was just opened.
pub(crate) struct Anchored {
    dir: PathBuf,
    anchor: Anchor,
}

impl Anchored {
    /// `file`: what the server keeps open in it, and nobody replaces while it runs; empty: the folder alone.
    pub(crate) fn new(dir: &Path, file: &str) -> io::Result<Anchored> {
        Ok(Anchored { dir: dir.into(), anchor: Anchor::at(&dir.join(file))? })
    }

    /// Looks after it from now on, until the watch is dropped.
    pub(crate) fn watch(self, vitals: Vitals) -> io::Result<Watch> {
        let (stop, stopped) = channel::<()>();
        let loss = Arc::<Loss>::default();
        let found = loss.clone();
        let look = move || {
            while stopped.recv_timeout(LOOK_EVERY) == Err(RecvTimeoutError::Timeout) {
                if let Some(instead) = self.anchor.instead() {
                    let (name, dir) = (vitals.name(), self.dir.display());
                    let why = format!(
                        "{name}: its folder {dir} is not where it was ({instead}): it was moved or replaced, or a file system was \
                         mounted over it or unmounted; nothing is served from it any more. Put the folder in its place again, and \
                         start the server"
                    );
                    tracing::error!("{why}");
                    vitals.lose_folder(&why);
                    return found.tell(why);
                }
            }
        };
        // Not joined: it may hang with the file system.
        std::thread::Builder::new().name("whereabouts".into()).spawn(look)?;
        Ok(Watch { loss, _stop: stop })
    }
}

/// A folder that is looked after.
pub(crate) struct Watch {
    loss: Arc<Loss>,
    _stop: Sender<()>,
}

impl Watch {
    /// What is known of the loss of the folder.
    pub(crate) fn loss(&self) -> &Arc<Loss> {
        &self.loss
    }
}

/// Whether the folder was lost.
#[derive(Default)]
pub(crate) struct Loss {
    why: OnceLock<String>,
    then: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Loss {
    /// One line with the remedy, if it was.
    pub(crate) fn why(&self) -> Option<&str> {
        self.why.get().map(String::as_str)
    }

    /// Has this called once it is lost; at once, if it is already.
    pub(crate) fn then(&self, then: impl FnOnce() + Send + 'static) {
        let mut slot = self.then.lock();
        match self.why() {
            None => *slot = Some(Box::new(then)),
            Some(_) => {
                drop(slot);
                then();
            }
        }
    }

    fn tell(&self, why: String) {
        let mut slot = self.then.lock();
        let _ = self.why.set(why); // one thread looks
        let then = slot.take();
        drop(slot);
        then.into_iter().for_each(|then| then());
    }
}
