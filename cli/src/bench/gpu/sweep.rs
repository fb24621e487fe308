//! The cases of the step bench: sizes, in cache or beyond it, and limits on blocks.
//!
//! Values are the host bench's functions of the index. This file does not know how much memory there is; the step bench
//! reports a case that does not fit.

use std::str::FromStr;

use instep::Layout;
use instep::bench::GpuLauncher;
use instep::cuda::Cuda;
use instep::op::Memory;
use serde::Serialize;

use crate::bench::Arguments;
use crate::bench::cases::{self, WORLD_SIZE, gradient, parameter};

/// Number of segments in a typical DDP bucket: 25 MiB of 50 parameters.
const BUCKET_SEGMENTS: usize = 50;
const BUCKET_ELEMENTS: usize = (25 << 20) / 4;
/// Gradients and parameters repeat after this prime number of elements.
pub(super) const PERIODS: (usize, usize) = (613, 977);
/// Number of elements that are filled or compared at a time.
pub(super) const PART: usize = 16 << 20;
/// A multiple of this many elements needs no padding.
const GRAIN: usize = 256 * WORLD_SIZE as usize;

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
    pub(super) optimizer: String,
    #[serde(skip)]
    pub(super) rule: cases::Case,
    #[serde(skip)]
    states: usize,
    pub(super) elements: usize,
    pub(super) segments: usize,
    pub(super) cache: Cache,
    /// Null: one per 2,048 elements.
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

/// All lines: optimizer by optimizer, sizes ascending, then the bucket of many segments.
pub(super) fn cases(options: &Arguments, cuda: &Cuda) -> instep::Result<Vec<Case>> {
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
    for rule in options.optimizers() {
        let states = rule.optimizer()?.state_names().len();
        for &(elements, segments) in &shapes {
            for blocks in gpu.blocks(&[Blocks::All]) {
                for cache in [Cache::Beyond, Cache::Resident] {
                    let max_blocks = blocks.of(cuda);
                    let optimizer = rule.name();
                    let case = Case { optimizer, rule, states, elements, segments, cache, max_blocks };
                    if cache == Cache::Beyond || case.is_resident(cuda.driver().l2_bytes()) {
                        cases.push(case);
                    }
                }
            }
        }
    }
    Ok(cases)
}

impl Case {
    /// Bytes of all arrays.
    fn footprint(&self) -> u64 {
        (self.elements * 4 * (2 + self.states)) as u64
    }

    /// Whether the case and a copy that moves as many bytes as a step fit into half of the cache.
    fn is_resident(&self, l2_bytes: u64) -> bool {
        4 * self.footprint() <= l2_bytes
    }

    fn buckets(&self, l2_bytes: u64) -> usize {
        match self.cache {
            Cache::Beyond => (4 * l2_bytes).div_ceil(self.footprint()).max(1) as usize,
            Cache::Resident => 1,
        }
    }

    /// Allocates and fills the memory of this case.
    pub(super) fn launcher(&self, cuda: &Cuda) -> instep::Result<GpuLauncher> {
        let buckets = self.buckets(cuda.driver().l2_bytes());
        let length = self.elements / self.segments;
        let names = (0..buckets * self.segments).map(|k| format!("p{k}"));
        let layout = names.fold(Layout::builder(), |builder, name| builder.param(name, length)).build()?;
        let mut cuda = cuda.clone();
        if let Some(blocks) = self.max_blocks {
            cuda = cuda.max_blocks(blocks);
        }
        let cap_bytes = (self.elements * 4) as u64;
        let optimizer = self.rule.optimizer()?;
        let mut launcher = GpuLauncher::new(&layout, &*optimizer, cap_bytes, WORLD_SIZE, &cuda)?;
        fill(&mut launcher, Memory::Grads, PERIODS.0, gradient)?;
        fill(&mut launcher, Memory::Params, PERIODS.1, parameter)?;
        Ok(launcher)
    }
}

/// Writes `value(k)`, which repeats after `period` elements, to every element `k`.
fn fill(
    launcher: &mut GpuLauncher,
    memory: Memory,
    period: usize,
    value: impl Fn(usize) -> f32,
) -> instep::Result<()> {
    let all = launcher.plan().arena_len() as usize;
    let values: Vec<f32> = (0..all.min(PART) + period).map(value).collect();
    for first in (0..all).step_by(PART) {
        let count = (all - first).min(PART);
        launcher.write(memory, first as u64, &values[first % period..][..count])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_repeat_after_their_periods() {
        for k in [0, 1, 612, 976, 5000, 598_900] {
            assert_eq!(gradient(k), gradient(k + PERIODS.0));
            assert_eq!(parameter(k), parameter(k + PERIODS.1));
        }
    }

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
