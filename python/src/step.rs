//! One bucket's step as a Python object.
//!
//! If another thread is using the object, a call raises instead of waiting. The GIL is released during every step.
#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};

use instep::bucket_step::OnGpu;
use instep::layout::ForeignBucket;
use instep::{BucketStep, Layout, ParamId, StreamHandle};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::{Bound as Addresses, Factors, gradients, precision, progress_in};
use crate::device::{Owner, gpu, pool};
use crate::errors::raised;
use crate::norm::{Block, Norm};
use crate::openmp::OpenMp;
use crate::optimizers::optimizer;

/// The step of one bucket. The bucket's parameters have one type and are on one device. Each parameter belongs to a
/// hyperparameter group.
#[pyclass(frozen, module = "instep._native")]
pub(crate) struct Step {
    owner: Owner,
    ids: Vec<ParamId>,
    /// One entry for each parameter.
    shown: Vec<Shown>,
    /// The number of threads that are reading counts. A step waits for these threads. The wait takes microseconds.
    readers: AtomicUsize,
    inner: ManuallyDrop<Mutex<Engine>>,
}

/// A parameter's step count as Python reads it: its place, and the difference from the native count, which may be
/// larger.
#[derive(Clone, Copy)]
struct Shown {
    /// The parameter's row in the arena's vectors of counts and carried numbers.
    row: usize,
    /// The native count minus the count that Python shows. If Python sets a count to 0, the native count stays above 0,
    /// because the next step must still read the states.
    ahead: u64,
}

enum Engine {
    Host(Box<BucketStep>),
    Gpu(Box<BucketStep<OnGpu>>),
}

/// Calls a method that both engines have.
macro_rules! on_both {
    ($engine:expr, $step:ident => $call:expr) => {
        match $engine {
            Engine::Host($step) => $call,
            Engine::Gpu($step) => $call,
        }
    };
}

#[pymethods]
impl Step {
    /// Builds the step.
    ///
    /// `groups` has an optimizer's key and hyperparameters for each group. `params` has the following numbers for each
    /// parameter: its length, its group, its offset in the arena, its row in the arena's vectors, the native count
    /// minus the count that Python shows, the number of elements of a row of the parameter, and the index of the
    /// parameter's first element among the elements of all full parameters. No block of 8-bit states crosses the end of
    /// a row. `arena` is the number of elements of the arena. `formats` has the formats of parameters, gradients,
    /// masters and states. `after` says what the step does to gradients. `openmp` is the address of an OpenMP runtime's
    /// `GOMP_parallel`: the step uses the runtime's threads. If `openmp` is 0, the step uses its own threads.
    /// `gpu_ordinal` is None for the CPU.
    #[new]
    #[pyo3(signature = (groups, params, arena, formats, seed, after, threads, openmp, gpu_ordinal))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        groups: Vec<(String, Bound<'_, PyDict>)>,
        params: Vec<(usize, usize, usize, usize, u64, usize, u64)>,
        arena: usize,
        formats: (String, String, String, String),
        seed: Option<u64>,
        after: &str,
        threads: usize,
        openmp: usize,
        gpu_ordinal: Option<u32>,
    ) -> PyResult<Step> {
        // SAFETY: the Python half finds the function in the runtime that PyTorch has loaded, which is never unloaded.
        let openmp = unsafe { OpenMp::at(openmp) };
        let mut layout = Layout::builder();
        for (k, (len, group, ..)) in params.iter().enumerate() {
            layout = layout.param(format!("{k}"), *len).in_group(format!("{group}"));
        }
        let layout = layout.build().map_err(raised)?;
        let ids: Vec<ParamId> = layout.ids().collect();
        let places = ids.iter().zip(&params);
        let bucket = places.fold(ForeignBucket::new(arena), |bucket, (id, (_, _, at, _, _, row, first))| {
            bucket.gradient(*id, *at).rows(*id, *row, *first)
        });
        let Some((key, hyper)) = groups.first() else {
            return Err(PyValueError::new_err("groups: empty; give one at least"));
        };
        let (param, grad, master, moments) = &formats;
        let formats = [param, grad, master, moments].map(String::as_str);
        let mut builder = BucketStep::builder(&layout, optimizer(key, hyper)?)
            .bucket(bucket)
            .precision(precision(formats, seed)?)
            .gradients(gradients(after)?);
        for (group, (key, hyper)) in groups.iter().enumerate() {
            if params.iter().any(|(_, of, ..)| *of == group) {
                builder = builder.group(&format!("{group}"), optimizer(key, hyper)?);
            }
        }
        let engine = match gpu_ordinal {
            None => Engine::Host(Box::new(builder.pool(pool(threads, openmp)?).host().map_err(raised)?)),
            Some(ordinal) => Engine::Gpu(Box::new(builder.cuda(&gpu(ordinal)?).map_err(raised)?)),
        };
        let inner = ManuallyDrop::new(Mutex::new(engine));
        let shown = params.iter().map(|&(_, _, _, row, ahead, ..)| Shown { row, ahead }).collect();
        Ok(Step { owner: Owner::current(), ids, shown, readers: AtomicUsize::new(0), inner })
    }

    /// Steps the bucket. A parameter is skipped if its gradient has the address 0.
    fn step(&self, py: Python<'_>, tensors: Addresses, factors: Factors, stream: usize) -> PyResult<()> {
        let mut inner = self.lock(py)?;
        let engine = &mut *inner;
        py.detach(move || {
            // SAFETY: the Python half keeps every tensor alive during the call, and no other code uses the tensors. On
            // a GPU, this holds until the stream has run the call's work.
            unsafe {
                match engine {
                    Engine::Host(step) => {
                        step.step(&tensors.tensors(), factors.scaling())?;
                        self.write_progress(step, &tensors)
                    }
                    Engine::Gpu(step) => {
                        step.enqueue(&tensors.tensors(), factors.scaling(), StreamHandle(stream))
                    }
                }
            }
        })
        .map_err(raised)
    }

    /// Adds the gradients to a norm.
    fn add_norm(&self, py: Python<'_>, tensors: Addresses, norm: &Norm, stream: usize) -> PyResult<()> {
        let (mut inner, mut block) = (self.lock(py)?, norm.lock()?);
        let (engine, block) = (&mut *inner, &mut *block);
        py.detach(move || {
            // SAFETY: the Python half keeps every tensor alive during the call, and no other code uses the tensors. On
            // a GPU, this holds until the stream has run the call's work.
            unsafe {
                match (engine, block) {
                    (Engine::Host(step), Block::Host(norm)) => step.add_norm(&tensors.gradients(), norm),
                    (Engine::Gpu(step), Block::Gpu(norm)) => {
                        step.enqueue_norm(&tensors.gradients(), norm, StreamHandle(stream))
                    }
                    _ => Err(elsewhere()),
                }
            }
        })
        .map_err(raised)
    }

    /// Steps the bucket. The step is clipped or skipped as `norm` has decided.
    fn step_decided(&self, py: Python<'_>, tensors: Addresses, norm: &Norm, stream: usize) -> PyResult<()> {
        let (mut inner, mut block) = (self.lock(py)?, norm.lock()?);
        let (engine, block) = (&mut *inner, &mut *block);
        py.detach(move || {
            // SAFETY: the Python half keeps every tensor alive during the call, and no other code uses the tensors. On
            // a GPU, this holds until the stream has run the call's work.
            unsafe {
                match (engine, block) {
                    (Engine::Host(step), Block::Host(norm)) => {
                        step.step_decided(&tensors.tensors(), norm)?;
                        self.write_progress(step, &tensors)
                    }
                    (Engine::Gpu(step), Block::Gpu(norm)) => {
                        step.enqueue_decided(&tensors.tensors(), norm, StreamHandle(stream))
                    }
                    _ => Err(elsewhere()),
                }
            }
        })
        .map_err(raised)
    }

    /// Raises an error if the vectors at these addresses differ from the counts and carried numbers that the last step
    /// on the CPU wrote. In that case, other code has written to the vectors without incrementing PyTorch's version
    /// counter. The next step would ignore that write.
    fn refuse_written(&self, py: Python<'_>, counts: usize, carried: usize) -> PyResult<()> {
        let mut inner = self.lock(py)?;
        let Engine::Host(step) = &mut *inner else { return Ok(()) };
        for (id, Shown { row, ahead }) in self.ids.iter().zip(&self.shown) {
            let count = step.step_count(*id).map_err(raised)? - ahead;
            let number = step.carried(*id).map_err(raised)?.unwrap_or(1.0);
            // SAFETY: the Python half gives 0, or the address of a vector that has this row and that it keeps alive.
            let shown = unsafe { progress_in(counts, carried, *row) };
            if shown.0.is_some_and(|of| of != count as f32) || shown.1.is_some_and(|of| of != number) {
                return Err(PyRuntimeError::new_err(WRITTEN));
            }
        }
        Ok(())
    }

    /// Replaces the hyperparameters of a group.
    fn set_hyper(&self, py: Python<'_>, group: usize, key: &str, hyper: &Bound<'_, PyDict>) -> PyResult<()> {
        let optimizer = optimizer(key, hyper)?;
        let mut inner = self.lock(py)?;
        on_both!(&mut *inner, step => step.set_optimizer(&format!("{group}"), &*optimizer)).map_err(raised)
    }

    /// Returns two numbers for each parameter: its number of updates, and the number that its optimizer carries.
    fn progress(&self, py: Python<'_>) -> PyResult<Vec<(u64, f64)>> {
        self.owner.refuse_child()?;
        let _reading = Reading::new(&self.readers);
        let mut inner = loop {
            match self.inner.try_lock() {
                Ok(inner) => break inner,
                Err(TryLockError::WouldBlock) => py.detach(|| drop(self.inner.lock())),
                Err(TryLockError::Poisoned(_)) => return Err(busy()),
            }
        };
        let engine = &mut *inner;
        let mut read = |(id, shown): (&ParamId, &Shown)| {
            on_both!(&mut *engine, step => {
                Ok((step.step_count(*id)? - shown.ahead, step.carried(*id)?.unwrap_or(1.0)))
            })
        };
        py.detach(|| self.ids.iter().zip(&self.shown).map(&mut read).collect::<instep::Result<_>>())
            .map_err(raised)
    }

    /// Sets two numbers for each parameter: its number of updates, and the number that its optimizer carries.
    fn set_progress(&self, py: Python<'_>, progress: Vec<(u64, f64)>) -> PyResult<()> {
        if progress.len() != self.ids.len() {
            return Err(PyValueError::new_err("progress: not one for each parameter"));
        }
        let mut inner = self.lock(py)?;
        let engine = &mut *inner;
        let mut write = |((id, shown), (count, carried)): ((&ParamId, &Shown), (u64, f64))| on_both!(&mut *engine, step => step.set_step_count(*id, (count + shown.ahead, carried)));
        py.detach(|| self.ids.iter().zip(&self.shown).zip(progress).try_for_each(&mut write)).map_err(raised)
    }
}

impl Step {
    /// Writes the counts and carried numbers of all parameters with a gradient into the arena's vectors.
    ///
    /// # Safety
    /// The conditions of [`Addresses::write_progress`] hold.
    unsafe fn write_progress(&self, step: &BucketStep, tensors: &Addresses) -> instep::Result<()> {
        for (k, (id, Shown { row, ahead })) in self.ids.iter().zip(&self.shown).enumerate() {
            if tensors.has_gradient(k) {
                let (count, carried) = (step.step_count(*id)? - ahead, step.carried(*id)?.unwrap_or(1.0));
                // SAFETY: the caller's promise; the row is of this arena.
                unsafe { tensors.write_progress(*row, count, carried) }
            }
        }
        Ok(())
    }

    /// Locks the engine. If another thread is reading counts, waits for it. If another thread uses the engine in any
    /// other way, raises an error.
    fn lock(&self, py: Python<'_>) -> PyResult<MutexGuard<'_, Engine>> {
        self.owner.refuse_child()?;
        loop {
            match self.inner.try_lock() {
                Ok(inner) => return Ok(inner),
                Err(TryLockError::WouldBlock) if self.readers.load(Ordering::SeqCst) > 0 => {
                    py.detach(|| drop(self.inner.lock()));
                }
                Err(_) => return Err(busy()),
            }
        }
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        // A forked child has no threads to end, and no GPU.
        if !self.owner.is_elsewhere() {
            // SAFETY: nothing uses it afterwards.
            unsafe { ManuallyDrop::drop(&mut self.inner) }
        }
    }
}

/// Counts a thread as a reader until this value is dropped.
struct Reading<'a>(&'a AtomicUsize);

impl<'a> Reading<'a> {
    fn new(readers: &'a AtomicUsize) -> Reading<'a> {
        readers.fetch_add(1, Ordering::SeqCst);
        Reading(readers)
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

const WRITTEN: &str = "state: a number in it was written through .data or numpy, which no step follows; \
                       write to the tensor itself, as in state[param]['step'].fill_(0)";

fn busy() -> PyErr {
    PyRuntimeError::new_err("optimizer: in use by another thread; wait for it")
}

fn elsewhere() -> instep::Error {
    instep::Error::unsupported("norm", "on another device than the step", "make one for each device")
}
