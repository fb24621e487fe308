//! Measures the time of each stage of a training run, from the layout to the checkpoint, for growing numbers of
//! parameters. Each figure is the time divided by the number of parameters.
//!
//! Parameters are small, so most of the time is bookkeeping and not arithmetic. If a column is constant, the time is
//! linear in the number of parameters.

use std::io::Cursor;
use std::time::Instant;

use clap::ValueEnum;
use instep::bench::Moving;
use instep::{AdamW, Error, Layout, ParamId, Solo, Stepper, checkpoint};

use super::Arguments;
use super::record::Record;
use super::statistics::Spread;
use super::table::announce;
use crate::Failure;
use crate::console::print_line;

const ELEMENTS: usize = 16;
/// The number of parameters in a bucket. This number is fixed, so the number of buckets grows with the number of
/// parameters.
const IN_BUCKET: usize = 1024;
const CAP_BYTES: u64 = (IN_BUCKET * ELEMENTS * size_of::<f32>()) as u64;
const USUAL: [usize; 3] = [1_000, 10_000, 100_000];
const QUICK: [usize; 2] = [100, 1_000];
const STAGES: [&str; 9] = [
    "layout",
    "lookup",
    "build",
    "begin",
    "handover",
    "finish",
    "rebind",
    "checkpoint_write",
    "checkpoint_read",
];

/// How parameters get their optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Case {
    /// One optimizer for all parameters.
    Shared,
    /// Each parameter is in its own group. All groups have equal hyperparameters.
    Groups,
    /// One optimizer per parameter, registered by `optimizer_for`.
    Each,
}

pub(super) fn run(options: &Arguments, record: &mut Record) -> Result<(), Failure> {
    let usual = if options.quick { &QUICK[..] } else { &USUAL[..] };
    let sizes = if options.parameters.is_empty() { usual } else { &options.parameters[..] };
    let what = format!(
        "ns per parameter of {ELEMENTS} elements, AdamW, buckets of {} KiB, one kernel thread, median; \
         write and read are of a checkpoint",
        CAP_BYTES >> 10
    );
    announce("growth", Case::value_variants().len() * sizes.len(), &what)?;
    let titles = STAGES.map(|stage| format!("{:>11}", stage.trim_start_matches("checkpoint_"))).concat();
    print_line(&format!("{:<8}{:>11}{titles}", "case", "parameters"))?;
    for case in Case::value_variants() {
        let case_name = format!("{case:?}").to_lowercase();
        for count in sizes {
            let names: Vec<String> = (0..*count).map(|k| format!("layer{k}.weight")).collect();
            let mut isa = "";
            let mut rounds = Vec::new();
            // The first round warms up.
            for round in 0..=options.rounds(3) {
                let (sample, name) = sample(*case, &names)?;
                isa = name;
                rounds.extend((round > 0).then_some(sample));
            }
            let mut line = format!("{case_name:<8}{count:>11}");
            for (k, stage) in STAGES.iter().enumerate() {
                let samples: Vec<f64> = rounds.iter().filter_map(|round| round[k]).collect();
                if samples.is_empty() {
                    line += &format!("{:>11}", "-");
                    continue;
                }
                let spread = Spread::of(samples);
                line += &format!("{:>11.1}", spread.median);
                record.add(
                    "growth",
                    &format!("{case_name} {count}"),
                    isa,
                    1,
                    &format!("{stage}_ns_per_parameter"),
                    spread,
                );
            }
            print_line(&line)?;
        }
    }
    Ok(())
}

/// Returns the nanoseconds per parameter of each stage, and the name of the instruction set. The times of the two
/// checkpoint stages are `None` if a checkpoint cannot contain that many names.
fn sample(case: Case, names: &[String]) -> instep::Result<([Option<f64>; STAGES.len()], &'static str)> {
    let mut stages = [None; STAGES.len()];
    let mut clock = Instant::now();
    let mut next = 0;
    // Sets the time of the next stage: the time since `clock` was set.
    let mut lap = |clock: &mut Instant| {
        stages[next] = Some(clock.elapsed().as_secs_f64() * 1e9 / names.len() as f64);
        next += 1;
        *clock = Instant::now();
    };

    let mut builder = Layout::builder();
    for name in names {
        builder = builder.param(name, ELEMENTS);
        if case == Case::Groups {
            builder = builder.in_group(name);
        }
    }
    let layout = builder.build()?;
    lap(&mut clock);

    let ids = names.iter().map(|name| layout.id(name)).collect::<instep::Result<Vec<ParamId>>>()?;
    lap(&mut clock);

    let mut builder = match case {
        Case::Each => Stepper::builder_without_optimizer(&layout),
        _ => Stepper::builder(&layout, AdamW::default()),
    };
    if case == Case::Each {
        builder = ids.iter().fold(builder, |builder, id| builder.optimizer_for(&[*id], AdamW::default()));
    }
    let mut stepper = builder.bucket_cap_bytes(CAP_BYTES).threads(1).host(Solo::default())?;
    lap(&mut clock);

    let mut pass = stepper.begin()?;
    lap(&mut clock);
    for id in ids.iter().rev() {
        pass.grads().get_mut(*id)?.fill(0.01);
        pass.grad_ready(*id)?;
    }
    lap(&mut clock);
    pass.finish()?;
    stepper.status()?;
    lap(&mut clock);

    // Moves the memory of all parameters and buckets. The time includes making the list of addresses.
    let mut moving = Moving::new(&layout, IN_BUCKET)?;
    clock = Instant::now();
    moving.move_all()?;
    lap(&mut clock);
    drop(moving);
    clock = Instant::now();

    let mut bytes = Vec::new();
    match checkpoint::write(&stepper, &mut bytes) {
        Ok(()) => {
            lap(&mut clock);
            checkpoint::read(&mut stepper, Cursor::new(bytes))?;
            lap(&mut clock);
        }
        // The format limits the length of its header.
        Err(Error::Checkpoint(_)) => {}
        Err(error) => return Err(error),
    }
    Ok((stages, stepper.isa().name()))
}
