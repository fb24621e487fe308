//! The `instep` command: parses the arguments, calls the function of a subcommand, and returns the exit code.
//!
//! Exit code 0 means success. Code 1 means that `diff` or `plan --measure` found a difference. Code 2 means that the
//! command failed or was refused, and stderr has one line that names the cause. The command never panics, not even if
//! its output is a closed pipe.

use std::io::Write;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use instep_cli::{Failure, bench, diff, environment, info, plan, replay};

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
    Plan(plan::Arguments),
    // Boxed because it has by far the most options.
    Bench(Box<bench::Arguments>),
}

fn main() -> ExitCode {
    let Arguments { command } = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            return ExitCode::from(2);
        }
        Err(error) if error.use_stderr() => return refuse(&one_line(&error)),
        Err(help) => {
            let _ = help.print();
            return ExitCode::SUCCESS;
        }
    };
    // The warnings come before the command, which may take long. They do not stop it, because a misspelt name is no
    // error.
    for line in
        environment::misspelt(std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned()))
    {
        let _ = writeln!(std::io::stderr(), "instep: {line}");
    }
    let outcome = match command {
        Command::Info(arguments) => info::run(&arguments),
        Command::Replay(arguments) => replay::run(&arguments),
        Command::Diff(arguments) => diff::run(&arguments),
        Command::Plan(arguments) => plan::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
    };
    outcome.unwrap_or_else(|failure: Failure| refuse(&failure.to_string()))
}

fn refuse(why: &str) -> ExitCode {
    // Names come from files. A line break in one must not look like a second message.
    let line: String = why
        .chars()
        .flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] })
        .collect();
    let _ = writeln!(std::io::stderr(), "instep: {line}");
    ExitCode::from(2)
}

/// Puts clap's message on one line, without the usage text. For an unknown command, adds the list of commands.
fn one_line(error: &clap::Error) -> String {
    let message = error.to_string();
    let lines = message.lines().map(str::trim).take_while(|line| !line.is_empty());
    let line = lines.collect::<Vec<_>>().join(" ").trim_start_matches("error: ").to_owned();
    if error.kind() != ErrorKind::InvalidSubcommand {
        return line;
    }
    let arguments = Arguments::command();
    let names: Vec<&str> = arguments.get_subcommands().map(|command| command.get_name()).collect();
    format!("{line}; commands: {}", names.join(", "))
}
