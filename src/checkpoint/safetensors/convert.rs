//! Describes a tensor of a file: its element type, shape and place. Converts the tensor's bytes exactly to f32 values
//! or to a count.
//!
//! This module refuses every value that would be rounded, because a state that differs in one bit changes the training.
//! `entries.rs` has checked that the shape matches the number of bytes.

use std::fmt;

use half::{bf16, f16};

use crate::dtype::DType;

/// Passes each value to `take`.
///
/// # Errors
/// Returns the first value that f32 cannot represent, or NaN if the type does not hold real numbers.
pub(in crate::checkpoint) fn floats(
    dtype: Dtype,
    bytes: &[u8],
    mut take: impl FnMut(f32),
) -> Result<(), f64> {
    match dtype {
        Dtype::F32 => bytes.as_chunks::<4>().0.iter().for_each(|bytes| take(f32::from_le_bytes(*bytes))),
        Dtype::F16 => {
            bytes.as_chunks::<2>().0.iter().for_each(|bytes| take(f16::from_le_bytes(*bytes).to_f32()))
        }
        Dtype::Bf16 => {
            bytes.as_chunks::<2>().0.iter().for_each(|bytes| take(bf16::from_le_bytes(*bytes).to_f32()))
        }
        Dtype::F64 => {
            for bytes in bytes.as_chunks::<8>().0 {
                let value = f64::from_le_bytes(*bytes);
                // A conversion of NaN loses only the payload, which nothing reads.
                if !value.is_nan() && f64::from(value as f32) != value {
                    return Err(value);
                }
                take(value as f32);
            }
        }
        Dtype::U32 | Dtype::I64 | Dtype::U64 => return Err(f64::NAN),
    }
    Ok(())
}

/// Returns whether [`floats`] can convert this type.
pub(in crate::checkpoint) fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::F64)
}

/// Returns the exact real value of one element.
pub(in crate::checkpoint) fn real(dtype: Dtype, bytes: &[u8]) -> Option<f64> {
    match dtype {
        Dtype::F32 => Some(f32::from_le_bytes(*bytes.first_chunk()?).into()),
        Dtype::F64 => Some(f64::from_le_bytes(*bytes.first_chunk()?)),
        _ => None,
    }
}

/// Returns an element of type I64, U64, F64 or F32 as an integer. Returns `None` for another type, or if the value is
/// not a whole number from 0 to 2^63 - 1.
pub(in crate::checkpoint) fn count(dtype: Dtype, bytes: &[u8]) -> Option<u64> {
    let integer = |bytes: &[u8]| Some(u64::from_le_bytes(*bytes.first_chunk()?));
    let count = match dtype {
        // A negative I64 reads as 2^63 or more.
        Dtype::I64 | Dtype::U64 => integer(bytes)?,
        Dtype::F64 => whole(f64::from_le_bytes(*bytes.first_chunk()?))?,
        Dtype::F32 => whole(f32::from_le_bytes(*bytes.first_chunk()?).into())?,
        Dtype::F16 | Dtype::Bf16 | Dtype::U32 => return None,
    };
    (count < 1 << 63).then_some(count)
}

fn whole(value: f64) -> Option<u64> {
    // Casts saturate, and the caller checks the range.
    (value >= 0.0 && value.fract() == 0.0).then_some(value as u64)
}

/// Element types of safetensors that this crate reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// IEEE 754 binary16.
    F16,
    /// The upper half of an f32.
    Bf16,
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary64.
    F64,
    /// Unsigned, 32 bits.
    U32,
    /// Signed, 64 bits.
    I64,
    /// Unsigned, 64 bits.
    U64,
}

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its dimensions. A scalar has none.
    pub shape: Vec<u64>,
    /// The product of the dimensions.
    pub elements: u64,
    pub(super) start_bytes: u64,
}

impl Dtype {
    pub(super) const ALL: [Dtype; 7] =
        [Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64, Dtype::U32, Dtype::I64, Dtype::U64];

    /// Returns the size of one element.
    pub const fn bytes(self) -> u64 {
        match self {
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::F32 | Dtype::U32 => 4,
            Dtype::F64 | Dtype::I64 | Dtype::U64 => 8,
        }
    }

    /// Returns whether the tensors of a step may have this type.
    pub const fn is_stepped(self) -> bool {
        matches!(self, Dtype::F32 | Dtype::Bf16 | Dtype::F16)
    }

    /// Returns the type's name in the safetensors format.
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::F16 => "F16",
            Dtype::Bf16 => "BF16",
            Dtype::F32 => "F32",
            Dtype::F64 => "F64",
            Dtype::U32 => "U32",
            Dtype::I64 => "I64",
            Dtype::U64 => "U64",
        }
    }
}

impl From<DType> for Dtype {
    fn from(dtype: DType) -> Dtype {
        match dtype {
            DType::F32 => Dtype::F32,
            DType::BF16 => Dtype::Bf16,
            DType::F16 => Dtype::F16,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Tensor {
    /// Returns the offset of the tensor's first byte in the file.
    pub fn start_bytes(&self) -> u64 {
        self.start_bytes
    }

    /// Returns the offset of the byte after the tensor in the file.
    pub fn end_bytes(&self) -> u64 {
        self.start_bytes + self.elements * self.dtype.bytes()
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/checkpoint/safetensors/convert.rs"]
mod tests;
