//! The small program of the two: does what starts a guided program, and executes the other one for everything else.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, anyhow};
use clap::{Parser, Subcommand};

use crate::assist::{self, Start};

/// The command's file name.
const FRONT: &str = "impresario";
/// That of the program with everything in it.
const MAIN: &str = "impresario-main";
/// Where `make install` puts that, seen from the folder with the command.
const INSTALLED: &str = "../lib/impresario";

/// As much of the command line as is read here. [`Cli`](crate::Cli) has it, too.
#[derive(Parser)]
#[command(name = "impresario", version, propagate_version = true, max_term_width = 100)]
pub struct Front {
    #[command(subcommand)]
    command: Assist,
}

#[derive(Subcommand)]
enum Assist {
    #[command(subcommand)]
    Assist(Start),
}

/// The program that users start.
pub fn front() -> ExitCode {
    let words: Vec<_> = std::env::args_os().skip(1).take(2).collect();
    let starts = match &words[..] {
        [assist, command] if assist == "assist" => command.to_str().is_some_and(Start::has_subcommand),
        _ => false,
    };
    if !starts {
        return crate::ended(execute_main());
    }
    let Assist::Assist(command) = Front::parse().command;
    crate::log("warn");
    crate::ended(assist::start(command))
}

/// Becomes the program with everything in it; returns only if that fails.
fn execute_main() -> Result<ExitCode> {
    let own = std::env::current_exe().context("finding this program's own file")?;
    let places = [own.with_file_name(MAIN), own.with_file_name(INSTALLED).join(MAIN)];
    let main = places.iter().find(|place| place.is_file()).ok_or_else(|| {
        let looked = places.each_ref().map(|place| place.display().to_string()).join(" or ");
        anyhow!(
            "{} needs the file {MAIN} for all but `assist run`, and there is no {looked}: build both with \
             `make build`, or install them with `make install`",
            own.display()
        )
    })?;
    let mut words = std::env::args_os();
    let mut command = Command::new(main);
    command.arg0(words.next().unwrap_or_else(|| FRONT.into())).args(words);
    Err(command.exec()).with_context(|| format!("starting {}", main.display()))
}

/// The file of the command that users start, in whichever of the two programs this is.
pub fn command_file() -> std::io::Result<PathBuf> {
    let own = std::env::current_exe()?;
    if own.file_name() != Some(OsStr::new(MAIN)) {
        return Ok(own);
    }
    let installed = own.ancestors().nth(3).map(|prefix| prefix.join("bin").join(FRONT));
    let places = [Some(own.with_file_name(FRONT)), installed];
    Ok(places.into_iter().flatten().find(|place| place.is_file()).unwrap_or(own))
}
