//! Collectives that are broken on purpose, each in one way, around ranks of this process.
//!
//! All faults stay inside the buffers that the conformance suite guards, so the tests themselves stay sound.

use std::sync::Arc;
use std::time::Duration;

use instep::collective::{Call, CollectiveKind};
use instep::{Collective, DType, Error, InProcess, Result};

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    Mean,
    /// Each rank adds its own value first.
    OwnOrder,
    IgnoresPassAndAgreement,
    /// A broadcast loses the payload of each NaN.
    OneNan,
    /// Buffers above 1 MiB are not there yet when the call returns.
    ReturnsEarly,
    NoDeadline,
    SilentAbort,
    WritesToTheSource,
    WritesPastTheEnd,
    /// A reduce-scatter leaves this rank's own values.
    OwnPart,
    PartsInReverse,
    /// Sums lose what 32 bits cannot hold.
    NarrowNumbers,
    /// Says that it knows no parts, and carries them out all the same.
    TakesUnknown,
    /// The second communicator is the first one.
    OneOrder,
}

pub(crate) struct Broken {
    inner: Arc<InProcess>,
    fault: Fault,
}

impl Broken {
    pub(crate) fn new(inner: InProcess, fault: Fault) -> Broken {
        Broken { inner: Arc::new(inner), fault }
    }

    /// # Safety
    /// As for `Collective::enqueue`.
    unsafe fn sum_from_own_rank(&self, call: &Call) -> Result<()> {
        let (own, ranks) = (self.inner.rank() as usize, self.inner.world_size() as usize);
        let len = (call.bytes / 4) as usize;
        // Everyone's values side by side: the others' places are zero here.
        let mut all = vec![0.0f32; len * ranks];
        // SAFETY: the source is valid for `bytes`, by the contract; it may be aligned to any element.
        unsafe { call.src.copy_to(all[own * len..].as_mut_ptr().cast(), call.bytes as usize) };
        let address = all.as_mut_ptr().cast::<u8>();
        let gather = Call { src: address, dst: address, bytes: call.bytes * ranks as u64, ..*call };
        // SAFETY: `all` has that many bytes and lives until the call returns.
        unsafe { self.inner.enqueue(&gather) }?;
        let sums = (0..len).map(|at| (0..ranks).map(|k| all[(own + k) % ranks * len + at]).sum::<f32>());
        let sums: Vec<f32> = sums.collect();
        // SAFETY: the destination is valid for `bytes`, by the contract.
        unsafe { sums.as_ptr().cast::<u8>().copy_to(call.dst, call.bytes as usize) };
        Ok(())
    }
}

/// Changes each f32 of a buffer.
///
/// # Safety
/// It is aligned, valid for `bytes`, and nothing else touches it.
unsafe fn change(buffer: *mut u8, bytes: u64, change: impl Fn(f32) -> f32) {
    // SAFETY: by the contract.
    let values = unsafe { std::slice::from_raw_parts_mut(buffer.cast::<f32>(), (bytes / 4) as usize) };
    values.iter_mut().for_each(|x| *x = change(*x));
}

impl Collective for Broken {
    fn rank(&self) -> u32 {
        self.inner.rank()
    }

    fn world_size(&self) -> u32 {
        self.inner.world_size()
    }

    fn knows(&self, _: CollectiveKind) -> bool {
        self.fault != Fault::TakesUnknown
    }

    fn duplicate(&self) -> Result<Arc<dyn Collective>> {
        match self.fault {
            Fault::OneOrder => Ok(Arc::new(Broken { inner: Arc::clone(&self.inner), fault: self.fault })),
            _ => self.inner.duplicate(),
        }
    }

    unsafe fn enqueue(&self, call: &Call) -> Result<()> {
        let sums = call.kind == CollectiveKind::AllReduce;
        let is_f32 = call.dtype == DType::F32;
        // SAFETY: every branch passes the caller's promise on, or uses the buffers within it; the suite's own buffers
        // have 64 bytes of margin.
        unsafe {
            match self.fault {
                Fault::Mean => {
                    self.inner.enqueue(call)?;
                    if sums {
                        let ranks = self.inner.world_size() as f32;
                        change(call.dst, call.bytes, |x| x / ranks);
                    }
                }
                Fault::OwnOrder if sums => self.sum_from_own_rank(call)?,
                Fault::IgnoresPassAndAgreement => {
                    self.inner.enqueue(&Call { pass: 0, agreement: 0, ..*call })?;
                }
                Fault::OneNan => {
                    self.inner.enqueue(call)?;
                    if call.kind == CollectiveKind::Broadcast && is_f32 {
                        change(call.dst, call.bytes, |x| if x.is_nan() { f32::NAN } else { x });
                    }
                }
                Fault::ReturnsEarly if call.bytes > 1 << 20 => {
                    let mut copy = std::slice::from_raw_parts(call.src, call.bytes as usize).to_vec();
                    let address = copy.as_mut_ptr();
                    self.inner.enqueue(&Call { src: address, dst: address, ..*call })?;
                }
                Fault::NoDeadline => {
                    self.inner.enqueue(&Call { deadline: Duration::from_secs(3600), ..*call })?;
                }
                Fault::WritesToTheSource => {
                    self.inner.enqueue(call)?;
                    let ranks = self.world_size();
                    let bytes = call.src_bytes(ranks).min(call.dst_bytes(ranks));
                    call.dst.copy_to(call.src.cast_mut(), bytes as usize);
                }
                Fault::WritesPastTheEnd => {
                    self.inner.enqueue(call)?;
                    call.dst.add(call.dst_bytes(self.world_size()) as usize).write(1);
                }
                Fault::OwnPart if call.kind == CollectiveKind::ReduceScatter => {
                    let bytes = call.dst_bytes(self.world_size()) as usize;
                    let own = call.src.add(self.rank() as usize * bytes);
                    let own = std::slice::from_raw_parts(own, bytes).to_vec();
                    self.inner.enqueue(call)?;
                    own.as_ptr().copy_to(call.dst, bytes);
                }
                Fault::PartsInReverse if call.kind == CollectiveKind::AllGather => {
                    self.inner.enqueue(call)?;
                    let part = call.src_bytes(self.world_size()) as usize;
                    let all = std::slice::from_raw_parts_mut(call.dst, call.bytes as usize);
                    let reversed: Vec<u8> = all.chunks(part.max(1)).rev().flatten().copied().collect();
                    all.copy_from_slice(&reversed);
                }
                Fault::NarrowNumbers if call.kind == CollectiveKind::Sum64 => {
                    self.inner.enqueue(call)?;
                    let words = std::slice::from_raw_parts_mut(call.dst, call.bytes as usize);
                    words.chunks_mut(8).for_each(|word| word[4..].fill(0));
                }
                _ => self.inner.enqueue(call)?,
            }
        }
        Ok(())
    }

    fn abort(&self, cause: &Error) {
        if self.fault != Fault::SilentAbort {
            self.inner.abort(cause);
        }
    }
}
