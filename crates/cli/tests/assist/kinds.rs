//! The library in the environment of programs of all kinds, each of which finds its own or nothing.

use std::path::{Path, PathBuf};
use std::process::Command;

use impresario_testing::{require, skip, until};

use crate::support::{Process, run_command};
use crate::tools::{Folder, assist, library};

/// Lays out the library; the word for `LD_PRELOAD`.
fn laid_out(folder: &Path) -> String {
    let ran = run_command(assist(["library"]).arg(folder));
    assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{}", ran.out);
    let word = ran.out.trim_end().to_string();
    assert_eq!(word, format!("{}/$PLATFORM/libimpresario_assist.so", folder.display()));
    word
}

/// Runs a program with the word in its environment: its output, and what it says on standard error, which is nothing.
#[track_caller]
fn quietly(program: &mut Command, word: &str) -> String {
    let ran = run_command(program.env("LD_PRELOAD", word));
    assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{}", ran.out);
    ran.out
}

/// A program that reads a file, made with a compiler's flags.
fn compiled(folder: &Folder, compiler: &str, name: &str, source: &str, flags: &[&str]) -> PathBuf {
    let (from, to) =
        (folder.at(&format!("{name}.{}", if source.contains(".globl") { "s" } else { "c" })), folder.at(name));
    std::fs::write(&from, source).unwrap();
    let made = Command::new(compiler).args(flags).arg("-o").arg(&to).arg(from).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    to
}

/// Says whether the library is in its own memory.
const LOOKS: &str = r#"
#include <stdio.h>
#include <string.h>
int main(void)
{
	char line[4096];
	int found = 0;
	FILE *maps = fopen("/proc/self/maps", "r");
	while (maps && fgets(line, sizeof line, maps))
		found |= strstr(line, "libimpresario_assist") != NULL;
	puts(found ? "with" : maps ? "without" : "unknown");
	return 0;
}
"#;

/// Ends with status 0, by a system call of 32 bits.
const ENDS: &str = "
.section .note.GNU-stack,\"\",@progbits
.text
.globl _start
_start:
	movl $1, %eax
	xorl %ebx, %ebx
	int $0x80
";

#[test]
fn each_program_finds_its_own_library() {
    let folder = Folder::new();
    let word = laid_out(&folder.at("preload"));
    let ours = compiled(&folder, "cc", "ours", LOOKS, &[]);
    assert_eq!(quietly(&mut Command::new(&ours), &word), "with\n");
    let others = (require("musl-gcc")).then(|| compiled(&folder, "musl-gcc", "musl", LOOKS, &[]));
    if let Some(musl) = &others {
        assert_eq!(quietly(&mut Command::new(musl), &word), "without\n");
        let file = run_command(Command::new(musl).env("LD_PRELOAD", library()));
        assert_ne!(file.code, 0, "a musl program would start with the file itself: the folder shows nothing");
    }
    let small = if cfg!(target_arch = "x86_64") && Path::new("/lib/ld-linux.so.2").exists() {
        let small = compiled(&folder, "cc", "small", ENDS, &["-m32", "-nostdlib", "-pie"]);
        assert_eq!(quietly(&mut Command::new(&small), &word), "");
        let file = run_command(Command::new(&small).env("LD_PRELOAD", library()));
        assert!(file.err.contains("wrong ELF class"), "the loader would not complain: the folder shows nothing");
        Some(small)
    } else {
        skip("libc6-i386", "programs of 32 bits cannot be started");
        None
    };

    // A job of all of them.
    let trace = folder.at("t.imt");
    let all = [Some(&ours), others.as_ref(), small.as_ref()];
    let job = all.into_iter().flatten().map(|p| p.display().to_string()).collect::<Vec<_>>().join(" && ");
    let mut record = assist(["record", "-o"]);
    record.env("IMPRESARIO_ASSIST_LIBRARY", folder.at("preload")).arg(&trace).args(["--", "sh", "-c", &job]);
    let ran = run_command(&mut record);
    let expected = if others.is_some() { "with\nwithout\n" } else { "with\n" };
    assert_eq!((ran.code, ran.out.as_str()), (0, expected), "{}", ran.err);
    assert!(!ran.err.contains("cannot be preloaded") && !ran.err.contains("Error loading"), "{}", ran.err);
    if let Some(musl) = &others {
        // The program itself is of another kind: those that it starts are reached, and it starts as without us.
        let mut run = assist(["run"]);
        run.env("IMPRESARIO_ASSIST_LIBRARY", folder.at("preload"))
            .arg(folder.hints("hints.json", &[&folder.data("data")]));
        run.arg("--").arg(musl);
        let ran = run_command(&mut run);
        assert_eq!((ran.code, ran.out.as_str()), (0, "without\n"), "{}", ran.err);
        assert!(ran.err.contains("does not preload libraries"), "{}", ran.err);
    }
}

#[test]
fn a_folder_is_brought_up_to_date_under_running_programs() {
    let folder = Folder::new();
    let place = folder.at("preload");
    let word = laid_out(&place);
    let running = Process::start_command(Command::new("sleep").arg("600").env("LD_PRELOAD", &word), &folder.at("log"));
    let maps = || std::fs::read_to_string(format!("/proc/{}/maps", running.pid())).unwrap();
    until("the program has the library", || maps().contains("libimpresario_assist.so\n"));
    assert_eq!(laid_out(&place), word);
    assert!(maps().contains("libimpresario_assist.so (deleted)"), "it keeps the one that it has: {}", maps());
    let folder_of_ours = if cfg!(target_arch = "x86_64") { "x86_64" } else { "aarch64" };
    let file = place.join(folder_of_ours).join("libimpresario_assist.so");
    assert!(std::fs::read(file).unwrap() == std::fs::read(library()).unwrap());
    assert_eq!(quietly(Command::new("sh").args(["-c", "echo here"]), &word), "here\n");
    let ran = run_command(assist(["library"]).env("IMPRESARIO_ASSIST_LIBRARY", &place));
    assert_eq!((ran.code, ran.out.trim_end()), (0, word.as_str()));
}

#[test]
fn mistakes_are_told() {
    let folder = Folder::new();
    let told = |command: &mut Command, code: i32, part: &str| {
        let ran = run_command(command);
        assert!(ran.code == code && ran.err.contains(part) && ran.err.lines().count() == 1, "{ran:?}");
    };
    told(assist(["library"]).arg(folder.at("a folder")), 2, "choose another folder");
    assert!(!folder.at("a folder").exists());
    let empty = folder.at("empty");
    std::fs::create_dir(&empty).unwrap();
    told(assist(["library"]).env("IMPRESARIO_ASSIST_LIBRARY", &empty), 1, "no folder of `assist library`");
    std::fs::write(folder.at("file"), b"").unwrap();
    told(assist(["library"]).arg(folder.at("file")), 1, "laying out");
}
