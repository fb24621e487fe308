//! One rank whose gradients are already summed.
//!
//! Its collectives do nothing, and the step still divides by `world_size`. Tests compare many ranks with it, and
//! `instep replay` uses it.
#![allow(unsafe_code)]

use crate::collective::{Call, Collective};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::handle::Place;

/// A group whose gradients are already summed over its ranks.
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

    /// Reaches every place, because it never reads a buffer.
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
