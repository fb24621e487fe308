//! Four arrays at a distance at which some CPUs take them for one another, for a bench to stream through.
//!
//! It uses the host's own placement and its own loop, and times nothing itself. `src/host/stagger.rs` has the reasons.

use crate::error::Result;
use crate::host::Isa;
use crate::host::kernels::Kernels;
use crate::host::memories::Arena;
use crate::host::stagger::Stagger;

const MIB: u64 = 1 << 20;

/// A gradient, a parameter and two states of f32. They start [`Distant::DISTANCE`] apart, but for the stagger.
pub struct Distant {
    kernels: Kernels,
    arena: Arena,
    starts: [usize; 4],
}

impl Distant {
    /// Bytes from one array to the next. AMD's way predictor hashes no address bit from this one on.
    pub const DISTANCE: u64 = 256 * MIB;

    /// Elements of each array.
    pub const ELEMENTS: usize = 64 << 10;

    /// Places the arrays as a stepper places its own if they are `staggered`, and all alike otherwise.
    ///
    /// # Errors
    /// `Config` if this CPU lacks the instruction set, `Layout` without 769 MiB of addresses.
    pub fn new(isa: Isa, staggered: bool) -> Result<Distant> {
        let mut stagger = Stagger::default();
        let starts = [0, 1, 2, 3].map(|k| {
            let start = if staggered { stagger.next(4 * Distant::ELEMENTS as u64) } else { 0 };
            (k * Distant::DISTANCE + start) as usize / size_of::<f32>()
        });
        let mut arena = Arena::zeroed(3 * Distant::DISTANCE + MIB, 0)?;
        for start in starts {
            arena.f32s()[start..][..Distant::ELEMENTS].fill(1.0);
        }
        Ok(Distant { kernels: Kernels::load(isa)?, arena, starts })
    }

    /// Moves the bytes of a step with two states, and changes no value.
    pub fn stream(&mut self) {
        let ranges = self.starts.map(|start| start..start + Distant::ELEMENTS);
        if let Ok(mut arrays) = self.arena.f32s().get_disjoint_mut(ranges) {
            self.kernels.stream(&mut arrays, 0);
        }
    }
}
