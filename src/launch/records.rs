//! Records before the first pass, one per segment and round, and how far a record has come.
//!
//! Their order is the assignment's: round by round, in each the plan's segments.

use crate::abi::{InstepRecord, InstepScalars};
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
