//! A bucket on a GPU's streams has the CPU's bits, wherever parameters and gradients lie, and makes few driver calls.
//!
//! The tests run on the stand-in for the driver, or with `INSTEP_REQUIRE_GPU=1` on a real GPU.

use std::ffi::c_void;
use std::ptr::with_exposed_provenance_mut;

use instep::bucket_step::{Lent, OnGpu, StepTensors};
use instep::cuda::Cuda;
use instep::layout::ForeignBucket;
use instep::{
    AdamW, BucketStep, DevicePtr, Error, GradNorm, Isa, Lamb, Layout, Pool, Scaling, Sgd, StreamHandle,
};

use crate::support::device::cuda;
use crate::support::stand_in::StandIn;
use crate::support::stand_in::calls::Call;
use crate::support::{Optim, few_optimizers, layout, paint};

const LENGTHS: [usize; 4] = [300, 0, 2100, 17];
/// Each parameter's offset in the bucket, and the bucket's length.
const OFFSETS: [usize; 4] = [3, 310, 313, 2420];
const LEN: usize = 2500;
const STEPS: usize = 11;

/// Memory of a GPU. It lives as long as the test.
pub(super) struct Device {
    cuda: Cuda,
    allocations: Vec<DevicePtr>,
}

impl Device {
    pub(super) fn new(cuda: &Cuda) -> Device {
        Device { cuda: cuda.clone(), allocations: Vec::new() }
    }

    pub(super) fn hold(&mut self, values: &[f32]) -> *mut c_void {
        let driver = self.cuda.driver();
        let entered = driver.enter().unwrap();
        let address = driver.allocate(4 * values.len().max(1) as u64, StreamHandle::default()).unwrap();
        // SAFETY: just allocated for them.
        unsafe { driver.upload(address, bytemuck::cast_slice(values), StreamHandle::default()).unwrap() };
        if entered {
            driver.leave();
        }
        self.allocations.push(address);
        std::ptr::with_exposed_provenance_mut(address.0 as usize)
    }

    /// Returns values after all work on a stream.
    pub(super) fn read(&self, from: *mut c_void, len: usize, stream: StreamHandle) -> Vec<f32> {
        let driver = self.cuda.driver();
        let mut values = vec![0f32; len];
        let entered = driver.enter().unwrap();
        let from = DevicePtr(from.addr() as u64);
        // SAFETY: as many as were uploaded there.
        unsafe { driver.download(bytemuck::cast_slice_mut(&mut values), from, stream).unwrap() };
        if entered {
            driver.leave();
        }
        values
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let driver = self.cuda.driver();
        let entered = driver.enter().unwrap();
        for address in self.allocations.drain(..) {
            // SAFETY: allocated by this driver; the stream that used it has been waited for.
            unsafe { driver.free(address, StreamHandle::default()) };
        }
        if entered {
            driver.leave();
        }
    }
}

fn described(layout: &Layout) -> ForeignBucket {
    let placed = layout.ids().zip(OFFSETS);
    placed.fold(ForeignBucket::new(LEN), |bucket, (id, offset)| bucket.gradient(id, offset))
}

/// Returns values for the whole bucket.
fn painted(row: usize) -> Vec<f32> {
    (0..LEN).map(|k| paint(row, k)).collect()
}

/// Returns parameters and states after some steps on the CPU; only the elements of parameters are compared.
fn on_host(layout: &Layout, optim: Optim, steps: usize) -> Vec<Vec<f32>> {
    let mut step = BucketStep::builder(layout, optim.boxed()).bucket(described(layout)).host().unwrap();
    let count = optim.boxed().state_names().len();
    let mut params = painted(0);
    let mut states = vec![vec![0f32; LEN]; count];
    for k in 0..steps {
        let grads = painted(k + 1);
        let tensors = StepTensors::new(Lent::slice_mut(&mut params), Lent::slice(&grads));
        let tensors = match &mut states[..] {
            [] => tensors,
            [one] => tensors.states([Lent::slice_mut(one)]),
            [one, two] => tensors.states([Lent::slice_mut(one), Lent::slice_mut(two)]),
            [one, two, three, ..] => {
                tensors.states([Lent::slice_mut(one), Lent::slice_mut(two), Lent::slice_mut(three)])
            }
        };
        step.step(&tensors, Scaling::mean(3)).unwrap();
    }
    [vec![params], states].concat()
}

fn of_parameters(values: &[f32]) -> Vec<u32> {
    let runs = OFFSETS.iter().zip(LENGTHS).map(|(start, len)| &values[*start..start + len]);
    runs.flatten().map(|value| value.to_bits()).collect()
}

fn with_states<'a>(tensors: StepTensors<'a>, states: &[*mut c_void]) -> StepTensors<'a> {
    // SAFETY: this test's own device memory.
    let state = |k: usize| unsafe { Lent::at(states[k]) };
    match states.len() {
        0 => tensors,
        1 => tensors.states([state(0)]),
        2 => tensors.states([state(0), state(1)]),
        _ => tensors.states([state(0), state(1), state(2)]),
    }
}

#[test]
fn a_gpu_gives_the_cpus_bits_on_changing_streams_and_addresses() {
    let (layout, cuda) = (layout(&LENGTHS), cuda());
    let driver = cuda.driver();
    let entered = driver.enter().unwrap();
    let other = driver.create_stream(0).unwrap();
    if entered {
        driver.leave();
    }
    for (optim, is_apart) in few_optimizers().into_iter().flat_map(|optim| [(optim, false), (optim, true)]) {
        let expected = on_host(&layout, optim, STEPS);
        let mut device = Device::new(&cuda);
        let builder = BucketStep::builder(&layout, optim.boxed()).bucket(described(&layout));
        let mut step = builder.cuda(&cuda).unwrap();
        let states: Vec<_> = expected[1..].iter().map(|_| device.hold(&vec![0f32; LEN])).collect();
        let mut params = device.hold(&painted(0));
        let each = |base: *mut c_void| OFFSETS.map(|at| base.wrapping_byte_add(4 * at));
        for k in 0..STEPS {
            let stream = if k % 3 == 1 { other } else { StreamHandle::default() };
            let grads = device.hold(&painted(k + 1));
            if k % 4 == 3 {
                // Elsewhere from now on, with the same values.
                let values = device.read(params, LEN, stream);
                params = device.hold(&values);
            }
            let [each_param, each_grad] = [each(params), each(grads)];
            // SAFETY: this test's own device memory, which nothing else touches before it reads it.
            unsafe {
                let tensors = if is_apart {
                    StepTensors::new(Lent::at_each(&each_param), Lent::at_each(&each_grad))
                } else {
                    StepTensors::new(Lent::at(params), Lent::at(grads))
                };
                step.enqueue(&with_states(tensors, &states), Scaling::mean(3), stream).unwrap();
            }
            // The host waits here: the next step is on another stream, and the copies above on none of them.
            device.read(params, 1, stream);
            assert_eq!(step.step_count(layout.id("p0").unwrap()).unwrap(), k as u64 + 1);
        }
        let found = [&[params][..], &states].concat();
        for (found, expected) in found.into_iter().zip(&expected) {
            let found = device.read(found, LEN, StreamHandle::default());
            assert!(of_parameters(&found) == of_parameters(expected), "{optim:?}, apart: {is_apart}");
        }
    }
    let entered = driver.enter().unwrap();
    // SAFETY: nothing is on it any more.
    unsafe { driver.destroy_stream(other) };
    if entered {
        driver.leave();
    }
}

/// Returns a bucket of one parameter on a stand-in, and its tensors.
fn small(cuda: &Cuda, device: &mut Device) -> (BucketStep<OnGpu>, [*mut c_void; 2]) {
    let layout = Layout::builder().param("a", 4).param("b", 4).build().unwrap();
    let step = BucketStep::builder(&layout, Sgd::default()).cuda(cuda).unwrap();
    (step, [device.hold(&[1.0; 8]), device.hold(&[1.0; 8])])
}

#[test]
fn a_gpu_passes_over_a_frozen_parameter_from_the_next_step_on() {
    let cuda = cuda();
    let mut device = Device::new(&cuda);
    let (mut step, [params, grads]) = small(&cuda, &mut device);
    let layout = step.layout().clone();
    let [a, b] = ["a", "b"].map(|name| layout.id(name).unwrap());
    for frozen in [false, true, true, false] {
        step.set_frozen(b, frozen).unwrap();
        // SAFETY: this test's own device memory.
        unsafe {
            let tensors = StepTensors::new(Lent::at(params), Lent::at(grads));
            step.enqueue(&tensors, Scaling::NONE, StreamHandle::default()).unwrap();
        }
    }
    assert_eq!((step.step_count(a).unwrap(), step.step_count(b).unwrap()), (4, 2));
    let found = device.read(params, 8, StreamHandle::default());
    assert_eq!(found[4] - 1.0, (found[0] - 1.0) / 2.0);
    assert!(found[..4].iter().all(|p| *p == found[0]) && found[4..].iter().all(|p| *p == found[4]));
}

#[test]
fn a_step_is_one_launch_and_copies_addresses_only_when_they_change() {
    let stand_in = StandIn::new();
    let cuda = Cuda::on(stand_in.clone());
    let mut device = Device::new(&cuda);
    let (mut step, [params, grads]) = small(&cuda, &mut device);
    let other = device.hold(&[1.0; 8]);
    let each = |base: *mut c_void| [base, base.wrapping_byte_add(16)];
    let mut work = |params: [*mut c_void; 2], is_apart: bool| {
        stand_in.take_calls();
        // SAFETY: this test's own device memory.
        unsafe {
            let tensors = if is_apart {
                StepTensors::new(Lent::at_each(&params), Lent::at(grads))
            } else {
                StepTensors::new(Lent::at(params[0]), Lent::at(grads))
            };
            step.enqueue(&tensors, Scaling::NONE, StreamHandle::default()).unwrap();
        }
        let calls = stand_in.take_calls();
        let count = |is: fn(&Call) -> bool| calls.iter().filter(|call| is(call)).count();
        [
            count(|call| matches!(call, Call::Launch { .. })),
            count(|call| matches!(call, Call::CopyOnDevice { .. })),
            count(|call| matches!(call, Call::Copy { .. } | Call::Make { .. })),
        ]
    };
    assert_eq!(work(each(params), false), [1, 0, 0]);
    assert_eq!(work(each(other), false), [1, 0, 0]);
    let first = work(each(params), true);
    assert_eq!(first[..2], [1, 1], "the tables are made here");
    assert_eq!(work(each(params), true), [1, 0, 0]);
    assert_eq!(work(each(other), true), [1, 1, 0]);
    assert_eq!(work(each(params), false), [1, 0, 0]);
}

#[test]
fn what_a_gpu_cannot_reach_is_refused_before_any_launch() {
    let stand_in = StandIn::new();
    let cuda = Cuda::on(stand_in.clone());
    let mut device = Device::new(&cuda);
    let layout = Layout::builder().param("a", 4).param("b", 4).build().unwrap();
    let adamw = || BucketStep::builder(&layout, AdamW::default());
    assert!(matches!(adamw().isa(Isa::Baseline).cuda(&cuda), Err(Error::Config { field: "isa", .. })));
    assert!(matches!(
        adamw().pool(Pool::new(1).unwrap()).cuda(&cuda),
        Err(Error::Config { field: "pool", .. })
    ));
    let none = cuda.clone().max_blocks(0);
    assert!(matches!(adamw().cuda(&none), Err(Error::Config { field: "max_blocks", .. })));
    let mut step = adamw().cuda(&cuda).unwrap();
    let all = [(); 4].map(|()| device.hold(&[1.0; 8]));
    stand_in.take_calls();
    let (mut on_host, apart) = ([0f32; 8], [all[2], all[2].wrapping_byte_add(16)]);
    // SAFETY: this test's own device memory.
    unsafe {
        let tensors = StepTensors::new(Lent::slice_mut(&mut on_host), Lent::at(all[1]));
        let tensors = tensors.states([Lent::at(all[2]), Lent::at(all[3])]);
        let refused = step.enqueue(&tensors, Scaling::NONE, StreamHandle::default());
        assert!(refused.unwrap_err().to_string().contains("a slice of the host's memory"));
        let tensors = StepTensors::new(Lent::at(all[0]), Lent::at(all[1]));
        let tensors = tensors.states([Lent::at_each(&apart), Lent::at(all[3])]);
        let refused = step.enqueue(&tensors, Scaling::NONE, StreamHandle::default());
        assert!(refused.unwrap_err().to_string().contains("only parameters and gradients may lie apart"));
        let tensors = StepTensors::new(Lent::at(all[0]), Lent::at(all[1])).states([Lent::at(all[2])]);
        let refused = step.enqueue(&tensors, Scaling::NONE, StreamHandle::default());
        assert!(refused.unwrap_err().to_string().contains("missing"));
    }
    assert_eq!(stand_in.take_calls(), []);
}

#[test]
fn a_failed_launch_is_remembered_and_a_dropped_bucket_leaves_nothing() {
    let stand_in = StandIn::new();
    let cuda = Cuda::on(stand_in.clone());
    {
        let mut device = Device::new(&cuda);
        let (mut step, [params, grads]) = small(&cuda, &mut device);
        let each = [params, params.wrapping_byte_add(16)];
        let mut enqueue = || {
            // SAFETY: this test's own device memory.
            unsafe {
                let tensors = StepTensors::new(Lent::at_each(&each), Lent::at(grads));
                step.enqueue(&tensors, Scaling::NONE, StreamHandle::default())
            }
        };
        enqueue().unwrap();
        stand_in.break_call("launch");
        assert!(matches!(enqueue(), Err(Error::Device { call: "launch", .. })));
        assert!(matches!(enqueue(), Err(Error::Poisoned { .. })));
    }
    assert_eq!(stand_in.allocated_bytes(), 0);
}

#[test]
fn a_bucket_dropped_after_a_step_failed_half_way_frees_nothing_that_its_first_launch_may_use() {
    let stand_in = StandIn::new();
    let cuda = Cuda::on(stand_in.clone());
    {
        let mut device = Device::new(&cuda);
        let layout = Layout::builder().param("a", 8).build().unwrap();
        let mut step = BucketStep::builder(&layout, Lamb::default()).cuda(&cuda).unwrap();
        let [params, grads, first, second] = [(); 4].map(|()| device.hold(&[1.0; 8]));
        stand_in.break_call_after("launch", 2);
        stand_in.stall();
        // SAFETY: this test's own device memory.
        let failed = unsafe {
            let tensors = StepTensors::new(Lent::at(params), Lent::at(grads));
            let tensors = tensors.states([Lent::at(first), Lent::at(second)]);
            step.enqueue(&tensors, Scaling::NONE, StreamHandle::default())
        };
        assert!(matches!(failed, Err(Error::Device { call: "launch", .. })));
    }
    assert!(stand_in.allocated_bytes() > 0, "the first launch still runs");
    stand_in.go_on();
    stand_in.forget_memory();
}

#[test]
fn a_rate_and_a_count_that_are_set_reach_the_next_step() {
    let cuda = cuda();
    let layout = Layout::builder().param("a", 8).build().unwrap();
    let id = layout.id("a").unwrap();
    let mut device = Device::new(&cuda);
    let mut step = BucketStep::builder(&layout, Sgd { lr: 1.0, ..Sgd::default() }).cuda(&cuda).unwrap();
    let [params, grads] = [device.hold(&[0.0; 8]), device.hold(&[1.0; 8])];
    step.set_step_count(id, 40).unwrap();
    for k in 0..10 {
        step.set_lr("default", f64::from(k)).unwrap();
        // SAFETY: this test's own device memory.
        let tensors = unsafe { StepTensors::new(Lent::at(params), Lent::at(grads)) };
        // SAFETY: as above, on the default stream.
        unsafe { step.enqueue(&tensors, Scaling::NONE, StreamHandle::default()).unwrap() };
    }
    assert_eq!(step.step_count(id).unwrap(), 50);
    assert_eq!(device.read(params, 8, StreamHandle::default()), [-45.0; 8]);
}

#[test]
fn a_norm_on_a_gpu_decides_and_clips_as_the_cpus_does() {
    let (layout, cuda) = (layout(&LENGTHS), cuda());
    let grads = painted(1);
    let mut spoiled = grads.clone();
    spoiled[OFFSETS[2] + 5] = f32::INFINITY;
    let sgd = || Sgd { lr: 1.0, ..Sgd::default() };
    for grads in [grads, spoiled] {
        let mut on_cpu = BucketStep::builder(&layout, sgd()).bucket(described(&layout)).host().unwrap();
        let (mut expected, mut norm) = (painted(0), GradNorm::host().unwrap());
        norm.begin(Scaling::mean(2)).unwrap();
        on_cpu.add_norm(&Lent::slice(&grads), &mut norm).unwrap();
        let largest = f32::from_bits(*norm.sum().unwrap().largest);
        let decision = norm.decide(Some(0.5), true).unwrap();
        let tensors = StepTensors::new(Lent::slice_mut(&mut expected), Lent::slice(&grads));
        on_cpu.step_decided(&tensors, &mut norm).unwrap();

        let mut device = Device::new(&cuda);
        let mut step = BucketStep::builder(&layout, sgd()).bucket(described(&layout)).cuda(&cuda).unwrap();
        let mut norm = GradNorm::cuda(&cuda).unwrap();
        let [params, at] = [device.hold(&painted(0)), device.hold(&grads)];
        let stream = StreamHandle::default();
        // SAFETY: this test's own device memory, on the default stream.
        unsafe {
            norm.enqueue_begin(Scaling::mean(2), stream).unwrap();
            step.enqueue_norm(&Lent::at(at), &mut norm, stream).unwrap();
            let tensors = StepTensors::new(Lent::at(params), Lent::at(at));
            let early = step.enqueue_decided(&tensors, &mut norm, stream);
            assert!(matches!(early, Err(Error::Order(_))));
            let sum = norm.enqueue_sum(stream).unwrap();
            let at = with_exposed_provenance_mut(sum.largest.0 as usize);
            assert!(device.read(at, 1, stream)[0].to_bits() == largest.to_bits());
            norm.enqueue_decide(Some(0.5), true, stream).unwrap();
            step.enqueue_decided(&tensors, &mut norm, stream).unwrap();
        }
        assert!(norm.decision().unwrap().norm.to_bits() == decision.norm.to_bits());
        assert_eq!(norm.decision().unwrap().skipped, decision.skipped);
        let found = device.read(params, LEN, stream);
        assert!(of_parameters(&found) == of_parameters(&expected));
    }
}

#[test]
fn a_gpu_passes_over_what_has_no_gradient_and_norms_leave_it_out() {
    let cuda = cuda();
    let layout = layout(&LENGTHS);
    let ids: Vec<_> = layout.ids().collect();
    let (stream, sgd) = (StreamHandle::default(), Sgd { lr: 0.5, momentum: 0.5, ..Sgd::default() });
    let build = || BucketStep::builder(&layout, sgd).bucket(described(&layout));
    let (mut freezes, mut lacks) = (build().host().unwrap(), build().cuda(&cuda).unwrap());
    let (mut norm, mut norm_on_gpu) = (GradNorm::host().unwrap(), GradNorm::cuda(&cuda).unwrap());
    let mut device = Device::new(&cuda);
    let (mut expected, mut buffer) = (painted(0), vec![0f32; LEN]);
    let [params, state] = [device.hold(&expected), device.hold(&buffer)];
    for (k, lacking) in
        [[false; 4], [true, true, false, false], [true; 4], [false; 4]].into_iter().enumerate()
    {
        let mut grads = painted(k + 1);
        let at = device.hold(&grads);
        let mut each = OFFSETS.map(|offset| at.wrapping_byte_add(4 * offset));
        for (param, _) in lacking.iter().enumerate().filter(|(_, lacks)| **lacks) {
            each[param] = std::ptr::null_mut();
            grads[OFFSETS[param]..][..LENGTHS[param]].fill(f32::NAN);
        }
        ids.iter().zip(lacking).for_each(|(id, lacks)| freezes.set_frozen(*id, lacks).unwrap());
        norm.begin(Scaling::mean(3)).unwrap();
        freezes.add_norm(&Lent::slice(&grads), &mut norm).unwrap();
        let decision = norm.decide(Some(1.0), true).unwrap();
        let tensors = StepTensors::new(Lent::slice_mut(&mut expected), Lent::slice(&grads));
        freezes.step_decided(&tensors.states([Lent::slice_mut(&mut buffer)]), &mut norm).unwrap();
        // SAFETY: this test's own device memory, on the default stream.
        unsafe {
            norm_on_gpu.enqueue_begin(Scaling::mean(3), stream).unwrap();
            lacks.enqueue_norm(&Lent::at_each(&each), &mut norm_on_gpu, stream).unwrap();
            norm_on_gpu.enqueue_decide(Some(1.0), true, stream).unwrap();
            let tensors = StepTensors::new(Lent::at(params), Lent::at_each(&each)).states([Lent::at(state)]);
            lacks.enqueue_decided(&tensors, &mut norm_on_gpu, stream).unwrap();
        }
        assert_eq!(norm_on_gpu.decision().unwrap().norm.to_bits(), decision.norm.to_bits(), "step {k}");
    }
    for id in ids {
        assert_eq!(lacks.step_count(id).unwrap(), freezes.step_count(id).unwrap());
    }
    for (found, expected) in [(params, &expected), (state, &buffer)] {
        assert!(of_parameters(&device.read(found, LEN, stream)) == of_parameters(expected));
    }
}

#[test]
fn a_gpus_norm_takes_each_bucket_once_and_steps_it_once() {
    let cuda = cuda();
    let mut device = Device::new(&cuda);
    let (mut step, [params, grads]) = small(&cuda, &mut device);
    let (mut other, _) = small(&cuda, &mut device);
    let (mut norm, stream) = (GradNorm::cuda(&cuda).unwrap(), StreamHandle::default());
    let refused = |outcome: instep::Result<()>, words: &str| {
        let error = outcome.unwrap_err();
        assert!(matches!(error, Error::Order(_)) && error.to_string().contains(words), "{error}");
    };
    // SAFETY: this test's own device memory, on the default stream.
    unsafe {
        norm.enqueue_begin(Scaling::NONE, stream).unwrap();
        refused(norm.enqueue_decide(None, true, stream), "norm: no bucket was added");
        step.enqueue_norm(&Lent::at(grads), &mut norm, stream).unwrap();
        refused(
            step.enqueue_norm(&Lent::at(grads), &mut norm, stream),
            "bucket of `a`: added to this norm already",
        );
        norm.enqueue_decide(None, true, stream).unwrap();
        let tensors = StepTensors::new(Lent::at(params), Lent::at(grads));
        refused(other.enqueue_decided(&tensors, &mut norm, stream), "bucket of `a`: not added to this norm");
        step.enqueue_decided(&tensors, &mut norm, stream).unwrap();
        refused(step.enqueue_decided(&tensors, &mut norm, stream), "bucket of `a`: stepped by this decision");
        norm.enqueue_begin(Scaling::NONE, stream).unwrap();
        norm.enqueue_sum(stream).unwrap();
        norm.enqueue_decide(None, true, stream).unwrap();
    }
    assert_eq!(norm.decision().unwrap().norm, 0.0);
    assert_eq!(device.read(params, 1, stream), [1.0 - Sgd::default().lr as f32]);
}
