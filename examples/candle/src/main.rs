//! A small training with candle on the CPU, stepped by instep and, apart from it, by candle-nn's AdamW.
//!
//! Both start from the same values and compute their own gradients. The program fails unless the loss has halved, and
//! unless after 200 steps each parameter of one is within 2e-6 of the other's, absolute.

mod glue;

use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};
use candle_nn::{Linear, Module, Optimizer, ParamsAdamW, loss};

use glue::Result;

const STEPS: usize = 200;
const TOLERANCE: f32 = 2e-6;
/// Powers of two, so that `1 - lr * weight_decay` is exact in f32. candle-nn multiplies by it; instep subtracts the decay.
const LR: f64 = 1.0 / 1024.0;
const WEIGHT_DECAY: f64 = 1.0 / 32.0;
const SAMPLES: usize = 64;
const WIDTHS: [usize; 3] = [8, 32, 1];

/// Values from -1 to 1 that look random and are the same in each run.
fn spread(seed: u32, len: usize) -> Vec<f32> {
    let hash = |k: u32| {
        (k ^ (seed << 20)).wrapping_add(1).wrapping_mul(0x9e37_79b9).rotate_left(15).wrapping_mul(0x85eb_ca6b)
    };
    (0..len as u32).map(|k| hash(k) as f32 / (u32::MAX / 2) as f32 - 1.0).collect()
}

/// Returns a weight and a bias per layer, the same ones at each call.
fn fresh_parameters() -> Result<Vec<Var>> {
    let mut vars = Vec::new();
    for (layer, widths) in WIDTHS.windows(2).enumerate() {
        let (inputs, outputs) = (widths[0], widths[1]);
        let scale = 1.0 / (inputs as f32).sqrt();
        let weight = spread(layer as u32 + 1, inputs * outputs).into_iter().map(|value| value * scale);
        vars.push(Var::from_vec(weight.collect(), (outputs, inputs), &Device::Cpu)?);
        vars.push(Var::from_vec(vec![0.0f32; outputs], outputs, &Device::Cpu)?);
    }
    Ok(vars)
}

/// A training's parameters, and its first and last loss.
struct Trained {
    params: Vec<f32>,
    losses: [f32; 2],
}

/// Trains new parameters with the step that `optimizer` makes for them.
fn train<S: FnMut(&GradStore, f64) -> Result<()>>(
    optimizer: impl FnOnce(Vec<Var>) -> Result<S>,
) -> Result<Trained> {
    let inputs = spread(0, SAMPLES * WIDTHS[0]);
    let target = |sample: &[f32]| (3.0 * sample[0]).sin() + sample[1] * sample[2];
    let targets: Vec<f32> = inputs.chunks(WIDTHS[0]).map(target).collect();
    let inputs = Tensor::from_vec(inputs, (SAMPLES, WIDTHS[0]), &Device::Cpu)?;
    let targets = Tensor::from_vec(targets, (SAMPLES, 1), &Device::Cpu)?;

    let vars = fresh_parameters()?;
    let layer = |pair: &[Var]| Linear::new(pair[0].as_tensor().clone(), Some(pair[1].as_tensor().clone()));
    let layers: Vec<Linear> = vars.chunks(2).map(layer).collect();
    let mut step = optimizer(vars.clone())?;
    let mut losses = Vec::new();
    for count in 0..STEPS {
        let mut activations = layers[0].forward(&inputs)?;
        for layer in &layers[1..] {
            activations = layer.forward(&activations.tanh()?)?;
        }
        let loss = loss::mse(&activations, &targets)?;
        losses.push(loss.to_scalar::<f32>()?);
        step(&loss.backward()?, if count < STEPS / 2 { LR } else { LR / 2.0 })?;
    }
    let mut params = Vec::new();
    for var in &vars {
        params.extend(var.flatten_all()?.to_vec1::<f32>()?);
    }
    Ok(Trained { params, losses: [losses[0], losses[STEPS - 1]] })
}

/// Fails unless a variable of another type is refused by its type, a rate that is refused changes nothing, and a variable
/// without a gradient is passed over.
fn hold_what_is_not_stepped() -> Result<()> {
    let var = |value: f32| Var::from_vec(vec![value; 2], 2, &Device::Cpu);
    let narrow = Var::from_tensor(&var(1.0)?.to_dtype(candle_core::DType::BF16)?)?;
    match glue::stepper(vec![var(1.0)?, narrow], instep::AdamW::default()) {
        Err(error) if error.to_string().starts_with("variable of BF16 on Cpu:") => {}
        Err(error) => return Err(error),
        Ok(_) => return Err("a variable in bf16 was accepted".into()),
    }
    let (used, unused) = (var(1.0)?, var(2.0)?);
    let mut step = glue::stepper(vec![used.clone(), unused.clone()], instep::AdamW::default())?;
    let grads = used.sum_all()?.backward()?;
    if step(&grads, f64::NAN).is_ok() || used.to_vec1::<f32>()? != [1.0; 2] {
        return Err("a rate that is no number was taken".into());
    }
    step(&grads, LR)?;
    if used.to_vec1::<f32>()? == [1.0; 2] || unused.to_vec1::<f32>()? != [2.0; 2] {
        return Err("a variable without a gradient was stepped, or one with a gradient was not".into());
    }
    Ok(())
}

fn main() -> Result<()> {
    hold_what_is_not_stepped()?;
    let by_instep = train(|vars| {
        glue::stepper(vars, instep::AdamW { weight_decay: WEIGHT_DECAY, ..Default::default() })
    })?;
    let by_candle = train(|vars| {
        let params = ParamsAdamW { weight_decay: WEIGHT_DECAY, ..Default::default() };
        let mut adamw = candle_nn::AdamW::new(vars, params)?;
        Ok(move |grads: &GradStore, lr| {
            adamw.set_learning_rate(lr);
            Ok(adamw.step(grads)?)
        })
    })?;

    for (name, trained) in [("instep", &by_instep), ("candle-nn", &by_candle)] {
        let [first, last] = trained.losses;
        println!("{name}: loss {first:.6} to {last:.6} in {STEPS} steps");
        if last.is_nan() || last > first / 2.0 {
            return Err(format!("{name}: the loss has not halved").into());
        }
    }
    let pairs = by_instep.params.iter().zip(&by_candle.params);
    // A difference that is NaN must not count as small, which `max` would do.
    let apart = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, |worst, d| if d <= worst { worst } else { d });
    println!("{} parameters: at most {apart:e} apart (absolute)", by_instep.params.len());
    if apart <= TOLERANCE { Ok(()) } else { Err(format!("more than {TOLERANCE:e} apart").into()) }
}
