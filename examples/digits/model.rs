//! A multi-layer perceptron in plain Rust: forward and backward, one layer at a time.
//!
//! The network reads parameters and writes gradients through the library's views, in their stored type `T`, and
//! computes in f32. The training loop hands the gradients over. Every sum has one fixed order, so equal inputs give
//! equal bits.

use instep::dtype::Element;
use instep::{Grads, Layout, ParamId, Params, Result, Stepper};

use crate::data::{CLASSES, PIXELS, Random, Samples};

/// The number of values per image: at the input, between the layers and at the output.
pub(crate) const WIDTHS: [usize; 5] = [PIXELS, 512, 256, 128, CLASSES];

/// The layers, first to last.
pub(crate) struct Network {
    pub(crate) layers: Vec<Layer>,
}

/// One fully connected layer, with the ids of its parameters. Weights are stored input by input.
pub(crate) struct Layer {
    pub(crate) weight: ParamId,
    pub(crate) bias: ParamId,
    index: usize,
    inputs: usize,
    outputs: usize,
    /// Whether ReLU is applied to the outputs. The last layer's outputs go into the softmax.
    rectified: bool,
}

/// Values that forward keeps for backward. The tape's memory is reused for every batch.
#[derive(Default)]
pub(crate) struct Tape {
    /// The inputs of each layer, and the outputs of the last layer.
    values: Vec<Vec<f32>>,
    /// Derivatives of the loss with respect to the outputs (before ReLU) of the layer that backward processes next.
    errors: Vec<f32>,
    input_errors: Vec<f32>,
    /// One row of a gradient, before it is rounded to the stored type.
    sums: Vec<f32>,
}

/// Loss and accuracy of one batch.
pub(crate) struct Score {
    /// Mean cross-entropy.
    pub(crate) loss: f64,
    /// Share of images for which the true digit got the highest probability.
    pub(crate) accuracy: f64,
}

/// Returns a layout with the named parameters, in forward order.
pub(crate) fn lay_out(widths: &[usize]) -> Result<Layout> {
    let mut layout = Layout::builder();
    for (index, (inputs, outputs)) in widths.iter().zip(&widths[1..]).enumerate() {
        layout = layout.param(format!("layer{index}.weight"), inputs * outputs);
        layout = layout.param(format!("layer{index}.bias"), *outputs);
    }
    layout.build()
}

impl Network {
    /// Finds the parameters that [`lay_out`] named.
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

    /// Draws initial weights that keep the scale of values from layer to layer (He et al., ICCV 2015).
    pub(crate) fn initialise(&self, stepper: &mut Stepper) -> Result<()> {
        let mut random = Random::new(1);
        // In the order in which `lay_out` names them.
        let mut limits =
            self.layers.iter().flat_map(|layer| [Some((6.0 / layer.inputs as f32).sqrt()), None]);
        stepper.fill_params(|_, values| match limits.next().flatten() {
            Some(limit) => values.fill_with(|| random.draw_within(limit)),
            None => values.fill(0.0),
        })
    }

    /// Classifies a batch, and stores the values that backward needs on the tape.
    pub(crate) fn forward<T: Element>(
        &self,
        stepper: &mut Stepper,
        batch: &Samples,
        tape: &mut Tape,
    ) -> Result<Score> {
        tape.values.resize_with(self.layers.len() + 1, Vec::new);
        tape.values[0].clone_from(&batch.images);
        for layer in &self.layers {
            layer.unshard(stepper)?;
            layer.forward::<T>(stepper.params(), batch.labels.len(), tape)?;
            layer.reshard(stepper)?;
        }
        Ok(score(&batch.labels, &tape.values[self.layers.len()], &mut tape.errors))
    }
}

impl Layer {
    /// Unshards the layer's parameters.
    pub(crate) fn unshard(&self, stepper: &mut Stepper) -> Result<()> {
        self.buckets(stepper)?.into_iter().try_for_each(|bucket| stepper.unshard(bucket))
    }

    /// Reshards the layer's parameters after the layer's forward.
    fn reshard(&self, stepper: &mut Stepper) -> Result<()> {
        self.buckets(stepper)?.into_iter().try_for_each(|bucket| stepper.reshard(bucket))
    }

    fn buckets(&self, stepper: &Stepper) -> Result<[u32; 2]> {
        let bucket = |id| Ok(stepper.plan().segment_of(stepper.layout().index(id)?).bucket);
        Ok([bucket(self.weight)?, bucket(self.bias)?])
    }

    fn forward<T: Element>(&self, params: Params<'_>, images: usize, tape: &mut Tape) -> Result<()> {
        let (weight, bias) = (params.get_as::<T>(self.weight)?, params.get_as::<T>(self.bias)?);
        let (before, after) = tape.values.split_at_mut(self.index + 1);
        let (values, results) = (&before[self.index], &mut after[0]);
        results.clear();
        results.extend(std::iter::repeat_n(bias, images).flatten().map(|bias| bias.to_f32()));
        // Here and in backward, one row of weights is used for all images while it is in the first-level cache.
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

    /// Writes the gradients of this layer, and propagates the tape's errors to the layer below.
    pub(crate) fn backward<T: Element>(
        &self,
        params: Params<'_>,
        grads: &mut Grads<'_>,
        tape: &mut Tape,
    ) -> Result<()> {
        let Tape { values, errors, input_errors, sums } = tape;
        let values = &values[self.index];
        let [weight_grad, bias_grad] = grads.get_disjoint_mut::<T, 2>([self.weight, self.bias])?;
        let mut write_row = |row: &mut [T], add: &dyn Fn(&mut [f32])| {
            sums.clear();
            sums.resize(row.len(), 0.0);
            add(sums);
            row.iter_mut().zip(&*sums).for_each(|(gradient, sum)| *gradient = T::from_f32(*sum));
        };
        write_row(bias_grad, &|sums| {
            errors.chunks_exact(self.outputs).for_each(|error| add_scaled(sums, 1.0, error));
        });
        for (input, row_grad) in weight_grad.chunks_exact_mut(self.outputs).enumerate() {
            write_row(row_grad, &|sums| {
                let images = values.chunks_exact(self.inputs).zip(errors.chunks_exact(self.outputs));
                images.for_each(|(image, error)| add_scaled(sums, image[input], error));
            });
        }
        if self.index == 0 {
            return Ok(()); // Only pixels are below.
        }
        input_errors.clear();
        input_errors.resize(values.len(), 0.0);
        for (input, row) in params.get_as::<T>(self.weight)?.chunks_exact(self.outputs).enumerate() {
            let below = values.chunks_exact(self.inputs).zip(input_errors.chunks_exact_mut(self.inputs));
            for (error, (image, input_error)) in errors.chunks_exact(self.outputs).zip(below) {
                // The derivative of the ReLU below is zero where its output was zero.
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

fn add_scaled<T: Element>(sums: &mut [f32], factor: f32, values: &[T]) {
    sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += factor * value.to_f32());
}

/// Computes the scalar product in 16 partial sums. A single sum could not be vectorised without changing its bits.
fn multiply_and_sum<T: Element>(left: &[T], right: &[f32]) -> f32 {
    let ((left, left_rest), (right, right_rest)) = (left.as_chunks::<16>(), right.as_chunks::<16>());
    let mut sums = [0.0; 16];
    for (left, right) in left.iter().zip(right) {
        for (sum, (left, right)) in sums.iter_mut().zip(left.iter().zip(right)) {
            *sum += left.to_f32() * right;
        }
    }
    let rest: f32 = left_rest.iter().zip(right_rest).map(|(left, right)| left.to_f32() * right).sum();
    sums.iter().sum::<f32>() + rest
}
