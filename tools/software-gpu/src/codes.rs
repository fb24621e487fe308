//! The codes of `cuda.h` that this driver returns, and their names.
//!
//! A code without a name here is returned only if the environment asks for it.

use std::ffi::CStr;

use crate::header::cudaError_enum as Code;

/// The result of a call: a value, or the code of an error.
pub(crate) type Answer<T> = Result<T, Code>;

macro_rules! named {
    ($($name:ident)*) => {
        /// Returns the name of a code that this driver returns.
        pub(crate) fn name(code: Code) -> Option<&'static CStr> {
            $(if code == Code::$name {
                return CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()).ok();
            })*
            None
        }
    };
}

named! {
    CUDA_SUCCESS CUDA_ERROR_INVALID_VALUE CUDA_ERROR_OUT_OF_MEMORY CUDA_ERROR_NOT_INITIALIZED CUDA_ERROR_INVALID_DEVICE
    CUDA_ERROR_INVALID_IMAGE CUDA_ERROR_INVALID_CONTEXT CUDA_ERROR_NO_BINARY_FOR_GPU CUDA_ERROR_INVALID_HANDLE
    CUDA_ERROR_ILLEGAL_STATE CUDA_ERROR_NOT_FOUND CUDA_ERROR_NOT_READY CUDA_ERROR_ILLEGAL_ADDRESS
    CUDA_ERROR_LAUNCH_FAILED CUDA_ERROR_NOT_SUPPORTED CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED CUDA_ERROR_STREAM_CAPTURE_MERGE CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED CUDA_ERROR_STREAM_CAPTURE_ISOLATION CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    CUDA_ERROR_CAPTURED_EVENT CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD CUDA_ERROR_UNKNOWN
}
