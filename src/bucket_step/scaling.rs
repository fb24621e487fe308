//! The factors in a bucket's gradients, which a step divides out.
//!
//! They become one f32 factor, as in a stepper's passes, so both give the same bits.
#![allow(unsafe_code)]

use std::ptr;

use crate::error::{Error, Result};

/// The factors in a bucket's gradients: a step multiplies each gradient by clip / (world size * loss scale).
///
/// ```
/// use instep::Scaling;
///
/// let scaling = Scaling::mean(8).loss_scale(1024.0); // the gradients are sums over 8 ranks of a scaled loss
/// # let _ = scaling;
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Scaling {
    world_size: u32,
    loss_scale: f64,
    clip: f64,
    grad_scale: *const f32,
    found_inf: *const f32,
}

// SAFETY: two addresses, which `grad_scaler`'s caller has promised to be valid for each call that they are given to.
unsafe impl Send for Scaling {}
// SAFETY: as above; no method of a shared value follows them.
unsafe impl Sync for Scaling {}

impl Scaling {
    /// Gradients that are stepped as they are.
    pub const NONE: Scaling = Scaling {
        world_size: 1,
        loss_scale: 1.0,
        clip: 1.0,
        grad_scale: ptr::null(),
        found_inf: ptr::null(),
    };

    /// Gradients that are sums over so many ranks: the step divides by their number.
    pub fn mean(world_size: u32) -> Scaling {
        Scaling { world_size, ..Scaling::NONE }
    }

    /// Sets the factor in the loss. Unset: 1.
    pub fn loss_scale(self, loss_scale: f64) -> Scaling {
        Scaling { loss_scale, ..self }
    }

    /// Sets a clip coefficient that the caller has computed, from 0 to 1. Unset: 1, no clipping.
    pub fn clip(self, clip: f64) -> Scaling {
        Scaling { clip, ..self }
    }

    /// Takes the loss scale, and the flag that forbids the step, from `torch.amp.GradScaler`'s tensors of one f32 each
    /// (`_scale`, `found_inf`). The step reads them when it runs. A flag other than 0 leaves
    /// parameters, states and step counts as they are; gradients are still zeroed, or averaged, if the step does that.
    ///
    /// `scale` replaces [`loss_scale`](Self::loss_scale). Where gradients are unscaled already, it is null. The step only
    /// reads `found_inf`: your code sets it, equally on all ranks. Null stands for 0.
    ///
    /// # Safety
    /// Both addresses are null, or aligned, in the memory of the step's device, and valid until each call that they are given to
    /// has run; nothing writes them meanwhile.
    pub unsafe fn grad_scaler(self, scale: *const f32, found_inf: *const f32) -> Scaling {
        Scaling { grad_scale: scale, found_inf, ..self }
    }

    /// Refuses factors that a step cannot divide out.
    pub(super) fn validate(&self) -> Result<()> {
        if self.world_size == 0 {
            return Err(Error::range("world_size", 0, "1 or more"));
        }
        if !(0.0..=1.0).contains(&self.clip) {
            return Err(Error::range("clip", self.clip, "a coefficient from 0 to 1"));
        }
        let multiplier = (1.0 / (f64::from(self.world_size) * self.loss_scale)) as f32;
        if multiplier.is_normal() && multiplier > 0.0 {
            return Ok(());
        }
        let allowed = "a finite number above 0, with 1 / (world_size * loss_scale) a normal f32";
        Err(Error::range("loss_scale", self.loss_scale, allowed))
    }

    /// Refuses a coefficient beside the one that a norm decides.
    pub(super) fn refuse_clip(&self) -> Result<()> {
        if self.clip == 1.0 {
            return Ok(());
        }
        Err(Error::config("clip", self.clip, "a norm decides the coefficient", "leave it out"))
    }

    /// Puts the factors into the arguments of a Begin.
    pub(super) fn put(&self, args: &mut crate::abi::InstepBeginArgs) {
        args.divisor = f64::from(self.world_size);
        args.loss_scale = self.loss_scale;
        args.clip = self.clip;
        args.grad_scale = self.grad_scale;
        args.found_inf = self.found_inf;
    }
}
