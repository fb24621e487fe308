//! Sends gradients as bf16 or f16: casts them, sums them with the inner communicator, and casts them back.
//!
//! Every element is cast separately, so the bits do not depend on bucket cap, mode or instruction set. All ranks
//! receive the same bits. Counts in a bucket's tail stay exact, because scales are powers of two and the number of
//! ranks is limited. The casts run as kernels, because kernels set the floating-point environment. The calling thread
//! may have inherited flush-to-zero.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use crate::collective::{Call, CallKey, Collective};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::handle::Place;
use crate::host::kernels::{Isa, Kernels};
use crate::layout::Plan;
use crate::op::{Agreed, CollectiveKind};

/// Bytes of a cache line. Buffers of collectives are aligned to cache lines.
const LINE_BYTES: usize = 64;

/// The smallest positive f16. A count of 1, multiplied by the pre-scale, must be at least this value.
const SMALLEST_PRE_SCALE: f32 = 1.0 / (1 << 24) as f32;

/// The largest power of two that is finite in f16. The number of ranks times the pre-scale must be at most this value.
const LARGEST_COUNT: f32 = 32_768.0;

/// A communicator that sends gradients as bf16 or f16, so the inner communicator `C` sends half as many bytes.
/// Parameters are still broadcast unchanged. `Compressed` works only on the host so far.
///
/// # Error
/// Let u be the unit roundoff of the format (2^-8 for bf16, 2^-11 for f16), s the pre-scale and n the number of ranks
/// in one process. An element is rounded once before the sum. The sum is taken in f32 and then rounded once. The error
/// of the sum is therefore at most (2u + u^2 + n 2^-23) times the sum of the magnitudes, plus (n + 1) / 2 times the
/// smallest subnormal. The smallest subnormal is 2^-133 for bf16 and 2^-24/s for f16. The error of the mean is this
/// error divided by n. If a communicator rounds at every hop, as a ring does, the relative error is up to n * u.
///
/// A gradient of 65520/s or more becomes infinite as f16, and the sum over ranks is then infinite or NaN.
/// [`skip_nonfinite`](crate::StepperBuilder::skip_nonfinite) then skips the pass. NaN and infinity are sent unchanged.
///
/// ```
/// use instep::overlap::Compressed;
/// use instep::{Layout, Sgd, Stepper, in_process};
///
/// let layout = Layout::builder().param("weight", 2).build()?;
/// let weight = layout.id("weight")?;
/// let ranks = in_process(2, |comm| {
///     let mut stepper = Stepper::host(&layout, Sgd { lr: 1.0, ..Default::default() }, Compressed::bf16(comm)?)?;
///     let mut pass = stepper.begin()?;
///     pass.grads().write(weight, &[1.0, 1.001])?; // the second has no bf16: 1 is the nearest
///     pass.grad_ready(weight)?;
///     pass.finish()?;
///     Ok::<_, instep::Error>(stepper.view::<f32>(weight)?.to_vec())
/// })?;
/// assert_eq!(ranks, [[-1.0, -1.0], [-1.0, -1.0]]);
/// # Ok::<(), instep::Error>(())
/// ```
///
/// # Source
/// PyTorch's `bf16_compress_hook` and `fp16_compress_hook`. PyTorch's hooks divide by the number of ranks before the
/// sum. In instep, the step divides the sum and rounds once. Before the sum, f16 gradients are only multiplied by a
/// power of two.
pub struct Compressed<C> {
    comm: C,
    dtype: DType,
    pre_scale: f32,
    kernels: Kernels,
    /// A buffer for the largest bucket, which stays allocated so that later passes allocate nothing.
    scratch: Mutex<Vec<u16>>,
}

impl<C: Collective> Compressed<C> {
    /// Sends gradients as bf16, which has the range of f32 and 8 bits of precision.
    ///
    /// # Errors
    /// `Unsupported` if `comm` cannot sum bf16. For example, another `Compressed` or a [`Hooked`](super::Hooked) cannot
    /// sum bf16. `Config`, `Unsupported` or `Arithmetic` for an instruction set that cannot be used.
    pub fn bf16(comm: C) -> Result<Compressed<C>> {
        Compressed::new(comm, DType::BF16, 1.0)
    }

    /// Sends gradients as f16, which has 11 bits of precision for magnitudes of at least 2^-14. Gradients are first
    /// multiplied by the largest power of two that is not above 1/world_size. If the gradients of all ranks are finite
    /// in f16, their scaled sum is finite too. See [`pre_scale`](Self::pre_scale).
    ///
    /// # Errors
    /// Errors as for [`bf16`](Self::bf16).
    pub fn f16(comm: C) -> Result<Compressed<C>> {
        let ranks = u64::from(comm.world_size().max(1)).next_power_of_two();
        let pre_scale = (1.0 / ranks as f32).max(SMALLEST_PRE_SCALE);
        Compressed::new(comm, DType::F16, pre_scale)
    }

    /// Sets the factor by which f16 gradients are multiplied before the cast. The sum is divided by the same factor.
    /// The factor is like a loss scale that applies only to the transfer. A small factor avoids overflow, and a large
    /// factor keeps small gradients from becoming zero.
    ///
    /// # Errors
    /// `Config` unless the factor is a power of two from 2^-24 to 32768 / world_size. With such a factor, the counts in
    /// tail blocks stay exact. Always `Config` for bf16, because bf16 has the range of f32 and needs no factor.
    pub fn pre_scale(mut self, pre_scale: f32) -> Result<Compressed<C>> {
        let refuse = |wrong, remedy| Err(Error::config("pre_scale", pre_scale, wrong, remedy));
        if self.dtype == DType::BF16 {
            return refuse("bf16 has the range of f32 and needs no scale", "leave it out");
        }
        let is_power_of_two = pre_scale.is_normal() && pre_scale > 0.0 && pre_scale.to_bits() << 9 == 0;
        let largest = LARGEST_COUNT / self.comm.world_size() as f32;
        if !(is_power_of_two && (SMALLEST_PRE_SCALE..=largest).contains(&pre_scale)) {
            return refuse("out of range", "use a power of two from 2^-24 to 32768 / world_size");
        }
        self.pre_scale = pre_scale;
        Ok(self)
    }

    fn new(comm: C, dtype: DType, pre_scale: f32) -> Result<Compressed<C>> {
        if !comm.sums(dtype) {
            let thing = format_args!("compression to {dtype}");
            return Err(Error::unsupported(
                thing,
                "the inner communicator cannot sum it",
                "wrap one that can",
            ));
        }
        let kernels = Kernels::load(Isa::from_environment()?)?;
        Ok(Compressed { comm, dtype, pre_scale, kernels, scratch: Mutex::default() })
    }

    /// Returns the largest number of ranks that the type can count exactly.
    fn most_counted_ranks(&self) -> u32 {
        if self.dtype == DType::BF16 { 256 } else { 2048 }
    }
}

/// Returns a slice of `scratch` with this many elements. The slice starts at a cache line. If `scratch` is too short,
/// it is extended.
fn reserve(scratch: &mut Vec<u16>, elements: u64) -> &mut [u16] {
    let elements = elements as usize;
    let padded = elements + LINE_BYTES / size_of::<u16>();
    if scratch.len() < padded {
        scratch.resize(padded, 0);
    }
    let first = scratch.as_ptr().align_offset(LINE_BYTES);
    &mut scratch[first..first + elements]
}

impl<C: Collective> Collective for Compressed<C> {
    fn inner(&self) -> Option<&dyn Collective> {
        Some(&self.comm)
    }

    fn rank(&self) -> u32 {
        self.comm.rank()
    }

    fn world_size(&self) -> u32 {
        self.comm.world_size()
    }

    /// Returns true only for the host's memory, and only if the inner collective reaches that memory.
    fn reaches(&self, place: Place) -> bool {
        place == Place::Host && self.comm.reaches(place)
    }

    /// Returns true only for f32, because only f32 is cast to the smaller type.
    fn sums(&self, dtype: DType) -> bool {
        dtype == DType::F32
    }

    fn supports(&self, kind: CollectiveKind) -> bool {
        matches!(kind, CollectiveKind::AllReduce | CollectiveKind::Broadcast)
    }

    /// # Errors
    /// `Config` if buckets have tail blocks, and there are more ranks than the type can count exactly. Otherwise,
    /// returns the errors of `C`.
    fn prepare(&self, plan: &Plan) -> Result<()> {
        let counts = plan.buckets().iter().any(|bucket| !bucket.tail.is_empty());
        if counts && self.world_size() > self.most_counted_ranks() {
            let wrong = format_args!("{} counts only {} ranks", self.dtype, self.most_counted_ranks());
            let remedy = "use Unused::StepZero and no uneven_inputs";
            return Err(Error::config("world_size", self.world_size(), wrong, remedy));
        }
        let largest = plan.buckets().iter().map(|bucket| bucket.len).max().unwrap_or(0);
        reserve(&mut self.scratch.lock().unwrap_or_else(PoisonError::into_inner), largest);
        self.comm.prepare(plan)
    }

    fn enqueue(&self, call: &mut Call<'_>) -> Result<()> {
        if !self.supports(call.kind) {
            return Err(call.unknown_kind());
        }
        if call.kind != CollectiveKind::AllReduce {
            return self.comm.enqueue(call);
        }
        if call.dtype != DType::F32 {
            let thing = format_args!("{} gradients", call.dtype);
            let wrong = format_args!("cannot be compressed to {}", self.dtype);
            return Err(Error::unsupported(thing, wrong, "use f32 gradients"));
        }
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let narrow = reserve(&mut scratch, call.bytes / call.dtype.bytes());
        let key = CallKey {
            dtype: self.dtype,
            bytes: size_of_val(narrow) as u64,
            // A sum of values that ranks have scaled differently would be meaningless.
            agreement: call.agreement ^ Agreed::Options.share(self.pre_scale.to_bits().into()),
            ..call.key()
        };
        self.kernels.narrow(bytemuck::cast_slice(call.source()?), narrow, self.dtype, self.pre_scale);
        let wire = bytemuck::cast_slice_mut(narrow);
        self.comm.enqueue(&mut Call::on_host(&self.comm, key, None, wire, call.deadline())?)?;
        self.kernels.widen(
            narrow,
            bytemuck::cast_slice_mut(call.target()?),
            self.dtype,
            1.0 / self.pre_scale,
        );
        Ok(())
    }

    fn abort(&self, cause: &Error) {
        self.comm.abort(cause);
    }
}

impl<C: fmt::Debug> fmt::Debug for Compressed<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}, gradients as {} times {}", self.comm, self.dtype, self.pre_scale)
    }
}
