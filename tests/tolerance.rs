//! How far one f32 update may be from the f64 reference: a running error analysis, without loose constants.
//!
//! Each f32 operation adds at most half an ulp of its result, U times its size, to the errors that it inherits; a
//! constant rounded from f64 adds as much. (Wilkinson 1963; Higham, "Accuracy and Stability of Numerical
//! Algorithms", 3.3.) Must bound the update of one step from the same f32 start, so that errors do not pile up.
//! Painted values stay clear of subnormals, where an ulp is no longer relative.

use crate::reference::{Adam, Rule, Scalar, Sgd};

/// Unit roundoff of f32.
pub(crate) const U: f64 = 1.0 / (1u64 << 24) as f64;

/// Products of two errors, and the reference's own f64 rounding, are below 2^-20 of the bound.
const SECOND_ORDER: f64 = 1.0 + 1.0 / (1u64 << 20) as f64;

/// An upper bound of |x|, and of the distance between x in f32 and x in exact arithmetic.
#[derive(Clone, Copy)]
struct Term {
    size: f64,
    error: f64,
}

impl Term {
    /// A stored f32: the start of the step.
    fn stored(x: f64) -> Term {
        Term { size: x.abs(), error: 0.0 }
    }

    /// Multiplied by a constant that is rounded to f32: one rounding for it, one for the product.
    fn times(self, constant: f64) -> Term {
        let size = self.size * constant.abs();
        Term { size, error: self.error * constant.abs() + 2.0 * U * size }
    }

    fn plus(self, other: Term) -> Term {
        let size = self.size + other.size;
        Term { size, error: self.error + other.error + U * size }
    }
}

/// Bounds for the parameter and each state after one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bound {
    pub param: f64,
    pub states: [f64; 3],
}

/// The bound for a step from `before` (f32 values) to `after` with a mean gradient made of an f32 sum.
pub(crate) fn bound(rule: &Rule, before: &Scalar, after: &Scalar, gradient: f64) -> Bound {
    // The mean is the sum times a rounded 1/divisor.
    let mean = Term::stored(gradient).times(1.0);
    let bound = match rule {
        Rule::Sgd(sgd) => sgd_bound(sgd, before, mean),
        Rule::Adam(adam) => adam_bound(adam, before, after, gradient, mean),
    };
    Bound { param: bound.param * SECOND_ORDER, states: bound.states.map(|error| error * SECOND_ORDER) }
}

/// g + weight_decay*p, which does not happen without decay.
fn decayed(mean: Term, weight_decay: f64, param: f64) -> Term {
    if weight_decay == 0.0 { mean } else { mean.plus(Term::stored(param).times(weight_decay)) }
}

fn sgd_bound(sgd: &Sgd, before: &Scalar, mean: Term) -> Bound {
    let g = decayed(mean, sgd.weight_decay, before.param);
    let (mut buffer, mut direction) = (g, g);
    if sgd.momentum != 0.0 && before.steps > 0 {
        buffer = Term::stored(before.states[0]).times(sgd.momentum).plus(g.times(1.0 - sgd.dampening));
        direction = buffer;
    }
    if sgd.nesterov {
        direction = g.plus(buffer.times(sgd.momentum));
    }
    let param = Term::stored(before.param).plus(direction.times(sgd.lr));
    Bound { param: param.error, states: [buffer.error, 0.0, 0.0] }
}

/// Error of an average of a stored `old` and a `new` that is off by `error`.
///
/// The kernels promise the accurate spelling, from + w*(to - from) with w <= 1/2: the larger part is rounded once,
/// at the end, and only what is multiplied by w is rounded three times more (difference, weight, product).
fn average_error(beta: f64, old: f64, new: f64, error: f64) -> f64 {
    let (old, new, w) = (old.abs(), new.abs(), beta.min(1.0 - beta));
    let kept = if beta > 0.5 { old } else { new };
    let moved = w * (old + new + error);
    (1.0 - beta) * error + U * (kept + error + moved) + 3.0 * U * moved
}

fn adam_bound(adam: &Adam, before: &Scalar, after: &Scalar, gradient: f64, mean: Term) -> Bound {
    let coupled = if adam.decoupled { 0.0 } else { adam.weight_decay };
    let g = (if adam.maximize { -gradient } else { gradient }) + coupled * before.param;
    let g_error = decayed(mean, coupled, before.param).error;
    let square_error = 2.0 * g.abs() * g_error + U * g * g;
    let m_error = average_error(adam.beta1, before.states[0], g, g_error);
    // A maximum is exact, and moves no further than what it is taken of.
    let v_error = average_error(adam.beta2, before.states[1], g * g, square_error);

    let m = after.states[0].abs();
    let second_moment = if adam.amsgrad { after.states[2] } else { after.states[1] };
    // The slope of the root at the near end of the interval; |sqrt a - sqrt b| <= sqrt |a - b| where that is steep.
    let slope_error = v_error / (2.0 * (second_moment - v_error).max(0.0).sqrt());
    let root = second_moment.sqrt();
    let root = Term { size: root, error: slope_error.min(v_error.sqrt()) + U * root };
    let corrected = root.times(1.0 / (1.0 - adam.beta2.powi(after.steps)).sqrt());
    let eps = Term { size: adam.eps, error: U * adam.eps };
    let denominator = corrected.plus(eps);

    let ratio = m / denominator.size;
    let ratio_error =
        (m_error + ratio * denominator.error) / (denominator.size - denominator.error) + U * ratio;
    let ratio = Term { size: ratio, error: ratio_error };
    let mut change = ratio.times(adam.lr / (1.0 - adam.beta1.powi(after.steps)));
    if adam.decoupled && adam.weight_decay != 0.0 {
        change = change.plus(Term::stored(before.param).times(adam.lr * adam.weight_decay));
    }
    let param_error = change.error + U * (after.param.abs() + change.error);
    Bound { param: param_error, states: [m_error, v_error, v_error] }
}
