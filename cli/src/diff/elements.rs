//! Elements of tensors: their bits, their values, and the distance between two elements.
//!
//! This file reads every type that the library writes into files. Reading changes no bit of an element.

use std::fmt;
use std::io::{Read, Seek};

use instep::checkpoint::safetensors::{Data, Dtype, Tensor};
use instep::{bf16, f16};

use crate::Failure;

/// One element of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Element {
    pub(super) dtype: Dtype,
    /// The element's bits, in the lower bits of this number.
    pub(super) bits: u64,
}

impl Element {
    /// Returns the value of a floating-point element, and `None` for an integer.
    pub(super) fn real(self) -> Option<f64> {
        match self.dtype {
            Dtype::Bf16 => Some(bf16::from_bits(self.bits as u16).to_f64()),
            Dtype::F16 => Some(f16::from_bits(self.bits as u16).to_f64()),
            Dtype::F32 => Some(f64::from(f32::from_bits(self.bits as u32))),
            Dtype::F64 => Some(f64::from_bits(self.bits)),
            Dtype::U32 | Dtype::I64 | Dtype::U64 => None,
        }
    }

    /// Returns the distance to another element of the same type, counted in representable values.
    ///
    /// The distance is `None` if either value is NaN, and 0 between the two zeros.
    pub(super) fn distance(self, other: Element) -> Option<u64> {
        let (Some(a), Some(b)) = (self.real(), other.real()) else {
            return Some(match self.dtype {
                Dtype::I64 => (self.bits as i64).abs_diff(other.bits as i64),
                _ => self.bits.abs_diff(other.bits),
            });
        };
        let sign = 1 << (8 * self.dtype.bytes() - 1);
        let place = |bits: u64| {
            let magnitude = (bits & (sign - 1)) as i64;
            if bits & sign != 0 { -magnitude } else { magnitude }
        };
        (!a.is_nan() && !b.is_nan()).then(|| place(self.bits).abs_diff(place(other.bits)))
    }
}

/// Writes the shortest decimal number that has the same value when it is parsed.
impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.dtype, self.real()) {
            (Dtype::F64, Some(value)) => write!(f, "{value:?}"),
            (_, Some(value)) => write!(f, "{:?}", value as f32),
            (Dtype::I64, None) => write!(f, "{}", self.bits as i64),
            (_, None) => write!(f, "{}", self.bits),
        }
    }
}

/// Reads the bits of consecutive elements, from index `first` on.
pub(super) fn read_bits<R: Read + Seek>(
    data: &mut Data<R>,
    tensor: &Tensor,
    first: u64,
    into: &mut [u64],
) -> Result<(), Failure> {
    let elements = first..first + into.len() as u64;
    let mut rest = into.iter_mut();
    data.stream(tensor, elements, |bytes| {
        for (bytes, place) in bytes.chunks_exact(tensor.dtype.bytes() as usize).zip(&mut rest) {
            *place = bytes.iter().rev().fold(0, |bits, byte| bits << 8 | u64::from(*byte));
        }
        Ok(())
    })?;
    Ok(())
}
