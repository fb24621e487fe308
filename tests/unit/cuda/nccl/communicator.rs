//! A test of what a communicator warns of when it opens.
//!
//! The warnings depend on the release, on who made the communicator, and on the environment.

use super::*;

#[test]
fn one_hardware_queue_and_communicators_without_an_order_are_warned_of() {
    let among = |version, is_adopted, set: &[(&str, &str)]| {
        let variable =
            |name: &str| set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        let found = warnings(version, is_adopted, variable);
        let name = |line: &String| line.split([':', '=']).next().unwrap_or_default().to_owned();
        found.iter().map(name).collect::<Vec<_>>()
    };
    let of = |version, set: &[(&str, &str)]| among(version, false, set);
    let (queues, order) = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_LAUNCH_ORDER_IMPLICIT");
    assert_eq!(of(23203, &[(queues, "1")]), [queues]);
    assert!(of(23203, &[(queues, "32")]).is_empty() && of(23100, &[]).is_empty());
    assert_eq!(of(23203, &[(order, "0")]), [order]);
    assert_eq!(among(23203, true, &[]), [order]);
    assert_eq!(of(22703, &[(queues, "1"), (order, "0")]), [queues, order]);
    assert!(of(22600, &[(order, "1")]).is_empty());
    assert_eq!(of(22503, &[(order, "1")]), ["NCCL before 2.26"]);
}
