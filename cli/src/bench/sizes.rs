//! The options -b, -e and -f define a sweep over bucket sizes, in bytes of gradients. nccl-tests has the same options.
//!
//! Sizes are rounded up so that buckets have no padding. The tables show the rounded sizes.

use super::cases::{Cache, Shape, WORLD_SIZE};
use super::precisions::Kind;
use crate::Failure;

/// A bucket needs no padding if its number of elements is a multiple of this number.
pub(super) const GRAIN: usize = 256 * WORLD_SIZE as usize;

/// The default ratio of one size to the previous one.
const USUAL_FACTOR: u64 = 4;

/// The default smallest and largest size of a sweep on the host.
pub(super) const HOST_BYTES: [u64; 2] = [256 << 10, 256 << 20];
pub(super) const GPU_BYTES: [u64; 2] = [256 << 10, 1 << 30];

/// Sizes of the buckets in the step bench, and in the norm bench on a GPU.
#[derive(Debug, clap::Args)]
pub(super) struct Sizes {
    /// Smallest bucket of a sweep in bytes of gradients, such as 8, 256K, 4M or 1G [default: 256K; on the host, no
    /// sweep without -b, -e or -f].
    #[arg(short = 'b', long, value_name = "BYTES", value_parser = parse_bytes)]
    pub(super) min_bytes: Option<u64>,
    /// Largest bucket of a sweep [default: 1G; on the host, 256M].
    #[arg(short = 'e', long, value_name = "BYTES", value_parser = parse_bytes)]
    pub(super) max_bytes: Option<u64>,
    /// Ratio of one size of a sweep to the previous one [default: 4].
    #[arg(short = 'f', long, value_name = "N", value_parser = clap::value_parser!(u16).range(2..))]
    pub(super) step_factor: Option<u16>,
}

impl Sizes {
    pub(super) fn is_given(&self) -> bool {
        self.min_bytes.is_some() || self.max_bytes.is_some() || self.step_factor.is_some()
    }

    /// Refuses a sweep with a smallest size above its largest.
    pub(super) fn refuse_empty(&self, usual: [u64; 2]) -> Result<(), Failure> {
        let [min, max] = self.ends(usual);
        if min > max {
            return Err(Failure::Bench(format!("-b: larger than -e, {min} and {max} bytes; give both")));
        }
        Ok(())
    }

    /// Returns the number of elements of each bucket, ascending.
    pub(super) fn elements(&self, kind: Kind, usual: [u64; 2]) -> Vec<usize> {
        let [min, max] = self.ends(usual);
        let factor = self.step_factor.map_or(USUAL_FACTOR, u64::from);
        let grain_bytes = GRAIN as u64 * kind.precision().grad.bytes();
        let sizes = std::iter::successors(Some(min), |bytes| bytes.checked_mul(factor));
        let sizes = sizes.take_while(|bytes| *bytes <= max);
        let mut elements: Vec<usize> =
            sizes.map(|bytes| bytes.div_ceil(grain_bytes) as usize * GRAIN).collect();
        // Sizes below the grain are all rounded up to it.
        elements.dedup();
        elements
    }

    /// Returns the number of elements of the largest bucket that a sweep may have.
    pub(super) fn largest(&self, kind: Kind, usual: [u64; 2]) -> u64 {
        self.ends(usual)[1] / kind.precision().grad.bytes()
    }

    /// Returns the shapes of a sweep on the host. Each size has a shape with [`Cache::Beyond`]. If the bucket fits into
    /// a quarter of the cache, the size also has a shape with [`Cache::Resident`].
    pub(super) fn shapes(&self, kind: Kind, bytes_per_element: u64, cache_bytes: u64) -> Vec<Shape> {
        let both = |elements: usize| {
            let is_resident = 4 * elements as u64 * bytes_per_element <= cache_bytes;
            let resident = is_resident.then_some(Shape::Sized(elements, Cache::Resident));
            [Shape::Sized(elements, Cache::Beyond)].into_iter().chain(resident)
        };
        self.elements(kind, HOST_BYTES).into_iter().flat_map(both).collect()
    }

    fn ends(&self, [min, max]: [u64; 2]) -> [u64; 2] {
        [self.min_bytes.unwrap_or(min), self.max_bytes.unwrap_or(max)]
    }
}

/// Parses a number of bytes, which may end in K, M or G. These units are powers of 1024, as in nccl-tests.
fn parse_bytes(text: &str) -> Result<u64, String> {
    let units = [("K", 10), ("M", 20), ("G", 30)];
    let unit = units.iter().find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, *shift)));
    let (digits, shift) = unit.unwrap_or((text, 0));
    let digits = Some(digits).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()));
    let bytes = digits.and_then(|digits| digits.parse::<u64>().ok()?.checked_mul(1 << shift));
    // No address space is larger, and a sum of such sizes does not overflow.
    bytes
        .filter(|bytes| (1..=1 << 48).contains(bytes))
        .ok_or_else(|| "a number like 8, 256K, 4M or 1G".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_nonsense_is_not() {
        let read = ["1", "8", "64K", "3M", "1G"].map(parse_bytes);
        assert_eq!(read, [1, 8, 64 << 10, 3 << 20, 1 << 30].map(Ok));
        for bad in ["", "0", "K", "-2K", "+2", "64k", "1.5M", "1Ki", "99999999999999G", "1T"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_sweep_counts_bytes_of_gradients_and_rounds_up_to_whole_buckets() {
        let sweep = |min, max, factor| Sizes { min_bytes: min, max_bytes: max, step_factor: factor };
        let sizes = sweep(Some(8), Some(64 << 10), Some(2));
        assert_eq!(sizes.elements(Kind::F32, [0, 0]), [2048, 4096, 8192, 16_384]);
        assert_eq!(sizes.elements(Kind::Bf16, [0, 0]), [2048, 4096, 8192, 16_384, 32_768]);
        let usual = sweep(None, None, None);
        assert_eq!(usual.elements(Kind::F32, [8 << 10, 128 << 10]), [2048, 8192, 32_768]);
        assert!(!usual.is_given() && sizes.is_given());
        assert!(sweep(Some(2), Some(1), None).elements(Kind::F32, [0, 0]).is_empty());
        // Half of the cache has room for a bucket and as many bytes again.
        let shapes = sizes.shapes(Kind::F32, 16, 4 * 16 * 4096);
        let cached = shapes.iter().filter(|shape| shape.cache() == Cache::Resident).count();
        assert_eq!((shapes.len(), cached), (4 + 2, 2));
    }
}
