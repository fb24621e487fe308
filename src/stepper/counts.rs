//! Progress of a parameter's optimizers: their step counts, and NAdam's product of momenta.
//!
//! A call that sets NAdam's step count to a number above 0 without the product is refused, because otherwise the next
//! update's bias correction would silently be wrong.

use std::borrow::Cow;

use crate::device::Device;
use crate::error::Result;
use crate::launch::{Progress, StepCount};
use crate::layout::ParamId;
use crate::stepper::state::optimizers::{Attached, OptimizerId};
use crate::stepper::stepper::Stepper;

/// Selects the step counts that a call reads or sets: the counts of all optimizers of a parameter, or the count of one
/// of them. If all counts are selected, a read returns the first optimizer's count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StepCountKey {
    param: ParamId,
    optimizer: Option<OptimizerId>,
}

impl From<ParamId> for StepCountKey {
    fn from(param: ParamId) -> Self {
        StepCountKey { param, optimizer: None }
    }
}

impl From<(ParamId, OptimizerId)> for StepCountKey {
    fn from((param, optimizer): (ParamId, OptimizerId)) -> Self {
        StepCountKey { param, optimizer: Some(optimizer) }
    }
}

impl<D: Device> Stepper<D> {
    /// Returns how many times a parameter's first optimizer has updated the parameter. With the key `(parameter,
    /// optimizer)`, returns the number of updates by that [optimizer](Self::optimizers_of). The counts of a parameter's
    /// optimizers can differ if an optimizer was [added later](Self::add_optimizer_for), or if you
    /// [set](Self::set_step_count) the count of only one optimizer.
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// `Order` inside a pass. `Layout` if the parameter belongs to another layout. `Config` if that optimizer does not
    /// step the parameter. `Poisoned` after a failure.
    pub fn step_count(&self, key: impl Into<StepCountKey>) -> Result<u64> {
        let (param, round) = self.first_round(key.into())?;
        self.settle_control()?;
        Ok(self.read_progress(param, round)?.count)
    }

    /// Sets the step counts of all optimizers of a parameter, or the count of one of these optimizers. The next update
    /// has the number `count + 1`, and its bias correction uses this number. Update number 1 initialises a momentum
    /// buffer instead of averaging into the buffer. If an optimizer [carries](Self::carried) a number from update to
    /// update, pass this number with the count. All ranks must set the same count. If the counts differ, the next
    /// collective that [compares calls](Self::set_lr) returns `Mismatch`.
    ///
    /// ```
    /// # use instep::{Error, Layout, NAdam, Solo, Stepper};
    /// # let layout = Layout::builder().param("w", 1).build()?;
    /// # let w = layout.id("w")?;
    /// let mut stepper = Stepper::host(&layout, NAdam::default(), Solo::default())?;
    /// assert!(matches!(stepper.set_step_count(w, 2), Err(Error::Config { field: "step_count", .. })));
    /// stepper.set_step_count(w, (2, 0.2031))?;
    /// let nadam = stepper.optimizers_of(w)?[0];
    /// assert_eq!((stepper.step_count(w)?, stepper.carried((w, nadam))?), (2, Some(0.2031)));
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// Errors as for [`step_count`](Self::step_count). `Config` if the count is 2^63 or more. `Config` if the optimizer
    /// carries a number, the count is above 0, and no number is given. `Config` if the optimizer carries no number, and
    /// a number other than 1 is given. `Config` if the number cannot be a product of momenta: it must be 1 if the count
    /// is 0, and otherwise at least 0 and below 1.
    pub fn set_step_count(
        &mut self,
        key: impl Into<StepCountKey>,
        value: impl Into<StepCount>,
    ) -> Result<()> {
        let key = key.into();
        let (param, first) = self.first_round(key)?;
        let rounds = match key.optimizer {
            Some(_) => first..first + 1,
            // A parameter without an optimizer also keeps one step count, because an optimizer may be added later.
            None => 0..self.optimizers.rounds(param).max(1),
        };
        let carries = rounds.clone().any(|round| self.optimizers.carried(param, round).is_some());
        let Progress { count, carried } = value.into().progress(carries)?;
        self.settle_control()?;
        self.note_loaded(param, [rounds.start as u64, count, carried.to_bits()]);
        for round in rounds {
            let carries = self.optimizers.carried(param, round).is_some();
            self.write_progress(
                param,
                round,
                Progress { count, carried: if carries { carried } else { 1.0 } },
            )?;
        }
        Ok(())
    }

    /// Returns NAdam's product of momenta (`mu_product` in `torch.optim`). NAdam carries this product from update to
    /// update, like its [step count](Self::step_count). The product is 1 before the first update. Returns `None` for
    /// all other optimizers.
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// Errors as for [`step_count`](Self::step_count).
    pub fn carried(&self, key: impl Into<StepCountKey>) -> Result<Option<f64>> {
        let (param, round) = self.first_round(key.into())?;
        self.settle_control()?;
        let carried = self.optimizers.carried(param, round);
        carried.map(|_| Ok(self.read_progress(param, round)?.carried)).transpose()
    }

    fn first_round(&self, key: StepCountKey) -> Result<(usize, usize)> {
        match key.optimizer {
            Some(optimizer) => self.round_of(key.param, optimizer),
            None => Ok((self.layout.index(key.param)?, 0)),
        }
    }

    /// Returns the name of the number that an optimizer [carries](Self::carried). The name is the one in `torch.optim`.
    /// For the parameter's `k`-th additional optimizer, the suffix `#k` is added.
    pub(crate) fn carried_name(&self, id: ParamId, optimizer: OptimizerId) -> Result<Option<String>> {
        let (param, round) = self.round_of(id, optimizer)?;
        let name = self.optimizers.carried(param, round);
        Ok(name.map(|name| if round == 0 { name.to_owned() } else { format!("{name}#{round}") }))
    }
}

impl<D: Device> Stepper<D> {
    /// Returns all optimizers. The list begins with the first optimizer of each group, in the layout's order of groups.
    /// The groups' [further optimizers](crate::StepperBuilder::then) follow. Optimizers of single parameters come next,
    /// in the order of registration. Optimizers that were [added](Self::add_optimizer_for) to the built stepper come
    /// last, including [those of groups](Self::add_group).
    ///
    /// ```
    /// use std::any::Any;
    /// use instep::{AdamW, Layout, Sgd, Solo, Stepper};
    ///
    /// let layout = Layout::builder().param("weight", 4).param("bias", 1).build()?;
    /// let (weight, bias) = (layout.id("weight")?, layout.id("bias")?);
    /// let stepper = Stepper::builder_without_optimizer(&layout)
    ///     .optimizer_for(&[weight], AdamW::default())
    ///     .optimizer_for(&[bias], Sgd { momentum: 0.9, ..Sgd::default() })
    ///     .host(Solo::default())?;
    /// let second = stepper.optimizers().nth(1).unwrap();
    /// let sgd = (second.optimizer as &dyn Any).downcast_ref::<Sgd>().unwrap();
    /// assert_eq!(sgd.momentum, 0.9);
    /// assert_eq!(stepper.optimizers_of(bias)?, [second.id]);
    /// assert_eq!(stepper.state_names(weight)?, ["exp_avg", "exp_avg_sq"]);
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Source
    /// `_get_in_backward_optimizers` of PyTorch.
    pub fn optimizers(&self) -> impl ExactSizeIterator<Item = Attached<'_>> {
        self.optimizers.all()
    }

    /// Returns the optimizers of a parameter. Optimizers that step the parameter come first, in the order of their
    /// steps. Optimizers that are only [attached](crate::StepperBuilder::attach) to the parameter follow.
    ///
    /// # Errors
    /// `Layout` if `id` is of another layout.
    pub fn optimizers_of(&self, id: ParamId) -> Result<Vec<OptimizerId>> {
        Ok(self.optimizers.of(self.layout.index(id)?).collect())
    }

    pub(crate) fn stepping(&self, id: ParamId) -> Result<Vec<OptimizerId>> {
        Ok(self.optimizers.stepping(self.layout.index(id)?).collect())
    }

    /// Returns the names of a parameter's states for [`ParamId::state`]. If `torch.optim` has the optimizer, these are
    /// the names in `torch.optim`. For the parameter's `k`-th additional optimizer, the suffix `#k` is added.
    ///
    /// # Errors
    /// `Layout` if `id` is of another layout.
    pub fn state_names(&self, id: ParamId) -> Result<Vec<Cow<'static, str>>> {
        Ok(self.optimizers.states(self.layout.index(id)?).map(|(name, _, _)| name).collect())
    }
}
