//! Defines named combinations of element types, and the storage of each combination.
//!
//! On the host, `step.rs` checks the steps of f32, and `plain_bits.rs` checks those of all other combinations.

use clap::ValueEnum;
use instep::layout::Storage;
use instep::{DType, Master, Moments, Precision, Rounding};

/// A combination of element types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Kind {
    /// f32 throughout.
    F32,
    /// f32 with states in bf16.
    F32MomentsBf16,
    /// f32 with states in 8 bits.
    F32Moments8bit,
    /// bf16 parameters and gradients; f32 master weights and states.
    Master,
    /// bf16 parameters; f32 gradients, master weights and states.
    MasterGradF32,
    /// bf16 parameters, gradients and states; f32 master weights.
    MasterMomentsBf16,
    /// bf16 parameters and gradients; 16-bit remainders; f32 states.
    Remainder16,
    /// bf16 parameters, gradients and states; 16-bit remainders.
    Remainder16MomentsBf16,
    /// bf16 parameters and gradients; 16-bit remainders; 8-bit states.
    Remainder16Moments8bit,
    /// bf16 parameters and gradients; 8-bit remainders; 8-bit states.
    Remainder8Moments8bit,
    /// bf16 throughout, rounded to nearest.
    Bf16,
    /// bf16 throughout, rounded stochastically.
    Bf16Stochastic,
    /// bf16 parameters and gradients; 8-bit states; stochastic rounding.
    Bf16Stochastic8bit,
    /// f16 parameters and gradients; f32 master weights and states.
    F16Master,
}

impl Kind {
    pub(super) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    pub(super) fn precision(self) -> Precision {
        let f32 = Precision::F32;
        let master = Precision { param: DType::BF16, grad: DType::BF16, master: Master::F32, ..f32 };
        let remainder = Precision { master: Master::Remainder16, ..master };
        let all = Precision { master: Master::None, moments: Moments::BF16, ..master };
        let stochastic = Precision { rounding: Rounding::Stochastic { seed: 1 }, ..all };
        match self {
            Kind::F32 => f32,
            Kind::F32MomentsBf16 => Precision { moments: Moments::BF16, ..f32 },
            Kind::F32Moments8bit => Precision { moments: Moments::EightBit, ..f32 },
            Kind::Master => master,
            Kind::MasterGradF32 => Precision { grad: DType::F32, ..master },
            Kind::MasterMomentsBf16 => Precision { moments: Moments::BF16, ..master },
            Kind::Remainder16 => remainder,
            Kind::Remainder16MomentsBf16 => Precision { moments: Moments::BF16, ..remainder },
            Kind::Remainder16Moments8bit => Precision { moments: Moments::EightBit, ..remainder },
            Kind::Remainder8Moments8bit => {
                Precision { master: Master::Remainder8, moments: Moments::EightBit, ..remainder }
            }
            Kind::Bf16 => all,
            Kind::Bf16Stochastic => stochastic,
            Kind::Bf16Stochastic8bit => Precision { moments: Moments::EightBit, ..stochastic },
            Kind::F16Master => Precision { param: DType::F16, grad: DType::F16, ..master },
        }
    }
}

/// Returns the storage of a launcher's tensors.
pub(super) fn storage(kind: Kind) -> Storage {
    kind.precision().into()
}
