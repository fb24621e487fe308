//! Learning rates and other hyperparameters: calls that set them between passes, multipliers per parameter, and
//! schedules.
//!
//! Every change is written to the settings. The op `Begin` of the next pass reads the settings. Nothing is rebuilt, and
//! a captured graph stays valid. All ranks must make the same changes.

use crate::abi::InstepHyper;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::layout::{ParamId, Plan};
use crate::optim::{LrSchedule, Value};
use crate::schedule::Schedule;
use crate::stepper::state::optimizers::{OptimizerId, OptimizerKey, Optimizers};
use crate::stepper::stepper::Stepper;

impl<D: Device> Stepper<D> {
    /// Sets an optimizer's learning rate from the next pass on. `optimizer` is the name of its group
    /// ([`DEFAULT_GROUP`](crate::layout::DEFAULT_GROUP) if the layout names no groups), or its id from
    /// [`optimizers`](Self::optimizers). All ranks must set the same learning rate. In-process ranks, `Mpi`, and
    /// [`Nccl`](crate::cuda::Nccl) with its ledger compare every call that ranks make to the
    /// [collective](crate::Collective). If learning rates differ, the next pass's first collective then returns
    /// `Mismatch`. With a collective that does not compare calls, different learning rates make the ranks' parameters
    /// diverge silently. Hyperparameters are not saved in checkpoints.
    ///
    /// # Ordering
    /// Waits until the op `Begin` of the last pass has run, but does not wait for the pass's steps. After an abandoned
    /// pass, waits for all unfinished ops of that pass.
    ///
    /// # Errors
    /// `Config` if there is no such optimizer, or if the group has several optimizers. `Config` if the optimizer
    /// follows a schedule or refuses the learning rate. A refused call has changed nothing. `Order` inside a pass.
    /// `Poisoned` after a failure.
    pub fn set_lr<'k>(&mut self, optimizer: impl Into<OptimizerKey<'k>>, lr: f64) -> Result<()> {
        self.refuse_open_pass()?;
        let key = optimizer.into();
        let id = self.optimizers.find(key)?;
        self.rates.refuse_scheduled(id, key)?;
        self.change_hyper(id, |optimizers, _| optimizers.set_lr(id, lr))
    }

    /// Sets one or more hyperparameters of an optimizer from the next pass on. If one value is refused, no value is
    /// set. The names are the fields of the optimizer's type, as in `torch.optim`. The values are checked together, so
    /// set hyperparameters that depend on each other in one call. The argument `optimizer` and the ordering are the
    /// same as for [`set_lr`](Self::set_lr). As with `set_lr`, all ranks must set the same values.
    ///
    /// ```
    /// # use instep::layout::DEFAULT_GROUP;
    /// # use instep::optim::Value;
    /// # use instep::{Error, Layout, Sgd, Solo, Stepper};
    /// # let layout = Layout::builder().param("w", 1).build()?;
    /// # let w = layout.id("w")?;
    /// let sgd = Sgd { lr: 1.0, momentum: 0.5, ..Sgd::default() };
    /// let mut stepper = Stepper::host(&layout, sgd, Solo::default())?;
    /// for momentum in [0.5, 0.25, 0.125] {
    ///     let changes = [("momentum", Value::from(momentum)), ("nesterov", Value::from(true))];
    ///     stepper.set_hyper(DEFAULT_GROUP, &changes)?;
    ///     let mut pass = stepper.begin()?;
    ///     pass.write(w.grad(), &[1.0])?;
    ///     pass.finish()?;
    /// }
    /// assert!(stepper.set_hyper(DEFAULT_GROUP, &[("momentum", 0.0)]).is_err()); // nesterov needs momentum
    /// // AdamW's betas are one value: `("betas", (0.8, 0.99))`.
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// A change is refused if it needs a state that the stepper does not have. For example, SGD without momentum has no
    /// momentum buffer. Momentum can be switched on later only if another SGD in the same round has a buffer. A
    /// parameter's first optimizer is in the first round, its second optimizer is in the second round, and so on. A
    /// state that is used for the first time is zeros. A state that was used before continues from its old values.
    ///
    /// # Errors
    /// Errors as for [`set_lr`](Self::set_lr). `Unsupported` if the optimizer has no hyperparameter of that name and
    /// kind. `Config` if values are out of range or exclude each other, or if the stepper lacks a state that they need.
    /// A refused call has changed nothing.
    pub fn set_hyper<'k, V: Into<Value> + Copy>(
        &mut self,
        optimizer: impl Into<OptimizerKey<'k>>,
        changes: &[(&str, V)],
    ) -> Result<()> {
        self.refuse_open_pass()?;
        let key = optimizer.into();
        let id = self.optimizers.find(key)?;
        if changes.iter().any(|(name, _)| *name == "lr") {
            self.rates.refuse_scheduled(id, key)?;
        }
        self.change_hyper(id, |optimizers, plan| optimizers.set_hyper(id, changes, plan))
    }

    /// Changes an optimizer's hyperparameters from the next pass on.
    fn change_hyper(
        &mut self,
        id: OptimizerId,
        change: impl FnOnce(&mut Optimizers, &Plan) -> Result<InstepHyper>,
    ) -> Result<()> {
        self.run.get_mut().touch(Schedule::touch_settings)?;
        let hyper = change(&mut self.optimizers, &self.plan)?;
        self.agreement.forget();
        self.settings.set_hyper(id.0 as usize, &hyper);
        self.settings_changed = true;
        Ok(())
    }

    /// Sets or replaces the learning-rate schedule of any optimizer from the next pass on. `None` removes the schedule,
    /// and the optimizer keeps its present learning rate until you call [`set_lr`](Self::set_lr). The step at which the
    /// schedule is evaluated is the same as for [`StepperBuilder::lr_schedule`](crate::StepperBuilder::lr_schedule).
    ///
    /// # Errors
    /// `Config` if there is no such optimizer, if the group has several optimizers, or if the schedule's numbers are
    /// out of range. `Order` inside a pass.
    pub fn set_lr_schedule<'k>(
        &mut self,
        optimizer: impl Into<OptimizerKey<'k>>,
        schedule: Option<LrSchedule>,
    ) -> Result<()> {
        self.refuse_open_pass()?;
        let id = self.optimizers.find(optimizer.into())?;
        self.rates.set(id, schedule)
    }

    /// Sets the factor that multiplies the learning rates of a parameter's optimizers, from the next pass on. The
    /// factor applies to learning rates from [`set_lr`](Self::set_lr) and from schedules. The factor is 1 until you set
    /// it, and is not saved in checkpoints. Rprop uses its learning rate, and thus this factor, only in a parameter's
    /// first update. All ranks must set the same factor. If the factors differ, the next collective that [compares
    /// calls](Self::set_lr) returns `Mismatch`.
    ///
    /// ```
    /// # use instep::{Layout, Sgd, Solo, Stepper};
    /// let layout = Layout::builder().param("backbone", 1).param("head", 1).build()?;
    /// let (backbone, head) = (layout.id("backbone")?, layout.id("head")?);
    /// let mut stepper = Stepper::host(&layout, Sgd { lr: 1.0, ..Default::default() }, Solo::default())?;
    /// stepper.set_lr_multiplier(backbone, 0.125)?;
    /// let mut pass = stepper.begin()?;
    /// pass.write(backbone.grad(), &[1.0])?;
    /// pass.write(head.grad(), &[1.0])?;
    /// pass.finish()?;
    /// assert_eq!((stepper.view::<f32>(backbone)?[0], stepper.view::<f32>(head)?[0]), (-0.125, -1.0));
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// Ordering as for [`set_lr`](Self::set_lr).
    ///
    /// # Errors
    /// `Config` if the factor is negative or not finite, or if an optimizer of the parameter refuses the multiplied
    /// learning rate. A refused call has changed nothing. `Layout` if `id` is of another layout. `Order` inside a pass.
    /// `Poisoned` after a failure.
    pub fn set_lr_multiplier(&mut self, id: ParamId, multiplier: f64) -> Result<()> {
        let param = self.layout.index(id)?;
        if !(multiplier >= 0.0 && multiplier.is_finite()) {
            return Err(Error::range("lr_multiplier", multiplier, "a finite number of at least 0"));
        }
        self.refuse_open_pass()?;
        self.run.get_mut().touch(Schedule::touch_settings)?;
        self.optimizers.set_lr_multiplier(param, multiplier)?;
        self.agreement.forget();
        self.write_lr_multipliers(param..param + 1);
        Ok(())
    }

    /// Returns the factor that multiplies the learning rates of a parameter's optimizers.
    ///
    /// # Errors
    /// `Layout` if `id` is of another layout.
    pub fn lr_multiplier(&self, id: ParamId) -> Result<f64> {
        Ok(self.optimizers.lr_multiplier(self.layout.index(id)?))
    }

    /// Returns the step at which the next pass evaluates the learning-rate schedules. The step is the number of
    /// finished passes, including [joined](Self::join) and replayed passes. Skipped passes count too, because the host
    /// does not wait until the device has decided whether a pass is skipped. Abandoned passes do not count. Save the
    /// step with your checkpoints.
    pub fn schedule_step(&self) -> u64 {
        self.rates.step
    }

    /// Sets the step of the learning-rate schedules, to resume a run. All ranks must set the same step, as with
    /// [`set_lr`](Self::set_lr).
    ///
    /// # Errors
    /// `Order` inside a pass. `Config` for a step of 2^63 or more.
    pub fn set_schedule_step(&mut self, step: u64) -> Result<()> {
        self.refuse_open_pass()?;
        if step >= 1 << 63 {
            return Err(Error::range("schedule_step", step, "a step below 2^63"));
        }
        self.rates.step = step;
        Ok(())
    }

    /// For each optimizer with a schedule, sets the learning rate of the next pass if this rate has changed.
    pub(super) fn follow_schedules(&mut self) -> Result<()> {
        if self.rates.schedules.is_empty() {
            return Ok(());
        }
        self.refuse_open_pass()?;
        for k in 0..self.rates.schedules.len() {
            let (id, schedule) = &self.rates.schedules[k];
            let id = *id;
            // A learning rate that f32 rounds to zero is set to zero, so that a decaying schedule never ends in an
            // error.
            let lr = Some(schedule.lr_at(self.rates.step)).filter(|lr| *lr as f32 != 0.0).unwrap_or(0.0);
            if self.optimizers.lr(id).to_bits() == lr.to_bits() {
                continue;
            }
            self.change_hyper(id, |optimizers, _| optimizers.set_lr(id, lr))?;
        }
        Ok(())
    }
}
