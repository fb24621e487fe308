//! Replaces some kinds of collectives, for example reduce-scatter or all-gather, by functions of the user.
//!
//! A stepper may duplicate the communicator or split it into groups. Duplicates of the communicator, and groups split
//! from it, use the same functions, so the functions are called on every stream and in every group. The idea comes from
//! PyTorch's `set_custom_reduce_scatter` and `set_custom_all_gather`.

use std::fmt;
use std::sync::Arc;

use crate::collective::{Call, Collective};
use crate::error::{Error, Result};
use crate::op::CollectiveKind;

type Way = dyn Fn(&dyn Collective, &mut Call<'_>) -> Result<()> + Send + Sync;

/// A communicator that runs the user's functions for some kinds of calls. A `CustomCalls` passes all other calls to the
/// inner communicator `comm`.
///
/// The user's function receives two arguments: the inner communicator of the call's group, and the call. On the host,
/// the function fills [`Call::target`] from [`Call::source`]. On a GPU, the function enqueues work on [`Call::stream`].
/// A result that several ranks receive must have the same bits on all of them. Steppers may use every kind of call for
/// which a function is set, even if `comm` does not support this [kind](Collective::supports).
///
/// ```
/// use instep::collective::{Call, CallKey, Collective, CollectiveKind};
/// use instep::overlap::CustomCalls;
/// use instep::{Layout, Result, Sgd, Stepper, Strategy, in_process};
///
/// /// A rank's part of the sum of whole buckets.
/// fn reduce_scatter(comm: &dyn Collective, call: &mut Call<'_>) -> Result<()> {
///     let mut whole: Vec<f32> = bytemuck::cast_slice(call.source()?).to_vec();
///     let key = CallKey { kind: CollectiveKind::AllReduce, ..call.key() };
///     let bytes = bytemuck::cast_slice_mut(&mut whole);
///     comm.enqueue(&mut Call::on_host(comm, key, None, bytes, call.deadline())?)?;
///     let part: &mut [f32] = bytemuck::cast_slice_mut(call.target()?);
///     let first = comm.rank() as usize * part.len();
///     part.copy_from_slice(&whole[first..first + part.len()]);
///     Ok(())
/// }
///
/// let layout = Layout::builder().param("weight", 1024).build()?;
/// let weight = layout.id("weight")?;
/// let ranks = in_process(2, |comm| {
///     let comm = CustomCalls::new(comm).with(CollectiveKind::ReduceScatter, reduce_scatter);
///     let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Sgd::default() });
///     let mut stepper = builder.strategy(Strategy::Zero).host(comm)?;
///     let mut pass = stepper.begin()?;
///     pass.grads().get_mut(weight)?.fill(3.0);
///     pass.finish()?;
///     Ok(stepper.view::<f32>(weight)?[0])
/// })?;
/// assert_eq!(ranks, [-3.0, -3.0]);
/// # Ok::<(), instep::Error>(())
/// ```
///
/// # Ordering
/// A function runs on the thread that calls [`Collective::enqueue`]. A function may run for several streams at the same
/// time.
///
/// # Errors
/// If a function returns an error or panics, the stepper is poisoned and the other ranks end with an error. A function
/// can return its own message as [`Error::Hook`].
///
/// # Source
/// PyTorch's `FSDPModule.set_custom_reduce_scatter` and `set_custom_all_gather`.
pub struct CustomCalls {
    comm: Arc<dyn Collective>,
    /// The function for each kind of call, or `None` if `comm` makes calls of this kind.
    ways: [Option<Arc<Way>>; CollectiveKind::ALL.len()],
}

impl CustomCalls {
    /// Builds a communicator that passes all calls to `comm`, until [`with`](Self::with) sets functions.
    pub fn new(comm: impl Collective + 'static) -> CustomCalls {
        CustomCalls { comm: Arc::new(comm), ways: [const { None }; CollectiveKind::ALL.len()] }
    }

    /// Sets the function `way`, which then makes all calls of this kind.
    pub fn with<W>(mut self, kind: CollectiveKind, way: W) -> CustomCalls
    where
        W: Fn(&dyn Collective, &mut Call<'_>) -> Result<()> + Send + Sync + 'static,
    {
        self.ways[kind as usize] = Some(Arc::new(way));
        self
    }

    fn around(&self, comm: Arc<dyn Collective>) -> Arc<dyn Collective> {
        Arc::new(CustomCalls { comm, ways: self.ways.clone() })
    }
}

impl Collective for CustomCalls {
    fn inner(&self) -> Option<&dyn Collective> {
        Some(&*self.comm)
    }

    fn rank(&self) -> u32 {
        self.comm.rank()
    }

    fn world_size(&self) -> u32 {
        self.comm.world_size()
    }

    fn supports(&self, kind: CollectiveKind) -> bool {
        self.ways[kind as usize].is_some() || self.comm.supports(kind)
    }

    fn duplicate(&self) -> Result<Arc<dyn Collective>> {
        Ok(self.around(self.comm.duplicate()?))
    }

    fn subgroup(&self, ranks: &[u32]) -> Result<Arc<dyn Collective>> {
        Ok(self.around(self.comm.subgroup(ranks)?))
    }

    fn enqueue(&self, call: &mut Call<'_>) -> Result<()> {
        match &self.ways[call.kind as usize] {
            Some(way) => way(&*self.comm, call),
            None => self.comm.enqueue(call),
        }
    }

    fn abort(&self, cause: &Error) {
        self.comm.abort(cause);
    }
}

impl fmt::Debug for CustomCalls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kinds = CollectiveKind::ALL.into_iter().filter(|kind| self.ways[*kind as usize].is_some());
        let kinds: Vec<String> = kinds.map(|kind| kind.to_string()).collect();
        write!(f, "rank {} of {}, own ways of: {}", self.rank(), self.world_size(), kinds.join(", "))
    }
}
