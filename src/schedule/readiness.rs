//! Tracks the hand-overs of the open pass, and determines which bucket may launch next.
//!
//! Buckets launch in index order, because all ranks must make collectives in the same order. If there are no
//! collectives to order, each bucket launches once it is complete. A parameter counts as handed over at the last of its
//! declared uses. A second hand-over is refused, because the trainer may have written into a gradient that is already
//! being reduced. No bucket waits for a frozen parameter, and a frozen parameter is never handed over.

use crate::error::{Error, Result};
use crate::layout::{Layout, Plan};

#[derive(Debug)]
pub(super) struct Readiness {
    /// Names for error messages.
    names: Vec<String>,
    uses: Vec<u32>,
    uses_left: Vec<u32>,
    pending: Vec<u32>,
    keeps_order: bool,
    /// The buckets that are complete and not launched, if buckets launch in any order.
    complete: Vec<u32>,
    next_bucket: u32,
    is_launched: Vec<bool>,
    /// Buckets launched in this micro-batch, in order. Only the last micro-batch of a pass launches buckets, unless
    /// each micro-batch is summed.
    launched: Vec<u32>,
    frozen: Vec<bool>,
    /// How many parameters of each bucket are not frozen.
    thawed: Vec<u32>,
    /// Whether each parameter was declared unused in this pass, and the number of such parameters.
    unused: Vec<bool>,
    unused_count: usize,
    /// Whether each parameter was declared unused in this pass without an earlier hand-over.
    left_out: Vec<bool>,
    /// Whether each parameter had a gradient in an earlier micro-batch of this pass, if each micro-batch is summed.
    contributed: Vec<bool>,
    /// The parameters handed over since the pass or micro-batch began, in order.
    arrivals: Vec<u32>,
}

impl Readiness {
    /// Returns the state in which no parameter is handed over.
    pub(super) fn new(layout: &Layout, plan: &Plan, keeps_order: bool) -> Self {
        let uses: Vec<u32> = layout.parameters().iter().map(|p| p.uses).collect();
        let thawed: Vec<u32> = plan.buckets().iter().map(|bucket| bucket.segments.len() as u32).collect();
        Readiness {
            names: layout.parameters().iter().map(|p| p.name.clone()).collect(),
            uses_left: uses.clone(),
            arrivals: Vec::with_capacity(uses.len()),
            frozen: vec![false; uses.len()],
            unused: vec![false; uses.len()],
            unused_count: 0,
            left_out: vec![false; uses.len()],
            contributed: vec![false; uses.len()],
            uses,
            pending: thawed.clone(),
            keeps_order,
            complete: Vec::with_capacity(thawed.len()),
            next_bucket: 0,
            is_launched: vec![false; thawed.len()],
            launched: Vec::with_capacity(thawed.len()),
            thawed,
        }
    }

    /// Opens a new pass.
    pub(super) fn reset(&mut self) {
        self.contributed.fill(false);
        self.go_on();
    }

    /// Opens the next micro-batch.
    pub(super) fn go_on(&mut self) {
        self.uses_left.copy_from_slice(&self.uses);
        self.pending.copy_from_slice(&self.thawed);
        self.next_bucket = 0;
        self.is_launched.fill(false);
        self.complete.clear();
        self.launched.clear();
        self.arrivals.clear();
        if std::mem::take(&mut self.unused_count) > 0 {
            self.unused.fill(false);
            self.left_out.fill(false);
        }
    }

    /// Records that no rank used a parameter, so the parameter's bucket no longer waits for its gradient. If buckets
    /// may launch in any order, this function does not make the bucket ready to launch. The caller may still be summing
    /// the bucket, and only a hand-over of the bucket means that the sum is complete.
    pub(super) fn set_unused(&mut self, plan: &Plan, param: usize) {
        self.unused[param] = true;
        self.unused_count += 1;
        if !self.is_handed_over(param) {
            self.left_out[param] = true;
            self.uses_left[param] = 0;
            self.pending[plan.segment_of(param).bucket as usize] -= 1;
        }
    }

    /// Makes a bucket ready to launch if it waits for no further gradient.
    pub(super) fn release(&mut self, bucket: u32) {
        if self.waits_for_release(bucket) {
            self.complete.push(bucket);
        }
    }

    pub(super) fn waits_for_release(&self, bucket: u32) -> bool {
        let is_waiting = self.pending[bucket as usize] == 0 && !self.is_launched[bucket as usize];
        is_waiting && !self.keeps_order && !self.complete.contains(&bucket)
    }

    pub(super) fn has_unused(&self) -> bool {
        self.unused_count > 0
    }

    pub(super) fn is_unused(&self, param: usize) -> bool {
        self.unused[param]
    }

    /// Returns whether the parameter was declared unused in this pass without an earlier hand-over.
    pub(super) fn is_left_out(&self, param: usize) -> bool {
        self.left_out[param]
    }

    /// Returns whether the parameter has a gradient of this rank in this pass.
    pub(super) fn is_contributing(&self, param: usize) -> bool {
        self.is_handed_over(param) && !self.left_out[param]
    }

    /// Records which parameters had a gradient in a micro-batch that was summed.
    pub(super) fn keep_contributions(&mut self) {
        for param in 0..self.contributed.len() {
            self.contributed[param] |= self.is_contributing(param);
        }
    }

    /// Returns whether this rank had a gradient of the parameter in an earlier micro-batch that ranks have summed.
    pub(super) fn has_contributed(&self, param: usize) -> bool {
        self.contributed[param]
    }

    pub(super) fn name(&self, param: usize) -> &str {
        &self.names[param]
    }

    /// Freezes or unfreezes a parameter for later passes.
    pub(super) fn set_frozen(&mut self, plan: &Plan, param: usize, frozen: bool) {
        let thawed = &mut self.thawed[plan.segment_of(param).bucket as usize];
        match (std::mem::replace(&mut self.frozen[param], frozen), frozen) {
            (false, true) => *thawed -= 1,
            (true, false) => *thawed += 1,
            _ => {}
        }
    }

    pub(super) fn is_frozen(&self, param: usize) -> bool {
        self.frozen[param]
    }

    pub(super) fn is_bucket_frozen(&self, bucket: u32) -> bool {
        self.thawed[bucket as usize] == 0
    }

    pub(super) fn is_handed_over(&self, param: usize) -> bool {
        self.uses_left[param] == 0
    }

    /// Returns an error if the parameter is frozen, or was declared unused without an earlier hand-over, because such a
    /// parameter has no gradient.
    pub(super) fn refuse_frozen(&self, param: usize) -> Result<()> {
        let (wrong, remedy) = match (self.frozen[param], self.left_out[param]) {
            (true, _) => ("frozen, so it takes no gradient", "unfreeze it between passes"),
            (false, true) => {
                let remedy = "do not name what has a gradient";
                ("named as unused, so it takes no gradient in this pass", remedy)
            }
            (false, false) => return Ok(()),
        };
        Err(Error::order(format_args!("`{}`", self.names[param]), wrong, remedy))
    }

    pub(super) fn refuse_handed_over(&self, param: usize) -> Result<()> {
        if !self.is_handed_over(param) || self.left_out[param] {
            return Ok(());
        }
        let name = &self.names[param];
        let remedy = "access it before the hand-over, or in the next pass or micro-batch";
        Err(Error::order(format_args!("`{name}`"), "already handed over in this pass", remedy))
    }

    /// Records that one use of the parameter is finished.
    pub(super) fn hand_over(&mut self, plan: &Plan, param: usize) -> Result<()> {
        self.refuse_frozen(param)?;
        self.refuse_handed_over(param)?;
        let left = &mut self.uses_left[param];
        *left -= 1;
        if *left == 0 {
            self.arrivals.push(param as u32);
            let bucket = plan.segment_of(param).bucket;
            let pending = &mut self.pending[bucket as usize];
            *pending -= 1;
            if *pending == 0 && !self.keeps_order {
                self.complete.push(bucket);
            }
        }
        Ok(())
    }

    /// Records that all remaining uses of the parameter are finished.
    pub(super) fn complete(&mut self, plan: &Plan, param: usize) -> Result<()> {
        self.uses_left[param] = self.uses_left[param].min(1);
        self.hand_over(plan, param)
    }

    /// Returns a complete bucket to launch now, if there is one. If buckets launch in index order, only the next bucket
    /// in that order is returned. With `force`, the returned bucket may be incomplete.
    pub(super) fn take_next(&mut self, force: bool) -> Option<u32> {
        let bucket = self.complete.pop().or_else(|| self.next_in_order(force))?;
        self.is_launched[bucket as usize] = true;
        self.launched.push(bucket);
        Some(bucket)
    }

    fn next_in_order(&mut self, force: bool) -> Option<u32> {
        while self.is_launched.get(self.next_bucket as usize) == Some(&true) {
            self.next_bucket += 1;
        }
        let pending = self.pending.get(self.next_bucket as usize)?;
        (force || self.keeps_order && *pending == 0).then_some(self.next_bucket)
    }

    /// Returns the parameters in the order that [`Schedule::arrival_order`](super::Schedule::arrival_order) describes.
    pub(super) fn arrival_order(&self) -> Vec<u32> {
        let mut missing = vec![true; self.uses.len()];
        self.arrivals.iter().for_each(|param| missing[*param as usize] = false);
        let rest = (0..self.uses.len() as u32).rev().filter(|param| missing[*param as usize]);
        self.arrivals.iter().copied().chain(rest).collect()
    }

    /// Returns whether a bucket was launched in this micro-batch.
    pub(super) fn is_launched(&self, bucket: u32) -> bool {
        self.is_launched[bucket as usize]
    }

    pub(super) fn launched(&self) -> &[u32] {
        &self.launched
    }
}
