//! Collectives with one deliberate fault each, around ranks of this process.
//!
//! All faults stay inside the buffers that the conformance suite guards, so the tests themselves stay sound. The
//! buffers belong to the calls, so a fault that passes them on under another key needs `unsafe`.

use std::sync::Arc;
use std::time::Duration;

use instep::collective::{Call, CallKey, CollectiveKind};
use instep::{Collective, DType, Error, InProcess, Result};

/// The fault of a collective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    Mean,
    /// Each rank adds its own value first.
    OwnOrder,
    IgnoresPassAndAgreement,
    /// A broadcast loses the payload of each NaN.
    OneNan,
    /// Buffers above 1 MiB are not ready when the call returns.
    ReturnsEarly,
    NoDeadline,
    SilentAbort,
    WritesToTheSource,
    WritesPastTheEnd,
    /// A reduce-scatter returns this rank's own values.
    OwnPart,
    PartsInReverse,
    /// Sums lose what 32 bits cannot hold.
    NarrowNumbers,
    /// It says that it does not know a kind of call, but makes that call.
    TakesUnknown,
    /// The second communicator is the first one.
    OneOrder,
    GroupOfAll,
    /// Of several calls together, it makes all but the last.
    LeavesOutTheLast,
}

pub(crate) struct Broken {
    inner: Arc<InProcess>,
    fault: Fault,
}

impl Broken {
    pub(crate) fn new(inner: InProcess, fault: Fault) -> Broken {
        Broken { inner: Arc::new(inner), fault }
    }

    fn sum_from_own_rank(&self, call: &mut Call<'_>) -> Result<()> {
        let (own, ranks) = (self.inner.rank() as usize, self.inner.world_size() as usize);
        let len = (call.bytes / 4) as usize;
        // Everyone's values side by side: the others' places are zero here.
        let mut all = vec![0.0f32; len * ranks];
        bytemuck::cast_slice_mut(&mut all[own * len..][..len]).copy_from_slice(call.source()?);
        self.pass_on(call, bytemuck::cast_slice_mut(&mut all), call.key())?;
        let sums = (0..len).map(|at| (0..ranks).map(|k| all[(own + k) % ranks * len + at]).sum::<f32>());
        let sums: Vec<f32> = sums.collect();
        call.target()?.copy_from_slice(bytemuck::cast_slice(&sums));
        Ok(())
    }

    /// Passes on a call of other memory, in place, under another key.
    fn pass_on(&self, call: &Call<'_>, buffer: &mut [u8], key: CallKey) -> Result<()> {
        let key = CallKey { bytes: buffer.len() as u64, ..key };
        self.inner.enqueue(&mut Call::on_host(&*self.inner, key, None, buffer, call.deadline())?)
    }
}

/// Changes each f32 of a buffer.
fn change(buffer: &mut [u8], change: impl Fn(f32) -> f32) {
    bytemuck::cast_slice_mut(buffer).iter_mut().for_each(|x| *x = change(*x));
}

impl Collective for Broken {
    fn rank(&self) -> u32 {
        self.inner.rank()
    }

    fn world_size(&self) -> u32 {
        self.inner.world_size()
    }

    fn supports(&self, _: CollectiveKind) -> bool {
        self.fault != Fault::TakesUnknown
    }

    fn duplicate(&self) -> Result<Arc<dyn Collective>> {
        match self.fault {
            Fault::OneOrder => Ok(Arc::new(Broken { inner: Arc::clone(&self.inner), fault: self.fault })),
            _ => self.inner.duplicate(),
        }
    }

    fn subgroup(&self, ranks: &[u32]) -> Result<Arc<dyn Collective>> {
        match self.fault {
            Fault::GroupOfAll => self.inner.duplicate(),
            _ => self.inner.subgroup(ranks),
        }
    }

    fn enqueue_all<'a>(&self, calls: &mut dyn Iterator<Item = Call<'a>>) -> Result<()> {
        let mut calls = calls.peekable();
        while let Some(mut call) = calls.next() {
            if self.fault != Fault::LeavesOutTheLast || calls.peek().is_some() {
                self.enqueue(&mut call)?;
            }
        }
        Ok(())
    }

    fn enqueue(&self, call: &mut Call<'_>) -> Result<()> {
        let sums = call.kind == CollectiveKind::AllReduce;
        let is_f32 = call.dtype == DType::F32;
        match self.fault {
            Fault::Mean => {
                self.inner.enqueue(call)?;
                if sums {
                    let ranks = self.inner.world_size() as f32;
                    change(call.target()?, |x| x / ranks);
                }
            }
            Fault::OwnOrder if sums => self.sum_from_own_rank(call)?,
            Fault::IgnoresPassAndAgreement => {
                let key = CallKey { pass: 0, agreement: 0, ..call.key() };
                let (src, dst, ranks) = (call.src(), call.dst(), self.inner.world_size());
                // SAFETY: the call's own memory, which `call` keeps.
                let mut other = unsafe { Call::new(key, ranks, src, dst, call.deadline(), None) };
                self.inner.enqueue(&mut other)?;
            }
            Fault::OneNan => {
                self.inner.enqueue(call)?;
                if call.kind == CollectiveKind::Broadcast && is_f32 {
                    change(call.target()?, |x| if x.is_nan() { f32::NAN } else { x });
                }
            }
            Fault::ReturnsEarly if sums && call.bytes > 1 << 20 => {
                let mut copy = vec![0.0f32; (call.bytes / 4) as usize];
                bytemuck::cast_slice_mut(&mut copy).copy_from_slice(call.source()?);
                self.pass_on(call, bytemuck::cast_slice_mut(&mut copy), call.key())?;
            }
            Fault::NoDeadline => {
                let (key, hour) = (call.key(), Duration::from_secs(3600));
                let (src, dst, ranks) = (call.src(), call.dst(), self.inner.world_size());
                // SAFETY: the call's own memory, which `call` keeps.
                let mut other = unsafe { Call::new(key, ranks, src, dst, hour, None) };
                self.inner.enqueue(&mut other)?;
            }
            Fault::WritesToTheSource => {
                self.inner.enqueue(call)?;
                let bytes = call.src_bytes().min(call.dst_bytes());
                // SAFETY: the suite's own buffers, which it gives mutably.
                unsafe { call.dst().copy_to(call.src().cast_mut(), bytes as usize) };
            }
            Fault::WritesPastTheEnd => {
                self.inner.enqueue(call)?;
                // SAFETY: the suite's own buffers have 64 bytes of margin.
                unsafe { call.dst().add(call.dst_bytes() as usize).write(1) };
            }
            Fault::OwnPart if call.kind == CollectiveKind::ReduceScatter => {
                let bytes = call.dst_bytes() as usize;
                let own = call.source()?[self.rank() as usize * bytes..][..bytes].to_vec();
                self.inner.enqueue(call)?;
                call.target()?.copy_from_slice(&own);
            }
            Fault::PartsInReverse if call.kind == CollectiveKind::AllGather => {
                self.inner.enqueue(call)?;
                let part = call.src_bytes() as usize;
                let all = call.target()?;
                let reversed: Vec<u8> = all.chunks(part.max(1)).rev().flatten().copied().collect();
                all.copy_from_slice(&reversed);
            }
            Fault::NarrowNumbers if call.kind == CollectiveKind::Sum64 => {
                self.inner.enqueue(call)?;
                call.target()?.chunks_mut(8).for_each(|word| word[4..].fill(0));
            }
            _ => self.inner.enqueue(call)?,
        }
        Ok(())
    }

    fn abort(&self, cause: &Error) {
        if self.fault != Fault::SilentAbort {
            self.inner.abort(cause);
        }
    }
}
