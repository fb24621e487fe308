//! A tensor of a file: its element type, shape and place.
//!
//! Plain data. `entries.rs` has checked that the shape is as long as the bytes.

use std::fmt;

use crate::dtype::DType;

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
    /// Its element type.
    pub dtype: Dtype,
    /// Its dimensions; none for a scalar.
    pub shape: Vec<u64>,
    /// Their product.
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

    /// Returns whether tensors of a step may be of this type.
    pub const fn is_stepped(self) -> bool {
        matches!(self, Dtype::F32 | Dtype::Bf16 | Dtype::F16)
    }

    /// Returns the name in the format.
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
    /// Returns the offset in the file.
    pub fn start_bytes(&self) -> u64 {
        self.start_bytes
    }

    /// Returns the offset one past the last byte.
    pub fn end_bytes(&self) -> u64 {
        self.start_bytes + self.elements * self.dtype.bytes()
    }
}
