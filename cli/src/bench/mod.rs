//! `instep bench`: what a step costs on this machine, beside what memory allows.
//!
//! Three benches: the step of a bucket against the in-place ceiling, optimizer time left exposed by overlap, and the
//! trainer's cost of handing a bucket over. benches/README.md derives every column. Must judge nothing: it reports.

mod cases;
mod handover;
mod overlap;
mod record;
#[path = "../../../tests/reference.rs"]
#[allow(dead_code)]
mod reference;
mod statistics;
mod step;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::ValueEnum;
use instep::Isa;

use crate::Failure;
use crate::console::print_line;
use cases::{Rule, Shape};
use record::Record;

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Bench {
    /// One bucket's step against the in-place ceiling.
    Step,
    /// Optimizer time that the trainer waits for, per mode and bucket cap.
    Overlap,
    /// The trainer's own time in `grad_ready`.
    Handover,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DeviceName {
    Host,
}

/// Measure steps on this machine
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Where the steps run.
    #[arg(long, value_enum, default_value = "host")]
    device: DeviceName,
    /// Benches to run [default: all].
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Bench>,
    /// Optimizers of the step bench [default: all].
    #[arg(long, value_enum, value_delimiter = ',')]
    optimizer: Vec<Rule>,
    /// Shapes of the step bench [default: all].
    #[arg(long, value_enum, value_delimiter = ',')]
    shape: Vec<Shape>,
    /// Instruction sets [default: INSTEP_ISA, else the widest].
    #[arg(long, value_delimiter = ',')]
    isa: Vec<Isa>,
    /// Kernel threads [default: 1 and one per core].
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Vec<u16>,
    /// Rounds, in each of which every candidate runs once.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: Option<u16>,
    /// Few rounds and small memory: checks that everything runs, measures little.
    #[arg(long)]
    quick: bool,
    /// Also write every figure here.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Also write every figure under benches/record/ of the source tree that this was built from.
    #[arg(long)]
    record: bool,
}

/// Runs the command.
///
/// # Errors
/// `Library` if a stepper cannot be built, `File` if a record cannot be written, `Bench` if a step computes something else
/// than the formula: then nothing is timed.
pub fn run(options: &Arguments) -> Result<ExitCode, Failure> {
    let DeviceName::Host = options.device;
    let mut record = Record::new();
    let wants = |bench| options.only.is_empty() || options.only.contains(&bench);
    if wants(Bench::Step) {
        step::run(options, &mut record)?;
    }
    if wants(Bench::Overlap) {
        overlap::run(options, &mut record)?;
    }
    if wants(Bench::Handover) {
        handover::run(options, &mut record)?;
    }
    if let Some(path) = &options.csv {
        record.write(path).map_err(Failure::file(path))?;
    }
    if options.record {
        let path = record::path_of_this_machine();
        record.write(&path).map_err(Failure::file(&path))?;
        print_line(&format!("recorded in {}", path.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

impl Arguments {
    fn isas(&self) -> instep::Result<Vec<Isa>> {
        if self.isa.is_empty() { Ok(vec![Isa::from_environment()?]) } else { Ok(self.isa.clone()) }
    }

    fn threads(&self) -> instep::Result<Vec<usize>> {
        if !self.threads.is_empty() {
            return Ok(self.threads.iter().map(|threads| usize::from(*threads)).collect());
        }
        let all = instep::Pool::from_environment()?.threads();
        Ok(if all == 1 { vec![1] } else { vec![1, all] })
    }

    fn rounds(&self, usual: usize) -> usize {
        self.rounds.map_or(if self.quick { 3 } else { usual }, usize::from)
    }
}
