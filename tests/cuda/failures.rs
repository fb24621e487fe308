//! Refusals of a stepper on a GPU, and failures of its driver: each is a typed error, and no operation is half done.
//!
//! The stand-in's calls can be made to fail one by one; the tests of borrowed memory also run on a GPU, as in
//! `cuda::bitexact`. A refusal launches nothing, and a failure frees all memory.

use std::sync::Arc;
use std::time::Duration;

use instep::cuda::{Cuda, CudaDevice, built_kernels};
use instep::layout::ForeignBucket;
use instep::{Borrowed, Error, Isa, Layout, Mode, Solo, Stepper, StreamHandle, Unused, in_process};

use crate::support::device::cuda;
use crate::support::hardware;
use crate::support::stand_in::calls::Call;
use crate::support::stand_in::{COMPUTE, StandIn};
use crate::support::{Options, Outcome, few_optimizers, layout, paint_params, painted, pass};

fn options() -> Options {
    Options { mode: Mode::Eager, cap: Some(4 << 10), ..Options::default() }
}

#[test]
fn a_machine_without_kernels_or_driver_says_which_it_lacks() {
    let gpu = hardware::is_required();
    match Cuda::open(0) {
        Ok(cuda) => {
            let error = Cuda::open(4096).unwrap_err();
            assert!(matches!(&error, Error::Unsupported(refusal) if refusal.thing == "cuda:4096"), "{error}");
            let made = options().stepper_on(&cuda, &layout(&[5]), few_optimizers()[0], Solo::default());
            assert_eq!(made.is_ok(), built_kernels().is_ok());
        }
        Err(Error::KernelsNotBuilt { .. }) => assert!(!gpu && !cfg!(feature = "cuda")),
        Err(Error::DriverUnavailable { why }) => {
            assert!(!gpu && cfg!(feature = "cuda"), "{why}");
            assert!(why.contains("cuInit") || why.contains("libcuda"), "{why}");
        }
        Err(other) => panic!("{other}"),
    }
    if !cfg!(feature = "cuda") {
        assert!(matches!(instep::cuda::device_count(), Err(Error::KernelsNotBuilt { .. })));
    }
}

#[test]
fn options_that_a_gpu_cannot_serve_are_refused_before_any_launch() {
    let (stand_in, layout, optim) = (StandIn::new(), layout(&[300, 5]), few_optimizers()[0]);
    let cuda = Cuda::on(stand_in.clone()).compute_stream(COMPUTE);
    let refused = |options: Options, cuda: &Cuda| {
        options.stepper_on(cuda, &layout, optim, Solo::default()).map(drop).unwrap_err().to_string()
    };
    let other_stream = cuda.clone().compute_stream(StreamHandle(0x777));
    assert!(refused(options(), &other_stream).contains("0x777"));
    let isa = Options { isa: Some(Isa::Baseline), ..options() };
    assert!(refused(isa, &cuda).starts_with("isa = set"));
    let threads = Options { threads: Some(1), ..options() };
    assert!(refused(threads, &cuda).starts_with("threads = set"));
    assert!(refused(options(), &cuda.clone().max_blocks(0)).starts_with("max_blocks = 0"));
    let clipped = Options { max_norm: Some(1.0), ..options() };
    assert!(refused(clipped, &cuda).contains("Eager"));
    let unreachable = in_process(2, |comm| options().stepper_on(&cuda, &layout, optim, comm).map(drop));
    assert!(matches!(unreachable, Err(Error::Unsupported { .. })), "{unreachable:?}");
    let launched = |call: &Call| matches!(call, Call::Launch { .. });
    assert!(!stand_in.take_calls().iter().any(launched));
    assert_eq!(stand_in.allocated_bytes(), 0);
}

/// Allocates device memory with these values. The test never frees it.
fn device_memory(cuda: &Cuda, values: &[f32]) -> *mut f32 {
    let driver = cuda.driver();
    let entered = driver.enter().unwrap();
    let stream = StreamHandle::default();
    let address = driver.allocate(4 * values.len() as u64, stream).unwrap();
    // SAFETY: just allocated for them, as bytes.
    unsafe {
        let bytes = std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values));
        driver.upload(address, bytes, stream).unwrap();
    }
    if entered {
        driver.leave();
    }
    std::ptr::with_exposed_provenance_mut(address.0 as usize)
}

fn two() -> Layout {
    Layout::builder().param("weight", 700).param("bias", 5).build().unwrap()
}

#[test]
fn tensors_that_are_elsewhere_null_misaligned_or_overlapping_are_refused() {
    let cuda = Cuda::on(StandIn::new()).compute_stream(COMPUTE);
    let (layout, weights) = (two(), device_memory(&cuda, &[0.0; 4096]));
    let [weight, bias] = [layout.id("weight").unwrap(), layout.id("bias").unwrap()];
    let bucket = || ForeignBucket::new(705).gradient(bias, 0).gradient(weight, 5);
    let grads = weights.wrapping_add(2048);
    let mut on_host = [0.0f32; 700];
    let cases = [
        (on_host.as_mut_ptr(), weights.wrapping_add(1024), "host memory"),
        (weights, std::ptr::null_mut(), "null"),
        (weights.wrapping_byte_add(2), weights.wrapping_add(1024), "not aligned"),
        (weights, weights.wrapping_add(699), "overlap"),
        (weights, grads.wrapping_add(704), "overlap"),
    ];
    for (first, second, why) in cases {
        let memory = Borrowed::new().param(weight, first).param(bias, second).bucket(bucket(), grads);
        let builder = few_optimizers()[0].builder(&layout).unused(Unused::StepZero);
        // SAFETY: refused before anything is touched.
        let refused = unsafe { builder.cuda_borrowing(Solo::default(), memory, &cuda) };
        let error = refused.map(drop).unwrap_err().to_string();
        assert!(error.contains(why), "{error}, not {why}");
    }
}

#[test]
fn borrowed_device_memory_gives_the_hosts_bits_at_every_offset() {
    let layout = two();
    let [weight, bias] = [layout.id("weight").unwrap(), layout.id("bias").unwrap()];
    for offset in 0..16 {
        let optim = few_optimizers()[3];
        let options = Options { unused: Unused::StepZero, ..Options::default() };
        let mut host = options.stepper(&layout, optim, Solo::default()).unwrap();
        let cuda = cuda();
        let memory = device_memory(&cuda, &[0.0; 4096]).wrapping_add(offset);
        let bucket = ForeignBucket::new(705 + offset).gradient(bias, 0).gradient(weight, 5);
        let borrowed = Borrowed::new()
            .param(weight, memory)
            .param(bias, memory.wrapping_add(1001))
            .bucket(bucket, memory.wrapping_add(2003));
        let builder = optim.builder(&layout).unused(Unused::StepZero);
        // SAFETY: the memory is never freed, and nothing else touches it.
        let mut gpu = unsafe { builder.cuda_borrowing(Solo::default(), borrowed, &cuda).unwrap() };
        paint_params(&mut host);
        paint_params(&mut gpu);
        for step in 0..3 {
            let gradient = painted(&options);
            pass(&mut host, &options, |param, values| gradient(step, param, values)).unwrap();
            pass(&mut gpu, &options, |param, values| gradient(step, param, values)).unwrap();
        }
        let (host, gpu) = (Outcome::of(&host).unwrap(), Outcome::of(&gpu).unwrap());
        gpu.assert_same(&host, &format!("offset {offset}"));
    }
}

#[test]
fn a_failed_call_poisons_with_its_op_and_no_later_op_is_tried() {
    for call in ["launch", "record", "wait"] {
        let (stand_in, layout) = (StandIn::new(), layout(&[3000, 300]));
        let cuda = Cuda::on(stand_in.clone()).compute_stream(COMPUTE);
        let mut stepper = options().stepper_on(&cuda, &layout, few_optimizers()[2], Solo::default()).unwrap();
        paint_params(&mut stepper);
        let gradient = painted(&options());
        pass(&mut stepper, &options(), |param, values| gradient(0, param, values)).unwrap();
        stand_in.break_call(call);
        let broken = pass(&mut stepper, &options(), |param, values| gradient(1, param, values));
        let error = broken.and_then(|()| stepper.status().map(drop)).unwrap_err();
        assert!(matches!(&error, Error::Poisoned { .. }), "{call}: {error}");
        assert!(matches!(error.cause(), Error::Device { call: c, code: 719, .. } if *c == call), "{error}");
        stand_in.break_call("nothing");
        stand_in.take_calls();
        assert_eq!(stepper.status().unwrap_err(), error);
        let _ = stepper.begin().and_then(|pass| pass.finish());
        assert!(!stand_in.take_calls().iter().any(|call| matches!(call, Call::Launch { .. })));
        assert!(matches!(stepper.close(), Err(Error::Poisoned { .. })));
        drop(cuda);
        assert_eq!(stand_in.allocated_bytes(), 0, "{call}");
    }
}

/// Steps may have run after a failed sum, so the error says what to do instead of a rescue.
#[test]
fn a_rescue_is_refused_after_a_failure_and_does_nothing_before_one() {
    for call in ["launch", "record", "wait"] {
        let (stand_in, layout) = (StandIn::new(), layout(&[3000, 300]));
        let cuda = Cuda::on(stand_in.clone()).compute_stream(COMPUTE);
        let mut stepper = options().stepper_on(&cuda, &layout, few_optimizers()[2], Solo::default()).unwrap();
        let gradient = painted(&options());
        for step in 0..2 {
            pass(&mut stepper, &options(), |param, values| gradient(step, param, values)).unwrap();
            stepper.rescue().unwrap();
        }
        stand_in.break_call(call);
        let broken = pass(&mut stepper, &options(), |param, values| gradient(2, param, values));
        broken.and_then(|()| stepper.status().map(drop)).unwrap_err();
        stand_in.break_call("nothing");
        let refused = stepper.rescue().unwrap_err();
        let Error::Unsupported(why) = &refused else { panic!("{call}: {refused}") };
        assert!(why.thing.contains("cuda:0") && why.wrong.contains("queued"), "{call}: {refused}");
        assert!(why.remedy.contains("checkpoint"), "{call}: {refused}");
        let poisoned = stepper.status().unwrap_err();
        assert!(matches!(poisoned, Error::Poisoned { .. }), "{call}: {poisoned}");
    }
}

#[test]
fn a_stepper_that_cannot_be_built_frees_everything() {
    let layout = layout(&[3000, 300]);
    let calls = ["load", "create_stream", "create_event", "allocate", "allocate_mapped", "upload", "fill"];
    // If events cannot be recorded or queried, the GPU may still use the pinned rings, so those are leaked.
    let cases = calls.map(|call| (call, 0)).into_iter().chain([("record", 4096), ("is_passed", 4096)]);
    for (call, left) in cases {
        let stand_in = StandIn::new();
        let cuda = Cuda::on(stand_in.clone()).compute_stream(COMPUTE);
        for successes in 0.. {
            stand_in.break_call_after(call, successes);
            match options().stepper_on(&cuda, &layout, few_optimizers()[2], Solo::default()) {
                Ok(_) => {
                    assert!(successes > 0, "{call} is never made");
                    break;
                }
                Err(Error::Device { call: failed, .. }) => assert_eq!(failed, call),
                Err(other) => panic!("{other}"),
            }
            assert!(stand_in.allocated_bytes() <= left, "{call} number {successes}");
            stand_in.forget_memory();
        }
        stand_in.break_call("nothing");
    }
}

/// Returns a stepper after one pass, with a deadline of 20 ms.
fn one_pass_under_a_deadline() -> (Arc<StandIn>, Stepper<CudaDevice>) {
    let (stand_in, layout) = (StandIn::new(), layout(&[300]));
    let cuda = Cuda::on(stand_in.clone()).compute_stream(COMPUTE);
    let builder = few_optimizers()[0].builder(&layout).deadline(Duration::from_millis(20));
    // SAFETY: the stand-in's stream is a number.
    let mut stepper = unsafe { builder.cuda(Solo::default(), &cuda).unwrap() };
    let gradient = painted(&options());
    pass(&mut stepper, &options(), |param, values| gradient(0, param, values)).unwrap();
    (stand_in, stepper)
}

#[test]
fn a_sum_that_hangs_is_a_deadline_and_dropping_its_stepper_waits_for_nothing() {
    let (stand_in, stepper) = one_pass_under_a_deadline();
    stand_in.stall_sums();
    // The call drops it while the GPU is still busy.
    let error = stepper.close().unwrap_err();
    assert!(matches!(error.cause(), Error::Deadline { missing, .. } if missing.is_empty()), "{error}");
    // Only the two pinned rings are left, because the GPU may still read them.
    assert!(stand_in.allocated_bytes() < 4096, "{} bytes left", stand_in.allocated_bytes());
}

#[test]
fn the_trainers_own_work_may_take_longer_than_the_deadline() {
    let (stand_in, stepper) = one_pass_under_a_deadline();
    stand_in.stall();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            stand_in.go_on();
        });
        let mut values = [0.0; 300];
        stepper.read(stepper.layout().id("p0").unwrap(), &mut values).unwrap();
    });
    stepper.close().unwrap();
}

#[test]
fn memory_that_the_trainers_stream_still_reads_is_freed_after_the_read() {
    let (options, layout, cuda) = (options(), layout(&[300]), cuda());
    let driver = Arc::clone(cuda.driver());
    let stream = if hardware::is_required() {
        hardware::entered(&*driver, |driver| driver.create_stream(0))
    } else {
        COMPUTE
    };
    let id = layout.ids().next().unwrap();
    let cuda = cuda.compute_stream(stream);
    let mut stepper = options.stepper_on(&cuda, &layout, few_optimizers()[0], Solo::default()).unwrap();
    paint_params(&mut stepper);
    pass(&mut stepper, &options, |param, values| painted(&options)(0, param, values)).unwrap();
    let (mut values, mut copied) = (vec![0.0f32; 300], vec![0u8; 1200]);
    stepper.read(id, &mut values).unwrap();
    let from = stepper.ptr(id).unwrap();
    // SAFETY: all 300 values of the parameter, which the stepper lets go only after the stream has read them.
    let copy = hardware::entered(&*driver, |driver| unsafe {
        let copy = driver.allocate(1200, stream)?;
        driver.copy(copy, from, 1200, stream)?;
        Ok(copy)
    });
    drop(stepper);
    // SAFETY: allocated and written on this stream.
    hardware::entered(&*driver, |driver| unsafe {
        driver.download(&mut copied, copy, stream)?;
        driver.free(copy, stream);
        Ok(())
    });
    let copied = copied.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
    assert!(values.iter().map(|value| value.to_bits()).eq(copied));
}
