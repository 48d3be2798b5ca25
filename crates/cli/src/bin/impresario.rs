//! `impresario`, the command that users start.

use std::process::ExitCode;

fn main() -> ExitCode {
    impresario_cli::front()
}
