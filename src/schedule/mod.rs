//! Decides when each bucket is reduced, measured and stepped: a pure state machine that maps trainer events to ops.
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
//! This module has no device, no clock and no unsafe code. The checker proves that the list of ops has no race. The
//! schedule specifies in which order ops must run, and only the emitter adds the `Wait` ops that this order needs.

mod bucket;
mod emitter;
mod gather;
mod micro_batches;
mod offload;
mod readiness;
mod sharing;
mod touch;
mod unused;

use emitter::{Emitter, Mark};
use readiness::Readiness;

use std::num::NonZeroU32;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::layout::{Layout, Plan};
use crate::op::{Action, Op, Phase, Span, Stream, Ticket, most_ops_per_pass};

/// When steps run, relative to the sums of gradients over ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// All steps run after the last reduce. This mode is the reference for the other two modes.
    Sequential,
    /// Each bucket's step runs right after its own reduce, during the rest of backward.
    #[default]
    Eager,
    /// Each bucket's norm runs after its reduce. One decision follows the last norm, and all steps run during the next
    /// forward. Clipping and skipping are exact, and steps overlap with forward.
    Normed,
}

/// Which decisions a pass makes from gradient norms. A decision applies to the steps of this pass, to the next pass, or
/// to both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Decision {
    /// There is no decision, and no norm is computed.
    #[default]
    None,
    /// One decision for each bucket. The decision depends on the bucket's own norm.
    EachBucket,
    /// One decision for the pass. The decision depends on the norm of all gradients, or on whether all gradients are
    /// finite.
    WholePass,
    /// One decision for the pass. The decision also computes the loss scale of the next pass, which the trainer reads.
    WholePassAndLossScale,
}

/// The schedule's options that are not in the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// When steps run.
    pub mode: Mode,
    decision: Decision,
    /// Whether the trainer is a stream. A stream may access a tensor until the hand-over. The hand-over may come long
    /// after the call that returned the tensor's address.
    pub trainer_is_a_stream: bool,
    /// Whether collectives must run in the order of the buckets.
    pub keeps_order: bool,
    /// Whether the caller sums the gradients. In this case, there are no collectives, and no op may write a gradient
    /// before the step or, with offload, before the download.
    pub sums_by_caller: bool,
}

impl Policy {
    /// Returns the default options of a mode. In `Normed` mode, a pass always has a decision. In every mode, buckets
    /// launch in index order.
    pub fn new(mode: Mode, decision: Decision) -> Self {
        let decision = match (mode, decision) {
            (Mode::Normed, Decision::None) => Decision::WholePass,
            (_, decision) => decision,
        };
        Policy { mode, decision, trainer_is_a_stream: false, keeps_order: true, sums_by_caller: false }
    }

    fn measures(&self) -> bool {
        self.decision != Decision::None
    }
}

/// The parameters that all ranks receive from rank 0 when a pass opens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Broadcast<'a> {
    /// No parameters.
    #[default]
    Nothing,
    /// The parameters of these buckets, in ascending order. None of the buckets is local.
    Buckets(&'a [u32]),
    /// All parameters.
    All,
}

/// The options with which a pass opens.
#[derive(Clone, Copy, Debug)]
pub struct Opening<'a> {
    /// The parameters that rank 0 broadcasts at the start of the pass.
    pub broadcast: Broadcast<'a>,
    /// Number of times that the trainer runs forward and backward.
    pub micro_batches: NonZeroU32,
    /// Whether this rank has no data. Such a rank takes part in all collectives with zeros.
    pub joined: bool,
    /// The agreement's number, which must be equal on all ranks. Every collective of the pass carries this number,
    /// combined with the schedule's own contribution.
    pub agreement: u64,
}

impl Default for Opening<'_> {
    fn default() -> Self {
        Opening { broadcast: Broadcast::Nothing, micro_batches: NonZeroU32::MIN, joined: false, agreement: 0 }
    }
}

/// A position that precedes all ops.
const NEVER: Ticket = Ticket { stream: Stream::Compute, tick: 0 };

/// The last accesses to one bucket. A `touched` ticket is the position of the first `Record` op on the compute stream
/// after the trainer's access.
#[derive(Clone, Debug, Default)]
struct LastAccess {
    touched: Ticket,
    /// The trainer's last access to frozen parameters. Only an all-gather must wait for this access.
    frozen_touched: Ticket,
    /// The last step, or the upload or all-gather after the step. The trainer must wait for this op.
    stepped: Option<Mark>,
    /// The sum of an earlier micro-batch. The trainer must wait for this sum before it writes the next gradient.
    summed: Option<Mark>,
    /// The last step itself, even if an all-gather follows. The next reduce must wait for this step.
    consumed: Option<Mark>,
    /// With offload, the last download. The next reduce must wait for this download.
    downloaded: Option<Mark>,
    /// With offload, the last release of parameters on the device. The next upload must wait for this release.
    released: Option<Mark>,
    is_unsharded: bool,
}

/// The scheduler of one rank. The methods append ops to a list, and [`drain`](Schedule::drain) removes and returns the
/// listed ops.
#[derive(Debug)]
pub struct Schedule {
    plan: Arc<Plan>,
    policy: Policy,
    emitter: Emitter,
    readiness: Readiness,
    pass: u64,
    open: bool,
    abandoned: bool,
    /// The options of the open pass. These options do not include the broadcast, because its ops have already been
    /// appended.
    opening: Opening<'static>,
    /// The number of micro-batches that follow the current one in the open pass.
    micro_batches_left: u32,
    /// The end of the pass's `Begin`. After this mark, the trainer may change the settings. If there are tail blocks,
    /// each reduce of the last micro-batch must wait for `Begin`, because `Begin` resets the counts that the reduce
    /// sums. With offload, the downloads wait instead.
    begun: Option<Mark>,
    /// The last reduce. If there are tail blocks, the next `Begin` must wait for this reduce.
    reduced: Option<Mark>,
    tails: bool,
    accesses: Vec<LastAccess>,
    /// The all-gather of each bucket's last unshard, or with offload the last upload of each bucket. The bucket's next
    /// step must wait for this op. A launch of several buckets waits for all marks in a slice of this list.
    gathered: Vec<Option<Mark>>,
    /// The trainer's position at the last call of `touch_all`.
    all_touched: Ticket,
    /// The trainer's last access to control memory, settings or counts. The next `Begin` must wait for this access.
    inputs_touched: Ticket,
    /// The `stepped` mark of the last step of any bucket, or the end of a later `synchronize`.
    last: Option<Mark>,
    /// The last op on control memory, if the pass is closed: the pass's `Publish`, or the last op of an abandoned pass.
    settled: Option<Mark>,
    /// The last `Decide`, if the trainer may read the loss scale that this op computes.
    decided: Option<Mark>,
    /// Ticket of the trainer's last read of the loss scale. The next `Decide` writes the loss scale, so it must wait
    /// for this read.
    loss_scale_touched: Ticket,
    /// For each bucket, the ranges of control memory that contain norms of parameters. Each rank computes the norms of
    /// its own parts of parameters. During the bucket's step, the ranks add these norms up.
    shared_norms: Vec<Vec<Span>>,
    /// Whether each bucket's step may share a launch with the next bucket's step.
    shares_with_next: Vec<bool>,
    /// A hash of all parameters that were declared unused after their hand-over.
    late_unused: u64,
}

impl Schedule {
    /// Builds a schedule before its first pass.
    pub fn new(layout: &Layout, plan: Arc<Plan>, policy: Policy) -> Self {
        let count = plan.buckets().len();
        Schedule {
            readiness: Readiness::new(layout, &plan, policy.keeps_order),
            accesses: vec![LastAccess::default(); count],
            gathered: vec![None; count],
            all_touched: NEVER,
            inputs_touched: NEVER,
            tails: plan.buckets().iter().any(|bucket| !bucket.tail.is_empty()),
            reduced: None,
            emitter: Emitter::with_room(most_ops_per_pass(&plan)),
            pass: 0,
            open: false,
            abandoned: false,
            opening: Opening::default(),
            micro_batches_left: 0,
            begun: None,
            last: None,
            settled: None,
            decided: None,
            loss_scale_touched: NEVER,
            shared_norms: vec![Vec::new(); count],
            shares_with_next: vec![false; count],
            late_unused: 0,
            plan,
            policy,
        }
    }

    /// Sets which numbers in control memory are added up over ranks during each bucket's step. There is one span of
    /// numbers for each `Measure` op. Each rank writes the norms of its own parts of parameters to these spans. Rules
    /// such as LAMB scale the update by the sums over ranks.
    pub fn share_norms_of_parameters(&mut self, spans: Vec<Vec<Span>>) {
        self.shared_norms = spans;
    }

    /// Removes and returns the ops that were appended since the last drain, in submission order.
    pub fn drain(&mut self) -> impl Iterator<Item = Op> + '_ {
        self.emitter.drain()
    }

    /// Returns the number of passes begun so far.
    pub fn pass(&self) -> u64 {
        self.pass
    }

    /// Sets the number of passes begun so far. Call this method after a rebuild, after a capture, which runs no pass,
    /// and after replayed passes.
    pub fn set_pass(&mut self, pass: u64) {
        self.pass = pass;
    }

    /// Returns the hash of all parameters that were declared unused after their hand-over. Ranks compare this hash in
    /// later passes.
    pub(crate) fn late_unused(&self) -> u64 {
        self.late_unused
    }

    /// Restores the hash that `late_unused` returned before a rebuild or a capture.
    pub(crate) fn set_late_unused(&mut self, late_unused: u64) {
        self.late_unused = late_unused;
    }

    /// Returns whether a pass is open.
    pub fn is_open(&self) -> bool {
        self.open
    }

    pub(crate) fn is_offloaded(&self) -> bool {
        self.plan.is_offloaded()
    }

    /// Returns whether the last pass was abandoned.
    pub fn was_abandoned(&self) -> bool {
        self.abandoned
    }

    /// Returns the agreement's number for a pass with these opening options. Ranks compare this number.
    pub(crate) fn agreement_of(&self, opening: &Opening<'_>) -> u64 {
        let of_pass =
            unused::share(self.late_unused) ^ micro_batches::share(&self.plan, opening.micro_batches);
        opening.agreement ^ of_pass
    }

    /// Opens a pass.
    ///
    /// # Errors
    /// `Order` if a pass is open.
    pub fn begin(&mut self, opening: Opening<'_>) -> Result<()> {
        self.require_closed()?;
        (self.open, self.abandoned) = (true, false);
        let agreement = self.agreement_of(&opening);
        let Opening { broadcast, micro_batches, joined, .. } = opening;
        self.opening = Opening { broadcast: Broadcast::Nothing, micro_batches, joined, agreement };
        self.micro_batches_left = opening.micro_batches.get() - 1;
        self.pass += 1;
        self.readiness.reset();
        let touched = !self.emitter.is_after(Stream::Optim, self.inputs_touched);
        let touched = touched.then(|| self.emitter.record(Stream::Compute));
        // Begin already comes after the last reduce, unless the last pass was abandoned between a reduce and its step.
        self.emitter.after(Stream::Optim, &[touched, self.reduced.filter(|_| self.tails)]);
        self.begun = Some(self.emitter.emit_marked(Stream::Optim, Action::Control(Phase::Begin)));
        self.settled = None;
        match broadcast {
            Broadcast::Nothing => return Ok(()),
            Broadcast::Buckets(buckets) => buckets.iter().for_each(|bucket| self.touch_bucket(*bucket)),
            Broadcast::All => self.touch_all(),
        }
        let written = self.emitter.record(Stream::Compute);
        self.emitter.after(Stream::Reduce, &[Some(written)]);
        let received = match broadcast {
            Broadcast::Buckets(buckets) => self.broadcast_buckets(buckets),
            _ => self.broadcast_all(),
        };
        let received = self.download_params(broadcast, received);
        self.emitter.after(Stream::Compute, &[received]);
        Ok(())
    }

    /// Records that the trainer has finished one use of a parameter. After the last use, the parameter's gradient is
    /// complete. Launches buckets that become complete, if this is the last micro-batch or if each micro-batch is
    /// summed.
    ///
    /// # Errors
    /// `Order` if no pass is open, or if the parameter is frozen, was declared unused, or was handed over before. A
    /// refused call launches nothing.
    pub fn hand_over(&mut self, param: usize) -> Result<()> {
        self.require_open()?;
        self.readiness.hand_over(&self.plan, param)?;
        self.launch_complete(false);
        Ok(())
    }

    /// Calls [`hand_over`](Self::hand_over) for all remaining uses of a parameter.
    ///
    /// # Errors
    /// Errors as for [`hand_over`](Self::hand_over).
    pub fn complete(&mut self, param: usize) -> Result<()> {
        self.require_open()?;
        self.readiness.complete(&self.plan, param)?;
        self.launch_complete(false);
        Ok(())
    }

    fn launch_complete(&mut self, awaits: bool) {
        if self.micro_batches_left > 0 && !self.plan.sums_micro_batches() {
            return;
        }
        while let Some(bucket) = self.readiness.take_next(false) {
            self.launch(bucket, awaits);
        }
    }

    /// Hands over all uses of each parameter of a bucket. Skips parameters that take no part in the pass, or that were
    /// handed over before. If `awaits` is true, the caller's sum may be incomplete, and the step waits for this sum.
    ///
    /// # Errors
    /// Errors as for [`hand_over`](Self::hand_over), for any of the parameters.
    pub fn hand_over_bucket(&mut self, bucket: u32, awaits: bool) -> Result<()> {
        self.require_open()?;
        let plan = Arc::clone(&self.plan);
        for segment in plan.segments_of(&plan.buckets()[bucket as usize]) {
            let param = segment.param as usize;
            if self.takes_part(param) && !self.is_handed_over(param) {
                self.readiness.complete(&plan, param)?;
            }
        }
        self.readiness.release(bucket);
        self.launch_complete(awaits);
        Ok(())
    }

    /// Returns whether the parameter was handed over in this pass.
    pub fn is_handed_over(&self, param: usize) -> bool {
        self.open && self.readiness.is_handed_over(param)
    }

    /// Returns whether the parameter is frozen.
    pub fn is_frozen(&self, param: usize) -> bool {
        self.readiness.is_frozen(param)
    }

    pub(crate) fn refuse_handed_over(&self, param: usize) -> Result<()> {
        if self.open { self.readiness.refuse_handed_over(param) } else { Ok(()) }
    }

    pub(crate) fn refuse_frozen(&self, param: usize) -> Result<()> {
        self.readiness.refuse_frozen(param)
    }

    /// Returns all parameters in the order of the hand-overs in the last micro-batch of the last pass. Parameters that
    /// were not handed over follow in reverse registration order.
    pub fn arrival_order(&self) -> Vec<u32> {
        self.readiness.arrival_order()
    }

    /// Freezes or unfreezes a parameter for later passes. Call [`touch_frozen`](Self::touch_frozen) first.
    pub fn set_frozen(&mut self, param: usize, frozen: bool) {
        self.readiness.set_frozen(&self.plan, param, frozen);
    }

    /// Closes the pass. Launches the remaining buckets, with zeros for gradients that were not handed over. Then
    /// appends the steps that have not been appended yet.
    ///
    /// # Errors
    /// `Order` if no pass is open, or if further micro-batches follow the current one.
    pub fn finish(&mut self) -> Result<()> {
        self.require_last_micro_batch()?;
        while let Some(bucket) = self.readiness.take_next(true) {
            self.launch(bucket, false);
        }
        self.reshard_all();
        match self.policy.mode {
            Mode::Sequential | Mode::Normed => self.step_all(),
            // The decision runs after the steps, because only the next pass may clip by its result. The decision also
            // waits for the last reduce, because a frozen bucket that carries the count of ranks has no step after its
            // sum.
            Mode::Eager if self.policy.measures() => {
                self.emitter.after(Stream::Optim, &[self.reduced]);
                self.decide();
            }
            Mode::Eager => {}
        }
        self.share_nonfinite();
        self.settled = Some(self.emitter.emit_marked(Stream::Optim, Action::Control(Phase::Publish)));
        self.open = false;
        Ok(())
    }

    /// Abandons the pass: no further bucket is launched, and the trainer may access everything once the launched ops
    /// have ended. Returns the buckets that were stepped in this pass.
    ///
    /// # Errors
    /// `Order` if no pass is open.
    pub fn abandon(&mut self) -> Result<Vec<u32>> {
        self.require_open()?;
        let launched = self.readiness.launched().iter().copied();
        let is_stepped = |bucket: &u32| self.micro_batches_left == 0 && self.is_stepped(*bucket);
        let launched: Vec<u32> = launched.filter(is_stepped).collect();
        self.reshard_all();
        self.synchronize();
        (self.open, self.abandoned) = (false, true);
        Ok(if self.policy.mode == Mode::Eager { launched } else { Vec::new() })
    }

    pub(crate) fn require_closed(&self) -> Result<()> {
        if self.open {
            return Err(Error::order("pass", "one is open already", "finish or abandon it first"));
        }
        Ok(())
    }

    pub(crate) fn require_open(&self) -> Result<()> {
        if self.open { Ok(()) } else { Err(Error::order("pass", "none is open", "begin one first")) }
    }
}
