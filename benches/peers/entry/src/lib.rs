//! Steps buckets immediately, for C or Python programs that compare the times of instep and other libraries.
//!
//! This interface is only for benches and is not the library's C interface. A failed call returns null or false, and
//! any function may change in later versions. Before and after a step, this file must do no work that a user of the
//! library would not do.
#![allow(unsafe_code)]

#[cfg(feature = "cuda")]
mod gpu;

use instep::bench::Launcher;
use instep::op::Memory;
use instep::{Adam, AdamW, DType, Isa, Layout, Moments, Optimizer, Precision, Rounding, Sgd};

/// Returns the optimizer that a number selects, with PyTorch's defaults: AdamW, Adam, SGD, and SGD with a momentum of
/// 0.9.
fn optimizer(number: u32) -> Option<Box<dyn Optimizer>> {
    match number {
        0 => Some(Box::new(AdamW::default())),
        1 => Some(Box::new(Adam::default())),
        2 => Some(Box::new(Sgd::default())),
        3 => Some(Box::new(Sgd { momentum: 0.9, ..Sgd::default() })),
        _ => None,
    }
}

/// Returns the element types that a number selects.
fn precision(number: u32) -> Option<Precision> {
    let rounding = match number {
        0 => return Some(Precision::F32),
        1 => Rounding::Nearest,
        2 => Rounding::Stochastic { seed: 1 },
        _ => return None,
    };
    let (param, grad, moments) = (DType::BF16, DType::BF16, Moments::BF16);
    Some(Precision { param, grad, moments, rounding, ..Precision::F32 })
}

/// Returns memory for `buckets` buckets of `segments` segments of `length` elements, or null on failure. `length` is a
/// multiple of 256, so that buckets have no padding. Optimizers: AdamW (0), Adam (1), SGD (2), SGD with momentum (3).
/// All tensors are f32 (precision 0), or bf16 with rounding to nearest (1) or stochastic rounding (2).
// SAFETY: the prefix keeps the name to this library.
#[unsafe(no_mangle)]
pub extern "C" fn instep_peer_new(
    number: u32,
    precision: u32,
    buckets: usize,
    segments: usize,
    length: usize,
    world_size: u32,
    threads: usize,
) -> *mut Launcher {
    let optimizer = optimizer(number).filter(|_| length > 0 && length.is_multiple_of(256));
    let (Some(optimizer), Some(precision)) = (optimizer, self::precision(precision)) else {
        return std::ptr::null_mut();
    };
    let params = (0..buckets * segments).map(|k| format!("p{k}"));
    let layout = params.fold(Layout::builder(), |builder, name| builder.param(name, length)).build();
    let isa = Isa::from_environment();
    let cap_bytes = (segments * length) as u64 * precision.grad.bytes();
    let launcher = layout.and_then(|layout| {
        Launcher::new(&layout, &*optimizer, cap_bytes, world_size, precision.into(), isa?, threads)
    });
    launcher.map_or(std::ptr::null_mut(), |launcher| Box::into_raw(Box::new(launcher)))
}

/// Returns the address of the first bucket's parameters (0), gradients (1) or moment (2, 3). The other buckets follow
/// in order.
///
/// # Safety
/// `launcher` comes from `instep_peer_new` and has not been freed.
// SAFETY: the prefix keeps the name to this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_peer_elements(launcher: *mut Launcher, array: u8) -> *mut u8 {
    let memory = match array {
        0 => Memory::Params,
        1 => Memory::Grads,
        2 | 3 => Memory::State(array - 2),
        _ => return std::ptr::null_mut(),
    };
    // SAFETY: by the contract.
    unsafe { (*launcher).bytes(memory, 0).as_mut_ptr() }
}

/// Steps buckets `first..last`, and returns whether all steps succeeded.
///
/// # Safety
/// The conditions of `instep_peer_elements` hold, and nothing else touches the elements during the call.
// SAFETY: the prefix keeps the name to this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_peer_step(launcher: *mut Launcher, first: u32, last: u32) -> bool {
    // SAFETY: by the contract.
    let launcher = unsafe { &mut *launcher };
    (first..last).all(|bucket| launcher.step(bucket).is_ok())
}

/// Frees the memory.
///
/// # Safety
/// The conditions of `instep_peer_elements` hold; the pointer and every pointer into the memory are invalid afterwards.
// SAFETY: the prefix keeps the name to this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_peer_free(launcher: *mut Launcher) {
    // SAFETY: made by `Box::into_raw`, by the contract.
    drop(unsafe { Box::from_raw(launcher) });
}
