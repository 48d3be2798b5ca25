//! What `impresario` executes for all subcommands but `assist run`.

use std::process::ExitCode;

fn main() -> ExitCode {
    impresario_cli::everything()
}
