//! The StepTensors of a bucket in memory of the test, of any type, at any aligned address.
//!
//! Every tensor is surrounded by bytes that a step must not touch.

use std::ffi::c_void;

use instep::bucket_step::{Lent, StepTensors};
use instep::layout::Storage;
use instep::{BucketStep, DType, Element, Layout, Master, Moments, ParamId};

use crate::support::lent::{Ground, Tensor};
use crate::support::stored::Stored;

/// Number of elements before and after each run that must stay unchanged.
const GUARD: usize = 8;
const GUARD_BYTE: u8 = 0xa5;

/// The runs of one kind of tensor: one per parameter, or one for the bucket.
#[derive(Clone)]
pub(super) struct Runs {
    bytes: Vec<Vec<u64>>,
    /// Start and length of each run, in bytes.
    starts: Vec<usize>,
    lens: Vec<usize>,
}

impl Runs {
    fn new(lens: &[usize], unit: usize, shift: usize) -> Runs {
        let starts = vec![(GUARD + shift) * unit; lens.len()];
        let lens: Vec<usize> = lens.iter().map(|len| len * unit).collect();
        let bytes = lens.iter().zip(&starts).map(|(len, start)| {
            let mut run = vec![u64::from_ne_bytes([GUARD_BYTE; 8]); (start + len + GUARD * unit).div_ceil(8)];
            bytemuck::cast_slice_mut(&mut run)[*start..start + len].fill(0u8);
            run
        });
        Runs { bytes: bytes.collect(), starts, lens }
    }

    fn run(&self, index: usize) -> &[u8] {
        &bytemuck::cast_slice(&self.bytes[index])[self.starts[index]..][..self.lens[index]]
    }

    pub(super) fn run_mut(&mut self, index: usize) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.bytes[index])[self.starts[index]..][..self.lens[index]]
    }

    fn on(&self, ground: &Ground) -> Vec<Tensor> {
        let tensor = |index: usize| {
            let tensor = Tensor::new(ground, self.lens[index], self.starts[index] % 16);
            tensor.write(self.run(index));
            tensor
        };
        (0..self.bytes.len()).map(tensor).collect()
    }

    fn addresses(&mut self) -> Vec<*mut c_void> {
        (0..self.bytes.len()).map(|index| self.run_mut(index).as_mut_ptr().cast()).collect()
    }

    #[track_caller]
    fn assert_guarded(&self) {
        for (index, run) in self.bytes.iter().enumerate() {
            let bytes: &[u8] = bytemuck::cast_slice(run);
            let (start, end) = (self.starts[index], self.starts[index] + self.lens[index]);
            assert!(
                bytes[..start].iter().chain(&bytes[end..]).all(|byte| *byte == GUARD_BYTE),
                "outside run {index}"
            );
        }
    }
}

/// All tensors of one bucket.
#[derive(Clone)]
pub(super) struct Own {
    pub(super) ids: Vec<ParamId>,
    lens: Vec<usize>,
    /// Each parameter's offset in a run for the whole bucket.
    pub(super) offsets: Vec<usize>,
    pub(super) len: usize,
    is_whole: bool,
    storage: Storage,
    pub(super) params: Runs,
    pub(super) grads: Runs,
    others: Vec<(Kind, Runs)>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Master,
    Copy,
    Ema,
    State,
    Scales,
}

impl Own {
    /// `shift` moves each run by this number of elements of its type.
    pub(super) fn new(
        layout: &Layout,
        ids: &[ParamId],
        (storage, states): (&Storage, usize),
        is_whole: bool,
        shift: usize,
    ) -> Own {
        let lens: Vec<usize> = ids.iter().map(|id| layout.parameter(*id).unwrap().len as usize).collect();
        let gap = if storage.precision.moments == Moments::EightBit { 256 } else { 3 };
        let (mut offsets, mut len) = (Vec::new(), gap);
        for of_param in &lens {
            offsets.push(len);
            len = (len + of_param).next_multiple_of(gap);
        }
        let units = |elements: usize| -> Vec<usize> {
            let all = if is_whole { vec![len] } else { lens.clone() };
            all.iter().map(|len| len.div_ceil(elements)).collect()
        };
        let runs = |bytes: u64| Runs::new(&units(1), bytes as usize, shift);
        let precision = storage.precision;
        let mut others = Vec::new();
        if precision.master != Master::None {
            others.push((Kind::Master, runs(precision.master.bytes())));
        }
        others.extend(storage.copy.map(|dtype| (Kind::Copy, runs(dtype.bytes()))));
        others.extend(storage.ema.then(|| (Kind::Ema, runs(4))));
        for _ in 0..states {
            others.push((Kind::State, runs(precision.moments.bytes())));
            if precision.moments == Moments::EightBit {
                others.push((Kind::Scales, Runs::new(&units(256), 4, shift)));
            }
        }
        let (params, grads) = (runs(precision.param.bytes()), runs(precision.grad.bytes()));
        Own { ids: ids.to_vec(), lens, offsets, len, is_whole, storage: *storage, params, grads, others }
    }

    /// Returns the same contents at other addresses.
    pub(super) fn moved(&self, layout: &Layout, is_whole: bool, shift: usize) -> Own {
        let states = self.others.iter().filter(|(kind, _)| *kind == Kind::State).count();
        let mut moved = Own::new(layout, &self.ids, (&self.storage, states), is_whole, shift);
        (0..self.ids.len()).for_each(|index| moved.take(index, self, index));
        moved
    }

    /// Copies the tensors of one parameter from another bucket of the same storage.
    pub(super) fn take(&mut self, index: usize, from: &Own, from_index: usize) {
        let place = |own: &Own, runs: &Runs, index| {
            (if own.is_whole { 0 } else { index }, own.range(runs, index, own.is_whole))
        };
        let all = |own: &Own| own.others.len() + 2;
        assert_eq!(all(self), all(from), "the same kinds of tensors");
        for kind in 0..all(from) {
            let (run, range) = place(from, from.runs(kind), from_index);
            let bytes = from.runs(kind).run(run)[range].to_vec();
            let (run, range) = place(self, self.runs(kind), index);
            self.runs_mut(kind).run_mut(run)[range].copy_from_slice(&bytes);
        }
    }

    fn runs(&self, kind: usize) -> &Runs {
        match kind {
            0 => &self.params,
            1 => &self.grads,
            kind => &self.others[kind - 2].1,
        }
    }

    fn runs_mut(&mut self, kind: usize) -> &mut Runs {
        match kind {
            0 => &mut self.params,
            1 => &mut self.grads,
            kind => &mut self.others[kind - 2].1,
        }
    }

    /// Returns the bytes of a parameter in a run.
    fn range(&self, runs: &Runs, index: usize, is_whole: bool) -> std::ops::Range<usize> {
        if !is_whole {
            return 0..runs.lens[index];
        }
        // Of a unit: bytes of an element, or of the scale of 256.
        let per = runs.lens[0] as f64 / self.len as f64;
        let (bytes, elements) = if per < 0.5 { (4, 256) } else { (runs.lens[0] / self.len, 1) };
        let (start, count) = (self.offsets[index] / elements, self.lens[index].div_ceil(elements));
        start * bytes..(start + count) * bytes
    }

    pub(super) fn write(&mut self, index: usize, values: &[f32], is_gradient: bool) {
        let precision = self.storage.precision;
        let dtype = if is_gradient { precision.grad } else { precision.param };
        let runs = if is_gradient { &self.grads } else { &self.params };
        let (range, run) = (self.range(runs, index, self.is_whole), if self.is_whole { 0 } else { index });
        let bytes = encoded(dtype, values);
        let runs = if is_gradient { &mut self.grads } else { &mut self.params };
        runs.run_mut(run)[range].copy_from_slice(&bytes);
        if !is_gradient && precision.master == Master::F32 {
            let (_, master) = self.others.iter_mut().find(|(kind, _)| *kind == Kind::Master).unwrap();
            let start = if self.is_whole { self.offsets[index] * 4 } else { 0 };
            master.run_mut(run)[start..][..values.len() * 4].copy_from_slice(&encoded(DType::F32, values));
        }
    }

    pub(super) fn param_bits(&self, index: usize) -> Vec<u32> {
        self.bits(&self.params, self.storage.precision.param, index)
    }

    /// Returns the bits of copies, averages, masters and states; it leaves out tensors whose bits do not follow from
    /// f32 values.
    pub(super) fn other_bits(&self, index: usize) -> Vec<(&'static str, Vec<u32>)> {
        let precision = self.storage.precision;
        let state = match precision.moments {
            Moments::F32 => Some(DType::F32),
            Moments::BF16 => Some(DType::BF16),
            Moments::EightBit => None,
        };
        let of = |(kind, runs): &(Kind, Runs)| {
            let (name, dtype) = match kind {
                Kind::Master => ("value", (precision.master == Master::F32).then_some(DType::F32)),
                Kind::Copy => ("copy", self.storage.copy),
                Kind::Ema => ("average", Some(DType::F32)),
                Kind::State => ("state", state),
                Kind::Scales => ("scales", None),
            };
            Some((name, self.bits(runs, dtype?, index)))
        };
        self.others.iter().filter_map(of).collect()
    }

    fn bits(&self, runs: &Runs, dtype: DType, index: usize) -> Vec<u32> {
        let bytes = &runs.run(if self.is_whole { 0 } else { index })[self.range(runs, index, self.is_whole)];
        let of = |chunk: &[u8]| match dtype {
            DType::F32 => u32::from_ne_bytes(chunk.try_into().unwrap()),
            DType::BF16 => bytemuck::pod_read_unaligned::<half::bf16>(chunk).to_f32().to_bits(),
            _ => bytemuck::pod_read_unaligned::<half::f16>(chunk).to_f32().to_bits(),
        };
        bytes.chunks(dtype.bytes() as usize).map(of).collect()
    }

    /// Asserts that a parameter, its tensors and its count are the same bits as in a stepper.
    #[track_caller]
    pub(super) fn assert_same(
        &self,
        params: &[usize],
        step: &BucketStep,
        expected: &Stored,
        what: &dyn std::fmt::Debug,
    ) {
        for (index, param) in params.iter().enumerate() {
            let of = |name: &str| &expected.params[*param].iter().find(|(known, _)| known == name).unwrap().1;
            assert!(self.param_bits(index) == *of("parameter as stored"), "parameter {param}: {what:?}");
            let mut states = expected.params[*param][2..].iter();
            for (name, bits) in self.other_bits(index) {
                let wanted = match name {
                    "state" => &states.next().unwrap().1,
                    name => of(name),
                };
                assert!(bits == *wanted, "{name} of parameter {param}: {what:?}");
            }
            let count = step.step_count(self.ids[index]).unwrap();
            assert_eq!(*of("step count"), [count as u32], "{what:?}");
        }
    }

    /// Calls `step` with these tensors.
    #[track_caller]
    pub(super) fn lend<T>(&mut self, step: impl FnOnce(&StepTensors<'_>) -> T) -> T {
        let addresses: Vec<_> =
            (0..self.others.len() + 2).map(|kind| self.runs_mut(kind).addresses()).collect();
        let outcome = self.with(&addresses, step);
        (0..addresses.len()).for_each(|kind| self.runs(kind).assert_guarded());
        outcome
    }

    /// Calls `step` with copies of these tensors on a GPU, and copies the results back.
    #[track_caller]
    pub(super) fn lend_on_gpu<T>(&mut self, ground: &Ground, step: impl FnOnce(&StepTensors<'_>) -> T) -> T {
        let held: Vec<Vec<Tensor>> =
            (0..self.others.len() + 2).map(|kind| self.runs(kind).on(ground)).collect();
        let addresses = |of: &Vec<Tensor>| of.iter().map(|tensor| tensor.address().cast()).collect();
        let outcome = self.with(&held.iter().map(addresses).collect::<Vec<_>>(), step);
        for (kind, tensors) in held.iter().enumerate() {
            for (index, tensor) in tensors.iter().enumerate() {
                tensor.assert_bands_stand();
                self.runs_mut(kind).run_mut(index).copy_from_slice(&tensor.read());
            }
        }
        outcome
    }

    /// Asserts that all bytes equal those of another bucket.
    #[track_caller]
    pub(super) fn assert_equal(&self, other: &Own, what: &dyn std::fmt::Debug) {
        for kind in 0..self.others.len() + 2 {
            let (found, expected) = (self.runs(kind), other.runs(kind));
            for index in 0..found.bytes.len() {
                assert!(found.run(index) == expected.run(index), "tensor {kind}, run {index}: {what:?}");
            }
        }
    }

    fn with<T>(&self, addresses: &[Vec<*mut c_void>], step: impl FnOnce(&StepTensors<'_>) -> T) -> T {
        let (params, grads, others) = (&addresses[0], &addresses[1], &addresses[2..]);
        let others: Vec<(Kind, &Vec<*mut c_void>)> =
            self.others.iter().zip(others).map(|((kind, _), of)| (*kind, of)).collect();
        // SAFETY: memory of the caller's, which `self` describes; the types are those of the precision.
        let tensor = |addresses: &'_ Vec<*mut c_void>| unsafe {
            let addresses = std::slice::from_raw_parts(addresses.as_ptr(), addresses.len());
            if self.is_whole { Lent::at(addresses[0]) } else { Lent::at_each(addresses) }
        };
        let mut tensors = StepTensors::new(tensor(params), tensor(grads));
        let mut states: Vec<_> = others.iter().filter(|(kind, _)| *kind == Kind::State).collect();
        let mut scales: Vec<_> = others.iter().filter(|(kind, _)| *kind == Kind::Scales).collect();
        for (kind, addresses) in &others {
            tensors = match kind {
                Kind::Master => tensors.master(tensor(addresses)),
                Kind::Copy => tensors.copy(tensor(addresses)),
                Kind::Ema => tensors.ema(tensor(addresses)),
                Kind::State | Kind::Scales => tensors,
            };
        }
        let next = |from: &mut Vec<&(Kind, &Vec<*mut c_void>)>| tensor(from.remove(0).1);
        tensors = match states.len() {
            0 => tensors,
            1 => tensors.states([next(&mut states)]),
            2 => tensors.states([next(&mut states), next(&mut states)]),
            _ => tensors.states([next(&mut states), next(&mut states), next(&mut states)]),
        };
        tensors = match scales.len() {
            0 => tensors,
            1 => tensors.scales([next(&mut scales)]),
            2 => tensors.scales([next(&mut scales), next(&mut scales)]),
            _ => tensors.scales([next(&mut scales), next(&mut scales), next(&mut scales)]),
        };
        step(&tensors)
    }
}

fn encoded(dtype: DType, values: &[f32]) -> Vec<u8> {
    fn of<T: Element + bytemuck::NoUninit>(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| bytemuck::bytes_of(&T::from_f32(*value)).to_vec()).collect()
    }
    match dtype {
        DType::F32 => of::<f32>(values),
        DType::BF16 => of::<half::bf16>(values),
        _ => of::<half::f16>(values),
    }
}
