//! Element storage of every stream, and the streams besides parameter, gradient and states.
//!
//! Arithmetic is f32 for every storage; storing rounds once. A combination that no kernel has is refused here by name,
//! because a step would be too late.

use crate::abi::INSTEP_QUANTUM;
use crate::dtype::DType;
use crate::error::{Error, Result};

/// The bits that a 16-bit parameter lacks, kept so that small updates are not lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Master {
    /// Nothing: the parameter is all there is.
    #[default]
    None,
    /// An f32 weight beside it. The parameter is its value to the nearest, ties to even. 4 bytes per element.
    F32,
    /// The lower half of an f32 whose upper half is the bf16 parameter: the same values as with [`F32`](Self::F32), bit
    /// for bit, in 2 bytes per element. The parameter is that value to the nearest, ties away from zero.
    Remainder16,
    /// The next 8 bits of it: a weight with a fraction of 15 bits, in 1 byte per element.
    Remainder8,
}

/// Storage of optimizer states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Moments {
    /// 4 bytes per element.
    #[default]
    F32,
    /// 2 bytes per element. Averages that change by less than 1/512 in a step stand still unless rounding is
    /// [stochastic](Rounding::Stochastic): with a decay rate of 0.999 the second moment never falls.
    BF16,
    /// A code of 8 bits per element, and an f32 per block of 256, counted from the start of each parameter. To the
    /// nearest, an average that moves by less than half a code, about 1/125 of itself near its block's largest, stands
    /// still: a second moment of decay rate 0.999 that falls below its block's largest is found out late, and steps
    /// are too small until then. Take [stochastic](Rounding::Stochastic) rounding, which keeps the mean. An optimizer's
    /// eps below 2^-45 is refused: so small second moments are zero.
    EightBit,
}

/// Rounding of values that are stored in fewer bits than f32: by a parameter without master, by a
/// [24-bit master](Master::Remainder8) and by states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// To the nearest; ties to even.
    #[default]
    Nearest,
    /// Rounds to one of the two neighbours, with probabilities that make the mean the value. The random bits depend on
    /// the seed, the parameter's number of updates and the element's place in the layout. They do not depend on
    /// buckets, ranks, threads or device, so the result has the same bits everywhere, and a resumed run has those of an
    /// uninterrupted one.
    Stochastic {
        /// Ranks must have the same.
        seed: u64,
    },
}

/// Element types of one stepper's tensors.
///
/// A master needs 16-bit parameters, a remainder bf16 ones. Stochastic rounding needs tensors to round: bf16 parameters
/// without master or with [`Remainder8`](Master::Remainder8), or states of fewer bits; f16 parameters without master
/// refuse it. [Adadelta](crate::Adadelta) and [Rprop](crate::Rprop) refuse states in 8 bits, and centered
/// [RMSprop](crate::RmsProp) refuses all but f32.
///
/// ```
/// use instep::{DType, Layout, Master, Moments, Precision, Rounding, Solo, Stepper};
///
/// let layout = Layout::builder().param("w", 2).build()?;
/// let w = layout.id("w")?;
/// let precision = Precision {
///     param: DType::BF16,
///     grad: DType::BF16,
///     master: Master::Remainder16,
///     moments: Moments::EightBit,
///     rounding: Rounding::Stochastic { seed: 1 },
///     ..Precision::default()
/// };
/// let builder = Stepper::builder(&layout, instep::AdamW::default()).precision(precision);
/// let mut stepper = builder.host(Solo::default())?;
/// stepper.write(w, &[1.0, 2.0])?;
/// let mut pass = stepper.begin()?;
/// pass.write(w.grad(), &[0.5, -0.5])?;
/// pass.finish()?;
/// assert_eq!(stepper.view::<half::bf16>(w)?[0], half::bf16::from_f32(0.999));
/// # Ok::<(), instep::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Precision {
    /// Parameters.
    pub param: DType,
    /// Gradients, in which the sum over ranks is made too.
    pub grad: DType,
    /// The missing bits of 16-bit parameters.
    pub master: Master,
    /// Optimizer states.
    pub moments: Moments,
    /// Rounding of values that lose bits.
    pub rounding: Rounding,
}

impl Default for Precision {
    /// f32 throughout.
    fn default() -> Self {
        Precision::F32
    }
}

impl Precision {
    /// f32 throughout.
    pub const F32: Precision = Precision {
        param: DType::F32,
        grad: DType::F32,
        master: Master::None,
        moments: Moments::F32,
        rounding: Rounding::Nearest,
    };

    /// Refuses what no kernel has.
    ///
    /// # Errors
    /// `Config` with the field that does not go with the others.
    pub fn validate(&self) -> Result<()> {
        let refuse = |field, value: &dyn std::fmt::Debug, wrong, remedy| {
            Err(Error::config(field, format!("{value:?}"), wrong, remedy))
        };
        let is_remainder = matches!(self.master, Master::Remainder16 | Master::Remainder8);
        if self.master != Master::None && self.param == DType::F32 {
            return refuse("master", &self.master, "f32 parameters need no master", "leave the master out");
        }
        if is_remainder && self.param != DType::BF16 {
            return refuse(
                "master",
                &self.master,
                "remainders exist only for bf16 parameters",
                "use an f32 master",
            );
        }
        if let Rounding::Stochastic { .. } = self.rounding {
            let rounds_params =
                self.param != DType::F32 && matches!(self.master, Master::None | Master::Remainder8);
            if rounds_params && self.param == DType::F16 {
                let wrong = "stochastic rounding of parameters supports bf16 only";
                return refuse(
                    "rounding",
                    &self.rounding,
                    wrong,
                    "use bf16, a master or rounding to nearest",
                );
            }
            if !rounds_params && self.moments == Moments::F32 {
                return refuse(
                    "rounding",
                    &self.rounding,
                    "neither parameters nor states lose bits in this precision",
                    "round to nearest",
                );
            }
        }
        Ok(())
    }
}

/// Everything that a plan stores per element.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Storage {
    /// Element types.
    pub precision: Precision,
    /// Each parameter once more, in this type.
    pub copy: Option<DType>,
    /// An exponential moving average of each parameter, in f32.
    pub ema: bool,
}

impl From<Precision> for Storage {
    fn from(precision: Precision) -> Self {
        Storage { precision, ..Storage::default() }
    }
}

impl Master {
    /// Returns the size of one element.
    pub const fn bytes(self) -> u64 {
        match self {
            Master::None => 0,
            Master::F32 => 4,
            Master::Remainder16 => 2,
            Master::Remainder8 => 1,
        }
    }
}

impl Moments {
    /// Returns the size of one element, without the scales of blocks.
    pub const fn bytes(self) -> u64 {
        match self {
            Moments::F32 => 4,
            Moments::BF16 => 2,
            Moments::EightBit => 1,
        }
    }

    /// Returns the size of the scales of so many elements' blocks.
    pub(crate) const fn scale_bytes(self, elements: u64) -> u64 {
        match self {
            Moments::F32 | Moments::BF16 => 0,
            Moments::EightBit => elements.div_ceil(INSTEP_QUANTUM as u64) * DType::F32.bytes(),
        }
    }
}
