//! A rebind makes the driver copy tiles on the optim stream, and never makes the host wait.
//!
//! `tests/stepper/rebinding.rs` compares the bits, on both devices. A captured pass keeps its own addresses.

use instep::cuda::{Cuda, CudaDevice};
use instep::{
    Borrowed, DevicePtr, Error, EventHandle, ForeignBucket, Layout, Mode, ParamId, Solo, Stepper,
    StreamHandle, Unused,
};

use crate::support::stand_in::calls::Call;
use crate::support::stand_in::{COMPUTE, StandIn};
use crate::support::{few_optimizers, hardware, layout};

const LENGTHS: [usize; 2] = [5000, 300];

fn allocate(cuda: &Cuda, len: usize) -> *mut f32 {
    let DevicePtr(at) =
        hardware::entered(&**cuda.driver(), |driver| driver.allocate(4 * len as u64 + 64, COMPUTE));
    std::ptr::with_exposed_provenance_mut(at as usize)
}

fn bucket(ids: &[ParamId]) -> ForeignBucket {
    ForeignBucket::new(LENGTHS[0] + LENGTHS[1]).gradient(ids[1], 0).gradient(ids[0], LENGTHS[1])
}

fn borrowing(cuda: &Cuda, layout: &Layout, ids: &[ParamId]) -> Stepper<CudaDevice> {
    let memory = Borrowed::new()
        .param(ids[0], allocate(cuda, LENGTHS[0]))
        .param(ids[1], allocate(cuda, LENGTHS[1]))
        .bucket(bucket(ids), allocate(cuda, LENGTHS[0] + LENGTHS[1]));
    let builder = few_optimizers()[2].builder(layout).unused(Unused::Refuse).mode(Mode::Eager);
    // SAFETY: the stand-in frees nothing before its end, and its stream is a number.
    unsafe { builder.cuda_borrowing(Solo::default(), memory, cuda) }.unwrap()
}

fn whole(stepper: &mut Stepper<CudaDevice>, ids: &[ParamId]) {
    let mut pass = stepper.begin().unwrap();
    for id in ids {
        pass.ptr(id.grad()).unwrap();
        pass.grad_ready(*id).unwrap();
    }
    pass.finish().unwrap();
}

fn streams_of(calls: &[Call], kernel: &str) -> Vec<StreamHandle> {
    let on = |call: &Call| match call {
        Call::Launch { kernel: launched, stream, .. } if *launched == kernel => Some(*stream),
        _ => None,
    };
    calls.iter().filter_map(on).collect()
}

#[test]
fn moved_parameters_cost_one_copy_per_launch_on_the_optim_stream_and_no_wait_of_the_host() {
    let stand_in = StandIn::new();
    let cuda = Cuda::on(stand_in.clone()).compute_stream(COMPUTE);
    let layout = layout(&LENGTHS);
    let ids: Vec<ParamId> = layout.ids().collect();
    let mut stepper = borrowing(&cuda, &layout, &ids);
    whole(&mut stepper, &ids);
    let optim = streams_of(&stand_in.take_calls(), "instep_begin")[0];
    let fresh: Vec<_> = (0..4).map(|_| allocate(&cuda, LENGTHS[0])).collect();
    let grads = allocate(&cuda, LENGTHS[0] + LENGTHS[1]);
    // Nothing that the GPU has been given ends from here on.
    stand_in.stall();
    stand_in.take_calls();
    for (turn, at) in fresh[..2].iter().enumerate() {
        // SAFETY: the new memory is as long, and what it holds does not matter here.
        assert!(!unsafe { stepper.rebind(Borrowed::new().param(ids[0], *at)) }.unwrap());
        let calls = stand_in.take_calls();
        let copied: Vec<_> = calls.iter().filter(|call| matches!(call, Call::CopyOnDevice { .. })).collect();
        let tiles = LENGTHS.map(|len| len.div_ceil(2048)).iter().sum::<usize>() as u64;
        assert_eq!(copied, [&Call::CopyOnDevice { stream: optim, bytes: 64 * tiles }], "{calls:?}");
        let is_waiting = |call: &Call| matches!(call, Call::Query { .. } | Call::Copy { .. });
        assert!(!calls.iter().any(is_waiting), "{calls:?}");
        let makes = calls.iter().any(|call| matches!(call, Call::Make { .. }));
        assert_eq!(makes, turn == 0, "only the first move makes anything: {calls:?}");
    }
    // Gradients are in the arguments alone, and what does not move costs nothing.
    for memory in [Borrowed::new().bucket(bucket(&ids), grads), Borrowed::new().param(ids[0], fresh[1])] {
        // SAFETY: as above.
        unsafe { stepper.rebind(memory) }.unwrap();
        let calls = stand_in.take_calls();
        let is_work = |call: &Call| !matches!(call, Call::Wait { .. } | Call::Record { .. });
        assert!(!calls.iter().any(is_work), "{calls:?}");
    }
    // The third move finds both rooms for tiles in use until the GPU goes on.
    let going_on = std::thread::spawn({
        let stand_in = stand_in.clone();
        move || {
            std::thread::sleep(std::time::Duration::from_millis(20));
            stand_in.go_on();
        }
    });
    // SAFETY: as above.
    unsafe { stepper.rebind(Borrowed::new().param(ids[0], fresh[2])) }.unwrap();
    going_on.join().unwrap();
    assert!(stand_in.take_calls().iter().any(|call| matches!(call, Call::Query { event: EventHandle(_) })));
    whole(&mut stepper, &ids);
    stepper.close().unwrap();
    stand_in.forget_memory();
}

#[test]
fn a_captured_pass_is_refused_after_its_tensors_have_moved_and_a_new_one_is_not() {
    let stand_in = StandIn::new();
    let cuda = Cuda::on(stand_in.clone()).compute_stream(COMPUTE);
    let layout = layout(&LENGTHS);
    let ids: Vec<ParamId> = layout.ids().collect();
    let mut stepper = borrowing(&cuda, &layout, &ids);
    whole(&mut stepper, &ids);
    let capture = |stepper: &mut Stepper<CudaDevice>| {
        let captured = stepper.capture(|mut pass| {
            for id in &ids {
                pass.ptr(id.grad())?;
                pass.grad_ready(*id)?;
            }
            pass.finish()
        });
        captured.unwrap()
    };
    let captured = capture(&mut stepper);
    // SAFETY: the capture holds no work of the trainer, here and below; nothing has moved.
    unsafe {
        stepper.rebind(Borrowed::new()).unwrap();
        stepper.replay(&captured).unwrap();
    }
    let [weights, grads] = [LENGTHS[0], LENGTHS[0] + LENGTHS[1]].map(|len| allocate(&cuda, len));
    let moves = [Borrowed::new().param(ids[0], weights), Borrowed::new().bucket(bucket(&ids), grads)];
    let mut captured = captured;
    for memory in moves {
        // SAFETY: as above.
        let refused = unsafe {
            stepper.rebind(memory).unwrap();
            stepper.replay(&captured).unwrap_err()
        };
        assert!(matches!(refused, Error::Order(_)) && refused.to_string().contains("rebind"), "{refused}");
        captured = capture(&mut stepper);
        // SAFETY: as above.
        unsafe { stepper.replay(&captured).unwrap() };
    }
    assert_eq!(stepper.step_count(ids[0]).unwrap(), 4);
    drop(captured);
    stepper.close().unwrap();
    stand_in.forget_memory();
}

#[test]
fn a_tensor_outside_the_gpus_memory_is_refused_and_the_stepper_goes_on_where_it_was() {
    let stand_in = StandIn::new();
    let cuda = Cuda::on(stand_in.clone()).compute_stream(COMPUTE);
    let layout = layout(&LENGTHS);
    let ids: Vec<ParamId> = layout.ids().collect();
    let mut stepper = borrowing(&cuda, &layout, &ids);
    whole(&mut stepper, &ids);
    let mut host = vec![0.0f32; LENGTHS[0] + LENGTHS[1]];
    let apart = ForeignBucket::new(LENGTHS[0]).gradient(ids[0], 0);
    let other = ForeignBucket::new(LENGTHS[1]).gradient(ids[1], 0);
    let (first, second) = (host.as_mut_ptr(), host.as_mut_ptr().wrapping_add(LENGTHS[0]));
    for memory in
        [Borrowed::new().param(ids[0], first), Borrowed::new().bucket(apart, first).bucket(other, second)]
    {
        // SAFETY: refused before anything is touched.
        let refused = unsafe { stepper.rebind(memory) }.unwrap_err();
        assert!(refused.to_string().contains("a tensor lies there, in"), "{refused}");
        whole(&mut stepper, &ids);
    }
    assert_eq!(stepper.step_count(ids[0]).unwrap(), 3);
    stepper.close().unwrap();
    stand_in.forget_memory();
}
