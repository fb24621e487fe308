//! Learning rates that follow a schedule: each pass sets its own when it begins.
//!
//! The rates go the way of `set_lr`, so nothing is rebuilt and ranks still agree on them. Must count the same passes on
//! every rank: those that were finished or joined, which ranks do together, and not those given up, which will be made
//! again.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::optim::LrSchedule;
use crate::stepper::Stepper;
use crate::stepper::optimizers::Optimizers;

/// Which groups follow what, and where they are.
#[derive(Debug, Default)]
pub(super) struct Rates {
    schedules: Vec<(String, LrSchedule)>,
    pub(super) step: u64,
}

impl Rates {
    pub(super) fn new(
        layout: &Layout,
        optimizers: &Optimizers,
        schedules: Vec<(String, LrSchedule)>,
    ) -> Result<Rates> {
        for (k, (group, schedule)) in schedules.iter().enumerate() {
            if !layout.groups().contains(group) {
                return Err(Error::config("lr_schedule", group, "is not a group of the layout"));
            }
            if schedules[..k].iter().any(|(other, _)| other == group) {
                return Err(Error::config("lr_schedule", group, "has a schedule already"));
            }
            if optimizers.of_group(group) != 1 {
                let why = "has not one optimizer of its own, whose rate would follow";
                return Err(Error::config("lr_schedule", group, why));
            }
            schedule.validate()?;
        }
        Ok(Rates { schedules, step: 0 })
    }

    /// Refuses to set by hand what a schedule would overwrite.
    pub(super) fn refuse_scheduled(&self, group: &str) -> Result<()> {
        if self.schedules.iter().any(|(scheduled, _)| scheduled == group) {
            return Err(Error::config("group", group, "has a schedule, which sets its rate in each pass"));
        }
        Ok(())
    }
}

impl<D: Device> Stepper<D> {
    /// The step that learning-rate schedules are asked for in the next pass: how many passes have been finished, joined
    /// and replayed ones included, skipped ones too, since only the device knows of those; abandoned ones not. To be
    /// saved with the rest of a run.
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
            return Err(Error::config("schedule_step", step, "must be below 2^63"));
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
            // What f32 cannot hold any more is nothing: a decay must not end in an error.
            let lr = Some(schedule.lr_at(self.rates.step)).filter(|lr| *lr as f32 != 0.0).unwrap_or(0.0);
            if self.optimizers.lr(group).is_some_and(|now| now.to_bits() == lr.to_bits()) {
                continue;
            }
            self.run.get_mut().touch_settings()?;
            let (index, hyper) = self.optimizers.set_lr(group, lr)?;
            self.agreement.forget();
            self.write_group(index, hyper);
        }
        Ok(())
    }
}
