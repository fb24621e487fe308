//! Element types of the tensors that a step accesses or that ranks exchange.
//!
//! This module has the names and sizes of the types, and converts single values. The module depends on no other module.
//! The kernels convert whole tensors. f64, sparse and complex tensors are not supported, because a fused kernel for
//! them would not be faster than the caller's own loop.

/// An element type. The kernels identify the types by the same numbers as these discriminants.
#[non_exhaustive]
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE 754 binary32.
    F32 = 0,
    /// bfloat16: the upper 16 bits of an f32, rounded.
    BF16 = 1,
    /// IEEE 754 binary16.
    F16 = 2,
}

impl DType {
    /// Returns the size of one element in bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            DType::F32 => 4,
            DType::BF16 | DType::F16 => 2,
        }
    }

    /// Returns the bytes of the number 1.
    pub(crate) fn one(self) -> &'static [u8] {
        const F32: [u8; 4] = 1f32.to_ne_bytes();
        const BF16: [u8; 2] = half::bf16::ONE.to_bits().to_ne_bytes();
        const F16: [u8; 2] = half::f16::ONE.to_bits().to_ne_bytes();
        match self {
            DType::F32 => &F32,
            DType::BF16 => &BF16,
            DType::F16 => &F16,
        }
    }

    /// Rounds a value to the nearest value of this type, ties to even.
    pub fn round(self, value: f32) -> f32 {
        match self {
            DType::F32 => value,
            DType::BF16 => half::bf16::from_f32(value).to_f32(),
            DType::F16 => half::f16::from_f32(value).to_f32(),
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
        })
    }
}

/// The type of an element in the slices that a stepper returns. This type is `f32`, or [`bf16`](crate::bf16) or
/// [`f16`](crate::f16) of the `half` crate.
pub trait Element: sealed::Element {
    /// This type as a [`DType`].
    const DTYPE: DType;

    /// Rounds to the nearest value, ties to even.
    fn from_f32(value: f32) -> Self;

    /// Converts to f32 without rounding.
    fn to_f32(self) -> f32;
}

mod sealed {
    /// A number type in which every bit pattern is valid.
    pub trait Element: bytemuck::Pod + Send + Sync + std::fmt::Debug {}

    impl Element for f32 {}
    impl Element for half::bf16 {}
    impl Element for half::f16 {}
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;

    fn from_f32(value: f32) -> Self {
        value
    }

    fn to_f32(self) -> f32 {
        self
    }
}

impl Element for half::bf16 {
    const DTYPE: DType = DType::BF16;

    fn from_f32(value: f32) -> Self {
        half::bf16::from_f32(value)
    }

    fn to_f32(self) -> f32 {
        half::bf16::to_f32(self)
    }
}

impl Element for half::f16 {
    const DTYPE: DType = DType::F16;

    fn from_f32(value: f32) -> Self {
        half::f16::from_f32(value)
    }

    fn to_f32(self) -> f32 {
        half::f16::to_f32(self)
    }
}
