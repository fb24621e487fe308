//! One collective on a stream. The driver asks it to continue until all ranks have done their part.
//!
//! The driver's lock is held during this, so nothing here waits.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use crate::communicator::{Communicator, OUTSTANDING, PROGRESS};
use crate::header::{ncclDataType_t as DataType, ncclRedOp_t as Operation};
use crate::pieces::{From, Kind};
use crate::settings;
use crate::sums;

/// A call. A captured call has a run for each launch of its graph.
pub(crate) struct Call {
    pub(crate) communicator: Arc<Communicator>,
    pub(crate) kind: Kind,
    pub(crate) bytes: usize,
    pub(crate) dtype: DataType,
    pub(crate) operation: Operation,
    pub(crate) runs: Mutex<BTreeMap<u64, Run>>,
}

/// The communicator that occupies a device with a collective, by the number of the device.
static OCCUPIED: Mutex<BTreeMap<u64, usize>> = Mutex::new(BTreeMap::new());

/// The progress of a run.
#[derive(Clone, Copy, Default)]
pub(crate) struct Run {
    next: usize,
    has_arrived: bool,
}

impl Call {
    /// Returns whether the call may begin. With a version that gives no order, a collective that has begun leaves no room
    /// on the device for those of other communicators.
    fn may_begin(&self) -> bool {
        let own = Arc::as_ptr(&self.communicator).addr();
        let mut occupied = OCCUPIED.lock().unwrap_or_else(PoisonError::into_inner);
        !settings::is_unordered() || *occupied.entry(self.communicator.device).or_insert(own) == own
    }

    /// Leaves the device to other communicators.
    fn end(&self) {
        let own = Arc::as_ptr(&self.communicator).addr();
        let mut occupied = OCCUPIED.lock().unwrap_or_else(PoisonError::into_inner);
        occupied.retain(|_, occupant| *occupant != own);
    }

    /// Continues until it must wait for other ranks, and returns whether the run has ended.
    ///
    /// # Safety
    /// `source` and `target` have the lengths that the driver got from the call.
    unsafe fn go_on(&self, ticket: u64, source: *const u8, target: *mut u8) -> bool {
        let communicator = &*self.communicator;
        let mut runs = self.runs.lock().unwrap_or_else(PoisonError::into_inner);
        let run = runs.entry(ticket).or_default();
        let mut moved = false;
        let ended = loop {
            if communicator.is_aborted() {
                break true;
            }
            let (rank, ranks) = (communicator.rank, communicator.ranks);
            let Some(piece) = self.kind.piece(run.next, self.bytes, rank, ranks) else { break true };
            let (number, shared) = (communicator.pieces.load(Ordering::Relaxed) + 1, &communicator.shared);
            // SAFETY: a piece lies inside the call's memory.
            let given = piece
                .gives
                .map_or(&[][..], |at| unsafe { std::slice::from_raw_parts(source.add(at), piece.bytes) });
            if run.next == 0 && !run.has_arrived && !self.may_begin() {
                break false;
            }
            if !run.has_arrived && !shared.arrive(number, given) {
                break false;
            }
            run.has_arrived = true;
            if !shared.all_arrived(number) {
                break false;
            }
            if let Some(at) = piece.takes {
                // SAFETY: a piece lies inside the call's memory; source and target may be one, and the source was copied.
                let into = unsafe { std::slice::from_raw_parts_mut(target.add(at), piece.bytes) };
                let values = |rank| shared.values(rank, piece.bytes);
                match piece.from {
                    From::Rank(rank) => into.copy_from_slice(values(rank)),
                    From::Sum => {
                        let all = (0..ranks).map(values).collect::<Vec<_>>();
                        sums::combine(self.operation, self.dtype, &all, into);
                    }
                }
            }
            shared.leave(number);
            communicator.pieces.store(number, Ordering::Relaxed);
            *run = Run { next: run.next + 1, has_arrived: false };
            moved = true;
        };
        if ended {
            runs.remove(&ticket);
            self.end();
        }
        if moved || ended {
            PROGRESS.fetch_add(1, Ordering::Relaxed);
        }
        ended
    }
}

/// The function that the driver calls to continue.
pub(crate) unsafe extern "C" fn step(
    call: *mut c_void,
    ticket: u64,
    source: *const u8,
    target: *mut u8,
) -> c_int {
    // SAFETY: the driver gives back what it was given, with memory of the lengths that it was told.
    unsafe { c_int::from((*call.cast::<Call>()).go_on(ticket, source, target)) }
}

/// The function that the driver calls once nothing can run the call any more.
pub(crate) unsafe extern "C" fn release(call: *mut c_void) {
    // SAFETY: made from a box, and released once.
    let call = unsafe { Box::from_raw(call.cast::<Call>()) };
    call.communicator.calls.fetch_sub(1, Ordering::AcqRel);
    OUTSTANDING.fetch_sub(1, Ordering::Relaxed);
}
