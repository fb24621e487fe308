//! The calls of a pass: begin, hand over, finish, abandon.
//!
//! A pass is the stepper's state, not an object, so a pass that is forgotten is found by the next begin.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::num::NonZeroU32;

use instep::EventHandle;

use crate::arguments::{Out, list, list_mut};
use crate::entry::call;
use crate::status::{Fault, INSTEP_NULL, INSTEP_UNSUPPORTED, Result, instep_status};
use crate::stepper::{Engine, STEPPERS, instep_stepper, on_any};

/// Opens a pass: one forward and backward. 0 and 1 stand for one micro-batch; of several, the first write of a gradient
/// replaces, later ones are the caller's to add, and buckets are stepped in the last. In the first pass all ranks take rank 0's
/// parameters; after parameters were written, those of their buckets.
///
/// Any thread, one at a time. Does not wait, but on a GPU for the other ranks' calls after parameters were written.
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

/// Goes on to the next micro-batch: every parameter is the caller's again, and the gradients stay.
///
/// Any thread, one at a time. Does not wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_next_micro_batch(stepper: *mut instep_stepper) -> instep_status {
    call(|| {
        STEPPERS.with(stepper, |training| {
            Ok(on_any!(&mut training.engine, stepper => stepper.next_micro_batch())?)
        })
    })
}

/// Hands over a parameter: its gradient is written, and neither is used any more in this pass. Once its bucket is complete, it
/// is reduced and stepped, as the mode says. Addresses of the parameter and of its gradient are no longer valid.
///
/// Any thread, one at a time. Does not wait, unless the stepper is inline. On a GPU it covers what was enqueued on
/// compute_stream.
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

/// Hands over all parameters of a bucket. Buckets of borrowed memory are numbered as they were given. With sums_by_caller it says
/// that the bucket's sum is there, which on a GPU only instep_stepper_bucket_ready_after can say.
///
/// Any thread, one at a time. As for instep_stepper_grad_ready.
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

/// Hands over all parameters of a bucket whose sum the caller makes, on a GPU and with sums_by_caller: its step waits for `event`
/// (cudaEvent_t or CUevent). The event was recorded in this pass after the bucket's sum, which comes after the pass's last write
/// of a gradient of the bucket and its last read of a parameter of the bucket. An event that was never recorded, or too early,
/// lets the step race with the sum. The wait is enqueued in this call, so the event may be destroyed or recorded again after it.
///
/// Any thread, one at a time. Does not wait.
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
            // SAFETY: the header's contract.
            Ok(unsafe { stepper.bucket_ready_after(bucket, EventHandle(event.expose_provenance())) }?)
        })
    })
}

/// Leaves parameters alone in the open pass, because no rank has a gradient for them. Not with INSTEP_UNUSED_SKIP, which counts
/// for itself. All ranks name the same ones, before they hand them over. A gradient that was written is discarded.
///
/// Any thread, one at a time. Does not wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_set_unused(
    stepper: *mut instep_stepper,
    params: *const u32,
    param_count: usize,
) -> instep_status {
    call(|| {
        // SAFETY: the header's contract.
        let params = unsafe { list(params, param_count, "params")? };
        STEPPERS.with(stepper, |training| {
            let ids = params.iter().map(|param| training.ids.get(*param)).collect::<Result<Vec<_>>>()?;
            Ok(on_any!(&mut training.engine, stepper => stepper.set_unused(&ids))?)
        })
    })
}

/// Closes the pass. Gradients that were written are handed over; for the others `unused` says what happens. With sums_by_caller
/// only a hand-over says that a sum is there, so a bucket that was written and not handed over is INSTEP_ORDER. If it is
/// INSTEP_ORDER the pass stays open, to be mended or abandoned.
///
/// Any thread, one at a time. Does not wait: the steps run beside what comes next, and the next access waits for its bucket.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_finish(stepper: *mut instep_stepper) -> instep_status {
    call(|| {
        STEPPERS.with(stepper, |training| Ok(on_any!(&mut training.engine, stepper => stepper.finish())?))
    })
}

/// Gives the pass up: what has not been launched is discarded. In INSTEP_MODE_EAGER, buckets that were launched stay stepped:
/// `*out_count` is their number, and the first `capacity` of them are written to `out_buckets`. Both may be null.
///
/// Any thread, one at a time. Does not wait, but for a pass that broadcasts parameters. Ranks abandon together, after the same
/// bucket.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_abandon(
    stepper: *mut instep_stepper,
    out_buckets: *mut u32,
    capacity: usize,
    out_count: *mut usize,
) -> instep_status {
    call(|| {
        let capacity = if out_buckets.is_null() { 0 } else { capacity };
        // SAFETY: the header's contract.
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
