//! The distance that one f32 update may have from the f64 reference, by a running error analysis without loose
//! constants.
//!
//! Each f32 operation adds at most half an ulp of its result, U times its size, to the errors of its inputs. A constant
//! rounded from f64 adds as much. (Wilkinson 1963; Higham, "Accuracy and Stability of Numerical Algorithms", 3.3.) The
//! analysis must bound the update of one step from the same f32 start, so that errors do not accumulate. Painted values
//! are far from subnormals, where an ulp is no longer relative.

use instep::Moments;

use crate::support::reference::{
    AdEmaMix, Adadelta, Adagrad, Adam, Adamax, Lamb, Lion, NAdam, RAdam, RmsProp, Rprop, Rule, Scalar, Sgd,
    norm,
};

/// Unit roundoff of f32.
pub(crate) const U: f64 = 1.0 / (1u64 << 24) as f64;

/// A factor for second-order errors: products of two errors, and the reference's own f64 rounding. Both are below 2^-20
/// of the bound.
const SECOND_ORDER: f64 = 1.0 + 1.0 / (1u64 << 20) as f64;

/// An upper bound of |x|, and of the distance between x in f32 and x in exact arithmetic.
#[derive(Clone, Copy)]
struct Term {
    size: f64,
    error: f64,
}

impl Term {
    /// Returns the term of a stored f32, as at the start of a step.
    fn stored(x: f64) -> Term {
        Term { size: x.abs(), error: 0.0 }
    }

    /// Returns the product with a constant that is rounded to f32: the constant and the product each have one rounding.
    fn times(self, constant: f64) -> Term {
        let size = self.size * constant.abs();
        Term { size, error: self.error * constant.abs() + 2.0 * U * size }
    }

    fn plus(self, other: Term) -> Term {
        let size = self.size + other.size;
        Term { size, error: self.error + other.error + U * size }
    }

    /// Returns the term of a constant that is rounded to f32.
    fn constant(x: f64) -> Term {
        Term { size: x.abs(), error: U * x.abs() }
    }

    fn product(self, other: Term) -> Term {
        let size = self.size * other.size;
        Term { size, error: self.error * (other.size + other.error) + other.error * self.size + U * size }
    }

    /// Returns the quotient by a term whose `size` is its exact value. A divisor that may be 0 gives no bound.
    fn over(self, divisor: Term) -> Term {
        let size = self.size / divisor.size;
        let nearest = divisor.size - divisor.error;
        let error = if nearest > 0.0 { (self.error + size * divisor.error) / nearest } else { f64::NAN };
        Term { size, error: error + U * size }
    }

    /// Returns the root of a term whose `size` is its exact value. The bound is the slope at the near end of the
    /// interval or, where that is steep, |sqrt a - sqrt b| <= sqrt |a - b|.
    fn root(self) -> Term {
        let slope = self.error / (2.0 * (self.size - self.error).max(0.0).sqrt());
        let size = self.size.sqrt();
        Term { size, error: slope.min(self.error.sqrt()) + U * size }
    }
}

/// Bounds for the parameter and each state after one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bound {
    pub param: f64,
    pub states: [f64; 3],
}

/// Returns the bounds for a tensor's step from `before` (f32 values) to `after`, with mean gradients made of f32 sums.
pub(crate) fn bounds(rule: &Rule, before: &[Scalar], after: &[Scalar], gradients: &[f64]) -> Vec<Bound> {
    let elements = before.iter().zip(after).zip(gradients);
    let mut bounds: Vec<Bound> =
        elements.map(|((before, after), gradient)| bound(rule, before, after, *gradient)).collect();
    if let Rule::Lamb(lamb) = rule {
        let params = lamb_params(lamb, before, after, &bounds);
        bounds.iter_mut().zip(params).for_each(|(bound, param)| bound.param = param);
    }
    bounds
}

fn bound(rule: &Rule, before: &Scalar, after: &Scalar, gradient: f64) -> Bound {
    // The mean is the sum times a rounded 1/divisor.
    let mean = Term::stored(gradient).times(1.0);
    let bound = match rule {
        Rule::Sgd(sgd) => sgd_bound(sgd, before, mean),
        Rule::Adam(adam) => adam_bound(adam, before, after, gradient, mean),
        Rule::Adagrad(adagrad) => adagrad_bound(adagrad, before, after, gradient, mean),
        Rule::RmsProp(rmsprop) => rmsprop_bound(rmsprop, before, after, gradient, mean),
        Rule::Adadelta(adadelta) => adadelta_bound(adadelta, before, after, gradient, mean),
        Rule::Adamax(adamax) => adamax_bound(adamax, before, after, gradient, mean),
        Rule::Rprop(rprop) => rprop_bound(rprop, before, after, gradient),
        Rule::Lion(lion) => lion_bound(lion, before, after, gradient, mean),
        Rule::NAdam(nadam) => nadam_bound(nadam, before, after, gradient, mean),
        Rule::RAdam(radam) => radam_bound(radam, before, after, gradient, mean),
        Rule::Lamb(lamb) => lamb_moments(lamb, before, gradient, mean),
        Rule::AdEmaMix(rule) => ademamix_bound(rule, before, after, gradient, mean),
    };
    Bound { param: bound.param * SECOND_ORDER, states: bound.states.map(|error| error * SECOND_ORDER) }
}

/// Returns g + weight_decay*p, or g without decay.
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

/// Returns the error of an average of a stored `old` and a `new` that is wrong by `error`.
///
/// The kernels promise the accurate formula, from + w*(to - from) with w <= 1/2. The larger part is rounded once, at
/// the end. Only the part that is multiplied by w is rounded three times more (difference, weight, product).
fn average_error(beta: f64, old: f64, new: f64, error: f64) -> f64 {
    counted_error(beta <= 0.5, beta, old, new, error)
}

/// Returns the same error, counted from the new sample with w = beta, or from the old average with w = 1 - beta.
fn counted_error(from_sample: bool, beta: f64, old: f64, new: f64, error: f64) -> f64 {
    let (old, new) = (old.abs(), new.abs());
    let (kept, w) = if from_sample { (new, beta) } else { (old, 1.0 - beta) };
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
    let root = Term { size: second_moment, error: v_error }.root();
    let corrected = root.times(1.0 / (1.0 - adam.beta2.powi(after.steps)).sqrt());
    let ratio = Term { size: m, error: m_error }.over(corrected.plus(Term::constant(adam.eps)));
    let mut change = ratio.times(adam.lr / (1.0 - adam.beta1.powi(after.steps)));
    if adam.decoupled && adam.weight_decay != 0.0 {
        change = change.plus(Term::stored(before.param).times(adam.lr * adam.weight_decay));
    }
    Bound { param: moved(after, change), states: [m_error, v_error, v_error] }
}

/// Returns the error of a parameter after a change has been subtracted from it.
fn moved(after: &Scalar, change: Term) -> f64 {
    change.error + U * (after.param.abs() + change.error)
}

/// Returns the gradient that a rule with coupled decay averages, with its error.
fn decayed_gradient(gradient: f64, maximize: bool, weight_decay: f64, param: f64, mean: Term) -> (f64, Term) {
    let g = (if maximize { -gradient } else { gradient }) + weight_decay * param;
    (g, Term { size: g.abs(), error: decayed(mean, weight_decay, param).error })
}

fn adagrad_bound(rule: &Adagrad, before: &Scalar, after: &Scalar, gradient: f64, mean: Term) -> Bound {
    let (_, g) = decayed_gradient(gradient, rule.maximize, rule.weight_decay, before.param, mean);
    let initial = Term::constant(rule.initial_accumulator_value);
    let sum = if before.steps == 0 { initial } else { Term::stored(before.states[0]) }.plus(g.product(g));
    let rate = rule.lr / (1.0 + f64::from(before.steps) * rule.lr_decay);
    let change = g.over(sum.root().plus(Term::constant(rule.eps))).times(rate);
    Bound { param: moved(after, change), states: [sum.error, 0.0, 0.0] }
}

fn rmsprop_bound(rule: &RmsProp, before: &Scalar, after: &Scalar, gradient: f64, mean: Term) -> Bound {
    let (value, g) = decayed_gradient(gradient, rule.maximize, rule.weight_decay, before.param, mean);
    let square = g.product(g);
    let v_error = average_error(rule.alpha, before.states[0], square.size, square.error);
    let mut states = [v_error, 0.0, 0.0];
    let mut variance = Term { size: after.states[0], error: v_error };
    if rule.centered {
        let k = if rule.momentum == 0.0 { 1 } else { 2 };
        states[k] = average_error(rule.alpha, before.states[k], value, g.error);
        let average = Term { size: after.states[k].abs(), error: states[k] };
        let square = average.product(average);
        // Where the two are close, their errors stay and the difference does not.
        let size = variance.size - after.states[k] * after.states[k];
        variance = Term { size, error: v_error + square.error + U * size };
    }
    let mut change = g.over(variance.root().plus(Term::constant(rule.eps)));
    if rule.momentum != 0.0 {
        change = change.plus(Term::stored(before.states[1]).times(rule.momentum));
        states[1] = change.error;
    }
    Bound { param: moved(after, change.times(rule.lr)), states }
}

fn adadelta_bound(rule: &Adadelta, before: &Scalar, after: &Scalar, gradient: f64, mean: Term) -> Bound {
    let (_, g) = decayed_gradient(gradient, rule.maximize, rule.weight_decay, before.param, mean);
    let square = g.product(g);
    let v_error = average_error(rule.rho, before.states[0], square.size, square.error);
    let rms = |x: Term| x.plus(Term::constant(rule.eps)).root();
    let ratio = rms(Term::stored(before.states[1])).over(rms(Term { size: after.states[0], error: v_error }));
    let change = ratio.product(g);
    let square = change.product(change);
    let u_error = average_error(rule.rho, before.states[1], square.size, square.error);
    Bound { param: moved(after, change.times(rule.lr)), states: [v_error, u_error, 0.0] }
}

fn adamax_bound(rule: &Adamax, before: &Scalar, after: &Scalar, gradient: f64, mean: Term) -> Bound {
    let (value, g) = decayed_gradient(gradient, rule.maximize, rule.weight_decay, before.param, mean);
    let m_error = average_error(rule.beta1, before.states[0], value, g.error);
    // A maximum is exact, and moves no further than what it is taken of.
    let faded = average_error(rule.beta2, before.states[1], 0.0, 0.0);
    let u_error = g.plus(Term::constant(rule.eps)).error.max(faded);
    let ratio = Term { size: after.states[0].abs(), error: m_error };
    let ratio = ratio.over(Term { size: after.states[1], error: u_error });
    let change = ratio.times(rule.lr / (1.0 - rule.beta1.powi(after.steps)));
    Bound { param: moved(after, change), states: [m_error, u_error, 0.0] }
}

/// Signs decide, and they are exact: those of a stored gradient and of one that is too large to vanish.
fn rprop_bound(rprop: &Rprop, before: &Scalar, after: &Scalar, gradient: f64) -> Bound {
    let mut size = if after.steps == 1 { Term::constant(rprop.lr) } else { Term::stored(before.states[1]) };
    let product = before.states[0] * if rprop.maximize { -gradient } else { gradient };
    if product != 0.0 {
        size = size.times(if product > 0.0 { rprop.eta_plus } else { rprop.eta_minus });
    }
    // Held to a limit, it is off by the limit's rounding, or by less than before.
    let size_error = size.error.max(U * after.states[1]);
    let prev_error = Term::stored(after.states[0]).times(1.0).error;
    let change = Term { size: after.states[1], error: size_error };
    Bound { param: moved(after, change), states: [prev_error, size_error, 0.0] }
}

/// Returns whether rounding may change the sign that Lion takes: the parameter is then wrong by two steps, or by one.
pub(crate) fn is_undecided(lion: &Lion, before: &Scalar, gradient: f64) -> bool {
    let g_error = Term::stored(gradient).times(1.0).error;
    let error = average_error(lion.beta1, before.states[0], gradient, g_error);
    error > 0.0 && lion.direction(before, gradient).abs() <= error * SECOND_ORDER
}

fn lion_bound(lion: &Lion, before: &Scalar, after: &Scalar, gradient: f64, mean: Term) -> Bound {
    let m_error = average_error(lion.beta2, before.states[0], gradient, mean.error);
    let mut change = Term::constant(lion.lr);
    if is_undecided(lion, before, gradient) {
        change.error += 2.0 * change.size;
    }
    if lion.weight_decay != 0.0 {
        change = change.plus(Term::stored(before.param).times(lion.lr * lion.weight_decay));
    }
    Bound { param: moved(after, change), states: [m_error, 0.0, 0.0] }
}

fn nadam_bound(nadam: &NAdam, before: &Scalar, after: &Scalar, gradient: f64, mean: Term) -> Bound {
    let coupled = if nadam.decoupled_weight_decay { 0.0 } else { nadam.weight_decay };
    let (value, g) = decayed_gradient(gradient, nadam.maximize, coupled, before.param, mean);
    let m_error = average_error(nadam.beta1, before.states[0], value, g.error);
    let square = g.product(g);
    let v_error = average_error(nadam.beta2, before.states[1], square.size, square.error);

    let root = Term { size: after.states[1], error: v_error }.root();
    let corrected = root.times(1.0 / (1.0 - nadam.beta2.powi(after.steps)).sqrt());
    let (of_gradient, of_average) = nadam.shares(after.steps);
    let gradient = g.times(nadam.lr * of_gradient);
    let average = Term { size: after.states[0].abs(), error: m_error }.times(nadam.lr * of_average);
    let mut change = gradient.plus(average).over(corrected.plus(Term::constant(nadam.eps)));
    if nadam.decoupled_weight_decay && nadam.weight_decay != 0.0 {
        change = change.plus(Term::stored(before.param).times(nadam.lr * nadam.weight_decay));
    }
    Bound { param: moved(after, change), states: [m_error, v_error, 0.0] }
}

fn radam_bound(radam: &RAdam, before: &Scalar, after: &Scalar, gradient: f64, mean: Term) -> Bound {
    let coupled = if radam.decoupled_weight_decay { 0.0 } else { radam.weight_decay };
    let (value, g) = decayed_gradient(gradient, radam.maximize, coupled, before.param, mean);
    let m_error = average_error(radam.beta1, before.states[0], value, g.error);
    let square = g.product(g);
    let v_error = average_error(radam.beta2, before.states[1], square.size, square.error);

    let m = Term { size: after.states[0].abs(), error: m_error };
    let lr = radam.lr / (1.0 - radam.beta1.powi(after.steps));
    let mut change = match radam.rectification(after.steps) {
        Some(rectification) => {
            let root = Term { size: after.states[1], error: v_error }.root();
            let correction = (1.0 - radam.beta2.powi(after.steps)).sqrt();
            m.over(root.plus(Term::constant(radam.eps))).times(lr * rectification * correction)
        }
        None => m.times(lr),
    };
    if radam.decoupled_weight_decay && radam.weight_decay != 0.0 {
        change = change.plus(Term::stored(before.param).times(radam.lr * radam.weight_decay));
    }
    Bound { param: moved(after, change), states: [m_error, v_error, 0.0] }
}

fn ademamix_bound(rule: &AdEmaMix, before: &Scalar, after: &Scalar, gradient: f64, mean: Term) -> Bound {
    let (value, g) = decayed_gradient(gradient, rule.maximize, 0.0, before.param, mean);
    let fast_error = average_error(rule.beta1, before.states[0], value, g.error);
    let slow_error = counted_error(false, rule.beta3, before.states[1], value, g.error);
    let square = g.product(g);
    let v_error = average_error(rule.beta2, before.states[2], square.size, square.error);

    let root = Term { size: after.states[2], error: v_error }.root();
    let corrected = root.times(1.0 / (1.0 - rule.beta2.powi(after.steps)).sqrt());
    let fast = Term { size: after.states[0].abs(), error: fast_error };
    let slow = Term { size: after.states[1].abs(), error: slow_error };
    let fast = fast.times(rule.lr / (1.0 - rule.beta1.powi(after.steps)));
    let averages = fast.plus(slow.times(rule.lr * rule.alpha));
    let mut change = averages.over(corrected.plus(Term::constant(rule.eps)));
    if rule.weight_decay != 0.0 {
        change = change.plus(Term::stored(before.param).times(rule.lr * rule.weight_decay));
    }
    Bound { param: moved(after, change), states: [fast_error, slow_error, v_error] }
}

/// Returns the bounds of the moments, which do not bound the parameter.
fn lamb_moments(lamb: &Lamb, before: &Scalar, gradient: f64, mean: Term) -> Bound {
    let (value, g) = decayed_gradient(gradient, lamb.maximize, 0.0, before.param, mean);
    let m_error = average_error(lamb.beta1, before.states[0], value, g.error);
    let square = g.product(g);
    let v_error = average_error(lamb.beta2, before.states[1], square.size, square.error);
    Bound { param: 0.0, states: [m_error, v_error, 0.0] }
}

/// Returns the error of LAMB's u if the moments of `after` are wrong by `moments`.
fn lamb_change(lamb: &Lamb, before: &Scalar, after: &Scalar, moments: &Bound) -> Term {
    let [m, v] = [0, 1].map(|k| Term { size: after.states[k].abs(), error: moments.states[k] });
    let corrected = v.root().times(1.0 / (1.0 - lamb.beta2.powi(after.steps)).sqrt());
    let direction = m.over(corrected.plus(Term::constant(lamb.eps)));
    decayed(direction.times(1.0 / (1.0 - lamb.beta1.powi(after.steps))), lamb.weight_decay, before.param)
}

/// Returns the bounds of LAMB's parameters if the moments of `after` are wrong by `moments`.
///
/// Norms are exact except for roundings of f64, so the relative error of their ratio is that of all changes together,
/// by their own norm. The ratio is rounded once with the rate.
pub(crate) fn lamb_params(lamb: &Lamb, before: &[Scalar], after: &[Scalar], moments: &[Bound]) -> Vec<f64> {
    // The reference's u is of the parameter that it started from.
    let starts: Vec<Scalar> =
        before.iter().zip(after).map(|(before, after)| Scalar { param: before.param, ..*after }).collect();
    let elements = before.iter().zip(after).zip(moments);
    let changes: Vec<Term> =
        elements.map(|((before, after), moments)| lamb_change(lamb, before, after, moments)).collect();
    let change_norm = norm(starts.iter().map(|x| lamb.change(x)));
    let error_norm = norm(changes.iter().map(|change| change.error));
    // Changes that may vanish together give no bound, unless the parameters are all zero: their ratio is 1.
    let has_ratio = before.iter().any(|x| x.param != 0.0);
    let nearest = change_norm - error_norm;
    let of_ratio = match (has_ratio, nearest > 0.0) {
        (false, _) => 0.0,
        (true, true) => error_norm / nearest,
        (true, false) => f64::NAN,
    };
    let rate = lamb.lr * lamb.ratio(&starts);
    let scale = Term { size: rate, error: rate * (of_ratio + U) };
    let moved = |(change, after): (&Term, &Scalar)| moved(after, change.product(scale)) * SECOND_ORDER;
    changes.iter().zip(after).map(moved).collect()
}

/// Returns the error of a stored state, rounded to nearest, where `scale` is the block's largest.
pub(crate) fn storage_error(moments: Moments, is_signed: bool, x: f64, scale: f64) -> f64 {
    match moments {
        Moments::F32 => 0.0,
        // Half of the last of 8 places, one of which is never stored, or of the last place of subnormals.
        Moments::BF16 => x.abs() / 256.0 + 2f64.powi(-134),
        Moments::EightBit => code_distance(is_signed, x, scale),
    }
}

/// Returns the error of an 8-bit code: half a code from the root, the error of the root after three roundings, and the
/// roundings of decoding. A value above zero that is too small for a code becomes the smallest code.
pub(crate) fn code_distance(is_signed: bool, x: f64, scale: f64) -> f64 {
    if scale < 2f64.powi(-90) {
        return x.abs();
    }
    let (codes, power, roundings) = if is_signed { (127.0, 2, 6.0) } else { (255.0, 4, 12.0) };
    let root = (x.abs() / scale).powf(1.0 / f64::from(power));
    let far = root + (0.5 + 3.0 * U * codes) / codes;
    let rounded = roundings * U * far.powi(power);
    let apart = if !is_signed && x > 0.0 && root < 0.5 / codes {
        (1.0 / codes).powi(power)
    } else {
        far.powi(power) - root.powi(power)
    };
    (apart + rounded) * scale * SECOND_ORDER
}
