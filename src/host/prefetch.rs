//! Whether a step prefetches: a measurement on this machine decides, because it helps some CPUs and slows others.
//!
//! The hardware's own prefetchers stop at every page of every stream. On some CPUs a prefetch keeps the next page's lines
//! coming; on others it only takes the place of loads. One process measures once per instruction set, over 64 MiB. No bit
//! depends on it.

use std::sync::OnceLock;
use std::time::Instant;

use crate::error::{Error, Result};
use crate::host::kernels::{Isa, Kernels};
use crate::host::memories::Arena;
use crate::host::stagger::{PAGE, Stagger};

/// How far ahead of its loads a step prefetches, in each stream.
pub(crate) const AHEAD_BYTES: u64 = 2048;

/// Memories that are shorter than this in sum are taken to lie in a cache, where a prefetch has nothing to fetch.
const BEYOND_CACHE: u64 = 32 << 20;

/// Size of each of the four arrays of the measurement. A last-level cache that holds all four is what is then measured.
const BYTES: u64 = 16 << 20;

/// Rounds of the measurement; the fastest counts, since a disturbance makes a round slower, never faster.
const ROUNDS: usize = 3;

/// Returns how far ahead a step of `memory_bytes` prefetches; 0: not at all. `INSTEP_PREFETCH` comes first.
///
/// # Errors
/// `Config` if the variable is neither `on` nor `off`.
pub(crate) fn ahead_bytes(kernels: Kernels, memory_bytes: u64) -> Result<u64> {
    static MEASURED: [OnceLock<u64>; Isa::ALL.len()] = [const { OnceLock::new() }; Isa::ALL.len()];
    let Some(text) = std::env::var_os("INSTEP_PREFETCH") else {
        let is_beyond = memory_bytes >= BEYOND_CACHE;
        let measured = || *MEASURED[kernels.isa() as usize].get_or_init(|| measure(kernels).unwrap_or(0));
        return Ok(if is_beyond { measured() } else { 0 });
    };
    match &*text.to_string_lossy() {
        "on" => Ok(AHEAD_BYTES),
        "off" => Ok(0),
        other => {
            Err(Error::config("INSTEP_PREFETCH", other, "is no choice", "use on or off, or leave it unset"))
        }
    }
}

/// Runs the memory traffic of a step with and without prefetches, and returns what was faster: by more than noise is, if
/// it is the prefetches.
fn measure(kernels: Kernels) -> Result<u64> {
    let mut stagger = Stagger::default();
    // One allocation: freeing several smaller ones would teach some allocators to keep as much for later.
    let starts = [0, 1, 2, 3].map(|k| (k * (BYTES + PAGE) + stagger.next(BYTES)) as usize / size_of::<f32>());
    let mut arena = Arena::zeroed(4 * (BYTES + PAGE), 0)?;
    let length = BYTES as usize / size_of::<f32>();
    let mut arrays =
        arena.f32s().get_disjoint_mut(starts.map(|start| start..start + length)).unwrap_or_default();
    // Pages that nobody wrote are one page of zeros.
    arrays.iter_mut().for_each(|array| array.fill(1.0));
    let mut fastest = [u128::MAX; 2];
    for _ in 0..ROUNDS {
        for (fastest, ahead_bytes) in fastest.iter_mut().zip([0, AHEAD_BYTES]) {
            let start = Instant::now();
            kernels.stream(&mut arrays, ahead_bytes);
            *fastest = start.elapsed().as_nanos().min(*fastest);
        }
    }
    Ok(if fastest[1] * 100 < fastest[0] * 97 { AHEAD_BYTES } else { 0 })
}
