//! Element types by name, and what a step of each is held against: the bits of the plainest instruction set.
//!
//! In what is stored in fewer bits than f32 a small step may not show at all, so no formula in f64 can be asked. Must
//! run the same steps on both sides before anything is timed.

use clap::ValueEnum;
use instep::bench::Launcher;
use instep::layout::Storage;
use instep::op::Memory;
use instep::{DType, Isa, Master, Moments, Precision, Rounding};

use super::cases::{self, Rule, Shape};
use crate::Failure;

/// A combination, by what it is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Kind {
    /// f32 throughout.
    F32,
    /// f32 with states in bf16.
    F32MomentsBf16,
    /// f32 with states in 8 bits.
    F32Moments8bit,
    /// bf16 parameters and gradients, f32 master weights and states.
    Master,
    /// The same with gradients in f32.
    MasterGradF32,
    /// The same with gradients and states in bf16.
    MasterMomentsBf16,
    /// bf16 parameters and gradients, 16-bit remainders, f32 states.
    Remainder16,
    /// The same with states in bf16.
    Remainder16MomentsBf16,
    /// The same with states in 8 bits.
    Remainder16Moments8bit,
    /// The same with 8-bit remainders.
    Remainder8Moments8bit,
    /// bf16 throughout, to the nearest.
    Bf16,
    /// bf16 throughout, rounded stochastically.
    Bf16Stochastic,
    /// bf16 parameters and gradients, stochastically, states in 8 bits.
    Bf16Stochastic8bit,
    /// f16 parameters and gradients, f32 master weights and states.
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

/// The first bucket's bytes behind two steps, against those of a launcher on the plainest instruction set. It has as many
/// buckets, since chance draws by an element's place among all.
pub(super) fn verify(
    launcher: &mut Launcher,
    (rule, kind): (Rule, Kind),
    shape: Shape,
    quick: bool,
) -> Result<(), Failure> {
    let states = rule.optimizer().state_names().len();
    let mut plain = cases::launcher(rule, kind, shape, Isa::Baseline, 1, quick)?;
    for launcher in [&mut *launcher, &mut plain] {
        for _ in 0..2 {
            launcher.begin()?;
            launcher.step(0)?;
        }
    }
    for memory in Memory::of_tensors(plain.plan(), states) {
        let theirs = plain.bytes(memory, 0);
        let ours = launcher.bytes(memory, 0);
        if let Some(at) = ours.iter().zip(&*theirs).position(|(ours, theirs)| ours != theirs) {
            let (rule, kind) = (rule.name(), kind.name());
            let what =
                format!("{rule} {kind} {memory:?}: byte {at} differs from the plainest instruction set's");
            return Err(Failure::Bench(what));
        }
    }
    Ok(())
}

/// What a launcher stores.
pub(super) fn storage(kind: Kind) -> Storage {
    kind.precision().into()
}
