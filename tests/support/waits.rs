//! Takes each wait out of a list in turn and asserts that the checker then reports a hazard.
//!
//! One helper serves simulated and recorded lists. Claims hold for the middle passes only: at the edges nothing follows
//! that would need a wait. The list itself must be free of hazards, which is checked first.

use std::ops::Range;

use instep::hazard::{Hazard, Traced, check};
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

/// Whether an entry is a wait.
pub(crate) fn is_wait(entry: &Traced) -> bool {
    matches!(entry, Traced::Op(Op { action: Action::Wait(_), .. }))
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
    assert_eq!(check(plan, states, list), [], "{what}");
    let waits: Vec<usize> = range.filter(|&k| is_wait(&list[k])).collect();
    assert!(waits.len() >= at_least, "{what}: only {} waits", waits.len());
    for at in waits {
        let mut fewer = list.to_vec();
        fewer.remove(at);
        let race = check(plan, states, &fewer).iter().any(|hazard| matches!(hazard, Hazard::Race { .. }));
        assert!(race, "{what}: nothing misses entry {at}, {:?}", list[at]);
    }
}
