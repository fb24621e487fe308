//! Ranks inside one process: threads that sum each other's buffers in memory.
//!
//! An all-reduce gives rank r the r-th part of every buffer: it adds them in rank order and writes the sum to all, so
//! the bits depend on nothing but the values. Ranks are the caller's threads; [`in_process`] makes them. Must report
//! the failure that came first, not its echoes on the other ranks.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::host::kernels::{Isa, Kernels};
use crate::host::rendezvous::Rendezvous;
use crate::host::streams::message_of;
use crate::op::{Call, Collective, CollectiveKind};
use crate::pool::Pool;

/// Each rank is three threads, so more would exhaust a machine rather than test a program.
const MAX_RANKS: u32 = 1024;

struct Group {
    world_size: u32,
    rendezvous: Rendezvous,
    kernels: Kernels,
    pool: Pool,
}

/// One rank's end of an in-process group.
pub struct InProcess {
    rank: u32,
    group: Arc<Group>,
    scratch: Mutex<Scratch>,
}

/// Reused between calls, so that a collective allocates nothing.
#[derive(Default)]
struct Scratch {
    calls: Vec<Call>,
    buffers: Vec<*mut f32>,
}

// SAFETY: the pointers are leftovers of the last call; each call fills both lists anew before it reads them.
unsafe impl Send for Scratch {}

/// Runs `body` once per rank, each on a thread of its own, and returns the results by rank. The ranks share one pool
/// of kernel threads: `INSTEP_THREADS`, else one per core.
///
/// # Errors
/// `Config` for a world size of 0 or above 1024. The error of the rank that failed first; a panic becomes
/// [`Error::Rank`]. The other ranks are ended with an error within their deadline.
///
/// ```
/// let ranks = instep::in_process(3, |comm| {
///     Ok::<_, instep::Error>(comm.rank())
/// })?;
/// assert_eq!(ranks, [0, 1, 2]);
/// # Ok::<(), instep::Error>(())
/// ```
pub fn in_process<T, E>(world_size: u32, body: impl Fn(InProcess) -> Result<T, E> + Sync) -> Result<Vec<T>, E>
where
    T: Send,
    E: From<Error> + Send,
{
    if !(1..=MAX_RANKS).contains(&world_size) {
        return Err(Error::config("world_size", world_size, "must be from 1 to 1024 in one process").into());
    }
    let group = Arc::new(Group {
        world_size,
        rendezvous: Rendezvous::new(world_size),
        kernels: Kernels::load(Isa::from_environment()?)?,
        pool: Pool::from_environment()?,
    });
    let (group, body) = (&group, &body);
    let run_rank = move |rank: u32| -> Result<T, E> {
        let comm = InProcess { rank, group: Arc::clone(group), scratch: Mutex::default() };
        let outcome = catch_unwind(AssertUnwindSafe(|| body(comm)));
        let (outcome, why) = match outcome {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(error)) => (Err(error), "its body returned an error".to_owned()),
            Err(panic) => {
                let message = message_of(&*panic);
                (Err(E::from(Error::Rank { rank, message: message.clone() })), message)
            }
        };
        group.rendezvous.fail(rank, &Error::Rank { rank, message: why });
        outcome
    };
    let outcomes: Vec<Result<T, E>> = thread::scope(|scope| {
        let spawn = |rank| {
            thread::Builder::new()
                .name(format!("instep-rank-{rank}"))
                .spawn_scoped(scope, move || run_rank(rank))
        };
        let threads: Vec<_> = (0..world_size).map(|rank| (rank, spawn(rank))).collect();
        let refused = |rank, message: String| {
            group.rendezvous.fail(rank, &Error::Rank { rank, message: message.clone() });
            Err(E::from(Error::Rank { rank, message }))
        };
        // A rank that could not be started must be known before the others are waited for.
        let threads: Vec<_> = threads
            .into_iter()
            .map(|(rank, thread)| (rank, thread.map_err(|error| refused(rank, error.to_string()))))
            .collect();
        let join = |(rank, thread): (u32, Result<thread::ScopedJoinHandle<'_, _>, _>)| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|panic| refused(rank, message_of(&*panic))),
            Err(error) => error,
        };
        threads.into_iter().map(join).collect()
    });
    let culprit = group.rendezvous.culprit();
    let mut values = Vec::with_capacity(outcomes.len());
    let mut errors = Vec::new();
    for (rank, outcome) in (0..world_size).zip(outcomes) {
        match outcome {
            Ok(value) => values.push(value),
            Err(error) => errors.push((Some(rank) != culprit, error)),
        }
    }
    // The culprit's first, then the lowest rank's.
    errors.sort_by_key(|(echo, _)| *echo);
    match errors.into_iter().next() {
        Some((_, error)) => Err(error),
        None => Ok(values),
    }
}

impl InProcess {
    /// This rank, from 0.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Number of ranks.
    pub fn world_size(&self) -> u32 {
        self.group.world_size
    }
}

impl Collective for InProcess {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn world_size(&self) -> u32 {
        self.group.world_size
    }

    unsafe fn enqueue(&self, call: &Call) -> Result<()> {
        if !std::ptr::eq(call.src, call.dst) {
            // Ranks meet over `dst`. SAFETY: both are valid for `bytes`, by the contract.
            unsafe { call.src.copy_to(call.dst, call.bytes as usize) }
        }
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let Scratch { calls, buffers } = &mut *scratch;
        self.group.rendezvous.meet(self.rank, call, calls)?;
        // From here to `part` nothing may return early: peers are inside our buffer and we inside theirs.
        buffers.clear();
        buffers.extend(calls.iter().map(|call| call.dst.cast::<f32>()));
        match call.kind {
            CollectiveKind::AllReduce => {
                let DType::F32 = call.dtype;
                let elements = call.bytes / call.dtype.bytes();
                let (rank, ranks) = (u64::from(self.rank), u64::from(self.group.world_size));
                let part = elements.div_ceil(ranks);
                let (first, last) = ((rank * part).min(elements), ((rank + 1) * part).min(elements));
                // SAFETY: all ranks have met with equal lengths, none returns before `part`, and rank r alone
                // touches the r-th part of each buffer; their owners promised that nothing else does.
                unsafe { self.group.kernels.sum(buffers, first, last) }
            }
            CollectiveKind::Broadcast => {
                if self.rank != 0 {
                    // SAFETY: as above; rank 0's buffer is only read, ours only written, and they are different
                    // allocations of `bytes` each.
                    unsafe { calls[0].src.copy_to_nonoverlapping(call.dst, call.bytes as usize) }
                }
            }
        }
        self.group.rendezvous.part();
        Ok(())
    }

    fn abort(&self, cause: &Error) {
        self.group.rendezvous.fail(self.rank, cause);
    }

    fn pool(&self) -> Option<Pool> {
        Some(self.group.pool.clone())
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        self.group.rendezvous.leave(self.rank);
    }
}

impl std::fmt::Debug for InProcess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {} in this process", self.rank, self.group.world_size)
    }
}
