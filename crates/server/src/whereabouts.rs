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
use impresario_base::presence::{Anchor, Instead};

use crate::listener::Vitals;

/// How often it looks: what is acknowledged in between may be lost.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Two looks so far apart must find it gone: file systems of other machines may be between two states for a moment.
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(200);

/// A folder that a server opens, or has opened.
pub(crate) struct Anchored {
    dir: PathBuf,
    anchors: Vec<Anchor>,
}

impl Anchored {
    /// To be made before the server opens anything there: what comes in its place from now on is noticed.
    pub(crate) fn before_opening(dir: &Path) -> Anchored {
        // Whoever opens it says what is wrong with it, or makes it.
        Anchored { dir: dir.into(), anchors: Anchor::at(dir).into_iter().collect() }
    }

    /// The server has opened it. `file`: what it keeps open there, and nobody replaces while it runs; `None`: the folder alone. Gives
    /// `None` if it cannot be looked after, and why the server must not start if it has opened another one.
    pub(crate) fn opened(mut self, name: &str, file: Option<&str>) -> io::Result<Result<Option<Anchored>, String>> {
        if self.anchors.is_empty() {
            self.anchors.push(Anchor::at(&self.dir)?);
        }
        if let Some(file) = file {
            self.anchors.push(Anchor::at(&self.dir.join(file))?);
        }
        let dir = self.dir.display();
        let looks = || {
            instead(&self.anchors).and_then(|_| {
                std::thread::sleep(LOOK_AGAIN_AFTER);
                instead(&self.anchors)
            })
        };
        match looks() {
            None => Ok(Ok(Some(self))),
            Some(Instead { what, is_certain: true }) => Ok(Err(format!(
                "its folder {dir} was moved or replaced while the server started ({what}), or a file system was mounted or unmounted \
                 there; start it again"
            ))),
            Some(Instead { what, .. }) => {
                tracing::warn!(
                    name,
                    "the folder {dir} seems to be another at each look ({what}): should it be moved or replaced while the server \
                     runs, that is not noticed"
                );
                Ok(Ok(None))
            }
        }
    }

    /// Looks after it from now on, until the watch is dropped.
    pub(crate) fn watch(self, vitals: Vitals) -> io::Result<Watch> {
        let (stop, stopped) = channel::<()>();
        let loss = Arc::<Loss>::default();
        let found = loss.clone();
        let anchors = Arc::new(self.anchors);
        // Not for longer than the server has it open: it could not be unmounted.
        let looked_at = Arc::downgrade(&anchors);
        let look = move || {
            let mut was_found = true;
            loop {
                let pause = if was_found { LOOK_EVERY } else { LOOK_AGAIN_AFTER };
                if stopped.recv_timeout(pause) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
                let Some(instead) = looked_at.upgrade().and_then(|anchors| instead(&anchors)) else {
                    was_found = true;
                    continue;
                };
                if std::mem::take(&mut was_found) {
                    continue;
                }
                let (name, dir, instead) = (vitals.name(), self.dir.display(), instead.what);
                let why = format!(
                    "{name}: its folder {dir} is not where it was ({instead}): it was moved or replaced, or a file system was \
                     mounted over it or unmounted; nothing is served from it any more. Put the folder in its place again, and \
                     start the server"
                );
                tracing::error!("{why}");
                vitals.lose_folder(&why);
                return found.tell(why);
            }
        };
        // Not joined: it may hang with the file system.
        std::thread::Builder::new().name("whereabouts".into()).spawn(look)?;
        Ok(Watch { loss, _stop: stop, _anchors: anchors })
    }
}

fn instead(anchors: &[Anchor]) -> Option<Instead> {
    anchors.iter().find_map(Anchor::instead)
}

/// A folder that is looked after.
pub(crate) struct Watch {
    loss: Arc<Loss>,
    _stop: Sender<()>,
    _anchors: Arc<Vec<Anchor>>,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_does_not_start_where_its_folder_moved_meanwhile() {
        let top = tempfile::tempdir().unwrap();
        let dir = top.path().join("folder");
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(dir.join("lock"), "").unwrap();
        let opened = |anchored: Anchored| anchored.opened("data.0", Some("lock")).unwrap();
        assert!(opened(Anchored::before_opening(&dir)).unwrap().is_some());
        let anchored = Anchored::before_opening(&dir);
        std::fs::rename(&dir, top.path().join("aside")).unwrap();
        assert!(anchored.opened("data.0", None).unwrap().is_err_and(|why| why.contains("start it again")));
    }

    #[test]
    fn a_mount_while_a_server_starts_is_noticed() {
        if !impresario_testing::require("root") {
            return;
        }
        let top = tempfile::tempdir().unwrap();
        let anchored = Anchored::before_opening(top.path());
        if let Err(why) =
            rustix::mount::mount("tmpfs", top.path(), "tmpfs", rustix::mount::MountFlags::empty(), c"size=1m")
        {
            return impresario_testing::skip("mounts", why);
        }
        std::fs::write(top.path().join("lock"), "").unwrap();
        let opened = anchored.opened("data.0", Some("lock"));
        rustix::mount::unmount(top.path(), rustix::mount::UnmountFlags::DETACH).unwrap();
        assert!(opened.unwrap().is_err_and(|why| why.contains("start it again")));
    }
}
