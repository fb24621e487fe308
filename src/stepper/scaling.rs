//! Reads, saves and loads the values that one pass computes for the next: the dynamic loss scale, and the norm for
//! clipping.
//!
//! The device stores the values. In each pass, the trainer reads the pass's loss scale. This read must not wait for a
//! step, because otherwise steps in `Normed` mode could not overlap with the next forward.

use std::mem::offset_of;

use crate::abi::InstepControl;
use crate::cuda::CudaDevice;
use crate::device::{Device, Executor};
use crate::error::{Error, Result};
use crate::handle::DevicePtr;
use crate::op::{Access, Memory, Span};
use crate::optim::{Clip, LossScale, ScalerState};
use crate::schedule::Schedule;
use crate::stepper::stepper::Stepper;

const PREVIOUS_NORM: Span = field(offset_of!(InstepControl, previous_norm), 8);
const NORM: Span = field(offset_of!(InstepControl, norm), 8);
const DECIDED: Span = field(offset_of!(InstepControl, decided), 4);

const fn field(offset: usize, bytes: u64) -> Span {
    Span { memory: Memory::Control, start: offset as u64, end: offset as u64 + bytes }
}

impl<D: Device> Stepper<D> {
    /// Returns the state of dynamic loss scaling after the last pass, for a checkpoint: the next pass's scale, and the
    /// growth tracker.
    ///
    /// # Ordering
    /// Waits for the last pass's decision, not for its steps. On a GPU, the host waits for all work on the trainer's
    /// stream.
    ///
    /// # Errors
    /// `Order` inside a pass. `Config` without a [dynamic loss scale](crate::LossScale::Dynamic). `Poisoned` after a
    /// failure.
    pub fn scaler_state(&self) -> Result<ScalerState> {
        self.refuse_open_pass()?;
        self.read_scaler()
    }

    /// Sets the state of dynamic loss scaling, to resume a run. All ranks must set the same state. If the states
    /// differ, the next pass's first collective that [compares calls](Self::set_lr) returns `Mismatch`.
    ///
    /// ```
    /// # use instep::{Layout, LossScaler, Mode, ScalerState, Sgd, Solo, Stepper};
    /// # let layout = Layout::builder().param("w", 2).build()?;
    /// # let builder = Stepper::builder(&layout, Sgd::default()).mode(Mode::Normed);
    /// let mut stepper = builder.loss_scale(LossScaler::default()).host(Solo::default())?;
    /// let saved = ScalerState { scale: 1024.0, growth_tracker: 1999 };
    /// stepper.set_scaler_state(saved)?;
    /// assert_eq!(stepper.scaler_state()?, saved);
    /// stepper.begin()?.finish()?; // the 2000th finite pass in a row
    /// assert_eq!(stepper.scaler_state()?, ScalerState { scale: 2048.0, growth_tracker: 0 });
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// Errors as for [`scaler_state`](Self::scaler_state). `Config` if the scale is not exact in f32, or if f32
    /// gradients cannot be divided by it.
    pub fn set_scaler_state(&mut self, state: ScalerState) -> Result<()> {
        self.require_scaler()?;
        state.validate(self.divisor)?;
        let words = [(state.scale as f32).to_bits(), state.growth_tracker];
        self.write_control_part(Span::LOSS_SCALE, bytemuck::bytes_of(&words))?;
        self.loaded.scaler = Some(state);
        self.agreement.forget();
        Ok(())
    }

    /// Returns the norm by which [`Clip::Previous`](crate::Clip::Previous) will clip the next pass, for a checkpoint.
    /// The result is the last finite norm of any pass, or `None` if no pass has had a finite norm yet.
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// `Order` inside a pass. `Config` without [`Clip::Previous`](crate::Clip::Previous). `Poisoned` after a failure.
    pub fn previous_norm(&self) -> Result<Option<f64>> {
        self.refuse_open_pass()?;
        self.require_previous_clip()?;
        Ok(Some(f64::from_ne_bytes(self.read_control_part(PREVIOUS_NORM)?)).filter(|norm| *norm >= 0.0))
    }

    /// Sets the norm by which the next pass is clipped, to resume a run. All ranks must set the same norm, as with
    /// [`set_scaler_state`](Self::set_scaler_state).
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// Errors as for [`previous_norm`](Self::previous_norm). `Config` for a norm that is negative or not finite.
    pub fn set_previous_norm(&mut self, norm: Option<f64>) -> Result<()> {
        if let Some(norm) = norm.filter(|norm| !(*norm >= 0.0 && norm.is_finite())) {
            return Err(Error::range("previous_norm", norm, "a finite number of at least 0"));
        }
        self.refuse_open_pass()?;
        self.require_previous_clip()?;
        self.write_control_part(PREVIOUS_NORM, &norm.unwrap_or(-1.0).to_ne_bytes())?;
        self.loaded.previous_norm = Some(norm);
        self.agreement.forget();
        Ok(())
    }

    /// Returns the norm of the last pass's averaged gradients. The norm covers all groups that are clipped together
    /// with this group. If the group is [clipped alone](crate::StepperBuilder::group_clip), the result is the norm of
    /// this group. If the group is not clipped, the result is the norm of all groups that are not clipped. Otherwise
    /// the result is [`Status::norm`](crate::Status::norm). Returns `None` if `Status::norm` is `None`, and after
    /// [`rebuild_buckets`](Self::rebuild_buckets) until the next pass.
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// `Order` inside a pass. `Config` if the layout has no such group. `Poisoned` after a failure.
    pub fn group_norm(&self, group: &str) -> Result<Option<f64>> {
        let index = self.layout.require_group("group", group)?;
        let status = self.status()?;
        let clip_set = self.plan.asked().clip_sets(&self.layout)?.0[index];
        let Some(block) = clip_set.checked_sub(1) else { return Ok(status.norm) };
        let is_decided = self.copy_control_part(DECIDED.of_control_block(block))? != [0; 4];
        let norm = f64::from_ne_bytes(self.copy_control_part(NORM.of_control_block(block))?);
        Ok(is_decided.then_some(norm))
    }

    /// Returns whether passes are clipped by the previous pass's norm. A checkpoint of such a stepper includes that
    /// norm, in every mode.
    pub(crate) fn clips_by_previous_norm(&self) -> bool {
        matches!(self.clip, Some(Clip::Previous(_)))
    }

    fn require_previous_clip(&self) -> Result<()> {
        if self.clips_by_previous_norm() {
            return Ok(());
        }
        let clip = self.clip.map_or("unset".to_owned(), |clip| format!("{clip:?}"));
        let wrong = "this stepper clips nothing by the previous norm";
        Err(Error::config("clip", clip, wrong, "build with Clip::Previous"))
    }

    /// Returns the loss scaler's state for a checkpoint, or `None` if the loss scale is not dynamic.
    pub(crate) fn scaler_state_if_any(&self) -> Result<Option<ScalerState>> {
        if self.loss_scale.is_dynamic() { self.scaler_state().map(Some) } else { Ok(None) }
    }

    /// Returns whether the loss scale is dynamic. If the scale is dynamic, returns an error for a state that
    /// [`set_scaler_state`](Self::set_scaler_state) would refuse.
    pub(crate) fn accepts_scaler_state(&self, state: ScalerState) -> Result<bool> {
        if self.loss_scale.is_dynamic() {
            state.validate(self.divisor)?;
        }
        Ok(self.loss_scale.is_dynamic())
    }

    fn require_scaler(&self) -> Result<()> {
        if self.loss_scale.is_dynamic() {
            return Ok(());
        }
        let remedy = "build with a LossScaler as StepperBuilder::loss_scale";
        let value = match self.loss_scale {
            LossScale::External(_) => return Err(kept_by_the_caller()),
            scale => scale.initial(),
        };
        Err(Error::config("loss_scale", value, "constant in this stepper", remedy))
    }

    fn read_scaler(&self) -> Result<ScalerState> {
        self.require_scaler()?;
        let [scale, growth_tracker]: [u32; 2] = bytemuck::cast(self.read_loss_scale()?);
        Ok(ScalerState { scale: f32::from_bits(scale).into(), growth_tracker })
    }
}

impl<D: Device> Stepper<D> {
    /// Returns the loss scale of the open pass. Between passes, returns the scale of the next pass. The trainer
    /// multiplies its loss by the scale, and the steps divide the gradients by the scale. A
    /// [dynamic](crate::LossScale::Dynamic) scale is exact in f32. Any other scale is the number with which the stepper
    /// was built.
    ///
    /// ```
    /// # use instep::{Layout, LossScaler, Mode, Sgd, Solo, Stepper};
    /// # let layout = Layout::builder().param("w", 1).build()?;
    /// # let w = layout.id("w")?;
    /// # let sgd = Sgd { lr: 1.0, ..Default::default() };
    /// let scaler = LossScaler { initial_scale: 2f64.powi(100), backoff_factor: 2f64.powi(-40), ..Default::default() };
    /// let mut stepper = Stepper::builder(&layout, sgd).mode(Mode::Normed).loss_scale(scaler).host(Solo::default())?;
    /// for expected in [-0.0, -1e9] {
    ///     let mut pass = stepper.begin()?;
    ///     let scale = pass.loss_scale()? as f32;
    ///     pass.grads().write(w, &[1e9 * scale])?; // too much for f32 under the first scale
    ///     pass.finish()?;
    ///     assert_eq!(stepper.view::<f32>(w)?, [expected]);
    /// }
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// Waits for the previous pass's decision, and thus for its last collective, but not for its steps. Call this
    /// method after forward, when you scale the loss. On a GPU, the host waits for all work on the trainer's stream.
    /// [`loss_scale_ptr`](Self::loss_scale_ptr) avoids this wait.
    ///
    /// # Errors
    /// `Config` if the loss scale comes from a [`grad_scaler`](crate::StepperBuilder::grad_scaler). `Poisoned` after a
    /// failure.
    pub fn loss_scale(&self) -> Result<f64> {
        match self.loss_scale {
            LossScale::Constant(loss_scale) => Ok(loss_scale),
            LossScale::Dynamic(_) => Ok(self.read_scaler()?.scale),
            LossScale::External(_) => Err(kept_by_the_caller()),
        }
    }
}

fn kept_by_the_caller() -> Error {
    Error::config("loss_scale", "external", "the caller's own scaler keeps it", "ask that scaler")
}

impl Stepper<CudaDevice> {
    /// Returns the address of the open pass's loss scale, which is one f32. The trainer's own kernels can read the loss
    /// scale at this address. The address stays the same, so a captured graph may hold it.
    ///
    /// # Ordering
    /// Work that you enqueue on the trainer's stream between this call and the end of the pass runs after the previous
    /// pass's decision. This call adds no wait for the previous pass's steps. The open pass's decision runs after such
    /// work. The host does not wait.
    ///
    /// # Errors
    /// `Config` without a [dynamic loss scale](crate::LossScale::Dynamic). `Order` between passes. `Poisoned` after a
    /// failure.
    pub fn loss_scale_ptr(&self) -> Result<DevicePtr> {
        self.require_scaler()?;
        self.refuse_closed_pass()?;
        let mut run = self.run.borrow_mut();
        run.touch(Schedule::touch_loss_scale)?;
        run.note(Access { span: Span::LOSS_SCALE, writes: false });
        Ok(DevicePtr(run.device.resolve(Span::LOSS_SCALE).addr() as u64))
    }
}
