//! A chain of linear layers in f64, with hand-written gradients: the networks of PyTorch's tests.
//!
//! Forward and backward compute `loss = sum(output)` or the mean squared error, per sample. The module contains no
//! optimizer.

/// The indices of a layer's weight (out x in) and bias among the parameters; two layers may share them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Linear {
    pub weight: usize,
    pub bias: Option<usize>,
    pub inputs: usize,
    pub outputs: usize,
}

/// The activation after every layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Activation {
    None,
    Sigmoid,
}

/// A chain of linear layers, with its parameters.
#[derive(Clone, Debug)]
pub(super) struct Network {
    pub layers: Vec<Linear>,
    pub activation: Activation,
    params: Vec<Vec<f64>>,
}

/// Returns a number in (-1, 1) that depends on row and column, and is the same on every machine.
pub(super) fn draw(row: usize, column: usize) -> f64 {
    let mixed = (row as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        ^ (column as u64).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0x94d0_49bb_1331_11eb);
    // 24 bits, so that the number is the same in f32.
    (mixed >> 40) as f64 / f64::from(1 << 23) - 1.0
}

impl Network {
    /// Draws parameters as `torch.nn.Linear` does: up to 1/sqrt(inputs).
    pub(super) fn new(layers: Vec<Linear>, activation: Activation) -> Network {
        Network::seeded(layers, activation, 0)
    }

    /// Returns the same layers with parameters of another seed.
    pub(super) fn seeded(layers: Vec<Linear>, activation: Activation, seed: usize) -> Network {
        let mut params = Vec::new();
        for layer in &layers {
            let scale = 1.0 / (layer.inputs as f64).sqrt();
            let of = [(Some(layer.weight), layer.inputs * layer.outputs), (layer.bias, layer.outputs)];
            for (place, len) in of {
                if place == Some(params.len()) {
                    let row = params.len() + 100 * seed;
                    // As f32 holds it, so that both sides start alike.
                    params.push((0..len).map(|k| f64::from((scale * draw(row, k)) as f32)).collect());
                }
            }
        }
        Network { layers, activation, params }
    }

    pub(super) fn params(&self) -> &[Vec<f64>] {
        &self.params
    }

    pub(super) fn params_mut(&mut self) -> &mut [Vec<f64>] {
        &mut self.params
    }

    /// Returns the same layers with other parameters.
    pub(super) fn at(&self, params: Vec<Vec<f64>>) -> Network {
        Network { layers: self.layers.clone(), activation: self.activation, params }
    }

    /// Adds a parameter, which no layer uses.
    pub(super) fn push(&mut self, values: Vec<f64>) {
        self.params.push(values);
    }

    pub(super) fn output(&self, input: &[f64]) -> Vec<f64> {
        self.forward(input).pop().unwrap()
    }

    fn activate(&self, x: f64) -> f64 {
        match self.activation {
            Activation::None => x,
            Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        }
    }

    /// Returns the slope of the activation, from its output.
    fn slope(&self, y: f64) -> f64 {
        match self.activation {
            Activation::None => 1.0,
            Activation::Sigmoid => y * (1.0 - y),
        }
    }

    /// Returns the outputs of every layer, after the input.
    fn forward(&self, input: &[f64]) -> Vec<Vec<f64>> {
        let mut outputs = vec![input.to_vec()];
        for layer in &self.layers {
            let (x, weight) = (&outputs[outputs.len() - 1], &self.params[layer.weight]);
            let row = |o: usize| -> f64 {
                let sum: f64 = x.iter().zip(&weight[o * layer.inputs..]).map(|(x, w)| x * w).sum();
                self.activate(sum + layer.bias.map_or(0.0, |bias| self.params[bias][o]))
            };
            outputs.push((0..layer.outputs).map(row).collect());
        }
        outputs
    }

    /// Returns gradients of a batch in backward's order: each entry is one use of one parameter. `slope_of_loss`
    /// returns the loss's derivative by each output; the loss is the sum over samples.
    pub(super) fn backward(
        &self,
        batch: &[Vec<f64>],
        slope_of_loss: impl Fn(&[f64]) -> Vec<f64>,
    ) -> Vec<(usize, Vec<f64>)> {
        let outputs: Vec<Vec<Vec<f64>>> = batch.iter().map(|input| self.forward(input)).collect();
        let mut deltas: Vec<Vec<f64>> =
            outputs.iter().map(|all| slope_of_loss(&all[all.len() - 1])).collect();
        let mut gradients = Vec::new();
        for (at, layer) in self.layers.iter().enumerate().rev() {
            for (delta, all) in deltas.iter_mut().zip(&outputs) {
                delta.iter_mut().zip(&all[at + 1]).for_each(|(d, y)| *d *= self.slope(*y));
            }
            if let Some(bias) = layer.bias {
                let sum = |o: usize| deltas.iter().map(|delta| delta[o]).sum();
                gradients.push((bias, (0..layer.outputs).map(sum).collect()));
            }
            let mut weight = vec![0.0; layer.inputs * layer.outputs];
            for (delta, all) in deltas.iter().zip(&outputs) {
                for (row, d) in weight.chunks_mut(layer.inputs).zip(delta) {
                    row.iter_mut().zip(&all[at]).for_each(|(g, x)| *g += d * x);
                }
            }
            gradients.push((layer.weight, weight));
            if at > 0 {
                let values = &self.params[layer.weight];
                for delta in &mut deltas {
                    let mut below = vec![0.0; layer.inputs];
                    for (row, d) in values.chunks(layer.inputs).zip(delta.iter()) {
                        below.iter_mut().zip(row).for_each(|(b, w)| *b += d * w);
                    }
                    *delta = below;
                }
            }
        }
        gradients
    }

    /// Returns the gradients of a batch, with the uses of each parameter added up.
    pub(super) fn gradients(
        &self,
        batch: &[Vec<f64>],
        slope_of_loss: impl Fn(&[f64]) -> Vec<f64>,
    ) -> Vec<Vec<f64>> {
        let mut sums: Vec<Vec<f64>> = self.params.iter().map(|values| vec![0.0; values.len()]).collect();
        for (param, gradient) in self.backward(batch, slope_of_loss) {
            sums[param].iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g);
        }
        sums
    }

    /// Takes over a stepper's f32 parameters.
    pub(super) fn set_params(&mut self, values: impl Iterator<Item = Vec<f32>>) {
        for (param, values) in self.params.iter_mut().zip(values) {
            *param = values.into_iter().map(f64::from).collect();
        }
    }
}

/// Returns a batch that depends on the row.
pub(super) fn batch(samples: usize, inputs: usize, row: usize) -> Vec<Vec<f64>> {
    (0..samples).map(|s| (0..inputs).map(|k| draw(1000 + row * 64 + s, k)).collect()).collect()
}

/// Returns the slope of `output.sum()`.
pub(super) fn sum(output: &[f64]) -> Vec<f64> {
    vec![1.0; output.len()]
}

/// The gradients agree with differences of the loss.
#[test]
fn gradients_are_the_slopes_of_the_loss() {
    let shared = Linear { weight: 0, bias: None, inputs: 3, outputs: 3 };
    let other = Linear { weight: 1, bias: Some(2), inputs: 3, outputs: 3 };
    for activation in [Activation::None, Activation::Sigmoid] {
        let mut network = Network::new(vec![shared, other, shared], activation);
        let inputs = batch(2, 3, 5);
        let loss = |network: &Network| -> f64 {
            inputs
                .iter()
                .map(|input| network.forward(input)[3].iter().map(|y| y * y / 2.0).sum::<f64>())
                .sum()
        };
        let gradients = network.gradients(&inputs, |output| output.to_vec());
        for (param, gradient) in gradients.iter().enumerate() {
            for (k, slope) in gradient.iter().enumerate() {
                let kept = network.params[param][k];
                let mut at = |x: f64| {
                    network.params[param][k] = x;
                    loss(&network)
                };
                let estimate = (at(kept + 1e-5) - at(kept - 1e-5)) / 2e-5;
                network.params[param][k] = kept;
                assert!(
                    (estimate - slope).abs() < 1e-8,
                    "{activation:?} {param}[{k}]: {slope}, not {estimate}"
                );
            }
        }
    }
}
