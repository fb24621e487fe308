//! One table for each optimizer, with its hyperparameters, defaults, ranges, states and source. The tables are in the
//! same order as in `kernels/optimizers.def`.
//!
//! The entry `relations` of a table checks several hyperparameters together. This file has no formula, and never calls
//! libm.

use super::declare::optimizer;
use super::{decay_fits, first_step_fits};
use crate::abi::*;
use crate::error::{Error, refuse};

// Defaults are those of `torch.optim.SGD`. PyTorch's functional SGD has another `lr`, 1e-2. As in PyTorch, `nesterov`
// without momentum is refused, because the formula would silently be plain SGD.
optimizer! {
    /// Stochastic gradient descent, with optional momentum.
    ///
    /// State: `momentum_buffer`, if `momentum` is not zero.
    pub struct Sgd: "SGD" {
        /// Learning rate.
        pub lr: f64 = 1e-3 => lr: NonNegative;
        /// Momentum factor; 0 disables momentum.
        pub momentum: f64 = 0.0 => momentum: NonNegative;
        /// The update adds `(1 - dampening) * gradient` to `momentum_buffer`.
        pub dampening: f64 = 0.0 => dampening: Finite;
        /// L2 penalty, added to the gradient.
        pub weight_decay: f64 = 0.0 => weight_decay: NonNegative;
        /// Uses Nesterov momentum; needs `momentum` > 0 and `dampening` = 0.
        pub nesterov: bool = false => nesterov: Flag;
        /// Ascend instead of descend.
        pub maximize: bool = false => maximize: Flag;
    }
    source: "Sutskever et al., ICML 2013, in the variant of `torch.optim.SGD`: a parameter's first buffer is a copy of \
             its gradient, without dampening.";
    kernel: INSTEP_OPTIMIZER_sgd, sgd;
    states: [];
    states: ["momentum_buffer"] if momentum;
    relations: |this| {
        refuse! {
            "nesterov" = true, if this.nesterov && (this.momentum <= 0.0 || this.dampening != 0.0)
                => "works only with momentum and without dampening", "set a momentum above 0 and dampening to 0";
        }
        Ok(())
    };
}

// Defaults are those of `torch.optim`. There are two types because Adam and AdamW apply weight decay differently and
// have different defaults for it.
optimizer! {
    /// Adam: weight decay is an L2 penalty, added to the gradient.
    ///
    /// States: `exp_avg`, `exp_avg_sq`, and `max_exp_avg_sq` if `amsgrad`.
    pub struct Adam: "Adam" {
        /// Learning rate.
        pub lr: f64 = 1e-3 => lr: NonNegative;
        /// Decay rates of the first and second moment.
        pub betas: (f64, f64) = (0.9, 0.999) => beta1: BelowOne, beta2: BelowOne;
        /// Added to the root of the corrected second moment.
        pub eps: f64 = 1e-8 => eps: NonNegative;
        /// L2 penalty.
        pub weight_decay: f64 = 0.0 => weight_decay: NonNegative;
        /// Uses the largest second moment so far, instead of the current second moment.
        pub amsgrad: bool = false => amsgrad: Flag;
        /// Ascend instead of descend.
        pub maximize: bool = false => maximize: Flag;
    }
    source: "Kingma & Ba, ICLR 2015; amsgrad: Reddi, Kale & Kumar, ICLR 2018.";
    kernel: INSTEP_OPTIMIZER_adam, adam { decoupled: 0 };
    states: ["exp_avg", "exp_avg_sq"];
    states: ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"] if amsgrad;
    relations: |this| first_step_fits(this.lr, this.betas.0);
}

optimizer! {
    /// AdamW: the decoupled weight decay changes the parameter directly, not the gradient.
    ///
    /// States: `exp_avg`, `exp_avg_sq`, and `max_exp_avg_sq` if `amsgrad`.
    pub struct AdamW: "AdamW" {
        /// Learning rate.
        pub lr: f64 = 1e-3 => lr: NonNegative;
        /// Decay rates of the first and second moment.
        pub betas: (f64, f64) = (0.9, 0.999) => beta1: BelowOne, beta2: BelowOne;
        /// Added to the root of the corrected second moment.
        pub eps: f64 = 1e-8 => eps: NonNegative;
        /// Decoupled weight decay; multiplied by the learning rate.
        pub weight_decay: f64 = 1e-2 => weight_decay: NonNegative;
        /// Uses the largest second moment so far, instead of the current second moment.
        pub amsgrad: bool = false => amsgrad: Flag;
        /// Ascend instead of descend.
        pub maximize: bool = false => maximize: Flag;
    }
    source: "Loshchilov & Hutter, ICLR 2019; amsgrad: Reddi, Kale & Kumar, ICLR 2018.";
    kernel: INSTEP_OPTIMIZER_adam, adam { decoupled: 1 };
    states: ["exp_avg", "exp_avg_sq"];
    states: ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"] if amsgrad;
    relations: |this| {
        first_step_fits(this.lr, this.betas.0)?;
        decay_fits(this.lr, this.weight_decay)
    };
}

// Defaults are those of `torch.optim.Adagrad`. The sum starts as zeros, and the first update adds
// `initial_accumulator_value`. PyTorch's sum has that value before the first update.
optimizer! {
    /// Adagrad: an element's learning rate falls as the sum of its squared gradients grows.
    ///
    /// State: `sum`, which is zero until the first update adds `initial_accumulator_value`.
    pub struct Adagrad: "Adagrad" {
        /// Learning rate.
        pub lr: f64 = 1e-2 => lr: NonNegative;
        /// A parameter's learning rate at its step `t` is `lr / (1 + (t - 1) * lr_decay)`; `t` starts at 1.
        pub lr_decay: f64 = 0.0 => lr_decay: NonNegative;
        /// L2 penalty, added to the gradient.
        pub weight_decay: f64 = 0.0 => weight_decay: NonNegative;
        /// Value that is added to the sum in the first update.
        pub initial_accumulator_value: f64 = 0.0 => initial_accumulator_value: NonNegative;
        /// Added to the root of the sum.
        pub eps: f64 = 1e-10 => eps: NonNegative;
        /// Ascend instead of descend.
        pub maximize: bool = false => maximize: Flag;
    }
    source: "Duchi, Hazan & Singer, JMLR 12, 2011, in the variant of `torch.optim.Adagrad`.";
    kernel: INSTEP_OPTIMIZER_adagrad, adagrad;
    states: ["sum"];
}

// Defaults are those of `torch.optim.RMSprop`. The order of the states is the kernel's: `grad_avg` follows the
// momentum buffer, if there is one.
optimizer! {
    /// RMSprop: divides the gradient by the root of an average of squared gradients, optionally with momentum.
    ///
    /// States: `square_avg`, then `momentum_buffer` if `momentum` is not zero, then `grad_avg` if `centered`.
    ///
    /// As in PyTorch, eps is outside the root, and the variance that `centered` uses is not clamped. If gradients
    /// hardly vary, rounding can make this variance negative, and the parameter becomes NaN. NaN would be common with
    /// bf16 or 8-bit states, so `centered` refuses such states.
    pub struct RmsProp: "RMSprop" {
        /// Learning rate.
        pub lr: f64 = 1e-2 => lr: NonNegative;
        /// Decay rate of the averages, in \[0, 1\]. PyTorch also accepts values above 1, which make the average of
        /// squares negative.
        pub alpha: f64 = 0.99 => alpha: UpToOne;
        /// Added to the root by which the gradient is divided.
        pub eps: f64 = 1e-8 => eps: NonNegative;
        /// L2 penalty, added to the gradient.
        pub weight_decay: f64 = 0.0 => weight_decay: NonNegative;
        /// Momentum factor; 0 disables momentum.
        pub momentum: f64 = 0.0 => momentum: NonNegative;
        /// Divides by the estimated standard deviation of the gradient, instead of its root mean square.
        pub centered: bool = false => centered: Flag;
        /// Ascend instead of descend.
        pub maximize: bool = false => maximize: Flag;
    }
    source: "Tieleman & Hinton, lecture 6.5, 2012; centered: Graves, 2013; in the variant of `torch.optim.RMSprop`.";
    kernel: INSTEP_OPTIMIZER_rmsprop, rmsprop;
    states: ["square_avg"];
    states: ["square_avg", "momentum_buffer"] if momentum;
    states: ["square_avg", "grad_avg"] if centered;
    states: ["square_avg", "momentum_buffer", "grad_avg"] if momentum & centered;
    facts {
        needs_f32_states: Some((
            "centered",
            "centered RMSprop subtracts a state's square from another, and rounded ones leave NaN"
        ))
    }
}

// Defaults are those of `torch.optim.Adadelta`. With `lr` = 1 this is the paper's method.
optimizer! {
    /// Adadelta: multiplies the gradient by a ratio of two root mean squares. The numerator is the root mean square of
    /// past changes, and the denominator is the root mean square of the gradients up to and including this one.
    ///
    /// States: `square_avg`, `acc_delta`.
    pub struct Adadelta: "Adadelta" {
        /// Factor of the update; the paper has no such factor.
        pub lr: f64 = 1.0 => lr: NonNegative;
        /// Decay rate of both averages.
        pub rho: f64 = 0.9 => rho: UpToOne;
        /// Added inside both square roots.
        pub eps: f64 = 1e-6 => eps: NonNegative;
        /// L2 penalty, added to the gradient.
        pub weight_decay: f64 = 0.0 => weight_decay: NonNegative;
        /// Ascend instead of descend.
        pub maximize: bool = false => maximize: Flag;
    }
    source: "Zeiler, 2012, in the variant of `torch.optim.Adadelta`, which adds a learning rate.";
    kernel: INSTEP_OPTIMIZER_adadelta, adadelta;
    states: ["square_avg", "acc_delta"];
    facts {
        needs_floats: Some("Adadelta divides by square_avg and feeds the quotient back into acc_delta, which codes of \
                            8 bits would bias upwards")
    }
}

// Defaults are those of `torch.optim.Adamax`. PyTorch's functional Adamax has another `lr`, 1e-3.
optimizer! {
    /// Adamax: Adam with a decaying maximum of the gradient's magnitude instead of the root of the second moment.
    ///
    /// States: `exp_avg`, `exp_inf`.
    pub struct Adamax: "Adamax" {
        /// Learning rate.
        pub lr: f64 = 2e-3 => lr: NonNegative;
        /// Decay rates of the first moment and of the maximum.
        pub betas: (f64, f64) = (0.9, 0.999) => beta1: BelowOne, beta2: BelowOne;
        /// Added to the absolute value of the gradient.
        pub eps: f64 = 1e-8 => eps: NonNegative;
        /// L2 penalty, added to the gradient.
        pub weight_decay: f64 = 0.0 => weight_decay: NonNegative;
        /// Ascend instead of descend.
        pub maximize: bool = false => maximize: Flag;
    }
    source: "Kingma & Ba, ICLR 2015, section 7.1, in the variant of `torch.optim.Adamax`, which adds eps to the \
             gradient's size inside the maximum.";
    kernel: INSTEP_OPTIMIZER_adamax, adamax;
    states: ["exp_avg", "exp_inf"];
    relations: |this| first_step_fits(this.lr, this.betas.0);
}

// Defaults are those of `torch.optim.Rprop`. Limits in the wrong order are refused, because they would make every step
// size the same. torch accepts them.
optimizer! {
    /// Resilient backpropagation: every element has its own step size, which grows while the gradient's sign does not
    /// change.
    ///
    /// Rprop needs gradients of the whole data set, because gradients of small batches change their signs at random.
    ///
    /// States: `prev`, `step_size`.
    pub struct Rprop: "Rprop" {
        /// Initial step size of each element; it has no effect after a parameter's first update.
        pub lr: f64 = 1e-2 => lr: NonNegative;
        /// Factors of the step size: the first applies if the gradient's sign changes, the second if the sign stays the
        /// same.
        pub etas: (f64, f64) = (0.5, 1.2) => eta_minus: InsideOne, eta_plus: AboveOne;
        /// Smallest and largest step size.
        pub step_sizes: (f64, f64) = (1e-6, 50.0) => step_size_min: NonNegative, step_size_max: NonNegative;
        /// Ascend instead of descend.
        pub maximize: bool = false => maximize: Flag;
    }
    source: "Riedmiller & Braun, ICNN 1993, in the variant of `torch.optim.Rprop`: an element is not updated in a step \
             in which its gradient changes sign.";
    kernel: INSTEP_OPTIMIZER_rprop, rprop;
    states: ["prev", "step_size"];
    relations: |this| {
        let (smallest, largest) = this.step_sizes;
        if smallest > largest {
            return Err(Error::range("step_sizes.0", smallest, "at most step_sizes.1"));
        }
        Ok(())
    };
    facts {
        needs_floats: Some("Rprop multiplies step sizes by factors near 1, which codes of 8 bits would round away")
    }
}

// `torch.optim` has no Lion, so defaults are the paper's. Every element changes by the full learning rate, so the
// default learning rate is a tenth of AdamW's.
optimizer! {
    /// Lion: each update changes every element by the learning rate. The sign of a momentum determines the direction of
    /// the change. The state of Lion takes half as much memory as the states of Adam.
    ///
    /// State: `exp_avg`.
    pub struct Lion: "Lion" {
        /// Learning rate.
        pub lr: f64 = 1e-4 => lr: NonNegative;
        /// Decay rates of two averages: the first average determines the sign of the change, and the second average is
        /// stored.
        pub betas: (f64, f64) = (0.9, 0.99) => beta1: BelowOne, beta2: BelowOne;
        /// Decoupled weight decay; multiplied by the learning rate.
        pub weight_decay: f64 = 0.0 => weight_decay: NonNegative;
        /// Ascend instead of descend.
        pub maximize: bool = false => maximize: Flag;
    }
    source: "Chen et al., \"Symbolic Discovery of Optimization Algorithms\", NeurIPS 2023.";
    kernel: INSTEP_OPTIMIZER_lion, lion;
    states: ["exp_avg"];
    relations: |this| decay_fits(this.lr, this.weight_decay);
}

// Defaults are those of `torch.optim.NAdam`. The kernel computes the momenta, because the result of libm's `pow`
// depends on the machine and on the caller's rounding mode.
optimizer! {
    /// NAdam: Adam with Nesterov momentum, and a momentum that grows over the first steps.
    ///
    /// States: `exp_avg`, `exp_avg_sq`, and one number per parameter, `mu_product`
    /// ([`carried`](crate::Stepper::carried)).
    pub struct NAdam: "NAdam" {
        /// Learning rate.
        pub lr: f64 = 2e-3 => lr: NonNegative;
        /// Decay rates of the first and second moment.
        pub betas: (f64, f64) = (0.9, 0.999) => beta1: BelowOne, beta2: BelowOne;
        /// Added to the root of the corrected second moment.
        pub eps: f64 = 1e-8 => eps: NonNegative;
        /// L2 penalty, added to the gradient, unless `decoupled_weight_decay` is set.
        pub weight_decay: f64 = 0.0 => weight_decay: NonNegative;
        /// Decay of the momentum schedule; the momentum rises from `betas.0 / 2` to `betas.0`.
        pub momentum_decay: f64 = 4e-3 => momentum_decay: NonNegativeF64;
        /// Makes weight decay decoupled: it is multiplied by the learning rate and subtracted from the parameter.
        pub decoupled_weight_decay: bool = false => decoupled: Flag;
        /// Ascend instead of descend.
        pub maximize: bool = false => maximize: Flag;
    }
    source: "Dozat, \"Incorporating Nesterov Momentum into Adam\", ICLR 2016 workshop, in the variant of \
             `torch.optim.NAdam`.";
    kernel: INSTEP_OPTIMIZER_nadam, nadam;
    states: ["exp_avg", "exp_avg_sq"];
    relations: |this| {
        // The product of momenta is at most betas.0. The factors of the gradient and of its average are therefore at
        // most `lr / (1 - betas.0)`.
        first_step_fits(this.lr, this.betas.0)?;
        if this.decoupled_weight_decay { decay_fits(this.lr, this.weight_decay) } else { Ok(()) }
    };
    facts { carried: Some("mu_product") }
}

// Defaults are those of `torch.optim.RAdam`. Validation bounds the first step, the largest one.
optimizer! {
    /// RAdam: Adam with a built-in warm-up. The learning rate is smaller while the second moment is uncertain, and the
    /// first steps are those of plain momentum.
    ///
    /// States: `exp_avg`, `exp_avg_sq`.
    pub struct RAdam: "RAdam" {
        /// Learning rate.
        pub lr: f64 = 1e-3 => lr: NonNegative;
        /// Decay rates of the first and second moment.
        pub betas: (f64, f64) = (0.9, 0.999) => beta1: BelowOne, beta2: BelowOne;
        /// Added to the root of the second moment, before its correction.
        pub eps: f64 = 1e-8 => eps: NonNegative;
        /// L2 penalty, added to the gradient, unless `decoupled_weight_decay` is set.
        pub weight_decay: f64 = 0.0 => weight_decay: NonNegative;
        /// Makes weight decay decoupled: it is multiplied by the learning rate and subtracted from the parameter.
        pub decoupled_weight_decay: bool = false => decoupled: Flag;
        /// Ascend instead of descend.
        pub maximize: bool = false => maximize: Flag;
    }
    source: "Liu et al., \"On the Variance of the Adaptive Learning Rate and Beyond\", ICLR 2020, in the variant of \
             `torch.optim.RAdam`.";
    kernel: INSTEP_OPTIMIZER_radam, radam;
    states: ["exp_avg", "exp_avg_sq"];
    relations: |this| {
        // Rectification and correction only make later steps smaller.
        first_step_fits(this.lr, this.betas.0)?;
        if this.decoupled_weight_decay { decay_fits(this.lr, this.weight_decay) } else { Ok(()) }
    };
}

// `torch.optim` has no LAMB, so defaults are the paper's, with the moments of Adam.
optimizer! {
    /// LAMB: AdamW's update, multiplied by the trust ratio, which is the parameter's norm divided by the update's norm.
    ///
    /// The trust ratio is 1 if one of the norms is 0, infinite or NaN. Each bucket takes two launches, which move 40
    /// bytes per element in f32. The norms are exact sums, so the division into buckets does not change any bits. As in
    /// the paper, parameters without weight decay are scaled too. Some other implementations do not scale these
    /// parameters, and they clip gradients inside LAMB. To clip in instep, set [`Clip::Global`](crate::Clip::Global).
    ///
    /// States: `exp_avg`, `exp_avg_sq`.
    pub struct Lamb: "LAMB" {
        /// Learning rate, multiplied by the trust ratio.
        pub lr: f64 = 1e-3 => lr: NonNegative;
        /// Decay rates of the first and second moment.
        pub betas: (f64, f64) = (0.9, 0.999) => beta1: BelowOne, beta2: BelowOne;
        /// Added to the root of the second moment.
        pub eps: f64 = 1e-6 => eps: NonNegative;
        /// Weight decay, added to the update before the trust ratio.
        pub weight_decay: f64 = 0.01 => weight_decay: NonNegative;
        /// Ascend instead of descend.
        pub maximize: bool = false => maximize: Flag;
    }
    source: "You et al., \"Large Batch Optimization for Deep Learning: Training BERT in 76 minutes\", ICLR 2020, \
             algorithm 2.";
    kernel: INSTEP_OPTIMIZER_lamb, lamb;
    states: ["exp_avg", "exp_avg_sq"];
    facts { is_scaled: true }
}

// `torch.optim` has no AdEMAMix, so defaults are the paper's. The kernel multiplies the slow average by `lr * alpha`,
// which must be finite as f32.
optimizer! {
    /// AdEMAMix: AdamW with a second, much slower average of the gradients.
    ///
    /// The paper warms up `alpha` and `beta3` over the first steps. Here both are constant.
    ///
    /// States: `exp_avg_fast`, `exp_avg_slow`, `exp_avg_sq`.
    pub struct AdEmaMix: "AdEMAMix" {
        /// Learning rate.
        pub lr: f64 = 1e-3 => lr: NonNegative;
        /// Decay rates of the fast average and of the second moment.
        pub betas: (f64, f64) = (0.9, 0.999) => beta1: BelowOne, beta2: BelowOne;
        /// Decay rate of the slow average, which has no bias correction.
        pub beta3: f64 = 0.9999 => beta3: BelowOne;
        /// Weight of the slow average; the fast average has weight 1.
        pub alpha: f64 = 5.0 => alpha: NonNegative;
        /// Added to the root of the corrected second moment.
        pub eps: f64 = 1e-8 => eps: NonNegative;
        /// Decoupled weight decay; multiplied by the learning rate.
        pub weight_decay: f64 = 0.0 => weight_decay: NonNegative;
        /// Ascend instead of descend.
        pub maximize: bool = false => maximize: Flag;
    }
    source: "Pagliardini, Ablin & Grangier, \"The AdEMAMix Optimizer: Better, Faster, Older\", 2024, algorithm 1.";
    kernel: INSTEP_OPTIMIZER_ademamix, ademamix;
    states: ["exp_avg_fast", "exp_avg_slow", "exp_avg_sq"];
    relations: |this| {
        first_step_fits(this.lr, this.betas.0)?;
        if !((this.lr * this.alpha) as f32).is_finite() {
            return Err(Error::config("alpha", this.alpha, "lr * alpha overflows f32", "lower one of them"));
        }
        decay_fits(this.lr, this.weight_decay)
    };
}
