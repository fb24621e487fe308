//! Finds and sets hyperparameters of a stepper's optimizers between passes, and holds the learning-rate schedules.
//!
//! A change is checked as a whole before it takes effect. The check covers ranges, relations between hyperparameters,
//! multiplied learning rates, and the states that the stepper has. The check depends only on the list of optimizers.
//! The caller copies the change to the settings. The step of the schedules is the number of finished and joined passes,
//! because all ranks make these passes together. Abandoned passes do not count.

use crate::abi::InstepHyper;
use crate::error::{Error, Result, one_of};
use crate::launch::refuse_storage;
use crate::layout::{Layout, Plan};
use crate::optim::{LrSchedule, Optimizer, Value};
use crate::stepper::state::optimizers::{OptimizerId, OptimizerKey, Optimizers, check_rate};

impl Optimizers {
    /// Returns the optimizer that `key` selects, either by its number or as the only optimizer of a group.
    pub(crate) fn find(&self, key: OptimizerKey<'_>) -> Result<OptimizerId> {
        let group = match key {
            OptimizerKey::Id(id) if (id.0 as usize) < self.entries.len() => return Ok(id),
            OptimizerKey::Id(id) => {
                let remedy = "use one of Stepper::optimizers";
                return Err(Error::config("optimizer", id.0, "not an optimizer of this stepper", remedy));
            }
            OptimizerKey::Group(group) => group,
        };
        match self.by_group.get(group).map(Vec::as_slice) {
            Some([index]) => Ok(OptimizerId(*index)),
            None | Some([]) => {
                let remedy = format!("use {}", one_of(group, self.by_group.keys().map(|name| &**name)));
                Err(Error::config("group", group, "no group of this name has an optimizer", remedy))
            }
            Some(_) => {
                let remedy = "name one by its OptimizerId, from Stepper::optimizers";
                Err(Error::config("group", group, "has several optimizers", remedy))
            }
        }
    }

    pub(crate) fn lr(&mut self, id: OptimizerId) -> f64 {
        *self.entries[id.0 as usize].optimizer.as_rule_mut().lr_mut()
    }

    /// Sets the learning rate of an optimizer of this stepper and returns its new hyperparameters. Allocates no memory
    /// if no parameter has a multiplier.
    pub(crate) fn set_lr(&mut self, id: OptimizerId, lr: f64) -> Result<InstepHyper> {
        let before = std::mem::replace(self.entries[id.0 as usize].optimizer.as_rule_mut().lr_mut(), lr);
        let checked = self.check(id);
        if checked.is_err() {
            *self.entries[id.0 as usize].optimizer.as_rule_mut().lr_mut() = before;
        }
        checked
    }

    /// Sets hyperparameters of an optimizer of this stepper, and returns all of its hyperparameters. If one value is
    /// refused, no value is set.
    pub(crate) fn set_hyper<V: Into<Value> + Copy>(
        &mut self,
        id: OptimizerId,
        changes: &[(&str, V)],
        plan: &Plan,
    ) -> Result<InstepHyper> {
        let mut changed = self.entries[id.0 as usize].optimizer.clone();
        changes.iter().try_for_each(|(name, value)| changed.set(name, (*value).into()))?;
        for storage in plan.storages() {
            let refused = refuse_storage(&*changed, storage);
            if refused.is_err()
                && self.stepped_by(id).any(|param| plan.storage_of(plan.segment_of(param)) == storage)
            {
                refused?;
            }
        }
        let missing = self.refuse_missing_states(id, &*changed);
        let has_no_place = missing.is_err();
        if has_no_place && self.stepped_by(id).next().is_some() {
            missing?;
        }
        let states = changed.state_names();
        let before = std::mem::replace(&mut self.entries[id.0 as usize].optimizer, changed);
        let checked = self.check(id);
        let entry = &mut self.entries[id.0 as usize];
        if checked.is_err() {
            entry.optimizer = before;
        } else if has_no_place || states.len() > entry.placed.len() {
            entry.placed = states;
        }
        checked
    }

    fn stepped_by(&self, id: OptimizerId) -> impl Iterator<Item = usize> + '_ {
        (0..self.lists.len()).filter(move |param| self.lists[*param].contains(&id.0))
    }

    /// Refuses hyperparameters if the stepper lacks a state that they need, or stores this state under another index.
    fn refuse_missing_states(&self, id: OptimizerId, changed: &dyn Optimizer) -> Result<()> {
        let (placed, new) = (self.entries[id.0 as usize].placed, changed.state_names());
        if placed == new {
            return Ok(());
        }
        let common = placed.len().min(new.len());
        let kernel = changed.as_rule().kernel();
        let kept = self.lists.iter().filter_map(|list| list.iter().position(|index| *index == id.0));
        let kept = kept.map(|round| self.states_of(round, kernel)).min().unwrap_or(0);
        if placed[..common] == new[..common] && new.len() <= kept {
            return Ok(());
        }
        let missing: Vec<&str> = new.iter().filter(|name| !placed.contains(name)).copied().collect();
        let wrong = "the stepper was not built with them, or not in these places";
        let remedy = "build it with these hyperparameters";
        let states = if missing.is_empty() { new.join(", ") } else { missing.join(", ") };
        Err(Error::config("states", states, wrong, remedy))
    }

    /// Refuses hyperparameters that are out of range. Also refuses a learning rate that is out of range after it is
    /// multiplied by a parameter's multiplier.
    fn check(&self, id: OptimizerId) -> Result<InstepHyper> {
        let optimizer = &*self.entries[id.0 as usize].optimizer;
        // The learning rate is checked first, so that the error names a NaN as such.
        let hyper = optimizer.as_rule().hyper()?;
        let mut multiplied = self.multiplied.range((id.0, 0)..=(id.0, usize::MAX));
        multiplied.try_for_each(|(_, param)| check_rate(optimizer, self.lr_multiplier(*param)))?;
        Ok(hyper)
    }

    pub(crate) fn set_lr_multiplier(&mut self, param: usize, multiplier: f64) -> Result<()> {
        for index in &self.lists[param] {
            check_rate(&*self.entries[*index as usize].optimizer, multiplier)?;
        }
        let stepping = self.lists[param].iter().map(|index| (*index, param));
        if multiplier == 1.0 {
            self.lr_multipliers.remove(&param);
            for pair in stepping {
                self.multiplied.remove(&pair);
            }
        } else {
            self.lr_multipliers.insert(param, multiplier);
            self.multiplied.extend(stepping);
        }
        Ok(())
    }
}

/// The learning-rate schedules of optimizers, and the current step of all schedules.
#[derive(Debug, Default)]
pub(crate) struct Rates {
    /// The schedule of each optimizer that has one, sorted by the optimizer's number.
    pub(crate) schedules: Vec<(OptimizerId, LrSchedule)>,
    pub(crate) step: u64,
}

impl Rates {
    /// Creates the schedules that the builder's `lr_schedule` has set for groups.
    pub(crate) fn new(
        layout: &Layout,
        optimizers: &Optimizers,
        of_groups: Vec<(String, LrSchedule)>,
    ) -> Result<Rates> {
        let mut named = Vec::with_capacity(of_groups.len());
        for (group, schedule) in of_groups {
            layout.require_group("lr_schedule", &group)?;
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

    /// Sets, replaces or removes the schedule of an optimizer.
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

    /// Returns the index of an optimizer's schedule in the list. If the optimizer has no schedule, the error is the
    /// index at which to insert one.
    fn place(&self, id: OptimizerId) -> Result<usize, usize> {
        self.schedules.binary_search_by_key(&id, |(scheduled, _)| *scheduled)
    }

    /// Refuses to set a learning rate that a schedule would overwrite. `key` is the caller's name for the optimizer.
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
