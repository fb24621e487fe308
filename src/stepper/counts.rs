//! Progress of a parameter's optimizers: their step counts, and the number that NAdam carries beside its own.
//!
//! A count without its carried number is refused: the next update would be corrected for momenta that never were, and
//! nothing would show it.

use crate::launch::Progress;
use std::ops::Range;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::layout::ParamId;
use crate::stepper::state::attached::OptimizerId;
use crate::stepper::stepper::Stepper;

impl<D: Device> Stepper<D> {
    /// Returns the number that one of a parameter's [optimizers](Self::optimizers_of) carries from update to update
    /// beside its [step count](Self::step_count_of): NAdam's product of momenta, `mu_product` in `torch.optim`, which
    /// is 1 before the first update. `None` for all others.
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// Errors as for [`step_count_of`](Self::step_count_of).
    pub fn carried_of(&self, id: ParamId, optimizer: OptimizerId) -> Result<Option<f64>> {
        let (param, round) = self.round_of(id, optimizer)?;
        self.settle_control()?;
        let carried = self.optimizers.carried(param, round);
        carried.map(|_| Ok(self.read_progress(param, round)?.carried)).transpose()
    }

    /// Says how many updates one of a parameter's optimizers has made, and what it [carries](Self::carried_of) by now.
    /// They belong together: [`set_step_count`](Self::set_step_count) refuses any count but 0 where a number is
    /// carried.
    ///
    /// ```
    /// # use instep::{Error, Layout, NAdam, Solo, Stepper};
    /// # let layout = Layout::builder().param("w", 1).build()?;
    /// # let w = layout.id("w")?;
    /// let mut stepper = Stepper::host(&layout, NAdam::default(), Solo::default())?;
    /// assert!(matches!(stepper.set_step_count(w, 2), Err(Error::Config { field: "step_count", .. })));
    /// let nadam = stepper.optimizers_of(w)?[0];
    /// stepper.set_step_count_and_carried_of(w, nadam, 2, 0.2031)?;
    /// assert_eq!((stepper.step_count(w)?, stepper.carried_of(w, nadam)?), (2, Some(0.2031)));
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// Errors as for [`set_step_count_of`](Self::set_step_count_of); `Config` if the optimizer carries nothing, or the
    /// number is no product of momenta, which is between 0 and 1, and 1 before the first update.
    pub fn set_step_count_and_carried_of(
        &mut self,
        id: ParamId,
        optimizer: OptimizerId,
        count: u64,
        carried: f64,
    ) -> Result<()> {
        let (param, round) = self.round_of(id, optimizer)?;
        if self.optimizers.carried(param, round).is_none() {
            return Err(Error::config(
                "carried",
                carried,
                "this optimizer carries nothing",
                "call set_step_count_of",
            ));
        }
        if !carried_fits(count, carried) {
            return Err(Error::range("carried", carried, CARRIED_RANGE));
        }
        self.set_counts(param, round..round + 1, count, Some(carried))
    }

    /// Makes ranks notice if they load different numbers for a parameter that they have in common. A local one is each
    /// rank's own: its count and states may differ, so the agreement leaves it out.
    pub(super) fn note_loaded(&mut self, param: usize, numbers: impl IntoIterator<Item = u64>) {
        if self.layout.parameters()[param].local {
            return;
        }
        numbers.into_iter().for_each(|number| self.loaded.note(param, number));
        self.agreement.forget();
    }

    /// Refuses before it writes. `carried` is of all rounds that carry a number.
    pub(super) fn set_counts(
        &mut self,
        param: usize,
        rounds: Range<usize>,
        count: u64,
        carried: Option<f64>,
    ) -> Result<()> {
        if count >= 1 << 63 {
            return Err(Error::range("step_count", count, "a count below 2^63"));
        }
        let carries = rounds.clone().any(|round| self.optimizers.carried(param, round).is_some());
        if carries && count > 0 && carried.is_none() {
            let wrong = "the optimizer carries a product of momenta too";
            return Err(Error::config("step_count", count, wrong, "call set_step_count_and_carried_of"));
        }
        self.settle_control()?;
        self.note_loaded(param, [rounds.start as u64, count].into_iter().chain(carried.map(f64::to_bits)));
        let progress = Progress { count, carried: carried.unwrap_or(1.0) };
        rounds.into_iter().try_for_each(|round| self.write_progress(param, round, progress))
    }

    /// The name of a carried number as in `torch.optim`, with the suffix `#k` of further optimizers.
    pub(crate) fn carried_name(&self, id: ParamId, optimizer: OptimizerId) -> Result<Option<String>> {
        let (param, round) = self.round_of(id, optimizer)?;
        let name = self.optimizers.carried(param, round);
        Ok(name.map(|name| if round == 0 { name.to_owned() } else { format!("{name}#{round}") }))
    }
}

/// Why a number is not carried.
pub(crate) const CARRIED_RANGE: &str = "a number from 0 to 1, and 1 before the first update";

/// Whether it can be a product of as many momenta.
pub(crate) fn carried_fits(count: u64, carried: f64) -> bool {
    (0.0..=1.0).contains(&carried) && (count > 0 || carried == 1.0)
}
