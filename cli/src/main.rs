//! The `instep` command: one subcommand per module of the library part, and how outcomes become exit codes.
//!
//! 0 is success, 1 says that `diff` found a difference, 2 that something was refused: then stderr has one line that
//! names it. Must never panic, not even when its output is a closed pipe.

use std::io::Write;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Parser, Subcommand};
use instep_cli::{Failure, bench, diff, info, replay};

#[derive(Parser)]
#[command(name = "instep", version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Info(info::Arguments),
    Replay(replay::Arguments),
    Diff(diff::Arguments),
    // By far the most options.
    Bench(Box<bench::Arguments>),
}

fn main() -> ExitCode {
    let Arguments { command } = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            return ExitCode::from(2);
        }
        Err(error) if error.use_stderr() => return refuse(&first_paragraph(&error.to_string())),
        Err(help) => {
            let _ = help.print();
            return ExitCode::SUCCESS;
        }
    };
    let outcome = match command {
        Command::Info(arguments) => info::run(&arguments),
        Command::Replay(arguments) => replay::run(&arguments),
        Command::Diff(arguments) => diff::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
    };
    outcome.unwrap_or_else(|failure: Failure| refuse(&failure.to_string()))
}

fn refuse(why: &str) -> ExitCode {
    // Names come from files: one with a line break in it must not look like two messages.
    let line: String = why
        .chars()
        .flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] })
        .collect();
    let _ = writeln!(std::io::stderr(), "instep: {line}");
    ExitCode::from(2)
}

/// clap's message without the usage behind it, on one line.
fn first_paragraph(message: &str) -> String {
    let lines = message.lines().map(str::trim).take_while(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join(" ").trim_start_matches("error: ").to_owned()
}
