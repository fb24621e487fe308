//! One rank whose gradients are already summed.
//!
//! Its collectives copy at most, from the source to another destination, and the step still divides by `world_size`.
//! Tests compare many ranks with it, and `instep replay` uses it.
#![allow(unsafe_code)]

use crate::collective::{Call, Collective};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::handle::{Place, StreamHandle};

/// A group whose gradients are already summed over its ranks: those of single-process training, or of an engine that makes
/// its own all-reduce and hands a bucket over once its sum is there, in any order of buckets. It counts ranks as it sums: a parameter that this rank
/// uses counts as used by all, so if ranks may use different parameters, build with
/// [`Unused::StepZero`](crate::Unused) or [`Unused::Refuse`](crate::Unused).
#[derive(Clone, Copy, Debug)]
pub struct Solo {
    world_size: u32,
}

impl Solo {
    /// Takes gradients that are sums over `world_size` ranks; 1 is single-process training.
    pub fn new(world_size: u32) -> Self {
        Solo { world_size }
    }
}

impl Default for Solo {
    fn default() -> Self {
        Solo::new(1)
    }
}

impl Collective for Solo {
    fn rank(&self) -> u32 {
        0
    }

    fn world_size(&self) -> u32 {
        self.world_size
    }

    /// Reaches every place, because it never touches a buffer that is reduced in place.
    fn reaches(&self, _: Place) -> bool {
        true
    }

    fn sums(&self, _: DType) -> bool {
        true
    }

    /// Nothing is sent.
    fn keeps_order(&self) -> bool {
        false
    }

    unsafe fn enqueue(&self, call: &Call) -> Result<()> {
        // On a GPU steppers sum in place, and this call has a stream.
        if !std::ptr::eq(call.src, call.dst) && call.stream == StreamHandle::default() {
            // SAFETY: both are host memory and valid for `bytes`, by the contract.
            unsafe { call.src.copy_to(call.dst, call.bytes as usize) }
        }
        Ok(())
    }

    fn abort(&self, _: &Error) {}
}
