//! What programs say over their sockets: who they are, and which files they opened and closed.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use impresario_ring::message::{ToClient, ToManager, register};
use impresario_ring::{Consumer, now_ns, ring_bytes};
use rustix::event::epoll::{self, EventData, EventFlags};

use super::{CutOff, MESSAGES_A_TURN, Messages, Service};
use crate::advice::OpenFile;
use crate::config::BackendChoice;
use crate::manager::client::{Advised, Open};
use crate::manager::files::Acting;
use crate::manager::lessons::{Opened, Student};
use crate::manager::pool::{LentFile, Target, Work};
use crate::manager::registration::{examine, is_eventfd};
use crate::manager::sink::RecordedFile;
use crate::manager::socket::{self, Received};

/// Mapped files of one program that are looked after when it has closed them, at most.
const MAPPED_MAX: usize = 256;
/// How often it is looked whether they are mapped still.
const LOOK_AT_MAPS_EVERY_NS: u64 = 5_000_000_000;

impl Service {
    /// Takes a turn of messages.
    pub(super) fn messages(&mut self, id: u64) -> Result<Messages, CutOff> {
        for _ in 0..MESSAGES_A_TURN {
            let Some(client) = self.clients.get_mut(&id) else { return Ok(Messages::End) };
            if client.asked_until_ns.is_some() {
                return Ok(Messages::All);
            }
            match socket::receive(client.socket.as_fd()) {
                Received::Nothing => return Ok(Messages::All),
                Received::End => return Ok(Messages::End),
                Received::Malformed(e, descriptors) => {
                    let uid = client.uid;
                    descriptors.into_iter().for_each(|fd| self.pool.let_go(fd, uid));
                    return Err(e.to_string());
                }
                Received::Lost(descriptors) => {
                    let uid = client.uid;
                    descriptors.into_iter().for_each(|fd| self.pool.let_go(fd, uid));
                    if !std::mem::replace(&mut client.told_of_limit, true) {
                        tracing::warn!(pid = client.pid, "a file is not looked after: no descriptor is left here");
                    }
                }
                Received::Message(message, descriptors) => {
                    let uid = client.uid;
                    // What of them is not kept is closed by a worker, never here: a file system may make that wait.
                    let mut descriptors: Vec<Option<OwnedFd>> = descriptors.into_iter().map(Some).collect();
                    let taken = self.message(id, message, &mut descriptors);
                    descriptors.into_iter().flatten().for_each(|fd| self.pool.let_go(fd, uid));
                    if self.pool.is_clogged(uid) {
                        return Err("its files cannot be closed as fast as it sends them".into());
                    }
                    taken?;
                }
            }
        }
        Ok(Messages::More)
    }

    /// Descriptors that are kept are taken out of the list.
    fn message(&mut self, id: u64, message: ToManager, descriptors: &mut [Option<OwnedFd>]) -> Result<(), CutOff> {
        let Some(client) = self.clients.get_mut(&id) else { return Ok(()) };
        match (message, descriptors) {
            (ToManager::Hello { .. }, [Some(ring), event]) => {
                if client.ring.is_some() {
                    return Err("it said Hello twice".into());
                }
                if !event.as_ref().is_some_and(is_eventfd) {
                    return Err("what should be an event descriptor is none".into());
                }
                let mut ring = Consumer::map(ring).map_err(|e| e.to_string())?;
                let bytes = ring_bytes(ring.slots()) as u64;
                if !self.users.take_ring(client.uid, bytes) {
                    return Err("the rings of its user's programs take as much memory as allowed".into());
                }
                let Some(event) = event.take() else { return Ok(()) };
                if self.small_bytes > 0 {
                    ring.set_small(self.small_bytes);
                    ring.set_lull(client.lull.until_waited_ns());
                }
                // Each write wakes the manager once, whether or not the count is ever read.
                let added =
                    epoll::add(&self.epoll, &event, EventData::new_u64(id * 2 + 1), EventFlags::IN | EventFlags::ET);
                client.ring = Some((ring, event));
                added.map_err(|e| format!("its event descriptor cannot be waited for: {e}"))?;
                let welcome = ToClient::Welcome { mode: self.mode, patterns_len: self.patterns.1 };
                match socket::send(client.socket.as_fd(), welcome, Some(self.patterns.0.as_fd())) {
                    // A program that has ended already may have left accesses.
                    Err(e) if !matches!(e.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {
                        return Err(format!("it does not take its welcome: {e}"));
                    }
                    _ => {}
                }
                self.ask(id);
            }
            (ToManager::Helper { client: of }, _) if client.ring.is_none() => return self.helper(id, of),
            _ if client.ring.is_none() => return Err("its first message is not Hello".into()),
            (ToManager::Register { file, flags }, [fd]) => self.register(id, file, flags, fd),
            (ToManager::Unregister { file }, _) => {
                client.closes(file);
                self.activate(id);
            }
            _ => return Err("a message without its descriptors".into()),
        }
        Ok(())
    }

    /// This connection takes orders for another one of the same process.
    fn helper(&mut self, id: u64, of: u64) -> Result<(), CutOff> {
        let Some((pid, uid)) = self.clients.get(&id).map(|c| (c.pid, c.uid)) else { return Ok(()) };
        let wanting = self.clients.get_mut(&of).filter(|c| pid != 0 && (c.pid, c.uid) == (pid, uid));
        let Some((client, (ring, _))) = wanting.and_then(|c| c.ring.as_mut().map(|ring| (&c.inside, ring))) else {
            return Err("it offers hints for a program that it is not".into());
        };
        // From here on it is the workers' matter.
        ring.want_helper(None);
        let inside = client.clone();
        if let Some(helper) = self.clients.remove(&id) {
            let _ = epoll::delete(&self.epoll, &helper.socket);
            self.active.remove(&id);
            self.users.disconnect(uid);
            self.programs_ever -= 1;
            if let Some(before) = inside.hang_up() {
                self.pool.hang_up(before, uid);
            }
            inside.connected(helper.socket);
        }
        Ok(())
    }

    fn register(&mut self, id: u64, number: u32, flags: u32, sent: &mut Option<OwnedFd>) {
        if self.clients.get(&id).is_none_or(|c| c.files.contains_key(&number)) {
            return; // a number is used once
        }
        let Some(examined) = sent.as_ref().and_then(|fd| examine(fd.as_fd())) else { return };
        // Of a file that is only written, a record is kept and nothing else done. Its neighbours are in memory, and those of the files
        // that the program reads would seem to be, too.
        let is_hinted = self.advise && examined.cached && examined.readable && flags & register::READ != 0;
        let kinds = self.clients.get(&id).map(|client| client.kinds.clone()).unwrap_or_default();
        let found = sent.as_ref().filter(|_| is_hinted).and_then(|fd| self.monitored(&examined, fd.as_fd(), &kinds));
        let is_planned = found.as_ref().is_some_and(|found| found.entry.is_plan());
        // What there is a plan for need not be learnt.
        let followed = found.as_ref().filter(|found| found.entry.online).map(|found| found.learnt.is_none());
        let Some(client) = self.clients.get_mut(&id) else { return };
        let uid = client.uid;
        if !self.users.open(uid, client.files.len(), self.pool.closing(uid)) {
            if !std::mem::replace(&mut client.told_of_limit, true) {
                tracing::warn!(
                    pid = client.pid,
                    uid = client.uid,
                    "more open files than its limit are not looked after"
                );
            }
            return;
        }
        let advised = found
            .and_then(|monitored| Some((monitored, Arc::new(LentFile::new(sent.take()?, uid, &self.pool)))))
            .map(|(monitored, fd)| {
                let inside = Some(&client.inside);
                let acting = Acting { id: examined.id, fd: &fd, uid: client.uid, inside, pool: &self.pool };
                let file = (examined.path.as_path(), examined.size_bytes);
                self.files.opened(&acting, client.id, &monitored, file, &mut self.users, now_ns());
                if let Some(siblings) = self.siblings.as_ref().filter(|_| monitored.entry.online) {
                    siblings.opened(&examined.path, &mut client.told, now_ns());
                }
                let mut mode = OpenFile::default();
                // A file met again is somewhere; only one just opened is at its beginning.
                if flags & register::FOUND == 0
                    && let Some(how) = mode.opened(&monitored.regions)
                {
                    self.files.read_ahead(&acting, how);
                }
                Advised { id: examined.id, fd: fd.clone(), mode, is_mapped: false }
            });
        self.next_number += 1;
        let recorded = RecordedFile {
            number: self.next_number,
            path: examined.path,
            id: examined.id,
            size_bytes: examined.size_bytes,
            changed_unix_ns: examined.changed_unix_ns,
            pid: client.pid,
            uid: client.uid,
            program: client.program.clone(),
        };
        let is_small = recorded.size_bytes <= self.small_bytes.into() && !is_planned;
        if is_small && let Some((ring, _)) = &mut client.ring {
            let ahead = self.siblings.as_ref().map(|siblings| siblings.ahead(&client.told, now_ns()));
            if client.lull.told(ring.waited_ns(), ahead.unwrap_or_default()) {
                ring.set_lull(client.lull.until_waited_ns());
            }
        }
        self.recorder.tell(|sink| sink.opened(&recorded));
        if let Some((taught, is_new)) = client.taught.clone().zip(followed) {
            let student = Student {
                uid: client.uid,
                program: client.program.clone(),
                together: taught.together,
                runs: taught.runs,
                keep: taught.keep,
                began_unix_ns: client.began_unix_ns,
            };
            let opened = Opened { file: &recorded, is_written: flags & register::WRITE != 0, is_new };
            let before = client.lesson;
            client.lesson = self.lessons.opened(before, &student, &opened, now_ns());
            if before.is_some() && client.lesson.is_none() {
                // Its run was given up, and the rest of it teaches nothing.
                client.taught = None;
            }
        }
        client.files.insert(number, Open { advised, is_small, is_leaving: false, number: self.next_number });
    }

    pub(super) fn unregister(&mut self, id: u64, number: u32) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        let Some(open) = client.files.remove(&number) else { return };
        if let Some(lesson) = client.lesson
            && open.advised.as_ref().is_some_and(|advised| self.files.has_strayed(advised.id))
        {
            self.lessons.strayed(lesson);
        }
        match open.advised {
            // Its pages are needed as long as the map is there. Few programs map more files than this.
            Some(advised) if advised.is_mapped && client.mapped.len() < MAPPED_MAX => client.mapped.push(advised),
            advised => {
                self.users.close(client.uid);
                if let Some(Advised { id: file, fd, .. }) = advised {
                    let inside = Some(&client.inside);
                    let acting = Acting { id: file, fd: &fd, uid: client.uid, inside, pool: &self.pool };
                    self.files.closed(&acting, id, &mut self.users, now_ns());
                }
            }
        }
    }

    /// Files that a program mapped and closed are not looked after any more.
    pub(super) fn let_maps_go(&mut self, id: u64, is_over: impl Fn(&Advised) -> bool) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        for Advised { id: file, fd, .. } in client.mapped.extract_if(.., |mapped| is_over(mapped)) {
            self.users.close(client.uid);
            let inside = Some(&client.inside);
            let acting = Acting { id: file, fd: &fd, uid: client.uid, inside, pool: &self.pool };
            self.files.closed(&acting, id, &mut self.users, now_ns());
        }
    }

    /// Now and then, has a worker look which of these a program has mapped still.
    pub(super) fn ask_for_maps(&mut self, id: u64, now: u64) {
        let Some(client) = self.clients.get_mut(&id).filter(|client| now >= client.look_at_maps_ns) else { return };
        let files: Vec<_> = client.mapped.iter().map(|Advised { id, fd, .. }| (*id, fd.clone())).collect();
        let Some((file, fd)) = files.first().cloned() else { return };
        let (backend, progress) = (BackendChoice::Auto, Arc::default());
        let target = Target { id: file, fd, backend, uid: client.uid, progress, inside: None };
        if self.pool.submit(target, Work::Maps(id, client.pid, files)) {
            client.look_at_maps_ns = u64::MAX;
        }
    }

    /// A worker has looked.
    pub(super) fn unmapped(&mut self, id: u64, files: &[Arc<LentFile>], now: u64) {
        if let Some(client) = self.clients.get_mut(&id) {
            client.look_at_maps_ns = now + LOOK_AT_MAPS_EVERY_NS;
        }
        self.let_maps_go(id, |mapped| files.iter().any(|fd| Arc::ptr_eq(fd, &mapped.fd)));
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::sync::mpsc;
    use std::time::Duration;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::config::Hints;
    use crate::manager::client::Client;
    use crate::manager::pool::Found;
    use crate::manager::{Control, Options};

    #[test]
    fn a_file_that_is_mapped_anew_while_a_worker_looks_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("socket")).unwrap();
        let control = Control {
            commands: mpsc::channel().1,
            event: Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()),
        };
        let mut service = Service::new(Options::new(Hints::default()), listener.into(), control).unwrap();
        let (socket, _program) = UnixStream::pair().unwrap();
        service.clients.insert(1, Client::new(1, socket.into(), 7, std::process::id(), 0));
        let path = dir.path().canonicalize().unwrap().join("file");
        std::fs::write(&path, "data").unwrap();
        let map_and_close = |service: &mut Service| {
            let fd = OwnedFd::from(std::fs::File::open(&path).unwrap());
            let id = examine(fd.as_fd()).unwrap().id;
            assert!(service.users.open(7, 0, 0));
            let advised = Advised { id, fd: Arc::new(fd.into()), mode: OpenFile::default(), is_mapped: true };
            service.clients.get_mut(&1).unwrap().mapped.push(advised);
        };
        map_and_close(&mut service);
        service.ask_for_maps(1, 0);
        let done = service.done.recv_timeout(Duration::from_secs(60)).unwrap();
        let Some(Found::Unmapped(1, files)) = done.found else { panic!("{done:?}") };
        map_and_close(&mut service);
        service.unmapped(1, &files, 0);
        let mapped = &service.clients[&1].mapped;
        assert!(mapped.len() == 1 && !Arc::ptr_eq(&mapped[0].fd, &files[0]), "{mapped:?}");
        service.pool.stop(Duration::from_secs(20));
    }
}
