//! `instep bench --device cuda:N`: the benches on a GPU, timed by CUDA events.
//!
//! A sweep over sizes prints one line for each size, in the units of nccl-tests. The ceiling is a copy that moves as
//! many bytes as the timed work, on the same device and in the same rounds. With `--kernels`, two different copies are
//! timed, and the faster copy is the ceiling. Before a step is timed, its result is compared with the host's, bit by
//! bit. After each row, the files of `--json`, `--record` and `--svg` are rewritten with all rows so far.

mod control;
mod files;
mod graph;
mod handover;
mod overlap;
mod report;
mod step;
mod sweep;
mod verify;

use std::path::PathBuf;

use instep::cuda::Cuda;

use super::{Arguments, Bench};
use crate::Failure;
use crate::console::print_line;
use report::Report;
use sweep::Blocks;

/// Options that only the benches on a GPU have.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Options of --device cuda:N")]
pub(super) struct Options {
    /// Limits on a step's thread blocks: all (no limit), a number, or a number per multiprocessor such as 2x [default:
    /// all; overlap: all,2x,1x].
    #[arg(long, value_name = "BLOCKS", value_delimiter = ',')]
    max_blocks: Vec<Blocks>,
    /// Fill gradients and states with zeros, like those of embedding rows that no token used. On a GPU, dividing zero
    /// by a number takes a slow path.
    #[arg(long)]
    zeros: bool,
    /// File of kernels, built by scripts/bench-kernels.sh. The overlap bench needs this file. With this file, steps and
    /// norms are also compared with a copy that the multiprocessors make [default: INSTEP_BENCH_KERNELS].
    #[arg(long, value_name = "FILE")]
    kernels: Option<PathBuf>,
    /// Also write a trace of the overlap bench for ui.perfetto.dev.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Also draw a pass of the overlap bench, as an SVG file.
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
}

impl Options {
    /// Lists these options, and whether each was given on the command line.
    pub(super) fn given(&self) -> [(&'static str, bool); 5] {
        [
            ("--max-blocks", !self.max_blocks.is_empty()),
            ("--zeros", self.zeros),
            ("--kernels", self.kernels.is_some()),
            ("--trace", self.trace.is_some()),
            ("--picture", self.picture.is_some()),
        ]
    }

    fn blocks(&self, usual: &[Blocks]) -> Vec<Blocks> {
        if self.max_blocks.is_empty() { usual.to_vec() } else { self.max_blocks.clone() }
    }
}

pub(super) fn run(options: &Arguments, cuda: &Cuda) -> Result<(), Failure> {
    let set = || std::env::var_os("INSTEP_BENCH_KERNELS").map(PathBuf::from);
    let path = options.gpu.kernels.clone().or_else(set);
    let kernels = path.map(|path| std::fs::read(&path).map_err(Failure::file(&path))).transpose()?;
    let kernels = kernels.as_deref();
    let mut report = Report::new(cuda, options)?;
    print_line(&report.machine.to_string())?;
    print_line(&format!("# {}", report.device))?;
    if options.wants(Bench::Step) {
        step::run(options, cuda, kernels, &mut report)?;
    }
    if options.wants(Bench::Norm) {
        step::run_norms(options, cuda, kernels, &mut report)?;
    }
    if options.wants(Bench::Control) {
        control::run(options, cuda, &mut report)?;
    }
    if options.wants(Bench::Graph) {
        graph::run(options, cuda, &mut report)?;
    }
    if options.wants(Bench::Overlap) {
        match kernels {
            Some(image) => overlap::run(options, cuda, image, &mut report)?,
            None if options.only.is_empty() => print_line(
                "\nSKIPPED: overlap, which needs --kernels FILE; scripts/bench-kernels.sh makes one",
            )?,
            None => {
                let why = "overlap: needs --kernels FILE; make one with scripts/bench-kernels.sh";
                return Err(Failure::Bench(why.into()));
            }
        }
    }
    if options.wants(Bench::Handover) {
        handover::run(options, cuda, &mut report)?;
    }
    files::save(options, &report)?;
    report.judge()
}
