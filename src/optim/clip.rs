//! Clipping of gradients: by which norm a stepper clips, and to what.
//!
//! A plain value that the builder checks. Norms and factors are computed in `kernels/numeric/control.h` and nowhere
//! else.

/// Clips the averaged gradients that are stepped to a largest norm, which is finite and above 0. Gradients that [are
/// not summed over ranks](crate::LayoutBuilder::local) are neither clipped nor part of a norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Clip {
    /// Clips by the norm of all gradients, exactly. Refused in Eager.
    Global(f64),
    /// Clips by the norm of the pass before, which every mode knows, Eager too. Not exact: a gradient that grows
    /// suddenly is stepped as large as it is, and the next pass is clipped. The first pass is not clipped, a norm that
    /// was infinite or NaN is passed over, and so is that of a pass skipped or given up. The bits are the same in every
    /// mode. A run that goes on from saved state loads the norm too
    /// ([`Stepper::set_previous_norm`](crate::Stepper::set_previous_norm)).
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
    /// Clips each bucket by its own norm, not by that of all gradients: what `torch.nn.utils.clip_grad_norm_` does to
    /// the averaged gradients of the bucket's stepped parameters. **Inexact, and the result depends on how the layout
    /// is cut into buckets**: another [cap](crate::StepperBuilder::bucket_cap_bytes), or
    /// [rebuilding](crate::Stepper::rebuild_buckets), trains differently, and the gradient's direction changes. With the
    /// same buckets it is the same bits in every mode, Eager too. A NaN or an infinity touches its own bucket alone,
    /// where IEEE has its way. [`Status::norm`](crate::Status::norm) is `None` and [`Status::clip`](crate::Status::clip)
    /// is 1, because each bucket has its own. Excludes [`skip_nonfinite`](crate::StepperBuilder::skip_nonfinite) and a
    /// [dynamic loss scale](crate::LossScale::Dynamic).
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
    /// The largest norm.
    pub(crate) fn max_norm(self) -> f64 {
        match self {
            Clip::Global(max_norm) | Clip::Previous(max_norm) | Clip::PerBucket(max_norm) => max_norm,
        }
    }
}
