//! Draws programs from seeds: options that can be combined, and actions that are allowed at their place.
//!
//! Options that the library refuses are not drawn, so a refusal is a difference. Rare combinations that must occur in
//! one phase are drawn together, because a few hundred programs would not have them otherwise.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::program::*;
use super::rules::state_names;

struct Draw {
    random: SmallRng,
    program: Program,
    passes: u64,
}

/// Makes the program of a seed.
pub(crate) fn draw(seed: u64) -> Program {
    let random = SmallRng::seed_from_u64(hash(&[seed, 0x70]));
    let rule = Rule {
        kind: Kind::Sgd,
        lr: 1.0,
        beta1: 0.0,
        beta2: 0.0,
        weight_decay: 0.0,
        eps: 0.0,
        flag: false,
        maximize: false,
    };
    let program = Program { seed, params: Vec::new(), rules: [rule; 2], phases: Vec::new() };
    let mut draw = Draw { random, program, passes: 0 };
    draw.program.rules = [draw.rule(), draw.rule()];
    draw.params();
    let phases = draw.random.random_range(1..=3);
    for k in 0..phases {
        let phase = draw.phase(k + 1 == phases);
        draw.program.phases.push(phase);
    }
    if let Some(entry) = draw.next_entry() {
        // Whatever the last file holds, one plain rank reads it.
        let ema = draw.program.phases.last().and_then(|last| last.config.ema);
        let config = Config { ema: ema.filter(|_| entry == Entry::Load), ..plain() };
        let actions = vec![Action::Observe];
        draw.program.phases.push(Phase { config, entry, actions, exit: Exit::Nothing });
    }
    draw.program
}

const F32: Precision =
    Precision { param: Type::F32, grad: Type::F32, master: Master::None, bf16_moments: false };

fn plain() -> Config {
    Config {
        ranks: 1,
        strategy: Strategy::Replicated,
        shard_size: None,
        offload: false,
        mode: Mode::Sequential,
        clip: Clip::None,
        skip_nonfinite: false,
        loss_scale: LossScale::Constant(1.0),
        unused: Unused::Skip,
        uneven: None,
        divisor: None,
        cap_bytes: None,
        threads: 0,
        inline: false,
        summed: false,
        gradients: Gradients::Keep,
        precisions: [F32; 2],
        copy: None,
        ema: None,
        schedules: [None; 2],
        record: false,
    }
}

impl Draw {
    /// True once in `n` times.
    fn once_in(&mut self, n: u32) -> bool {
        self.random.random_ratio(1, n)
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.random.random_range(0..from.len())]
    }

    fn rule(&mut self) -> Rule {
        let kind = if self.once_in(4) { Kind::Sgd } else { self.pick(&KINDS) };
        let has_momentum = matches!(kind, Kind::Sgd | Kind::RmsProp);
        let beta1 = if has_momentum && self.once_in(2) { 0.0 } else { self.pick(&[0.5, 0.75, 0.9]) };
        let flag = self.once_in(3) && !(kind == Kind::Sgd && beta1 == 0.0);
        // A variance that is the difference of two states must not vanish.
        let is_centered = kind == Kind::RmsProp && flag;
        let no_decay = matches!(kind, Kind::Rprop);
        Rule {
            kind,
            lr: self.pick(&[0.0625, 0.125, 0.25]),
            beta1,
            beta2: if is_centered { 0.9 } else { self.pick(&[0.75, 0.9, 0.99]) },
            weight_decay: if no_decay { 0.0 } else { self.pick(&[0.0, 0.015625, 0.125]) },
            eps: if kind == Kind::Adadelta { 0.001 } else { self.pick(&[1e-8, 0.001]) },
            flag,
            maximize: self.once_in(6),
        }
    }

    fn params(&mut self) {
        let has_second = self.once_in(2);
        let has_local = self.once_in(3);
        for _ in 0..self.random.random_range(1..=6) {
            let len = match self.random.random_range(0..10) {
                0 => self.random.random_range(1500..4500),
                1 => 1,
                2 => self.random.random_range(255..=257),
                3 if self.once_in(3) => 0,
                4 => self.random.random_range(500..1100),
                _ => self.random.random_range(2..80),
            };
            let second = has_second && self.once_in(2);
            let local = has_local && self.once_in(3);
            let uses = if self.once_in(6) { 2 } else { 1 };
            let f32 = self.once_in(8);
            self.program.params.push(Param { len, second, local, f32, uses });
        }
        if self.program.params.iter().all(|param| param.local || param.len == 0) {
            self.program.params.push(Param { len: 40, second: false, local: false, f32: false, uses: 1 });
        }
    }

    /// Returns the parameters that ranks have in common.
    fn shared(&self) -> Vec<usize> {
        let params = self.program.params.iter().enumerate();
        params.filter(|(_, param)| !param.local && param.len > 0).map(|(k, _)| k).collect()
    }

    fn precision(&mut self, group: usize) -> Precision {
        let rule = self.program.rules[group];
        let bf16_moments = self.once_in(4) && !(rule.kind == Kind::RmsProp && rule.flag);
        let (param, grad, master) = match self.random.random_range(0..14) {
            0 => (Type::Bf16, Type::F32, Master::None),
            1 | 2 => (Type::Bf16, self.pick(&[Type::F32, Type::Bf16]), Master::F32),
            3 | 4 => (Type::Bf16, self.pick(&[Type::F32, Type::Bf16]), Master::Remainder16),
            5 => (Type::Bf16, Type::Bf16, Master::Remainder8),
            6 => (Type::F16, Type::F32, Master::F32),
            7 => (Type::F16, Type::Bf16, Master::None),
            _ => (Type::F32, Type::F32, Master::None),
        };
        Precision { param, grad, master, bf16_moments }
    }

    fn schedule(&mut self) -> Schedule {
        let lr = self.pick(&[0.125, 0.25]);
        match self.random.random_range(0..3) {
            0 => Schedule::Step { lr, size: self.random.random_range(1..=2), gamma: 0.5 },
            1 => Schedule::Cosine {
                lr,
                period: self.random.random_range(3..9),
                lowest: self.pick(&[0.0, 0.03125]),
            },
            _ => Schedule::WarmUp { lr, steps: self.random.random_range(1..5), start: 0.25 },
        }
    }

    fn config(&mut self, entry: Entry) -> Config {
        let ranks = self.pick(&[1, 2, 2, 2, 3, 4, 4]);
        let strategy = self.pick(&[Strategy::Replicated, Strategy::Zero, Strategy::Fsdp]);
        let is_sharded = strategy != Strategy::Replicated;
        let mode = self.pick(&[Mode::Sequential, Mode::Eager, Mode::Normed]);
        let is_eager = mode == Mode::Eager;
        let most = self.pick(&[0.5, 2.0]);
        let clip = match self.random.random_range(0..3) {
            0 => Clip::None,
            1 if !is_eager => Clip::Global(most),
            _ => Clip::Previous(most),
        };
        let uneven = (strategy != Strategy::Fsdp && self.once_in(3))
            .then(|| self.pick(&[Divisor::WorldSize, Divisor::Contributing]));
        let offload = self.once_in(3);
        let gradients = self.pick(&[
            Gradients::Keep,
            Gradients::Keep,
            Gradients::Zero,
            Gradients::Zero,
            Gradients::Average,
            Gradients::Release,
        ]);
        let loss_scale = match self.random.random_range(0..3) {
            0 if !is_eager => {
                LossScale::Dynamic(self.pick(&[1024.0, 65536.0]), self.random.random_range(1..4))
            }
            _ => LossScale::Constant(self.pick(&[1.0, 8.0, 1024.0])),
        };
        let last_ema = self.program.phases.last().and_then(|phase| phase.config.ema);
        let keeps_ema = entry == Entry::Load && last_ema.is_some();
        let has_second = self.program.params.iter().any(|param| param.second);
        Config {
            ranks,
            strategy,
            shard_size: (is_sharded && ranks == 4 && self.once_in(2)).then_some(2),
            offload,
            mode,
            clip,
            skip_nonfinite: !is_eager && self.once_in(2),
            loss_scale,
            unused: self.pick(&[Unused::Skip, Unused::StepZero, Unused::Refuse]),
            uneven,
            divisor: (uneven != Some(Divisor::Contributing) && self.once_in(8)).then_some(2.0),
            cap_bytes: self.pick(&[None, Some(4), Some(1024), Some(2048), Some(8192)]),
            threads: self.random.random_range(0..=2),
            inline: self.once_in(5),
            summed: is_sharded && uneven.is_none() && self.once_in(2),
            gradients: if offload && gradients == Gradients::Average { Gradients::Zero } else { gradients },
            precisions: [self.precision(0), self.precision(1)],
            copy: (!offload && self.once_in(4)).then(|| self.pick(&[Type::F32, Type::Bf16, Type::F16])),
            ema: (keeps_ema || self.once_in(3)).then(|| self.pick(&[0.5, 0.9])),
            schedules: [
                self.once_in(4).then(|| self.schedule()),
                (has_second && self.once_in(4)).then(|| self.schedule()),
            ],
            record: !self.once_in(3),
        }
    }

    /// Returns how a phase after the last one gets the result of the last one.
    fn next_entry(&self) -> Option<Entry> {
        match self.program.phases.last()?.exit {
            Exit::Nothing | Exit::Doom { saves: false, .. } => None,
            Exit::Export { .. } => Some(Entry::Import),
            Exit::Save | Exit::SaveTogether | Exit::Write | Exit::Doom { .. } => Some(Entry::Load),
        }
    }

    fn phase(&mut self, is_last: bool) -> Phase {
        let entry = self.next_entry().unwrap_or(Entry::Fresh { differ: false });
        let mut config = self.config(entry);
        let counts_in_a_frozen_bucket = config.strategy != Strategy::Fsdp && self.once_in(6);
        if counts_in_a_frozen_bucket {
            let uneven = config.uneven.or(Some(Divisor::WorldSize));
            // Copies of what was stepped, or an all-gather, may be under way.
            let offload = config.offload || !config.is_sharded();
            let gradients = if offload { Gradients::Keep } else { config.gradients };
            let copy = if offload { None } else { config.copy };
            config = Config { uneven, offload, gradients, copy, summed: false, record: true, ..config };
            if uneven == Some(Divisor::Contributing) {
                config.divisor = None;
            }
        }
        let can_differ = (0..self.program.params.len()).all(|param| self.can_differ(&config, param));
        let entry = match entry {
            Entry::Fresh { .. } => Entry::Fresh { differ: can_differ && self.once_in(2) },
            other => other,
        };
        let mut frozen = vec![false; self.program.params.len()];
        let mut actions = Vec::new();
        if entry != (Entry::Fresh { differ: true }) || self.once_in(2) {
            actions.push(Action::Observe);
        }
        let count = self.random.random_range(4..=11);
        for _ in 0..count {
            self.action(&config, &mut frozen, &mut actions);
        }
        if counts_in_a_frozen_bucket || self.once_in(3) {
            // The count of ranks travels in a bucket that takes part in nothing else.
            self.passes(&config, &frozen, &mut actions);
            for (param, spec) in self.program.params.iter().enumerate() {
                if !spec.local && !frozen[param] {
                    frozen[param] = true;
                    actions.push(Action::Freeze(param, true));
                }
            }
            for _ in 0..2 {
                self.passes(&config, &frozen, &mut actions);
            }
            let thawed = self.pick(&self.shared());
            frozen[thawed] = false;
            actions.push(Action::Freeze(thawed, false));
            self.passes(&config, &frozen, &mut actions);
        }
        let exit = self.exit(&config, &frozen, &mut actions, is_last);
        Phase { config, entry, actions, exit }
    }

    /// Returns whether ranks may write different values to a parameter; those of rank 0 then count.
    fn can_differ(&self, config: &Config, param: usize) -> bool {
        let param = &self.program.params[param];
        config.strategy != Strategy::Fsdp && config.precision(param).master == Master::None
    }

    fn exit(&mut self, config: &Config, frozen: &[bool], actions: &mut Vec<Action>, is_last: bool) -> Exit {
        let has_work = self.shared().iter().any(|param| !frozen[*param]);
        if config.ranks > 1 && has_work && self.once_in(3) {
            // A pass before it, since ranks compare what they write only after their first one, and a cached number
            // of what they agree on is one of the things to find out about.
            let mut pass = self.pass(config, frozen);
            (pass.end, pass.poison) = (End::Finish, None);
            actions.extend([Action::Pass(pass), Action::Observe]);
            let doom = self.doom(config, frozen);
            let has_local = self.program.params.iter().any(|param| param.local);
            let is_whole =
                config.strategy == Strategy::Replicated && !(config.mode == Mode::Eager && has_local);
            return Exit::Doom { doom, rank: self.random.random_range(0..config.ranks), saves: is_whole };
        }
        if self.once_in(2) {
            actions.push(Action::Observe);
        }
        match self.random.random_range(0..8) {
            0 if is_last => Exit::Nothing,
            0..=1 => Exit::Save,
            2..=4 => Exit::SaveTogether,
            5 => Exit::Write,
            _ => Exit::Export { averages: config.ema.is_some() && self.once_in(2), f32: self.once_in(2) },
        }
    }

    fn doom(&mut self, config: &Config, frozen: &[bool]) -> Doom {
        let shared: Vec<usize> = self.shared().into_iter().filter(|param| !frozen[*param]).collect();
        let param = self.pick(&shared);
        let group = usize::from(self.program.params[param].second);
        loop {
            return match self.random.random_range(0..12) {
                0 | 1 => Doom::Dies,
                2 => Doom::Lr(group),
                3 if self.program.rules[group].kind != Kind::Rprop => Doom::Hyper(group),
                4 | 5 => Doom::Multiplier(param),
                6 | 7 if matches!(config.clip, Clip::Previous(_)) => Doom::PreviousNorm,
                8 if matches!(config.loss_scale, LossScale::Dynamic(..)) => Doom::Scaler,
                9 => Doom::StepCount(param),
                10 if !state_names(self.program.rule(param)).is_empty() => Doom::State(param),
                11 if self.once_in(2) => Doom::Param(param),
                11 if shared.len() > 1 => Doom::Frozen(param),
                _ => continue,
            };
        }
    }

    fn passes(&mut self, config: &Config, frozen: &[bool], actions: &mut Vec<Action>) {
        let pass = self.pass(config, frozen);
        actions.push(Action::Pass(pass));
        if self.once_in(3) {
            actions.push(Action::Status);
        }
        if self.once_in(3) {
            actions.push(Action::Observe);
        }
    }

    fn action(&mut self, config: &Config, frozen: &mut [bool], actions: &mut Vec<Action>) {
        let param = self.random.random_range(0..self.program.params.len());
        let group = usize::from(self.program.params[param].second);
        let salt = self.random.random_range(1..1 << 30);
        let action = match self.random.random_range(0..40) {
            0..=2 => {
                frozen[param] = !frozen[param];
                Action::Freeze(param, frozen[param])
            }
            3 => Action::SetLr(group, self.pick(&[0.0, 0.125, 0.5])),
            4 if self.program.rules[group].kind != Kind::Rprop => {
                Action::SetHyper(group, self.pick(&[0.0, 0.0625]))
            }
            5 | 6 => Action::SetMultiplier(param, self.pick(&[0.0, 0.5, 2.0])),
            7 => {
                let schedule = (!self.once_in(3)).then(|| self.schedule());
                Action::SetSchedule(group, schedule)
            }
            8 => Action::SetScheduleStep(self.random.random_range(0..6)),
            9 if matches!(config.clip, Clip::Previous(_)) => {
                Action::SetPreviousNorm(self.pick(&[None, Some(0.25), Some(4.0)]))
            }
            10 if matches!(config.loss_scale, LossScale::Dynamic(..)) => Action::SetScaler(256.0, 0),
            11 | 12 => {
                let differ = self.can_differ(config, param) && self.once_in(2);
                Action::WriteParam { param, salt, differ }
            }
            // Whatever is written, a variance that is the difference of two states would fall below zero.
            13 if state_names(self.program.rule(param)).contains(&"grad_avg") => return,
            13 if !state_names(self.program.rule(param)).is_empty() => Action::WriteStates { param, salt },
            14 if config.ema.is_some() => Action::WriteEma { param, salt },
            15 => Action::SetCount { param, count: self.random.random_range(0..9) },
            16..=18 if config.strategy == Strategy::Fsdp => Action::Unshard(self.random.random_range(0..8)),
            19 if config.strategy == Strategy::Fsdp => Action::Reshard(self.random.random_range(0..8)),
            20 | 21 => Action::Rebuild,
            22 => Action::Reload,
            23 => Action::Observe,
            _ => return self.passes(config, frozen, actions),
        };
        actions.push(action);
    }

    fn pass(&mut self, config: &Config, frozen: &[bool]) -> Pass {
        self.passes += 1;
        let ranks = config.ranks as usize;
        let count = self.program.params.len();
        let micro_batches = self.pick(&[1, 1, 2, 3]);
        let joins: Vec<bool> = (0..ranks).map(|_| config.uneven.is_some() && self.once_in(3)).collect();
        let leaves_out = config.unused != Unused::Refuse && self.once_in(2);
        let mut unwritten: Vec<u32> = vec![0; ranks];
        for mask in &mut unwritten {
            for param in 0..count {
                *mask |= u32::from(leaves_out && self.once_in(4)) << param;
            }
        }
        if leaves_out && self.once_in(2) {
            // On all ranks alike.
            unwritten = vec![unwritten[0]; ranks];
        }
        let can_name = config.unused != Unused::Skip && config.uneven.is_none();
        let takes_part: Vec<usize> = (0..count).filter(|param| !frozen[*param]).collect();
        let named: Vec<usize> = takes_part.iter().copied().filter(|_| can_name && self.once_in(8)).collect();
        let mut pass = Pass {
            number: self.passes,
            micro_batches,
            named,
            named_late: None,
            poison: None,
            rewrites: self.once_in(4),
            left_to_finish: if self.once_in(3) { self.random.random() } else { 0 },
            reads: self.once_in(2),
            probes: self.once_in(4),
            end: End::Finish,
            joins,
            unwritten,
        };
        let takes_part = || takes_part.iter().copied().filter(|param| !pass.named.contains(param));
        let is_written =
            |rank: usize, param: usize| !pass.joins[rank] && pass.unwritten[rank] >> param & 1 == 0;
        let locals: Vec<usize> = takes_part().filter(|param| self.program.params[*param].local).collect();
        let shared: Vec<usize> = takes_part().filter(|param| self.shared().contains(param)).collect();
        let rank = self.random.random_range(0..ranks);
        let late: Vec<usize> = locals.into_iter().filter(|param| is_written(rank, *param)).collect();
        let poisoned: Vec<usize> = shared.into_iter().filter(|param| is_written(rank, *param)).collect();
        if can_name && config.mode != Mode::Eager && !late.is_empty() && !self.once_in(3) {
            let param = self.pick(&late);
            pass.named_late = Some((rank as u32, param));
            pass.left_to_finish &= !(1 << param);
        } else if !pass.joins.contains(&true) && pass.named.is_empty() && self.once_in(5) {
            pass.unwritten = vec![pass.unwritten[0]; ranks];
            let micro_batches = self.random.random_range(0..pass.micro_batches);
            pass.end = End::Abandon { micro_batches, hand_overs: self.random.random_range(0..=count + 1) };
        } else if config.skips() && !poisoned.is_empty() && self.once_in(4) {
            let param = self.pick(&poisoned);
            let element = self.random.random_range(0..self.program.params[param].len);
            pass.poison = Some((rank as u32, param, element));
        }
        pass
    }
}
