//! Records and settings before the first pass, one per segment and round.
//!
//! Their order is the assignment's: round by round, in each the plan's segments.

use crate::abi::{InstepRecord, InstepScalars};
use crate::launch::assignment::Assignment;
use crate::launch::codes::action_code;
use crate::launch::region::Regions;
use crate::layout::Plan;

/// Every record before the first pass.
pub(crate) fn first_records<'a>(
    plan: &'a Plan,
    regions: &'a Regions,
    assignment: &'a Assignment,
) -> impl Iterator<Item = InstepRecord> + 'a {
    let address = |at: u64| regions.gradient(plan, at).expose_provenance() as u64;
    let segments =
        move |round| plan.segments().iter().enumerate().map(move |(k, segment)| (round, k, segment));
    (0..assignment.rounds()).flat_map(segments).map(move |(round, k, segment)| {
        let (hyper, optimizer) = assignment.optimizer(round, k);
        InstepRecord {
            steps: 0,
            stepped: 0,
            hyper,
            action: action_code(segment.action),
            optimizer,
            tail: segment.tail.map_or(0, address),
            contributors: plan.buckets()[segment.bucket as usize].contributors.map_or(0, address),
            carried: [1.0; 2],
            scalars: InstepScalars { words: [0; 6] },
        }
    })
}

/// What every record's learning rate is multiplied by before the first pass.
pub(crate) fn first_lr_multipliers(assignment: &Assignment) -> impl Iterator<Item = f64> + use<> {
    std::iter::repeat_n(1.0, assignment.record_count())
}

/// What steps do with each record's segment before the first pass.
pub(crate) fn first_actions<'a>(plan: &'a Plan, assignment: &Assignment) -> impl Iterator<Item = u32> + 'a {
    let all = (0..assignment.rounds()).flat_map(|_| plan.segments());
    all.map(|segment| action_code(segment.action))
}
