//! A naive trainer in f64: the whole training of all ranks, element by element.
//!
//! It shares no code with the library and knows nothing of buckets, shards, offload and threads, none of which may
//! change a result. The check tells it which parameters an abandoned pass has stepped.

use super::program::*;
use super::rules::{Element, Update, nadam_momentum, state_names};
use super::values::{F32, Values, bits, rounded, value_bits};

/// The tensors of one parameter on one rank, or on all of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cell {
    pub(crate) value: Values,
    pub(crate) states: Vec<Values>,
    pub(crate) ema: Values,
    pub(crate) copy: Values,
    pub(crate) count: u64,
    pub(crate) carried: f64,
    /// The content of the gradient after the pass, if it is known.
    pub(crate) gradient: Option<Values>,
}

/// The device's decisions about a pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decision {
    pub(crate) skipped: bool,
    pub(crate) norm: Option<f64>,
    pub(crate) clip: f64,
    pub(crate) loss_scale: f64,
    /// A parameter whose gradient is not finite, if any.
    pub(crate) culprit: Option<usize>,
    pub(crate) abandoned: bool,
}

/// All ranks of one phase.
pub(crate) struct Model<'p> {
    pub(crate) program: &'p Program,
    pub(crate) config: &'p Config,
    /// For each parameter, one cell for all ranks, or one cell for each rank if the parameter is local.
    pub(crate) cells: Vec<Vec<Cell>>,
    pub(crate) rules: [Rule; 2],
    pub(crate) schedules: [Option<Schedule>; 2],
    pub(crate) multipliers: Vec<f64>,
    pub(crate) frozen: Vec<bool>,
    pub(crate) schedule_step: u64,
    pub(crate) scale: f64,
    pub(crate) growth: u32,
    pub(crate) previous_norm: Option<f64>,
    pub(crate) passes: u64,
    pub(crate) abandoned: u64,
    pub(crate) last: Option<Decision>,
    /// Whether ranks other than the first have other values until the next pass begins.
    pub(crate) differs: bool,
}

impl<'p> Model<'p> {
    /// Makes the model of a stepper in which nothing has happened.
    pub(crate) fn new(program: &'p Program, config: &'p Config) -> Model<'p> {
        let cells = program.params.iter().enumerate().map(|(k, param)| {
            let zeros = || Values::exact(vec![0.0; param.len]);
            let cell = Cell {
                value: zeros(),
                states: state_names(program.rule(k)).iter().map(|_| zeros()).collect(),
                ema: zeros(),
                copy: zeros(),
                count: 0,
                carried: 1.0,
                gradient: None,
            };
            vec![cell; if param.local { config.ranks as usize } else { 1 }]
        });
        let (scale, growth) = match config.loss_scale {
            LossScale::Constant(scale) | LossScale::Dynamic(scale, _) => (scale, 0),
        };
        Model {
            cells: cells.collect(),
            rules: program.rules,
            schedules: config.schedules,
            multipliers: vec![1.0; program.params.len()],
            frozen: vec![false; program.params.len()],
            schedule_step: 0,
            scale,
            growth,
            previous_norm: None,
            passes: 0,
            abandoned: 0,
            last: None,
            differs: false,
            program,
            config,
        }
    }

    fn precision(&self, param: usize) -> Precision {
        self.config.precision(&self.program.params[param])
    }

    /// Writes a parameter's value, in one rank's cell or in the cell of all ranks.
    pub(crate) fn write_value(&mut self, param: usize, cell: usize, values: Vec<f64>) {
        let mut values = Values::exact(values);
        values.round(value_bits(&self.precision(param)));
        self.cells[param][cell].value = Values::exact(values.values);
    }

    pub(crate) fn write_state(&mut self, param: usize, cell: usize, state: usize, values: Vec<f64>) {
        let mut values = Values::exact(values);
        if self.precision(param).bf16_moments {
            values.round(8);
        }
        self.cells[param][cell].states[state] = Values::exact(values.values);
    }

    /// Sets each group's learning rate for the pass that begins.
    fn follow_schedules(&mut self) {
        for group in 0..2 {
            if let Some(schedule) = &self.schedules[group] {
                self.rules[group].lr = rate(schedule, self.schedule_step);
            }
        }
    }

    /// Returns whether a rank writes a parameter's gradient.
    pub(crate) fn writes(&self, pass: &Pass, rank: u32, param: usize) -> bool {
        let is_written = pass.unwritten[rank as usize] >> param & 1 == 0;
        is_written && !pass.joins[rank as usize] && !self.frozen[param] && !pass.named.contains(&param)
    }

    /// Returns a rank's own gradient of a pass, scaled: the sum of its micro-batches.
    fn own_gradient(&self, pass: &Pass, rank: u32, param: usize) -> Vec<f64> {
        let len = self.program.params[param].len;
        let is_summed = self.config.summed && !self.program.params[param].local;
        let replaces = pass.rewrites && !is_summed;
        let first = if replaces { pass.micro_batches - 1 } else { 0 };
        let of = |k: usize| {
            (first..pass.micro_batches)
                .map(|m| micro_gradient(self.program, pass, rank, m, param, k))
                .sum::<f64>()
        };
        (0..len).map(|k| of(k) * self.scale).collect()
    }

    /// Begins a pass, in which all ranks get the values of rank 0.
    fn begin(&mut self) {
        self.passes += 1;
        self.differs = false;
        self.follow_schedules();
    }

    /// Abandons a pass, after which these parameters of each rank are stepped nevertheless.
    pub(crate) fn abandon(&mut self, pass: &Pass, stepped: &[usize]) {
        self.begin();
        let clip = self.clip_of_previous();
        for param in stepped.iter().copied().filter(|param| self.program.params[*param].len > 0) {
            self.step(pass, param, clip);
        }
        self.cells.iter_mut().flatten().for_each(|cell| cell.gradient = None);
        self.abandoned += 1;
        self.last = Some(Decision {
            skipped: false,
            norm: None,
            clip: 1.0,
            loss_scale: self.scale,
            culprit: None,
            abandoned: true,
        });
    }

    fn clip_of_previous(&self) -> f64 {
        match (self.config.clip, self.previous_norm) {
            (Clip::Previous(most), Some(norm)) => clip_coefficient(most, norm),
            _ => 1.0,
        }
    }

    fn divisor(&self, pass: &Pass) -> f64 {
        match (self.config.uneven, self.config.divisor) {
            (Some(Divisor::Contributing), _) => {
                pass.joins.iter().filter(|joins| !**joins).count().max(1) as f64
            }
            (_, Some(divisor)) => divisor,
            _ => f64::from(self.config.ranks),
        }
    }

    /// Makes a pass.
    pub(crate) fn pass(&mut self, pass: &Pass) {
        self.begin();
        let has_data = pass.joins.iter().any(|joins| !joins);
        let params = 0..self.program.params.len();
        let stepped: Vec<usize> =
            params.clone().filter(|param| has_data && self.is_stepped(pass, *param)).collect();
        let shared = || stepped.iter().copied().filter(|param| !self.program.params[*param].local);
        let divisor = self.divisor(pass) * self.scale;
        let (mut squares, mut culprit) = (0.0, None);
        for param in shared() {
            for x in self.sum(pass, param) {
                squares += (x / divisor).powi(2);
                if !x.is_finite() {
                    culprit = culprit.or(Some(param));
                }
            }
        }
        let norm = squares.sqrt();
        let skipped = culprit.is_some() && self.config.skips();
        let clip = match self.config.clip {
            Clip::Global(most) => clip_coefficient(most, norm),
            _ => self.clip_of_previous(),
        };
        let decides =
            self.config.clip != Clip::None || self.config.skips() || self.config.mode == Mode::Normed;
        self.last = Some(Decision {
            skipped,
            norm: decides.then_some(norm),
            clip: if skipped { 1.0 } else { clip },
            loss_scale: self.scale,
            culprit,
            abandoned: false,
        });
        self.leave_gradients(pass, skipped, clip);
        if !skipped {
            for param in &stepped {
                self.step(pass, *param, clip);
            }
        }
        if has_data && !skipped && norm.is_finite() && decides {
            self.previous_norm = Some(norm);
        }
        if let (LossScale::Dynamic(_, interval), true) = (self.config.loss_scale, has_data) {
            if skipped {
                (self.scale, self.growth) = (self.scale / 2.0, 0);
            } else if self.growth + 1 < interval {
                self.growth += 1;
            } else {
                (self.scale, self.growth) = (self.scale * 2.0, 0);
            }
        }
        self.schedule_step += 1;
    }

    /// Returns whether a parameter is stepped; for a local parameter, on any rank.
    fn is_stepped(&self, pass: &Pass, param: usize) -> bool {
        if self.frozen[param] || pass.named.contains(&param) || self.program.params[param].len == 0 {
            return false;
        }
        self.config.unused != Unused::Skip
            || (0..self.config.ranks).any(|rank| self.writes(pass, rank, param))
    }

    /// Returns the sum over ranks.
    fn sum(&self, pass: &Pass, param: usize) -> Vec<f64> {
        let mut sum = vec![0.0; self.program.params[param].len];
        for rank in (0..self.config.ranks).filter(|rank| self.writes(pass, *rank, param)) {
            let own = self.own_gradient(pass, rank, param);
            sum.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
        }
        sum
    }

    /// Sets the values that gradients have after the pass, if they are specified.
    fn leave_gradients(&mut self, pass: &Pass, skipped: bool, clip: f64) {
        for param in 0..self.program.params.len() {
            let is_local = self.program.params[param].local;
            if self.frozen[param] {
                if self.config.gradients != Gradients::Zero {
                    // Zeros, if something else of its bucket takes part.
                    self.cells[param].iter_mut().for_each(|cell| cell.gradient = None);
                }
                continue;
            }
            let sum = self.sum(pass, param);
            for cell in 0..self.cells[param].len() {
                let len = self.program.params[param].len;
                let zeros = || Some(Values::exact(vec![0.0; len]));
                let is_named =
                    pass.named.contains(&param) || pass.named_late.is_some_and(|(_, named)| named == param);
                let is_left = is_local && (!self.writes(pass, cell as u32, param) || pass.joins[cell]);
                self.cells[param][cell].gradient = match self.config.gradients {
                    _ if is_named || is_left => None,
                    Gradients::Zero => zeros(),
                    Gradients::Keep if !is_local => Some(Values::exact(sum.clone())),
                    Gradients::Keep => Some(Values::exact(self.own_gradient(pass, cell as u32, param))),
                    Gradients::Average if !is_local && !skipped && self.is_stepped(pass, param) => {
                        let factor = clip / (self.divisor(pass) * self.scale);
                        let mut mean = Values::exact(sum.iter().map(|x| x * factor).collect());
                        mean.blur(F32 * mean.largest());
                        mean.round(bits(self.precision(param).grad));
                        Some(mean)
                    }
                    Gradients::Average | Gradients::Release => None,
                };
            }
        }
    }

    /// Steps a parameter. A local parameter is stepped on every rank that has data and used it.
    fn step(&mut self, pass: &Pass, param: usize, clip: f64) {
        let is_local = self.program.params[param].local;
        let group = usize::from(self.program.params[param].second);
        for cell in 0..self.cells[param].len() {
            let rank = cell as u32;
            let gradient: Vec<f64> = if is_local {
                let is_named = pass.named_late == Some((rank, param));
                let is_unused = self.config.unused == Unused::Skip && !self.writes(pass, rank, param);
                if pass.joins[cell] || is_named || is_unused {
                    continue;
                }
                let own = if self.writes(pass, rank, param) {
                    self.own_gradient(pass, rank, param)
                } else {
                    vec![0.0; self.program.params[param].len]
                };
                own.iter().map(|x| x / self.scale).collect()
            } else {
                let divisor = self.divisor(pass) * self.scale;
                self.sum(pass, param).iter().map(|x| x / divisor * clip).collect()
            };
            let rule = self.rules[group];
            let lr = rule.lr * self.multipliers[param];
            let (precision, config) = (self.precision(param), self.config);
            self.cells[param][cell].update(&rule, lr, &gradient, &precision, config);
        }
    }
}

impl Cell {
    fn update(&mut self, rule: &Rule, lr: f64, gradient: &[f64], precision: &Precision, config: &Config) {
        self.count += 1;
        let update = Update { rule, lr, step: self.count, carried: self.carried };
        let state =
            |cell: &Cell, s: usize, k: usize| cell.states.get(s).map_or(0.0, |values| values.values[k]);
        let before = self.value.clone();
        let mut uncertain = self.states.iter().map(|s| s.uncertainty() + F32).fold(F32, f64::max);
        // Per element: how far a sign that went the other way has moved it, and which part of the gradient is uncertain
        // where decay takes most of it away.
        let (mut turned, mut lost) = (vec![0.0; gradient.len()], vec![0.0; gradient.len()]);
        let mut elements: Vec<Element> = (0..gradient.len())
            .map(|k| Element { value: self.value.values[k], states: [0, 1, 2].map(|s| state(self, s, k)) })
            .collect();
        for (k, (x, g)) in elements.iter_mut().zip(gradient).enumerate() {
            let (size, sign) = (x.states[0].abs() + g.abs(), if rule.maximize { -1.0 } else { 1.0 });
            let decay = rule.weight_decay * x.value;
            if rule.weight_decay > 0.0 && rule.kind != Kind::Lion && *g != 0.0 {
                let (all, error) = (g.abs() + decay.abs(), rule.weight_decay * self.value.errors[k]);
                lost[k] = ((F32 * all + error) / (sign * g + decay).abs().max(F32 * all)).min(1.0);
            }
            if let Some(distance) = update.apply(x, *g)
                && distance < 4.0 * uncertain * size + self.states[0].errors[k]
            {
                turned[k] = 2.0 * lr;
            }
        }
        if rule.kind == Kind::Lamb {
            if precision.bf16_moments {
                // A second launch reads the moments that the first one has stored.
                elements.iter_mut().flat_map(|x| &mut x.states).for_each(|x| *x = rounded(*x, 8));
                uncertain = uncertain.max(2f64.powi(-7));
            }
            update.scale_by_norms(&mut elements);
        }
        if rule.kind == Kind::NAdam {
            self.carried *= nadam_momentum(rule, self.count);
        }
        self.value.values = elements.iter().map(|x| x.value).collect();
        let moved = self.value.values.iter().zip(&before.values).map(|(new, old)| (new - old).abs());
        let moved = moved.filter(|x| x.is_finite()).fold(0.0, f64::max);
        // The errors of the states come in, by no more than a few times the part of the change that they are.
        let change = 4.0 * moved * (F32 + uncertain + self.value.uncertainty());
        self.value.blur(F32 * before.largest().max(self.value.largest()) + change);
        for (error, (turned, lost)) in self.value.errors.iter_mut().zip(turned.iter().zip(&lost)) {
            *error += turned + 4.0 * moved * lost;
        }
        let decayed = 4.0 * rule.weight_decay * self.value.errors.iter().copied().fold(0.0, f64::max);
        for (s, values) in self.states.iter_mut().enumerate() {
            let largest = values.largest();
            values.values = elements.iter().map(|x| x.states[s]).collect();
            // What was added may have been larger than the sum.
            let largest = largest.max(values.largest());
            values.blur(F32 * largest + decayed);
            values.errors.iter_mut().zip(&lost).for_each(|(error, lost)| *error += largest * lost);
            if precision.bf16_moments {
                values.round(8);
            }
        }
        self.value.round(value_bits(precision));
        if let Some(copy) = config.copy {
            self.copy = self.value.clone();
            self.copy.round(bits(copy));
        }
        if let Some(decay) = config.ema {
            let first = self.count == 1;
            let average = |old: f64, new: f64| if first { new } else { decay * old + (1.0 - decay) * new };
            let largest = self.value.largest().max(self.ema.largest());
            let pairs = |old: &[f64], new: &[f64]| -> Vec<f64> {
                old.iter().zip(new).map(|(old, new)| average(*old, *new)).collect()
            };
            self.ema.values = pairs(&self.ema.values, &self.value.values);
            self.ema.errors = pairs(&self.ema.errors, &self.value.errors);
            self.ema.blur(F32 * largest);
        }
    }
}

/// Returns the unscaled gradient of one micro-batch, including poison.
pub(crate) fn micro_gradient(
    program: &Program,
    pass: &Pass,
    rank: u32,
    micro_batch: u32,
    param: usize,
    k: usize,
) -> f64 {
    if pass.poison == Some((rank, param, k)) && micro_batch + 1 == pass.micro_batches {
        return if pass.number.is_multiple_of(2) { f64::NAN } else { f64::INFINITY };
    }
    gradient(program.seed, pass.number, rank, micro_batch, param, k)
}

/// Returns the coefficient of `torch.nn.utils.clip_grad_norm_`.
fn clip_coefficient(most: f64, norm: f64) -> f64 {
    let clip = most / (norm + 1e-6);
    if clip > 1.0 { 1.0 } else { clip }
}

/// Returns the learning rate of a scheduler of `torch.optim.lr_scheduler`, in closed form.
pub(crate) fn rate(schedule: &Schedule, step: u64) -> f64 {
    match *schedule {
        Schedule::Step { lr, size, gamma } => lr * gamma.powf((step / size) as f64),
        Schedule::Cosine { lr, period, lowest } => {
            let turn = std::f64::consts::PI * step as f64 / period as f64;
            let rate = lowest + (lr - lowest) * (1.0 + turn.cos()) / 2.0;
            if rate as f32 == 0.0 { 0.0 } else { rate }
        }
        Schedule::WarmUp { lr, steps, start } if step < steps => {
            lr * (start + (1.0 - start) * step as f64 / steps as f64)
        }
        Schedule::WarmUp { lr, .. } => lr,
    }
}
