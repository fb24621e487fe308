//! The input of several passes: buckets, dtypes, options, values; and the comparison of both machines.
//!
//! The machines use the same memory one after the other, from the same start, so addresses in tables are equal and
//! every bit can be compared. `World` owns the memory.

use instep::abi::*;
use instep::{DType, Precision};

use super::machine::{Machine, Shape};
use super::world::World;
pub(crate) use crate::support::hypers::{parts, rule};
use crate::support::{Optim, paint, paint_gradient};

/// All that a step may do with gradients.
pub(crate) const ENDS: [InstepGradients; 3] =
    [INSTEP_GRADIENTS_KEEP, INSTEP_GRADIENTS_ZERO, INSTEP_GRADIENTS_AVERAGE];

#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub len: usize,
    pub action: InstepSegmentAction,
    /// Number of ranks that had a gradient for it, after the sum. None means that ranks are not counted.
    pub used: Option<f32>,
}

#[derive(Clone, Debug)]
pub(crate) struct Bucket {
    pub segments: Vec<Segment>,
    /// Number of ranks that had data, after the sum. None means that ranks are not counted.
    pub ranks: Option<f32>,
}

/// Buckets that are stepped together, and all other input of the passes.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub optim: Optim,
    pub buckets: Vec<Bucket>,
    pub precision: Precision,
    /// None means no copy.
    pub copy: Option<DType>,
    /// Decay of the moving average of the parameters, if there is one.
    pub ema: Option<f64>,
    pub gradients: InstepGradients,
    /// The launches of a step, in order.
    pub parts: &'static [InstepStepPart],
    /// Elements by which runs of the gradients start after the beginning of a cache line; the other memories have other
    /// distances.
    pub misalignment: usize,
    /// Further elements by which only the gradients are misaligned.
    pub gradient_misalignment: usize,
    /// Elements by which every offset is larger and every base is earlier; whole blocks if states are in 8 bits.
    pub shift: u64,
    pub normed: bool,
    pub max_norm: f64,
    /// Each bucket has its own norm and decision.
    pub per_bucket: bool,
    pub skip_nonfinite: bool,
    /// 0 means the number of ranks that contributed.
    pub divisor: f64,
    pub passes: usize,
    /// Number of slots in the status ring.
    pub slots: usize,
    /// The value of a segment's element; 16-bit memories take its upper half.
    pub param: fn(usize, usize) -> f32,
    /// The gradient of a segment's element in a pass.
    pub gradient: fn(usize, usize, usize) -> f32,
}

impl Case {
    pub(crate) fn new(optim: Optim, buckets: Vec<Bucket>) -> Case {
        Case {
            optim,
            buckets,
            precision: Precision::F32,
            copy: None,
            ema: None,
            gradients: INSTEP_GRADIENTS_KEEP,
            parts: parts(optim),
            misalignment: 0,
            gradient_misalignment: 0,
            shift: 0,
            normed: true,
            max_norm: 0.5,
            per_bucket: false,
            skip_nonfinite: false,
            divisor: 3.0,
            passes: 3,
            slots: 4,
            param: paint,
            gradient: paint_gradient,
        }
    }

    /// Runs the case on the CPU, then in every shape on the GPU, and compares all memory after each pass.
    pub(crate) fn assert_same_bits(&self, shapes: &[Shape]) {
        self.assert_same_bits_as(Machine::Cpu, shapes);
    }

    /// Runs the case on `first`, then in every shape on the GPU, and compares all memory after each pass.
    pub(crate) fn assert_same_bits_as(&self, first: Machine, shapes: &[Shape]) {
        self.precision.validate().unwrap();
        let mut world = World::new(self);
        let start = world.snapshot();
        let expected: Vec<_> = (0..self.passes).map(|pass| world.pass(pass, first)).collect();
        for shape in shapes {
            world.all().into_iter().zip(&start).for_each(|(bands, words)| bands.restore(words));
            for (pass, expected) in expected.iter().enumerate() {
                world.pass(pass, Machine::Gpu(*shape));
                let what = format!("pass {pass}, {shape:?}, {:?}", self.described());
                for (bands, words) in world.all().into_iter().zip(expected) {
                    bands.assert_same(words, first.owner(), &what);
                }
            }
        }
    }

    fn described(&self) -> impl std::fmt::Debug {
        let stored = (self.precision, ("copy", self.copy), ("average", self.ema));
        let ends = ("gradients", self.gradients, "parts", self.parts);
        let misaligned = ("misaligned", self.misalignment, "and gradients", self.gradient_misalignment);
        (self.optim, stored, ends, misaligned, ("shift", self.shift))
    }
}
