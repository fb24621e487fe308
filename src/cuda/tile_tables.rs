//! The tiles of a launch whose parameters or gradients lie apart: tables of addresses, two in turn.
//!
//! A table is written anew only if an address has changed. The host writes pinned memory and the stream copies it, so
//! nothing waits but a host that changes addresses faster than the GPU runs steps. A table in use is never written.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use super::driver::{Driver, Mapped};
use super::memory::bytes_of_all;
use crate::abi::InstepTile;
use crate::error::Result;
use crate::handle::{DevicePtr, EventHandle, StreamHandle};
use crate::launch::Bases;

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

#[derive(Clone, Copy)]
struct Table {
    staging: Mapped,
    device: DevicePtr,
    /// After the last copy from `staging`, and after the last launch that read the table.
    copied: EventHandle,
    used: EventHandle,
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
                copied: driver.create_event(false)?,
                used: driver.create_event(false)?,
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
                    self.driver.wait(stream, table.used)?;
                }
                self.driver.copy(table.device, table.staging.device, bytes, stream)?;
                self.driver.record(table.copied, stream)?;
            }
            table.was_copied = true;
            self.bases.extend_from_slice(bases);
        }
        Ok(ptr::with_exposed_provenance(self.tables[self.current].device.0 as usize))
    }

    /// Marks the position on a stream after the launch that reads the current table.
    pub(super) fn mark_used(&mut self, stream: StreamHandle) -> Result<()> {
        let table = &mut self.tables[self.current];
        table.was_used = true;
        // SAFETY: both are alive.
        unsafe { self.driver.record(table.used, stream) }
    }

    /// Writes the current table's staging memory: addresses of parameters, and gradients counted from address 0.
    fn write(&mut self, bases: &[Bases], grad_bytes: u64) -> Result<()> {
        let table = &self.tables[self.current];
        // SAFETY: the event is alive.
        while table.was_copied && !unsafe { self.driver.is_passed(table.copied)? } {
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
        for table in self.tables {
            // SAFETY: made by `new`; the engine has made `stream` wait for all launches, and the host for all copies.
            unsafe {
                self.driver.free(table.device, self.stream);
                self.driver.free_mapped(table.staging);
                self.driver.destroy_event(table.copied);
                self.driver.destroy_event(table.used);
            }
        }
    }
}
