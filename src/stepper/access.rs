//! Copies tensors to the host and back on every device, returns the status of passes, and makes a failed stepper
//! readable.
//!
//! The calls are for initialising, saving and checking tensors, and for small trainers. A large trainer uses slices on
//! the host (`views.rs`) and addresses on a GPU (`gpu.rs`) instead. A wrong length is refused before anything is
//! touched. After a first failure, the host device skips all further ops, so its memory can still be read. A GPU still
//! runs steps that were queued after a failed all-reduce, so its memory cannot be read after a failure.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::layout::ParamId;
use crate::op::Memory;
use crate::stepper::state::options::Status;
use crate::stepper::stepper::Stepper;
use crate::stepper::tensor::TensorId;

impl<D: Device> Stepper<D> {
    /// Copies a tensor to the host. The values are converted from the tensor's [precision](crate::Precision) to f32.
    /// Between passes, `tensor` can be any tensor. In a pass, it can be a parameter, or a gradient that was written in
    /// that pass. If you [write](Self::write) the values back, the tensor has the same bits as before. If you write the
    /// values to a stepper of lower precision, they are rounded.
    ///
    /// ```
    /// # use instep::{Layout, Sgd, Solo, Stepper};
    /// # let layout = Layout::builder().param("w", 2).build()?;
    /// # let w = layout.id("w")?;
    /// let mut stepper = Stepper::host(&layout, Sgd { lr: 1.0, ..Default::default() }, Solo::default())?;
    /// stepper.write(w, &[3.0, 4.0])?;
    /// let mut pass = stepper.begin()?;
    /// pass.write(w.grad(), &[1.0, 1.0])?;
    /// pass.finish()?;
    /// let mut weights = [0.0; 2];
    /// stepper.read(w, &mut weights)?;
    /// assert_eq!(weights, [2.0, 3.0]);
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Shapes
    /// `into` has as many elements as the parameter.
    ///
    /// # Ordering
    /// Waits for the last step of the tensor's bucket if the tensor is a parameter, a parameter's copy, or (inside a
    /// pass) a gradient. For any other tensor, waits for all steps.
    ///
    /// # Errors
    /// `Layout` if the parameter belongs to another layout, or if `into` has another length. `Unsupported` if the
    /// stepper has no such tensor. `Order` inside a pass for a state, copy or moving average. `Order` for a parameter
    /// or gradient that was handed over in this micro-batch. `Order` for a gradient that was not written in the open
    /// pass or, with [`Accumulation::Summed`](crate::Accumulation), in this micro-batch. `Order` between passes for a
    /// gradient that was [released](crate::Gradients::Release). `Sharded` for a [sharded](crate::Strategy) tensor.
    /// `Poisoned` after a failure.
    pub fn read<'n>(&self, tensor: impl Into<TensorId<'n>>, into: &mut [f32]) -> Result<()> {
        let (id, memory) = self.find(tensor.into())?;
        self.check_len(id, into.len())?;
        self.admit_read(id, memory)?;
        self.read_values(id, memory, into)
    }

    /// Replaces a tensor's values by f32 values from the host. Write gradients inside a pass, and all other tensors
    /// between passes.
    ///
    /// A write of a parameter also writes its [master weight](crate::Master). The first pass broadcasts all of rank 0's
    /// parameters. If you write a parameter later, the next pass broadcasts rank 0's values of that parameter's bucket.
    /// All ranks must write the same parameters. If a rank does not write a parameter that another rank writes, the
    /// next collective returns `Mismatch`. If the ranks are in one process, the error names the parameter.
    ///
    /// States, moving averages and local parameters are never broadcast. Every rank must write the same values to
    /// states and averages, and set the same step counts ([`set_step_count`](Self::set_step_count)). If only some ranks
    /// write a state or an average, the next collective that [compares calls](Self::set_lr) returns `Mismatch`. Ranks
    /// do not compare the values that were written to states and averages.
    ///
    /// [Sharded](crate::Strategy) parameters and masters are not broadcast: each rank stores its own shard of the
    /// values that it wrote. Ranks compare all values that they wrote to such parameters, including values written
    /// before the first pass.
    ///
    /// # Shapes
    /// `from` has as many elements as the parameter.
    ///
    /// # Ordering
    /// Waits for the last step of the tensor's bucket if the tensor is a gradient. For any other tensor, waits for all
    /// steps.
    ///
    /// # Errors
    /// `Layout` if the parameter belongs to another layout, or if `from` has another length. `Unsupported` for a copy,
    /// or if the stepper has no such tensor. `Order` for a gradient between passes, and for any other tensor inside a
    /// pass. `Order` for the gradient of a frozen parameter, and for a gradient that was handed over in this
    /// micro-batch. `Poisoned` after a failure.
    pub fn write<'n>(&mut self, tensor: impl Into<TensorId<'n>>, from: &[f32]) -> Result<()> {
        let (id, memory) = self.find(tensor.into())?;
        self.check_len(id, from.len())?;
        self.admit_write(id, memory)?;
        self.write_values(id, memory, from)?;
        self.note_shared(id, memory, from)?;
        self.note_written(id, memory)
    }

    /// Lets the closure `write` change each parameter. The closure is called once per parameter, in registration order,
    /// with the parameter's name and its values as f32. If parameters are not sharded, the next pass broadcasts rank
    /// 0's parameters. All ranks must make this call, because ranks compare which parameters they [wrote](Self::write).
    /// With [`Strategy::Zero`](crate::Strategy), a parameter's master weight is sharded, so the closure gets the
    /// parameter's own rounded values instead of the master's.
    ///
    /// # Ordering
    /// Waits for all steps. With [`Strategy::Fsdp`](crate::Strategy::Fsdp), all ranks must make this call together,
    /// because it [gathers](Self::gather) each parameter.
    ///
    /// # Errors
    /// `Order` inside a pass. `Poisoned` after a failure. With [`Strategy::Fsdp`](crate::Strategy::Fsdp), returns
    /// `Mismatch` or `Deadline` if a rank does not make the call. Ranks compare the written values if parameters are
    /// sharded, or if masters are sharded or [offloaded](crate::StepperBuilder::offload). If the values differ, the
    /// next collective returns `Mismatch`.
    pub fn fill_params(&mut self, mut write: impl FnMut(&str, &mut [f32])) -> Result<()> {
        self.settle_between_passes()?;
        let layout = self.layout.clone();
        let mut values = Vec::new();
        for id in layout.ids() {
            let parameter = layout.parameter(id)?;
            values.resize(parameter.len as usize, 0.0);
            if self.plan.shards_params() {
                self.gather(id, &mut values)?;
            } else {
                match self.read_values(id, Memory::Params, &mut values) {
                    Err(Error::Sharded { .. }) => self.read_stored_param(id, &mut values)?,
                    outcome => outcome?,
                }
            }
            write(&parameter.name, &mut values);
            // The write is noted first, because a failed write may have changed the parameter.
            self.note_written(id, Memory::Params)?;
            self.write_values(id, Memory::Params, &values)?;
            self.note_shared(id, Memory::Params, &values)?;
        }
        Ok(())
    }

    /// Returns whether the next write of a gradient is the first one in the open pass. With
    /// [`Accumulation::Summed`](crate::Accumulation), only writes in this micro-batch count. The first write replaces
    /// the gradient, and later writes add to it.
    ///
    /// # Errors
    /// `Order` between passes. `Layout` if `id` belongs to another layout.
    pub fn is_first(&self, id: ParamId) -> Result<bool> {
        let index = self.layout.index(id)?;
        self.refuse_closed_pass()?;
        Ok(!self.written.borrow()[index])
    }

    pub(crate) fn keeps_ema(&self) -> bool {
        self.plan.keeps_ema()
    }

    /// Returns the names of the states that the optimizers of one parameter use. Steps do not change the parameter's
    /// other states.
    pub(crate) fn states_kept_for(&self, id: ParamId) -> Result<Vec<String>> {
        Ok(self.optimizers.kept(self.layout.index(id)?).collect())
    }

    /// Returns the result of the last pass, such as its norm and whether it was skipped.
    ///
    /// # Ordering
    /// Waits for all steps. If you make this call after every pass in `Normed` mode, steps no longer overlap with the
    /// next forward.
    ///
    /// # Errors
    /// `Order` inside a pass. `Poisoned` after a failure.
    pub fn status(&self) -> Result<Status> {
        self.settle_control()?;
        self.read_status()
    }

    /// Returns, without waiting, the status of the newest pass that is known to have ended. If the device lags the host
    /// by two passes, the status is two passes old. Returns `None` before the first pass has ended. An abandoned pass
    /// has no status. [`Status::abandoned`] counts abandoned passes.
    pub fn latest_status(&self) -> Option<Status> {
        self.run.borrow().device.latest().map(|published| Status::new(&published, self.abandoned))
    }
}

impl<D: Device> Stepper<D> {
    /// Makes a failed stepper readable, so that you can save this rank's training when another rank has died.
    /// Afterwards you can read [tensors](Self::read), step counts and [`status`](Self::status), and save
    /// [checkpoints](crate::checkpoint). Passes are still refused. If there was no failure, this call only waits, and
    /// changes nothing.
    ///
    /// On the host, memory contains the results of the ops that ran before the failure. Steps that had not run before
    /// the failure are skipped, even if all collectives of their pass had completed. In `Sequential` and `Normed` mode,
    /// a pass with a failed all-reduce has changed nothing. In `Eager` mode, the first buckets of that pass may have
    /// been stepped. [Step counts](Self::step_count) show which buckets were stepped.
    ///
    /// With sharded states, a step of [`Lamb`](crate::Lamb) waits for the other ranks after it has updated the moments
    /// and before it updates the parameters. If the failure came during this wait, the bucket's moments are one update
    /// ahead of its parameters.
    ///
    /// With [`Strategy::Fsdp`](crate::Strategy), no sharded parameter can be read, because the other ranks' shards are
    /// lost. With [`Strategy::Zero`](crate::Strategy), the parameters of a bucket cannot be read if the failure came
    /// between the bucket's step and its all-gather. In such a bucket, only this rank's shard has been stepped.
    ///
    /// On a GPU, this call is refused after a failure. A step on a GPU runs as soon as its all-reduce has ended, even
    /// if the all-reduce has failed. Steps of up to eight passes may therefore have used the gradients of a failed
    /// all-reduce, so no parameter is reliable. Continue from an earlier [checkpoint](crate::checkpoint) instead.
    ///
    /// ```
    /// use instep::{AdamW, Layout, Stepper, in_process};
    ///
    /// let layout = Layout::builder().param("w", 4).build()?;
    /// let w = layout.id("w")?;
    /// let _ = in_process(2, |comm| {
    ///     let is_lost = comm.rank() == 1;
    ///     let mut stepper = Stepper::host(&layout, AdamW::default(), comm)?;
    ///     for step in 0..3 {
    ///         if is_lost && step == 2 {
    ///             return Ok(()); // as if its process had died
    ///         }
    ///         let mut pass = stepper.begin()?;
    ///         pass.grads().write(w, &[1.0; 4])?;
    ///         pass.finish()?;
    ///     }
    ///     if stepper.status().is_err() {
    ///         stepper.rescue()?;
    ///         assert_eq!(stepper.step_count(w)?, 2);
    ///         assert!(stepper.view::<f32>(w)?[0] < 0.0);
    ///         assert!(stepper.begin().is_err());
    ///     }
    ///     Ok::<(), instep::Error>(())
    /// });
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// Waits until every op has ended or has been skipped. An op that waits for other ranks waits at most until the
    /// deadline.
    ///
    /// # Errors
    /// `Order` inside a pass. `Unsupported` on a GPU after a failure.
    pub fn rescue(&mut self) -> Result<()> {
        self.refuse_open_pass()?;
        let run = self.run.get_mut();
        if !D::TRAINER_IS_A_STREAM {
            run.rescue();
            return self.restore_params();
        }
        run.schedule.synchronize();
        // A GPU may report a failure only after the host has waited for the GPU.
        let outcome = run.settle().and_then(|()| run.device.synchronize());
        outcome.map_err(|_| {
            let thing = format_args!("rescue from {}", run.device.place());
            let wrong =
                "steps that were queued after the op that failed have run, on gradients that are no sum";
            Error::unsupported(thing, wrong, "go on from the last checkpoint")
        })
    }
}
