//! The calls of a pass: begin, hand over, finish, abandon.
//!
//! In C a pass is a state of the stepper, not an object. instep_stepper_begin therefore detects an earlier pass that
//! was not closed.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::num::NonZeroU32;

use instep::EventHandle;

use crate::arguments::{Out, list, list_mut};
use crate::entry::call;
use crate::status::{Fault, INSTEP_NULL, INSTEP_UNSUPPORTED, Result, instep_status};
use crate::stepper::{Engine, STEPPERS, instep_stepper, on_any};

/// Opens a pass: one forward and backward. A `micro_batches` of 0 or 1 means one micro-batch. With several
/// micro-batches, the caller writes a gradient in the first micro-batch and adds to it in later ones. Buckets are
/// stepped in the last micro-batch. The first pass broadcasts rank 0's parameters. If a parameter is written later
/// (instep_stepper_write, or instep_stepper_address with INSTEP_WRITE), the next pass broadcasts all parameters of the
/// parameter's bucket. With sums_by_caller, no pass broadcasts parameters.
///
/// Any thread may call this function, one thread at a time per stepper. On a GPU, the call waits only if it is eight
/// passes ahead of the GPU. On the CPU, the call waits only if the option `is_inline` is 1: if the pass broadcasts
/// parameters, the call then waits for the broadcast.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_begin(
    stepper: *mut instep_stepper,
    micro_batches: u32,
) -> instep_status {
    call(|| {
        let micro_batches = NonZeroU32::new(micro_batches).unwrap_or(NonZeroU32::MIN);
        STEPPERS.with(stepper, |training| {
            on_any!(&mut training.engine, stepper => stepper.begin_accumulating(micro_batches)?.detach());
            Ok(())
        })
    })
}

/// Begins the next micro-batch. The caller may then use every parameter and gradient again. The values of the gradients
/// do not change.
///
/// Any thread may call this function, one thread at a time per stepper. The call does not wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_next_micro_batch(stepper: *mut instep_stepper) -> instep_status {
    call(|| {
        STEPPERS.with(stepper, |training| {
            Ok(on_any!(&mut training.engine, stepper => stepper.next_micro_batch())?)
        })
    })
}

/// Hands over a parameter. The caller declares that the gradient of the parameter is written, and that one use of the
/// parameter is finished. Once all parameters of the bucket are handed over in the last micro-batch, the bucket is
/// reduced. With a collective of several ranks, the reduce also requires that all earlier buckets are handed over. The
/// option `mode` decides when the bucket is stepped. When the parameter is handed over for its last use, its address
/// and its gradient's address become invalid.
///
/// Any thread may call this function, one thread at a time per stepper. The call waits only if the option `is_inline`
/// is 1. On a GPU, the sum and the step run after the work that is on compute_stream at the time of the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_grad_ready(
    stepper: *mut instep_stepper,
    param: u32,
) -> instep_status {
    call(|| {
        STEPPERS.with(stepper, |training| {
            let id = training.ids.get(param)?;
            Ok(on_any!(&mut training.engine, stepper => stepper.grad_ready(id))?)
        })
    })
}

/// Hands over all parameters of a bucket. Buckets in the caller's memory are numbered in the order of
/// instep_memory.buckets. With sums_by_caller, the call also declares that the bucket's sum is complete. On a GPU with
/// sums_by_caller, call instep_stepper_bucket_ready_after instead.
///
/// Any thread may call this function, one thread at a time per stepper. The call waits only if the option `is_inline`
/// is 1.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_bucket_ready(
    stepper: *mut instep_stepper,
    bucket: u32,
) -> instep_status {
    call(|| {
        STEPPERS.with(stepper, |training| {
            Ok(on_any!(&mut training.engine, stepper => stepper.bucket_ready(bucket))?)
        })
    })
}

/// Hands over all parameters of a bucket on a GPU with sums_by_caller. The bucket's step waits for `event` (cudaEvent_t
/// or CUevent). The caller must have recorded the event in this pass, after the bucket's sum. The sum must run after
/// the pass's last write of a gradient in the bucket, and after the pass's last read of a parameter in the bucket. If
/// the event was never recorded, or was recorded too early, the step races with the sum. This call enqueues the wait,
/// so the event may be destroyed or recorded again after the call.
///
/// Any thread may call this function, one thread at a time per stepper. The call does not wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_bucket_ready_after(
    stepper: *mut instep_stepper,
    bucket: u32,
    event: *mut c_void,
) -> instep_status {
    call(|| {
        STEPPERS.with(stepper, |training| {
            let Engine::Cuda(stepper) = &mut training.engine else {
                let text = "event: the CPU has none; call instep_stepper_bucket_ready once the sum is there";
                return Err(Fault::new(INSTEP_UNSUPPORTED, text));
            };
            if event.is_null() {
                let text = "event: null; record one after the bucket's sum";
                return Err(Fault::new(INSTEP_NULL, text));
            }
            // SAFETY: the caller meets the header's contract.
            Ok(unsafe { stepper.bucket_ready_after(bucket, EventHandle(event.expose_provenance())) }?)
        })
    })
}

/// Declares parameters for which no rank has a gradient, so that the open pass does not step them. All ranks must
/// declare the same parameters at the same point of the pass, before these parameters are handed over. If the gradient
/// of a declared parameter was written, it is discarded. With INSTEP_UNUSED_SKIP the call is refused, because the
/// stepper then finds unused parameters itself.
///
/// Any thread may call this function, one thread at a time per stepper. The call does not wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_set_unused(
    stepper: *mut instep_stepper,
    params: *const u32,
    param_count: usize,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract.
        let params = unsafe { list(params, param_count, "params")? };
        STEPPERS.with(stepper, |training| {
            let ids = params.iter().map(|param| training.ids.get(*param)).collect::<Result<Vec<_>>>()?;
            Ok(on_any!(&mut training.engine, stepper => stepper.set_unused(&ids))?)
        })
    })
}

/// Closes the pass. The call hands over each parameter that has a written gradient and was not handed over before. The
/// option `unused` decides what happens to parameters without a gradient. With sums_by_caller, the call returns
/// INSTEP_ORDER if gradients of a bucket were written but the bucket was not handed over. Only the hand-over declares
/// that the bucket's sum is complete. After INSTEP_ORDER the pass is still open, and can be completed or abandoned.
///
/// Any thread may call this function, one thread at a time per stepper. The call waits only if the option `is_inline`
/// is 1. Otherwise steps overlap with later work, and the next access to a tensor waits for the step of the tensor's
/// bucket.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_finish(stepper: *mut instep_stepper) -> instep_status {
    call(|| {
        STEPPERS.with(stepper, |training| Ok(on_any!(&mut training.engine, stepper => stepper.finish())?))
    })
}

/// Abandons the pass. A bucket is launched when its sum and its step are enqueued on the device. The gradients of
/// buckets that were not launched are discarded. In INSTEP_MODE_EAGER, the steps of launched buckets are not undone.
/// The call writes the number of stepped buckets to `*out_count`, and the first `capacity` of their numbers to
/// `out_buckets`. Both pointers may be null.
///
/// Any thread may call this function, one thread at a time per stepper. The call waits only if the pass broadcasts
/// parameters. All ranks must abandon the pass after the same bucket.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_abandon(
    stepper: *mut instep_stepper,
    out_buckets: *mut u32,
    capacity: usize,
    out_count: *mut usize,
) -> instep_status {
    call(|| {
        let capacity = if out_buckets.is_null() { 0 } else { capacity };
        // SAFETY: the caller meets the header's contract.
        let (buckets, to_count) = unsafe {
            (list_mut(out_buckets, capacity, "out_buckets")?, Out::optional(out_count, "out_count")?)
        };
        STEPPERS.with(stepper, |training| {
            let stepped = on_any!(&mut training.engine, stepper => stepper.abandon())?.stepped_buckets;
            buckets.iter_mut().zip(&stepped).for_each(|(place, bucket)| *place = *bucket);
            to_count.into_iter().for_each(|out| out.put(stepped.len()));
            Ok(())
        })
    })
}
