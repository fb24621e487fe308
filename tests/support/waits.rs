//! Takes each wait out of a list in turn and asserts that the checker then reports a hazard.
//!
//! One helper serves simulated and recorded lists. Claims hold for the middle passes only: at the edges nothing follows
//! that would need a wait. The list itself must be free of hazards. What precedes a deleted wait is judged once for all.

use std::ops::Range;

use instep::hazard::{Checker, Hazard, Traced};
use instep::layout::Plan;
use instep::op::{Action, Op, Phase};

/// From the second pass's Begin to the last one's, in a recorded list of at least four passes.
pub(crate) fn middle_passes(list: &[Traced]) -> Range<usize> {
    let begins =
        |entry: &Traced| matches!(entry, Traced::Op(Op { action: Action::Control(Phase::Begin), .. }));
    let starts: Vec<usize> = (0..list.len()).filter(|&k| begins(&list[k])).collect();
    assert!(starts.len() >= 4, "{} passes", starts.len());
    starts[1]..starts[starts.len() - 1]
}

/// Whether an entry is a wait, for a stream or for the caller's sum.
pub(crate) fn is_wait(entry: &Traced) -> bool {
    matches!(entry, Traced::Op(Op { action: Action::Wait(_) | Action::AwaitSum { .. }, .. }))
}

/// Deletes each wait of `range`, of which there must be `at_least` so many, and expects a race each time.
pub(crate) fn assert_each_is_missed(
    plan: &Plan,
    states: usize,
    list: &[Traced],
    range: Range<usize>,
    at_least: usize,
    what: &str,
) {
    let mut whole = Checker::new(plan, states);
    let mut waits = 0;
    for (at, entry) in list.iter().enumerate() {
        if range.contains(&at) && is_wait(entry) {
            waits += 1;
            let missed = races_without(whole.clone(), &list[at + 1..]);
            assert!(missed, "{what}: nothing misses entry {at}, {entry:?}");
        }
        whole.push(entry);
    }
    assert_eq!(whole.hazards(), [], "{what}");
    assert!(waits >= at_least, "{what}: only {waits} waits");
}

/// Whether the list has a race that goes on with `rest`, and not with the wait before it.
fn races_without(mut checker: Checker<'_>, rest: &[Traced]) -> bool {
    rest.iter().any(|entry| {
        checker.push(entry);
        checker.hazards().iter().any(|hazard| matches!(hazard, Hazard::Race { .. }))
    })
}
