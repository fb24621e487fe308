//! Pools of stream-ordered memory, and which of their memory stays mapped once the program has freed it.
//!
//! Mapping memory is the slow part of an allocation, so a trace shows it. Memory is free as soon as a call frees it,
//! because later calls come after that call in the order of streams. A call that waits for the GPU returns memory
//! that a pool keeps beyond its threshold.

use crate::codes::Answer;
use crate::gpu::Gpu;
use crate::header::cudaError_enum as Code;
use crate::heap::Kind;
use crate::work::Work;

impl Gpu {
    /// Allocates memory of a pool, or of the usual pool, and returns its address and the bytes that the pool had to
    /// map.
    pub(crate) fn allocate_of(
        &mut self,
        pool: Option<usize>,
        bytes: usize,
        stream: usize,
        name: &'static str,
    ) -> Answer<(u64, u64)> {
        let context = self.streams.get(stream)?.context;
        let origin = pool.unwrap_or_else(|| self.pools.usual(context));
        self.pools.table.get(origin)?;
        let made = self.allocate(bytes, Kind::Device { context }, name)?;
        self.enqueue(stream, name, Work::Allocated(made), &[])?;
        let pool = self.pools.table.get(origin)?;
        pool.in_use += bytes as u64;
        let mapped = pool.in_use.saturating_sub(pool.mapped);
        pool.mapped += mapped;
        self.pools.origins.insert(made, origin);
        Ok((made, mapped))
    }

    /// Makes a pool with these properties, of device memory that no other process sees.
    pub(crate) fn new_pool(&mut self, is_plain: bool, device: i32) -> Answer<usize> {
        if !is_plain || !(0..self.settings.devices).contains(&device) {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        }
        Ok(self.pools.create())
    }
}
