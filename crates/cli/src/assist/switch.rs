//! `impresario assist on`, `off` and `status`: guided I/O for all programs of a user's logins, or of everybody's.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use impresario_assist::learn::Store;
use impresario_assist::manager::is_abandoned;
use impresario_base::replace::{replace, replaceable};

use super::learn::{count, within};
use super::library::{self, Library};
use super::report::answering_socket;
use crate::front::command_file;
use crate::{print, usage};

/// Where the shells of all users look for what to read at a login.
const PROFILES: &str = "/etc/profile.d";
/// The file there, and in a user's folder of settings.
const SNIPPET: &str = "impresario-assist.sh";
/// What ends a line of ours in a file of the user's.
const MARK: &str = "# impresario assist on";
/// The first line of such a file that was not there before; it ends with [`MARK`], too.
const MADE: &[u8] = b"# This file was made by # impresario assist on\n";
/// How the other files of ours begin. One that begins otherwise is the user's, and neither replaced nor removed.
const SNIPPET_HEAD: &str = "# Guided I/O for the programs of a login: written by `impresario assist on`, removed by `impresario assist off`.\n";
const UNIT_HEAD: &str = "# Written by `impresario assist on`, removed by `impresario assist off`.\n";
/// The user's service, below the folder of settings, and the folder of those that systemd starts with the user's first login.
const UNIT: &str = "systemd/user/impresario-assist.service";
const WANTS: &str = "systemd/user/default.target.wants";
/// What the user's manager follows until the user says else.
const HINTS: &str = "{ \"Directory\": [ { \"Path\": \"/\", \"Recursive\": true, \"Online\": true } ] }\n";
/// Programs of which `status` tells what was learnt, and how long the file system is waited for on which that is kept.
const LEARNT_SHOWN: usize = 5;
const LEARNT_WITHIN: Duration = Duration::from_secs(5);
/// A program that is tried with the library is waited for so long.
const TRIED_WITHIN: Duration = Duration::from_secs(10);

/// Switch guided I/O on for all programs that you start from now on
///
/// Writes a file for shells, which sets LD_PRELOAD at a login if the library is there, one line in the profiles of your shells that reads it, a
/// hints file, and a service of systemd that runs your advice manager while you are logged in. What was learnt of your programs
/// is used. Says what it writes; a second time it changes nothing. A program is tried with the library first. `impresario assist off` takes
/// all of it back.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario assist on
  sudo impresario assist on --system
  impresario assist status
  impresario assist off")]
pub struct On {
    #[command(flatten)]
    whose: Whose,
}

/// Switch guided I/O off again
///
/// Removes what `impresario assist on` wrote, and nothing that was there before. Programs that run keep the library; new logins are as before. A hints file that was changed
/// stays.
#[derive(clap::Args)]
pub struct Off {
    #[command(flatten)]
    whose: Whose,
}

/// Tell whether guided I/O is on
///
/// For your logins, for this shell, whether an advice manager answers, and what was learnt of your programs, and when. The exit status is 0 where it is on for your logins (with
/// --system, for everybody's), 1 where it is off.
#[derive(clap::Args)]
pub struct Status {
    #[command(flatten)]
    whose: Whose,
}

#[derive(clap::Args)]
struct Whose {
    /// For all users of this machine, by a file in /etc/profile.d
    #[arg(long)]
    system: bool,
    /// Another folder in its place, as of an image for nodes
    #[arg(long, value_name = "DIR", requires = "system")]
    profiles: Option<PathBuf>,
}

impl Whose {
    fn place(&self) -> Result<Place> {
        if self.system {
            let folder = self.profiles.clone().unwrap_or_else(|| PROFILES.into());
            return Ok(Place { snippet: std::path::absolute(folder)?.join(SNIPPET), user: None });
        }
        let set = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let home =
            set("HOME").ok_or_else(|| usage("HOME names no folder, so it is not known whose logins are meant"))?;
        let settings = set("XDG_CONFIG_HOME").unwrap_or_else(|| home.join(".config"));
        let (zsh, shell) =
            (set("ZDOTDIR").unwrap_or_else(|| home.clone()), std::env::var_os("SHELL").unwrap_or_default());
        let has_zsh = Path::new(&shell).file_name() == Some(OsStr::new("zsh"));
        // Bash reads the first of its three that is there, so none is made that would hide another one.
        let profiles = [
            (home.join(".profile"), true),
            (home.join(".bash_profile"), false),
            (home.join(".bash_login"), false),
            (zsh.join(".zprofile"), has_zsh),
        ];
        let profiles = profiles.into_iter().filter(|(path, is_made)| *is_made || path.exists());
        let user = User {
            profiles: profiles.map(|(path, _)| path).collect(),
            hints: settings.join("impresario/hints.json"),
            unit: settings.join(UNIT),
            wanted: settings.join(WANTS).join("impresario-assist.service"),
        };
        Ok(Place { snippet: settings.join("impresario").join(SNIPPET), user: Some(user) })
    }
}

/// What is written.
struct Place {
    snippet: PathBuf,
    user: Option<User>,
}

struct User {
    profiles: Vec<PathBuf>,
    hints: PathBuf,
    unit: PathBuf,
    wanted: PathBuf,
}

pub fn on(args: On) -> Result<ExitCode> {
    let place = args.whose.place()?;
    let library = library::find()?;
    let word = suitable(&library)?;
    try_with(&word)?;
    telling(|told| {
        written(&place.snippet, SNIPPET_HEAD, &snippet(&word, &library.file()), told)?;
        let Some(user) = &place.user else {
            *told += "New logins of all users have guided I/O where a manager runs: systemctl enable --now impresario-assist\n";
            return Ok(());
        };
        user.serve(told)?;
        let line = line(&place.snippet);
        let add = |before: Option<&[u8]>| {
            let text = before.unwrap_or_default();
            if has_line(text, &line) {
                return text.to_vec();
            }
            let made = if before.is_none() || has_line(text, MADE) { MADE } else { &[] };
            let mut text = without(text);
            if text.last().is_some_and(|last| *last != b'\n') {
                text.push(b'\n');
            }
            [made, &*text, &*line].concat()
        };
        user.profiles.iter().try_for_each(|profile| changed(profile, add, told))?;
        *told += &format!(
            "Guided I/O is on from your next login on. In this shell: . {}\nYour manager starts with your next login, or now: systemctl \
             --user daemon-reload; systemctl --user start impresario-assist (without systemd: impresario assist daemon --config {})\n",
            place.snippet.display(),
            user.hints.display()
        );
        Ok(())
    })
}

pub fn off(args: Off) -> Result<ExitCode> {
    let place = args.whose.place()?;
    telling(|told| {
        if let Some(user) = &place.user {
            let mut there = user.profiles.iter().filter(|profile| profile.exists());
            there.try_for_each(|profile| changed(profile, |text| without(text.unwrap_or_default()), told))?;
            if std::fs::read_link(&user.wanted).is_ok_and(|unit| unit == user.unit) {
                gone(&user.wanted, told)?;
            }
            removed(&user.unit, UNIT_HEAD, told)?;
            if std::fs::read(&user.hints).is_ok_and(|text| text == HINTS.as_bytes()) {
                removed(&user.hints, HINTS, told)?;
            }
        }
        removed(&place.snippet, SNIPPET_HEAD, told)?;
        if place.user.is_none() && place.snippet.exists() {
            anyhow::bail!("{} was not written by `impresario assist on`; remove it yourself", place.snippet.display());
        }
        *told += match (told.is_empty(), &place.user) {
            (true, _) => "Guided I/O is off already.\n",
            (false, None) => {
                "Guided I/O is off for new logins. The manager goes on: systemctl disable --now impresario-assist\n"
            }
            (false, Some(_)) => {
                "Guided I/O is off for new logins. Your manager goes on: systemctl --user stop impresario-assist\n"
            }
        };
        Ok(())
    })
}

/// Says what was done, also where not all of it could be.
fn telling(act: impl FnOnce(&mut String) -> Result<()>) -> Result<ExitCode> {
    let mut told = String::new();
    let acted = act(&mut told);
    let code = print(told)?;
    acted.map(|()| code)
}

impl User {
    /// Writes what runs the user's manager.
    fn serve(&self, told: &mut String) -> Result<()> {
        if !self.hints.exists() {
            written(&self.hints, HINTS, HINTS.as_bytes(), told)?;
        }
        let own = command_file().context("finding this program's own file")?;
        written(&self.unit, UNIT_HEAD, &unit(&own, &self.hints), told)?;
        if self.wanted.symlink_metadata().is_err() {
            let made = make_folder_of(&self.wanted).and_then(|()| std::os::unix::fs::symlink(&self.unit, &self.wanted));
            made.with_context(|| format!("making {}", self.wanted.display()))?;
            *told += &format!("Made {}.\n", self.wanted.display());
        }
        Ok(())
    }
}

pub fn status(args: Status) -> Result<ExitCode> {
    let place = args.whose.place()?;
    let is_read = |profile: &PathBuf| std::fs::read(profile).is_ok_and(|text| without(&text) != text);
    let is_on = place.snippet.is_file() && place.user.as_ref().is_none_or(|user| user.profiles.iter().any(is_read));
    let shown = place.snippet.display();
    let mut told = match is_on {
        true => format!("Guided I/O is on for new logins: {shown}\n"),
        false => "Guided I/O is off for new logins; `impresario assist on` switches it on.\n".to_string(),
    };
    let missing = || {
        let text = std::fs::read(&place.snippet).ok()?;
        let file = text.split(|b| *b == b'\n').find_map(|line| line.strip_prefix(LIBRARY_LINE.as_bytes()))?.to_vec();
        let file = PathBuf::from(OsStr::from_bytes(&file));
        (!file.is_file()).then_some(file)
    };
    if let Some(library) = missing().filter(|_| is_on) {
        told += &format!("The library is not there, so nothing is set: {}\n", library.display());
    }
    let here =
        std::env::var_os("LD_PRELOAD").is_some_and(|set| set.to_string_lossy().contains("libimpresario_assist.so"));
    told += if here { "It is on in this shell.\n" } else { "It is off in this shell.\n" };
    let socket = answering_socket();
    told += &match socket.exists() && !is_abandoned(&socket) {
        true => format!("The advice manager listens at {}.\n", socket.display()),
        false => format!("No advice manager listens at {}: programs run as usual.\n", socket.display()),
    };
    told += &learnt();
    print(told)?;
    Ok(if is_on { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What was learnt last of this user's programs, and when.
fn learnt() -> String {
    let Some(store) = Store::of_user(|name| std::env::var_os(name)) else { return String::new() };
    let folder = store.folder().to_path_buf();
    let Some(all) = within(LEARNT_WITHIN, move || store.newest(LEARNT_SHOWN)) else {
        return format!("What was learnt is not known: the file system of {} does not answer.\n", folder.display());
    };
    let (newest, programs) = all;
    if programs == 0 {
        return "Nothing was learnt of your programs yet.\n".into();
    }
    let mut told = format!("Learnt of {}, last of:\n", count(programs as u64, "program"));
    for (learnt, ago) in newest {
        let used = learnt.kinds.iter().filter(|kind| kind.is_used()).count();
        let (kinds, runs) = (count(learnt.kinds.len() as u64, "kind"), count(learnt.runs, "run"));
        told += &format!("  {}, {}: {runs}, hints for {used} of {kinds} of files\n", learnt.program, since(ago));
    }
    told + "`impresario assist learn --list` tells what.\n"
}

/// How long ago something was, for people.
fn since(ago: Duration) -> String {
    let seconds = ago.as_secs();
    match seconds {
        0..60 => "just now".into(),
        60..3600 => format!("{} ago", count(seconds / 60, "minute")),
        3600..86_400 => format!("{} ago", count(seconds / 3600, "hour")),
        _ => format!("{} ago", count(seconds / 86_400, "day")),
    }
}

/// The word for `LD_PRELOAD`, if programs of every kind start with it as without.
fn suitable(library: &Library) -> Result<OsString> {
    if !library.is_for_all() {
        return Err(usage(format!(
            "{} is for programs of one kind; `impresario assist library FOLDER` lays it out for all, and \
             IMPRESARIO_ASSIST_LIBRARY=FOLDER names that",
            library.file().display()
        )));
    }
    let word = library.to_preload();
    let file = library.file();
    // They mean something else to the loader, or end a line of the file for shells.
    if file.as_os_str().as_bytes().iter().any(|byte| matches!(byte, b' ' | b':' | b'$' | b'\n' | b'\t')) {
        return Err(usage(format!("{} has a character in its path that LD_PRELOAD cannot hold", file.display())));
    }
    Ok(word)
}

/// A program that does not start with the library must not be in the way of a login.
fn try_with(word: &OsStr) -> Result<()> {
    let mut program = Command::new("/bin/sh");
    program.args(["-c", "exit 0"]).env("LD_PRELOAD", word).env("IMPRESARIO_ASSIST_SOCKET", "/nowhere");
    program.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = program.spawn().context("starting /bin/sh with the library")?;
    let end = Instant::now() + TRIED_WITHIN;
    while child.try_wait()?.is_none() {
        if Instant::now() >= end {
            let _ = child.kill();
            anyhow::bail!("/bin/sh does not end with the library; nothing is switched on");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let ran = child.wait_with_output()?;
    if !ran.status.success() || !ran.stderr.is_empty() {
        let said = String::from_utf8_lossy(&ran.stderr).trim().to_string();
        anyhow::bail!(
            "/bin/sh does not start as usual with the library ({}: {said}); nothing is switched on",
            ran.status
        );
    }
    Ok(())
}

/// What stands before the library's path in the file for shells.
const LIBRARY_LINE: &str = "# The library: ";

/// For shells at a login: POSIX, quiet, and of no effect where anything is missing, also where errors or unset variables end a shell.
fn snippet(word: &OsStr, file: &Path) -> Vec<u8> {
    let head = "# With IMPRESARIO_ASSIST=off, or without the library, nothing is set.\n";
    let (file_word, word) = (quoted(file.as_os_str()), quoted(word));
    let library = [LIBRARY_LINE.as_bytes(), file.as_os_str().as_bytes(), b"\n"].concat();
    let test = [b"if [ \"${IMPRESARIO_ASSIST-}\" != off ] && [ -r ", &*file_word, b" ]; then\n"].concat();
    let set = [
        b"\tcase \"${LD_PRELOAD-}\" in\n\t*libimpresario_assist.so*) ;;\n\t*)\n\t\tLD_PRELOAD=".as_slice(),
        &word,
        b"\"${LD_PRELOAD:+:$LD_PRELOAD}\"\n\t\texport LD_PRELOAD\n\t\t;;\n\tesac\n",
    ];
    // The library looks for a user's manager by itself, and for the machine's only where a user has no folder for one.
    let socket =
        "\tif [ -z \"${IMPRESARIO_ASSIST_SOCKET-}\" ] && [ ! -S \"${XDG_RUNTIME_DIR-}/impresario-assist.sock\" ] &&
\t\t[ -S /run/impresario/assist.sock ]; then
\t\tIMPRESARIO_ASSIST_SOCKET=/run/impresario/assist.sock
\t\texport IMPRESARIO_ASSIST_SOCKET
\tfi
fi
";
    [SNIPPET_HEAD.as_bytes(), head.as_bytes(), &library, &test, &set.concat(), socket.as_bytes()].concat()
}

/// The line in a profile that reads the file for shells.
fn line(snippet: &Path) -> Vec<u8> {
    let path = quoted(snippet.as_os_str());
    [b"[ ! -r ", &*path, b" ] || . ", &*path, b" ", MARK.as_bytes(), b"\n"].concat()
}

fn has_line(text: &[u8], line: &[u8]) -> bool {
    text.split_inclusive(|byte| *byte == b'\n').any(|there| there == line)
}

/// A profile without our lines.
fn without(text: &[u8]) -> Vec<u8> {
    let is_ours = |line: &&[u8]| line.trim_ascii_end().ends_with(MARK.as_bytes());
    text.split_inclusive(|byte| *byte == b'\n').filter(|line| !is_ours(line)).collect::<Vec<_>>().concat()
}

/// A word for a shell.
fn quoted(word: &OsStr) -> Vec<u8> {
    let parts: Vec<&[u8]> = word.as_bytes().split(|byte| *byte == b'\'').collect();
    [b"'", &*parts.join(&b"'\\''"[..]), b"'"].concat()
}

/// The user's manager, as systemd runs it.
fn unit(own: &Path, hints: &Path) -> Vec<u8> {
    // In a unit, a percent sign and a backslash have a meaning, within quotes, too.
    let word = |path: &Path| path.display().to_string().replace('\\', "\\\\").replace('"', "\\\"").replace('%', "%%");
    let (own, hints) = (word(own), word(hints));
    format!(
        "{UNIT_HEAD}[Unit]
Description=Impresario advice manager (guided I/O)
Documentation=man:impresario-assist(1)

[Service]
Type=notify
ExecStart=\"{own}\" assist daemon --config \"{hints}\"
ExecReload=/bin/kill -HUP $MAINPID
Restart=on-failure
RestartSec=1
RestartPreventExitStatus=2

[Install]
WantedBy=default.target
"
    )
    .into_bytes()
}

fn make_folder_of(path: &Path) -> io::Result<()> {
    std::fs::create_dir_all(path.parent().unwrap_or(Path::new("/")))
}

/// Whether a file was written by [`written`], by how it begins. A link was not.
fn is_ours(path: &Path, head: &str) -> bool {
    path.symlink_metadata().is_ok_and(|there| there.is_file())
        && std::fs::read(path).is_ok_and(|text| text.starts_with(head.as_bytes()))
}

/// Writes a file of ours, which begins with `head`, unless it is as it should be.
fn written(path: &Path, head: &str, text: &[u8], told: &mut String) -> Result<()> {
    if std::fs::read(path).is_ok_and(|there| there == text) {
        *told += &format!("{} is as it should be.\n", path.display());
        return Ok(());
    }
    if path.symlink_metadata().is_ok() && !is_ours(path, head) {
        anyhow::bail!("{} is there and was not written by `impresario assist on`; move it away", path.display());
    }
    let write = || {
        make_folder_of(path)?;
        replace(path, 0o644, text)?;
        // Logins of all users read it, whatever root's umask.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o644))
    };
    write().with_context(|| format!("writing {}", path.display()))?;
    *told += &format!("Wrote {}.\n", path.display());
    Ok(())
}

/// Changes a file of the user's, which need not be there. One that was not there before, and of which nothing is left, goes; a link
/// stays, as does an empty file that the user has made.
fn changed(path: &Path, change: impl Fn(Option<&[u8]>) -> Vec<u8>, told: &mut String) -> Result<()> {
    let change = || -> io::Result<Option<bool>> {
        let place = replaceable(path)?;
        let is_link = path.symlink_metadata().is_ok_and(|there| there.is_symlink());
        let (before, mode) = match std::fs::read(&place) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && is_link => {
                return Err(io::Error::other("it is a link that leads to no file; make that file, or remove the link"));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => (None, 0o644),
            read => (Some(read?), place.metadata()?.permissions().mode() & 0o777),
        };
        let after = change(before.as_deref());
        let before = before.unwrap_or_default();
        if after == before {
            return Ok(None);
        }
        if after.is_empty() && !is_link && has_line(&before, MADE) {
            std::fs::remove_file(path)?;
        } else {
            replace(&place, mode, &after)?;
        }
        Ok(Some(after.len() > before.len()))
    };
    match change().with_context(|| format!("changing {}", path.display()))? {
        Some(true) => *told += &format!("One line more in {}.\n", path.display()),
        Some(false) => *told += &format!("One line less in {}.\n", path.display()),
        None => {}
    }
    Ok(())
}

/// Removes a file of ours, if it is there.
fn removed(path: &Path, head: &str, told: &mut String) -> Result<()> {
    if is_ours(path, head) { gone(path, told) } else { Ok(()) }
}

fn gone(path: &Path, told: &mut String) -> Result<()> {
    match std::fs::remove_file(path) {
        Ok(()) => *told += &format!("Removed {}.\n", path.display()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(|| format!("removing {}", path.display())),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_for_people() {
        let told = [0, 59, 60, 150, 7200, 86_400 * 3].map(|s| since(Duration::from_secs(s)));
        assert_eq!(told, ["just now", "just now", "1 minute ago", "2 minutes ago", "2 hours ago", "3 days ago"]);
    }
}
