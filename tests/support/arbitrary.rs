//! Random trainings for `tests/schedule/property.rs`.
//!
//! A [`Training`] defines what is computed; a [`Setup`] defines how, and must not change a bit of the result. Gradients
//! are formulas of pass, rank, parameter and element, so a case is small and shrinks. The crate accepts all trainings
//! that are drawn, and any training that it accepts can be drawn; `tests/support/training.rs` carries them out.

use instep::{Adam, AdamW, DType, Isa, Mode, Precision, SegmentAction, Sgd, Unused};
use proptest::collection::vec;
use proptest::option::weighted;
use proptest::prelude::*;
use proptest::sample::select;

use crate::support::stored::accepted;
use crate::support::{MODES, Optim, few_optimizers};

pub(crate) const MAX_PARAMS: usize = 12;

/// The treatment of one parameter in one pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Treatment {
    Used,
    /// Its last use is not handed over, so `finish` must handle it.
    Late,
    /// The parameter is read, but gets no gradient.
    Read,
    Untouched,
}

impl Treatment {
    pub(crate) fn has_gradient(self) -> bool {
        matches!(self, Treatment::Used | Treatment::Late)
    }
}

/// One element of one rank's gradient that is not painted. Indices wrap, so they fit any layout.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Special {
    pub param: usize,
    pub element: usize,
    pub rank: usize,
    pub value: f32,
}

#[derive(Clone, Debug)]
pub(crate) struct PassPlan {
    /// There are [`MAX_PARAMS`] of them, as in `order`, so that a layout can shrink by itself.
    pub treatments: Vec<Treatment>,
    pub order: Vec<usize>,
    pub ranks_differ: bool,
    pub scale: f32,
    pub specials: Vec<Special>,
    /// The pass is abandoned after this number of parameters.
    pub abandon: Option<usize>,
    /// Parameters are loaded before the pass.
    pub reload: bool,
    /// The status is read after the pass.
    pub status: bool,
    /// Parameters that are frozen before the pass, or unfrozen if they were frozen. Indices wrap.
    pub toggles: Vec<usize>,
}

#[derive(Clone, Debug)]
pub(crate) struct Training {
    /// Length, number of uses, action.
    pub params: Vec<(usize, u32, SegmentAction)>,
    pub optim: Optim,
    /// Gradients are f32: in 16 bits the sums of painted gradients would be rounded, and no single rank could get them.
    pub precision: Precision,
    pub unused: Unused,
    pub loss_scale: f64,
    pub max_norm: Option<f64>,
    pub skip_nonfinite: bool,
    pub world_size: u32,
    /// This number of neighbouring ranks is summed first, then those sums.
    pub summed_by: usize,
    pub passes: Vec<PassPlan>,
    /// The number of passes after which each rank has no more data; rank 0 has data for all passes. None means that all
    /// ranks have data for all passes.
    pub data: Option<Vec<usize>>,
}

/// The way in which a training is carried out.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    mode: Mode,
    pub cap: u64,
    pub threads: Option<usize>,
    pub isa: Isa,
    /// Permutes each pass's order.
    pub order: Vec<usize>,
    /// What ranks shard.
    pub strategy: instep::Strategy,
    /// The number of ranks that shard tensors, if not all.
    pub shard_size: Option<std::num::NonZeroU32>,
    /// Steps run in the host's memory.
    pub offloads: bool,
    /// A seed for borrowed memory, which moves before each pass. It is unset if ranks run out of data, which borrowed
    /// memory does not support.
    pub lent: Option<u64>,
    /// The passes after which the stepper rebuilds its buckets, as one bit each.
    pub rebuilds: u8,
}

#[rustfmt::skip] // A table: one case per line.
fn optimizer() -> impl Strategy<Value = Optim> {
    let mut optimizers = few_optimizers().to_vec();
    optimizers.extend([
        Optim::of(Sgd { lr: 0.05, maximize: true, weight_decay: 0.04, ..Sgd::default() }),
        Optim::of(Sgd { lr: 0.05, momentum: 0.9, dampening: 0.3, ..Sgd::default() }),
        Optim::of(Adam { betas: (0.3, 0.45), maximize: true, ..Adam::default() }),
        Optim::of(AdamW::default()),
    ]);
    select(optimizers)
}

fn precision() -> impl Strategy<Value = Precision> {
    let others = accepted().filter(|precision| precision.grad == DType::F32).collect::<Vec<_>>();
    prop_oneof![2 => Just(Precision::F32), 3 => select(others)]
}

fn parameter() -> impl Strategy<Value = (usize, u32, SegmentAction)> {
    let len = prop_oneof![
        3 => select(vec![0, 1, 3, 255, 256, 257, 2048, 2049]),
        1 => 0..1000usize,
        1 => 0..5000usize,
    ];
    let step = SegmentAction::Step;
    let actions = select(vec![step, step, step, SegmentAction::Average, SegmentAction::Leave]);
    (len, select(vec![1, 1, 1, 2, 3]), actions)
}

fn special() -> impl Strategy<Value = Special> {
    let nan = f32::from_bits(0xffc0_0001);
    let values = vec![nan, f32::INFINITY, f32::NEG_INFINITY, 3e38, -3e38, 1e-39, 1e-44, -0.0, 1e20];
    (0..MAX_PARAMS, 0..5000usize, 0..4usize, select(values))
        .prop_map(|(param, element, rank, value)| Special { param, element, rank, value })
}

fn permutation() -> impl Strategy<Value = Vec<usize>> {
    Just((0..MAX_PARAMS).collect::<Vec<_>>()).prop_shuffle()
}

fn pass_plan() -> impl Strategy<Value = PassPlan> {
    let treatment = prop_oneof![
        6 => Just(Treatment::Used),
        1 => Just(Treatment::Late),
        1 => Just(Treatment::Read),
        1 => Just(Treatment::Untouched),
    ];
    // A pass that touches nothing is the one that no wait of the trainer's protects.
    let treatments = prop_oneof![
        8 => vec(treatment, MAX_PARAMS),
        1 => Just(vec![Treatment::Untouched; MAX_PARAMS]),
    ];
    let scale = select(vec![1.0f32, 1.0, 1.0, 1e-20, 1e-38, 1e30]);
    let specials = prop_oneof![2 => Just(Vec::new()), 1 => vec(special(), 0..4)];
    let flags = (any::<bool>(), weighted(0.2, 0..=MAX_PARAMS), prop::bool::weighted(0.15), any::<bool>());
    let toggles = prop_oneof![3 => Just(Vec::new()), 1 => vec(0..MAX_PARAMS, 1..4)];
    (treatments, permutation(), scale, specials, flags, toggles).prop_map(
        |(treatments, order, scale, specials, (ranks_differ, abandon, reload, status), toggles)| PassPlan {
            treatments,
            order,
            ranks_differ,
            scale,
            specials,
            abandon,
            reload,
            status,
            toggles,
        },
    )
}

pub(crate) fn training() -> impl Strategy<Value = Training> {
    let options = (
        select(vec![Unused::Skip, Unused::Skip, Unused::StepZero]),
        select(vec![1.0, 128.0, 3.0]),
        weighted(0.3, select(vec![1e-3, 1.0, 1e30])),
        prop::bool::weighted(0.3),
    );
    let params = vec(parameter(), 1..=MAX_PARAMS);
    let data = weighted(0.3, vec(0..5usize, 4));
    let optimizer = (optimizer(), precision());
    (params, optimizer, options, 1..=4u32, vec(pass_plan(), 1..6), data).prop_map(
        |(
            params,
            (optim, precision),
            (unused, loss_scale, max_norm, skip_nonfinite),
            world_size,
            mut passes,
            data,
        )| {
            // A rank that runs out of data could not give up after the same bucket as the others.
            if data.is_some() {
                passes.iter_mut().for_each(|pass| pass.abandon = None);
            }
            // Without elements there is nothing to count ranks in.
            let data = data.filter(|_| params.iter().any(|(len, ..)| *len > 0));
            Training {
                params,
                optim,
                precision,
                unused,
                loss_scale,
                max_norm,
                skip_nonfinite,
                world_size,
                summed_by: world_size as usize,
                passes,
                data,
            }
        },
    )
}

pub(crate) fn setup() -> impl Strategy<Value = Setup> {
    let mode = select(MODES.to_vec());
    let threads = select(vec![None, Some(1), Some(2), Some(3)]);
    let cap = select(vec![1, 1000, 5000, 1 << 20]);
    let moves = (weighted(0.4, any::<u64>()), prop_oneof![1 => Just(0u8), 1 => any::<u8>()]);
    (mode, cap, threads, select(Isa::available()), permutation(), moves).prop_map(
        |(mode, cap, threads, isa, order, (lent, rebuilds))| {
            let strategy = instep::Strategy::Replicated;
            Setup {
                mode,
                cap,
                threads,
                isa,
                order,
                strategy,
                shard_size: None,
                offloads: false,
                lent,
                rebuilds,
            }
        },
    )
}

impl Setup {
    /// Returns one bucket, one thread, no overlap, and no vector wider than the platform's default; all other setups
    /// are compared with it.
    pub(crate) fn plain() -> Setup {
        let order = (0..MAX_PARAMS).collect();
        let (mode, threads) = (Mode::Sequential, Some(1));
        Setup {
            mode,
            cap: 1 << 30,
            threads,
            isa: Isa::Baseline,
            order,
            strategy: instep::Strategy::Replicated,
            shard_size: None,
            offloads: false,
            lent: None,
            rebuilds: 0,
        }
    }

    /// Returns whether the caller may own the buckets, or the stepper may rebuild them.
    pub(crate) fn is_plainly_replicated(&self) -> bool {
        self.strategy == instep::Strategy::Replicated && !self.offloads
    }

    /// Returns the mode, or another one if Eager would refuse the training.
    pub(crate) fn mode(&self, training: &Training) -> Mode {
        if self.mode == Mode::Eager && training.wants_norm() { Mode::Normed } else { self.mode }
    }
}

impl Training {
    /// Returns whether a rank has data for a pass.
    pub(crate) fn has_data(&self, at: usize, rank: usize) -> bool {
        rank == 0 || self.data.as_ref().is_none_or(|data| at < data[rank])
    }

    pub(crate) fn wants_norm(&self) -> bool {
        self.max_norm.is_some() || self.skip_nonfinite
    }
}
