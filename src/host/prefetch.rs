//! Whether a step prefetches, which this machine is asked: it helps some CPUs and slows others by a fifth.
//!
//! The hardware's own prefetchers stop at every page of every stream. On some CPUs a prefetch keeps the next page's lines
//! coming; on others it only takes the place of loads. One short measurement per process decides, and no bit depends on it.

use std::sync::OnceLock;
use std::time::Instant;

use crate::error::{Error, Result};
use crate::host::kernels::Kernels;

/// How far ahead a step prefetches where it does: a few hundred nanoseconds of its own.
pub(crate) const AHEAD_BYTES: u64 = 2048;

/// Memories that are shorter than this in sum lie in a cache, where nothing is to be asked for.
const BEYOND_CACHE: u64 = 32 << 20;

/// Elements of each of the four arrays of the measurement, 64 MiB together.
const LENGTH: usize = 4 << 20;

/// Rounds of the measurement; the fastest counts, since whatever disturbs one makes it slower.
const ROUNDS: usize = 3;

/// Returns how far ahead a step of `memory_bytes` prefetches; 0: not at all. `INSTEP_PREFETCH` comes first.
///
/// # Errors
/// `Config` if the variable is neither `on` nor `off`.
pub(crate) fn ahead_bytes(kernels: Kernels, memory_bytes: u64) -> Result<u64> {
    static MEASURED: OnceLock<u64> = OnceLock::new();
    let Some(text) = std::env::var_os("INSTEP_PREFETCH") else {
        let is_beyond = memory_bytes >= BEYOND_CACHE;
        return Ok(if is_beyond { *MEASURED.get_or_init(|| measure(kernels)) } else { 0 });
    };
    match &*text.to_string_lossy() {
        "on" => Ok(AHEAD_BYTES),
        "off" => Ok(0),
        other => {
            Err(Error::config("INSTEP_PREFETCH", other, "is no choice", "use on or off, or leave it unset"))
        }
    }
}

/// Runs the memory traffic of a step with and without prefetches, and returns what was faster.
fn measure(kernels: Kernels) -> u64 {
    // Starts as arenas have them.
    const STAGGER: usize = 1024 / size_of::<f32>();
    let mut memory = vec![1.0f32; 4 * (LENGTH + STAGGER)];
    let mut arrays = memory.chunks_exact_mut(LENGTH + STAGGER);
    let mut arrays: [&mut [f32]; 4] = std::array::from_fn(|_| arrays.next().unwrap_or_default());
    let mut fastest = [u128::MAX; 2];
    for _ in 0..ROUNDS {
        for (fastest, ahead_bytes) in fastest.iter_mut().zip([0, AHEAD_BYTES]) {
            let start = Instant::now();
            kernels.stream(&mut arrays, ahead_bytes);
            *fastest = start.elapsed().as_nanos().min(*fastest);
        }
    }
    if fastest[1] < fastest[0] { AHEAD_BYTES } else { 0 }
}
