//! Events: making, recording, querying and timing them.
//!
//! An event that was never recorded counts as ended, as with the real driver.

use std::ffi::c_uint;

use super::{exported, handle, pointer, put};
use crate::header::{CUevent, CUstream};

exported! {
    call cuEventCreate(gpu, event: *mut CUevent, flags: c_uint) {
        let made = gpu.create_event(flags)?;
        put(event, pointer(made))
    }

    call cuEventDestroy_v2(gpu, event: CUevent) { gpu.destroy_event(handle(event)) }

    call cuEventRecord(gpu, event: CUevent, stream: CUstream) { gpu.record(handle(event), handle(stream)) }

    call cuEventQuery(gpu, event: CUevent) { gpu.query_event(handle(event)) }

    wait cuEventSynchronize(gpu, event: CUevent) { Ok(gpu.place_of(handle(event))?.into_iter().collect()) }

    call cuEventElapsedTime_v2(gpu, milliseconds: *mut f32, from: CUevent, to: CUevent) {
        let elapsed = gpu.elapsed(handle(from), handle(to))?;
        put(milliseconds, elapsed)
    }
}
