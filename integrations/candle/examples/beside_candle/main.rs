//! Times one AdamW step of candle-nn and of instep, on variables and gradients of the same sizes.
//!
//! `cargo run --release --example beside_candle [WIDTH]`. `RAYON_NUM_THREADS` and `INSTEP_THREADS` set the threads.

mod compare;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Module, Optimizer, ParamsAdamW, Sequential, VarBuilder, VarMap, linear, seq};
use instep_candle::FusedOptimizer;

use compare::{LAYERS, compare, timed, width};

/// A network and the gradients of one backward pass.
fn network(width: usize) -> Result<(VarMap, GradStore)> {
    let varmap = VarMap::new();
    let builder = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    let layers = (0..LAYERS).try_fold(seq(), |layers: Sequential, k| {
        Ok::<_, candle_core::Error>(layers.add(linear(width, width, builder.pp(k))?))
    })?;
    let inputs = Tensor::randn(0f32, 1.0, (8, width), &Device::Cpu)?;
    let grads = layers.forward(&inputs)?.sqr()?.mean_all()?.backward()?;
    Ok((varmap, grads))
}

fn main() -> Result<()> {
    let params = ParamsAdamW { lr: 1e-6, ..Default::default() };
    let ((theirs, their_grads), (ours, our_grads)) = (network(width())?, network(width())?);
    let mut candles = candle_nn::AdamW::new(theirs.all_vars(), params.clone())?;
    let mut insteps = FusedOptimizer::new(ours.all_vars(), params.into())?;
    compare("candle_nn::AdamW", "instep_candle::FusedOptimizer", || {
        [
            timed(|| candles.step(&their_grads).expect("candle steps")),
            timed(|| insteps.step(&our_grads).expect("instep steps")),
        ]
    });
    Ok(())
}
