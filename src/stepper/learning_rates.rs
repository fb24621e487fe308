//! Learning rates: set per group or optimizer, multiplied per parameter, or following a schedule.
//!
//! Every change goes through the settings, which the next Begin reads, so nothing is rebuilt and a captured graph stays
//! valid. Ranks agree on all of it.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::layout::ParamId;
use crate::stepper::state::attached::OptimizerId;
use crate::stepper::stepper::Stepper;

impl<D: Device> Stepper<D> {
    /// Sets the learning rate of a group ([`DEFAULT_GROUP`](crate::layout::DEFAULT_GROUP) if the layout names none)
    /// from the next pass on. Ranks must set the same: if they differ, the next pass's first collective is a
    /// `Mismatch`, if the [collective](crate::Collective) compares every call, as in-process ranks do and
    /// [`Nccl`](crate::cuda::Nccl) with its ledger; where none does, parameters drift apart.
    ///
    /// # Ordering
    /// Waits for the last pass to have begun on the optim stream, not for its steps; after an abandoned pass, for all
    /// of its ops in flight.
    ///
    /// # Errors
    /// `Config` if there is no such group, it [follows a schedule](crate::StepperBuilder::lr_schedule), or the
    /// optimizer refuses the rate, which changes nothing; `Order` inside a pass, `Poisoned` after a failure.
    pub fn set_lr(&mut self, group: &str, lr: f64) -> Result<()> {
        self.refuse_open_pass()?;
        self.rates.refuse_scheduled(group)?;
        self.run.get_mut().touch_settings()?;
        let (index, hyper) = self.optimizers.set_lr(group, lr)?;
        self.agreement.forget();
        self.write_hyper(index, hyper);
        Ok(())
    }

    /// Sets the learning rate of one of the [`optimizers`](Self::optimizers), as [`set_lr`](Self::set_lr) does a
    /// group's.
    ///
    /// # Ordering
    /// Ordering as for [`set_lr`](Self::set_lr).
    ///
    /// # Errors
    /// Errors as for [`set_lr`](Self::set_lr).
    pub fn set_lr_of(&mut self, id: OptimizerId, lr: f64) -> Result<()> {
        self.refuse_open_pass()?;
        self.run.get_mut().touch_settings()?;
        let (index, hyper) = self.optimizers.set_lr_of(id, lr)?;
        self.agreement.forget();
        self.write_hyper(index, hyper);
        Ok(())
    }

    /// Multiplies the learning rate of every optimizer of a parameter, from the next pass on: what
    /// [`set_lr`](Self::set_lr) and schedules set for its group comes times this. 1 until it is set, and not saved with
    /// a run. Where the rate is only what a first update starts from (Rprop), it is multiplied there. Ranks must set
    /// the same: if they differ, the next collective is a `Mismatch`, if it [compares](Self::set_lr).
    ///
    /// ```
    /// # use instep::{Layout, Sgd, Solo, Stepper};
    /// let layout = Layout::builder().param("backbone", 1).param("head", 1).build()?;
    /// let (backbone, head) = (layout.id("backbone")?, layout.id("head")?);
    /// let mut stepper = Stepper::host(&layout, Sgd { lr: 1.0, ..Default::default() }, Solo::default())?;
    /// stepper.set_lr_multiplier(backbone, 0.125)?;
    /// let mut pass = stepper.begin()?;
    /// pass.write_grad(backbone, &[1.0])?;
    /// pass.write_grad(head, &[1.0])?;
    /// pass.finish()?;
    /// assert_eq!((stepper.params()?.get(backbone)?[0], stepper.params()?.get(head)?[0]), (-0.125, -1.0));
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// Ordering as for [`set_lr`](Self::set_lr).
    ///
    /// # Errors
    /// `Config` if it is negative or not finite, or an optimizer of the parameter refuses the rate that comes of it,
    /// which changes nothing; `Layout` if `id` is of another layout; `Order` inside a pass, `Poisoned` after a failure.
    pub fn set_lr_multiplier(&mut self, id: ParamId, multiplier: f64) -> Result<()> {
        let param = self.layout.index(id)?;
        if !(multiplier >= 0.0 && multiplier.is_finite()) {
            return Err(Error::range("lr_multiplier", multiplier, "a finite number of at least 0"));
        }
        self.refuse_open_pass()?;
        self.run.get_mut().touch_settings()?;
        self.optimizers.set_lr_multiplier(param, multiplier)?;
        self.agreement.forget();
        self.write_lr_multipliers(param..param + 1);
        Ok(())
    }

    /// Returns the factor in the learning rates of a parameter's optimizers.
    ///
    /// # Errors
    /// `Layout` if `id` is of another layout.
    pub fn lr_multiplier(&self, id: ParamId) -> Result<f64> {
        Ok(self.optimizers.lr_multiplier(self.layout.index(id)?))
    }

    /// Returns the step of the learning-rate schedules in the next pass: how many passes have been finished, joined and
    /// replayed ones included, skipped ones too, since only the device knows of those; abandoned ones not. To be saved
    /// with the rest of a run.
    pub fn schedule_step(&self) -> u64 {
        self.rates.step
    }

    /// Sets the step that learning-rate schedules go on from, as a loaded run does. Ranks must set the same, as with
    /// [`set_lr`](Self::set_lr).
    ///
    /// # Errors
    /// `Order` inside a pass, `Config` for a step of 2^63 or more.
    pub fn set_schedule_step(&mut self, step: u64) -> Result<()> {
        self.refuse_open_pass()?;
        if step >= 1 << 63 {
            return Err(Error::range("schedule_step", step, "a step below 2^63"));
        }
        self.rates.step = step;
        Ok(())
    }

    /// Gives every scheduled group the rate of the pass to come, where it differs from the last one.
    pub(super) fn follow_schedules(&mut self) -> Result<()> {
        if self.rates.schedules.is_empty() {
            return Ok(());
        }
        self.refuse_open_pass()?;
        for k in 0..self.rates.schedules.len() {
            let (group, schedule) = &self.rates.schedules[k];
            // A rate that f32 rounds to zero is set to zero: a decay must not end in an error.
            let lr = Some(schedule.lr_at(self.rates.step)).filter(|lr| *lr as f32 != 0.0).unwrap_or(0.0);
            if self.optimizers.lr(group).is_some_and(|now| now.to_bits() == lr.to_bits()) {
                continue;
            }
            self.run.get_mut().touch_settings()?;
            let (index, hyper) = self.optimizers.set_lr(group, lr)?;
            self.agreement.forget();
            self.write_hyper(index, hyper);
        }
        Ok(())
    }
}
