//! A plan: the launches for lists of tensors with given lengths and formats.
//!
//! Each launch is a [`BucketStep`]. Every call passes the addresses of the tensors to the plan.
#![allow(unsafe_code)]

use std::mem;
use std::ptr;

use instep::bucket_step::{Lent, StepTensors};
use instep::optim::{Descriptor, Value};
use instep::{
    BucketStep, DEFAULT_GROUP, DType, Layout, Master, Moments, Optimizer, ParamId, Precision, Rounding,
    Scaling,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::found::{CARRIED, COPIES, COUNTS, Format, Found, GRADS, PARAMS, STATES};
use crate::arguments::Addresses;
use crate::device::pool;
use crate::errors::raised;
use crate::openmp::OpenMp;
use crate::tensors::Word;

/// The properties by which a call finds its plan, in addition to lengths and formats.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Key {
    pub(super) process: u32,
    pub(super) threads: usize,
    /// A bit mask with a bit for each list that was given.
    pub(super) lists: u32,
}

/// Launches for lists of these lengths and formats.
pub(super) struct Plan {
    pub(super) key: Key,
    pub(super) formats: Vec<Format>,
    pub(super) lens: Vec<u64>,
    pub(super) hyper: Vec<Value>,
    pub(super) parts: Vec<Part>,
    /// For each empty parameter, a spare element for each list. The updates of an empty parameter are counted too, so a
    /// launch gets one spare element for it.
    pub(super) spare: Vec<u64>,
    /// The start and end of each tensor's memory, and the tensor's number, in the order of the start addresses in the
    /// last call. In the next call, this order is often nearly sorted, so the sort is fast.
    pub(super) spans: Vec<(usize, usize, u32)>,
}

/// The parameters of one format. One launch steps them.
pub(super) struct Part {
    pub(super) step: BucketStep,
    pub(super) ids: Vec<ParamId>,
    /// The indices of these parameters in the lists.
    pub(super) members: Vec<usize>,
    pub(super) format: Format,
    /// Whether the optimizer carries a number in addition to each count.
    pub(super) carries: bool,
    /// The counts and carried numbers that `step` has. A call sets only those numbers that have changed.
    pub(super) progress: Vec<(u64, f64)>,
    /// For each list, the addresses of the part's tensors. A step does not use them if the plan has only one part.
    pub(super) addresses: Vec<Addresses>,
}

impl Plan {
    pub(super) fn new(
        key: Key,
        found: &Found,
        descriptor: &'static Descriptor,
        hyper: Vec<Value>,
        openmp: usize,
    ) -> PyResult<Plan> {
        let optimizer = optimizer(descriptor, &hyper)?;
        // SAFETY: the Python half finds the function in the runtime that PyTorch has loaded, which is never unloaded.
        let openmp = unsafe { OpenMp::at(openmp) };
        let pool = pool(key.threads, openmp)?;
        let mut of_format: Vec<(Format, Vec<usize>)> = Vec::new();
        for (k, format) in found.formats.iter().enumerate() {
            match of_format.iter_mut().find(|(known, _)| known == format) {
                Some((_, members)) => members.push(k),
                None => of_format.push((*format, vec![k])),
            }
        }
        let mut parts = Vec::new();
        for (format, members) in of_format {
            let layout = members.iter().fold(Layout::builder(), |layout, k| {
                layout.param(format!("params[{k}]"), found.lens[*k].max(1) as usize)
            });
            let layout = layout.build().map_err(raised)?;
            let moments = if format.state == Word::BF16 { Moments::BF16 } else { Moments::F32 };
            let of = |word: Word| word.dtype().unwrap_or(DType::F32);
            let precision = Precision {
                param: of(format.param),
                grad: of(format.grad),
                master: Master::None,
                moments,
                rounding: Rounding::Nearest,
            };
            let mut builder =
                BucketStep::builder(&layout, optimizer.clone()).precision(precision).pool(pool.clone());
            if let Some(copy) = format.copy {
                builder = builder.copy_params(of(copy));
            }
            let ids: Vec<ParamId> = layout.ids().collect();
            let step = builder.host().map_err(raised)?;
            let progress = vec![(0, 1.0); members.len()];
            let (carries, addresses) = (descriptor.carried.is_some(), Vec::new());
            parts.push(Part { step, ids, members, format, carries, progress, addresses });
        }
        let (formats, lens) = (found.formats.clone(), found.lens.clone());
        Ok(Plan { key, formats, lens, hyper, parts, spare: Vec::new(), spans: Vec::new() })
    }

    pub(super) fn set_hyper(&mut self, descriptor: &'static Descriptor, hyper: Vec<Value>) -> PyResult<()> {
        match hyper[0] {
            // A schedule changes only the learning rate.
            Value::Number(lr) if hyper[1..] == self.hyper[1..] => {
                self.parts
                    .iter_mut()
                    .try_for_each(|part| part.step.set_lr(DEFAULT_GROUP, lr))
                    .map_err(raised)?;
            }
            _ => {
                let optimizer = optimizer(descriptor, &hyper)?;
                let set = |part: &mut Part| part.step.set_optimizer(DEFAULT_GROUP, &*optimizer);
                self.parts.iter_mut().try_for_each(set).map_err(raised)?;
            }
        }
        self.hyper = hyper;
        Ok(())
    }

    /// Copies the addresses of each part's tensors from `found` into the part.
    pub(super) fn gather(&mut self, found: &Found) {
        for part in &mut self.parts {
            part.addresses.resize_with(found.addresses.len(), Addresses::default);
            for (own, all) in part.addresses.iter_mut().zip(&found.addresses) {
                own.0.clear();
                if !all.0.is_empty() {
                    own.0.extend(part.members.iter().map(|k| all.0[*k]));
                }
            }
        }
    }

    /// Replaces the address of each empty parameter, and of its gradient, copy and states, by that of a spare element.
    pub(super) fn fill_empty(&mut self, found: &mut Found) {
        let lists = found.addresses.len();
        let empty = self.lens.iter().enumerate().filter(|(_, len)| **len == 0);
        self.spare.clear();
        self.spare.resize(lists * empty.clone().count(), 0);
        for ((k, _), own) in empty.zip(self.spare.chunks_exact_mut(lists)) {
            for (list, element) in
                own.iter_mut().enumerate().filter(|(list, _)| !matches!(*list, COUNTS | CARRIED))
            {
                if let Some(at) =
                    found.addresses[list].0.get_mut(k).filter(|at| list == PARAMS || !at.is_null())
                {
                    *at = ptr::from_mut(element).cast();
                }
            }
        }
    }

    /// Returns the numbers of two tensors that overlap in memory, if there are such tensors and the step writes one of
    /// them. A tensor's number is the number of its parameter times the number of lists, plus the number of its list.
    pub(super) fn overlap(&mut self, found: &Found) -> Option<(u32, u32)> {
        let lists = found.addresses.len();
        let span = |number: u32| {
            let (list, k) = (number as usize % lists, number as usize / lists);
            let at = found.addresses[list].0.get(k).map_or(0, |at| at.expose_provenance());
            let bytes = found.formats[k].bytes(list, found.lens[k]);
            (at, at.saturating_add(if at == 0 { 0 } else { bytes }), number)
        };
        let count = found.lens.len() * lists;
        if self.spans.len() == count {
            self.spans.iter_mut().for_each(|known| *known = span(known.2));
        } else {
            self.spans = (0..count as u32).map(span).collect();
        }
        self.spans.sort_by_key(|(start, ..)| *start);
        let (mut any, mut written) = ((0, 0), (0, 0));
        for (start, end, number) in self.spans.iter().copied().filter(|(start, end, _)| end > start) {
            let is_written = number as usize % lists != GRADS;
            let (reach, other) = if is_written { any } else { written };
            if start < reach {
                let mut both = [other, number];
                both.sort_by_key(|number| (*number as usize % lists, *number));
                return Some(both.into());
            }
            any = any.max((end, number));
            if is_written {
                written = written.max((end, number));
            }
        }
        None
    }

    /// Returns whether each count still has the value that the last step wrote. Also returns `false` if the optimizer
    /// carries numbers, or if f32 may round a count. The caller must then read all counts again.
    ///
    /// # Safety
    /// `found` has the address of an initialised f32 for each count.
    pub(super) unsafe fn has_current_counts(&self, found: &Found) -> bool {
        let is_known = |(k, (count, _)): (&usize, &(u64, f64))| {
            // SAFETY: the caller's promise.
            let read = unsafe { found.addresses[COUNTS].0[*k].cast::<f32>().read_unaligned() };
            *count < 1 << f32::MANTISSA_DIGITS && read == *count as u32 as f32
        };
        let knows = |part: &Part| !part.carries && part.members.iter().zip(&part.progress).all(is_known);
        self.parts.iter().all(knows)
    }

    /// Sets the counts and carried numbers that have changed since the last call.
    pub(super) fn set_counts(&mut self, found: &Found, descriptor: &Descriptor) -> PyResult<()> {
        for part in &mut self.parts {
            for (at, k) in part.members.iter().enumerate() {
                let progress = found.progress[*k];
                if part.progress[at] != progress {
                    part.step.set_step_count(part.ids[at], progress).map_err(|error| {
                        let name = descriptor.carried.unwrap_or("state_step");
                        PyValueError::new_err(format!("{name}s[{k}]: {error}"))
                    })?;
                    part.progress[at] = progress;
                }
            }
        }
        Ok(())
    }

    /// Steps all parts, and writes the new counts and carried numbers into their tensors. `again` means that the last
    /// call of this plan had the same addresses.
    pub(super) fn run(&mut self, found: &Found, scaling: Scaling, again: bool) -> instep::Result<()> {
        if let [part] = &mut *self.parts {
            return part.run(&found.addresses, scaling, again);
        }
        if !again {
            self.gather(found);
        }
        for part in &mut self.parts {
            let addresses = mem::take(&mut part.addresses);
            let outcome = part.run(&addresses, scaling, again);
            part.addresses = addresses;
            outcome?;
        }
        Ok(())
    }
}

impl Part {
    fn run(&mut self, addresses: &[Addresses], scaling: Scaling, again: bool) -> instep::Result<()> {
        // SAFETY: addresses of dense tensors of these types and lengths that do not overlap, as checked. The lists of
        // the call, or the storages of a prepared one, keep them alive.
        unsafe {
            let each = |list: usize| Lent::at_each(&addresses[list].0);
            let states = (STATES..addresses.len()).filter(|list| !addresses[*list].0.is_empty());
            let mut tensors = StepTensors::new(each(PARAMS), each(GRADS)).states(states.map(each));
            if self.format.copy.is_some() {
                tensors = tensors.copy(each(COPIES));
            }
            if again { self.step.step_again(scaling) } else { self.step.step(&tensors, scaling) }?;
            let [grads, counts, carried] = [GRADS, COUNTS, CARRIED].map(|list| &*addresses[list].0);
            for (at, progress) in self.progress.iter_mut().enumerate().filter(|(at, _)| !grads[*at].is_null())
            {
                progress.0 += 1;
                counts[at].cast::<f32>().write_unaligned(progress.0 as f32);
                if !self.carries {
                    continue;
                }
                progress.1 = self.step.carried(self.ids[at])?.unwrap_or(1.0);
                match self.format.carried {
                    Word::F32 => carried[at].cast::<f32>().write_unaligned(progress.1 as f32),
                    _ => carried[at].cast::<f64>().write_unaligned(progress.1),
                }
            }
        }
        Ok(())
    }
}

/// Makes an optimizer with these values of its hyperparameters.
pub(super) fn optimizer(descriptor: &'static Descriptor, hyper: &[Value]) -> PyResult<Box<dyn Optimizer>> {
    let mut optimizer = descriptor.build();
    for (field, value) in descriptor.fields.iter().zip(hyper) {
        optimizer.set(field.name, *value).map_err(raised)?;
    }
    Ok(optimizer)
}
