//! Pools of stream-ordered memory: what of it stays mapped once the program has freed it.
//!
//! Memory that a pool maps is the slow part of an allocation, so a trace tells of it. Memory is free from the call that frees
//! it on, since later calls come after that in the order of streams. A call that waits for the GPU gives back what a pool
//! keeps beyond its threshold.

use std::collections::BTreeMap;

use crate::gpu::{Answer, Gpu};
use crate::handles::Table;
use crate::header::cudaError_enum as Code;
use crate::heap::Kind;
use crate::work::Work;

/// The memory of one pool, in bytes.
#[derive(Default)]
struct Pool {
    threshold: u64,
    in_use: u64,
    mapped: u64,
}

pub(crate) struct Pools {
    table: Table<Pool>,
    /// Of each context, the one that calls take which name none.
    usual: BTreeMap<usize, usize>,
    /// By its address, which pool memory is of.
    origins: BTreeMap<u64, usize>,
}

impl Pools {
    pub(crate) fn new() -> Pools {
        Pools { table: Table::new("memory pool"), usual: BTreeMap::new(), origins: BTreeMap::new() }
    }

    pub(crate) fn create(&mut self) -> usize {
        self.table.insert(Pool::default())
    }

    /// Destroys a pool; its memory may outlive it.
    pub(crate) fn destroy(&mut self, pool: usize) -> Answer<()> {
        self.table.remove(pool).map(drop)
    }

    pub(crate) fn set_threshold(&mut self, pool: usize, bytes: u64) -> Answer<()> {
        self.table.get(pool).map(|pool| pool.threshold = bytes)
    }

    pub(crate) fn usual(&mut self, context: usize) -> usize {
        *self.usual.entry(context).or_insert_with(|| self.table.insert(Pool::default()))
    }

    /// Returns the number of the program's own.
    pub(crate) fn len(&self) -> usize {
        self.table.len() - self.usual.len()
    }

    /// Returns which one of its kind a handle was.
    pub(crate) fn number(&self, pool: usize) -> Option<usize> {
        self.table.number(pool)
    }

    pub(crate) fn free(&mut self, address: u64, bytes: u64) {
        let Some(origin) = self.origins.remove(&address) else { return };
        if self.table.peek(origin).is_some()
            && let Ok(pool) = self.table.get(origin)
        {
            pool.in_use -= bytes;
        }
    }

    pub(crate) fn trim(&mut self) {
        self.table.iter_mut().for_each(|pool| pool.mapped = pool.mapped.min(pool.in_use.max(pool.threshold)));
    }
}

impl Gpu {
    /// Allocates memory of a pool, or of the usual one, and returns its address and the bytes that the pool had to map.
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

    /// Returns a pool that the properties describe, of device memory that no other process sees.
    pub(crate) fn new_pool(&mut self, is_plain: bool, device: i32) -> Answer<usize> {
        if !is_plain || !(0..self.settings.devices).contains(&device) {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        }
        Ok(self.pools.create())
    }
}
