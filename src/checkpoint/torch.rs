//! Plans the load of a state dict of `torch.optim`: finds states by name or number, and adds the states that torch
//! leaves out.
//!
//! torch does not save states of a parameter that was never updated, states that the group does not use, or the step
//! count of a momentum buffer. Any other missing state is an error. If Adam's step count were missing, for example,
//! Adam would silently step with the wrong bias correction.

use std::borrow::Cow;
use std::collections::HashMap;

use super::keys::{CHECKSUMS, EMA, PARAM, STATE, STEP};
use super::plan::{Count, Counted, Named, Part, Piece, Plan, carried, carried_key, missing};
use super::safetensors::{Header, in_tensor};
use crate::device::Device;
use crate::error::{Error, Result, one_of};
use crate::layout::{Layout, ParamId};
use crate::stepper::Stepper;

/// The only state that torch saves without a step count.
const MOMENTUM: &str = "momentum_buffer";

/// Finds a parameter by name or number.
struct Names<'a> {
    layout: &'a Layout,
    by_number: Vec<ParamId>,
}

/// The parts of a parameter's state that the file has.
#[derive(Default)]
struct Found<'h> {
    states: Vec<Cow<'static, str>>,
    count: Option<Named<'h>>,
    /// The numbers that the parameter's optimizers carry from update to update, with their keys in the file.
    carried: Vec<Named<'h>>,
}

pub(super) fn sort<'h, D: Device>(
    header: &'h Header,
    stepper: &Stepper<D>,
    order: Option<&[&str]>,
) -> Result<Plan<'h>> {
    let names = Names::new(stepper, order)?;
    let mut plan = Plan::default();
    let mut found: HashMap<ParamId, Found<'h>> = HashMap::new();
    let mut emas = 0;
    for (key, tensor) in &header.tensors {
        let from = (key.as_str(), tensor);
        if let Some(name) = key.strip_prefix(PARAM) {
            let id = names.named(key, name)?;
            plan.pieces.push(Piece::new(from, stepper, id, Part::Value)?);
        } else if let Some((who, state)) = key.strip_prefix(STATE).and_then(|rest| rest.rsplit_once('.')) {
            let id = names.find(who).ok_or_else(|| names.missing(key, who))?;
            let found = found.entry(id).or_default();
            if state == STEP {
                Count::new(from)?;
                twice(key, found.count.replace(from).is_some())?;
                continue;
            }
            let carriers = stepper.stepping(id)?.into_iter().map(|o| carried_key(stepper, id, Some(o)));
            if carriers.collect::<Result<Vec<_>>>()?.iter().flatten().any(|name| name == state) {
                twice(key, found.carried.iter().any(|(known, _)| named(known) == state))?;
                found.carried.push(carried(from)?);
                continue;
            }
            let known = stepper.state_names(id)?.into_iter().find(|known| known == state);
            let known = known.ok_or_else(|| {
                in_tensor(key, "this optimizer keeps no such state", "import the states of this optimizer")
            })?;
            twice(key, found.states.contains(&known))?;
            found.states.push(known.clone());
            plan.pieces.push(Piece::new(from, stepper, id, Part::State(known))?);
        } else if let (Some(name), true) = (key.strip_prefix(EMA), stepper.keeps_ema()) {
            let id = names.named(key, name)?;
            plan.pieces.push(Piece::new(from, stepper, id, Part::Ema)?);
            emas += 1;
        } else if key != CHECKSUMS {
            plan.add_scalar(from)?;
        }
    }
    if plan.pieces.is_empty() && found.is_empty() {
        return Err(Error::checkpoint(
            "the file",
            "holds neither parameters nor states",
            "check its tensors' names",
        ));
    }
    plan.begins_emas = stepper.keeps_ema() && emas == 0;
    for id in stepper.layout().ids() {
        let name = &stepper.layout().parameter(id)?.name;
        if emas > 0 && !header.tensors.contains_key(&format!("{EMA}{name}")) {
            return Err(missing(&format!("{EMA}{name}")));
        }
        let found = found.remove(&id).unwrap_or_default();
        found.complete(stepper, id, &mut plan)?;
    }
    Ok(plan)
}

impl Found<'_> {
    /// Adds the step count. Also adds zeros for states that the group does not use, and for states that torch has not
    /// created yet.
    fn complete<'h, D: Device>(self, stepper: &Stepper<D>, id: ParamId, plan: &mut Plan<'h>) -> Result<()>
    where
        Self: 'h,
    {
        let key = |state: &str| -> Result<String> {
            Ok(format!("{STATE}{}.{state}", stepper.layout().parameter(id)?.name))
        };
        let kept = stepper.states_kept_for(id)?;
        let untouched = self.states.is_empty() && self.count.is_none() && self.carried.is_empty();
        let lacking = kept.iter().find(|state| !self.states.iter().any(|known| known == *state));
        if let (Some(state), false) = (lacking, untouched) {
            return Err(missing(&key(state)?));
        }
        let all = stepper.state_names(id)?.into_iter();
        plan.zeros.extend(all.filter(|state| !self.states.contains(state)).map(|state| (id, state)));
        let count = match self.count {
            Some(from) => Count::Stored(from),
            None if self.states.is_empty() => Count::Given(0),
            // With a count of 0, the next update would be the first one, which overwrites the buffer.
            None if kept == [MOMENTUM] => Count::Given(1),
            None => return Err(missing(&key(STEP)?)),
        };
        let stepping = stepper.stepping(id)?;
        if stepping.is_empty() {
            plan.counts.push(Counted { id, optimizer: None, count, carried: None });
        }
        for optimizer in stepping.into_iter().map(Some) {
            let name = carried_key(stepper, id, optimizer)?.filter(|_| !untouched);
            let carried = match name {
                Some(name) => match self.carried.iter().find(|(key, _)| named(key) == name) {
                    Some(from) => Some(*from),
                    None => return Err(missing(&key(&name)?)),
                },
                None => None,
            };
            plan.counts.push(Counted { id, optimizer, count, carried });
        }
        Ok(())
    }
}

impl<'a> Names<'a> {
    fn new<D: Device>(stepper: &'a Stepper<D>, order: Option<&[&str]>) -> Result<Names<'a>> {
        let layout = stepper.layout();
        let by_number = match order {
            Some(order) => order.iter().map(|name| layout.id(name)).collect::<Result<_>>()?,
            None => layout.ids().collect(),
        };
        Ok(Names { layout, by_number })
    }

    fn named(&self, key: &str, name: &str) -> Result<ParamId> {
        self.layout.find(name).ok_or_else(|| self.missing(key, name))
    }

    fn missing(&self, key: &str, name: &str) -> Error {
        let known = self.layout.parameters().iter().map(|parameter| parameter.name.as_str());
        in_tensor(key, "belongs to no parameter", format_args!("use {}", one_of(name, known)))
    }

    fn find(&self, who: &str) -> Option<ParamId> {
        let number = || who.parse::<usize>().ok().filter(|number| number.to_string() == who);
        self.layout.find(who).or_else(|| self.by_number.get(number()?).copied())
    }
}

/// Returns the part of a state's key after the last dot.
fn named(key: &str) -> &str {
    key.rsplit_once('.').map_or(key, |(_, name)| name)
}

fn twice(key: &str, is: bool) -> Result<()> {
    if is { Err(in_tensor(key, "given twice, by name and by number", "keep one")) } else { Ok(()) }
}
