//! The driver's calls follow from the ops: every wait, record, launch and fill, in order.
//!
//! The checker proves that the ops have no races. These tests translate each op by hand, so a device that omits a wait,
//! launches on another stream or uses another grid fails. They never ask the library for the expected calls.

use std::collections::{HashMap, HashSet};

use instep::abi::{INSTEP_GPU_THREADS, INSTEP_TILE_ELEMENTS};
use instep::cuda::Cuda;
use instep::cuda::driver::Shape;
use instep::hazard::Traced;
use instep::layout::Plan;
use instep::op::{Action, Op, Phase, Span, Stream, Ticket};
use instep::{
    Clip, DType, Error, EventHandle, Master, Mode, OffloadPolicy, Precision, Sgd, Solo, Stepper,
    StreamHandle, Sums, Unused,
};

use crate::support::stand_in::calls::Call;
use crate::support::stand_in::{COMPUTE, StandIn};
use crate::support::waits::{assert_each_is_missed, middle_passes};
use crate::support::{MODES, Options, Presummed, few_optimizers, layout, paint_params, painted, pass};

const LENGTHS: [usize; 5] = [70_000, 0, 300, 2049, 40_000];

/// Number of blocks that the stand-in runs at a time.
const RESIDENT: u32 = 8;

/// Returns the number of blocks of a step in buckets of this many elements. A tile of 38 KiB is a share, smaller tiles
/// share 224 KiB, and every resident block has two shares. AdamW in f32 moves 28 bytes per element.
fn shared_shortly(tiles: u32, elements: u64) -> u32 {
    let (moved, of_tiles) = (28 * elements, |kib: u64| u64::from(tiles) * (kib << 10));
    let short = if moved >= of_tiles(38) { 1 } else { of_tiles(224).div_ceil(moved) as u32 };
    tiles.div_ceil(short.min(tiles / (2 * RESIDENT)).max(1))
}

/// Returns the smallest number of blocks for which no block has more tiles than with `most`.
fn shared_evenly(tiles: u32, most: u32) -> u32 {
    let fullest = tiles.div_ceil(most);
    (0..=most).find(|blocks| blocks * fullest >= tiles).unwrap()
}

/// Returns the call of one op. The trainer's waits come at its next access, so they are kept separately.
fn expected(
    op: &Op,
    plan: &Plan,
    streams: &HashMap<Stream, StreamHandle>,
    most: Option<u32>,
) -> Option<Call> {
    let stream = streams[&op.stream];
    let tiles = |bucket: u32| {
        let segments = plan.segments_of(&plan.buckets()[bucket as usize]);
        segments.iter().map(|s| s.len.div_ceil(INSTEP_TILE_ELEMENTS.into()) as u32).sum::<u32>()
    };
    let copied = |src: Span, dst: Span| {
        let (bytes, is_host) = (src.bytes(), |span: Span| span.memory.is_offloaded(plan));
        match (is_host(src), is_host(dst)) {
            (true, _) => Call::CopyUp { stream, bytes },
            (_, true) => Call::CopyDown { stream, bytes },
            _ => Call::CopyOnDevice { stream, bytes },
        }
    };
    let launch = |kernel, blocks, threads| Call::Launch { kernel, shape: Shape { blocks, threads }, stream };
    match op.action {
        Action::Wait(_)
        | Action::Record(_)
        | Action::AwaitSum { .. }
        | Action::Collective { .. }
        | Action::Measure { .. }
        | Action::Release(_) => None,
        Action::Count(span) => Some(Call::Fill { stream, bytes: span.bytes() }),
        Action::Copy { src, dst, .. } => Some(copied(src, dst)),
        Action::Add { src, .. } => {
            let rounds = src.bytes().div_ceil(4 * 4 * u64::from(INSTEP_GPU_THREADS)) as u32;
            Some(launch("instep_add", rounds.min(most.unwrap_or(u32::MAX)), INSTEP_GPU_THREADS))
        }
        _ if plan.is_offloaded() && op.stream == Stream::Optim => Some(Call::OnHost { stream }),
        Action::Control(Phase::Begin) => Some(launch("instep_begin", 1, INSTEP_GPU_THREADS)),
        Action::Control(Phase::Decide | Phase::DecideBucket { .. }) => Some(launch("instep_decide", 1, 1)),
        Action::Control(Phase::Publish) => Some(launch("instep_publish", 1, 1)),
        Action::Norm { bucket } => {
            let blocks = shared_evenly(tiles(bucket), most.unwrap_or(RESIDENT).min(RESIDENT));
            Some(launch("instep_norm", blocks, INSTEP_GPU_THREADS))
        }
        Action::Step { bucket, count } => {
            let buckets = &plan.buckets()[bucket as usize..(bucket + count) as usize];
            let elements = buckets.iter().map(|bucket| bucket.params.end - bucket.params.start).sum();
            let tiles = (bucket..bucket + count).map(tiles).sum();
            let blocks = most.map_or_else(|| shared_shortly(tiles, elements), |most| most.min(tiles));
            Some(launch("instep_step_adam", blocks, INSTEP_GPU_THREADS))
        }
        Action::Leave { .. } => Some(Call::Fill { stream, bytes: 4 }),
        Action::Zero(span) => Some(Call::Fill { stream, bytes: span.end - span.start }),
    }
}

/// Walks both lists and asserts that each op became its call.
pub(super) fn assert_calls(
    ops: &[Op],
    calls: &[Call],
    plan: &Plan,
    streams: &HashMap<Stream, StreamHandle>,
    most: Option<u32>,
) {
    let mut events: HashMap<Ticket, EventHandle> = HashMap::new();
    // The host waits for copies, which no op makes, by an event that it queries right after its record. A wait that
    // takes long queries events of ops too.
    let asked = |pair: &[Call]| match pair {
        [Call::Record { event, .. }, Call::Query { event: queried }] if event == queried => Some(*event),
        _ => None,
    };
    let asked: HashSet<EventHandle> = calls.windows(2).filter_map(asked).collect();
    let mut calls = calls.iter().filter(|call| match call {
        // Every measured op takes timed events.
        Call::Query { .. } | Call::Copy { .. } | Call::Make { .. } => false,
        Call::Record { event, .. } => !asked.contains(event),
        _ => true,
    });
    // The trainer's waits are issued at its next touch.
    let mut owed: Vec<Ticket> = Vec::new();
    let mut next = |owed: &mut Vec<Ticket>, events: &HashMap<Ticket, EventHandle>| loop {
        match calls.next() {
            Some(Call::Wait { stream, event }) if *stream == COMPUTE => {
                let paid = owed.iter().position(|ticket| events[ticket] == *event);
                owed.remove(paid.unwrap_or_else(|| panic!("the trainer waits for {event:?}: {owed:?}")));
            }
            other => return other.copied(),
        }
    };
    for op in ops {
        match op.action {
            Action::Wait(ticket) if op.stream == Stream::Compute => {
                // A later position of the same stream replaces an earlier one that is still to be issued.
                owed.retain(|earlier| earlier.stream != ticket.stream);
                owed.push(ticket);
            }
            Action::Wait(ticket) => {
                let call = Call::Wait { stream: streams[&op.stream], event: events[&ticket] };
                assert_eq!(next(&mut owed, &events), Some(call), "{op}");
            }
            Action::Record(ticket) => match next(&mut owed, &events) {
                Some(Call::Record { event, stream }) if stream == streams[&op.stream] => {
                    // An event of a ring stands for its newest position only.
                    events.retain(|_, other| *other != event);
                    events.insert(ticket, event);
                }
                other => panic!("{op}: {other:?}"),
            },
            _ => {
                if let Some(call) = expected(op, plan, streams, most) {
                    assert_eq!(next(&mut owed, &events), Some(call), "{op}");
                }
                if op.action == Action::Control(Phase::Begin) {
                    // After it the settings' slot is free again.
                    let freed = next(&mut owed, &events);
                    assert!(
                        matches!(freed, Some(Call::Record { stream, .. }) if stream == streams[&op.stream])
                    );
                }
            }
        }
    }
    assert_eq!(next(&mut owed, &events), None, "calls that no op explains");
}

pub(super) fn ops(list: &[Traced]) -> Vec<Op> {
    list.iter().filter_map(|entry| if let Traced::Op(op) = entry { Some(*op) } else { None }).collect()
}

/// Returns the trainer's stream, and the streams of a new stepper whose steps have priority -1.
pub(super) fn streams(stand_in: &StandIn) -> HashMap<Stream, StreamHandle> {
    let made = stand_in.take_calls();
    let with = |wanted: i32| {
        let stream = made.iter().find_map(|call| match call {
            Call::CreateStream { stream, priority } if *priority == wanted => Some(*stream),
            _ => None,
        });
        stream.unwrap()
    };
    let (reduce, optim) = (with(i32::MIN), with(-1));
    HashMap::from([(Stream::Compute, COMPUTE), (Stream::Reduce, reduce), (Stream::Optim, optim)])
}

#[test]
fn every_op_becomes_its_call_and_nothing_else_is_called() {
    let ways = [(None, false), (Some(3), false), (None, true)];
    for (mode, (most, per_bucket)) in MODES.into_iter().flat_map(|mode| ways.map(|way| (mode, way))) {
        let max_norm = (mode == Mode::Normed && !per_bucket).then_some(1.0);
        let options = Options {
            mode,
            max_norm,
            unused: Unused::Skip,
            cap: Some(1 << 10),
            world_size: 2,
            record: true,
            ..Options::default()
        };
        let (stand_in, layout) = (StandIn::new(), layout(&LENGTHS));
        let mut cuda = Cuda::on(stand_in.clone()).compute_stream(COMPUTE).optim_priority(-1);
        if let Some(most) = most {
            cuda = cuda.max_blocks(most);
        }
        let builder = options.builder(&layout, few_optimizers()[2]);
        let builder = if per_bucket { builder.clip(Clip::PerBucket(1.0)) } else { builder };
        // SAFETY: the stand-in's stream is a number.
        let mut stepper = unsafe { builder.cuda(Presummed(2), &cuda).unwrap() };
        let streams = streams(&stand_in);
        paint_params(&mut stepper);
        let gradient = painted(&options);
        for step in 0..6 {
            pass(&mut stepper, &options, |param, values| {
                (param + step) % 3 != 0 && gradient(step, param, values)
            })
            .unwrap();
        }
        let list = ops(&stepper.take_recording().unwrap().list);
        let calls = stand_in.take_calls();
        assert!(list.len() > 100, "{mode:?}");
        assert_calls(&list, &calls, stepper.plan(), &streams, most);
        let launched = |kernel: &str| {
            let same = |call: &&Call| matches!(call, Call::Launch { kernel: k, .. } if *k == kernel);
            calls.iter().filter(same).count()
        };
        let buckets = stepper.plan().buckets().iter().filter(|bucket| bucket.len > 0).count();
        assert_eq!(buckets, 4);
        let launches = match mode {
            _ if per_bucket => buckets,
            Mode::Sequential => 1,
            Mode::Eager => buckets,
            // The bucket that the next forward needs first has one of its own.
            Mode::Normed => 2,
        };
        assert_eq!(launched("instep_step_adam"), 6 * launches, "{mode:?}, each bucket decided: {per_bucket}");
        if per_bucket {
            let decided = ["instep_norm", "instep_decide"].map(launched);
            assert_eq!(decided, [6 * buckets; 2], "one of each per bucket: {mode:?}");
        }
    }
}

#[test]
fn a_step_waits_for_the_event_after_the_callers_sum_and_for_nothing_else() {
    let (stand_in, layout) = (StandIn::new(), layout(&[300, 700]));
    let cuda = Cuda::on(stand_in.clone()).compute_stream(COMPUTE).optim_priority(-1);
    let options =
        Options { cap: Some(1 << 10), unused: Unused::StepZero, mode: Mode::Eager, ..Options::default() };
    let sums = || Sums::by_caller(3, 4);
    let mut stepper = options.stepper_on(&cuda, &layout, few_optimizers()[0], sums()).unwrap();
    assert_eq!((stepper.rank(), stepper.world_size()), (3, 4));
    let optim = streams(&stand_in)[&Stream::Optim];
    paint_params(&mut stepper);
    // The same event may be recorded again for another bucket once the call has returned.
    for (round, named) in [[7001, 7002], [7003, 7003]].into_iter().enumerate() {
        let mut pass = stepper.begin().unwrap();
        for (param, id) in layout.ids().enumerate().collect::<Vec<_>>().into_iter().rev() {
            pass.ptr(id.grad()).unwrap();
            stand_in.take_calls();
            let event = EventHandle(named[1 - param]);
            // SAFETY: the stand-in's events are numbers.
            unsafe { pass.bucket_ready_after(1 - param as u32, event).unwrap() };
            let calls = stand_in.take_calls();
            let is_made = matches!(
                calls[..],
                [
                    Call::Wait { stream: waits, event: awaited },
                    Call::Launch { kernel: "instep_step_sgd", stream: steps, .. },
                    Call::Record { stream: records, .. },
                ] if [waits, steps, records] == [optim; 3] && awaited == event
            );
            assert!(is_made, "round {round}: {calls:?}");
        }
        pass.finish().unwrap();
    }
    let refused = |outcome: instep::Result<()>, wanted: &[&str]| {
        let error = outcome.unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Order(_)) && wanted.iter().all(|part| text.contains(part)), "{text}");
    };
    // A gradient whose address was not asked for was not summed. Nothing else than an event says that a sum is there.
    let [first, last] = [layout.ids().next().unwrap(), layout.ids().last().unwrap()];
    stepper.begin().unwrap().detach();
    stepper.ptr(last.grad()).unwrap();
    // SAFETY: as above.
    refused(unsafe { stepper.bucket_ready_after(1, EventHandle(7001)) }, &["`p0`"]);
    refused(stepper.bucket_ready(0), &["bucket 0: no event", "bucket_ready_after(0, event)"]);
    refused(stepper.grad_ready(last), &["bucket 0: no event", "bucket_ready_after(0, event)"]);
    stepper.ptr(first.grad()).unwrap();
    // SAFETY: as above.
    unsafe { stepper.bucket_ready_after(1, EventHandle(7001)).unwrap() };
    // SAFETY: as above.
    refused(unsafe { stepper.bucket_ready_after(1, EventHandle(7001)) }, &["already handed over"]);
    refused(stepper.finish(), &["bucket 0: not handed over", "bucket_ready_after(0, event)"]);
    // SAFETY: as above.
    unsafe { stepper.bucket_ready_after(0, EventHandle(7001)).unwrap() };
    stepper.finish().unwrap();
    // Micro-batches are summed once.
    let mut pass = stepper.begin_accumulating(2.try_into().unwrap()).unwrap();
    pass.ptr(last.grad()).unwrap();
    // SAFETY: as above.
    refused(unsafe { pass.bucket_ready_after(0, EventHandle(7001)) }, &["bucket 0", "micro-batches"]);
    pass.abandon().unwrap();
    stepper.close().unwrap();
    let low = Precision { param: DType::BF16, grad: DType::BF16, master: Master::F32, ..Precision::F32 };
    let halves = Stepper::builder(&layout, Sgd::default()).precision(low).unused(Unused::StepZero);
    // SAFETY: as above.
    assert!(unsafe { halves.cuda(sums(), &cuda) }.is_ok(), "the framework sums any type");
    let counted = Options { unused: Unused::Skip, ..options.clone() };
    let counted = counted.stepper_on(&cuda, &layout, few_optimizers()[0], sums()).map(drop).unwrap_err();
    assert!(counted.to_string().starts_with("unused = Skip"), "{counted}");
    // Who sums is asked for no event.
    let mut own = options.stepper_on(&cuda, &layout, few_optimizers()[0], Solo::default()).unwrap();
    let mut pass = own.begin().unwrap();
    // SAFETY: as above.
    refused(unsafe { pass.bucket_ready_after(0, EventHandle(7001)) }, &["bucket 0", "Sums::by_caller"]);
}

#[test]
fn each_wait_beside_the_callers_sums_is_missed_and_nothing_is_written_for_a_collective() {
    let layout = layout(&[300, 700, 2100]);
    for (mode, offloads) in MODES.into_iter().flat_map(|mode| [(mode, false), (mode, true)]) {
        let max_norm = (mode == Mode::Normed).then_some(1.0);
        let options = Options {
            mode,
            max_norm,
            cap: Some(1),
            unused: Unused::Refuse,
            record: true,
            ..Options::default()
        };
        let cuda = Cuda::on(StandIn::new()).compute_stream(COMPUTE);
        let builder = options.builder(&layout, few_optimizers()[2]);
        let builder = if offloads { builder.offload(OffloadPolicy::default()) } else { builder };
        // SAFETY: the stand-in's stream is a number.
        let mut stepper = unsafe { builder.cuda(Sums::by_caller(0, 4), &cuda) }.unwrap();
        paint_params(&mut stepper);
        for _ in 0..6 {
            let mut pass = stepper.begin().unwrap();
            for (param, id) in layout.ids().enumerate().collect::<Vec<_>>().into_iter().rev() {
                pass.ptr(id).unwrap();
                pass.ptr(id.grad()).unwrap();
                // SAFETY: the stand-in's events are numbers.
                unsafe { pass.bucket_ready_after(2 - param as u32, EventHandle(7001)).unwrap() };
            }
            pass.finish().unwrap();
        }
        let recording = stepper.take_recording().unwrap();
        let (list, what) = (&recording.list, format!("{mode:?}, offloads: {offloads}"));
        assert_each_is_missed(stepper.plan(), 2, list, middle_passes(list), 12, &what);
        let ops = ops(list);
        assert!(ops.iter().all(|op| op.stream != Stream::Reduce), "{what}: nothing is reduced");
        let awaited = ops.iter().filter(|op| matches!(op.action, Action::AwaitSum { .. })).count();
        assert_eq!(awaited, 18, "{what}");
    }
}

#[test]
fn a_steady_pass_makes_nothing_and_each_bucket_costs_one_wait_and_one_launch() {
    let (stand_in, layout) = (StandIn::new(), layout(&[5000, 20_000, 300, 2049, 40_000]));
    let cuda = Cuda::on(stand_in.clone()).compute_stream(COMPUTE).optim_priority(-1);
    let options = Options { mode: Mode::Eager, cap: Some(16 << 10), world_size: 2, ..Options::default() };
    let mut stepper = options.stepper_on(&cuda, &layout, few_optimizers()[2], Presummed(2)).unwrap();
    let optim = streams(&stand_in)[&Stream::Optim];
    paint_params(&mut stepper);
    let buckets = stepper.plan().buckets().len();
    assert_eq!(buckets, 3);
    let gradient = painted(&options);
    for step in 0..20 {
        pass(&mut stepper, &options, |param, values| gradient(step, param, values)).unwrap();
        let calls = stand_in.take_calls();
        if step < 2 {
            continue;
        }
        let made = calls.iter().find(|call| matches!(call, Call::Make { .. } | Call::CreateStream { .. }));
        assert_eq!(made, None, "in pass {step}");
        let waits = |call: &&Call| matches!(call, Call::Wait { stream, .. } if *stream == optim);
        assert_eq!(calls.iter().filter(waits).count(), buckets, "waits in pass {step}");
        let launched: Vec<_> = calls
            .iter()
            .filter_map(|call| match call {
                Call::Launch { kernel, stream, .. } => Some((*kernel, *stream)),
                _ => None,
            })
            .collect();
        let (mut expected, step_kernel) = (vec![("instep_begin", optim)], ("instep_step_adam", optim));
        expected.extend(vec![step_kernel; buckets]);
        expected.push(("instep_publish", optim));
        assert_eq!(launched, expected, "launches in pass {step}");
    }
}
