//! Steps lists of the caller's tensors with one optimizer.
//!
//! [`Lists`] stores plans between calls, but no tensors. A plan has the lengths and formats of tensors, and the
//! corresponding launches. Each call reads addresses, counts and values from the tensors. A call checks all tensors
//! before it writes anything.
#![allow(unsafe_code)]

mod found;
mod moved;
mod plan;

use std::mem;
use std::process;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use instep::bucket_step::Lent;
use instep::optim::{Descriptor, Value};
use instep::{GradNorm, Pool, Scaling};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple, PyType};

use crate::arguments::Addresses;
use crate::device::Owner;
use crate::errors::raised;
use crate::openmp::OpenMp;
use crate::optimizers::{all_state_names, descriptor};
use crate::tensors::{Reader, Word};
use found::{
    CARRIED, COPIES, COUNTS, Finder, Format, Found, GRADS, PARAMS, STATES, read_progress, refuse_negative,
    refuse_unfit, refused_count,
};
use moved::{LEAST_DETACHED, LEAST_MEAN, LEAST_SHARED, Move};
use plan::{Key, Plan, optimizer};

/// The largest number of plans that an optimizer stores. A call for a whole model needs one plan. A program that steps
/// each parameter separately needs one plan for each length.
const MOST_PLANS: usize = 64;

/// The lists of a call, which keep the call's tensors alive.
type TensorLists<'py> = Vec<Option<Bound<'py, PyList>>>;

/// Plans and memory of earlier calls, for use in later calls.
#[derive(Default)]
struct Idle {
    plans: Vec<Plan>,
    /// Memory for the addresses and counts that a call finds.
    found: Vec<Found>,
    /// The last hyperparameters, and the result of `Lists::kept` for them.
    kept: Option<(Vec<Value>, u32)>,
}

/// Two functions of torch, and the address of `GOMP_parallel` in torch's OpenMP runtime (0 without such a runtime).
struct Torch {
    get_num_threads: Py<PyAny>,
    increment_version: Py<PyAny>,
    openmp: usize,
}

/// Steps lists of tensors with one optimizer.
#[pyclass(frozen, module = "instep._native")]
pub(crate) struct Lists {
    finder: Finder,
    torch: Torch,
    owner: Owner,
    idle: Mutex<Idle>,
}

/// Steps the same tensors in every call.
#[pyclass(frozen, module = "instep._native")]
pub(crate) struct Prepared {
    owner: Owner,
    descriptor: &'static Descriptor,
    /// The plan, the tensors, and whether the plan has stepped these tensors.
    inner: Mutex<(Plan, Found, bool)>,
    /// The tensors' storages, which keep the memory of the tensors alive.
    _keeps: Vec<Py<PyAny>>,
}

#[pymethods]
impl Lists {
    /// Makes the object for the optimizer with this key. The reader of tensors gets `tensor`, `parameter` and
    /// `exchange`. `torch` has torch's `get_num_threads` and `increment_version`, and the address of `GOMP_parallel` or
    /// 0.
    #[new]
    #[pyo3(signature = (key, tensor, parameter, exchange, torch))]
    fn new(
        key: &str,
        tensor: Py<PyType>,
        parameter: &Bound<'_, PyType>,
        exchange: Option<&Bound<'_, PyAny>>,
        torch: (Py<PyAny>, Py<PyAny>, usize),
    ) -> PyResult<Lists> {
        let (descriptor, states) = (descriptor(key)?, all_state_names(key)?);
        let finder = Finder { descriptor, states, reader: Reader::new(tensor, parameter, exchange)? };
        let (get_num_threads, increment_version, openmp) = torch;
        let torch = Torch { get_num_threads, increment_version, openmp };
        // A child that is forked while another thread reads this would wait for that thread for ever.
        LazyLock::force(&moved::CACHE_BYTES);
        Ok(Lists { finder, torch, owner: Owner::current(), idle: Mutex::default() })
    }

    /// Steps the tensors of these lists. `lists` has the parameters, gradients, counts, copies, carried numbers and
    /// states, in this order. Each of these items is a list or None. `hyper` has every hyperparameter, in the order of
    /// the optimizer's fields.
    fn step(
        &self,
        py: Python<'_>,
        lists: &Bound<'_, PyTuple>,
        hyper: &Bound<'_, PyTuple>,
        gradient_scale: f64,
        threads: Option<i64>,
    ) -> PyResult<()> {
        let scaling = scaling(gradient_scale)?;
        let (mut plan, found, lists) = self.plan(py, lists, hyper, threads)?;
        plan.set_counts(&found, self.finder.descriptor)?;
        // A plan that has failed is dropped, because it is unknown how far its step went.
        py.detach(|| plan.run(&found, scaling, false)).map_err(raised)?;
        self.tell_autograd(&lists, &found)?;
        self.keep(plan, found);
        Ok(())
    }

    /// Makes an object that steps these tensors in every call. The object keeps the tensors' storages alive. The object
    /// is valid as long as the tensors keep their addresses and sizes.
    fn prepare(
        &self,
        py: Python<'_>,
        lists: &Bound<'_, PyTuple>,
        hyper: &Bound<'_, PyTuple>,
        threads: Option<i64>,
    ) -> PyResult<Prepared> {
        let (plan, found, lists) = self.plan(py, lists, hyper, threads)?;
        let (descriptor, inner) = (self.finder.descriptor, Mutex::new((plan, found, false)));
        let tensors = lists.iter().flatten().flat_map(|list| list.iter()).filter(|tensor| !tensor.is_none());
        let storages =
            tensors.map(|tensor| Ok(tensor.call_method0(intern!(py, "untyped_storage"))?.unbind()));
        let _keeps = storages.collect::<PyResult<_>>()?;
        Ok(Prepared { owner: Owner::current(), descriptor, inner, _keeps })
    }

    /// Returns the exact norm of a list's tensors, and the factor that clips them to `max_norm`.
    fn norm(
        &self,
        py: Python<'_>,
        tensors: &Bound<'_, PyAny>,
        max_norm: Option<f64>,
        threads: Option<i64>,
    ) -> PyResult<(f64, f64)> {
        let mut norm = GradNorm::host().map_err(raised)?;
        norm.begin(Scaling::NONE).map_err(raised)?;
        let list = self.finder.list(tensors, GRADS)?;
        let mut found = self.memory(GRADS + 1);
        for k in 0..list.len() {
            let tensor = list.get_item(k)?;
            let view = self.finder.reader.read(&tensor, || format!("tensors[{k}]"))?;
            refuse_unfit(&view, &tensor, || format!("tensors[{k}]"), |word| word.dtype().is_some())?;
            refuse_negative(&view, &tensor, || format!("tensors[{k}]"))?;
            let (param, state) = (Word::F32, Word::F32);
            found.formats.push(Format { param, grad: view.word, state, copy: None, carried: Word::F64 });
            found.lens.push(view.len());
            found.addresses[GRADS].push(if view.len() == 0 { 0 } else { view.address });
        }
        let key = self.key(py, 0, threads)?;
        let mut plan = match self.take(key, &found) {
            Some(plan) => plan,
            None => {
                let hyper = self.finder.descriptor.fields.iter().map(|field| field.default).collect();
                Plan::new(key, &found, self.finder.descriptor, hyper, self.openmp())?
            }
        };
        let decision = py.detach(|| {
            plan.gather(&found);
            for part in &mut plan.parts {
                // SAFETY: addresses of dense tensors, which the list keeps alive during the call.
                unsafe { part.step.add_norm(&Lent::at_each(&part.addresses[GRADS].0), &mut norm)? };
            }
            if plan.parts.is_empty() {
                norm.sum()?;
            }
            norm.decide(max_norm, false)
        });
        let decision = decision.map_err(raised)?;
        self.keep(plan, found);
        Ok((decision.norm, decision.clip))
    }

    /// Copies each tensor of `tensors` into the tensor at the same index in `into`. If `adds` is true, adds the
    /// elements instead.
    fn r#move(
        &self,
        py: Python<'_>,
        into: &Bound<'_, PyAny>,
        tensors: &Bound<'_, PyAny>,
        adds: bool,
        threads: Option<i64>,
    ) -> PyResult<()> {
        let lists = [self.finder.list_of("into", into)?, self.finder.list_of("tensors", tensors)?];
        if lists[0].len() != lists[1].len() {
            let (into, tensors) = (lists[0].len(), lists[1].len());
            let text = format!("tensors: {tensors} for {into} to write; give one for each");
            return Err(PyValueError::new_err(text));
        }
        let count = lists[0].len();
        let mut moves = Vec::with_capacity(count);
        // The spans of each list are stored together. The tensors of a list often lie in memory in the order of the
        // list, and then the sort has nothing to move.
        let mut spans = vec![(0, 0, 0); 2 * count];
        for k in 0..count {
            let (into, tensor) = (lists[0].get_item(k)?, lists[1].get_item(k)?);
            let [own, other] = [(&into, "into"), (&tensor, "tensors")].map(|(tensor, list)| {
                let name = || format!("{list}[{k}]");
                let view = self.finder.reader.read(tensor, name)?;
                refuse_unfit(&view, tensor, name, |word| matches!(word, Word::F32 | Word::BF16))?;
                refuse_negative(&view, tensor, name)?;
                Ok::<_, PyErr>(view)
            });
            let (own, other) = (own?, other?);
            if own.shape != other.shape || !own.lies_as(&other) {
                let (shape, strides) = (&own.shape, &own.strides);
                return Err(PyValueError::new_err(format!(
                    "tensors[{k}]: shape {:?} and strides {:?}, where into[{k}] has {shape:?} and {strides:?}; give \
                     one with its order of elements",
                    other.shape, other.strides
                )));
            }
            let len = own.len() as usize;
            for (view, number) in [(&own, k), (&other, count + k)] {
                spans[number] = (view.address, view.address + len * view.word.size(), number);
            }
            moves.push(Move { into: (own.address, own.word), from: (other.address, other.word), len });
        }
        spans.retain(|(start, end, _)| end > start);
        spans.sort_by_key(|(start, ..)| *start);
        let (mut any, mut written) = ((0, 0), (0, 0));
        for (start, end, number) in spans {
            let (reach, other) = if number < count { any } else { written };
            if start < reach {
                let name = |number: usize| match number.checked_sub(count) {
                    Some(k) => format!("tensors[{k}]"),
                    None => format!("into[{number}]"),
                };
                let text = format!("{} and {}: overlap; give each its own memory", name(other), name(number));
                return Err(PyValueError::new_err(text));
            }
            any = any.max((end, number));
            if number < count {
                written = written.max((end, number));
            }
        }
        let elements: usize = moves.iter().map(|one| one.len).sum();
        let threads = match threads {
            None if elements < LEAST_SHARED.max(count * LEAST_MEAN) => 1,
            threads => self.threads(py, threads)?,
        };
        if threads == 1 && elements < LEAST_DETACHED {
            // SAFETY: dense tensors of these types that do not overlap, as checked; the GIL keeps the lists alive.
            unsafe { moved::run(&moves, adds, 1, None) };
            self.torch.increment_version.call1(py, (&lists[0],))?;
            return Ok(());
        }
        // SAFETY: the Python half finds the function in the runtime that PyTorch has loaded, which is never unloaded.
        let openmp = unsafe { OpenMp::at(self.openmp()) };
        // SAFETY: dense tensors of these types that do not overlap, as checked; the lists keep them alive.
        py.detach(|| unsafe { moved::run(&moves, adds, threads, openmp) });
        self.torch.increment_version.call1(py, (&lists[0],))?;
        Ok(())
    }
}

#[pymethods]
impl Prepared {
    /// Steps the tensors. If `lr` is given, it is the learning rate of this call and of all later calls.
    #[pyo3(signature = (*, lr=None, gradient_scale=1.0))]
    fn __call__(&self, py: Python<'_>, lr: Option<f64>, gradient_scale: f64) -> PyResult<()> {
        self.owner.refuse_child()?;
        let scaling = scaling(gradient_scale)?;
        let busy = || PyRuntimeError::new_err("prepared call: in use by another thread; wait for it");
        let mut inner = self.inner.try_lock().map_err(|_| busy())?;
        let (plan, found, has_run) = &mut *inner;
        if let Some(lr) = lr.map(Value::Number).filter(|lr| *lr != plan.hyper[0]) {
            let mut hyper = plan.hyper.clone();
            hyper[0] = lr;
            plan.set_hyper(self.descriptor, hyper)?;
        }
        // SAFETY: the counts are f32 numbers in memory that the storages keep alive, by the contract of this object.
        if !unsafe { plan.has_current_counts(found) } {
            let Found { addresses, formats, progress, .. } = &mut *found;
            for (k, progress) in progress.iter_mut().enumerate() {
                let carried =
                    addresses[CARRIED].0.get(k).map(|at| (at.expose_provenance(), formats[k].carried));
                // SAFETY: these are numbers of these types in memory that the storages keep alive, by the contract of
                // this object.
                let read = unsafe { read_progress(addresses[COUNTS].0[k].expose_provenance(), carried) };
                *progress = read.ok_or_else(|| refused_count(&format!("state_steps[{k}]")))?;
            }
            plan.set_counts(found, self.descriptor)?;
        }
        let again = mem::take(has_run);
        py.detach(|| plan.run(found, scaling, again)).map_err(raised)?;
        *has_run = true;
        Ok(())
    }
}

impl Lists {
    /// Reads the lists, and returns the plan for them with these hyperparameters. Also returns copies of the lists,
    /// which keep the tensors alive.
    fn plan<'py>(
        &self,
        py: Python<'py>,
        lists: &Bound<'py, PyTuple>,
        hyper: &Bound<'py, PyTuple>,
        threads: Option<i64>,
    ) -> PyResult<(Plan, Found, TensorLists<'py>)> {
        let hyper = self.finder.hyper(hyper)?;
        let kept = self.kept(&hyper)?;
        let lists = self.finder.lists(lists, kept)?;
        let mut found = self.memory(lists.len());
        self.finder.find(&lists, &mut found)?;
        let is_there = lists.iter().enumerate().map(|(k, list)| u32::from(list.is_some()) << k).sum();
        let key = self.key(py, is_there, threads)?;
        let mut plan = match self.take(key, &found) {
            Some(mut plan) => {
                if plan.hyper != hyper {
                    plan.set_hyper(self.finder.descriptor, hyper)?;
                }
                plan
            }
            None => py.detach(|| Plan::new(key, &found, self.finder.descriptor, hyper, self.openmp()))?,
        };
        plan.fill_empty(&mut found);
        if let Some((one, other)) = plan.overlap(&found) {
            let name =
                |number: u32| self.finder.name(number as usize % lists.len(), number as usize / lists.len());
            let text = format!("{} and {}: overlap; give each its own memory", name(one), name(other));
            return Err(PyValueError::new_err(text));
        }
        Ok((plan, found, lists))
    }

    fn key(&self, py: Python<'_>, lists: u32, threads: Option<i64>) -> PyResult<Key> {
        Ok(Key { process: process::id(), threads: self.threads(py, threads)?, lists })
    }

    /// Returns the user's number of threads. If the user gives none, returns the number of threads of torch's own
    /// loops.
    fn threads(&self, py: Python<'_>, threads: Option<i64>) -> PyResult<usize> {
        let most = Pool::MAX_THREADS;
        let Some(threads) = threads else {
            return Ok(self.torch.get_num_threads.call0(py)?.extract::<usize>(py)?.clamp(1, most));
        };
        let known = usize::try_from(threads).ok().filter(|threads| (1..=most).contains(threads));
        known.ok_or_else(|| {
            PyValueError::new_err(format!("threads = {threads}: out of range; use 1 to {most}, or None"))
        })
    }

    /// Returns the address of `GOMP_parallel`. In a forked child, returns 0, because torch's threads do not exist
    /// there.
    fn openmp(&self) -> usize {
        if self.owner.is_elsewhere() { 0 } else { self.torch.openmp }
    }

    /// Increments the version counters of the parameters and copies that the step has changed. Autograd then refuses a
    /// backward pass through their old values.
    fn tell_autograd(&self, lists: &TensorLists<'_>, found: &Found) -> PyResult<()> {
        for list in [PARAMS, COPIES] {
            let Some(tensors) = &lists[list] else { continue };
            let py = tensors.py();
            let is_none = |list: usize| found.addresses[list].0.iter().any(|at| at.is_null());
            if is_none(GRADS) || is_none(list) {
                let has =
                    |k: &usize| [GRADS, list].iter().all(|list| !found.addresses[*list].0[*k].is_null());
                let some = (0..tensors.len()).filter(has).map(|k| tensors.get_item(k));
                let some = PyList::new(py, some.collect::<PyResult<Vec<_>>>()?)?;
                self.torch.increment_version.call1(py, (some,))?;
            } else {
                self.torch.increment_version.call1(py, (tensors,))?;
            }
        }
        Ok(())
    }

    /// Returns a bit mask with a bit for each list of states that the optimizer needs with these hyperparameters. The
    /// mask does not depend on the learning rate.
    fn kept(&self, hyper: &[Value]) -> PyResult<u32> {
        if let Some((_, kept)) = self.idle().kept.as_ref().filter(|(known, _)| known[1..] == hyper[1..]) {
            return Ok(*kept);
        }
        let names = optimizer(self.finder.descriptor, hyper)?.state_names();
        let kept = |k: usize| u32::from(names.contains(&self.finder.states[k])) << (STATES + k);
        let kept = (0..self.finder.states.len()).map(kept).sum();
        self.idle().kept = Some((hyper.to_vec(), kept));
        Ok(kept)
    }

    fn idle(&self) -> MutexGuard<'_, Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns memory for the addresses and counts that a call finds.
    fn memory(&self, lists: usize) -> Found {
        let mut found = self.idle().found.pop().unwrap_or_default();
        found.formats.clear();
        found.lens.clear();
        found.progress.clear();
        found.addresses.resize_with(lists, Addresses::default);
        found.addresses.iter_mut().for_each(|list| list.0.clear());
        found
    }

    /// Removes a plan for these lists and returns it. If another thread calls before the plan is stored again, that
    /// call uses another stored plan for these lists, or makes its own plan.
    fn take(&self, key: Key, found: &Found) -> Option<Plan> {
        let plans = &mut self.idle().plans;
        let fits = |plan: &Plan| plan.key == key && plan.lens == found.lens && plan.formats == found.formats;
        let at = plans.iter().rposition(fits)?;
        Some(plans.remove(at))
    }

    /// Stores a plan for the next call with the same formats and lengths. Also stores `found`, memory that any later
    /// call may use.
    fn keep(&self, plan: Plan, found: Found) {
        let mut idle = self.idle();
        if idle.plans.len() >= MOST_PLANS {
            idle.plans.remove(0);
        }
        idle.plans.push(plan);
        if idle.found.is_empty() {
            idle.found.push(found);
        }
    }
}

/// Returns the scaling that multiplies each gradient by this factor.
fn scaling(gradient_scale: f64) -> PyResult<Scaling> {
    if !(gradient_scale.is_finite() && gradient_scale >= 0.0) {
        let text =
            format!("gradient_scale = {gradient_scale}: out of range; use a finite number of 0 or more");
        return Err(PyValueError::new_err(text));
    }
    // Division by a power of two is exact. The quotient is at most 1, so it is a valid clip coefficient.
    let mut power = 1.0;
    while gradient_scale * power > 1.0 {
        power /= 2.0;
    }
    Ok(Scaling::NONE.loss_scale(power).clip(gradient_scale * power))
}
