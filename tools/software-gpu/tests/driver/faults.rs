//! Each fault that a program can make, and the name under which it is caught, with every seed.
//!
//! A test of a fault continues after the fault, so no seed can end it earlier.

use std::ptr::null_mut;

use software_gpu::exports::*;

use super::calls::*;
use super::{is_caught, with_settings};

#[test]
fn a_wait_that_is_missing_is_a_race() {
    is_caught("race", || {
        open();
        let (memory, first, second) = (filled(64, 1), stream!(), stream!());
        ok!(cuMemsetD8Async(memory, 2, 64, first));
        ok!(cuMemsetD8Async(memory + 63, 3, 1, second));
        ok!(cuCtxSynchronize());
    });
}

#[test]
fn an_event_that_is_recorded_before_its_work_is_a_race() {
    is_caught("race", || {
        open();
        let (memory, copy, first, second, event) =
            (filled(64, 1), allocate(64), stream!(), stream!(), event!());
        ok!(cuEventRecord(event, first));
        ok!(cuMemsetD8Async(memory, 2, 64, first));
        ok!(cuStreamWaitEvent(second, event, 0));
        ok!(cuMemcpyDtoDAsync_v2(copy, memory, 64, second));
        ok!(cuStreamSynchronize(second));
        ok!(cuStreamSynchronize(first));
    });
}

#[test]
fn memory_that_is_freed_while_a_stream_uses_it_is_caught() {
    is_caught("freed in use", || {
        open();
        let (own, other, event) = (stream!(), stream!(), event!());
        let memory = made!(0, place => cuMemAllocAsync(&mut place, 64, own));
        ok!(cuEventRecord(event, own));
        ok!(cuStreamWaitEvent(other, event, 0));
        ok!(cuMemsetD8Async(memory, 1, 64, other));
        ok!(cuMemFreeAsync(memory, own));
        ok!(cuStreamSynchronize(other));
        ok!(cuStreamSynchronize(own));
    });
}

#[test]
fn memory_that_is_used_after_it_was_freed_is_caught() {
    is_caught("freed in use", || {
        open();
        let memory = filled(64, 1);
        ok!(cuMemFree_v2(memory));
        let stream = stream!();
        ok!(cuMemsetD8Async(memory, 1, 64, stream));
        ok!(cuStreamSynchronize(stream));
    });
}

#[test]
fn an_access_past_the_end_is_caught() {
    is_caught("out of bounds", || {
        open();
        let memory = filled(64, 1);
        ok!(cuMemsetD8_v2(memory, 1, 65));
        ok!(cuCtxSynchronize());
    });
}

#[test]
fn memory_that_nobody_wrote_may_be_copied_and_not_read() {
    is_caught("no value", || {
        open();
        let (memory, copy) = (allocate(64), allocate(64));
        ok!(cuMemcpyDtoD_v2(copy, memory, 64));
        read(copy, 64);
    });
}

#[test]
fn an_event_that_is_destroyed_twice_is_caught() {
    is_caught("stale handle", || {
        open();
        let event = event!();
        ok!(cuEventDestroy_v2(event));
        unsafe { cuEventDestroy_v2(event) };
    });
}

#[test]
fn memory_that_is_freed_twice_is_caught() {
    is_caught("double free", || {
        open();
        let memory = allocate(64);
        ok!(cuMemFree_v2(memory));
        unsafe { cuMemFree_v2(memory) };
    });
}

#[test]
fn a_driver_call_in_a_host_function_is_caught() {
    unsafe extern "C" fn calls(_: *mut std::ffi::c_void) {
        unsafe { cuCtxSynchronize() };
    }
    is_caught("call in a host function", || {
        open();
        let stream = stream!();
        ok!(cuLaunchHostFunc(stream, Some(calls), null_mut()));
        ok!(cuStreamSynchronize(stream));
    });
}

#[test]
fn an_event_of_another_context_is_caught() {
    is_caught("another context", || {
        open();
        let event = event!();
        made!(null_mut(), place => cuCtxCreate_v4(&mut place, null_mut(), 0, 0));
        let stream = stream!();
        unsafe { cuEventRecord(event, stream) };
    });
}

#[test]
fn a_call_without_a_current_context_is_refused() {
    super::ends_well(|| {
        open();
        ok!(cuCtxPopCurrent_v2(null_mut()));
        assert_eq!(unsafe { cuEventCreate(&mut null_mut(), 0) }.0, 201);
    });
}

#[test]
fn an_event_without_times_is_refused_for_timing() {
    super::ends_well(|| {
        open();
        let (stream, from, to) = (stream!(), event!(), event!());
        ok!(cuEventRecord(from, stream));
        ok!(cuEventRecord(to, stream));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(unsafe { cuEventElapsedTime_v2(&mut 0.0, from, to) }.0, 400);
    });
}

#[test]
fn a_call_fails_on_command_and_only_that_one() {
    with_settings(&[("INSTEP_GPU_FAIL", "cuMemAlloc:2,cuStreamCreate=999")], || {
        open();
        let allocate = || unsafe { cuMemAlloc_v2(&mut 0, 8) }.0;
        assert_eq!([allocate(), allocate(), allocate()], [0, 2, 0]);
        assert_eq!(unsafe { cuStreamCreate(&mut null_mut(), 1) }.0, 999);
    });
}

#[test]
fn memory_that_is_full_is_refused() {
    with_settings(&[("INSTEP_GPU_MEMORY", "1000")], || {
        open();
        let memory = allocate(900);
        assert_eq!(unsafe { cuMemAlloc_v2(&mut 0, 200) }.0, 2);
        ok!(cuMemFree_v2(memory));
        allocate(200);
    });
}

#[test]
fn what_is_alive_at_exit_is_a_leak_if_leaks_are_asked_for() {
    for (well, said) in super::alone(&[("INSTEP_GPU_LEAKS", "1")], || {
        open();
        let memory = allocate(64);
        let kept = event!();
        assert!(!kept.is_null() && memory != 0);
    }) {
        assert!(!well && said.contains("software gpu: leak: ") && said.contains("1 events"), "{said}");
    }
}

#[test]
fn a_device_address_is_nothing_that_the_host_can_read() {
    for (well, said) in super::alone(&[], || {
        open();
        let memory = filled(64, 1);
        let byte = std::ptr::with_exposed_provenance::<u8>(memory as usize);
        println!("{}", unsafe { byte.read_volatile() });
    }) {
        assert!(!well, "{said}");
    }
}
