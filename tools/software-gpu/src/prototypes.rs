//! Compiles only if every exported function has the type that `cuda.h` gives it, and every function of the list exists.
//!
//! Two functions fit into one array only if their types are equal. `exported.txt` is the list; a test compares it.

macro_rules! same {
    ($($name:ident)*) => {
        const _: () = {
            $(let _ = [crate::exports::$name, crate::header::$name];)*
        };

        #[cfg(test)]
        const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}

same! {
    cuInit
    cuDriverGetVersion
    cuGetErrorName
    cuGetErrorString
    cuDeviceGetCount
    cuDeviceGet
    cuDeviceGetAttribute
    cuDeviceGetName
    cuDeviceTotalMem_v2
    cuDevicePrimaryCtxRetain
    cuDevicePrimaryCtxRelease_v2
    cuCtxCreate_v4
    cuCtxDestroy_v2
    cuCtxGetCurrent
    cuCtxSetCurrent
    cuCtxPushCurrent_v2
    cuCtxPopCurrent_v2
    cuCtxGetDevice
    cuCtxSynchronize
    cuCtxGetStreamPriorityRange
    cuDeviceGetDevResource
    cuDevResourceGenerateDesc
    cuGreenCtxCreate
    cuModuleLoadData
    cuModuleGetFunction
    cuModuleUnload
    cuOccupancyMaxActiveBlocksPerMultiprocessor
    cuStreamCreate
    cuStreamCreateWithPriority
    cuStreamDestroy_v2
    cuStreamGetCtx
    cuStreamGetCtx_v2
    cuGreenCtxStreamCreate
    cuStreamQuery
    cuStreamSynchronize
    cuStreamWaitEvent
    cuStreamBeginCapture_v2
    cuStreamEndCapture
    cuStreamIsCapturing
    cuStreamGetCaptureInfo_v3
    cuThreadExchangeStreamCaptureMode
    cuLaunchHostFunc
    cuEventCreate
    cuEventDestroy_v2
    cuEventRecord
    cuEventQuery
    cuEventSynchronize
    cuEventElapsedTime_v2
    cuMemAlloc_v2
    cuMemFree_v2
    cuMemGetInfo_v2
    cuMemAllocAsync
    cuMemFreeAsync
    cuMemPoolCreate
    cuMemPoolDestroy
    cuMemPoolSetAttribute
    cuMemAllocFromPoolAsync
    cuMemHostAlloc
    cuMemHostGetDevicePointer_v2
    cuMemFreeHost
    cuPointerGetAttribute
    cuMemsetD8_v2
    cuMemsetD8Async
    cuMemsetD16Async
    cuMemsetD32Async
    cuMemcpyHtoD_v2
    cuMemcpyDtoH_v2
    cuMemcpyDtoD_v2
    cuMemcpyHtoDAsync_v2
    cuMemcpyDtoHAsync_v2
    cuMemcpyDtoDAsync_v2
    cuLaunchKernel
    cuGraphInstantiateWithFlags
    cuGraphDestroy
    cuGraphLaunch
    cuGraphExecDestroy
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_function_of_the_list_is_held_to_the_header() {
        let listed = include_str!("exported.txt").lines().filter(|line| !line.starts_with('#'));
        assert!(listed.eq(super::NAMES.iter().copied()));
    }
}
