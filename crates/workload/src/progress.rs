//! Progress of a long command on standard error, stopping it with Ctrl-C, and its results as JSON.

use std::io::{ErrorKind, IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::fs::{Access, access};
use signal_hook::iterator::Signals;

use crate::compare;
use crate::stop::Stop;
use crate::usage::usage;
use impresario_base::machine::ending_signals;
use impresario_base::replace::replaceable;
use impresario_base::units::show_seconds;

/// A second signal after this time ends the program at once. An earlier one is a copy of the first: `timeout` and some
/// shells signal both the program and its process group.
const IMPATIENCE: Duration = Duration::from_secs(1);

/// Sets the returned flag at Ctrl-C, SIGTERM, and, unless `nohup` has it ignored, when the terminal is closed. A second signal, more than a second later, ends the program and its
/// servers at once and leaves the cluster's folder behind.
pub fn catch_signals() -> Result<Stop> {
    let stop = Stop::new();
    let mut signals = Signals::new(ending_signals()).context("catching signals")?;
    let flag = stop.clone();
    let listen = move || {
        let mut first: Option<Instant> = None;
        for _ in signals.forever() {
            flag.set();
            if first.get_or_insert_with(Instant::now).elapsed() > IMPATIENCE {
                std::process::exit(130);
            }
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(listen).context("catching signals")?;
    Ok(stop)
}

/// Refuses files that cannot be written: a command asks before it measures, so that a mistyped name costs no measurement.
/// Changes nothing.
pub fn check_outputs(files: &[Option<&Path>]) -> Result<()> {
    let mut named = files.iter().copied().flatten();
    named.try_for_each(|file| writable(file).map_err(|why| usage(format!("{}: {why}", file.display()))))
}

/// The same of a file in whose place a complete one is put in the end: it counts whether its folder can be written to.
pub fn check_replaced(file: &Path) -> Result<()> {
    let refuse = |why| usage(format!("{}: {why}", file.display()));
    let there = replaceable(file).map_err(|error| refuse(error.to_string()))?;
    folder_writable(&there).map_err(refuse)
}

fn writable(file: &Path) -> Result<(), String> {
    match file.metadata() {
        Ok(there) if there.is_dir() => Err("it is a directory; name a file".into()),
        Ok(_) => may_write(file),
        Err(error) if error.kind() == ErrorKind::NotFound => folder_writable(file),
        Err(error) => Err(error.to_string()),
    }
}

/// Whether files can be made where this one is.
fn folder_writable(file: &Path) -> Result<(), String> {
    let folder = file.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !folder.is_dir() {
        return Err(format!("there is no directory {}; create it first", folder.display()));
    }
    may_write(folder)
}

fn may_write(path: &Path) -> Result<(), String> {
    access(path, Access::WRITE_OK).map_err(|error| format!("it cannot be written: {error}"))
}

/// All that a command writes in the end: each was tried, whatever became of the others.
pub fn all_written<const N: usize>(results: [Result<()>; N]) -> Result<()> {
    let mut errors: Vec<_> = results.into_iter().filter_map(Result::err).collect();
    match errors.len() {
        0 => Ok(()),
        1 => Err(errors.remove(0)),
        _ => bail!("{}", errors.iter().map(|error| format!("{error:#}")).collect::<Vec<_>>().join("; ")),
    }
}

/// Writes a value as JSON to the file that the user named, if any.
pub fn write_json(path: Option<&Path>, value: &impl serde::Serialize) -> Result<()> {
    write_text(path, || Ok(serde_json::to_string_pretty(value)? + "\n"))
}

/// Writes a text to the file that the user named, if any.
pub fn write_text(path: Option<&Path>, text: impl FnOnce() -> Result<String>) -> Result<()> {
    let Some(path) = path else { return Ok(()) };
    std::fs::write(path, text()?).with_context(|| format!("writing {}", path.display()))
}

/// One line that is updated on a terminal; a line per step elsewhere.
pub struct Progress {
    terminal: bool,
    shown: bool,
    /// When the last of many frequent steps was shown.
    shown_at: Option<Instant>,
}

/// How often frequent steps are shown: on a terminal, and elsewhere.
const EVERY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

impl Progress {
    /// On standard error.
    #[expect(clippy::new_without_default, reason = "it looks at standard error, so it is no plain default")]
    pub fn new() -> Progress {
        Progress { terminal: std::io::stderr().is_terminal(), shown: false, shown_at: None }
    }

    /// Shows a step in place of the previous one. Errors of standard error are ignored.
    pub fn show(&mut self, text: &str) {
        let mut err = std::io::stderr().lock();
        if self.terminal {
            // Truncated rather than wrapped: a wrapped line could not be erased.
            let text: String = text.chars().take(110).collect();
            _ = write!(err, "\r\x1b[K{text}");
        } else {
            _ = writeln!(err, "{text}");
        }
        _ = err.flush();
        self.shown = true;
    }

    /// Shows a step of many, unless one was shown a moment ago.
    pub fn show_now_and_then(&mut self, text: &str) {
        let every = if self.terminal { EVERY.0 } else { EVERY.1 };
        if self.shown_at.is_none_or(|at| at.elapsed() >= every) {
            self.shown_at = Some(Instant::now());
            self.show(text);
        }
    }

    /// Leaves the line.
    pub fn end(&mut self) {
        if self.terminal && std::mem::take(&mut self.shown) {
            _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }

    /// A step of an experiment: a bar, what runs, what is left.
    pub fn experiment(&mut self, p: &compare::Progress<'_>) {
        let done = p.done;
        let share = f64::from(done) / f64::from(p.wanted.max(1));
        let filled = (share * 20.0) as usize;
        let left = p.left.filter(|l| !l.is_zero());
        let left = left.map_or(String::new(), |l| format!(", about {} left", show_seconds(l.as_secs_f64())));
        let what = format!("pair {}, {}, {}", p.pair, p.case, p.system);
        let text = match p.result {
            // Elsewhere than on a terminal one line a run is enough.
            None if !self.terminal => return,
            None => what,
            Some(r) => {
                let doubt = if r.counts() { "" } else { ", does not count" };
                format!("{what}: {}{doubt}", show_seconds(r.makespan_s))
            }
        };
        self.show(&format!("[{:<20}] {done}/{}{left} · {text}", "#".repeat(filled.min(20)), p.wanted));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use anyhow::anyhow;

    use super::*;
    use crate::usage::Usage;

    #[test]
    fn files_that_cannot_be_written_are_refused_before_and_none_is_touched() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("there"), "mine").unwrap();
        let check = |name: &str| check_outputs(&[None, Some(at("there").as_path()), Some(at(name).as_path())]);
        check("new.json").unwrap();
        for (name, why) in
            [("nowhere/new.json", "create it first"), ("", "it is a directory"), ("there/new", "Not a dir")]
        {
            let error = check(name).unwrap_err();
            assert!(error.is::<Usage>() && error.to_string().contains(why), "{error}");
        }
        assert_eq!(std::fs::read_to_string(at("there")).unwrap(), "mine");
        assert!(!at("new.json").exists());
        check_outputs(&[Some(Path::new("/dev/null")), Some(Path::new("relative.json"))]).unwrap();
    }

    #[test]
    fn what_is_replaced_need_not_be_writable_itself() {
        let folder = tempfile::tempdir().unwrap();
        let there = folder.path().join("a.toml");
        std::fs::write(&there, "mine").unwrap();
        std::fs::set_permissions(&there, std::fs::Permissions::from_mode(0o444)).unwrap();
        check_replaced(&there).unwrap();
        check_replaced(&folder.path().join("new.toml")).unwrap();
        for (path, why) in [(folder.path().join("none/a.toml"), "create it first"), ("/dev/null".into(), "is no file")]
        {
            let error = check_replaced(&path).unwrap_err();
            assert!(error.is::<Usage>() && error.to_string().contains(why), "{error}");
        }
    }

    #[test]
    fn one_output_that_fails_does_not_keep_the_others() {
        let folder = tempfile::tempdir().unwrap();
        let json = folder.path().join("b.json");
        let written = all_written([
            write_text(Some(folder.path()), || Ok("page".into())),
            write_json(Some(&json), &1),
            Err(anyhow!("a pipe")),
        ]);
        let error = written.unwrap_err().to_string();
        assert!(error.contains("writing ") && error.contains("a pipe"), "{error}");
        assert_eq!(std::fs::read_to_string(json).unwrap(), "1\n");
        all_written([write_json(None, &1)]).unwrap();
    }
}
