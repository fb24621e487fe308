//! `cargo bench`: runs `instep bench` with the same options, so that there is one runner.
//!
//! This file must measure nothing itself.
#![allow(missing_docs)]

use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    // Cargo adds --bench for the harness that this is not.
    let options = std::env::args().skip(1).filter(|option| option != "--bench");
    match Command::new(env!("CARGO_BIN_EXE_instep")).arg("bench").args(options).status() {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("the runner does not start: {error}");
            ExitCode::FAILURE
        }
    }
}
