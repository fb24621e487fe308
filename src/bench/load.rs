//! Stand-ins for the work that runs concurrently with a step in training, on one GPU: backward's kernels and an
//! all-reduce.
//!
//! The kernels are in benches/gpu/backward.cu, which `scripts/bench-kernels.sh` compiles separately, so the library
//! never contains them. Memory is never freed. This file must enqueue its work in the order of real training, and must
//! never wait.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::sync::Arc;
use std::{ptr, slice};

use super::Trainer;
use crate::collective::{Call, Collective};
use crate::cuda::CudaDevice;
use crate::cuda::driver::{Driver, Entered, Kernel, Shape};
use crate::error::{Error, Result};
use crate::handle::{DevicePtr, EventHandle, Place, StreamHandle};
use crate::layout::ParamId;
use crate::op::CollectiveKind;
use crate::stepper::Pass;

/// The number of thread blocks of the all-reduce. NCCL uses the same number of thread blocks inside one machine.
const REDUCE_BLOCKS: u32 = 24;
/// The number of threads in a thread block of the all-reduce. NCCL uses the same number. A block also uses so many
/// registers that a multiprocessor with one of these blocks has no room for a block of a step.
/// `scripts/bench-kernels.sh` checks the registers.
const REDUCE_THREADS: u32 = 640;
/// The width and height of the part of a matrix product that one thread block computes.
const MATMUL_SIDE: u32 = 128;
const THREADS: u32 = 256;
const BLOCKS_PER_MULTIPROCESSOR: u32 = 8;

/// The kind of kernels that backward consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadKind {
    /// One matrix product per parameter, on tensor cores.
    Matmul,
    /// One pass over activations per parameter.
    Elementwise,
}

/// Sets how long the stand-in for an all-reduce takes: `latency_ns` plus the buffer's bytes divided by `bytes_per_ns`.
#[derive(Clone, Copy, Debug)]
pub struct Pacing {
    /// The fixed time, in nanoseconds.
    pub latency_ns: u64,
    /// Bytes of the buffer per nanosecond.
    pub bytes_per_ns: f64,
}

/// Amount of work.
#[derive(Clone, Copy, Debug)]
pub struct LoadSize {
    /// Number of parameters.
    pub params: usize,
    /// The number of rows of each parameter, a multiple of 128. The number of columns is the same.
    pub side: u32,
    /// The inner dimension of each product: a multiple of 32.
    pub depth: u32,
    /// The number of bytes that a pass over activations reads. The pass writes the same number of bytes. This number
    /// must be at least the number of bytes of a gradient.
    pub activation_bytes: u64,
    /// How long the all-reduce takes.
    pub pacing: Pacing,
}

impl LoadSize {
    /// Returns the number of elements of a parameter.
    pub fn elements(&self) -> usize {
        self.side as usize * self.side as usize
    }
}

/// The kernels and their memory on a device.
pub struct Load {
    driver: Arc<dyn Driver>,
    size: LoadSize,
    compute: StreamHandle,
    reducing: StreamHandle,
    handed: EventHandle,
    reduced: EventHandle,
    matmul: Kernel,
    elementwise: Kernel,
    factors: [DevicePtr; 2],
    activations: [DevicePtr; 2],
    /// The gradients of a pass without a stepper.
    grads: DevicePtr,
    reduce: PacedReduce,
}

/// A stand-in for an all-reduce of 8 ranks. The stand-in takes as much time and moves as many bytes as the all-reduce,
/// but it changes no value.
#[derive(Clone)]
pub struct PacedReduce {
    driver: Arc<dyn Driver>,
    kernel: Kernel,
    scratch: DevicePtr,
    scratch_bytes: u64,
    pacing: Pacing,
}

#[repr(C)]
struct MatmulArgs {
    a: u64,
    b: u64,
    out: u64,
    rows: u32,
    columns: u32,
    depth: u32,
    reserved: u32,
}

#[repr(C)]
struct ElementwiseArgs {
    from: u64,
    to: u64,
    gradient: u64,
    count: u64,
    gradient_count: u64,
}

#[repr(C)]
struct ReduceArgs {
    buffer: u64,
    scratch: u64,
    count: u64,
    duration_ns: u64,
}

impl Load {
    /// Loads the kernels of `image`, and fills the memory that they read.
    ///
    /// # Errors
    /// `Device` if the driver refuses a call, for example for lack of memory.
    pub fn new(trainer: &Trainer, image: &[u8], size: LoadSize) -> Result<Load> {
        assert!(
            size.side.is_multiple_of(128) && size.depth.is_multiple_of(32),
            "the kernels' blocks are whole"
        );
        assert!(
            size.activation_bytes >= (size.elements() * size_of::<f32>()) as u64,
            "a gradient is read from them"
        );
        let driver = Arc::clone(trainer.driver());
        let _entered = Entered::new(&*driver)?;
        let (module, compute) = (driver.load(image)?, trainer.stream());
        let kernel = |name: &CStr| driver.kernel(module, name);
        let grads_bytes = (size.params * size.elements() * size_of::<f32>()) as u64;
        // The size of a bucket of all gradients and of its tail block, both padded for 8 ranks.
        let scratch_bytes = grads_bytes + (2 * 8 * 256 + size.params as u64 + 1) * 4;
        let factor_bytes = u64::from(size.side) * u64::from(size.depth) * 2;
        // Each word is two bf16 values, near 1 in one factor and near 2^-7 or -2^-7 in the other. Nothing is 0, and no
        // product overflows.
        let factors = [filled(&*driver, factor_bytes, compute, 0x3f80_3f81)?, {
            filled(&*driver, factor_bytes, compute, 0x3c00_bc01)?
        }];
        let one = 1f32.to_bits();
        let activations = [filled(&*driver, size.activation_bytes, compute, one)?, {
            filled(&*driver, size.activation_bytes, compute, one)?
        }];
        let reduce = PacedReduce {
            driver: Arc::clone(&driver),
            kernel: kernel(c"bench_reduce")?,
            scratch: filled(&*driver, scratch_bytes, compute, one)?,
            scratch_bytes,
            pacing: size.pacing,
        };
        Ok(Load {
            size,
            compute,
            reducing: driver.create_stream(i32::MIN)?,
            handed: driver.create_event(false)?,
            reduced: driver.create_event(false)?,
            matmul: kernel(c"bench_matmul")?,
            elementwise: kernel(c"bench_elementwise")?,
            factors,
            activations,
            grads: filled(&*driver, grads_bytes, compute, one)?,
            reduce,
            driver: Arc::clone(&driver),
        })
    }

    /// Returns the all-reduce, for a stepper on the same device.
    pub fn collective(&self) -> PacedReduce {
        self.reduce.clone()
    }

    /// Launches backward of one parameter. The launch writes the parameter's gradient.
    ///
    /// # Errors
    /// `Order` if the gradient was already handed over. `Device` if the driver refuses a call.
    pub fn backward(&self, kind: LoadKind, pass: &mut Pass<'_, CudaDevice>, id: ParamId) -> Result<()> {
        let len = pass.layout().parameter(id)?.len;
        assert!(
            len >= self.size.elements() as u64,
            "a parameter of {len} elements is shorter than the load's gradients"
        );
        let gradient = pass.ptr(id.grad())?;
        self.launch_backward(kind, gradient)
    }

    /// Launches the backward kernel of one parameter in a pass without a stepper.
    ///
    /// # Errors
    /// `Device` if the driver refuses a call.
    pub fn backward_alone(&self, kind: LoadKind, param: usize) -> Result<()> {
        self.launch_backward(kind, self.gradient(param))
    }

    /// Launches the all-reduce of the gradients of `count` parameters from `first` on, in a pass without a stepper. The
    /// all-reduce waits for the backward that was launched before this call.
    ///
    /// # Errors
    /// `Device` if the driver refuses a call.
    pub fn reduce_alone(&self, first: usize, count: usize) -> Result<()> {
        let _entered = Entered::new(&*self.driver)?;
        // SAFETY: the handles are our own, and the gradients are as long as the parameters.
        unsafe {
            self.driver.record(self.handed, self.compute)?;
            self.driver.wait(self.reducing, self.handed)?;
            let bytes = (count * self.size.elements() * size_of::<f32>()) as u64;
            self.reduce.run(self.gradient(first), bytes, self.reducing)
        }
    }

    /// Makes the trainer's stream wait for every all-reduce of a pass without a stepper.
    ///
    /// # Errors
    /// `Device` if the driver refuses a call.
    pub fn join_alone(&self) -> Result<()> {
        let _entered = Entered::new(&*self.driver)?;
        // SAFETY: handles of our own.
        unsafe {
            self.driver.record(self.reduced, self.reducing)?;
            self.driver.wait(self.compute, self.reduced)
        }
    }

    fn gradient(&self, param: usize) -> DevicePtr {
        assert!(param < self.size.params, "there is no parameter {param}");
        DevicePtr(self.grads.0 + (param * self.size.elements() * size_of::<f32>()) as u64)
    }

    fn launch_backward(&self, kind: LoadKind, gradient: DevicePtr) -> Result<()> {
        let _entered = Entered::new(&*self.driver)?;
        let LoadSize { side, depth, activation_bytes, .. } = self.size;
        match kind {
            LoadKind::Matmul => {
                let [a, b] = self.factors.map(|factor| factor.0);
                let args =
                    MatmulArgs { a, b, out: gradient.0, rows: side, columns: side, depth, reserved: 0 };
                let blocks = (side / MATMUL_SIDE).pow(2);
                // SAFETY: this is the kernel's argument struct, and each address in it is of memory as long as `size`
                // says.
                unsafe {
                    launch(
                        &*self.driver,
                        self.matmul,
                        Shape { blocks, threads: THREADS },
                        self.compute,
                        &args,
                    )
                }
            }
            LoadKind::Elementwise => {
                let [from, to] = self.activations.map(|activation| activation.0);
                let (count, gradient_count) = (activation_bytes / 16, self.size.elements() as u64 / 4);
                let args = ElementwiseArgs { from, to, gradient: gradient.0, count, gradient_count };
                let blocks = BLOCKS_PER_MULTIPROCESSOR * self.driver.gpu().multiprocessors;
                // SAFETY: this is the kernel's argument struct, and each address in it is of memory as long as `size`
                // says.
                unsafe {
                    launch(
                        &*self.driver,
                        self.elementwise,
                        Shape { blocks, threads: THREADS },
                        self.compute,
                        &args,
                    )
                }
            }
        }
    }
}

impl PacedReduce {
    /// # Safety
    /// `buffer` has `bytes` bytes, and `bytes` is at most `scratch_bytes`. Work on the stream may access the buffer.
    unsafe fn run(&self, buffer: DevicePtr, bytes: u64, stream: StreamHandle) -> Result<()> {
        let duration_ns = self.pacing.latency_ns + (bytes as f64 / self.pacing.bytes_per_ns) as u64;
        let args = ReduceArgs { buffer: buffer.0, scratch: self.scratch.0, count: bytes / 16, duration_ns };
        let shape = Shape { blocks: REDUCE_BLOCKS, threads: REDUCE_THREADS };
        // SAFETY: this is the kernel's argument struct. The rest is the caller's promise.
        unsafe { launch(&*self.driver, self.kernel, shape, stream, &args) }
    }
}

impl Collective for PacedReduce {
    fn rank(&self) -> u32 {
        0
    }

    fn world_size(&self) -> u32 {
        8
    }

    fn reaches(&self, place: Place) -> bool {
        place == Place::Cuda(self.driver.ordinal())
    }

    /// Enqueues the stand-in for an all-reduce. For a broadcast, this call does nothing, because only the first pass
    /// broadcasts and no bench measures the first pass.
    fn enqueue(&self, call: &mut Call<'_>) -> Result<()> {
        if call.kind == CollectiveKind::Broadcast {
            return Ok(());
        }
        assert!(call.bytes <= self.scratch_bytes, "the bucket is longer than the load's gradients");
        let stream = call.require_stream()?;
        // SAFETY: the buffer is the call's own memory, and the scratch memory is as long as the bucket.
        unsafe { self.run(DevicePtr(call.dst().addr() as u64), call.bytes, stream) }
    }

    fn abort(&self, _: &Error) {}
}

/// # Safety
/// `Args` is the kernel's argument struct, and the addresses in `args` are valid.
unsafe fn launch<Args>(
    driver: &dyn Driver,
    kernel: Kernel,
    shape: Shape,
    stream: StreamHandle,
    args: &Args,
) -> Result<()> {
    let args: *const c_void = ptr::from_ref(args).cast();
    // SAFETY: the caller's promise.
    unsafe { driver.launch(kernel, shape, stream, args) }
}

/// Allocates memory and fills it with a word, part by part.
fn filled(driver: &dyn Driver, bytes: u64, stream: StreamHandle, word: u32) -> Result<DevicePtr> {
    let memory = driver.allocate(bytes, stream)?;
    let part = vec![word; bytes.min(16 << 20).div_ceil(4) as usize];
    // SAFETY: the words are plain numbers, so their bytes can be read.
    let part = unsafe { slice::from_raw_parts(part.as_ptr().cast::<u8>(), size_of_val(&*part)) };
    for start in (0..bytes).step_by(16 << 20) {
        let length = (bytes - start).min(16 << 20) as usize;
        // SAFETY: the part lies inside the memory that was just allocated.
        unsafe { driver.upload(DevicePtr(memory.0 + start), &part[..length], stream)? };
    }
    Ok(memory)
}
