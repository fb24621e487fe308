//! Thread pools and GPUs, which all steps of a process share.
//!
//! Threads do not survive a fork. A step, a norm or a prepared call therefore stores the number of the process that
//! made it, and refuses calls in a forked child.

use std::collections::HashMap;
use std::process;
use std::sync::{Arc, Mutex, PoisonError};

use instep::Pool;
use instep::cuda::Cuda;
use pyo3::PyResult;
use pyo3::exceptions::PyRuntimeError;

use crate::errors::raised;
use crate::openmp::OpenMp;

/// The key of a pool: the process, the number of threads, and the address of `GOMP_parallel` (0 without an OpenMP
/// runtime).
type Threads = (u32, usize, usize);

static POOLS: Mutex<Option<HashMap<Threads, Pool>>> = Mutex::new(None);
/// The opened GPUs by process and ordinal.
static GPUS: Mutex<Option<HashMap<(u32, u32), Cuda>>> = Mutex::new(None);

/// Returns a pool of this number of threads. With an OpenMP runtime, the pool uses the runtime's threads. Otherwise the
/// pool has its own threads, which start at the first step that needs them.
pub(crate) fn pool(threads: usize, openmp: Option<OpenMp>) -> PyResult<Pool> {
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    let pools = pools.get_or_insert_default();
    let key = (process::id(), threads, openmp.map_or(0, |team| team.address()));
    if let Some(pool) = pools.get(&key) {
        return Ok(pool.clone());
    }
    let pool = match openmp {
        Some(team) => Pool::of_team(threads, Arc::new(team)),
        None => Pool::new(threads),
    };
    Ok(pools.entry(key).or_insert(pool.map_err(raised)?).clone())
}

/// Returns a GPU by its ordinal.
pub(crate) fn gpu(ordinal: u32) -> PyResult<Cuda> {
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let gpus = gpus.get_or_insert_default();
    let key = (process::id(), ordinal);
    if let Some(cuda) = gpus.get(&key) {
        return Ok(cuda.clone());
    }
    let cuda = Cuda::open(ordinal).map_err(raised)?;
    Ok(gpus.entry(key).or_insert(cuda).clone())
}

/// The process that an object belongs to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner(u32);

impl Owner {
    /// Returns the calling process as an owner.
    pub(crate) fn current() -> Owner {
        Owner(process::id())
    }

    /// Returns whether the calling process is a forked child of this process.
    pub(crate) fn is_elsewhere(self) -> bool {
        self.0 != process::id()
    }

    /// Refuses calls in a child, where the threads of the pool do not exist.
    pub(crate) fn refuse_child(self) -> PyResult<()> {
        if !self.is_elsewhere() {
            return Ok(());
        }
        let text = "optimizer: made by a process that has forked since; make it in the child, or use the spawn method";
        Err(PyRuntimeError::new_err(text))
    }
}
