//! Captures and graphs: what becomes a graph, what a capture forbids, and what a launch guarantees.
//!
//! The codes are those of `cuda.h`.

use std::ptr::null_mut;

use software_gpu::exports::*;

use super::calls::*;
use super::{ends_well, is_caught};

const UNSUPPORTED: u32 = 900;
const INVALIDATED: u32 = 901;
const UNJOINED: u32 = 904;
const ISOLATION: u32 = 905;
const CAPTURED_EVENT: u32 = 907;

#[test]
fn a_graph_runs_its_branches_at_each_launch_and_not_in_the_capture() {
    ends_well(|| {
        open();
        let (memory, first, second, fork, join) = (filled(64, 1), stream!(), stream!(), event!(), event!());
        begin!(first);
        ok!(cuEventRecord(fork, first));
        ok!(cuStreamWaitEvent(second, fork, 0));
        ok!(cuMemsetD8Async(memory, 2, 32, first));
        ok!(cuMemsetD8Async(memory + 32, 3, 32, second));
        ok!(cuEventRecord(join, second));
        ok!(cuStreamWaitEvent(first, join, 0));
        let graph = made!(null_mut(), place => cuStreamEndCapture(first, &mut place));
        let executable = made!(null_mut(), place => cuGraphInstantiateWithFlags(&mut place, graph, 0));
        ok!(cuGraphDestroy(graph));
        assert_eq!(read(memory, 64), [1; 64]);
        for _ in 0..3 {
            ok!(cuMemsetD8Async(memory, 9, 64, first));
            ok!(cuGraphLaunch(executable, first));
        }
        ok!(cuStreamSynchronize(first));
        assert_eq!(read(memory, 64), [[2; 32], [3; 32]].concat());
        ok!(cuGraphExecDestroy(executable));
    });
}

#[test]
fn branches_of_a_graph_that_nothing_joins_race() {
    is_caught("race", || {
        open();
        let (memory, first, second, fork, join) = (filled(64, 1), stream!(), stream!(), event!(), event!());
        begin!(first);
        ok!(cuEventRecord(fork, first));
        ok!(cuStreamWaitEvent(second, fork, 0));
        ok!(cuMemsetD8Async(memory, 2, 64, first));
        ok!(cuMemsetD8Async(memory, 3, 64, second));
        ok!(cuEventRecord(join, second));
        ok!(cuStreamWaitEvent(first, join, 0));
        let graph = made!(null_mut(), place => cuStreamEndCapture(first, &mut place));
        let executable = made!(null_mut(), place => cuGraphInstantiateWithFlags(&mut place, graph, 0));
        ok!(cuGraphLaunch(executable, first));
        ok!(cuStreamSynchronize(first));
    });
}

#[test]
fn a_capture_whose_streams_are_not_joined_fails_at_its_end() {
    ends_well(|| {
        open();
        let (memory, first, second, fork) = (filled(64, 1), stream!(), stream!(), event!());
        begin!(first);
        ok!(cuEventRecord(fork, first));
        ok!(cuStreamWaitEvent(second, fork, 0));
        ok!(cuMemsetD8Async(memory, 3, 64, second));
        assert_eq!(unsafe { cuStreamEndCapture(first, &mut null_mut()) }.0, UNJOINED);
        ok!(cuMemsetD8Async(memory, 4, 64, first));
        ok!(cuStreamSynchronize(first));
        // CUDA does not say that the other one leaves the capture.
        assert_eq!(unsafe { cuMemsetD8Async(memory, 4, 64, second) }.0, INVALIDATED);
    });
}

#[test]
fn a_capture_forbids_waits_of_its_streams_and_unsafe_calls() {
    ends_well(|| {
        open();
        let (stream, other) = (stream!(), stream!());
        for call in [|| unsafe { cuMemAlloc_v2(&mut 0, 8) }.0, || unsafe { cuCtxSynchronize() }.0] {
            begin!(stream);
            assert_eq!(call(), UNSUPPORTED);
            assert_eq!(unsafe { cuStreamEndCapture(stream, &mut null_mut()) }.0, INVALIDATED);
        }
        begin!(stream);
        assert_eq!(unsafe { cuStreamSynchronize(stream) }.0, UNSUPPORTED);
        assert_eq!(unsafe { cuStreamEndCapture(stream, &mut null_mut()) }.0, INVALIDATED);
        ok!(cuStreamSynchronize(other));
    });
}

#[test]
fn each_capture_has_an_id_which_its_streams_share() {
    ends_well(|| {
        open();
        let (first, second, fork, join) = (stream!(), stream!(), event!(), event!());
        let none = null_mut();
        let info = |stream| {
            let (mut status, mut id) = (unsafe { std::mem::zeroed() }, 0);
            ok!(cuStreamGetCaptureInfo_v3(
                stream,
                &mut status,
                &mut id,
                none,
                null_mut(),
                null_mut(),
                null_mut()
            ));
            (status.0, id)
        };
        let capture = || {
            begin!(first);
            ok!(cuEventRecord(fork, first));
            assert_eq!(info(second), (0, 0));
            ok!(cuStreamWaitEvent(second, fork, 0));
            assert_eq!(info(first).0, 1);
            assert_eq!(info(first), info(second));
            let (_, id) = info(first);
            ok!(cuEventRecord(join, second));
            ok!(cuStreamWaitEvent(first, join, 0));
            let graph = made!(null_mut(), place => cuStreamEndCapture(first, &mut place));
            ok!(cuGraphDestroy(graph));
            assert_eq!(info(first), (0, 0));
            id
        };
        assert_ne!(capture(), capture());
        begin!(first);
        assert_eq!(unsafe { cuStreamSynchronize(first) }.0, UNSUPPORTED);
        assert_eq!(info(first), (2, 0), "an invalid capture");
    });
}

#[test]
fn events_do_not_cross_the_edge_of_a_capture() {
    ends_well(|| {
        open();
        let (stream, other, outside, inside) = (stream!(), stream!(), event!(), event!());
        ok!(cuEventRecord(outside, other));
        begin!(stream);
        assert_eq!(unsafe { cuStreamWaitEvent(stream, outside, 0) }.0, ISOLATION);
        assert_eq!(unsafe { cuStreamEndCapture(stream, &mut null_mut()) }.0, INVALIDATED);
        begin!(stream);
        ok!(cuEventRecord(inside, stream));
        let graph = made!(null_mut(), place => cuStreamEndCapture(stream, &mut place));
        assert_eq!(unsafe { cuEventQuery(inside) }.0, CAPTURED_EVENT);
        assert_eq!(unsafe { cuStreamWaitEvent(other, inside, 0) }.0, CAPTURED_EVENT);
        ok!(cuGraphDestroy(graph));
    });
}
