//! The norm of the gradients of several buckets, and the decision that follows from it.
//!
//! The sum of squares is exact, so neither the order of the buckets nor their number changes a bit of it.
#![allow(unsafe_code)]

use std::mem::offset_of;

use super::marks::{BucketMark, NormMarks};
use super::scaling::Scaling;
use crate::abi::{INSTEP_NORM_LIMBS, InstepControl};
use crate::cuda::{Cuda, NormBlock};
use crate::error::{Error, Result};
use crate::handle::{DevicePtr, StreamHandle};
use crate::host::Isa;
use crate::host::kernels::Kernels;
use crate::host::memories::Memories;
use crate::launch::{Counts, StepConstants, begin_block, decide_block, first_control};

/// Norm and decision over the gradients of any number of buckets.
///
/// Between two beginnings, each bucket is added once, then the norm is decided, then each bucket is stepped once; another
/// order is refused by the bucket's name. A bucket without a gradient, all of whose parameters are frozen or lack theirs, adds
/// nothing to the norm and still counts as added. Ranks that hold shards take the [`sum`](GradNorm::sum) before they decide.
/// A norm whose sum was taken may be decided without a bucket, as on a rank that holds none, and steps buckets that were
/// added to another norm, since what is in the sum is the caller's to know.
///
/// ```
/// use instep::bucket_step::{Lent, StepTensors};
/// use instep::{BucketStep, GradNorm, Layout, Scaling, Sgd};
///
/// let layout = Layout::builder().param("weight", 2).build()?;
/// let mut step = BucketStep::builder(&layout, Sgd { lr: 1.0, ..Default::default() }).host()?;
/// let (mut params, grads) = ([0.0f32; 2], [6.0f32, 8.0]);
///
/// let mut norm = GradNorm::host()?;
/// norm.begin(Scaling::mean(2))?;
/// step.add_norm(&Lent::slice(&grads), &mut norm)?; // once per bucket, in any order
/// let decision = norm.decide(Some(2.5), true)?;
/// step.step_decided(&StepTensors::new(Lent::slice_mut(&mut params), Lent::slice(&grads)), &mut norm)?;
/// assert_eq!(decision.norm, 5.0); // of the mean
/// assert!((params[0] + 1.5).abs() < 1e-5 && (params[1] + 2.0).abs() < 1e-5); // clipped to 2.5
/// # Ok::<(), instep::Error>(())
/// ```
///
/// # Source
/// `torch.nn.utils.clip_grad_norm_`.
pub struct GradNorm<B = NormOnHost> {
    block: B,
    phase: Phase,
    marks: NormMarks,
}

/// The CPU's half of a [`GradNorm`].
pub struct NormOnHost {
    memories: Memories,
    kernels: Kernels,
}

/// A GPU's half of a [`GradNorm`].
pub struct NormOnGpu(NormBlock);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    New,
    Begun,
    Decided,
}

/// The exact sum of squares of the gradients that were added, before the factors of [`Scaling`].
///
/// It has no order: ranks that hold shards of the gradients add their limbs up, wrapping, take the largest of `largest`,
/// and all decide alike.
#[derive(Debug)]
pub struct NormSum<'a> {
    /// The digits of the sum in base 2^32, each with room for carries.
    pub limbs: &'a mut [u64; NORM_LIMBS],
    /// The largest magnitude, as the bits of an f32. They order as the magnitudes do, and NaN's are above infinity's.
    pub largest: &'a mut u32,
}

/// The addresses of a [`NormSum`] on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct NormSumOnGpu {
    /// [`NORM_LIMBS`] numbers of 64 bits.
    pub limbs: DevicePtr,
    /// One number of 32 bits.
    pub largest: DevicePtr,
}

/// Number of limbs of a [`NormSum`].
pub const NORM_LIMBS: usize = INSTEP_NORM_LIMBS as usize;

/// The outcome of a norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// The norm of all averaged gradients; infinite or NaN if one of them is.
    pub norm: f64,
    /// The factor that clips them; 1 if nothing is clipped or everything is skipped.
    pub clip: f64,
    /// Whether no gradient is infinite or NaN.
    pub is_finite: bool,
    /// Whether steps after this decision change nothing.
    pub skipped: bool,
}

impl Decision {
    fn of(control: &InstepControl) -> Decision {
        let (norm, clip, skipped) = (control.norm, control.clip, control.skip != 0);
        Decision { norm, clip, is_finite: norm.is_finite(), skipped }
    }
}

impl GradNorm {
    /// Makes a norm on the CPU.
    ///
    /// # Errors
    /// Errors as for [`BucketStepBuilder::host`](super::BucketStepBuilder::host), of the instruction set.
    pub fn host() -> Result<GradNorm> {
        let kernels = Kernels::load(Isa::from_environment()?)?;
        let memories = Memories::without_tensors(Counts::default())?;
        // SAFETY: nothing runs on this memory yet.
        unsafe { memories.write_control(first_control(&StepConstants::PLAIN), std::iter::empty()) };
        Ok(GradNorm::of(NormOnHost { memories, kernels }))
    }

    /// Begins anew, with the factors that all these gradients have.
    ///
    /// # Errors
    /// `Config` for factors that cannot be divided out, or a clip.
    pub fn begin(&mut self, scaling: Scaling) -> Result<()> {
        scaling.validate()?;
        scaling.refuse_clip()?;
        let mut args = begin_block(self.control());
        scaling.put(&mut args);
        // SAFETY: one control block of our own and no records; `Scaling`'s addresses are valid by its own contract.
        unsafe { self.block.kernels.begin(&args) };
        self.mark_begun();
        Ok(())
    }

    /// Decides: clips by `max_norm` if there is one, and skips the steps if a gradient is infinite or NaN and
    /// `skip_nonfinite` says so. A finite gradient that overflows when the loss scale is divided out skips them too, and so
    /// does another program's flag ([`Scaling::grad_scaler`]), also if `skip_nonfinite` is false.
    ///
    /// # Errors
    /// `Config` if `max_norm` is not a finite number above 0; `Order` without [`begin`](Self::begin), or if no bucket was added
    /// and the [`sum`](Self::sum) was not taken.
    pub fn decide(&mut self, max_norm: Option<f64>, skip_nonfinite: bool) -> Result<Decision> {
        refuse_max_norm(max_norm)?;
        self.refuse_decided()?;
        self.marks.refuse_empty()?;
        // SAFETY: one control block of our own, on which nothing runs while it is borrowed mutably.
        let control = unsafe {
            self.block.kernels.decide(&decide_block(self.control(), max_norm, skip_nonfinite));
            self.block.memories.read_control()
        };
        self.phase = Phase::Decided;
        Ok(Decision::of(&control))
    }

    /// Returns the sum so far, for ranks that hold other shards of the gradients to be added to. A rank that holds none takes
    /// it too.
    ///
    /// # Errors
    /// `Order` without [`begin`](Self::begin).
    pub fn sum(&mut self) -> Result<NormSum<'_>> {
        self.refuse_decided()?;
        self.marks.take_sum();
        // SAFETY: nothing runs on the block while it is borrowed mutably, as the fields of the sum do it.
        let control = unsafe { &mut *self.control() };
        Ok(NormSum { limbs: &mut control.limbs, largest: &mut control.max_abs_bits })
    }

    /// Returns the decision once more.
    ///
    /// # Errors
    /// `Order` if it has not been decided.
    pub fn decision(&mut self) -> Result<Decision> {
        self.refuse_undecided()?;
        // SAFETY: nothing runs on the block, since it is borrowed mutably.
        Ok(Decision::of(&unsafe { self.block.memories.read_control() }))
    }

    /// Returns the block that steps after this norm read.
    pub(super) fn control(&self) -> *mut InstepControl {
        self.block.memories.regions().control()
    }
}

impl GradNorm<NormOnGpu> {
    /// Makes a norm on a GPU, for buckets of the same.
    ///
    /// # Errors
    /// `KernelsNotBuilt`; `Device` if the driver refuses anything.
    pub fn cuda(cuda: &Cuda) -> Result<GradNorm<NormOnGpu>> {
        Ok(GradNorm::of(NormOnGpu(NormBlock::new(cuda)?)))
    }

    /// Enqueues the beginning, with the factors that all these gradients have.
    ///
    /// # Ordering
    /// On the stream, after the norm's last call on any stream, as every call of this type.
    ///
    /// # Errors
    /// `Config` for factors that cannot be divided out, or a clip; `Device` if a launch fails, and `Poisoned` ever after.
    ///
    /// # Safety
    /// The stream is this GPU's, alive until it has passed the call, and not being captured.
    pub unsafe fn enqueue_begin(&mut self, scaling: Scaling, stream: StreamHandle) -> Result<()> {
        scaling.validate()?;
        scaling.refuse_clip()?;
        // SAFETY: the caller's promise.
        unsafe { self.block.0.begin(|args| scaling.put(args), stream)? };
        self.mark_begun();
        Ok(())
    }

    /// Enqueues the decision, as [`decide`](GradNorm::decide) makes it.
    ///
    /// # Errors
    /// Errors as for [`decide`](GradNorm::decide) and [`enqueue_begin`](Self::enqueue_begin).
    ///
    /// # Safety
    /// As for [`enqueue_begin`](Self::enqueue_begin).
    pub unsafe fn enqueue_decide(
        &mut self,
        max_norm: Option<f64>,
        skip_nonfinite: bool,
        stream: StreamHandle,
    ) -> Result<()> {
        refuse_max_norm(max_norm)?;
        self.refuse_decided()?;
        self.marks.refuse_empty()?;
        // SAFETY: the caller's promise.
        unsafe { self.block.0.decide(max_norm, skip_nonfinite, stream)? };
        self.phase = Phase::Decided;
        Ok(())
    }

    /// Returns the addresses of the sum so far, which the caller's own work on the stream may change, as it may a
    /// [`NormSum`].
    ///
    /// # Ordering
    /// The stream waits for the norm's last call. The decision comes after the work if it is enqueued on the same stream.
    ///
    /// # Errors
    /// `Order` without [`enqueue_begin`](Self::enqueue_begin); `Device` if the driver refuses to wait.
    ///
    /// # Safety
    /// As for [`enqueue_begin`](Self::enqueue_begin).
    pub unsafe fn enqueue_sum(&mut self, stream: StreamHandle) -> Result<NormSumOnGpu> {
        self.refuse_decided()?;
        self.marks.take_sum();
        let at = |base: DevicePtr, offset: usize| DevicePtr(base.0 + offset as u64);
        self.block.0.during(stream, |base| {
            Ok(NormSumOnGpu {
                limbs: at(base, offset_of!(InstepControl, limbs)),
                largest: at(base, offset_of!(InstepControl, max_abs_bits)),
            })
        })
    }

    /// Returns the decision.
    ///
    /// # Ordering
    /// Waits for the norm's last call.
    ///
    /// # Errors
    /// `Order` if it has not been decided; `Device` if the copy fails.
    pub fn decision(&mut self) -> Result<Decision> {
        self.refuse_undecided()?;
        Ok(Decision::of(&self.block.0.read()?))
    }

    pub(super) fn block(&mut self) -> &mut NormBlock {
        &mut self.block.0
    }
}

fn refuse_max_norm(max_norm: Option<f64>) -> Result<()> {
    match max_norm.filter(|max_norm| !(*max_norm > 0.0 && max_norm.is_finite())) {
        None => Ok(()),
        Some(max_norm) => Err(Error::range("max_norm", max_norm, "a finite number above 0")),
    }
}

impl<B> GradNorm<B> {
    fn of(block: B) -> GradNorm<B> {
        GradNorm { block, phase: Phase::New, marks: NormMarks::default() }
    }

    fn mark_begun(&mut self) {
        self.phase = Phase::Begun;
        self.marks.begin();
    }

    /// Refuses a bucket's gradients before they are added.
    pub(super) fn refuse_add(&self, bucket: &BucketMark, name: impl FnOnce() -> String) -> Result<()> {
        self.refuse_decided()?;
        self.marks.refuse_added(bucket, name)
    }

    /// Refuses a bucket's step by this norm.
    pub(super) fn refuse_step(&self, bucket: &BucketMark, name: impl FnOnce() -> String) -> Result<()> {
        self.refuse_undecided()?;
        self.marks.refuse_step(bucket, name)
    }

    pub(super) fn marks(&mut self) -> &mut NormMarks {
        &mut self.marks
    }

    fn refuse_undecided(&self) -> Result<()> {
        match self.phase {
            Phase::Decided => Ok(()),
            Phase::New | Phase::Begun => Err(Error::order("norm", "not decided yet", "decide it first")),
        }
    }

    fn refuse_decided(&self) -> Result<()> {
        match self.phase {
            Phase::Begun => Ok(()),
            Phase::New => Err(Error::order("norm", "not begun", "begin it first")),
            Phase::Decided => Err(Error::order("norm", "decided already", "begin it anew")),
        }
    }
}

impl<B> std::fmt::Debug for GradNorm<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GradNorm").field("phase", &self.phase).finish_non_exhaustive()
    }
}
