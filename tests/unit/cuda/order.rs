//! A test of which communicators NCCL orders.
//!
//! The answer depends on the release, on who made the communicator, and on one variable.

use super::*;

#[test]
fn nccl_orders_by_its_variable_since_2_26_and_by_its_configuration_since_2_31() {
    let of = |version, is_adopted, value: Option<&str>| {
        is_ordered(version, is_adopted, |name| {
            assert_eq!(name, "NCCL_LAUNCH_ORDER_IMPLICIT");
            value.map(str::to_owned)
        })
    };
    for is_adopted in [false, true] {
        assert!(!of(22506, is_adopted, Some("1")) && !of(22506, is_adopted, None));
        assert!(of(22602, is_adopted, Some("1")) && of(23203, is_adopted, Some(" 1")));
        assert!(!of(23007, is_adopted, None) && !of(23203, is_adopted, Some("0")));
        // A value that NCCL ignores.
        assert_eq!(of(23203, is_adopted, Some("yes")), !is_adopted);
        assert_eq!(of(23100, is_adopted, None), !is_adopted);
    }
}
