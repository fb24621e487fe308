//! Parameters that the trainer declares unused on all ranks in the open pass.
//!
//! The `Leave` op makes steps and norms skip such a parameter. `Leave` runs on the optim stream, after the pass's
//! `Begin` and before the bucket's step, so it needs no wait. Ranks compare the declared parameters in the collective
//! that sums the bucket. If a parameter was already handed over, ranks compare it in the next collective after the open
//! pass.

use super::{Mode, Schedule};
use crate::error::{Error, Result};
use crate::layout::fold;
use crate::op::{Action, Agreed, Stream};

/// Returns the contribution of unused parameters to the agreement's number. `unused` is a hash of these parameters.
pub(super) fn share(unused: u64) -> u64 {
    if unused == 0 { 0 } else { Agreed::Loaded.share(unused) }
}

impl Schedule {
    /// Makes the open pass skip parameters that no rank used. Frozen parameters are already skipped.
    ///
    /// # Errors
    /// `Order` if no pass is open, or if this is not the pass's last micro-batch. In `Eager` mode, also returns `Order`
    /// if one of `params` was already handed over. A refused call has changed nothing.
    pub fn leave_unused(&mut self, params: &[usize]) -> Result<()> {
        self.require_open()?;
        if self.micro_batches_left > 0 {
            let wrong = "a later micro-batch may use them";
            return Err(Error::order("unused parameters", wrong, "name them in the last micro-batch"));
        }
        let is_new = |param: &&usize| self.takes_part(**param);
        if self.policy.mode == Mode::Eager
            && let Some(param) = params.iter().filter(is_new).find(|param| self.is_handed_over(**param))
        {
            let name = self.readiness.name(*param);
            let remedy = "name it as unused before its hand-over, or use Normed or Sequential";
            return Err(Error::order(format_args!("`{name}`"), "its step may be on its way", remedy));
        }
        for param in params {
            if !self.takes_part(*param) {
                continue;
            }
            let bucket = self.plan.segment_of(*param).bucket as usize;
            if self.is_handed_over(*param) && !self.plan.buckets()[bucket].is_local {
                // The hashes are added up, so that ranks may declare parameters in different orders. No hash of a local
                // parameter is added, because local parameters may differ between ranks.
                let named = fold(fold(0, &self.pass.to_le_bytes()), &(*param as u64).to_le_bytes());
                self.late_unused = self.late_unused.wrapping_add(named);
            }
            self.readiness.set_unused(&self.plan, *param);
            let segment = self.plan.segment_index(*param) as u32;
            self.emitter.emit(Stream::Optim, Action::Leave { segment });
        }
        Ok(())
    }

    /// Returns whether the open pass steps the parameter: it is neither frozen nor declared unused.
    pub fn takes_part(&self, param: usize) -> bool {
        let is_unused = self.open && self.readiness.is_unused(param);
        !self.is_frozen(param) && !is_unused
    }

    /// Returns whether a bucket waits only for [`hand_over_bucket`](Self::hand_over_bucket) before it can be launched.
    pub fn waits_for_release(&self, bucket: u32) -> bool {
        self.open && self.readiness.waits_for_release(bucket)
    }

    /// Returns a hash of the unused parameters of a bucket.
    pub(super) fn unused_in(&self, bucket: u32) -> u64 {
        if !self.readiness.has_unused() {
            return 0;
        }
        let segments = self.plan.segments_of(&self.plan.buckets()[bucket as usize]);
        let unused = segments.iter().filter(|segment| self.readiness.is_left_out(segment.param as usize));
        unused.fold(0, |hash, segment| fold(hash, &(u64::from(segment.param) + 1).to_le_bytes()))
    }
}
