//! A step on a GPU is one launch, and its argument holds Begin's results. Counts move from the host to the GPU.
//!
//! The tests run on the stand-in for the driver, or with `INSTEP_REQUIRE_GPU=1` on a real GPU. The CPU runs each
//! program too, and its bits and counts must be the same after each call.

use std::ffi::c_void;

use instep::abi::{INSTEP_GIVEN_INDICES, INSTEP_GIVEN_RECORDS};
use instep::bucket_step::{Lent, OnGpu, StepTensors};
use instep::cuda::Cuda;
use instep::layout::{ForeignBucket, Storage};
use instep::{AdamW, BucketStep, DType, GradNorm, Gradients, Layout, ParamId, Scaling, Sgd, StreamHandle};

use super::gpu::Device;
use super::memory::Own;
use crate::support::device::cuda;
use crate::support::lent::{Ground, Random, stream};
use crate::support::stand_in::StandIn;
use crate::support::stand_in::calls::Call;
use crate::support::stored::{accepted, dyadic};
use crate::support::{Optim, few_optimizers, layout, paint};

const STREAM: StreamHandle = StreamHandle(0);
const EMA_DECAY: f64 = 0.75;

/// The same bucket on the CPU and on a GPU.
struct Both {
    on_cpu: BucketStep,
    on_gpu: BucketStep<OnGpu>,
    norm: GradNorm,
    norm_on_gpu: GradNorm<instep::bucket_step::NormOnGpu>,
    ids: Vec<ParamId>,
    /// Parameters, states and the optional moving average, on the CPU and on the GPU.
    tensors: Vec<(Vec<f32>, *mut c_void)>,
    has_ema: bool,
    device: Device,
    len: usize,
    calls: usize,
}

impl Both {
    fn new(cuda: &Cuda, lens: &[usize], optim: Optim, has_ema: bool) -> Both {
        let (layout, len) = (layout(lens), lens.iter().sum());
        let mut device = Device::new(cuda);
        let mut builder = BucketStep::builder(&layout, optim.boxed());
        builder = if has_ema { builder.ema(EMA_DECAY) } else { builder };
        let others = optim.boxed().state_names().len() + usize::from(has_ema);
        let first = (0..len).map(|k| paint(0, k)).collect::<Vec<_>>();
        let tensors = std::iter::once(first).chain(vec![vec![0f32; len]; others]);
        Both {
            on_cpu: builder.clone().host().unwrap(),
            on_gpu: builder.cuda(cuda).unwrap(),
            norm: GradNorm::host().unwrap(),
            norm_on_gpu: GradNorm::cuda(cuda).unwrap(),
            ids: layout.ids().collect(),
            tensors: tensors.map(|values| (device.hold(&values), values)).map(|(at, v)| (v, at)).collect(),
            has_ema,
            device,
            len,
            calls: 0,
        }
    }

    /// Steps both buckets; `scaler` is another program's scale and flag, or else the norm decides.
    fn step(&mut self, scaling: Scaling, scaler: Option<[f32; 2]>, by_norm: bool) {
        self.calls += 1;
        let grads: Vec<f32> = (0..self.len).map(|k| paint(self.calls, k)).collect();
        let grads_on_gpu = self.device.hold(&grads);
        let at_of = |values: &[f32; 2]| (&raw const values[0], &raw const values[1]);
        let scaler_on_gpu = scaler.map(|values| self.device.hold(&values).cast::<f32>().cast_const());
        // SAFETY: two numbers each, of this call and of the test's device memory.
        let [scaling, scaling_on_gpu] = unsafe {
            let here = scaler.as_ref().map(at_of);
            let there = scaler_on_gpu.map(|at| (at, at.wrapping_add(1)));
            [here, there].map(|at| at.map_or(scaling, |(scale, found)| scaling.grad_scaler(scale, found)))
        };
        // SAFETY: this test's own memory, on the default stream.
        unsafe {
            let (grads, on_gpu) = (Lent::slice(&grads), Lent::at(grads_on_gpu));
            if by_norm {
                self.norm.begin(scaling).unwrap();
                self.on_cpu.add_norm(&grads, &mut self.norm).unwrap();
                self.norm.decide(Some(0.5), true).unwrap();
                self.norm_on_gpu.enqueue_begin(scaling_on_gpu, STREAM).unwrap();
                self.on_gpu.enqueue_norm(&on_gpu, &mut self.norm_on_gpu, STREAM).unwrap();
                self.norm_on_gpu.enqueue_decide(Some(0.5), true, STREAM).unwrap();
            }
            let there: Vec<_> = self.tensors.iter().map(|(_, at)| *at).collect();
            let mut here = self.tensors.iter_mut().map(|(values, _)| Lent::slice_mut(values));
            let (mut tensors, mut tensors_on_gpu) =
                (StepTensors::new(here.next().unwrap(), grads), StepTensors::new(Lent::at(there[0]), on_gpu));
            let mut here: Vec<_> = here.collect();
            let mut there: Vec<_> = there[1..].iter().map(|at| Lent::at(*at)).collect();
            if self.has_ema {
                tensors = tensors.ema(here.pop().unwrap());
                tensors_on_gpu = tensors_on_gpu.ema(there.pop().unwrap());
            }
            let (tensors, tensors_on_gpu) = (tensors.states(here), tensors_on_gpu.states(there));
            if by_norm {
                self.on_cpu.step_decided(&tensors, &mut self.norm).unwrap();
                self.on_gpu.enqueue_decided(&tensors_on_gpu, &mut self.norm_on_gpu, STREAM).unwrap();
            } else {
                self.on_cpu.step(&tensors, scaling).unwrap();
                self.on_gpu.enqueue(&tensors_on_gpu, scaling_on_gpu, STREAM).unwrap();
            }
        }
    }

    #[track_caller]
    fn assert_equal(&self, what: impl std::fmt::Debug) {
        for (index, (values, at)) in self.tensors.iter().enumerate() {
            let found = self.device.read(*at, self.len, STREAM);
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert!(bits(&found) == bits(values), "{what:?}: tensor {index} after {} calls", self.calls);
        }
        for id in &self.ids {
            let counts = (self.on_gpu.step_count(*id).unwrap(), self.on_cpu.step_count(*id).unwrap());
            assert_eq!(counts.0, counts.1, "{what:?}: {id:?} after {} calls", self.calls);
            let carried = (self.on_gpu.carried(*id).unwrap(), self.on_cpu.carried(*id).unwrap());
            assert_eq!(carried.0.map(f64::to_bits), carried.1.map(f64::to_bits), "{what:?}: {id:?}");
        }
    }

    /// Sets counts to `first`, `first + 1` and so on, and returns the number of launches of a step.
    fn launches(&mut self, stand_in: &StandIn, first: Option<u64>) -> usize {
        for (k, id) in self.ids.iter().enumerate() {
            let Some(first) = first else { break };
            self.on_cpu.set_step_count(*id, first + k as u64).unwrap();
            self.on_gpu.set_step_count(*id, first + k as u64).unwrap();
        }
        stand_in.take_calls();
        self.step(Scaling::mean(3), None, false);
        stand_in.take_calls().iter().filter(|call| matches!(call, Call::Launch { .. })).count()
    }
}

#[test]
fn a_step_that_the_host_decides_is_one_launch_and_lambs_are_two_after_its_begin() {
    for optim in few_optimizers() {
        let stand_in = StandIn::new();
        let mut both = Both::new(&Cuda::on(stand_in.clone()), &[300, 0, 2100, 17], optim, false);
        let expected = if optim.descriptor.name == "LAMB" { 3 } else { 1 };
        for _ in 0..3 {
            assert_eq!(both.launches(&stand_in, None), expected, "{optim:?}");
        }
        both.assert_equal(optim);
    }
}

#[test]
fn as_many_different_records_as_an_argument_holds_are_one_launch_and_one_more_is_begun_on_the_gpu() {
    let sgd = Optim::of(Sgd { lr: 0.5, momentum: 0.5, ..Sgd::default() });
    let most = INSTEP_GIVEN_RECORDS as usize;
    for (params, expected) in [(most, 1), (most + 1, 2)] {
        let stand_in = StandIn::new();
        let mut both = Both::new(&Cuda::on(stand_in.clone()), &vec![5; params], sgd, false);
        assert_eq!(both.launches(&stand_in, None), 1, "{params} equal records");
        assert_eq!(both.launches(&stand_in, Some(7)), expected, "{params} counts");
        both.assert_equal(params);
        // Once there, the counts stay on the GPU.
        assert_eq!(both.launches(&stand_in, None), expected, "{params} counts, once more");
        both.assert_equal(params);
    }
}

#[test]
fn as_many_parameters_as_an_argument_holds_are_one_launch_and_one_more_is_begun_on_the_gpu() {
    let most = INSTEP_GIVEN_INDICES as usize;
    for (params, expected) in [(most, 1), (most + 1, 2)] {
        let stand_in = StandIn::new();
        let sgd = Optim::of(Sgd { lr: 0.5, ..Sgd::default() });
        let mut both = Both::new(&Cuda::on(stand_in.clone()), &vec![1; params], sgd, false);
        assert_eq!(both.launches(&stand_in, None), expected, "{params} parameters");
        both.assert_equal(params);
    }
}

/// Begin runs on the host, in every format. The cases alternate copies and averages. They keep, zero and average
/// gradients, leave one out, and put two kinds of optimizer into one bucket.
#[test]
fn every_format_has_the_cpus_bits_in_buckets_of_two_kinds_of_optimizer() {
    let (cuda, lens) = (cuda(), [300, 17, 2100, 40]);
    let builder = lens.iter().enumerate().fold(Layout::builder(), |builder, (k, len)| {
        let builder = builder.param(format!("p{k}"), *len);
        if k % 2 == 0 { builder } else { builder.in_group("others") }
    });
    let layout = builder.build().unwrap();
    let ids: Vec<ParamId> = layout.ids().collect();
    let gradients = [Gradients::Keep, Gradients::Zero, Gradients::Average];
    let ground = Ground::of(&cuda);
    for (at, precision) in accepted().enumerate() {
        let storage = Storage { precision, copy: (at % 2 == 0).then_some(DType::BF16), ema: at % 3 == 0 };
        let what = (precision, gradients[at % 3]);
        let mut here = Own::new(&layout, &ids, (&storage, 2), true, at % 3);
        let listed = ids.iter().zip(&here.offsets);
        let bucket = listed.fold(ForeignBucket::new(here.len), |bucket, (id, at)| bucket.gradient(*id, *at));
        let builder = BucketStep::builder(&layout, AdamW { lr: 0.01, ..AdamW::default() })
            .group("others", Sgd { lr: 0.05, momentum: 0.9, ..Sgd::default() })
            .bucket(bucket)
            .precision(precision)
            .gradients(gradients[at % 3]);
        let builder = storage.copy.map_or(builder.clone(), |dtype| builder.copy_params(dtype));
        let builder = if storage.ema { builder.ema(EMA_DECAY) } else { builder };
        let (mut on_cpu, mut on_gpu) = (builder.clone().host().unwrap(), builder.cuda(&cuda).unwrap());
        let dyadic = |step, param| (0..lens[param]).map(|k| dyadic(step, 0, param, k)).collect::<Vec<_>>();
        (0..ids.len()).for_each(|param| here.write(param, &dyadic(7, param), false));
        let mut there = here.clone();
        for step in 0..3 {
            for own in [&mut here, &mut there] {
                (0..ids.len()).for_each(|param| own.write(param, &dyadic(step, param), true));
            }
            for id in &ids {
                let is_frozen = step == 1 && *id == ids[2];
                on_cpu.set_frozen(*id, is_frozen).unwrap();
                on_gpu.set_frozen(*id, is_frozen).unwrap();
            }
            let scaling = Scaling::mean(3).loss_scale(4.0);
            here.lend(|tensors| on_cpu.step(tensors, scaling)).unwrap();
            // SAFETY: copies of the test's own, which nothing else touches.
            there
                .lend_on_gpu(&ground, |tensors| unsafe { on_gpu.enqueue(tensors, scaling, stream()) })
                .unwrap();
            there.assert_equal(&here, &(what, step));
        }
        for id in &ids {
            assert_eq!(on_gpu.step_count(*id).unwrap(), on_cpu.step_count(*id).unwrap(), "{what:?}");
        }
    }
}

/// A third of the programs never ask the GPU for a decision; in the others some calls do.
#[test]
fn random_programs_give_the_cpus_bits_and_counts_wherever_updates_are_decided() {
    let cuda = cuda();
    for (index, optim) in few_optimizers().into_iter().enumerate() {
        for program in 0..6 {
            let mut random = Random(100 * index as u64 + program);
            let asks_gpu = program % 3 > 0;
            let mut both = Both::new(&cuda, &[300, 0, 1030, 17], optim, program % 2 == 0);
            for _ in 0..12 {
                let param = both.ids[random.below(4)];
                match random.below(8) {
                    0 if asks_gpu => both.step(Scaling::mean(2), None, true),
                    1 if asks_gpu => {
                        let found = if random.below(2) == 0 { 0.0 } else { 1.0 };
                        both.step(Scaling::mean(2), Some([8.0, found]), false);
                    }
                    2 => {
                        let freeze = random.below(2) == 0;
                        both.on_cpu.set_frozen(param, freeze).unwrap();
                        both.on_gpu.set_frozen(param, freeze).unwrap();
                    }
                    3 => {
                        let lr = 0.125 * random.below(4) as f64;
                        both.on_cpu.set_lr("default", lr).unwrap();
                        both.on_gpu.set_lr("default", lr).unwrap();
                    }
                    4 if both.on_cpu.carried(param).unwrap().is_none() => {
                        let count = random.below(1000) as u64;
                        both.on_cpu.set_step_count(param, count).unwrap();
                        both.on_gpu.set_step_count(param, count).unwrap();
                    }
                    _ => {
                        let clip = [1.0, 0.25][random.below(2)];
                        both.step(Scaling::mean(3).loss_scale(16.0).clip(clip), None, false);
                    }
                }
                both.assert_equal((optim, program));
            }
        }
    }
}
