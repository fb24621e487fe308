//! Unshards and reshards buckets of sharded parameters.
//!
//! On the host, addresses stay the same, and only the pages of the other ranks' shards are freed. On a GPU, an
//! unsharded bucket has separate memory, which has a new address each time the bucket is unsharded. Every read and
//! write of a parameter first checks, with functions of this file, that the parameter's bucket is unsharded.

use std::num::NonZeroU32;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::layout::ParamId;
use crate::op::{Memory, Span};
use crate::stepper::builder::StepperBuilder;
use crate::stepper::claims::bucket_numbered;
use crate::stepper::stepper::Stepper;

impl StepperBuilder<'_> {
    /// Limits how many buckets may be [unsharded](Stepper::unshard) at the same time. A trainer that forgets to reshard
    /// then gets an error instead of using more memory. By default, there is no limit.
    pub fn max_unsharded(mut self, buckets: NonZeroU32) -> Self {
        self.max_unsharded = Some(buckets);
        self
    }
}

impl<D: Device> Stepper<D> {
    /// Makes the parameters of a bucket full on this rank, with [`Strategy::Fsdp`](crate::Strategy::Fsdp). Make this
    /// call some time before you access the bucket, so that the all-gather overlaps with other work. All ranks must
    /// unshard the same buckets in the same order, inside a pass or between passes. The call does nothing if the bucket
    /// is already full on this rank.
    ///
    /// ```
    /// use instep::{Adam, Gradients, Layout, Stepper, Strategy, in_process};
    ///
    /// let layout = Layout::builder().param("w", 4096).build()?;
    /// let w = layout.id("w")?;
    /// in_process(2, |comm| {
    ///     let builder = Stepper::builder(&layout, Adam::default()).strategy(Strategy::Fsdp);
    ///     let mut stepper = builder.gradients(Gradients::Release).host(comm)?;
    ///     stepper.write(w, &vec![0.5; 4096])?; // on all ranks; each keeps its part
    ///     for _ in 0..3 {
    ///         stepper.unshard(0)?;
    ///         let loss: f32 = stepper.view::<f32>(w)?.iter().sum();
    ///         stepper.reshard(0)?; // until backward
    ///         let mut pass = stepper.begin()?;
    ///         pass.unshard(0)?;
    ///         pass.grads().write(w, &vec![loss; 4096])?;
    ///         pass.grad_ready(w)?; // the bucket's last gradient: it is resharded, summed and stepped
    ///         pass.finish()?;
    ///     }
    ///     assert!(stepper.view::<f32>(w).is_err());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// On a GPU, the full bucket has a new address until the bucket is resharded ([`Stepper::ptr`] returns the
    /// address). With [`Nccl`](crate::cuda::Nccl), all ranks must unshard and hand over buckets in the same order,
    /// because NCCL runs a device's collectives in the order of the calls. This strategy has run in two processes on
    /// one H200, but not on several GPUs yet.
    ///
    /// # Ordering
    /// Returns at once. An access to the bucket waits for the all-gather. The all-gather runs after the bucket's last
    /// step.
    ///
    /// # Errors
    /// `Layout` if there is no such bucket. `Order` if [as many buckets as allowed](StepperBuilder::max_unsharded) are
    /// unsharded already, or if the open pass has launched this bucket. After a [rescue](Self::rescue), returns the
    /// failure that led to the rescue. If the all-gather fails later, the next access returns that failure.
    pub fn unshard(&mut self, bucket: u32) -> Result<()> {
        bucket_numbered(&self.plan, bucket)?;
        self.refuse_rescued()?;
        let schedule = &self.run.get_mut().schedule;
        if schedule.is_full(bucket) {
            return Ok(());
        }
        if schedule.is_bucket_handed_over(bucket) {
            let wrong = "its gradients are handed over in this pass, so it is resharded";
            let remedy = "hand its last gradient over after the last use of its parameters";
            return Err(Error::order(format_args!("bucket {bucket}"), wrong, remedy));
        }
        let is_full = |most: &NonZeroU32| schedule.unsharded().count() >= most.get() as usize;
        if let Some(most) = self.max_unsharded.filter(is_full) {
            let whole: Vec<String> = schedule.unsharded().map(|bucket| bucket.to_string()).collect();
            let buckets = if whole.len() == 1 { "bucket" } else { "buckets" };
            let wrong = format_args!(
                "would be one more than max_unsharded allows, which is {most}, with {buckets} {} unsharded",
                whole.join(", ")
            );
            let remedy = "reshard one first, or allow more";
            return Err(Error::order(format_args!("bucket {bucket}"), wrong, remedy));
        }
        // In an open pass, the schedule uses the agreement with which the pass began.
        let agreement = if schedule.is_open() { 0 } else { self.agreed_number() };
        let run = self.run.get_mut();
        run.schedule.unshard(bucket, agreement);
        run.submit();
        Ok(())
    }

    /// Frees the other ranks' shards of a bucket's parameters, with [`Strategy::Fsdp`](crate::Strategy::Fsdp). This
    /// call is not a collective. A bucket is also resharded when it is launched, that is, once its gradients and those
    /// of earlier buckets are handed over. Every bucket is resharded when a pass is finished or abandoned. The call
    /// does nothing unless the bucket is [unsharded](Self::unshard).
    ///
    /// # Ordering
    /// Returns at once. On a GPU, the other ranks' shards are freed after all earlier work on the trainer's stream.
    ///
    /// # Errors
    /// `Layout` if there is no such bucket.
    pub fn reshard(&mut self, bucket: u32) -> Result<()> {
        bucket_numbered(&self.plan, bucket)?;
        self.note_reshard(bucket);
        let run = self.run.get_mut();
        run.schedule.reshard(bucket);
        run.submit();
        Ok(())
    }

    /// Refuses access to a parameter or a copy while this rank has only a shard of it.
    pub(super) fn refuse_resharded(&self, id: ParamId, memory: Memory) -> Result<()> {
        let segment = self.plan.segment_of(self.layout.index(id)?);
        if !memory.is_sent() || segment.len == 0 || self.run.borrow().schedule.is_full(segment.bucket) {
            return Ok(());
        }
        let (name, bucket) = (&self.layout.parameters()[segment.param as usize].name, segment.bucket);
        let wrong = format_args!("bucket {bucket} is not unsharded");
        let remedy = format_args!("call unshard({bucket}) on all ranks");
        Err(Error::order(format_args!("`{name}`"), wrong, remedy))
    }

    /// Refuses a mutable slice of a sharded or offloaded parameter.
    pub(super) fn refuse_sharded_slice(&self, id: ParamId, memory: Memory) -> Result<()> {
        let segment = self.plan.segment_of(self.layout.index(id)?);
        if memory == Memory::Params && self.plan.is_offloaded() {
            let wrong = "the host has them too, and steps those";
            return Err(Error::unsupported("mutable slice of parameters", wrong, "use Stepper::write"));
        }
        if memory != Memory::Params || !self.plan.shards_params() || !self.is_sharded(segment) {
            return Ok(());
        }
        let wrong = "they are sharded, and ranks compare what they write";
        Err(Error::unsupported("mutable slice of parameters", wrong, "use Stepper::write"))
    }

    /// Returns how many bytes of parameters or copies this rank does not have now, because their buckets are resharded.
    pub(super) fn resharded_bytes(&self, memory: Memory) -> u64 {
        let schedule = &self.run.borrow().schedule;
        let resharded = (0..).zip(self.plan.buckets()).filter(|(k, _)| !schedule.is_full(*k));
        let sent = resharded.filter(|(_, bucket)| Memory::sent_of(bucket).any(|sent| sent == memory));
        sent.flat_map(|(_, bucket)| Span::resharded(memory, &self.plan, bucket))
            .map(|others| others.bytes())
            .sum()
    }
}
