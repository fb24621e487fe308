//! One rank's part in a group of GPUs. NCCL runs the collectives, and a host collective may report failures.
//!
//! The first failure of any communicator is stored, and sent to the other ranks over the host collective. Every later
//! call on any of this rank's communicators returns that failure. Collectives go onto the caller's stream, and only one
//! thread at a time enqueues collectives on a device.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::sync::{Arc, Mutex, TryLockError};
use std::time::Duration;

use crate::collective::{Allocation, Call, Collective, CollectiveKind, Purpose, place_in};
use crate::cuda::Cuda;
use crate::cuda::driver::Driver;
use crate::cuda::nccl::ending::detached;
use crate::cuda::nccl::entry::{Entry, Record};
use crate::cuda::nccl::host::Host;
use crate::cuda::nccl::library::{Library, unique_id};
use crate::cuda::nccl::memory::allocate;
use crate::cuda::nccl::raw::{Raw, Seat};
use crate::cuda::nccl::shared::{Further, Shared, Slot, closed, lock};
use crate::cuda::nccl::{Options, UniqueId};
use crate::cuda::order::{ORDERS_BY_VARIABLE, is_ordered};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::handle::Place;
use crate::poll::{Wall, poll};

/// One rank's part in a group of GPUs. Each GPU has its own process. A clone is another handle of the same
/// communicator. Give one handle to the stepper. Keep a second handle, to [`close`](Self::close) the group after the
/// stepper is dropped.
///
/// Every rank gets the same bits from a sum. NCCL chooses the order of a sum, so the last bit may differ between world
/// sizes, machines and versions. NCCL may round a bf16 or f16 sum after each addition. Ranks on the CPU round such a
/// sum only at the end.
///
/// When a stepper is built, ranks compare its layout and options. If a parameter is [written](crate::Stepper::write),
/// the next pass, unless it is the first, also compares which parameters were written, together with the learning rates
/// and the frozen parameters. Each comparison is an all-gather of 144 bytes per rank, and the calling thread waits for
/// the result. Learning rates and frozen parameters in other passes, and abandoned passes, are compared only with a
/// host collective ([`beside`](Self::beside)) and [`Options::ledger`]. Without the ledger, ranks that differ in these
/// get no `Mismatch`. Such ranks diverge, or hang until the stepper's deadline. Replays of captured passes are never
/// compared.
///
/// If a rank fails or dies, a host collective reports this to the other ranks. Without a host collective, the other
/// ranks wait until the stepper's deadline, unless NCCL itself reports an error.
///
/// # Ordering
/// One thread at a time enqueues on a device. Several steppers may share a device, each with its own communicator. NCCL
/// connects in the first pass of each stepper. These first passes must begin in the same order on every rank. If NCCL
/// does not order collectives, all passes and replays of a device's steppers must come in the same order on every rank.
/// If the program has its own communicator on the same device, every rank must issue the collectives of the program and
/// of the stepper in the same order. The program must issue its collectives on the stepper's thread. With
/// [`Sums::by_caller`](crate::Sums::by_caller), the program's communicator is the only one.
///
/// A stepper with shards ([`Strategy`](crate::Strategy)) makes a further communicator for its all-gathers. With
/// [groups](crate::StepperBuilder::shard_size), it makes two more communicators: one for its group, and one for its
/// replicas. If NCCL does not order the collectives of these communicators, the collectives run one at a time, in the
/// order of the calls. These communicators fail, are aborted and are closed together with the first communicator. All
/// ranks of the program must make their further communicators at the same point, even if each communicator has only the
/// ranks of one shard group. The id of a further communicator is sent over the first communicator.
///
/// Dropping the last handle closes the group on another thread. A captured pass counts as a handle. At exit, the
/// process waits up to 10 s for that thread. At least one second passes between an abort and the exit of the process.
/// If the process ends before that thread, or if a panic drops the handle, the other ranks count this rank as failed.
#[derive(Clone)]
pub struct Nccl {
    shared: Arc<Shared>,
    /// The communicator of this handle, if it is not the group's first communicator.
    further: Option<Arc<Further>>,
}

/// A communicator id that no NCCL library makes.
const NO_ID: UniqueId = [0; 128];

/// Connects to the ranks that have the same id, within a time limit. The last argument is a check. If the check returns
/// an error, the wait ends.
type Connect<'a> = &'a dyn Fn(&UniqueId, Duration, &dyn Fn() -> Result<()>) -> Result<Raw>;

impl Nccl {
    /// Joins a group. `join` finds the group's id and connects.
    pub(super) fn open(options: &Options, join: impl FnOnce(Connect<'_>) -> Result<Raw>) -> Result<Nccl> {
        options.refuse_ledger()?;
        let (library, driver, seat) = prepare(options)?;
        let raw = join(&|id, left, wanted| Raw::connect(library, &driver, seat, id, left, wanted))?;
        Ok(Nccl::around(raw, options, None))
    }

    pub(super) fn open_beside(host: Arc<dyn Collective>, options: &Options) -> Result<Nccl> {
        let host = Host(host);
        let connect = || {
            let (library, driver, seat) = prepare(options)?;
            let own = if seat.rank == 0 { unique_id()? } else { NO_ID };
            let id = host.share_id(own, options.deadline)?;
            Raw::connect(library, &driver, seat, &id, options.deadline, || host.0.check())
        };
        match connect() {
            Ok(raw) => Ok(Nccl::around(raw, options, Some(host))),
            Err(error) => {
                host.0.abort(&error);
                Err(error)
            }
        }
    }

    pub(super) fn around(raw: Raw, options: &Options, host: Option<Host>) -> Nccl {
        let shared = Shared {
            driver: Arc::clone(&raw.driver),
            seat: raw.seat,
            deadline: options.deadline,
            ledger: options.ledger,
            warnings: warnings(raw.library.version, raw.is_borrowed, |name| std::env::var(name).ok()),
            host,
            first: Arc::new(Mutex::new(Some(raw))),
            further: Mutex::default(),
            ending: Arc::new(()),
            captured: Arc::new(()),
            failure: Mutex::new(None),
        };
        Nccl { shared: Arc::new(shared), further: None }
    }

    /// Makes another communicator of these ranks. The new communicator's id is sent over the group's first
    /// communicator, because the oldest supported NCCL cannot split a communicator.
    fn another(&self, ranks: &[u32]) -> Result<Nccl> {
        let rank = place_in(ranks, self.rank(), self.world_size())?;
        let own = self.further.as_ref();
        let ranks = ranks.iter().map(|rank| own.map_or(*rank, |own| own.ranks[*rank as usize]));
        let ranks: Vec<u32> = ranks.collect();
        let shared = &self.shared;
        shared.refuse()?;
        let (first, count) = (ranks[0], ranks.len() as u32);
        // If the id cannot be made, zeros are sent, so that no rank waits for this rank's part of the exchange.
        let made = if rank == 0 { unique_id() } else { Ok(NO_ID) };
        let id = *made.as_ref().unwrap_or(&NO_ID);
        let own = Record { entry: Entry::Communicator { first, count }, id };
        let records = shared.exchange(&own, shared.deadline)?;
        made.map_err(|error| shared.fail(error))?;
        let id = records[first as usize].id;
        if id == NO_ID {
            let why = "it could not make an id; its own error says why".to_owned();
            return Err(shared.fail(Error::PeerLost { rank: first, why }));
        }
        let seat = Seat { rank, ranks: count, ..shared.seat };
        let wanted = || shared.wanted();
        let raw = Raw::connect(Library::get()?, &shared.driver, seat, &id, shared.deadline, wanted);
        let raw = raw.map_err(|error| shared.fail(error))?;
        let further = Some(Arc::new(Further::new(shared, raw, ranks, rank)));
        Ok(Nccl { shared: Arc::clone(shared), further })
    }

    /// Compares a call with the calls of the other ranks, if there is a ledger.
    fn compare(&self, call: &Call<'_>) -> Result<()> {
        match &self.shared.host {
            Some(host) if self.shared.ledger => host.compare(&call.key(), call.deadline()),
            _ => Ok(()),
        }
    }

    fn slot(&self) -> &Slot {
        self.further.as_ref().map_or(&self.shared.first, |further| &further.slot)
    }

    /// Returns the warnings that apply, one line each. One possible warning names a setting that prevents overlap with
    /// backward. The other possible warning names the setting, or the old NCCL version, with which ranks can hang if
    /// the program has its own communicator. The library prints nothing itself.
    pub fn warnings(&self) -> &[String] {
        &self.shared.warnings
    }

    /// Waits until every collective has ended on all ranks of this machine, and ends the group. All ranks must make
    /// this call within the deadline. Afterwards, calls on every handle return an error.
    ///
    /// # Ordering
    /// Drop captured passes of the group's steppers before this call. A communicator cannot end while a captured graph
    /// contains its collectives.
    ///
    /// # Errors
    /// `Order` while such a captured pass is alive. The group is then unchanged. If an error has already ended the
    /// group, this call returns that error. `PeerLost`, `Deadline` or `Collective` if a rank does not take part.
    pub fn close(&self) -> Result<()> {
        self.shared.refuse()?;
        let captured = Arc::strong_count(&self.shared.captured) - 1;
        if captured > 0 {
            let wrong = format_args!("captured passes that hold its collectives: {captured}");
            return Err(Error::order("communicator", wrong, "drop them, then close it"));
        }
        // The further communicators of a stepper exist until the stepper is dropped.
        let mut slots = self.shared.slots().into_iter();
        let Some(first) = slots.next().and_then(|first| lock(&first).take()) else {
            return Err(closed());
        };
        self.shared.remember(closed());
        let have_ended = || Ok((Arc::strong_count(&self.shared.ending) == 1).then_some(()));
        poll(Wall::start(), Duration::ZERO, self.shared.deadline, || Ok(()), have_ended)?;
        let mut outcome = Ok(());
        for raw in slots.filter_map(|slot| lock(&slot).take()).chain([first]) {
            match &outcome {
                Ok(()) => outcome = raw.finish(self.shared.deadline, || self.shared.look()),
                Err(_) => raw.abort_detached(),
            }
        }
        let part = |()| self.shared.host.as_ref().map_or(Ok(()), |host| host.part(self.shared.deadline));
        outcome.and_then(part).inspect_err(|error| self.shared.send_failure(error))
    }
}

impl Collective for Nccl {
    fn rank(&self) -> u32 {
        self.further.as_ref().map_or(self.shared.seat.rank, |further| further.rank)
    }

    fn world_size(&self) -> u32 {
        self.further.as_ref().map_or(self.shared.seat.ranks, |further| further.ranks.len() as u32)
    }

    fn reaches(&self, place: Place) -> bool {
        place == Place::Cuda(self.shared.driver.ordinal())
    }

    fn sums(&self, _: DType) -> bool {
        true
    }

    fn supports(&self, _: CollectiveKind) -> bool {
        true
    }

    fn duplicate(&self) -> Result<Arc<dyn Collective>> {
        let ranks: Vec<u32> = (0..self.world_size()).collect();
        self.subgroup(&ranks)
    }

    fn subgroup(&self, ranks: &[u32]) -> Result<Arc<dyn Collective>> {
        Ok(Arc::new(self.another(ranks)?))
    }

    /// Allocates memory for gradients. The group's first communicator reduces the gradients in place.
    fn allocate(&self, purpose: Purpose, place: Place, bytes: u64) -> Result<Option<Allocation>> {
        if purpose != Purpose::Gradients || !self.reaches(place) {
            return Ok(None);
        }
        allocate(&self.shared, bytes)
    }

    fn agree(&self, number: u64, deadline: Duration) -> Result<()> {
        self.shared.refuse()?;
        self.shared.exchange(&Record { entry: Entry::Stepper(number), id: NO_ID }, deadline).map(drop)
    }

    fn enqueue(&self, call: &mut Call<'_>) -> Result<()> {
        let shared = &self.shared;
        shared.refuse()?;
        // Every thread takes the communicator's lock before the device's lock. Otherwise two threads could deadlock.
        let enqueue = |raw: &Raw| {
            raw.in_order(call.require_stream()?, || {
                self.compare(call)?;
                raw.enqueue(call, || shared.wanted())
            })
        };
        shared.with_raw(self.slot(), enqueue).map_err(|error| shared.fail(error))
    }

    // NCCL sorts by size the calls that are enqueued as one launch, so all ranks must put the same calls into one
    // launch.
    fn enqueue_all<'a>(&self, calls: &mut dyn Iterator<Item = Call<'a>>) -> Result<()> {
        let (shared, deadline) = (&self.shared, Cell::new(self.shared.deadline));
        shared.refuse()?;
        let add = |raw: &Raw, call: Call<'_>| {
            deadline.set(call.deadline());
            self.compare(&call)?;
            raw.add(&call)
        };
        let group = |raw: &Raw| {
            let Some(first) = calls.next() else { return Ok(()) };
            let stream = first.require_stream()?;
            let mut all = std::iter::once(first).chain(calls);
            let add_all = || all.try_for_each(|call| add(raw, call));
            raw.in_order(stream, || raw.group(&deadline, || shared.wanted(), add_all))
        };
        shared.with_raw(self.slot(), group).map_err(|error| shared.fail(error))
    }

    fn check(&self) -> Result<()> {
        self.shared.refuse()?;
        self.shared.look().map_err(|error| self.shared.fail(error))?;
        for slot in self.shared.slots() {
            let raw = match slot.try_lock() {
                Ok(raw) => raw,
                Err(TryLockError::Poisoned(raw)) => raw.into_inner(),
                // Another thread is inside NCCL and detects the communicator's errors.
                Err(TryLockError::WouldBlock) => continue,
            };
            let outcome = raw.as_ref().map_or(Ok(()), Raw::check);
            drop(raw);
            outcome.map_err(|error| self.shared.fail(error))?;
        }
        Ok(())
    }

    fn hold(&self) -> Option<Box<dyn Any + Send + Sync>> {
        Some(Box::new((Arc::clone(&self.shared.captured), self.clone())))
    }

    fn abort(&self, cause: &Error) {
        // The other ranks already know of an earlier failure.
        if self.shared.refuse().is_ok() {
            let cause = self.shared.remember(cause.clone());
            self.shared.send_failure(cause.cause());
        }
        // A thread inside NCCL holds the lock until it next checks for a failure. An abort may wait for work that
        // depends on another communicator, so no abort waits for another abort.
        for slot in self.shared.slots() {
            detached(move || {
                let raw = lock(&slot).take();
                drop(slot);
                if let Some(raw) = raw {
                    raw.abort();
                }
            });
        }
    }
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Seat { rank, ranks, .. } = self.shared.seat;
        write!(f, "rank {rank} of {ranks} by NCCL on cuda:{}", self.shared.driver.ordinal())
    }
}

/// Finds the library and the device. This search comes first, so a rank that lacks the library or the device fails
/// without a wait for other ranks.
fn prepare(options: &Options) -> Result<(&'static Library, Arc<dyn Driver>, Seat)> {
    options.refuse()?;
    let (library, driver) = (Library::get()?, Cuda::open(options.device)?.driver);
    let Options { rank, world_size, ctas, .. } = *options;
    Ok((library, driver, Seat { rank, ranks: world_size, ctas }))
}

fn warnings(version: u32, is_adopted: bool, variable: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let is_one = |name| variable(name).is_some_and(|value| value.trim() == "1");
    let one_queue = "CUDA_DEVICE_MAX_CONNECTIONS=1: all streams share one hardware queue, so sums and steps cannot \
                     overlap with backward; unset it";
    let unordered = "NCCL_LAUNCH_ORDER_IMPLICIT: not 1, so this NCCL has no order between the collectives of instep and \
                     of the program's communicators, and ranks can hang; set it to 1";
    let old = "NCCL before 2.26: it has no order between the collectives of instep and of the program's communicators, \
               and ranks can hang; let one end before the other begins, or use a newer NCCL";
    let order = match version {
        _ if is_ordered(version, is_adopted, &variable) => None,
        ORDERS_BY_VARIABLE.. => Some(unordered),
        _ => Some(old),
    };
    let queues = is_one("CUDA_DEVICE_MAX_CONNECTIONS").then_some(one_queue);
    [queues, order].into_iter().flatten().map(str::to_owned).collect()
}

#[cfg(test)]
#[path = "../../../tests/unit/cuda/nccl/communicator.rs"]
mod tests;
