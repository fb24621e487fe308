//! The optimizers of one stepper, the parameters that each of them steps, and the order of these steps.
//!
//! This module only has lists. The kernels read hyperparameters from the settings, and the optimizers of each segment
//! from the assignment. A refused value does not replace the old one.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Result, refuse};
use crate::launch::{Assignment, StepConstants, refuse_storage};
use crate::layout::{Layout, ParamId, Plan};
use crate::optim::{Optimizer, short};

/// An optimizer for a group, or for single parameters.
#[derive(Debug)]
pub(crate) struct Registered {
    pub(crate) target: Target,
    pub(crate) optimizer: Box<dyn Optimizer>,
}

/// The parameters that an optimizer steps.
#[derive(Clone, Debug)]
pub(crate) enum Target {
    /// A group. The optimizer becomes the group's first optimizer, in place of the stepper's default optimizer.
    Group(String),
    /// A group. The optimizer runs after the group's earlier optimizers.
    Further(String),
    /// Parameters (indices into the layout). This optimizer steps them in place of the optimizers of their groups.
    Params(Vec<usize>),
    /// Parameters. The optimizer runs after the parameters' earlier optimizers.
    FurtherParams(Vec<usize>),
    /// The optimizer is listed with these parameters, but steps nothing.
    Nothing(Vec<usize>),
}

/// The optimizers of one stepper, and the parameters that each steps.
#[derive(Clone)]
pub(crate) struct Optimizers {
    /// The optimizers in the settings' order. Those that the builder set for groups come first, and those that were
    /// added later come last.
    pub(super) entries: Vec<Entry>,
    /// The entries of each group. A group without entries is not in the map.
    pub(super) by_group: BTreeMap<Arc<str>, Vec<u32>>,
    /// The entries that step each parameter, in order.
    pub(super) lists: Vec<Vec<u32>>,
    /// Sorted pairs of a parameter and an entry. The entry is listed with the parameter but does not step it.
    attached: Vec<(usize, u32)>,
    /// Each parameter's learning-rate multiplier, unless it is 1.
    pub(super) lr_multipliers: BTreeMap<usize, f64>,
    /// Pairs of an entry and a parameter that it steps, for parameters with a multiplier.
    pub(super) multiplied: BTreeSet<(u32, usize)>,
    /// The names of each kernel's states in each round. If optimizers of one kernel have different states, these are
    /// the state names of the optimizer with the most states.
    names: Vec<Vec<(u32, &'static [&'static str])>>,
}

pub(super) struct Entry {
    group: Option<Arc<str>>,
    pub(super) optimizer: Box<dyn Optimizer>,
    /// The names of all states that have had an index so far. The optimizer's present states are this list or a prefix
    /// of it. An index is never reused for another state, because the memory keeps the old state's values.
    pub(super) placed: &'static [&'static str],
    steps: bool,
}

impl Entry {
    fn new(group: Option<Arc<str>>, optimizer: Box<dyn Optimizer>, steps: bool) -> Entry {
        Entry { group, placed: optimizer.state_names(), optimizer, steps }
    }
}

impl Clone for Entry {
    fn clone(&self) -> Self {
        let Entry { group, optimizer, placed, steps } = self;
        let optimizer = optimizer.as_rule().boxed();
        Entry { group: group.clone(), optimizer, placed, steps: *steps }
    }
}

/// The optimizers of each parameter, for ranks to compare.
pub(crate) struct Assigned<'a>(pub(crate) &'a Optimizers);

impl fmt::Debug for Assigned<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps = self.0.entries.iter().map(|entry| entry.steps);
        f.write_str("optimizers of the parameters: ")?;
        f.debug_list().entries(&self.0.lists).entries(&self.0.attached).entries(steps).finish()
    }
}

/// All hyperparameters, for ranks to compare. Optimizers that step nothing are included.
pub(crate) struct Hyperparameters<'a>(pub(crate) &'a Optimizers);

impl fmt::Debug for Hyperparameters<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for entry in &self.0.entries {
            match &entry.group {
                Some(group) => writeln!(f, "group {group}: {:?}", entry.optimizer)?,
                None => writeln!(f, "{:?}", entry.optimizer)?,
            }
        }
        // Multipliers of 1 are left out, so that ranks with different layouts do not seem to differ in learning rates.
        let mut multipliers = self.0.lr_multipliers.iter();
        multipliers
            .try_for_each(|(param, factor)| writeln!(f, "parameter {param}: its rate times {factor:?}"))
    }
}

impl Optimizers {
    /// Creates the list of optimizers. `common` is the optimizer of every group for which no other optimizer is
    /// registered. If `common` is `None`, such groups have no optimizer.
    pub(crate) fn new(
        layout: &Layout,
        common: Option<&dyn Optimizer>,
        registered: Vec<Registered>,
    ) -> Result<Optimizers> {
        let groups = layout.groups();
        let place = |name: &String| layout.require_group("group", name);
        let mut first: Vec<Option<Box<dyn Optimizer>>> = groups.iter().map(|_| None).collect();
        let mut further: Vec<(usize, Box<dyn Optimizer>)> = Vec::new();
        let mut own: Vec<(Target, Box<dyn Optimizer>)> = Vec::new();
        for Registered { target, optimizer } in registered {
            match target {
                Target::Group(name) => {
                    refuse! {
                        "group" = name, if first[place(&name)?].replace(optimizer).is_some()
                            => "has an optimizer already", "register a second one with StepperBuilder::then";
                    }
                }
                Target::Further(name) => further.push((place(&name)?, optimizer)),
                target => own.push((target, optimizer)),
            }
        }
        let mut entries = Vec::new();
        let names: Vec<Arc<str>> = groups.iter().map(|name| name.as_str().into()).collect();
        let mut of_group: Vec<Vec<u32>> = groups.iter().map(|_| Vec::new()).collect();
        let first = first.into_iter().enumerate().filter_map(|(group, own)| {
            Some((group, own.or_else(|| common.map(|common| common.as_rule().boxed()))?))
        });
        further.sort_by_key(|(group, _)| *group);
        for (group, optimizer) in first.chain(further) {
            of_group[group].push(entries.len() as u32);
            entries.push(Entry::new(Some(Arc::clone(&names[group])), optimizer, true));
        }
        let mut lists: Vec<Vec<u32>> =
            layout.parameters().iter().map(|p| of_group[p.group as usize].clone()).collect();
        let by_group = names.into_iter().zip(of_group).filter(|(_, all)| !all.is_empty()).collect();
        let mut is_own = vec![false; lists.len()];
        let (mut attached, mut added) = (Vec::new(), Vec::new());
        for (target, optimizer) in own {
            let index = entries.len() as u32;
            let steps = !matches!(target, Target::Nothing(_));
            match target {
                Target::Params(params) => {
                    for param in params {
                        let name = &layout.parameters()[param].name;
                        refuse! {
                            "optimizer_for" = name, if std::mem::replace(&mut is_own[param], true)
                                => "has an optimizer already", "register a second one with StepperBuilder::then_for";
                        }
                        lists[param] = vec![index];
                    }
                }
                Target::FurtherParams(params) => added.extend(params.into_iter().map(|p| (p, index))),
                Target::Nothing(params) => attached.extend(params.into_iter().map(|p| (p, index))),
                Target::Group(_) | Target::Further(_) => unreachable!("sorted out above"),
            }
            entries.push(Entry::new(None, optimizer, steps));
        }
        // As for groups, further optimizers come after the first ones, independent of the order of registration.
        added.into_iter().for_each(|(param, index)| lists[param].push(index));
        attached.sort_unstable();
        let mut optimizers = Optimizers {
            entries,
            by_group,
            lists,
            attached,
            lr_multipliers: BTreeMap::new(),
            multiplied: BTreeSet::new(),
            names: Vec::new(),
        };
        for entry in &optimizers.entries {
            entry.optimizer.as_rule().hyper()?;
        }
        optimizers.names = optimizers.collect_names();
        Ok(optimizers)
    }

    /// Refuses a parameter's element types and options if one of its optimizers does not support them.
    pub(crate) fn refuse_storage(&self, plan: &Plan) -> Result<()> {
        self.lists.iter().enumerate().try_for_each(|(param, list)| {
            let storage = plan.storage_of(plan.segment_of(param));
            list.iter().try_for_each(|k| refuse_storage(&*self.entries[*k as usize].optimizer, storage))
        })
    }

    /// Removes all optimizers, and thus all states, of every parameter that is not stepped.
    pub(crate) fn leave_out(&mut self, is_stepped: impl Fn(usize) -> bool) {
        for (param, list) in self.lists.iter_mut().enumerate() {
            if !is_stepped(param) {
                list.clear();
            }
        }
        self.names = self.collect_names();
    }

    pub(crate) fn round(&self, param: usize, id: OptimizerId) -> Option<usize> {
        self.lists[param].iter().position(|index| *index == id.0)
    }

    /// Returns the number of optimizers that step a parameter.
    pub(crate) fn rounds(&self, param: usize) -> usize {
        self.lists[param].len()
    }

    /// Returns a copy of `self` with one more optimizer. The new optimizer steps after its parameters' earlier
    /// optimizers. If `group` is `Some`, the new optimizer belongs to that group.
    pub(crate) fn with(
        &self,
        params: &[usize],
        group: Option<Arc<str>>,
        optimizer: Box<dyn Optimizer>,
    ) -> Result<(Optimizers, OptimizerId)> {
        optimizer.as_rule().hyper()?;
        let mut more = self.clone();
        let id = OptimizerId(more.entries.len() as u32);
        params.iter().try_for_each(|param| check_rate(&*optimizer, self.lr_multiplier(*param)))?;
        for param in params {
            more.lists[*param].push(id.0);
            if more.lr_multipliers.contains_key(param) {
                more.multiplied.insert((id.0, *param));
            }
        }
        if let Some(group) = &group {
            more.by_group.entry(Arc::clone(group)).or_default().push(id.0);
        }
        more.entries.push(Entry::new(group, optimizer, true));
        more.names = more.collect_names();
        Ok((more, id))
    }

    fn collect_names(&self) -> Vec<Vec<(u32, &'static [&'static str])>> {
        let rounds = self.lists.iter().map(Vec::len).max().unwrap_or(0);
        let of_round = |round: usize| {
            let mut names: Vec<(u32, &'static [&'static str])> = Vec::new();
            for index in self.lists.iter().filter_map(|list| list.get(round)) {
                let optimizer = &self.entries[*index as usize].optimizer;
                let own = optimizer.state_names();
                match names.iter_mut().find(|(kernel, _)| *kernel == optimizer.as_rule().kernel()) {
                    Some((_, most)) if own.len() > most.len() => *most = own,
                    Some(_) => {}
                    None => names.push((optimizer.as_rule().kernel(), own)),
                }
            }
            names
        };
        (0..rounds).map(of_round).collect()
    }

    /// Returns the assignment, which lists the optimizers that step each segment.
    pub(crate) fn assignment(
        &self,
        layout: &Layout,
        plan: &Plan,
        constants: StepConstants,
    ) -> Result<Assignment> {
        if self.entries.is_empty() {
            // Without optimizers, every gradient is averaged. The launch uses no hyperparameters, so it may be given
            // those of any optimizer.
            let none = crate::optim::Sgd::default();
            let hyper = crate::optim::sealed::Rule::hyper(&none)?;
            return Ok(Assignment::new(layout, plan, constants, [(&none as &dyn Optimizer, hyper)], |_| {
                Vec::new()
            }));
        }
        let hypers =
            self.entries.iter().map(|entry| entry.optimizer.as_rule().hyper()).collect::<Result<Vec<_>>>()?;
        let all = self.entries.iter().map(|entry| &*entry.optimizer).zip(hypers);
        let assignment = Assignment::new(layout, plan, constants, all, |param| self.lists[param].clone());
        let records = assignment.rounds().checked_mul(plan.segments().len());
        if records.is_none_or(|records| u32::try_from(records).is_err()) {
            // A tile stores the index of its record as a u32.
            let wrong = "too many of one parameter for this number of parameters";
            let remedy = "keep their product below 2^32";
            return Err(Error::config("optimizers", assignment.rounds(), wrong, remedy));
        }
        match assignment.state_count() {
            // A state's number is a byte and must not wrap around.
            states if states > usize::from(u8::MAX) => {
                let wrong = "too many over all optimizers that step one parameter";
                Err(Error::config("states", states, wrong, "keep at most 255"))
            }
            _ => Ok(assignment),
        }
    }

    /// Returns the name of the number that a parameter's optimizer carries besides its step count.
    pub(crate) fn carried(&self, param: usize, round: usize) -> Option<&'static str> {
        self.lists[param]
            .get(round)
            .and_then(|index| self.entries[*index as usize].optimizer.as_rule().carried())
    }

    pub(crate) fn stepping(&self, param: usize) -> impl Iterator<Item = OptimizerId> + '_ {
        self.lists[param].iter().copied().map(OptimizerId)
    }

    /// Returns the optimizers of a parameter: first those that step it, in order, then those that are only attached.
    pub(crate) fn of(&self, param: usize) -> impl Iterator<Item = OptimizerId> + '_ {
        let first = self.attached.partition_point(|(of, _)| *of < param);
        let attached = self.attached[first..].iter().take_while(move |(of, _)| *of == param).map(|(_, k)| *k);
        self.lists[param].iter().copied().chain(attached).map(OptimizerId)
    }

    pub(crate) fn all(&self) -> impl ExactSizeIterator<Item = Attached<'_>> {
        self.entries.iter().enumerate().map(|(k, entry)| Attached {
            id: OptimizerId(k as u32),
            group: entry.group.as_deref(),
            optimizer: &*entry.optimizer,
            steps: entry.steps,
        })
    }

    /// Returns the states of a parameter: the name of each, its round, and its index in the round.
    pub(crate) fn states(
        &self,
        param: usize,
    ) -> impl Iterator<Item = (Cow<'static, str>, usize, usize)> + '_ {
        self.lists[param].iter().enumerate().flat_map(move |(round, index)| {
            let kernel = self.entries[*index as usize].optimizer.as_rule().kernel();
            // All custom optimizers count as one kernel for launches, but each has its own state names.
            let custom = self.entries[*index as usize].optimizer.as_rule().custom().is_some();
            let own = self.entries[*index as usize].optimizer.state_names();
            let known = self.names[round].iter().find(|(k, _)| *k == kernel).map_or(own, |(_, names)| names);
            // The optimizer's own names come first, even if another group's optimizer names the same state differently.
            // The states that this optimizer does not use follow.
            let known = if custom { own } else { known };
            let unused = known.iter().filter(|name| !own.contains(name)).take(known.len() - own.len());
            own.iter().chain(unused).enumerate().map(move |(k, name)| {
                let name = if round == 0 { Cow::Borrowed(*name) } else { format!("{name}#{round}").into() };
                (name, round, k)
            })
        })
    }

    pub(crate) fn lr_multiplier(&self, param: usize) -> f64 {
        self.lr_multipliers.get(&param).copied().unwrap_or(1.0)
    }

    /// Returns how many states a kernel keeps in a round.
    pub(super) fn states_of(&self, round: usize, kernel: u32) -> usize {
        self.names[round].iter().find(|(known, _)| *known == kernel).map_or(0, |(_, names)| names.len())
    }

    /// Returns the names of the states that a parameter's own optimizers use.
    pub(crate) fn kept(&self, param: usize) -> impl Iterator<Item = String> + '_ {
        self.states(param).filter_map(move |(name, round, k)| {
            let own = &self.entries[self.lists[param][round] as usize].optimizer;
            (k < own.state_names().len()).then(|| name.into_owned())
        })
    }

    pub(crate) fn of_group(&self, group: &str) -> usize {
        self.by_group.get(group).map_or(0, Vec::len)
    }
}

/// Returns the parameters' indices in the layout, and refuses a parameter that is named twice.
pub(crate) fn places(layout: &Layout, params: &[ParamId]) -> Result<Vec<usize>> {
    let mut named = HashSet::with_capacity(params.len());
    let place = |id: &ParamId| {
        let place = layout.index(*id)?;
        if !named.insert(place) {
            let name = &layout.parameters()[place].name;
            let remedy = "name it once; for two optimizers make two calls";
            return Err(Error::config("params", name, "named twice", remedy));
        }
        Ok(place)
    };
    params.iter().map(place).collect()
}

/// Checks that an optimizer accepts its learning rate times `multiplier`. A product that f32 rounds to zero counts as
/// zero, as in a schedule.
pub(super) fn check_rate(optimizer: &dyn Optimizer, multiplier: f64) -> Result<()> {
    let mut multiplied = optimizer.as_rule().boxed();
    let lr = *multiplied.as_rule_mut().lr_mut();
    *multiplied.as_rule_mut().lr_mut() =
        Some(lr * multiplier).filter(|product| *product as f32 != 0.0).unwrap_or(0.0);
    let refused = |_| {
        let wrong = format_args!("times the rate {} it leaves the optimizer's range", short(lr));
        Error::config("lr_multiplier", short(multiplier), wrong, "use a smaller one")
    };
    multiplied.as_rule().hyper().map(drop).map_err(refused)
}

/// The number that identifies an optimizer in its stepper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OptimizerId(pub(crate) u32);

/// Selects an optimizer of a stepper, either by its number or as the only optimizer of a group
/// ([`DEFAULT_GROUP`](crate::layout::DEFAULT_GROUP) if the layout names no groups).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptimizerKey<'a> {
    /// The only optimizer of a group.
    Group(&'a str),
    /// Any optimizer, by its number.
    Id(OptimizerId),
}

impl<'a> From<&'a str> for OptimizerKey<'a> {
    fn from(group: &'a str) -> Self {
        OptimizerKey::Group(group)
    }
}

impl<'a> From<&'a String> for OptimizerKey<'a> {
    fn from(group: &'a String) -> Self {
        OptimizerKey::Group(group)
    }
}

impl From<OptimizerId> for OptimizerKey<'_> {
    fn from(id: OptimizerId) -> Self {
        OptimizerKey::Id(id)
    }
}

/// An optimizer of a stepper, as [`Stepper::optimizers`](crate::Stepper::optimizers) lists it.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Attached<'a> {
    /// The number that identifies the optimizer in [`Stepper::set_lr`](crate::Stepper::set_lr) and
    /// [`Stepper::set_hyper`](crate::Stepper::set_hyper).
    pub id: OptimizerId,
    /// The layout's group for which the optimizer was set. This is `None` if the optimizer was set for single
    /// parameters.
    pub group: Option<&'a str>,
    /// The optimizer with its current hyperparameters. The optimizer's type is one of the types in
    /// [`optim`](crate::optim). `(optimizer as &dyn Any).downcast_ref` returns a reference of that type.
    pub optimizer: &'a dyn Optimizer,
    /// Whether passes run the optimizer. This is false if the optimizer was only
    /// [attached](crate::StepperBuilder::attach).
    pub steps: bool,
}
