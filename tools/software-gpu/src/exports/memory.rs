//! Memory on the GPU, allocated at once or in a stream's order, and pinned memory on the host.
//!
//! For the judge, memory of `cuMemAllocAsync` exists only after its position on the stream. `pools.rs` decides which
//! memory stays mapped.

use std::ffi::{c_int, c_uint, c_void};

use super::{exported, handle, pointer, put};
use crate::header::{
    CUctx_st, CUdeviceptr, CUmemAllocationHandleType_enum as HandleType,
    CUmemAllocationType_enum as AllocationType, CUmemLocationType_enum as LocationType, CUmemPool_attribute,
    CUmemPool_attribute_enum as PoolAttribute, CUmemPoolProps, CUmemoryPool, CUmemorytype_enum as MemoryType,
    CUstream,
};
use crate::header::{CUpointer_attribute, CUpointer_attribute_enum as Attribute, cudaError_enum as Code};
use crate::heap::Kind;
use crate::trace::{self, Value};
use crate::work::Work;

const KNOWN_HOST_FLAGS: c_uint = 0b111;

/// Adds the mapped bytes to the call's line in the trace.
fn tell_of_mapped(bytes: u64) {
    if bytes > 0 {
        trace::answered(Value::Mapped(bytes));
    }
}

exported! {
    call cuMemAlloc_v2(gpu, address: *mut CUdeviceptr, bytes: usize) {
        let context = gpu.current()?;
        gpu.forbid_unsafe_calls()?;
        let made = gpu.allocate(bytes, Kind::Device { context }, "cuMemAlloc")?;
        put(address, made)
    }

    call cuMemFree_v2(gpu, address: CUdeviceptr) {
        gpu.current()?;
        gpu.forbid_unsafe_calls()?;
        if address == 0 {
            return Ok(());
        }
        gpu.free_now(address, "cuMemFree")
    }

    call cuMemGetInfo_v2(gpu, free: *mut usize, total: *mut usize) {
        gpu.current()?;
        put(free, gpu.settings.memory.saturating_sub(gpu.heap.in_use) as usize)?;
        put(total, gpu.settings.memory as usize)
    }

    call cuMemAllocAsync(gpu, address: *mut CUdeviceptr, bytes: usize, stream: CUstream) {
        let stream = gpu.stream(handle(stream))?;
        let (made, mapped) = gpu.allocate_of(None, bytes, stream, "cuMemAllocAsync")?;
        put(address, made).map(|()| tell_of_mapped(mapped))
    }

    call cuMemPoolCreate(gpu, pool: *mut CUmemoryPool, props: *const CUmemPoolProps) {
        let props = props.as_ref().ok_or(Code::CUDA_ERROR_INVALID_VALUE)?;
        let is_plain = props.allocType == AllocationType::CU_MEM_ALLOCATION_TYPE_PINNED
            && props.handleTypes == HandleType::CU_MEM_HANDLE_TYPE_NONE
            && props.location.type_ == LocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        let made = gpu.new_pool(is_plain, props.location.id)?;
        put(pool, pointer(made))
    }

    call cuMemPoolDestroy(gpu, pool: CUmemoryPool) { gpu.pools.destroy(handle(pool)) }

    call cuMemPoolSetAttribute(gpu, pool: CUmemoryPool, attr: CUmemPool_attribute, value: *mut c_void) {
        if attr != PoolAttribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD {
            return Err(Code::CUDA_ERROR_NOT_SUPPORTED);
        }
        let bytes = *value.cast::<u64>().as_ref().ok_or(Code::CUDA_ERROR_INVALID_VALUE)?;
        gpu.pools.set_threshold(handle(pool), bytes)
    }

    call cuMemAllocFromPoolAsync(
        gpu, address: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, stream: CUstream
    ) {
        let stream = gpu.stream(handle(stream))?;
        let (made, mapped) = gpu.allocate_of(Some(handle(pool)), bytes, stream, "cuMemAllocFromPoolAsync")?;
        put(address, made).map(|()| tell_of_mapped(mapped))
    }

    call cuMemFreeAsync(gpu, address: CUdeviceptr, stream: CUstream) {
        let stream = gpu.stream(handle(stream))?;
        if address == 0 {
            return Ok(());
        }
        gpu.require_start(address, "cuMemFreeAsync")?;
        let bytes = gpu.heap.around(address).map_or(0, |memory| memory.bytes);
        gpu.pools.free(address, bytes);
        gpu.enqueue(stream, "cuMemFreeAsync", Work::Freed(address), &[]).map(drop)
    }

    call cuMemHostAlloc(gpu, address: *mut *mut c_void, bytes: usize, flags: c_uint) {
        gpu.current()?;
        gpu.forbid_unsafe_calls()?;
        if flags & !KNOWN_HOST_FLAGS != 0 {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        }
        let made = gpu.allocate(bytes, Kind::Pinned, "cuMemHostAlloc")?;
        put(address, pointer(made as usize))
    }

    call cuMemHostGetDevicePointer_v2(gpu, device: *mut CUdeviceptr, host: *mut c_void, flags: c_uint) {
        gpu.current()?;
        let address = host.expose_provenance() as u64;
        match gpu.heap.around(address) {
            Some(memory) if memory.kind == Kind::Pinned && flags == 0 => put(device, address),
            _ => Err(Code::CUDA_ERROR_INVALID_VALUE),
        }
    }

    call cuMemFreeHost(gpu, address: *mut c_void) {
        gpu.current()?;
        gpu.forbid_unsafe_calls()?;
        gpu.free_now(address.expose_provenance() as u64, "cuMemFreeHost")
    }

    call cuPointerGetAttribute(gpu, value: *mut c_void, attribute: CUpointer_attribute, address: CUdeviceptr) {
        gpu.current()?;
        let kind = gpu.heap.around(address).ok_or(Code::CUDA_ERROR_INVALID_VALUE)?.kind;
        let context = match kind {
            Kind::Device { context } => context,
            Kind::Pinned => gpu.current()?,
        };
        match attribute {
            Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE => put(value.cast(), match kind {
                Kind::Device { .. } => MemoryType::CU_MEMORYTYPE_DEVICE.0,
                Kind::Pinned => MemoryType::CU_MEMORYTYPE_HOST.0,
            }),
            Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => {
                put(value.cast::<c_int>(), gpu.contexts.get(context)?.device)
            }
            Attribute::CU_POINTER_ATTRIBUTE_CONTEXT => put(value.cast(), pointer::<CUctx_st>(context)),
            _ => Err(Code::CUDA_ERROR_NOT_SUPPORTED),
        }
    }
}
