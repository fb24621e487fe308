//! The cases of the step bench: sizes, in cache or beyond it, and limits on blocks.
//!
//! AdamW comes first, because a run may be cut off. This file does not know how much memory there is; the bench reports a
//! case that does not fit.

use std::str::FromStr;

use instep::Layout;
use instep::bench::{GpuCase, GpuLauncher, Work};
use instep::cuda::Cuda;
use serde::Serialize;

use crate::bench::Arguments;
use crate::bench::cases::{self, WORLD_SIZE};
use crate::bench::precisions::{Kind, storage};

/// Number of segments in a typical DDP bucket: 25 MiB of 50 parameters.
const BUCKET_SEGMENTS: usize = 50;
const BUCKET_ELEMENTS: usize = (25 << 20) / 4;
/// A multiple of this many elements needs no padding.
pub(super) const GRAIN: usize = 256 * WORLD_SIZE as usize;

/// Most thread blocks of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blocks {
    All,
    PerMultiprocessor(u32),
    Exactly(u32),
}

/// Whether a step finds its bucket in the L2 cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Cache {
    /// Never: the step rotates through buckets of four times the cache's size.
    Beyond,
    /// Always: the step repeats one bucket that fits, with its copy, into half of the cache.
    Resident,
}

/// One line of the table.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Case {
    /// Null for the norm, which knows no optimizer.
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
    pub(super) elements: usize,
    pub(super) segments: usize,
    pub(super) cache: Cache,
    /// Null: as many as the GPU holds at a time.
    pub(super) max_blocks: Option<u32>,
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
            Blocks::PerMultiprocessor(factor) => Some(factor.saturating_mul(cuda.driver().multiprocessors())),
            Blocks::Exactly(blocks) => Some(blocks),
        }
    }
}

/// A number of elements, with or without Ki, Mi or Gi.
pub(super) fn parse_elements(text: &str) -> Result<usize, String> {
    let units = [("Ki", 10), ("Mi", 20), ("Gi", 30)];
    let unit = units.iter().find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, *shift)));
    let (digits, shift) = unit.unwrap_or((text, 0));
    let elements = digits.parse::<usize>().ok().and_then(|n| n.checked_mul(1 << shift));
    elements
        .filter(|n| *n > 0 && n.is_multiple_of(GRAIN))
        .ok_or_else(|| format!("a multiple of {GRAIN}, like 64Ki or 1Mi"))
}

/// All steps: optimizer by optimizer and precision by precision, sizes ascending, then the bucket of many segments.
pub(super) fn steps(options: &Arguments, cuda: &Cuda) -> instep::Result<Vec<Case>> {
    let mut rules = options.optimizers();
    rules.sort_by_key(|rule| rule.name() != "adamw");
    cases(options, cuda, &rules, Work::Step)
}

/// All norms, likewise. SGD steps these buckets, because it has no states that take memory.
pub(super) fn norms(options: &Arguments, cuda: &Cuda) -> instep::Result<Vec<Case>> {
    let rules = cases::Case::all().into_iter().filter(|rule| rule.name() == "sgd");
    cases(options, cuda, &rules.collect::<Vec<_>>(), Work::Norm)
}

fn cases(options: &Arguments, cuda: &Cuda, rules: &[cases::Case], work: Work) -> instep::Result<Vec<Case>> {
    let gpu = &options.gpu;
    let largest = gpu.max_elements.unwrap_or(256 << 20);
    let factor = usize::from(gpu.factor.unwrap_or(4));
    let sizes = std::iter::successors(gpu.min_elements.or(Some(64 << 10)), |n| n.checked_mul(factor));
    let mut shapes: Vec<(usize, usize)> =
        sizes.take_while(|elements| *elements <= largest).map(|elements| (elements, 1)).collect();
    if largest >= BUCKET_ELEMENTS {
        shapes.push((BUCKET_ELEMENTS, BUCKET_SEGMENTS));
    }
    let mut cases = Vec::new();
    for &rule in rules {
        let states = rule.optimizer()?.state_names().len();
        for &kind in &options.precision {
            for &(elements, segments) in &shapes {
                for blocks in gpu.blocks(&[Blocks::All]) {
                    for cache in [Cache::Beyond, Cache::Resident] {
                        let case = Case {
                            optimizer: (work == Work::Step).then(|| rule.name()),
                            precision: kind.name(),
                            rule,
                            kind,
                            work,
                            states,
                            elements,
                            segments,
                            cache,
                            max_blocks: blocks.of(cuda),
                        };
                        if cache == Cache::Beyond || case.is_resident(cuda.driver().l2_bytes()) {
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
    /// The optimizer's name, or what else is timed.
    pub(super) fn name(&self) -> &str {
        self.optimizer.as_deref().unwrap_or("norm")
    }

    /// Bytes of all arrays that the work touches, without the scales of 8-bit states.
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

    /// Whether the case and a copy that moves as many bytes fit into half of the cache.
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
        let buckets = self.buckets(cuda.driver().l2_bytes());
        let length = self.elements / self.segments;
        let names = (0..buckets * self.segments).map(|k| format!("p{k}"));
        let layout = names.fold(Layout::builder(), |builder, name| builder.param(name, length)).build()?;
        let mut cuda = cuda.clone();
        if let Some(blocks) = self.max_blocks {
            cuda = cuda.max_blocks(blocks);
        }
        let case = GpuCase {
            cap_bytes: self.elements as u64 * self.kind.precision().grad.bytes(),
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
    fn sizes_and_blocks_are_read_and_nonsense_is_not() {
        assert_eq!(parse_elements("64Ki"), Ok(65_536));
        assert_eq!(parse_elements("6553600"), Ok(BUCKET_ELEMENTS));
        for bad in ["", "0", "Ki", "1Ki", "100", "-2Ki", "64ki", "99999999999999Gi"] {
            assert!(parse_elements(bad).is_err(), "{bad}");
        }
        let blocks = ["all", "2x", "264"].map(|text| text.parse());
        assert_eq!(blocks, [Blocks::All, Blocks::PerMultiprocessor(2), Blocks::Exactly(264)].map(Ok));
        assert!(["", "0", "0x", "x", "none"].iter().all(|bad| bad.parse::<Blocks>().is_err()));
    }
}
