//! Names and objects of running servers, asked page by page.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use impresario_client::{ClientError, Identity, Link, LinkOptions, ServerPosition, Vet};
use impresario_config::{Config, Data, META_NAME};
use impresario_store::Scrubbed;
use impresario_wire::frame::ANSWER_BODY_MAX_BYTES;
use impresario_wire::{Answer, Call, Examine, FileKey, FileRecord, MetaCall, Role, Welcome};

use super::{Finding, Kind, Known, Looked, Names, Objects, Outcome, Page, Report, Sides, Unscrubbed};

/// Objects of one page.
const PAGE_OBJECTS: u32 = 4096;

/// Connects to the servers of a configuration; of data servers, to those that are wanted.
pub(super) fn connect(config: &Config, wants: impl Fn(&Data) -> bool, report: &mut Report) -> Sides {
    let nothing = |config: &Config| Sides { names: None, objects: config.data.iter().map(|_| None).collect() };
    let identity = match Identity::of_program() {
        Ok(identity) => Arc::new(identity),
        Err(error) => {
            report.unchecked.push(error.to_string());
            return nothing(config);
        }
    };
    // With the state of the server, so that one that does not answer is found now.
    let link = |role, server: &str, address: &str, vet| {
        let options = LinkOptions {
            timeout: Duration::from_millis(config.cluster.request_timeout_ms),
            vet,
            place: ServerPosition::of(config, server),
            access: impresario_transport::Access::of(config, impresario_wire::KeyRole::Admin),
            ..LinkOptions::new(role, ANSWER_BODY_MAX_BYTES)
        };
        let link = Link::asking((server, address), &identity, options)?;
        let status = link.ask(Call::Status)?;
        Ok::<_, ClientError>((link, status))
    };
    let meta = link(Role::Meta, META_NAME, &config.meta.address, None);
    let (meta, status) = match meta {
        Ok((link, Answer::Text(status))) => (link, serde_json::from_str(&status).unwrap_or_default()),
        Ok(_) => return nothing(config),
        Err(error) => {
            report.unchecked.push(format!("{error}; or stop all servers and check their folders without --online"));
            return nothing(config);
        }
    };
    let known = known(&status);
    let number = |text: &serde_json::Value| u64::from_str_radix(text.as_str()?, 16).ok();
    let key_prefix = status.get("key_prefix").and_then(number);
    let names = RunningNames { link: meta, key_prefix };
    let objects = config.data.iter().map(|data| {
        if data.is_retired() || !wants(data) {
            return None;
        }
        let is_other = Arc::new(AtomicBool::new(false));
        let (wanted, other) = (known.get(&data.name).copied(), is_other.clone());
        let vet = Vet(Arc::new(move |welcome: &Welcome| {
            if wanted.is_none_or(|wanted| wanted == welcome.store) {
                return Ok(());
            }
            other.store(true, Ordering::Relaxed);
            Err(format!("it serves folder {:016x}, which is not the one that the cluster knows", welcome.store))
        }));
        match link(Role::Data, &data.name, &data.address, Some(vet)) {
            Ok((link, _)) => Some(Box::new(RunningObjects(link)) as Box<dyn Objects>),
            Err(error) if is_other.load(Ordering::Relaxed) => {
                let (kind, outcome, server) = (Kind::Identity, Outcome::Left, Some(data.name.clone()));
                let what = format!("{error}: is the right disk mounted?");
                report.add(Finding { kind, outcome, server, path: None, key: None, what });
                None
            }
            Err(error) => {
                report.unchecked.push(error.to_string());
                None
            }
        }
    });
    let objects = objects.collect();
    Sides { names: Some(Box::new(names)), objects }
}

fn known(status: &serde_json::Value) -> Known {
    let stores = status.get("stores").and_then(|stores| stores.as_object());
    let number = |text: &serde_json::Value| u64::from_str_radix(text.as_str()?, 16).ok();
    stores.into_iter().flatten().filter_map(|(name, store)| Some((name.clone(), number(store)?))).collect()
}

fn unexpected() -> String {
    "a server gave an answer to another question; is it of this version?".into()
}

struct RunningNames {
    link: Link,
    key_prefix: Option<u64>,
}

impl RunningNames {
    fn call(&self, call: MetaCall) -> Result<(Answer, u64), String> {
        let call = Call::Meta { who: self.link.identity().who(), call };
        let reply = self.link.call(call, &[], None, self.deadline()).map_err(|error| error.to_string())?;
        Ok((reply.answer, reply.session))
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.link.options().timeout
    }
}

impl Names for RunningNames {
    fn key_prefix(&self) -> Option<u64> {
        self.key_prefix
    }

    fn examine(&mut self, what: Examine) -> Result<Looked, String> {
        match self.call(MetaCall::Examine(what))?.0 {
            Answer::Examined { entries, walk, renamed, is_sure } => Ok(Looked { entries, walk, renamed, is_sure }),
            _ => Err(unexpected()),
        }
    }

    /// An open for writing marks the file, and with its end the server asks the objects for the length.
    fn settle(&mut self, path: &[u8], _size: u64, file: FileKey) -> Result<(), String> {
        let opened = self.call(MetaCall::Open { path: path.into(), write: true })?;
        let (Answer::Opened(opened), session) = opened else { return Err(unexpected()) };
        let close = MetaCall::Close { handle: opened.handle, wrote: true };
        let close = Call::Meta { who: self.link.identity().who(), call: close };
        self.link.call_in(session, close, self.deadline()).map_err(|error| error.to_string())?;
        if opened.file == file { Ok(()) } else { Err("it was replaced meanwhile".into()) }
    }

    fn finish_removal(&mut self, _file: &FileRecord, _has_name: bool) -> Result<bool, String> {
        Ok(false)
    }
}

struct RunningObjects(Link);

impl RunningObjects {
    fn call(&self, call: Call) -> Result<Answer, String> {
        self.0.ask(call).map_err(|error| error.to_string())
    }
}

impl Objects for RunningObjects {
    fn page(&mut self, from: u64) -> Result<Page, String> {
        match self.call(Call::ListObjects { from: FileKey(from), max: PAGE_OBJECTS })? {
            Answer::Objects { objects, foreign, next } => {
                let objects = objects.iter().map(|object| (object.file.0, object.size, object.age_s)).collect();
                Ok(Page { objects, foreign, next: next.map(|key| key.0) })
            }
            _ => Err(unexpected()),
        }
    }

    fn look(&mut self, key: u64) -> Result<Option<u64>, String> {
        match self.0.ask(Call::ObjectStat { file: FileKey(key) }) {
            Ok(Answer::Object(info)) => Ok((info.made != 0).then_some(info.size)),
            Err(error) if error.errno() == libc::EIDRM => Ok(None),
            Ok(_) => Err(unexpected()),
            Err(error) => Err(error.to_string()),
        }
    }

    fn remove(&mut self, key: u64, for_good: bool) -> Result<(), String> {
        let (who, file) = (self.0.identity().who(), FileKey(key));
        match self.call(if for_good { Call::Unlink { who, file } } else { Call::SetAside { who, file } })? {
            Answer::Done => Ok(()),
            _ => Err(unexpected()),
        }
    }

    fn scrub(&mut self, key: u64, offset: u64, max_bytes: u64) -> Result<Option<Scrubbed>, Unscrubbed> {
        let max_bytes = u32::try_from(max_bytes).unwrap_or(u32::MAX);
        let answer = self.0.ask(Call::Scrub { file: FileKey(key), offset, max_bytes }).map_err(|error| Unscrubbed {
            // What a server that is away says nothing of is not asked for piece by piece.
            is_of_piece: matches!(&error, ClientError::Fault { fault, .. } if fault.errno == libc::EIO),
            why: error.to_string(),
        });
        match answer? {
            Answer::Scrubbed(found) => Ok(found.map(|found| Scrubbed {
                read_bytes: found.read_bytes,
                good_blocks: found.good_blocks,
                learnt_blocks: found.learnt_blocks,
                unknown_blocks: found.unknown_blocks,
                corrupt: found.corrupt,
                next: found.next,
            })),
            _ => Err(Unscrubbed { why: unexpected(), is_of_piece: false }),
        }
    }

    /// The server does that itself.
    fn end_scrub(&mut self) -> Result<(), String> {
        Ok(())
    }
}
