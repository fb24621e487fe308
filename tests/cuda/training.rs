//! A network learns digits on a GPU and on the host, in every mode: equal bits after every epoch, and good accuracy.
//!
//! A network of two layers on the CPU computes the gradients from the device's parameters, so one wrong bit spreads to
//! all later passes. The tests run on the stand-in, or with `INSTEP_REQUIRE_GPU=1` on a GPU. Parameters and gradients
//! pass only through calls that every device has.

#[path = "../../examples/digits/data.rs"]
#[allow(dead_code)]
mod data;

use data::{CLASSES, GLOBAL_BATCH, PIXELS, Random, Samples};
use instep::cuda::Nccl;
use instep::{Adam, Collective, Device, Layout, ParamId, Result, Sgd, Solo, Stepper, Strategy, in_process};

use crate::support::device::cuda;
use crate::support::hardware;
use crate::support::{MODES, Optim, Options, Outcome};

const HIDDEN: usize = 32;
const EPOCHS: u32 = 3;

/// A network of two layers, whose weights are stored output by output.
struct Network {
    weights: [ParamId; 2],
    biases: [ParamId; 2],
}

fn lay_out() -> Layout {
    let layout = Layout::builder().param("w0", HIDDEN * PIXELS).param("b0", HIDDEN);
    layout.param("w1", CLASSES * HIDDEN).param("b1", CLASSES).build().unwrap()
}

/// Returns the outputs: a bias plus the scalar product of the image with a row.
fn connect(weights: &[f32], biases: &[f32], image: &[f32]) -> Vec<f32> {
    let rows = weights.chunks_exact(image.len()).zip(biases);
    rows.map(|(row, bias)| row.iter().zip(image).fold(*bias, |sum, (w, x)| sum + w * x)).collect()
}

fn add_outer(grad: &mut [f32], errors: &[f32], inputs: &[f32]) {
    for (row, error) in grad.chunks_exact_mut(inputs.len()).zip(errors) {
        row.iter_mut().zip(inputs).for_each(|(g, x)| *g += error * x);
    }
}

/// All parameters.
struct Values {
    weights: [Vec<f32>; 2],
    biases: [Vec<f32>; 2],
}

impl Values {
    fn zeros() -> Values {
        let zeros = |len: usize| vec![0.0; len];
        let weights = [zeros(HIDDEN * PIXELS), zeros(CLASSES * HIDDEN)];
        Values { weights, biases: [zeros(HIDDEN), zeros(CLASSES)] }
    }

    fn forward(&self, image: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let mut hidden = connect(&self.weights[0], &self.biases[0], image);
        hidden.iter_mut().for_each(|x| *x = x.max(0.0));
        let logits = connect(&self.weights[1], &self.biases[1], &hidden);
        (hidden, logits)
    }

    /// Computes the gradients of the mean cross-entropy of a batch.
    fn gradients(&self, batch: &Samples) -> Values {
        let mut grads = Values::zeros();
        for (image, label) in batch.images.chunks_exact(PIXELS).zip(&batch.labels) {
            let (hidden, logits) = self.forward(image);
            let largest = logits.iter().copied().fold(f32::MIN, f32::max);
            let mut errors: Vec<f32> = logits.iter().map(|logit| (logit - largest).exp()).collect();
            let total: f32 = errors.iter().sum();
            errors.iter_mut().for_each(|error| *error /= total);
            errors[*label] -= 1.0;
            errors.iter_mut().for_each(|error| *error /= batch.labels.len() as f32);
            let mut below = vec![0.0; HIDDEN];
            for (row, error) in self.weights[1].chunks_exact(HIDDEN).zip(&errors) {
                below.iter_mut().zip(row).for_each(|(sum, w)| *sum += w * error);
            }
            below.iter_mut().zip(&hidden).for_each(|(error, x)| *error *= f32::from(*x > 0.0));
            for (layer, (errors, inputs)) in [(&below, image), (&errors, &hidden[..])].into_iter().enumerate()
            {
                add_outer(&mut grads.weights[layer], errors, inputs);
                add_outer(&mut grads.biases[layer], errors, &[1.0]);
            }
        }
        grads
    }

    fn accuracy(&self, samples: &Samples) -> f64 {
        let guessed = samples.images.chunks_exact(PIXELS).zip(&samples.labels).filter(|(image, label)| {
            let logits = self.forward(image).1;
            (0..CLASSES).all(|class| logits[class] <= logits[**label])
        });
        guessed.count() as f64 / samples.labels.len() as f64
    }
}

impl Network {
    fn new(layout: &Layout) -> Network {
        let id = |name| layout.id(name).unwrap();
        Network { weights: [id("w0"), id("w1")], biases: [id("b0"), id("b1")] }
    }

    fn read(&self, read: impl Fn(ParamId, &mut [f32]) -> Result<()>) -> Result<Values> {
        let mut values = Values::zeros();
        for layer in 0..2 {
            read(self.weights[layer], &mut values.weights[layer])?;
            read(self.biases[layer], &mut values.biases[layer])?;
        }
        Ok(values)
    }

    fn train<D: Device>(
        &self,
        stepper: &mut Stepper<D>,
        training: &Samples,
        rank: u32,
        ranks: u32,
    ) -> Result<Vec<Outcome>> {
        let mut random = Random::new(7);
        for (weight, inputs) in self.weights.into_iter().zip([PIXELS, HIDDEN]) {
            let mut drawn = vec![0.0; stepper.layout().parameter(weight)?.len as usize];
            drawn.fill_with(|| random.draw_within((6.0 / inputs as f32).sqrt()));
            stepper.write(weight, &drawn)?;
        }
        let mut outcomes = Vec::new();
        for epoch in 1..=EPOCHS {
            for batch in training.draw_batches(epoch, rank, ranks) {
                assert_eq!(batch.labels.len(), GLOBAL_BATCH / ranks as usize);
                let mut pass = stepper.begin()?;
                // All ranks have all parameters anyway, unless they share them out.
                (0..pass.plan().buckets().len() as u32).try_for_each(|bucket| pass.unshard(bucket))?;
                let grads = self.read(|id, into| pass.read(id, into))?.gradients(&batch);
                for layer in [1, 0] {
                    pass.write(self.biases[layer].grad(), &grads.biases[layer])?;
                    pass.grad_ready(self.biases[layer])?;
                    pass.write(self.weights[layer].grad(), &grads.weights[layer])?;
                    pass.grad_ready(self.weights[layer])?;
                }
                pass.finish()?;
            }
            outcomes.push(Outcome::of(stepper)?);
        }
        Ok(outcomes)
    }
}

#[test]
fn digits_are_learned_with_the_hosts_bits_in_every_mode() {
    let (training, held_out) = Samples::load().unwrap().split();
    let (layout, network) = (lay_out(), Network::new(&lay_out()));
    let sgd = Optim::of(Sgd { lr: 0.1, momentum: 0.9, nesterov: true, ..Sgd::default() });
    let adam = Optim::of(Adam { lr: 5e-3, ..Adam::default() });
    for optim in [sgd, adam] {
        let plain = Options { cap: Some(2 << 10), ..Options::default() };
        let mut host = plain.stepper(&layout, optim, Solo::default()).unwrap();
        let expected = network.train(&mut host, &training, 0, 1).unwrap();
        for mode in MODES {
            let what = format!("{optim:?} {mode:?}");
            let mut gpu = Options { mode, ..plain.clone() }
                .stepper_on(&cuda(), &layout, optim, Solo::default())
                .unwrap();
            for (epoch, (gpu, host)) in
                network.train(&mut gpu, &training, 0, 1).unwrap().iter().zip(&expected).enumerate()
            {
                gpu.assert_same(host, &format!("{what}, epoch {epoch}"));
            }
            let learned = network.read(|id, into| gpu.read(id, into)).unwrap().accuracy(&held_out);
            assert!(learned > 0.85, "{what}: {learned}");
        }
    }
}

/// Trains one of two ranks on a GPU; both get the bits of two ranks on the host. `cuda::gpu::nccl` starts it twice.
// `cuda::gpu` needs the feature.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) fn learn_as_a_rank_of_two(comm: Nccl, strategy: Strategy) {
    let (training, held_out) = Samples::load().unwrap().split();
    let (layout, network) = (lay_out(), Network::new(&lay_out()));
    let optim = Optim::of(Adam { lr: 5e-3, ..Adam::default() });
    let options = Options { cap: Some(2 << 10), ..Options::default() };
    let rank = comm.rank();
    let on_host = in_process(2, |comm| {
        let rank = comm.rank();
        let mut host = options.builder(&layout, optim).strategy(strategy).host(comm)?;
        network.train(&mut host, &training, rank, 2)
    });
    // A stepper that goes first would end the group for the other rank.
    let group = comm.clone();
    let builder = options.builder(&layout, optim).strategy(strategy);
    // SAFETY: the trainer's stream is the default one.
    let mut gpu = unsafe { builder.cuda(comm, &hardware::open()) }.unwrap();
    let trained = network.train(&mut gpu, &training, rank, 2).unwrap();
    for (epoch, (gpu, host)) in trained.iter().zip(&on_host.unwrap()[rank as usize]).enumerate() {
        gpu.assert_same(host, &format!("rank {rank}, epoch {epoch}"));
    }
    let learned = network.read(|id, into| gpu.gather(id, into)).unwrap().accuracy(&held_out);
    assert!(learned > 0.85, "{learned}");
    gpu.close().unwrap();
    group.close().unwrap();
}
