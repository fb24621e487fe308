//! Claims: work may touch the memory of its stream's claim, in a graph too, and an access to any other byte is caught.
//!
//! A claim holds from the call that makes it to the next one.

use std::ptr::{null, null_mut};

use software_gpu::exports::*;

use super::calls::*;
use super::{ends_well, is_caught};

/// Claims a part of some memory for the work of a stream.
fn claim<T>(stream: *mut T, address: u64, bytes: u64, kind: u64) {
    let range = Claimed { address, bytes, kind };
    ok!(softwareGpuClaim(stream.expose_provenance(), c"step of bucket 0".as_ptr(), &range, 1));
}

fn end_claim<T>(stream: *mut T) {
    ok!(softwareGpuClaim(stream.expose_provenance(), null(), null(), 0));
}

#[test]
fn a_byte_that_the_program_did_not_claim_is_caught() {
    is_caught("unclaimed", || {
        open();
        let (memory, stream) = (filled(64, 1), stream!());
        claim(stream, memory, 63, Claimed::WRITTEN);
        ok!(cuMemsetD8Async(memory, 1, 64, stream));
        ok!(cuStreamSynchronize(stream));
    });
}

#[test]
fn a_write_to_what_was_claimed_for_reading_is_caught_in_a_graph() {
    is_caught("unclaimed", || {
        open();
        let (memory, stream) = (filled(64, 1), stream!());
        begin!(stream);
        claim(stream, memory, 64, Claimed::READ);
        ok!(cuMemsetD8Async(memory, 1, 64, stream));
        end_claim(stream);
        let graph = made!(null_mut(), place => cuStreamEndCapture(stream, &mut place));
        let executable = made!(null_mut(), place => cuGraphInstantiateWithFlags(&mut place, graph, 0));
        ok!(cuGraphLaunch(executable, stream));
        ok!(cuStreamSynchronize(stream));
    });
}

#[test]
fn work_inside_a_claim_and_after_it_ends_well() {
    ends_well(|| {
        open();
        let (memory, other, stream) = (filled(64, 1), filled(64, 1), stream!());
        claim(stream, memory, 64, Claimed::WRITTEN);
        ok!(cuMemsetD8Async(memory, 2, 64, stream));
        // Only guarded memory is held to this one.
        claim(stream, memory, 64, Claimed::GUARDED);
        ok!(cuMemsetD8Async(other, 2, 64, stream));
        end_claim(stream);
        ok!(cuMemsetD8Async(memory, 3, 64, stream));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(read(memory, 64), [3; 64]);
    });
}

/// A function of the program that does nothing.
unsafe extern "C" fn nothing(_: *mut std::ffi::c_void) {}

fn pinned() -> u64 {
    made!(null_mut(), place => cuMemHostAlloc(&mut place, 64, 3)).expose_provenance() as u64
}

#[test]
fn what_a_host_function_claims_is_what_it_touches() {
    is_caught("race", || {
        open();
        let (device, host, copies, calls) = (filled(64, 1), pinned(), stream!(), stream!());
        let to = std::ptr::with_exposed_provenance_mut(host as usize);
        ok!(cuMemcpyDtoHAsync_v2(to, device, 64, copies));
        claim(calls, host + 63, 1, Claimed::READ);
        ok!(cuLaunchHostFunc(calls, Some(nothing), null_mut()));
        end_claim(calls);
        ok!(cuCtxSynchronize());
    });
}

#[test]
fn a_host_function_that_claims_memory_of_a_gpu_is_caught() {
    is_caught("a GPU's memory", || {
        open();
        let (memory, stream) = (filled(64, 1), stream!());
        claim(stream, memory, 64, Claimed::READ);
        ok!(cuLaunchHostFunc(stream, Some(nothing), null_mut()));
        ok!(cuStreamSynchronize(stream));
    });
}

#[test]
fn a_host_function_that_waits_for_a_copy_may_claim_what_was_copied() {
    ends_well(|| {
        open();
        let (device, host, copies, calls, event) = (filled(64, 1), pinned(), stream!(), stream!(), event!());
        let to = std::ptr::with_exposed_provenance_mut(host as usize);
        ok!(cuMemcpyDtoHAsync_v2(to, device, 64, copies));
        ok!(cuEventRecord(event, copies));
        ok!(cuStreamWaitEvent(calls, event, 0));
        claim(calls, host, 64, Claimed::WRITTEN);
        ok!(cuLaunchHostFunc(calls, Some(nothing), null_mut()));
        end_claim(calls);
        ok!(cuStreamSynchronize(calls));
    });
}
