//! The norm of the gradients of several buckets, and the decision that follows from it.
//!
//! The sum of squares is exact, so its bits do not depend on the order or the number of the buckets.
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

/// The norm of the gradients of any number of buckets, and the decision to clip or skip.
///
/// After each `begin`, add each bucket once, then decide, then step each bucket once. Any other order is an error. You
/// must add every bucket that you step with the norm, even if all its parameters are frozen or have no gradient. Such a
/// bucket does not change the norm. If the gradients are sharded over ranks, the ranks combine their
/// [`sum`](GradNorm::sum)s before they decide.
///
/// Only the caller knows which gradients a combined sum contains. Two checks are therefore omitted once `sum` has been
/// called. The norm may be decided even if no bucket was added, for example on a rank without shards. A bucket that was
/// added to another norm may be stepped with this norm.
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

/// The CPU's part of a [`GradNorm`].
pub struct NormOnHost {
    memories: Memories,
    kernels: Kernels,
}

/// The GPU's part of a [`GradNorm`].
pub struct NormOnGpu(NormBlock);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    New,
    Begun,
    Decided,
}

/// The exact sum of squares of the gradients that were added. The gradients have not been divided by the factors of
/// [`Scaling`].
///
/// The sum does not depend on the order of the gradients. If the gradients are sharded over ranks, add each limb over
/// all ranks with wrapping addition, and take the maximum of `largest` over all ranks. All ranks then make the same
/// decision.
#[derive(Debug)]
pub struct NormSum<'a> {
    /// The digits of the sum in base 2^32. Each digit has 64 bits, which leaves room for carries.
    pub limbs: &'a mut [u64; NORM_LIMBS],
    /// The largest magnitude of the gradients, as the bits of an f32. If these bits are compared as integers, they have
    /// the same order as the magnitudes. NaN counts as larger than infinity.
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
    /// The norm of all averaged gradients. The norm is infinite or NaN if a gradient is infinite or NaN.
    pub norm: f64,
    /// The factor by which steps clip the gradients. The factor is 1 if no gradient is clipped or if the steps are
    /// skipped.
    pub clip: f64,
    /// Whether all gradients are finite.
    pub is_finite: bool,
    /// Whether steps with this norm are skipped.
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
    /// `Config` if `INSTEP_ISA` is not the name of an instruction set. `Unsupported` if this machine lacks the
    /// instruction set of `INSTEP_ISA`. `Arithmetic` if the kernels fail their self-test.
    pub fn host() -> Result<GradNorm> {
        let kernels = Kernels::load(Isa::from_environment()?)?;
        let memories = Memories::without_tensors(Counts::default())?;
        // SAFETY: nothing runs on this memory yet.
        unsafe { memories.write_control(first_control(&StepConstants::PLAIN), std::iter::empty()) };
        Ok(GradNorm::of(NormOnHost { memories, kernels }))
    }

    /// Begins a new norm. The norm divides every added gradient by the factors in `scaling`.
    ///
    /// # Errors
    /// `Config` if `scaling` has a factor out of range, an unaligned address or a clip coefficient.
    pub fn begin(&mut self, scaling: Scaling) -> Result<()> {
        scaling.validate()?;
        scaling.refuse_clip()?;
        let mut args = begin_block(self.control());
        scaling.put(&mut args);
        // SAFETY: there is one control block of our own, and no record. `Scaling`'s addresses are valid by its own
        // contract.
        unsafe { self.block.kernels.begin(&args) };
        self.mark_begun();
        Ok(())
    }

    /// Decides the clip coefficient, and whether steps with this norm are skipped. If `max_norm` is set, gradients are
    /// clipped to this norm. With `skip_nonfinite`, steps are skipped if a gradient is infinite or NaN, or becomes
    /// infinite when it is divided by the loss scale. The flag of [`Scaling::grad_scaler`] skips the steps even if
    /// `skip_nonfinite` is false.
    ///
    /// # Errors
    /// `Config` if `max_norm` is not a finite number above 0. `Order` if the norm has not been [begun](Self::begin), if
    /// it has already been decided, or if no bucket was added and [`sum`](Self::sum) was not called.
    pub fn decide(&mut self, max_norm: Option<f64>, skip_nonfinite: bool) -> Result<Decision> {
        refuse_max_norm(max_norm)?;
        self.refuse_decided()?;
        self.marks.refuse_empty()?;
        // SAFETY: the control block is our own, and nothing runs on it while it is borrowed mutably.
        let control = unsafe {
            self.block.kernels.decide(&decide_block(self.control(), max_norm, skip_nonfinite));
            self.block.memories.read_control()
        };
        self.phase = Phase::Decided;
        Ok(Decision::of(&control))
    }

    /// Returns the sum so far. If the gradients are sharded over ranks, combine the sums of all ranks as [`NormSum`]
    /// describes. Ranks without shards must take part too.
    ///
    /// # Errors
    /// `Order` if the norm has not been [begun](Self::begin), or if it has already been decided.
    pub fn sum(&mut self) -> Result<NormSum<'_>> {
        self.refuse_decided()?;
        self.marks.take_sum();
        // SAFETY: nothing runs on the block while it is borrowed mutably, and the returned sum keeps it borrowed
        // mutably.
        let control = unsafe { &mut *self.control() };
        Ok(NormSum { limbs: &mut control.limbs, largest: &mut control.max_abs_bits })
    }

    /// Returns the last decision.
    ///
    /// # Errors
    /// `Order` if the norm has not been decided.
    pub fn decision(&mut self) -> Result<Decision> {
        self.refuse_undecided()?;
        // SAFETY: nothing runs on the block, because it is borrowed mutably.
        Ok(Decision::of(&unsafe { self.block.memories.read_control() }))
    }

    /// Returns the norm's control block. A step with this norm reads the block.
    pub(super) fn control(&self) -> *mut InstepControl {
        self.block.memories.regions().control()
    }
}

impl GradNorm<NormOnGpu> {
    /// Makes a norm on a GPU, for buckets on the same GPU.
    ///
    /// # Errors
    /// `KernelsNotBuilt` in a build without kernels. `Device` if the driver refuses a call.
    pub fn cuda(cuda: &Cuda) -> Result<GradNorm<NormOnGpu>> {
        Ok(GradNorm::of(NormOnGpu(NormBlock::of(cuda)?)))
    }

    /// Enqueues the beginning of a new norm. The norm divides every added gradient by the factors in `scaling`.
    ///
    /// # Ordering
    /// The launch runs on the stream. The work of all calls on this norm runs in the order of the calls, even if the
    /// calls enqueue it on different streams.
    ///
    /// # Errors
    /// `Config` if `scaling` has a factor out of range, an unaligned address or a clip coefficient. `Device` if a
    /// launch fails, and `Poisoned` in every later call.
    ///
    /// # Safety
    /// The stream belongs to this GPU, lives until it has run the launch, and is not being captured.
    pub unsafe fn enqueue_begin(&mut self, scaling: Scaling, stream: StreamHandle) -> Result<()> {
        scaling.validate()?;
        scaling.refuse_clip()?;
        // SAFETY: the caller's promise.
        unsafe { self.block.0.begin(|args| scaling.put(args), stream)? };
        self.mark_begun();
        Ok(())
    }

    /// Enqueues the same decision that [`decide`](GradNorm::decide) makes on the CPU.
    ///
    /// # Errors
    /// Errors as for [`decide`](GradNorm::decide). `Device` if a launch fails, and `Poisoned` in every later call.
    ///
    /// # Safety
    /// The stream meets the conditions of [`enqueue_begin`](Self::enqueue_begin).
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

    /// Returns the addresses of the sum's limbs and of the largest magnitude so far. You may enqueue your own work that
    /// combines the sums of all ranks, as [`NormSum`] describes.
    ///
    /// # Ordering
    /// The stream waits for the work of the norm's previous call. Enqueue the decision on the same stream, so that it
    /// runs after your work.
    ///
    /// # Errors
    /// `Order` if the norm has not been [begun](Self::enqueue_begin), or if it has already been decided. `Device` if
    /// the driver cannot make the stream wait.
    ///
    /// # Safety
    /// The stream meets the conditions of [`enqueue_begin`](Self::enqueue_begin).
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
    /// The calling thread waits for the work of the norm's previous call.
    ///
    /// # Errors
    /// `Order` if the norm has not been decided. `Device` if the copy fails.
    pub fn decision(&mut self) -> Result<Decision> {
        self.refuse_undecided()?;
        Ok(Decision::of(&self.block.0.control()?))
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

    /// Returns an error if the bucket's gradients cannot be added to this norm now.
    pub(super) fn refuse_add(&self, bucket: &BucketMark, name: impl FnOnce() -> String) -> Result<()> {
        self.refuse_decided()?;
        self.marks.refuse_added(bucket, name)
    }

    /// Returns an error if the bucket cannot be stepped with this norm now.
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
