//! Streams, captures, and functions of the host on a stream.
//!
//! Priorities are accepted and change nothing: the seed decides the order.

use std::ffi::{c_int, c_uint, c_void};

use super::{exported, handle, pointer, put};
use crate::header::{
    CUcontext, CUevent, CUgraph, CUgraphEdgeData, CUgraphNode, CUgreenCtx, CUhostFn, CUstream,
    CUstreamCaptureMode, CUstreamCaptureStatus, CUstreamCaptureStatus_enum as CaptureStatus,
    cudaError_enum as Code, cuuint64_t,
};
use crate::objects::Mode;
use crate::work::Work;

exported! {
    call cuStreamCreate(gpu, stream: *mut CUstream, flags: c_uint) {
        let made = gpu.new_stream(flags)?;
        put(stream, pointer(made))
    }

    call cuStreamCreateWithPriority(gpu, stream: *mut CUstream, flags: c_uint, _priority: c_int) {
        let made = gpu.new_stream(flags)?;
        put(stream, pointer(made))
    }

    call cuStreamDestroy_v2(gpu, stream: CUstream) { gpu.destroy_stream(handle(stream)) }

    call cuStreamGetCtx(gpu, stream: CUstream, context: *mut CUcontext) {
        let stream = gpu.stream(handle(stream))?;
        let stream = gpu.streams.get(stream)?;
        put(context, pointer(stream.green.unwrap_or(stream.context)))
    }

    call cuStreamGetCtx_v2(gpu, stream: CUstream, context: *mut CUcontext, green: *mut CUgreenCtx) {
        let stream = gpu.stream(handle(stream))?;
        let stream = gpu.streams.get(stream)?;
        put(context, pointer(stream.context))?;
        put(green, pointer(stream.green.unwrap_or(0)))
    }

    call cuGreenCtxStreamCreate(gpu, stream: *mut CUstream, green: CUgreenCtx, flags: c_uint, _priority: c_int) {
        let made = gpu.new_green_stream(handle(green), flags)?;
        put(stream, pointer(made))
    }

    call cuStreamQuery(gpu, stream: CUstream) {
        let end = gpu.end_of(handle(stream))?;
        if gpu.ask_for(&end) { Ok(()) } else { Err(Code::CUDA_ERROR_NOT_READY) }
    }

    wait cuStreamSynchronize(gpu, stream: CUstream) { gpu.end_of(handle(stream)).map(|end| vec![end]) }

    call cuStreamWaitEvent(gpu, stream: CUstream, event: CUevent, flags: c_uint) {
        if flags != 0 {
            return Err(Code::CUDA_ERROR_NOT_SUPPORTED);
        }
        gpu.wait_for(handle(stream), handle(event))
    }

    call cuStreamBeginCapture_v2(gpu, stream: CUstream, mode: CUstreamCaptureMode) {
        gpu.begin_capture(handle(stream), mode.0)
    }

    call cuStreamEndCapture(gpu, stream: CUstream, graph: *mut CUgraph) {
        match gpu.end_capture(handle(stream)) {
            Ok(made) => put(graph, pointer(made)),
            Err(code) => {
                let _ = put(graph, std::ptr::null_mut());
                Err(code)
            }
        }
    }

    call cuStreamIsCapturing(gpu, stream: CUstream, status: *mut CUstreamCaptureStatus) {
        let stream = gpu.stream(handle(stream))?;
        let capturing = gpu.streams.get(stream)?.capture.is_some();
        put(status, CaptureStatus(u32::from(capturing)))
    }

    call cuStreamGetCaptureInfo_v3(
        gpu, stream: CUstream, status: *mut CUstreamCaptureStatus, id: *mut cuuint64_t, graph: *mut CUgraph,
        nodes: *mut *const CUgraphNode, edges: *mut *const CUgraphEdgeData, count: *mut usize,
    ) {
        if !(graph.is_null() && nodes.is_null() && edges.is_null() && count.is_null()) {
            return Err(Code::CUDA_ERROR_NOT_SUPPORTED);
        }
        let stream = gpu.stream(handle(stream))?;
        let Some(capture) = gpu.streams.get(stream)?.capture else { return put(status, CaptureStatus(0)) };
        let is_invalid = gpu.captures.get(capture)?.invalid.is_some();
        put(status, CaptureStatus(1 + u32::from(is_invalid)))?;
        if !id.is_null() && !is_invalid {
            id.write(capture as cuuint64_t);
        }
        Ok(())
    }

    call cuThreadExchangeStreamCaptureMode(_gpu, mode: *mut CUstreamCaptureMode) {
        if mode.is_null() {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        }
        let wanted = Mode::of((*mode).0)?;
        (*mode).0 = wanted.exchange().number();
        Ok(())
    }

    call cuLaunchHostFunc(gpu, stream: CUstream, function: CUhostFn, data: *mut c_void) {
        let function = function.ok_or(Code::CUDA_ERROR_INVALID_VALUE)? as *const c_void;
        let stream = gpu.stream(handle(stream))?;
        let work = Work::Host { function: function.expose_provenance(), data: data.expose_provenance() };
        gpu.enqueue(stream, "host function", work, &[]).map(drop)
    }
}
