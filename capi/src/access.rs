//! Access to a stepper's tensors: reading and writing values, getting addresses, and rebinding to new addresses.
//!
//! The struct `instep_tensor_id` corresponds to `TensorId` in the Rust library.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_void};

use instep::{DType, Element, Moments, Stepper, TensorId, bf16, f16};

use crate::arguments::{Out, list, list_mut, text};
use crate::codes::{
    INSTEP_COPY, INSTEP_EMA, INSTEP_GRAD, INSTEP_PARAM, INSTEP_READ, INSTEP_STATE, INSTEP_WRITE, code,
    of_dtype,
};
use crate::entry::call;
use crate::memory::{instep_memory, memory};
use crate::status::{Fault, INSTEP_UNSUPPORTED, Result, instep_status};
use crate::stepper::{Engine, STEPPERS, Training, instep_stepper, on_any};

/// Names a tensor of a stepper.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct instep_tensor_id {
    /// INSTEP_PARAM, INSTEP_GRAD, INSTEP_STATE, INSTEP_COPY or INSTEP_EMA.
    pub kind: u32,
    /// The parameter's number.
    pub param: u32,
    /// The state's name, from instep_optimizer_state_name. Null for any other kind.
    pub state: *const c_char,
}

/// Copies a tensor to `values`, converted to f32 from its element type. Between passes, any tensor except a released
/// gradient can be read. In a pass, only parameters, and gradients that were written in that pass, can be read. `count`
/// is the number of elements of the tensor's parameter.
///
/// Any thread may call this function, one thread at a time per stepper. The call waits for the last step of the
/// tensor's bucket if the tensor is a parameter, a copy, or (in a pass) a gradient. For any other tensor, the call
/// waits for all steps.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_read(
    stepper: *mut instep_stepper,
    tensor: instep_tensor_id,
    values: *mut f32,
    count: usize,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract, here and below.
        let values = unsafe { list_mut(values, count, "values")? };
        STEPPERS.with(stepper, |training| {
            // SAFETY: the caller meets the header's contract.
            let tensor = unsafe { training.tensor(&tensor)? };
            Ok(on_any!(&training.engine, stepper => stepper.read(tensor, values))?)
        })
    })
}

/// Copies `values` to a tensor, rounded to the tensor's element type. A gradient can be written only in a pass, and any
/// other tensor only between passes. A tensor of kind INSTEP_COPY cannot be written, because only steps write it.
/// `count` is the number of elements of the tensor's parameter. If one rank writes a parameter, every rank must write
/// the same parameter. The next pass then broadcasts rank 0's values of all parameters in the written parameter's
/// bucket. States and moving averages are not broadcast, so write them on every rank. Step counts are not written with
/// the states: set them on every rank with instep_stepper_set_progress.
///
/// Any thread may call this function, one thread at a time per stepper. In a pass, the call waits for the last step of
/// the gradient's bucket. Between passes, the call waits for all steps.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_write(
    stepper: *mut instep_stepper,
    tensor: instep_tensor_id,
    values: *const f32,
    count: usize,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract, here and below.
        let values = unsafe { list(values, count, "values")? };
        STEPPERS.with(stepper, |training| {
            // SAFETY: the caller meets the header's contract.
            let tensor = unsafe { training.tensor(&tensor)? };
            Ok(on_any!(&mut training.engine, stepper => stepper.write(tensor, values))?)
        })
    })
}

/// Writes a tensor's address to `*out_address`, and its element type to `*out_dtype`. `out_dtype` may be null. 8-bit
/// states have no address. `access` is INSTEP_READ or INSTEP_WRITE. In a pass, a call with INSTEP_WRITE marks a
/// gradient as written. Until the caller writes the gradient, its memory has the values that the previous pass left
/// there.
///
/// In a pass, the address is valid until the parameter is handed over or the micro-batch ends. Between passes, the
/// address is valid until the next call on this stepper. On a GPU, work that is enqueued on compute_stream while the
/// address is valid may use the address. On a GPU, only gradients may be written through an address, and even a call
/// with INSTEP_READ marks a gradient as written.
///
/// Any thread may call this function, one thread at a time per stepper. On the CPU, a call with INSTEP_READ waits for
/// the same steps as instep_stepper_read. A call with INSTEP_WRITE waits for the same steps as instep_stepper_write. On
/// a GPU, compute_stream waits instead of the calling thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_address(
    stepper: *mut instep_stepper,
    tensor: instep_tensor_id,
    access: u32,
    out_address: *mut *mut c_void,
    out_dtype: *mut u32,
) -> instep_status {
    call(|| {
        let writes = code("access", access, &[(INSTEP_READ, false), (INSTEP_WRITE, true)])?;
        // SAFETY: the caller meets the header's contract, here and below.
        let (to_address, to_dtype) =
            unsafe { (Out::new(out_address, "out_address")?, Out::optional(out_dtype, "out_dtype")?) };
        STEPPERS.with(stepper, |training| {
            // SAFETY: the caller meets the header's contract.
            let tensor = unsafe { training.tensor(&tensor)? };
            let dtype = training.dtype(tensor)?;
            let address = match &mut training.engine {
                Engine::Host(stepper) => match dtype {
                    DType::BF16 => host_address::<bf16>(stepper, tensor, writes)?,
                    DType::F16 => host_address::<f16>(stepper, tensor, writes)?,
                    _ => host_address::<f32>(stepper, tensor, writes)?,
                },
                Engine::Cuda(_) if writes && !matches!(tensor, TensorId::Grad(_)) => {
                    let text = "address: for writing a tensor on a GPU that is no gradient; use instep_stepper_write";
                    return Err(Fault::new(INSTEP_UNSUPPORTED, text));
                }
                Engine::Cuda(stepper) => std::ptr::with_exposed_provenance_mut(stepper.ptr(tensor)?.0 as usize),
            };
            let code = of_dtype(dtype)?;
            to_address.put(address);
            to_dtype.into_iter().for_each(|out| out.put(code));
            Ok(())
        })
    })
}

/// Gives new addresses to a stepper that was created with the caller's memory. If `tensors` lists no parameters, all
/// parameters keep their addresses. If `tensors` lists no buckets, all buckets keep their addresses.
/// `*out_has_new_buckets` is 1 if the buckets are new, and 0 if at most addresses have changed. out_has_new_buckets may
/// be null. With new buckets, ranks compare layouts, buckets and options. States and step counts stay with their
/// parameters. Copy each parameter's values to its new address before this call.
///
/// Any thread may call this function between passes, one thread at a time per stepper. On the CPU, the call waits for
/// all steps, so the stepper does not touch the old memory after the call. On a GPU, work that is enqueued on
/// compute_stream after the call runs after all work that touches the old memory. With new buckets, the call waits for
/// all steps on a GPU too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_rebind(
    stepper: *mut instep_stepper,
    tensors: *const instep_memory,
    out_has_new_buckets: *mut u32,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract, here and below.
        let out = unsafe { Out::optional(out_has_new_buckets, "out_has_new_buckets")? };
        STEPPERS.with(stepper, |training| {
            // SAFETY: the caller meets the header's contract.
            let has_new_buckets = unsafe {
                let borrowed = memory(tensors, &training.ids, &training.types)?;
                on_any!(&mut training.engine, stepper => stepper.rebind(borrowed))?
            };
            out.into_iter().for_each(|out| out.put(has_new_buckets.into()));
            Ok(())
        })
    })
}

fn host_address<T: Element>(
    stepper: &mut Stepper,
    tensor: TensorId<'_>,
    writes: bool,
) -> Result<*mut c_void> {
    Ok(if writes {
        stepper.view_mut::<T>(tensor)?.as_mut_ptr().cast()
    } else {
        stepper.view::<T>(tensor)?.as_ptr().cast_mut().cast()
    })
}

impl Training {
    /// # Safety
    /// The state's name in `given` meets instep.h's contract during `'a`.
    unsafe fn tensor<'a>(&self, given: &instep_tensor_id) -> Result<TensorId<'a>> {
        let id = self.ids.get(given.param)?;
        let kinds = [INSTEP_PARAM, INSTEP_GRAD, INSTEP_STATE, INSTEP_COPY, INSTEP_EMA];
        Ok(match code("kind of tensor", given.kind, &kinds.map(|kind| (kind, kind)))? {
            INSTEP_GRAD => TensorId::Grad(id),
            // SAFETY: guaranteed by the caller.
            INSTEP_STATE => TensorId::State(id, unsafe { text(given.state, "state")? }),
            INSTEP_COPY => TensorId::Copy(id),
            INSTEP_EMA => TensorId::Ema(id),
            _ => TensorId::Param(id),
        })
    }

    /// Returns the type in which a tensor is stored. For 8-bit states it returns f32, and the library then refuses the
    /// access.
    fn dtype(&self, tensor: TensorId<'_>) -> Result<DType> {
        let precision = |id| on_any!(&self.engine, stepper => stepper.precision_of(id));
        Ok(match tensor {
            TensorId::Param(id) => precision(id)?.param,
            TensorId::Grad(id) => precision(id)?.grad,
            TensorId::State(id, _) if precision(id)?.moments == Moments::BF16 => DType::BF16,
            TensorId::State(..) | TensorId::Ema(_) => DType::F32,
            TensorId::Copy(_) => self.copy.unwrap_or(DType::F32),
        })
    }
}
