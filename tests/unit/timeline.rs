//! A test of exposed time: the overlap of work and waiting.
//!
//! Of work, only the time in which the trainer waits is exposed.

use super::*;

#[test]
fn exposed_time_is_the_overlap_of_work_and_waiting() {
    let intervals = |list: &[(u64, u64)]| -> Vec<Interval> {
        list.iter().map(|&(start_ns, end_ns)| Interval { start_ns, end_ns }).collect()
    };
    let busy = intervals(&[(0, 10), (20, 30), (40, 50)]);
    let blocked = intervals(&[(5, 22), (24, 26), (48, 60)]);
    let found = exposure(&busy, &blocked);
    assert_eq!((found.busy_ns, found.exposed_ns), (30, 5 + 2 + 2 + 2));
    assert_eq!(exposure(&busy, &[]).hidden_share(), Some(1.0));
    assert_eq!(exposure(&[], &blocked).hidden_share(), None);
}
