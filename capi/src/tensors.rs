//! The tensors of one step, and the factors in its gradients.
//!
//! Lengths are compared with the bucket's before an address is used; where the memory ends, only the caller knows.
#![allow(unsafe_code)]

use std::ffi::c_void;

use instep::Scaling;
use instep::bucket_step::{Tensor, Tensors};

use crate::arguments::{Growing, list, read, read_any};
use crate::codes::zero;
use crate::status::{Fault, INSTEP_LAYOUT, Result};

/// States that an optimizer keeps per element, at most.
pub const INSTEP_STATES_AT_MOST: usize = 4;

/// Where one kind of tensor lies: one run with the bucket's offsets, or one run per parameter. All zeros: there is none.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct instep_tensor {
    /// The first element of the run; null if each parameter has its own.
    pub address: *mut c_void,
    /// The first element of each parameter, in the order of the bucket; null if there is one run. On a GPU, only parameters
    /// and gradients may lie apart.
    pub addresses: *const *mut c_void,
    /// The run's elements, or the number of addresses. It is compared with the bucket's.
    pub count: usize,
}

/// The tensors of one step.
///
/// The memory is the caller's. It is read and written until the call returns, on a GPU until the stream has passed the step,
/// and nothing else may touch it meanwhile. Addresses are aligned to an element, and no two tensors overlap.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct instep_tensors {
    /// sizeof(instep_tensors).
    pub size: usize,
    /// Parameters, of the precision's type.
    pub params: instep_tensor,
    /// Summed gradients, of the precision's type.
    pub grads: instep_tensor,
    /// Master weights or remainders, if the precision has them. Before the first step an f32 master holds its parameter's
    /// value, and remainders are zeros.
    pub master: instep_tensor,
    /// The copy in another type, if the options ask for it. Only written.
    pub copy: instep_tensor,
    /// Moving averages, if the options ask for them: f32.
    pub ema: instep_tensor,
    /// The optimizer's states, in the order of instep_optimizer_state_name. Before the first step they are zeros.
    pub states: [instep_tensor; INSTEP_STATES_AT_MOST],
    /// The scales of 8-bit states: a float per 256 elements of the bucket.
    pub scales: [instep_tensor; INSTEP_STATES_AT_MOST],
}

// SAFETY: numbers and pointers, for which zeros are values.
unsafe impl Growing for instep_tensors {
    const NAME: &'static str = "instep_tensors";
}

/// The factors in the gradients: each is multiplied by clip / (world_size * loss_scale). Zeros stand for 1.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct instep_scaling {
    /// sizeof(instep_scaling).
    pub size: usize,
    /// The gradients are sums over so many ranks.
    pub world_size: u32,
    /// Zero; anything else is refused.
    pub reserved: u32,
    /// The factor in the loss.
    pub loss_scale: f64,
    /// A clip coefficient that the caller has computed, from 0 to 1.
    pub clip: f64,
    /// Null, or the loss scale in the memory of the step's device, in the place of loss_scale (GradScaler's _scale). It is
    /// read when the step runs.
    pub grad_scale: *const f32,
    /// Null, or a flag in the memory of the step's device: other than 0, the step changes nothing (GradScaler's found_inf).
    pub found_inf: *const f32,
}

// SAFETY: numbers and pointers, for which zeros are values.
unsafe impl Growing for instep_scaling {
    const NAME: &'static str = "instep_scaling";
}

/// The lengths of a bucket's tensors.
#[derive(Clone, Copy)]
pub(crate) struct Extent {
    pub(crate) elements: usize,
    pub(crate) params: usize,
}

impl Extent {
    /// One kind of tensor, if it is there.
    ///
    /// # Safety
    /// The addresses are as the header says, for `'a`.
    unsafe fn tensor<'a>(
        self,
        name: &str,
        given: &instep_tensor,
        per_unit: usize,
    ) -> Result<Option<Tensor<'a>>> {
        let instep_tensor { address, addresses, count } = *given;
        if addresses.is_null() && address.is_null() && count == 0 && self.elements > 0 {
            return Ok(None);
        }
        let (expected, what) = match addresses.is_null() {
            true => (self.elements.div_ceil(per_unit), "elements"),
            false => (self.params, "addresses"),
        };
        if count != expected {
            let text = format_args!("{name}: {count} {what}, where the bucket has {expected}; pass as many");
            return Err(Fault::new(INSTEP_LAYOUT, text));
        }
        if !addresses.is_null() && !address.is_null() {
            let remedy = "leave one of them null";
            return Err(Fault::argument(name, "both one address and one per parameter", remedy));
        }
        // SAFETY: the caller's promise.
        Ok(Some(unsafe {
            match addresses.is_null() {
                true => Tensor::at(address),
                false => Tensor::at_each(list(addresses, count, name)?),
            }
        }))
    }

    /// The gradients alone.
    ///
    /// # Safety
    /// As for [`tensors`](Self::tensors).
    pub(crate) unsafe fn grads<'a>(self, given: &instep_tensor) -> Result<Tensor<'a>> {
        // SAFETY: the caller's promise.
        unsafe { self.tensor("gradients", given, 1)? }.ok_or_else(|| missing("gradients"))
    }

    /// All tensors of a step.
    ///
    /// # Safety
    /// The struct, its lists and their addresses are as the header says, for `'a`.
    pub(crate) unsafe fn tensors<'a>(self, from: *const instep_tensors) -> Result<Tensors<'a>> {
        // SAFETY: the caller's promise, here and below.
        let given = unsafe { read(from)? };
        refuse_overlap(&given, self.elements)?;
        // SAFETY: as above.
        let tensor = |name, tensor: &instep_tensor, unit| unsafe { self.tensor(name, tensor, unit) };
        let all = |name, of: &[instep_tensor], unit| -> Result<Vec<Tensor<'a>>> {
            let mut found: Vec<_> = of.iter().map(|one| tensor(name, one, unit)).collect::<Result<_>>()?;
            while found.pop_if(|last| last.is_none()).is_some() {}
            found.into_iter().map(|one| one.ok_or_else(|| missing(name))).collect()
        };
        let params = tensor("parameters", &given.params, 1)?.ok_or_else(|| missing("parameters"))?;
        let grads = tensor("gradients", &given.grads, 1)?.ok_or_else(|| missing("gradients"))?;
        let states = all("states", &given.states, 1)?;
        let mut tensors = Tensors::new(params, grads).states(states);
        let scales = all("scales", &given.scales, 256)?;
        tensors = tensors.scales(scales);
        if let Some(master) = tensor("masters", &given.master, 1)? {
            tensors = tensors.master(master);
        }
        if let Some(copy) = tensor("copies", &given.copy, 1)? {
            tensors = tensors.copy(copy);
        }
        if let Some(ema) = tensor("moving averages", &given.ema, 1)? {
            tensors = tensors.ema(ema);
        }
        Ok(tensors)
    }
}

/// # Safety
/// The struct and its addresses are as the header says, or the pointer is null.
pub(crate) unsafe fn scaling(from: *const instep_scaling) -> Result<Scaling> {
    // SAFETY: the caller's promise.
    let Some(given) = (unsafe { read_any(from)? }) else { return Ok(Scaling::NONE) };
    zero("reserved", given.reserved)?;
    refuse_misaligned("grad_scale", given.grad_scale)?;
    refuse_misaligned("found_inf", given.found_inf)?;
    let one = |number: f64| if number == 0.0 { 1.0 } else { number };
    let scaling =
        Scaling::mean(given.world_size.max(1)).loss_scale(one(given.loss_scale)).clip(one(given.clip));
    // SAFETY: the caller's promise.
    Ok(unsafe { scaling.grad_scaler(given.grad_scale, given.found_inf) })
}

fn refuse_misaligned(name: &str, address: *const f32) -> Result<()> {
    if address.is_aligned() {
        return Ok(());
    }
    Err(Fault::argument(name, format_args!("{address:p} is misaligned"), "align it to 4 bytes"))
}

/// Refuses runs that overlap. How many bytes an element has, this file does not know: it has one at least.
fn refuse_overlap(given: &instep_tensors, elements: usize) -> Result<()> {
    let named = [
        ("parameters", &given.params),
        ("gradients", &given.grads),
        ("masters", &given.master),
        ("copies", &given.copy),
        ("moving averages", &given.ema),
    ];
    let states = given.states.iter().map(|one| ("states", one));
    let scales = given.scales.iter().map(|one| ("scales", one));
    let mut runs: [(usize, usize, &str); 5 + 2 * INSTEP_STATES_AT_MOST] = Default::default();
    let mut count = 0;
    for (name, tensor) in named.into_iter().chain(states).chain(scales) {
        if !tensor.address.is_null() && tensor.addresses.is_null() && elements > 0 {
            let start = tensor.address.addr();
            runs[count] = (start, start.saturating_add(tensor.count.min(elements)), name);
            count += 1;
        }
    }
    let runs = &mut runs[..count];
    runs.sort_unstable();
    match runs.windows(2).find(|pair| pair[1].0 < pair[0].1) {
        None => Ok(()),
        Some(pair) => {
            let text = format_args!("{} and {}: overlap; give each its own memory", pair[0].2, pair[1].2);
            Err(Fault::new(INSTEP_LAYOUT, text))
        }
    }
}

fn missing(name: &str) -> Fault {
    Fault::new(INSTEP_LAYOUT, format_args!("{name}: missing; give an address, or one per parameter"))
}
