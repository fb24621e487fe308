//! Times one AdamW step of burn and of instep, on modules and gradients of the same sizes, on burn's CPU backend.
//!
//! `cargo run --release --example beside_burn [WIDTH]`. `RAYON_NUM_THREADS` and `INSTEP_THREADS` set the threads.

mod compare;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Distribution, Tensor};
use instep_burn::{Config, FusedOptimizer};

use compare::{LAYERS, compare, timed, width};

#[derive(Module, Debug)]
struct Network {
    layers: Vec<Linear>,
}

impl Network {
    fn grads(&self, inputs: &Tensor<2>) -> GradientsParams {
        let output = self.layers.iter().fold(inputs.clone(), |x, layer| layer.forward(x));
        GradientsParams::from_grads((output.clone() * output).mean().backward(), self)
    }
}

fn main() -> Result<(), instep_burn::Error> {
    let (device, width) = (Device::flex().autodiff(), width());
    let new =
        || Network { layers: (0..LAYERS).map(|_| LinearConfig::new(width, width).init(&device)).collect() };
    let inputs = Tensor::random([8, width], Distribution::Default, &device);
    let mut burns = AdamWConfig::new().init();
    let mut insteps = FusedOptimizer::new(Config::new(instep::AdamW::default()))?;
    // A step takes the module by value and gives it back.
    let (mut theirs, mut ours) = (Some(new()), Some(new()));
    compare("burn's AdamW", "instep_burn::FusedOptimizer", || {
        let (module, twin) = (theirs.take().expect("given back"), ours.take().expect("given back"));
        let (grads, twins) = (module.grads(&inputs), twin.grads(&inputs));
        [
            timed(|| theirs = Some(burns.step(1e-6, module, grads))),
            timed(|| ours = Some(insteps.step(1e-6, twin, twins))),
        ]
    });
    Ok(())
}
