//! The server processes of `impresario up`: start, logs, deaths, and a shutdown within bounded time.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use impresario_base::lock::Mutex;
use impresario_base::time::wait_while;
use rustix::process::{Pid, Signal, kill_process};

/// Lines of a server's log that are kept for the report of its death.
const TAIL_LINES: usize = 20;
/// A longer line of a log is truncated: a faulty server must not fill our memory.
const LINE_MAX_BYTES: u64 = 8192;

/// One server process. Dropping it kills it if it still runs.
pub struct Server {
    /// Its name in the configuration.
    pub name: String,
    child: Child,
    ended: Option<ExitStatus>,
    tail: Arc<Mutex<VecDeque<String>>>,
    readers: Vec<std::thread::JoinHandle<()>>,
}

impl Server {
    /// Starts `impresario serve config --name name`; its log appears on standard error, each line with the
    /// server's name in front.
    pub fn start(config: &Path, name: &str) -> anyhow::Result<Server> {
        let program = std::env::current_exe().context("cannot find the program itself")?;
        let mut command = Command::new(program);
        command.arg("serve").arg(config).args(["--name", name]);
        // The server ends when this process does, even if this process is killed. Its own process group keeps Ctrl-C
        // from reaching it directly, so that the servers are stopped in order.
        command.args(["--parent", &std::process::id().to_string()]).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("cannot start server {name}"))?;
        let tail = Arc::new(Mutex::new(VecDeque::with_capacity(TAIL_LINES)));
        let pipes: [Option<Box<dyn Read + Send>>; 2] =
            [child.stdout.take().map(|p| Box::new(p) as _), child.stderr.take().map(|p| Box::new(p) as _)];
        let readers = pipes.into_iter().flatten().map(|pipe| {
            let (name, tail) = (name.to_string(), tail.clone());
            std::thread::spawn(move || relay(&name, pipe, &tail))
        });
        let readers = readers.collect();
        Ok(Server { name: name.into(), child, ended: None, tail, readers })
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its exit status, if it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().unwrap_or(None);
        }
        self.ended
    }

    /// Asks it to stop.
    pub fn ask_to_stop(&mut self) {
        self.signal(Signal::TERM);
    }

    fn signal(&mut self, signal: Signal) {
        if self.ended().is_none() {
            let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
            // It was not reaped, so the number is still its own.
            pid.map(|pid| kill_process(pid, signal));
        }
    }

    /// Waits for its end; kills it when `deadline` passes. True when it ended by itself.
    pub fn finish(&mut self, deadline: Instant) -> bool {
        while self.ended().is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        let by_itself = self.ended().is_some();
        if !by_itself {
            self.signal(Signal::KILL);
            self.ended = self.child.wait().ok();
        }
        by_itself
    }

    /// The report of its death: the cause, and the end of its log.
    pub fn obituary(&mut self) -> String {
        let how = match self.ended() {
            Some(status) => match (status.signal(), status.code()) {
                (Some(signal), _) => format!("was killed by signal {signal}"),
                (None, code) => format!("ended with exit status {}", code.unwrap_or_default()),
            },
            None => "still runs".into(),
        };
        // The pipes close with the process; wait briefly for its last output.
        wait_while(&|| !self.readers.iter().all(|reader| reader.is_finished()), Duration::from_millis(500));
        let tail = self.tail.lock();
        let mut text = format!("server {} {how}", self.name);
        if !tail.is_empty() {
            text += "; the end of its log:";
        }
        tail.iter().for_each(|line| text += &format!("\n    {line}"));
        text
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        let _ = self.child.wait();
    }
}

/// Copies a server's log to ours, line by line.
fn relay(name: &str, pipe: impl Read, tail: &Mutex<VecDeque<String>>) {
    let mut pipe = BufReader::new(pipe);
    let mut line = Vec::new();
    while matches!((&mut pipe).take(LINE_MAX_BYTES).read_until(b'\n', &mut line), Ok(n) if n > 0) {
        let text = String::from_utf8_lossy(&line).trim_end().to_string();
        tell!("[{name}] {text}");
        let mut tail = tail.lock();
        if tail.len() == TAIL_LINES {
            tail.pop_front();
        }
        tail.push_back(text);
        line.clear();
    }
}
