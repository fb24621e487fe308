//! Gradient clipping, and dynamic loss scaling.
//!
//! The types of this module are plain values that the builder validates. The scaling policy and its defaults are those
//! of `torch.amp.GradScaler` (Micikevicius et al., Mixed Precision Training, ICLR 2018). Only
//! `kernels/numeric/control.h` implements the arithmetic. Validation rejects factors that would move the scale out of
//! the range of f32.

use std::fmt;

use crate::error::{Error, Result, refuse};
use crate::handle::Address;

/// The factor by which the trainer multiplies the loss. Each step divides the gradients by this factor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LossScale {
    /// A constant factor. The value 1 / (factor * gradient divisor) must be a normal f32. The gradient divisor is the
    /// world size by default.
    Constant(f64),
    /// A factor that adapts to the gradients, like the factor of `torch.amp.GradScaler`. Call
    /// [`Stepper::loss_scale`](crate::Stepper::loss_scale) in each pass to get the current factor. A dynamic factor
    /// implies [`skip_nonfinite`](crate::StepperBuilder::skip_nonfinite), so [`Eager`](crate::Mode::Eager) mode refuses
    /// a dynamic factor. The factor changes in the same way on all ranks, because all ranks have the same sums. A pass
    /// that is abandoned, or in which no rank had data, does not change the factor. A new factor is used only if the
    /// new factor and 1 / (new factor * gradient divisor) are normal f32 values. The gradient divisor is the world size
    /// by default.
    Dynamic(LossScaler),
    /// A factor in the memory of the caller's scaler, such as a `torch.amp.GradScaler`
    /// ([`StepperBuilder::grad_scaler`](crate::StepperBuilder::grad_scaler)). As with `Dynamic`, a pass with an
    /// infinite or NaN gradient is skipped, and [`Eager`](crate::Mode::Eager) mode refuses this kind of factor.
    External(ExternalScaler),
}

/// The addresses of the caller's own loss scaler. Ranks compare the `Debug` output of options, so the output of this
/// type omits the addresses.
#[derive(Clone, Copy, PartialEq)]
pub struct ExternalScaler {
    /// Addresses of one f32 each.
    pub(crate) scale: Address,
    pub(crate) found_inf: Address,
}

impl fmt::Debug for ExternalScaler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ExternalScaler")
    }
}

/// Adapts the loss scale to the gradients. A pass with an infinite or NaN gradient is skipped and makes the scale
/// smaller. After `growth_interval` passes in a row without such a gradient, the scale grows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaler {
    /// The first pass's scale, a value that f32 represents exactly. Default 65536.
    pub initial_scale: f64,
    /// Factor above 1 by which the scale is multiplied after `growth_interval` passes in a row without a skip. Default
    /// 2.
    pub growth_factor: f64,
    /// Factor between 0 and 1 by which the scale is multiplied after a skipped pass. Default 0.5.
    pub backoff_factor: f64,
    /// Number of passes in a row without a skip after which the scale grows. Default 2000.
    pub growth_interval: u32,
}

/// State of a [`LossScaler`] between two passes, sufficient to resume a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScalerState {
    /// The next pass's scale.
    pub scale: f64,
    /// Number of passes since the last change of the scale or the last skipped pass.
    pub growth_tracker: u32,
}

impl From<f64> for LossScale {
    fn from(loss_scale: f64) -> Self {
        LossScale::Constant(loss_scale)
    }
}

impl From<LossScaler> for LossScale {
    fn from(scaler: LossScaler) -> Self {
        LossScale::Dynamic(scaler)
    }
}

impl LossScale {
    /// Returns the first pass's scale.
    pub(crate) fn initial(self) -> f64 {
        match self {
            LossScale::Constant(loss_scale) => loss_scale,
            LossScale::Dynamic(scaler) => scaler.initial_scale,
            // Begin reads the caller's scale.
            LossScale::External(_) => 1.0,
        }
    }

    /// Returns whether passes with an infinite or NaN gradient are skipped with this kind of scale.
    pub(crate) fn skips_nonfinite(self) -> bool {
        !matches!(self, LossScale::Constant(_))
    }

    pub(crate) fn external(self) -> Option<ExternalScaler> {
        if let LossScale::External(scaler) = self { Some(scaler) } else { None }
    }

    pub(crate) fn is_dynamic(self) -> bool {
        matches!(self, LossScale::Dynamic(_))
    }
}

impl Default for LossScaler {
    fn default() -> Self {
        LossScaler { initial_scale: 65536.0, growth_factor: 2.0, backoff_factor: 0.5, growth_interval: 2000 }
    }
}

impl LossScaler {
    /// The values that kernels get if the loss scale is not dynamic. With these values, the scale never changes.
    pub(crate) const CONSTANT: LossScaler =
        LossScaler { initial_scale: 1.0, growth_factor: 1.0, backoff_factor: 1.0, growth_interval: 0 };

    /// Returns the largest scale for which 1 / (scale * gradient divisor) is still a normal f32. The smallest allowed
    /// scale is the smallest normal f32. With this scale, the reciprocal does not overflow for any number of ranks.
    pub(crate) fn largest_scale(divisor: f64) -> f64 {
        1.0 / (f64::from(f32::MIN_POSITIVE) * divisor)
    }

    pub(crate) fn validate(&self, divisor: f64) -> Result<()> {
        scale("initial_scale", self.initial_scale, divisor)?;
        if !(self.growth_factor > 1.0 && self.growth_factor.is_finite()) {
            return Err(Error::range("growth_factor", self.growth_factor, "a finite number above 1"));
        }
        if !(self.backoff_factor > 0.0 && self.backoff_factor < 1.0) {
            return Err(Error::range("backoff_factor", self.backoff_factor, "a number above 0 and below 1"));
        }
        if self.growth_interval == 0 {
            return Err(Error::range("growth_interval", 0, "a whole number above 0"));
        }
        Ok(())
    }
}

impl ScalerState {
    pub(crate) fn validate(&self, divisor: f64) -> Result<()> {
        scale("scale", self.scale, divisor)
    }
}

/// Returns an error for a scale that f32 cannot represent exactly, or by which f32 gradients cannot be divided.
fn scale(field: &'static str, scale: f64, divisor: f64) -> Result<()> {
    let allowed = f64::from(f32::MIN_POSITIVE)..=LossScaler::largest_scale(divisor);
    refuse! {
        field = scale, if !allowed.contains(&scale)
            => "out of range", "use at least 2^-126 and at most 2^126 / the divisor of gradients";
        field = scale, if f64::from(scale as f32) != scale
            => "not representable in f32", "round it to f32, as the trainer's loss is";
    }
    Ok(())
}

/// Limits the norm of the averaged gradients that are stepped. The limit is finite and above 0. Gradients of
/// [local](crate::LayoutBuilder::local) parameters, which are not summed over ranks, are not clipped. Norms do not
/// include these gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Clip {
    /// Clips by the exact norm of all gradients, except those of groups with a [group
    /// clip](crate::StepperBuilder::group_clip). [`Eager`](crate::Mode::Eager) mode refuses this clipping.
    Global(f64),
    /// Clips by the norm of the previous pass. Every mode supports this clipping, even [`Eager`](crate::Mode::Eager),
    /// because the previous norm is available when the pass begins. Clipping by the previous norm is not exact. If
    /// gradients grow suddenly, they are clipped by the smaller norm of the previous pass, and only the next pass uses
    /// the larger norm. The first pass is not clipped. Norms that are infinite or NaN, and norms of skipped or
    /// abandoned passes, are ignored. With this clipping, all modes compute the same bits. A run that resumes from
    /// saved state must also load the norm ([`Stepper::set_previous_norm`](crate::Stepper::set_previous_norm)).
    ///
    /// ```
    /// # use instep::{Clip, Layout, Sgd, Solo, Stepper};
    /// # let layout = Layout::builder().param("w", 1).build()?;
    /// # let w = layout.id("w")?;
    /// let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Default::default() });
    /// let mut stepper = builder.clip(Clip::Previous(1.0)).host(Solo::default())?;
    /// for expected in [-4.0, -5.0] { // the second step is 4 * 1/4
    ///     let mut pass = stepper.begin()?;
    ///     pass.grads().write(w, &[4.0])?;
    ///     pass.finish()?;
    ///     assert!((stepper.view::<f32>(w)?[0] - expected).abs() < 1e-6);
    /// }
    /// # Ok::<(), instep::Error>(())
    /// ```
    Previous(f64),
    /// Clips each bucket by the bucket's own norm, as `torch.nn.utils.clip_grad_norm_` does on the averaged gradients
    /// of the bucket's stepped parameters. **This is inexact, and the result depends on how the layout is divided into
    /// buckets.** The result therefore changes if the [cap](crate::StepperBuilder::bucket_cap_bytes) changes, or if the
    /// buckets are [rebuilt](crate::Stepper::rebuild_buckets). This clipping also changes the gradient's direction.
    /// With the same buckets, all modes compute the same bits, and [`Eager`](crate::Mode::Eager) mode supports this
    /// clipping too. A NaN or an infinity affects only its own bucket, by the rules of IEEE 754.
    /// [`Status::norm`](crate::Status::norm) is `None` and [`Status::clip`](crate::Status::clip) is 1, because each
    /// bucket has its own values. [`skip_nonfinite`](crate::StepperBuilder::skip_nonfinite) and a [dynamic loss
    /// scale](crate::LossScale::Dynamic) are refused with this clipping.
    ///
    /// ```
    /// # use instep::{Clip, Layout, Sgd, Solo, Stepper};
    /// # let layout = Layout::builder().param("loud", 1).param("quiet", 1).build()?;
    /// # let [loud, quiet] = [layout.id("loud")?, layout.id("quiet")?];
    /// let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Default::default() });
    /// let builder = builder.bucket_cap_bytes(4).clip(Clip::PerBucket(1.0)); // a bucket each
    /// let mut stepper = builder.host(Solo::default())?;
    /// let mut pass = stepper.begin()?;
    /// pass.grads().write(loud, &[100.0])?;
    /// pass.grads().write(quiet, &[0.5])?;
    /// pass.finish()?;
    /// assert!((stepper.view::<f32>(loud)?[0] + 1.0).abs() < 1e-6);
    /// assert_eq!(stepper.view::<f32>(quiet)?, [-0.5]);
    /// # Ok::<(), instep::Error>(())
    /// ```
    PerBucket(f64),
}

impl Clip {
    pub(crate) fn max_norm(self) -> f64 {
        match self {
            Clip::Global(max_norm) | Clip::Previous(max_norm) | Clip::PerBucket(max_norm) => max_norm,
        }
    }
}
