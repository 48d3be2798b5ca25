//! Guided I/O switched on for all logins, and off again, in a home of the test's own.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{Ran, run_command};
use crate::tools::{Folder, assist, library};

/// A home, and the library for programs of all kinds.
struct Home {
    folder: Folder,
    library: PathBuf,
}

impl Home {
    fn new() -> Home {
        let folder = Folder::new();
        let library = folder.at("preload");
        let ran = run_command(assist(["library"]).arg(&library));
        assert_eq!(ran.code, 0, "{}", ran.err);
        std::fs::create_dir(folder.at("home")).unwrap();
        Home { folder, library }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.at("home").join(name)
    }

    fn switch(&self, args: &[&str]) -> Ran {
        let mut command = assist(args);
        command.env("HOME", self.at("")).env("SHELL", "/bin/sh").env("IMPRESARIO_ASSIST_LIBRARY", &self.library);
        command.env_remove("XDG_CONFIG_HOME").env_remove("ZDOTDIR").env_remove("LD_PRELOAD");
        run_command(&mut command)
    }

    /// What a login shell prints, which must start without a word.
    #[track_caller]
    fn login(&self, shell: &str, script: &str, set: &[(&str, &str)]) -> String {
        let mut login = Command::new(shell);
        login.arg0(format!("-{shell}")).args(["-c", script]).env_clear();
        login.env("HOME", self.at("")).env("PATH", "/usr/bin:/bin").envs(set.iter().copied());
        let ran = run_command(&mut login);
        assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{shell}: {}", ran.out);
        ran.out
    }

    /// All files of the home and what is in them.
    fn contents(&self) -> Vec<(PathBuf, Vec<u8>)> {
        fn find(folder: &Path, found: &mut Vec<(PathBuf, Vec<u8>)>) {
            for entry in std::fs::read_dir(folder).unwrap().flatten() {
                match entry.path().is_dir() {
                    true => find(&entry.path(), found),
                    false => found.push((entry.path(), std::fs::read(entry.path()).unwrap())),
                }
            }
        }
        let mut found = Vec::new();
        find(&self.at(""), &mut found);
        found.sort();
        found
    }
}

const SHOW: &str = r#"printf '%s\n' "${LD_PRELOAD-}" && cat /dev/null"#;

#[test]
fn logins_are_guided_from_on_to_off() {
    let home = Home::new();
    std::fs::write(home.at(".profile"), "X=1\n").unwrap();
    std::fs::write(home.at(".bash_profile"), "set -eu\n. ~/.profile\n").unwrap();
    let before = home.contents();
    let status = || home.switch(&["status"]).code;
    assert_eq!((status(), home.login("sh", SHOW, &[])), (1, "\n".into()));

    let ran = home.switch(&["on"]);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
    let snippet = home.at(".config/impresario/impresario-assist.sh");
    for told in [snippet.to_str().unwrap(), ".profile", ".bash_profile", "impresario-assist.service", "hints.json"] {
        assert!(ran.out.contains(told), "{told}: {}", ran.out);
    }
    let on = home.contents();
    let again = home.switch(&["on"]);
    assert!(again.code == 0 && again.out.contains("as it should be") && !again.out.contains("Wrote"), "{}", again.out);
    assert_eq!(home.contents(), on, "a second time changes nothing");
    assert_eq!(status(), 0);

    let word = format!("{}/$PLATFORM/libimpresario_assist.so\n", home.library.display());
    let bash = Command::new("bash").arg("--version").output().is_ok();
    for shell in ["sh", "bash"].into_iter().filter(|shell| bash || *shell == "sh") {
        assert_eq!(home.login(shell, SHOW, &[]), word, "{shell}");
        assert_eq!(home.login(shell, SHOW, &[("IMPRESARIO_ASSIST", "off")]), "\n", "{shell}");
        let other = home.login(shell, "echo $LD_PRELOAD", &[("LD_PRELOAD", "libc.so.6")]);
        assert_eq!(other.trim_end(), word.trim_end().to_string() + ":libc.so.6", "{shell}");
    }
    // It asks for the hints that it wrote.
    let unit = std::fs::read_to_string(home.at(".config/systemd/user/impresario-assist.service")).unwrap();
    assert!(unit.contains(home.at(".config/impresario/hints.json").to_str().unwrap()), "{unit}");
    assert!(home.at(".config/systemd/user/default.target.wants/impresario-assist.service").is_file());

    // Without the library a login is as ever, also under `set -eu`.
    std::fs::rename(&home.library, home.folder.at("away")).unwrap();
    for shell in ["sh", "bash"].into_iter().filter(|shell| bash || *shell == "sh") {
        assert_eq!(home.login(shell, "echo ${LD_PRELOAD-none}", &[]), "none\n", "{shell}");
    }
    assert!(home.switch(&["status"]).out.contains("library is not there"));
    std::fs::rename(home.folder.at("away"), &home.library).unwrap();

    let off = home.switch(&["off"]);
    assert_eq!((off.code, off.err.as_str()), (0, ""), "{}", off.out);
    assert_eq!(home.contents(), before, "{}", off.out);
    assert_eq!((status(), home.login("sh", SHOW, &[])), (1, "\n".into()));
    assert_eq!(home.switch(&["off"]).out, "Guided I/O is off already.\n");
}

#[test]
fn what_the_user_has_written_stays() {
    let home = Home::new();
    let hints = home.at(".config/impresario/hints.json");
    std::fs::create_dir_all(hints.parent().unwrap()).unwrap();
    std::fs::write(&hints, "{}").unwrap();
    std::fs::write(home.folder.at("dotfile"), "# no newline").unwrap();
    std::os::unix::fs::symlink(home.folder.at("dotfile"), home.at(".profile")).unwrap();
    assert_eq!(home.switch(&["on"]).code, 0);
    assert!(home.at(".profile").symlink_metadata().unwrap().is_symlink(), "a link stays one");
    assert!(std::fs::read_to_string(home.at(".profile")).unwrap().starts_with("# no newline\n["));
    assert_eq!(home.switch(&["off"]).code, 0);
    assert_eq!(std::fs::read_to_string(home.at(".profile")).unwrap(), "# no newline\n");
    assert_eq!(std::fs::read_to_string(&hints).unwrap(), "{}");
}

/// An empty profile that was there, or a link to one, is not ours to remove.
#[test]
fn profiles_that_were_empty_stay() {
    let home = Home::new();
    let dotfile = home.folder.at("dotfile");
    std::fs::write(&dotfile, "").unwrap();
    std::os::unix::fs::symlink(&dotfile, home.at(".profile")).unwrap();
    std::fs::write(home.at(".bash_profile"), "").unwrap();
    let before = home.contents();
    for _ in 0..2 {
        assert_eq!(home.switch(&["on"]).code, 0);
        assert_ne!(std::fs::read(&dotfile).unwrap(), b"");
        assert_eq!(home.switch(&["off"]).code, 0);
        assert_eq!(home.contents(), before);
        assert!(home.at(".profile").symlink_metadata().unwrap().is_symlink());
    }
    // One that was made goes, unless something was added to it since.
    std::fs::remove_file(home.at(".profile")).unwrap();
    for added in ["", "X=1\n"] {
        assert_eq!(home.switch(&["on"]).code, 0);
        let made = std::fs::read_to_string(home.at(".profile")).unwrap();
        std::fs::write(home.at(".profile"), made + added).unwrap();
        assert_eq!(home.switch(&["off"]).code, 0);
        assert_eq!(std::fs::read_to_string(home.at(".profile")).unwrap_or_default(), added);
        assert_eq!(home.at(".profile").exists(), !added.is_empty());
    }
    // A link that leads nowhere is not replaced.
    std::fs::remove_file(home.at(".profile")).unwrap();
    std::os::unix::fs::symlink("nowhere", home.at(".profile")).unwrap();
    let ran = home.switch(&["on"]);
    assert!(ran.code == 1 && ran.err.contains(".profile") && ran.err.contains("remove the link"), "{ran:?}");
    assert!(home.at(".profile").symlink_metadata().unwrap().is_symlink());
}

/// Files under the names of ours that `on` has not written are neither replaced nor removed.
#[test]
fn what_has_the_names_of_our_files_stays() {
    let home = Home::new();
    let unit = home.at(".config/systemd/user/impresario-assist.service");
    let wanted = home.at(".config/systemd/user/default.target.wants/impresario-assist.service");
    std::fs::create_dir_all(wanted.parent().unwrap()).unwrap();
    std::fs::write(&unit, "[Service]\n").unwrap();
    std::fs::write(home.at("other.service"), "[Service]\n").unwrap();
    std::os::unix::fs::symlink(home.at("other.service"), &wanted).unwrap();
    let before = home.contents();
    let ran = home.switch(&["on"]);
    assert!(ran.code == 1 && ran.err.contains("impresario-assist.service is there and was not written"), "{ran:?}");
    assert_eq!(home.switch(&["off"]).code, 0);
    assert_eq!(home.contents(), before);

    let profiles = home.folder.at("profile.d");
    let snippet = profiles.join("impresario-assist.sh");
    std::fs::create_dir(&profiles).unwrap();
    let system = |what: &str| home.switch(&[what, "--system", "--profiles", profiles.to_str().unwrap()]);
    std::fs::write(home.at("own.sh"), "").unwrap();
    let make: [&dyn Fn(); 2] = [&|| std::fs::write(&snippet, "").unwrap(), &|| {
        std::os::unix::fs::symlink(home.at("own.sh"), &snippet).unwrap()
    }];
    for make in make {
        make();
        let (on, off) = (system("on"), system("off"));
        assert!(on.code == 1 && on.err.contains("move it away"), "{on:?}");
        assert!(off.code == 1 && off.err.contains("remove it yourself"), "{off:?}");
        assert_eq!(std::fs::read(&snippet).unwrap(), b"");
        std::fs::remove_file(&snippet).unwrap();
    }
}

#[test]
fn an_administrator_switches_it_on_for_all() {
    let home = Home::new();
    let profiles = home.folder.at("profile.d");
    let system = |what: &str| home.switch(&[what, "--system", "--profiles", profiles.to_str().unwrap()]);
    assert_eq!(system("status").code, 1);
    let on = system("on");
    let snippet = profiles.join("impresario-assist.sh");
    assert!(on.code == 0 && on.out.starts_with(&format!("Wrote {}.\n", snippet.display())), "{on:?}");
    assert_eq!((system("status").code, home.contents().len()), (0, 0), "nobody's home is touched");
    let script = format!(". {}; {SHOW}", snippet.display());
    let word = format!("{}/$PLATFORM/libimpresario_assist.so\n", home.library.display());
    assert_eq!(home.login("sh", &script, &[]), word);
    assert!(system("off").code == 0 && !snippet.exists());
}

/// A library that not every program starts with must not come into everybody's environment.
#[test]
fn nothing_is_written_where_programs_would_not_start_as_usual() {
    let home = Home::new();
    let on = |library: &Path| {
        let mut command = assist(["on"]);
        command.env("HOME", home.at("")).env("IMPRESARIO_ASSIST_LIBRARY", library).env_remove("XDG_CONFIG_HOME");
        run_command(&mut command)
    };
    let one_kind = on(library());
    assert!(one_kind.code == 2 && one_kind.err.contains("assist library FOLDER"), "{one_kind:?}");
    let damaged = home.library.canonicalize().unwrap();
    let platforms =
        std::fs::read_dir(&damaged).unwrap().flatten().map(|entry| entry.path().join("libimpresario_assist.so"));
    platforms.for_each(|file| std::fs::write(file, "no library").unwrap());
    let damaged = on(&damaged);
    assert!(damaged.code != 0 && damaged.err.contains("nothing is switched on"), "{damaged:?}");
    assert_eq!(home.contents(), []);
    let homeless = run_command(assist(["on"]).env_remove("HOME").env_remove("XDG_CONFIG_HOME"));
    assert!(homeless.code == 2 && homeless.err.contains("HOME"), "{homeless:?}");
}
