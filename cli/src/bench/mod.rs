//! `instep bench`: times optimizer steps on this machine and compares them with a memory ceiling.
//!
//! Three benches run on every device: step, overlap and handover. Four benches run only on the host: launch, distance,
//! sharding and growth. Three run only on a GPU: norm, control and graph. A slow step never makes a bench fail.
//! benches/README.md explains every column.

mod cases;
mod distance;
mod gpu;
mod growth;
mod handover;
mod launch;
mod load;
mod machine;
mod overlap;
mod plain_bits;
mod plot;
mod precisions;
mod record;
#[allow(dead_code)]
mod reference;
mod report;
mod sharding;
mod sizes;
mod statistics;
mod step;
pub(crate) mod system;
mod table;

use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

use clap::ValueEnum;
use instep::cuda::Cuda;
use instep::{Isa, Pool};

use crate::Failure;
use crate::console::print_line;
use cases::Shape;
use load::Watch;
use machine::Machine;
use precisions::Kind;
use record::Record;
use sizes::{GPU_BYTES, HOST_BYTES, Sizes};

/// The benches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Bench {
    /// One bucket's step, compared with a memory ceiling. On the host, the ceiling is an in-place loop. On a GPU, it is
    /// the faster of two copies.
    Step,
    /// One bucket's norm, compared with the faster of two copies. This bench needs a GPU.
    Norm,
    /// The kernels Begin and Decide. A pass launches Begin once. A pass with one decision about clipping or skipping
    /// launches Decide once. This bench needs a GPU.
    Control,
    /// The replay of a captured pass, compared with the same pass made call by call. This bench needs a GPU.
    Graph,
    /// The time for which the trainer waits for the optimizer, in each mode.
    Overlap,
    /// The time of a call of `grad_ready` on the trainer's thread.
    Handover,
    /// The time that a `BucketStep` adds to its kernel. This bench runs on the host.
    Launch,
    /// The memory traffic of a step over arrays that are 256 MiB apart. Arrays that start at the same offset in a page
    /// are compared with arrays at staggered offsets. This bench runs on the host.
    Distance,
    /// A pass in three variants: without shards, with sharded states, and with sharded states and parameters. This
    /// bench runs on the host.
    Sharding,
    /// The time per parameter of each stage of a training run, for growing numbers of parameters. This bench runs on
    /// the host.
    Growth,
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
        host.or(ordinal.map(DeviceName::Cuda)).ok_or_else(|| "use host or cuda:N".to_owned())
    }
}

/// Time optimizer steps on this machine; benches/README.md explains every column
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Device that runs the steps: host or cuda:N.
    #[arg(long, default_value = "host")]
    device: DeviceName,
    /// Benches to run [default: all].
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Bench>,
    /// Optimizers of the step bench [default: all].
    #[arg(long, value_delimiter = ',')]
    optimizer: Vec<cases::Case>,
    /// Element types in the step bench, and in the norm bench on a GPU.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "f32")]
    precision: Vec<Kind>,
    /// Shapes of the step bench on the host, if none of -b, -e and -f is given [default: all].
    #[arg(long, value_enum, value_delimiter = ',')]
    shape: Vec<Shape>,
    #[command(flatten)]
    sizes: Sizes,
    /// Instruction sets [default: INSTEP_ISA, or the widest].
    #[arg(long, value_delimiter = ',')]
    isa: Vec<Isa>,
    /// Numbers of kernel threads [default: 1 and one per core].
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=Pool::MAX_THREADS as i64))]
    threads: Vec<u16>,
    /// Numbers of parameters of the growth bench [default: 1000,10000,100000]. A million parameters take 4 GiB of
    /// memory.
    #[arg(long, value_delimiter = ',', value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=10_000_000))]
    parameters: Vec<usize>,
    /// Number of rounds. Each round times every variant that is compared.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: Option<u16>,
    /// Use few rounds and little memory, to check that everything runs.
    #[arg(long)]
    quick: bool,
    /// Also write every figure to this file.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Also write every figure to this file as one JSON object, after each row.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Also draw, for each bucket size, the step's speed as a percentage of the ceiling. The SVG file is written again
    /// after each row.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Also write every figure under benches/record/ of the source tree of this build.
    #[arg(long)]
    record: bool,
    #[command(flatten)]
    gpu: gpu::Options,
}

/// Runs the command.
///
/// # Errors
/// `Library` if the device does not exist or a stepper cannot be built. `File` if a file cannot be read or written.
/// `Bench` if options do not fit together or do not fit the device, or if a step computes a wrong result. On the host,
/// the first wrong result ends the bench. On a GPU, the remaining cases still run.
pub fn run(options: &Arguments) -> Result<ExitCode, Failure> {
    match options.device {
        DeviceName::Host => run_on_host(options)?,
        DeviceName::Cuda(ordinal) => run_on_gpu(options, &Cuda::open(ordinal)?)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs the benches on the GPU `cuda`, as [`run`] does with `--device cuda:N`. Tests pass a simulated device, so they
/// need no GPU.
///
/// # Errors
/// Errors as for [`run`].
pub fn run_on_gpu(options: &Arguments, cuda: &Cuda) -> Result<(), Failure> {
    let host = [
        ("--shape", !options.shape.is_empty()),
        ("--isa", !options.isa.is_empty()),
        ("--threads", !options.threads.is_empty()),
        ("--csv", options.csv.is_some()),
        ("--parameters", !options.parameters.is_empty()),
        ("--only launch", options.only.contains(&Bench::Launch)),
        ("--only distance", options.only.contains(&Bench::Distance)),
        ("--only sharding", options.only.contains(&Bench::Sharding)),
        ("--only growth", options.only.contains(&Bench::Growth)),
    ];
    refuse(host, "--device host")?;
    options.sizes.refuse_empty(GPU_BYTES)?;
    gpu::run(options, cuda)
}

impl Arguments {
    /// Returns the optimizers of the step bench.
    fn optimizers(&self) -> Vec<cases::Case> {
        if self.optimizer.is_empty() { cases::Case::all() } else { self.optimizer.clone() }
    }
}

/// Refuses options that are for another device.
fn refuse(given: impl IntoIterator<Item = (&'static str, bool)>, of: &str) -> Result<(), Failure> {
    match given.into_iter().find(|(_, given)| *given) {
        Some((name, _)) => {
            Err(Failure::Bench(format!("{name}: is for {of}; leave it out, or change --device")))
        }
        None => Ok(()),
    }
}

fn run_on_host(options: &Arguments) -> Result<(), Failure> {
    refuse(options.gpu.given(), "--device cuda:N")?;
    let named = |bench| options.only.contains(&bench);
    let others = [
        ("--only norm", named(Bench::Norm)),
        ("--only control", named(Bench::Control)),
        ("--only graph", named(Bench::Graph)),
    ];
    refuse(others, "--device cuda:N")?;
    if options.sizes.is_given() && !options.shape.is_empty() {
        let why = "--shape: has sizes of its own; leave it out, or leave out -b, -e and -f";
        return Err(Failure::Bench(why.into()));
    }
    options.sizes.refuse_empty(HOST_BYTES)?;
    let (machine, watch) = (Machine::this()?, Watch::start());
    print_line(&machine.to_string())?;
    let mut record = Record::new(&machine, options.quick, options.json.clone(), options.svg.clone());
    if options.wants(Bench::Step) {
        step::run(options, &mut record)?;
    }
    if options.wants(Bench::Overlap) {
        overlap::run(options, &mut record)?;
    }
    if options.wants(Bench::Handover) {
        handover::run(options, &mut record)?;
    }
    if options.wants(Bench::Launch) {
        launch::run(options, &mut record)?;
    }
    if options.wants(Bench::Distance) {
        distance::run(options, &mut record)?;
    }
    if options.wants(Bench::Sharding) {
        sharding::run(options, &mut record)?;
    }
    if options.wants(Bench::Growth) {
        growth::run(options, &mut record)?;
    }
    let load = watch.load();
    record.save(load)?;
    if let Some(warning) = load.and_then(|load| load.warning()) {
        print_line(&format!("\n{warning}"))?;
    }
    if let Some(path) = &options.csv {
        record.write(path).map_err(Failure::file(path))?;
    }
    if options.record {
        let path = system::path_of_this_machine();
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
        let all = Pool::from_environment()?.threads();
        Ok(if all == 1 { vec![1] } else { vec![1, all] })
    }

    fn wants(&self, bench: Bench) -> bool {
        self.only.is_empty() || self.only.contains(&bench)
    }

    fn rounds(&self, usual: usize) -> usize {
        self.rounds.map_or(if self.quick { 3 } else { usual }, usize::from)
    }
}
