//! Records before the first pass, one per segment and round, and how far a record has come.
//!
//! Their order is the assignment's: round by round, in each the plan's segments. A count that is set from outside is
//! checked here alone: one that cannot be counted on, or that lacks what its optimizer carries, is refused.

use crate::abi::{InstepRecord, InstepScalars};
use crate::error::{Error, Result};
use crate::launch::assignment::Assignment;
use crate::launch::codes::{action_code, dtype_code};
use crate::launch::region::Regions;
use crate::layout::Plan;

/// Every record before the first pass.
pub(crate) fn first_records<'a>(
    plan: &'a Plan,
    regions: &'a Regions,
    assignment: &'a Assignment,
) -> impl Iterator<Item = InstepRecord> + 'a {
    let address = |bucket, at| regions.gradient(plan, bucket, at).expose_provenance() as u64;
    let segments =
        move |round| plan.segments().iter().enumerate().map(move |(k, segment)| (round, k, segment));
    (0..assignment.rounds()).flat_map(segments).map(move |(round, k, segment)| {
        let ((hyper, optimizer), bucket) = (assignment.optimizer(round, k), plan.bucket_of(segment));
        InstepRecord {
            steps: 0,
            stepped: 0,
            hyper,
            action: action_code(segment.action),
            // The table of optimizers is short.
            optimizer: optimizer as u16,
            grad_dtype: dtype_code(bucket.storage.precision.grad) as u16,
            tail: segment.tail.map_or(0, |at| address(bucket, at)),
            contributors: bucket.contributors.map_or(0, |at| address(bucket, at)),
            carried: [1.0; 2],
            scalars: InstepScalars { words: [0; 6] },
        }
    })
}

/// The records of a segment, one per round.
pub(crate) fn records_of(plan: &Plan, regions: &Regions, segment: u32) -> impl Iterator<Item = usize> {
    (segment as usize..regions.counts().records).step_by(plan.segments().len())
}

/// Progress of a record: the updates that it has had, and the number that its rule carries beside that count.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    pub(crate) count: u64,
    pub(crate) carried: f64,
}

impl Progress {
    /// The last pass counts already, although only the next Begin adds its update to the record.
    pub(crate) fn of(record: &InstepRecord) -> Progress {
        let carried = record.carried[usize::from(record.stepped != 0)];
        Progress { count: record.steps + u64::from(record.stepped), carried }
    }

    /// Puts the record there.
    pub(crate) fn set(self, record: &mut InstepRecord) {
        (record.steps, record.stepped) = (self.count, 0);
        record.carried = [self.carried; 2];
    }
}

/// A number of updates, and what the optimizer carries beside it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepCount {
    pub(crate) count: u64,
    pub(crate) carried: Option<f64>,
}

impl From<u64> for StepCount {
    fn from(count: u64) -> Self {
        StepCount { count, carried: None }
    }
}

impl From<(u64, f64)> for StepCount {
    fn from((count, carried): (u64, f64)) -> Self {
        StepCount { count, carried: Some(carried) }
    }
}

impl StepCount {
    /// Counts from here on have no room for the updates to come.
    const END: u64 = 1 << 63;

    /// Returns the progress that it stands for, if the optimizers carry a number or if they do not.
    ///
    /// # Errors
    /// `Config` for a count of 2^63 or more, one above 0 without the number that is carried, or a number that is no product
    /// of so many momenta.
    pub(crate) fn progress(self, carries: bool) -> Result<Progress> {
        let StepCount { count, carried } = self;
        if count >= StepCount::END {
            return Err(Error::range("step_count", count, "a count below 2^63"));
        }
        match carried {
            Some(carried) if !carries && carried != 1.0 => {
                let wrong = "this optimizer carries nothing";
                Err(Error::config("carried", carried, wrong, "leave it out, or set 1"))
            }
            Some(carried) if carries && !carried_fits(count, carried) => {
                Err(Error::range("carried", carried, CARRIED_RANGE))
            }
            None if carries && count > 0 => {
                let wrong = "the optimizer carries a product of momenta too";
                Err(Error::config("step_count", count, wrong, "set count and carried together"))
            }
            _ => Ok(Progress { count, carried: carried.unwrap_or(1.0) }),
        }
    }
}

/// The numbers that are carried.
pub(crate) const CARRIED_RANGE: &str =
    "1 before the first update, and a number of at least 0 and below 1 after it";

/// Returns whether a number can be the product of so many momenta, each of which is below 1.
pub(crate) fn carried_fits(count: u64, carried: f64) -> bool {
    if count == 0 { carried == 1.0 } else { (0.0..1.0).contains(&carried) }
}
