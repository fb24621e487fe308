//! Options that are types of their own (sharding, offload, unused parameters, the mean over uneven inputs), and the
//! device's decisions about a pass.
//!
//! These are plain values. The builder decides which options fit together. A status is what the kernels have published,
//! and the stepper's own count of abandoned passes; nothing is computed here.

use crate::abi::{INSTEP_NO_BUCKET, InstepStatus};

/// Which tensors are sharded over the ranks. With shards, each rank has and steps one shard of each bucket. If sums are
/// exact, the choice changes no bit of the training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// No shards: every rank steps everything, after one all-reduce per bucket.
    #[default]
    Replicated,
    /// States, masters and averages are sharded; parameters and gradients are full (ZeRO stage 1). A bucket takes a
    /// reduce-scatter of gradients, and an all-gather of stepped parameters, which runs beside the next bucket's
    /// reduce-scatter. With [`Gradients::Release`](crate::Gradients) a rank frees the gradients that it does not step
    /// (stage 2).
    ///
    /// To read a state, a master or an average, all ranks call [`Stepper::gather`](crate::Stepper::gather) together; to
    /// write one, all ranks call [`write`](crate::Stepper::write). [`shard_size`](crate::StepperBuilder::shard_size)
    /// makes groups. If parameters have [masters](crate::Master), every rank must write the same parameters. Refused:
    /// optimizers of your own ([`StepParam`](crate::optim::StepParam)), averaged gradients, borrowed memory, and
    /// collectives that do not [know](crate::Collective::knows) the calls.
    ///
    /// A GPU also refuses released gradients. No real GPU has stepped shards yet.
    ///
    /// # Source
    /// Rajbhandari et al., SC 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
    Zero,
    /// Like [`Zero`](Self::Zero), but parameters are sharded too (FSDP, ZeRO stage 3).
    /// [`Stepper::unshard`](crate::Stepper::unshard) makes a bucket's parameters full, on all ranks in the same order.
    /// [`reshard`](crate::Stepper::reshard) frees the other ranks' shards. So do the launch of the bucket and the end
    /// of the pass. Every rank must write the same parameters. Uneven inputs are refused too.
    ///
    /// # Source
    /// Zhao et al., VLDB 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel".
    Fsdp,
}

/// How gradients accumulate over a pass's [micro-batches](crate::Stepper::begin_accumulating). If sums are exact and
/// the trainer uses [`Grads::add`](crate::Grads::add), the choice changes no bit. If it uses `write` in each
/// micro-batch, `Local` keeps the last gradient, and `Summed` the sum of all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Accumulation {
    /// Each rank accumulates in its own gradients, and the last micro-batch reduces them over ranks. A bucket is
    /// reduced once per pass, and full gradients stay from one micro-batch to the next.
    #[default]
    Local,
    /// Each micro-batch reduces its buckets over ranks, and a rank accumulates the sums of its shard. All ranks make
    /// the same number of micro-batches. A bucket is reduced once per micro-batch, and with
    /// [`Gradients::Release`](crate::Gradients) no gradient stays in between. With
    /// [`shard_size`](crate::StepperBuilder::shard_size) each micro-batch reduces within groups, and replicas
    /// all-reduce once, in the last micro-batch. Gradients of 16 bits are rounded after each addition.
    ///
    /// # Source
    /// FSDP's `set_requires_gradient_sync`, and `set_requires_all_reduce` for replicas.
    Summed,
}

/// Runs steps on the host, in the host's memory: parameters, summed gradients, states, masters and averages, of this
/// rank's shard if there are shards. The device keeps the parameters and gradients of forward and backward.
///
/// # Source
/// `CPUOffloadPolicy` of PyTorch's FSDP2; Ren et al., USENIX ATC 2021, "ZeRO-Offload".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OffloadPolicy {
    /// Asks for page-locked host memory, which a GPU copies without blocking the trainer's thread. Without it, that
    /// thread waits for each copy, and so for other ranks. Ranks must then unshard and hand over in one order, and
    /// passes cannot be captured. The host device ignores this.
    pub pin_memory: bool,
}

impl Default for OffloadPolicy {
    /// With page-locked memory, as in PyTorch.
    fn default() -> Self {
        OffloadPolicy { pin_memory: true }
    }
}

/// What a pass does with a parameter whose gradient was not written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Unused {
    /// If no rank wrote the gradient, value, states and step count stay. Borrowed buckets cannot count ranks; there the
    /// trainer calls [`Stepper::set_unused`](crate::Stepper::set_unused) instead. A parameter that *some* rank used is
    /// stepped on all ranks.
    #[default]
    Skip,
    /// The parameter is stepped with a zero gradient, so momentum and decay still move it. **On borrowed memory the
    /// zeros overwrite the gradient**, even if you wrote it through your own pointer without asking for the gradient
    /// first.
    StepZero,
    /// [`finish`](crate::Stepper::finish) returns an `Order` that names the parameter, and a [`Pass`](crate::Pass) is
    /// abandoned. Each rank must write every gradient, except of frozen parameters and those with
    /// [`SegmentAction::Leave`](crate::SegmentAction). If only some ranks forget a gradient, the group ends, as when
    /// only some ranks abandon. This is the default for borrowed memory and for sums by the caller.
    Refuse,
}

/// The divisor of the sum of gradients once ranks run out of data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Divisor {
    /// The number of ranks, those without data included: each sample keeps its weight.
    #[default]
    WorldSize,
    /// The number of ranks that had data in this pass.
    ContributingRanks,
}

/// The device's decisions about the last pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Status {
    /// Number of passes begun so far, including this one and abandoned ones.
    pub pass: u64,
    /// Number of passes that this rank has [abandoned](crate::Stepper::abandon) so far, dropped ones included. In
    /// Eager, their first buckets may have been stepped; learning-rate schedules did not advance.
    pub abandoned: u64,
    /// Whether the pass was skipped because of a gradient that is not finite. A skipped pass has changed nothing.
    pub skipped: bool,
    /// Norm of all averaged gradients, but for those of groups with a
    /// [clip of their own](crate::StepperBuilder::group_clip), for which there is
    /// [`group_norm`](crate::Stepper::group_norm): infinite or NaN if one of them is; `None` if neither mode nor option asked for
    /// it, or the pass was given up, or buckets are clipped one by one. Clipping [by the previous
    /// norm](crate::Clip::Previous) asks.
    pub norm: Option<f64>,
    /// Factor that clipping multiplied those by; 1 without clipping, in a skipped pass, and with
    /// [`Clip::PerBucket`](crate::Clip::PerBucket), where each bucket has its own.
    pub clip: f64,
    /// The loss scale that was divided out of the gradients.
    pub loss_scale: f64,
    /// Index of the first bucket in which a gradient to be stepped is infinite or NaN.
    /// [`segments_of`](crate::layout::Plan::segments_of) it in the plan are its parameters. Eager steps that bucket
    /// anyway, and so does every mode without skipping. If the mode makes a decision, the mean is judged, which a small
    /// loss scale can make infinite although the sum is finite; otherwise the sum is judged. With [sharded
    /// states](crate::Strategy) it is the smallest index of all ranks. With
    /// [`shard_size`](crate::StepperBuilder::shard_size) it is the smallest index of the rank's group; groups have the
    /// same sums and so agree, except about local parameters.
    pub first_nonfinite_bucket: Option<u32>,
}

impl Status {
    pub(crate) fn new(published: &InstepStatus, abandoned: u64) -> Status {
        let bucket = published.first_nonfinite_bucket;
        Status {
            pass: published.sequence,
            abandoned,
            skipped: published.skipped != 0,
            norm: (published.decided != 0).then_some(published.norm),
            clip: published.clip,
            loss_scale: published.loss_scale,
            first_nonfinite_bucket: (bucket != INSTEP_NO_BUCKET).then_some(bucket),
        }
    }
}
