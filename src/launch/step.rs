//! The kernel launches of a bucket's norm or step. Arguments and tiles are the same for every executor.
//!
//! Launches are built once, and every pass reuses them. The addresses in a stepper's launches come from `Op::accesses`.
//! The race checker uses the same accesses, so it checks exactly the bytes that the launches touch. A `BucketStep` gets
//! new addresses for each step. No tile extends beyond its segment. If each row begins a new block of 8-bit states, no
//! tile extends beyond its row either. Tiles therefore have no padding.

use std::ptr;

use bytemuck::Zeroable;

use crate::abi::{
    INSTEP_DTYPE_BF16, INSTEP_DTYPE_F16, INSTEP_DTYPE_F32, INSTEP_GRADIENTS_AVERAGE, INSTEP_GRADIENTS_KEEP,
    INSTEP_GRADIENTS_ZERO, INSTEP_LONGEST_RUN, INSTEP_PART_WHOLE, INSTEP_TILE_ELEMENTS, InstepStepArgs,
    InstepTile,
};
use crate::dtype::DType;
use crate::launch::assignment::{Assignment, BucketLaunch};
use crate::launch::region::Regions;
use crate::layout::{Bucket, Gradients, Plan, Precision, Rounding, Storage};
use crate::op::{Action, Frozen, Memory, Op, Part, Span, Stream};

const _: () = assert!(DType::F32 as u32 == INSTEP_DTYPE_F32);
const _: () = assert!(DType::BF16 as u32 == INSTEP_DTYPE_BF16);
const _: () = assert!(DType::F16 as u32 == INSTEP_DTYPE_F16);

/// The kind of launches: norms or steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Norm,
    Step,
}

/// One launch for a bucket. The arguments do not have the tiles' address yet, because the executor allocates the tiles.
pub(crate) struct Launch {
    pub(crate) args: InstepStepArgs,
    pub(crate) tiles: Vec<InstepTile>,
    /// The number of bytes that the launch moves over the memory bus, not counting control memory. If a bucket has
    /// several kinds of optimizer, each launch gets a share of the bucket's bytes, in proportion to its elements.
    pub(crate) moved_bytes: u64,
}

impl Launch {
    /// Returns the launches of a bucket's norm or step, in order, with addresses in a stepper's memory.
    pub(crate) fn all(
        kind: Kind,
        bucket: u32,
        plan: &Plan,
        regions: &Regions,
        assignment: &Assignment,
    ) -> Vec<Launch> {
        let mut launches = Launch::each(kind, bucket, plan, regions, assignment);
        launches.iter_mut().for_each(|(launch, spans)| launch.bind(bucket, plan, regions, spans));
        launches.into_iter().map(|(launch, _)| launch).collect()
    }

    /// Returns the same launches as [`all`](Self::all), but without the addresses of tensors. A tile's `param` is then
    /// an offset in bytes from the bucket's first parameter. The tile's other offsets count elements.
    /// [`Bases::put`](super::Bases::put) sets the addresses later.
    pub(crate) fn unbound(
        kind: Kind,
        bucket: u32,
        plan: &Plan,
        regions: &Regions,
        assignment: &Assignment,
    ) -> Vec<Launch> {
        Launch::each(kind, bucket, plan, regions, assignment).into_iter().map(|(launch, _)| launch).collect()
    }

    fn each(
        kind: Kind,
        bucket: u32,
        plan: &Plan,
        regions: &Regions,
        assignment: &Assignment,
    ) -> Vec<(Launch, Vec<(Span, usize)>)> {
        let of_bucket = match kind {
            Kind::Norm => {
                let segments = plan.buckets()[bucket as usize].segments.clone().collect();
                vec![BucketLaunch {
                    round: 0,
                    kernel: 0,
                    parts: Part::all(false),
                    states: 0,
                    first_state: 0,
                    is_last: false,
                    segments,
                }]
            }
            Kind::Step => assignment.launches(plan, bucket),
        };
        let parts = of_bucket.iter().flat_map(|launch| launch.parts.iter().map(move |part| (launch, *part)));
        parts
            .map(|(launch, part)| Launch::new(kind, bucket, launch, part, plan, regions, assignment))
            .collect()
    }

    /// Makes a launch without addresses. Also returns the spans of the launch's tensors. Each span has a number: the
    /// state's index among the states of the launch, or 0 for other tensors.
    fn new(
        kind: Kind,
        bucket: u32,
        launch: &BucketLaunch,
        part: Part,
        plan: &Plan,
        regions: &Regions,
        assignment: &Assignment,
    ) -> (Launch, Vec<(Span, usize)>) {
        let action = match kind {
            Kind::Norm => Action::Norm { bucket },
            Kind::Step => Action::Step { bucket, count: 1 },
        };
        let described = &plan.buckets()[bucket as usize];
        let states = launch.first_state..launch.first_state + launch.states;
        let mut args = InstepStepArgs {
            // A bucket that is not summed over ranks takes no part in norms and clipping.
            control: if described.is_local { regions.control() } else { regions.control_of(plan, bucket) },
            records: regions.records(),
            optimizer: launch.kernel,
            state_count: launch.states as u32,
            bucket,
            gradients: gradients_code(plan.gradients_of_step(), launch.is_last),
            local: described.is_local.into(),
            norms: if matches!(part, Part::Measure | Part::Apply) {
                regions.norms()
            } else {
                ptr::null_mut()
            },
            part: part as u32,
            seed: seed(&described.storage, launch.round),
            ..stored_args(&described.storage, assignment.constants.ema_decay)
        };
        // The accesses assume that no segment is frozen. If a segment is frozen later, its action makes the kernels
        // skip it.
        let (mut spans, mut moved_bytes) = (Vec::new(), 0);
        let op = Op { stream: Stream::Optim, action };
        op.accesses(plan, assignment.state_count(), &Frozen::default(), &mut |access| {
            let is_ours = match access.span.memory {
                Memory::Control => false,
                Memory::State(k) | Memory::Scales(k) => states.contains(&usize::from(k)),
                // Only the launch of a parameter's last optimizer has the parameter's final value.
                Memory::Copy | Memory::Ema => launch.is_last,
                _ => true,
            };
            if is_ours {
                moved_bytes += access.moved_bytes(plan, &described.storage, part);
                let place = match access.span.memory {
                    Memory::State(k) | Memory::Scales(k) => usize::from(k) - states.start,
                    _ => 0,
                };
                spans.push((access.span, place));
            }
        });
        let record_in = |round, segment: u32| assignment.record(round, segment as usize) as u32;
        let records: [&dyn Fn(u32) -> u32; 2] =
            [&|segment| record_in(launch.round, segment), &|segment| record_in(0, segment)];
        let tiles = tiles(plan, described, &launch.segments, records, kind == Kind::Step);
        args.tile_count = tiles.len() as u64;
        // The spans cover the bucket. With several kinds of optimizer, a launch takes only its own segments.
        let len_of = |segment: u32| u128::from(plan.segments()[segment as usize].len);
        let (own, all): (u128, u128) =
            (launch.segments.iter().copied().map(len_of).sum(), described.segments.clone().map(len_of).sum());
        let moved_bytes = (u128::from(moved_bytes) * own / all.max(1)) as u64;
        (Launch { args, tiles, moved_bytes }, spans)
    }

    /// Makes the offsets of the tiles relative to the first of several buckets that share launches. The buckets can
    /// then share one table of tiles and one struct of arguments.
    pub(crate) fn count_from(&mut self, first: &InstepStepArgs, plan: &Plan) {
        let (ahead, buckets) = (self.args.bucket - first.bucket, plan.buckets());
        let between = &buckets[first.bucket as usize..self.args.bucket as usize];
        let [start, own] = [first.bucket, self.args.bucket].map(|k| Span::summed(&buckets[k as usize]).start);
        let grads = (own - start) / buckets[first.bucket as usize].storage.precision.grad.bytes();
        let states: u64 = between.iter().map(|bucket| bucket.shard.end - bucket.shard.start).sum();
        for tile in &mut self.tiles {
            tile.bucket = ahead;
            tile.grad_offset += grads;
            tile.state_offset += states;
        }
        // A bucket that is clipped by its own norm has its own control block, and shares no launch.
        self.args = InstepStepArgs { control: self.args.control, tile_count: self.args.tile_count, ..*first };
    }

    /// Sets the addresses of the arguments and tiles. The addresses come from `spans`, which the race checker checks
    /// too. Each tile gets the address of its own parameter, because parameters may be in separate memory.
    fn bind(&mut self, bucket: u32, plan: &Plan, regions: &Regions, spans: &[(Span, usize)]) {
        let described = &plan.buckets()[bucket as usize];
        let (first, mut params) = (Span::summed_in(Memory::Grads.of_step(plan), described).start, None);
        let args = &mut self.args;
        for (span, place) in spans {
            match span.memory {
                Memory::Grads | Memory::HostGrads if span.start == first => {
                    args.grads = regions.resolve(*span).cast()
                }
                Memory::Params | Memory::HostParams => params = Some(*span),
                Memory::Master => args.master = regions.resolve(*span).cast(),
                Memory::State(_) => args.states[*place] = regions.resolve(*span).cast(),
                Memory::Scales(_) => args.scales[*place] = regions.resolve(*span).cast(),
                Memory::Copy => args.copy = regions.resolve(*span).cast(),
                Memory::Ema => args.ema = regions.resolve(*span).cast(),
                _ => {}
            }
        }
        // The launch of a norm has no parameters, and never reads the parameter addresses of its tiles.
        let Some(claimed) = params else { return };
        bind_params(&mut self.tiles, plan, regions, |span| {
            let is_claimed = claimed.start <= span.start && span.end <= claimed.end;
            assert!(is_claimed || span.bytes() == 0, "a tile leaves its op's spans");
        });
    }
}

/// Replaces the addresses of the caller's tensors in the arguments and tiles of a bound launch. Returns whether a tile
/// has changed.
pub(crate) fn rebind(
    kind: Kind,
    args: &mut InstepStepArgs,
    tiles: &mut [InstepTile],
    plan: &Plan,
    regions: &Regions,
) -> bool {
    let grads = Span::summed(&plan.buckets()[args.bucket as usize]);
    if grads.bytes() > 0 {
        args.grads = regions.resolve(grads).cast();
    }
    kind == Kind::Step && bind_params(tiles, plan, regions, |_| ())
}

/// In each tile, replaces the offset or the earlier address by the current address of the tile's elements. Before the
/// tiles of a record change, calls `check` with the span of all their elements. Returns whether any tile has changed.
fn bind_params(tiles: &mut [InstepTile], plan: &Plan, regions: &Regions, check: impl Fn(&Span)) -> bool {
    let (segments, mut has_changed) = (plan.segments().len() as u32, false);
    for of_segment in tiles.chunk_by_mut(|a, b| a.record == b.record) {
        let segment = &plan.segments()[(of_segment[0].record % segments) as usize];
        let first = segment.start + (of_segment[0].element - segment.element);
        let elements: u64 = of_segment.iter().map(|tile| u64::from(tile.count)).sum();
        let memory = Memory::Params.of_step(plan);
        let span = Span::within(memory, plan.bucket_of(segment), first, first + elements);
        check(&span);
        let (base, first) = (regions.resolve(span).expose_provenance() as u64, of_segment[0].param);
        if base != first {
            has_changed = true;
            of_segment.iter_mut().for_each(|tile| tile.param = base + (tile.param - first));
        }
    }
    has_changed
}

/// Returns the kernels' constant (`INSTEP_GRADIENTS_*`) that selects what a launch does with stepped gradients. If
/// gradients are to be released, the launch does not change them. A later op releases them.
fn gradients_code(gradients: Gradients, is_last: bool) -> u32 {
    match gradients {
        Gradients::Zero if is_last => INSTEP_GRADIENTS_ZERO,
        Gradients::Average if is_last => INSTEP_GRADIENTS_AVERAGE,
        Gradients::Keep | Gradients::Zero | Gradients::Average | Gradients::Release => INSTEP_GRADIENTS_KEEP,
    }
}

/// Returns the arguments that depend only on the storage.
fn stored_args(storage: &Storage, ema_decay: f64) -> InstepStepArgs {
    let Precision { param, grad, master, moments, rounding } = storage.precision;
    let (ema_from_sample, ema_weight) = average_weight(ema_decay);
    InstepStepArgs {
        param_dtype: param as u32,
        grad_dtype: grad as u32,
        copy_dtype: storage.copy.unwrap_or(DType::F32) as u32,
        master_kind: master as u32,
        moments: moments as u32,
        stochastic: (rounding != Rounding::Nearest).into(),
        gradients: INSTEP_GRADIENTS_KEEP,
        ema_from_sample,
        ema_weight,
        part: INSTEP_PART_WHOLE,
        ..InstepStepArgs::zeroed()
    }
}

/// Returns the seed of stochastic rounding. It differs between rounds. With equal seeds, two rounds would get the same
/// random bits, because their updates have the same number.
fn seed(storage: &Storage, round: usize) -> u64 {
    match storage.precision.rounding {
        Rounding::Nearest => 0,
        Rounding::Stochastic { seed } => seed ^ (round as u64) << 48,
    }
}

/// Returns the same value as `average_weight` in math.h.
fn average_weight(beta: f64) -> (u32, f32) {
    let from_sample = 1.0 - beta >= 0.5;
    (from_sample.into(), if from_sample { -beta as f32 } else { (1.0 - beta) as f32 })
}

/// Divides segments of a bucket into tiles. `record` returns the index of a segment's record in the launch's round, and
/// `first_record` returns the index of the segment's record in the first round. All offsets count from the start of
/// this rank's part of the bucket. With `with_empty_tiles`, a segment that has no elements on this rank gets a tile
/// without elements.
pub(super) fn tiles(
    plan: &Plan,
    bucket: &Bucket,
    segments: &[u32],
    [record, first_record]: [&dyn Fn(u32) -> u32; 2],
    with_empty_tiles: bool,
) -> Vec<InstepTile> {
    // If the step writes averaged gradients, it writes them after each run of tiles. Each run is then one tile long, so
    // that the gradients are still in the GPU's cache.
    let longest = if plan.gradients() == Gradients::Average { 1 } else { INSTEP_LONGEST_RUN };
    let kept = |index: &u32| bucket.shard_of_segment(&plan.segments()[*index as usize]);
    let counts =
        segments.iter().map(kept).map(|kept| (kept.end - kept.start) / u64::from(INSTEP_TILE_ELEMENTS) + 1);
    let mut tiles = Vec::with_capacity(counts.sum::<u64>() as usize);
    for index in segments {
        let segment = &plan.segments()[*index as usize];
        let kept = bucket.shard_of_segment(segment);
        let tile = |at: u64, count: u64| InstepTile {
            param: (segment.start + at - bucket.params.start) * bucket.storage.precision.param.bytes(),
            // Both differences would be negative for a segment without a part on this rank.
            grad_offset: (segment.grad_start + at).saturating_sub(bucket.summed().start),
            state_offset: (segment.start + segment.state_at(at)).saturating_sub(bucket.shard.start),
            element: segment.element + at,
            count: count as u32,
            record: record(*index),
            first: (at == kept.start).into(),
            first_record: first_record(*index),
            run: run_of(segment.run_end(at, kept.end) - at, longest),
            bucket: 0,
            reserved: [0; 2],
        };
        let mut at = kept.start;
        while at < kept.end {
            let count = (segment.run_end(at, kept.end) - at).min(INSTEP_TILE_ELEMENTS.into());
            tiles.push(tile(at, count));
            at += count;
        }
        if with_empty_tiles && kept.is_empty() && segment.len > 0 {
            // All elements of the segment are on other ranks. A tile without elements makes this rank count the update
            // too.
            tiles.push(InstepTile { grad_offset: 0, state_offset: 0, ..tile(kept.start, 0) });
        }
    }
    tiles
}

/// Returns the number of full tiles in the next `elements` elements of a segment, but at least 1 and at most `longest`.
fn run_of(elements: u64, longest: u32) -> u32 {
    (elements / u64::from(INSTEP_TILE_ELEMENTS)).clamp(1, longest.into()) as u32
}

#[cfg(test)]
#[path = "../../tests/unit/launch/step.rs"]
mod tests;
