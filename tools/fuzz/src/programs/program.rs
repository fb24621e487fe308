//! A program: a model and what a training does with it, as plain data.
//!
//! It depends on nothing in the library. Gradients and written values are functions of the seed and of their place. The
//! run and the model compute them separately, and a program stays small.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Sgd,
    Adam,
    AdamW,
    Adagrad,
    RmsProp,
    Adadelta,
    Adamax,
    Lion,
    NAdam,
    RAdam,
    Lamb,
    AdEmaMix,
    Rprop,
}

pub(crate) const KINDS: [Kind; 13] = [
    Kind::Sgd,
    Kind::Adam,
    Kind::AdamW,
    Kind::Adagrad,
    Kind::RmsProp,
    Kind::Adadelta,
    Kind::Adamax,
    Kind::Lion,
    Kind::NAdam,
    Kind::RAdam,
    Kind::Lamb,
    Kind::AdEmaMix,
    Kind::Rprop,
];

/// An optimizer. Fields that a kind does not need are ignored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rule {
    pub(crate) kind: Kind,
    pub(crate) lr: f64,
    /// Also SGD's and RMSprop's momentum.
    pub(crate) beta1: f64,
    /// Also RMSprop's alpha and Adadelta's rho.
    pub(crate) beta2: f64,
    pub(crate) weight_decay: f64,
    pub(crate) eps: f64,
    /// Nesterov, amsgrad, centered, decoupled decay, or an initial accumulator.
    pub(crate) flag: bool,
    pub(crate) maximize: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Param {
    pub(crate) len: usize,
    /// Whether the parameter is in the second group instead of the default one.
    pub(crate) second: bool,
    pub(crate) local: bool,
    /// Whether the parameter stays f32 in a group of 16 bits.
    pub(crate) f32: bool,
    pub(crate) uses: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Strategy {
    Replicated,
    Zero,
    Fsdp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Sequential,
    Eager,
    Normed,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Clip {
    None,
    Global(f64),
    Previous(f64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unused {
    Skip,
    StepZero,
    Refuse,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Divisor {
    WorldSize,
    Contributing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gradients {
    Keep,
    Zero,
    Average,
    Release,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Type {
    F32,
    Bf16,
    F16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Master {
    None,
    F32,
    Remainder16,
    Remainder8,
}

/// Element types of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Precision {
    pub(crate) param: Type,
    pub(crate) grad: Type,
    pub(crate) master: Master,
    pub(crate) bf16_moments: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum LossScale {
    Constant(f64),
    /// First scale and growth interval; the factors are 2 and 1/2.
    Dynamic(f64, u32),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Schedule {
    Step { lr: f64, size: u64, gamma: f64 },
    Cosine { lr: f64, period: u64, lowest: f64 },
    WarmUp { lr: f64, steps: u64, start: f64 },
}

/// The options of a stepper.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Config {
    pub(crate) ranks: u32,
    pub(crate) strategy: Strategy,
    pub(crate) shard_size: Option<u32>,
    pub(crate) offload: bool,
    pub(crate) mode: Mode,
    pub(crate) clip: Clip,
    pub(crate) skip_nonfinite: bool,
    pub(crate) loss_scale: LossScale,
    pub(crate) unused: Unused,
    pub(crate) uneven: Option<Divisor>,
    /// The divisor of sums, instead of the number of ranks.
    pub(crate) divisor: Option<f64>,
    pub(crate) cap_bytes: Option<u64>,
    /// Number of kernel threads; 0 means the threads of the group of ranks.
    pub(crate) threads: usize,
    pub(crate) inline: bool,
    pub(crate) summed: bool,
    pub(crate) gradients: Gradients,
    /// The precisions of the default group and of the second group.
    pub(crate) precisions: [Precision; 2],
    pub(crate) copy: Option<Type>,
    pub(crate) ema: Option<f64>,
    pub(crate) schedules: [Option<Schedule>; 2],
    pub(crate) record: bool,
}

/// How a phase gets its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// Values are written. Ranks other than the first may write other values, which the first pass replaces.
    Fresh { differ: bool },
    /// The checkpoint that the phase before has left.
    Load,
    /// The parameters that the phase before has exported.
    Import,
}

/// What a phase leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    Nothing,
    Save,
    SaveTogether,
    /// Rank 0 writes to memory; if tensors are sharded, all ranks write.
    Write,
    Export {
        averages: bool,
        f32: bool,
    },
    /// One rank leaves, or does something other than the rest, and the next pass fails. The others are rescued. The
    /// first of them writes a checkpoint, if `saves`.
    Doom {
        doom: Doom,
        rank: u32,
        saves: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Doom {
    Dies,
    Lr(usize),
    Hyper(usize),
    Multiplier(usize),
    PreviousNorm,
    Scaler,
    StepCount(usize),
    State(usize),
    Param(usize),
    Frozen(usize),
}

/// How a pass ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Finish,
    /// The pass is abandoned after this number of micro-batches, and then of hand-overs.
    Abandon {
        micro_batches: u32,
        hand_overs: usize,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Pass {
    /// The number from which the pass's gradients follow; no other pass of the program has it.
    pub(crate) number: u64,
    pub(crate) micro_batches: u32,
    /// Whether each rank has no data.
    pub(crate) joins: Vec<bool>,
    /// The parameters that each rank does not write, as bits.
    pub(crate) unwritten: Vec<u32>,
    /// Parameters that all ranks declare unused.
    pub(crate) named: Vec<usize>,
    /// A local parameter that one rank declares unused after its hand-over.
    pub(crate) named_late: Option<(u32, usize)>,
    /// A rank, a parameter and an element whose gradient is not finite.
    pub(crate) poison: Option<(u32, usize, usize)>,
    /// Whether a local gradient is `write`n in each micro-batch, so that the last one counts.
    pub(crate) rewrites: bool,
    /// Parameters that no rank hands over before the end, as bits.
    pub(crate) left_to_finish: u32,
    /// Whether parameters are read before their hand-over.
    pub(crate) reads: bool,
    /// Whether calls that must be refused are made.
    pub(crate) probes: bool,
    pub(crate) end: End,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Action {
    Pass(Pass),
    /// Reads everything on all ranks.
    Observe,
    /// Reads the outcome of the last pass.
    Status,
    Freeze(usize, bool),
    SetLr(usize, f64),
    SetHyper(usize, f64),
    SetMultiplier(usize, f64),
    SetSchedule(usize, Option<Schedule>),
    SetScheduleStep(u64),
    SetPreviousNorm(Option<f64>),
    SetScaler(f64, u32),
    WriteParam {
        param: usize,
        salt: u64,
        differ: bool,
    },
    /// Writes all states, because a first moment without a second one would be divided by nearly 0.
    WriteStates {
        param: usize,
        salt: u64,
    },
    WriteEma {
        param: usize,
        salt: u64,
    },
    SetCount {
        param: usize,
        count: u64,
    },
    Unshard(usize),
    Reshard(usize),
    Rebuild,
    /// Saves to memory and loads the result into the same stepper.
    Reload,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Phase {
    pub(crate) config: Config,
    pub(crate) entry: Entry,
    pub(crate) actions: Vec<Action>,
    pub(crate) exit: Exit,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Program {
    pub(crate) seed: u64,
    pub(crate) params: Vec<Param>,
    /// The rules of the default group and of the second group.
    pub(crate) rules: [Rule; 2],
    pub(crate) phases: Vec<Phase>,
}

impl Program {
    pub(crate) fn name(&self, param: usize) -> String {
        format!("layer.{param}")
    }

    pub(crate) fn rule(&self, param: usize) -> &Rule {
        &self.rules[usize::from(self.params[param].second)]
    }
}

impl Config {
    /// The element types of a parameter.
    pub(crate) fn precision(&self, param: &Param) -> Precision {
        let group = self.precisions[usize::from(param.second)];
        if param.f32 {
            Precision { param: Type::F32, grad: Type::F32, master: Master::None, ..group }
        } else {
            group
        }
    }

    pub(crate) fn is_sharded(&self) -> bool {
        self.strategy != Strategy::Replicated
    }

    /// Returns the number of ranks that have shards of a tensor.
    pub(crate) fn shards(&self) -> u32 {
        if self.is_sharded() { self.shard_size.unwrap_or(self.ranks) } else { 1 }
    }

    pub(crate) fn skips(&self) -> bool {
        self.skip_nonfinite || matches!(self.loss_scale, LossScale::Dynamic(..))
    }
}

/// A hash of some numbers, for choices that run and model must make in the same way.
pub(crate) fn hash(numbers: &[u64]) -> u64 {
    numbers.iter().fold(0x9e37_79b9_7f4a_7c15, |state, number| {
        let mut x = state ^ number.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    })
}

/// Returns the unscaled gradient of an element: a small dyadic number, whose sums over ranks and micro-batches are
/// exact in bf16.
pub(crate) fn gradient(
    seed: u64,
    pass: u64,
    rank: u32,
    micro_batch: u32,
    param: usize,
    element: usize,
) -> f64 {
    let place = [seed, pass, u64::from(rank), u64::from(micro_batch), param as u64, element as u64];
    let drawn = hash(&place) >> 20;
    if drawn.is_multiple_of(8) { 0.0 } else { ((drawn >> 8) % 31) as f64 / 8.0 - 15.0 / 8.0 }
}

/// Returns a value to write to a tensor, which is exact in every format.
pub(crate) fn value(seed: u64, salt: u64, param: usize, element: usize) -> f64 {
    let drawn = hash(&[seed, salt, param as u64, element as u64]) >> 20;
    let magnitude = (drawn % 31 + 1) as f64 / 16.0;
    if (drawn >> 8).is_multiple_of(2) { magnitude } else { -magnitude }
}

/// Returns the order in which a rank hands parameters over.
pub(crate) fn order(program: &Program, pass: &Pass, rank: u32) -> Vec<usize> {
    // Ranks that give a pass up have launched the same buckets.
    let rank = if pass.end == End::Finish { rank } else { 0 };
    let uses =
        program.params.iter().enumerate().flat_map(|(k, param)| std::iter::repeat_n(k, param.uses as usize));
    let mut order: Vec<(u64, usize)> = uses
        .enumerate()
        .map(|(at, k)| {
            let drawn = hash(&[program.seed, pass.number, 77, u64::from(rank), at as u64]);
            // Mostly from the last one back, as backward has it.
            let back = (program.params.len() - k) as u64;
            (if pass.number.is_multiple_of(3) { drawn } else { back << 32 | drawn >> 40 }, k)
        })
        .collect();
    order.sort_unstable();
    order.into_iter().map(|(_, k)| k).collect()
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (k, param) in self.params.iter().enumerate() {
            writeln!(f, "  {}: {param:?}", self.name(k))?;
        }
        writeln!(f, "  default: {:?}\n  second: {:?}", self.rules[0], self.rules[1])?;
        for (k, phase) in self.phases.iter().enumerate() {
            writeln!(f, "  phase {k}: {:?}\n    enters by {:?}", phase.config, phase.entry)?;
            for (at, action) in phase.actions.iter().enumerate() {
                writeln!(f, "    {at}: {action:?}")?;
            }
            writeln!(f, "    ends with {:?}", phase.exit)?;
        }
        Ok(())
    }
}
