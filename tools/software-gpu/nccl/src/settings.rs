//! The settings from the environment: the seed, and the calls that fail.
//!
//! `INSTEP_NCCL_FAIL=ncclAllReduce:2=1` makes the second call fail with code 1. `look:3=6` sets an error at the third
//! query of a communicator's state, and the error stays. Code 0 returns a false success for this query, and changes
//! nothing else. It deceives a program that does not query again. A query counts while a call that waits for no other
//! rank is in progress.

use std::collections::BTreeMap;
use std::env;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};

static SEED: LazyLock<u64> =
    LazyLock::new(|| env::var("INSTEP_GPU_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(0));
static FAILURES: LazyLock<String> = LazyLock::new(|| env::var("INSTEP_NCCL_FAIL").unwrap_or_default());
static COUNTS: Mutex<BTreeMap<String, u64>> = Mutex::new(BTreeMap::new());
static CALLS: AtomicU64 = AtomicU64::new(0);

/// Returns for how many queries the next call stays in progress, at least one.
pub(crate) fn looks() -> u64 {
    let mixed = (*SEED * 31 + CALLS.fetch_add(1, Ordering::Relaxed)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    1 + (mixed >> 32) % 4
}

/// Counts a call, and returns the code with which it must fail, if any.
pub(crate) fn failure(call: &str) -> Option<u32> {
    if !FAILURES.contains(call) {
        return None;
    }
    let mut counts = COUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    let count = counts.entry(call.to_owned()).or_default();
    *count += 1;
    FAILURES.split(',').find_map(|word| {
        let (rest, code) = word.split_once('=')?;
        let (name, nth) = rest.split_once(':')?;
        (name == call && nth.parse() == Ok(*count)).then(|| code.parse().ok())?
    })
}
