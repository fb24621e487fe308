//! Reads everything that a stepper has, on all ranks together, by every call that can read it.
//!
//! Calls that give the same tensor must give the same bits. If a tensor is sharded, a plain read is refused.

use instep::{Result, TensorId};

use super::program::*;
use super::rank::{Event, Rank, What, kind};
use super::rules::state_names;
use super::values::{bits, rounded};

/// Reads everything, between passes.
pub(crate) fn everything(rank: &mut Rank<'_>) -> Result<()> {
    for param in 0..rank.ids.len() {
        let (id, len) = (rank.ids[param], rank.program.params[param].len);
        for (what, tensor) in tensors(rank, param) {
            let mut values = vec![0.0; len];
            rank.stepper.gather(tensor, &mut values)?;
            let mut read = vec![0.0; len];
            let answer = rank.stepper.read(tensor, &mut read).map(|()| read);
            compare_reads(rank, (what, param), &values, answer);
            rank.note(Event::Tensor { what, param, values });
        }
        let count = rank.stepper.step_count(id)?;
        let carried = rank.stepper.carried(id)?;
        rank.note(Event::Count { param, count, carried });
    }
    settings(rank)
}

fn tensors<'p>(rank: &Rank<'p>, param: usize) -> Vec<(What, TensorId<'p>)> {
    let id = rank.ids[param];
    let names = state_names(rank.program.rule(param)).iter().enumerate();
    let mut all = vec![(What::Value, id.into())];
    all.extend(names.map(|(k, name)| (What::State(k), id.state(name))));
    all.extend(rank.config.ema.map(|_| (What::Ema, id.ema())));
    all.extend(rank.config.copy.map(|_| (What::Copy, id.copy())));
    if rank.config.gradients != Gradients::Release {
        all.push((What::Gradient, id.grad()));
    }
    all
}

/// Checks that a plain read of a full tensor gives what a gather gives, and that a plain read of a sharded tensor is
/// refused.
fn compare_reads(rank: &mut Rank<'_>, (what, param): (What, usize), values: &[f32], read: Result<Vec<f32>>) {
    let config = rank.config;
    let precision = config.precision(&rank.program.params[param]);
    let is_whole = config.shards() == 1 || rank.program.params[param].local;
    let is_sent = matches!(what, What::Value | What::Copy);
    let is_everywhere = is_sent && config.strategy == Strategy::Zero && precision.master == Master::None;
    let name = rank.program.name(param);
    match read {
        Ok(read) if same_bits(&read, values) => {}
        Ok(_) => rank.wrong(format!("{what:?} of {name}: read and gather differ")),
        Err(error) if is_whole || is_everywhere => {
            // With one rank of FSDP, or parts without elements, a bucket must be unsharded all the same.
            let is_resharded = is_sent && config.strategy == Strategy::Fsdp && kind(&error) == "Order";
            if !is_resharded || rank.program.params[param].local {
                rank.wrong(format!("{what:?} of {name}: {error}"));
            }
        }
        Err(error) if matches!(kind(&error), "Sharded" | "Order") => {}
        Err(error) => rank.wrong(format!("{what:?} of {name}: {error:?}")),
    }
    if what == What::Value
        && let Ok(stored) = Rank::view(&rank.stepper, precision.param, rank.ids[param])
    {
        let bits = bits(precision.param);
        let is_nearest = |stored: f32, value: f32| {
            let (stored, value) = (f64::from(stored), f64::from(value));
            let unit = 2.0 * (rounded(value, bits) - value).abs();
            let is_too_large = precision.param == Type::F16 && value.abs() >= 65504.0;
            let is_tiny = precision.param == Type::F16 && (stored - value).abs() <= 2f64.powi(-25);
            let is_either = stored == value || stored.is_nan() && value.is_nan();
            is_either || is_too_large || is_tiny || (stored - value).abs() * 2.0 <= unit * 1.0001
        };
        if let Some(k) = (0..values.len()).find(|k| !is_nearest(stored[*k], values[*k])) {
            rank.wrong(format!("{name}[{k}]: stored as {}, and its value is {}", stored[k], values[k]));
        }
    }
}

pub(crate) fn same_bits(one: &[f32], other: &[f32]) -> bool {
    one.len() == other.len() && one.iter().zip(other).all(|(a, b)| a.to_bits() == b.to_bits())
}

fn settings(rank: &mut Rank<'_>) -> Result<()> {
    let schedule_step = rank.stepper.schedule_step();
    let scaler = match rank.config.loss_scale {
        LossScale::Constant(_) => None,
        LossScale::Dynamic(..) => Some(rank.stepper.scaler_state()?).map(|s| (s.scale, s.growth_tracker)),
    };
    let previous_norm = match rank.stepper.previous_norm() {
        // Without a clip by it there is none to ask for.
        Err(instep::Error::Config { field: "clip", .. }) => None,
        outcome => Some(outcome?),
    };
    rank.note(Event::Settings { schedule_step, scaler, previous_norm });
    Ok(())
}

/// Reads what is left on this rank after a failure.
pub(crate) fn what_is_left(rank: &mut Rank<'_>) -> Result<()> {
    let config = rank.config;
    for param in 0..rank.ids.len() {
        let spec = &rank.program.params[param];
        if spec.local && config.mode == Mode::Eager {
            // Its step waits for no other rank, so it may have run.
            continue;
        }
        let is_whole = config.strategy == Strategy::Replicated || spec.local;
        let is_everywhere =
            config.strategy == Strategy::Zero && config.precision(spec).master == Master::None;
        for (what, tensor) in tensors(rank, param) {
            let mut values = vec![0.0; spec.len];
            if what == What::Gradient
                || !(is_whole || is_everywhere && matches!(what, What::Value | What::Copy))
            {
                continue;
            }
            rank.stepper.read(tensor, &mut values)?;
            rank.note(Event::Tensor { what, param, values });
        }
        let (count, carried) =
            (rank.stepper.step_count(rank.ids[param])?, rank.stepper.carried(rank.ids[param])?);
        rank.note(Event::Count { param, count, carried });
    }
    Ok(())
}
