//! `instep bench`: what a step costs on this machine, beside what memory allows.
//!
//! Three benches on each device: the step of a bucket against the ceiling, optimizer time left exposed by overlap, and
//! the trainer's cost of handing a bucket over. benches/README.md derives every column. Must judge nothing: it reports.

mod cases;
mod gpu;
mod handover;
mod overlap;
mod plain_bits;
mod precisions;
mod record;
#[path = "../../../tests/support/reference.rs"]
#[allow(dead_code)]
mod reference;
mod statistics;
mod step;

use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

use clap::ValueEnum;
use instep::Isa;
use instep::cuda::Cuda;

use crate::Failure;
use crate::console::print_line;
use cases::Shape;
use precisions::Kind;
use record::Record;

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Bench {
    /// One bucket's step against the ceiling: an in-place loop on the host, a copy on a GPU.
    Step,
    /// Optimizer time that the trainer waits for, per mode and bucket cap.
    Overlap,
    /// The trainer's own time in `grad_ready`.
    Handover,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DeviceName {
    Host,
    Cuda(u32),
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<DeviceName, String> {
        let ordinal = text.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
        let host = (text == "host").then_some(DeviceName::Host);
        host.or(ordinal.map(DeviceName::Cuda)).ok_or_else(|| "host, or cuda:N".to_owned())
    }
}

/// Measure steps on this machine
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Where the steps run: host, or cuda:N.
    #[arg(long, default_value = "host")]
    device: DeviceName,
    /// Benches to run [default: all].
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Bench>,
    /// Optimizers of the step bench [default: all].
    #[arg(long, value_delimiter = ',')]
    optimizer: Vec<cases::Case>,
    /// Element types of the step bench, each against memory at the rate of f32.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "f32")]
    precision: Vec<Kind>,
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
    #[command(flatten)]
    gpu: gpu::Options,
}

/// Runs the command.
///
/// # Errors
/// `Library` if there is no such device or a stepper cannot be built, `File` if a record cannot be written, `Bench` if
/// an option is for another device, or a step computes something else than it should: then nothing is timed.
pub fn run(options: &Arguments) -> Result<ExitCode, Failure> {
    match options.device {
        DeviceName::Host => run_on_host(options)?,
        DeviceName::Cuda(ordinal) => run_on_gpu(options, &Cuda::open(ordinal)?)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The benches of `--device cuda:N` on this one: how tests run them without a GPU.
///
/// # Errors
/// As [`run`].
pub fn run_on_gpu(options: &Arguments, cuda: &Cuda) -> Result<(), Failure> {
    let host = [
        ("--shape", !options.shape.is_empty()),
        ("--isa", !options.isa.is_empty()),
        ("--threads", !options.threads.is_empty()),
        ("--csv", options.csv.is_some()),
    ];
    refuse(host, "--device host")?;
    gpu::run(options, cuda)
}

impl Arguments {
    /// The optimizers of the step bench.
    fn optimizers(&self) -> Vec<cases::Case> {
        if self.optimizer.is_empty() { cases::Case::all() } else { self.optimizer.clone() }
    }
}

/// Refuses options that the device knows nothing of.
fn refuse(given: impl IntoIterator<Item = (&'static str, bool)>, of: &str) -> Result<(), Failure> {
    match given.into_iter().find(|(_, given)| *given) {
        Some((name, _)) => Err(Failure::Bench(format!("{name} is for {of}"))),
        None => Ok(()),
    }
}

fn run_on_host(options: &Arguments) -> Result<(), Failure> {
    refuse(options.gpu.given(), "--device cuda:N")?;
    let mut record = Record::new();
    if options.wants(Bench::Step) {
        step::run(options, &mut record)?;
    }
    if options.wants(Bench::Overlap) {
        overlap::run(options, &mut record)?;
    }
    if options.wants(Bench::Handover) {
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
    Ok(())
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

    fn wants(&self, bench: Bench) -> bool {
        self.only.is_empty() || self.only.contains(&bench)
    }

    fn rounds(&self, usual: usize) -> usize {
        self.rounds.map_or(if self.quick { 3 } else { usual }, usize::from)
    }
}
