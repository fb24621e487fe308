//! Sharded tensors: the builder's options for them, gathers of full tensors, and refusals of options that need full
//! gradients or parameters.
//!
//! A gather uses the memory of gradients, and restores the gradients afterwards. Every refusal comes before the first
//! collective call.

use std::num::NonZeroU32;
use std::ops::Range;

use crate::collective::{Collective, CollectiveKind, refused_kind};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::launch::Assignment;
use crate::layout::{Layout, Master, ParamId, Plan, Segment, SegmentAction, fold};
use crate::op::{Memory, Span};
use crate::schedule::Decision;
use crate::stepper::builder::StepperBuilder;
use crate::stepper::state::options::{Accumulation, Strategy};
use crate::stepper::stepper::Stepper;
use crate::stepper::tensor::{Elements, TensorId};

impl StepperBuilder<'_> {
    /// Sets which tensors are sharded. By default, no tensor is sharded, and every rank steps all parameters.
    ///
    /// ```
    /// use instep::op::Memory;
    /// use instep::{Adam, Layout, Stepper, Strategy, in_process};
    ///
    /// let layout = Layout::builder().param("w", 4096).build()?;
    /// let w = layout.id("w")?;
    /// let ranks = in_process(4, |comm| {
    ///     let builder = Stepper::builder(&layout, Adam::default()).strategy(Strategy::Zero);
    ///     let mut stepper = builder.host(comm)?;
    ///     let mut pass = stepper.begin()?;
    ///     pass.grads().get_mut(w)?.fill(1.0);
    ///     pass.finish()?;
    ///     let mut moments = vec![0.0; 4096];
    ///     stepper.gather(w.state("exp_avg"), &mut moments)?; // on all ranks
    ///     let states = stepper.memory().into_iter().find(|(memory, _)| *memory == Memory::State(0));
    ///     Ok((stepper.view::<f32>(w)?.to_vec(), moments, stepper.plan().shard_of(0), states))
    /// })?;
    /// let (_, _, shard, states) = &ranks[1];
    /// assert_eq!((shard.clone(), states.unwrap().1), (1024..2048, 4 * 1024));
    /// assert!(ranks.iter().all(|rank| (&rank.0, &rank.1) == (&ranks[0].0, &ranks[0].1)));
    /// # Ok::<(), instep::Error>(())
    /// ```
    pub fn strategy(mut self, strategy: Strategy) -> Self {
        self.strategy = strategy;
        self
    }

    /// Sets the number of ranks in each group that shards tensors (hybrid sharding, HSDP). By default, all ranks form
    /// one group. With 8 ranks and a size of 4, ranks 0 to 3 form one group, and ranks 4 to 7 form another. Each group
    /// [shards](Self::strategy) tensors among its ranks. Ranks 0 and 4 are replicas: they have the same shards. After
    /// the reduce-scatter in each group, replicas all-reduce the gradients of their shards. Choose the size so that
    /// each group is on one machine, because links inside a machine are faster. The size must divide the number of
    /// ranks. If sums are exact, the size changes no bit of the training.
    ///
    /// ```
    /// use std::num::NonZeroU32;
    ///
    /// use instep::{Adam, Layout, Stepper, Strategy, in_process};
    ///
    /// let layout = Layout::builder().param("w", 4096).build()?;
    /// let w = layout.id("w")?;
    /// let ranks = in_process(4, |comm| {
    ///     let builder = Stepper::builder(&layout, Adam::default()).strategy(Strategy::Zero);
    ///     let mut stepper = builder.shard_size(NonZeroU32::new(2).expect("not 0")).host(comm)?;
    ///     let mut pass = stepper.begin()?;
    ///     pass.grads().get_mut(w)?.fill(1.0);
    ///     pass.finish()?;
    ///     Ok((stepper.plan().shard_of(0), stepper.view::<f32>(w)?.to_vec()))
    /// })?;
    /// assert_eq!((&ranks[1].0, &ranks[3].0), (&(2048..4096), &(2048..4096)));
    /// assert!(ranks.iter().all(|rank| rank.1 == ranks[0].1));
    /// # Ok::<(), instep::Error>(())
    /// ```
    pub fn shard_size(mut self, ranks: NonZeroU32) -> Self {
        self.shard_size = Some(ranks);
        self
    }

    /// Sets how gradients accumulate over a pass's micro-batches if tensors are sharded. The default is
    /// [`Accumulation::Local`].
    ///
    /// ```
    /// use instep::{Accumulation, Gradients, Layout, Sgd, Stepper, Strategy, in_process};
    ///
    /// let layout = Layout::builder().param("w", 4096).build()?;
    /// let w = layout.id("w")?;
    /// let ranks = in_process(2, |comm| {
    ///     let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Sgd::default() }).strategy(Strategy::Zero);
    ///     let builder = builder.accumulation(Accumulation::Summed).gradients(Gradients::Release);
    ///     let mut stepper = builder.host(comm)?;
    ///     let mut pass = stepper.begin_accumulating(2.try_into().unwrap())?;
    ///     pass.grads().write(w, &vec![1.0; 4096])?;
    ///     pass.grad_ready(w)?; // its sum over ranks is on its way, and its memory is given back after that
    ///     pass.next_micro_batch()?;
    ///     pass.grads().write(w, &vec![0.5; 4096])?;
    ///     pass.finish()?;
    ///     Ok(stepper.view::<f32>(w)?[0])
    /// })?;
    /// assert_eq!(ranks, [-1.5; 2]);
    /// # Ok::<(), instep::Error>(())
    /// ```
    pub fn accumulation(mut self, accumulation: Accumulation) -> Self {
        self.accumulation = accumulation;
        self
    }

    pub(super) fn sharded(&self, plan: Plan, rank: u32, world_size: u32) -> Result<Plan> {
        let shard_size = self.shard_size.map_or(world_size, NonZeroU32::get);
        if self.strategy == Strategy::Replicated {
            return Ok(plan);
        }
        let plan = plan.sharded_among(self.layout, rank, shard_size)?;
        let plan = if self.strategy == Strategy::Fsdp { plan.with_sharded_params() } else { plan };
        Ok(if self.accumulation == Accumulation::Summed { plan.with_summed_micro_batches() } else { plan })
    }

    /// Refuses a collective that cannot make every call that the strategy needs.
    pub(super) fn refuse_unknown_calls(&self, comm: &dyn Collective) -> Result<()> {
        if self.strategy == Strategy::Replicated {
            return Ok(());
        }
        let always = [CollectiveKind::ReduceScatter, CollectiveKind::AllGather, CollectiveKind::Min32];
        let decides = [CollectiveKind::Sum64, CollectiveKind::Max32];
        let needed = always.iter().chain(decides.iter().filter(|_| self.decision() != Decision::None));
        match { needed }.find(|kind| !comm.supports(**kind)) {
            Some(kind) => Err(refused_kind(*kind)),
            None => Ok(()),
        }
    }
}

/// Refuses options that need full gradients or parameters, if the plan is sharded. Also refuses a `comm` that cannot
/// make a needed call.
pub(super) fn refuse_full_work(
    layout: &Layout,
    plan: &Plan,
    assignment: &Assignment,
    comm: &dyn Collective,
) -> Result<()> {
    if !plan.is_sharded() {
        return Ok(());
    }
    let name = |segment: &Segment| format!("`{}`", layout.parameters()[segment.param as usize].name);
    let refuse = |thing: &str, wrong: &str, remedy: &str| {
        Err(Error::unsupported(format_args!("Strategy::Zero with {thing}"), wrong, remedy))
    };
    let averaged = |segment: &&Segment| {
        segment.action == SegmentAction::Average && !plan.bucket_of(segment).is_local && segment.len > 0
    };
    if let Some(segment) = plan.segments().iter().find(averaged) {
        let remedy = "give it an optimizer, or use Strategy::Replicated";
        return refuse(&name(segment), "no rank has all of an averaged gradient", remedy);
    }
    if let Some(custom) = assignment.customs().next() {
        let thing = format!("optimizer `{}`", custom.name());
        return refuse(&thing, "code of your own steps whole parameters", "use Strategy::Replicated");
    }
    if assignment.norm_count() > 0 && !comm.supports(CollectiveKind::Sum64) {
        return Err(refused_kind(CollectiveKind::Sum64));
    }
    Ok(())
}

impl<D: Device> Stepper<D> {
    /// Copies a full tensor to the host, as [`read`](Self::read) does. If the tensor is [sharded](Strategy), all ranks
    /// make this call together, for the same tensor. A gradient is copied as the sum over ranks.
    ///
    /// # Shapes
    /// `into` has as many elements as the parameter.
    ///
    /// # Ordering
    /// Waits for all steps and, if the tensor is sharded, for the other ranks.
    ///
    /// # Errors
    /// `Order` inside a pass. `Mismatch` or `Deadline` if a rank does not make the call. Other errors as for
    /// [`read`](Self::read).
    pub fn gather<'n>(&self, tensor: impl Into<TensorId<'n>>, into: &mut [f32]) -> Result<()> {
        let (id, memory) = self.find(tensor.into())?;
        self.check_len(id, into.len())?;
        self.refuse_open_pass()?;
        self.settle_between_passes()?;
        let whole = 0..self.layout.parameter(id)?.len;
        self.decode(id, memory, whole, into, |elements, bytes| self.gather_or_read(elements, bytes))
    }

    /// Copies a full tensor to `bytes`: from all ranks, or from only this rank if this rank has the full tensor.
    pub(super) fn gather_or_read(&self, whole: &Elements, bytes: &mut [u8]) -> Result<()> {
        // In a group of one, this rank has all of the tensor. No collective runs then, because it would overwrite
        // gradients while a slice of them may be alive.
        let is_sharded = self.is_sharded(whole.segment) && self.plan.shards().0 > 1;
        let memory = whole.memory;
        if is_sharded && (memory == Memory::Grads || memory.is_sharded_state() || self.plan.shards_params()) {
            self.gather_bytes(whole.memory, whole.segment, bytes)
        } else {
            self.read_elements(whole, bytes)
        }
    }

    pub(super) fn is_sharded(&self, segment: &Segment) -> bool {
        self.plan.is_sharded() && !self.plan.bucket_of(segment).is_local
    }

    /// Gathers a tensor from all ranks by several collectives. Each collective gathers one piece of every rank's shard.
    fn gather_bytes(&self, memory: Memory, segment: &Segment, into: &mut [u8]) -> Result<()> {
        self.refuse_rescued()?;
        let bucket = self.plan.bucket_of(segment);
        let (ranks, rank) = self.plan.shards();
        let part = |rank| bucket.part(segment, &bucket.shard_of(rank));
        let elements = |rank| Elements { memory, segment, range: part(rank) };
        let parts: Vec<Range<usize>> = (0..ranks).map(|rank| elements(rank).bytes(&self.plan)).collect();
        let own = parts[rank as usize].clone();
        if !own.is_empty() {
            self.read_elements(&elements(rank), &mut into[own.clone()])?;
        }
        let longest = parts.iter().map(|part| part.len()).max().unwrap_or(0);
        let piece = self.piece_bytes(longest);
        for at in (0..longest).step_by(piece.max(1)) {
            let of = |part: &Range<usize>| {
                (part.start + at).min(part.end)..(part.start + at + piece).min(part.end)
            };
            let all = self.exchange_pieces(piece, &into[of(&own)])?;
            for (part, got) in parts.iter().zip(all.chunks(piece)) {
                let to = &mut into[of(part)];
                to.copy_from_slice(&got[..to.len()]);
            }
        }
        Ok(())
    }

    /// Returns how many bytes each rank sends in one [exchange](Self::exchange_pieces), if each rank has at most
    /// `bytes` to send.
    pub(super) fn piece_bytes(&self, bytes: usize) -> usize {
        // Between passes no slice of a sharded gradient can exist, because `refuse_shard` refuses the slice. Local
        // gradients lie after the sharded gradients.
        let room = Span::elements(Memory::Grads, &self.plan, 0, self.plan.common_len()).bytes() as usize;
        let room = room / self.plan.shards().0 as usize;
        bytes.next_multiple_of(LINE).min(room - room % LINE)
    }

    /// Returns all ranks' pieces, each padded to `piece` bytes. The pieces are gathered at the start of the gradients'
    /// memory. The gradients are restored afterwards.
    pub(super) fn exchange_pieces(&self, piece: usize, own: &[u8]) -> Result<Vec<u8>> {
        let grads = |start: usize, len: usize| {
            let (start, end) = (start as u64, (start + len) as u64);
            Span { memory: Memory::Grads, start, end }
        };
        let (ranks, rank) = self.plan.shards();
        let spans = [grads(rank as usize * piece, piece), grads(0, ranks as usize * piece)];
        self.exchange(CollectiveKind::AllGather, spans, own, self.agreement.fixed())
    }

    /// Runs a collective on the memory of gradients, and then restores the gradients. `own` is first written to the
    /// start of `src`. Returns the bytes of `dst` after the collective.
    pub(super) fn exchange(
        &self,
        kind: CollectiveKind,
        [src, dst]: [Span; 2],
        own: &[u8],
        agreement: u64,
    ) -> Result<Vec<u8>> {
        let mut gradients = vec![0; dst.bytes() as usize];
        let mut received = gradients.clone();
        self.touch_everything(dst)?;
        self.read_span(dst, &mut gradients)?;
        self.write_span(Span { end: src.start + own.len() as u64, ..src }, own)?;
        self.run.borrow_mut().schedule.exchange(kind, [src, dst], agreement);
        self.touch_everything(dst)?;
        self.read_span(dst, &mut received)?;
        self.write_span(dst, &gradients)?;
        Ok(received)
    }

    /// Refuses a tensor if this rank has only a shard of it. For parameters and copies, `refuse_resharded` does this
    /// instead.
    pub(super) fn refuse_shard(&self, id: ParamId, memory: Memory) -> Result<()> {
        let segment = self.plan.segment_of(self.layout.index(id)?);
        let is_summed = memory == Memory::Grads && !self.run.borrow().schedule.is_open();
        // In a group of one, the shard is the full tensor.
        let is_sharded = self.is_sharded(segment) && self.plan.shards().0 > 1;
        if !is_sharded || !(memory.is_sharded_state() || is_summed) {
            return Ok(());
        }
        let Range { start: first, end } = self.plan.bucket_of(segment).shard_of_segment(segment);
        let name = &self.layout.parameters()[segment.param as usize].name;
        let of = match memory {
            Memory::Grads => "gradient of ",
            Memory::State(_) | Memory::Scales(_) => "state of ",
            Memory::Ema => "moving average of ",
            _ => "master of ",
        };
        Err(Error::Sharded { tensor: format!("{of}`{name}`"), first, end, len: segment.len })
    }

    /// Refuses a call that sharding or offload does not allow.
    pub(super) fn refuse_sharded(&self, thing: &str, verb: &str) -> Result<()> {
        let wrong = match (self.plan.is_sharded(), self.plan.is_offloaded()) {
            (false, false) => return Ok(()),
            (true, _) => "the states are sharded, by buckets that stay",
            (false, true) => "the host has the states, by buckets that stay",
        };
        let remedy = format_args!("{verb} in a stepper that is built anew, from a checkpoint");
        Err(Error::unsupported(thing, wrong, remedy))
    }

    /// Adds written values to the agreement if the parameter is sharded, or if its master is sharded or offloaded.
    /// Passes broadcast neither sharded parameters nor sharded or offloaded masters. Sharded values are not broadcast,
    /// because each rank has only a shard.
    pub(super) fn note_shared(&mut self, id: ParamId, memory: Memory, values: &[f32]) -> Result<()> {
        let segment = self.plan.segment_of(self.layout.index(id)?).clone();
        let has_master = self.plan.storage_of(&segment).precision.master != Master::None;
        let is_own = has_master || self.plan.shards_params();
        let is_common = self.plan.rewrites_params() && !self.plan.bucket_of(&segment).is_local;
        if memory == Memory::Params && is_own && is_common {
            let hash = values.iter().fold(0, |hash, value| fold(hash, &value.to_bits().to_le_bytes()));
            let param = segment.param as usize;
            self.loaded.note_param(param, hash);
            self.params_written.note_values(param, hash);
            self.agreement.forget();
        }
        Ok(())
    }
}

/// The size of a cache line in bytes. The length of a piece is a multiple of this size, so no element is split between
/// two pieces.
const LINE: usize = 64;
