//! Conversions of floating point that Rust's `as` does not say: 16-bit formats, canonical NaNs, extremes.
//!
//! All round to nearest even, once, and keep subnormals, but for the one approximation.

/// The bits of an f32, of the canonical NaN if it is one.
#[inline(always)]
pub(super) fn canonical(value: f32) -> u32 {
    if value.is_nan() { 0x7fff_ffff } else { value.to_bits() }
}

/// The bits of an f64. PTX leaves open which NaN arithmetic makes; this one no CPU makes, so bits that depend on it differ.
#[inline(always)]
pub(super) fn settled(value: f64) -> u64 {
    if value.is_nan() { u64::MAX >> 1 } else { value.to_bits() }
}

/// `sqrt.approx.ftz.f32`, off by as much as 2^-11 in a direction that the operand's last bit draws. A GPU is off by less, so
/// what gives the same results with this root depends on no last place of it.
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

/// Towards zero; what does not fit becomes the nearest integer that does, and a NaN the integer with the sign bit alone.
pub(super) fn u64_from(value: f64) -> u64 {
    if value.is_nan() { 1 << 63 } else { value as u64 }
}

/// The larger or the smaller of two f32, by bits; any NaN gives the canonical one, and -0 is less than +0.
#[inline(always)]
pub(super) fn extreme(a: u32, b: u32, smaller: bool) -> u32 {
    if f32::from_bits(a).is_nan() || f32::from_bits(b).is_nan() {
        return 0x7fff_ffff;
    }
    // As two's complement the bits are in the order of the values.
    let order = |bits: u32| (bits ^ ((bits as i32 >> 31) as u32 >> 1)) as i32;
    if (order(a) < order(b)) == smaller { a } else { b }
}
