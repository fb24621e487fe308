//! Element types of the tensors that a step touches.
//!
//! A leaf: names and sizes only, no conversion. Only f32 exists so far; f64, sparse and complex tensors are not
//! planned, since no fused kernel for them would be faster than the caller's own loop.

/// An element type.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
}

impl DType {
    /// Size of one element.
    pub const fn bytes(self) -> u64 {
        match self {
            DType::F32 => 4,
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
        })
    }
}
