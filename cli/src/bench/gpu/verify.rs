//! Fills the memory of a case. Before the case is timed, this module compares the result of two steps with the result
//! on the host, byte by byte.
//!
//! Values repeat after [`PERIOD`] elements, so the host computes one period for any number of elements. If an update
//! depends on the whole parameter, the host computes the whole parameter. Cases of up to [`WHOLE`] elements are
//! compared in full. In larger cases, only the ranges that [`tiles`] returns are compared. A full comparison would take
//! seconds, and the GPU's clock rate would drop meanwhile. With stochastic rounding, only the start of the first
//! parameter is compared, in cases of any size.

use std::ops::Range;

use instep::bench::{GpuLauncher, Launcher};
use instep::op::Memory;
use instep::{Isa, Layout};
use serde::Serialize;

use super::sweep::Case;
use crate::bench::cases::{self, WORLD_SIZE, gradient, parameter};
use crate::bench::precisions::{Kind, storage};
use crate::bench::sizes::GRAIN;

const STEPS: usize = 2;
/// The number of elements after which gradients and parameters repeat. This number is a multiple of the length of a
/// tile, and of the length of a block of 8-bit states.
const PERIOD: usize = 1 << 20;
/// Cases of up to this number of elements are compared in full, except with stochastic rounding.
const WHOLE: u64 = 16 << 20;
/// The number of ranges that are compared in a case of more than [`WHOLE`] elements without stochastic rounding. Each
/// range is one period long.
const TILES: u64 = 16;
const SEED: u64 = 1;

/// The result of a comparison: the number of compared elements, and the first difference.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Compared {
    /// The number of elements that were compared in each kind of tensor ([`Memory`]).
    pub(super) elements: u64,
    /// The number of all elements of each kind of tensor.
    pub(super) of: u64,
    pub(super) sample: String,
    /// The first difference as a text; null if all bytes equal those of the host.
    pub(super) mismatch: Option<String>,
}

/// Computes the host's results for one optimizer and precision.
pub(super) struct Expected {
    rule: cases::Case,
    kind: Kind,
    zeros: bool,
}

impl Expected {
    pub(super) fn new(case: &Case) -> Expected {
        Expected { rule: case.rule, kind: case.kind, zeros: case.zeros }
    }

    /// Fills gradients, parameters and their masters.
    pub(super) fn fill(&self, launcher: &mut GpuLauncher) -> instep::Result<()> {
        let all = launcher.plan().arena_len();
        let period = all.min(PERIOD as u64);
        let mut host = self.host(0, period as usize, 1)?;
        for memory in Memory::of_tensors(host.plan(), 0) {
            let periods = WHOLE.min(all) / period;
            let (bytes, part) = (host.bytes(memory, 0).repeat(periods as usize), period * periods);
            for first in (0..all).step_by(part as usize) {
                let count = part.min(all - first);
                let length = bytes.len() as u64 * count / part;
                launcher.write(memory, first..first + count, &bytes[..length as usize])?;
            }
        }
        Ok(())
    }

    /// Steps all buckets of a filled launcher twice, and compares the results with those of the same steps on the host.
    pub(super) fn compare(&self, case: &Case, launcher: &mut GpuLauncher) -> instep::Result<Compared> {
        for _ in 0..STEPS {
            launcher.step_all()?;
        }
        let (plan, period) = (launcher.plan(), PERIOD as u64);
        let (all, is_scaled) = (plan.arena_len(), self.rule.is_scaled());
        // The host computes each unit separately. A unit is a whole parameter if updates depend on the whole parameter,
        // or else a period.
        let (units, ranges, sample): (Vec<Range<u64>>, _, _) = if self.kind.name().contains("stochastic") {
            // Random bits depend on an element's place in the layout, so the host has the same random bits only for the
            // first parameter.
            let first = plan.segment_of(0);
            let count = if is_scaled { first.len } else { first.len.min(period) };
            let unit = first.start..first.start + count;
            (vec![unit.clone()], vec![unit], "the start of the first parameter".to_owned())
        } else {
            let units = if is_scaled {
                plan.segments().iter().map(|s| s.start..s.start + s.len).collect()
            } else {
                (0..all).step_by(PERIOD).map(|first| first..all.min(first + period)).collect()
            };
            let sample = match all {
                ..=WHOLE => "all".to_owned(),
                _ => format!("first and last tile, {} at random with seed {SEED}", TILES - 2),
            };
            (units, tiles(all), sample)
        };
        let mut compared = Compared {
            elements: ranges.iter().map(|r| r.end - r.start).sum(),
            of: all,
            sample,
            mismatch: None,
        };
        let mut host: Option<((u64, u64), Launcher)> = None;
        for unit in units {
            let parts = ranges.iter().map(|r| r.start.max(unit.start)..r.end.min(unit.end));
            let parts: Vec<Range<u64>> = parts.filter(|part| part.start < part.end).collect();
            if parts.is_empty() {
                continue;
            }
            let key = (unit.start % period, unit.end - unit.start);
            if host.as_ref().is_none_or(|(of, _)| *of != key) {
                let mut made =
                    self.host(key.0, key.1 as usize, instep::Pool::from_environment()?.threads())?;
                for _ in 0..STEPS {
                    made.step(0)?;
                }
                host = Some((key, made));
            }
            let Some((_, host)) = &mut host else { continue };
            for part in parts {
                let found = difference(case, launcher, host, &unit, part)?;
                compared.mismatch = compared.mismatch.or(found);
            }
        }
        Ok(compared)
    }

    /// Makes a launcher on the host with one parameter of `len` elements. The parameter gets the values of the case's
    /// elements `first` to `first + len - 1`.
    fn host(&self, first: u64, len: usize, threads: usize) -> instep::Result<Launcher> {
        let layout = Layout::builder().param("w", len).build()?;
        let optimizer = self.rule.optimizer()?;
        let storage = storage(self.kind);
        let mut host =
            Launcher::new(&layout, &*optimizer, u64::MAX, WORLD_SIZE, storage, Isa::best(), threads)?;
        let place = |k: usize| (first as usize + k) % PERIOD;
        host.fill(Memory::Params, |k| parameter(place(k)))?;
        host.fill(Memory::Grads, |k| if self.zeros { 0.0 } else { gradient(place(k)) })?;
        Ok(host)
    }
}

/// Compares the elements `part` of every tensor except the gradients with those of the host, and returns the first
/// difference.
fn difference(
    case: &Case,
    launcher: &mut GpuLauncher,
    host: &mut Launcher,
    unit: &Range<u64>,
    part: Range<u64>,
) -> instep::Result<Option<String>> {
    let elements = unit.end - unit.start;
    for memory in Memory::of_tensors(launcher.plan(), case.states).filter(|memory| *memory != Memory::Grads) {
        let wanted = host.bytes(memory, 0);
        // Parts begin and end at whole blocks, and therefore at whole bytes.
        let at = |element: u64| (wanted.len() as u64 * (element - unit.start) / elements) as usize;
        let wanted = &wanted[at(part.start)..at(part.end)];
        let mut got = vec![0; wanted.len()];
        launcher.read(memory, part.clone(), &mut got)?;
        if got == wanted {
            continue;
        }
        let count = got.iter().zip(wanted).filter(|(a, b)| a != b).count();
        let first = got.iter().zip(wanted).position(|(a, b)| a != b).unwrap_or_default();
        let element = part.start + first as u64 * (part.end - part.start) / got.len() as u64;
        let (name, precision) = (case.name(), &case.precision);
        return Ok(Some(format!(
            "{name} {precision} {memory:?} element {element}: byte {:#04x} on the GPU, {:#04x} on the host, and \
             {count} of {} bytes from element {} on differ; report this as a bug",
            got[first],
            wanted[first],
            got.len(),
            part.start,
        )));
    }
    Ok(None)
}

/// Returns the ranges to compare: either all elements, or [`TILES`] ranges of one period. One range is at the start,
/// and one is at the end. The elements between them are divided into equal parts, with one range at a random place in
/// each part.
fn tiles(all: u64) -> Vec<Range<u64>> {
    if all <= WHOLE {
        return Vec::from([Range { start: 0, end: all }]);
    }
    let (tile, grain) = (PERIOD as u64, GRAIN as u64);
    let share = (all - 2 * tile) / (TILES - 2);
    let between = (0..TILES - 2).map(|k| {
        let room = (share - tile) / grain + 1;
        (tile + k * share + random(SEED.wrapping_add(k)) % room * grain) / grain * grain
    });
    let firsts = [0].into_iter().chain(between).chain([all - tile]);
    firsts.map(|first| first..first + tile).collect()
}

/// Returns a random number that SplitMix64 (Steele, Lea and Flood 2014) computes from `seed`.
fn random(seed: u64) -> u64 {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_has_both_ends_and_tiles_over_the_whole_range_that_do_not_overlap() {
        assert_eq!(tiles(WHOLE), [Range { start: 0, end: WHOLE }]);
        for all in [WHOLE + 2048, 64 << 20, 256 << 20, (2048 << 20) + 2048] {
            let tiles = tiles(all);
            assert_eq!(tiles.len() as u64, TILES);
            assert_eq!((tiles[0].start, tiles[TILES as usize - 1].end), (0, all));
            let share = all / (TILES - 2);
            for (a, b) in tiles.iter().zip(&tiles[1..]) {
                assert!(a.end <= b.start && b.start - a.end < 2 * share, "{a:?} {b:?}");
                assert!(b.start % GRAIN as u64 == 0 && b.end - b.start == PERIOD as u64);
            }
        }
    }
}
