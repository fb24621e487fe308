//! What a run of passes depends on: buckets, dtypes, options, values; and the comparison of both machines.
//!
//! Both run on the same memory, one after the other from the same start, so that addresses in tables are equal too and
//! every bit can be compared. Must hold no memory: that is `World`'s.

use instep::abi::*;
use instep::optim::Optimizer;
use instep::{Adadelta, Adagrad, Adam, AdamW, Adamax, RmsProp, Sgd};

use super::machine::{Machine, Shape};
use super::world::World;
use crate::support::{Optim, paint, paint_gradient};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub len: usize,
    pub action: InstepSegmentAction,
    /// How many ranks had a gradient for it, once reduced; none if that is not counted.
    pub used: Option<f32>,
}

#[derive(Clone, Debug)]
pub(crate) struct Bucket {
    pub segments: Vec<Segment>,
    /// How many ranks had data, once reduced; none if that is not counted.
    pub ranks: Option<f32>,
}

/// Buckets that are stepped together, and all that a run of passes depends on.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub optim: Optim,
    pub buckets: Vec<Bucket>,
    pub param_dtype: InstepDtype,
    pub grad_dtype: InstepDtype,
    /// None: no copy.
    pub copy_dtype: Option<InstepDtype>,
    pub zero_grads: bool,
    /// Elements by which runs of the gradients start behind a cache line; the other memories are off in other ways.
    pub misalignment: usize,
    /// Elements that every offset is larger by, and every base is earlier by.
    pub shift: u64,
    pub normed: bool,
    pub max_norm: f64,
    /// Each bucket is measured and decided on alone.
    pub per_bucket: bool,
    pub skip_nonfinite: bool,
    /// 0: as many as contributed.
    pub divisor: f64,
    pub passes: usize,
    /// Of the status ring.
    pub slots: usize,
    /// Value of a segment's element; 16-bit memories take its upper half.
    pub param: fn(usize, usize) -> f32,
    /// The same in a pass.
    pub gradient: fn(usize, usize, usize) -> f32,
}

impl Case {
    pub(crate) fn new(optim: Optim, buckets: Vec<Bucket>) -> Case {
        Case {
            optim,
            buckets,
            param_dtype: INSTEP_DTYPE_F32,
            grad_dtype: INSTEP_DTYPE_F32,
            copy_dtype: None,
            zero_grads: false,
            misalignment: 0,
            shift: 0,
            normed: true,
            max_norm: 0.5,
            per_bucket: false,
            skip_nonfinite: false,
            divisor: 3.0,
            passes: 3,
            slots: 4,
            param: paint,
            gradient: paint_gradient,
        }
    }

    /// Runs it on the CPU, then in every shape on the GPU, and compares all memory after each pass.
    pub(crate) fn assert_same_bits(&self, shapes: &[Shape]) {
        let mut world = World::new(self);
        let start = world.snapshot();
        let expected: Vec<_> = (0..self.passes).map(|pass| world.pass(pass, Machine::Cpu)).collect();
        for shape in shapes {
            world.all().into_iter().zip(&start).for_each(|(bands, words)| bands.restore(words));
            for (pass, expected) in expected.iter().enumerate() {
                world.pass(pass, Machine::Gpu(*shape));
                let what = format!("pass {pass}, {shape:?}, {:?}", self.described());
                for (bands, words) in world.all().into_iter().zip(expected) {
                    bands.assert_same(words, &what);
                }
            }
        }
    }

    fn described(&self) -> impl std::fmt::Debug {
        let dtypes = (self.param_dtype, self.grad_dtype, self.copy_dtype);
        let zeroed = ("gradients zeroed", self.zero_grads);
        (self.optim, ("dtypes", dtypes), zeroed, ("misaligned", self.misalignment), ("shift", self.shift))
    }
}

/// Kernel, hyperparameters and number of states of an optimizer.
pub(crate) fn rule(optim: Optim) -> (u32, InstepHyper, usize) {
    let adam = |optim: Adam, decoupled: bool| {
        let Adam { lr, betas: (beta1, beta2), eps, weight_decay, amsgrad, maximize } = optim;
        let (decoupled, maximize) = (decoupled.into(), maximize.into());
        let reserved = 0;
        let states = if amsgrad { 3 } else { 2 };
        let amsgrad = amsgrad.into();
        let hyper =
            InstepAdamHyper { lr, beta1, beta2, eps, weight_decay, decoupled, amsgrad, maximize, reserved };
        (INSTEP_OPTIMIZER_adam, InstepHyper { adam: hyper }, states)
    };
    match optim {
        Optim::Sgd(Sgd { lr, momentum, dampening, weight_decay, nesterov, maximize }) => {
            let (nesterov, maximize) = (nesterov.into(), maximize.into());
            let hyper = InstepSgdHyper { lr, momentum, dampening, weight_decay, nesterov, maximize };
            (INSTEP_OPTIMIZER_sgd, InstepHyper { sgd: hyper }, usize::from(momentum != 0.0))
        }
        Optim::Adam(optim) => adam(optim, false),
        Optim::AdamW(AdamW { lr, betas, eps, weight_decay, amsgrad, maximize }) => {
            adam(Adam { lr, betas, eps, weight_decay, amsgrad, maximize }, true)
        }
        Optim::Adagrad(adagrad) => {
            let Adagrad { lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize } = adagrad;
            let maximize = maximize.into();
            let reserved = 0;
            let adagrad = InstepAdagradHyper {
                lr,
                lr_decay,
                weight_decay,
                initial_accumulator_value,
                eps,
                maximize,
                reserved,
            };
            (INSTEP_OPTIMIZER_adagrad, InstepHyper { adagrad }, 1)
        }
        Optim::RmsProp(optim) => {
            let RmsProp { lr, alpha, eps, weight_decay, momentum, centered, maximize } = optim;
            let (centered, maximize) = (centered.into(), maximize.into());
            let rmsprop = InstepRmsPropHyper { lr, alpha, eps, weight_decay, momentum, centered, maximize };
            (INSTEP_OPTIMIZER_rmsprop, InstepHyper { rmsprop }, optim.state_names().len())
        }
        Optim::Adadelta(Adadelta { lr, rho, eps, weight_decay, maximize }) => {
            let (maximize, reserved) = (maximize.into(), 0);
            let adadelta = InstepAdadeltaHyper { lr, rho, eps, weight_decay, maximize, reserved };
            (INSTEP_OPTIMIZER_adadelta, InstepHyper { adadelta }, 2)
        }
        Optim::Adamax(Adamax { lr, betas: (beta1, beta2), eps, weight_decay, maximize }) => {
            let (maximize, reserved) = (maximize.into(), 0);
            let adamax = InstepAdamaxHyper { lr, beta1, beta2, eps, weight_decay, maximize, reserved };
            (INSTEP_OPTIMIZER_adamax, InstepHyper { adamax }, 2)
        }
    }
}
