//! When each bucket is reduced, measured and stepped: a pure state machine from trainer events to ops.
//!
//! ```text
//! Eager     compute  backward 0 | backward 1 | backward 2 |             next forward
//!           reduce              | reduce 0   | reduce 1   | reduce 2   |
//!           optim                            | step 0     | step 1     | step 2
//!
//! Normed    optim                            | norm 0     | norm 1     | norm 2, decide, step 2, step 1, step 0
//!           compute                                                    next forward: bucket 2, bucket 1, bucket 0
//! ```
//!
//! No device, no clock, no unsafe: the list it writes is the trace and what the checker proves. Must never write a
//! Wait itself; it says what comes after what, and the emitter knows which of that is news.

mod emitter;
mod readiness;

use emitter::{Emitter, Mark};
use readiness::Readiness;

use std::num::NonZeroU32;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::layout::{Layout, Plan, Segment};
use crate::op::{Action, CollectiveKind, Memory, Op, Phase, Span, Stream, Ticket};

/// When steps run, relative to reduces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// All steps after the last reduce: the reference for the other two.
    Sequential,
    /// Each bucket's step right behind its own reduce, beside the rest of backward.
    #[default]
    Eager,
    /// Norms behind their reduces, then one decision, then all steps, beside the next forward: exact clipping and
    /// exact skipping, with overlap.
    Normed,
}

/// What the schedule must know beyond the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// See [`Mode`].
    pub mode: Mode,
    /// Whether the pass needs the global norm or its non-finite flag.
    pub norm: bool,
}

impl Policy {
    /// Completes a mode: Normed always has a norm.
    pub fn new(mode: Mode, norm_wanted: bool) -> Self {
        Policy { mode, norm: norm_wanted || mode == Mode::Normed }
    }
}

/// What a pass is opened with.
#[derive(Clone, Copy, Debug)]
pub struct Opening {
    /// All ranks first take rank 0's parameters.
    pub broadcast: bool,
    /// How often the trainer goes through forward and backward.
    pub micro_batches: NonZeroU32,
    /// This rank has no data: it takes part in everything and contributes nothing.
    pub joined: bool,
    /// What ranks must have in common, as one number that every collective of the pass carries.
    pub agreement: u64,
}

impl Default for Opening {
    fn default() -> Self {
        Opening { broadcast: false, micro_batches: NonZeroU32::MIN, joined: false, agreement: 0 }
    }
}

/// A position that everything is behind.
const NEVER: Ticket = Ticket { stream: Stream::Compute, tick: 0 };

/// The scheduler of one rank. Its methods append ops; [`drain`](Schedule::drain) takes them.
#[derive(Debug)]
pub struct Schedule {
    plan: Arc<Plan>,
    policy: Policy,
    emitter: Emitter,
    readiness: Readiness,
    pass: u64,
    open: bool,
    opening: Opening,
    /// Micro-batches of the open pass that are still to come after this one.
    micro_batches_left: u32,
    /// The end of Begin: the trainer may set what it has read, and with tails reduces must come after it, since it resets
    /// the blocks that they sum.
    begun: Option<Mark>,
    /// The last reduce, which with tails the next Begin must come after.
    reduced: Option<Mark>,
    tails: bool,
    /// Per bucket, the first Record of the compute stream behind the trainer's last touch.
    touched: Vec<Ticket>,
    /// The same for control memory, settings and counts, which the next Begin writes or reads.
    inputs_touched: Ticket,
    /// Per bucket, its last step: what the trainer and the next reduce must come after.
    stepped: Vec<Option<Mark>>,
    /// The last step of all.
    last: Option<Mark>,
    /// The last op on control memory, if the pass is closed: its last step, or what stands for it where none was.
    settled: Option<Mark>,
}

impl Schedule {
    /// A schedule that has not begun.
    pub fn new(layout: &Layout, plan: Arc<Plan>, policy: Policy) -> Self {
        Schedule {
            readiness: Readiness::new(layout, &plan),
            stepped: vec![None; plan.buckets().len()],
            touched: vec![NEVER; plan.buckets().len()],
            inputs_touched: NEVER,
            tails: plan.buckets().iter().any(|bucket| !bucket.tail.is_empty()),
            reduced: None,
            // Most that one pass writes: per bucket its waits, marks and work, per segment two zeros or a broadcast.
            emitter: Emitter::with_room(64 + 16 * plan.buckets().len() + 2 * plan.segments().len()),
            pass: 0,
            open: false,
            opening: Opening::default(),
            micro_batches_left: 0,
            begun: None,
            last: None,
            settled: None,
            plan,
            policy,
        }
    }

    /// The ops written since the last call, in submission order.
    pub fn drain(&mut self) -> impl Iterator<Item = Op> + '_ {
        self.emitter.drain()
    }

    /// Passes begun so far.
    pub fn pass(&self) -> u64 {
        self.pass
    }

    /// Whether a pass is open.
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Opens a pass.
    ///
    /// # Errors
    /// `Order` if a pass is open.
    pub fn begin(&mut self, opening: Opening) -> Result<()> {
        if self.open {
            return Err(Error::Order("a pass is open already".into()));
        }
        self.open = true;
        self.opening = opening;
        self.micro_batches_left = opening.micro_batches.get() - 1;
        self.pass += 1;
        self.readiness.reset();
        let touched = !self.emitter.is_after(Stream::Optim, self.inputs_touched);
        let touched = touched.then(|| self.emitter.record(Stream::Compute));
        // The reduce is known already, unless the last pass was given up between a reduce and its step.
        self.emitter.after(Stream::Optim, &[touched, self.reduced.filter(|_| self.tails)]);
        self.begun = Some(self.emitter.emit_marked(Stream::Optim, Action::Control(Phase::Begin)));
        self.settled = None;
        if opening.broadcast {
            self.touch_all();
            let written = self.emitter.record(Stream::Compute);
            self.emitter.after(Stream::Reduce, &[Some(written)]);
            let received = self.broadcast();
            self.emitter.after(Stream::Compute, &[received]);
        }
        Ok(())
    }

    /// Gives every parameter back to the trainer for the next micro-batch.
    ///
    /// # Errors
    /// `Order` if no pass is open or this was the last one.
    pub fn next_micro_batch(&mut self) -> Result<()> {
        self.require_open()?;
        if self.micro_batches_left == 0 {
            return Err(Error::Order("this is the last micro-batch of the pass".into()));
        }
        self.micro_batches_left -= 1;
        self.readiness.reset();
        Ok(())
    }

    /// The trainer has finished with one use of a parameter, and with its gradient at the last use. Launches what
    /// becomes complete, if this is the last micro-batch.
    ///
    /// # Errors
    /// `Order` if no pass is open or the parameter was handed over before; nothing is launched then.
    pub fn hand_over(&mut self, param: usize) -> Result<()> {
        self.require_open()?;
        self.readiness.hand_over(&self.plan, param)?;
        self.launch_complete();
        Ok(())
    }

    /// As [`hand_over`](Self::hand_over), for all uses that are left.
    ///
    /// # Errors
    /// As there.
    pub fn complete(&mut self, param: usize) -> Result<()> {
        self.require_open()?;
        self.readiness.complete(&self.plan, param)?;
        self.launch_complete();
        Ok(())
    }

    fn launch_complete(&mut self) {
        if self.micro_batches_left > 0 {
            return;
        }
        while let Some(bucket) = self.readiness.take_next(false) {
            self.launch(bucket);
        }
    }

    /// Whether the trainer may still touch the parameter in this pass.
    pub fn is_handed_over(&self, param: usize) -> bool {
        self.open && self.readiness.is_handed_over(param)
    }

    /// Whether the parameter is frozen.
    pub fn is_frozen(&self, param: usize) -> bool {
        self.readiness.is_frozen(param)
    }

    /// Takes a parameter out of the passes that come, or puts it back in, between passes. The trainer is about to say so
    /// in the settings.
    pub fn set_frozen(&mut self, param: usize, frozen: bool) {
        if frozen {
            // Steps of earlier passes may still be writing it, and later touches of a frozen parameter wait for nothing.
            let bucket = self.plan.segment_of(param).bucket;
            self.emitter.after(Stream::Compute, &[self.stepped[bucket as usize]]);
        }
        self.readiness.set_frozen(&self.plan, param, frozen);
        self.touch_settings();
    }

    /// The trainer is about to touch a parameter or its gradient. Every access must be announced: the ops of the bucket
    /// wait for exactly what was.
    pub fn touch(&mut self, param: usize) {
        let segment = self.plan.segment_of(param);
        // No op of a pass touches a frozen parameter, and Begin comes after whatever unfreezes it.
        if segment.len > 0 && !self.is_frozen(param) {
            self.touch_bucket(segment.bucket);
        }
    }

    /// The trainer is about to read the status, or to read or set step counts, between passes.
    pub fn touch_control(&mut self) {
        self.touch_inputs(self.settled);
    }

    /// The trainer is about to set hyperparameters or actions, between passes. The steps of the last pass may still run:
    /// they read what Begin has derived.
    pub fn touch_settings(&mut self) {
        self.touch_inputs(self.begun);
    }

    /// The trainer is about to read how many ranks contributed to the last pass.
    pub fn touch_contributors(&mut self) {
        self.touch_inputs(self.reduced);
    }

    /// What Begin reads or writes: the trainer comes after `mark`, and the next Begin after the trainer.
    fn touch_inputs(&mut self, mark: Option<Mark>) {
        self.emitter.after(Stream::Compute, &[mark]);
        self.inputs_touched = self.emitter.next_ticket(Stream::Compute);
    }

    /// The trainer is about to touch any parameter, gradient or state.
    pub fn touch_all(&mut self) {
        // First, since it implies the others: one wait instead of many.
        self.emitter.after(Stream::Compute, &[self.last]);
        for bucket in 0..self.stepped.len() as u32 {
            self.touch_bucket(bucket);
        }
    }

    fn touch_bucket(&mut self, bucket: u32) {
        self.touched[bucket as usize] = self.emitter.next_ticket(Stream::Compute);
        self.emitter.after(Stream::Compute, &[self.stepped[bucket as usize]]);
    }

    /// The trainer is about to wait for everything that was submitted.
    pub fn synchronize(&mut self) {
        // The trainer's touches so far first, so that no later reduce has to wait for a position behind these waits.
        let touched = self.emitter.record(Stream::Compute);
        self.emitter.after(Stream::Reduce, &[Some(touched)]);
        let marks = [self.emitter.record(Stream::Reduce), self.emitter.record(Stream::Optim)];
        self.emitter.after(Stream::Compute, &marks.map(Some));
        // Norms leave no mark of their own, so after an abandoned pass this one stands for them too.
        self.stepped.fill(Some(marks[1]));
        (self.last, self.settled) = (Some(marks[1]), Some(marks[1]));
    }

    /// Closes the pass: launches what is left, with zeros for what was not handed over, and the steps.
    ///
    /// # Errors
    /// `Order` if no pass is open, or micro-batches are still to come.
    pub fn finish(&mut self) -> Result<()> {
        self.require_open()?;
        if self.micro_batches_left > 0 {
            return Err(Error::Order(format!("{} micro-batches are still to come", self.micro_batches_left)));
        }
        while let Some(bucket) = self.readiness.take_next(true) {
            self.launch(bucket);
        }
        if self.policy.mode != Mode::Eager {
            self.step_all();
        }
        if self.settled.is_none() {
            // No step has left a mark, but whoever reads the status must come after the decision.
            self.settled = Some(self.emitter.record(Stream::Optim));
        }
        self.open = false;
        Ok(())
    }

    /// Gives the pass up: nothing more is launched, and the trainer may touch everything once what is in flight has
    /// ended. Returns how many buckets keep a step of this pass.
    ///
    /// # Errors
    /// `Order` if no pass is open.
    pub fn abandon(&mut self) -> Result<u32> {
        self.require_open()?;
        let launched = self.readiness.launched();
        self.synchronize();
        self.open = false;
        Ok(if self.policy.mode == Mode::Eager { launched } else { 0 })
    }

    fn require_open(&self) -> Result<()> {
        if self.open { Ok(()) } else { Err(Error::Order("no pass is open".into())) }
    }

    /// The bucket's gradients are final on this rank: reduce them, and go as far as the mode allows.
    fn launch(&mut self, bucket: u32) {
        if self.is_left_out(bucket) {
            return;
        }
        let plan = Arc::clone(&self.plan);
        let described = &plan.buckets()[bucket as usize];
        let span = Span::bucket(&plan, described);
        if described.len > 0 {
            let touched = !self.emitter.is_after(Stream::Reduce, self.touched[bucket as usize]);
            let written = touched.then(|| self.emitter.record(Stream::Compute));
            let begun = self.begun.filter(|_| self.tails);
            self.emitter.after(Stream::Reduce, &[written, begun, self.stepped[bucket as usize]]);
        }
        if self.opening.joined && described.len > 0 {
            self.emitter.emit(Stream::Reduce, Action::Zero(span));
        } else {
            for segment in plan.segments_of(described) {
                if !self.readiness.is_handed_over(segment.param as usize) {
                    self.contribute_nothing(segment);
                }
            }
        }
        self.reduced = Some(self.collective(CollectiveKind::AllReduce, Some(bucket), span));
        if !self.is_stepped(bucket) {
            if described.len > 0 {
                // A frozen carrier: nothing comes behind this reduce that the trainer and the next one could wait for.
                self.stepped[bucket as usize] = self.reduced;
            }
            return;
        }
        match self.policy.mode {
            Mode::Sequential => {}
            Mode::Eager => {
                self.emitter.after(Stream::Optim, &[self.reduced]);
                self.step(bucket);
            }
            Mode::Normed => {
                self.emitter.after(Stream::Optim, &[self.reduced]);
                self.emitter.emit(Stream::Optim, Action::Norm { bucket });
            }
        }
    }

    /// Whether a pass steps the bucket: it has elements, and not all of them are frozen.
    fn is_stepped(&self, bucket: u32) -> bool {
        self.plan.buckets()[bucket as usize].len > 0 && !self.readiness.is_bucket_frozen(bucket)
    }

    fn step(&mut self, bucket: u32) {
        let mark = self.emitter.emit_marked(Stream::Optim, Action::Step { bucket });
        self.stepped[bucket as usize] = Some(mark);
        (self.last, self.settled) = (Some(mark), Some(mark));
    }

    /// Whether the pass goes without the bucket: all of it is frozen, on every rank, since they agree on that. The one
    /// that carries the count of contributing ranks is always reduced.
    fn is_left_out(&self, bucket: u32) -> bool {
        let described = &self.plan.buckets()[bucket as usize];
        let carries = described.contributors.is_some()
            && self.plan.carrier().is_some_and(|carrier| carrier.start == described.start);
        self.readiness.is_bucket_frozen(bucket) && !carries
    }

    /// Zeros for a parameter that was not handed over, in its gradient and in its tail.
    fn contribute_nothing(&mut self, segment: &Segment) {
        let gradient = Span::segment(Memory::Grads, &self.plan, segment);
        if gradient.bytes() > 0 {
            self.emitter.emit(Stream::Reduce, Action::Zero(gradient));
        }
        if let Some(tail) = segment.tail {
            let flag = Span::elements(Memory::Grads, &self.plan, tail, tail + 1);
            self.emitter.emit(Stream::Reduce, Action::Zero(flag));
        }
    }

    /// Everything behind the last reduce: norms if they are not done yet, the decision, the steps.
    fn step_all(&mut self) {
        let plan = Arc::clone(&self.plan);
        let buckets = 0..plan.buckets().len() as u32;
        self.emitter.after(Stream::Optim, &[self.reduced]);
        if self.policy.norm {
            if self.policy.mode == Mode::Sequential {
                for bucket in buckets.clone() {
                    if self.is_stepped(bucket) {
                        self.emitter.emit(Stream::Optim, Action::Norm { bucket });
                    }
                }
            }
            self.emitter.emit(Stream::Optim, Action::Control(Phase::Decide));
        }
        // The last bucket holds the first parameters, which the next forward needs first.
        for bucket in buckets.rev() {
            if self.is_stepped(bucket) {
                self.step(bucket);
            }
        }
    }

    /// Rank 0's parameters for all: at once, or one by one where they lie apart.
    fn broadcast(&mut self) -> Option<Mark> {
        let plan = Arc::clone(&self.plan);
        if !plan.is_foreign() {
            let whole = Span::elements(Memory::Params, &plan, 0, plan.arena_len());
            return Some(self.collective(CollectiveKind::Broadcast, None, whole));
        }
        let mut received = None;
        for segment in plan.segments().iter().filter(|segment| segment.len > 0) {
            let span = Span::segment(Memory::Params, &plan, segment);
            received = Some(self.collective(CollectiveKind::Broadcast, Some(segment.bucket), span));
        }
        received
    }

    fn collective(&mut self, kind: CollectiveKind, bucket: Option<u32>, span: Span) -> Mark {
        let (pass, agreement) = (self.pass, self.opening.agreement);
        let action = Action::Collective { kind, pass, agreement, bucket, src: span, dst: span };
        self.emitter.emit_marked(Stream::Reduce, action)
    }
}
