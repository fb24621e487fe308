//! The memory in which the ranks of a communicator meet: a state for each rank, and room for a piece of its values.
//!
//! Ranks count pieces. A rank fills its room for a piece once all ranks have left the previous piece, and reads once
//! all have arrived. A rank that dies does not arrive, and the others wait until they abort, as with the real library.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

/// Most bytes of a piece.
pub(crate) const PIECE: usize = 1 << 20;
const HEADER: usize = 1 << 16;
const MOST_RANKS: usize = HEADER / size_of::<Rank>();

#[repr(C)]
struct Rank {
    /// The number of its device plus 1, once it has joined.
    joined: AtomicU64,
    arrived: AtomicU64,
    left: AtomicU64,
    ended: AtomicU64,
}

pub(crate) struct Shared {
    start: *mut u8,
    bytes: usize,
    rank: usize,
    ranks: usize,
    name: CString,
}

// SAFETY: states are atomic; a room is written by its rank alone, and read only between its arrival and its leaving.
unsafe impl Send for Shared {}
// SAFETY: states are atomic; a room is written by its rank alone, and read only between its arrival and its leaving.
unsafe impl Sync for Shared {}

impl Shared {
    /// Opens the memory with this name. The first rank makes the memory.
    pub(crate) fn open(name: &str, rank: usize, ranks: usize) -> Option<Shared> {
        let (name, bytes) = (CString::new(name).ok()?, HEADER + ranks * PIECE);
        if ranks > MOST_RANKS {
            return None;
        }
        // SAFETY: a file of this name belongs to these ranks alone; failures are checked.
        unsafe {
            let file = libc::shm_open(name.as_ptr(), libc::O_CREAT | libc::O_RDWR, 0o600);
            if file < 0 || libc::ftruncate(file, bytes as libc::off_t) != 0 {
                return None;
            }
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let start = libc::mmap(ptr::null_mut(), bytes, access, libc::MAP_SHARED, file, 0);
            libc::close(file);
            (start != libc::MAP_FAILED).then_some(Shared { start: start.cast(), bytes, rank, ranks, name })
        }
    }

    fn state(&self, rank: usize) -> &Rank {
        // SAFETY: inside the header; zeros are a state.
        unsafe { &*self.start.cast::<Rank>().add(rank) }
    }

    fn room(&self, rank: usize) -> *mut u8 {
        self.start.wrapping_add(HEADER + rank * PIECE)
    }

    fn all(&self, reached: impl Fn(&Rank) -> bool) -> bool {
        (0..self.ranks).all(|rank| reached(self.state(rank)))
    }

    pub(crate) fn join(&self, device: u64) {
        self.state(self.rank).joined.store(device + 1, Ordering::Release);
    }

    /// Returns the devices of all ranks once all have joined; the name is then no longer needed.
    pub(crate) fn joined(&self) -> Option<Vec<u64>> {
        let devices =
            (0..self.ranks).map(|rank| self.state(rank).joined.load(Ordering::Acquire).checked_sub(1));
        let devices: Option<Vec<u64>> = devices.collect();
        if devices.is_some() {
            // SAFETY: the memory stays; a second call finds no name.
            unsafe { libc::shm_unlink(self.name.as_ptr()) };
        }
        devices
    }

    pub(crate) fn end(&self) {
        self.state(self.rank).ended.store(1, Ordering::Release);
    }

    pub(crate) fn all_ended(&self) -> bool {
        self.all(|rank| rank.ended.load(Ordering::Acquire) == 1)
    }

    /// Fills this rank's room for a piece, if all ranks have left the previous piece, and marks this rank as arrived.
    pub(crate) fn arrive(&self, piece: u64, values: &[u8]) -> bool {
        if !self.all(|rank| rank.left.load(Ordering::Acquire) + 1 >= piece) {
            return false;
        }
        // SAFETY: nobody reads this room now, and a piece is no longer than it.
        unsafe { self.room(self.rank).copy_from_nonoverlapping(values.as_ptr(), values.len()) };
        self.state(self.rank).arrived.store(piece, Ordering::Release);
        true
    }

    pub(crate) fn all_arrived(&self, piece: u64) -> bool {
        self.all(|rank| rank.arrived.load(Ordering::Acquire) >= piece)
    }

    /// Returns the values of a rank. All ranks have arrived, and this one has not left.
    pub(crate) fn values(&self, rank: usize, bytes: usize) -> &[u8] {
        // SAFETY: the room is not written before all have left.
        unsafe { std::slice::from_raw_parts(self.room(rank), bytes) }
    }

    pub(crate) fn leave(&self, piece: u64) {
        self.state(self.rank).left.store(piece, Ordering::Release);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: this mapping, which nothing uses any more.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}
