//! Sends and receives MPI's messages between two ranks. No MPI call blocks: this file starts a message, and later tests
//! whether the message has ended.
//!
//! One lock covers every call into the MPI library, so `MPI_THREAD_SERIALIZED` is enough. MPI may use a message's
//! memory from the start of the message until a test reports its end.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int};
use std::fmt::Display;
use std::mem::MaybeUninit;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ::mpi::ffi;
use ::mpi::topology::Communicator;
use ::mpi::{Threading, environment};

use crate::error::{Error, Result};
use crate::poll::{Wall, poll};
use crate::text::sentence;

/// The kind of a message. Messages of one kind between two ranks arrive in the order in which they were sent.
#[derive(Clone, Copy)]
pub(super) enum Tag {
    Key,
    Part,
    Sum,
    Broadcast,
    Failure,
}

/// A failure is sent as one message of this size, padded with zeros.
const FAILURE_BYTES: usize = 1024;

/// The time for which a rank polls without sleeping. A message with much data ends only after many polls.
const AWAKE: Duration = Duration::from_millis(1);

static LIBRARY: Mutex<()> = Mutex::new(());

fn library() -> MutexGuard<'static, ()> {
    LIBRARY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A message that has been started.
pub(super) struct Message {
    request: ffi::MPI_Request,
    pub(super) peer: u32,
}

/// This rank's handle of an MPI communicator that only this crate uses.
pub(super) struct Wire {
    comm: ffi::MPI_Comm,
    pub(super) rank: u32,
    pub(super) ranks: u32,
    /// The numbers of the group's ranks in the communicator. `None` if the group is the whole communicator.
    members: Option<Vec<u32>>,
    /// Number of ranks of the communicator.
    all: u32,
}

// SAFETY: a communicator is a handle, and `LIBRARY` lets one thread at a time call the library.
unsafe impl Send for Wire {}
// SAFETY: a communicator is a handle, and `LIBRARY` lets one thread at a time call the library.
unsafe impl Sync for Wire {}
// SAFETY: a request is a handle, and `LIBRARY` lets one thread at a time call the library.
unsafe impl Send for Message {}

impl Wire {
    /// Duplicates a communicator. The duplicate is never freed, because freeing it would wait for ranks that may have
    /// failed.
    pub(super) fn duplicate(original: &impl Communicator, deadline: Duration) -> Result<Wire> {
        if !environment::is_initialized() || environment::is_finalized() {
            return Err(Error::order("MPI", "not initialized, or finalized already", "initialize it first"));
        }
        if environment::threading_support() < Threading::Serialized {
            let wrong = "initialized for calls from one thread only";
            return Err(Error::unsupported(
                "MPI",
                wrong,
                "initialize it with Threading::Serialized or Multiple",
            ));
        }
        let (rank, ranks) = (original.rank() as u32, original.size() as u32);
        Wire { comm: original.as_raw(), rank, ranks, members: None, all: ranks }.duplicated(deadline)
    }

    /// Duplicates this wire. The original may be dropped when the call has returned.
    pub(super) fn duplicated(&self, deadline: Duration) -> Result<Wire> {
        let mut wire = Wire { members: self.members.clone(), ..*self };
        // If the call fails, this memory is leaked, because the library may still write to it.
        let duplicate = Box::leak(Box::new(self.comm));
        let mut request = MaybeUninit::uninit();
        let lock = library();
        // SAFETY: the communicator is live, because a reference to it is held. There is memory for both results.
        let code = unsafe { ffi::MPI_Comm_idup(self.comm, duplicate, request.as_mut_ptr()) };
        drop(lock);
        wire.checked("MPI_Comm_idup", code)?;
        // SAFETY: the call has succeeded.
        let mut messages = vec![Message { request: unsafe { request.assume_init() }, peer: wire.rank }];
        wire.wait(&mut messages, "MPI_Comm_idup", deadline, || Ok(()))?;
        // SAFETY: the request has ended, so the library no longer uses the memory, which came from a `Box`.
        wire.comm = *unsafe { Box::from_raw(duplicate) };
        let lock = library();
        // SAFETY: the communicator is this wire's own.
        let code = unsafe { ffi::MPI_Comm_set_errhandler(wire.comm, ffi::RSMPI_ERRORS_RETURN) };
        drop(lock);
        wire.checked("MPI_Comm_set_errhandler", code)?;
        Ok(wire)
    }

    /// Restricts the wire to some of its ranks. `place` is this rank's index among them.
    pub(super) fn among(self, ranks: &[u32], place: u32) -> Wire {
        let members = ranks.iter().map(|rank| self.name_of(*rank)).collect();
        Wire {
            comm: self.comm,
            rank: place,
            ranks: ranks.len() as u32,
            members: Some(members),
            all: self.all,
        }
    }

    /// Returns the number of a rank in the communicator. Errors use this number.
    pub(super) fn name_of(&self, rank: u32) -> u32 {
        self.members.as_ref().map_or(rank, |members| members[rank as usize])
    }

    /// Starts to send a message.
    ///
    /// # Safety
    /// The bytes are valid, and nothing writes to them, until [`test`](Self::test) drops the message. If `test` never
    /// drops the message, both conditions must hold forever.
    pub(super) unsafe fn send(&self, to: u32, tag: Tag, from: *const u8, bytes: usize) -> Result<Message> {
        // SAFETY: the caller's promise.
        let request = unsafe { self.send_to(self.name_of(to), tag, from, bytes) }?;
        Ok(Message { request, peer: to })
    }

    /// Starts to send a message. `to` is the receiver's number in the communicator.
    ///
    /// # Safety
    /// The bytes are valid, and nothing writes to them, until the request has ended. If the request never ends, both
    /// conditions must hold forever.
    unsafe fn send_to(&self, to: u32, tag: Tag, from: *const u8, bytes: usize) -> Result<ffi::MPI_Request> {
        let mut request = MaybeUninit::uninit();
        let _lock = library();
        // SAFETY: the contract covers the memory, and the communicator lives until MPI is finalized.
        let code = unsafe {
            let (to, tag) = (to as c_int, tag as c_int);
            ffi::MPI_Isend(
                from.cast(),
                bytes as c_int,
                ffi::RSMPI_UINT8_T,
                to,
                tag,
                self.comm,
                request.as_mut_ptr(),
            )
        };
        self.checked("MPI_Isend", code)?;
        // SAFETY: the call has succeeded.
        Ok(unsafe { request.assume_init() })
    }

    /// Starts to receive exactly `bytes` bytes.
    ///
    /// # Safety
    /// The bytes are valid, and nothing touches them, until [`test`](Self::test) drops the message. If `test` never
    /// drops the message, both conditions must hold forever.
    pub(super) unsafe fn receive(&self, from: u32, tag: Tag, to: *mut u8, bytes: usize) -> Result<Message> {
        let mut request = MaybeUninit::uninit();
        let _lock = library();
        // SAFETY: the contract covers the memory, and the communicator lives until MPI is finalized.
        let code = unsafe {
            let (from, tag) = (self.name_of(from) as c_int, tag as c_int);
            ffi::MPI_Irecv(
                to.cast(),
                bytes as c_int,
                ffi::RSMPI_UINT8_T,
                from,
                tag,
                self.comm,
                request.as_mut_ptr(),
            )
        };
        self.checked("MPI_Irecv", code)?;
        // SAFETY: the call has succeeded.
        Ok(Message { request: unsafe { request.assume_init() }, peer: from })
    }

    /// Waits until all messages have ended, or until `wanted` returns an error.
    pub(super) fn wait(
        &self,
        messages: &mut Vec<Message>,
        call: impl Display,
        deadline: Duration,
        wanted: impl Fn() -> Result<()>,
    ) -> Result<()> {
        let look = || Ok(self.test(messages)?.then_some(()));
        if poll(Wall::start(), AWAKE, deadline, wanted, look)?.is_some() {
            return Ok(());
        }
        let peers = messages.iter().map(|message| message.peer).filter(|peer| *peer != self.rank);
        let mut missing: Vec<u32> = peers.map(|peer| self.name_of(peer)).collect();
        missing.sort_unstable();
        missing.dedup();
        Err(Error::deadline(self.name_of(self.rank), call, deadline, missing))
    }

    /// Drops the messages that have ended, and returns whether all of them have ended.
    fn test(&self, messages: &mut Vec<Message>) -> Result<bool> {
        let mut outcome = Ok(());
        messages.retain_mut(|message| {
            let mut ended = 0;
            let lock = library();
            // SAFETY: the request is live, because this function drops every request that has ended.
            let code = unsafe { ffi::MPI_Test(&mut message.request, &mut ended, ffi::RSMPI_STATUS_IGNORE) };
            drop(lock);
            let tested = self.checked("MPI_Test", code);
            let is_under_way = tested.is_err() || ended == 0;
            outcome = std::mem::replace(&mut outcome, Ok(())).and(tested);
            is_under_way
        });
        outcome.map(|()| messages.is_empty())
    }

    /// If another rank has sent a failure, returns that rank's number in the communicator and the failure's text.
    pub(super) fn failure(&self) -> Result<Option<(u32, String)>> {
        let (mut is_there, mut status) = (0, MaybeUninit::<ffi::MPI_Status>::uninit());
        let mut frame = [0u8; FAILURE_BYTES];
        let tag = Tag::Failure as c_int;
        let _lock = library();
        // SAFETY: there is memory for the results, and the status is read only if the call has filled it.
        let (code, from) = unsafe {
            let code =
                ffi::MPI_Iprobe(ffi::RSMPI_ANY_SOURCE, tag, self.comm, &mut is_there, status.as_mut_ptr());
            (code, if code == 0 && is_there != 0 { status.assume_init().MPI_SOURCE } else { 0 })
        };
        self.checked("MPI_Iprobe", code)?;
        if is_there == 0 {
            return Ok(None);
        }
        // SAFETY: the frame is as long as every failure. The message has arrived, so the call does not wait.
        let code = unsafe {
            let (to, len) = (frame.as_mut_ptr().cast(), FAILURE_BYTES as c_int);
            ffi::MPI_Recv(to, len, ffi::RSMPI_UINT8_T, from, tag, self.comm, ffi::RSMPI_STATUS_IGNORE)
        };
        self.checked("MPI_Recv", code)?;
        let text = frame.split(|byte| *byte == 0).next().unwrap_or_default();
        Ok(Some((from as u32, sentence(String::from_utf8_lossy(text)))))
    }

    /// Sends a failure to all other ranks of the communicator. This function does not wait until the message is read,
    /// so the message's memory is leaked.
    pub(super) fn send_failure(&self, why: &str) {
        if environment::is_finalized() {
            return;
        }
        let mut frame = why.as_bytes().to_vec();
        frame.resize(FAILURE_BYTES, 0);
        let frame: &'static [u8] = frame.leak();
        let own = self.name_of(self.rank);
        for peer in (0..self.all).filter(|peer| *peer != own) {
            // SAFETY: the frame lives forever. If the frame cannot be sent, the peer's call ends at its deadline.
            let _ = unsafe { self.send_to(peer, Tag::Failure, frame.as_ptr(), FAILURE_BYTES) };
        }
    }

    fn checked(&self, call: &'static str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let mut text: [c_char; 1024] = [0; 1024];
        let mut len = 0;
        // SAFETY: MPI's texts are shorter than the buffer in every implementation that the bindings support, and the
        // call returns the length.
        unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr(), &mut len) };
        let bytes: Vec<u8> = text.iter().take(len.max(0) as usize).map(|c| *c as u8).collect();
        let message = String::from_utf8_lossy(&bytes).into_owned();
        Err(Error::Collective { rank: self.name_of(self.rank), call, code, message })
    }
}
