//! Optimizers that the user implements. Parameters of custom and built-in optimizers may share buckets.
//!
//! The user writes only the formula. The library stores the states, counts the updates, and decides which parameters
//! are skipped. The user's code receives exactly the memory that the checker assumes: one parameter, its gradient and
//! its states, and on a GPU also the step's scalars. PyTorch's functional optimizers have a similar `step_param`.

use std::fmt;
use std::sync::Arc;

use super::{Descriptor, Optimizer, Value, sealed::Rule};
use crate::abi::{INSTEP_MAX_STATES, InstepCustomHyper, InstepHyper};
use crate::error::{Error, Result, refuse};
use crate::handle::{DevicePtr, Place, StreamHandle};

/// One parameter's update, on the CPU.
#[derive(Debug)]
pub struct ParamStep<'a> {
    /// The parameter's name in the layout.
    pub name: &'a str,
    /// The parameter, which is updated in place.
    pub param: &'a mut [f32],
    /// The SUM of the parameter's gradients over ranks. The slice has one value for each element of the parameter.
    /// [`mean_grad`](Self::mean_grad) returns the mean.
    pub grad_sum: &'a [f32],
    /// The states, in the order of [`StepParam::state_names`]. Each state has one value for each element of the
    /// parameter. Before the first update, all values are zero.
    pub states: &'a mut [&'a mut [f32]],
    /// The factor that turns the sum into the gradient for the step: 1 / (world size * loss scale) times the clip
    /// coefficient.
    pub multiplier: f32,
    /// The current learning rate. [`Stepper::set_lr`](crate::Stepper::set_lr) may have changed it.
    pub lr: f64,
    /// The number of this update: 1 for the parameter's first update.
    pub step: u64,
}

impl<'a> ParamStep<'a> {
    /// Returns the elements of the gradient for the step: averaged over ranks, divided by the loss scale, and clipped.
    pub fn mean_grad(&self) -> impl ExactSizeIterator<Item = f32> + use<'a> {
        let multiplier = self.multiplier;
        self.grad_sum.iter().map(move |sum| sum * multiplier)
    }
}

/// One parameter's update on a GPU: addresses for the user's own kernel. Each tensor has `len` f32 elements.
#[derive(Clone, Copy, Debug)]
pub struct EnqueuedStep<'a> {
    /// The parameter's name in the layout.
    pub name: &'a str,
    /// The stream to enqueue on.
    pub stream: StreamHandle,
    /// Number of elements of each tensor.
    pub len: u64,
    /// The address of the parameter, which the kernel updates in place.
    pub param: DevicePtr,
    /// The SUM of the parameter's gradients over ranks. The kernel multiplies this sum by the multiplier in
    /// [`scalars`](Self::scalars) to get the gradient for the step.
    pub grad_sum: DevicePtr,
    /// The states, in the order of [`StepParam::state_names`].
    pub states: &'a [DevicePtr],
    /// The address of four values, in this order: `lr` (f64), `step` (u64), `multiplier` (f32) and `action` (u32). The
    /// values are valid when the stream reaches the kernel. The GPU decides whether the step is skipped. If `action` is
    /// not 0, the kernel must change nothing.
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
/// The schedule orders only these accesses: an update reads the gradient, and writes the parameter and the states. An
/// update must touch no other memory of a stepper. A skipped, unused or frozen parameter gets no update.
///
/// # Source
/// `step_param` of PyTorch's functional optimizers, which `_OptimizerHookState` calls.
pub trait StepParam: Send + Sync {
    /// Returns the optimizer's name, for errors and listings. The name must be equal on all ranks.
    fn name(&self) -> &str;

    /// Returns the names of the states. A state has one value per element. There are at most three states, and no name
    /// has a dot or `#`.
    fn state_names(&self) -> &'static [&'static str] {
        &[]
    }

    /// Returns a hash of all hyperparameters of this optimizer. Ranks compare this hash. If the hash differs between
    /// ranks, the next collective returns `Mismatch`.
    fn fingerprint(&self) -> u64 {
        0
    }

    /// Returns the initial learning rate.
    fn lr(&self) -> f64 {
        0.0
    }

    /// Returns whether this code can update parameters at `place`. If this method returns false, a stepper with
    /// parameters at `place` cannot be built.
    fn reaches(&self, place: Place) -> bool {
        place == Place::Host
    }

    /// Updates one parameter, on the thread of the optim stream. The result must have the same bits on every rank.
    ///
    /// # Errors
    /// Any error or panic poisons the stepper. To return a message of your own, use [`Error::Hook`].
    fn step_param(&self, step: ParamStep<'_>) -> Result<()>;

    /// Enqueues the update of one parameter, on the thread that called the stepper. This function must not wait for the
    /// GPU.
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

/// Wraps a [`StepParam`] as an [`Optimizer`]. A `Custom` can step all parameters. It can also step only one group or
/// single parameters, while built-in optimizers step the others.
#[derive(Clone)]
pub struct Custom {
    rule: Arc<dyn StepParam>,
    lr: f64,
}

impl Custom {
    /// Wraps the user's code. The initial learning rate is [`StepParam::lr`].
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
        let names = self.rule.state_names();
        let is_odd = |(k, name): (usize, &&str)| {
            name.is_empty() || name.contains(['.', '#']) || *name == "step" || names[..k].contains(name)
        };
        refuse! {
            "lr" = self.lr, if !self.lr.is_finite() => "out of range", "use a finite number";
            "state_names" = names.join(", "), if names.len() > INSTEP_MAX_STATES as usize
                => "too many", "keep at most three states";
            "state_names" = names.join(", "), if names.iter().enumerate().any(is_odd)
                => "not usable as names of states", "use different names without `.` and `#`, other than `step`";
        }
        // Every byte of the union must be set, because the union is copied to memory that a GPU reads.
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
