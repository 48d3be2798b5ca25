//! The name by which a program's next run is recognised: that of its executable or, for an interpreter, that of the
//! script.

/// Programs that run scripts, without a version (`python3.12` is `python`).
const INTERPRETERS: [&str; 13] =
    ["python", "perl", "ruby", "Rscript", "julia", "node", "php", "lua", "octave", "sh", "bash", "dash", "zsh"];
/// Options of interpreters that take a word, which is then not the script.
const WITH_A_WORD: [&str; 4] = ["-W", "-X", "-I", "--require"];
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

/// The name of the program that a process runs; `None` of one that is gone or that may not be looked at. The kernel reads it
/// in the process's memory, so a process that hangs may make this wait.
pub fn program_of_process(pid: u32) -> Option<String> {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let words: Vec<_> = line.split(|b| *b == 0).map(String::from_utf8_lossy).collect();
    program_of(words.iter().map(|word| &**word))
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
        assert_eq!(program_of(["ä".repeat(200).as_str()]).map(|name| name.len()), Some(NAME_BYTES_MAX));
    }
}
