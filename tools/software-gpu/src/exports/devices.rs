//! Start, version, error names, and the properties of a device.
//!
//! The number of multiprocessors depends on the seed, because no result may depend on it.

use std::ffi::{CStr, c_char, c_int, c_uint};

use super::{exported, put};
use crate::codes::{self, Answer};
use crate::entry;
use crate::header::{CUDA_VERSION, CUdevice_attribute_enum as Attribute};
use crate::header::{CUdevice, CUdevice_attribute, CUresult, cudaError_enum as Code};
use crate::trace::{Call, Shown};

const NAME: &CStr = c"software GPU";

/// `cuInit` of `cuda.h`.
///
/// # Safety
/// The arguments are those that `cuda.h` documents.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuInit(flags: c_uint) -> CUresult {
    entry::initialise();
    let call = Call { name: "cuInit", arguments: Some(&[("flags", flags.shown())]) };
    entry::call(&call, |_| if flags == 0 { Ok(()) } else { Err(Code::CUDA_ERROR_INVALID_VALUE) })
}

/// Writes the name of a code, which lives as long as the library. Writes null if the code has none.
///
/// # Safety
/// `text` meets the conditions of [`put`].
unsafe fn put_name(code: CUresult, text: *mut *const c_char) -> Answer<()> {
    let name = codes::name(code);
    // SAFETY: by the contract.
    unsafe { put(text, name.map_or(std::ptr::null(), CStr::as_ptr))? };
    name.map(drop).ok_or(Code::CUDA_ERROR_INVALID_VALUE)
}

exported! {
    always cuDriverGetVersion(_gpu, version: *mut c_int) { put(version, CUDA_VERSION as c_int) }

    always cuGetErrorName(_gpu, error: CUresult, text: *mut *const c_char) { put_name(error, text) }

    // The text is the name.
    always cuGetErrorString(_gpu, error: CUresult, text: *mut *const c_char) { put_name(error, text) }

    call cuDeviceGetCount(gpu, count: *mut c_int) { put(count, gpu.settings.devices) }

    call cuDeviceGet(gpu, device: *mut CUdevice, ordinal: c_int) {
        gpu.device(ordinal)?;
        put(device, ordinal)
    }

    call cuDeviceGetName(gpu, name: *mut c_char, bytes: c_int, device: CUdevice) {
        gpu.device(device)?;
        let text = NAME.to_bytes_with_nul();
        if name.is_null() || (bytes as usize) < text.len() {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        }
        name.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), text.len());
        Ok(())
    }

    call cuDeviceTotalMem_v2(gpu, bytes: *mut usize, device: CUdevice) {
        gpu.device(device)?;
        put(bytes, gpu.settings.memory as usize)
    }

    call cuDeviceGetAttribute(gpu, value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice) {
        gpu.device(device)?;
        let answer = match attribute {
            Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK => 1024,
            Attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE => 32,
            // Results must not depend on how many there are.
            Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => 2 + (gpu.settings.seed % 4) as c_int,
            Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR => 2048,
            Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE => 64 << 10,
            Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => 9,
            Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => 0,
            Attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
            | Attribute::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY
            | Attribute::CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED
            | Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED => 1,
            _ => 0,
        };
        put(value, answer)
    }
}
