//! Compares what the ranks saw with the model, action by action.
//!
//! The model takes over values that are close enough, so a bound covers only the few updates since then. Every
//! difference names its place and both values.

use super::model::Model;
use super::observe::same_bits;
use super::program::*;
use super::rank::{ENTRY, EXIT, Event, Log, What};
use super::rules::state_names;
use super::run;
use super::values::{F16_STEP, Values, bits, value_bits};

/// The knowledge of the check between phases.
pub(crate) struct Checked<'p> {
    pub(crate) model: Model<'p>,
    /// The parameters of each bucket.
    buckets: Vec<Vec<usize>>,
    /// The rank that wrote the file.
    source: usize,
}

type Verdict = Result<(), String>;

/// Checks a phase that continues from the result of the phase before.
pub(crate) fn phase<'p>(
    program: &'p Program,
    number: usize,
    before: Option<&Checked<'p>>,
    logs: &[Log],
) -> Result<Checked<'p>, String> {
    let phase = &program.phases[number];
    let model = enter(program, number, before)?;
    let mut checked = Checked { model, buckets: Vec::new(), source: 0 };
    let placed = |at: usize, what: &str| {
        let place = match at {
            ENTRY => "its entry".to_owned(),
            EXIT => format!("its exit, {:?}", phase.exit),
            at => format!("action {at}, {:?}", phase.actions[at]),
        };
        format!("phase {number}, {place}: {what}")
    };
    for (rank, log) in logs.iter().enumerate() {
        if let Some((at, Event::Wrong(what))) = log.iter().find(|(_, event)| matches!(event, Event::Wrong(_)))
        {
            return Err(placed(*at, &format!("rank {rank}: {what}")));
        }
    }
    let of = |at: usize| -> Vec<Vec<&Event>> {
        let events = |log: &'_ Log| -> Vec<usize> { (0..log.len()).filter(|k| log[*k].0 == at).collect() };
        logs.iter().map(|log| events(log).into_iter().map(|k| &log[k].1).collect()).collect()
    };
    checked.take_buckets(&of(ENTRY)).map_err(|what| placed(ENTRY, &what))?;
    for (at, action) in phase.actions.iter().enumerate() {
        checked.action(action, &of(at)).map_err(|what| placed(at, &what))?;
    }
    checked.exit(phase.exit, &of(EXIT)).map_err(|what| placed(EXIT, &what))?;
    Ok(checked)
}

/// Makes the model of a stepper that has got its tensors.
fn enter<'p>(program: &'p Program, number: usize, before: Option<&Checked<'p>>) -> Result<Model<'p>, String> {
    let phase = &program.phases[number];
    let mut model = Model::new(program, &phase.config);
    if let Entry::Fresh { differ } = phase.entry {
        for param in 0..program.params.len() {
            write(&mut model, param, number as u64);
        }
        model.differs = differ;
        return Ok(model);
    }
    let left = before.ok_or("a phase without one before it")?;
    let exit = program.phases[number - 1].exit;
    for (param, spec) in program.params.iter().enumerate() {
        let file = &left.model.cells[param][if spec.local { left.source } else { 0 }];
        let precision = phase.config.precision(spec);
        for cell in &mut model.cells[param] {
            cell.value = file.value.clone();
            if let Exit::Export { averages, f32 } = exit {
                if averages && file.count > 0 {
                    cell.value = file.ema.clone();
                }
                if !f32 {
                    cell.value.round(bits(left.model.config.precision(spec).param));
                }
            } else {
                (cell.count, cell.carried) = (file.count, file.carried);
                cell.states.clone_from(&file.states);
                if precision.bf16_moments {
                    cell.states.iter_mut().for_each(|state| state.round(8));
                }
            }
            cell.value.round(value_bits(&precision));
            let has_average = left.model.config.ema.is_some() && !matches!(exit, Exit::Export { .. });
            cell.ema = if has_average { file.ema.clone() } else { cell.value.clone() };
        }
    }
    if !matches!(exit, Exit::Export { .. }) {
        model.schedule_step = left.model.schedule_step;
        let [was, is] =
            [left.model.config, model.config].map(|c| matches!(c.loss_scale, LossScale::Dynamic(..)));
        if was && is {
            (model.scale, model.growth) = (left.model.scale, left.model.growth);
        }
        let [was, is] = [left.model.config, model.config].map(|c| matches!(c.clip, Clip::Previous(_)));
        if was && is {
            model.previous_norm = left.model.previous_norm;
        }
    }
    Ok(model)
}

fn sorted(buckets: &[u32]) -> Vec<u32> {
    let mut sorted = buckets.to_vec();
    sorted.sort_unstable();
    sorted
}

/// Returns the values that all ranks write to a parameter, or each rank to a local one.
fn written(program: &Program, param: usize, rank: usize, salt: u64) -> Vec<f64> {
    let salt = salt + ((rank as u64) << 40);
    (0..program.params[param].len).map(|k| value(program.seed, salt, param, k)).collect()
}

fn write(model: &mut Model<'_>, param: usize, salt: u64) {
    for cell in 0..model.cells[param].len() {
        let values = written(model.program, param, cell, salt);
        model.write_value(param, cell, values);
    }
}

/// Finds the first element that is too far off.
fn compare(name: &str, expected: &Values, found: &[f32], rounding: f64) -> Verdict {
    for (k, found) in found.iter().enumerate() {
        let (found, expected, most) = (f64::from(*found), expected.values[k], expected.errors[k]);
        let is_beyond_f16 = rounding == 2f64.powi(-11) && found.is_infinite() && expected.abs() > 65000.0;
        let is_same = found == expected || !found.is_finite() && !expected.is_finite() || is_beyond_f16;
        let step = if rounding > 0.0 { F16_STEP } else { 0.0 };
        let is_close = (found - expected).abs() <= most + rounding * expected.abs() + step;
        if !is_same && !is_close {
            return Err(format!(
                "{name}[{k}] is {found:e}, and the model has {expected:e} within {most:.1e}"
            ));
        }
    }
    Ok(())
}

impl Checked<'_> {
    fn take_buckets(&mut self, events: &[Vec<&Event>]) -> Verdict {
        for event in events.iter().flatten() {
            if let Event::Buckets(buckets) = event {
                let mut all: Vec<usize> = buckets.iter().flatten().copied().collect();
                all.sort_unstable();
                if all != (0..self.model.program.params.len()).collect::<Vec<_>>() {
                    return Err(format!("the buckets hold {buckets:?}"));
                }
                self.buckets.clone_from(buckets);
            }
        }
        Ok(())
    }

    fn action(&mut self, action: &Action, events: &[Vec<&Event>]) -> Verdict {
        let program = self.model.program;
        match *action {
            Action::Pass(ref pass) => return self.pass(pass, events),
            Action::Observe => return self.observe(events),
            Action::Status => {
                for (rank, event) in events.iter().enumerate() {
                    if let Some(Event::Status(status)) = event.first() {
                        self.status(status).map_err(|what| format!("rank {rank}: {what}"))?;
                    }
                }
            }
            Action::Freeze(param, frozen) => self.model.frozen[param] = frozen,
            Action::SetLr(group, lr) => {
                let expected = self.model.schedules[group].map(|_| "Config");
                for event in events.iter().flatten() {
                    if let Event::Answered { call, error } = event
                        && *error != expected
                    {
                        return Err(format!("{call} answered {error:?}, not {expected:?}"));
                    }
                }
                if expected.is_none() {
                    self.model.rules[group].lr = lr;
                }
            }
            Action::SetHyper(group, decay) => self.model.rules[group].weight_decay = decay,
            Action::SetMultiplier(param, factor) => self.model.multipliers[param] = factor,
            Action::SetSchedule(group, schedule) => self.model.schedules[group] = schedule,
            Action::SetScheduleStep(step) => self.model.schedule_step = step,
            Action::SetPreviousNorm(norm) => self.model.previous_norm = norm,
            Action::SetScaler(scale, growth) => (self.model.scale, self.model.growth) = (scale, growth),
            Action::WriteParam { param, salt, differ } => {
                write(&mut self.model, param, salt);
                self.model.differs |= differ && !program.params[param].local;
            }
            Action::WriteStates { param, salt } => {
                for (state, name) in state_names(program.rule(param)).iter().enumerate() {
                    for cell in 0..self.model.cells[param].len() {
                        let values = written(program, param, cell, salt + state as u64);
                        let values = values.iter().map(|x| *x as f32).collect();
                        let values = run::written_state(name, values).into_iter().map(f64::from).collect();
                        self.model.write_state(param, cell, state, values);
                    }
                }
            }
            Action::WriteEma { param, salt } => {
                for (rank, cell) in self.model.cells[param].iter_mut().enumerate() {
                    cell.ema = Values::exact(written(program, param, rank, salt));
                }
            }
            Action::SetCount { param, count } => {
                let rule = program.rule(param);
                let carried =
                    if rule.kind == Kind::NAdam { run::product_of_momenta(rule, count) } else { 1.0 };
                self.model.cells[param]
                    .iter_mut()
                    .for_each(|cell| (cell.count, cell.carried) = (count, carried));
            }
            Action::Rebuild => return self.take_buckets(events),
            Action::Unshard(_) | Action::Reshard(_) | Action::Reload => {}
        }
        Ok(())
    }

    fn pass(&mut self, pass: &Pass, events: &[Vec<&Event>]) -> Verdict {
        let stepped = self.stepped_of_abandoned(pass);
        for (rank, event) in
            events.iter().enumerate().flat_map(|(rank, events)| events.iter().map(move |e| (rank, *e)))
        {
            self.in_pass(pass, rank, event, &stepped).map_err(|what| format!("rank {rank}: {what}"))?;
        }
        if pass.end == End::Finish {
            self.model.pass(pass);
        } else {
            let buckets = stepped.iter().flat_map(|bucket| &self.buckets[*bucket as usize]);
            let params: Vec<usize> = buckets.copied().filter(|param| !self.model.frozen[*param]).collect();
            self.model.abandon(pass, &params);
        }
        Ok(())
    }

    fn in_pass(&self, pass: &Pass, rank: usize, event: &Event, stepped: &[u32]) -> Verdict {
        let (model, program) = (&self.model, self.model.program);
        match event {
            Event::Scale(scale) if *scale != model.scale => {
                Err(format!("loss scale {scale}, and the model has {}", model.scale))
            }
            Event::Joined(any) if *any != pass.joins.contains(&false) => Err(format!("join returned {any}")),
            Event::Seen { param, values } => {
                let of = bits(model.config.precision(&program.params[*param]).param);
                let cell = &model.cells[*param][if program.params[*param].local { rank } else { 0 }];
                // As far as the nearest may be, where either of two is the nearest.
                let rounding = if of == 24 { 0.0 } else { 2f64.powi(-(of as i32)) };
                compare(&format!("{} in the pass", program.name(*param)), &cell.value, values, rounding)
            }
            Event::Stale { param, micro_batch, value } if model.config.gradients == Gradients::Zero => {
                let cell = &model.cells[*param][if program.params[*param].local { rank } else { 0 }];
                let was_zeroed = cell.gradient.as_ref().is_some_and(|g| g.values.iter().all(|x| *x == 0.0));
                if *micro_batch > 0 || was_zeroed {
                    Err(format!(
                        "the gradient of {} reads {value} in micro-batch {micro_batch}, and was zeroed before",
                        program.name(*param)
                    ))
                } else {
                    Ok(())
                }
            }
            Event::Abandoned(buckets) if sorted(buckets) != *stepped => {
                Err(format!("abandon left buckets {buckets:?} stepped, and the model has {stepped:?}"))
            }
            _ => Ok(()),
        }
    }

    /// Returns the buckets that an Eager pass had launched before it was abandoned: those whose gradients were all
    /// handed over. With several ranks, these are the first buckets in order, up to the first that was not complete.
    fn stepped_of_abandoned(&self, pass: &Pass) -> Vec<u32> {
        let (model, program) = (&self.model, self.model.program);
        let hand_overs = match pass.end {
            End::Abandon { micro_batches, hand_overs } if micro_batches + 1 == pass.micro_batches => {
                hand_overs
            }
            _ => return Vec::new(),
        };
        if model.config.mode != Mode::Eager {
            return Vec::new();
        }
        let mut uses_left: Vec<u32> = program.params.iter().map(|param| param.uses).collect();
        let order = order(program, pass, 0).into_iter();
        let handed =
            order.filter(|param| model.writes(pass, 0, *param) && pass.left_to_finish >> param & 1 == 0);
        handed.take(hand_overs).for_each(|param| uses_left[param] -= 1);
        let is_complete =
            |bucket: &&Vec<usize>| bucket.iter().all(|param| model.frozen[*param] || uses_left[*param] == 0);
        let keeps_order = model.config.ranks > 1;
        let launched = self.buckets.iter().take_while(|bucket| !keeps_order || is_complete(bucket));
        let complete = (0..).zip(launched).filter(|(_, bucket)| is_complete(bucket));
        let has_work = |params: &[usize]| {
            params.iter().any(|param| !model.frozen[*param])
                && params.iter().any(|param| program.params[*param].len > 0)
        };
        complete.filter(|(_, params)| has_work(params)).map(|(bucket, _)| bucket).collect()
    }

    fn status(&self, found: &instep::Status) -> Verdict {
        let Some(expected) = self.model.last else { return Ok(()) };
        let buckets = || (0..).zip(&self.buckets);
        let culprit =
            expected.culprit.and_then(|param| buckets().find(|(_, params)| params.contains(&param)));
        let culprit: Option<u32> = culprit.map(|(bucket, _)| bucket);
        let is_close =
            |a: f64, b: f64| a == b || !a.is_finite() && !b.is_finite() || (a - b).abs() <= 1e-6 * b.abs();
        let wrong = |what: &str, found: &dyn std::fmt::Debug, expected: &dyn std::fmt::Debug| {
            Err(format!("status.{what} is {found:?}, and the model has {expected:?}"))
        };
        if (found.pass, found.abandoned) != (self.model.passes, self.model.abandoned) {
            let (found, expected) =
                ((found.pass, found.abandoned), (self.model.passes, self.model.abandoned));
            return wrong("pass and abandoned", &found, &expected);
        }
        if found.skipped != expected.skipped {
            return wrong("skipped", &found.skipped, &expected.skipped);
        }
        if found.norm.is_some() != expected.norm.is_some()
            || !found.norm.zip(expected.norm).is_none_or(|(a, b)| is_close(a, b))
        {
            return wrong("norm", &found.norm, &expected.norm);
        }
        if !expected.abandoned && !is_close(found.clip, expected.clip) {
            return wrong("clip", &found.clip, &expected.clip);
        }
        if found.loss_scale != expected.loss_scale {
            return wrong("loss_scale", &found.loss_scale, &expected.loss_scale);
        }
        if found.first_nonfinite_bucket != culprit {
            return wrong("first_nonfinite_bucket", &found.first_nonfinite_bucket, &culprit);
        }
        Ok(())
    }

    /// Compares all that ranks read, and takes over their values.
    fn observe(&mut self, events: &[Vec<&Event>]) -> Verdict {
        let program = self.model.program;
        // The ranks that have something in common read it in the same order.
        for (rank, own) in events.iter().enumerate() {
            for event in own {
                let placed = |what: String| format!("rank {rank}: {what}");
                match event {
                    Event::Tensor { what, param, values } => {
                        let is_local = program.params[*param].local;
                        let is_first = is_local || rank == 0;
                        if !is_first && self.model.differs && matches!(what, What::Value) {
                            continue;
                        }
                        self.tensor(*what, *param, if is_local { rank } else { 0 }, values)
                            .map_err(placed)?;
                        let first = events.iter().flatten().find_map(|event| match event {
                            Event::Tensor { what: w, param: p, values } if (w, p) == (what, param) => {
                                Some(values)
                            }
                            _ => None,
                        });
                        let is_promised =
                            *what != What::Gradient || self.model.cells[*param][0].gradient.is_some();
                        if !is_local && is_promised && !first.is_some_and(|first| same_bits(first, values)) {
                            return Err(placed(format!(
                                "{what:?} of {} has other bits than on rank 0",
                                program.name(*param)
                            )));
                        }
                    }
                    Event::Count { param, count, carried } => {
                        let cell =
                            &self.model.cells[*param][if program.params[*param].local { rank } else { 0 }];
                        let is_same = carried.is_none_or(|carried| (carried - cell.carried).abs() < 1e-9);
                        if *count != cell.count || !is_same {
                            let (expected, name) = ((cell.count, cell.carried), program.name(*param));
                            let what = format!(
                                "{name} has had {count} updates, {carried:?}, and the model has {expected:?}"
                            );
                            return Err(placed(what));
                        }
                    }
                    Event::Settings { schedule_step, scaler, previous_norm } => {
                        self.settings(*schedule_step, *scaler, *previous_norm).map_err(placed)?;
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    fn tensor(&mut self, what: What, param: usize, cell: usize, found: &[f32]) -> Verdict {
        let name = format!("{what:?} of {}", self.model.program.name(param));
        let cell = &mut self.model.cells[param][cell];
        let expected = match what {
            What::Value => &mut cell.value,
            What::State(k) => &mut cell.states[k],
            What::Ema => &mut cell.ema,
            What::Copy => &mut cell.copy,
            What::Gradient => match &mut cell.gradient {
                Some(gradient) => gradient,
                None => return Ok(()),
            },
        };
        compare(&name, expected, found, 0.0)?;
        expected.adopt(found);
        Ok(())
    }

    fn settings(&self, step: u64, scaler: Option<(f64, u32)>, norm: Option<Option<f64>>) -> Verdict {
        let model = &self.model;
        if step != model.schedule_step {
            return Err(format!("schedule_step is {step}, and the model has {}", model.schedule_step));
        }
        if scaler.is_some_and(|scaler| scaler != (model.scale, model.growth)) {
            return Err(format!(
                "the scaler is at {scaler:?}, and the model at {:?}",
                (model.scale, model.growth)
            ));
        }
        let expected = matches!(model.config.clip, Clip::Previous(_)).then_some(model.previous_norm);
        let is_same = match (norm, expected) {
            (Some(Some(norm)), Some(Some(expected))) => (norm - expected).abs() <= 1e-6 * expected,
            (norm, expected) => norm == expected,
        };
        if !is_same {
            return Err(format!("previous_norm is {norm:?}, and the model has {expected:?}"));
        }
        Ok(())
    }

    fn exit(&mut self, exit: Exit, events: &[Vec<&Event>]) -> Verdict {
        let Exit::Doom { doom, rank: odd, .. } = exit else { return Ok(()) };
        let mut has_seen_mismatch = doom == Doom::Dies;
        let mut others = events.to_vec();
        for (rank, own) in events.iter().enumerate() {
            if doom == Doom::Dies && rank == odd as usize {
                continue;
            }
            let Some(Event::Doomed { kinds, schedule_step }) = own.first() else {
                return Err(format!("rank {rank} has not come to the pass that fails"));
            };
            if kinds.is_empty() {
                return Err(format!("rank {rank}: the pass went well, though rank {odd} had done otherwise"));
            }
            if kinds.iter().any(|kind| !["Mismatch", "PeerLost", "LeftPass"].contains(kind)) {
                return Err(format!("rank {rank}: failed as {kinds:?}"));
            }
            has_seen_mismatch |= kinds.contains(&"Mismatch");
            if rank != odd as usize {
                self.model.schedule_step = *schedule_step;
            }
        }
        if !has_seen_mismatch {
            return Err("no rank named the mismatch".into());
        }
        others[odd as usize].clear();
        self.source = usize::from(odd == 0);
        self.observe(&others)
    }
}
