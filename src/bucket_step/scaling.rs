//! The factors by which a step scales a bucket's gradients: world size, loss scale and clip.
//!
//! All factors are first combined into one f32 factor, as in a stepper's passes. A bucket step therefore gives the same
//! bits as a stepper.

use std::ptr;

use crate::error::{Error, Result};
use crate::handle::Address;

/// The factors by which a step scales a bucket's gradients. A step multiplies each gradient by clip / (world size *
/// loss scale).
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
    /// This field and `found_inf` each store the address of one f32. Both addresses meet the contract of
    /// [`grad_scaler`](Scaling::grad_scaler).
    pub(super) grad_scale: Option<Address>,
    pub(super) found_inf: Option<Address>,
}

impl Scaling {
    /// A `Scaling` without factors. A step uses the gradients unchanged.
    pub const NONE: Scaling =
        Scaling { world_size: 1, loss_scale: 1.0, clip: 1.0, grad_scale: None, found_inf: None };

    /// Returns the `Scaling` for gradients that are sums over `world_size` ranks. The step divides the gradients by
    /// `world_size`.
    pub fn mean(world_size: u32) -> Scaling {
        Scaling { world_size, ..Scaling::NONE }
    }

    /// Sets the loss scale. The default is 1.
    pub fn loss_scale(self, loss_scale: f64) -> Scaling {
        Scaling { loss_scale, ..self }
    }

    /// Sets the clip coefficient, a number from 0 to 1 that the caller has computed. The default is 1. A coefficient of
    /// 1 clips nothing.
    pub fn clip(self, clip: f64) -> Scaling {
        Scaling { clip, ..self }
    }

    /// Returns an error if a factor is out of range or an address is unaligned.
    pub(super) fn validate(&self) -> Result<()> {
        if self.world_size == 0 {
            return Err(Error::range("world_size", 0, "1 or more"));
        }
        let scaler = [("scale", self.grad_scale), ("found_inf", self.found_inf)];
        for (field, address) in scaler.map(|(field, at)| (field, at.map_or(0, Address::get))) {
            if !address.is_multiple_of(align_of::<f32>() as u64) {
                let wrong = "not aligned to f32";
                return Err(Error::config(field, format_args!("{address:#x}"), wrong, "align it to 4 bytes"));
            }
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

    /// Returns an error if a clip coefficient is set. This check is for calls that take the coefficient from a norm.
    pub(super) fn refuse_clip(&self) -> Result<()> {
        if self.clip == 1.0 {
            return Ok(());
        }
        Err(Error::config("clip", self.clip, "a norm decides the coefficient", "leave it out"))
    }

    /// Puts the factors into the arguments of the kernel `begin`.
    pub(super) fn put(&self, args: &mut crate::abi::InstepBeginArgs) {
        args.divisor = f64::from(self.world_size);
        args.loss_scale = self.loss_scale;
        args.clip = self.clip;
        let pointer = |at: Option<Address>| at.map_or(ptr::null(), |at| at.as_ptr().cast_const().cast());
        (args.grad_scale, args.found_inf) = (pointer(self.grad_scale), pointer(self.found_inf));
    }
}
