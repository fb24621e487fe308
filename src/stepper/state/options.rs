//! Options that are types of their own (sharding, offload, unused parameters, the mean over uneven inputs), and what the
//! device decides about one pass.
//!
//! Plain values. The builder decides which options fit together. A status is read from what the kernels publish, but for
//! the abandoned passes, which the stepper counts; nothing is computed here.

use crate::abi::{INSTEP_NO_BUCKET, InstepStatus};

/// Which tensors are sharded over the ranks: each rank then has, and steps, one shard of each bucket. If sums are
/// exact, the choice changes no bit of the training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// No shards: every rank steps everything, after one all-reduce per bucket.
    #[default]
    Replicated,
    /// States, masters and averages are sharded; parameters and gradients are full (ZeRO stage 1). A bucket takes a
    /// reduce-scatter of gradients, and an all-gather of stepped parameters beside the next bucket's sum. With
    /// [`Gradients::Release`](crate::Gradients) a rank frees the gradients that it does not step (stage 2).
    ///
    /// A state, a master or an average is read by [`Stepper::gather`](crate::Stepper::gather), on all ranks together, and
    /// written by [`write`](crate::Stepper::write) on all ranks. [`shard_size`](crate::StepperBuilder::shard_size) makes
    /// groups. Where there are [masters](crate::Master), every rank must write the same parameters. Refused: optimizers of your own
    /// ([`StepParam`](crate::optim::StepParam)), averaged gradients, borrowed memory, and collectives that do not
    /// [know](crate::Collective::knows) the calls.
    ///
    /// On a GPU released gradients are refused besides. No real GPU has stepped shards yet.
    ///
    /// # Source
    /// Rajbhandari et al., SC 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
    Zero,
    /// As [`Zero`](Self::Zero), with sharded parameters too (FSDP, ZeRO stage 3).
    /// [`Stepper::unshard`](crate::Stepper::unshard) makes a bucket's parameters full, on all ranks in the same order.
    /// [`reshard`](crate::Stepper::reshard) frees the other ranks' shards. So do the launch of the bucket and the end
    /// of the pass. Every rank must write the same parameters. Refused besides: uneven inputs.
    ///
    /// # Source
    /// Zhao et al., VLDB 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel".
    Fsdp,
}

/// How the gradients of a pass's [micro-batches](crate::Stepper::begin_accumulating) add up. If sums are exact, it changes no
/// bit of a training that adds ([`Grads::add`](crate::Grads::add)). A `write` in each micro-batch means the last gradient with
/// `Local`, and the sum of all with `Summed`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Accumulation {
    /// On each rank, in its own gradients; the last micro-batch sums them over ranks. A pass has one sum, and full
    /// gradients stay from one micro-batch to the next.
    #[default]
    Local,
    /// As sums over ranks: each micro-batch launches its buckets, and a rank adds up the sums of its shard. All ranks
    /// make the same number of micro-batches. Each micro-batch has a sum, and with
    /// [`Gradients::Release`](crate::Gradients) no gradient stays in between. With
    /// [`shard_size`](crate::StepperBuilder::shard_size) the sums are those of neighbours; replicas add up once, in the
    /// last micro-batch. Gradients of 16 bits are rounded after each addition.
    ///
    /// # Source
    /// FSDP's `set_requires_gradient_sync`, and `set_requires_all_reduce` for replicas.
    Summed,
}

/// Puts steps on the host, with the memory that they need: parameters, sums of gradients, states, masters and averages,
/// of this rank's shard if there are shards. The device has the parameters and gradients of forward and backward.
///
/// # Source
/// `CPUOffloadPolicy` of PyTorch's FSDP2; Ren et al., USENIX ATC 2021, "ZeRO-Offload".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OffloadPolicy {
    /// Asks for page-locked host memory, which a GPU copies while the trainer's thread goes on. Without it, that thread waits
    /// for each copy, and so for what other ranks do up to there: ranks unshard and hand over in one order then. Passes cannot be
    /// captured. The host device has no use for it.
    pub pin_memory: bool,
}

impl Default for OffloadPolicy {
    /// With page-locked memory, as in PyTorch.
    fn default() -> Self {
        OffloadPolicy { pin_memory: true }
    }
}

/// The treatment of a parameter whose gradient was not written in a pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Unused {
    /// If no rank wrote it: value, state and step count stay. On borrowed buckets, which cannot count,
    /// [`Stepper::set_unused`](crate::Stepper::set_unused) says it instead. A parameter that *some* rank used is stepped on all.
    #[default]
    Skip,
    /// It is stepped with a zero gradient, so momentum and decay still move it. **On borrowed memory the zeros are
    /// written over what lies there**, also over what you wrote through your own pointer without asking for the
    /// gradient first.
    StepZero,
    /// [`finish`](crate::Stepper::finish) is an `Order` that names it, and a [`Pass`](crate::Pass) is abandoned. Each rank must
    /// write every gradient, except of frozen parameters and those with
    /// [`SegmentAction::Leave`](crate::SegmentAction); one that forgets a gradient alone ends the group, as one that
    /// abandons alone. Unset, the choice for borrowed memory and for sums made elsewhere.
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
    /// Passes begun so far, this one included, abandoned ones too.
    pub pass: u64,
    /// Passes that this rank has [abandoned](crate::Stepper::abandon) so far, dropped ones included. In Eager, their first
    /// buckets may have been stepped; schedules did not advance.
    pub abandoned: u64,
    /// Whether the pass was skipped, because of a gradient that is not finite: it has changed nothing.
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
    /// The factor in the loss that was divided out of them.
    pub loss_scale: f64,
    /// The first bucket with an infinite or NaN gradient among those stepped; its parameters are
    /// [`segments_of`](crate::layout::Plan::segments_of) it in the plan. Eager steps it all the same, and so does every
    /// mode that skips nothing. Where a pass decides, the mean counts, which a small loss scale may make infinite
    /// although the sum is finite; elsewhere the sum counts. With [sharded states](crate::Strategy) it is the first of
    /// all ranks. With [`shard_size`](crate::StepperBuilder::shard_size), each group finds that of its own ranks:
    /// groups have the same sums and agree, except about local parameters.
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
