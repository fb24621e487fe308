//! Element types of the tensors that a step touches, or that travel between ranks.
//!
//! A leaf: names and sizes only, no conversion. A stepper's own tensors are f32 so far; f64, sparse and complex ones are
//! not planned, since no fused kernel for them would be faster than the caller's own loop.

/// An element type.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// The upper half of an f32, rounded.
    BF16,
    /// IEEE 754 binary16.
    F16,
}

impl DType {
    /// Size of one element.
    pub const fn bytes(self) -> u64 {
        match self {
            DType::F32 => 4,
            DType::BF16 | DType::F16 => 2,
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
