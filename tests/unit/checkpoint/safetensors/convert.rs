//! Tests of the conversions from another library's element types.
//!
//! A value that f32 or a count cannot hold exactly is refused.

use super::*;

/// Converts f16 by its definition in f64, without rounding.
fn defined(bits: u16) -> f64 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 0x1f), f64::from(bits & 0x3ff));
    let magnitude = match exponent {
        0 => fraction * 2f64.powi(-24),
        31 if fraction == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (1024.0 + fraction) * 2f64.powi(exponent - 25),
    };
    if bits >> 15 == 1 { -magnitude } else { magnitude }
}

#[test]
fn every_f16_becomes_the_f32_of_its_value() {
    for bits in 0..=u16::MAX {
        let (mut given, expected) = (None, defined(bits));
        floats(Dtype::F16, &bits.to_le_bytes(), |value| given = Some(f64::from(value))).unwrap();
        let given = given.unwrap();
        let same = given.to_bits() == expected.to_bits() || (given.is_nan() && expected.is_nan());
        assert!(same, "{bits:#06x}: {given} and {expected}");
    }
}

#[test]
fn an_f64_between_two_f32_is_refused_and_the_others_are_kept() {
    let read = |value: f64| {
        let mut given = None;
        floats(Dtype::F64, &value.to_le_bytes(), |value| given = Some(value)).map(|()| given.unwrap())
    };
    for fine in [0.0, -0.0, 1.5, f64::from(f32::MIN_POSITIVE) / 4.0, f64::from(f32::MAX), f64::INFINITY] {
        assert_eq!(f64::from(read(fine).unwrap()).to_bits(), fine.to_bits());
    }
    assert!(read(f64::NAN).unwrap().is_nan());
    for lost in [0.1, 1e39, 1e-46, 16_777_217.0] {
        assert_eq!(read(lost), Err(lost));
    }
}

#[test]
fn only_whole_numbers_below_two_to_the_63_are_counts() {
    assert_eq!(count(Dtype::F32, &7f32.to_le_bytes()), Some(7));
    assert_eq!(count(Dtype::F64, &2f64.powi(62).to_le_bytes()), Some(1 << 62));
    assert_eq!(count(Dtype::U64, &(u64::MAX >> 1).to_le_bytes()), Some(u64::MAX >> 1));
    for bad in [0.5, -1.0, 2f64.powi(63), f64::NAN, f64::INFINITY] {
        assert_eq!(count(Dtype::F64, &bad.to_le_bytes()), None, "{bad}");
    }
    assert_eq!(count(Dtype::I64, &(-1i64).to_le_bytes()), None);
    assert_eq!(count(Dtype::U64, &(1u64 << 63).to_le_bytes()), None);
}
