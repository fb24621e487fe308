//! A trainer that only passes time: forward in order of registration, backward in the reverse.
//!
//! It makes the calls of a real trainer, in the same order. Where ranks share parameters out, it unshards the current bucket
//! and the next one, and reshards the one before.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use instep::op::Memory;
use instep::{Device, Foresight, Layout, ParamId, Stepper};

use super::speeds::Speeds;
use crate::Failure;

/// The most bytes that each memory has held.
#[derive(Default)]
pub(super) struct Peaks(pub(super) BTreeMap<Memory, u64>);

impl Peaks {
    fn note<D: Device>(&mut self, stepper: &Stepper<D>) {
        for (memory, bytes) in stepper.memory() {
            let peak = self.0.entry(memory).or_default();
            *peak = (*peak).max(bytes);
        }
    }
}

/// The position of a trainer that unshards buckets.
#[derive(Default)]
pub(super) struct Walk {
    at: Option<u32>,
}

impl Walk {
    /// The current bucket and the next one.
    pub(super) const MOST: NonZeroU32 = NonZeroU32::MIN.saturating_add(1);

    /// Comes to a parameter. Returns whether its bucket is another one than before.
    pub(super) fn arrive<D: Device>(
        &mut self,
        stepper: &mut Stepper<D>,
        id: ParamId,
        is_forward: bool,
    ) -> instep::Result<bool> {
        let bucket = stepper.plan().segment_of(stepper.layout().index(id)?).bucket;
        if !stepper.plan().shards_params() || self.at == Some(bucket) {
            return Ok(false);
        }
        if let Some(last) = self.at.replace(bucket) {
            stepper.reshard(last)?;
        }
        stepper.unshard(bucket)?;
        // Buckets are filled from the last parameter back.
        let next = if is_forward { bucket.checked_sub(1) } else { Some(bucket + 1) };
        if let Some(next) = next.filter(|next| (*next as usize) < stepper.plan().buckets().len()) {
            stepper.unshard(next)?;
        }
        Ok(true)
    }
}

/// Foresees one pass.
pub(super) fn train(
    stepper: &mut Foresight,
    layout: &Layout,
    speeds: &Speeds,
    peaks: &mut Peaks,
) -> Result<(), Failure> {
    let elements = |id: ParamId| Ok::<u64, Failure>(layout.parameter(id)?.len);
    let mut walk = Walk::default();
    peaks.note(stepper);
    for id in layout.ids() {
        if walk.arrive(stepper, id, true)? {
            peaks.note(stepper);
        }
        stepper.touch(id)?;
        stepper.compute(speeds.compute_ns(2, elements(id)?));
    }
    stepper.begin()?.detach();
    for id in layout.ids().rev() {
        if walk.arrive(stepper, id, false)? {
            peaks.note(stepper);
        }
        stepper.compute(speeds.compute_ns(4, elements(id)?));
        stepper.touch(id.grad())?;
        stepper.grad_ready(id)?;
    }
    stepper.finish()?;
    Ok(())
}
