//! Ranks inside one process. Each rank is a thread, and the threads sum each other's buffers in memory.
//!
//! In an all-reduce, rank r adds the r-th part of every buffer in rank order and writes the sum to all buffers. The
//! bits of the sum therefore depend only on the values. 16-bit elements are added as f32 and rounded once.
//! [`in_process`] starts a thread per rank. If ranks fail, `in_process` returns the first failure, and not the errors
//! that this failure causes on other ranks. A split corresponds to `ncclCommSplit`, with one colour or several.
#![allow(unsafe_code)]

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use crate::collective::{Call, Collective, CollectiveKind, place_in};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::handle::Place;
use crate::host::kernels::{Isa, Kernels};
use crate::host::rendezvous::{Arrived, Rendezvous, Seat};
use crate::host::streams::message_of;
use crate::pool::Pool;

/// The largest number of ranks in one process. Each rank has three threads, so more ranks would exhaust the system's
/// threads.
const MAX_RANKS: u32 = 1024;

struct Group {
    rendezvous: Rendezvous,
    kernels: Kernels,
    pool: Pool,
}

/// The communicator of one rank in a group of ranks inside one process.
pub struct InProcess {
    seat: Seat,
    /// The ranks of this communicator, as numbers in the whole group.
    ranks: Arc<[u32]>,
    group: Arc<Group>,
    scratch: Mutex<Scratch>,
}

/// Lists that are reused in every call, so that a collective allocates nothing.
#[derive(Default)]
struct Scratch {
    calls: Vec<Arrived>,
    buffers: Vec<*mut u8>,
}

// SAFETY: the pointers are leftovers of the last call. Each call fills both lists before it reads them.
unsafe impl Send for Scratch {}

/// Runs `body` once per rank, each time on a separate thread. Returns the results in the order of the ranks.
///
/// The ranks share one pool of kernel threads. `INSTEP_THREADS` sets the number of these threads, by default one per
/// core. If the body can fail with errors of another type, let `T` be a `Result` with these errors.
///
/// # Errors
/// `Config` for a world size of 0 or above 1024. Otherwise, returns the error of the rank that failed first. A panic
/// becomes [`Error::Rank`]. The other ranks end with an error within their deadline.
///
/// ```
/// fn main() -> Result<(), Box<dyn std::error::Error>> {
///     let ranks = instep::in_process(3, |comm| Ok(comm.rank()))?;
///     assert_eq!(ranks, [0, 1, 2]);
///     Ok(())
/// }
/// ```
pub fn in_process<T: Send>(world_size: u32, body: impl Fn(InProcess) -> Result<T> + Sync) -> Result<Vec<T>> {
    let places = world_size.min(MAX_RANKS);
    let values: Vec<Mutex<Option<T>>> = (0..places).map(|_| Mutex::default()).collect();
    run_ranks(world_size, &|comm| {
        let place = &values[comm.rank() as usize];
        let value = body(comm)?;
        *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
        Ok(())
    })?;
    let take = |place: Mutex<Option<T>>| place.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok(values.into_iter().filter_map(take).collect())
}

/// Runs a body that stores its own result. This function is not generic, so it is compiled once and not for each body.
fn run_ranks(world_size: u32, body: &(dyn Fn(InProcess) -> Result<()> + Sync)) -> Result<()> {
    if !(1..=MAX_RANKS).contains(&world_size) {
        return Err(Error::range("world_size", world_size, "1 to 1024 ranks in one process"));
    }
    let group = Arc::new(Group {
        rendezvous: Rendezvous::new(world_size),
        kernels: Kernels::load(Isa::from_environment()?)?,
        pool: Pool::from_environment()?,
    });
    let all: Arc<[u32]> = (0..world_size).collect();
    let refuse = |rank, message: String| {
        let error = Error::Rank { rank, message };
        group.rendezvous.fail(rank, &error);
        error
    };
    let run_rank = |rank: u32| {
        let comm = InProcess::new(rank, &all, &group);
        match catch_unwind(AssertUnwindSafe(|| body(comm))) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => {
                refuse(rank, "its body returned an error".to_owned());
                Err(error)
            }
            Err(panic) => Err(refuse(rank, message_of(&*panic))),
        }
    };
    let outcomes: Vec<Result<()>> = thread::scope(|scope| {
        let spawn = |rank| {
            thread::Builder::new()
                .name(format!("instep-rank-{rank}"))
                .spawn_scoped(scope, move || run_rank(rank))
                .map_err(|error| refuse(rank, error.to_string()))
        };
        // If a rank cannot start, the group must learn this before this thread waits for the other ranks.
        let threads: Vec<_> = (0..world_size).map(spawn).collect();
        let join = |(rank, thread): (u32, Result<thread::ScopedJoinHandle<'_, _>>)| {
            thread?.join().unwrap_or_else(|panic| Err(refuse(rank, message_of(&*panic))))
        };
        (0..world_size).zip(threads).map(join).collect()
    });
    let culprit = group.rendezvous.culprit();
    let errors = (0..world_size).zip(outcomes).filter_map(|(rank, outcome)| Some((rank, outcome.err()?)));
    // The error of the rank at fault has precedence, and then the error of the lowest rank.
    match errors.min_by_key(|(rank, _)| (Some(*rank) != culprit, *rank)) {
        Some((_, error)) => Err(error),
        None => Ok(()),
    }
}

impl InProcess {
    /// Returns this rank, from 0.
    pub fn rank(&self) -> u32 {
        self.seat.place
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> u32 {
        self.ranks.len() as u32
    }

    /// Returns another communicator of the same ranks, with the same kernel threads. Each additional stepper needs its
    /// own communicator. Every rank counts the splits of all its communicators together. The n-th splits of all ranks
    /// form a group.
    ///
    /// # Ordering
    /// Calls on different splits may come in any order, and the order may differ from rank to rank. A trainer that
    /// waits for one stepper delays its other steppers. If two ranks each wait for a pass that the other has not begun,
    /// both ranks end with a `Deadline`. A stepper's first pass waits for all ranks, and each later pass waits for the
    /// pass before it. Therefore begin the steppers' first passes in the same order on every rank. After that, the
    /// order may differ between ranks if, in each stepper, no rank is more than one pass ahead of another rank.
    ///
    /// # Errors
    /// This call never fails. A failure of one split ends all splits, including later ones. If a rank has not made a
    /// split, other ranks' calls on that split end with `Deadline`. Once the rank has dropped all its communicators,
    /// these calls end with `PeerLost` instead.
    ///
    /// ```
    /// use instep::{Adam, InProcess, Layout, Result, Stepper, in_process};
    ///
    /// fn pass(stepper: &mut Stepper, gradient: f32) -> Result<()> {
    ///     let weight = stepper.layout().id("weight")?;
    ///     let mut pass = stepper.begin()?;
    ///     pass.grads().write(weight, &[gradient])?;
    ///     pass.grad_ready(weight)?;
    ///     pass.finish() // sum and step run while the other stepper's pass is open
    /// }
    ///
    /// let layout = Layout::builder().param("weight", 1).build()?;
    /// let ranks = in_process(2, |comm: InProcess| {
    ///     let mut critic = Stepper::host(&layout, Adam::default(), comm.split())?;
    ///     let mut generator = Stepper::host(&layout, Adam::default(), comm)?;
    ///     for step in 0..10 {
    ///         pass(&mut critic, 1.0)?;
    ///         if step % 5 == 4 {
    ///             pass(&mut generator, -1.0)?; // once for every five passes of the critic
    ///         }
    ///     }
    ///     let weight = layout.id("weight")?;
    ///     Ok((critic.step_count(weight)?, generator.step_count(weight)?))
    /// })?;
    /// assert_eq!(ranks, [(10, 2), (10, 2)]);
    /// # Ok::<(), instep::Error>(())
    /// ```
    #[must_use = "other ranks wait for calls on the split"]
    pub fn split(&self) -> InProcess {
        InProcess::new(self.seat.place, &self.ranks, &self.group)
    }

    fn new(place: u32, ranks: &Arc<[u32]>, group: &Arc<Group>) -> InProcess {
        let seat = group.rendezvous.sit(place, ranks);
        InProcess { seat, ranks: Arc::clone(ranks), group: Arc::clone(group), scratch: Mutex::default() }
    }
}

/// Replaces the integers in every rank's buffer by their sum, maximum or minimum over the ranks. `kind` selects the
/// operation. `part` takes the count of integers, and returns the range that this call combines. Integers are accessed
/// as bytes, because buffers may be unaligned.
///
/// # Safety
/// Every buffer is valid for `bytes` bytes. Buffers do not overlap, and nothing else touches this part of a buffer.
pub(crate) unsafe fn combine(
    kind: CollectiveKind,
    ranks: &[*mut u8],
    bytes: u64,
    part: impl Fn(u64) -> Range<u64>,
) {
    let smaller = kind == CollectiveKind::Min32;
    let choose = |a: u32, b: u32| if smaller { a.min(b) } else { a.max(b) };
    // SAFETY: `combine` has the contract of `combine_numbers`.
    unsafe {
        match kind {
            CollectiveKind::Sum64 => combine_numbers(ranks, part(bytes / 8), |a, b| {
                u64::from_ne_bytes(a).wrapping_add(u64::from_ne_bytes(b)).to_ne_bytes()
            }),
            _ => combine_numbers(ranks, part(bytes / 4), |a, b| {
                choose(u32::from_ne_bytes(a), u32::from_ne_bytes(b)).to_ne_bytes()
            }),
        }
    }
}

/// # Safety
/// Every buffer is valid for the numbers in the range `part`. Buffers do not overlap, and nothing else touches this
/// part of a buffer.
unsafe fn combine_numbers<const BYTES: usize>(
    ranks: &[*mut u8],
    part: Range<u64>,
    combined: impl Fn([u8; BYTES], [u8; BYTES]) -> [u8; BYTES],
) {
    for at in part.start as usize..part.end as usize {
        let place = |buffer: &*mut u8| buffer.wrapping_add(at * BYTES).cast::<[u8; BYTES]>();
        // SAFETY: by the contract, the bytes are in bounds and initialised. Bytes need no alignment.
        let numbers = ranks.iter().map(|buffer| unsafe { place(buffer).read() });
        if let Some(number) = numbers.reduce(&combined) {
            // SAFETY: by the contract, the bytes are in bounds and initialised. Bytes need no alignment.
            ranks.iter().for_each(|buffer| unsafe { place(buffer).write(number) });
        }
    }
}

/// Returns the part of the range `0..elements` that a rank sums for all ranks.
fn part_of(elements: u64, rank: usize, ranks: u64) -> Range<u64> {
    let (part, rank) = (elements.div_ceil(ranks), rank as u64);
    (rank * part).min(elements)..((rank + 1) * part).min(elements)
}

impl Collective for InProcess {
    fn rank(&self) -> u32 {
        self.seat.place
    }

    fn world_size(&self) -> u32 {
        self.ranks.len() as u32
    }

    fn sums(&self, _: DType) -> bool {
        true
    }

    fn supports(&self, _: CollectiveKind) -> bool {
        true
    }

    /// Makes a [split](Self::split).
    fn duplicate(&self) -> Result<Arc<dyn Collective>> {
        Ok(Arc::new(self.split()))
    }

    /// Makes a communicator of some of the ranks. If ranks make different groups at the same point, and a rank is in two
    /// of them, the ranks end with a `Mismatch`.
    fn subgroup(&self, ranks: &[u32]) -> Result<Arc<dyn Collective>> {
        let own = place_in(ranks, self.seat.place, self.world_size())?;
        let ranks = ranks.iter().map(|rank| self.ranks[*rank as usize]).collect();
        Ok(Arc::new(InProcess::new(own, &ranks, &self.group)))
    }

    fn enqueue(&self, call: &mut Call<'_>) -> Result<()> {
        let (own, ranks) = (self.seat.place as usize, self.ranks.len() as u64);
        call.require_host(self.world_size())?;
        let is_whole = !matches!(call.kind, CollectiveKind::ReduceScatter | CollectiveKind::AllGather);
        if is_whole {
            // The call copies its source to the destination, and ranks combine their destinations.
            call.in_place()?;
        }
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let Scratch { calls, buffers } = &mut *scratch;
        self.group.rendezvous.meet(&self.seat, call, calls)?;
        let dst = call.dst();
        // No code from here to `part` may return early, because ranks access each other's buffers.
        buffers.clear();
        buffers.extend(calls.iter().map(|(_, call)| call.dst));
        match call.kind {
            CollectiveKind::AllReduce => {
                let Range { start, end } = part_of(call.bytes / call.dtype.bytes(), own, ranks);
                // SAFETY: all ranks have met with equal lengths, and none returns before `part`. Only rank r touches
                // the r-th part of each buffer. The buffers' owners have promised that nothing else touches them.
                unsafe { self.group.kernels.sum(buffers, call.dtype, start, end) }
            }
            CollectiveKind::Broadcast => {
                if own != 0 {
                    // SAFETY: all ranks have met with equal lengths, and none returns before `part`. Rank 0's buffer is
                    // only read, and ours is only written. They are different allocations of `bytes` bytes each.
                    unsafe { calls[0].1.src.copy_to_nonoverlapping(dst, call.bytes as usize) }
                }
            }
            CollectiveKind::ReduceScatter => {
                let part = call.dst_bytes() / call.dtype.bytes();
                let (first, last) = (own as u64 * part, (own as u64 + 1) * part);
                buffers.clear();
                buffers.extend(calls.iter().map(|(_, call)| call.src.cast_mut()));
                // SAFETY: all ranks have met with equal lengths, and none returns before `part`. Rank r alone reads the
                // r-th part of each source and writes its own destination, which lies in no other part.
                unsafe { self.group.kernels.sum_to(buffers, call.dtype, first, last, dst) }
            }
            CollectiveKind::AllGather => {
                let part = call.src_bytes() as usize;
                for (rank, (_, theirs)) in calls.iter().enumerate() {
                    let place = dst.wrapping_add(rank * part);
                    // This rank's own source may already lie at `place`. Peers read this source now, so it must not be
                    // written, not even with the same bytes.
                    if !std::ptr::eq(theirs.src, place) {
                        // SAFETY: all ranks have met with equal lengths, and none returns before `part`. Sources are
                        // only read, and each rank writes its own destination outside its source.
                        unsafe { theirs.src.copy_to(place, part) }
                    }
                }
            }
            CollectiveKind::Sum64 | CollectiveKind::Max32 | CollectiveKind::Min32 => {
                // SAFETY: all ranks have met with equal lengths, and none returns before `part`. Rank r alone touches
                // the r-th part of each buffer.
                unsafe { combine(call.kind, buffers, call.bytes, |numbers| part_of(numbers, own, ranks)) }
            }
        }
        self.group.rendezvous.part(&self.seat);
        Ok(())
    }

    fn check(&self) -> Result<()> {
        self.group.rendezvous.check(&self.seat)
    }

    fn abort(&self, cause: &Error) {
        self.group.rendezvous.fail(self.seat.member, cause);
    }

    fn pool(&self) -> Option<Pool> {
        Some(self.group.pool.clone())
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        self.group.rendezvous.leave(&self.seat);
    }
}

impl std::fmt::Debug for InProcess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {} in this process", self.rank(), self.world_size())
    }
}

/// A group of one rank, for training in a single process. Buckets launch as soon as they are complete, in any order. If
/// a framework with several ranks makes the all-reduce itself, build the stepper with
/// [`Sums::by_caller`](crate::Sums::by_caller).
#[derive(Clone, Copy, Debug, Default)]
pub struct Solo(());

impl Collective for Solo {
    fn rank(&self) -> u32 {
        0
    }

    fn world_size(&self) -> u32 {
        1
    }

    /// Returns true for the host and for every GPU, because `Solo` never touches a buffer that is reduced in place.
    fn reaches(&self, _: Place) -> bool {
        true
    }

    fn sums(&self, _: DType) -> bool {
        true
    }

    fn supports(&self, _: CollectiveKind) -> bool {
        true
    }

    fn duplicate(&self) -> Result<Arc<dyn Collective>> {
        Ok(Arc::new(*self))
    }

    fn enqueue(&self, call: &mut Call<'_>) -> Result<()> {
        // On a GPU, the call has a stream. Steppers then reduce in place, so nothing is copied.
        if call.stream().is_none() {
            call.in_place()?;
        }
        Ok(())
    }

    fn abort(&self, _: &Error) {}
}
