//! PyTorch's mixed precision policy, in the terms of a [`Precision`].
//!
//! A policy only chooses element types. The master keeps the parameter's own type, so a policy loses no bits of it. The rules
//! are those of `torch.distributed.fsdp.MixedPrecisionPolicy`.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::layout::element_types::{Master, Precision};

/// The types in which a model computes, sums its gradients, and takes and gives values, for parameters that have a type of
/// their own. It goes with every [strategy](crate::Strategy).
///
/// ```
/// use instep::{DType, Layout, MixedPrecisionPolicy, Solo, Stepper, bf16};
///
/// let policy = MixedPrecisionPolicy {
///     param_dtype: Some(DType::BF16),
///     reduce_dtype: Some(DType::F32),
///     ..MixedPrecisionPolicy::default()
/// };
/// let layout = Layout::builder().param("w", 2).build()?;
/// let w = layout.id("w")?;
/// let builder = Stepper::builder(&layout, instep::Sgd { lr: 1.0, ..Default::default() });
/// let mut stepper = builder.precision(policy.precision(DType::F32)?).host(Solo::default())?;
/// stepper.write(w, &[1.0, 2.0])?; // the f32 parameter
/// let mut pass = stepper.begin()?;
/// pass.grads().write(w, &[bf16::from_f32(1.0 / 1024.0); 2])?; // one micro-batch, as bf16 backward leaves it
/// pass.grads().add(w, &[bf16::from_f32(1.0); 2])?; // the next one; the sum is f32
/// pass.finish()?;
/// let mut exact = [0.0; 2];
/// stepper.read(w, &mut exact)?;
/// assert_eq!(exact, [-1.0 / 1024.0, 1.0 - 1.0 / 1024.0]);
/// assert_eq!(stepper.view::<bf16>(w)?[1], bf16::from_f32(exact[1]));
/// # Ok::<(), instep::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MixedPrecisionPolicy {
    /// Parameters in forward and backward, and on the wire; `None`: their own type.
    pub param_dtype: Option<DType>,
    /// Gradients where micro-batches and ranks add them up; `None`: as [`param_dtype`](Self::param_dtype).
    pub reduce_dtype: Option<DType>,
    /// Outputs of a forward; `None`: the type that it computes in.
    pub output_dtype: Option<DType>,
    /// Whether a forward's inputs become [`param_dtype`](Self::param_dtype).
    pub cast_forward_inputs: bool,
}

impl Default for MixedPrecisionPolicy {
    /// Parameters' own types throughout.
    fn default() -> Self {
        MixedPrecisionPolicy {
            param_dtype: None,
            reduce_dtype: None,
            output_dtype: None,
            cast_forward_inputs: true,
        }
    }
}

impl MixedPrecisionPolicy {
    /// Returns the precision of a stepper, a [group](crate::StepperBuilder::group_precision) or a bucket, for
    /// parameters that the optimizer is to see in `original`. f32 parameters that compute in 16 bits have an f32
    /// master, which a [strategy](crate::Strategy) may shard.
    ///
    /// PyTorch rounds a reduced gradient to `original` before the step. Here the step takes it unrounded.
    ///
    /// # Errors
    /// `Config` if the parameters' own type cannot hold what they compute in.
    pub fn precision(&self, original: DType) -> Result<Precision> {
        let param = self.param_dtype.unwrap_or(original);
        let master = match (original, param) {
            (DType::F32, DType::BF16 | DType::F16) => Master::F32,
            (original, param) if original == param => Master::None,
            _ => {
                let wrong = format_args!("parameters of {original} cannot hold it");
                return Err(Error::config(
                    "param_dtype",
                    param,
                    wrong,
                    "leave it out, or keep f32 parameters",
                ));
            }
        };
        Ok(Precision { param, grad: self.reduce_dtype.unwrap_or(param), master, ..Precision::F32 })
    }

    /// Returns the type that a forward's input of type `input` is [cast](crate::cast()) to.
    pub fn forward_input(&self, input: DType) -> DType {
        self.param_dtype.filter(|_| self.cast_forward_inputs).unwrap_or(input)
    }

    /// Returns the type that a forward's output of type `output` is [cast](crate::cast()) to.
    pub fn forward_output(&self, output: DType) -> DType {
        self.output_dtype.unwrap_or(output)
    }
}
