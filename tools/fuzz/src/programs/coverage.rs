//! Counts which pairs of features were tested together in one phase of some program, and names what no program reaches.
//!
//! A missing pair is printed, so a change of the drawn programs shows what it lost.

use std::collections::{BTreeMap, BTreeSet};

use super::program::*;

/// The combinations that the programs cannot reach, and why.
const OUT_OF_REACH: &str = "\
OUT OF REACH of these programs
  devices but the host's, captured passes, borrowed buckets, BucketStep, C and Python: other tests hold them
  races that no recording shows: ThreadSanitizer looks for them
  stochastic rounding and moments of 8 bits: the model would have to know random bits and codes
  values that are not finite where nothing is skipped; local gradients that are not finite
  averaged and left parameters, optimizers of the user's own, several optimizers of a parameter, those added late
  Clip::PerBucket: the model knows no buckets
  ranks that share tensors and lose a rank in the middle of a step: what is torn depends on time
  collectives over other transports, hooks, compression, sums by the caller, Solo
  f16 gradients, whose sums would be rounded";

#[derive(Default)]
pub(crate) struct Coverage {
    alone: BTreeMap<&'static str, u64>,
    pairs: BTreeMap<(&'static str, &'static str), u64>,
}

impl Coverage {
    pub(crate) fn add(&mut self, program: &Program) {
        for phase in &program.phases {
            let features = features(program, phase);
            for (k, one) in features.iter().enumerate() {
                *self.alone.entry(one).or_default() += 1;
                for other in features.iter().skip(k + 1) {
                    *self.pairs.entry((one, other)).or_default() += 1;
                }
            }
        }
    }
}

impl std::fmt::Display for Coverage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let features: Vec<&'static str> = self.alone.keys().copied().collect();
        let possible = features.len() * features.len().saturating_sub(1) / 2;
        writeln!(
            f,
            "{} features, {} of {possible} pairs met in one phase",
            features.len(),
            self.pairs.len()
        )?;
        let mut with_all = Vec::new();
        for (k, one) in features.iter().enumerate() {
            let has_met = |other: &str| {
                let (first, second) = if *one < other { (*one, other) } else { (other, *one) };
                self.pairs.contains_key(&(first, second))
            };
            let others = features[..k].iter().chain(&features[k + 1..]).copied();
            let missing: Vec<&str> = others.filter(|other| !has_met(other)).collect();
            if missing.is_empty() {
                with_all.push(format!("{one} ({})", self.alone[one]))
            } else {
                writeln!(f, "  {one} ({}) not with: {}", self.alone[one], missing.join(", "))?
            }
        }
        writeln!(f, "  with all others: {}", with_all.join(", "))?;
        f.write_str(OUT_OF_REACH)
    }
}

fn features(program: &Program, phase: &Phase) -> BTreeSet<&'static str> {
    let config = &phase.config;
    let mut all = BTreeSet::new();
    all.insert(match config.ranks {
        1 => "1 rank",
        2 => "2 ranks",
        3 => "3 ranks",
        _ => "4 ranks",
    });
    all.insert(match config.strategy {
        Strategy::Replicated => "Replicated",
        Strategy::Zero => "Zero",
        Strategy::Fsdp => "Fsdp",
    });
    all.insert(match config.mode {
        Mode::Sequential => "Sequential",
        Mode::Eager => "Eager",
        Mode::Normed => "Normed",
    });
    all.insert(match config.clip {
        Clip::None => "no clip",
        Clip::Global(_) => "Clip::Global",
        Clip::Previous(_) => "Clip::Previous",
    });
    all.insert(match config.unused {
        Unused::Skip => "Unused::Skip",
        Unused::StepZero => "Unused::StepZero",
        Unused::Refuse => "Unused::Refuse",
    });
    all.insert(match config.gradients {
        Gradients::Keep => "Gradients::Keep",
        Gradients::Zero => "Gradients::Zero",
        Gradients::Average => "Gradients::Average",
        Gradients::Release => "Gradients::Release",
    });
    all.insert(match phase.entry {
        Entry::Fresh { differ: false } => "fresh",
        Entry::Fresh { differ: true } => "fresh with other values on other ranks",
        Entry::Load => "load",
        Entry::Import => "import_params",
    });
    all.insert(match phase.exit {
        Exit::Nothing => "no file",
        Exit::Save => "save",
        Exit::SaveTogether => "save_together",
        Exit::Write => "checkpoint::write",
        Exit::Export { .. } => "export",
        Exit::Doom { doom: Doom::Dies, .. } => "rescue after a lost rank",
        Exit::Doom { .. } => "rescue after a disagreement",
    });
    let options = [
        (config.shard_size.is_some(), "shard_size"),
        (config.offload, "offload"),
        (config.skip_nonfinite, "skip_nonfinite"),
        (matches!(config.loss_scale, LossScale::Dynamic(..)), "dynamic loss scale"),
        (config.uneven.is_some(), "uneven inputs"),
        (config.divisor.is_some(), "gradient_divisor"),
        (config.cap_bytes.is_some(), "bucket cap"),
        (config.threads > 0, "threads"),
        (config.inline, "inline"),
        (config.summed, "Accumulation::Summed"),
        (config.copy.is_some(), "copies"),
        (config.ema.is_some(), "averages"),
        (config.schedules.iter().any(Option::is_some), "lr_schedule"),
        (config.record, "recorded"),
    ];
    all.extend(options.into_iter().filter(|(is_on, _)| *is_on).map(|(_, name)| name));
    for param in &program.params {
        let precision = config.precision(param);
        all.insert(match (precision.param, precision.master) {
            (Type::F32, _) => "f32",
            (Type::Bf16, Master::None) => "bf16",
            (Type::Bf16, Master::F32) => "bf16 with F32 master",
            (_, Master::Remainder16) => "bf16 with Remainder16",
            (_, Master::Remainder8) => "bf16 with Remainder8",
            (Type::F16, Master::None) => "f16",
            (Type::F16, _) => "f16 with F32 master",
        });
        let kinds = [
            (precision.grad == Type::Bf16, "bf16 gradients"),
            (precision.bf16_moments, "bf16 moments"),
            (param.local, "local parameter"),
            (param.second, "two groups"),
            (param.uses > 1, "shared parameter"),
            (param.len == 0, "empty parameter"),
        ];
        all.extend(kinds.into_iter().filter(|(is_on, _)| *is_on).map(|(_, name)| name));
        all.insert(match if param.second { program.rules[1].kind } else { program.rules[0].kind } {
            Kind::Sgd => "SGD",
            Kind::Adam => "Adam",
            Kind::AdamW => "AdamW",
            Kind::Adagrad => "Adagrad",
            Kind::RmsProp => "RMSprop",
            Kind::Adadelta => "Adadelta",
            Kind::Adamax => "Adamax",
            Kind::Lion => "Lion",
            Kind::NAdam => "NAdam",
            Kind::RAdam => "RAdam",
            Kind::Lamb => "LAMB",
            Kind::AdEmaMix => "AdEMAMix",
            Kind::Rprop => "Rprop",
        });
    }
    phase.actions.iter().for_each(|action| of_action(action, &mut all));
    all
}

fn of_action(action: &Action, all: &mut BTreeSet<&'static str>) {
    let name = match action {
        Action::Pass(pass) => {
            let kinds = [
                (pass.micro_batches > 1, "micro-batches"),
                (pass.joins.contains(&true), "join"),
                (pass.unwritten.iter().any(|mask| *mask != 0), "gradients left out"),
                (!pass.named.is_empty(), "set_unused"),
                (pass.named_late.is_some(), "set_unused after a hand-over"),
                (pass.poison.is_some(), "skipped pass"),
                (pass.reads, "reads in a pass"),
                (pass.probes, "refused calls"),
                (pass.end != End::Finish, "abandoned pass"),
            ];
            all.extend(kinds.into_iter().filter(|(is_on, _)| *is_on).map(|(_, name)| name));
            return;
        }
        Action::Observe => "observe",
        Action::Status => "status",
        Action::Freeze(_, true) => "freeze",
        Action::Freeze(_, false) => "thaw",
        Action::SetLr(..) => "set_lr",
        Action::SetHyper(..) => "set_hyper",
        Action::SetMultiplier(..) => "set_lr_multiplier",
        Action::SetSchedule(..) => "set_lr_schedule",
        Action::SetScheduleStep(_) => "set_schedule_step",
        Action::SetPreviousNorm(_) => "set_previous_norm",
        Action::SetScaler(..) => "set_scaler_state",
        Action::WriteParam { .. } => "write parameter",
        Action::WriteStates { .. } => "write states",
        Action::WriteEma { .. } => "write average",
        Action::SetCount { .. } => "set_step_count",
        Action::Unshard(_) => "unshard",
        Action::Reshard(_) => "reshard",
        Action::Rebuild => "rebuild",
        Action::Reload => "reload",
    };
    all.insert(name);
}
