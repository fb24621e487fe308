//! One rank that is fed gradients which somebody else has summed already.
//!
//! Its collectives do nothing, since the sum is there; the mean is still taken over `world_size`. It is the reference
//! that many ranks are held to, and the way to replay a step.
#![allow(unsafe_code)]

use crate::collective::{Call, Collective};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::handle::Place;

/// A group whose sums are already there.
#[derive(Clone, Copy, Debug)]
pub struct Solo {
    world_size: u32,
}

impl Solo {
    /// Gradients are sums over `world_size` ranks; 1 is plain single-process training.
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

    /// Everything: what it sums is there already.
    fn reaches(&self, _: Place) -> bool {
        true
    }

    fn sums(&self, _: DType) -> bool {
        true
    }

    unsafe fn enqueue(&self, _: &Call) -> Result<()> {
        Ok(())
    }

    fn abort(&self, _: &Error) {}
}
