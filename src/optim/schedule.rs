//! Learning rates as functions of the step: the closed forms of `torch.optim.lr_scheduler`.
//!
//! A schedule has no state: a learning rate depends only on the number of the step. A schedule can therefore resume at
//! any step, no rounding error accumulates, and all ranks get the same learning rate for the same step.

use std::f64::consts::PI;
use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Result};

/// Computes the learning rate of each step. Steps are counted from 0.
///
/// ```
/// use instep::LrSchedule;
///
/// let schedule = LrSchedule::cosine(0.1, 90, 0.0).warm_up(10, 0.5);
/// assert_eq!(schedule.lr_at(0), 0.05);
/// assert_eq!(schedule.lr_at(10), 0.1);
/// assert!((schedule.lr_at(55) - 0.05).abs() < 1e-15);
/// assert_eq!(schedule.lr_at(100), 0.0);
/// ```
#[derive(Clone, Debug)]
pub struct LrSchedule {
    shape: Shape,
    /// The number of steps of the linear warm-up, and its start factor.
    warm_up: Option<(u64, f64)>,
}

#[derive(Clone)]
enum Shape {
    Constant { lr: f64 },
    Step { lr: f64, step_size: u64, gamma: f64 },
    Cosine { lr: f64, period: u64, lowest: f64 },
    Custom(Arc<dyn Fn(u64) -> f64 + Send + Sync>),
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Shape::Constant { lr } => write!(f, "Constant({lr})"),
            Shape::Step { lr, step_size, gamma } => write!(f, "Step({lr}, {step_size}, {gamma})"),
            Shape::Cosine { lr, period, lowest } => write!(f, "Cosine({lr}, {period}, {lowest})"),
            Shape::Custom(_) => f.write_str("Custom"),
        }
    }
}

impl LrSchedule {
    /// Returns a schedule with a constant learning rate.
    pub fn constant(lr: f64) -> LrSchedule {
        Shape::Constant { lr }.into()
    }

    /// Returns a schedule that starts at `lr`, and multiplies the learning rate by `gamma` every `step_size` steps.
    ///
    /// # Source
    /// `torch.optim.lr_scheduler.StepLR`: `lr * gamma^(step / step_size)`.
    pub fn step(lr: f64, step_size: u64, gamma: f64) -> LrSchedule {
        Shape::Step { lr, step_size, gamma }.into()
    }

    /// Returns a schedule in which the learning rate falls from `lr` to `lowest` along half a cosine in `period` steps,
    /// and rises again in the next `period` steps.
    ///
    /// # Source
    /// `torch.optim.lr_scheduler.CosineAnnealingLR` with `period` as `T_max` (Loshchilov and Hutter, SGDR, ICLR 2017).
    pub fn cosine(lr: f64, period: u64, lowest: f64) -> LrSchedule {
        Shape::Cosine { lr, period, lowest }.into()
    }

    /// Returns a schedule that calls `lr_at` to get the learning rate of a step. A stepper makes one such call per pass
    /// for each optimizer with this schedule. `lr_at` must return the same value on every rank.
    pub fn custom(lr_at: impl Fn(u64) -> f64 + Send + Sync + 'static) -> LrSchedule {
        Shape::Custom(Arc::new(lr_at)).into()
    }

    /// Adds a linear warm-up of `steps` steps before this schedule. Let `lr` be this schedule's learning rate at its
    /// step 0. The learning rate rises linearly from `start_factor` times `lr` to `lr`. Step 0 of this schedule becomes
    /// step `steps` of the returned schedule. A second call of this method replaces the warm-up.
    ///
    /// # Source
    /// `torch.optim.lr_scheduler.SequentialLR` of a `LinearLR` and this schedule, with `steps` as the milestone.
    pub fn warm_up(mut self, steps: u64, start_factor: f64) -> LrSchedule {
        self.warm_up = Some((steps, start_factor));
        self
    }

    /// Returns the learning rate of a step.
    pub fn lr_at(&self, step: u64) -> f64 {
        match self.warm_up {
            Some((steps, start_factor)) if step < steps => {
                let share = step as f64 / steps as f64;
                self.shape.lr_at(0) * (start_factor + (1.0 - start_factor) * share)
            }
            Some((steps, _)) => self.shape.lr_at(step - steps),
            None => self.shape.lr_at(step),
        }
    }

    /// Checks the schedule's own numbers. Optimizers check each learning rate when it is set.
    ///
    /// # Errors
    /// `Config` for a number out of range. With such a number, [`lr_at`](Self::lr_at) may panic.
    pub fn validate(&self) -> Result<()> {
        match self.shape {
            Shape::Constant { lr } | Shape::Step { lr, .. } | Shape::Cosine { lr, .. } if !lr.is_finite() => {
                return Err(Error::range("lr", lr, "a finite number"));
            }
            Shape::Step { step_size: 0, .. } => {
                return Err(Error::range("step_size", 0, "a whole number above 0"));
            }
            Shape::Step { gamma, .. } if !(gamma >= 0.0 && gamma.is_finite()) => {
                return Err(Error::range("gamma", gamma, "a finite number of at least 0"));
            }
            Shape::Cosine { period: 0, .. } => {
                return Err(Error::range("period", 0, "a whole number above 0"));
            }
            Shape::Cosine { lowest, .. } if !(lowest >= 0.0 && lowest.is_finite()) => {
                return Err(Error::range("lowest", lowest, "a finite number of at least 0"));
            }
            _ => {}
        }
        match self.warm_up {
            Some((_, factor)) if !(factor >= 0.0 && factor.is_finite()) => {
                Err(Error::range("start_factor", factor, "a finite number of at least 0"))
            }
            _ => Ok(()),
        }
    }
}

impl From<Shape> for LrSchedule {
    fn from(shape: Shape) -> LrSchedule {
        LrSchedule { shape, warm_up: None }
    }
}

impl Shape {
    fn lr_at(&self, step: u64) -> f64 {
        match self {
            Shape::Constant { lr } => *lr,
            Shape::Step { lr, step_size, gamma } => lr * power(*gamma, step / step_size),
            Shape::Cosine { lr, period, lowest } => {
                let half_turns = step as f64 / *period as f64;
                lowest + (lr - lowest) * (1.0 + (PI * half_turns).cos()) / 2.0
            }
            Shape::Custom(lr_at) => lr_at(step),
        }
    }
}

/// Returns a power, computed by repeated squaring so that every machine gets the same bits.
fn power(base: f64, mut exponent: u64) -> f64 {
    let (mut result, mut square) = (1.0, base);
    while exponent > 0 {
        if exponent % 2 == 1 {
            result *= square;
        }
        square *= square;
        exponent /= 2;
    }
    result
}
