//! The `instep` command: what this machine offers for fused optimizer steps.
//!
//! A thin face over the library: it must not compute anything that a user of the library could not.

use clap::{Parser, Subcommand};
use instep::Isa;

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

fn main() -> Result<(), instep::Error> {
    let Arguments { command } = Arguments::parse();
    match command {
        Command::Info => info(),
    }
}

fn info() -> Result<(), instep::Error> {
    let names: Vec<&str> = Isa::available().into_iter().map(Isa::name).collect();
    println!("instruction sets  {} (available: {})", Isa::from_environment()?, names.join(", "));
    println!("cores             {}", std::thread::available_parallelism().map_or(1, |n| n.get()));
    println!("devices           host");
    Ok(())
}
