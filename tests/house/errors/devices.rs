//! Failures of ranks and devices, and missing parts of a machine or a build.
//!
//! The stand-in replaces the GPU. An error that needs broken hardware, a broken build or a missing library is built by
//! hand, as the library builds it.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use instep::cuda::{Cuda, nccl};
use instep::{AdamW, Error, Gradients, Isa, OffloadPolicy, Sgd, Solo, Stepper, StepperBuilder, in_process};

use super::Page;
use super::building::one;
use crate::support::stand_in::{COMPUTE, StandIn};

pub(super) fn add(page: &mut Page) {
    ranks(page);
    gpu(page);
    nccl_options(page);
    made_by_hand(page);
}

fn ranks(page: &mut Page) {
    let layout = one();
    let id = layout.ids().next().unwrap();
    page.refused(in_process(2, |comm| match comm.rank() {
        0 => panic!("out of data"),
        _ => Ok(()),
    }));
    page.refused(in_process(2, |comm| {
        let lr = 0.1 * f64::from(1 + comm.rank());
        let mut stepper = Stepper::host(&layout, Sgd { lr, ..Sgd::default() }, comm)?;
        let mut pass = stepper.begin()?;
        pass.write(id.grad(), &[1.0; 4])?;
        pass.grad_ready(id)?;
        pass.finish()?;
        stepper.status().map(drop)
    }));
}

fn gpu(page: &mut Page) {
    let layout = one();
    let cuda = || Cuda::on(StandIn::new()).compute_stream(COMPUTE);
    let mut row = |change: fn(StepperBuilder<'_>) -> StepperBuilder<'_>, cuda: Cuda| {
        // SAFETY: the stream is the stand-in's; nothing is built.
        page.refused(unsafe {
            change(Stepper::builder(&layout, Sgd::default())).cuda(Solo::default(), &cuda)
        });
    };
    row(|b| b.isa(Isa::Baseline), cuda());
    row(|b| b.threads(2), cuda());
    row(|b| b.gradients(Gradients::Release), cuda());
    row(|b| b, cuda().max_blocks(0));
    row(|b| b, Cuda::on(StandIn::new()).compute_stream(instep::StreamHandle(0x7777)));
    let broken = StandIn::new();
    broken.break_call("create_stream");
    row(|b| b, Cuda::on(broken));
    // SAFETY: as above.
    let refused = in_process(2, |comm| {
        // SAFETY: it is refused before it uses the stream, or lives no longer than it.
        unsafe { Stepper::builder(&layout, Sgd::default()).cuda(comm, &cuda()) }.map(drop)
    });
    page.refused(refused);
    let id = layout.ids().next().unwrap();
    let builder = Stepper::builder(&layout, AdamW::default()).offload(OffloadPolicy { pin_memory: false });
    let cuda = Cuda::on(StandIn::new()).compute_stream(COMPUTE);
    // SAFETY: as above.
    let mut stepper = unsafe { builder.cuda(Solo::default(), &cuda) }.unwrap();
    page.refused(stepper.ptr(id.state("exp_avg")));
    stepper.begin().and_then(|pass| pass.finish()).unwrap();
    page.refused(stepper.capture(|pass| pass.finish()));
}

fn nccl_options(page: &mut Page) {
    let options = || nccl::Options { job: "a run".to_owned(), ..nccl::Options::default() };
    let mut row = |options: nccl::Options| page.refused(nccl::Nccl::from_file(&options, "id"));
    row(nccl::Options { world_size: 0, ..options() });
    row(nccl::Options { rank: 1, ..options() });
    row(nccl::Options { deadline: Duration::ZERO, ..options() });
    row(nccl::Options { ledger: true, ..options() });
    row(nccl::Options { job: String::new(), ..options() });
}

fn made_by_hand(page: &mut Page) {
    let damaged =
        Error::Device { call: "cuLaunchKernel", code: 700, name: "CUDA_ERROR_ILLEGAL_ADDRESS".into() };
    let missing =
        Error::File { what: "w.safetensors".into(), kind: ErrorKind::NotFound, why: "not found".into() };
    page.errors.extend([
        Error::KernelsNotBuilt { how: "rebuild with `--features cuda`".into() },
        Error::DriverUnavailable { why: "libcuda.so.1 cannot be opened".into() },
        Error::NcclUnavailable {
            why: "libnccl.so.2 cannot be opened; name the file with INSTEP_NCCL".into(),
        },
        Error::Collective {
            rank: 1,
            call: "ncclAllReduce",
            code: 6,
            message: "remote process exited".into(),
        },
        Error::Hook("out of memory".into()),
        Error::Arithmetic { isa: "avx2", property: 3 },
        Error::LeftPass { rank: 1, pass: 3, other_rank: 0, theirs: "AllReduce, pass 3, bucket 0".into() },
        Error::PeerLost { rank: 1, why: "its stepper was dropped inside a pass".into() },
        Error::Deadline {
            rank: 0,
            call: "AllReduce of bucket 0".into(),
            waited_ms: 60_000,
            missing: vec![1],
        },
        Error::Deadline { rank: 0, call: "AllReduce of bucket 0".into(), waited_ms: 60_000, missing: vec![] },
        Error::PartlyLoaded { loaded: 3, tensors: 9, why: Arc::new(missing) },
        Error::Poisoned { op: "Step of bucket 0".into(), first: Arc::new(damaged) },
        Error::Rank { rank: 1, message: "a thread could not be started".into() },
    ]);
}
