//! Hyperparameters per parameter group: one optimizer for all, with numbers of its own for each group.
//!
//! Pure bookkeeping; the numbers reach the kernels through the settings. Must keep the old value when it refuses a new
//! one, and must never let two groups of one launch need different kernels.

use crate::abi::InstepHyper;
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::optim::Optimizer;

/// One rule per group of the layout, in its order.
#[derive(Debug)]
pub(crate) struct Groups {
    names: Vec<String>,
    rules: Vec<Box<dyn Optimizer>>,
}

impl Groups {
    /// `common` for every group that `own` does not name.
    pub(super) fn new(
        layout: &Layout,
        common: &dyn Optimizer,
        own: Vec<(String, Box<dyn Optimizer>)>,
    ) -> Result<Groups> {
        let names = layout.groups().to_vec();
        let mut rules: Vec<Option<Box<dyn Optimizer>>> = names.iter().map(|_| None).collect();
        for (name, rule) in own {
            let Some(group) = names.iter().position(|known| *known == name) else {
                return Err(Error::config("group", name, "is not a group of the layout"));
            };
            if rules[group].is_some() {
                return Err(Error::config("group", name, "has hyperparameters already"));
            }
            if rule.kernel() != common.kernel() {
                let what = format!("another optimizer for group `{name}` ({rule:?})");
                return Err(Error::Unsupported { what, have: format!("{common:?}, with other numbers") });
            }
            rules[group] = Some(rule);
        }
        let rules = rules.into_iter().map(|rule| rule.unwrap_or_else(|| common.boxed())).collect();
        let groups = Groups { names, rules };
        groups.hypers()?;
        Ok(groups)
    }

    /// The kernel that serves all groups.
    pub(super) fn kernel(&self) -> u32 {
        self.rules[0].kernel()
    }

    /// States of the group that keeps most: the others' are a prefix of them.
    pub(super) fn state_names(&self) -> &'static [&'static str] {
        self.rules.iter().map(|rule| rule.state_names()).max_by_key(|names| names.len()).unwrap_or(&[])
    }

    /// Validated hyperparameters, group by group.
    pub(super) fn hypers(&self) -> Result<Vec<InstepHyper>> {
        self.rules.iter().map(|rule| rule.hyper()).collect()
    }

    /// Sets a group's learning rate and returns the group's number and its new hyperparameters.
    pub(super) fn set_lr(&mut self, name: &str, lr: f64) -> Result<(usize, InstepHyper)> {
        let Some(group) = self.names.iter().position(|known| known == name) else {
            return Err(Error::config("group", name, "is not a group of the layout"));
        };
        let rule = &mut self.rules[group];
        let before = std::mem::replace(rule.lr_mut(), lr);
        match rule.hyper() {
            Ok(hyper) => Ok((group, hyper)),
            Err(error) => {
                *rule.lr_mut() = before;
                Err(error)
            }
        }
    }
}
