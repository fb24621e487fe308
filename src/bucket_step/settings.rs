//! Changes a bucket's settings between two steps, on a CPU or a GPU. The settings are hyperparameters, frozen
//! parameters and step counts.
//!
//! If one value of a change is refused, the change has no effect. The methods have the same names and meanings as those
//! of the stepper. A device implements only the trait [`Engine`].

use super::builder::group_of;
use super::tensors::Lent;
use super::{BucketStep, GroupOptimizer};
use crate::error::{Error, Result};
use crate::launch::{Progress, Settings, StepCount, refuse_storage};
use crate::layout::{ParamId, SegmentAction};
use crate::optim::{Optimizer, Value};

/// The device's part of a [`BucketStep`](super::BucketStep). Only this crate can implement it.
pub trait Engine {
    /// Replaces the settings from the next step on, without waiting.
    fn write_settings(&mut self, settings: &Settings);

    /// Returns a record's progress. If a GPU counts the updates, this call first waits for all enqueued steps.
    fn read_progress(&self, record: usize) -> Result<Progress>;

    /// Sets a record's progress. If a GPU counts the updates, this call first waits for all enqueued steps.
    fn write_progress(&mut self, record: usize, progress: Progress) -> Result<()>;
}

impl<E: Engine> BucketStep<E> {
    /// Sets the learning rate of a group, such as [`DEFAULT_GROUP`](crate::DEFAULT_GROUP), from the next step on.
    ///
    /// # Ordering
    /// Never waits for a GPU.
    ///
    /// # Errors
    /// `Layout` if there is no such group, `Config` if the optimizer refuses the learning rate. After these errors,
    /// nothing has changed.
    pub fn set_lr(&mut self, group: &str, lr: f64) -> Result<()> {
        let index = group_of(&self.layout, group)?;
        let rule = self.optimizers[index].optimizer.as_rule_mut();
        let before = std::mem::replace(rule.lr_mut(), lr);
        match rule.hyper() {
            Ok(hyper) => self.settings.set_hyper(index, &hyper),
            Err(error) => {
                *rule.lr_mut() = before;
                return Err(error);
            }
        }
        self.engine.write_settings(&self.settings);
        Ok(())
    }

    /// Sets one or more hyperparameters of a group from the next step on. If one value is refused, no value is set. The
    /// names are the fields of the optimizer's type, as in `torch.optim`. The values are checked after all of them have
    /// been set, so their order does not matter.
    ///
    /// ```
    /// use instep::optim::Value;
    /// use instep::{AdamW, BucketStep, DEFAULT_GROUP, Layout};
    ///
    /// let layout = Layout::builder().param("w", 1).build()?;
    /// let mut step = BucketStep::builder(&layout, AdamW::default()).host()?;
    /// step.set_hyper(DEFAULT_GROUP, &[("weight_decay", 0.1), ("eps", 1e-6)])?;
    /// step.set_hyper(DEFAULT_GROUP, &[("lr", Value::from(0.5)), ("betas", Value::from((0.8, 0.99)))])?;
    /// assert_eq!(step.optimizer(DEFAULT_GROUP)?.get("weight_decay"), Some(0.1.into()));
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// Ordering as for [`set_lr`](Self::set_lr).
    ///
    /// # Errors
    /// `Layout` if there is no such group. `Unsupported` if the optimizer has no hyperparameter of that name and type,
    /// or if the change needs optimizer states for which the step was not built. `Config` if values are out of range or
    /// exclude each other. After these errors, nothing has changed.
    pub fn set_hyper<V: Into<Value> + Copy>(&mut self, group: &str, changes: &[(&str, V)]) -> Result<()> {
        let mut changed = self.optimizers[group_of(&self.layout, group)?].optimizer.clone();
        changes.iter().try_for_each(|(name, value)| changed.set(name, (*value).into()))?;
        self.set_optimizer(group, &*changed)
    }

    /// Replaces all hyperparameters of a group by those of `optimizer`, from the next step on. Fields of `optimizer`
    /// with default values also replace the group's values. Step counts and states do not change. To change only some
    /// hyperparameters, as a schedule does, call [`set_lr`](Self::set_lr) or [`set_hyper`](Self::set_hyper).
    ///
    /// # Ordering
    /// Ordering as for [`set_lr`](Self::set_lr).
    ///
    /// # Errors
    /// `Layout` if there is no such group. `Config` for values out of range. `Unsupported` for another kind of
    /// optimizer, or for an optimizer that needs states for which the step was not built. After these errors, nothing
    /// has changed.
    pub fn set_optimizer(&mut self, group: &str, optimizer: &dyn Optimizer) -> Result<()> {
        let index = group_of(&self.layout, group)?;
        let of_group = &mut self.optimizers[index];
        of_group.refuse_other(group, optimizer)?;
        // A `BucketStep`'s plan has exactly one bucket.
        refuse_storage(optimizer, &self.plan.buckets()[0].storage)?;
        self.settings.set_hyper(index, &optimizer.as_rule().hyper()?);
        of_group.optimizer = optimizer.as_rule().boxed();
        self.engine.write_settings(&self.settings);
        Ok(())
    }

    /// Returns a group's optimizer, with the hyperparameters of the next step.
    ///
    /// # Errors
    /// `Layout` if there is no such group.
    pub fn optimizer(&self, group: &str) -> Result<&dyn Optimizer> {
        Ok(&*self.optimizers[group_of(&self.layout, group)?].optimizer)
    }

    /// Freezes or unfreezes a parameter. A step skips a frozen parameter in the same way as a parameter without a
    /// gradient. A frozen parameter's tensors and step count do not change. Steps and norms do not read its memory. To
    /// skip a parameter in only one step, lend no gradient for it ([`Lent::optional_slices`]).
    ///
    /// # Ordering
    /// Ordering as for [`set_lr`](Self::set_lr).
    ///
    /// # Errors
    /// `Layout` if the parameter is not in this bucket.
    pub fn set_frozen(&mut self, id: ParamId, frozen: bool) -> Result<()> {
        let segment = self.record(id)?;
        self.left[segment].is_frozen = frozen;
        self.leave(segment);
        self.engine.write_settings(&self.settings);
        Ok(())
    }

    /// Returns how many updates a parameter has had.
    ///
    /// # Ordering
    /// Waits for all enqueued steps if a GPU counts the updates. A GPU counts the updates if
    /// [`enqueue`](BucketStep::enqueue) makes an additional launch for the scalars.
    ///
    /// # Errors
    /// `Layout` if the parameter is not in this bucket. `Device` if the copy from a GPU fails, and `Poisoned` after a
    /// failed step.
    pub fn step_count(&self, id: ParamId) -> Result<u64> {
        Ok(self.engine.read_progress(self.record(id)?)?.count)
    }

    /// Returns NAdam's product of momenta (`mu_product` in `torch.optim`). NAdam carries this number from update to
    /// update. Returns `None` for all other optimizers.
    ///
    /// # Ordering
    /// Ordering as for [`step_count`](Self::step_count).
    ///
    /// # Errors
    /// Errors as for [`step_count`](Self::step_count).
    pub fn carried(&self, id: ParamId) -> Result<Option<f64>> {
        let record = self.record(id)?;
        self.carries(record).then(|| Ok(self.engine.read_progress(record)?.carried)).transpose()
    }

    /// Sets how many updates a parameter has had, for example to resume a training. The next update is number `count +
    /// 1`. If the optimizer [carries](Self::carried) a number, pass this number with the count.
    ///
    /// ```
    /// # use instep::{BucketStep, Error, Layout, NAdam};
    /// # let layout = Layout::builder().param("w", 1).build()?;
    /// # let w = layout.id("w")?;
    /// let mut step = BucketStep::builder(&layout, NAdam::default()).host()?;
    /// assert!(matches!(step.set_step_count(w, 2), Err(Error::Config { field: "step_count", .. })));
    /// step.set_step_count(w, (2, 0.2031))?;
    /// assert_eq!((step.step_count(w)?, step.carried(w)?), (2, Some(0.2031)));
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Ordering
    /// Ordering as for [`step_count`](Self::step_count).
    ///
    /// # Errors
    /// Errors as for [`step_count`](Self::step_count). `Config` if the count is 2^63 or more. If the optimizer carries
    /// a number, also returns `Config` in two cases: the count is above 0 and the number is missing, or the number is
    /// not a possible product of momenta. Before the first update, the product is 1. After that, the product is at
    /// least 0 and below 1. If the optimizer carries no number, returns `Config` for a number other than 1. After these
    /// errors, nothing has changed.
    pub fn set_step_count(&mut self, id: ParamId, value: impl Into<StepCount>) -> Result<()> {
        let record = self.record(id)?;
        let progress = value.into().progress(self.carries(record))?;
        self.engine.write_progress(record, progress)
    }

    /// Records which gradients are missing in a call. Does nothing if both this call and the last call have all
    /// gradients.
    pub(super) fn pass_over_missing(&mut self, grads: &Lent<'_>, lacks_some: bool) {
        if !lacks_some && !self.lacks_some {
            return;
        }
        self.lacks_some = lacks_some;
        let mut has_changed = false;
        for segment in 0..self.left.len() {
            let is_missing = self.shape.is_missing(grads, segment);
            if self.left[segment].is_missing != is_missing {
                self.left[segment].is_missing = is_missing;
                self.leave(segment);
                has_changed = true;
            }
        }
        if has_changed {
            self.engine.write_settings(&self.settings);
        }
    }

    /// Records in the settings whether steps skip a segment. In a bucket step, each
    /// segment is one parameter with one optimizer, so segment `i` has record `i`.
    fn leave(&mut self, segment: usize) {
        let own = self.plan.segments()[segment].action;
        let action = if self.left[segment].any() { SegmentAction::Leave } else { own };
        self.settings.set_action(segment, action);
        self.is_stale = true;
    }

    /// Returns whether a record's optimizer [carries](Self::carried) a number.
    fn carries(&self, record: usize) -> bool {
        // A bucket step has one round.
        let (optimizer, _) = self.assignment.optimizer(0, record);
        self.optimizers[optimizer as usize].optimizer.as_rule().carried().is_some()
    }
}

impl GroupOptimizer {
    /// Returns an error if the step was not built for this kind of optimizer or for its states.
    fn refuse_other(&self, group: &str, next: &dyn Optimizer) -> Result<()> {
        let (built, kept) = (self.state_names, next.state_names());
        let thing = format_args!("group `{group}`");
        if self.optimizer.as_rule().kernel() != next.as_rule().kernel() {
            let wrong = "another optimizer than the step was built for";
            return Err(Error::unsupported(thing, wrong, "build another step"));
        }
        if built.get(..kept.len()) != Some(kept) {
            let wrong =
                format_args!("would keep {}, where the step was built for {}", listed(kept), listed(built));
            return Err(Error::unsupported(thing, wrong, "build another step"));
        }
        Ok(())
    }
}

fn listed(states: &[&str]) -> String {
    if states.is_empty() { "no state".to_owned() } else { states.join(", ") }
}
