//! Tests of the key by which ranks compare their calls.
//!
//! Each field of a call has bytes of its own, so that a mismatch names the fields that differ.

use super::*;

/// Only the options' lane equals that of `keys()[0]`.
const OTHER_OPTIONS: u64 = !0x0001_0001_0000_0001;

fn keys() -> Vec<CallKey> {
    let mut keys = Vec::new();
    for kind in CollectiveKind::ALL {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for bucket in [None, Some(0), Some(3), Some(u32::MAX)] {
                for number in [0, 0x0123_4567_89ab_cdec, u64::MAX - 3] {
                    keys.push(CallKey {
                        kind,
                        pass: number,
                        bucket,
                        dtype,
                        bytes: number,
                        agreement: !number,
                    });
                }
            }
        }
    }
    keys
}

#[test]
fn every_key_is_read_from_its_own_bytes_and_no_two_keys_share_bytes() {
    let mut seen = std::collections::HashMap::new();
    for key in keys() {
        assert_eq!(CallKey::from_bytes(&key.to_bytes()), Some(key));
        assert_eq!(seen.insert(key.to_bytes(), key), None);
    }
}

#[test]
fn bytes_that_no_key_has_are_refused() {
    let key = CallKey { bytes: 8, bucket: None, ..keys()[0] };
    assert_eq!(CallKey::from_bytes(&key.to_bytes()), Some(key));
    // An unknown kind, type and flag, the byte that stays zero, a bucket without a flag, half an element.
    for (at, value) in [(0, 7), (1, 3), (2, 2), (3, 1), (4, 1), (16, 6)] {
        let mut bytes = key.to_bytes();
        bytes[at] = value;
        assert_eq!(CallKey::from_bytes(&bytes), None, "byte {at}");
    }
}

#[test]
fn a_rank_that_left_a_pass_is_named_whichever_rank_notices() {
    let (ours, theirs) = (keys()[0], CallKey { pass: 1, bucket: Some(3), bytes: 4, ..keys()[0] });
    for error in [ours.mismatch(&theirs, 2, 1), theirs.mismatch(&ours, 1, 2)] {
        assert!(matches!(error, Error::LeftPass { rank: 1, pass: 0, other_rank: 2, .. }), "{error}");
    }
    let error = ours.mismatch(&CallKey { kind: CollectiveKind::Broadcast, ..theirs }, 2, 1);
    assert!(matches!(error, Error::Mismatch { .. }), "a rebuild outside a pass is none that was left");
}

#[test]
fn a_mismatch_names_every_field_that_differs_and_no_other() {
    let key = keys()[0];
    let cases = [
        (CallKey { kind: CollectiveKind::Broadcast, ..key }, "kind"),
        (CallKey { bucket: Some(0), ..key }, "bucket"),
        (CallKey { dtype: DType::F16, ..key }, "type"),
        (CallKey { bytes: 4, ..key }, "length"),
        (CallKey { agreement: OTHER_OPTIONS, ..key }, "options"),
        (CallKey { pass: 1, agreement: OTHER_OPTIONS, ..key }, "pass and options"),
        (CallKey { dtype: DType::F16, bytes: 4, ..key }, "type and length"),
        (CallKey { kind: CollectiveKind::AllGather, agreement: OTHER_OPTIONS, ..key }, "kind"),
    ];
    for (theirs, named) in cases {
        match key.mismatch(&theirs, 2, 1) {
            Error::Mismatch { rank: 2, other_rank: 1, differs, .. } => assert_eq!(differs, named),
            other => panic!("{other}"),
        }
    }
}
