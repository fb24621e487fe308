//! The tensors of one call: slices that are checked, or addresses that the caller vouches for, two numbers among them.
//!
//! A tensor is one run that has the bucket's offsets, or one run per parameter. This file hands out addresses and lengths
//! and touches no element.
#![allow(unsafe_code)]

use std::any::TypeId;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr::NonNull;

use bytemuck::Pod;

use crate::abi::INSTEP_MAX_STATES;
use crate::bucket_step::scaling::Scaling;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::handle::Address;
use crate::op::Memory;

const STATES: usize = INSTEP_MAX_STATES as usize;

/// Where one kind of tensor lies during a call: one run for the whole bucket, or one per parameter.
///
/// One run has the bucket's offsets: element k of the bucket lies k elements after its start. Runs per parameter come in
/// the order in which the bucket lists its parameters.
#[derive(Debug)]
pub struct Tensor<'a> {
    pub(super) location: Location,
    /// What a slice says of its elements.
    pub(super) element: Option<Element>,
    pub(super) is_writable: bool,
    _tensors: PhantomData<&'a mut c_void>,
}

/// The elements of a slice.
#[derive(Clone, Copy, Debug)]
pub(super) struct Element {
    pub(super) bytes: usize,
    /// `None` for a type that has no name here, whose bits are taken as they are.
    pub(super) dtype: Option<DType>,
}

impl Element {
    fn of<T: 'static>() -> Element {
        let is = |dtype: TypeId| dtype == TypeId::of::<T>();
        let known = [
            (TypeId::of::<f32>(), DType::F32),
            (TypeId::of::<half::bf16>(), DType::BF16),
            (TypeId::of::<half::f16>(), DType::F16),
        ];
        let dtype = known.into_iter().find(|(known, _)| is(*known)).map(|(_, dtype)| dtype);
        Element { bytes: size_of::<T>(), dtype }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Location {
    Whole(Run),
    Each(Runs),
}

/// An address, and the length in bytes if it is known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) address: usize,
    pub(super) bytes: Option<usize>,
}

/// A list of runs. `get` knows the type of its elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Runs {
    list: *const c_void,
    pub(super) count: usize,
    get: unsafe fn(*const c_void, usize) -> Run,
}

// SAFETY: slices of plain numbers, which may go to another thread; or addresses, whose users the caller orders.
unsafe impl Send for Tensor<'_> {}

impl Runs {
    /// Returns one run of the list.
    ///
    /// # Panics
    /// If there is none.
    pub(super) fn run(&self, index: usize) -> Run {
        assert!(index < self.count, "a run for each parameter");
        // SAFETY: `list` points to `count` elements of the type that `get` was made for, borrowed for `'a`.
        unsafe { (self.get)(self.list, index) }
    }
}

impl Run {
    fn of<T>(slice: &[T]) -> Run {
        Run { address: slice.as_ptr().expose_provenance(), bytes: Some(size_of_val(slice)) }
    }

    fn of_mut<T>(slice: &mut [T]) -> Run {
        Run { address: slice.as_mut_ptr().expose_provenance(), bytes: Some(size_of_val(slice)) }
    }
}

impl<'a> Tensor<'a> {
    /// Lends a run that a step may write.
    ///
    /// # Shapes
    /// As many elements as the bucket; scales of 8-bit states: one per 256 elements.
    pub fn slice_mut<T: Pod>(slice: &'a mut [T]) -> Tensor<'a> {
        Tensor::new::<T>(Location::Whole(Run::of_mut(slice)), true)
    }

    /// Lends a run that is only read: gradients.
    ///
    /// # Shapes
    /// Shapes as for [`slice_mut`](Self::slice_mut).
    pub fn slice<T: Pod>(slice: &'a [T]) -> Tensor<'a> {
        Tensor::new::<T>(Location::Whole(Run::of(slice)), false)
    }

    /// Lends one run per parameter, which a step may write.
    ///
    /// # Shapes
    /// As many runs as the bucket has parameters, in the order in which the bucket lists them, each as long as its parameter;
    /// scales: one per 256 elements, begun ones included. The list stays borrowed for as long as its slices, so it is made
    /// anew for each step. Kinds may mix: parameters apart, and states in one run.
    pub fn slices_mut<T: Pod>(slices: &'a mut [&'a mut [T]]) -> Tensor<'a> {
        /// # Safety
        /// `list` has an element `index` of this type.
        unsafe fn get<T>(list: *const c_void, index: usize) -> Run {
            // SAFETY: the caller's promise; the slice stays borrowed for as long as the tensor.
            Run::of_mut(unsafe { &mut **list.cast::<*mut [T]>().add(index) })
        }
        let (list, count) = (slices.as_mut_ptr().cast_const().cast(), slices.len());
        Tensor::new::<T>(Location::Each(Runs { list, count, get: get::<T> }), true)
    }

    /// Lends one run per parameter that is only read: gradients.
    ///
    /// # Shapes
    /// Shapes as for [`slices_mut`](Self::slices_mut).
    pub fn slices<T: Pod>(slices: &'a [&'a [T]]) -> Tensor<'a> {
        /// # Safety
        /// `list` has an element `index` of this type.
        unsafe fn get<T>(list: *const c_void, index: usize) -> Run {
            // SAFETY: as in `slices_mut`.
            Run::of(unsafe { &**list.cast::<*const [T]>().add(index) })
        }
        let (list, count) = (slices.as_ptr().cast(), slices.len());
        Tensor::new::<T>(Location::Each(Runs { list, count, get: get::<T> }), false)
    }

    /// Names the address of a run for the whole bucket.
    ///
    /// # Safety
    /// Until each call that it is given to has run: the address, aligned to an element, is valid for the tensor's
    /// elements, in the type that the step's precision says, in the memory of the step's device; what is read is
    /// initialised; nothing else touches what the call touches, and no other tensor of the call overlaps it.
    pub unsafe fn at(address: *mut c_void) -> Tensor<'a> {
        Tensor::raw(Location::Whole(Run { address: address.expose_provenance(), bytes: None }))
    }

    /// Names one address per parameter. On a GPU only parameters and gradients may lie apart; any other tensor is one run
    /// with the bucket's offsets.
    ///
    /// # Safety
    /// As for [`at`](Self::at), for each address and the elements of its parameter.
    pub unsafe fn at_each(addresses: &'a [*mut c_void]) -> Tensor<'a> {
        /// # Safety
        /// `list` has an element `index`.
        unsafe fn get(list: *const c_void, index: usize) -> Run {
            // SAFETY: the caller's promise.
            let address = unsafe { *list.cast::<*mut c_void>().add(index) };
            Run { address: address.expose_provenance(), bytes: None }
        }
        let (list, count) = (addresses.as_ptr().cast(), addresses.len());
        Tensor::raw(Location::Each(Runs { list, count, get }))
    }

    /// Refuses what a GPU cannot reach.
    pub(super) fn refuse_on_gpu(&self, memory: Memory) -> Result<()> {
        if self.element.is_some() {
            let remedy = "name device addresses with `Tensor::at`";
            return Err(Error::unsupported(
                format_args!("{memory:?}"),
                "a slice of the host's memory",
                remedy,
            ));
        }
        let is_apart = matches!(self.location, Location::Each(Runs { count: 2.., .. }));
        if is_apart && !matches!(memory, Memory::Params | Memory::Grads) {
            let wrong = "on a GPU, only parameters and gradients may lie apart";
            return Err(Error::unsupported(
                format_args!("{memory:?}"),
                wrong,
                "name one run with `Tensor::at`",
            ));
        }
        Ok(())
    }

    fn new<T: Pod>(location: Location, is_writable: bool) -> Tensor<'a> {
        Tensor { location, element: Some(Element::of::<T>()), is_writable, _tensors: PhantomData }
    }

    fn raw(location: Location) -> Tensor<'a> {
        Tensor { location, element: None, is_writable: true, _tensors: PhantomData }
    }
}

/// The tensors of one step.
#[derive(Debug)]
pub struct Tensors<'a> {
    params: Tensor<'a>,
    grads: Tensor<'a>,
    master: Option<Tensor<'a>>,
    copy: Option<Tensor<'a>>,
    ema: Option<Tensor<'a>>,
    states: [Option<Tensor<'a>>; STATES],
    scales: [Option<Tensor<'a>>; STATES],
    /// More states were given than any optimizer keeps.
    has_more: bool,
}

impl<'a> Tensors<'a> {
    /// Returns one kind of tensor, if it was added.
    pub(super) fn get(&self, memory: Memory) -> Option<&Tensor<'a>> {
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

    /// Refuses what a GPU's step cannot reach.
    pub(super) fn refuse_on_gpu(&self) -> Result<()> {
        let mut all = [Memory::Params, Memory::Grads].into_iter().chain(self.memories());
        all.try_for_each(|memory| self.get(memory).map_or(Ok(()), |tensor| tensor.refuse_on_gpu(memory)))
    }

    /// Adds or replaces one kind of tensor.
    #[cfg(feature = "bench")]
    pub(crate) fn put(&mut self, memory: Memory, tensor: Tensor<'a>) {
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

    /// Returns what was added to parameters and gradients.
    pub(super) fn memories(&self) -> impl Iterator<Item = Memory> + '_ {
        let numbered = (0..STATES as u8).flat_map(|k| [Memory::State(k), Memory::Scales(k)]);
        let all = [Memory::Master, Memory::Copy, Memory::Ema].into_iter().chain(numbered);
        let extra = self.has_more.then_some(Memory::State(STATES as u8));
        all.filter(|memory| self.get(*memory).is_some()).chain(extra)
    }

    /// Parameters and summed gradients. What else a step needs depends on its optimizer and precision.
    pub fn new(params: Tensor<'a>, grads: Tensor<'a>) -> Tensors<'a> {
        let none = || std::array::from_fn(|_| None);
        let (states, scales, has_more) = (none(), none(), false);
        Tensors { params, grads, master: None, copy: None, ema: None, states, scales, has_more }
    }

    /// Adds the optimizer's states, in the order of [`state_names`](crate::Optimizer::state_names). Before the first step
    /// they are zeros. Codes of 8 bits are `u8`.
    pub fn states(mut self, states: impl IntoIterator<Item = Tensor<'a>>) -> Tensors<'a> {
        (self.states, self.has_more) = listed(states);
        self
    }

    /// Adds the scales of 8-bit states, in the same order: an f32 per 256 elements. With 8-bit states, every offset in the
    /// bucket is a multiple of 256.
    pub fn scales(mut self, scales: impl IntoIterator<Item = Tensor<'a>>) -> Tensors<'a> {
        let has_more;
        (self.scales, has_more) = listed(scales);
        self.has_more |= has_more;
        self
    }

    /// Adds the masters or remainders of 16-bit parameters ([`Master`](crate::Master)), of f32, u16 or u8. Before the first
    /// step, an f32 master holds its parameter's value, because a step reads the master alone. A remainder is zero.
    pub fn master(self, master: Tensor<'a>) -> Tensors<'a> {
        Tensors { master: Some(master), ..self }
    }

    /// Adds the copy of the parameters in another type, which a step only writes.
    pub fn copy(self, copy: Tensor<'a>) -> Tensors<'a> {
        Tensors { copy: Some(copy), ..self }
    }

    /// Adds the moving averages of the parameters, in f32. A parameter's first update overwrites its average; a resumed
    /// training needs the old ones.
    pub fn ema(self, ema: Tensor<'a>) -> Tensors<'a> {
        Tensors { ema: Some(ema), ..self }
    }
}

/// As many as an optimizer keeps at most, and whether there were more.
fn listed<'a>(tensors: impl IntoIterator<Item = Tensor<'a>>) -> ([Option<Tensor<'a>>; STATES], bool) {
    let mut tensors = tensors.into_iter();
    (std::array::from_fn(|_| tensors.next()), tensors.next().is_some())
}

impl Scaling {
    /// Takes the loss scale, and the flag that forbids the step, from `torch.amp.GradScaler`'s tensors of one f32 each
    /// (`_scale`, `found_inf`). The step reads them when it runs. A flag other than 0 leaves
    /// parameters, states and step counts as they are; gradients are still zeroed, or averaged, if the step does that.
    ///
    /// `scale` replaces [`loss_scale`](Self::loss_scale). Where gradients are unscaled already, it is null. The step only
    /// reads `found_inf`: your code sets it, equally on all ranks. Null stands for 0.
    ///
    /// # Safety
    /// Both addresses are null, or in the memory of the step's device and valid until each call that they are given to has
    /// run; nothing writes them meanwhile. One that is not aligned is refused by those calls.
    pub unsafe fn grad_scaler(mut self, scale: *const f32, found_inf: *const f32) -> Scaling {
        let address = |at: *const f32| NonNull::new(at.cast_mut().cast()).map(Address::of);
        (self.grad_scale, self.found_inf) = (address(scale), address(found_inf));
        self
    }
}
