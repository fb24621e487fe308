//! The `instep` command: what this machine offers for fused optimizer steps.
//!
//! A thin face over the library: it must not compute anything that a user of the library could not.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use instep::{Isa, Pool};

#[derive(Parser)]
#[command(version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show the instruction sets and threads that a stepper would use here.
    Info,
}

fn main() -> ExitCode {
    let Arguments { command } = Arguments::parse();
    let outcome = match command {
        Command::Info => info(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("instep: {error}");
            ExitCode::from(2)
        }
    }
}

fn info() -> instep::Result<()> {
    let names: Vec<&str> = Isa::available().into_iter().map(Isa::name).collect();
    println!("instruction set  {} (available: {})", Isa::from_environment()?, names.join(", "));
    println!("kernel threads   {}", Pool::from_environment()?.threads());
    println!("devices          host");
    Ok(())
}
