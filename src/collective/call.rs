//! The memory that a communicator works on: the buffers of a [`Call`], and buffers that the communicator allocates
//! itself.
//!
//! The code that makes a `Call` guarantees that nothing else uses the buffers, so an implementation of `Collective`
//! needs no unsafe code. An implementation gets host memory as slices, and safe code cannot change a buffer's address
//! or length. `std::io::IoSliceMut` is a similar safe view of memory for system calls that take pointers.
#![allow(unsafe_code)]

use std::any::Any;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, ptr, slice};

use crate::collective::key::CallKey;
use crate::collective::{Collective, CollectiveKind, refused_kind};
use crate::error::{Error, Result};
use crate::handle::StreamHandle;
use crate::op::Words;

/// The start addresses of a call's buffers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addresses {
    pub(crate) src: *const u8,
    pub(crate) dst: *mut u8,
}

// SAFETY: these are plain numbers until one is dereferenced. The code that dereferences it is responsible.
unsafe impl Send for Addresses {}
// SAFETY: these are plain numbers until one is dereferenced. The code that dereferences it is responsible.
unsafe impl Sync for Addresses {}

/// One rank's call in a collective. A call consists of a [`CallKey`], which must be equal on all ranks, and of this
/// rank's buffers.
///
/// On the host, nothing else uses the buffers until [`enqueue`](Collective::enqueue) returns. On a GPU, nothing else
/// uses the buffers until the stream has passed the call. If the buffers are in host memory, [`source`](Self::source),
/// [`target`](Self::target) and [`in_place`](Self::in_place) return them as slices.
///
/// ```
/// use std::time::Duration;
///
/// use instep::collective::{Call, CallKey, Collective, CollectiveKind};
/// use instep::{DType, in_process};
///
/// let sums = in_process(2, |comm| {
///     let (kind, mut values) = (CollectiveKind::AllReduce, [1.0f32, 2.0]);
///     let key = CallKey { kind, pass: 0, bucket: None, dtype: DType::F32, bytes: 8, agreement: 0 };
///     let bytes = bytemuck::cast_slice_mut(&mut values);
///     comm.enqueue(&mut Call::on_host(&comm, key, None, bytes, Duration::from_secs(60))?)?;
///     Ok(values)
/// })?;
/// assert_eq!(sums, [[2.0, 4.0], [2.0, 4.0]]);
/// # Ok::<(), instep::Error>(())
/// ```
pub struct Call<'a> {
    key: CallKey,
    addresses: Addresses,
    src_bytes: u64,
    dst_bytes: u64,
    deadline: Duration,
    stream: Option<StreamHandle>,
    words: Option<&'a Arc<Words>>,
    memory: PhantomData<&'a mut [u8]>,
}

impl<'a> Call<'a> {
    /// Makes a `Call` on raw buffers, in a group of `world_size` ranks. If `stream` is `None`, the buffers are in host
    /// memory.
    ///
    /// # Shapes
    /// Each buffer has `key.bytes` bytes, with two exceptions: `dst` in a reduce-scatter and `src` in an all-gather
    /// have `key.bytes / world_size` bytes. `dst` may be the same address as `src`. In a reduce-scatter, `dst` may be
    /// this rank's part of `src`. In an all-gather, `src` may be this rank's part of `dst`. Otherwise the buffers do
    /// not overlap.
    ///
    /// # Safety
    /// Both buffers are valid for their lengths, initialised, and aligned to the element type. Nothing else accesses
    /// the buffers while the `Call` lives. On a GPU, nothing else accesses the buffers until the stream has passed the
    /// call.
    pub unsafe fn new(
        key: CallKey,
        world_size: u32,
        src: *const u8,
        dst: *mut u8,
        deadline: Duration,
        stream: Option<StreamHandle>,
    ) -> Call<'a> {
        let part = key.bytes / u64::from(world_size.max(1));
        let of = |kind| if key.kind == kind { part } else { key.bytes };
        let [src_bytes, dst_bytes] = [CollectiveKind::AllGather, CollectiveKind::ReduceScatter].map(of);
        let addresses = Addresses { src, dst };
        Call { key, addresses, src_bytes, dst_bytes, deadline, stream, words: None, memory: PhantomData }
    }

    /// Makes a `Call` on host memory, for the ranks of `comm`. The call reads `source` and writes `target`. If `source`
    /// is `None`, the call works in place on `target`.
    ///
    /// # Shapes
    /// `source` and `target` have the lengths of `src` and `dst` in [`new`](Self::new). In a call in place, `target`
    /// has `key.bytes` bytes.
    ///
    /// # Errors
    /// `Layout` if a buffer's length does not match the key, or if a buffer is not aligned to its elements.
    pub fn on_host(
        comm: &(impl Collective + ?Sized),
        key: CallKey,
        source: Option<&'a mut [u8]>,
        target: &'a mut [u8],
        deadline: Duration,
    ) -> Result<Call<'a>> {
        let (ranks, rank, given) =
            (comm.world_size(), comm.rank(), source.as_ref().map(|source| source.len()));
        let (len, whole) = (target.len() as u64, target.as_mut_ptr());
        let src = source.map_or(whole.cast_const(), |source| source.as_mut_ptr().cast_const());
        // SAFETY: both buffers are borrowed mutably for the call's life. The code below checks lengths and alignment
        // before anything dereferences an address.
        let mut call = unsafe { Call::new(key, ranks, src, whole, deadline, None) };
        let (wanted_src, wanted_dst) = match given {
            Some(_) => (call.src_bytes, call.dst_bytes),
            None => (key.bytes, key.bytes),
        };
        let given_bytes = given.map_or(len, |given| given as u64);
        let is_whole = key.bytes.is_multiple_of(call.unit() * call.parts(ranks));
        if (given_bytes, len) != (wanted_src, wanted_dst) || !is_whole {
            let wrong =
                format_args!("{given_bytes} bytes of source and {len} of target in a group of {ranks}");
            return Err(Error::layout(format_args!("[{call}]"), wrong, "give as many as the key says"));
        }
        if rank >= ranks {
            let wrong = format_args!("rank {rank} of {ranks}");
            return Err(Error::layout(format_args!("[{call}]"), wrong, "give ranks numbers from 0"));
        }
        if given.is_none() {
            // The shorter buffer is this rank's part of the longer one.
            let at = |bytes: u64| if bytes < key.bytes { rank as usize * bytes as usize } else { 0 };
            let [src, dst] = [at(call.src_bytes), at(call.dst_bytes)].map(|at| whole.wrapping_add(at));
            call.addresses = Addresses { src, dst };
        }
        let element = key.dtype.bytes() as usize;
        if !(call.src().addr().is_multiple_of(element) && call.dst().addr().is_multiple_of(element)) {
            let wrong = format_args!("not aligned to {element} bytes");
            return Err(Error::layout(format_args!("buffers of [{call}]"), wrong, "align them"));
        }
        Ok(call)
    }

    /// Adds the text that describes this rank's [agreement](CallKey::agreement). If ranks differ, the error message may
    /// quote a part of this text.
    pub(crate) fn with_words(self, words: &'a Arc<Words>) -> Call<'a> {
        Call { words: Some(words), ..self }
    }

    pub(crate) fn words(&self) -> Option<&'a Arc<Words>> {
        self.words
    }

    /// Returns the key, which must be equal on all ranks.
    pub fn key(&self) -> CallKey {
        self.key
    }

    /// Returns the address of the source. In a stepper's calls, the address is aligned to 64 bytes, with two exceptions
    /// that are aligned only to the element type: borrowed memory, and the elements that count how many ranks used a
    /// parameter. In calls that [`on_host`](Self::on_host) makes, the address may be aligned only to the element type.
    pub fn src(&self) -> *const u8 {
        self.addresses.src
    }

    /// Returns the address of the destination.
    pub fn dst(&self) -> *mut u8 {
        self.addresses.dst
    }

    pub(crate) fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// Returns the length of the source.
    pub fn src_bytes(&self) -> u64 {
        self.src_bytes
    }

    /// Returns the length of the destination.
    pub fn dst_bytes(&self) -> u64 {
        self.dst_bytes
    }

    /// Returns how long this rank may wait for the other ranks.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Returns the stream to enqueue on, or `None` if the buffers are in host memory and no GPU takes part. With
    /// [offload](crate::StepperBuilder::offload) on a GPU, calls of `Sum64`, `Max32` and `Min32` have a stream,
    /// although their buffers are in page-locked host memory. The GPU accesses this memory at the same addresses.
    pub fn stream(&self) -> Option<StreamHandle> {
        self.stream
    }

    /// Returns the [`stream`](Self::stream), or an error if the call has no stream.
    ///
    /// # Errors
    /// `Unsupported` if there is no stream, because the buffers are in host memory.
    pub fn require_stream(&self) -> Result<StreamHandle> {
        let remedy = "use a collective that reaches the host";
        self.stream.ok_or_else(|| {
            Error::unsupported(format_args!("[{self}]"), "its buffers are on the host", remedy)
        })
    }

    /// Returns an error if the buffers are not in host memory, or if their lengths do not fit `world_size` ranks.
    ///
    /// # Errors
    /// `Unsupported` for a GPU's memory, `Layout` for wrong lengths.
    pub(crate) fn require_host(&self, world_size: u32) -> Result<()> {
        if self.stream.is_some() {
            let remedy = "use a collective that reaches the GPU";
            return Err(Error::unsupported(format_args!("[{self}]"), "its buffers are on a GPU", remedy));
        }
        if self.src_bytes.min(self.dst_bytes) * self.parts(world_size) != self.key.bytes {
            let wrong = format_args!("its parts are not those of {world_size} ranks");
            return Err(Error::layout(format_args!("[{self}]"), wrong, "report the number of ranks inside"));
        }
        Ok(())
    }

    /// Returns the bytes of the source.
    ///
    /// # Errors
    /// `Unsupported` if the source is in a GPU's memory.
    pub fn source(&self) -> Result<&[u8]> {
        let len = self.host_len(self.src_bytes)?;
        // SAFETY: the maker of the call has promised host memory of this length. A mutable slice of this memory borrows
        // the call mutably.
        Ok(unsafe { slice::from_raw_parts(self.addresses.src, len) })
    }

    /// Returns the bytes of the destination. In a call in place, the destination first contains the bytes of the
    /// source.
    ///
    /// # Errors
    /// `Unsupported` if the destination is in a GPU's memory.
    pub fn target(&mut self) -> Result<&mut [u8]> {
        let len = self.host_len(self.dst_bytes)?;
        // SAFETY: the maker of the call has promised host memory of this length. `&mut self` excludes other slices of
        // it.
        Ok(unsafe { slice::from_raw_parts_mut(self.addresses.dst, len) })
    }

    /// Returns the destination, after copying the source to it. If the source and the destination are the same buffer,
    /// nothing is copied.
    ///
    /// # Errors
    /// Errors as for [`target`](Self::target). `Unsupported` if the buffers differ in length, as in a reduce-scatter or
    /// an all-gather.
    pub fn in_place(&mut self) -> Result<&mut [u8]> {
        if self.src_bytes != self.dst_bytes {
            return Err(self.unknown_kind());
        }
        let (len, Addresses { src, dst }) = (self.host_len(self.src_bytes)?, self.addresses);
        if !ptr::eq(src, dst) {
            // SAFETY: the maker of the call has promised two buffers of host memory of this length. `&mut self`
            // excludes slices of them.
            unsafe { src.copy_to(dst, len) };
        }
        self.target()
    }

    fn host_len(&self, bytes: u64) -> Result<usize> {
        if self.stream.is_some() {
            let remedy = "pass the addresses to the GPU's library";
            return Err(Error::unsupported(
                format_args!("slice of [{self}]"),
                "it is a GPU's memory",
                remedy,
            ));
        }
        // The memory exists, so its length fits in a `usize`.
        Ok(bytes as usize)
    }

    /// Returns the size in bytes of each value that the collective combines.
    fn unit(&self) -> u64 {
        match self.key.kind {
            CollectiveKind::Sum64 => 8,
            CollectiveKind::Max32 | CollectiveKind::Min32 => 4,
            _ => self.key.dtype.bytes(),
        }
    }

    /// Returns the number of equal parts in the longer buffer. A reduce-scatter and an all-gather have one part per
    /// rank, and other collectives have one part.
    fn parts(&self, world_size: u32) -> u64 {
        let is_sharded = matches!(self.key.kind, CollectiveKind::ReduceScatter | CollectiveKind::AllGather);
        if is_sharded { world_size.into() } else { 1 }
    }

    /// Returns the error for a collective that does not support this [kind](Collective::supports) of call.
    pub fn unknown_kind(&self) -> Error {
        refused_kind(self.key.kind)
    }
}

impl Deref for Call<'_> {
    type Target = CallKey;

    fn deref(&self) -> &CallKey {
        &self.key
    }
}

impl fmt::Display for Call<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.key.fmt(f)
    }
}

impl fmt::Debug for Call<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Call { key, addresses, deadline, stream, .. } = self;
        let mut shown = f.debug_struct("Call");
        shown.field("key", key).field("addresses", addresses).field("deadline", deadline);
        shown.field("stream", stream).finish()
    }
}

/// The kind of data that a stepper stores in memory [allocated](crate::Collective::allocate) by its communicator.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// Gradients. All-reduces and reduce-scatters sum them.
    Gradients,
    /// Parameters. Broadcasts and all-gathers send them. The all-gathers are calls on a
    /// [duplicate](crate::Collective::duplicate) of the communicator that allocated the memory.
    Parameters,
}

/// Memory that a communicator has allocated for the buffers of its calls. The communicator's calls are faster on this
/// memory than on other memory.
pub struct Allocation {
    pub(crate) address: *mut u8,
    _owner: Box<dyn Any + Send + Sync>,
}

impl Allocation {
    /// Wraps the memory that starts at `address`. The address is aligned to 256 bytes, and the contents may be
    /// arbitrary. Dropping `owner` frees the memory.
    ///
    /// # Safety
    /// The memory has the requested number of bytes and is on a device that the communicator reaches. It is valid until
    /// `owner` is dropped. Until then, only the stepper and its trainer access the memory.
    pub unsafe fn new(address: *mut u8, owner: Box<dyn Any + Send + Sync>) -> Allocation {
        Allocation { address, _owner: owner }
    }

    /// Returns the address of the first byte.
    pub fn address(&self) -> *mut u8 {
        self.address
    }
}

// SAFETY: the address is a number until it is dereferenced, and the owner may be sent. Steppers are responsible for
// dereferencing the address.
unsafe impl Send for Allocation {}
// SAFETY: the address is a number until it is dereferenced, and the owner may be shared. Steppers are responsible for
// dereferencing the address.
unsafe impl Sync for Allocation {}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Allocation").field("address", &self.address).finish_non_exhaustive()
    }
}
