//! The software GPU's trace counts the driver's calls of a steady pass: the cost of a stepper on backward's thread.
//!
//! The count leaves out the program's own calls, and the first passes. A change that saves a call lowers a figure in
//! the tables here.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

use instep::cuda::{Cuda, CudaDevice, Nccl};
use instep::layout::ForeignBucket;
use instep::{
    AdamW, Borrowed, Clip, DType, EventHandle, Layout, Mode, Pass, Stepper, Strategy, Sums, Unused,
};

use super::doors::Door;
use super::memory::Gpu;
use super::nccl::ranks_play_with;
use crate::support::{MODES, layout};

/// The environment variable with the trace's file; `%p` in it stands for the process's number.
const TRACE: &str = "INSTEP_GPU_TRACE";

const BUCKETS: usize = 3;
const LENGTH: usize = 5000;
const PASSES: usize = 20;
/// From this pass on, a pass reuses an earlier pass's place for its settings, and first asks whether that place is
/// free.
const FIRST_STEADY: usize = 8;

/// The calls of begin, of asking for all addresses of gradients, of each hand-over, of finish, and of the whole pass
/// with its three buckets. A launch is counted in the row of its kernel.
const BY_CALLER: &str = "
Sequential            begin addresses bucket finish pass
cuCtxGetCurrent           1         0      1      2    6
cuEventQuery              1         0      0      0    1
cuEventRecord             2         0      0      4    6
cuStreamWaitEvent         0         0      1      1    4
instep_begin              1         0      0      0    1
instep_publish            0         0      0      1    1
instep_step_adam          0         0      0      3    3
all                       5         0      2     11   22

Eager                 begin addresses bucket finish pass
cuCtxGetCurrent           1         0      1      2    6
cuEventQuery              1         0      0      0    1
cuEventRecord             2         0      1      1    6
cuStreamWaitEvent         0         0      1      1    4
instep_begin              1         0      0      0    1
instep_publish            0         0      0      1    1
instep_step_adam          0         0      1      0    3
all                       5         0      4      5   22

Normed                begin addresses bucket finish pass
cuCtxGetCurrent           1         1      1      1    6
cuEventQuery              1         0      0      0    1
cuEventRecord             2         0      0      4    6
cuStreamWaitEvent         0         1      1      0    4
instep_begin              1         0      0      0    1
instep_decide             0         0      0      1    1
instep_norm               0         0      1      0    3
instep_publish            0         0      0      1    1
instep_step_adam          0         0      0      3    3
all                       5         2      3     10   26

Eager, no context     begin addresses bucket finish pass
cuCtxGetCurrent           1         0      1      2    6
cuCtxPopCurrent_v2        1         0      1      2    6
cuCtxPushCurrent_v2       1         0      1      2    6
cuEventQuery              1         0      0      0    1
cuEventRecord             2         0      1      1    6
cuStreamWaitEvent         0         0      1      1    4
instep_begin              1         0      0      0    1
instep_publish            0         0      0      1    1
instep_step_adam          0         0      1      0    3
all                       7         0      6      9   34
";
const NCCL: &str = "
Sequential            begin addresses bucket finish pass
cuCtxGetCurrent           1         0      1      2    6
cuEventQuery              1         0      0      0    1
cuEventRecord             2         0      2      4   12
cuStreamWaitEvent         0         0      1      2    5
instep_begin              1         0      0      0    1
instep_publish            0         0      0      1    1
instep_step_adam          0         0      0      3    3
ncclAllReduce             0         0      1      0    3
all                       5         0      5     12   32

Eager                 begin addresses bucket finish pass
cuCtxGetCurrent           1         0      1      2    6
cuEventQuery              1         0      0      0    1
cuEventRecord             2         0      3      1   12
cuStreamWaitEvent         0         0      2      1    7
instep_begin              1         0      0      0    1
instep_publish            0         0      0      1    1
instep_step_adam          0         0      1      0    3
ncclAllReduce             0         0      1      0    3
all                       5         0      8      5   34

Normed                begin addresses bucket finish pass
cuCtxGetCurrent           1         1      1      1    6
cuEventQuery              1         0      0      0    1
cuEventRecord             2         0      2      4   12
cuStreamWaitEvent         0         1      2      0    7
instep_begin              1         0      0      0    1
instep_decide             0         0      0      1    1
instep_norm               0         0      1      0    3
instep_publish            0         0      0      1    1
instep_step_adam          0         0      0      3    3
ncclAllReduce             0         0      1      0    3
all                       5         2      7     10   38
";

/// The calls of a whole pass for two steppers. The first has separate buckets in the caller's memory. The second owns
/// its memory, and neighbouring buckets share launches.
const OWN: &str = "
                        3 buckets    24 buckets
Sequential             apart  own   apart  own
cuEventRecord              6    4      27    4
instep_step_adam           3    1      24    1
all                       22   18     106   60

Normed                 apart  own   apart  own
cuEventRecord              6    5      27    5
instep_step_adam           3    2      24    2
all                       26   24     131   87
";

/// This process's trace; the test reads it as it grows.
struct Trace {
    path: String,
    read: usize,
}

impl Trace {
    fn open() -> Trace {
        let path = std::env::var(TRACE).unwrap().replace("%p", &std::process::id().to_string());
        Trace { path, read: 0 }
    }

    fn take(&mut self) -> Vec<String> {
        let text = fs::read_to_string(&self.path).unwrap();
        let new = text[self.read..].lines().map(str::to_owned).collect();
        self.read = text.len();
        new
    }
}

/// The number of calls in each part of a pass, by the name of the call; a launch is counted by its kernel.
type Counts = BTreeMap<String, [usize; PARTS]>;

const PARTS: usize = 3 + BUCKETS;
const BEGIN: usize = 0;
const ADDRESSES: usize = 1;
const FIRST_BUCKET: usize = 2;
const FINISH: usize = PARTS - 1;

/// Returns the call of a line, or the kernel of a launch.
fn name_of(line: &str) -> &str {
    let mut words = line.split(' ');
    let call = words.next().unwrap();
    words.find_map(|word| word.strip_prefix("function=")).unwrap_or(call)
}

fn count(parts: &[Vec<String>; PARTS]) -> Counts {
    let mut counts = Counts::new();
    for (part, line) in
        parts.iter().enumerate().flat_map(|(k, lines)| lines.iter().map(move |line| (k, line)))
    {
        counts.entry(name_of(line).to_owned()).or_default()[part] += 1;
    }
    counts
}

/// Runs one pass and returns the library's calls in each part of it.
fn traced(
    stepper: &mut Stepper<CudaDevice>,
    trace: &mut Trace,
    layout: &Layout,
    enter: impl Fn(),
    hand: &impl Fn(u32, *mut f32) -> Option<EventHandle>,
) -> [Vec<String>; PARTS] {
    let mut parts = <[Vec<String>; PARTS]>::default();
    enter();
    trace.take();
    let mut pass = stepper.begin().unwrap();
    parts[BEGIN] = trace.take();
    let address = |id: instep::ParamId| pass.ptr(id.grad()).unwrap().0 as usize as *mut f32;
    let addresses: Vec<*mut f32> = layout.ids().map(address).collect();
    parts[ADDRESSES] = trace.take();
    for (bucket, address) in (0..).zip(addresses) {
        let event = hand(bucket, address);
        enter();
        trace.take();
        match event {
            // SAFETY: recorded after the sum.
            Some(event) => unsafe { pass.bucket_ready_after(bucket, event) },
            None => pass.bucket_ready(bucket),
        }
        .unwrap();
        parts[FIRST_BUCKET + bucket as usize] = trace.take();
    }
    pass.finish().unwrap();
    parts[FINISH] = trace.take();
    parts
}

/// Returns the table of the calls of a steady pass. `hand` enqueues the program's work on a bucket before its
/// hand-over, and the event after the program's own sum, if it sums.
fn table(
    (mode, is_current): (Mode, bool),
    sums: impl Into<Sums>,
    gpu: &Gpu,
    cuda: &Cuda,
    hand: impl Fn(u32, *mut f32) -> Option<EventHandle>,
) -> String {
    let layout = layout(&[LENGTH; BUCKETS]);
    let mut memory = Borrowed::new();
    for id in layout.ids() {
        let [values, gradients] = [0.5, 0.0].map(|value| gpu.upload(&[value; LENGTH]));
        memory = memory.param(id, values).bucket(ForeignBucket::new(LENGTH).gradient(id, 0), gradients);
    }
    let mut builder = Stepper::builder(&layout, AdamW::default()).mode(mode).unused(Unused::StepZero);
    if mode == Mode::Normed {
        builder = builder.clip(Clip::Global(1.0));
    }
    // SAFETY: memory and stream live as long as the process, and what touches them keeps to the stepper's order.
    let mut stepper = unsafe { builder.cuda_borrowing(sums, memory, cuda) }.unwrap();
    let mut trace = Trace::open();
    // The GPU has ended each pass before the next, so no call waits for it, and none is made twice.
    let passes: Vec<Counts> = (0..PASSES)
        .map(|_| {
            let parts = traced(&mut stepper, &mut trace, &layout, || gpu.set_current(is_current), &hand);
            gpu.set_current(true);
            gpu.synchronize();
            count(&parts)
        })
        .collect();
    stepper.close().unwrap();
    let steady = passes.last().unwrap();
    for (pass, counts) in passes.iter().enumerate().skip(FIRST_STEADY) {
        assert_eq!(counts, steady, "{mode:?}: pass {pass} differs from the last");
    }
    let title = format!("{mode:?}{}", if is_current { "" } else { ", no context" });
    let mut text = format!("{title:<22}begin addresses bucket finish pass\n");
    let mut sums = [0; 5];
    let mut row = |name: &str, counts: [usize; 5]| {
        let [begin, addresses, bucket, finish, pass] = counts;
        text += &format!("{name:<22}{begin:>5}{addresses:>10}{bucket:>7}{finish:>7}{pass:>5}\n");
    };
    for (name, counts) in steady {
        let buckets: BTreeSet<usize> = counts[FIRST_BUCKET..FINISH].iter().copied().collect();
        assert_eq!(buckets.len(), 1, "{mode:?}: {name}: the buckets differ: {counts:?}");
        let counts =
            [counts[BEGIN], counts[ADDRESSES], counts[FIRST_BUCKET], counts[FINISH], counts.iter().sum()];
        sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        row(name, counts);
    }
    row("all", sums);
    text
}

fn assert_tables<const N: usize>(found: [String; N], expected: &str) {
    let found = found.join("\n");
    assert!(found == expected.trim_start(), "the calls are now\n{found}");
}

/// The program sums buckets itself, on its own stream.
fn of_caller() {
    let gpu = Gpu::open();
    let cuda = Cuda::open(0).unwrap().compute_stream(gpu.stream());
    let sums = gpu.beside();
    let written = Gpu::event();
    let summed = [(); BUCKETS].map(|()| Gpu::event());
    let of = |mode| {
        table(mode, Sums::by_caller(0, 4), &gpu, &cuda, |bucket, gradient| {
            gpu.set_current(true);
            gpu.fill(gradient, 0.5, LENGTH);
            gpu.record(written);
            sums.wait_for(written);
            sums.fill(gradient, 2.0, LENGTH);
            let event = summed[bucket as usize];
            sums.record(event);
            Some(event)
        })
    };
    let [sequential, eager, normed] = MODES.map(|mode| (mode, true));
    assert_tables([sequential, eager, normed, (Mode::Eager, false)].map(of), BY_CALLER);
}

/// Returns the calls of a steady pass with one event for all sums.
fn of_pass(mode: Mode, is_own: bool, buckets: usize, gpu: &Gpu, cuda: &Cuda) -> BTreeMap<String, usize> {
    let layout = layout(&vec![LENGTH; buckets]);
    let mut builder = Stepper::builder(&layout, AdamW::default()).mode(mode).unused(Unused::StepZero);
    if mode == Mode::Normed {
        builder = builder.clip(Clip::Global(1.0));
    }
    let sums = Sums::by_caller(0, 4);
    let mut stepper = if is_own {
        // SAFETY: the stream lives as long as the process.
        unsafe { builder.bucket_cap_bytes(1).cuda(sums, cuda) }.unwrap()
    } else {
        let mut memory = Borrowed::new();
        for id in layout.ids() {
            let [values, gradients] = [0.5, 0.0].map(|value| gpu.upload(&[value; LENGTH]));
            memory = memory.param(id, values).bucket(ForeignBucket::new(LENGTH).gradient(id, 0), gradients);
        }
        // SAFETY: so does the memory, and what touches it keeps to the stepper's order.
        unsafe { builder.cuda_borrowing(sums, memory, cuda) }.unwrap()
    };
    assert_eq!(stepper.plan().buckets().len(), buckets);
    let (mut trace, summed) = (Trace::open(), Gpu::event());
    let mut counts = BTreeMap::new();
    for _ in 0..PASSES {
        trace.take();
        let mut lines = Vec::new();
        let mut pass = stepper.begin().unwrap();
        // From the first bucket on, which is stepped last.
        let mut ids: Vec<_> = layout.ids().collect();
        if is_own {
            ids.reverse();
        }
        let addresses: Vec<_> =
            ids.iter().map(|id| pass.ptr(id.grad()).unwrap().0 as usize as *mut f32).collect();
        lines.extend(trace.take());
        addresses.iter().for_each(|address| gpu.fill(*address, 0.5, LENGTH));
        gpu.record(summed);
        trace.take();
        // SAFETY: recorded after the sums.
        (0..buckets as u32).for_each(|bucket| unsafe { pass.bucket_ready_after(bucket, summed).unwrap() });
        pass.finish().unwrap();
        lines.extend(trace.take());
        gpu.synchronize();
        counts = BTreeMap::from([("all".to_owned(), lines.len())]);
        lines.iter().for_each(|line| *counts.entry(name_of(line).to_owned()).or_default() += 1);
    }
    stepper.close().unwrap();
    counts
}

/// The program sums buckets itself again, with 3 buckets and with 24.
fn of_own() {
    let gpu = Gpu::open();
    let cuda = Cuda::open(0).unwrap().compute_stream(gpu.stream());
    let of = |mode: Mode| {
        let ways = [(false, 3), (true, 3), (false, 24), (true, 24)];
        let ways = ways.map(|(is_own, buckets)| of_pass(mode, is_own, buckets, &gpu, &cuda));
        let row = |name: &str| {
            let [a, b, c, d] = [0, 1, 2, 3].map(|way: usize| ways[way].get(name).copied().unwrap_or(0));
            format!("{name:<22}{a:>6}{b:>5}{c:>8}{d:>5}\n")
        };
        let rows = ["cuEventRecord", "instep_step_adam", "all"].map(row).concat();
        format!("{:<22} apart  own   apart  own\n{rows}", format!("{mode:?}"))
    };
    let found = [Mode::Sequential, Mode::Normed].map(of).join("\n");
    let found = format!("\n{:<24}3 buckets    24 buckets\n{found}", "");
    assert!(found == OWN, "the calls are now{found}");
}

/// A scene of one rank of two, for `nccl.rs`.
pub(super) fn of_nccl(comm: Nccl, gpu: &Gpu) {
    let cuda = Cuda::open(0).unwrap().compute_stream(gpu.stream());
    let of = |mode| {
        table((mode, true), comm.clone(), gpu, &cuda, |_, gradient| {
            gpu.fill(gradient, 0.5, LENGTH);
            None
        })
    };
    assert_tables(MODES.map(of), NCCL);
    comm.close().unwrap();
}

/// A scene of one rank of two: forward and backward unshard each bucket, one bucket ahead of its use. From the second
/// pass on, buckets use memory that is already mapped, although the host waits for the GPU after each.
pub(super) fn of_unsharding(comm: Nccl, gpu: &Gpu) {
    let layout = layout(&[LENGTH, 700, 3 * LENGTH, LENGTH]);
    let cuda = Cuda::open(0).unwrap().compute_stream(gpu.stream());
    let builder = Stepper::builder(&layout, AdamW::default()).strategy(Strategy::Fsdp).bucket_cap_bytes(1000);
    // SAFETY: the stream lives as long as the process.
    let mut stepper = unsafe { builder.cuda(comm.clone(), &cuda) }.unwrap();
    let buckets = stepper.plan().buckets().len() as u32;
    let mut trace = Trace::open();
    for pass in 0..4 {
        trace.take();
        for order in [(0..buckets).collect::<Vec<_>>(), (0..buckets).rev().collect()] {
            stepper.unshard(order[0]).unwrap();
            for (k, bucket) in order.iter().enumerate() {
                if let Some(next) = order.get(k + 1) {
                    stepper.unshard(*next).unwrap();
                }
                stepper.reshard(*bucket).unwrap();
            }
        }
        gpu.synchronize();
        let lines = trace.take();
        let taken = lines.iter().filter(|line| name_of(line) == "cuMemAllocFromPoolAsync").count();
        let mapped: Vec<_> = lines.iter().filter(|line| line.contains(" mapped=")).collect();
        assert_eq!(taken, 2 * buckets as usize, "pass {pass}");
        assert!(pass == 0 || mapped.is_empty(), "pass {pass}: {mapped:?}");
        assert!(pass > 0 || !mapped.is_empty(), "the first pass maps what it needs");
    }
    stepper.close().unwrap();
    comm.close().unwrap();
}

/// Collectives of a steady pass of a rank with shards of three buckets, and the launches that NCCL makes of them: a
/// reduce-scatter and the counts of ranks are one, the numbers of a decision are one, parameters and their copies are one.
const GROUPS: &str = "
                 collectives launches
Eager                     10        7
Normed                    12        8
Normed, copies            15        8
";

/// A scene of a rank of two. Lines of one launch follow one another.
pub(super) fn of_groups(comm: Nccl, gpu: &Gpu) {
    let layout = layout(&[LENGTH; BUCKETS]);
    let cuda = Cuda::open(0).unwrap().compute_stream(gpu.stream());
    let of = |name: &str, mode: Mode, copy: Option<DType>| {
        let mut builder = Stepper::builder(&layout, AdamW::default()).strategy(Strategy::Zero).mode(mode);
        builder = builder.bucket_cap_bytes(1);
        if mode == Mode::Normed {
            builder = builder.clip(Clip::Global(1.0));
        }
        if let Some(dtype) = copy {
            builder = builder.copy_params(dtype);
        }
        // SAFETY: the stream lives as long as the process.
        let mut stepper = unsafe { builder.cuda(comm.clone(), &cuda) }.unwrap();
        let mut trace = Trace::open();
        let mut lines = Vec::new();
        for _ in 0..4 {
            trace.take();
            let mut pass = stepper.begin().unwrap();
            for id in layout.ids() {
                let gradient = pass.ptr(id.grad()).unwrap().0 as usize as *mut f32;
                gpu.fill(gradient, 0.5, LENGTH);
                pass.grad_ready(id).unwrap();
            }
            pass.finish().unwrap();
            gpu.synchronize();
            lines = trace.take();
        }
        stepper.close().unwrap();
        let mut calls = lines.iter().filter(|line| line.starts_with("nccl")).peekable();
        let (mut collectives, mut launches) = (0, 0);
        while let Some(line) = calls.next() {
            let together = line.split(" together=").nth(1).and_then(|rest| rest.split(' ').next());
            let together = together.map_or(1, |number| number.parse::<usize>().unwrap());
            for _ in 1..together {
                let next = calls.next().expect("a line for each collective of a launch");
                assert!(next.contains(&format!(" together={together}")), "{next}");
            }
            (collectives, launches) = (collectives + together, launches + 1);
        }
        format!("{name:<17}{collectives:>11}{launches:>9}\n")
    };
    let found = [
        of("Eager", Mode::Eager, None),
        of("Normed", Mode::Normed, None),
        of("Normed, copies", Mode::Normed, Some(DType::BF16)),
    ];
    let found = format!("\n{:<17}collectives launches\n{}", "", found.concat());
    assert!(found == GROUPS, "the launches are now{found}");
    comm.close().unwrap();
}

/// The environment variable that is 1 if events must order the collectives of two communicators.
const BY_EVENTS: &str = "INSTEP_TEST_BY_EVENTS";

fn word<'a>(line: &'a str, name: &str) -> &'a str {
    let value = line.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    value.unwrap_or_else(|| panic!("no {name} in {line}"))
}

/// Asserts that each collective, and each graph with some, waits for the event that was recorded after the last one of
/// another stream, on which another communicator's collectives run. In a capture, only the capture's collectives count.
/// Returns the number of waits outside of captures, and in captures.
fn assert_ordered(lines: &[String]) -> [usize; 2] {
    let (mut waits, mut last, mut captured) = ([0; 2], [None, None], 0);
    let mut k = 0;
    while k < lines.len() {
        let (line, call) = (&lines[k], name_of(&lines[k]));
        match call {
            "cuStreamBeginCapture_v2" => (captured, last[1]) = (1, None),
            "cuStreamEndCapture" => captured = 0,
            _ => {}
        }
        k += 1;
        let is_graph = call == "cuGraphLaunch";
        if !call.starts_with("nccl") && !is_graph {
            continue;
        }
        let stream = word(line, "stream");
        if let Some((other, event)) = last[captured].filter(|(other, _)| *other != stream || is_graph) {
            let wait = format!("cuStreamWaitEvent stream={stream} event={event} flags=0");
            assert_eq!(lines[k - 2], wait, "{call} must wait for the collective on {other}");
            waits[captured] += 1;
        }
        if line.contains(" together=") {
            k += word(line, "together").parse::<usize>().unwrap() - 1;
        }
        assert_eq!(name_of(&lines[k]), "cuEventRecord", "after {line}");
        assert_eq!(word(&lines[k], "stream"), stream, "after {line}");
        last[captured] = Some((stream, word(&lines[k], "event")));
    }
    waits
}

/// A scene of a rank of two: passes, a captured pass and replays of a stepper with two communicators. The other rank's
/// GPU has another order of work.
pub(super) fn of_order(comm: Nccl, gpu: &Gpu) {
    let layout = layout(&[LENGTH; BUCKETS]);
    let cuda = Cuda::open(0).unwrap().compute_stream(gpu.stream());
    let builder = Stepper::builder(&layout, AdamW::default()).strategy(Strategy::Zero).bucket_cap_bytes(1);
    // SAFETY: the stream lives as long as the process.
    let mut stepper = unsafe { builder.mode(Mode::Eager).cuda(comm.clone(), &cuda) }.unwrap();
    let one_pass = |mut pass: Pass<'_, CudaDevice>| {
        for id in layout.ids() {
            let gradient = pass.ptr(id.grad())?.0 as usize as *mut f32;
            gpu.fill(gradient, 0.5, LENGTH);
            pass.grad_ready(id)?;
        }
        pass.finish()
    };
    let is_by_events = std::env::var(BY_EVENTS).as_deref() == Ok("1");
    let mut trace = Trace::open();
    trace.take();
    one_pass(stepper.begin().unwrap()).unwrap();
    if is_by_events {
        assert_ordered(&trace.take());
    }
    // Without the waits, the ranks would wait for each other here.
    gpu.synchronize();
    for _ in 0..3 {
        trace.take();
        one_pass(stepper.begin().unwrap()).unwrap();
        let captures = [(); 2].map(|()| stepper.capture(one_pass).unwrap());
        for captured in captures.iter().chain(&captures) {
            // SAFETY: the stepper owns all memory of the capture.
            unsafe { stepper.replay(captured).unwrap() };
        }
        one_pass(stepper.begin().unwrap()).unwrap();
        let lines = trace.take();
        if is_by_events {
            // A pass sums and all-gathers each bucket. Its first sum waits too, unless it is the first of a capture or of
            // `lines`.
            let of_pass = 2 * BUCKETS;
            assert_eq!(assert_ordered(&lines), [2 * of_pass - 1 + 4, 2 * (of_pass - 1)]);
        } else {
            let asked = lines.iter().find(|line| line.starts_with("cuStreamGetCaptureInfo"));
            assert_eq!(asked, None, "NCCL orders the calls");
        }
        gpu.synchronize();
    }
    stepper.close().unwrap();
    comm.close().unwrap();
}

/// The calls of a bucket step on slices of cudarc's of two streams, and of one on the same with their tracking off.
#[cfg(feature = "cuda")]
const SLICES: &str = "
                     tracked  not
cuCtxGetCurrent            9    1
cuEventRecord              4    1
cuStreamWaitEvent          6    1
instep_step_sgd            1    1
";

#[cfg(feature = "cuda")]
fn of_slices() {
    use instep::cuda::cudarc::driver::CudaContext;

    use super::cudarc::{Slices, on_gpu};
    let of = |is_tracked: bool| {
        let mut step = on_gpu();
        let context = CudaContext::new(0).unwrap();
        if !is_tracked {
            // SAFETY: one stream orders all that is done with the slices.
            unsafe { context.disable_event_tracking() };
        }
        let [memory, steps] = [(); 2].map(|()| context.new_stream().unwrap());
        let mut slices = Slices::on(if is_tracked { &memory } else { &steps });
        let mut trace = Trace::open();
        let mut counts = BTreeMap::<String, usize>::new();
        for _ in 0..PASSES {
            trace.take();
            slices.step(&mut step, &steps);
            let lines = trace.take();
            steps.synchronize().unwrap();
            counts.clear();
            lines.iter().for_each(|line| *counts.entry(name_of(line).to_owned()).or_default() += 1);
        }
        counts
    };
    let (tracked, not) = (of(true), of(false));
    let names: BTreeSet<&String> = tracked.keys().chain(not.keys()).collect();
    let row = |name: &&String| {
        let [tracked, not] = [&tracked, &not].map(|counts| counts.get(*name).copied().unwrap_or(0));
        format!("{name:<22}{tracked:>6}{not:>5}\n")
    };
    let found: String = names.iter().map(row).collect();
    let found = format!("{:<21}tracked  not\n{found}", "");
    assert!(found == SLICES.trim_start_matches('\n'), "the calls are now\n{found}");
}

/// Runs a test's scene in a separate process, and records the process's calls in a file.
fn alone(test: &str, scene: impl FnOnce()) {
    if std::env::var_os(TRACE).is_some() {
        return scene();
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let test = format!("cuda::gpu::calls::{test}");
    child.args(["--exact", &test, "--ignored", "--nocapture"]).env(TRACE, folder.path().join("%p"));
    assert!(child.status().unwrap().success());
}

#[test]
#[ignore = "scripts/software-gpu.sh runs it: needs the software GPU's trace"]
fn a_steady_pass_makes_the_calls_of_the_table_beside_sums_of_the_programs() {
    alone("a_steady_pass_makes_the_calls_of_the_table_beside_sums_of_the_programs", of_caller);
}

#[test]
#[ignore = "scripts/software-gpu.sh runs it: needs the software GPU's trace"]
fn a_steady_pass_launches_fewer_steps_where_the_stepper_owns_its_buckets() {
    alone("a_steady_pass_launches_fewer_steps_where_the_stepper_owns_its_buckets", of_own);
}

#[cfg(feature = "cuda")]
#[test]
#[ignore = "scripts/software-gpu.sh runs it: needs the software GPU's trace"]
fn a_bucket_step_on_slices_of_cudarcs_makes_the_calls_of_the_table() {
    alone("a_bucket_step_on_slices_of_cudarcs_makes_the_calls_of_the_table", of_slices);
}

#[test]
#[ignore = "scripts/software-gpu.sh runs it: needs the software GPU's trace"]
fn a_steady_pass_makes_the_calls_of_the_table_beside_nccls_sums() {
    let folder = tempfile::tempdir().unwrap();
    ranks_play_with(2, "calls", Door::File, &[(TRACE, &folder.path().join("%p"))]);
}

#[test]
#[ignore = "scripts/software-gpu.sh runs it: needs the software GPU's trace"]
fn a_steady_pass_with_shards_launches_fewer_kernels_of_nccl_than_it_makes_collectives() {
    let folder = tempfile::tempdir().unwrap();
    ranks_play_with(2, "calls_of_groups", Door::File, &[(TRACE, &folder.path().join("%p"))]);
}

#[test]
#[ignore = "scripts/software-gpu.sh runs it: needs the software GPU's trace"]
fn a_steady_pass_maps_no_memory_for_the_buckets_that_it_unshards() {
    let folder = tempfile::tempdir().unwrap();
    ranks_play_with(2, "calls_of_unsharding", Door::File, &[(TRACE, &folder.path().join("%p"))]);
}

#[test]
#[ignore = "scripts/software-gpu.sh runs it: needs the software GPU's trace"]
fn events_order_the_collectives_of_two_communicators_where_nccl_does_not() {
    let (version, variable) = ("INSTEP_NCCL_VERSION", "NCCL_LAUNCH_ORDER_IMPLICIT");
    type Variables<'a> = &'a [(&'a str, &'a str)];
    let cases: [(&str, Door, Variables<'_>); 6] = [
        ("1", Door::File, &[(version, "22506"), (variable, "1")]),
        ("1", Door::Id, &[(version, "23007")]),
        ("0", Door::Id, &[(version, "23007"), (variable, "1")]),
        ("0", Door::File, &[]),
        // A framework's communicator has its own configuration.
        ("1", Door::Adopt, &[]),
        ("0", Door::Adopt, &[(variable, "1")]),
    ];
    for (by_events, door, set) in cases {
        let folder = tempfile::tempdir().unwrap();
        let trace = folder.path().join("%p");
        let set = set.iter().map(|(name, value)| (*name, Path::new(*value)));
        let environment: Vec<_> = set.chain([(TRACE, &*trace), (BY_EVENTS, Path::new(by_events))]).collect();
        ranks_play_with(2, "calls_of_order", door, &environment);
    }
}
