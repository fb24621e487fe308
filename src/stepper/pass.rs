//! A pass that borrows its stepper, so that the compiler enforces the rules of safe access.
//!
//! Each rule is expressed by a lifetime, and tested by a doc example that must not compile. The stepper's state, not
//! `Drop`, decides whether a pass is open. If a leaked or detached pass is still open, the next `begin` therefore
//! returns an error.

use std::mem;
use std::num::NonZeroU32;
use std::ops::{Deref, DerefMut};

use crate::device::Device;
use crate::error::{Error, Result};
use crate::host::HostDevice;
use crate::schedule::Opening;
use crate::stepper::stepper::{Abandoned, Stepper};
use crate::stepper::views::{Grads, Params};

/// An open pass of a stepper. A pass dereferences to its [stepper](Stepper), so you call the stepper's methods on the
/// pass. Dropping a pass abandons it. [`detach`](Self::detach) leaves it open.
///
/// A slice cannot be used after any gradient is handed over:
/// ```
/// # use instep::{Layout, Sgd, Solo, Stepper};
/// # let layout = Layout::builder().param("w", 4).build()?;
/// # let w = layout.id("w")?;
/// # let mut stepper = Stepper::host(&layout, Sgd::default(), Solo::default())?;
/// let mut pass = stepper.begin()?;
/// let (_, mut grads) = pass.split();
/// let slice = grads.get_mut(w)?;
/// slice[0] = 1.0;
/// pass.grad_ready(w)?;
/// # pass.finish()?;
/// # Ok::<(), instep::Error>(())
/// ```
/// ```compile_fail,E0499
/// # use instep::{Layout, Sgd, Solo, Stepper};
/// # let layout = Layout::builder().param("w", 4).build()?;
/// # let w = layout.id("w")?;
/// # let mut stepper = Stepper::host(&layout, Sgd::default(), Solo::default())?;
/// let mut pass = stepper.begin()?;
/// let (_, mut grads) = pass.split();
/// let slice = grads.get_mut(w)?;
/// pass.grad_ready(w)?;
/// slice[0] = 1.0; // the bucket may be on its way
/// # pass.finish()?;
/// # Ok::<(), instep::Error>(())
/// ```
/// A slice cannot be used after the pass has ended:
/// ```
/// # use instep::{Layout, Sgd, Solo, Stepper};
/// # let layout = Layout::builder().param("w", 4).build()?;
/// # let w = layout.id("w")?;
/// # let mut stepper = Stepper::host(&layout, Sgd::default(), Solo::default())?;
/// let mut pass = stepper.begin()?;
/// let weight = pass.split().0.get(w)?;
/// assert_eq!(weight[0], 0.0);
/// pass.finish()?;
/// # Ok::<(), instep::Error>(())
/// ```
/// ```compile_fail,E0505
/// # use instep::{Layout, Sgd, Solo, Stepper};
/// # let layout = Layout::builder().param("w", 4).build()?;
/// # let w = layout.id("w")?;
/// # let mut stepper = Stepper::host(&layout, Sgd::default(), Solo::default())?;
/// let mut pass = stepper.begin()?;
/// let weight = pass.split().0.get(w)?;
/// pass.finish()?;
/// assert_eq!(weight[0], 0.0); // the step may be writing it
/// # Ok::<(), instep::Error>(())
/// ```
/// A slice cannot be used after the micro-batch has ended:
/// ```compile_fail,E0499
/// # use instep::{Layout, Sgd, Solo, Stepper};
/// # let layout = Layout::builder().param("w", 4).build()?;
/// # let w = layout.id("w")?;
/// # let mut stepper = Stepper::host(&layout, Sgd::default(), Solo::default())?;
/// let mut pass = stepper.begin_accumulating(2.try_into().unwrap())?;
/// let mut grads = pass.grads();
/// let slice = grads.get_mut(w)?;
/// pass.next_micro_batch()?;
/// slice[0] = 1.0;
/// # pass.finish()?;
/// # Ok::<(), instep::Error>(())
/// ```
/// Views of two passes may be swapped. After a swap, each view keeps both passes borrowed:
/// ```
/// # use instep::{Layout, Sgd, Solo, Stepper};
/// # let layout = Layout::builder().param("w", 4).build()?;
/// # let w = layout.id("w")?;
/// # let mut one = Stepper::host(&layout, Sgd::default(), Solo::default())?;
/// # let mut two = Stepper::host(&layout, Sgd::default(), Solo::default())?;
/// let (mut first, mut second) = (one.begin()?, two.begin()?);
/// let (mut a, mut b) = (first.split().1, second.split().1);
/// std::mem::swap(&mut a, &mut b);
/// a.get_mut(w)?[0] = 1.0;
/// b.get_mut(w)?[0] = 2.0;
/// first.grad_ready(w)?;
/// # Ok::<(), instep::Error>(())
/// ```
/// ```compile_fail,E0499
/// # use instep::{Layout, Sgd, Solo, Stepper};
/// # let layout = Layout::builder().param("w", 4).build()?;
/// # let w = layout.id("w")?;
/// # let mut one = Stepper::host(&layout, Sgd::default(), Solo::default())?;
/// # let mut two = Stepper::host(&layout, Sgd::default(), Solo::default())?;
/// let (mut first, mut second) = (one.begin()?, two.begin()?);
/// let (mut a, mut b) = (first.split().1, second.split().1);
/// std::mem::swap(&mut a, &mut b);
/// first.grad_ready(w)?;
/// b.get_mut(w)?[0] = 2.0; // this is the first pass's gradient now
/// # Ok::<(), instep::Error>(())
/// ```
/// A stepper has one open pass at a time:
/// ```
/// # use instep::{Layout, Sgd, Solo, Stepper};
/// # let layout = Layout::builder().param("w", 4).build()?;
/// # let mut stepper = Stepper::host(&layout, Sgd::default(), Solo::default())?;
/// let first = stepper.begin()?;
/// first.finish()?;
/// let second = stepper.begin()?;
/// second.finish()?;
/// # Ok::<(), instep::Error>(())
/// ```
/// ```compile_fail,E0499
/// # use instep::{Layout, Sgd, Solo, Stepper};
/// # let layout = Layout::builder().param("w", 4).build()?;
/// # let mut stepper = Stepper::host(&layout, Sgd::default(), Solo::default())?;
/// let first = stepper.begin()?;
/// let second = stepper.begin()?;
/// first.finish()?;
/// second.finish()?;
/// # Ok::<(), instep::Error>(())
/// ```
#[must_use = "dropping a pass abandons it"]
#[derive(Debug)]
pub struct Pass<'a, D: Device = HostDevice> {
    stepper: &'a mut Stepper<D>,
}

impl<D: Device> Stepper<D> {
    /// Opens a pass: one forward and backward.
    ///
    /// # Ordering
    /// Does not wait. The steps of the last pass may still be running. The first pass broadcasts rank 0's parameters.
    /// After a [write](Stepper::write) of a parameter, the next pass broadcasts all parameters of that parameter's
    /// bucket. When a pass opens after such a write, ranks compare which parameters they wrote. With
    /// [`Nccl`](crate::cuda::Nccl), this comparison blocks the thread until all ranks have opened the pass. With
    /// [`Strategy::Fsdp`](crate::Strategy), nothing is broadcast.
    ///
    /// # Errors
    /// `Order` if a pass is still open, [detached](Pass::detach) or leaked. [`abandon`](Self::abandon) ends that pass.
    /// `Config` if the optimizer refuses a learning rate of a [schedule](crate::StepperBuilder::lr_schedule).
    pub fn begin(&mut self) -> Result<Pass<'_, D>> {
        self.begin_accumulating(NonZeroU32::MIN)
    }

    /// Opens a pass of several micro-batches, over which gradients accumulate. The first write of a gradient in the
    /// pass replaces the gradient. In later micro-batches, the trainer adds to the gradient with [`Grads::add`].
    /// Buckets are launched only in the last micro-batch. With shards, ranks may [reduce each
    /// micro-batch](crate::StepperBuilder::accumulation) instead. The first write in each micro-batch then replaces the
    /// gradient. For a mean over micro-batches, the trainer divides its loss by the number of micro-batches.
    ///
    /// ```
    /// # use instep::{Layout, Sgd, Solo, Stepper};
    /// # let layout = Layout::builder().param("w", 2).build()?;
    /// # let w = layout.id("w")?;
    /// # let mut stepper = Stepper::host(&layout, Sgd { lr: 1.0, ..Default::default() }, Solo::default())?;
    /// let mut pass = stepper.begin_accumulating(2.try_into().unwrap())?;
    /// pass.grads().add(w, &[1.0, 2.0])?;
    /// pass.grad_ready(w)?; // nothing is launched yet
    /// pass.next_micro_batch()?;
    /// pass.grads().add(w, &[0.5, 0.5])?;
    /// pass.grad_ready(w)?; // now the bucket is on its way
    /// pass.finish()?;
    /// assert_eq!(stepper.view::<f32>(w)?, [-1.5, -2.5]);
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// Ordering as for [`begin`](Self::begin).
    ///
    /// # Errors
    /// Errors as for [`begin`](Self::begin).
    pub fn begin_accumulating(&mut self, micro_batches: NonZeroU32) -> Result<Pass<'_, D>> {
        self.refuse_capture()?;
        self.open(Opening { micro_batches, ..Opening::default() })?;
        Ok(Pass::new(self))
    }
}

impl Pass<'_> {
    /// Returns views of parameters and gradients. Both views borrow the whole pass, so they cannot be used after a
    /// gradient is handed over. Call `split` again for each layer.
    pub fn split(&mut self) -> (Params<'_>, Grads<'_>) {
        (Params::new(self.stepper), Grads::new(self.stepper))
    }

    /// Returns a view of only the gradients.
    pub fn grads(&mut self) -> Grads<'_> {
        Grads::new(self.stepper)
    }
}

impl<'a, D: Device> Pass<'a, D> {
    pub(super) fn new(stepper: &'a mut Stepper<D>) -> Self {
        Pass { stepper }
    }

    /// Ends the borrow and leaves the pass open, for frameworks that cannot store a borrow. Such a framework then calls
    /// the stepper's own methods.
    ///
    /// ```
    /// # use instep::{Layout, Sgd, Solo, Stepper};
    /// # let layout = Layout::builder().param("w", 2).build()?;
    /// # let w = layout.id("w")?;
    /// # let mut stepper = Stepper::host(&layout, Sgd { lr: 1.0, ..Default::default() }, Solo::default())?;
    /// stepper.begin()?.detach();
    /// stepper.view_mut::<f32>(w.grad())?.fill(1.0);
    /// stepper.grad_ready(w)?;
    /// stepper.finish()?;
    /// assert_eq!(stepper.view::<f32>(w)?, [-1.0, -1.0]);
    /// # Ok::<(), instep::Error>(())
    /// ```
    pub fn detach(self) {
        mem::forget(self);
    }

    /// Closes the pass with [`Stepper::finish`], or abandons it if `finish` is refused.
    ///
    /// # Ordering
    /// Ordering as for [`Stepper::finish`].
    ///
    /// # Errors
    /// Errors as for [`Stepper::finish`].
    pub fn finish(self) -> Result<()> {
        self.stepper.finish()
    }

    /// Abandons the pass with [`Stepper::abandon`]. Dropping a pass also abandons it.
    ///
    /// # Ordering
    /// Ordering as for [`Stepper::abandon`].
    ///
    /// # Errors
    /// Errors as for [`Stepper::abandon`].
    pub fn abandon(self) -> Result<Abandoned> {
        self.stepper.abandon()
    }
}

impl<D: Device> Deref for Pass<'_, D> {
    type Target = Stepper<D>;

    fn deref(&self) -> &Stepper<D> {
        self.stepper
    }
}

impl<D: Device> DerefMut for Pass<'_, D> {
    fn deref_mut(&mut self) -> &mut Stepper<D> {
        self.stepper
    }
}

impl<D: Device> Drop for Pass<'_, D> {
    fn drop(&mut self) {
        // No pass is open if `finish` or `abandon` has closed it, or if the caller has replaced the stepper.
        if !self.stepper.run.get_mut().schedule.is_open() {
            return;
        }
        if std::thread::panicking() {
            let rank = self.stepper.rank();
            self.stepper.abort_group(&Error::PeerLost { rank, why: "it panicked inside a pass".into() });
        }
        // The pass is open, so `abandon` cannot be refused.
        let _ = self.stepper.abandon();
    }
}
