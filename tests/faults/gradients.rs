//! `Gradients::Zero` zeroes each whole gradient: also the parts that other ranks step, and after the sum of each
//! micro-batch.
//!
//! A backward that adds to its gradients needs these zeros. The test reads the trainer's slice before the first write.

use std::num::NonZeroU32;

use instep::{
    Accumulation, Gradients, InProcess, Layout, Mode, OffloadPolicy, Pass, Result, Sgd, Stepper, Strategy,
    Unused, in_process,
};

const LEN: usize = 700;
const RANKS: u32 = 4;
const MICRO_BATCHES: u32 = 3;

#[derive(Clone, Copy, Debug)]
struct Case {
    mode: Mode,
    strategy: Strategy,
    offloads: bool,
    shard_size: Option<u32>,
    accumulation: Accumulation,
    unused: Unused,
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for mode in [Mode::Sequential, Mode::Eager, Mode::Normed] {
        for (offloads, unused) in
            [(false, Unused::Skip), (false, Unused::StepZero), (true, Unused::Skip), (true, Unused::StepZero)]
        {
            let accumulation = Accumulation::Local;
            let replicated = Strategy::Replicated;
            cases.push(Case { mode, strategy: replicated, offloads, shard_size: None, accumulation, unused });
            for strategy in [Strategy::Zero, Strategy::Fsdp] {
                for shard_size in [None, Some(2), Some(1)] {
                    for accumulation in [Accumulation::Local, Accumulation::Summed] {
                        cases.push(Case { mode, strategy, offloads, shard_size, accumulation, unused });
                    }
                }
            }
        }
    }
    cases
}

/// Adds 1 to each gradient, as a backward does that never replaces gradients, and returns the earlier values.
fn backward(pass: &mut Pass<'_>, found: &mut Vec<f32>) -> Result<()> {
    for id in pass.layout().clone().ids().rev() {
        let mut gradients = pass.grads();
        let gradient = gradients.get_mut(id)?;
        found.extend_from_slice(gradient);
        gradient.iter_mut().for_each(|g| *g += 1.0);
        pass.grad_ready(id)?;
    }
    Ok(())
}

/// Returns the gradients that a rank finds before each backward of two passes, the last of one micro-batch, and the
/// parameters after them.
fn run(layout: &Layout, case: Case, comm: InProcess) -> Result<(Vec<Vec<f32>>, Vec<f32>)> {
    let builder = Stepper::builder(layout, Sgd { lr: 1.0, ..Sgd::default() }).mode(case.mode);
    let mut builder = builder.strategy(case.strategy).accumulation(case.accumulation).unused(case.unused);
    if case.offloads {
        builder = builder.offload(OffloadPolicy::default());
    }
    if let Some(ranks) = case.shard_size.and_then(NonZeroU32::new) {
        builder = builder.shard_size(ranks);
    }
    let mut stepper = builder.gradients(Gradients::Zero).bucket_cap_bytes(1).host(comm)?;
    let mut found = Vec::new();
    for micro_batches in [MICRO_BATCHES, 1] {
        let mut pass = stepper.begin_accumulating(NonZeroU32::new(micro_batches).unwrap())?;
        for left in (0..micro_batches).rev() {
            let mut here = Vec::new();
            backward(&mut pass, &mut here)?;
            found.push(here);
            if left > 0 {
                pass.next_micro_batch()?;
            }
        }
        pass.finish()?;
    }
    let mut params = Vec::new();
    for id in layout.ids() {
        let mut values = [0.0; LEN];
        stepper.gather(id, &mut values)?;
        params.extend(values);
    }
    Ok((found, params))
}

#[test]
fn a_gradient_that_the_policy_ends_is_zero_on_every_rank_before_the_next_backward() {
    let layout = Layout::builder().param("a", LEN).param("b", LEN).build().unwrap();
    for case in cases() {
        let ends = in_process(RANKS, |comm| run(&layout, case, comm)).unwrap();
        for (rank, (found, params)) in ends.iter().enumerate() {
            let expected = |at: usize| match case.accumulation {
                // The second micro-batch goes on from what the first has left on its rank.
                Accumulation::Local if at < MICRO_BATCHES as usize => at as f32,
                _ => 0.0,
            };
            for (at, values) in found.iter().enumerate() {
                let found = values.iter().find(|value| **value != expected(at));
                assert_eq!(found, None, "before backward {at}, rank {rank}, {case:?}");
            }
            // The mean over ranks of each backward's gradient is 1.
            let steps = -(MICRO_BATCHES as f32 + 1.0);
            assert!(params.iter().all(|param| *param == steps), "rank {rank}, {case:?}: {}", params[0]);
        }
    }
}
