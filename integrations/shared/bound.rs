//! AdamW in f64, and a bound on the rounding errors of an AdamW in f32 with the same gradients.
//!
//! A running error analysis computes, to first order, the largest error of each value in an f32 computation. The bound
//! holds for moments computed as averages or as sums of products, and for weight decay applied as a factor or as a
//! difference.

/// The unit roundoff of f32.
const U: f64 = 1.0 / 16_777_216.0;
/// Room for terms of second order, which are below U times the number of steps.
const SECOND_ORDER: f64 = 1.01;

/// The hyperparameters, with the values that the f32 computation uses.
#[derive(Clone, Copy)]
pub(crate) struct AdamW {
    pub(crate) betas: (f64, f64),
    pub(crate) eps: f64,
    pub(crate) weight_decay: f64,
    /// Whether the powers of the betas are computed in f32 instead of f64.
    pub(crate) has_f32_powers: bool,
}

/// A value, and a bound on its error.
#[derive(Clone, Copy, Default)]
struct Value {
    at: f64,
    off: f64,
}

impl Value {
    /// Returns the moving average after `term` is added. `given` is the number of roundings in the computation of
    /// `term`.
    fn averaged(self, term: f64, beta: f64, given: f64) -> Value {
        let at = beta * self.at + (1.0 - beta) * term;
        let sums = 2.0 * beta * self.at.abs() + (3.0 + given) * (1.0 - beta) * (term.abs() + self.at.abs());
        Value { at, off: beta * self.off + U * (sums + at.abs()) }
    }
}

/// One element of a parameter, with its moments.
#[derive(Clone, Copy)]
pub(crate) struct Element {
    rule: AdamW,
    param: Value,
    moments: [Value; 2],
}

impl Element {
    pub(crate) fn new(param: f32, rule: AdamW) -> Element {
        Element { rule, param: Value { at: f64::from(param), off: 0.0 }, moments: Default::default() }
    }

    /// Makes update number `count`. The first update has number 1.
    pub(crate) fn update(&mut self, grad: f32, lr: f64, count: i32) {
        let AdamW { betas: (beta1, beta2), eps, weight_decay, has_f32_powers } = self.rule;
        let grad = f64::from(grad);
        let [m, v] = self.moments;
        let (m, v) = (m.averaged(grad, beta1, 0.0), v.averaged(grad * grad, beta2, 1.0));
        self.moments = [m, v];

        let correction = |beta: f64| {
            let power = beta.powi(count);
            let off = if has_f32_powers { f64::from(count + 1) * power / (1.0 - power) } else { 0.0 };
            (1.0 - power, U * (1.0 + off))
        };
        let ((by1, off1), (by2, off2)) = (correction(beta1), correction(beta2));
        let relative = if v.at == 0.0 { 0.0 } else { v.off / v.at };
        let below = (v.at / by2).sqrt() + eps;
        let change = m.at / by1 / below;
        let off = m.off / by1 / below + change.abs() * (off1 + 0.5 * (relative + off2) + 8.0 * U);
        let param = self.param.at * (1.0 - lr * weight_decay) - lr * change;
        self.param.off +=
            U * (3.0 * self.param.at.abs() + 2.0 * param.abs()) + lr * (off + 2.0 * U * change.abs());
        self.param.at = param;
    }

    /// Returns the error of an f32 parameter as a share of its bound. The share is at most 1 if the parameter is right.
    pub(crate) fn judge(&self, param: f32) -> f64 {
        (f64::from(param) - self.param.at).abs() / (SECOND_ORDER * self.param.off)
    }
}
