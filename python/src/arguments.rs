//! Reads addresses, factors and formats from Python's arguments.
//!
//! A format that PyTorch also has is named as in PyTorch. An unknown name is refused, and the error lists the known
//! names.

use std::ffi::c_void;
use std::ptr::with_exposed_provenance_mut;

use instep::bucket_step::{Lent, StepTensors};
use instep::{DType, Gradients, Master, Moments, Precision, Rounding, Scaling};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// One address per parameter.
#[derive(Default)]
pub(crate) struct Addresses(pub(crate) Vec<*mut c_void>);

// SAFETY: addresses, which the caller vouches for on any thread.
#[allow(unsafe_code)]
unsafe impl Send for Addresses {}

// SAFETY: addresses, which the caller vouches for on any thread.
#[allow(unsafe_code)]
unsafe impl Sync for Addresses {}

impl Addresses {
    pub(crate) fn push(&mut self, address: usize) {
        self.0.push(with_exposed_provenance_mut(address));
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Addresses {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Addresses> {
        let addresses: Vec<usize> = object.extract()?;
        Ok(Addresses(addresses.into_iter().map(with_exposed_provenance_mut).collect()))
    }
}

/// The addresses of the tensors of one step. Each parameter and each gradient has its own address. Every other tensor
/// is one array for the whole arena. A gradient with the address 0 is missing, and its parameter is skipped. `counts`
/// and `carried` are the addresses of two vectors, or 0 if the arena lacks the vector. Each vector has one number for
/// each parameter of the arena.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Bound {
    params: Addresses,
    grads: Addresses,
    states: Vec<usize>,
    scales: Vec<usize>,
    master: usize,
    counts: usize,
    carried: usize,
}

impl Bound {
    /// # Safety
    /// Every address is valid for its tensor, as [`Lent::at`] requires. `instep.torch` guarantees this.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn tensors(&self) -> StepTensors<'_> {
        // SAFETY: the caller's promise.
        unsafe {
            let run = |address: &usize| Lent::at(with_exposed_provenance_mut(*address));
            let params = Lent::at_each(&self.params.0);
            let tensors = StepTensors::new(params, self.gradients())
                .states(self.states.iter().map(run))
                .scales(self.scales.iter().map(run));
            if self.master == 0 { tensors } else { tensors.master(run(&self.master)) }
        }
    }

    pub(crate) fn has_gradient(&self, param: usize) -> bool {
        !self.grads.0[param].is_null()
    }

    /// Writes a parameter's count and carried number into the parameter's row of `counts` and `carried`.
    ///
    /// # Safety
    /// A vector with an address other than 0 has this row, and nothing else touches the vector.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn write_progress(&self, row: usize, count: u64, carried: f64) {
        // SAFETY: the caller's promise.
        unsafe {
            if self.counts != 0 {
                with_exposed_provenance_mut::<f32>(self.counts).add(row).write(count as f32);
            }
            if self.carried != 0 {
                with_exposed_provenance_mut::<f64>(self.carried).add(row).write(carried);
            }
        }
    }

    /// # Safety
    /// The conditions of [`tensors`](Self::tensors) hold.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn gradients(&self) -> Lent<'_> {
        // SAFETY: the caller's promise.
        unsafe { Lent::at_each(&self.grads.0) }
    }
}

/// Reads a parameter's count and carried number, each at the index `row` of its vector. Returns `None` in place of a
/// number if its vector has the address 0.
///
/// # Safety
/// A vector with an address other than 0 has this row, and nothing else touches the vector.
#[allow(unsafe_code)]
pub(crate) unsafe fn progress_in(counts: usize, carried: usize, row: usize) -> (Option<f32>, Option<f64>) {
    // SAFETY: the caller's promise.
    unsafe {
        (
            (counts != 0).then(|| with_exposed_provenance_mut::<f32>(counts).add(row).read()),
            (carried != 0).then(|| with_exposed_provenance_mut::<f64>(carried).add(row).read()),
        )
    }
}

/// The factors that the gradients contain: the number of ranks and the loss scale. The last two fields are the
/// addresses of GradScaler's scale and `found_inf`, or 0 without a GradScaler.
#[derive(FromPyObject)]
pub(crate) struct Factors(u32, f64, usize, usize);

impl Factors {
    /// # Safety
    /// Each of the two addresses is 0, or is valid as [`Scaling::grad_scaler`] requires.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn scaling(&self) -> Scaling {
        let Factors(world_size, loss_scale, scale, found_inf) = *self;
        let [scale, found_inf] =
            [scale, found_inf].map(|a| with_exposed_provenance_mut::<f32>(a).cast_const());
        // SAFETY: the caller's promise.
        unsafe { Scaling::mean(world_size).loss_scale(loss_scale).grad_scaler(scale, found_inf) }
    }
}

/// Converts the names of a step's formats to a precision.
pub(crate) fn precision([param, grad, master, moments]: [&str; 4], seed: Option<u64>) -> PyResult<Precision> {
    let dtype =
        |word| one_of(word, [("float32", DType::F32), ("bfloat16", DType::BF16), ("float16", DType::F16)]);
    let masters = [
        ("none", Master::None),
        ("float32", Master::F32),
        ("remainder16", Master::Remainder16),
        ("remainder8", Master::Remainder8),
    ];
    let kinds = [("float32", Moments::F32), ("bfloat16", Moments::BF16), ("8bit", Moments::EightBit)];
    Ok(Precision {
        param: dtype(param)?,
        grad: dtype(grad)?,
        master: one_of(master, masters)?,
        moments: one_of(moments, kinds)?,
        rounding: seed.map_or(Rounding::Nearest, |seed| Rounding::Stochastic { seed }),
    })
}

/// Converts the name of a step's action on the gradients: `keep`, `zero` or `average`.
pub(crate) fn gradients(word: &str) -> PyResult<Gradients> {
    one_of(word, [("keep", Gradients::Keep), ("zero", Gradients::Zero), ("average", Gradients::Average)])
}

fn one_of<T: Copy, const N: usize>(word: &str, known: [(&str, T); N]) -> PyResult<T> {
    match known.iter().find(|(name, _)| *name == word) {
        Some((_, value)) => Ok(*value),
        None => {
            let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
            Err(PyValueError::new_err(format!("`{word}`: not known here; use one of {}", names.join(", "))))
        }
    }
}
