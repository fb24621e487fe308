//! Removes each wait of a list in turn and asserts that the checker then reports a hazard.
//!
//! One helper serves simulated and recorded lists. Only the middle passes are tested: at the ends no later op would
//! need a wait. The list itself must be free of hazards. The checker judges the part before a deleted wait only once.

use std::ops::Range;

use instep::hazard::{Checker, Hazard, Traced};
use instep::layout::Plan;
use instep::op::{Action, Op, Phase};

/// Returns the range from the second pass's Begin to the last pass's Begin, in a recorded list of at least four passes.
pub(crate) fn middle_passes(list: &[Traced]) -> Range<usize> {
    let begins =
        |entry: &Traced| matches!(entry, Traced::Op(Op { action: Action::Control(Phase::Begin), .. }));
    let starts: Vec<usize> = (0..list.len()).filter(|&k| begins(&list[k])).collect();
    assert!(starts.len() >= 4, "{} passes", starts.len());
    starts[1]..starts[starts.len() - 1]
}

/// Returns whether an entry is a wait, for a stream or for the caller's sum.
pub(crate) fn is_wait(entry: &Traced) -> bool {
    matches!(entry, Traced::Op(Op { action: Action::Wait(_) | Action::AwaitSum { .. }, .. }))
}

/// Deletes each wait of `range`, which must have `at_least` this number, and expects a race each time.
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

/// Returns whether the list has a race that continues with `rest`, without the wait before it.
fn races_without(mut checker: Checker<'_>, rest: &[Traced]) -> bool {
    rest.iter().any(|entry| {
        checker.push(entry);
        checker.hazards().iter().any(|hazard| matches!(hazard, Hazard::Race { .. }))
    })
}
