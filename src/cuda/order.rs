//! The order of collectives on one device. Collectives of several communicators run in the order of the calls.
//!
//! A kernel of NCCL occupies the device until the other ranks run the same kernel. If two ranks start the kernels of
//! two communicators in different orders, and a device has no room for both kernels, the ranks wait for each other
//! forever. A newer NCCL starts kernels in the order of the calls ([`is_ordered`]). If NCCL does not order the calls,
//! this module orders them with events: a call waits for the previous call if the two calls belong to different
//! communicators. All ranks make the calls in the same order, so a kernel waits only for kernels that precede it on
//! every rank. (On drivers before CUDA 12.3, NCCL's implicit order also makes each kernel wait for the previous
//! kernel.)
//!
//! A captured stream cannot wait for an event from outside of its capture. Even if it could, the wait would not order
//! replays. Calls of one capture are therefore ordered among themselves, and a stepper's replay is ordered like a call.
//! Calls of two captures must not alternate, because this module remembers one call for all captures together: the last
//! one. The launches of a program's own graphs are not ordered, because the program makes them without this library.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::driver::Driver;
use super::owned::{Event, capture_of};
use crate::error::Result;
use crate::handle::StreamHandle;

/// The first NCCL version in which a communicator's configuration can order its calls with the calls of other
/// communicators. The next constant is the first version in which an environment variable can order them.
const ORDERS: u32 = 23100;
pub(super) const ORDERS_BY_VARIABLE: u32 = 22600;

/// Returns whether NCCL orders the calls of a communicator with the calls of other communicators. A framework's
/// communicator has the configuration that the framework chose. The environment variable overrides every configuration.
pub(super) fn is_ordered(version: u32, is_adopted: bool, variable: impl Fn(&str) -> Option<String>) -> bool {
    match variable("NCCL_LAUNCH_ORDER_IMPLICIT").as_deref().map(str::trim) {
        Some("1") => version >= ORDERS_BY_VARIABLE,
        Some("0") => false,
        _ => version >= ORDERS && !is_adopted,
    }
}

/// The calls of one device.
#[derive(Default)]
pub(super) struct Order {
    /// True once a communicator with calls that NCCL does not order was made on this device. Events then order the
    /// calls of all communicators.
    pub(super) is_by_events: bool,
    /// The last call outside of captures, and the last call in a capture.
    last: [Option<Last>; 2],
}

struct Last {
    /// The communicator, or `None` for a launch of a graph.
    owner: Option<usize>,
    capture: Option<u64>,
    event: Event,
}

/// The calls by device ordinal. A call holds its device's lock, because NCCL allows only one thread at a time for all
/// communicators of a device.
static DEVICES: Mutex<BTreeMap<u32, &'static Mutex<Order>>> = Mutex::new(BTreeMap::new());

/// Waits until no other thread enqueues on a device, and keeps other threads out until the guard is dropped.
pub(super) fn on_device(device: u32) -> MutexGuard<'static, Order> {
    let mut all = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let own: &'static Mutex<Order> = all.entry(device).or_insert_with(|| Box::leak(Box::default()));
    drop(all);
    own.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Order {
    /// Runs `work`, which enqueues collectives on a stream, with the device current. If events order the device's
    /// calls, the collectives run after the earlier collectives of other communicators. NCCL itself orders the
    /// collectives of one communicator.
    pub(super) fn enqueue(
        &mut self,
        owner: Option<usize>,
        driver: &Arc<dyn Driver>,
        stream: StreamHandle,
        work: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if !self.is_by_events {
            return work();
        }
        let capture = capture_of(&**driver, stream)?;
        let place = &mut self.last[usize::from(capture.is_some())];
        let last = match place {
            Some(last) => last,
            None => place.insert(Last { owner: None, capture, event: Event::new(driver, false)? }),
        };
        let is_other = owner.is_none() || last.owner != owner;
        if is_other && last.capture == capture {
            last.event.hold(stream)?;
        }
        work()?;
        last.event.record(stream)?;
        (last.owner, last.capture) = (owner, capture);
        Ok(())
    }
}

#[cfg(test)]
#[path = "../../tests/unit/cuda/order.rs"]
mod tests;
