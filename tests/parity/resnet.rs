//! A layout with the parameter shapes of ResNet50, and gradients by formula: no convolution is computed.
//!
//! It has 161 tensors with 25.6 million elements. Gradients are multiples of 1/64, so sums over ranks are exact and
//! equal those of one rank, bit for bit. The tests make few passes, because each moves hundreds of megabytes.

use instep::{Device, Layout, Result, Stepper, StepperBuilder};

use super::ids;

/// Returns the lengths in registration order: the stem, four stages of bottlenecks, the classifier.
pub(super) fn lengths() -> Vec<usize> {
    let mut lengths = vec![64 * 3 * 7 * 7, 64, 64];
    let mut inputs = 64;
    for (planes, blocks) in [(64, 3), (128, 4), (256, 6), (512, 3)] {
        let outputs = 4 * planes;
        for block in 0..blocks {
            let convolutions =
                [(inputs * planes, planes), (9 * planes * planes, planes), (planes * outputs, outputs)];
            let shortcut = (block == 0).then_some((inputs * outputs, outputs));
            for (weight, channels) in convolutions.into_iter().chain(shortcut) {
                lengths.extend([weight, channels, channels]);
            }
            inputs = outputs;
        }
    }
    lengths.extend([2048 * 1000, 1000]);
    lengths
}

/// A layout and its bucket cap.
pub(super) struct Shapes {
    pub(super) layout: Layout,
    /// The default is DDP's default.
    cap: Option<u64>,
}

impl Shapes {
    pub(super) fn capped<'a>(&self, builder: StepperBuilder<'a>) -> StepperBuilder<'a> {
        match self.cap {
            Some(cap) => builder.bucket_cap_bytes(cap),
            None => builder,
        }
    }
}

/// Returns the shapes of ResNet50.
pub(super) fn whole() -> Shapes {
    let layout = crate::support::layout(&lengths());
    let elements: u64 = layout.ids().map(|id| layout.parameter(id).unwrap().len).sum();
    assert_eq!((layout.ids().len(), elements), (161, 25_557_032));
    Shapes { layout, cap: None }
}

/// Returns as many tensors of a sixteenth of the length, in as many buckets. A test uses the full size once, and this
/// size for its further cases.
pub(super) fn sixteenth() -> Shapes {
    let lengths: Vec<usize> = lengths().into_iter().map(|length| length.div_ceil(16)).collect();
    Shapes { layout: crate::support::layout(&lengths), cap: Some((25 << 20) / 16) }
}

/// Fills values with a period of 251, equal on every rank and machine, at the speed of a copy.
fn repeat(values: &mut [f32], at: impl Fn(usize) -> f32) {
    let period: Vec<f32> = (0..251).map(at).collect();
    values.chunks_mut(251).for_each(|chunk| chunk.copy_from_slice(&period[..chunk.len()]));
}

/// Writes the sum of these ranks' gradients.
pub(super) fn fill(
    values: &mut [f32],
    step: usize,
    ranks: impl Iterator<Item = usize> + Clone,
    param: usize,
) {
    let of = |rank: usize, k: usize| ((step * 31 + rank * 57 + param * 17 + k * 13) % 251) as f32 - 125.0;
    repeat(values, |k| ranks.clone().map(|rank| of(rank, k)).sum::<f32>() / 64.0);
}

pub(super) fn initialise<D: Device>(stepper: &mut Stepper<D>, seed: usize) -> Result<()> {
    let mut values = Vec::new();
    for (param, id) in ids(stepper).into_iter().enumerate() {
        values.resize(stepper.layout().parameter(id)?.len as usize, 0.0);
        repeat(&mut values, |k| ((param * 29 + seed * 101 + k * 7) % 251) as f32 / 1021.0 - 0.1);
        stepper.write(id, &values)?;
    }
    Ok(())
}

/// Makes one pass, with the sum of the gradients of these ranks.
pub(super) fn pass(
    stepper: &mut Stepper,
    step: usize,
    ranks: impl Iterator<Item = usize> + Clone,
    copies: bool,
) -> Result<()> {
    let ids = ids(stepper);
    let mut own = Vec::new();
    let mut pass = stepper.begin()?;
    for (param, id) in ids.into_iter().enumerate().rev() {
        let mut grads = pass.grads();
        if copies {
            own.resize(grads.get_mut(id)?.len(), 0.0);
            fill(&mut own, step, ranks.clone(), param);
            grads.write(id, &own)?;
        } else {
            fill(grads.get_mut(id)?, step, ranks.clone(), param);
        }
        pass.grad_ready(id)?;
    }
    pass.finish()
}

/// Returns one number for all bits, by two elements per step, because a chain of multiplications takes most of the
/// time.
pub(super) fn digest(values: &[f32]) -> u64 {
    let fold = |hash: u64, pair: &[f32]| {
        let high = pair.get(1).map_or(0, |value| u64::from(value.to_bits()));
        (hash ^ (high << 32 | u64::from(pair[0].to_bits())))
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(29)
    };
    values.chunks(2).fold(values.len() as u64, fold)
}

/// Returns the value, the states and the count of each parameter.
pub(super) fn digests(stepper: &Stepper) -> Result<Vec<Vec<u64>>> {
    let of = |id| {
        let mut numbers = vec![digest(stepper.view::<f32>(id)?), stepper.step_count(id)?];
        for state in stepper.state_names(id)? {
            numbers.push(digest(stepper.view::<f32>(id.state(&state))?));
        }
        Ok(numbers)
    };
    ids(stepper).into_iter().map(of).collect()
}
