//! A program's options and optimizers, as the library has them.
//!
//! This file translates and decides nothing.

use std::num::NonZeroU32;
use std::time::Duration;

use instep::optim::Optimizer;
use instep::{
    Accumulation, AdEmaMix, Adadelta, Adagrad, Adam, AdamW, Adamax, Collective, DEFAULT_GROUP, DType, Lamb,
    Layout, Lion, LossScaler, LrSchedule, Moments, NAdam, OffloadPolicy, RAdam, Result, RmsProp, Rounding,
    Rprop, Sgd, Stepper, StepperBuilder,
};

use super::program::*;
use super::rules::{ALPHA, BETA3, ETAS, INITIAL_SUM, LR_DECAY, MOMENTUM_DECAY, STEP_SIZES};

/// How long ranks wait for each other before the program is a finding.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

pub(crate) const GROUPS: [&str; 2] = [DEFAULT_GROUP, "second"];

pub(crate) fn layout(program: &Program) -> Result<Layout> {
    let params = program.params.iter().enumerate();
    let builder = params.fold(Layout::builder(), |builder, (k, param)| {
        let mut builder = builder.param(program.name(k), param.len).uses(param.uses);
        if param.second {
            builder = builder.in_group(GROUPS[1]);
        }
        if param.local {
            builder = builder.local();
        }
        if param.f32 { builder.dtype(DType::F32) } else { builder }
    });
    builder.build()
}

pub(crate) fn stepper(
    program: &Program,
    config: &Config,
    layout: &Layout,
    comm: impl Collective + 'static,
) -> Result<Stepper> {
    let mut builder = Stepper::builder_without_optimizer(layout);
    for (group, rule) in GROUPS.iter().zip(&program.rules) {
        if layout.groups().iter().any(|known| known == group) {
            builder = with_rule(builder, group, rule);
        }
    }
    builder = builder.precision(precision(&config.precisions[0])).strategy(match config.strategy {
        Strategy::Replicated => instep::Strategy::Replicated,
        Strategy::Zero => instep::Strategy::Zero,
        Strategy::Fsdp => instep::Strategy::Fsdp,
    });
    if layout.groups().len() > 1 {
        builder = builder.group_precision(GROUPS[1], precision(&config.precisions[1]));
    }
    if let Some(size) = config.shard_size.and_then(NonZeroU32::new) {
        builder = builder.shard_size(size);
    }
    if config.offload {
        builder = builder.offload(OffloadPolicy::default());
    }
    builder = builder.mode(match config.mode {
        Mode::Sequential => instep::Mode::Sequential,
        Mode::Eager => instep::Mode::Eager,
        Mode::Normed => instep::Mode::Normed,
    });
    builder = match config.clip {
        Clip::None => builder,
        Clip::Global(most) => builder.clip(instep::Clip::Global(most)),
        Clip::Previous(most) => builder.clip(instep::Clip::Previous(most)),
    };
    builder = builder.skip_nonfinite(config.skip_nonfinite);
    builder = match config.loss_scale {
        LossScale::Constant(scale) => builder.loss_scale(scale),
        LossScale::Dynamic(initial_scale, growth_interval) => {
            builder.loss_scale(LossScaler { initial_scale, growth_interval, ..LossScaler::default() })
        }
    };
    builder = builder.unused(match config.unused {
        Unused::Skip => instep::Unused::Skip,
        Unused::StepZero => instep::Unused::StepZero,
        Unused::Refuse => instep::Unused::Refuse,
    });
    builder = match config.uneven {
        None => builder,
        Some(Divisor::WorldSize) => builder.uneven_inputs(instep::Divisor::WorldSize),
        Some(Divisor::Contributing) => builder.uneven_inputs(instep::Divisor::ContributingRanks),
    };
    if let Some(divisor) = config.divisor {
        builder = builder.gradient_divisor(divisor);
    }
    if let Some(bytes) = config.cap_bytes {
        builder = builder.bucket_cap_bytes(bytes);
    }
    if config.threads > 0 {
        builder = builder.threads(config.threads);
    }
    if config.inline {
        builder = builder.inline();
    }
    if config.summed {
        builder = builder.accumulation(Accumulation::Summed);
    }
    builder = builder.gradients(match config.gradients {
        Gradients::Keep => instep::Gradients::Keep,
        Gradients::Zero => instep::Gradients::Zero,
        Gradients::Average => instep::Gradients::Average,
        Gradients::Release => instep::Gradients::Release,
    });
    if let Some(copy) = config.copy {
        builder = builder.copy_params(dtype(copy));
    }
    if let Some(decay) = config.ema {
        builder = builder.ema(decay);
    }
    for (group, schedule) in GROUPS.iter().zip(&config.schedules) {
        if let Some(schedule) = schedule {
            builder = builder.lr_schedule(*group, lr_schedule(schedule));
        }
    }
    builder.record(config.record).deadline(DEADLINE).host(comm)
}

pub(crate) fn lr_schedule(schedule: &Schedule) -> LrSchedule {
    match *schedule {
        Schedule::Step { lr, size, gamma } => LrSchedule::step(lr, size, gamma),
        Schedule::Cosine { lr, period, lowest } => LrSchedule::cosine(lr, period, lowest),
        Schedule::WarmUp { lr, steps, start } => LrSchedule::constant(lr).warm_up(steps, start),
    }
}

pub(crate) fn dtype(of: Type) -> DType {
    match of {
        Type::F32 => DType::F32,
        Type::Bf16 => DType::BF16,
        Type::F16 => DType::F16,
    }
}

fn precision(of: &Precision) -> instep::Precision {
    instep::Precision {
        param: dtype(of.param),
        grad: dtype(of.grad),
        master: match of.master {
            Master::None => instep::Master::None,
            Master::F32 => instep::Master::F32,
            Master::Remainder16 => instep::Master::Remainder16,
            Master::Remainder8 => instep::Master::Remainder8,
        },
        moments: if of.bf16_moments { Moments::BF16 } else { Moments::F32 },
        rounding: Rounding::Nearest,
    }
}

fn with_rule<'a>(builder: StepperBuilder<'a>, group: &str, rule: &Rule) -> StepperBuilder<'a> {
    fn add<'a>(
        builder: StepperBuilder<'a>,
        group: &str,
        rule: impl Optimizer + 'static,
    ) -> StepperBuilder<'a> {
        builder.group(group, rule)
    }
    let Rule { kind, lr, beta1, beta2, weight_decay, eps, flag, maximize } = *rule;
    let betas = (beta1, beta2);
    match kind {
        Kind::Sgd => {
            let sgd = Sgd { lr, momentum: beta1, dampening: 0.0, weight_decay, nesterov: flag, maximize };
            add(builder, group, sgd)
        }
        Kind::Adam => add(builder, group, Adam { lr, betas, eps, weight_decay, amsgrad: flag, maximize }),
        Kind::AdamW => add(builder, group, AdamW { lr, betas, eps, weight_decay, amsgrad: flag, maximize }),
        Kind::Adagrad => {
            let initial_accumulator_value = if flag { INITIAL_SUM } else { 0.0 };
            let lr_decay = LR_DECAY;
            add(
                builder,
                group,
                Adagrad { lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize },
            )
        }
        Kind::RmsProp => {
            let (alpha, momentum) = (beta2, beta1);
            add(builder, group, RmsProp { lr, alpha, eps, weight_decay, momentum, centered: flag, maximize })
        }
        Kind::Adadelta => add(builder, group, Adadelta { lr, rho: beta2, eps, weight_decay, maximize }),
        Kind::Adamax => add(builder, group, Adamax { lr, betas, eps, weight_decay, maximize }),
        Kind::Lion => add(builder, group, Lion { lr, betas, weight_decay, maximize }),
        Kind::NAdam => {
            let (momentum_decay, decoupled_weight_decay) = (MOMENTUM_DECAY, flag);
            let nadam =
                NAdam { lr, betas, eps, weight_decay, momentum_decay, decoupled_weight_decay, maximize };
            add(builder, group, nadam)
        }
        Kind::RAdam => {
            let radam = RAdam { lr, betas, eps, weight_decay, decoupled_weight_decay: flag, maximize };
            add(builder, group, radam)
        }
        Kind::Lamb => add(builder, group, Lamb { lr, betas, eps, weight_decay, maximize }),
        Kind::AdEmaMix => add(
            builder,
            group,
            AdEmaMix { lr, betas, beta3: BETA3, alpha: ALPHA, eps, weight_decay, maximize },
        ),
        Kind::Rprop => add(builder, group, Rprop { lr, etas: ETAS, step_sizes: STEP_SIZES, maximize }),
    }
}
