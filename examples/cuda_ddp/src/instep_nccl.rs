//! The same training as in `main.rs`, but instep also sums the gradients: the stepper owns all tensors, and
//! `cuda::Nccl` reduces each bucket.
//!
//! `WORLD_SIZE=2 cargo run -p cuda_ddp -- --instep-nccl` starts this training. Handing over a gradient takes one call
//! and needs no event.
#![allow(unsafe_code)]

use cudarc::driver::{CudaContext, result};
use instep::cuda::{Cuda, Nccl, nccl};
use instep::{AdamW, Layout, Stepper};

use crate::{BUCKETS, LENGTH, STEPS, ranks};

pub(crate) fn train(ranks::Own { rank, world_size, device, id }: ranks::Own) -> ranks::Outcome {
    let backward = CudaContext::new(device)?.new_stream()?;
    let options = nccl::Options {
        rank: rank as u32,
        world_size: world_size as u32,
        device: device as u32,
        ..nccl::Options::default()
    };
    let comm = Nccl::with_id(&options, id)?;

    let layout =
        (0..BUCKETS).fold(Layout::builder(), |layout, k| layout.param(format!("p{k}"), LENGTH)).build()?;
    let cuda = Cuda::open(device as u32)?.compute_stream((&*backward).into());
    // SAFETY: the stream outlives the stepper.
    let mut stepper = unsafe { Stepper::builder(&layout, AdamW::default()).cuda(comm, &cuda)? };
    layout.ids().try_for_each(|id| stepper.write(id, &[1.0f32; LENGTH]))?;

    for step in 0..STEPS {
        let mut pass = stepper.begin()?;
        for (bucket, id) in layout.ids().enumerate() {
            pass.ptr(id)?; // before you read the parameter
            let gradient = pass.ptr(id.grad())?; // before you write the gradient
            let data = ranks::gradient(rank, step, bucket);
            // The copy stands for your kernels.
            // SAFETY: the gradient has as many elements, and the stream is the stepper's. `data` is not page-locked, so
            // the driver has read it when the call returns.
            unsafe { result::memcpy_htod_async(gradient.0, &data, backward.cu_stream())? };
            pass.grad_ready(id)?; // context, record, wait, all-reduce, record, wait, launch, record
        }
        pass.finish()?;
    }
    let mut trained = vec![vec![0.0; LENGTH]; BUCKETS];
    layout.ids().zip(&mut trained).try_for_each(|(id, values)| stepper.read(id, values))?;
    stepper.close()?;
    assert!(trained == ranks::on_the_cpu(&layout, world_size)?, "other bits than the CPU's");
    println!("rank {rank} of {world_size}: {STEPS} steps by instep's NCCL, with the bits of the CPU");
    Ok(())
}
