//! Connects ranks over MPI (feature `mpi`). Each rank is a process. The processes may run on one machine or on several.
//!
//! This file adds the values itself, because MPI's order of additions may depend on the rank. Rank r adds the r-th part
//! of each window in rank order, so the sum has the same bits as with ranks in one process. Messages use only memory
//! that this file allocates. If a call fails, this memory is leaked, because MPI may still write to it.
#![allow(unsafe_code)]

mod wire;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ::mpi::environment;
use ::mpi::topology::Communicator;

use crate::collective::{Call, CallKey, Collective, CollectiveKind, place_in};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::host::kernels::{Isa, Kernels};
use crate::host::ranks::combine;
use wire::{Message, Tag, Wire};

/// The length of a window in bytes. Ranks sum a buffer one window at a time.
const WINDOW_BYTES: usize = 4 << 20;

/// A cache line. Parts of a window start at cache lines.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([u8; LINE_BYTES]);
const LINE_BYTES: usize = 64;

/// The communicator of one rank in a group of processes that use MPI. The communicator sums f32, bf16 and f16 in host
/// memory. The sums have the same bits as with [`in_process`](crate::in_process).
///
/// Compiling this type needs an MPI library and libclang. The crate `mpi` finds both. Initialize MPI with
/// `Threading::Serialized` if no other code calls MPI while steppers exist. Otherwise use `Threading::Multiple`. Drop
/// steppers before MPI is finalized.
///
/// If a rank dies, the other ranks detect it at the deadline of a call, unless `mpirun` ends all ranks earlier.
///
/// ```no_run
/// use instep::{AdamW, Layout, Mpi, Stepper};
/// use mpi::Threading;
///
/// // mpirun -n 4 ./my_program
/// let (universe, _) = mpi::initialize_with_threading(Threading::Serialized).ok_or("MPI is initialized already")?;
/// let layout = Layout::builder().param("weight", 1000).build()?;
/// let stepper = Stepper::host(&layout, AdamW::default(), Mpi::new(&universe.world())?)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Mpi {
    wire: Wire,
    kernels: Kernels,
    scratch: Mutex<Scratch>,
    failure: Mutex<Option<Error>>,
}

/// Memory of messages, reused between calls. All of this memory is on the heap, so that it stays valid if it is leaked.
#[derive(Default)]
struct Scratch {
    /// The [`CallKey`] of each rank's collective call as bytes, in the order of the ranks.
    keys: Vec<u8>,
    /// A part of the buffer. Before the exchange, `window` has this rank's values. After the exchange, it has the
    /// call's result: sums or, if the call only copies values, other ranks' values.
    window: Vec<Line>,
    /// The values of every rank for the part of the window that this rank sums.
    parts: Vec<Line>,
    under_way: Vec<Message>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Mpi {
    /// Duplicates the communicator for one stepper. All ranks must make this call. Each rank waits up to a minute for
    /// the other ranks. If there are several such calls, all ranks must make them in the same order.
    ///
    /// # Errors
    /// `Order` if MPI is not initialized, or is finalized already. `Unsupported` if MPI was initialized without support
    /// for several threads. `Deadline` if a rank does not take part. `Collective` if an MPI call fails. `Config`,
    /// `Unsupported` or `Arithmetic` for an instruction set that cannot be used.
    pub fn new(communicator: &impl Communicator) -> Result<Mpi> {
        let kernels = Kernels::load(Isa::from_environment()?)?;
        let wire = Wire::duplicate(communicator, Duration::from_secs(60))?;
        Ok(Mpi { wire, kernels, scratch: Mutex::default(), failure: Mutex::default() })
    }

    /// Returns a communicator that uses another wire and the same kernels.
    fn on(&self, wire: Wire) -> Mpi {
        Mpi { wire, kernels: self.kernels, scratch: Mutex::default(), failure: Mutex::default() }
    }

    fn peers(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.wire.ranks).filter(|peer| *peer != self.wire.rank)
    }

    /// If the group has ended, returns the error that has ended it.
    fn refuse(&self) -> Result<()> {
        lock(&self.failure).clone().map_or(Ok(()), Err)
    }

    /// Waits until all started messages have ended.
    fn wait(&self, call: &Call<'_>, under_way: &mut Vec<Message>) -> Result<()> {
        self.wire.wait(under_way, call, call.deadline(), || {
            self.refuse()?;
            let lost = self.wire.failure()?;
            lost.map_or(Ok(()), |(rank, why)| Err(Error::PeerLost { rank, why }))
        })
    }

    fn compare(&self, call: &Call<'_>, scratch: &mut Scratch) -> Result<()> {
        let Scratch { keys, under_way, .. } = scratch;
        keys.resize(self.wire.ranks as usize * CallKey::BYTES, 0);
        let (places, _) = keys.as_chunks_mut::<{ CallKey::BYTES }>();
        places[self.wire.rank as usize] = call.key().to_bytes();
        let first = places.as_mut_ptr();
        for peer in self.peers() {
            // SAFETY: every rank has a place in `keys`. Until `wait` has returned, only messages touch it. If `wait`
            // fails, the scratch is leaked.
            unsafe {
                let (own, theirs) = (first.add(self.wire.rank as usize), first.add(peer as usize));
                under_way.push(self.wire.receive(peer, Tag::Key, theirs.cast(), CallKey::BYTES)?);
                under_way.push(self.wire.send(peer, Tag::Key, own.cast(), CallKey::BYTES)?);
            }
        }
        self.wait(call, under_way)?;
        let (places, _) = keys.as_chunks::<{ CallKey::BYTES }>();
        for peer in self.peers() {
            let theirs = CallKey::from_bytes(&places[peer as usize]);
            let [own, other] = [self.wire.rank, peer].map(|rank| self.wire.name_of(rank));
            let theirs = theirs.ok_or_else(|| Error::other_version(other, "call"))?;
            if theirs != call.key() {
                return Err(call.key().mismatch(&theirs, own, other));
            }
        }
        Ok(())
    }

    /// Combines `elements` elements of the window over ranks.
    fn sum_window(&self, call: &Call<'_>, scratch: &mut Scratch, elements: usize) -> Result<()> {
        let element = call.dtype.bytes() as usize;
        let part = elements.div_ceil(self.wire.ranks as usize).next_multiple_of(LINE_BYTES / element);
        let len_of = |rank: usize| ((rank + 1) * part).min(elements).saturating_sub(rank * part) * element;
        self.reduce_parts(call, scratch, part * element, len_of)?;
        self.spread_parts(call, scratch, part * element, len_of)
    }

    /// Combines each rank's part of the window on that rank. Parts start `part_bytes` bytes apart, and `len_of` returns
    /// the length of a rank's part in bytes.
    fn reduce_parts(
        &self,
        call: &Call<'_>,
        scratch: &mut Scratch,
        part_bytes: usize,
        len_of: impl Fn(usize) -> usize,
    ) -> Result<()> {
        let (own, ranks) = (self.wire.rank as usize, self.wire.ranks as usize);
        let Scratch { window, parts, under_way, .. } = scratch;
        reserve(window, ranks * part_bytes);
        reserve(parts, ranks * part_bytes);
        let (window, parts) = (window.as_mut_ptr().cast::<u8>(), parts.as_mut_ptr().cast::<u8>());
        // SAFETY: every rank has a part in both memories. Until `wait` has returned, only messages touch their parts.
        // If `wait` fails, the scratch is leaked. The sum's pointers are to parts of full length.
        unsafe {
            for peer in self.peers() {
                let (at, bytes) = (peer as usize * part_bytes, len_of(peer as usize));
                if len_of(own) > 0 {
                    under_way.push(self.wire.receive(peer, Tag::Part, parts.add(at), len_of(own))?);
                }
                if bytes > 0 {
                    under_way.push(self.wire.send(peer, Tag::Part, window.add(at), bytes)?);
                }
            }
            self.wait(call, under_way)?;
            let own_part = window.add(own * part_bytes);
            let terms: Vec<*mut u8> =
                (0..ranks).map(|k| if k == own { own_part } else { parts.add(k * part_bytes) }).collect();
            let bytes = len_of(own) as u64;
            match call.kind {
                CollectiveKind::Sum64 | CollectiveKind::Max32 | CollectiveKind::Min32 => {
                    combine(call.kind, &terms, bytes, |numbers| 0..numbers);
                }
                _ => self.kernels.sum(&terms, call.dtype, 0, bytes / call.dtype.bytes()),
            }
        }
        Ok(())
    }

    /// Sends each rank's part of the window to all ranks.
    fn spread_parts(
        &self,
        call: &Call<'_>,
        scratch: &mut Scratch,
        part_bytes: usize,
        len_of: impl Fn(usize) -> usize,
    ) -> Result<()> {
        let (own, ranks) = (self.wire.rank as usize, self.wire.ranks as usize);
        let Scratch { window, under_way, .. } = scratch;
        reserve(window, ranks * part_bytes);
        let window = window.as_mut_ptr().cast::<u8>();
        // SAFETY: every rank has a part in the window. Until `wait` has returned, only messages touch their parts. If
        // `wait` fails, the scratch is leaked.
        unsafe {
            for peer in self.peers() {
                let (at, bytes) = (peer as usize * part_bytes, len_of(peer as usize));
                if bytes > 0 {
                    under_way.push(self.wire.receive(peer, Tag::Sum, window.add(at), bytes)?);
                }
                if len_of(own) > 0 {
                    let part = window.add(own * part_bytes);
                    under_way.push(self.wire.send(peer, Tag::Sum, part, len_of(own))?);
                }
            }
        }
        self.wait(call, under_way)
    }

    /// Runs a reduce-scatter or an all-gather. Each exchange covers one piece of every rank's part.
    fn exchange_parts(&self, call: &mut Call<'_>, scratch: &mut Scratch) -> Result<()> {
        let (own, ranks) = (self.wire.rank as usize, self.wire.ranks as usize);
        let part = call.bytes as usize / ranks;
        let most = (WINDOW_BYTES / ranks / LINE_BYTES).max(1) * LINE_BYTES;
        let mut done = 0;
        while done < part {
            let bytes = most.min(part - done);
            let apart = bytes.next_multiple_of(LINE_BYTES);
            reserve(&mut scratch.window, ranks * apart);
            let window = scratch.window.as_mut_ptr().cast::<u8>();
            // SAFETY: the window has room for a piece of each part. Both buffers belong to the call and have its
            // length, as the call's maker has promised. `require_host` has refused a GPU's memory. No message is in
            // flight.
            unsafe {
                if call.kind == CollectiveKind::ReduceScatter {
                    (0..ranks)
                        .for_each(|k| call.src().add(k * part + done).copy_to(window.add(k * apart), bytes));
                    self.reduce_parts(call, scratch, apart, |_| bytes)?;
                    let sum = scratch.window.as_ptr().cast::<u8>().add(own * apart);
                    sum.copy_to(call.dst().add(done), bytes);
                } else {
                    call.src().add(done).copy_to(window.add(own * apart), bytes);
                    self.spread_parts(call, scratch, apart, |_| bytes)?;
                    let all = scratch.window.as_ptr().cast::<u8>();
                    (0..ranks)
                        .for_each(|k| all.add(k * apart).copy_to(call.dst().add(k * part + done), bytes));
                }
            }
            done += bytes;
        }
        Ok(())
    }

    /// Sends the bytes of rank 0's window to all ranks.
    fn broadcast_window(&self, call: &Call<'_>, scratch: &mut Scratch, bytes: usize) -> Result<()> {
        let Scratch { window, under_way, .. } = scratch;
        let window = window.as_mut_ptr().cast::<u8>();
        // SAFETY: the window has room for `bytes` bytes. Until `wait` has returned, only messages touch it. If `wait`
        // fails, the scratch is leaked.
        unsafe {
            if self.wire.rank > 0 {
                under_way.push(self.wire.receive(0, Tag::Broadcast, window, bytes)?);
            } else {
                for peer in self.peers() {
                    under_way.push(self.wire.send(peer, Tag::Broadcast, window, bytes)?);
                }
            }
        }
        self.wait(call, under_way)
    }

    fn carry_out(&self, call: &mut Call<'_>, scratch: &mut Scratch) -> Result<()> {
        self.compare(call, scratch)?;
        if matches!(call.kind, CollectiveKind::ReduceScatter | CollectiveKind::AllGather) {
            return self.exchange_parts(call, scratch);
        }
        let mut done = 0;
        while done < call.bytes as usize {
            let bytes = WINDOW_BYTES.min(call.bytes as usize - done);
            reserve(&mut scratch.window, bytes);
            // SAFETY: the window has room. Both buffers belong to the call and have its length, as the call's maker has
            // promised. No message is in flight.
            unsafe { call.src().add(done).copy_to(scratch.window.as_mut_ptr().cast(), bytes) };
            match call.kind {
                CollectiveKind::Broadcast => self.broadcast_window(call, scratch, bytes)?,
                _ => self.sum_window(call, scratch, bytes / call.dtype.bytes() as usize)?,
            }
            // SAFETY: the window has room. Both buffers belong to the call and have its length, as the call's maker has
            // promised. No message is in flight.
            unsafe { scratch.window.as_ptr().cast::<u8>().copy_to(call.dst().add(done), bytes) };
            done += bytes;
        }
        Ok(())
    }

    /// Stores the first failure, and sends it to the other ranks unless they detect it themselves.
    fn fail(&self, error: Error, is_known: bool) -> Error {
        let mut failure = lock(&self.failure);
        if let Some(first) = &*failure {
            return first.clone();
        }
        *failure = Some(error.clone());
        drop(failure);
        if !is_known {
            self.wire.send_failure(&error.to_string());
        }
        error
    }
}

/// Makes room for `bytes` bytes and keeps the contents.
fn reserve(lines: &mut Vec<Line>, bytes: usize) {
    let count = bytes.div_ceil(LINE_BYTES);
    if lines.len() < count {
        lines.resize(count, Line([0; LINE_BYTES]));
    }
}

impl Collective for Mpi {
    fn rank(&self) -> u32 {
        self.wire.rank
    }

    fn world_size(&self) -> u32 {
        self.wire.ranks
    }

    fn sums(&self, _: DType) -> bool {
        true
    }

    fn supports(&self, _: CollectiveKind) -> bool {
        true
    }

    fn duplicate(&self) -> Result<Arc<dyn Collective>> {
        Ok(Arc::new(self.on(self.wire.duplicated(Duration::from_secs(60))?)))
    }

    /// All ranks duplicate the full communicator, although each rank exchanges values only with its group. A failure
    /// can therefore still be sent to all ranks.
    fn subgroup(&self, ranks: &[u32]) -> Result<Arc<dyn Collective>> {
        let place = place_in(ranks, self.wire.rank, self.wire.ranks)?;
        let wire = self.wire.duplicated(Duration::from_secs(60))?;
        Ok(Arc::new(self.on(wire.among(ranks, place))))
    }

    fn enqueue(&self, call: &mut Call<'_>) -> Result<()> {
        self.refuse()?;
        if environment::is_finalized() {
            return Err(Error::order("MPI", "finalized already", "drop steppers before the universe"));
        }
        call.require_host(self.wire.ranks)?;
        let mut scratch = lock(&self.scratch);
        self.carry_out(call, &mut scratch).map_err(|error| {
            // Messages may still be in flight, so their memory is leaked.
            std::mem::forget(std::mem::take(&mut *scratch));
            // The other ranks already know these errors: every rank compares all keys, and a lost rank has sent its
            // failure to all ranks.
            let is_known =
                matches!(error, Error::Mismatch { .. } | Error::LeftPass { .. } | Error::PeerLost { .. });
            self.fail(error, is_known)
        })
    }

    fn check(&self) -> Result<()> {
        self.refuse()?;
        match self.wire.failure()? {
            Some((rank, why)) => Err(self.fail(Error::PeerLost { rank, why }, true)),
            None => Ok(()),
        }
    }

    fn abort(&self, cause: &Error) {
        self.fail(cause.cause().clone(), false);
    }
}

impl fmt::Debug for Mpi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {} over MPI", self.wire.rank, self.wire.ranks)
    }
}
