//! Sends the same gradients in four ways: as f32, as bf16, as f16, and by a closure that sends an eighth at a time.
//!
//! Four ranks in this process fit one small linear model, each on its own samples. The example fails if ranks end with
//! different bits, or if the model of one of the four ways does not fit the samples.
//! `cargo run --release --example compression`

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use instep::dtype::DType;
use instep::overlap::{Compressed, GradBucket, Hooked};
use instep::{Collective, InProcess, Layout, Result, Sgd, Stepper, in_process};

const RANKS: u32 = 4;
const FEATURES: usize = 1024;
const SAMPLES: usize = 16;
const PASSES: u64 = 300;
/// The closure sends one eighth of the elements per pass, in turn.
const PARTS: u64 = 8;

/// Returns a number in [-1, 1) that depends only on the row and the column.
fn noise(row: usize, column: usize) -> f32 {
    ((row * 4133 + column * 2971 + row * column * 97) % 8191) as f32 / 4096.0 - 1.0
}

/// Returns one of a rank's samples: its features and its target.
fn sample(rank: usize, index: usize) -> (Vec<f32>, f32) {
    let features: Vec<f32> = (0..FEATURES).map(|k| noise(rank * SAMPLES + index + 1, k)).collect();
    let target = features.iter().enumerate().map(|(k, x)| x * noise(5000, k)).sum();
    (features, target)
}

/// Trains on one rank. Returns the mean squared error over the rank's samples before the last step, and the bits of the
/// weights after it.
fn train(comm: impl Collective + 'static) -> Result<(f32, Vec<u32>)> {
    let layout = Layout::builder().param("weights", FEATURES).build()?;
    let weights = layout.id("weights")?;
    let rank = comm.rank() as usize;
    let samples: Vec<_> = (0..SAMPLES).map(|index| sample(rank, index)).collect();
    let mut stepper = Stepper::host(&layout, Sgd { lr: 0.01, ..Default::default() }, comm)?;
    let mut loss = 0.0;
    for _ in 0..PASSES {
        let mut pass = stepper.begin()?;
        let (params, mut grads) = pass.split();
        let (values, gradient) = (params.get(weights)?, grads.get_mut(weights)?);
        gradient.fill(0.0);
        loss = 0.0;
        for (features, target) in &samples {
            let output: f32 = features.iter().zip(values).map(|(x, w)| x * w).sum();
            let error = (output - target) / SAMPLES as f32;
            gradient.iter_mut().zip(features).for_each(|(g, x)| *g += error * x);
            loss += (output - target) * (output - target) / SAMPLES as f32;
        }
        pass.grad_ready(weights)?;
        pass.finish()?;
    }
    Ok((loss, stepper.view::<f32>(weights)?.iter().map(|w| w.to_bits()).collect()))
}

/// Returns a hook that sends every eighth element and adds the unsent ones to later gradients (error feedback, Stich
/// et al. 2018).
fn an_eighth_at_a_time(sent_bytes: Arc<AtomicU64>) -> impl FnMut(&mut GradBucket<'_>) -> Result<()> + Send {
    let mut kept: Vec<f32> = Vec::new();
    let mut message: Vec<f32> = Vec::new();
    move |bucket| {
        let part = (bucket.pass() % PARTS) as usize;
        let step = PARTS as usize;
        kept.resize(bucket.values().len(), 0.0);
        kept.iter_mut().zip(bucket.values()).for_each(|(kept, g)| *kept += g);
        message.clear();
        message.extend(kept.iter_mut().skip(part).step_by(step).map(std::mem::take));
        bucket.all_reduce_buffer(&mut message)?;
        sent_bytes.fetch_add(size_of_val(&message[..]) as u64, Relaxed);
        let values = bucket.values_mut();
        values.fill(0.0);
        values.iter_mut().skip(part).step_by(step).zip(&message).for_each(|(g, sum)| *g = *sum);
        Ok(())
    }
}

/// Trains all ranks with one of the four ways to send gradients. Checks that the ranks agree in every bit, and returns
/// their mean loss.
fn fit(way: impl Fn(InProcess) -> Result<(f32, Vec<u32>)> + Sync) -> Result<f32> {
    let ranks = in_process(RANKS, way)?;
    assert!(ranks.iter().all(|(_, bits)| *bits == ranks[0].1), "every rank holds the same bits");
    Ok(ranks.iter().map(|(loss, _)| loss).sum::<f32>() / RANKS as f32)
}

fn main() -> Result<()> {
    let sent_bytes = Arc::new(AtomicU64::new(0));
    let all = |dtype: DType| FEATURES as u64 * dtype.bytes();
    let closure = |comm| train(Hooked::new(comm, an_eighth_at_a_time(Arc::clone(&sent_bytes))));
    let plain = fit(train)?;
    let bf16 = fit(|comm| train(Compressed::bf16(comm)?))?;
    let f16 = fit(|comm| train(Compressed::f16(comm)?))?;
    let eighth = fit(closure)?;
    let eighth_bytes = sent_bytes.load(Relaxed) / (PASSES * u64::from(RANKS));

    let start: f32 = (0..SAMPLES).map(|index| sample(0, index).1.powi(2)).sum::<f32>() / SAMPLES as f32;
    println!("{RANKS} ranks, {PASSES} passes, a loss of {start:.1} at the start");
    println!("     sent  bytes per rank and pass  loss at the end");
    for (name, bytes, loss) in [
        ("f32", all(DType::F32), plain),
        ("bf16", all(DType::BF16), bf16),
        ("f16", all(DType::F16), f16),
        ("an eighth", eighth_bytes, eighth),
    ] {
        println!("{name:>9}  {bytes:>23}  {loss:>15.1e}");
        assert!(loss < start * 1e-6, "a loss of {loss} is no fit");
    }
    assert_eq!(eighth_bytes, all(DType::F32) / PARTS);
    Ok(())
}
