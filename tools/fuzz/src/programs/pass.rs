//! One pass of a program on one rank: gradients, hand-overs, reads, calls that must be refused, and the end.
//!
//! It writes the gradients that the model sums. The pass's number decides in which way they are written.

use std::num::NonZeroU32;

use instep::{ParamId, Pass as OpenPass, Result, Stepper, bf16};

use super::model::micro_gradient;
use super::program::*;
use super::rank::{Event, Log, Rank, kind};

/// A rank in an open pass.
struct Open<'a> {
    program: &'a Program,
    config: &'a Config,
    pass: &'a Pass,
    ids: &'a [ParamId],
    frozen: &'a [bool],
    rank: u32,
    at: usize,
    log: &'a mut Log,
    scale: f64,
    open: OpenPass<'a>,
}

/// Makes a pass.
pub(crate) fn run(rank: &mut Rank<'_>, pass: &Pass) -> Result<()> {
    if pass.joins[rank.rank as usize] {
        let any = rank.stepper.join()?;
        rank.note(Event::Joined(any));
        return Ok(());
    }
    let micro_batches = NonZeroU32::new(pass.micro_batches).unwrap_or(NonZeroU32::MIN);
    let mut open = Open {
        program: rank.program,
        config: rank.config,
        pass,
        ids: &rank.ids,
        frozen: &rank.frozen,
        rank: rank.rank,
        at: rank.at,
        log: &mut rank.log,
        scale: 1.0,
        open: rank.stepper.begin_accumulating(micro_batches)?,
    };
    open.scale = open.open.loss_scale()?;
    open.note(Event::Scale(open.scale));
    if pass.probes {
        open.probe_the_start();
    }
    if pass.reads {
        open.read()?;
    }
    for micro_batch in 0..pass.micro_batches {
        if !open.micro_batch(micro_batch)? {
            return open.abandon();
        }
    }
    if let Some((named, param)) = pass.named_late
        && named == open.rank
    {
        open.open.set_unused(&[open.ids[param]])?;
    }
    if pass.probes {
        open.probe_the_end();
    }
    open.open.finish()
}

/// Makes a pass of one micro-batch that writes everything.
pub(crate) fn doomed(rank: &mut Rank<'_>) -> Result<()> {
    let mut open = rank.stepper.begin()?;
    for (param, id) in rank.ids.iter().enumerate() {
        if !open.is_frozen(*id)? {
            open.grads().write(*id, &vec![1.0f32; rank.program.params[param].len])?;
        }
    }
    open.finish()
}

impl Open<'_> {
    fn note(&mut self, event: Event) {
        self.log.push((self.at, event));
    }

    /// Notes a call that must be refused at this moment.
    fn refused<T>(&mut self, call: &str, answer: Result<T>) {
        let wrong = match answer {
            Err(error) if kind(&error) == "Order" => return,
            Err(error) => format!("{call}: refused as {error:?}, not as Order"),
            Ok(_) => format!("{call}: accepted, though it had to be refused as Order"),
        };
        self.note(Event::Wrong(wrong));
    }

    /// Returns whether this rank writes a gradient.
    fn writes(&self, param: usize) -> bool {
        let is_unwritten = self.pass.unwritten[self.rank as usize] >> param & 1 != 0;
        !is_unwritten && !self.frozen[param] && !self.pass.named.contains(&param)
    }

    /// Returns a number below `n`, which is the same on all ranks with the same `of`.
    fn chance(&self, of: &[u64], n: u64) -> u64 {
        let place: Vec<u64> = [self.program.seed, self.pass.number].iter().chain(of).copied().collect();
        (hash(&place) >> 13) % n
    }

    fn grad_type(&self, param: usize) -> Type {
        self.config.precision(&self.program.params[param]).grad
    }

    /// Makes one micro-batch, and returns whether the pass continues.
    fn micro_batch(&mut self, micro_batch: u32) -> Result<bool> {
        for param in 0..self.ids.len() {
            if self.writes(param) {
                self.write(micro_batch, param)?;
            }
        }
        let is_last = micro_batch + 1 == self.pass.micro_batches;
        if is_last && !self.pass.named.is_empty() {
            self.name_unused()?;
        }
        let most = match self.pass.end {
            End::Abandon { micro_batches, hand_overs } if micro_batches == micro_batch => Some(hand_overs),
            _ => None,
        };
        let order = order(self.program, self.pass, self.rank).into_iter();
        let handed: Vec<usize> = order.filter(|param| self.hands_over(*param)).collect();
        for param in handed.into_iter().take(most.unwrap_or(usize::MAX)) {
            self.open.grad_ready(self.ids[param])?;
        }
        if most.is_some() {
            return Ok(false);
        }
        if !is_last {
            if self.pass.probes {
                let answer = Stepper::finish(&mut self.open);
                self.refused("finish before the last micro-batch", answer);
            }
            self.open.next_micro_batch()?;
        }
        Ok(true)
    }

    fn hands_over(&self, param: usize) -> bool {
        self.writes(param) && self.pass.left_to_finish >> param & 1 == 0
    }

    fn abandon(self) -> Result<()> {
        if self.chance(&[8], 3) == 0 {
            drop(self.open);
            return Ok(());
        }
        let abandoned = self.open.abandon()?;
        self.log.push((self.at, Event::Abandoned(abandoned.stepped_buckets)));
        Ok(())
    }

    /// Reads parameters before anything is handed over. Ranks unshard the same buckets.
    fn read(&mut self) -> Result<()> {
        let is_fsdp = self.config.strategy == Strategy::Fsdp;
        let buckets = if is_fsdp { self.open.plan().buckets().len() as u32 } else { 0 };
        for bucket in 0..buckets {
            if self.chance(&[1, bucket.into()], 3) > 0 {
                self.open.unshard(bucket)?;
            }
        }
        for param in 0..self.ids.len() {
            let of = self.config.precision(&self.program.params[param]).param;
            if self.chance(&[2, self.rank.into(), param as u64], 3) == 0 {
                continue;
            }
            match Rank::view(&self.open, of, self.ids[param]) {
                Ok(values) => self.note(Event::Seen { param, values }),
                Err(error) if kind(&error) == "Order" && is_fsdp && !self.program.params[param].local => {}
                Err(error) => return Err(error),
            }
        }
        for bucket in 0..buckets {
            if self.chance(&[3, self.rank.into(), bucket.into()], 3) == 0 {
                self.open.reshard(bucket)?;
            }
        }
        Ok(())
    }

    /// Writes the gradient of one micro-batch.
    fn write(&mut self, micro_batch: u32, param: usize) -> Result<()> {
        let scaled =
            |k| micro_gradient(self.program, self.pass, self.rank, micro_batch, param, k) * self.scale;
        let values: Vec<f32> = (0..self.program.params[param].len).map(|k| scaled(k) as f32).collect();
        let is_summed = self.config.summed && !self.program.params[param].local;
        let is_first = micro_batch == 0 || is_summed;
        let (id, chance) = (self.ids[param], self.chance(&[4, param as u64, micro_batch.into()], 3));
        if chance == 0 && is_first {
            // Where it lies, after a look at what is there.
            let before = if self.grad_type(param) == Type::Bf16 {
                let slice = self.open.view_mut::<bf16>(id.grad())?;
                let before = slice.iter().map(|x| x.to_f32()).find(|x| *x != 0.0);
                slice.iter_mut().zip(&values).for_each(|(slot, value)| *slot = bf16::from_f32(*value));
                before
            } else {
                let slice = self.open.view_mut::<f32>(id.grad())?;
                let before = slice.iter().copied().find(|x| *x != 0.0);
                slice.copy_from_slice(&values);
                before
            };
            if let Some(value) = before {
                self.note(Event::Stale { param, micro_batch, value });
            }
            return Ok(());
        }
        let replaces = is_first && chance == 1 || self.pass.rewrites && !is_summed;
        let mut grads = self.open.grads();
        if replaces { grads.write(id, &values) } else { grads.add(id, &values) }
    }

    /// Declares parameters unused on all ranks; what was written to them is discarded.
    fn name_unused(&mut self) -> Result<()> {
        let mut ids = Vec::new();
        for param in self.pass.named.iter().copied() {
            if self.chance(&[6, param as u64], 2) == 0 {
                let values = vec![3.0f32; self.program.params[param].len];
                self.open.grads().write(self.ids[param], &values)?;
            }
            ids.push(self.ids[param]);
        }
        self.open.set_unused(&ids)
    }

    fn probe_the_start(&mut self) {
        let answer = self.open.begin().map(drop);
        self.refused("begin in a pass", answer);
        let answer = self.open.set_lr(super::build::GROUPS[0], 0.5);
        self.refused("set_lr in a pass", answer);
        let answer = self.open.set_lr_multiplier(self.ids[0], 0.5);
        self.refused("set_lr_multiplier in a pass", answer);
        let answer = self.open.set_frozen(self.ids[0], true);
        self.refused("set_frozen in a pass", answer);
        let answer = self.open.set_step_count(self.ids[0], 0);
        self.refused("set_step_count in a pass", answer);
        let values = vec![0.5; self.program.params[0].len];
        let answer = self.open.write(self.ids[0], &values);
        self.refused("write of a parameter in a pass", answer);
        let answer = self.open.rebuild_buckets();
        self.refused("rebuild_buckets in a pass", answer);
        for param in 0..self.ids.len() {
            let answer = self.open.grad_ready(self.ids[param]);
            self.refused("hand-over of what was not written, or is frozen", answer);
            if self.frozen[param] {
                let values = vec![0.5f32; self.program.params[param].len];
                let answer = self.open.grads().write(self.ids[param], &values);
                self.refused("gradient of a frozen parameter", answer);
            }
        }
        let is_needed = |param: usize| !self.frozen[param] && self.program.params[param].len > 0;
        if self.config.unused == Unused::Refuse && (0..self.ids.len()).any(is_needed) {
            let answer = Stepper::finish(&mut self.open);
            self.refused("finish without gradients, with Unused::Refuse", answer);
        }
    }

    fn probe_the_end(&mut self) {
        let answer = self.open.next_micro_batch();
        self.refused("next_micro_batch after the last one", answer);
        let answer = self.open.step_count(self.ids[0]);
        self.refused("step_count in a pass", answer);
        for param in 0..self.ids.len() {
            if self.hands_over(param) {
                let answer = self.open.grad_ready(self.ids[param]);
                self.refused("second hand-over", answer);
                let values = vec![0.5f32; self.program.params[param].len];
                let answer = self.open.grads().write(self.ids[param], &values);
                self.refused("gradient that was handed over", answer);
                let of = self.config.precision(&self.program.params[param]).param;
                let answer = Rank::view(&self.open, of, self.ids[param]);
                self.refused("parameter that was handed over", answer);
            }
        }
    }
}
