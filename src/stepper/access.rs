//! Copies tensors to the host and back on every device, returns the status of passes, and makes a failed stepper
//! readable.
//!
//! These calls are for initialising, saving and checking, and for small trainers. A large trainer uses slices on the
//! host (`views.rs`) and addresses on a GPU (`gpu.rs`). A wrong length is refused before anything is touched. The host
//! device skips every op after the first failure, so its memory can be read afterwards. A GPU still runs steps that
//! were queued after a failed all-reduce, so reads of its memory are refused.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::layout::ParamId;
use crate::op::Memory;
use crate::stepper::state::options::Status;
use crate::stepper::stepper::Stepper;
use crate::stepper::tensor::TensorId;

impl<D: Device> Stepper<D> {
    /// Copies a tensor to the host as f32, with any [precision](crate::Precision). Between passes it copies any
    /// tensor. In a pass it copies a parameter, or a gradient that was written in that pass. Writing the values back
    /// restores the same bits if the precision is the same. A lower precision rounds the values.
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
    /// `Layout` if the parameter belongs to another layout or the length differs. `Unsupported` if the stepper keeps no
    /// such tensor. `Order` inside a pass for a state, copy or average. `Order` for a parameter or gradient that was
    /// handed over in this micro-batch. `Order` for a gradient that was not written in the open pass or, with
    /// [`Accumulation::Summed`](crate::Accumulation), in this micro-batch. `Order` between passes for a gradient that
    /// was [released](crate::Gradients::Release). `Sharded` for a [sharded](crate::Strategy) tensor. `Poisoned` after a
    /// failure.
    pub fn read<'n>(&self, tensor: impl Into<TensorId<'n>>, into: &mut [f32]) -> Result<()> {
        let (id, memory) = self.find(tensor.into())?;
        self.check_len(id, into.len())?;
        self.admit_read(id, memory)?;
        self.read_values(id, memory, into)
    }

    /// Replaces a tensor by values from the host. Write gradients inside a pass, and other tensors between passes.
    ///
    /// A write of a parameter also writes its [master weight](crate::Master). The first pass broadcasts all of rank 0's
    /// parameters. After a later write of a parameter, the next pass broadcasts only the bucket that has this
    /// parameter, from rank 0. All ranks must write the same parameters. If ranks write different parameters, or one
    /// rank writes none, the next collective returns `Mismatch`. If the ranks are in one process, the error names the
    /// parameter. States, averages and local parameters are never broadcast. Every rank must write the same states and
    /// averages, and set the same step counts ([`set_step_count`](Self::set_step_count)). If only some ranks write a
    /// state or an average, the next collective that [compares](Self::set_lr) returns `Mismatch`. The written values
    /// are not compared.
    ///
    /// If parameters or masters are [sharded](crate::Strategy), nothing is broadcast, and each rank stores its shard of
    /// the written values. Ranks then compare the written values, also those of writes before the first pass.
    ///
    /// # Shapes
    /// `from` has as many elements as the parameter.
    ///
    /// # Ordering
    /// Waits for the last step of the tensor's bucket if the tensor is a gradient. For any other tensor, waits for all
    /// steps.
    ///
    /// # Errors
    /// `Layout` if the parameter belongs to another layout or the length differs. `Unsupported` for a copy, or if the
    /// stepper keeps no such tensor. `Order` for a gradient between passes, for any other tensor inside a pass, or for
    /// a gradient that is frozen or was handed over in this micro-batch. `Poisoned` after a failure.
    pub fn write<'n>(&mut self, tensor: impl Into<TensorId<'n>>, from: &[f32]) -> Result<()> {
        let (id, memory) = self.find(tensor.into())?;
        self.check_len(id, from.len())?;
        self.admit_write(id, memory)?;
        self.write_values(id, memory, from)?;
        self.note_shared(id, memory, from)?;
        self.note_written(id, memory)
    }

    /// Lets the closure `write` change each parameter. The closure is called once per parameter, in registration order,
    /// with the parameter's name and its values as f32. If parameters are not sharded, the next pass broadcasts those
    /// of rank 0. All ranks must write the same parameters, as with [`Stepper::write`](Self::write). If the master is
    /// [sharded](crate::Strategy), the closure gets the rounded parameter instead of the master.
    ///
    /// # Ordering
    /// Waits for all steps. With [`Strategy::Fsdp`](crate::Strategy::Fsdp) all ranks must make this call together,
    /// because it [gathers](Self::gather) each parameter.
    ///
    /// # Errors
    /// `Order` inside a pass. `Poisoned` after a failure. With [`Strategy::Fsdp`](crate::Strategy::Fsdp), `Mismatch` or
    /// `Deadline` if a rank does not take part. If parameters are sharded, or have masters that are sharded or
    /// [offloaded](crate::StepperBuilder::offload), ranks compare the written values. The next collective returns
    /// `Mismatch` if these values differ.
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

    /// Returns the names of the states that a parameter's own optimizers keep. The parameter's other states stay zero.
    pub(crate) fn states_kept_for(&self, id: ParamId) -> Result<Vec<String>> {
        Ok(self.optimizers.kept(self.layout.index(id)?).collect())
    }

    /// Returns the result of the last pass, such as its norm and whether it was skipped.
    ///
    /// # Ordering
    /// Waits for all steps. If you make this call after every pass in Normed, steps no longer overlap with the next
    /// forward.
    ///
    /// # Errors
    /// `Order` inside a pass. `Poisoned` after a failure.
    pub fn status(&self) -> Result<Status> {
        self.settle_control()?;
        self.read_status()
    }

    /// Returns, without waiting, the status of the newest pass that is known to have ended. If the device lags the host
    /// by two passes, the status is two passes old. Returns `None` before the first pass has ended. Abandoned passes
    /// have no status, but are [counted](Status::abandoned).
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
    /// On the host, memory has the results of the ops that ran before the failure. Steps that had not run before the
    /// failure are skipped, even if all collectives of their pass had completed. In Sequential and Normed, a pass with
    /// a failed all-reduce has changed nothing. In Eager, the first buckets of that pass may have been stepped. [Step
    /// counts](Self::step_count) show which ones.
    ///
    /// With sharded states, a step of [`Lamb`](crate::Lamb) waits for the other ranks after it has updated the moments
    /// and before it updates the parameters. If the failure came during this wait, the bucket's moments are one update
    /// ahead of its parameters.
    ///
    /// With [`Strategy::Fsdp`](crate::Strategy), no sharded parameter can be read, because the other ranks' shards are
    /// lost. With [`Strategy::Zero`](crate::Strategy), the parameters of a bucket cannot be read if the failure came
    /// between the bucket's step and its all-gather. Only this rank's shard was stepped then.
    ///
    /// On a GPU, rescue is refused after a failure. A step on a GPU runs once its all-reduce has ended, even if the
    /// all-reduce has failed. Steps of up to eight passes may therefore have used the gradients of a failed all-reduce,
    /// so no parameter is reliable. Continue from a [checkpoint](crate::checkpoint).
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
    /// Waits until every op has ended or been skipped. Waits for other ranks until the deadline.
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
