//! One rank: it builds a stepper, trains, and returns its results. The loop in the middle shows all calls that a
//! training step needs.
//!
//! A rank has no access to the other ranks or to the other run. Ranks meet only in the library's collectives, and
//! `report` compares their results.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use instep::dtype::Element;
use instep::hazard::Hazard;
use instep::optim::{
    Optimizer,
    Value::{self, Flag, Number, Pair},
};
use instep::{Clip, Collective, Error, Layout, Mode, OffloadPolicy, Recording, Result, Stepper};

use crate::data::Samples;
use crate::machine::choose_threads;
use crate::model::{Network, Tape, WIDTHS, lay_out};
use crate::report::Progress;
use crate::{Flags, PrecisionName, StrategyName};

/// The results of one rank.
pub(crate) struct Trained {
    pub(crate) accuracy: f64,
    /// Wall time of the passes, without the evaluation after each epoch.
    pub(crate) training: Duration,
    pub(crate) parameters: Vec<Trace>,
    pub(crate) hazards: Vec<Hazard>,
    /// When each operation ran, and when the trainer waited.
    pub(crate) recording: Recording,
}

/// One parameter after training.
pub(crate) struct Trace {
    pub(crate) name: String,
    pub(crate) steps: u64,
    /// The parameter itself and the optimizer's states, by name.
    pub(crate) tensors: Vec<(Cow<'static, str>, Vec<f32>)>,
}

/// Trains one rank's copy of the network on its part of every batch.
pub(crate) fn train_rank(
    flags: &Flags,
    mode: Mode,
    training: &Samples,
    held_out: &Samples,
    progress: &Progress,
    comm: impl Collective + 'static,
) -> Result<Trained> {
    match flags.precision {
        PrecisionName::F32 => train_rank_as::<f32>(flags, mode, training, held_out, progress, comm),
        _ => train_rank_as::<half::bf16>(flags, mode, training, held_out, progress, comm),
    }
}

/// `T` is the type of parameters and gradients.
fn train_rank_as<T: Element>(
    flags: &Flags,
    mode: Mode,
    training: &Samples,
    held_out: &Samples,
    progress: &Progress,
    comm: impl Collective + 'static,
) -> Result<Trained> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let layout = lay_out(&WIDTHS)?;
    let network = Network::new(&layout, &WIDTHS)?;
    let mut tape = Tape::default();
    let mut stepper = build_stepper(flags, mode, &layout, comm)?;
    if rank == 0 || flags.strategy != StrategyName::Ddp || flags.offload {
        // The first pass broadcasts these values to every rank. It leaves out tensors of which each rank keeps its own
        // part.
        network.initialise(&mut stepper)?;
    }
    if rank == 0 {
        progress.start(flags, &stepper)?;
    }

    let mut training_time = Duration::ZERO;
    for epoch in 1..=flags.epochs {
        let started = Instant::now();
        let mut losses = Vec::new();
        for batch in training.draw_batches(epoch, rank, ranks) {
            let mut pass = stepper.begin()?;
            losses.push(network.forward::<T>(&mut pass, &batch, &mut tape)?.loss);
            for layer in network.layers.iter().rev() {
                layer.unshard(&mut pass)?;
                let (params, mut grads) = pass.split();
                layer.backward::<T>(params, &mut grads, &mut tape)?;
                // A bucket that is complete now is reduced and stepped during the backward of the layers below.
                pass.grad_ready(layer.bias)?;
                pass.grad_ready(layer.weight)?;
            }
            pass.finish()?;
        }
        training_time += started.elapsed();
        if rank == 0 || flags.strategy == StrategyName::Fsdp {
            // All ranks that shard parameters take part, because the evaluation unshards them.
            let accuracy = network.forward::<T>(&mut stepper, held_out, &mut tape)?.accuracy;
            if rank == 0 {
                progress.advance(epoch, losses.iter().sum::<f64>() / losses.len() as f64, accuracy);
            }
        }
    }

    let accuracy = network.forward::<T>(&mut stepper, held_out, &mut tape)?.accuracy;
    let parameters = collect_parameters(&stepper)?;
    // The recording is taken last, so that it has every operation, from start to end.
    let nothing = || Error::order("recording", "empty", "build the stepper with `record`");
    let recording = stepper.take_recording().ok_or_else(nothing)?;
    Ok(Trained {
        accuracy,
        training: training_time,
        parameters,
        hazards: stepper.check(&recording),
        recording,
    })
}

/// Returns options for this network, if the optimizer's defaults do not suit the network.
fn tuned(optimizer: &str) -> &'static [(&'static str, Value)] {
    match optimizer {
        "sgd" => &[("lr", Number(0.05)), ("momentum", Number(0.9)), ("nesterov", Flag(true))],
        "adam" | "adamw" | "nadam" | "radam" => &[("lr", Number(2e-3))],
        "adagrad" => &[("lr", Number(2e-2))],
        "rmsprop" => &[("lr", Number(1e-3))],
        "adamax" => &[("lr", Number(4e-3))],
        // Small batches make gradients change sign at random; factors near 1 average over that.
        "rprop" => &[("lr", Number(1e-3)), ("etas", Pair((0.9, 1.05))), ("step_sizes", Pair((1e-5, 1e-3)))],
        _ => &[],
    }
}

fn build_stepper(
    flags: &Flags,
    mode: Mode,
    layout: &Layout,
    comm: impl Collective + 'static,
) -> Result<Stepper> {
    let mut optimizer = flags.optimizer.build();
    for (field, value) in tuned(&flags.optimizer.key()) {
        optimizer.set(field, *value)?;
    }
    let builder = Stepper::builder(layout, optimizer);
    let builder = builder.precision(flags.precision.into());
    let builder = builder.strategy(flags.strategy.into());
    let builder = if flags.offload { builder.offload(OffloadPolicy::default()) } else { builder };
    let mut builder = builder.mode(mode).bucket_cap_bytes(flags.bucket_cap_bytes).record(true);
    if let Some(ranks) = flags.shard_size.filter(|_| flags.strategy != StrategyName::Ddp) {
        builder = builder.shard_size(ranks);
    }
    if let Some(max_norm) = flags.max_norm {
        builder = builder.clip(Clip::Global(max_norm));
    }
    if let Some(threads) = choose_threads(flags.threads, flags.ranks) {
        builder = builder.threads(threads);
    }
    builder.host(comm)
}

fn collect_parameters(stepper: &Stepper) -> Result<Vec<Trace>> {
    let collect = |id| {
        let mut values = vec![0.0; stepper.layout().parameter(id)?.len as usize];
        stepper.gather(id, &mut values)?;
        let mut tensors = vec![("value".into(), values.clone())];
        for state in stepper.state_names(id)? {
            stepper.gather(id.state(&state), &mut values)?;
            tensors.push((state, values.clone()));
        }
        let name = stepper.layout().parameter(id)?.name.clone();
        Ok(Trace { name, steps: stepper.step_count(id)?, tensors })
    };
    stepper.layout().ids().map(collect).collect()
}
