//! Tiles of launches after their tensors have moved: written to pinned memory, and copied by the stream, two in turn.
//!
//! [`TileTables`] are for a bucket whose parameters or gradients lie apart in each call. A table is written anew only if an
//! address has changed, and never while it is in use. [`StagedTiles`] are for a stepper whose parameters have moved: each
//! launch keeps its table, and the copy comes after all that read the old addresses. The host waits only if addresses
//! change faster than the GPU copies them.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use super::driver::{Driver, Mapped};
use super::gpu_memory::{address, bytes_of_all};
use super::launches::BucketLaunch;
use super::owned::Event;
use crate::abi::InstepTile;
use crate::error::Result;
use crate::handle::{DevicePtr, StreamHandle};
use crate::launch::{Bases, Kind, Regions, rebind};
use crate::layout::Plan;

/// See the module.
pub(super) struct TileTables {
    driver: Arc<dyn Driver>,
    /// The stream on which the tables were allocated, and are freed.
    stream: StreamHandle,
    /// With offsets in place of addresses.
    tiles: Vec<InstepTile>,
    /// The addresses in the current table.
    bases: Vec<Bases>,
    tables: [Table; 2],
    current: usize,
}

struct Table {
    staging: Mapped,
    device: DevicePtr,
    /// After the last copy from `staging`, and after the last launch that read the table.
    copied: Event,
    used: Event,
    was_copied: bool,
    was_used: bool,
}

impl TileTables {
    /// Allocates both tables.
    pub(super) fn new(
        driver: &Arc<dyn Driver>,
        stream: StreamHandle,
        tiles: Vec<InstepTile>,
    ) -> Result<TileTables> {
        let bytes = size_of_val(&*tiles) as u64;
        let table = || -> Result<Table> {
            let (staging, device) = (driver.allocate_mapped(bytes)?, driver.allocate(bytes, stream)?);
            // SAFETY: just allocated, so long. The host waits for the copy, so the memory is there for every stream.
            unsafe { driver.upload(device, bytes_of_all(&tiles), stream)? };
            Ok(Table {
                staging,
                device,
                copied: Event::new(driver, false)?,
                used: Event::new(driver, false)?,
                was_copied: false,
                was_used: false,
            })
        };
        let tables = [table()?, table()?];
        let (driver, bases) = (Arc::clone(driver), Vec::new());
        Ok(TileTables { driver, stream, tiles, bases, tables, current: 0 })
    }

    /// Returns a table with these addresses of each segment, for launches that follow on `stream`.
    pub(super) fn with(
        &mut self,
        bases: &[Bases],
        grad_bytes: u64,
        stream: StreamHandle,
    ) -> Result<*const InstepTile> {
        if self.bases != bases {
            self.current = 1 - self.current;
            // Until the copy is enqueued no table is current.
            self.bases.clear();
            self.write(bases, grad_bytes)?;
            let bytes = size_of_val(&*self.tiles) as u64;
            let table = &mut self.tables[self.current];
            // SAFETY: both are so long; the staging memory's last copy has ended, and the stream waits for the table's
            // last reader.
            unsafe {
                if table.was_used {
                    table.used.hold(stream)?;
                }
                self.driver.copy(table.device, table.staging.device, bytes, stream)?;
            }
            table.copied.record(stream)?;
            table.was_copied = true;
            self.bases.extend_from_slice(bases);
        }
        Ok(ptr::with_exposed_provenance(self.tables[self.current].device.0 as usize))
    }

    /// Marks the position on a stream after the launch that reads the current table.
    pub(super) fn mark_used(&mut self, stream: StreamHandle) -> Result<()> {
        let table = &mut self.tables[self.current];
        table.was_used = true;
        table.used.record(stream)
    }

    /// Writes the current table's staging memory: addresses of parameters, and gradients counted from address 0.
    fn write(&mut self, bases: &[Bases], grad_bytes: u64) -> Result<()> {
        let table = &self.tables[self.current];
        while table.was_copied && !table.copied.is_passed()? {
            std::thread::sleep(Duration::from_micros(50));
        }
        let to = table.staging.host.cast::<InstepTile>();
        for (index, tile) in self.tiles.iter().enumerate() {
            let of_segment = &bases[tile.record as usize];
            let (params, grads) = (of_segment.params() as u64, of_segment.grads() as u64);
            let tile = InstepTile {
                param: params.wrapping_add(tile.param),
                grad_offset: grads.wrapping_add(tile.grad_offset * grad_bytes) / grad_bytes,
                ..*tile
            };
            // SAFETY: one of as many tiles as the memory was made for, aligned to a page.
            unsafe { to.add(index).write(tile) };
        }
        Ok(())
    }
}

impl Drop for TileTables {
    fn drop(&mut self) {
        for table in &self.tables {
            // SAFETY: made by `new`; the engine has made `stream` wait for all launches, and the host for all copies.
            unsafe {
                self.driver.free(table.device, self.stream);
                self.driver.free_mapped(table.staging);
            }
        }
    }
}

/// The tiles of the steps' launches, bucket by bucket, once a parameter has moved.
pub(super) struct MovingTiles {
    pub(super) lists: Vec<Vec<InstepTile>>,
    pub(super) staged: StagedTiles,
}

impl MovingTiles {
    /// Sends the tiles of the launches whose parameters have moved; all of them, if the lists were made just now.
    pub(super) fn follow(
        &mut self,
        steps: &[Vec<BucketLaunch>],
        (plan, regions): (&Plan, &Regions),
        is_first: bool,
        stream: StreamHandle,
    ) -> Result<()> {
        let mut changed = Vec::with_capacity(self.lists.len());
        for (launch, tiles) in steps.iter().flatten().zip(&mut self.lists) {
            let mut args = launch.args();
            // Lists that were made just now have the new addresses already.
            if rebind(Kind::Step, &mut args, tiles, plan, regions) || is_first && !tiles.is_empty() {
                changed.push((args.tiles, &**tiles));
            }
        }
        // SAFETY: each list is as long as its launch's table, and they fit together; steps run on this stream alone, and
        // graphs that read the tables come before it, by the waits that follow a replay.
        unsafe { self.staged.send(changed.into_iter(), stream) }
    }
}

/// Room for the tiles of all launches, on their way to the GPU.
pub(super) struct StagedTiles {
    driver: Arc<dyn Driver>,
    staging: [Staging; 2],
    current: usize,
}

struct Staging {
    memory: Mapped,
    /// After the last copies from it.
    copied: Event,
    was_copied: bool,
}

impl StagedTiles {
    /// Allocates room for that many tiles, twice.
    pub(super) fn new(driver: &Arc<dyn Driver>, tiles: usize) -> Result<StagedTiles> {
        let bytes = (tiles * size_of::<InstepTile>()) as u64;
        let staging = || -> Result<Staging> {
            let (memory, copied) = (driver.allocate_mapped(bytes)?, Event::new(driver, false)?);
            Ok(Staging { memory, copied, was_copied: false })
        };
        Ok(StagedTiles { driver: Arc::clone(driver), staging: [staging()?, staging()?], current: 0 })
    }

    /// Enqueues the copy of each list to its table.
    ///
    /// # Safety
    /// The tables are as long as their lists, alive, and read by launches on this stream alone. The lists fit the room.
    unsafe fn send<'a>(
        &mut self,
        lists: impl Iterator<Item = (*const InstepTile, &'a [InstepTile])>,
        stream: StreamHandle,
    ) -> Result<()> {
        self.current = 1 - self.current;
        let Staging { memory, copied, was_copied } = &mut self.staging[self.current];
        while *was_copied && !copied.is_passed()? {
            std::thread::sleep(Duration::from_micros(50));
        }
        let (host, mut sent) = (memory.host.cast::<InstepTile>().as_ptr(), 0);
        for (table, tiles) in lists {
            let bytes = size_of_val(tiles) as u64;
            let mut from = memory.device;
            from.0 += (sent * size_of::<InstepTile>()) as u64;
            // SAFETY: the room is long enough by the contract, and aligned to a page; the last copies from it have ended.
            // The stream orders the copy with the table's readers.
            unsafe {
                host.add(sent).copy_from_nonoverlapping(tiles.as_ptr(), tiles.len());
                self.driver.copy(address(table), from, bytes, stream)?;
            }
            sent += tiles.len();
        }
        *was_copied = true;
        copied.record(stream)
    }
}

impl Drop for StagedTiles {
    fn drop(&mut self) {
        for Staging { memory, .. } in &self.staging {
            // SAFETY: made by `new`; a device with work still in flight forgets its tiles instead.
            unsafe { self.driver.free_mapped(*memory) }
        }
    }
}
