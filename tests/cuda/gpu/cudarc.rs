//! A bucket step on cudarc's own types: its streams and events are handles, its slices are tensors.
//!
//! The bits are compared with those of the host's step. `calls.rs` counts the calls that cudarc's tracking of slices
//! adds.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

use instep::bucket_step::{Lent, OnGpu, StepTensors};
use instep::cuda::Cuda;
use instep::cuda::cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use instep::{BucketStep, Error, EventHandle, Scaling, Sgd, StreamHandle};
use libloading::Library;

use crate::support::{layout, paint};

const LENGTH: usize = 5000;

fn optimizer() -> Sgd {
    Sgd { lr: 0.1, momentum: 0.9, ..Sgd::default() }
}

fn painted(row: usize) -> Vec<f32> {
    (0..LENGTH).map(|k| paint(row, k)).collect()
}

/// Opens the driver; cudarc then finds the driver that `INSTEP_CUDA` names.
pub(super) fn on_gpu() -> BucketStep<OnGpu> {
    BucketStep::builder(&layout(&[LENGTH]), optimizer()).cuda(&Cuda::open(0).unwrap()).unwrap()
}

/// The tensors of a step.
pub(super) struct Slices {
    params: CudaSlice<f32>,
    grads: CudaSlice<f32>,
    momentum: CudaSlice<f32>,
}

impl Slices {
    pub(super) fn on(stream: &Arc<CudaStream>) -> Slices {
        let [params, grads] = [0, 1].map(|row| stream.clone_htod(&painted(row)).unwrap());
        let momentum = stream.alloc_zeros(LENGTH).unwrap();
        Slices { params, grads, momentum }
    }

    /// Enqueues a step on the stream.
    pub(super) fn step(&mut self, step: &mut BucketStep<OnGpu>, stream: &Arc<CudaStream>) {
        let (params, _params) = Lent::cuda_slice_mut(&mut self.params, stream);
        let (grads, _grads) = Lent::cuda_slice(&self.grads, stream);
        let (momentum, _momentum) = Lent::cuda_slice_mut(&mut self.momentum, stream);
        let tensors = StepTensors::new(params, grads).states([momentum]);
        // SAFETY: the slices' own context, which outlives the work: its streams are waited for before they go.
        unsafe { step.enqueue(&tensors, Scaling::mean(2), stream.into()).unwrap() };
    }
}

#[test]
#[ignore = "benches/gpu/run.sh runs it: needs a GPU"]
fn slices_of_one_stream_are_stepped_on_another_with_the_bits_of_the_host() {
    let mut step = on_gpu();
    let context = CudaContext::new(0).unwrap();
    let [memory, steps] = [(); 2].map(|()| context.new_stream().unwrap());
    let mut slices = Slices::on(&memory);
    let (mut params, grads, mut momentum) = (painted(0), painted(1), vec![0.0f32; LENGTH]);
    let mut on_host = BucketStep::builder(&layout(&[LENGTH]), optimizer()).host().unwrap();
    for _ in 0..3 {
        slices.step(&mut step, &steps);
        let tensors = StepTensors::new(Lent::slice_mut(&mut params), Lent::slice(&grads));
        on_host.step(&tensors.states([Lent::slice_mut(&mut momentum)]), Scaling::mean(2)).unwrap();
        assert_eq!(memory.clone_dtoh(&slices.params).unwrap(), params);
        assert_eq!(memory.clone_dtoh(&slices.momentum).unwrap(), momentum);
    }
    steps.synchronize().unwrap();
    context.check_err().unwrap();
}

#[test]
#[ignore = "benches/gpu/run.sh runs it: needs a GPU"]
fn slices_of_a_gpu_of_another_length_or_type_or_for_the_host_are_refused() {
    let mut step = on_gpu();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let mut slices = Slices::on(&stream);
    let mut refused = |params: Lent<'_>| {
        let (grads, _grads) = Lent::cuda_slice(&slices.grads, &stream);
        let (momentum, _momentum) = Lent::cuda_slice_mut(&mut slices.momentum, &stream);
        let tensors = StepTensors::new(params, grads).states([momentum]);
        // SAFETY: refused before anything is enqueued.
        unsafe { step.enqueue(&tensors, Scaling::NONE, (&stream).into()) }.unwrap_err().to_string()
    };
    let mut short = stream.alloc_zeros::<f32>(LENGTH - 1).unwrap();
    let (params, _short) = Lent::cuda_slice_mut(&mut short, &stream);
    assert!(refused(params).contains("a run of 4999 elements, where the bucket has 5000"));
    let mut narrow = stream.alloc_zeros::<u16>(LENGTH).unwrap();
    let (params, _narrow) = Lent::cuda_slice_mut(&mut narrow, &stream);
    assert!(refused(params).contains("elements of u16"));
    let (params, read) = Lent::cuda_slice(&slices.params, &stream);
    assert!(refused(params).contains("only lent for reading"));
    drop(read);
    let mut on_host = BucketStep::builder(&layout(&[LENGTH]), optimizer()).host().unwrap();
    let (params, _params) = Lent::cuda_slice_mut(&mut slices.params, &stream);
    let (grads, mut momentum) = (painted(1), painted(2));
    let tensors = StepTensors::new(params, Lent::slice(&grads)).states([Lent::slice_mut(&mut momentum)]);
    let error = on_host.step(&tensors, Scaling::NONE).unwrap_err();
    assert!(matches!(&error, Error::Unsupported(why) if why.wrong == "a slice of a GPU's memory"), "{error}");
}

#[test]
#[ignore = "benches/gpu/run.sh runs it: needs a GPU"]
fn streams_and_events_of_cudarc_are_handles_of_the_same_driver() {
    let cuda = Cuda::open(0).unwrap();
    let context = CudaContext::new(0).unwrap();
    let (stream, event) = (context.new_stream().unwrap(), context.new_event(None).unwrap());
    assert_eq!(StreamHandle::from(&context.default_stream()), StreamHandle::default());
    let driver = cuda.driver();
    assert!(!driver.enter().unwrap(), "cudarc has made the context current");
    // SAFETY: both are alive, and of this device.
    unsafe {
        driver.inspect_stream((&stream).into()).unwrap();
        driver.record(EventHandle::from(&event), StreamHandle::from(&*stream)).unwrap();
        driver.wait(StreamHandle::default(), EventHandle::from(&event)).unwrap();
    }
    stream.synchronize().unwrap();
    assert!(event.is_complete());
}

#[test]
#[ignore = "benches/gpu/run.sh runs it: needs a GPU"]
fn a_stream_of_a_green_context_is_taken_and_one_of_another_context_refused() {
    type Pointer = *mut c_void;
    let cuda = Cuda::open(0).unwrap();
    let driver = cuda.driver();
    let context = CudaContext::new(0).unwrap();
    let path = std::env::var("INSTEP_CUDA").unwrap_or_else(|_| "libcuda.so.1".to_owned());
    // SAFETY: the driver, which is loaded.
    let library = unsafe { Library::new(path).unwrap() };
    macro_rules! call {
        ($name:ident($($argument:expr => $type:ty),*)) => {{
            // SAFETY: the types are those of `cuda.h`, and each place takes what is written.
            let code = unsafe { library.get::<unsafe extern "C" fn($($type),*) -> i32>(stringify!($name).as_bytes()).unwrap()($($argument),*) };
            assert_eq!(code, 0, stringify!($name));
        }};
    }
    let [mut resources, mut green, mut stream, mut other, mut foreign]: [Pointer; 5] = [null_mut(); 5];
    // A `CUdevResource` has 144 bytes; 1 stands for multiprocessors, for a default stream, and for a stream that joins no other.
    let mut all = [0u64; 18];
    call!(cuDeviceGetDevResource(0 => i32, all.as_mut_ptr() => *mut u64, 1 => u32));
    call!(cuDevResourceGenerateDesc(&mut resources => *mut Pointer, all.as_mut_ptr() => *mut u64, 1 => u32));
    call!(cuGreenCtxCreate(&mut green => *mut Pointer, resources => Pointer, 0 => i32, 1 => u32));
    call!(cuGreenCtxStreamCreate(&mut stream => *mut Pointer, green => Pointer, 1 => u32, 0 => i32));
    call!(cuCtxCreate_v4(&mut other => *mut Pointer, null_mut() => Pointer, 0 => u32, 0 => i32));
    call!(cuStreamCreate(&mut foreign => *mut Pointer, 1 => u32));
    context.bind_to_thread().unwrap();
    let [stream, foreign] = [stream, foreign].map(|stream| StreamHandle(stream.expose_provenance()));
    // SAFETY: both are alive.
    let [taken, refused] = [stream, foreign].map(|stream| unsafe { driver.inspect_stream(stream) });
    taken.unwrap();
    let error = refused.unwrap_err();
    assert!(
        matches!(&error, Error::Unsupported(why) if why.wrong == "belongs to another device or context"),
        "{error}"
    );
}
