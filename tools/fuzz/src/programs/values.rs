//! A tensor in f64 with an error bound for the library's tensor, and the rounding of formats of fewer bits.
//!
//! A bound grows by the largest error of one f32 update or one rounding. Every update of the training is larger than
//! that.

use super::program::{Master, Precision, Type};

/// Rounding of one f32 update, relative to the largest value of a tensor.
pub(crate) const F32: f64 = 1.0 / (1 << 19) as f64;

const F16_BITS: u32 = 11;

const F16_LARGEST: f64 = 65504.0;

/// The distance of neighbouring subnormal f16 numbers.
pub(crate) const F16_STEP: f64 = 1.0 / (1 << 24) as f64;

/// A tensor, and the largest error that the library's tensor may have.
#[derive(Clone, Debug, Default)]
pub(crate) struct Values {
    pub(crate) values: Vec<f64>,
    /// The error of each element.
    pub(crate) errors: Vec<f64>,
}

impl Values {
    pub(crate) fn exact(values: Vec<f64>) -> Values {
        Values { errors: vec![0.0; values.len()], values }
    }

    pub(crate) fn largest(&self) -> f64 {
        self.values.iter().filter(|x| x.is_finite()).fold(0.0, |most, x| most.max(x.abs()))
    }

    /// The largest error, relative to the largest value.
    pub(crate) fn uncertainty(&self) -> f64 {
        let error = self.errors.iter().copied().fold(0.0, f64::max);
        if error > 0.0 { error / self.largest().max(error) } else { 0.0 }
    }

    /// Increases the error bound of each element.
    pub(crate) fn blur(&mut self, error: f64) {
        self.errors.iter_mut().for_each(|e| *e += error);
    }

    /// Takes over the library's values, which were close enough.
    pub(crate) fn adopt(&mut self, found: &[f32]) {
        *self = Values::exact(found.iter().map(|x| f64::from(*x)).collect());
    }

    /// Rounds to a format of fewer bits than f32.
    pub(crate) fn round(&mut self, bits: u32) {
        if bits >= 24 {
            return;
        }
        for (x, error) in self.values.iter_mut().zip(&mut self.errors) {
            *x = rounded(*x, bits);
            // A value near a tie may have gone the other way.
            *error += x.abs() * 2f64.powi(1 - bits as i32) + if bits == F16_BITS { F16_STEP } else { 0.0 };
        }
    }
}

/// Rounds to the nearest number with `bits` significant bits, ties to even.
pub(crate) fn rounded(x: f64, bits: u32) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let unit = 2f64.powi(x.abs().log2().floor() as i32 + 1 - bits as i32);
    let nearest = (x / unit).round_ties_even() * unit;
    if bits == F16_BITS && nearest.abs() > F16_LARGEST { f64::INFINITY.copysign(x) } else { nearest }
}

pub(crate) fn bits(of: Type) -> u32 {
    match of {
        Type::F32 => 24,
        Type::Bf16 => 8,
        Type::F16 => F16_BITS,
    }
}

/// Returns the number of significant bits of what `read` returns for a parameter.
pub(crate) fn value_bits(precision: &Precision) -> u32 {
    match (precision.param, precision.master) {
        (param, Master::None) => bits(param),
        (_, Master::F32 | Master::Remainder16) => 24,
        (_, Master::Remainder8) => 16,
    }
}
