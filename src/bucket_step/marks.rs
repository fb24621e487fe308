//! Records which buckets were added to a norm. The records last from the norm's `begin` to its next `begin`.
//!
//! After a norm has begun, each bucket is added once and then stepped once. If an added bucket is stepped without the
//! norm, it cannot be stepped with the norm any more. At least one bucket must be added before the decision. If the
//! caller has called `sum`, the sum may also contain other gradients. Two more calls are then accepted: a decision
//! before any bucket was added, and a step of a bucket that was added to another norm.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};

/// The state of a bucket with respect to norms.
#[derive(Debug)]
pub(super) struct BucketMark {
    /// Unique among all buckets that this process ever builds.
    id: u64,
    /// Number of steps so far, with or without a norm.
    steps: u64,
    /// Whether the bucket was added to a norm since its last step.
    is_measured: bool,
}

#[derive(Debug)]
struct Added {
    /// The bucket's number of steps when it was added.
    steps: u64,
    is_stepped: bool,
}

/// The state of a norm with respect to buckets.
#[derive(Debug, Default)]
pub(super) struct NormMarks {
    /// The added buckets, by id. `begin` empties the map but does not free its memory, so the same number of buckets
    /// can be added again without an allocation.
    buckets: HashMap<u64, Added>,
    is_sum_taken: bool,
}

impl BucketMark {
    pub(super) fn new() -> BucketMark {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        BucketMark { id: NEXT.fetch_add(1, Ordering::Relaxed), steps: 0, is_measured: false }
    }

    /// Records a step of the bucket.
    pub(super) fn step(&mut self) {
        self.steps += 1;
        self.is_measured = false;
    }
}

impl NormMarks {
    pub(super) fn begin(&mut self) {
        self.buckets.clear();
        self.is_sum_taken = false;
    }

    pub(super) fn take_sum(&mut self) {
        self.is_sum_taken = true;
    }

    /// Returns an error if the bucket was already added to this norm.
    pub(super) fn refuse_added(&self, bucket: &BucketMark, name: impl FnOnce() -> String) -> Result<()> {
        if !self.buckets.contains_key(&bucket.id) {
            return Ok(());
        }
        Err(Error::order(name(), "added to this norm already", "add each bucket once"))
    }

    pub(super) fn add(&mut self, bucket: &mut BucketMark) {
        bucket.is_measured = true;
        self.buckets.insert(bucket.id, Added { steps: bucket.steps, is_stepped: false });
    }

    /// Returns an error if no bucket was added and `sum` was not called.
    pub(super) fn refuse_empty(&self) -> Result<()> {
        if self.is_sum_taken || !self.buckets.is_empty() {
            return Ok(());
        }
        Err(Error::order("norm", "no bucket was added", "add the gradients of each bucket first"))
    }

    /// Returns an error if the bucket was not added to this norm, or if it was stepped after it was added.
    pub(super) fn refuse_step(&self, bucket: &BucketMark, name: impl FnOnce() -> String) -> Result<()> {
        let (wrong, remedy) = match self.buckets.get(&bucket.id) {
            Some(added) if added.is_stepped => {
                ("stepped by this decision already", "begin the norm anew for its next gradients")
            }
            Some(added) if added.steps == bucket.steps => return Ok(()),
            Some(_) => {
                ("stepped since it was added to this norm", "begin the norm anew for its next gradients")
            }
            None if self.is_sum_taken && bucket.is_measured => return Ok(()),
            None => ("not added to this norm", "add its gradients before the decision"),
        };
        Err(Error::order(name(), wrong, remedy))
    }

    pub(super) fn step(&mut self, bucket: &mut BucketMark) {
        bucket.step();
        self.buckets.insert(bucket.id, Added { steps: bucket.steps, is_stepped: true });
    }
}
