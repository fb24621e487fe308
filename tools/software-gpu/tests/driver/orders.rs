//! Orders that streams, events and the host's waits make: their guarantees hold with every seed.
//!
//! A test here has all the waits that it needs, so it must end with the right bytes.

use software_gpu::exports::*;

use super::calls::*;
use super::ends_well;

#[test]
fn a_stream_that_waits_for_an_event_sees_the_work_before_it() {
    ends_well(|| {
        open();
        let (memory, copy, first, second, event) =
            (filled(64, 1), allocate(64), stream!(), stream!(), event!());
        ok!(cuMemsetD8Async(memory, 2, 64, first));
        ok!(cuEventRecord(event, first));
        ok!(cuStreamWaitEvent(second, event, 0));
        ok!(cuMemcpyDtoDAsync_v2(copy, memory, 64, second));
        ok!(cuStreamSynchronize(second));
        assert_eq!(read(copy, 64), [2; 64]);
    });
}

#[test]
fn a_wait_takes_the_latest_record_and_not_a_later_one() {
    ends_well(|| {
        open();
        let (memory, first, second, event) = (filled(64, 1), stream!(), stream!(), event!());
        // Never recorded: it orders nothing.
        ok!(cuStreamWaitEvent(second, event, 0));
        ok!(cuMemsetD8Async(memory, 2, 32, first));
        ok!(cuEventRecord(event, first));
        ok!(cuStreamWaitEvent(second, event, 0));
        ok!(cuEventRecord(event, second));
        ok!(cuMemsetD8Async(memory, 3, 32, second));
        ok!(cuMemsetD8Async(memory + 32, 4, 32, first));
        ok!(cuCtxSynchronize());
        assert_eq!(read(memory, 64), [[3; 32], [4; 32]].concat());
    });
}

#[test]
fn the_default_stream_and_blocking_streams_wait_for_each_other() {
    ends_well(|| {
        open();
        let (memory, blocking) =
            (filled(64, 1), made!(std::ptr::null_mut(), place => cuStreamCreate(&mut place, 0)));
        ok!(cuMemsetD8Async(memory, 2, 64, blocking));
        ok!(cuMemsetD8Async(memory, 3, 32, std::ptr::null_mut()));
        ok!(cuMemsetD8Async(memory, 4, 16, blocking));
        ok!(cuStreamSynchronize(blocking));
        assert_eq!(read(memory, 64), [&[4; 16][..], &[3; 16], &[2; 32]].concat());
    });
}

#[test]
fn a_wait_for_the_context_sees_the_work_of_a_stream_that_is_destroyed() {
    ends_well(|| {
        open();
        let (memory, copy, stream) = (filled(64, 1), allocate(64), stream!());
        ok!(cuMemsetD8Async(memory, 2, 64, stream));
        ok!(cuMemcpyDtoDAsync_v2(copy, memory, 64, stream));
        ok!(cuStreamDestroy_v2(stream));
        ok!(cuCtxSynchronize());
        assert_eq!(read(copy, 64), [2; 64]);
    });
}

#[test]
fn a_stream_that_is_asked_often_enough_ends() {
    ends_well(|| {
        open();
        let (memory, stream, event) = (filled(64, 1), stream!(), event!());
        for value in 0..9 {
            ok!(cuMemsetD8Async(memory, value, 64, stream));
        }
        ok!(cuEventRecord(event, stream));
        let mut asked = 0;
        while unsafe { cuEventQuery(event) }.0 == NOT_READY {
            asked += 1;
            assert!(asked < 20);
        }
        ok!(cuStreamQuery(stream));
        assert_eq!(read(memory, 64), [8; 64]);
    });
}

#[test]
fn pinned_memory_is_read_when_the_copy_runs_and_pageable_memory_in_the_call() {
    ends_well(|| {
        open();
        let (memory, stream) = (allocate(8), stream!());
        let mut values = [5u8; 8];
        ok!(cuMemcpyHtoDAsync_v2(memory, values.as_ptr().cast(), 8, stream));
        values.fill(6);
        ok!(cuStreamSynchronize(stream));
        assert_eq!(read(memory, 8), [5; 8]);
        let pinned = made!(std::ptr::null_mut(), place => cuMemHostAlloc(&mut place, 8, 0));
        unsafe { pinned.cast::<[u8; 8]>().write([7; 8]) };
        ok!(cuMemcpyHtoDAsync_v2(memory, pinned, 8, stream));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(read(memory, 8), [7; 8]);
        ok!(cuMemFreeHost(pinned));
    });
}

#[test]
fn seed_zero_runs_nothing_before_a_wait_needs_it() {
    ends_well(|| {
        if std::env::var("INSTEP_GPU_SEED").as_deref() != Ok("0") {
            return;
        }
        open();
        let (memory, stream) = (allocate(8), stream!());
        let pinned = made!(std::ptr::null_mut(), place => cuMemHostAlloc(&mut place, 8, 0));
        unsafe { pinned.cast::<[u8; 8]>().write([1; 8]) };
        ok!(cuMemcpyHtoDAsync_v2(memory, pinned, 8, stream));
        // Too early: the copy has not run.
        unsafe { pinned.cast::<[u8; 8]>().write([2; 8]) };
        ok!(cuStreamSynchronize(stream));
        assert_eq!(read(memory, 8), [2; 8]);
    });
}
