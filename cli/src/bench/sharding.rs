//! Measures the time of a pass with sharded states, and of a pass with sharded states and parameters. Both are compared
//! with the same pass without shards.
//!
//! In each round, every strategy makes one pass in the same process, so a busy machine slows all of them down. The
//! trainer computes nothing that could overlap with a collective. The bench therefore shows the full cost of the
//! collectives.

use std::time::Instant;

use instep::op::Memory;
use instep::{AdamW, Gradients, InProcess, Layout, Stepper, Strategy, Unused, in_process};

use super::Arguments;
use super::record::Record;
use super::statistics::Spread;
use super::table::announce;
use crate::Failure;
use crate::console::print_line;

const RANKS: u32 = 2;
const BUCKETS: usize = 4;
const STRATEGIES: [(&str, Strategy); 3] =
    [("replicated", Strategy::Replicated), ("zero", Strategy::Zero), ("fsdp", Strategy::Fsdp)];

/// The times of one strategy's passes, and the bytes that a rank holds between passes.
#[derive(Default)]
struct Outcome {
    ms: Vec<f64>,
    bytes: u64,
}

pub(super) fn run(options: &Arguments, record: &mut Record) -> Result<(), Failure> {
    let elements = if options.quick { 1 << 14 } else { 2 << 20 };
    let names = (0..BUCKETS).map(|k| format!("p{k}"));
    let layout = names.fold(Layout::builder(), |builder, name| builder.param(name, elements)).build()?;
    let rounds = options.rounds(31);
    let what = format!(
        "one pass of {RANKS} ranks in this process, {BUCKETS} buckets of {} KiB, AdamW in f32, \
         ms and ratio to replicated, median (min-max) of {rounds} passes; MiB that a rank holds",
        (elements * size_of::<f32>()) >> 10
    );
    announce("sharding", STRATEGIES.len(), &what)?;
    let mut ranks = in_process(RANKS, |comm| train(&layout, comm, rounds))?;
    let (isa, outcomes) = ranks.swap_remove(0);
    let whole = outcomes[0].ms.clone();
    for ((name, _), Outcome { ms, bytes }) in STRATEGIES.into_iter().zip(outcomes) {
        let ratios = Spread::of(ms.iter().zip(&whole).map(|(ms, whole)| ms / whole));
        let ms = Spread::of(ms);
        let mib = bytes as f64 / f64::from(1 << 20);
        print_line(&format!("{name:<12}{:<28}{:<24}{mib:.1}", ms.show(2), ratios.show(2)))?;
        record.add("sharding", name, isa, 1, "pass_ms", ms);
        record.add("sharding", name, isa, 1, "ratio_to_replicated", ratios);
        record.add("sharding", name, isa, 1, "held_mib", Spread::of([mib]));
    }
    Ok(())
}

fn train(layout: &Layout, comm: InProcess, rounds: usize) -> instep::Result<(&'static str, Vec<Outcome>)> {
    let build = |(_, strategy): (&str, Strategy)| {
        let builder = Stepper::builder(layout, AdamW::default()).strategy(strategy).threads(1);
        // Each parameter is a bucket, and every one has a gradient.
        let builder = builder.bucket_cap_bytes(1).unused(Unused::StepZero).gradients(Gradients::Keep);
        builder.host(comm.split())
    };
    let mut steppers = STRATEGIES.into_iter().map(build).collect::<instep::Result<Vec<_>>>()?;
    let mut outcomes: Vec<Outcome> = steppers.iter().map(|_| Outcome::default()).collect();
    // The first passes touch memory and start threads.
    for round in 0..rounds + 2 {
        for (stepper, outcome) in steppers.iter_mut().zip(&mut outcomes) {
            let ms = pass_ms(stepper, layout)?;
            if round >= 2 {
                outcome.ms.push(ms);
            }
            let held = stepper.memory().into_iter();
            outcome.bytes = held.filter(|(memory, _)| *memory != Memory::Grads).map(|(_, bytes)| bytes).sum();
        }
    }
    let isa = steppers[0].isa().name();
    steppers.into_iter().try_for_each(Stepper::close)?;
    Ok((isa, outcomes))
}

/// Makes one pass and returns its time in milliseconds. The pass reads all parameters, hands over all gradients, and
/// waits for the steps.
fn pass_ms(stepper: &mut Stepper, layout: &Layout) -> instep::Result<f64> {
    let buckets = stepper.plan().buckets().len() as u32;
    let start = Instant::now();
    for (id, bucket) in layout.ids().zip((0..buckets).rev()) {
        stepper.unshard(bucket)?;
        if let Some(next) = bucket.checked_sub(1) {
            stepper.unshard(next)?;
        }
        stepper.view::<f32>(id)?;
        // What is last in forward is first in backward.
        if bucket > 0 {
            stepper.reshard(bucket)?;
        }
    }
    let mut pass = stepper.begin()?;
    for (id, bucket) in layout.ids().rev().zip(0..) {
        pass.unshard(bucket)?;
        if bucket + 1 < buckets {
            pass.unshard(bucket + 1)?;
        }
        pass.view::<f32>(id)?;
        pass.bucket_mut::<f32>(bucket)?[0] = 0.5;
        pass.bucket_ready(bucket)?;
    }
    pass.finish()?;
    stepper.status()?;
    Ok(start.elapsed().as_secs_f64() * 1e3)
}
