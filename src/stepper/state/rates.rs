//! Learning-rate schedules: which optimizer follows which, and the step that they have reached.
//!
//! Every rank counts the same passes: finished and joined ones, which ranks do together. Abandoned passes do not count,
//! because they will be made again.

use crate::error::{Error, Result, one_of};
use crate::layout::Layout;
use crate::optim::LrSchedule;
use crate::stepper::state::attached::{OptimizerId, OptimizerKey};
use crate::stepper::state::optimizers::Optimizers;

/// The schedules of optimizers, and their positions.
#[derive(Debug, Default)]
pub(crate) struct Rates {
    /// By number of the optimizer.
    pub(crate) schedules: Vec<(OptimizerId, LrSchedule)>,
    pub(crate) step: u64,
}

impl Rates {
    /// Schedules of whole groups.
    pub(crate) fn new(
        layout: &Layout,
        optimizers: &Optimizers,
        of_groups: Vec<(String, LrSchedule)>,
    ) -> Result<Rates> {
        let mut named = Vec::with_capacity(of_groups.len());
        for (group, schedule) in of_groups {
            if layout.group(&group).is_none() {
                let known = one_of(&group, layout.groups().iter().map(String::as_str));
                let remedy = format_args!("use {known}");
                return Err(Error::config("lr_schedule", group, "not a group of the layout", remedy));
            }
            let count = optimizers.of_group(&group);
            if count != 1 {
                let wrong = format_args!("this group has {count} optimizers, and a schedule drives one");
                let remedy = "call Stepper::set_lr_schedule for each";
                return Err(Error::config("lr_schedule", group, wrong, remedy));
            }
            schedule.validate()?;
            named.push((optimizers.find((&group).into())?, group, schedule));
        }
        named.sort_by_key(|(id, _, _)| *id);
        if let Some(twice) = named.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            let remedy = "name each group once";
            return Err(Error::config("lr_schedule", &twice[0].1, "has a schedule already", remedy));
        }
        let schedules = named.into_iter().map(|(id, _, schedule)| (id, schedule)).collect();
        Ok(Rates { schedules, step: 0 })
    }

    /// Lets an optimizer follow a schedule, or none any more.
    pub(crate) fn set(&mut self, id: OptimizerId, schedule: Option<LrSchedule>) -> Result<()> {
        schedule.as_ref().map_or(Ok(()), LrSchedule::validate)?;
        match (self.place(id), schedule) {
            (Ok(at), Some(schedule)) => self.schedules[at].1 = schedule,
            (Ok(at), None) => drop(self.schedules.remove(at)),
            (Err(at), Some(schedule)) => self.schedules.insert(at, (id, schedule)),
            (Err(_), None) => {}
        }
        Ok(())
    }

    /// Where an optimizer's schedule is, or belongs.
    fn place(&self, id: OptimizerId) -> Result<usize, usize> {
        self.schedules.binary_search_by_key(&id, |(scheduled, _)| *scheduled)
    }

    /// Refuses to set by hand what a schedule would overwrite. `key` is how the caller names the optimizer.
    pub(crate) fn refuse_scheduled(&self, id: OptimizerId, key: OptimizerKey<'_>) -> Result<()> {
        if self.place(id).is_err() {
            return Ok(());
        }
        let (wrong, remedy) =
            ("its schedule sets the rate in each pass", "remove it with set_lr_schedule first");
        Err(match key {
            OptimizerKey::Group(group) => Error::config("group", group, wrong, remedy),
            OptimizerKey::Id(id) => Error::config("optimizer", id.0, wrong, remedy),
        })
    }
}
