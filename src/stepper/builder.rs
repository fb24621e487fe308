//! Options of a stepper.
//!
//! Options are plain values that `build.rs` checks against each other. No setter returns an error, because an option
//! can be checked only together with the others.

use crate::stepper::state::options::{Accumulation, Divisor, OffloadPolicy, Strategy, Unused};
use crate::stepper::stepper::Stepper;
use std::collections::HashSet;
use std::num::NonZeroU32;
use std::time::Duration;

use crate::dtype::DType;
use crate::error::Error;
use crate::host::Isa;
use crate::layout::{BucketCaps, Gradients, Layout, ParamId, Precision};
use crate::optim::{Clip, LossScale, LrSchedule, Optimizer};
use crate::schedule::Mode;
use crate::stepper::state::optimizers::{Registered, Target, places};

/// Options of a [`Stepper`](crate::Stepper).
pub struct StepperBuilder<'a> {
    pub(super) layout: &'a Layout,
    /// The optimizer of parameters for which no other optimizer is registered.
    pub(super) optimizer: Option<Box<dyn Optimizer>>,
    pub(super) registered: Vec<Registered>,
    /// The parameters that are stepped, as indices into the layout. `None` means all parameters.
    pub(super) optimized: Option<HashSet<usize>>,
    /// The first error that any setter found. Building the stepper returns it.
    pub(super) refused: Option<Error>,
    pub(super) lr_schedules: Vec<(String, LrSchedule)>,
    pub(super) mode: Mode,
    pub(super) strategy: Strategy,
    pub(super) shard_size: Option<NonZeroU32>,
    pub(super) max_unsharded: Option<NonZeroU32>,
    pub(super) offload: Option<OffloadPolicy>,
    pub(super) accumulation: Accumulation,
    pub(super) caps: Option<BucketCaps>,
    pub(super) gradients: Gradients,
    pub(super) precision: Precision,
    pub(super) group_precisions: Vec<(String, Precision)>,
    pub(super) copy_dtype: Option<DType>,
    pub(super) ema_decay: Option<f64>,
    /// If this is `None`, the default depends on who owns the buckets and who sums them.
    pub(super) unused: Option<Unused>,
    pub(super) uneven_inputs: Option<Divisor>,
    pub(super) gradient_divisor: Option<f64>,
    pub(super) clip: Option<Clip>,
    pub(super) group_clips: Vec<(String, Option<f64>)>,
    pub(super) skip_nonfinite: bool,
    pub(super) loss_scale: LossScale,
    pub(super) isa: Option<Isa>,
    pub(super) threads: Option<usize>,
    pub(super) is_inline: bool,
    pub(super) deadline: Option<Duration>,
    pub(super) record: bool,
}

impl Stepper {
    /// Returns the default options for a stepper of `layout`.
    pub fn builder(layout: &Layout, optimizer: impl Optimizer + 'static) -> StepperBuilder<'_> {
        StepperBuilder::new(layout, Some(optimizer.as_rule().boxed()))
    }

    /// Returns the default options for a stepper of `layout` without a default optimizer. Set optimizers with
    /// [`group`](StepperBuilder::group) and [`optimizer_for`](StepperBuilder::optimizer_for). If a parameter has no
    /// optimizer, its gradient is only averaged over the ranks.
    pub fn builder_without_optimizer(layout: &Layout) -> StepperBuilder<'_> {
        StepperBuilder::new(layout, None)
    }
}

impl<'a> StepperBuilder<'a> {
    pub(super) fn new(layout: &'a Layout, optimizer: Option<Box<dyn Optimizer>>) -> Self {
        StepperBuilder {
            layout,
            optimizer,
            registered: Vec::new(),
            optimized: None,
            refused: None,
            lr_schedules: Vec::new(),
            mode: Mode::default(),
            strategy: Strategy::default(),
            shard_size: None,
            max_unsharded: None,
            offload: None,
            accumulation: Accumulation::default(),
            caps: None,
            gradients: Gradients::default(),
            precision: Precision::F32,
            group_precisions: Vec::new(),
            copy_dtype: None,
            ema_decay: None,
            unused: None,
            uneven_inputs: None,
            gradient_divisor: None,
            clip: None,
            group_clips: Vec::new(),
            skip_nonfinite: false,
            loss_scale: LossScale::Constant(1.0),
            isa: None,
            threads: None,
            is_inline: false,
            deadline: None,
            record: false,
        }
    }

    /// Sets the optimizer of one group of the layout. A bucket can hold parameters of several groups. Groups with the
    /// same kind of optimizer also share kernel launches.
    pub fn group(self, name: impl Into<String>, optimizer: impl Optimizer + 'static) -> Self {
        self.register(Target::Group(name.into()), optimizer)
    }

    /// Adds an optimizer to one group. The new optimizer steps after the group's earlier optimizers, with the same
    /// gradients. The new optimizer has separate states, named `momentum_buffer#1` and so on.
    ///
    /// ```
    /// # use instep::layout::DEFAULT_GROUP;
    /// # use instep::{Layout, Sgd, Solo, Stepper};
    /// # let layout = Layout::builder().param("w", 1).build()?;
    /// # let w = layout.id("w")?;
    /// let (first, second) = (Sgd { lr: 1.0, ..Sgd::default() }, Sgd { lr: 0.5, ..Sgd::default() });
    /// let mut stepper = Stepper::builder(&layout, first).then(DEFAULT_GROUP, second).host(Solo::default())?;
    /// let mut pass = stepper.begin()?;
    /// pass.grads().write(w, &[2.0])?;
    /// pass.finish()?;
    /// assert_eq!(stepper.view::<f32>(w)?, [-3.0]);
    /// # Ok::<(), instep::Error>(())
    /// ```
    pub fn then(self, group: impl Into<String>, optimizer: impl Optimizer + 'static) -> Self {
        self.register(Target::Further(group.into()), optimizer)
    }

    /// Sets an optimizer for single parameters, in place of their group's optimizers. A parameter may be named in only
    /// one call of `optimizer_for`. [`Stepper::optimizers_of`](crate::Stepper::optimizers_of) returns the optimizer's
    /// id for [`set_lr`](crate::Stepper::set_lr) and [`set_hyper`](crate::Stepper::set_hyper).
    /// [`Stepper::optimizers`](crate::Stepper::optimizers) lists the optimizers of groups first. After these, it lists
    /// one optimizer for each call of `optimizer_for`, [`then_for`](Self::then_for) and [`attach`](Self::attach), in
    /// the order of the calls.
    pub fn optimizer_for(self, params: &[ParamId], optimizer: impl Optimizer + 'static) -> Self {
        self.register_for(params, Target::Params, optimizer)
    }

    /// Adds an optimizer to single parameters ([`then`](Self::then) adds one to a group). The new optimizer steps after
    /// the parameters' earlier optimizers, with the same gradients. The earlier optimizers are those set for the
    /// parameters or for their group.
    pub fn then_for(self, params: &[ParamId], optimizer: impl Optimizer + 'static) -> Self {
        self.register_for(params, Target::FurtherParams, optimizer)
    }

    /// Attaches an optimizer to parameters: the stepper lists the optimizer, but never runs it and keeps no state for
    /// it. If no other optimizer steps a parameter, the stepper averages the parameter's gradient. Your code then runs
    /// the attached optimizer on this gradient. All ranks must attach the same optimizers.
    ///
    /// ```
    /// # use instep::{Layout, Sgd, Solo, Stepper};
    /// # let layout = Layout::builder().param("w", 1).build()?;
    /// # let w = layout.id("w")?;
    /// let builder = Stepper::builder_without_optimizer(&layout).attach(&[w], Sgd::default());
    /// let mut stepper = builder.host(Solo::default())?;
    /// let mut pass = stepper.begin()?;
    /// pass.grads().write(w, &[1.0])?;
    /// pass.finish()?;
    /// assert_eq!((stepper.view::<f32>(w)?[0], stepper.view::<f32>(w.grad())?[0]), (0.0, 1.0));
    /// assert!(stepper.optimizers().all(|attached| !attached.steps));
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Source
    /// PyTorch's `_apply_optimizer_in_backward` with `register_hook=False`.
    pub fn attach(self, params: &[ParamId], optimizer: impl Optimizer + 'static) -> Self {
        self.register_for(params, Target::Nothing, optimizer)
    }

    /// Steps only these parameters. Other parameters have no states. Unless their action is `Leave`, their gradients
    /// are averaged over the ranks for an optimizer outside the stepper
    /// ([`SegmentAction::Average`](crate::SegmentAction) describes these gradients). After that optimizer has computed
    /// new parameters, store them with [`write`](crate::Stepper::write). `None` steps all parameters, and an empty list
    /// steps no parameter.
    pub fn optimize_only(mut self, params: Option<&[ParamId]>) -> Self {
        self.optimized = params.and_then(|params| self.places(params)).map(HashSet::from_iter);
        self
    }

    fn register_for(
        mut self,
        params: &[ParamId],
        target: fn(Vec<usize>) -> Target,
        optimizer: impl Optimizer + 'static,
    ) -> Self {
        match self.places(params) {
            Some(params) => self.register(target(params), optimizer),
            None => self,
        }
    }

    fn register(mut self, target: Target, optimizer: impl Optimizer + 'static) -> Self {
        // `boxed` never wraps a box in another box, so `Stepper::optimizers` can return the optimizer's own type.
        self.registered.push(Registered { target, optimizer: optimizer.as_rule().boxed() });
        self
    }

    fn places(&mut self, params: &[ParamId]) -> Option<Vec<usize>> {
        match places(self.layout, params) {
            Ok(places) => Some(places),
            Err(error) => {
                self.refused.get_or_insert(error);
                None
            }
        }
    }

    /// Sets a schedule for the learning rate of a group's optimizer ([`DEFAULT_GROUP`](crate::layout::DEFAULT_GROUP) if
    /// the layout names no groups). Each pass uses the schedule's learning rate at step n, where n is the number of
    /// finished passes ([`Stepper::schedule_step`](crate::Stepper::schedule_step)). To set the schedule of any other
    /// optimizer, call [`Stepper::set_lr_schedule`](crate::Stepper::set_lr_schedule).
    ///
    /// ```
    /// # use instep::layout::DEFAULT_GROUP;
    /// # use instep::{Layout, LrSchedule, Sgd, Solo, Stepper};
    /// # let layout = Layout::builder().param("w", 1).build()?;
    /// # let w = layout.id("w")?;
    /// let halved = LrSchedule::step(1.0, 1, 0.5); // 1, then 1/2, then 1/4
    /// let builder = Stepper::builder(&layout, Sgd::default()).lr_schedule(DEFAULT_GROUP, halved);
    /// let mut stepper = builder.host(Solo::default())?;
    /// for _ in 0..3 {
    ///     let mut pass = stepper.begin()?;
    ///     pass.grads().write(w, &[1.0])?;
    ///     pass.finish()?;
    /// }
    /// assert_eq!(stepper.view::<f32>(w)?, [-1.75]);
    /// # Ok::<(), instep::Error>(())
    /// ```
    pub fn lr_schedule(mut self, group: impl Into<String>, schedule: LrSchedule) -> Self {
        self.lr_schedules.push((group.into(), schedule));
        self
    }

    /// Sets when steps run. The default is [`Mode::Eager`](crate::Mode). If nothing is clipped or skipped, training
    /// gives bit-identical parameters and states in all modes.
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// Sets the size cap of every bucket, including the first, in bytes of gradients. The default is 1 MiB for the
    /// first bucket and 25 MiB for all others.
    pub fn bucket_cap_bytes(mut self, bytes: u64) -> Self {
        self.caps = Some(BucketCaps { first_bytes: bytes, rest_bytes: bytes });
        self
    }

    /// Sets what happens to the gradients of stepped parameters after the step. The default, [`Keep`](Gradients::Keep),
    /// leaves the sums in place. Parameters, states and step counts have the same bits with every choice. Ranks may
    /// choose differently.
    ///
    /// * [`Zero`](Gradients::Zero): after the pass the gradient is zeros, even if it was not written. The gradient of a
    ///   frozen parameter does not change. A frozen parameter's gradient is already zeros if the parameter was stepped
    ///   before, or shares a bucket with a stepped parameter.
    /// * [`Average`](Gradients::Average): the gradient becomes the value that the optimizer used. A gradient that no
    ///   rank has written becomes zeros. A local parameter's gradient comes from this rank only, and is divided only by
    ///   the loss scale. For gradients with the action [`Average` or `Leave`](crate::SegmentAction), and for gradients
    ///   of parameters without an optimizer, this option has the same effect as `Keep`. PyTorch's `unscale_` and
    ///   `clip_grad_norm_` skip such gradients too. If a pass is abandoned, a bucket that was not stepped holds either
    ///   the sums or this rank's own gradients.
    /// * [`Release`](Gradients::Release): in `Eager` mode, each bucket's pages are returned to the operating system
    ///   right after the bucket's step. A pass therefore never has all gradients in memory at once, unless backward is
    ///   faster than the steps. In the other modes, all gradients that this rank steps are in memory when the last
    ///   gradient has been reduced. The next write maps the pages again, one by one, and therefore costs more than a
    ///   write to mapped pages. A page is not returned if it also holds a gradient with the action [`Average` or
    ///   `Leave`](crate::SegmentAction), or the counts of ranks that had a gradient. `Release` needs Linux and a
    ///   stepper on the CPU that owns its memory, and is refused otherwise.
    ///
    /// ```
    /// use instep::{Error, Gradients, Layout, Sgd, Solo, Stepper};
    ///
    /// let layout = Layout::builder().param("w", 2).build()?;
    /// let w = layout.id("w")?;
    /// let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Default::default() });
    /// let mut stepper = builder.gradients(Gradients::Zero).host(Solo::default())?;
    /// let mut pass = stepper.begin()?;
    /// pass.grads().write(w, &[1.0, 2.0])?;
    /// pass.finish()?;
    /// assert_eq!(stepper.view::<f32>(w)?, [-1.0, -2.0]);
    /// assert_eq!(stepper.view::<f32>(w.grad())?, [0.0, 0.0]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn gradients(mut self, gradients: Gradients) -> Self {
        self.gradients = gradients;
        self
    }

    /// Sets the element types of parameters, gradients, master weights and states. The default is f32 throughout.
    /// Arithmetic is always f32. The documentation of [`Precision`] describes which types can be combined.
    /// [Groups](Self::group_precision) and [parameters](crate::LayoutBuilder::dtype) may have other types. A custom
    /// optimizer ([`Custom`](crate::optim::Custom)) needs f32.
    pub fn precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// Gives one group of the layout its own precision. Parameters of different precisions never share a bucket.
    /// Clipping, skipping and the loss scale apply to the gradients of all precisions together.
    ///
    /// ```
    /// use instep::{AdamW, DType, Layout, Master, Precision, Solo, Stepper};
    ///
    /// let layout = Layout::builder().param("linear.weight", 6).param("norm.weight", 2).in_group("norms").build()?;
    /// let bf16 = Precision { param: DType::BF16, grad: DType::BF16, master: Master::F32, ..Precision::F32 };
    /// let builder = Stepper::builder(&layout, AdamW::default()).precision(bf16);
    /// let mut stepper = builder.group_precision("norms", Precision::F32).host(Solo::default())?;
    /// let mut pass = stepper.begin()?;
    /// pass.grads().get_mut(layout.id("norm.weight")?)?.fill(0.5f32);
    /// pass.view_mut(layout.id("linear.weight")?.grad())?.fill(half::bf16::from_f32(0.5));
    /// pass.finish()?;
    /// # Ok::<(), instep::Error>(())
    /// ```
    pub fn group_precision(mut self, group: impl Into<String>, precision: Precision) -> Self {
        self.group_precisions.push((group.into(), precision));
        self
    }

    /// Makes each step also write a copy of its parameters in this type, in the same launch. For example, your own
    /// all-gather can send these copies, which are smaller than the parameters. The copy is made from the [master
    /// weight](crate::Master), if there is one. The copy has the parameter's value after the last update, and is zeros
    /// before the first update. A custom optimizer ([`Custom`](crate::optim::Custom)) writes no copy.
    /// [`Stepper::view`](crate::Stepper::view) and, on a GPU, `Stepper::ptr` return the copy in place.
    /// [`Stepper::read`](crate::Stepper::read) returns it as f32.
    pub fn copy_params(mut self, dtype: DType) -> Self {
        self.copy_dtype = Some(dtype);
        self
    }

    /// Keeps an f32 exponential moving average of each parameter, or of its [master weight](crate::Master) if it has
    /// one. Each update of the parameter sets the average to `decay * average + (1 - decay) * parameter`, in the same
    /// launch. Before the first update, the average is zeros. The first update sets the average to the parameter's
    /// value. A custom optimizer ([`Custom`](crate::optim::Custom)) keeps no average.
    /// [`Stepper::read`](crate::Stepper::read) returns the average.
    ///
    /// ```
    /// # use instep::{Layout, Sgd, Solo, Stepper};
    /// # let layout = Layout::builder().param("w", 1).build()?;
    /// # let w = layout.id("w")?;
    /// let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Default::default() });
    /// let mut stepper = builder.ema(0.75).host(Solo::default())?;
    /// for _ in 0..2 {
    ///     let mut pass = stepper.begin()?;
    ///     pass.write(w.grad(), &[-4.0])?;
    ///     pass.finish()?;
    /// }
    /// let mut average = [0.0];
    /// stepper.read(w.ema(), &mut average)?;
    /// assert_eq!(average, [5.0]); // 3/4 of 4, and 1/4 of 8
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Source
    /// `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn`.
    pub fn ema(mut self, decay: f64) -> Self {
        self.ema_decay = Some(decay);
        self
    }

    /// Sets what a pass does with parameters that have no gradient. The default is [`Unused::Refuse`] on
    /// [borrowed](crate::Borrowed) buckets and with sums [by the caller](crate::Sums::by_caller). In all other cases,
    /// the default is [`Unused::Skip`], because the stepper can then count the ranks with a gradient.
    pub fn unused(mut self, unused: Unused) -> Self {
        self.unused = Some(unused);
        self
    }

    /// Lets ranks run out of data at different times (see [`Stepper::join`](crate::Stepper::join)). `divisor` selects
    /// the number of ranks by which the summed gradients are divided. With [`Solo`](crate::Solo), there is only one
    /// rank, so gradients are divided by 1.
    pub fn uneven_inputs(mut self, divisor: Divisor) -> Self {
        self.uneven_inputs = Some(divisor);
        self
    }

    /// Divides the summed gradients by this number, from 1 to 2^24. The default divisor is the number of ranks that
    /// [`uneven_inputs`](Self::uneven_inputs) selects, or otherwise the number of all ranks. The division is a part of
    /// the step's gradient factor, so it adds no rounding. With a divisor of 1, steps use the undivided sums. The
    /// gradient of a local parameter is not divided by this number.
    ///
    /// # Source
    /// `FSDPModule.set_gradient_divide_factor` of PyTorch.
    pub fn gradient_divisor(mut self, divisor: f64) -> Self {
        self.gradient_divisor = Some(divisor);
        self
    }

    /// Clips the averaged gradients by their global norm or by the previous pass's norm, or clips each bucket by its
    /// own norm. By default, nothing is clipped.
    pub fn clip(mut self, clip: Clip) -> Self {
        self.clip = Some(clip);
        self
    }

    /// Clips one group of the layout separately, by the exact norm of its gradients. With `None`, the group is not
    /// clipped. All other groups are clipped together, by [`clip`](Self::clip). Groups that are clipped separately
    /// share no bucket. [`Stepper::group_norm`](crate::Stepper::group_norm) returns the group's norm. This option is
    /// refused in `Eager` mode, with [`Clip::Previous`] and with [`Clip::PerBucket`]. With
    /// [`skip_nonfinite`](Self::skip_nonfinite) or a loss scaler, one infinite or NaN gradient skips the steps of all
    /// groups.
    ///
    /// ```
    /// use instep::{Clip, Layout, Mode, Sgd, Solo, Stepper};
    ///
    /// let layout = Layout::builder().param("w", 1).param("expert", 1).in_group("experts");
    /// let layout = layout.param("bias", 1).in_group("biases").build()?;
    /// let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Default::default() }).mode(Mode::Normed);
    /// let builder = builder.clip(Clip::Global(1.0)).group_clip("experts", 2.0).group_clip("biases", None);
    /// let mut stepper = builder.host(Solo::default())?;
    /// let mut pass = stepper.begin()?;
    /// for param in layout.ids() {
    ///     pass.grads().write(param, &[8.0])?;
    /// }
    /// pass.finish()?;
    /// let stepped = layout.ids().map(|param| Ok(stepper.view::<f32>(param)?[0].round()));
    /// assert_eq!(stepped.collect::<Result<Vec<f32>, instep::Error>>()?, [-1.0, -2.0, -8.0]);
    /// assert_eq!(stepper.group_norm("experts")?, Some(8.0));
    /// # Ok::<(), instep::Error>(())
    /// ```
    pub fn group_clip(mut self, group: impl Into<String>, max_norm: impl Into<Option<f64>>) -> Self {
        self.group_clips.push((group.into(), max_norm.into()));
        self
    }

    /// Skips a pass if a gradient is infinite or NaN before or after it is averaged. A skipped pass changes no
    /// parameter, state or step count. Only gradients of stepped parameters can cause a skip. Gradients of
    /// [local](crate::LayoutBuilder::local) parameters cannot cause a skip, because they differ between ranks, and all
    /// ranks must skip the same passes. This option is refused in `Eager` mode.
    pub fn skip_nonfinite(mut self, skip: bool) -> Self {
        self.skip_nonfinite = skip;
        self
    }

    /// Sets the loss scale: a constant, or a [`LossScaler`](crate::LossScaler) that adapts the scale. Steps divide the
    /// gradients by the loss scale. The default is 1.
    pub fn loss_scale(mut self, loss_scale: impl Into<LossScale>) -> Self {
        self.loss_scale = loss_scale.into();
        self
    }

    /// Sets the instruction set of the kernels. The default is the set that `INSTEP_ISA` names. If `INSTEP_ISA` is not
    /// set, the default is the widest set that the CPU supports.
    pub fn isa(mut self, isa: Isa) -> Self {
        self.isa = Some(isa);
        self
    }

    /// Gives this stepper its own pool of `threads` kernel threads. By default, the stepper uses the communicator's
    /// shared pool. If the communicator has no pool, the stepper makes a pool of `INSTEP_THREADS` threads. If
    /// `INSTEP_THREADS` is not set, this pool has one thread per core, but at most
    /// [`Pool::MAX_THREADS`](crate::Pool::MAX_THREADS).
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// Runs all collectives and steps on the thread that calls the stepper. The hand-over that completes a bucket also
    /// reduces and steps that bucket. Nothing overlaps. The stepper starts only the threads of its pool. With
    /// [`threads(1)`](Self::threads), the stepper starts no thread. Use this option in engines that have their own
    /// threads, and in processes that must not start threads. If several ranks share a process, each rank still needs
    /// its own thread, because an all-reduce waits for the other ranks.
    ///
    /// ```
    /// # use instep::{Layout, Sgd, Solo, Stepper};
    /// # let layout = Layout::builder().param("w", 2).build()?;
    /// # let w = layout.id("w")?;
    /// let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Default::default() }).inline().threads(1);
    /// let mut stepper = builder.host(Solo::default())?;
    /// let mut pass = stepper.begin()?;
    /// pass.grads().write(w, &[1.0, 2.0])?;
    /// pass.grad_ready(w)?; // stepped when it returns
    /// pass.finish()?;
    /// # Ok::<(), instep::Error>(())
    /// ```
    pub fn inline(mut self) -> Self {
        self.is_inline = true;
        self
    }

    /// Sets how long a collective waits for other ranks. The default is the value of `INSTEP_DEADLINE_MS`, or 60 s if
    /// this variable is not set.
    ///
    /// On a GPU, only calls that wait for the GPU check the deadline. Time counts towards the deadline only while a
    /// collective is unfinished and the trainer's stream has passed the last hand-over. The time of a long backward
    /// therefore does not count. Progress inside a captured graph cannot be observed, so the full time of a replay
    /// counts.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Records the stepper's ops with their times, the trainer's accesses, and the intervals in which the trainer
    /// waited. The recording grows with every pass until [`Stepper::take_recording`](crate::Stepper::take_recording)
    /// takes it.
    pub fn record(mut self, record: bool) -> Self {
        self.record = record;
        self
    }
}
