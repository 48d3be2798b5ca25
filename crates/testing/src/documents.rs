//! What the documents tell a reader to type: the command lines of a program, each with its place, and blocks of files.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use clap::Command;
use clap::error::ErrorKind;

/// A command line in a document.
struct Told {
    /// The document and the line.
    place: String,
    /// What follows the program's name.
    words: Vec<String>,
    /// Whether it is in a block of commands, where it can be typed as it is.
    is_whole: bool,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The files for users, as paths from the top of the tree: documents, and what is installed with the program.
pub fn files() -> Vec<PathBuf> {
    let mut found = vec!["README.md".into(), "lab/README.md".into(), "integrations/glusterfs/README.md".into()];
    for folder in ["doc", "packaging", "packaging/slurm", "packaging/htcondor"] {
        let entries = std::fs::read_dir(root().join(folder)).unwrap().map(|entry| entry.unwrap().path());
        let files = entries.filter(|path| path.is_file());
        found.extend(files.map(|path| Path::new(folder).join(path.file_name().unwrap())));
    }
    found.sort();
    found
}

/// The blocks of a document between lines of three backticks with the name of a language behind the first: the number of
/// the line above each, and its text without the indentation of a list.
pub fn blocks(document: &Path, language: &str) -> Vec<(usize, String)> {
    let text = std::fs::read_to_string(root().join(document)).unwrap();
    let (mut found, mut open) = (Vec::new(), None::<(usize, &str, String)>);
    for (i, line) in text.lines().enumerate() {
        match (line.trim_start().strip_prefix("```"), &mut open) {
            (Some(of), None) => open = Some((i + 1, of, String::new())),
            (Some(_), Some(_)) => {
                let (at, of, body) = open.take().unwrap();
                found.extend((of == language).then_some((at, body)));
            }
            (None, Some((_, _, body))) => writeln!(body, "{}", line.trim_start()).unwrap(),
            (None, None) => {}
        }
    }
    found
}

/// A table of a document: the cells of its heading and of its rows.
pub struct Table {
    /// The heading.
    pub head: Vec<String>,
    /// The rows; each has as many cells as the heading.
    pub rows: Vec<Vec<String>>,
}

/// The tables in a piece of a document whose heading begins so behind its first `|`.
///
/// # Panics
/// Where a row has more or fewer cells than the heading.
#[track_caller]
pub fn tables(text: &str, begins: &str) -> Vec<Table> {
    let cells = |line: &str| -> Vec<String> {
        line.trim().trim_matches('|').split('|').map(|cell| cell.trim().to_string()).collect()
    };
    let mut found = Vec::new();
    let mut lines = text.lines().peekable();
    while let Some(head) = lines.find(|line| line.starts_with(&format!("| {begins}"))).map(cells) {
        lines.next();
        let mut rows = Vec::new();
        while let Some(line) = lines.next_if(|line| line.starts_with('|')) {
            let row = cells(line);
            assert_eq!(row.len(), head.len(), "a cell is missing: {line}");
            rows.push(row);
        }
        found.push(Table { head, rows });
    }
    found
}

/// What stands between backticks.
pub fn spans(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// The words of a command line up to its end: a comment, a column of explanations, another command or a redirection.
fn words(line: &str) -> Vec<String> {
    let (mut found, mut word, mut quote, mut spaces) = (Vec::new(), None::<String>, None, 0);
    for c in line.chars() {
        match (quote, c) {
            (Some(open), _) if c == open => quote = None,
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, ' ') => {
                found.extend(word.take());
                spaces += 1;
                if spaces == 2 {
                    break;
                }
                continue;
            }
            (None, '#' | '|' | '&' | '>' | '<' | '(' | '·') if word.is_none() => break,
            (None, ';' | ')') => break,
            _ => word.get_or_insert_default().push(c),
        }
        spaces = 0;
    }
    found.extend(word);
    found
}

/// The command lines of a program in a piece of text.
fn told(text: &str, program: &str, place: &str, is_whole: bool, found: &mut Vec<Told>) {
    let drawn = text.contains("──") || text.trim_start().starts_with('#');
    for (at, _) in text.match_indices(program).filter(|_| !drawn) {
        let (before, after) = (&text[..at], &text[at + program.len()..]);
        let last = before.split_whitespace().last().unwrap_or_default();
        let is_value = last.starts_with('-') && last != "--" && before.ends_with(' ');
        let starts = before.is_empty() || (before.ends_with([' ', '\'']) || before.ends_with("bin/")) && !is_value;
        let words = words(after);
        let is_command = words.first().is_some_and(|word| word != "--");
        if starts && after.starts_with(' ') && is_command {
            found.push(Told { place: place.into(), words, is_whole });
        }
    }
}

/// All command lines of a program in the files for users.
fn commands(program: &str) -> Vec<Told> {
    let mut found = Vec::new();
    for file in files() {
        let text = std::fs::read_to_string(root().join(&file)).unwrap();
        let is_document = file.extension().is_some_and(|extension| extension == "md");
        let (mut language, mut paragraph, mut line) = (None::<&str>, String::new(), String::new());
        for (i, next) in text.lines().chain([""]).enumerate() {
            let place = format!("{}:{}", file.display(), i + 1);
            let in_block = language.is_some() || !is_document || next.starts_with("    ") && paragraph.is_empty();
            if let Some(begun) = next.trim_start().strip_prefix("```").filter(|_| is_document) {
                language = if language.is_some() { None } else { Some(begun) };
            } else if in_block {
                if language.is_none_or(|language| ["", "sh"].contains(&language)) {
                    line += next.trim();
                    if !line.ends_with('\\') {
                        told(&line, program, &place, true, &mut found);
                        line.clear();
                    } else {
                        line.pop();
                    }
                }
                continue;
            } else if !next.is_empty() && !next.starts_with('|') {
                paragraph += next.trim();
                paragraph.push(' ');
                continue;
            }
            let inline = spans(&paragraph).chain(spans(next));
            inline.for_each(|span| told(span, program, &place, false, &mut found));
            paragraph.clear();
        }
    }
    found
}

/// What is wrong with a command line.
fn complaint(top: &Command, told: &Told) -> Option<String> {
    let (mut command, mut rest, mut flags) = (top, &told.words[..], Vec::new());
    let given = |command: &Command, found: &mut Vec<String>| {
        for argument in command.get_arguments() {
            found.extend(argument.get_long_and_visible_aliases().into_iter().flatten().map(|long| format!("--{long}")));
            found.extend(argument.get_short().map(|short| format!("-{short}")));
        }
    };
    given(command, &mut flags);
    while let Some(next) = rest.first().and_then(|word| command.find_subcommand(word)) {
        (command, rest) = (next, &rest[1..]);
        given(command, &mut flags);
    }
    // Not a word of prose, nor what stands for several.
    let is_name = |word: &&String| word.chars().all(|c| c.is_ascii_lowercase() || c == '-') && !word.starts_with('-');
    if let Some(word) = rest.first().filter(is_name).filter(|_| command.has_subcommands()) {
        return Some(format!("{} has no subcommand {word}", command.get_name()));
    }
    for word in rest.iter().take_while(|word| *word != "--") {
        let name = word.trim_start_matches('[').split(['=', ']', '…']).next().unwrap_or_default();
        let is_flag = name.starts_with("--") || name.len() == 2 && name.starts_with('-');
        if is_flag && !flags.iter().any(|flag| flag == name) {
            return Some(format!("{} has no {name}", command.get_name()));
        }
    }
    let is_open = |word: &String| word.contains(['[', '…', '$']) || word.ends_with("...");
    let stands_for = |word: &String| word.len() > 1 && word.chars().all(|c| c.is_ascii_uppercase() || c == '_');
    if !told.is_whole || told.words.iter().any(is_open) {
        return None;
    }
    let all = std::iter::once(top.get_name().to_string()).chain(told.words.iter().cloned());
    let error = top.clone().try_get_matches_from(all).err()?;
    let is_shown = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    let is_placeholder = error.kind() == ErrorKind::ValueValidation && told.words.iter().any(stands_for);
    (!is_shown && !is_placeholder).then(|| error.to_string().lines().next().unwrap_or_default().to_string())
}

/// Every command line of the program `command` in the files for users is one that it takes: subcommands and flags exist, and
/// lines in blocks of commands are complete. Returns how many there are.
#[track_caller]
pub fn check_commands(mut command: Command) -> usize {
    command.build();
    let told = commands(command.get_name());
    let complaints: Vec<String> = told
        .iter()
        .filter_map(|told| {
            let why = complaint(&command, told)?;
            Some(format!("{}: {} {}: {why}", told.place, command.get_name(), told.words.join(" ")))
        })
        .collect();
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
    told.len()
}
