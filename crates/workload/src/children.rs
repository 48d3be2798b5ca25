//! Child processes of a benchmark: they end with it, and it stops exactly these.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// How long a process may take to end before it is killed.
const STOP_PATIENCE: Duration = Duration::from_secs(3);

/// Started processes; stopped when dropped.
#[derive(Default)]
pub struct Children {
    started: Vec<Started>,
}

struct Started {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Children {
    /// Starts a program; its output goes to a log.
    ///
    /// The process is killed when the *thread* that starts it ends: start it from one that lives long enough.
    pub fn start(&mut self, name: &str, program: &Path, arguments: &[String], log: &Path) -> Result<()> {
        let mut command = Command::new(program);
        command.args(arguments);
        self.start_command(name, command, log)
    }

    /// The same of a command.
    pub fn start_command(&mut self, name: &str, mut command: Command, log: &Path) -> Result<()> {
        let out = File::create(log).with_context(|| format!("making the log {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        // A separate process group: Ctrl-C in the terminal goes to us, and we stop the children in order.
        command.process_group(0);
        // SAFETY: between fork and exec only prctl is called, which is a plain system call.
        unsafe {
            command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        let child = command
            .spawn()
            .with_context(|| format!("starting {name} ({})", Path::new(command.get_program()).display()))?;
        self.started.push(Started { name: name.into(), child, log: log.into() });
        Ok(())
    }

    /// Names and process numbers.
    pub fn pids(&self) -> Vec<(String, u32)> {
        self.started.iter().map(|s| (s.name.clone(), s.child.id())).collect()
    }

    /// Sends a signal to one of them.
    pub fn signal(&mut self, name: &str, signal: libc::c_int) -> Result<()> {
        let at = self.position(name)?;
        let child = &mut self.started[at].child;
        if let (None, Ok(pid)) = (child.try_wait()?, i32::try_from(child.id())) {
            // SAFETY: the child has not been waited for, so its number is still its own.
            unsafe { libc::kill(pid, signal) };
        }
        Ok(())
    }

    /// Kills one of them; another of its name may then be started.
    pub fn kill(&mut self, name: &str) -> Result<()> {
        let at = self.position(name)?;
        let mut started = self.started.remove(at);
        started.child.kill()?;
        started.child.wait()?;
        Ok(())
    }

    fn position(&self, name: &str) -> Result<usize> {
        self.started.iter().position(|started| started.name == name).with_context(|| format!("{name} does not run"))
    }

    /// An error if one of them ended on its own, with the end of its output.
    pub fn check(&mut self) -> Result<()> {
        for started in &mut self.started {
            if let Some(status) = started.child.try_wait()? {
                let said = std::fs::read_to_string(&started.log).unwrap_or_default();
                let last: Vec<&str> = said.lines().rev().take(3).collect();
                let last = last.into_iter().rev().collect::<Vec<_>>().join(" | ");
                bail!("{} ended by itself ({status}): {last}", started.name);
            }
        }
        Ok(())
    }

    /// Asks all to end, waits, and kills those that do not.
    pub fn stop(&mut self) {
        for started in self.started.iter_mut().rev() {
            if let (Ok(None), Ok(pid)) = (started.child.try_wait(), i32::try_from(started.child.id())) {
                // SAFETY: the child has not been waited for, so its number is still its own.
                unsafe { libc::kill(pid, libc::SIGTERM) };
                // One that was stopped does not hear it before it goes on.
                // SAFETY: as above.
                unsafe { libc::kill(pid, libc::SIGCONT) };
            }
        }
        let deadline = Instant::now() + STOP_PATIENCE;
        for mut started in self.started.drain(..).rev() {
            while matches!(started.child.try_wait(), Ok(None)) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
            // Both fail only if it has already ended.
            _ = started.child.kill();
            _ = started.child.wait();
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stops_what_it_started_and_tells_what_ended() {
        let dir = tempfile::tempdir().unwrap();
        let mut children = Children::default();
        let sleep = ["60".to_string()];
        children.start("sleeper", Path::new("/bin/sleep"), &sleep, &dir.path().join("a")).unwrap();
        children.check().unwrap();
        let pid = children.pids()[0].1;
        children.signal("sleeper", libc::SIGSTOP).unwrap();
        children.start("other", Path::new("/bin/sleep"), &sleep, &dir.path().join("a")).unwrap();
        children.kill("other").unwrap();
        assert!(children.kill("other").unwrap_err().to_string().contains("other does not run"));
        children.check().unwrap();
        children.stop();
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
        let script = ["-c".to_string(), "echo no such folder; exit 3".into()];
        children.start("talker", Path::new("/bin/sh"), &script, &dir.path().join("b")).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        let error = loop {
            match children.check() {
                Err(e) => break e.to_string(),
                Ok(()) => assert!(Instant::now() < deadline),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        assert!(error.contains("talker") && error.contains("no such folder"), "{error}");
    }
}
