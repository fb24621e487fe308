//! Tables of tiles for launches that get tensors at new addresses. The host writes the tiles to pinned memory, and a
//! copy on the stream sends them to the GPU. Two pinned buffers are used in turn.
//!
//! A bucket has a [`TileTables`] if each call passes the address of each parameter or gradient. A table is written
//! again only if an address has changed, and never while it is in use. A stepper has a [`MovingTiles`] once a parameter
//! has moved. A launch uses the same table before and after a move. The copy that brings new tiles into the table runs
//! after all ops that read the old addresses. The host waits only if addresses change faster than the GPU copies the
//! tiles.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::driver::Driver;
use super::gpu_memory::{address, bytes_of_all};
use super::launches::BucketLaunch;
use super::owned::{Arena, Event, OwnedMapped};
use crate::abi::InstepTile;
use crate::error::Result;
use crate::handle::StreamHandle;
use crate::launch::{Bases, Kind, Regions, rebind};
use crate::layout::Plan;

/// Two tables of tiles that are used in turn, for a bucket that receives an address for each parameter or gradient.
pub(super) struct TileTables {
    /// The tiles, with offsets in place of addresses.
    tiles: Vec<InstepTile>,
    bases: Vec<Bases>,
    /// The two tables. The event of each table is recorded after the last launch that reads the table. The owner frees
    /// the tables on a stream that first waits for all launches.
    tables: [(Arena, Event); 2],
    current: usize,
    staged: StagedTiles,
}

impl TileTables {
    pub(super) fn new(
        driver: &Arc<dyn Driver>,
        stream: StreamHandle,
        tiles: Vec<InstepTile>,
    ) -> Result<TileTables> {
        let table = || -> Result<(Arena, Event)> {
            let arena = Arena::new(driver, size_of_val(&*tiles) as u64, stream)?;
            // SAFETY: the memory was just allocated, with this length. The host waits for the copy, so every stream
            // finds the contents.
            unsafe { driver.upload(arena.address(), bytes_of_all(&tiles), stream)? };
            Ok((arena, Event::new(driver, false)?))
        };
        let (tables, staged) = ([table()?, table()?], StagedTiles::new(driver, tiles.len())?);
        Ok(TileTables { tiles, bases: Vec::new(), tables, current: 0, staged })
    }

    /// Returns a pointer to a table of tiles in which each segment's tensors are at the addresses in `bases`. Later
    /// launches on `stream` may read the table.
    pub(super) fn with(
        &mut self,
        bases: &[Bases],
        grad_bytes: u64,
        stream: StreamHandle,
    ) -> Result<*const InstepTile> {
        if self.bases != bases {
            self.current = 1 - self.current;
            // No table is current until the copy is enqueued.
            self.bases.clear();
            // A tile has the address of its parameter, and the offset of its gradient from address 0.
            let placed = self.tiles.iter().map(|tile| {
                let of_segment = &bases[tile.record as usize];
                let (params, grads) = (of_segment.params() as u64, of_segment.grads() as u64);
                let param = params.wrapping_add(tile.param);
                let grad_offset = grads.wrapping_add(tile.grad_offset * grad_bytes) / grad_bytes;
                InstepTile { param, grad_offset, ..*tile }
            });
            let (table, used) = &self.tables[self.current];
            // The host first waits for the last copy from the pinned buffer, so that nothing is enqueued if that copy
            // has failed.
            self.staged.turn()?;
            used.hold(stream)?;
            // SAFETY: the table has the same length, and the stream now comes after the table's last reader.
            unsafe { self.staged.send([(table.base().cast_const().cast(), placed)], stream)? };
            self.bases.extend_from_slice(bases);
        }
        Ok(self.tables[self.current].0.base().cast_const().cast())
    }

    /// Marks the position on a stream after the launch that reads the current table.
    pub(super) fn mark_used(&mut self, stream: StreamHandle) -> Result<()> {
        self.tables[self.current].1.record(stream)
    }
}

/// The tiles of all launches of steps, bucket by bucket. These tiles exist once a parameter has moved.
pub(super) struct MovingTiles {
    lists: Vec<Vec<InstepTile>>,
    staged: StagedTiles,
}

impl MovingTiles {
    pub(super) fn new(driver: &Arc<dyn Driver>, lists: Vec<Vec<InstepTile>>) -> Result<MovingTiles> {
        let staged = StagedTiles::new(driver, lists.iter().map(Vec::len).sum())?;
        Ok(MovingTiles { lists, staged })
    }

    /// For each launch with moved parameters, enqueues a copy of its tiles.
    pub(super) fn follow(
        &mut self,
        steps: &[Vec<BucketLaunch>],
        (plan, regions): (&Plan, &Regions),
        stream: StreamHandle,
    ) -> Result<()> {
        let mut changed = Vec::with_capacity(self.lists.len());
        for (launch, tiles) in steps.iter().flatten().zip(&mut self.lists) {
            let mut args = launch.args();
            if rebind(Kind::Step, &mut args, tiles, plan, regions) {
                changed.push((args.tiles, tiles.iter().copied()));
            }
        }
        self.staged.turn()?;
        // SAFETY: each list is as long as its launch's table, and all lists together fit into the buffer. Steps run
        // only on this stream. Graphs that read the tables come before the copy, by the waits that follow a replay.
        unsafe { self.staged.send(changed, stream) }
    }
}

/// Two buffers for tiles that are being sent to the GPU. The event of each buffer is recorded after the last copies
/// from the buffer. If a device is dropped while such a copy may run, the device leaks the buffers.
struct StagedTiles {
    driver: Arc<dyn Driver>,
    staging: [(OwnedMapped, Event); 2],
    current: usize,
}

impl StagedTiles {
    fn new(driver: &Arc<dyn Driver>, tiles: usize) -> Result<StagedTiles> {
        let staging = || -> Result<(OwnedMapped, Event)> {
            let memory = OwnedMapped::new(driver, tiles * size_of::<InstepTile>())?;
            Ok((memory, Event::new(driver, false)?))
        };
        Ok(StagedTiles { driver: Arc::clone(driver), staging: [staging()?, staging()?], current: 0 })
    }

    /// Switches to the other buffer, and blocks until the last copies from it have ended.
    fn turn(&mut self) -> Result<()> {
        self.current = 1 - self.current;
        self.staging[self.current].1.block()
    }

    /// Enqueues the copy of each list to its table, through the buffer that the last [`turn`](Self::turn) selected.
    ///
    /// # Safety
    /// The tables are alive, and each table is as long as its list. The stream has waited for all work that reads the
    /// tables. All lists together fit in the buffer.
    unsafe fn send(
        &mut self,
        lists: impl IntoIterator<Item = (*const InstepTile, impl ExactSizeIterator<Item = InstepTile>)>,
        stream: StreamHandle,
    ) -> Result<()> {
        let (memory, copied) = &self.staging[self.current];
        let (mut host, mut from) = (memory.host().cast::<InstepTile>().as_ptr(), memory.device());
        for (table, tiles) in lists {
            let bytes = (tiles.len() * size_of::<InstepTile>()) as u64;
            // SAFETY: the buffer is long enough by the contract, and aligned to a page. The last copies from it have
            // ended. The stream orders the copy with the table's readers.
            unsafe {
                for tile in tiles {
                    host.write(tile);
                    host = host.add(1);
                }
                self.driver.copy(address(table), from, bytes, stream)?;
            }
            from.0 += bytes;
        }
        copied.record(stream)
    }
}
