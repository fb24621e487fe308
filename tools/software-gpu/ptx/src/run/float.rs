//! Conversions of floating point that Rust's `as` does not have: 16-bit formats, canonical NaNs, extremes.
//!
//! All of them round to nearest even, once, and keep subnormals. The only exception is the approximate root.

/// Returns the bits of an f32; for a NaN, the bits of the canonical NaN.
#[inline(always)]
pub(super) fn canonical(value: f32) -> u32 {
    if value.is_nan() { 0x7fff_ffff } else { value.to_bits() }
}

/// Returns the bits of an f64. PTX does not specify which NaN arithmetic makes. No CPU makes this NaN, so results that
/// depend on its bits differ.
#[inline(always)]
pub(super) fn settled(value: f64) -> u64 {
    if value.is_nan() { u64::MAX >> 1 } else { value.to_bits() }
}

/// Computes `sqrt.approx.ftz.f32` with an error of up to 2^-11, in a direction that the operand's last bit selects. The
/// error of a GPU is smaller, so code that gives the same results with this root does not depend on the last places of
/// the root.
#[inline(always)]
pub(super) fn rough_square_root(bits: u32) -> f32 {
    let x = f32::from_bits(bits);
    let flushed = if x.is_subnormal() { 0.0_f32.copysign(x) } else { x };
    flushed.sqrt() * if bits & 1 == 0 { 1.0 + 0.5_f32.powi(11) } else { 1.0 - 0.5_f32.powi(11) }
}

pub(super) fn f16_from(value: f32) -> u16 {
    if value.is_nan() { 0x7fff } else { half::f16::from_f32(value).to_bits() }
}

#[inline(always)]
pub(super) fn bf16_from(value: f32) -> u16 {
    let bits = value.to_bits();
    // Half of the last place that stays, and one less if that is even: a tie goes to the even one.
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if value.is_nan() { 0x7fff } else { rounded as u16 }
}

/// Converts towards zero. A value that does not fit becomes the nearest integer that fits, and a NaN the integer with
/// only the sign bit.
pub(super) fn u64_from(value: f64) -> u64 {
    if value.is_nan() { 1 << 63 } else { value as u64 }
}

/// Returns the larger or the smaller of two f32, by bits. Any NaN gives the canonical one, and -0 is less than +0.
#[inline(always)]
pub(super) fn extreme(a: u32, b: u32, smaller: bool) -> u32 {
    if f32::from_bits(a).is_nan() || f32::from_bits(b).is_nan() {
        return 0x7fff_ffff;
    }
    // As two's complement the bits are in the order of the values.
    let order = |bits: u32| (bits ^ ((bits as i32 >> 31) as u32 >> 1)) as i32;
    if (order(a) < order(b)) == smaller { a } else { b }
}
