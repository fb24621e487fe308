//! Trainings of sharded ranks with GPUs: their steppers, and the trainer's actions.
//!
//! `shards.rs` runs and compares them; `cuda::gpu::shards` runs the same cases in processes. Each case has something
//! that the others lack.

use std::num::NonZeroU32;

use instep::{
    Accumulation, Adam, AdamW, Clip, DType, Divisor, Gradients, Lamb, LossScale, LossScaler, Master, Mode,
    Moments, OffloadPolicy, Precision, Sgd, Stepper, StepperBuilder, Strategy, Unused,
};

use super::shards::shapes;
use crate::support::with_group_clips;

/// A stepper and its trainer's actions.
#[derive(Clone, Copy)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) build: fn(StepperBuilder<'static>) -> StepperBuilder<'static>,
    /// In odd passes p1 is unused on all ranks, and p3 on odd ranks.
    pub(crate) leaves_out: bool,
    /// p5 is frozen in the second and third pass.
    pub(crate) freezes: bool,
    /// The third pass has an infinite gradient on the last rank.
    pub(crate) overflows: bool,
    /// Odd ranks have no data after two passes.
    pub(crate) joins: bool,
    /// Abandons the third pass after its first gradients.
    pub(crate) abandons: bool,
    pub(crate) micro_batches: u32,
    /// Number of neighbouring ranks that shard tensors, if not all.
    pub(crate) shard_size: Option<NonZeroU32>,
}

pub(crate) const PLAIN: Case = Case {
    name: "plain",
    build: |builder| builder,
    leaves_out: false,
    freezes: false,
    overflows: false,
    joins: false,
    abandons: false,
    micro_batches: 1,
    shard_size: None,
};

pub(crate) const CASES: [Case; 28] = [
    Case { name: "eager", leaves_out: true, ..PLAIN },
    Case {
        name: "clip_and_skip",
        build: |builder| builder.mode(Mode::Normed).clip(Clip::Global(0.5)).skip_nonfinite(true),
        leaves_out: true,
        overflows: true,
        ..PLAIN
    },
    Case {
        name: "loss_scale",
        build: |builder| {
            let scaler = LossScaler { initial_scale: 1024.0, growth_interval: 2, ..LossScaler::default() };
            builder.mode(Mode::Sequential).clip(Clip::Global(0.5)).loss_scale(LossScale::Dynamic(scaler))
        },
        overflows: true,
        ..PLAIN
    },
    Case {
        name: "groups_clipped",
        build: |builder| with_group_clips(builder).mode(Mode::Normed).skip_nonfinite(true),
        leaves_out: true,
        overflows: true,
        ..PLAIN
    },
    Case {
        name: "groups_clipped_and_scaled_over_contributors",
        build: |builder| {
            let scaler = LossScaler { initial_scale: 1024.0, growth_interval: 2, ..LossScaler::default() };
            let builder = with_group_clips(builder).mode(Mode::Sequential).loss_scale(scaler);
            builder.uneven_inputs(Divisor::ContributingRanks)
        },
        overflows: true,
        joins: true,
        ..PLAIN
    },
    Case {
        name: "each_bucket_clipped",
        build: |builder| builder.clip(Clip::PerBucket(0.25)).loss_scale(8.0),
        leaves_out: true,
        ..PLAIN
    },
    Case {
        name: "masters_and_copies",
        build: |builder| {
            let low = Precision { param: DType::BF16, master: Master::F32, ..Precision::F32 };
            builder.precision(low).copy_params(DType::F16).ema(0.9).gradients(Gradients::Average)
        },
        ..PLAIN
    },
    Case {
        name: "remainders",
        build: |builder| {
            let low = Precision { param: DType::BF16, master: Master::Remainder16, ..Precision::F32 };
            builder.precision(low).mode(Mode::Normed).clip(Clip::Global(0.5))
        },
        ..PLAIN
    },
    Case {
        name: "eight_bits",
        build: |builder| {
            let low = Precision { moments: Moments::EightBit, ..Precision::F32 };
            builder.precision(low).clip(Clip::Previous(0.5)).gradients(Gradients::Zero)
        },
        ..PLAIN
    },
    Case {
        name: "frozen_and_accumulated",
        build: |builder| builder.mode(Mode::Sequential).unused(Unused::StepZero),
        freezes: true,
        micro_batches: 2,
        ..PLAIN
    },
    Case {
        name: "each_micro_batch_summed",
        build: |builder| {
            builder.accumulation(Accumulation::Summed).mode(Mode::Normed).clip(Clip::Global(0.5))
        },
        leaves_out: true,
        freezes: true,
        micro_batches: 3,
        ..PLAIN
    },
    Case {
        name: "summed_and_zeroed",
        build: |builder| builder.accumulation(Accumulation::Summed).gradients(Gradients::Zero),
        leaves_out: true,
        micro_batches: 3,
        ..PLAIN
    },
    Case {
        name: "summed_in_sixteen_bits",
        build: |builder| {
            let low =
                Precision { param: DType::BF16, grad: DType::BF16, master: Master::F32, ..Precision::F32 };
            builder.precision(low).accumulation(Accumulation::Summed)
        },
        micro_batches: 2,
        ..PLAIN
    },
    Case { name: "frozen_and_unused", leaves_out: true, freezes: true, ..PLAIN },
    Case { name: "norms_of_parameters", leaves_out: true, overflows: true, ..PLAIN },
    Case {
        name: "norms_clipped",
        build: |builder| builder.mode(Mode::Normed).clip(Clip::Global(0.5)).skip_nonfinite(true),
        freezes: true,
        overflows: true,
        ..PLAIN
    },
    Case {
        name: "norms_of_masters",
        build: |builder| {
            let low = Precision { param: DType::BF16, master: Master::F32, ..Precision::F32 };
            builder.precision(low).clip(Clip::PerBucket(0.25)).copy_params(DType::F16)
        },
        micro_batches: 2,
        ..PLAIN
    },
    Case {
        name: "abandoned",
        build: |builder| builder.mode(Mode::Normed).clip(Clip::Global(0.5)),
        abandons: true,
        ..PLAIN
    },
    Case {
        name: "joined",
        build: |builder| builder.uneven_inputs(Divisor::ContributingRanks),
        joins: true,
        ..PLAIN
    },
    Case { name: "offloaded", build: offloaded, leaves_out: true, freezes: true, ..PLAIN },
    Case {
        name: "offloaded_clip_and_skip",
        build: |builder| {
            offloaded(builder).mode(Mode::Normed).clip(Clip::Global(0.5)).skip_nonfinite(true).threads(2)
        },
        leaves_out: true,
        overflows: true,
        ..PLAIN
    },
    Case {
        name: "offloaded_loss_scale",
        build: |builder| {
            let scaler = LossScaler { initial_scale: 1024.0, growth_interval: 2, ..LossScaler::default() };
            offloaded(builder).mode(Mode::Sequential).loss_scale(LossScale::Dynamic(scaler))
        },
        overflows: true,
        micro_batches: 2,
        ..PLAIN
    },
    Case {
        name: "offloaded_eight_bits",
        build: |builder| {
            let low = Precision {
                param: DType::BF16,
                grad: DType::BF16,
                master: Master::Remainder16,
                moments: Moments::EightBit,
                ..Precision::F32
            };
            offloaded(builder).precision(low).ema(0.9).gradients(Gradients::Zero)
        },
        leaves_out: true,
        ..PLAIN
    },
    Case {
        name: "norms_offloaded",
        build: |builder| offloaded(builder).clip(Clip::PerBucket(0.25)).unused(Unused::StepZero),
        leaves_out: true,
        freezes: true,
        ..PLAIN
    },
    Case {
        name: "offloaded_and_summed",
        build: |builder| {
            offloaded(builder).accumulation(Accumulation::Summed).mode(Mode::Normed).clip(Clip::Global(0.5))
        },
        leaves_out: true,
        micro_batches: 3,
        ..PLAIN
    },
    Case {
        name: "offloaded_and_abandoned",
        build: |builder| offloaded(builder).mode(Mode::Normed).clip(Clip::Previous(0.5)),
        abandons: true,
        ..PLAIN
    },
    Case {
        name: "offloaded_and_joined",
        build: |builder| offloaded(builder).uneven_inputs(Divisor::ContributingRanks),
        joins: true,
        ..PLAIN
    },
    Case {
        name: "offloaded_to_pageable_memory",
        build: |builder| builder.offload(OffloadPolicy { pin_memory: false }),
        leaves_out: true,
        freezes: true,
        ..PLAIN
    },
];

fn offloaded(builder: StepperBuilder<'static>) -> StepperBuilder<'static> {
    builder.offload(OffloadPolicy::default())
}

pub(crate) fn builder(case: &Case, strategy: Strategy) -> StepperBuilder<'static> {
    let optimizer = Adam { amsgrad: true, ..Adam::default() };
    let builder = match case.name {
        "frozen_and_accumulated" => {
            Stepper::builder(shapes(), Sgd { momentum: 0.9, weight_decay: 0.1, ..Sgd::default() })
        }
        name if name.starts_with("norms") => Stepper::builder(shapes(), Lamb::default()),
        "eight_bits" | "masters_and_copies" => Stepper::builder(shapes(), AdamW::default()),
        _ => Stepper::builder(shapes(), optimizer),
    };
    let builder = (case.build)(builder.bucket_cap_bytes(2500).record(true)).strategy(strategy);
    match case.shard_size {
        Some(ranks) => builder.shard_size(ranks),
        None => builder,
    }
}
