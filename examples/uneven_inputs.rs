//! Gradient accumulation, a changing learning rate, and ranks that run out of data at different times.
//!
//! Four ranks fit a line to 7, 5, 3 and 6 batches of two micro-batches each. A rank without data still takes part in
//! every step, and the mean is over the ranks with data. The example fails if a rank's result differs from the other
//! ranks' results, or from the result of a single rank that receives the sums of all ranks.
//! `cargo run --release --example uneven_inputs`

use std::num::NonZeroU32;

use instep::layout::DEFAULT_GROUP;
use instep::{Divisor, Layout, ParamId, Pass, Result, Sgd, Stepper, Sums, in_process};

const BATCHES: [usize; 4] = [7, 5, 3, 6];
const MICRO_BATCHES: u32 = 2;

fn rate(step: usize) -> f64 {
    0.25 / (1.0 + step as f64)
}

/// Returns gradients of the squared error at one point of y = 3x - 1, as multiples of 1/16, so that sums are exact.
fn gradients(params: [f32; 2], rank: usize, batch: usize, micro_batch: u32) -> [f32; 2] {
    let x = ((rank + batch + micro_batch as usize) % 4) as f32;
    let error = params[0] * x + params[1] - (3.0 * x - 1.0);
    let rounded = (error * 16.0).round() / 16.0;
    [rounded * x / MICRO_BATCHES as f32, rounded / MICRO_BATCHES as f32] // the mean over micro-batches
}

fn read(pass: &Pass<'_>, ids: [ParamId; 2]) -> Result<[f32; 2]> {
    Ok([pass.params().get(ids[0])?[0], pass.params().get(ids[1])?[0]])
}

fn main() -> Result<()> {
    let layout = Layout::builder().param("slope", 1).param("offset", 1).build()?;
    let ids = [layout.id("slope")?, layout.id("offset")?];
    let micro_batches = NonZeroU32::new(MICRO_BATCHES).unwrap_or(NonZeroU32::MIN);

    let ends = in_process(4, |comm| {
        let rank = comm.rank() as usize;
        let builder = Stepper::builder(&layout, Sgd { momentum: 0.5, ..Sgd::default() });
        let mut stepper = builder.uneven_inputs(Divisor::ContributingRanks).host(comm)?;
        for batch in 0..BATCHES[rank] {
            stepper.set_lr(DEFAULT_GROUP, rate(batch))?; // all ranks set the same rate, or they get an error
            let mut pass = stepper.begin_accumulating(micro_batches)?;
            for micro_batch in 0..MICRO_BATCHES {
                let gradients = gradients(read(&pass, ids)?, rank, batch, micro_batch);
                for (id, gradient) in ids.into_iter().zip(gradients) {
                    pass.grads().add(id, &[gradient])?;
                    pass.grad_ready(id)?; // launches in the last micro-batch only
                }
                if micro_batch + 1 < MICRO_BATCHES {
                    pass.next_micro_batch()?;
                }
            }
            pass.finish()?;
        }
        let mut step = BATCHES[rank];
        loop {
            stepper.set_lr(DEFAULT_GROUP, rate(step))?;
            if !stepper.join()? {
                break;
            }
            step += 1;
        }
        let params = stepper.params();
        Ok(([params.get(ids[0])?[0], params.get(ids[1])?[0]], stepper.step_count(ids[0])?))
    })?;

    // One rank that is fed, for each step, the sum over the ranks with data and their number.
    let mut values = [0.0f32; 2];
    let mut buffers = [0.0f32; 2];
    let steps = BATCHES.into_iter().max().unwrap_or(0);
    for batch in 0..steps {
        let with_data: Vec<usize> = (0..4).filter(|rank| batch < BATCHES[*rank]).collect();
        let mut alone = Stepper::host(
            &layout,
            Sgd { lr: rate(batch), momentum: 0.5, ..Sgd::default() },
            Sums::by_caller(0, with_data.len() as u32),
        )?;
        for (k, id) in ids.into_iter().enumerate() {
            alone.write(id, &values[k..=k])?;
            alone.write(id.state("momentum_buffer"), &buffers[k..=k])?;
            alone.set_step_count(id, batch as u64)?;
        }
        let mut pass = alone.begin()?;
        for (k, id) in ids.into_iter().enumerate() {
            let of_rank =
                |rank: &usize| (0..MICRO_BATCHES).map(|m| gradients(values, *rank, batch, m)[k]).sum::<f32>();
            pass.grads().write(id, &[with_data.iter().map(of_rank).sum::<f32>()])?;
            pass.grad_ready(id)?; // says that the sum is there
        }
        pass.finish()?;
        for (k, id) in ids.into_iter().enumerate() {
            values[k] = alone.view::<f32>(id)?[0];
            buffers[k] = alone.view::<f32>(id.state("momentum_buffer"))?[0];
        }
    }
    println!("{} steps: y = {:.3} x + {:.3} on every rank", ends[0].1, ends[0].0[0], ends[0].0[1]);
    assert!(ends.iter().all(|end| *end == (values, steps as u64)), "{ends:?} instead of {values:?}");
    Ok(())
}
