//! A phase of a program on the library: one thread per rank, each of which notes what it saw.
//!
//! This file does not need the model. Properties that need no model are checked here, and a violation is logged as
//! [`Event::Wrong`]: a refusal has the right kind, and a recording has no hazard.

use std::path::Path;

use instep::checkpoint::{self, Export, Extras};
use instep::hazard::Hazard;
use instep::{Error, InProcess, Result, in_process};

use super::build::{self, GROUPS};
use super::observe;
use super::pass;
use super::program::*;
use super::rank::{ENTRY, EXIT, Event, Log, Rank, Together, kind};
use super::rules::{nadam_momentum, state_names};

/// Runs a phase: it loads from `before` and leaves a file at `after`.
pub(crate) fn phase(program: &Program, number: usize, before: &Path, after: &Path) -> Result<Vec<Log>> {
    let phase = &program.phases[number];
    let (layout, together) = (build::layout(program)?, Together::default());
    in_process(phase.config.ranks, |comm: InProcess| {
        let rank = comm.rank();
        let stepper = build::stepper(program, &phase.config, &layout, comm)?;
        let mut rank = Rank {
            program,
            config: &phase.config,
            stepper,
            ids: layout.ids().collect(),
            rank,
            log: Vec::new(),
            at: ENTRY,
            frozen: vec![false; program.params.len()],
            passes: 0,
            recorded: instep::Recording::default(),
            together: &together,
        };
        rank.note_buckets();
        rank.enter(phase.entry, before, number)?;
        for (at, action) in phase.actions.iter().enumerate() {
            rank.at = at;
            rank.act(action)?;
        }
        rank.at = EXIT;
        rank.exit(phase.exit, after)?;
        Ok(rank.log)
    })
}

impl Rank<'_> {
    fn note_buckets(&mut self) {
        let plan = self.stepper.plan();
        let params = |bucket| plan.segments_of(bucket).iter().map(|segment| segment.param as usize).collect();
        let buckets = plan.buckets().iter().map(params).collect();
        self.note(Event::Buckets(buckets));
    }

    /// Returns the written values: the same on all ranks, except for local parameters and for values that rank 0's
    /// values replace.
    pub(crate) fn written(&self, param: usize, salt: u64, differ: bool) -> Vec<f32> {
        let differs = differ || self.program.params[param].local;
        let salt = salt + if differs { u64::from(self.rank) << 40 } else { 0 };
        let len = self.program.params[param].len;
        (0..len).map(|k| value(self.program.seed, salt, param, k) as f32).collect()
    }

    fn enter(&mut self, entry: Entry, before: &Path, number: usize) -> Result<()> {
        match entry {
            Entry::Fresh { differ } => {
                for param in 0..self.ids.len() {
                    let values = self.written(param, number as u64, differ);
                    self.stepper.write(self.ids[param], &values)?;
                }
            }
            Entry::Load => drop(checkpoint::load(&mut self.stepper, before)?),
            Entry::Import => {
                let file = std::fs::File::open(before).map_err(|error| Error::Hook(error.to_string()))?;
                checkpoint::import_params(&mut self.stepper, file)?;
            }
        }
        Ok(())
    }

    fn act(&mut self, action: &Action) -> Result<()> {
        match *action {
            Action::Pass(ref pass) => {
                self.passes += 1;
                pass::run(self, pass)?;
            }
            Action::Observe => observe::everything(self)?,
            Action::Status if self.passes > 0 => {
                let status = self.stepper.status()?;
                self.note(Event::Status(status));
            }
            Action::Status => {}
            Action::Freeze(param, frozen) => {
                self.frozen[param] = frozen;
                self.stepper.set_frozen(self.ids[param], frozen)?;
            }
            Action::SetLr(group, lr) => {
                let answer = self.stepper.set_lr(GROUPS[group], lr);
                self.answered("set_lr", &answer);
            }
            Action::SetHyper(group, decay) => {
                self.stepper.set_hyper(GROUPS[group], &[("weight_decay", decay)])?;
            }
            Action::SetMultiplier(param, factor) => {
                self.stepper.set_lr_multiplier(self.ids[param], factor)?
            }
            Action::SetSchedule(group, schedule) => {
                self.stepper.set_lr_schedule(GROUPS[group], schedule.as_ref().map(build::lr_schedule))?;
            }
            Action::SetScheduleStep(step) => self.stepper.set_schedule_step(step)?,
            Action::SetPreviousNorm(norm) => self.stepper.set_previous_norm(norm)?,
            Action::SetScaler(scale, growth_tracker) => {
                self.stepper.set_scaler_state(instep::ScalerState { scale, growth_tracker })?;
            }
            Action::WriteParam { param, salt, differ } => {
                let values = self.written(param, salt, differ);
                self.stepper.write(self.ids[param], &values)?;
            }
            Action::WriteStates { param, salt } => {
                for (salt, name) in (salt..).zip(state_names(self.program.rule(param))) {
                    let values = written_state(name, self.written(param, salt, false));
                    self.stepper.write(self.ids[param].state(name), &values)?;
                }
            }
            Action::WriteEma { param, salt } => {
                let values = self.written(param, salt, false);
                self.stepper.write(self.ids[param].ema(), &values)?;
            }
            Action::SetCount { param, count } => self.set_count(param, count)?,
            Action::Unshard(bucket) => {
                let buckets = self.stepper.plan().buckets().len();
                self.stepper.unshard((bucket % buckets) as u32)?;
            }
            Action::Reshard(bucket) => {
                let buckets = self.stepper.plan().buckets().len();
                self.stepper.reshard((bucket % buckets) as u32)?;
            }
            Action::Rebuild => {
                self.check_recording();
                let answer = self.stepper.rebuild_buckets();
                if self.config.is_sharded() || self.config.offload {
                    self.refused("rebuild_buckets", "Unsupported", answer);
                } else if answer? {
                    self.recorded = instep::Recording::default();
                    self.note_buckets();
                }
            }
            Action::Reload => {
                let mut bytes = Vec::new();
                checkpoint::write(&self.stepper, &mut bytes)?;
                checkpoint::read(&mut self.stepper, std::io::Cursor::new(bytes))?;
            }
        }
        Ok(())
    }

    pub(crate) fn set_count(&mut self, param: usize, count: u64) -> Result<()> {
        let rule = self.program.rule(param);
        if rule.kind == Kind::NAdam {
            self.stepper.set_step_count(self.ids[param], (count, product_of_momenta(rule, count)))
        } else {
            self.stepper.set_step_count(self.ids[param], count)
        }
    }

    /// Checks the recording so far.
    fn check_recording(&mut self) {
        if let Some(recording) = self.stepper.take_recording() {
            self.recorded.list.extend(recording.list);
            let hazards = self.stepper.check(&self.recorded);
            if let Some(first) = hazards.first() {
                let entry = |at: &usize| format!("{:?}", self.recorded.list[*at]);
                let entries = match first {
                    Hazard::Race { first, second, .. } => vec![entry(first), entry(second)],
                    Hazard::UnrecordedWait { at } | Hazard::MisplacedRecord { at } => vec![entry(at)],
                };
                self.wrong(format!(
                    "{} hazards, the first one: {first}, {}",
                    hazards.len(),
                    entries.join(" and ")
                ));
            }
        }
    }

    fn exit(&mut self, exit: Exit, after: &Path) -> Result<()> {
        let extras = Extras::default();
        match exit {
            Exit::Nothing => {}
            Exit::Save => checkpoint::save_with(&self.stepper, &extras, after)?,
            Exit::SaveTogether => checkpoint::save_together_with(&self.stepper, &extras, after)?,
            Exit::Write => {
                let mut bytes = Vec::new();
                checkpoint::write_with(&self.stepper, &extras, &mut bytes)?;
                if self.rank == 0 {
                    std::fs::write(after, bytes).map_err(|error| Error::Hook(error.to_string()))?;
                }
            }
            Exit::Export { averages, f32 } => {
                checkpoint::export(&self.stepper, Export { averages, f32 }, after)?;
            }
            Exit::Doom { doom, rank, saves } => {
                self.check_recording();
                self.together.meet(self.config.ranks);
                return self.fail(doom, rank, saves, after);
            }
        }
        self.check_recording();
        Ok(())
    }

    /// Makes a pass that fails, because one rank is gone or did something else, and then reads what is left.
    fn fail(&mut self, doom: Doom, rank: u32, saves: bool, after: &Path) -> Result<()> {
        let is_odd = rank == self.rank;
        if is_odd {
            if doom == Doom::Dies {
                return Ok(());
            }
            self.deviate(doom)?;
        }
        let mut kinds = Vec::new();
        if let Err(error) = pass::doomed(self).and_then(|()| self.stepper.step_count(self.ids[0]).map(drop)) {
            kinds.push(kind(error.cause()));
        }
        let schedule_step = self.stepper.schedule_step();
        self.note(Event::Doomed { kinds: kinds.clone(), schedule_step });
        if kinds.is_empty() {
            return Ok(());
        }
        self.stepper.rescue()?;
        let answer = self.stepper.begin().map(drop);
        if answer.is_ok() {
            self.wrong("begin: accepted after a rescue".into());
        }
        if is_odd {
            return Ok(());
        }
        observe::what_is_left(self)?;
        if saves && self.rank == u32::from(rank == 0) {
            let mut bytes = Vec::new();
            checkpoint::write(&self.stepper, &mut bytes)?;
            std::fs::write(after, bytes).map_err(|error| Error::Hook(error.to_string()))?;
        }
        Ok(())
    }

    fn deviate(&mut self, doom: Doom) -> Result<()> {
        match doom {
            Doom::Dies => Ok(()),
            Doom::Lr(group) => {
                self.stepper.set_lr_schedule(GROUPS[group], None)?;
                self.stepper.set_lr(GROUPS[group], 0.03)
            }
            Doom::Hyper(group) => self.stepper.set_hyper(GROUPS[group], &[("weight_decay", 0.03)]),
            Doom::Multiplier(param) => self.stepper.set_lr_multiplier(self.ids[param], 0.25),
            Doom::PreviousNorm => self.stepper.set_previous_norm(Some(0.75)),
            Doom::Scaler => {
                self.stepper.set_scaler_state(instep::ScalerState { scale: 32.0, growth_tracker: 0 })
            }
            Doom::StepCount(param) => self.set_count(param, 77),
            Doom::State(param) => {
                let name = state_names(self.program.rule(param))[0];
                let values = self.written(param, 5, false);
                self.stepper.write(self.ids[param].state(name), &values)
            }
            Doom::Param(param) => {
                let values = self.written(param, 5, false);
                self.stepper.write(self.ids[param], &values)
            }
            Doom::Frozen(param) => self.stepper.set_frozen(self.ids[param], true),
        }
    }
}

/// Returns NAdam's product of the momenta up to a step.
pub(crate) fn product_of_momenta(rule: &Rule, count: u64) -> f64 {
    (1..=count).map(|step| nadam_momentum(rule, step)).product()
}

/// Returns the values to write to a state: nothing negative under a root.
pub(crate) fn written_state(name: &str, values: Vec<f32>) -> Vec<f32> {
    let is_square = ["sq", "inf", "sum", "delta", "step_size"].iter().any(|part| name.contains(part));
    values.into_iter().map(|x| if is_square { x.abs() } else { x }).collect()
}
