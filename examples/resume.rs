//! Trains on two ranks, saves after half the steps, and resumes from the file with other buckets and another mode.
//!
//! The resumed run reads only the checkpoint. The exit status is 1 if the runs end with different bits.
//! `cargo run --release --example resume`

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use instep::checkpoint::{self, Extras, Scalar};
use instep::{AdamW, InProcess, Layout, Mode, Result, Stepper, in_process};

const STEPS: u64 = 200;

/// Values of parameters and states.
type Tensors = Vec<Vec<f32>>;

/// A file that is removed at the end of the run.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn main() -> Result<ExitCode> {
    let name = format!("instep-resume-{}.safetensors", std::process::id());
    let file = Scratch(std::env::temp_dir().join(name));
    let layout = Layout::builder().param("slope", 300).param("offset", 300).build()?;

    let whole = in_process(2, |comm| train_and_save(&layout, comm, &file.0))?;
    let resumed = in_process(2, |comm| resume(&layout, comm, &file.0))?;

    let bits = |tensors: &Tensors| -> Vec<u32> { tensors.iter().flatten().map(|x| x.to_bits()).collect() };
    let same = whole.iter().zip(&resumed).all(|(whole, resumed)| bits(whole) == bits(resumed));
    let bytes = std::fs::metadata(&file.0).map_or(0, |metadata| metadata.len());
    println!("{STEPS} steps on 2 ranks, eager, buckets of 1 KiB; saved after {} ({bytes} bytes)", STEPS / 2);
    println!("resumed from the file: normed, one bucket");
    println!("parameters and states: {}", if same { "the same bits" } else { "DIFFERENT" });
    Ok(if same { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn train_and_save(layout: &Layout, comm: InProcess, file: &Path) -> Result<Tensors> {
    let optimizer = AdamW { lr: 0.01, ..AdamW::default() };
    let mut stepper =
        Stepper::builder(layout, optimizer).mode(Mode::Eager).bucket_cap_bytes(1024).host(comm)?;
    for step in 0..STEPS {
        if step == STEPS / 2 {
            // Every rank may call this; rank 0 writes.
            let scalars = [("next_step".to_owned(), Scalar::U64(step))].into();
            checkpoint::save_with(&stepper, &Extras { scalars, ..Extras::default() }, file)?;
        }
        pass(&mut stepper, step)?;
    }
    everything(&stepper)
}

fn resume(layout: &Layout, comm: InProcess, file: &Path) -> Result<Tensors> {
    let optimizer = AdamW { lr: 0.01, ..AdamW::default() };
    let mut stepper = Stepper::builder(layout, optimizer).mode(Mode::Normed).host(comm)?;
    // Every rank loads, because states are never broadcast.
    let extras = checkpoint::load(&mut stepper, file)?;
    let Some(Scalar::U64(next_step)) = extras.scalars.get("next_step") else {
        return Err(instep::Error::order("checkpoint", "has no scalar `next_step`", "save one with it"));
    };
    for step in *next_step..STEPS {
        pass(&mut stepper, step)?;
    }
    everything(&stepper)
}

/// Fits lines y = slope x + offset; each rank has its own points.
fn pass(stepper: &mut Stepper, step: u64) -> Result<()> {
    let layout = stepper.layout().clone();
    let (slope, offset) = (layout.id("slope")?, layout.id("offset")?);
    let x = (step % 8) as f32 / 4.0 - stepper.rank() as f32;
    let mut pass = stepper.begin()?;
    let (params, mut grads) = pass.split();
    let lines = params.get(slope)?.iter().zip(params.get(offset)?).enumerate();
    let errors: Vec<f32> = lines.map(|(k, (a, b))| a * x + b - (k as f32 * x - 1.0)).collect();
    grads.write(offset, &errors)?;
    grads.write(slope, &errors.iter().map(|error| error * x).collect::<Vec<_>>())?;
    pass.grad_ready(offset)?;
    pass.grad_ready(slope)?;
    pass.finish()
}

fn everything(stepper: &Stepper) -> Result<Tensors> {
    let mut all = Vec::new();
    for id in stepper.layout().ids() {
        all.push(stepper.view::<f32>(id)?.to_vec());
        for name in stepper.state_names(id)? {
            all.push(stepper.view::<f32>(id.state(&name))?.to_vec());
        }
    }
    Ok(all)
}
