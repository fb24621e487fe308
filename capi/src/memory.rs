//! The caller's parameters and gradient buckets, for a stepper that borrows them.
//!
//! The Rust library checks the addresses. It refuses null addresses, misaligned addresses and memory that overlaps.
#![allow(unsafe_code)]

use std::ffi::c_void;

use instep::{Borrowed, DType, bf16, f16};

use crate::arguments::{Growing, list, read};
use crate::bucket_options::bucket;
use crate::layout::Ids;
use crate::options::Types;
use crate::status::{Fault, INSTEP_LAYOUT, Result};

/// A flat bucket of gradients in the caller's memory.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct instep_bucket {
    /// The first element.
    pub address: *mut c_void,
    /// The number of elements, gaps included.
    pub elements: usize,
    /// The numbers of the parameters that have their gradients in this bucket.
    pub params: *const u32,
    /// The offset of each gradient in the bucket, in elements.
    pub offsets: *const usize,
    /// The number of parameters in `params`.
    pub param_count: usize,
}

/// The caller's tensors. These tensors are in the memory of the stepper's device. The layout and the precisions
/// determine the tensors' element types. All gradients of a bucket must have one type.
///
/// The stepper reads and writes the tensors until instep_stepper_free has returned. The caller may write a gradient
/// after a call of instep_stepper_address with INSTEP_WRITE, and may read a parameter after a call of
/// instep_stepper_address. On the CPU, the caller may also write a parameter after a call between passes with
/// INSTEP_WRITE. Each permission ends when the address becomes invalid (see instep_stepper_address). At all other times
/// the caller must not touch gradients or parameters.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct instep_memory {
    /// sizeof(instep_memory).
    pub size: usize,
    /// The addresses of all parameters, in the order of their numbers.
    pub params: *const *mut c_void,
    /// The number of parameters of the layout. In instep_stepper_rebind, 0 means that no parameter has moved.
    pub param_count: usize,
    /// All buckets. Buckets are numbered in the order of this list. Every parameter must be in exactly one bucket.
    pub buckets: *const instep_bucket,
    /// The number of buckets. In instep_stepper_rebind, 0 means that the buckets have not changed.
    pub bucket_count: usize,
}

// SAFETY: all fields are numbers and pointers, for which zeros are valid.
unsafe impl Growing for instep_memory {
    const NAME: &'static str = "instep_memory";
}

/// # Safety
/// The struct and its lists meet instep.h's contract.
pub(crate) unsafe fn memory(from: *const instep_memory, ids: &Ids, types: &[Types]) -> Result<Borrowed> {
    // SAFETY: guaranteed by the caller, here and below.
    let (params, buckets) = unsafe {
        let given = read(from)?;
        (
            list(given.params, given.param_count, "params")?,
            list(given.buckets, given.bucket_count, "buckets")?,
        )
    };
    if !params.is_empty() && params.len() != ids.len() {
        let (given, expected) = (params.len(), ids.len());
        let text = format_args!("params: {given} addresses, where the layout has {expected}; give each one");
        return Err(Fault::new(INSTEP_LAYOUT, text));
    }
    let mut borrowed = Borrowed::new();
    for (param, address) in params.iter().enumerate() {
        let id = ids.get(param as u32)?;
        borrowed = match types[param].param {
            DType::BF16 => borrowed.param::<bf16>(id, address.cast()),
            DType::F16 => borrowed.param::<f16>(id, address.cast()),
            _ => borrowed.param::<f32>(id, address.cast()),
        };
    }
    for one in buckets {
        // SAFETY: guaranteed by the caller.
        let (params, offsets) = unsafe {
            (list(one.params, one.param_count, "params")?, list(one.offsets, one.param_count, "offsets")?)
        };
        let foreign = bucket(ids, params, offsets, one.elements)?;
        // A bucket holds gradients of one type. An empty bucket is refused later.
        let first = params.first().map_or(DType::F32, |param| types[*param as usize].grad);
        borrowed = match first {
            DType::BF16 => borrowed.bucket::<bf16>(foreign, one.address.cast()),
            DType::F16 => borrowed.bucket::<f16>(foreign, one.address.cast()),
            _ => borrowed.bucket::<f32>(foreign, one.address.cast()),
        };
    }
    Ok(borrowed)
}
