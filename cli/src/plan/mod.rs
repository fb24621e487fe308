//! `instep plan`: predicts a rank's memory, traffic, schedule and times, without a GPU and without the other ranks.
//!
//! The plan comes from the stepper's own builder, schedule and byte counts. The command adds a simulated trainer and
//! the speeds that the user gives. The predicted times are only as good as these speeds. `--measure` compares a plan's
//! schedule with a real run.

mod measure;
mod model;
mod offload_run;
mod report;
mod shards;
mod speeds;
mod torch;
mod trainer;

use std::io::Read;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::process::ExitCode;

use instep::checkpoint::safetensors::regular_file;
use instep::timeline::{draw_picture, window_of_passes, write_trace};
use instep::{Accumulation, Clip, Gradients, Mode, OffloadPolicy, Stepper, StepperBuilder, Strategy, Unused};

use crate::Failure;
use crate::console::{print, print_json};
use crate::replay::refused;
use model::Model;
use report::Report;
use speeds::{Ranks, Speeds};
use trainer::{Peaks, Walk, train};

/// The largest size of a description.
const MAX_CONFIG_BYTES: u64 = 64 << 20;

/// The number of predicted passes. The first pass also broadcasts the parameters, so it is not typical. The report
/// describes the second-to-last pass, because the steps of a pass may end during the next pass.
const PASSES: u64 = 4;

/// The default size of a bucket.
const BUCKET_CAP_MIB: u64 = 25;

/// Predicts the run of one rank: bytes in memory, bytes sent, schedule and times
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// Parameters and optimizer of the model, as JSON
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    /// Number of ranks
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub world_size: u32,
    /// When steps run: sequential, eager or normed
    #[arg(long, value_enum, default_value_t = Order::Eager)]
    pub mode: Order,
    /// Which tensors are sharded: replicated (none), zero (states) or fsdp (parameters too)
    #[arg(long, value_enum, default_value_t = Sharing::Replicated)]
    pub strategy: Sharing,
    /// Number of neighbouring ranks in a group. The ranks of a group together have all shards, and the groups are
    /// replicas of each other [default: all ranks]
    #[arg(long, value_name = "COUNT")]
    pub shard_size: Option<NonZeroU32>,
    /// Run steps on the host, with states, masters and averages in the host's memory. `torch` plans a training with
    /// `instep.torch.offload`, on a plain module or under DDP. With --strategy=fsdp, `torch` plans a training under
    /// fully_shard with CPUOffloadPolicy
    #[arg(long, value_enum, value_name = "ENGINE", num_args = 0..=1, require_equals = true, default_missing_value = "stepper")]
    pub offload: Option<Engine>,
    /// With --offload=torch, size of the page-locked memory through which gradients are copied to the host [default:
    /// the size of all gradients]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    pub ring_mib: Option<u64>,
    /// With --offload=torch, divide gradients by a loss scale, and check all gradients before any step
    #[arg(long)]
    pub grad_scaler: bool,
    /// Free each gradient after its step. A gradient in another rank's shard is freed after its sum over ranks
    #[arg(long)]
    pub release_gradients: bool,
    /// Number of micro-batches in a pass (gradient accumulation)
    #[arg(long, value_name = "COUNT", default_value = "1", conflicts_with = "measure")]
    pub micro_batches: NonZeroU32,
    /// With shards, sum gradients over ranks in each micro-batch instead of once per pass
    #[arg(long, requires = "micro_batches")]
    pub sum_micro_batches: bool,
    /// Norm to which all gradients together are clipped; for sequential and normed
    #[arg(long, value_name = "NORM")]
    pub max_norm: Option<f64>,
    /// Size of a bucket
    #[arg(long, value_name = "MIB", default_value_t = BUCKET_CAP_MIB, value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    pub bucket_cap_mib: u64,
    #[command(flatten)]
    speeds: Speeds,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Write the run as a trace for ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Draw one pass as an SVG picture
    #[arg(long, value_name = "FILE")]
    pub picture: Option<PathBuf>,
    /// Train here with threads as ranks, predict this run with the measured times of its ops, and compare the two
    #[arg(long, conflicts_with_all = ["trace", "picture"])]
    pub measure: bool,
}

/// When steps run, relative to all-reduces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Order {
    /// After the last all-reduce
    Sequential,
    /// After the bucket's own all-reduce
    Eager,
    /// After the norm of all gradients, concurrently with the next forward
    Normed,
}

/// Which tensors are sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Sharing {
    /// None: every rank steps everything
    Replicated,
    /// Optimizer states: each rank steps a shard of each bucket
    Zero,
    /// Optimizer states and parameters: a rank has the full parameters of two buckets at a time, the current one and
    /// the next
    Fsdp,
}

/// The engine that steps on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Engine {
    /// The library's stepper, with its schedule
    Stepper,
    /// `instep.torch.offload`, which steps a bucket after autograd has made its gradients
    Torch,
}

impl Arguments {
    /// Refuses options that cannot be combined. The errors name the options of this command. The library's own errors
    /// would use other names.
    fn check(&self) -> Result<(), Failure> {
        let refuse = |option: String, wrong: &str, remedy: &str| Err(Failure::config(option, wrong, remedy));
        if let Some(max_norm) = self.max_norm {
            let option = format!("--max-norm {max_norm}");
            if !(max_norm > 0.0 && max_norm.is_finite()) {
                return refuse(option, "out of range", "use a number above 0");
            }
            if self.mode == Order::Eager && self.offload != Some(Engine::Torch) {
                let wrong = "--mode eager steps the first bucket before the norm of all is known";
                return refuse(option, wrong, "use --mode normed or --mode sequential");
            }
        }
        let of_torch =
            [("--ring-mib", self.ring_mib.is_some()), ("--grad-scaler", self.grad_scaler)].into_iter();
        let of_stepper = [
            ("--mode", self.mode != Order::Eager),
            ("--strategy zero", self.strategy == Sharing::Zero),
            ("--sum-micro-batches", self.sum_micro_batches),
            ("--release-gradients", self.release_gradients),
            ("--measure", self.measure),
            ("--trace", self.trace.is_some()),
            ("--picture", self.picture.is_some()),
        ];
        if self.offload == Some(Engine::Torch) {
            if let Some((option, _)) = of_stepper.into_iter().find(|(_, given)| *given) {
                let wrong = "instep.torch.offload has no such choice, and makes no schedule to draw";
                return refuse(option.into(), wrong, "leave it out, or use --offload=stepper");
            }
            let of_buckets = [
                ("--ring-mib", self.ring_mib.is_some()),
                ("--bucket-cap-mib", self.bucket_cap_mib != BUCKET_CAP_MIB),
            ];
            let given = of_buckets.into_iter().find(|(_, given)| *given && self.strategy == Sharing::Fsdp);
            if let Some((option, _)) = given {
                let wrong = "FSDP copies gradients itself, and its units are the buckets";
                return refuse(option.into(), wrong, "leave it out");
            }
        } else if let Some((option, _)) = of_torch.into_iter().find(|(_, given)| *given) {
            return refuse(
                option.into(),
                "is of instep.torch.offload",
                "give --offload=torch too, or leave it out",
            );
        }
        let has_shards = self.strategy != Sharing::Replicated;
        if let Some(ranks) = self.shard_size {
            let option = format!("--shard-size {ranks}");
            if !has_shards {
                let wrong = "with --strategy replicated there are no shards";
                return refuse(option, wrong, "use --strategy zero or --strategy fsdp");
            }
            if !self.world_size.is_multiple_of(ranks.get()) {
                let wrong = format!("does not divide --world-size {}", self.world_size);
                return refuse(option, &wrong, "use a divisor of it");
            }
        }
        if self.sum_micro_batches && !has_shards {
            let wrong = "with --strategy replicated there are no shards to sum";
            let remedy = "use --strategy zero or --strategy fsdp";
            return refuse("--sum-micro-batches".into(), wrong, remedy);
        }
        Ok(())
    }

    /// Returns the builder of the planned stepper.
    fn builder<'a>(&self, model: &'a Model) -> StepperBuilder<'a> {
        let mode = match self.mode {
            Order::Sequential => Mode::Sequential,
            Order::Eager => Mode::Eager,
            Order::Normed => Mode::Normed,
        };
        let strategy = match self.strategy {
            Sharing::Replicated => Strategy::Replicated,
            Sharing::Zero => Strategy::Zero,
            Sharing::Fsdp => Strategy::Fsdp,
        };
        let mut builder = Stepper::builder(&model.layout, model.optimizer.clone()).strategy(strategy);
        if self.strategy == Sharing::Fsdp {
            builder = builder.max_unsharded(Walk::MOST);
        }
        if let Some(ranks) = self.shard_size {
            builder = builder.shard_size(ranks);
        }
        if self.offload.is_some() {
            builder = builder.offload(OffloadPolicy::default());
        }
        if self.release_gradients {
            builder = builder.gradients(Gradients::Release);
        }
        if self.sum_micro_batches {
            builder = builder.accumulation(Accumulation::Summed);
        }
        let builder = builder.precision(model.precision).mode(mode).record(true);
        // Every parameter has a gradient, so no bucket has a tail that counts the ranks.
        let builder = builder.bucket_cap_bytes(self.bucket_cap_mib << 20).unused(Unused::StepZero);
        match self.max_norm {
            Some(max_norm) => builder.clip(Clip::Global(max_norm)),
            None => builder,
        }
    }
}

/// Runs the command.
///
/// # Errors
/// Returns an error if the description or an option is refused, or if a file cannot be read or written.
pub fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let Arguments { config, world_size, speeds, .. } = arguments;
    let mut text = Vec::new();
    regular_file(config)?.take(MAX_CONFIG_BYTES + 1).read_to_end(&mut text).map_err(Failure::file(config))?;
    if text.len() as u64 > MAX_CONFIG_BYTES {
        return Err(Failure::Config(format!("longer than {MAX_CONFIG_BYTES} bytes")).configured(config));
    }
    let model = Model::parse(&text).map_err(|failure| failure.configured(config))?;
    speeds.check()?;
    arguments.check()?;
    if arguments.offload == Some(Engine::Torch) {
        let plan = torch::Plan::new(arguments, &model)?;
        if arguments.json {
            print_json(&plan)?
        } else {
            print(&plan.to_string())?
        }
        return Ok(ExitCode::SUCCESS);
    }
    if arguments.measure {
        return measure::run(arguments, &model);
    }
    let ranks = Ranks::new(*world_size, arguments.shard_size);
    let cost = speeds.cost(ranks, arguments.offload.is_some());
    let mut stepper = arguments.builder(&model).forecast(0, *world_size, cost).map_err(refused)?;
    stepper.share_launches();
    let mut peaks = Peaks::default();
    for _ in 0..PASSES {
        train(&mut stepper, &model.layout, speeds, (&mut peaks, arguments.micro_batches))?;
    }
    let Some(run) = stepper.take_recording() else {
        return Err(Failure::Config("the run was not recorded".into()));
    };
    let lane = run.lane(0);
    let pass = window_of_passes(&lane, PASSES - 1, 1);
    let report = Report::new(&model, ranks, (&stepper, &peaks), &run, pass);
    if let Some(path) = &arguments.trace {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = write_trace(&mut text, &[lane]);
        std::fs::write(path, text).map_err(Failure::file(path))?;
    }
    if let (Some(path), Some(window)) = (&arguments.picture, pass) {
        let title = format!("one pass of {} on {world_size} ranks, foreseen", config.display());
        std::fs::write(path, draw_picture(&title, &[lane], window)).map_err(Failure::file(path))?;
    }
    if arguments.json {
        print_json(&report)?
    } else {
        print(&report.to_string())?
    }
    Ok(ExitCode::SUCCESS)
}
