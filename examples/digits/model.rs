//! A multi-layer perceptron in plain Rust: forward and backward, one layer at a time.
//!
//! It reads parameters and writes gradients through the library's views and keeps neither. Must never hand anything
//! over: when a gradient is ready is the training loop's to say. Sums are taken in one fixed order, so equal inputs
//! give equal bits.

use instep::{Grads, Layout, ParamId, Params, ParamsMut, Result};

use crate::data::{CLASSES, PIXELS, Random, Samples};

/// Values per image between the layers.
pub(crate) const WIDTHS: [usize; 5] = [PIXELS, 512, 256, 128, CLASSES];

/// The layers, first to last.
pub(crate) struct Network {
    pub(crate) layers: Vec<Layer>,
}

/// One fully connected layer: where its parameters are. Weights are stored input by input.
pub(crate) struct Layer {
    pub(crate) weight: ParamId,
    pub(crate) bias: ParamId,
    index: usize,
    inputs: usize,
    outputs: usize,
    /// ReLU on the outputs; the last layer's go into the softmax as they are.
    rectified: bool,
}

/// What forward leaves behind for backward; its memory serves batch after batch.
#[derive(Default)]
pub(crate) struct Tape {
    /// The inputs of each layer, and the last one's outputs.
    values: Vec<Vec<f32>>,
    /// Derivatives of the loss by what the layer that is next in backward put out, before its ReLU.
    errors: Vec<f32>,
    input_errors: Vec<f32>,
}

/// How well a batch was recognised.
pub(crate) struct Score {
    /// Mean cross-entropy.
    pub(crate) loss: f64,
    /// Share of images whose digit got the highest probability.
    pub(crate) accuracy: f64,
}

/// Names the parameters, in forward order.
pub(crate) fn lay_out(widths: &[usize]) -> Result<Layout> {
    let mut layout = Layout::builder();
    for (index, (inputs, outputs)) in widths.iter().zip(&widths[1..]).enumerate() {
        layout = layout.param(format!("layer{index}.weight"), inputs * outputs);
        layout = layout.param(format!("layer{index}.bias"), *outputs);
    }
    layout.build()
}

impl Network {
    /// Finds the parameters that [`lay_out`] has named.
    pub(crate) fn new(layout: &Layout, widths: &[usize]) -> Result<Network> {
        let connect = |(index, (inputs, outputs)): (usize, (&usize, &usize))| {
            Ok(Layer {
                weight: layout.id(&format!("layer{index}.weight"))?,
                bias: layout.id(&format!("layer{index}.bias"))?,
                index,
                inputs: *inputs,
                outputs: *outputs,
                rectified: index + 2 < widths.len(),
            })
        };
        let layers = widths.iter().zip(&widths[1..]).enumerate().map(connect).collect::<Result<_>>()?;
        Ok(Network { layers })
    }

    /// Draws the first weights, so that values keep their size from layer to layer (He et al., ICCV 2015).
    pub(crate) fn initialise(&self, mut params: ParamsMut<'_>) -> Result<()> {
        let mut random = Random::new(1);
        for layer in &self.layers {
            let limit = (6.0 / layer.inputs as f32).sqrt();
            params.get_mut(layer.weight)?.fill_with(|| random.draw_within(limit));
            params.get_mut(layer.bias)?.fill(0.0);
        }
        Ok(())
    }

    /// Recognises a batch, and leaves on the tape what backward needs.
    pub(crate) fn forward(&self, params: Params<'_>, batch: &Samples, tape: &mut Tape) -> Result<Score> {
        tape.values.resize_with(self.layers.len() + 1, Vec::new);
        tape.values[0].clone_from(&batch.images);
        for layer in &self.layers {
            layer.forward(params, batch.labels.len(), tape)?;
        }
        Ok(score(&batch.labels, &tape.values[self.layers.len()], &mut tape.errors))
    }
}

impl Layer {
    fn forward(&self, params: Params<'_>, images: usize, tape: &mut Tape) -> Result<()> {
        let (weight, bias) = (params.get(self.weight)?, params.get(self.bias)?);
        let (before, after) = tape.values.split_at_mut(self.index + 1);
        let (values, results) = (&before[self.index], &mut after[0]);
        results.clear();
        results.extend(std::iter::repeat_n(bias, images).flatten());
        // Here and in backward, a row of weights serves all images while it is in the nearest cache.
        for (input, row) in weight.chunks_exact(self.outputs).enumerate() {
            for (image, result) in
                values.chunks_exact(self.inputs).zip(results.chunks_exact_mut(self.outputs))
            {
                add_scaled(result, image[input], row);
            }
        }
        if self.rectified {
            results.iter_mut().for_each(|result| *result = result.max(0.0));
        }
        Ok(())
    }

    /// Writes the gradients of this layer, and moves the tape's errors on to the layer below.
    pub(crate) fn backward(&self, params: Params<'_>, grads: &mut Grads<'_>, tape: &mut Tape) -> Result<()> {
        let Tape { values, errors, input_errors } = tape;
        let values = &values[self.index];
        let [weight_grad, bias_grad] = grads.get_disjoint_mut([self.weight, self.bias])?;
        // They still hold what the last pass left.
        weight_grad.fill(0.0);
        bias_grad.fill(0.0);
        for error in errors.chunks_exact(self.outputs) {
            add_scaled(bias_grad, 1.0, error);
        }
        for (input, row_grad) in weight_grad.chunks_exact_mut(self.outputs).enumerate() {
            for (image, error) in values.chunks_exact(self.inputs).zip(errors.chunks_exact(self.outputs)) {
                add_scaled(row_grad, image[input], error);
            }
        }
        if self.index == 0 {
            return Ok(()); // Nothing below but pixels.
        }
        input_errors.clear();
        input_errors.resize(values.len(), 0.0);
        for (input, row) in params.get(self.weight)?.chunks_exact(self.outputs).enumerate() {
            let below = values.chunks_exact(self.inputs).zip(input_errors.chunks_exact_mut(self.inputs));
            for (error, (image, input_error)) in errors.chunks_exact(self.outputs).zip(below) {
                // The ReLU below lets through only what came out of it above zero.
                if image[input] > 0.0 {
                    input_error[input] = multiply_and_sum(row, error);
                }
            }
        }
        std::mem::swap(errors, input_errors);
        Ok(())
    }
}

/// Compares the softmax of `logits` with the labels, and writes the derivatives of the mean loss.
fn score(labels: &[usize], logits: &[f32], errors: &mut Vec<f32>) -> Score {
    errors.clear();
    let images = labels.len() as f64;
    let (mut loss, mut correct) = (0.0, 0usize);
    for (label, logits) in labels.iter().zip(logits.chunks_exact(logits.len() / labels.len())) {
        // The largest is subtracted, because the exponential of a large number overflows.
        let guess = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap_or(0);
        let exponentials = logits.iter().map(|logit| (logit - logits[guess]).exp());
        let total: f32 = exponentials.clone().sum();
        loss += f64::from(total.ln() + logits[guess] - logits[*label]);
        correct += usize::from(guess == *label);
        let first = errors.len();
        errors.extend(exponentials.map(|exponential| exponential / total));
        errors[first + label] -= 1.0;
    }
    errors.iter_mut().for_each(|error| *error /= images as f32);
    Score { loss: loss / images, accuracy: correct as f64 / images }
}

fn add_scaled(sums: &mut [f32], factor: f32, values: &[f32]) {
    sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += factor * value);
}

/// The scalar product, in 16 partial sums: a single one could not be computed in vectors without changing its bits.
fn multiply_and_sum(left: &[f32], right: &[f32]) -> f32 {
    let ((left, left_rest), (right, right_rest)) = (left.as_chunks::<16>(), right.as_chunks::<16>());
    let mut sums = [0.0; 16];
    for (left, right) in left.iter().zip(right) {
        for (sum, (left, right)) in sums.iter_mut().zip(left.iter().zip(right)) {
            *sum += left * right;
        }
    }
    let rest: f32 = left_rest.iter().zip(right_rest).map(|(left, right)| left * right).sum();
    sums.iter().sum::<f32>() + rest
}
