//! The cases of the step bench and the norm bench: the buckets' sizes, whether the buckets are in the cache, and limits
//! on thread blocks.
//!
//! The step bench measures AdamW first, because even an interrupted run should have the rows of AdamW. Some cases may
//! not fit into memory. The benches skip these cases and report them.

use std::str::FromStr;

use instep::Layout;
use instep::bench::{GpuCase, GpuLauncher, Work};
use instep::cuda::Cuda;
use serde::Serialize;

use crate::bench::Arguments;
use crate::bench::cases::{self, Cache, WORLD_SIZE};
use crate::bench::precisions::{Kind, storage};
use crate::bench::sizes::GPU_BYTES;

/// The number of parameters in a typical bucket of DDP, which has 25 MiB of gradients.
const BUCKET_SEGMENTS: usize = 50;
const BUCKET_ELEMENTS: usize = (25 << 20) / 4;

/// The limit on thread blocks of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blocks {
    All,
    PerMultiprocessor(u32),
    Exactly(u32),
}

/// One line of the table.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Case {
    /// The optimizer's name; null for a norm, because a norm does not depend on the optimizer.
    pub(super) optimizer: Option<String>,
    pub(super) precision: String,
    #[serde(skip)]
    pub(super) rule: cases::Case,
    #[serde(skip)]
    pub(super) kind: Kind,
    #[serde(skip)]
    pub(super) work: Work,
    #[serde(skip)]
    pub(super) states: usize,
    /// Bytes of gradients.
    pub(super) bytes: u64,
    pub(super) elements: usize,
    pub(super) segments: usize,
    pub(super) cache: Cache,
    /// The limit on thread blocks, or null if there is none.
    pub(super) max_blocks: Option<u32>,
    /// Whether gradients and states are 0.
    pub(super) zeros: bool,
}

impl FromStr for Blocks {
    type Err = String;

    fn from_str(text: &str) -> Result<Blocks, String> {
        let number = |text: &str| text.parse().ok().filter(|n: &u32| *n > 0);
        match text.strip_suffix('x') {
            _ if text == "all" => Some(Blocks::All),
            Some(factor) => number(factor).map(Blocks::PerMultiprocessor),
            None => number(text).map(Blocks::Exactly),
        }
        .ok_or_else(|| "all, a number like 264, or one per multiprocessor like 2x".to_owned())
    }
}

impl Blocks {
    pub(super) fn of(self, cuda: &Cuda) -> Option<u32> {
        match self {
            Blocks::All => None,
            Blocks::PerMultiprocessor(factor) => {
                Some(factor.saturating_mul(cuda.driver().gpu().multiprocessors))
            }
            Blocks::Exactly(blocks) => Some(blocks),
        }
    }
}

/// Returns the cases of the step bench, ordered by optimizer and then by precision. Within each precision, sizes
/// ascend, and the bucket with many segments is last.
pub(super) fn steps(options: &Arguments, cuda: &Cuda) -> instep::Result<Vec<Case>> {
    let mut rules = options.optimizers();
    rules.sort_by_key(|rule| rule.name() != "adamw");
    cases(options, cuda, &rules, Work::Step)
}

/// Returns the cases of the norm bench, ordered by precision. The buckets are made for SGD, because SGD has no states
/// and so takes the least memory.
pub(super) fn norms(options: &Arguments, cuda: &Cuda) -> instep::Result<Vec<Case>> {
    let rules = cases::Case::all().into_iter().filter(|rule| rule.name() == "sgd");
    cases(options, cuda, &rules.collect::<Vec<_>>(), Work::Norm)
}

fn cases(options: &Arguments, cuda: &Cuda, rules: &[cases::Case], work: Work) -> instep::Result<Vec<Case>> {
    let mut cases = Vec::new();
    for &rule in rules {
        let states = rule.optimizer()?.state_names().len();
        for &kind in &options.precision {
            let sizes = options.sizes.elements(kind, GPU_BYTES);
            let mut shapes: Vec<(usize, usize)> = sizes.iter().map(|elements| (*elements, 1)).collect();
            if options.sizes.largest(kind, GPU_BYTES) >= BUCKET_ELEMENTS as u64 {
                shapes.push((BUCKET_ELEMENTS, BUCKET_SEGMENTS));
            }
            for (elements, segments) in shapes {
                for blocks in options.gpu.blocks(&[Blocks::All]) {
                    for cache in [Cache::Beyond, Cache::Resident] {
                        let case = Case {
                            optimizer: (work == Work::Step).then(|| rule.name()),
                            precision: kind.name(),
                            rule,
                            kind,
                            work,
                            states,
                            bytes: elements as u64 * kind.precision().grad.bytes(),
                            elements,
                            segments,
                            cache,
                            max_blocks: blocks.of(cuda),
                            zeros: options.gpu.zeros,
                        };
                        if cache == Cache::Beyond || case.is_resident(cuda.driver().gpu().l2_bytes) {
                            cases.push(case);
                        }
                    }
                }
            }
        }
    }
    Ok(cases)
}

impl Case {
    /// Returns the name of the optimizer, or `norm` for a norm.
    pub(super) fn name(&self) -> &str {
        self.optimizer.as_deref().unwrap_or("norm")
    }

    /// Returns the total number of bytes of the arrays that the work accesses, without the scales of 8-bit states.
    fn footprint(&self) -> u64 {
        let precision = self.kind.precision();
        let (grad, states) = (precision.grad.bytes(), self.states as u64 * precision.moments.bytes());
        let stepped = if self.work == Work::Step {
            precision.param.bytes() + precision.master.bytes() + states
        } else {
            0
        };
        self.elements as u64 * (grad + stepped)
    }

    /// Returns whether the case's arrays, and the same number of bytes for a copy, fit into half of the cache.
    fn is_resident(&self, l2_bytes: u64) -> bool {
        4 * self.footprint() <= l2_bytes
    }

    fn buckets(&self, l2_bytes: u64) -> usize {
        match self.cache {
            Cache::Beyond => (4 * l2_bytes).div_ceil(self.footprint()).max(1) as usize,
            Cache::Resident => 1,
        }
    }

    /// Allocates the memory of this case.
    pub(super) fn launcher(&self, cuda: &Cuda) -> instep::Result<GpuLauncher> {
        let buckets = self.buckets(cuda.driver().gpu().l2_bytes);
        let length = self.elements / self.segments;
        let names = (0..buckets * self.segments).map(|k| format!("p{k}"));
        let layout = names.fold(Layout::builder(), |builder, name| builder.param(name, length)).build()?;
        let mut cuda = cuda.clone();
        if let Some(blocks) = self.max_blocks {
            cuda = cuda.max_blocks(blocks);
        }
        let case = GpuCase {
            cap_bytes: self.bytes,
            world_size: WORLD_SIZE,
            storage: storage(self.kind),
            clips: false,
        };
        GpuLauncher::new(&layout, &*self.rule.optimizer()?, case, &cuda)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_read_and_nonsense_is_not() {
        let blocks = ["all", "2x", "264"].map(|text| text.parse());
        assert_eq!(blocks, [Blocks::All, Blocks::PerMultiprocessor(2), Blocks::Exactly(264)].map(Ok));
        assert!(["", "0", "0x", "x", "none"].iter().all(|bad| bad.parse::<Blocks>().is_err()));
    }
}
