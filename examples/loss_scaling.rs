//! Fits a line with a loss scale that overflows at first, and shows that only the overflowing passes are lost.
//!
//! f32 stands in for f16, which needs scaling. The scale starts so high that gradients overflow, and each overflow
//! reduces the scale. The example fails unless the run ends with the same bits as a run without scaling.
//! `cargo run --release --example loss_scaling`

use instep::{AdamW, Layout, LossScaler, Mode, Result, Solo, Stepper};

const STEPS: usize = 400;
const SLOPE: f32 = 3.0;
const OFFSET: f32 = -1.0;

/// Trains until `STEPS` passes have stepped. Returns slope and offset, and the number of skipped passes.
fn train(scaler: Option<LossScaler>) -> Result<([f32; 2], usize)> {
    let layout = Layout::builder().param("slope", 1).param("offset", 1).build()?;
    let (slope, offset) = (layout.id("slope")?, layout.id("offset")?);
    let optimizer = AdamW { lr: 0.05, weight_decay: 0.0, ..Default::default() };
    let mut builder = Stepper::builder(&layout, optimizer).mode(Mode::Normed);
    if let Some(scaler) = scaler {
        builder = builder.loss_scale(scaler);
    }
    let mut stepper = builder.host(Solo::default())?;
    let (mut stepped, mut skipped) = (0, 0);
    while stepped < STEPS {
        // A skipped pass is repeated with the same sample.
        let x = (stepped % 8) as f32 / 2.0 - 1.0;
        let mut pass = stepper.begin()?;
        let error = pass.params().get(slope)?[0] * x + pass.params().get(offset)?[0] - (SLOPE * x + OFFSET);
        // Waits for the last pass's decision, and not for its steps.
        let scale = pass.loss_scale()? as f32;
        let (_, mut grads) = pass.split();
        grads.write(slope, &[error * x * scale])?;
        grads.write(offset, &[error * scale])?;
        pass.finish()?;
        let status = stepper.status()?;
        if status.skipped {
            skipped += 1;
            let next = stepper.scaler_state()?.scale;
            println!("pass {} overflowed under 2^{}: next 2^{}", status.pass, scale.log2(), next.log2());
        } else {
            stepped += 1;
        }
    }
    let params = stepper.params();
    Ok(([params.get(slope)?[0], params.get(offset)?[0]], skipped))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // The largest power of two with an exact reciprocal. Errors of 4 and more overflow f32 when multiplied by it.
    let scaler =
        LossScaler { initial_scale: 2f64.powi(126), backoff_factor: 2f64.powi(-2), ..Default::default() };
    let (scaled, skipped) = train(Some(scaler))?;
    let (plain, none) = train(None)?;
    println!(
        "{skipped} passes skipped; y = {} x + {}, unscaled y = {} x + {}",
        scaled[0], scaled[1], plain[0], plain[1]
    );
    if skipped == 0 || none != 0 {
        return Err("the scale must overflow at first, and the run without one never".into());
    }
    if scaled.map(f32::to_bits) != plain.map(f32::to_bits) {
        return Err("a power of two divides out exactly, so the bits must be the same".into());
    }
    if (scaled[0] - SLOPE).abs() > 0.05 || (scaled[1] - OFFSET).abs() > 0.05 {
        return Err("the line was not found".into());
    }
    Ok(())
}
