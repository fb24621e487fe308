//! Optimizers of the user's own, beside the built-in ones in the same buckets.
//!
//! The library keeps the states, decides what is skipped and counts the updates; only the formula is the user's. Must
//! hand out exactly the memory that the checker has judged: one parameter, its gradient, its states. Idea: the
//! functional optimizers' `step_param` in PyTorch's `_OptimizerHookState`.

use std::fmt;
use std::sync::Arc;

use super::{Descriptor, Optimizer, Value, sealed::Rule};
use crate::abi::{INSTEP_MAX_STATES, InstepCustomHyper, InstepHyper};
use crate::error::{Error, Result};
use crate::handle::{DevicePtr, Place, StreamHandle};

/// One parameter's update, on the CPU.
#[derive(Debug)]
pub struct ParamStep<'a> {
    /// The parameter's name in the layout.
    pub name: &'a str,
    /// The parameter, to be updated.
    pub param: &'a mut [f32],
    /// The SUM of its gradients over ranks, as long as the parameter: [`mean_grad`](Self::mean_grad) has the mean.
    pub grad_sum: &'a [f32],
    /// The states, in the order of [`StepParam::state_names`], each as long as the parameter; zeros before the first
    /// update.
    pub states: &'a mut [&'a mut [f32]],
    /// What makes the sum the gradient to step with: 1/world_size, the loss scale and clipping in one factor.
    pub multiplier: f32,
    /// The learning rate, as [`Stepper::set_lr`](crate::Stepper::set_lr) has left it.
    pub lr: f64,
    /// Which update of this parameter it is, from 1.
    pub step: u64,
}

impl<'a> ParamStep<'a> {
    /// Returns the gradient to step with, element by element: averaged over ranks, without the loss scale, clipped.
    pub fn mean_grad(&self) -> impl ExactSizeIterator<Item = f32> + use<'a> {
        let multiplier = self.multiplier;
        self.grad_sum.iter().map(move |sum| sum * multiplier)
    }
}

/// One parameter's update, on a GPU: addresses for a kernel of the user's own. All lengths are `len` f32.
#[derive(Clone, Copy, Debug)]
pub struct EnqueuedStep<'a> {
    /// The parameter's name in the layout.
    pub name: &'a str,
    /// The stream to enqueue on.
    pub stream: StreamHandle,
    /// Elements.
    pub len: u64,
    /// The parameter, to be updated.
    pub param: DevicePtr,
    /// The SUM of its gradients over ranks, to be multiplied by the multiplier of [`scalars`](Self::scalars).
    pub grad_sum: DevicePtr,
    /// The states, in the order of [`StepParam::state_names`].
    pub states: &'a [DevicePtr],
    /// `lr` (f64), `step` (u64), `multiplier` (f32) and `action` (u32), one after the other, as the stream will find
    /// them: the GPU decides about skipping, so the kernel must change nothing unless `action` is 0.
    pub scalars: DevicePtr,
}

/// The formula of an optimizer, parameter by parameter.
///
/// ```
/// use instep::optim::{Custom, ParamStep, StepParam};
/// use instep::{Layout, Solo, Stepper};
///
/// /// Descent that goes no further than `limit` in a step.
/// struct Careful {
///     limit: f32,
/// }
///
/// impl StepParam for Careful {
///     fn name(&self) -> &str {
///         "careful"
///     }
///     fn fingerprint(&self) -> u64 {
///         self.limit.to_bits().into()
///     }
///     fn lr(&self) -> f64 {
///         0.5
///     }
///     fn step_param(&self, step: ParamStep<'_>) -> instep::Result<()> {
///         let means = step.mean_grad(); // averaged, unscaled and clipped
///         for (p, mean) in step.param.iter_mut().zip(means) {
///             *p -= (step.lr as f32 * mean).clamp(-self.limit, self.limit);
///         }
///         Ok(())
///     }
/// }
///
/// let layout = Layout::builder().param("w", 2).build()?;
/// let w = layout.id("w")?;
/// let mut stepper = Stepper::host(&layout, Custom::new(Careful { limit: 1.0 }), Solo::default())?;
/// let mut pass = stepper.begin()?;
/// pass.grads().write(w, &[3.0, -0.5])?;
/// pass.finish()?;
/// assert_eq!(stepper.view::<f32>(w)?, [-1.0, 0.25]);
/// # Ok::<(), instep::Error>(())
/// ```
///
/// # Ordering
/// It reads the gradient, and writes the parameter and the states, and nothing else that a stepper owns: that is what
/// the schedule has ordered. A skipped, unused or frozen parameter is not passed to it.
///
/// # Source
/// `step_param` of PyTorch's functional optimizers, as `_OptimizerHookState` asks for it.
pub trait StepParam: Send + Sync {
    /// Returns the name for errors and listings. Ranks compare it.
    fn name(&self) -> &str;

    /// Names of the states that it keeps per element: three at most, and no dot or `#` in a name.
    fn state_names(&self) -> &'static [&'static str] {
        &[]
    }

    /// A number for hyperparameters of its own, which ranks compare as they do those of built-in optimizers: where they
    /// differ, the next collective is a `Mismatch`. Bits of all of them, folded, will do.
    fn fingerprint(&self) -> u64 {
        0
    }

    /// The first learning rate.
    fn lr(&self) -> f64 {
        0.0
    }

    /// Returns whether this code can update parameters at `place`. A stepper with parameters elsewhere is refused.
    fn reaches(&self, place: Place) -> bool {
        place == Place::Host
    }

    /// Updates one parameter, on the thread of the optim stream. Must give the same bits on every rank.
    ///
    /// # Errors
    /// Any error poisons the stepper, and so does a panic; [`Error::Hook`] takes words of your own.
    fn step_param(&self, step: ParamStep<'_>) -> Result<()>;

    /// Enqueues the update of one parameter, on the thread that called the stepper. Must not wait.
    ///
    /// # Errors
    /// Errors as for [`step_param`](Self::step_param).
    fn enqueue_param(&self, step: &EnqueuedStep<'_>) -> Result<()> {
        Err(Error::unsupported(
            format_args!("`{}`", step.name),
            format_args!("the optimizer `{}` cannot step it on a GPU", self.name()),
            "implement StepParam::enqueue_param, or step on the host",
        ))
    }
}

/// A [`StepParam`] as an [`Optimizer`]: for a whole stepper, for one group beside built-in ones, or for single
/// parameters.
#[derive(Clone)]
pub struct Custom {
    rule: Arc<dyn StepParam>,
    lr: f64,
}

impl Custom {
    /// Takes its first learning rate from [`StepParam::lr`].
    pub fn new(rule: impl StepParam + 'static) -> Custom {
        Custom { lr: rule.lr(), rule: Arc::new(rule) }
    }
}

impl fmt::Debug for Custom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fields = [self.rule.fingerprint(), self.lr.to_bits()];
        f.debug_struct("Custom")
            .field("name", &self.rule.name())
            .field("lr", &self.lr)
            .field("bits", &fields)
            .finish()
    }
}

impl Rule for Custom {
    fn descriptor(&self) -> Option<&'static Descriptor> {
        None
    }

    fn get(&self, name: &str) -> Option<Value> {
        (name == "lr").then_some(Value::Number(self.lr))
    }

    fn put(&mut self, name: &str, value: Value) -> bool {
        match (name, value) {
            ("lr", Value::Number(lr)) => self.lr = lr,
            _ => return false,
        }
        true
    }

    fn state_names(&self) -> &'static [&'static str] {
        self.rule.state_names()
    }

    fn hyper(&self) -> Result<InstepHyper> {
        if !self.lr.is_finite() {
            return Err(Error::range("lr", self.lr, "a finite number"));
        }
        let names = self.rule.state_names();
        if names.len() > INSTEP_MAX_STATES as usize {
            return Err(Error::config(
                "state_names",
                names.join(", "),
                "too many",
                "keep at most three states",
            ));
        }
        let is_odd = |(k, name): (usize, &&str)| {
            name.is_empty() || name.contains(['.', '#']) || *name == "step" || names[..k].contains(name)
        };
        if names.iter().enumerate().any(is_odd) {
            let remedy = "use different names without `.` and `#`, other than `step`";
            return Err(Error::config(
                "state_names",
                names.join(", "),
                "not usable as names of states",
                remedy,
            ));
        }
        // Every byte of the union is set, as it is copied to where a GPU reads it.
        let mut hyper = InstepHyper { words: [0.0; 8] };
        hyper.custom = InstepCustomHyper { lr: self.lr };
        Ok(hyper)
    }

    fn lr_mut(&mut self) -> &mut f64 {
        &mut self.lr
    }

    fn boxed(&self) -> Box<dyn Optimizer> {
        Box::new(self.clone())
    }

    fn custom(&self) -> Option<Arc<dyn StepParam>> {
        Some(Arc::clone(&self.rule))
    }
}
