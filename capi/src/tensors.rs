//! The tensors of one step, and the numbers by which the step divides the gradients.
//!
//! The library compares lengths with the bucket's length before it uses an address. The library cannot check that the
//! memory at the address has that length.
#![allow(unsafe_code)]

use std::ffi::c_void;

use instep::Scaling;
use instep::bucket_step::{Lent, StepTensors};

use crate::arguments::{Growing, list, read, read_any};
use crate::codes::zero;
use crate::status::{Fault, INSTEP_LAYOUT, Result};

/// The largest number of states that an optimizer has per element.
pub const INSTEP_STATES_AT_MOST: usize = 4;

/// The memory of one kind of tensor in a bucket, such as its gradients. The memory is one range with the bucket's
/// offsets, or one range for each parameter. If all fields are zero, there is no tensor of this kind.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct instep_tensor {
    /// The first element of the range. This field is null if each parameter has its own range.
    pub address: *mut c_void,
    /// For each parameter, the first element of its range, in the order of the bucket. This field is null if all
    /// parameters share one range. On a GPU, only parameters and gradients may have a range per parameter. If a
    /// gradient's address is null, its parameter has no gradient in this call. A step does not change the tensors or
    /// the step count of a parameter without a gradient, and norms leave the parameter out.
    pub addresses: *const *mut c_void,
    /// The number of elements of the range, or the length of `addresses`. The library checks that `count` is the
    /// bucket's number of elements or of parameters.
    pub count: usize,
}

/// The tensors of one step.
///
/// The caller owns the memory. Until the call returns, only the step may touch the memory. On a GPU, only the step may
/// touch the memory until the step on the stream has ended. Addresses must be aligned to an element, and no two tensors
/// may overlap.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct instep_tensors {
    /// sizeof(instep_tensors).
    pub size: usize,
    /// Parameters, in the type that the precision gives.
    pub params: instep_tensor,
    /// Summed gradients, in the type that the precision gives.
    pub grads: instep_tensor,
    /// Master weights or remainders, if the precision has them. Before the first step, an f32 master must have its
    /// parameter's value, and remainders must be zeros.
    pub master: instep_tensor,
    /// Copies of the parameters in another type, if the options ask for copies. The step only writes them.
    pub copy: instep_tensor,
    /// Moving averages in f32, if the options ask for them.
    pub ema: instep_tensor,
    /// The optimizer's states, in the order of instep_optimizer_state_name. The states must be zeros before the first
    /// step.
    pub states: [instep_tensor; INSTEP_STATES_AT_MOST],
    /// The scales of 8-bit states: one float per 256 elements of the bucket.
    pub scales: [instep_tensor; INSTEP_STATES_AT_MOST],
}

// SAFETY: all fields are numbers and pointers, for which zeros are valid.
unsafe impl Growing for instep_tensors {
    const NAME: &'static str = "instep_tensors";
}

/// Numbers by which a step divides the gradients, and a clip coefficient. The step multiplies each gradient by clip /
/// (world_size * loss_scale). A field that is 0 counts as 1.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct instep_scaling {
    /// sizeof(instep_scaling).
    pub size: usize,
    /// The number of ranks over which the gradients were summed.
    pub world_size: u32,
    /// Zero. Anything else is refused.
    pub reserved: u32,
    /// The factor by which the loss was multiplied.
    pub loss_scale: f64,
    /// A clip coefficient that the caller has computed, from 0 to 1.
    pub clip: f64,
    /// Null, or the loss scale in the memory of the step's device. It replaces loss_scale (GradScaler's _scale). The
    /// value is read when the step runs.
    pub grad_scale: *const f32,
    /// Null, or a flag in the memory of the step's device. If the flag is not 0, the step changes nothing (GradScaler's
    /// found_inf).
    pub found_inf: *const f32,
}

// SAFETY: all fields are numbers and pointers, for which zeros are valid.
unsafe impl Growing for instep_scaling {
    const NAME: &'static str = "instep_scaling";
}

/// Returns a tensor, or `None` if the caller did not give it.
///
/// # Safety
/// The addresses meet instep.h's contract during `'a`.
unsafe fn lent<'a>(name: &str, given: &instep_tensor) -> Result<Option<Lent<'a>>> {
    let instep_tensor { address, addresses, count } = *given;
    match (address.is_null(), addresses.is_null()) {
        (true, true) if count == 0 => Ok(None),
        // SAFETY: guaranteed by the caller, here and below.
        (_, true) => Ok(Some(unsafe { Lent::at_len(address, count) })),
        // SAFETY: guaranteed by the caller.
        (true, false) => Ok(Some(unsafe { Lent::at_each(list(addresses, count, name)?) })),
        (false, false) => {
            Err(Fault::argument(name, "both one address and one per parameter", "leave one of them null"))
        }
    }
}

/// Returns a tensor that every step needs. The caller may omit the tensor if the bucket has no elements.
///
/// # Safety
/// The conditions of [`lent`] hold.
unsafe fn required<'a>(name: &str, given: &instep_tensor, is_empty: bool) -> Result<Lent<'a>> {
    // SAFETY: guaranteed by the caller. No element lies at the null address.
    let (found, nothing) = unsafe { (lent(name, given)?, Lent::at_len(std::ptr::null_mut(), 0)) };
    found.or(is_empty.then_some(nothing)).ok_or_else(|| {
        Fault::new(INSTEP_LAYOUT, format_args!("{name}: missing; give an address, or one per parameter"))
    })
}

/// Returns only the gradients.
///
/// # Safety
/// The conditions of [`tensors`] hold.
pub(crate) unsafe fn gradients<'a>(given: &instep_tensor, is_empty: bool) -> Result<Lent<'a>> {
    // SAFETY: guaranteed by the caller.
    unsafe { required("gradients", given, is_empty) }
}

/// Returns all tensors of a step. If `is_empty`, the bucket has no elements, and tensors may be missing.
///
/// # Safety
/// The struct, its lists and their addresses meet instep.h's contract during `'a`.
pub(crate) unsafe fn tensors<'a>(from: *const instep_tensors, is_empty: bool) -> Result<StepTensors<'a>> {
    // SAFETY: guaranteed by the caller, here and below.
    let given = unsafe { read(from)? };
    // SAFETY: guaranteed by the caller.
    let one = |name, tensor: &instep_tensor| unsafe { lent(name, tensor) };
    let all = |name, of: &[instep_tensor]| -> Result<Vec<Option<Lent<'a>>>> {
        of.iter().map(|tensor| one(name, tensor)).collect()
    };
    // SAFETY: guaranteed by the caller.
    let params = unsafe { required("parameters", &given.params, is_empty)? };
    // SAFETY: guaranteed by the caller.
    let grads = unsafe { gradients(&given.grads, is_empty)? };
    let mut tensors = StepTensors::new(params, grads)
        .states(all("states", &given.states)?)
        .scales(all("scales", &given.scales)?);
    if let Some(master) = one("masters", &given.master)? {
        tensors = tensors.master(master);
    }
    if let Some(copy) = one("copies", &given.copy)? {
        tensors = tensors.copy(copy);
    }
    if let Some(ema) = one("moving averages", &given.ema)? {
        tensors = tensors.ema(ema);
    }
    Ok(tensors)
}

/// # Safety
/// The struct and its addresses meet instep.h's contract, or the pointer is null.
pub(crate) unsafe fn scaling(from: *const instep_scaling) -> Result<Scaling> {
    // SAFETY: guaranteed by the caller.
    let Some(given) = (unsafe { read_any(from)? }) else { return Ok(Scaling::NONE) };
    zero("reserved", given.reserved)?;
    refuse_misaligned("grad_scale", given.grad_scale)?;
    refuse_misaligned("found_inf", given.found_inf)?;
    let one = |number: f64| if number == 0.0 { 1.0 } else { number };
    let scaling =
        Scaling::mean(given.world_size.max(1)).loss_scale(one(given.loss_scale)).clip(one(given.clip));
    // SAFETY: guaranteed by the caller.
    Ok(unsafe { scaling.grad_scaler(given.grad_scale, given.found_inf) })
}

fn refuse_misaligned(name: &str, address: *const f32) -> Result<()> {
    if address.is_aligned() {
        return Ok(());
    }
    Err(Fault::argument(name, format_args!("{address:p} is misaligned"), "align it to 4 bytes"))
}
