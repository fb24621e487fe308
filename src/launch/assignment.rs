//! Assigns to each segment the optimizers that step it, in the order of their steps. Groups the steps of a bucket into
//! few launches.
//!
//! Each parameter has a list of optimizers. Round k consists of the k-th optimizers of all lists. In a round, a bucket
//! needs one launch for each kernel. If all parameters have the same kind of optimizer, the bucket needs only one
//! launch, even if the hyperparameters differ. The states of a round are numbered after the states of earlier rounds.
//! This file has no addresses. This file refuses element types that an optimizer does not support, and tensors that the
//! device cannot reach.

use std::ops::Range;
use std::sync::Arc;

use crate::abi::{INSTEP_OPTIMIZER_CUSTOM, InstepHyper};
use crate::error::{Error, Result};
use crate::handle::{DevicePtr, Place};
use crate::launch::region::{Counts, Piece};
use crate::layout::{Gradients, Layout, Moments, Plan, Precision, SegmentAction, Storage};
use crate::op::{Memory, Part, Span};
use crate::optim::{Clip, LossScale, Optimizer, StepParam};

/// The parts of a step's arguments that are the same in every pass.
#[derive(Clone, Copy)]
pub(crate) struct StepConstants {
    /// The divisor of summed gradients. 0 stands for the number of ranks with data.
    pub(crate) divisor: f64,
    pub(crate) loss_scale: LossScale,
    /// The largest value of a dynamic loss scale.
    pub(crate) largest_loss_scale: f64,
    pub(crate) clip: Option<Clip>,
    pub(crate) skip_nonfinite: bool,
    /// Decay rate of the moving averages of parameters, if there are any.
    pub(crate) ema_decay: f64,
}

impl StepConstants {
    /// The constants of a step that does not scale, clip or check gradients.
    pub(crate) const PLAIN: StepConstants = StepConstants {
        divisor: 1.0,
        loss_scale: LossScale::Constant(1.0),
        largest_loss_scale: 0.0,
        clip: None,
        skip_nonfinite: false,
        ema_decay: 0.0,
    };

    /// Returns the loss scale for the arguments of `Begin`. If the result is 0, `Begin` reads the loss scale from the
    /// control block, or from the address of the caller's scaler.
    pub(crate) fn constant_loss_scale(&self) -> f64 {
        match self.loss_scale {
            LossScale::Constant(loss_scale) => loss_scale,
            LossScale::Dynamic(_) | LossScale::External(_) => 0.0,
        }
    }

    /// Returns two maximum norms. With the first one, `Begin` clips by the norm of the previous pass. With the second
    /// one, `Decide` clips by the norm of a pass or a bucket.
    pub(crate) fn max_norms(&self) -> [Option<f64>; 2] {
        match self.clip {
            Some(Clip::Previous(max_norm)) => [Some(max_norm), None],
            Some(Clip::Global(max_norm) | Clip::PerBucket(max_norm)) => [None, Some(max_norm)],
            None => [None, None],
        }
    }
}

/// One optimizer with its hyperparameters.
#[derive(Clone)]
struct Assigned {
    kernel: u32,
    is_scaled: bool,
    states: usize,
    hyper: InstepHyper,
    custom: Option<Arc<dyn StepParam>>,
}

/// The optimizers of each segment, their constants, and the resulting launches.
#[derive(Clone)]
pub struct Assignment {
    pub(crate) constants: StepConstants,
    optimizers: Vec<Assigned>,
    /// The optimizers of each segment, in order.
    lists: Vec<Vec<u32>>,
    /// The name of each segment's parameter, for custom optimizers.
    names: Vec<String>,
    rounds: Vec<Round>,
    state_count: usize,
}

/// The k-th optimizers of all lists.
#[derive(Clone, Debug, Default)]
struct Round {
    /// The number of states in all earlier rounds.
    first_state: usize,
    kernels: Vec<UsedKernel>,
}

/// A kernel in a round, and its number of states. If several optimizers of the round use the kernel, `states` is the
/// number for the optimizer with the most states.
#[derive(Clone, Copy, Debug)]
struct UsedKernel {
    kernel: u32,
    is_scaled: bool,
    states: usize,
}

/// One launch of a bucket's step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BucketLaunch {
    pub(crate) round: usize,
    pub(crate) kernel: u32,
    /// The parts of the step, with one kernel launch for each part. If norms scale the update, there are two parts: the
    /// first computes the norms, and the second applies the update.
    pub(crate) parts: &'static [Part],
    pub(crate) states: usize,
    pub(crate) first_state: usize,
    /// Whether this is the last launch that steps these segments. Some work happens only in a segment's last launch,
    /// such as zeroing its gradient. If a step has no such work, this field is `true` for every launch.
    pub(crate) is_last: bool,
    /// The segments that the launch steps or averages, in the plan's order.
    pub(crate) segments: Vec<u32>,
}

/// A point in a bucket's step at which ranks add up norms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NormStop {
    /// The number of kernel launches before this point. Each part of the step is one launch.
    pub(crate) launches: usize,
    /// The records at this point: ranks add up all norms in them. The range may include records of other launches,
    /// because the norms in those records are zeros or are no longer needed.
    pub(crate) records: Range<usize>,
}

/// Returns the launches of one stage of a step. Stage 0 starts at the beginning of the step, and every further stage
/// starts at a stop. The last stage extends to the end of the step.
pub(crate) fn part_of_step(stops: &[NormStop], stage: usize, launches: usize) -> Range<usize> {
    let at = |stop: Option<&NormStop>, otherwise| stop.map_or(otherwise, |stop| stop.launches);
    at(stage.checked_sub(1).map(|last| &stops[last]), 0)..at(stops.get(stage), launches)
}

impl Assignment {
    /// Makes the assignment. `optimizers` has at least one entry. `list` returns the optimizers of a parameter as
    /// indices into `optimizers`. The list is empty if no optimizer steps the parameter.
    pub(crate) fn new<'a>(
        layout: &Layout,
        plan: &Plan,
        constants: StepConstants,
        optimizers: impl IntoIterator<Item = (&'a dyn Optimizer, InstepHyper)>,
        list: impl Fn(usize) -> Vec<u32>,
    ) -> Assignment {
        let assigned = |(optimizer, hyper): (&dyn Optimizer, InstepHyper)| Assigned {
            kernel: optimizer.as_rule().kernel(),
            is_scaled: optimizer.as_rule().is_scaled(),
            states: optimizer.state_names().len(),
            hyper,
            custom: optimizer.as_rule().custom(),
        };
        let lists: Vec<Vec<u32>> = plan.segments().iter().map(|s| list(s.param as usize)).collect();
        let name = |param: u32| layout.parameters()[param as usize].name.clone();
        let mut assignment = Assignment {
            constants,
            names: plan.segments().iter().map(|segment| name(segment.param)).collect(),
            optimizers: optimizers.into_iter().map(assigned).collect(),
            rounds: vec![Round::default()],
            state_count: 0,
            lists,
        };
        assert!(!assignment.optimizers.is_empty(), "there is an optimizer");
        let rounds = assignment.lists.iter().map(Vec::len).max().unwrap_or(0);
        assignment.rounds.resize_with(rounds.max(1), Round::default);
        for (round, index) in assignment.lists.iter().flat_map(|list| list.iter().enumerate()) {
            let Assigned { kernel, is_scaled, states, .. } = assignment.optimizers[*index as usize];
            let kernels = &mut assignment.rounds[round].kernels;
            match kernels.iter_mut().find(|used| used.kernel == kernel) {
                Some(used) => used.states = states.max(used.states),
                None => kernels.push(UsedKernel { kernel, is_scaled, states }),
            }
        }
        for round in &mut assignment.rounds {
            round.first_state = assignment.state_count;
            assignment.state_count += round.kernels.iter().map(|used| used.states).max().unwrap_or(0);
        }
        assignment
    }

    /// Assigns one optimizer to all parameters.
    #[cfg(feature = "bench")]
    pub(crate) fn uniform(
        layout: &Layout,
        plan: &Plan,
        constants: StepConstants,
        optimizer: &dyn Optimizer,
    ) -> Result<Assignment> {
        let hyper = optimizer.as_rule().hyper()?;
        Ok(Assignment::new(layout, plan, constants, [(optimizer, hyper)], |_| vec![0]))
    }

    /// Returns the counts that determine the sizes of the device's control memory, settings and states.
    pub(crate) fn counts(&self, plan: &Plan) -> Counts {
        let clips_buckets = matches!(self.constants.clip, Some(Clip::PerBucket(_)));
        Counts {
            hypers: self.optimizers.len(),
            records: self.record_count(),
            norms: self.norm_count(),
            bucket_controls: if clips_buckets { plan.buckets().len() } else { 0 },
            set_controls: plan.max_norms().len(),
            states: self.state_count,
        }
    }

    /// Returns the length of the longest list, at least 1.
    pub(crate) fn rounds(&self) -> usize {
        self.rounds.len()
    }

    pub(crate) fn state_count(&self) -> usize {
        self.state_count
    }

    pub(crate) fn first_state(&self, round: usize) -> usize {
        self.rounds[round].first_state
    }

    /// Returns the number of records in control memory: one per round and segment, round by round.
    pub(crate) fn record_count(&self) -> usize {
        self.rounds() * self.lists.len()
    }

    /// Returns the number of records that have norms. If an optimizer scales its update by norms, all records have
    /// norms. Otherwise, no record has norms.
    pub(crate) fn norm_count(&self) -> usize {
        if self.optimizers.iter().any(|optimizer| optimizer.is_scaled) { self.record_count() } else { 0 }
    }

    pub(crate) fn record(&self, round: usize, segment: usize) -> usize {
        round * self.lists.len() + segment
    }

    /// Returns the index of a record's hyperparameters, and the record's kernel. If no optimizer steps the segment in
    /// this round, both numbers are arbitrary but valid.
    pub(crate) fn optimizer(&self, round: usize, segment: usize) -> (u32, u32) {
        let index = self.lists[segment].get(round).copied().unwrap_or(0);
        (index, self.optimizers[index as usize].kernel)
    }

    /// Returns the kernel to which a segment's state belongs, and the state's index among that kernel's states.
    pub(crate) fn kernel_of_state(&self, state: usize, segment: usize) -> (u32, usize) {
        let round = self.rounds.iter().rposition(|round| round.first_state <= state).unwrap_or(0);
        (self.optimizer(round, segment).1, state - self.rounds[round].first_state)
    }

    /// Returns a record's custom optimizer, the parameter's name, and the number of the optimizer's states. The number
    /// of states was read at construction, so this function calls no user code.
    pub(crate) fn custom(&self, round: usize, segment: usize) -> Option<(&Arc<dyn StepParam>, &str, usize)> {
        let optimizer = &self.optimizers[*self.lists[segment].get(round)? as usize];
        Some((optimizer.custom.as_ref()?, &self.names[segment], optimizer.states))
    }

    /// Returns the custom optimizers that are in the list of at least one segment.
    pub(crate) fn customs(&self) -> impl Iterator<Item = &Arc<dyn StepParam>> {
        let mut is_listed = vec![false; self.optimizers.len()];
        self.lists.iter().flatten().for_each(|k| is_listed[*k as usize] = true);
        let listed = self.optimizers.iter().zip(is_listed).filter(|(_, is_listed)| *is_listed);
        listed.filter_map(|(optimizer, _)| optimizer.custom.as_ref())
    }

    /// Refuses a custom optimizer that cannot reach parameters in this memory.
    pub(crate) fn refuse_unreached(&self, place: Place) -> Result<()> {
        match self.customs().find(|custom| !custom.reaches(place)) {
            None => Ok(()),
            Some(custom) => Err(Error::unsupported(
                format_args!("optimizer `{}`", custom.name()),
                format_args!("its StepParam::reaches excludes {place}"),
                "step on a device that it reaches, or implement it for this one",
            )),
        }
    }

    /// Returns the kernels that the plan's launches use. Each kernel has a flag: whether its states are 8-bit codes. No
    /// pair of a kernel and a flag occurs twice.
    pub(crate) fn kernels(&self, plan: &Plan) -> Vec<(u32, bool)> {
        let mut kernels: Vec<(u32, bool)> = Vec::new();
        for (k, bucket) in (0..).zip(plan.buckets()) {
            let has_codes = bucket.storage.precision.moments == Moments::EightBit;
            kernels.extend(self.launches(plan, k).iter().map(|launch| (launch.kernel, has_codes)));
        }
        kernels.sort_unstable();
        kernels.dedup();
        kernels
    }

    /// Returns the initial hyperparameters, in the settings' order.
    pub(crate) fn hypers(&self) -> impl ExactSizeIterator<Item = InstepHyper> + '_ {
        self.optimizers.iter().map(|optimizer| optimizer.hyper)
    }

    /// Returns the launches of a bucket's step, in order. A custom optimizer has a launch too: its kernel decides for
    /// each segment whether the user's code must step it.
    pub(crate) fn launches(&self, plan: &Plan, bucket: u32) -> Vec<BucketLaunch> {
        let segments = plan.buckets()[bucket as usize].segments.clone();
        let mut launches = Vec::<BucketLaunch>::new();
        // Some work is done once per step, in a parameter's last launch. This launch zeroes or averages the gradient,
        // and updates the copy and the moving average from the final value.
        let ends = matches!(plan.gradients_of_step(), Gradients::Zero | Gradients::Average);
        let has_last = ends || plan.copy().is_some() || plan.keeps_ema();
        for round in 0..self.rounds() {
            let earlier = launches.len();
            for segment in segments.clone() {
                let is_stepped = plan.segments()[segment as usize].action == SegmentAction::Step;
                let Some(index) = self.lists[segment as usize].get(round).filter(|_| is_stepped) else {
                    continue;
                };
                let kernel = self.optimizers[*index as usize].kernel;
                let is_last = !has_last || self.lists[segment as usize].len() == round + 1;
                let shared = |l: &&mut BucketLaunch| l.kernel == kernel && l.is_last == is_last;
                match launches[earlier..].iter_mut().find(shared) {
                    Some(launch) => launch.segments.push(segment),
                    None => launches.push(self.launch(round, kernel, is_last, segment)),
                }
            }
        }
        // A custom optimizer neither zeroes nor averages gradients, so a further launch does this.
        for at in (0..launches.len()).rev() {
            let BucketLaunch { round, kernel, is_last, .. } = launches[at];
            if ends && is_last && kernel == INSTEP_OPTIMIZER_CUSTOM {
                let segments = launches[at].segments.clone();
                let end = BucketLaunch { segments, ..self.launch_of_nothing(round, &[Part::End]) };
                launches.insert(at + 1, end);
            }
        }
        // Segments that are averaged or left join the first launch that is not for a custom optimizer.
        let averaged: Vec<u32> =
            segments.filter(|k| plan.segments()[*k as usize].action != SegmentAction::Step).collect();
        if !averaged.is_empty() {
            let at = launches.iter().position(|l| l.round == 0 && l.kernel != INSTEP_OPTIMIZER_CUSTOM);
            let at = at.unwrap_or_else(|| {
                launches.insert(0, self.launch_of_nothing(0, Part::all(false)));
                0
            });
            launches[at].segments.extend(averaged);
            launches[at].segments.sort_unstable();
        }
        launches
    }

    fn launch(&self, round: usize, kernel: u32, is_last: bool, segment: u32) -> BucketLaunch {
        let Round { first_state, kernels } = &self.rounds[round];
        let used = kernels.iter().find(|used| used.kernel == kernel).copied();
        let UsedKernel { is_scaled, states, .. } =
            used.unwrap_or(UsedKernel { kernel, is_scaled: false, states: 0 });
        let (first_state, parts) = (*first_state, Part::all(is_scaled));
        BucketLaunch { round, kernel, parts, states, first_state, is_last, segments: vec![segment] }
    }

    /// Returns the parts of a bucket's step. A step has two parts if norms scale the update.
    pub(crate) fn parts(&self, plan: &Plan, bucket: u32) -> &'static [Part] {
        Part::all(self.launches(plan, bucket).iter().any(|launch| launch.parts.contains(&Part::Apply)))
    }

    /// Returns the points at which a sharded bucket's step stops, so that the ranks can add up norms. A step stops
    /// after each launch that computes norms.
    pub(crate) fn stops(&self, plan: &Plan, bucket: u32) -> Vec<NormStop> {
        if !plan.is_sharded() || plan.buckets()[bucket as usize].is_local {
            return Vec::new();
        }
        let (mut stops, mut launches) = (Vec::new(), 0);
        for BucketLaunch { round, parts, segments, .. } in self.launches(plan, bucket) {
            let record = |segment: &u32| self.record(round, *segment as usize);
            if let (true, Some(first), Some(last)) =
                (parts.contains(&Part::Measure), segments.first(), segments.last())
            {
                stops.push(NormStop { launches: launches + 1, records: record(first)..record(last) + 1 });
            }
            launches += parts.len();
        }
        stops
    }

    /// Returns for each bucket whether its step can share a launch with the next bucket's step. Two buckets share a
    /// launch only if they have the same storage and the same clip set, their states are adjacent in memory, and their
    /// launches are equal except for the segments.
    pub(crate) fn shares_with_next(&self, plan: &Plan) -> Vec<bool> {
        // The caller's tensors are not adjacent in memory, and they may move.
        let is_one_piece = !plan.is_foreign() && !plan.is_offloaded();
        let launches: Vec<_> = (0..plan.buckets().len() as u32)
            .map(|bucket| {
                let launches = self.launches(plan, bucket).into_iter();
                launches.map(|launch| BucketLaunch { segments: Vec::new(), ..launch }).collect::<Vec<_>>()
            })
            .collect();
        let shares = |bucket: usize| {
            let [this, next] = [Some(&plan.buckets()[bucket]), plan.buckets().get(bucket + 1)];
            let (Some(this), Some(next)) = (this, next) else { return false };
            let goes_on = |memory: Memory| {
                matches!(memory, Memory::Params | Memory::Grads)
                    || Span::shard(memory, this).end == Span::shard(memory, next).start
            };
            (this.storage, this.is_local, this.clip_set) == (next.storage, next.is_local, next.clip_set)
                && this.len > 0
                && next.len > 0
                && launches[bucket] == launches[bucket + 1]
                && self.stops(plan, bucket as u32).is_empty()
                && Memory::of_bucket(this, self.state_count).all(goes_on)
        };
        (0..launches.len()).map(|bucket| is_one_piece && shares(bucket)).collect()
    }

    /// Returns a launch without segments, of an arbitrary kernel.
    fn launch_of_nothing(&self, round: usize, parts: &'static [Part]) -> BucketLaunch {
        let first_state = self.rounds[round].first_state;
        BucketLaunch { round, kernel: 0, parts, states: 0, first_state, is_last: true, segments: Vec::new() }
    }
}

/// The smallest eps that is allowed with 8-bit codes. A block of second moments becomes zero if its largest value is
/// below 2^-90 (`kernels/numeric/codes.h`). The square roots of such moments are below 2^-45, so eps must be at least
/// 2^-45.
const SMALLEST_EPS_OF_CODES: f64 = 1.0 / (1u64 << 45) as f64;
const TOO_SMALL_FOR_CODES: &str =
    "8-bit codes lose second moments below 2^-90, so eps must be at least 2^-45";

/// Refuses element types and options that this optimizer does not support.
pub(crate) fn refuse_storage(optimizer: &dyn Optimizer, storage: &Storage) -> Result<()> {
    let (rule, precision) = (optimizer.as_rule(), storage.precision);
    if let Some(custom) = rule.custom() {
        let thing = format_args!("optimizer `{}`", custom.name());
        if precision != Precision::F32 {
            let remedy = "use Precision::F32 or an optimizer of this crate";
            return Err(Error::unsupported(thing, "custom code steps only f32 tensors", remedy));
        }
        if let Some(what) = storage.copy.map(|_| "copies").or(storage.ema.then_some("moving averages")) {
            let wrong = format_args!("custom code writes no {what} of parameters");
            let remedy = "leave them out or use an optimizer of this crate";
            return Err(Error::unsupported(thing, wrong, remedy));
        }
    }
    let of_floats = rule.needs_f32_states().filter(|_| precision.moments != Moments::F32);
    let tiny = rule.eps().filter(|eps| *eps < SMALLEST_EPS_OF_CODES);
    let of_codes = rule.needs_floats().or(tiny.map(|_| TOO_SMALL_FOR_CODES));
    let of_codes = of_codes.filter(|_| precision.moments == Moments::EightBit);
    match of_floats.or(of_codes) {
        None => Ok(()),
        Some(wrong) => {
            let value = format!("{:?}", precision.moments);
            Err(Error::config("moments", value, wrong, "keep states in f32"))
        }
    }
}

/// Refuses tensors that do not begin and end in the memory that `place` names. `inspect` returns the memory in which an
/// address lies.
pub(crate) fn refuse_other_places<'a>(
    pieces: impl IntoIterator<Item = &'a Piece>,
    place: Place,
    inspect: impl Fn(DevicePtr) -> Result<Place>,
) -> Result<()> {
    for piece in pieces {
        let start = piece.base.get();
        for (verb, address) in [("lies", start), ("ends", start + piece.bytes - 1)] {
            let found = inspect(DevicePtr(address));
            if found != Ok(place) {
                let found = found
                    .map_or_else(|e| format!("no memory of any device ({e})"), |place| place.to_string());
                return Err(Error::layout(
                    format_args!("address {address:#x}"),
                    format_args!("a tensor {verb} there, in {found}"),
                    format_args!("lend tensors in {place}"),
                ));
            }
        }
    }
    Ok(())
}
