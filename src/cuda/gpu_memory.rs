//! A stepper's memory on the GPU: arenas, tiles and the initial control records. This file also manages an offloaded
//! stepper's memory on the host.
//!
//! Allocations are stream-ordered, so freeing memory does not wait and does not affect a running kernel. Addresses
//! leave this module only through `Regions`, which checks them. With offload, the host's control memory is page-locked.
//! With `OffloadPolicy::pin_memory`, the host's parameters and gradients are page-locked too, because they are copied
//! to or from the GPU. Optimizer states are the largest part of the host's memory, and stay pageable. The host's memory
//! is freed only when the GPU is idle. (Ren et al., USENIX ATC 2021, "ZeRO-Offload".)
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::Arc;

use crate::abi::{InstepControl, InstepRecord};
use crate::collective::{Allocation, Collective, Purpose};
use crate::cuda::driver::Driver;
use crate::cuda::full_buckets::{Unsharded, is_sharded, shard_bytes, shards};
use crate::cuda::owned::{Arena, OwnedMapped, pointer};
use crate::error::{Error, Result};
use crate::handle::{DevicePtr, Place, StreamHandle};
use crate::host::memories;
use crate::host::stagger::Stagger;
use crate::launch::{
    Assignment, BorrowedPieces, Progress, Region, Regions, first_control, first_records, first_sets,
};
use crate::layout::Plan;
use crate::op::{Memory, Span};

/// Whether an op or the trainer requests an address. A rank's shard of a full bucket is stored in two places: ops
/// access the shard's own memory, and the trainer accesses the full bucket.
#[derive(Clone, Copy)]
pub(super) enum Reader {
    Op,
    Trainer,
}

pub(super) struct DeviceMemory {
    pub(super) driver: Arc<dyn Driver>,
    /// The memory is allocated in the order of this stream.
    stream: StreamHandle,
    pub(super) regions: Regions,
    arenas: Vec<Arena>,
    /// With offload, the host's part of the memory. It is not stream-ordered.
    pub(super) host: Option<HostMemory>,
    /// Memory that the communicator allocated. It is not stream-ordered.
    pub(super) lent: Vec<Allocation>,
    pub(super) unsharded: Unsharded,
}

impl DeviceMemory {
    /// Allocates zeroed memory for a plan, except for borrowed tensors, and writes the initial control records.
    pub(super) fn new(
        driver: &Arc<dyn Driver>,
        stream: StreamHandle,
        plan: &Plan,
        assignment: &Assignment,
        comm: &dyn Collective,
        borrowed: Option<BorrowedPieces>,
        mut host: Option<HostMemory>,
    ) -> Result<DeviceMemory> {
        let mut arenas = Vec::new();
        let mut sharded = Vec::new();
        for memory in [Memory::Params, Memory::Copy].into_iter().filter(|memory| is_sharded(*memory, plan)) {
            let arena = Arena::zeroed(driver, shard_bytes(memory, plan), stream)?;
            sharded.push((memory, shards(memory, plan, &arena)?));
            arenas.push(arena);
        }
        let mut owned = |bytes: u64| {
            let arena = Arena::zeroed(driver, bytes, stream)?;
            let region = Region::whole(pointer(arena.address())?, bytes);
            arenas.push(arena);
            Ok::<Region, Error>(region)
        };
        let [params_bytes, grads_bytes] =
            [Memory::Params, Memory::Grads].map(|memory| Span::whole(memory, plan).bytes());
        let mut lent = Vec::new();
        let mut lent_or_owned = |purpose: Purpose, bytes: u64| {
            let made =
                if bytes > 0 { comm.allocate(purpose, Place::Cuda(driver.ordinal()), bytes)? } else { None };
            let Some(allocation) = made else { return owned(bytes) };
            let base = pointer(DevicePtr(allocation.address.expose_provenance() as u64))?;
            // SAFETY: the communicator has just allocated this memory. It has `bytes` bytes, which is not 0.
            unsafe { driver.fill(DevicePtr(base.addr().get() as u64), &[0], bytes, stream)? };
            lent.push(allocation);
            Ok(Region::whole(base, bytes))
        };
        let given = match borrowed {
            Some(borrowed) => [Region::scattered(borrowed.params), Region::scattered(borrowed.grads)],
            None => {
                let grads = lent_or_owned(Purpose::Gradients, grads_bytes)?;
                let params = sharded.iter().position(|(memory, _)| *memory == Memory::Params);
                let params = params.map(|at| sharded.swap_remove(at).1);
                [params.map_or_else(|| lent_or_owned(Purpose::Parameters, params_bytes), Ok)?, grads]
            }
        };
        let given = [Memory::Params, Memory::Grads].into_iter().zip(given).chain(sharded);
        let regions = Regions::new(plan, assignment.counts(plan), given, |memory, bytes| match &mut host {
            Some(host) if memory.is_offloaded(plan) => host.zeroed(driver, memory, bytes),
            _ => owned(bytes),
        })?;
        let memory = DeviceMemory { host, lent, ..DeviceMemory::of(driver, stream, regions, arenas) };
        // With offload, the host's runner writes the initial control memory instead.
        if memory.host.is_none() {
            memory.initialise(plan, assignment)?;
        }
        Ok(memory)
    }

    /// Returns the address at which a reader finds a span, or `None` if the span has no memory now.
    pub(super) fn find(&self, span: Span, reader: Reader) -> Option<*mut u8> {
        let (shard, full) = (|| self.regions.find(span), || self.unsharded.find(span));
        match reader {
            Reader::Op => shard().or_else(full),
            Reader::Trainer => full().or_else(shard),
        }
    }

    /// Allocates only control memory and settings. Each launch passes the addresses of its tensors.
    pub(super) fn without_tensors(
        driver: &Arc<dyn Driver>,
        stream: StreamHandle,
        plan: &Plan,
        assignment: &Assignment,
    ) -> Result<DeviceMemory> {
        let mut arenas = Vec::new();
        let regions = Regions::without_tensors(assignment.counts(plan), |_, bytes| {
            let arena = Arena::zeroed(driver, bytes, stream)?;
            let region = Region::whole(pointer(arena.address())?, bytes);
            arenas.push(arena);
            Ok(region)
        })?;
        let memory = DeviceMemory::of(driver, stream, regions, arenas);
        memory.initialise(plan, assignment)?;
        Ok(memory)
    }

    fn of(
        driver: &Arc<dyn Driver>,
        stream: StreamHandle,
        regions: Regions,
        arenas: Vec<Arena>,
    ) -> DeviceMemory {
        let (driver, lent, unsharded) = (Arc::clone(driver), Vec::new(), Unsharded::default());
        DeviceMemory { driver, stream, regions, arenas, host: None, lent, unsharded }
    }

    /// Uploads the initial control block and records.
    fn initialise(&self, plan: &Plan, assignment: &Assignment) -> Result<()> {
        let DeviceMemory { driver, stream, .. } = self;
        let constants = &assignment.constants;
        let records: Vec<InstepRecord> = first_records(plan, &self.regions, assignment).collect();
        let sets: Vec<InstepControl> = first_sets(plan, constants).collect();
        // SAFETY: control memory has room for a block, the blocks of these clip sets, and these records. The rest of it
        // stays zeros. Nothing runs on it yet.
        unsafe {
            let control = first_control(constants);
            driver.upload(address(self.regions.control()), bytes_of(&control), *stream)?;
            if !sets.is_empty() {
                driver.upload(address(self.regions.further_controls().0), bytes_of_all(&sets), *stream)?;
            }
            if !records.is_empty() {
                driver.upload(address(self.regions.records()), bytes_of_all(&records), *stream)?;
            }
        }
        Ok(())
    }

    /// Uploads a copy of these values. The copy lives as long as this memory.
    pub(super) fn keep<T: Copy>(&mut self, values: &[T]) -> Result<*const T> {
        let (driver, stream) = (&self.driver, self.stream);
        let arena = Arena::zeroed(driver, size_of_val(values) as u64, stream)?;
        let kept = pointer(arena.address())?.as_ptr().cast_const().cast();
        if !values.is_empty() {
            // SAFETY: this memory was just allocated for the values.
            unsafe { driver.upload(arena.address(), bytes_of_all(values), stream)? };
        }
        self.arenas.push(arena);
        Ok(kept)
    }
}

/// Downloads a value.
///
/// # Safety
/// `at` is a device address of a `T` that nothing writes now. Every bit pattern is a valid `T`.
pub(super) unsafe fn fetch<T: Copy>(driver: &dyn Driver, at: *const T, stream: StreamHandle) -> Result<T> {
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: zeros are initialised bytes, as many as the slice says. The caller guarantees the address.
    unsafe {
        let bytes = std::slice::from_raw_parts_mut(value.as_mut_ptr().cast(), size_of::<T>());
        driver.download(bytes, address(at), stream)?;
        Ok(value.assume_init())
    }
}

/// Sets the [`Progress`] of a record.
///
/// # Safety
/// `at` is a device address of a record that nothing else touches now.
pub(super) unsafe fn write_progress(
    driver: &dyn Driver,
    at: *mut InstepRecord,
    progress: Progress,
    stream: StreamHandle,
) -> Result<()> {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut record = fetch(driver, at.cast_const(), stream)?;
        progress.set(&mut record);
        driver.upload(address(at), bytes_of(&record), stream)
    }
}

pub(super) fn address<T>(pointer: *const T) -> DevicePtr {
    DevicePtr(pointer.addr() as u64)
}

/// Returns values as bytes. The values have no uninitialized padding.
pub(super) fn bytes_of_all<T: Copy>(values: &[T]) -> &[u8] {
    // SAFETY: the structs of abi.h have no padding, and nothing else is passed in.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

pub(super) fn bytes_of<T: Copy>(value: &T) -> &[u8] {
    bytes_of_all(std::slice::from_ref(value))
}

/// The host's memory for offloaded steps.
#[derive(Default)]
pub(super) struct HostMemory {
    /// Whether parameters and gradients are page-locked. Control memory is always page-locked, and states are never
    /// page-locked.
    is_pinned: bool,
    stagger: Stagger,
    pinned: Vec<OwnedMapped>,
    pageable: Vec<memories::Arena>,
}

impl HostMemory {
    pub(super) fn new(is_pinned: bool) -> HostMemory {
        HostMemory { is_pinned, ..HostMemory::default() }
    }

    pub(super) fn zeroed(&mut self, driver: &Arc<dyn Driver>, memory: Memory, bytes: u64) -> Result<Region> {
        let offset = self.stagger.next(bytes);
        let is_pinned = match memory {
            Memory::Control => true,
            Memory::HostParams | Memory::HostGrads => self.is_pinned,
            _ => false,
        };
        if !is_pinned {
            let arena = memories::Arena::zeroed(bytes, offset)?;
            let (base, bytes) = arena.run();
            self.pageable.push(arena);
            return Ok(Region::whole(base, bytes));
        }
        let mapped = OwnedMapped::new(driver, (bytes + offset) as usize)?;
        let base = mapped.host().as_ptr().wrapping_add(offset as usize);
        let base = NonNull::new(base).unwrap_or(mapped.host());
        self.pinned.push(mapped);
        Ok(Region::whole(base, bytes))
    }
}
