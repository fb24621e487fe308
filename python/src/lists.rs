//! One optimizer over lists of the caller's tensors: read, checked, counted and stepped in one call.
//!
//! What stays between calls is a plan: lengths, formats and the launches for them. Addresses, counts and values are read
//! from the tensors in each call, and nothing is written before all of them have been checked.
#![allow(unsafe_code)]

use std::mem;
use std::process;
use std::ptr::{self, with_exposed_provenance_mut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use instep::bucket_step::{Lent, StepTensors};
use instep::optim::{Descriptor, Value};
use instep::{
    BucketStep, DEFAULT_GROUP, DType, GradNorm, Layout, Master, Moments, Optimizer, ParamId, Pool, Precision,
    Rounding, Scaling,
};
use pyo3::exceptions::{PyNotImplementedError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple, PyType};

use crate::arguments::Addresses;
use crate::device::{Owner, pool};
use crate::errors::raised;
use crate::openmp::OpenMp;
use crate::optimizers::{all_state_names, descriptor};
use crate::tensors::{Reader, View, Word};

/// Plans that an optimizer keeps. A model has one; a program that steps parameter by parameter has one per length.
const MOST_PLANS: usize = 64;

// The lists of a call, in order.
const PARAMS: usize = 0;
const GRADS: usize = 1;
const COUNTS: usize = 2;
const COPIES: usize = 3;
/// Numbers that the optimizer carries beside the counts.
const CARRIED: usize = 4;
/// The first of the states.
const STATES: usize = 5;

/// The types of one parameter's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Format {
    param: Word,
    grad: Word,
    state: Word,
    copy: Option<Word>,
    carried: Word,
}

/// What a plan was made for, beside lengths and formats.
#[derive(Clone, Copy, PartialEq)]
struct Key {
    process: u32,
    threads: usize,
    /// A bit for each list that is there.
    lists: u32,
}

/// The tensors of a call, list by list.
#[derive(Default)]
struct Found {
    formats: Vec<Format>,
    lens: Vec<u64>,
    /// By list; one that is not there is empty. A gradient at 0 is none.
    addresses: Vec<Addresses>,
    progress: Vec<(u64, f64)>,
}

/// Launches for lists of these lengths and formats.
struct Plan {
    key: Key,
    formats: Vec<Format>,
    lens: Vec<u64>,
    hyper: Vec<Value>,
    parts: Vec<Part>,
    /// One element for each list of each empty parameter, which counts its updates as any other does.
    spare: Vec<u64>,
    /// Start, end and number of each run of memory, as sorted in the last call: the next call's are nearly in this order.
    spans: Vec<(usize, usize, u32)>,
}

/// The parameters of one format: a launch.
struct Part {
    step: BucketStep,
    ids: Vec<ParamId>,
    /// Their places in the lists.
    members: Vec<usize>,
    format: Format,
    /// What the step has counted, so that only other counts are set.
    progress: Vec<(u64, f64)>,
    /// Its members', where the call has more than it.
    addresses: Vec<Addresses>,
}

/// What calls leave for the next ones.
#[derive(Default)]
struct Idle {
    plans: Vec<Plan>,
    /// Memory alone.
    found: Vec<Found>,
    /// Hyperparameters, and a bit for each list of states that they keep.
    kept: Option<(Vec<Value>, u32)>,
}

/// Functions of torch, and the address of its OpenMP runtime's or 0.
struct Torch {
    get_num_threads: Py<PyAny>,
    increment_version: Py<PyAny>,
    openmp: usize,
}

/// Steps lists of tensors with one optimizer.
#[pyclass(frozen, module = "instep._native")]
pub(crate) struct Lists {
    descriptor: &'static Descriptor,
    /// All that the optimizer may keep, in the order of the lists.
    states: Vec<&'static str>,
    reader: Reader,
    torch: Torch,
    owner: Owner,
    idle: Mutex<Idle>,
}

/// Steps the same tensors again and again.
#[pyclass(frozen, module = "instep._native")]
pub(crate) struct Prepared {
    owner: Owner,
    descriptor: &'static Descriptor,
    inner: Mutex<(Plan, Found)>,
    /// Storages, which keep the memory alive.
    _keeps: Vec<Py<PyAny>>,
}

#[pymethods]
impl Lists {
    /// Takes an optimizer's key, what reads tensors, and torch's `get_num_threads`, `increment_version` and the address of
    /// its `GOMP_parallel` or 0.
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
        let reader = Reader::new(tensor, parameter, exchange)?;
        let (get_num_threads, increment_version, openmp) = torch;
        let torch = Torch { get_num_threads, increment_version, openmp };
        Ok(Lists { descriptor, states, reader, torch, owner: Owner::current(), idle: Mutex::default() })
    }

    /// Steps. `lists` are parameters, gradients, counts, copies, carried numbers and all states, each a list or None; `hyper`
    /// has every hyperparameter in order.
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
        plan.set_counts(&found, self.descriptor)?;
        // A plan that has failed is dropped, for nothing says how far it went.
        py.detach(|| plan.run(&found, scaling)).map_err(raised)?;
        self.tell_autograd(&lists, &found)?;
        self.keep(plan, found);
        Ok(())
    }

    /// Makes an object that steps these tensors for as long as they lie where they do. Their storages keep their memory.
    fn prepare(
        &self,
        py: Python<'_>,
        lists: &Bound<'_, PyTuple>,
        hyper: &Bound<'_, PyTuple>,
        threads: Option<i64>,
    ) -> PyResult<Prepared> {
        let (plan, found, lists) = self.plan(py, lists, hyper, threads)?;
        let (descriptor, inner) = (self.descriptor, Mutex::new((plan, found)));
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
        let list = self.list(tensors, GRADS)?;
        let mut found = self.memory(GRADS + 1);
        for k in 0..list.len() {
            let tensor = list.get_item(k)?;
            let view = self.reader.read(&tensor, || format!("tensors[{k}]"))?;
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
                let hyper = self.descriptor.fields.iter().map(|field| field.default).collect();
                Plan::new(key, &found, self.descriptor, hyper, self.openmp())?
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
}

#[pymethods]
impl Prepared {
    /// Steps. `lr` is the learning rate from now on.
    #[pyo3(signature = (*, lr=None, gradient_scale=1.0))]
    fn __call__(&self, py: Python<'_>, lr: Option<f64>, gradient_scale: f64) -> PyResult<()> {
        self.owner.refuse_child()?;
        let scaling = scaling(gradient_scale)?;
        let busy = || PyRuntimeError::new_err("prepared call: in use by another thread; wait for it");
        let mut inner = self.inner.try_lock().map_err(|_| busy())?;
        let (plan, found) = &mut *inner;
        if let Some(lr) = lr.map(Value::Number).filter(|lr| *lr != plan.hyper[0]) {
            let mut hyper = plan.hyper.clone();
            hyper[0] = lr;
            plan.set_hyper(self.descriptor, hyper)?;
        }
        for k in 0..found.progress.len() {
            let at = |list: usize| found.addresses[list].0.get(k).map_or(0, |at| at.expose_provenance());
            let carried = Some((at(CARRIED), found.formats[k].carried)).filter(|(at, _)| *at != 0);
            // SAFETY: numbers of these types in memory that the storages keep, as this object's contract has it.
            let progress = unsafe { read_progress(at(COUNTS), carried) };
            found.progress[k] = progress.ok_or_else(|| refused_count(&format!("state_steps[{k}]")))?;
        }
        plan.set_counts(found, self.descriptor)?;
        py.detach(|| plan.run(found, scaling)).map_err(raised)
    }
}

impl Lists {
    /// Stands for the address of an empty tensor, which may be 0.
    const EMPTY: usize = 64;

    /// Reads the lists and finds the plan for them, with these hyperparameters. The lists that it returns keep the tensors.
    fn plan<'py>(
        &self,
        py: Python<'py>,
        lists: &Bound<'py, PyTuple>,
        hyper: &Bound<'py, PyTuple>,
        threads: Option<i64>,
    ) -> PyResult<(Plan, Found, Vec<Option<Bound<'py, PyList>>>)> {
        let hyper = self.hyper(hyper)?;
        let kept = self.kept(&hyper)?;
        let lists = self.lists(lists, kept)?;
        let mut found = self.memory(lists.len());
        self.find(&lists, &mut found)?;
        let is_there = lists.iter().enumerate().map(|(k, list)| u32::from(list.is_some()) << k).sum();
        let key = self.key(py, is_there, threads)?;
        let mut plan = match self.take(key, &found) {
            Some(mut plan) => {
                if plan.hyper != hyper {
                    plan.set_hyper(self.descriptor, hyper)?;
                }
                plan
            }
            None => py.detach(|| Plan::new(key, &found, self.descriptor, hyper, self.openmp()))?,
        };
        plan.fill_empty(&mut found);
        if let Some((one, other)) = plan.overlap(&found) {
            let name = |number: u32| self.name(number as usize % lists.len(), number as usize / lists.len());
            let text = format!("{} and {}: overlap; give each its own memory", name(one), name(other));
            return Err(PyValueError::new_err(text));
        }
        Ok((plan, found, lists))
    }

    /// Threads as the user says, or as many as torch's own loops have.
    fn key(&self, py: Python<'_>, lists: u32, threads: Option<i64>) -> PyResult<Key> {
        let most = Pool::MAX_THREADS;
        let threads = match threads {
            None => self.torch.get_num_threads.call0(py)?.extract::<usize>(py)?.clamp(1, most),
            Some(threads) => usize::try_from(threads)
                .ok()
                .filter(|threads| (1..=most).contains(threads))
                .ok_or_else(|| {
                    PyValueError::new_err(format!(
                        "threads = {threads}: out of range; use 1 to {most}, or None"
                    ))
                })?,
        };
        Ok(Key { process: process::id(), threads, lists })
    }

    /// torch's threads do not exist in a child by fork.
    fn openmp(&self) -> usize {
        if self.owner.is_elsewhere() { 0 } else { self.torch.openmp }
    }

    /// Tells autograd that parameters have changed in place, so that it refuses a backward pass through old values.
    fn tell_autograd(&self, lists: &[Option<Bound<'_, PyList>>], found: &Found) -> PyResult<()> {
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

    /// Returns a bit for each list of states that the optimizer keeps with these values. They do not depend on the rate.
    fn kept(&self, hyper: &[Value]) -> PyResult<u32> {
        if let Some((known, kept)) = &self.idle().kept {
            if known[1..] == hyper[1..] {
                return Ok(*kept);
            }
        }
        let names = optimizer(self.descriptor, hyper)?.state_names();
        let kept = |k: usize| u32::from(names.contains(&self.states[k])) << (STATES + k);
        let kept = (0..self.states.len()).map(kept).sum();
        self.idle().kept = Some((hyper.to_vec(), kept));
        Ok(kept)
    }

    fn idle(&self) -> MutexGuard<'_, Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hyper(&self, values: &Bound<'_, PyTuple>) -> PyResult<Vec<Value>> {
        let fields = self.descriptor.fields.iter().zip(values);
        fields
            .map(|(field, value)| {
                Ok(match field.default {
                    Value::Pair(_) => Value::Pair(value.extract()?),
                    Value::Flag(_) => Value::Flag(value.is_truthy()?),
                    Value::Number(_) => Value::Number(value.extract()?),
                })
            })
            .collect()
    }

    /// Takes the lists that this optimizer has. Copies of them, so that nobody changes one meanwhile.
    fn lists<'py>(
        &self,
        lists: &Bound<'py, PyTuple>,
        kept: u32,
    ) -> PyResult<Vec<Option<Bound<'py, PyList>>>> {
        let mut taken = Vec::with_capacity(lists.len());
        for (k, list) in lists.iter().enumerate() {
            let list = if list.is_none() { None } else { Some(self.list(&list, k)?) };
            let is_kept = match k {
                COPIES => list.is_some(),
                CARRIED => self.descriptor.carried.is_some(),
                _ => k < STATES || kept >> k & 1 == 1,
            };
            if list.is_some() != is_kept {
                let name = self.list_name(k);
                let optimizer = self.descriptor.name;
                return Err(PyValueError::new_err(if is_kept {
                    format!(
                        "{name}: missing, but {optimizer} keeps them with these hyperparameters; give a list"
                    )
                } else {
                    format!(
                        "{name}: given, but {optimizer} keeps none with these hyperparameters; leave them out"
                    )
                }));
            }
            taken.push(list);
        }
        let count = |list: &Option<Bound<'_, PyList>>| list.as_ref().map_or(0, |list| list.len());
        for (k, list) in taken.iter().enumerate() {
            if list.is_some() && count(list) != count(&taken[PARAMS]) {
                let (name, own, params) = (self.list_name(k), count(list), count(&taken[PARAMS]));
                let text = format!("{name}: {own} tensors for {params} parameters; give one for each");
                return Err(PyValueError::new_err(text));
            }
        }
        Ok(taken)
    }

    fn list<'py>(&self, list: &Bound<'py, PyAny>, k: usize) -> PyResult<Bound<'py, PyList>> {
        if let Ok(list) = list.cast::<PyList>() {
            return Ok(list.get_slice(0, list.len()));
        }
        match list.try_iter() {
            Ok(items) if !self.reader.is_tensor(list)? => {
                PyList::new(list.py(), items.collect::<PyResult<Vec<_>>>()?)
            }
            _ => Err(PyTypeError::new_err(format!(
                "{}: not a list; give a list of tensors",
                self.list_name(k)
            ))),
        }
    }

    fn list_name(&self, list: usize) -> String {
        match list {
            PARAMS => "params".to_owned(),
            GRADS => "grads".to_owned(),
            COUNTS => "state_steps".to_owned(),
            COPIES => "copies".to_owned(),
            CARRIED => format!("{}s", self.descriptor.carried.unwrap_or_default()),
            state => format!("{}s", self.states[state - STATES]),
        }
    }

    fn name(&self, list: usize, k: usize) -> String {
        format!("{}[{k}]", self.list_name(list))
    }

    /// Returns memory for what a call finds.
    fn memory(&self, lists: usize) -> Found {
        let mut found = self.idle().found.pop().unwrap_or_default();
        found.formats.clear();
        found.lens.clear();
        found.progress.clear();
        found.addresses.resize_with(lists, Addresses::default);
        found.addresses.iter_mut().for_each(|list| list.0.clear());
        found
    }

    /// Reads and checks every tensor.
    fn find(&self, lists: &[Option<Bound<'_, PyList>>], found: &mut Found) -> PyResult<()> {
        let count = lists[PARAMS].as_ref().map_or(0, |params| params.len());
        (0..count).try_for_each(|k| self.find_one(lists, k, found))
    }

    /// Reads and checks the tensors of one parameter.
    fn find_one(&self, lists: &[Option<Bound<'_, PyList>>], k: usize, found: &mut Found) -> PyResult<()> {
        let item = |list: usize| lists[list].as_ref().map(|list| list.get_item(k)).transpose();
        let Some(param) = item(PARAMS)? else { return Ok(()) };
        let own = self.reader.read(&param, || self.name(PARAMS, k))?;
        refuse_unfit(&own, &param, || self.name(PARAMS, k), |word| word.dtype().is_some())?;
        refuse_negative(&own, &param, || self.name(PARAMS, k))?;
        let len = own.len();
        found.addresses[PARAMS].push(own.address);
        let mut format =
            Format { param: own.word, grad: own.word, state: Word::F32, copy: None, carried: Word::F64 };
        let mut progress = (None, 0);
        let mut first_state = None;
        for list in GRADS..lists.len() {
            let Some(tensor) = item(list)? else { continue };
            let name = || self.name(list, k);
            if tensor.is_none() && matches!(list, GRADS | COPIES) {
                found.addresses[list].push(0);
                continue;
            }
            let view = self.reader.read(&tensor, name)?;
            if matches!(list, COUNTS | CARRIED) {
                refuse_unfit(&view, &tensor, name, |word| {
                    word == Word::F32 || list == CARRIED && word == Word::F64
                })?;
                if view.len() != 1 {
                    let text = format!("{}: {} elements; give a tensor of one number", name(), view.len());
                    return Err(PyValueError::new_err(text));
                }
                found.addresses[list].push(view.address);
                if list == COUNTS {
                    progress.1 = view.address;
                } else {
                    progress.0 = Some((view.address, view.word));
                    format.carried = view.word;
                }
                continue;
            }
            if view.shape != own.shape {
                let text = format!(
                    "{}: of shape {:?}, where {} has {:?}; give one of its shape",
                    name(),
                    view.shape,
                    self.name(PARAMS, k),
                    own.shape
                );
                return Err(PyValueError::new_err(text));
            }
            refuse_unfit(&view, &tensor, name, |word| match list {
                GRADS | COPIES => word.dtype().is_some(),
                _ => matches!(word, Word::F32 | Word::BF16),
            })?;
            refuse_negative(&view, &tensor, name)?;
            if !view.lies_as(&own) {
                let text = format!(
                    "{}: strides {:?}, where {} has {:?}; give one with its order of elements",
                    name(),
                    view.strides,
                    self.name(PARAMS, k),
                    own.strides
                );
                return Err(PyValueError::new_err(text));
            }
            match list {
                GRADS => format.grad = view.word,
                COPIES => format.copy = Some(view.word),
                _ if *first_state.get_or_insert(view.word) == view.word => format.state = view.word,
                _ => {
                    let first =
                        lists[STATES..].iter().position(Option::is_some).map_or(STATES, |k| k + STATES);
                    let first = self.name(first, k);
                    let text = format!("{}: of another type than {first}; give states of one type", name());
                    return Err(PyNotImplementedError::new_err(text));
                }
            }
            found.addresses[list].push(if len == 0 { Self::EMPTY } else { view.address });
        }
        // SAFETY: a tensor of one number of this type, as checked above.
        let progress = unsafe { read_progress(progress.1, progress.0) };
        found.progress.push(progress.ok_or_else(|| refused_count(&self.name(COUNTS, k)))?);
        found.lens.push(len);
        found.formats.push(format);
        Ok(())
    }

    /// Takes the plan for these lists out, so that calls in other threads make their own.
    fn take(&self, key: Key, found: &Found) -> Option<Plan> {
        let plans = &mut self.idle().plans;
        let fits = |plan: &Plan| plan.key == key && plan.lens == found.lens && plan.formats == found.formats;
        let at = plans.iter().rposition(fits)?;
        Some(plans.remove(at))
    }

    /// Keeps a plan for the next call of its kind, and memory for any.
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

impl Plan {
    fn new(
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
            parts.push(Part { step, ids, members, format, progress, addresses: Vec::new() });
        }
        let (formats, lens) = (found.formats.clone(), found.lens.clone());
        Ok(Plan { key, formats, lens, hyper, parts, spare: Vec::new(), spans: Vec::new() })
    }

    fn set_hyper(&mut self, descriptor: &'static Descriptor, hyper: Vec<Value>) -> PyResult<()> {
        let optimizer = optimizer(descriptor, &hyper)?;
        for part in &mut self.parts {
            part.step.set_optimizer(DEFAULT_GROUP, &*optimizer).map_err(raised)?;
        }
        self.hyper = hyper;
        Ok(())
    }

    /// Gives each part its members' addresses.
    fn gather(&mut self, found: &Found) {
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

    /// Gives empty parameters and their tensors an element each.
    fn fill_empty(&mut self, found: &mut Found) {
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

    /// Finds two tensors that share memory, one of which is written. A number is that of the parameter times the number of
    /// lists, and the list's.
    fn overlap(&mut self, found: &Found) -> Option<(u32, u32)> {
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

    /// Sets the counts that are not what the last call left.
    fn set_counts(&mut self, found: &Found, descriptor: &Descriptor) -> PyResult<()> {
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

    /// Steps, and writes counts and carried numbers.
    fn run(&mut self, found: &Found, scaling: Scaling) -> instep::Result<()> {
        if let [part] = &mut *self.parts {
            return part.run(&found.addresses, scaling);
        }
        self.gather(found);
        for part in &mut self.parts {
            let addresses = mem::take(&mut part.addresses);
            let outcome = part.run(&addresses, scaling);
            part.addresses = addresses;
            outcome?;
        }
        Ok(())
    }
}

impl Part {
    fn run(&mut self, addresses: &[Addresses], scaling: Scaling) -> instep::Result<()> {
        // SAFETY: addresses of dense tensors of these types and lengths that do not overlap, as checked. The lists of the call,
        // or the storages of a prepared one, keep them alive.
        unsafe {
            let each = |list: usize| Lent::at_each(&addresses[list].0);
            let states = (STATES..addresses.len()).filter(|list| !addresses[*list].0.is_empty());
            let mut tensors = StepTensors::new(each(PARAMS), each(GRADS)).states(states.map(each));
            if self.format.copy.is_some() {
                tensors = tensors.copy(each(COPIES));
            }
            self.step.step(&tensors, scaling)?;
            for at in 0..self.members.len() {
                if addresses[GRADS].0[at].is_null() {
                    continue;
                }
                let count = self.progress[at].0 + 1;
                let number = self.step.carried(self.ids[at])?;
                self.progress[at] = (count, number.unwrap_or(1.0));
                addresses[COUNTS].0[at].cast::<f32>().write_unaligned(count as f32);
                match (number, self.format.carried) {
                    (None, _) => {}
                    (Some(number), Word::F32) => {
                        addresses[CARRIED].0[at].cast::<f32>().write_unaligned(number as f32)
                    }
                    (Some(number), _) => addresses[CARRIED].0[at].cast::<f64>().write_unaligned(number),
                }
            }
        }
        Ok(())
    }
}

impl Format {
    /// Returns the bytes of a tensor of this list.
    fn bytes(&self, list: usize, len: u64) -> usize {
        let (word, len) = match list {
            PARAMS => (self.param, len as usize),
            GRADS => (self.grad, len as usize),
            COUNTS => (Word::F32, 1),
            COPIES => (self.copy.unwrap_or(Word::F32), len as usize),
            CARRIED => (self.carried, 1),
            _ => (self.state, len as usize),
        };
        word.size() * len
    }
}

/// Makes the optimizer of these values.
fn optimizer(descriptor: &'static Descriptor, hyper: &[Value]) -> PyResult<Box<dyn Optimizer>> {
    let mut optimizer = descriptor.build();
    for (field, value) in descriptor.fields.iter().zip(hyper) {
        optimizer.set(field.name, *value).map_err(raised)?;
    }
    Ok(optimizer)
}

/// Reads a count and the number that is carried beside it. None if the count is no whole number.
///
/// # Safety
/// The addresses are those of initialised numbers of these types.
unsafe fn read_progress(count: usize, carried: Option<(usize, Word)>) -> Option<(u64, f64)> {
    // SAFETY: the caller's promise.
    unsafe {
        let count = with_exposed_provenance_mut::<f32>(count).read_unaligned();
        let carried = carried.map(|(at, word)| match word {
            Word::F32 => f64::from(with_exposed_provenance_mut::<f32>(at).read_unaligned()),
            _ => with_exposed_provenance_mut::<f64>(at).read_unaligned(),
        });
        let is_whole = count >= 0.0 && count <= (1u64 << 62) as f32 && count.fract() == 0.0;
        is_whole.then_some((count as u64, carried.unwrap_or(1.0)))
    }
}

fn refused_count(name: &str) -> PyErr {
    PyValueError::new_err(format!("{name}: not a count; give a whole number of 0 or more"))
}

/// Refuses a tensor that no kernel takes.
fn refuse_unfit(
    view: &View<'_>,
    tensor: &Bound<'_, PyAny>,
    name: impl Fn() -> String,
    has: impl Fn(Word) -> bool,
) -> PyResult<()> {
    let unsupported = |text: String| Err(PyNotImplementedError::new_err(format!("{}: {text}", name())));
    if !has(view.word) {
        let known = [
            (Word::F32, "float32"),
            (Word::BF16, "bfloat16"),
            (Word::F16, "float16"),
            (Word::F64, "float64"),
        ];
        let known: Vec<&str> = known.iter().filter(|(word, _)| has(*word)).map(|(_, name)| *name).collect();
        let dtype = tensor.getattr("dtype")?.str()?;
        return unsupported(format!("of {dtype}; use {}", known.join(", ")));
    }
    if !view.is_on_cpu {
        return unsupported(format!("on {}; give a tensor on the CPU", tensor.getattr("device")?.str()?));
    }
    if !view.is_dense() {
        let strides = &view.strides;
        return unsupported(format!(
            "strides {strides:?} of shape {:?} leave gaps or overlap; give its clone()",
            view.shape
        ));
    }
    if view.len() > 0 && (view.address == 0 || !view.address.is_multiple_of(view.word.size())) {
        return unsupported(
            "without memory of its own that is aligned to its elements; give a plain tensor".to_owned(),
        );
    }
    Ok(())
}

/// Refuses a view whose memory has the other sign. The two numbers of a complex one lie side by side, so that of more than one
/// element is not dense.
fn refuse_negative(view: &View<'_>, tensor: &Bound<'_, PyAny>, name: impl Fn() -> String) -> PyResult<()> {
    if view.len() != 1 || !tensor.call_method0(intern!(tensor.py(), "is_neg"))?.is_truthy()? {
        return Ok(());
    }
    let text = format!("{}: a view whose memory has the other sign; give its resolve_neg()", name());
    Err(PyNotImplementedError::new_err(text))
}

/// The step that multiplies each gradient by this factor.
fn scaling(gradient_scale: f64) -> PyResult<Scaling> {
    if !(gradient_scale.is_finite() && gradient_scale >= 0.0) {
        let text =
            format!("gradient_scale = {gradient_scale}: out of range; use a finite number of 0 or more");
        return Err(PyValueError::new_err(text));
    }
    // A power of two is divided out exactly, and the rest is at most 1, as a clip coefficient is.
    let mut power = 1.0;
    while gradient_scale * power > 1.0 {
        power /= 2.0;
    }
    Ok(Scaling::NONE.loss_scale(power).clip(gradient_scale * power))
}
