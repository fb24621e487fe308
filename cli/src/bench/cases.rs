//! What is stepped: optimizers, shapes, and the values that fill them.
//!
//! Values are functions of the index and never 0: the root of 0 takes a slow path on some machines.

use clap::ValueEnum;
use instep::bench::Launcher;
use instep::optim::Optimizer;
use instep::{
    Adadelta, Adagrad, Adam, AdamW, Adamax, Isa, Lamb, Layout, Lion, NAdam, RAdam, RmsProp, Rprop, Sgd,
};

use super::precisions::{Kind, storage};
use super::record::last_level_cache_bytes;
use super::reference;

/// Sum over this many ranks, so that the divide is part of what is timed.
pub(super) const WORLD_SIZE: u32 = 8;

/// A sample steps about this many, tens of milliseconds: a clock tick and a wake-up are nothing beside it.
pub(super) const SAMPLE_ELEMENTS: f64 = 32e6;

/// An optimizer with the flags that set its traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Rule {
    Sgd,
    Momentum,
    Adam,
    Adamw,
    Amsgrad,
    Adagrad,
    Rmsprop,
    Adadelta,
    Adamax,
    Rprop,
    Lion,
    Nadam,
    Radam,
    Lamb,
}

const LR: f64 = 1e-4;

impl Rule {
    pub(super) fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }

    pub(super) fn optimizer(self) -> Box<dyn Optimizer> {
        match self {
            Rule::Sgd => Box::new(Sgd { lr: LR, ..Sgd::default() }),
            Rule::Momentum => Box::new(Sgd { lr: LR, momentum: 0.9, ..Sgd::default() }),
            Rule::Adam => Box::new(Adam { lr: LR, ..Adam::default() }),
            Rule::Adamw => Box::new(AdamW { lr: LR, ..AdamW::default() }),
            Rule::Amsgrad => Box::new(AdamW { lr: LR, amsgrad: true, ..AdamW::default() }),
            Rule::Adagrad => Box::new(Adagrad { lr: LR, ..Adagrad::default() }),
            Rule::Rmsprop => Box::new(RmsProp { lr: LR, ..RmsProp::default() }),
            Rule::Adadelta => Box::new(Adadelta { lr: LR, ..Adadelta::default() }),
            Rule::Adamax => Box::new(Adamax { lr: LR, ..Adamax::default() }),
            Rule::Rprop => Box::new(Rprop { lr: LR, ..Rprop::default() }),
            Rule::Lion => Box::new(Lion { lr: LR, ..Lion::default() }),
            Rule::Nadam => Box::new(NAdam { lr: LR, ..NAdam::default() }),
            Rule::Radam => Box::new(RAdam { lr: LR, ..RAdam::default() }),
            Rule::Lamb => Box::new(Lamb { lr: LR, ..Lamb::default() }),
        }
    }

    /// Whether an element's update depends on all of its parameter.
    pub(super) fn is_scaled(self) -> bool {
        self == Rule::Lamb
    }

    /// The same numbers for the formula in f64.
    pub(super) fn reference(self) -> reference::Rule {
        let momentum = if self == Rule::Momentum { 0.9 } else { 0.0 };
        let decoupled = matches!(self, Rule::Adamw | Rule::Amsgrad);
        match self {
            Rule::Sgd | Rule::Momentum => reference::Rule::Sgd(reference::Sgd {
                lr: LR,
                momentum,
                dampening: 0.0,
                weight_decay: 0.0,
                nesterov: false,
                maximize: false,
            }),
            Rule::Adam | Rule::Adamw | Rule::Amsgrad => reference::Rule::Adam(reference::Adam {
                lr: LR,
                beta1: 0.9,
                beta2: 0.999,
                eps: 1e-8,
                weight_decay: if decoupled { 1e-2 } else { 0.0 },
                decoupled,
                amsgrad: self == Rule::Amsgrad,
                maximize: false,
            }),
            Rule::Adagrad => reference::Rule::Adagrad(reference::Adagrad {
                lr: LR,
                lr_decay: 0.0,
                weight_decay: 0.0,
                initial_accumulator_value: 0.0,
                eps: 1e-10,
                maximize: false,
            }),
            Rule::Rmsprop => reference::Rule::RmsProp(reference::RmsProp {
                lr: LR,
                alpha: 0.99,
                eps: 1e-8,
                weight_decay: 0.0,
                momentum: 0.0,
                centered: false,
                maximize: false,
            }),
            Rule::Adadelta => reference::Rule::Adadelta(reference::Adadelta {
                lr: LR,
                rho: 0.9,
                eps: 1e-6,
                weight_decay: 0.0,
                maximize: false,
            }),
            Rule::Adamax => reference::Rule::Adamax(reference::Adamax {
                lr: LR,
                beta1: 0.9,
                beta2: 0.999,
                eps: 1e-8,
                weight_decay: 0.0,
                maximize: false,
            }),
            Rule::Rprop => reference::Rule::Rprop(reference::Rprop {
                lr: LR,
                eta_minus: 0.5,
                eta_plus: 1.2,
                step_size_min: 1e-6,
                step_size_max: 50.0,
                maximize: false,
            }),
            Rule::Lion => reference::Rule::Lion(reference::Lion {
                lr: LR,
                beta1: 0.9,
                beta2: 0.99,
                weight_decay: 0.0,
                maximize: false,
            }),
            Rule::Nadam => reference::Rule::NAdam(reference::NAdam {
                lr: LR,
                beta1: 0.9,
                beta2: 0.999,
                eps: 1e-8,
                weight_decay: 0.0,
                momentum_decay: 4e-3,
                decoupled: false,
                maximize: false,
            }),
            Rule::Radam => reference::Rule::RAdam(reference::RAdam {
                lr: LR,
                beta1: 0.9,
                beta2: 0.999,
                eps: 1e-8,
                weight_decay: 0.0,
                decoupled: false,
                maximize: false,
            }),
            Rule::Lamb => reference::Rule::Lamb(reference::Lamb {
                lr: LR,
                beta1: 0.9,
                beta2: 0.999,
                eps: 1e-6,
                weight_decay: 1e-2,
                maximize: false,
            }),
        }
    }
}

/// How large a bucket is, and whether the next step finds it in cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Shape {
    /// 64 Ki elements, one segment, again and again.
    L2,
    /// 1 Mi elements, one segment, again and again.
    L3,
    /// 16 Mi elements, one segment, rotated through more than four times the last-level cache.
    Dram,
    /// 25 MiB of gradients in 50 segments, rotated likewise.
    Bucket,
}

impl Shape {
    pub(super) fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }

    /// Segments of a bucket, and elements of a segment.
    fn segments(self) -> (usize, usize) {
        match self {
            Shape::L2 => (1, 64 << 10),
            Shape::L3 => (1, 1 << 20),
            Shape::Dram => (1, 16 << 20),
            Shape::Bucket => (50, (25 << 20) / 4 / 50),
        }
    }

    pub(super) fn elements(self) -> usize {
        let (segments, length) = self.segments();
        segments * length
    }

    /// Enough buckets that none is in cache when its turn comes.
    fn buckets(self, bytes_per_element: u64, quick: bool) -> usize {
        let bytes = self.elements() as u64 * bytes_per_element;
        match self {
            Shape::L2 | Shape::L3 => 1,
            Shape::Dram | Shape::Bucket if quick => 1,
            Shape::Dram | Shape::Bucket => {
                (4 * last_level_cache_bytes()).div_ceil(bytes) as usize + self.buckets_per_sample()
            }
        }
    }

    /// Buckets that one sample steps.
    pub(super) fn buckets_per_sample(self) -> usize {
        (SAMPLE_ELEMENTS / self.elements() as f64).ceil() as usize
    }
}

/// The gradient of element `k`, summed over ranks.
pub(super) fn gradient(k: usize) -> f32 {
    ((k % 613) as f32 - 306.3) * 1e-2
}

/// The first value of parameter element `k`.
pub(super) fn parameter(k: usize) -> f32 {
    0.5 + (k % 977) as f32 * 1e-3
}

/// Memory of this shape, filled.
pub(super) fn launcher(
    rule: Rule,
    kind: Kind,
    shape: Shape,
    isa: Isa,
    threads: usize,
    quick: bool,
) -> instep::Result<Launcher> {
    use instep::op::Memory;
    let optimizer = rule.optimizer();
    let (segments, length) = shape.segments();
    let precision = kind.precision();
    let states = optimizer.state_names().len() as u64;
    // Scales of 8-bit states apart, which are few.
    let resident = precision.param.bytes() + precision.grad.bytes() + precision.master.bytes();
    let buckets = shape.buckets(resident + states * precision.moments.bytes(), quick);
    let names = (0..buckets * segments).map(|k| format!("p{k}"));
    let layout = names.fold(Layout::builder(), |builder, name| builder.param(name, length)).build()?;
    let cap_bytes = shape.elements() as u64 * precision.grad.bytes();
    let mut launcher =
        Launcher::new(&layout, &*optimizer, cap_bytes, WORLD_SIZE, storage(kind), isa, threads)?;
    launcher.fill(Memory::Params, parameter);
    launcher.fill(Memory::Grads, gradient);
    Ok(launcher)
}
