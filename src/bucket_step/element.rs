//! The element types of a step's tensors. If a slice has the wrong type, the error names that type.
//!
//! Floating-point types are [`DType`]s. Remainders and 8-bit codes are plain bits, in `u16` or `u8`.

use std::fmt;

use crate::dtype::DType;
use crate::layout::{Master, Moments, Storage};
use crate::op::Memory;

/// How an element is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    Float(DType),
    U16,
    U8,
}

/// A type that the elements of a step's slices may have. Numbers are `f32`, [`bf16`](crate::bf16) or
/// [`f16`](crate::f16). Remainders are `u16` or `u8`, and 8-bit codes are `u8`.
#[diagnostic::on_unimplemented(
    message = "a step takes no elements of `{Self}`",
    label = "use f32, bf16, f16, or u16 and u8 for remainders and 8-bit codes"
)]
pub trait StepElement: sealed::StepElement {
    #[doc(hidden)]
    const STORED: Stored;
}

mod sealed {
    /// A plain number. Every bit pattern is a valid value of its type.
    pub trait StepElement: bytemuck::Pod {}
}

macro_rules! elements {
    ($($element:ty => $stored:expr),*) => {
        $(
            impl sealed::StepElement for $element {}

            impl StepElement for $element {
                const STORED: Stored = $stored;
            }
        )*
    };
}

elements! {
    f32 => Stored::Float(DType::F32),
    half::bf16 => Stored::Float(DType::BF16),
    half::f16 => Stored::Float(DType::F16),
    u16 => Stored::U16,
    u8 => Stored::U8
}

impl Stored {
    /// Returns the element type of one kind of tensor.
    pub(super) fn of(memory: Memory, storage: &Storage) -> Stored {
        let Storage { precision, copy, .. } = storage;
        match memory {
            Memory::Params => Stored::Float(precision.param),
            Memory::Grads => Stored::Float(precision.grad),
            Memory::Master => match precision.master {
                Master::Remainder16 => Stored::U16,
                Master::Remainder8 => Stored::U8,
                Master::None | Master::F32 => Stored::Float(DType::F32),
            },
            Memory::Copy => Stored::Float(copy.unwrap_or(DType::F32)),
            Memory::State(_) => match precision.moments {
                Moments::F32 => Stored::Float(DType::F32),
                Moments::BF16 => Stored::Float(DType::BF16),
                Moments::EightBit => Stored::U8,
            },
            _ => Stored::Float(DType::F32),
        }
    }
}

impl fmt::Display for Stored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stored::Float(dtype) => dtype.fmt(f),
            Stored::U16 => f.write_str("u16"),
            Stored::U8 => f.write_str("u8"),
        }
    }
}
