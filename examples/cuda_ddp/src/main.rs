//! Data-parallel training with your streams and your all-reduce: backward on one stream, NCCL's sums on another.
//!
//! Each bucket is handed over with an event that is recorded after the bucket's sum.
//! `WORLD_SIZE=2 cargo run -p cuda_ddp` starts two ranks, each with a GPU. With `-- --instep-nccl`,
//! `instep::cuda::Nccl` sums the gradients instead.
#![allow(unsafe_code)]

mod instep_nccl;
mod ranks;

use cudarc::driver::{CudaContext, DevicePtr};
use cudarc::nccl::{Comm, Id, ReduceOp};
use instep::cuda::Cuda;
use instep::{AdamW, Borrowed, ForeignBucket, Layout, Stepper, Sums};

const BUCKETS: usize = 3;
const LENGTH: usize = 5000;
const STEPS: usize = 5;

fn main() -> ranks::Outcome {
    let sums_by_instep = std::env::args().any(|argument| argument == "--instep-nccl");
    let Some(own) = ranks::own()? else { return ranks::start(sums_by_instep) };
    if sums_by_instep {
        return instep_nccl::train(own);
    }
    let ranks::Own { rank, world_size, device, id } = own;
    let context = CudaContext::new(device)?;
    // SAFETY: the events below order the streams.
    unsafe { context.disable_event_tracking() };
    let (backward, reduce) = (context.new_stream()?, context.new_stream()?);
    let nccl = Comm::from_rank(reduce.clone(), rank, world_size, Id::uninit(id.map(|byte| byte as _)))
        .map_err(ranks::told)?;

    // Yours: parameters, and a flat bucket for the gradient of each. The stepper keeps the optimizer's states.
    let layout =
        (0..BUCKETS).fold(Layout::builder(), |layout, k| layout.param(format!("p{k}"), LENGTH)).build()?;
    let params = (0..BUCKETS).map(|_| backward.clone_htod(&[1.0f32; LENGTH]));
    let params = params.collect::<Result<Vec<_>, _>>()?;
    let grads = (0..BUCKETS).map(|_| backward.alloc_zeros::<f32>(LENGTH));
    let mut grads = grads.collect::<Result<Vec<_>, _>>()?;
    let mut memory = Borrowed::new();
    for (bucket, id) in layout.ids().enumerate() {
        let address = |of: u64| std::ptr::with_exposed_provenance_mut::<f32>(of as usize);
        memory = memory.param(id, address(params[bucket].device_ptr(&backward).0)).bucket(
            ForeignBucket::new(LENGTH).gradient(id, 0),
            address(grads[bucket].device_ptr(&backward).0),
        );
    }
    let cuda = Cuda::open(device as u32)?.compute_stream((&*backward).into());
    let sums = Sums::by_caller(rank as u32, world_size as u32);
    // SAFETY: streams and tensors outlive the stepper, and are touched as its rules say.
    let mut stepper =
        unsafe { Stepper::builder(&layout, AdamW::default()).cuda_borrowing(sums, memory, &cuda)? };

    for step in 0..STEPS {
        let mut pass = stepper.begin()?;
        for (bucket, id) in layout.ids().enumerate() {
            pass.ptr(id)?; // before you read the parameter; with a global clip, `backward` waits here for the step
            pass.ptr(id.grad())?; // before you write the gradient
            backward.memcpy_htod(&ranks::gradient(rank, step, bucket), &mut grads[bucket])?; // stands for your kernels
            reduce.wait(&backward.record_event(None)?)?;
            nccl.all_reduce_in_place(&mut grads[bucket], &ReduceOp::Sum).map_err(ranks::told)?;
            let summed = reduce.record_event(None)?;
            // SAFETY: after the sum, which waited for backward's last use of the bucket's gradients and parameters.
            unsafe { pass.bucket_ready_after(bucket as u32, (&summed).into())? }; // instep waits for `summed`, then steps
        }
        pass.finish()?; // the stream `backward` waits for all steps, unless you clip by the global norm
    }
    stepper.close()?;
    let trained: Vec<Vec<f32>> = params.iter().map(|of| backward.clone_dtoh(of)).collect::<Result<_, _>>()?;
    assert!(trained == ranks::on_the_cpu(&layout, world_size)?, "other bits than the CPU's");
    println!("rank {rank} of {world_size}: {STEPS} steps, with the bits of the CPU");
    Ok(())
}
