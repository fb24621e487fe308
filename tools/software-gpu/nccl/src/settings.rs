//! The settings from the environment: the seed, the version, and the calls that fail.
//!
//! `INSTEP_NCCL_FAIL=ncclAllReduce:2=1` makes the second call fail with code 1. `look:3=6` sets an error at the third
//! query of a communicator's state, and the error stays. Code 0 returns a false success for this query, and changes
//! nothing else. It deceives a program that does not query again. A query counts while a call that waits for no other
//! rank is in progress.

use std::collections::BTreeMap;
use std::env;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};

use crate::header::NCCL_VERSION_CODE;

static SEED: LazyLock<u64> =
    LazyLock::new(|| env::var("INSTEP_GPU_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(0));
static FAILURES: LazyLock<String> = LazyLock::new(|| env::var("INSTEP_NCCL_FAIL").unwrap_or_default());
static VERSION: LazyLock<u32> = LazyLock::new(|| {
    env::var("INSTEP_NCCL_VERSION").ok().and_then(|text| text.parse().ok()).unwrap_or(NCCL_VERSION_CODE)
});
static COUNTS: Mutex<BTreeMap<String, u64>> = Mutex::new(BTreeMap::new());
static CALLS: AtomicU64 = AtomicU64::new(0);

/// Returns the version that the library claims to be, in its header's encoding.
pub(crate) fn version() -> u32 {
    *VERSION
}

/// Returns whether this version may start the collectives of two communicators in another order than that of the calls.
pub(crate) fn is_unordered() -> bool {
    let by_variable = || env::var("NCCL_LAUNCH_ORDER_IMPLICIT").as_deref() == Ok("1");
    version() < 22600 || version() < 23100 && !by_variable()
}

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
