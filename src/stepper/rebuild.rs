//! Rebuilds buckets in the order in which gradients arrive, and adds optimizers. Neither operation changes a bit of the
//! existing parameters, states and step counts.
//!
//! All ranks use rank 0's order. Rank 0 broadcasts this order in the memory of gradients, because every device and
//! every collective can send that memory. The stepper keeps its old buckets until the new buckets are complete.
//! PyTorch's reducer rebuilds its buckets once, before the second forward.

use std::cell::RefCell;
use std::sync::Arc;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::launch::{Assignment, BorrowedPieces, Settings};
use crate::layout::{Gradients, ParamId, Plan, SegmentAction};
use crate::op::{Access, CollectiveKind, Memory, Span};
use crate::optim::Optimizer;
use crate::schedule::Schedule;
use crate::stepper::state::borrowed::Borrowed;
use crate::stepper::state::optimizers::{OptimizerId, Optimizers, places};
use crate::stepper::state::run::Run;
use crate::stepper::stepper::Stepper;

impl<D: Device> Stepper<D> {
    /// Rebuilds the buckets in the order in which rank 0 handed over its gradients. Only hand-overs in the last
    /// micro-batch of the last pass count. Unused and frozen parameters come last, in reverse registration order. In
    /// later passes, each bucket is then complete as early as possible, even if the layout has another order. Returns
    /// whether the order has changed.
    ///
    /// All ranks make this call at the same point between passes, usually once, after the first pass. The call costs a
    /// collective, memory for both sets of buckets during the call, and a copy of every tensor through host memory. The
    /// call changes no parameter, gradient, state, step count, learning rate or status. Frozen parameters stay frozen.
    /// Training continues with the same bits as without the call. A [recording](crate::StepperBuilder::record) starts
    /// anew, because the checker checks a recording against one set of buckets. [Take](Self::take_recording) the old
    /// recording before this call. On a GPU, [`replay`](Self::replay) refuses passes that were captured before the
    /// call, and the trainer must request all addresses again.
    ///
    /// ```
    /// # use instep::{AdamW, Layout, Solo, Stepper};
    /// let layout = Layout::builder().param("head", 1000).param("body", 1000).build()?;
    /// let (head, body) = (layout.id("head")?, layout.id("body")?);
    /// let mut stepper = Stepper::builder(&layout, AdamW::default()).bucket_cap_bytes(4000).host(Solo::default())?;
    /// for step in 0..10 {
    ///     let mut pass = stepper.begin()?;
    ///     for id in [head, body] { // not the reverse of registration
    ///         pass.grads().get_mut(id)?.fill(1.0);
    ///         pass.grad_ready(id)?; // in the first pass the head's bucket waits for the body's
    ///     }
    ///     pass.finish()?;
    ///     if step == 0 {
    ///         assert!(stepper.rebuild_buckets()?);
    ///     }
    /// }
    /// assert_eq!(stepper.step_count(head)?, 10);
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// Waits for all steps, and for rank 0.
    ///
    /// # Errors
    /// `Unsupported` if the stepper is [sharded](crate::Strategy) or [offloaded](crate::StepperBuilder::offload), or if
    /// the caller sums the buckets or owns them (use [`rebind`](Self::rebind)). `Order` inside a pass. `Poisoned` after
    /// a failure. If the new buckets cannot be built, for example for lack of memory, the stepper keeps its old
    /// buckets. If only some ranks have new buckets, the next collective that [compares calls](Self::set_lr) returns
    /// `Mismatch`.
    pub fn rebuild_buckets(&mut self) -> Result<bool> {
        self.refuse_open_pass()?;
        self.refuse_rescued()?;
        if self.plan.is_foreign() || self.policy.sums_by_caller {
            let wrong = "the caller owns them, or their sums, so it alone can rebuild them";
            return Err(Error::unsupported("buckets", wrong, "rebuild them and call Stepper::rebind"));
        }
        self.refuse_sharded("buckets", "rebuild them")?;
        if self.plan.grads_len() == 0 {
            // The order is broadcast through the gradients' memory, which is empty in this plan.
            return Ok(false);
        }
        let mut order = self.run.get_mut().schedule.arrival_order();
        self.adopt_rank_0s(&mut order)?;
        let plan = self.plan.reordered(&self.layout, &order)?;
        if plan == *self.plan {
            return Ok(false);
        }
        self.move_to(plan, self.optimizers.clone(), None)?;
        Ok(true)
    }

    /// Adds an optimizer to parameters. The new optimizer runs after the optimizers that the parameters already have.
    /// If a parameter had no optimizer, it is stepped from now on. All ranks make this call at the same point between
    /// passes. The call costs as much as [`rebuild_buckets`](Self::rebuild_buckets), changes as little, and has the
    /// same effect on recordings, captured passes and addresses. The new optimizer's states start as zeros, and its
    /// [`step_count`](Self::step_count) starts at 0.
    ///
    /// ```
    /// # use instep::{Layout, Sgd, Solo, Stepper};
    /// # let layout = Layout::builder().param("w", 1).build()?;
    /// # let w = layout.id("w")?;
    /// let mut stepper = Stepper::builder_without_optimizer(&layout).host(Solo::default())?;
    /// let id = stepper.add_optimizer_for(&[w], Sgd { lr: 1.0, ..Sgd::default() })?;
    /// assert_eq!(stepper.optimizers_of(w)?, [id]);
    /// let mut pass = stepper.begin()?;
    /// pass.grads().write(w, &[2.0])?;
    /// pass.finish()?;
    /// assert_eq!(stepper.view::<f32>(w)?, [-2.0]);
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// `Unsupported` if the stepper is [sharded](crate::Strategy) or [offloaded](crate::StepperBuilder::offload), or if
    /// an optimizer of your own cannot reach the tensors, or cannot step their element types. `Config` for
    /// hyperparameters out of range, for a parameter that is named twice, or for a parameter with the action
    /// [`Leave`](SegmentAction::Leave). `Config` if the optimizer carries a product of momenta
    /// ([`NAdam`](crate::NAdam)), and a parameter that had no optimizer has a step count above 0. `Layout` if an id is
    /// of another layout. `Order` inside a pass. `Poisoned` after a failure. After each of these errors, the stepper is
    /// unchanged.
    pub fn add_optimizer_for(
        &mut self,
        params: &[ParamId],
        optimizer: impl Optimizer + 'static,
    ) -> Result<OptimizerId> {
        let params = places(&self.layout, params)?;
        self.add_late(params, None, &optimizer)
    }

    /// Adds an optimizer for single parameters, or for a group.
    pub(super) fn add_late(
        &mut self,
        params: Vec<usize>,
        group: Option<Arc<str>>,
        optimizer: &dyn Optimizer,
    ) -> Result<OptimizerId> {
        self.refuse_open_pass()?;
        self.refuse_rescued()?;
        self.refuse_sharded("optimizer", "add one")?;
        let left = params.iter().find(|param| self.plan.segment_of(**param).action == SegmentAction::Leave);
        if let Some(param) = left {
            let name = &self.layout.parameters()[*param].name;
            let wrong = format_args!("no optimizer may step `{name}`");
            return Err(Error::config("action", "Leave", wrong, "use SegmentAction::Step"));
        }
        let (optimizers, id) = self.optimizers.with(&params, group, optimizer.as_rule().boxed())?;
        let mut plan = (*self.plan).clone();
        plan.change_actions([SegmentAction::Average, SegmentAction::Step], |param| {
            optimizers.rounds(param) > 0
        });
        self.settle_between_passes()?;
        self.run.get_mut().touch(Schedule::touch_control)?;
        for param in params {
            // A step count that was set while the parameter had no optimizer would become the new optimizer's count.
            let is_first = self.optimizers.rounds(param) == 0 && optimizers.carried(param, 0).is_some();
            if is_first && self.read_progress(param, 0)?.count != 0 {
                let name = &self.layout.parameters()[param].name;
                let wrong = "has a step count, but no product of momenta, which this optimizer carries";
                return Err(Error::config("params", name, wrong, "set its step count to 0 first"));
            }
        }
        let borrowed = if plan.is_foreign() { Some(self.pieces_for(&Borrowed::new(), &plan)?) } else { None };
        self.move_to(plan, optimizers, borrowed)?;
        Ok(id)
    }

    /// Copies all tensors that the stepper owns to a new device. The caller has already waited for all ops.
    pub(super) fn move_to(
        &mut self,
        plan: Plan,
        optimizers: Optimizers,
        borrowed: Option<BorrowedPieces>,
    ) -> Result<()> {
        optimizers.refuse_storage(&plan)?;
        let (agreement, plan) = (self.agreement.with_plan(&plan), Arc::new(plan));
        let assignment = Arc::new(optimizers.assignment(&self.layout, &plan, self.assignment.constants)?);
        assignment.refuse_unreached(self.run.get_mut().device.place())?;
        let mut device = self.rebuilt_device(&plan, &assignment, borrowed, agreement.words())?;
        self.copy_tensors(&plan, &assignment, &mut device)?;
        if let Err(error) = self.comms.world.prepare(&plan) {
            // The communicator must serve the old plan again.
            self.comms.world.prepare(&self.plan)?;
            return Err(error);
        }
        let mut schedule = Schedule::new(&self.layout, Arc::clone(&plan), self.policy);
        if D::TRAINER_IS_A_STREAM {
            schedule.share_launches(assignment.shares_with_next(&plan));
        }
        let run = self.run.get_mut();
        schedule.set_pass(run.schedule.pass());
        schedule.set_late_unused(run.schedule.late_unused());
        let params = 0..self.layout.parameters().len();
        let frozen: Vec<usize> = params.filter(|param| run.schedule.is_frozen(*param)).collect();
        self.run = RefCell::new(Run::new(schedule, device, run.is_recording()));
        (self.plan, self.agreement) = (plan, agreement);
        self.settings = Settings::new(&self.plan, &assignment);
        (self.optimizers, self.assignment) = (optimizers, assignment);
        for param in frozen {
            self.run.get_mut().touch(|schedule| schedule.touch_frozen(param, true))?;
            self.write_frozen(param, true);
        }
        self.run.get_mut().touch(Schedule::touch_settings)?;
        self.write_lr_multipliers(0..self.layout.parameters().len());
        Ok(())
    }

    /// Broadcasts rank 0's numbers through the start of the gradients' memory, and restores the gradients.
    fn adopt_rank_0s(&mut self, numbers: &mut [u32]) -> Result<()> {
        let agreement = self.agreed_number();
        let room_bytes = Span::whole(Memory::Grads, &self.plan).bytes();
        // If most parameters are empty, there may be more numbers than fit. Several broadcasts then send the numbers.
        for numbers in numbers.chunks_mut(room_bytes as usize / size_of::<u32>()) {
            let span = Span { memory: Memory::Grads, start: 0, end: size_of_val(numbers) as u64 };
            let own: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
            let bytes = self.exchange(CollectiveKind::Broadcast, [span; 2], &own, agreement)?;
            for (number, bytes) in numbers.iter_mut().zip(bytes.as_chunks().0) {
                *number = u32::from_ne_bytes(*bytes);
            }
        }
        Ok(())
    }

    /// Waits for all ops, and records that the trainer touches a span and the counts.
    pub(super) fn touch_everything(&self, span: Span) -> Result<()> {
        let mut run = self.run.borrow_mut();
        run.touch(Schedule::touch_all)?;
        run.touch(Schedule::touch_control)?;
        run.note(Access { span, writes: true });
        Ok(())
    }

    /// Copies each of the stepper's own tensors and step counts to another device, at the offsets of `plan`.
    fn copy_tensors(&mut self, plan: &Plan, assignment: &Assignment, device: &mut D) -> Result<()> {
        let (ours, ours_assigned) = (Arc::clone(&self.plan), Arc::clone(&self.assignment));
        let mut bytes = Vec::new();
        for (index, segment) in ours.segments().iter().enumerate() {
            let there = plan.segment_index(segment.param as usize);
            let is_released = plan.gradients() == Gradients::Release && segment.action == SegmentAction::Step;
            // A new optimizer of another parameter may add states to any round, and states of later rounds then get
            // other numbers. States are therefore matched by their round and their index in the round.
            let states = self.optimizers.states(segment.param as usize).flat_map(|(_, round, k)| {
                let [from, to] = [&*ours_assigned, assignment].map(|a| (a.first_state(round) + k) as u8);
                let scales = (Memory::Scales(from), Memory::Scales(to));
                [(Memory::State(from), Memory::State(to)), scales]
            });
            // Borrowed tensors are not copied.
            let is_ours = |memory: &Memory| match memory {
                Memory::Params => !plan.is_foreign(),
                Memory::Grads => !plan.is_foreign() && !is_released,
                _ => true,
            };
            let single = Memory::of_tensors(plan, 0).filter(is_ours);
            let memories: Vec<_> = single.map(|memory| (memory, memory)).chain(states).collect();
            for (memory, new) in memories {
                let from = Span::segment(memory, &ours, segment);
                let to = Span::segment(new, plan, &plan.segments()[there]);
                self.copy_span(from, device, to, &mut bytes)?;
            }
            for round in 0..ours_assigned.rounds() {
                let (from, to) = (ours_assigned.record(round, index), assignment.record(round, there));
                self.copy_progress(from, device, to)?;
            }
        }
        Ok(())
    }
}

impl<D: Device> Stepper<D> {
    /// Sets the optimizer of a group that was built without one. The group's name then selects the optimizer in
    /// [`set_lr`](Self::set_lr), [`set_hyper`](Self::set_hyper) and [`set_lr_schedule`](Self::set_lr_schedule), as for
    /// an optimizer that was set on the builder. [`optimizers`](Self::optimizers) lists the optimizer under this name.
    /// The optimizer steps those parameters of the group that have the action [`Step`](SegmentAction::Step) and no
    /// optimizer yet. Parameters that [`optimize_only`](crate::StepperBuilder::optimize_only) left out are included.
    /// All ranks make this call at the same point between passes. The call costs as much as
    /// [`rebuild_buckets`](Self::rebuild_buckets).
    ///
    /// ```
    /// # use instep::{Layout, Sgd, Solo, Stepper};
    /// let layout = Layout::builder().param("body", 1).param("head", 1).in_group("head").build()?;
    /// let head = layout.id("head")?;
    /// let builder = Stepper::builder_without_optimizer(&layout).group("default", Sgd::default());
    /// let mut stepper = builder.host(Solo::default())?;
    /// stepper.add_group("head", Sgd::default())?;
    /// stepper.set_lr("head", 0.5)?;
    /// let mut pass = stepper.begin()?;
    /// pass.write(head.grad(), &[2.0])?;
    /// pass.finish()?;
    /// assert_eq!(stepper.view::<f32>(head)?, [-1.0]);
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// `Config` if the layout has no such group, if the group already has an optimizer, or if the new optimizer would
    /// step no parameter. Other errors as for [`add_optimizer_for`](Self::add_optimizer_for).
    pub fn add_group(&mut self, name: &str, optimizer: impl Optimizer + 'static) -> Result<OptimizerId> {
        self.refuse_open_pass()?;
        let group = self.layout.require_group("group", name)?;
        if self.optimizers.of_group(name) > 0 {
            let remedy = "change it with Stepper::set_hyper, or add one with Stepper::add_optimizer_for";
            return Err(Error::config("group", name, "has an optimizer already", remedy));
        }
        let parameters = self.layout.parameters().iter().enumerate();
        let of_group =
            parameters.filter(|(_, p)| p.group as usize == group && p.action == SegmentAction::Step);
        let free = of_group.map(|(param, _)| param).filter(|param| self.optimizers.rounds(*param) == 0);
        let params: Vec<usize> = free.collect();
        if params.is_empty() {
            let wrong = "each of its parameters has an optimizer, or is not to be stepped";
            return Err(Error::config("group", name, wrong, "use Stepper::add_optimizer_for"));
        }
        self.add_late(params, Some(Arc::from(name)), &optimizer)
    }
}
