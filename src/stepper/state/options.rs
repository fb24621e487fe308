//! Types of options (sharding, offload, unused parameters, the mean over uneven inputs), and the device's decisions
//! about a pass.
//!
//! These are plain values. The builder decides which options fit together. A status has values that the kernels have
//! computed, and the stepper's count of abandoned passes. This file computes nothing.

use crate::abi::{INSTEP_NO_BUCKET, InstepStatus};

/// Which tensors are sharded over the ranks. With shards, each rank steps one shard of each bucket, and has only this
/// shard of the sharded tensors. If sums are exact, the choice changes no bit of the training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// No shards: every rank steps all parameters, after one all-reduce per bucket.
    #[default]
    Replicated,
    /// States, masters and averages are sharded. Parameters and gradients are full (ZeRO stage 1). Each bucket needs a
    /// reduce-scatter of gradients and an all-gather of stepped parameters. The all-gather overlaps with the next
    /// bucket's reduce-scatter. With [`Gradients::Release`](crate::Gradients), a rank frees the gradients that it does
    /// not step, as in ZeRO stage 2.
    ///
    /// To read a state, a master or an average, all ranks call [`Stepper::gather`](crate::Stepper::gather) together. To
    /// write such a tensor, all ranks call [`write`](crate::Stepper::write).
    /// [`shard_size`](crate::StepperBuilder::shard_size) divides the ranks into groups. If parameters have
    /// [masters](crate::Master), every rank must write the same values to the same parameters. Ranks compare these
    /// values, and the next collective returns `Mismatch` if they differ. This strategy refuses optimizers of your own
    /// ([`StepParam`](crate::optim::StepParam)), averaged gradients, borrowed memory, and collectives that do not
    /// support every call that sharding needs ([`Collective::supports`](crate::Collective::supports)).
    ///
    /// On a GPU, `Gradients::Release` is refused too. This strategy has run in up to four processes on one H200, but
    /// not on several GPUs yet.
    ///
    /// # Source
    /// Rajbhandari et al., SC 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
    Zero,
    /// Like [`Zero`](Self::Zero), but parameters are sharded too (FSDP, ZeRO stage 3).
    /// [`Stepper::unshard`](crate::Stepper::unshard) makes a bucket's parameters full. All ranks must unshard the same
    /// buckets in the same order. [`reshard`](crate::Stepper::reshard) frees the other ranks' shards of a bucket. These
    /// shards are also freed when the bucket is launched, and at the end of the pass. Every rank must write the same
    /// values to the same parameters, even to parameters without masters. Ranks compare these values, and the next
    /// collective returns `Mismatch` if they differ. This strategy refuses uneven inputs, and everything that `Zero`
    /// refuses.
    ///
    /// # Source
    /// Zhao et al., VLDB 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel".
    Fsdp,
}

/// How gradients accumulate over a pass's [micro-batches](crate::Stepper::begin_accumulating). If sums are exact and
/// the trainer uses [`Grads::add`](crate::Grads::add), the choice changes no bit of the training. If the trainer uses
/// `write` in each micro-batch, `Local` keeps only the last micro-batch's gradient, and `Summed` sums the gradients of
/// all micro-batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Accumulation {
    /// Each rank accumulates in its own gradients, and the last micro-batch reduces them over ranks. A bucket is
    /// reduced once per pass, and full gradients stay in memory between micro-batches.
    #[default]
    Local,
    /// Each micro-batch reduces its buckets over ranks, and each rank accumulates the sums for its own shard. All ranks
    /// must make the same number of micro-batches. A bucket is reduced once per micro-batch. With
    /// [`Gradients::Release`](crate::Gradients), only the gradients of local parameters stay in memory between
    /// micro-batches, beside the accumulated sums. With [`shard_size`](crate::StepperBuilder::shard_size), each
    /// micro-batch reduces within groups, and replicas all-reduce once, in the last micro-batch. Gradients of 16 bits
    /// are rounded after each addition.
    ///
    /// # Source
    /// FSDP's `set_requires_gradient_sync`, and `set_requires_all_reduce` for replicas.
    Summed,
}

/// Runs steps on the host. The host's memory has parameters, summed gradients, states, masters and averages. If these
/// tensors are sharded, the host's memory has only this rank's shards. The device's memory has the parameters and
/// gradients that forward and backward use.
///
/// # Source
/// `CPUOffloadPolicy` of PyTorch's FSDP2. Ren et al., USENIX ATC 2021, "ZeRO-Offload".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OffloadPolicy {
    /// Whether the host's memory is page-locked. A GPU copies page-locked memory without blocking the trainer's thread.
    /// If the memory is not page-locked, the thread waits for each copy, and thus for other ranks. Without page-locked
    /// memory, all ranks must unshard and hand over buckets in the same order, and passes cannot be captured. The host
    /// device ignores this option.
    pub pin_memory: bool,
}

impl Default for OffloadPolicy {
    /// Returns a policy with page-locked memory, which PyTorch also uses by default.
    fn default() -> Self {
        OffloadPolicy { pin_memory: true }
    }
}

/// What a pass does with a parameter if its gradient was not written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Unused {
    /// The parameter's value, states and step count do not change if no rank wrote the gradient. If at least one rank
    /// wrote the gradient, all ranks step the parameter. Borrowed buckets do not support `Skip`, because they have no
    /// room to count ranks. Call [`Stepper::set_unused`](crate::Stepper::set_unused) instead.
    #[default]
    Skip,
    /// The parameter is stepped with a zero gradient, so momentum and weight decay still change it. **On borrowed
    /// memory the zeros may overwrite your gradient.** To prevent this, get the gradient from the stepper (for example
    /// with [`Stepper::view_mut`](crate::Stepper::view_mut)) before you write it through your own pointer.
    StepZero,
    /// [`finish`](crate::Stepper::finish) returns an `Order` error that names the parameter.
    /// [`Pass::finish`](crate::Pass::finish) then also abandons the pass. Each rank must write every gradient, except
    /// those of frozen parameters and of parameters with [`SegmentAction::Leave`](crate::SegmentAction). If only some
    /// ranks forget a gradient, or if only some ranks abandon a pass, the group of ranks ends with an error. `Refuse`
    /// is the default for borrowed memory and for sums by the caller.
    Refuse,
}

/// The divisor of the summed gradients when some ranks have run out of data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Divisor {
    /// The number of all ranks, including ranks without data. Each sample then has the same weight as in a pass in
    /// which all ranks have data.
    #[default]
    WorldSize,
    /// The number of ranks that had data in this pass.
    ContributingRanks,
}

/// The device's decisions about the last pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Status {
    /// Number of passes begun so far, including this pass and abandoned passes.
    pub pass: u64,
    /// Number of passes that this rank has [abandoned](crate::Stepper::abandon) or dropped so far. In `Eager` mode,
    /// these passes may have stepped their first buckets. Abandoned passes do not advance learning-rate schedules.
    pub abandoned: u64,
    /// Whether the pass was skipped because of a gradient that is not finite. A skipped pass has changed no parameter,
    /// no state and no step count.
    pub skipped: bool,
    /// Norm of the averaged gradients of all groups without a [group clip](crate::StepperBuilder::group_clip).
    /// [`group_norm`](crate::Stepper::group_norm) returns the norms of other groups. The norm is infinite or NaN if a
    /// gradient is infinite or NaN. The norm is `None` if no option or mode needs it, if the pass was abandoned, or
    /// with [`Clip::PerBucket`](crate::Clip::PerBucket). [`Clip::Previous`](crate::Clip::Previous) is an option that
    /// needs the norm.
    pub norm: Option<f64>,
    /// Factor by which clipping multiplied the gradients that [`norm`](Status::norm) covers. The factor is 1 without
    /// clipping and in a skipped pass. With [`Clip::PerBucket`](crate::Clip::PerBucket), the field is always 1, because
    /// each bucket has its own factor.
    pub clip: f64,
    /// The loss scale by which the gradients were divided.
    pub loss_scale: f64,
    /// Index of the first bucket in which the gradient of a stepped parameter is infinite or NaN.
    /// [`Plan::segments_of`](crate::layout::Plan::segments_of) lists the bucket's parameters. In `Eager` mode, this
    /// bucket is stepped anyway. In the other modes, this bucket is stepped unless the pass is skipped. A pass that
    /// clips gradients or may be skipped tests averaged gradients. Any other pass tests summed gradients. The results
    /// can differ, because a small loss scale can make the average infinite although the sum is finite. With [sharded
    /// states](crate::Strategy), this is the smallest index on any rank. With
    /// [`shard_size`](crate::StepperBuilder::shard_size), this is the smallest index in the rank's group. After the
    /// replicas' all-reduce, all groups have the same sums, so this index can differ between groups only because of
    /// local parameters.
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
