//! Steps PyTorch's tensors on a GPU, on PyTorch's stream, for torch_gpu.py.
//!
//! A stepper borrows the tensors and makes whole passes: begin, hand-over of every gradient, finish. Errors go to
//! standard error. Before and after a pass, this file must do only the work of a trainer.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::slice;

use instep::cuda::{Cuda, CudaDevice};
use instep::{
    Adam, AdamW, Borrowed, Error, ForeignBucket, Layout, ParamId, Result, Sgd, Solo, Stepper, StreamHandle,
    Unused,
};

/// A stepper, and its parameters in the order in which they are handed over.
struct Peer {
    stepper: Stepper<CudaDevice>,
    ids: Vec<ParamId>,
}

/// The caller's tensors, as a C struct.
#[repr(C)]
pub(crate) struct Tensors {
    buckets: usize,
    segments: usize,
    length: usize,
    /// The device addresses of all parameters (`segments` per bucket), bucket by bucket.
    params: *const *mut f32,
    /// The device addresses of the flat gradients of each bucket.
    grads: *const *mut f32,
}

/// Returns a stepper on parameters of `length` elements each, or null on failure. Optimizers are numbered as in
/// `instep_peer_new`.
///
/// # Safety
/// On this device, until the stepper is closed, each parameter's address is valid for `length` elements, and each
/// bucket's address for `segments` x `length` elements. Only work on `stream` touches the elements, and `stream`
/// outlives the stepper.
// SAFETY: the prefix keeps the name to this library.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn instep_peers_gpu_open(
    number: u32,
    ordinal: u32,
    stream: usize,
    world_size: u32,
    tensors: &Tensors,
) -> *mut c_void {
    // SAFETY: by the contract.
    told(unsafe { open(number, ordinal, stream, world_size, tensors) })
        .map_or(std::ptr::null_mut(), |peer| Box::into_raw(Box::new(peer)).cast())
}

/// Makes one pass over all buckets, first to last. Work that is enqueued on PyTorch's stream after this call runs after
/// every step.
///
/// # Safety
/// `peer` comes from `instep_peers_gpu_open` and has not been closed.
// SAFETY: the prefix keeps the name to this library.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn instep_peers_gpu_pass(peer: *mut c_void) -> bool {
    // SAFETY: by the contract.
    let Peer { stepper, ids } = unsafe { &mut *peer.cast::<Peer>() };
    let mut pass = || {
        let mut pass = stepper.begin()?;
        for id in &*ids {
            pass.ptr(id.grad())?;
            pass.grad_ready(*id)?;
        }
        pass.finish()
    };
    told(pass()).is_some()
}

/// Closes the stepper, once all its work has run.
///
/// # Safety
/// The conditions of `instep_peers_gpu_pass` hold; the pointer is invalid afterwards.
// SAFETY: the prefix keeps the name to this library.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn instep_peers_gpu_close(peer: *mut c_void) -> bool {
    // SAFETY: made by `Box::into_raw`, by the contract.
    let peer = unsafe { Box::from_raw(peer.cast::<Peer>()) };
    told(peer.stepper.close()).is_some()
}

/// # Safety
/// The conditions of `instep_peers_gpu_open` hold.
unsafe fn open(number: u32, ordinal: u32, stream: usize, world_size: u32, tensors: &Tensors) -> Result<Peer> {
    let Tensors { buckets, segments, length, params, grads } = *tensors;
    // SAFETY: as long as the contract says.
    let (params, grads) =
        unsafe { (slice::from_raw_parts(params, buckets * segments), slice::from_raw_parts(grads, buckets)) };
    let names = (0..buckets * segments).map(|k| format!("p{k}"));
    let layout = names.fold(Layout::builder(), |builder, name| builder.param(name, length)).build()?;
    let ids: Vec<ParamId> = layout.ids().collect();
    let mut borrowed = Borrowed::new();
    for (bucket, address) in grads.iter().enumerate() {
        let mut foreign = ForeignBucket::new(segments * length);
        for segment in 0..segments {
            let k = bucket * segments + segment;
            foreign = foreign.gradient(ids[k], segment * length);
            borrowed = borrowed.param(ids[k], params[k]);
        }
        borrowed = borrowed.bucket(foreign, *address);
    }
    let builder = match number {
        0 => Stepper::builder(&layout, AdamW::default()),
        1 => Stepper::builder(&layout, Adam::default()),
        2 => Stepper::builder(&layout, Sgd::default()),
        3 => Stepper::builder(&layout, Sgd { momentum: 0.9, ..Sgd::default() }),
        _ => return Err(Error::layout(format_args!("optimizer {number}"), "unknown", "")),
    };
    let cuda = Cuda::open(ordinal)?.compute_stream(StreamHandle(stream));
    // What the ranks' sums are divided by.
    let builder = builder.unused(Unused::StepZero).loss_scale(f64::from(world_size));
    // SAFETY: the caller's promise, by the contract.
    let stepper = unsafe { builder.cuda_borrowing(Solo::default(), borrowed, &cuda)? };
    Ok(Peer { stepper, ids })
}

/// Returns the value, or prints the error and returns `None`.
fn told<T>(outcome: Result<T>) -> Option<T> {
    outcome.inspect_err(|error| eprintln!("instep: {error}")).ok()
}
