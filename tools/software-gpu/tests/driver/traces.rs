//! `INSTEP_GPU_TRACE`: the lines of a program's calls in the file, and that no call is missing.
//!
//! A test reads its own file: the line is there when its call returns.

use std::fs;
use std::path::PathBuf;
use std::ptr::null_mut;

use software_gpu::exports::*;

use crate::calls::{allocate, event, made, ok, open, stream};
use crate::{alone, with_settings};

const TRACE: &str = "INSTEP_GPU_TRACE";

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("trace-{name}"))
}

fn lines(path: &str) -> Vec<String> {
    fs::read_to_string(path).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn every_call_is_a_line_with_its_arguments_answers_and_errors() {
    let path = file("lines");
    with_settings(&[(TRACE, path.to_str().unwrap()), ("INSTEP_GPU_FAIL", "cuEventRecord:2=0")], || {
        let mut version = 0;
        ok!(cuDriverGetVersion(&mut version));
        open();
        let (first, second, done) = (stream!(), stream!(), event!());
        let memory = allocate(64);
        ok!(cuMemsetD8Async(memory, 7, 32, first));
        ok!(cuEventRecord(done, first));
        ok!(cuStreamWaitEvent(second, done, 0));
        let mut values = [0u8; 8];
        ok!(cuMemcpyDtoHAsync_v2(values.as_mut_ptr().cast(), memory + 16, 8, second));
        ok!(cuEventRecord(done, null_mut()));
        let refused = unsafe { cuStreamEndCapture(first, &mut null_mut()) };
        assert_ne!(refused.0, 0);
        ok!(cuEventDestroy_v2(done));
        let _other = event!();
        let expected = [
            &format!("cuDriverGetVersion -> {version}"),
            "cuInit flags=0",
            "cuDevicePrimaryCtxRetain device=0 -> c1",
            "cuCtxPushCurrent_v2 context=c1",
            "cuStreamCreate flags=1 -> s2",
            "cuStreamCreate flags=1 -> s3",
            "cuEventCreate flags=2 -> e1",
            "cuMemAlloc_v2 bytes=64 -> m1",
            "cuMemsetD8Async to=m1 value=7 count=32 stream=s2",
            "cuEventRecord event=e1 stream=s2",
            "cuStreamWaitEvent stream=s3 event=e1 flags=0",
            "cuMemcpyDtoHAsync_v2 to=host from=m1+16 bytes=8 stream=s3",
            "cuEventRecord event=e1 stream=default -> CUDA_SUCCESS",
            "cuStreamEndCapture stream=s2 -> CUDA_ERROR_ILLEGAL_STATE",
            "cuEventDestroy_v2 event=e1",
            "cuEventCreate flags=2 -> e2",
        ];
        assert_eq!(lines(&std::env::var(TRACE).unwrap()), expected);
    });
}

#[test]
fn a_call_that_ends_the_program_is_the_last_line_of_its_trace() {
    let path = file("fault");
    let ended = alone(&[(TRACE, path.to_str().unwrap())], || {
        open();
        let done = event!();
        ok!(cuEventDestroy_v2(done));
        let _ = unsafe { cuEventQuery(done) };
    });
    assert!(ended.iter().all(|(well, _)| !well));
    assert_eq!(lines(path.to_str().unwrap()).last().unwrap(), "cuEventQuery event=e1");
}

#[test]
fn each_process_has_a_trace_of_its_own_where_the_name_asks_for_its_number() {
    let path = file("of-%p");
    with_settings(&[(TRACE, path.to_str().unwrap())], || {
        open();
        let number = std::process::id().to_string();
        let path = std::env::var(TRACE).unwrap().replace("%p", &number);
        assert_eq!(lines(&path).len(), 3);
        fs::remove_file(path).unwrap();
    });
}

#[test]
fn the_functions_that_nvidias_driver_has_not_are_no_lines() {
    let path = file("own");
    with_settings(&[(TRACE, path.to_str().unwrap())], || {
        open();
        let stream = made!(null_mut(), place => cuStreamCreate(&mut place, 1));
        ok!(softwareGpuClaim(stream.expose_provenance(), c"all".as_ptr(), std::ptr::null(), 0));
        assert_ne!(softwareGpuResolve(0), 0);
        assert_eq!(lines(&std::env::var(TRACE).unwrap()).len(), 4);
    });
}

/// Allocates and frees memory of each size, waits for the GPU, and returns the mapped bytes of the allocations' lines.
fn mapped_in_two_rounds(
    take: impl Fn(usize) -> u64,
    free: impl Fn(u64),
    wait: impl Fn(),
) -> Vec<Option<u64>> {
    let before = lines(&std::env::var(TRACE).unwrap()).len();
    for _ in 0..2 {
        let [first, second] = [1000, 500].map(&take);
        free(first);
        // In the order of the stream the first one is free.
        let third = take(800);
        free(second);
        free(third);
        wait();
    }
    let lines = lines(&std::env::var(TRACE).unwrap());
    let taken = lines[before..].iter().filter(|line| line.starts_with("cuMemAlloc"));
    taken.map(|line| Some(line.split_once(" mapped=")?.1.parse().unwrap())).collect()
}

#[test]
fn a_pool_keeps_what_its_threshold_says_once_the_host_waits() {
    let path = file("pools");
    with_settings(&[(TRACE, path.to_str().unwrap()), ("INSTEP_GPU_LEAKS", "1")], || {
        open();
        let stream = stream!();
        let usual = |bytes| made!(0, place => cuMemAllocAsync(&mut place, bytes, stream));
        let free = |memory| ok!(cuMemFreeAsync(memory, stream));
        let wait = || ok!(cuStreamSynchronize(stream));
        let round = [Some(1000), Some(500), None];
        assert_eq!(mapped_in_two_rounds(usual, free, wait), [round, round].concat());
        // Of pinned memory on device 0.
        let props = [1u64, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let pool = made!(null_mut(), place => cuMemPoolCreate(&mut place, props.as_ptr().cast()));
        let of_pool = |bytes| made!(0, place => cuMemAllocFromPoolAsync(&mut place, bytes, pool, stream));
        assert_eq!(mapped_in_two_rounds(of_pool, free, wait), [round, round].concat());
        for (threshold, second) in [(1200u64, [None, Some(300), None]), (u64::MAX, [None; 3])] {
            let value = (&raw const threshold).cast_mut().cast();
            let attribute = CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            ok!(cuMemPoolSetAttribute(pool, attribute, value));
            let found = mapped_in_two_rounds(of_pool, free, wait);
            assert_eq!(found[3..], second, "{threshold}");
        }
        let memory = of_pool(64);
        ok!(cuMemPoolDestroy(pool));
        ok!(cuMemFreeAsync(memory, stream));
        ok!(cuStreamDestroy_v2(stream));
    });
}
