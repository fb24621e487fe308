//! Memory and copies as calls see them: which side is pageable, what is staged, and what the call waits for.
//!
//! It decides nothing else about order; `streams.rs` does.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use crate::codes::Answer;
use crate::gpu::Gpu;
use crate::header::cudaError_enum as Code;
use crate::heap::Kind;
use crate::judge::Judge;
use crate::queue::{Mark, Operation};
use crate::report;
use crate::shadow::Touch;
use crate::work::{Side, Work};

impl Gpu {
    pub(crate) fn allocate(&mut self, bytes: usize, kind: Kind, made_by: &'static str) -> Answer<u64> {
        if bytes == 0 {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        }
        if kind != Kind::Pinned && self.heap.in_use.saturating_add(bytes as u64) > self.settings.memory {
            return Err(Code::CUDA_ERROR_OUT_OF_MEMORY);
        }
        self.heap.allocate(bytes as u64, kind, made_by).ok_or(Code::CUDA_ERROR_OUT_OF_MEMORY)
    }

    /// Ends the program if no live memory begins here.
    pub(crate) fn require_start(&mut self, address: u64, call: &str) -> Answer<()> {
        if self.heap.starting_at(address).is_none() {
            report::fault("double free", &format!("{call} of {address:#x}, where no living memory begins"));
        }
        Ok(())
    }

    /// Frees memory. The host's waits so far must show that no work uses it any more.
    pub(crate) fn free_now(&mut self, address: u64, call: &str) -> Answer<()> {
        self.require_start(address, call)?;
        let touch = Touch { lane: usize::MAX, position: 0, name: format!("{call} (host)").into() };
        let clock = self.queue.host.clone();
        let operation = Operation { touch, clock, after: Vec::new(), work: Work::Marker };
        let context = match self.heap.around(address).map(|memory| memory.kind) {
            Some(Kind::Device { context }) => context,
            _ => 0,
        };
        Judge { heap: &mut self.heap, operation: &operation, context, claim: None }
            .own(address, "freed in use");
        let bytes = self.heap.around(address).map_or(0, |memory| memory.bytes);
        self.pools.free(address, bytes);
        self.heap.free(address, call.to_owned());
        Ok(())
    }

    /// Returns memory of this driver as a side of a copy.
    pub(crate) fn known(&self, address: u64) -> Side {
        Side::Known(address)
    }

    /// Returns memory of the host that a copy reads: pinned memory later, pageable memory now.
    ///
    /// # Safety
    /// `bytes` bytes may be read at the address.
    pub(crate) unsafe fn read_host(&self, address: *const c_void, bytes: usize) -> Side {
        let number = address.expose_provenance() as u64;
        if self.heap.around(number).is_some() {
            return Side::Known(number);
        }
        // SAFETY: by the contract.
        Side::Staged(Arc::from(unsafe { std::slice::from_raw_parts(address.cast::<u8>(), bytes) }))
    }

    /// Returns memory of the host that a copy writes.
    pub(crate) fn written_host(&self, address: *mut c_void) -> Side {
        let number = address.expose_provenance();
        match self.heap.around(number as u64) {
            Some(_) => Side::Known(number as u64),
            None => Side::Pageable(number),
        }
    }

    /// Enqueues a copy, and returns what the call has to wait for.
    pub(crate) fn copy(
        &mut self,
        stream: usize,
        what: &str,
        to: Side,
        from: Side,
        bytes: usize,
        waits: bool,
    ) -> Answer<Vec<Mark>> {
        let stream = self.stream(stream)?;
        if bytes == 0 {
            return Ok(Vec::new());
        }
        let waits = waits || matches!(to, Side::Pageable(_));
        if waits && self.streams.get(stream)?.capture.is_some() {
            self.forbid_in_capture(stream)?;
        }
        let mark = self.enqueue(stream, what, Work::Copy { to, from, bytes: bytes as u64 }, &[])?;
        Ok(mark.into_iter().filter(|_| waits).collect())
    }

    /// Enqueues a fill with a pattern, repeated `count` times.
    pub(crate) fn fill(&mut self, stream: usize, to: u64, pattern: &[u8], count: usize) -> Answer<()> {
        let stream = self.stream(stream)?;
        if count == 0 || !to.is_multiple_of(pattern.len() as u64) {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        }
        let bytes = (count * pattern.len()) as u64;
        self.enqueue(stream, "fill", Work::Fill { to, pattern: pattern.to_vec(), bytes }, &[]).map(drop)
    }
}
