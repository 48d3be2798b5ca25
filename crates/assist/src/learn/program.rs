//! The name by which a program's next run is recognised: that of its executable or, for an interpreter, that of the
//! script.

/// Programs that run scripts, without a version (`python3.12` is `python`).
const INTERPRETERS: [&str; 13] =
    ["python", "perl", "ruby", "Rscript", "julia", "node", "php", "lua", "octave", "sh", "bash", "dash", "zsh"];
/// Options of interpreters that take a word, which is then not the script.
const WITH_A_WORD: [&str; 4] = ["-W", "-X", "-I", "--require"];
/// Processes up from a worker that are looked at, at most.
const ANCESTORS_MAX: usize = 8;
/// The longest name that is kept.
pub const NAME_BYTES_MAX: usize = 100;

/// The name of the program that a command starts; `None` of an empty one.
pub fn program_of<'a>(words: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let mut words = words.into_iter();
    let program = file_name(words.next()?)?;
    let plain = program.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.' || c == '-');
    if !INTERPRETERS.contains(&plain) {
        return Some(shortened(program));
    }
    while let Some(word) = words.next() {
        match word {
            // A module of Python; a program in the command line has no name.
            "-m" => return words.next().map(shortened),
            "-c" | "-e" | "-" => break,
            _ if WITH_A_WORD.contains(&word) => drop(words.next()),
            _ if word.starts_with('-') => {}
            script => return file_name(script).map(shortened),
        }
    }
    Some(shortened(plain))
}

/// The name of the program that a process runs; `None` of one that is gone or that may not be looked at. A worker of Python's
/// `multiprocessing` has that of the program that started it. The kernel reads it in the process's memory, so a process that
/// hangs may make this wait.
pub fn program_of_process(pid: u32) -> Option<String> {
    let mut of = pid;
    for _ in 0..ANCESTORS_MAX {
        let line = std::fs::read(format!("/proc/{of}/cmdline")).ok()?;
        let words: Vec<_> = line.split(|b| *b == 0).map(String::from_utf8_lossy).collect();
        if !words.windows(2).any(|pair| starts_worker(&pair[0], &pair[1])) {
            return program_of(words.iter().map(|word| &**word));
        }
        let stat = std::fs::read_to_string(format!("/proc/{of}/stat")).ok()?;
        // After the name in brackets, which may hold anything: the state, and the parent.
        of = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?;
    }
    None
}

/// Whether an option of Python and its value make it a worker of another process: those of `multiprocessing` that are not
/// forked, and of its server that forks, and those of `loky`.
fn starts_worker(option: &str, value: &str) -> bool {
    let of_loky = ["loky.", "joblib.externals.loky."].iter().any(|module| value.starts_with(module));
    option == "-c" && value.starts_with("from multiprocessing.") || option == "-m" && of_loky
}

fn file_name(word: &str) -> Option<&str> {
    word.rsplit('/').find(|part| !part.is_empty())
}

fn shortened(name: &str) -> String {
    let end = (0..=name.len().min(NAME_BYTES_MAX)).rev().find(|end| name.is_char_boundary(*end));
    name[..end.unwrap_or(0)].into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_are_named_and_interpreters_are_not() {
        for (command, name) in [
            ("/usr/bin/tar -cf a.tar data", "tar"),
            ("./solver --input mesh.h5", "solver"),
            ("python3 analysis.py data.root", "analysis.py"),
            ("/opt/venv/bin/python3.12 -u -W ignore ../x/analysis.py data.root", "analysis.py"),
            ("python -m analysis.main data", "analysis.main"),
            ("python3 -c print(1)", "python"),
            ("bash ./job.sh", "job.sh"),
            ("sh -c cat", "sh"),
            ("analysis.py data.root", "analysis.py"),
            ("folder/", "folder"),
        ] {
            assert_eq!(program_of(command.split(' ')).as_deref(), Some(name), "{command}");
        }
        assert_eq!((program_of([]), program_of(["/"])), (None, None));
        let own = std::env::current_exe().unwrap();
        assert_eq!(program_of_process(std::process::id()).as_deref(), own.file_name().and_then(|name| name.to_str()));
        assert_eq!(program_of_process(u32::MAX), None);
        assert!(starts_worker("-c", "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)"));
        assert!(starts_worker("-m", "joblib.externals.loky.backend.popen_loky_posix"));
        assert!(!starts_worker("-c", "import multiprocessing") && !starts_worker("-m", "lokyx"));
        assert_eq!(program_of(["ä".repeat(200).as_str()]).map(|name| name.len()), Some(NAME_BYTES_MAX));
    }
}
