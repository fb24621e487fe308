//! Learning-rate schedules: which group follows which, and the step that they have reached.
//!
//! Every rank counts the same passes: finished and joined ones, which ranks do together. Abandoned passes do not count,
//! because they will be made again.

use crate::error::{Error, Result, one_of};
use crate::layout::Layout;
use crate::optim::LrSchedule;
use crate::stepper::state::optimizers::Optimizers;

/// Which groups follow what, and where they are.
#[derive(Debug, Default)]
pub(crate) struct Rates {
    /// By name of the group.
    pub(crate) schedules: Vec<(String, LrSchedule)>,
    pub(crate) step: u64,
}

impl Rates {
    pub(crate) fn new(
        layout: &Layout,
        optimizers: &Optimizers,
        mut schedules: Vec<(String, LrSchedule)>,
    ) -> Result<Rates> {
        schedules.sort_by(|(one, _), (other, _)| one.cmp(other));
        for (k, (group, schedule)) in schedules.iter().enumerate() {
            if layout.group(group).is_none() {
                return Err(Error::config(
                    "lr_schedule",
                    group,
                    "not a group of the layout",
                    format_args!("use {}", one_of(group, layout.groups().iter().map(String::as_str))),
                ));
            }
            if schedules[..k].last().is_some_and(|(other, _)| other == group) {
                return Err(Error::config(
                    "lr_schedule",
                    group,
                    "has a schedule already",
                    "name each group once",
                ));
            }
            let count = optimizers.of_group(group);
            if count != 1 {
                let wrong = format_args!("this group has {count} optimizers, and a schedule drives one");
                return Err(Error::config("lr_schedule", group, wrong, "set rates with set_lr_of"));
            }
            schedule.validate()?;
        }
        Ok(Rates { schedules, step: 0 })
    }

    /// Refuses to set by hand what a schedule would overwrite.
    pub(crate) fn refuse_scheduled(&self, group: &str) -> Result<()> {
        if self.schedules.binary_search_by(|(scheduled, _)| (**scheduled).cmp(group)).is_ok() {
            return Err(Error::config(
                "group",
                group,
                "its schedule sets the rate in each pass",
                "build without the schedule to set it by hand",
            ));
        }
        Ok(())
    }
}
