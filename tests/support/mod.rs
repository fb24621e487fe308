//! The integration tests share painted inputs, and one way to run a stepper.
//!
//! Inputs are functions of (step, parameter, element) with prime cycles, so a failing case needs no seed and is the
//! same on any rank, in any order. Results are read only through the public interface.

pub(crate) mod arbitrary;
pub(crate) mod device;
pub(crate) mod entries;
pub(crate) mod guarded;
pub(crate) mod hardware;
pub(crate) mod hypers;
pub(crate) mod lent;
#[allow(dead_code)]
#[path = "../../examples/tcp_ranks/meeting.rs"]
pub(crate) mod meeting;
pub(crate) mod optimizers;
// The specification, which other programs read too.
#[path = "../../reference/optimizers.rs"]
pub(crate) mod reference;
pub(crate) mod stand_in;
pub(crate) mod stored;
/// The example's collective, also for processes with one GPU each.
#[allow(dead_code)]
#[path = "../../examples/tcp_ranks/tcp.rs"]
pub(crate) mod tcp;
pub(crate) mod tolerance;
pub(crate) mod training;
pub(crate) mod waits;

use instep::collective::Call;
use instep::cuda::{Cuda, CudaDevice};
use instep::{
    Clip, Collective, DType, Device, Divisor, Error, Gradients, Isa, Layout, Mode, ParamId, Pass, Place,
    Result, Status, Stepper, StepperBuilder, Sums, Unused,
};

pub(crate) use crate::support::optimizers::{Optim, few_optimizers, one_per_state_count, optimizers};

/// Lengths near every width of the kernels: vectors of 4, 8 and 16, leaves of 256, tiles of 2048.
pub(crate) const LENGTHS: [usize; 19] =
    [0, 1, 3, 7, 8, 9, 15, 16, 17, 63, 64, 65, 255, 256, 257, 2047, 2048, 2049, 5000];

pub(crate) const MODES: [Mode; 3] = [Mode::Sequential, Mode::Eager, Mode::Normed];

/// A group of this number of ranks whose gradients already are their sums. It sends nothing, and its counts are sums
/// too: a parameter that this rank uses counts as used once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Presummed(pub u32);

impl Collective for Presummed {
    fn rank(&self) -> u32 {
        0
    }

    fn world_size(&self) -> u32 {
        self.0
    }

    fn reaches(&self, _: Place) -> bool {
        true
    }

    fn sums(&self, _: DType) -> bool {
        true
    }

    fn enqueue(&self, call: &mut Call<'_>) -> Result<()> {
        if self.supports(call.key().kind) { Ok(()) } else { Err(call.unknown_kind()) }
    }

    fn abort(&self, _: &Error) {}
}

/// The options of a stepper and of its passes.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub mode: Mode,
    pub cap: Option<u64>,
    pub unused: Unused,
    pub gradients: Gradients,
    pub uneven: Option<Divisor>,
    pub max_norm: Option<f64>,
    pub skip_nonfinite: bool,
    pub loss_scale: f64,
    pub isa: Option<Isa>,
    pub threads: Option<usize>,
    pub record: bool,
    /// The number of ranks that gradients are summed over, for [`run`] and [`open`].
    pub world_size: u32,
    /// The hand-over order as registration indices; none means last to first, as in backward.
    pub order: Option<Vec<usize>>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            mode: Mode::Sequential,
            cap: None,
            unused: Unused::Skip,
            gradients: Gradients::Keep,
            uneven: None,
            max_norm: None,
            skip_nonfinite: false,
            loss_scale: 1.0,
            isa: None,
            threads: None,
            record: false,
            world_size: 1,
            order: None,
        }
    }
}

impl Options {
    /// Builds a stepper on any communicator, with parameters as the crate makes them.
    pub(crate) fn stepper(&self, layout: &Layout, optim: Optim, sums: impl Into<Sums>) -> Result<Stepper> {
        self.builder(layout, optim).host(sums)
    }

    /// Builds the same stepper on a GPU.
    pub(crate) fn stepper_on(
        &self,
        cuda: &Cuda,
        layout: &Layout,
        optim: Optim,
        sums: impl Into<Sums>,
    ) -> Result<Stepper<CudaDevice>> {
        // SAFETY: the trainer's stream is the default one, or the stand-in's, which is a number.
        unsafe { self.builder(layout, optim).cuda(sums, cuda) }
    }

    pub(crate) fn builder<'a>(&self, layout: &'a Layout, optim: Optim) -> StepperBuilder<'a> {
        let mut builder = optim.builder(layout).mode(self.mode).unused(self.unused).gradients(self.gradients);
        builder = builder.skip_nonfinite(self.skip_nonfinite).record(self.record);
        if self.loss_scale != 1.0 {
            builder = builder.loss_scale(self.loss_scale);
        }
        if let Some(divisor) = self.uneven {
            builder = builder.uneven_inputs(divisor);
        }
        if let Some(cap) = self.cap {
            builder = builder.bucket_cap_bytes(cap);
        }
        if let Some(max_norm) = self.max_norm {
            builder = builder.clip(Clip::Global(max_norm));
        }
        if let Some(isa) = self.isa {
            builder = builder.isa(isa);
        }
        if let Some(threads) = self.threads {
            builder = builder.threads(threads);
        }
        builder
    }

    /// Returns the factor by which a gradient of the mean loss is multiplied for a [`Solo`] stepper.
    pub(crate) fn divisor(&self) -> f64 {
        f64::from(self.world_size) * self.loss_scale
    }
}

/// Returns a layout of parameters p0, p1, ... with these lengths.
pub(crate) fn layout(lengths: &[usize]) -> Layout {
    let named = lengths.iter().enumerate();
    named.fold(Layout::builder(), |builder, (k, len)| builder.param(format!("p{k}"), *len)).build().unwrap()
}

/// Returns the same layout in three alternating groups: "default", "alone" and "free", for the clips of
/// [`with_group_clips`].
pub(crate) fn grouped(lengths: &[usize]) -> Layout {
    let add = |builder: instep::LayoutBuilder, (k, len): (usize, &usize)| {
        builder.param(format!("p{k}"), *len).in_group(["default", "alone", "free"][k % 3])
    };
    lengths.iter().enumerate().fold(Layout::builder(), add).build().unwrap()
}

/// Clips the groups of a [`grouped`] layout together, alone and not at all.
pub(crate) fn with_group_clips(builder: StepperBuilder<'_>) -> StepperBuilder<'_> {
    builder.clip(Clip::Global(0.5)).group_clip("alone", 0.25).group_clip("free", None)
}

/// Returns a number in (-1, 1) with a full mantissa. Sums and products of round numbers would be exact, and a
/// dependence on their order would not show. The cycle is the prime 8191.
pub(crate) fn paint(row: usize, column: usize) -> f32 {
    let position = (column * 2971 + row * 4133 + 17) % 8191;
    (position as f32 - 4095.0) / 4099.0
}

/// Returns a gradient of the mean loss: zero one time in ten, else over four decades, half of each sign.
pub(crate) fn paint_gradient(step: usize, param: usize, element: usize) -> f32 {
    let x = paint(step * 31 + param * 7 + 1000, element);
    if x.abs() < 0.1 { 0.0 } else { x * [1.0, 1.0 / 4.0, 1.0 / 64.0, 1.0 / 1024.0][(element + step) % 4] }
}

/// Fills a gradient with the values that [`Solo`] expects: the sum over ranks, loss scale included.
pub(crate) fn painted(options: &Options) -> impl Fn(usize, usize, &mut [f32]) -> bool + use<> {
    let divisor = options.divisor() as f32;
    move |step, param, gradient| {
        for (element, g) in gradient.iter_mut().enumerate() {
            *g = paint_gradient(step, param, element) * divisor;
        }
        true
    }
}

/// Paints every parameter, by registration index. Every second group of four is small, so that its updates are not lost
/// in the rounding of the sum.
pub(crate) fn paint_params<D: Device>(stepper: &mut Stepper<D>) {
    let layout = stepper.layout().clone();
    for (param, id) in layout.ids().enumerate() {
        let small = [1.0, 1.0 / 8192.0];
        let len = layout.parameter(id).unwrap().len as usize;
        let values: Vec<f32> = (0..len).map(|k| paint(param, k) * small[k / 4 % 2]).collect();
        stepper.write(id, &values).unwrap();
    }
}

/// Returns a painted [`Solo`] stepper.
pub(crate) fn open(layout: &Layout, optim: Optim, options: &Options) -> Stepper {
    let mut stepper = options.stepper(layout, optim, Presummed(options.world_size)).unwrap();
    paint_params(&mut stepper);
    stepper
}

/// Makes one pass. `gradient` gets a parameter's index and its gradient to fill; false leaves it out of the pass.
pub(crate) fn pass<D: Device>(
    stepper: &mut Stepper<D>,
    options: &Options,
    mut gradient: impl FnMut(usize, &mut [f32]) -> bool,
) -> Result<()> {
    pass_of(stepper, options, &mut gradient)
}

/// Compiled once, and not for each of the tests' closures.
fn pass_of<D: Device>(
    stepper: &mut Stepper<D>,
    options: &Options,
    gradient: &mut dyn FnMut(usize, &mut [f32]) -> bool,
) -> Result<()> {
    let layout = stepper.layout().clone();
    let ids: Vec<_> = layout.ids().collect();
    let order = options.order.clone().unwrap_or_else(|| (0..ids.len()).rev().collect());
    // What a parameter that is left out had in its gradient must not matter, so it is not touched at all.
    let mut scratch = Vec::new();
    let mut pass = stepper.begin()?;
    for param in order {
        let parameter = layout.parameter(ids[param])?;
        scratch.resize(parameter.len as usize, 0.0);
        if !gradient(param, &mut scratch) {
            continue;
        }
        pass.write(ids[param].grad(), &scratch)?;
        for _ in 0..parameter.uses {
            pass.grad_ready(ids[param])?;
        }
    }
    pass.finish()
}

/// Hands over all written gradients and ends the pass, as a caller does whose gradients already are sums.
pub(crate) fn finish<D: Device>(mut pass: Pass<'_, D>) -> Result<()> {
    for id in pass.layout().clone().ids() {
        // Refused where nothing was written, and after the last use.
        while pass.grad_ready(id).is_ok() {}
    }
    pass.finish()
}

/// All that a stepper holds between passes, by registration index. Sharded ranks read it together.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    pub params: Vec<Vec<f32>>,
    /// The states of each parameter.
    pub states: Vec<Vec<Vec<f32>>>,
    pub grads: Vec<Vec<f32>>,
    pub step_counts: Vec<u64>,
    /// The bits of the number that each optimizer of a parameter carries, if it carries one.
    pub carried: Vec<Vec<u64>>,
    pub status: Status,
}

impl Outcome {
    pub(crate) fn of<D: Device>(stepper: &Stepper<D>) -> Result<Outcome> {
        let layout = stepper.layout().clone();
        let copied = |id, read: &dyn Fn(&mut [f32]) -> Result<()>| {
            let mut values = vec![0.0; layout.parameter(id)?.len as usize];
            read(&mut values)?;
            Ok(values)
        };
        let state = |id, name: &str| copied(id, &|into| stepper.gather(id.state(name), into));
        Ok(Outcome {
            params: layout
                .ids()
                .map(|id| copied(id, &|into| stepper.gather(id, into)))
                .collect::<Result<_>>()?,
            states: layout
                .ids()
                .map(|id| stepper.state_names(id)?.iter().map(|name| state(id, name)).collect())
                .collect::<Result<_>>()?,
            grads: layout
                .ids()
                .map(|id| copied(id, &|into| stepper.gather(id.grad(), into)))
                .collect::<Result<_>>()?,
            step_counts: layout.ids().map(|id| stepper.step_count(id)).collect::<Result<_>>()?,
            carried: layout.ids().map(|id| carried(stepper, id)).collect::<Result<_>>()?,
            status: stepper.status()?,
        })
    }

    /// Returns every tensor of one parameter, with its name.
    fn tensors(&self, param: usize) -> impl Iterator<Item = (String, &[f32])> {
        let states = self.states[param].iter().enumerate();
        let states = states.map(|(k, state)| (format!("state {k}"), state.as_slice()));
        let own = [("value".to_string(), self.params[param].as_slice())];
        own.into_iter().chain(states)
    }

    /// Asserts that a parameter, its states and its step count are the same bits as `theirs` in another outcome.
    pub(crate) fn assert_same_param(&self, param: usize, other: &Outcome, theirs: usize, what: &str) {
        assert_eq!(self.step_counts[param], other.step_counts[theirs], "step count of p{param}: {what}");
        assert_eq!(self.carried[param], other.carried[theirs], "carried for p{param}: {what}");
        for ((name, a), (_, b)) in self.tensors(param).zip(other.tensors(theirs)) {
            assert_same_bits(a, b, &format!("{name} of p{param}: {what}"));
        }
    }

    /// Asserts the same bits in everything that lasts: parameters, states, step counts.
    pub(crate) fn assert_same(&self, other: &Outcome, what: &str) {
        assert_eq!(self.params.len(), other.params.len());
        for param in 0..self.params.len() {
            self.assert_same_param(param, other, param, what);
        }
    }
}

/// Returns the bits of the number that each optimizer of a parameter carries; an optimizer that steps nothing carries
/// none.
fn carried<D: Device>(stepper: &Stepper<D>, id: ParamId) -> Result<Vec<u64>> {
    let all = stepper.optimizers_of(id)?.into_iter();
    let all = all.filter_map(|optimizer| stepper.carried((id, optimizer)).ok().flatten());
    Ok(all.map(f64::to_bits).collect())
}

/// Sets a parameter's step count, and what its optimizers carry with it.
pub(crate) fn set_step_count<D: Device>(stepper: &mut Stepper<D>, id: ParamId, count: u64) -> Result<()> {
    for optimizer in stepper.optimizers_of(id)? {
        match stepper.carried((id, optimizer))? {
            Some(_) => {
                let carried = if count == 0 { 1.0 } else { 0.3 };
                stepper.set_step_count((id, optimizer), (count, carried))?;
            }
            None => stepper.set_step_count((id, optimizer), count)?,
        }
    }
    Ok(())
}

pub(crate) fn assert_same_bits(a: &[f32], b: &[f32], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    let differs = |k: &usize| a[*k].to_bits() != b[*k].to_bits();
    if let Some(k) = (0..a.len()).find(differs) {
        panic!(
            "{what}: element {k} is {:e} ({:#010x}) and {:e} ({:#010x})",
            a[k],
            a[k].to_bits(),
            b[k],
            b[k].to_bits()
        );
    }
}

/// Runs a painted [`Solo`] stepper; `gradient` gets step, parameter and the gradient to fill.
pub(crate) fn run(
    layout: &Layout,
    optim: Optim,
    options: &Options,
    steps: usize,
    gradient: impl Fn(usize, usize, &mut [f32]) -> bool,
) -> Outcome {
    let mut stepper = open(layout, optim, options);
    for step in 0..steps {
        pass(&mut stepper, options, |param, values| gradient(step, param, values)).unwrap();
    }
    Outcome::of(&stepper).unwrap()
}
