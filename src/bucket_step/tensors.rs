//! The tensors of one call: slices that this library checks, or addresses that the caller must check.
//!
//! A tensor is one contiguous run of elements for the whole bucket, or one run per parameter. This file returns
//! addresses and lengths and touches no element.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr::NonNull;

use super::element::{StepElement, Stored};
use crate::abi::INSTEP_MAX_STATES;
use crate::bucket_step::scaling::Scaling;
use crate::handle::Address;
use crate::op::Memory;

pub(super) const STATES: usize = INSTEP_MAX_STATES as usize;

/// The memory of one kind of tensor (parameters, gradients, a state), lent to one call. The memory is one contiguous
/// run of elements for the whole bucket, or one run per parameter.
///
/// A run for the whole bucket has the bucket's offsets: element k of the bucket is stored k elements after the run's
/// start. If there is one run per parameter, the runs are in the order of the bucket's list of parameters.
///
/// If each gradient has its own run, some gradients may be missing. The call skips a parameter without a gradient, as
/// if the parameter were [frozen](super::BucketStep::set_frozen). The parameter's tensors and step count do not change,
/// and norms leave it out.
#[derive(Debug)]
pub struct Lent<'a> {
    pub(super) location: Location,
    /// The type of a slice's elements. `None` for addresses.
    pub(super) element: Option<Stored>,
    pub(super) is_writable: bool,
    /// Whether the slice is in a GPU's memory. For an address, this field is false, and the caller of `Lent::at`
    /// guarantees that the address is on the step's device.
    pub(super) is_on_gpu: bool,
    _tensors: PhantomData<&'a mut c_void>,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Location {
    Whole(Run),
    Each(Runs),
}

/// The address of a run, and the run's length in elements if it is known. A missing run has the address 0.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) address: usize,
    pub(super) elements: Option<usize>,
}

/// A list of slices or addresses. The function `get` returns one element of the list as a [`Run`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Runs {
    list: *const c_void,
    pub(super) count: usize,
    get: unsafe fn(*const c_void, usize) -> Run,
    /// Whether the elements of the list are plain addresses.
    is_raw: bool,
}

// SAFETY: a tensor has slices of plain numbers, which may move to another thread, or addresses. The caller of
// `Lent::at` orders all accesses to an address.
unsafe impl Send for Lent<'_> {}

impl Runs {
    /// Returns the run with this index.
    ///
    /// # Panics
    /// Panics if the list has no run with this index.
    pub(super) fn run(&self, index: usize) -> Run {
        assert!(index < self.count, "a run for each parameter");
        // SAFETY: `list` points to `count` elements of the type that `get` was made for, borrowed for `'a`.
        unsafe { (self.get)(self.list, index) }
    }

    /// Returns the list itself if its elements are plain addresses. Reading the list is faster than calling `get` for
    /// each run.
    pub(super) fn addresses(&self) -> Option<&[*mut c_void]> {
        // SAFETY: `list` then points to `count` addresses, borrowed for `'a`.
        self.is_raw.then(|| unsafe { std::slice::from_raw_parts(self.list.cast(), self.count) })
    }
}

impl Run {
    /// A missing run. Its address is 0. No slice has the address 0, not even an empty slice.
    const NONE: Run = Run { address: 0, elements: Some(0) };

    fn of<T>(slice: &[T]) -> Run {
        Run { address: slice.as_ptr().expose_provenance(), elements: Some(slice.len()) }
    }

    fn of_mut<T>(slice: &mut [T]) -> Run {
        Run { address: slice.as_mut_ptr().expose_provenance(), elements: Some(slice.len()) }
    }

    /// Returns whether the run is a missing gradient.
    pub(super) fn is_none(&self) -> bool {
        self.address == 0
    }
}

impl<'a> Lent<'a> {
    /// Lends a run that a step may write.
    ///
    /// # Shapes
    /// The run has as many elements as the bucket. The precision determines their type. Remainders are `u16` or `u8`,
    /// and 8-bit states are `u8` with scales of f32, one per 256 elements. Other types do not compile:
    ///
    /// ```compile_fail,E0277
    /// instep::bucket_step::Lent::slice_mut(&mut [1i32]);
    /// ```
    pub fn slice_mut<T: StepElement>(slice: &'a mut [T]) -> Lent<'a> {
        Lent::new::<T>(Location::Whole(Run::of_mut(slice)), true)
    }

    /// Lends a contiguous range of read-only memory, such as gradients.
    ///
    /// # Shapes
    /// Shapes as for [`slice_mut`](Self::slice_mut).
    pub fn slice<T: StepElement>(slice: &'a [T]) -> Lent<'a> {
        Lent::new::<T>(Location::Whole(Run::of(slice)), false)
    }

    /// Lends one writable run per parameter to a step.
    ///
    /// # Shapes
    /// There is one run per parameter, in the order in which the bucket lists the parameters. Each run is as long as
    /// its parameter. A run of scales has one scale per 256 elements, rounded up. The list stays borrowed until the
    /// borrows of its slices end, so make a new list for each step. Parameters may be in separate runs while states are
    /// in one run.
    pub fn slices_mut<T: StepElement>(slices: &'a mut [&'a mut [T]]) -> Lent<'a> {
        /// # Safety
        /// `list` is the address of a list of `&mut [T]` that has an element at `index`.
        unsafe fn get<T>(list: *const c_void, index: usize) -> Run {
            // SAFETY: the caller's promise. The slice is borrowed for `'a`, and the tensor lives no longer than that.
            Run::of_mut(unsafe { &mut **list.cast::<*mut [T]>().add(index) })
        }
        let (list, count) = (slices.as_mut_ptr().cast_const().cast(), slices.len());
        Lent::new::<T>(Location::Each(Runs { list, count, get: get::<T>, is_raw: false }), true)
    }

    /// Lends one read-only run per parameter, such as gradients.
    ///
    /// # Shapes
    /// Shapes as for [`slices_mut`](Self::slices_mut).
    pub fn slices<T: StepElement>(slices: &'a [&'a [T]]) -> Lent<'a> {
        /// # Safety
        /// `list` is the address of a list of `&[T]` that has an element at `index`.
        unsafe fn get<T>(list: *const c_void, index: usize) -> Run {
            // SAFETY: the caller's promise. The slice is borrowed for `'a`, and the tensor lives no longer than that.
            Run::of(unsafe { &**list.cast::<*const [T]>().add(index) })
        }
        let (list, count) = (slices.as_ptr().cast(), slices.len());
        Lent::new::<T>(Location::Each(Runs { list, count, get: get::<T>, is_raw: false }), false)
    }

    /// Lends one writable run for each parameter that has a gradient in this call. A parameter with `None` is skipped.
    ///
    /// # Shapes
    /// Shapes as for [`slices_mut`](Self::slices_mut). Only gradients may be `None`.
    pub fn optional_slices_mut<T: StepElement>(slices: &'a mut [Option<&'a mut [T]>]) -> Lent<'a> {
        /// # Safety
        /// `list` is the address of a list of `Option<&mut [T]>` that has an element at `index`.
        unsafe fn get<T>(list: *const c_void, index: usize) -> Run {
            // SAFETY: the caller's promise. The slice is borrowed for `'a`, and the tensor lives no longer than that.
            let slice = unsafe { &mut *list.cast_mut().cast::<Option<&mut [T]>>().add(index) };
            slice.as_mut().map_or(Run::NONE, |slice| Run::of_mut(slice))
        }
        let (list, count) = (slices.as_mut_ptr().cast_const().cast(), slices.len());
        Lent::new::<T>(Location::Each(Runs { list, count, get: get::<T>, is_raw: false }), true)
    }

    /// Lends one read-only run for each parameter that has a gradient in this call. A parameter with `None` is skipped.
    ///
    /// ```
    /// use instep::bucket_step::{Lent, StepTensors};
    /// use instep::{BucketStep, Layout, Scaling, Sgd};
    ///
    /// let layout = Layout::builder().param("used", 2).param("unused", 1).build()?;
    /// let mut step = BucketStep::builder(&layout, Sgd { lr: 1.0, ..Default::default() }).host()?;
    /// let mut params = [0.0f32; 3];
    /// let grads = [Some(&[1.0f32, 2.0][..]), None];
    /// let tensors = StepTensors::new(Lent::slice_mut(&mut params), Lent::optional_slices(&grads));
    /// step.step(&tensors, Scaling::NONE)?;
    /// assert_eq!(params, [-1.0, -2.0, 0.0]);
    /// assert_eq!(step.step_count(layout.id("unused")?)?, 0);
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Shapes
    /// Shapes as for [`optional_slices_mut`](Self::optional_slices_mut).
    pub fn optional_slices<T: StepElement>(slices: &'a [Option<&'a [T]>]) -> Lent<'a> {
        /// # Safety
        /// `list` is the address of a list of `Option<&[T]>` that has an element at `index`.
        unsafe fn get<T>(list: *const c_void, index: usize) -> Run {
            // SAFETY: the caller's promise. The slice is borrowed for `'a`, and the tensor lives no longer than that.
            let slice = unsafe { &*list.cast::<Option<&[T]>>().add(index) };
            slice.map_or(Run::NONE, Run::of)
        }
        let (list, count) = (slices.as_ptr().cast(), slices.len());
        Lent::new::<T>(Location::Each(Runs { list, count, get: get::<T>, is_raw: false }), false)
    }

    /// Lends the address of a run for the whole bucket.
    ///
    /// # Safety
    /// The following conditions hold until the work of every call with this address has ended. The address is aligned
    /// to an element and is in the memory of the step's device. The memory at the address contains all elements of the
    /// tensor, in the type that the step's precision sets. Elements that the call reads are initialised. Nothing else
    /// accesses the elements that the call accesses, and no other tensor of the call overlaps them. (If two runs that
    /// cover the whole bucket overlap, the call refuses them.)
    pub unsafe fn at(address: *mut c_void) -> Lent<'a> {
        Lent::raw(Location::Whole(Run { address: address.expose_provenance(), elements: None }))
    }

    /// Lends the address of a run and its number of elements. The call that gets the tensor compares this number with
    /// the bucket's number of elements.
    ///
    /// # Safety
    /// The address meets the contract of [`at`](Self::at).
    pub unsafe fn at_len(address: *mut c_void, elements: usize) -> Lent<'a> {
        Lent::raw(Location::Whole(Run { address: address.expose_provenance(), elements: Some(elements) }))
    }

    /// Lends one address per parameter. On a GPU, only parameters and gradients may be in separate runs. Any other
    /// tensor is one run with the bucket's offsets. In a list of gradients, a null address means that the parameter has
    /// no gradient and is skipped. In other lists, an address may be null only if its run has no elements.
    ///
    /// # Safety
    /// Each address that is not null meets the contract of [`at`](Self::at) for the elements of its parameter.
    pub unsafe fn at_each(addresses: &'a [*mut c_void]) -> Lent<'a> {
        /// # Safety
        /// `list` is the address of a list of addresses that has an element at `index`.
        unsafe fn get(list: *const c_void, index: usize) -> Run {
            // SAFETY: the caller's promise.
            let address = unsafe { *list.cast::<*mut c_void>().add(index) };
            Run { address: address.expose_provenance(), elements: None }
        }
        let (list, count) = (addresses.as_ptr().cast(), addresses.len());
        Lent::raw(Location::Each(Runs { list, count, get, is_raw: true }))
    }

    fn new<T: StepElement>(location: Location, is_writable: bool) -> Lent<'a> {
        Lent { location, element: Some(T::STORED), is_writable, is_on_gpu: false, _tensors: PhantomData }
    }

    /// Lends a slice of a GPU's memory.
    #[cfg(feature = "cuda")]
    pub(super) fn on_gpu<T: StepElement>(address: u64, elements: usize, is_writable: bool) -> Lent<'a> {
        let run = Run { address: address as usize, elements: Some(elements) };
        Lent { is_on_gpu: true, ..Lent::new::<T>(Location::Whole(run), is_writable) }
    }

    fn raw(location: Location) -> Lent<'a> {
        Lent { location, element: None, is_writable: true, is_on_gpu: false, _tensors: PhantomData }
    }
}

/// The tensors of one step.
#[derive(Debug)]
pub struct StepTensors<'a> {
    params: Lent<'a>,
    grads: Lent<'a>,
    master: Option<Lent<'a>>,
    copy: Option<Lent<'a>>,
    ema: Option<Lent<'a>>,
    states: [Option<Lent<'a>>; STATES],
    scales: [Option<Lent<'a>>; STATES],
    /// Whether more states or scales were given than any optimizer has.
    has_more: bool,
}

impl<'a> StepTensors<'a> {
    /// Returns one kind of tensor, if it was added.
    pub(super) fn get(&self, memory: Memory) -> Option<&Lent<'a>> {
        match memory {
            Memory::Params => Some(&self.params),
            Memory::Grads => Some(&self.grads),
            Memory::Master => self.master.as_ref(),
            Memory::Copy => self.copy.as_ref(),
            Memory::Ema => self.ema.as_ref(),
            Memory::State(k) => self.states.get(usize::from(k))?.as_ref(),
            Memory::Scales(k) => self.scales.get(usize::from(k))?.as_ref(),
            Memory::HostParams | Memory::HostGrads | Memory::Sums | Memory::Control | Memory::Settings => {
                None
            }
        }
    }

    pub(super) fn grads(&self) -> &Lent<'a> {
        &self.grads
    }

    /// Adds or replaces one kind of tensor.
    #[cfg(feature = "bench")]
    pub(crate) fn put(&mut self, memory: Memory, tensor: Lent<'a>) {
        match memory {
            Memory::Params => self.params = tensor,
            Memory::Grads => self.grads = tensor,
            Memory::Master => self.master = Some(tensor),
            Memory::Copy => self.copy = Some(tensor),
            Memory::Ema => self.ema = Some(tensor),
            Memory::State(k) => self.states[usize::from(k)] = Some(tensor),
            Memory::Scales(k) => self.scales[usize::from(k)] = Some(tensor),
            Memory::HostParams | Memory::HostGrads | Memory::Sums | Memory::Control | Memory::Settings => {}
        }
    }

    /// Returns the kinds of tensors that were added besides parameters and gradients. If more states or scales were
    /// added than any optimizer has, the result contains one state that no optimizer has.
    pub(super) fn memories(&self) -> impl Iterator<Item = Memory> + '_ {
        let numbered = (0..STATES as u8).flat_map(|k| [Memory::State(k), Memory::Scales(k)]);
        let all = [Memory::Master, Memory::Copy, Memory::Ema].into_iter().chain(numbered);
        let extra = self.has_more.then_some(Memory::State(STATES as u8));
        all.filter(|memory| self.get(*memory).is_some()).chain(extra)
    }

    /// Returns a `StepTensors` that has only parameters and summed gradients. The optimizer and the precision decide
    /// which other tensors you must add.
    pub fn new(params: Lent<'a>, grads: Lent<'a>) -> StepTensors<'a> {
        let none = || std::array::from_fn(|_| None);
        let (states, scales, has_more) = (none(), none(), false);
        StepTensors { params, grads, master: None, copy: None, ema: None, states, scales, has_more }
    }

    /// Adds the optimizer's states, in the order of [`state_names`](crate::Optimizer::state_names). Before the first
    /// step, the states must be zeros. 8-bit codes are `u8`. If a state is `None`, the step returns an error that names
    /// the missing state.
    pub fn states(
        mut self,
        states: impl IntoIterator<Item = impl Into<Option<Lent<'a>>>>,
    ) -> StepTensors<'a> {
        (self.states, self.has_more) = listed(states);
        self
    }

    /// Adds the scales of 8-bit states, in the order of the states: one f32 per 256 elements. With 8-bit states, every
    /// offset in the bucket is a multiple of 256.
    pub fn scales(
        mut self,
        scales: impl IntoIterator<Item = impl Into<Option<Lent<'a>>>>,
    ) -> StepTensors<'a> {
        let has_more;
        (self.scales, has_more) = listed(scales);
        self.has_more |= has_more;
        self
    }

    /// Adds the masters or remainders of 16-bit parameters ([`Master`](crate::Master)), in f32, u16 or u8. Before the
    /// first step, an f32 master must have its parameter's value, because a step reads only the master. A remainder
    /// must be zero.
    pub fn master(self, master: Lent<'a>) -> StepTensors<'a> {
        StepTensors { master: Some(master), ..self }
    }

    /// Adds the memory for a copy of the parameters in another type. A step writes the copy and never reads it.
    pub fn copy(self, copy: Lent<'a>) -> StepTensors<'a> {
        StepTensors { copy: Some(copy), ..self }
    }

    /// Adds the moving averages of the parameters, in f32. A parameter's first update overwrites its average. To resume
    /// a training, restore the averages.
    pub fn ema(self, ema: Lent<'a>) -> StepTensors<'a> {
        StepTensors { ema: Some(ema), ..self }
    }
}

/// Returns the first [`STATES`] tensors, and whether `tensors` has more.
fn listed<'a>(
    tensors: impl IntoIterator<Item = impl Into<Option<Lent<'a>>>>,
) -> ([Option<Lent<'a>>; STATES], bool) {
    let mut tensors = tensors.into_iter().map(Into::into);
    (std::array::from_fn(|_| tensors.next().flatten()), tensors.any(|tensor| tensor.is_some()))
}

impl Scaling {
    /// Makes steps read the loss scale and the skip flag from the tensors of `torch.amp.GradScaler` (`_scale` and
    /// `found_inf`, one f32 each). A step reads both values when it runs. If the flag is not 0, parameters, states and
    /// step counts do not change. Gradients are still zeroed or averaged, if the step was built with that option.
    ///
    /// `scale` replaces [`loss_scale`](Self::loss_scale). Pass null if the gradients are already unscaled. The step
    /// only reads `found_inf`. Your code must set `found_inf` to the same value on all ranks. A null `found_inf` counts
    /// as 0.
    ///
    /// # Safety
    /// Each address is null or points to memory of the step's device. This memory stays valid, and nothing writes to
    /// it, until the work of every call with this `Scaling` has ended. The calls refuse an unaligned address.
    pub unsafe fn grad_scaler(mut self, scale: *const f32, found_inf: *const f32) -> Scaling {
        let address = |at: *const f32| NonNull::new(at.cast_mut().cast()).map(Address::of);
        (self.grad_scale, self.found_inf) = (address(scale), address(found_inf));
        self
    }
}
