//! Kernels from PTX that fail or never end on request.
//!
//! A failed kernel makes every later call fail; one that hangs holds up its stream and no other.

use std::ffi::c_void;
use std::ptr::null_mut;

use software_gpu::exports::*;

use super::calls::*;
use super::with_settings;

const ILLEGAL_ADDRESS: u32 = 700;

/// Writes 7 to a word.
const PTX: &std::ffi::CStr = c"
.version 8.0
.target sm_80
.address_size 64
.visible .entry seven(.param .u64 seven_param_0)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [seven_param_0];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, 7;
    st.global.u32 [%rd2], %r1;
    ret;
}
";

/// Launches the kernel on a stream.
macro_rules! launch {
    ($memory:expr, $stream:expr) => {{
        let module = made!(null_mut(), place => cuModuleLoadData(&mut place, PTX.as_ptr().cast()));
        let kernel = made!(null_mut(), place => cuModuleGetFunction(&mut place, module, c"seven".as_ptr()));
        let mut address: u64 = $memory;
        let mut arguments: [*mut c_void; 1] = [(&raw mut address).cast()];
        ok!(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, $stream, arguments.as_mut_ptr(), null_mut()));
    }};
}

#[test]
fn a_kernel_that_fails_as_it_runs_makes_every_later_call_fail() {
    with_settings(&[("INSTEP_GPU_FAIL", "kernel:2=700")], || {
        open();
        let (memory, stream) = (allocate(4), stream!());
        launch!(memory, stream);
        ok!(cuStreamSynchronize(stream));
        assert_eq!(read(memory, 4), [7, 0, 0, 0]);
        launch!(memory, stream);
        assert_eq!(unsafe { cuStreamSynchronize(stream) }.0, ILLEGAL_ADDRESS);
        assert_eq!(unsafe { cuMemAlloc_v2(&mut 0, 8) }.0, ILLEGAL_ADDRESS);
        assert_eq!(unsafe { cuCtxSynchronize() }.0, ILLEGAL_ADDRESS);
    });
}

#[test]
fn a_kernel_that_never_ends_holds_up_its_stream_and_no_other() {
    with_settings(&[("INSTEP_GPU_HANG", "2")], || {
        open();
        let (memory, hung, other, event) = (filled(8, 1), stream!(), stream!(), event!());
        launch!(memory, hung);
        ok!(cuStreamSynchronize(hung));
        launch!(memory, hung);
        ok!(cuEventRecord(event, hung));
        launch!(memory + 4, other);
        ok!(cuStreamSynchronize(other));
        assert!((0..100).all(|_| unsafe { cuEventQuery(event) }.0 == NOT_READY));
        assert_eq!(unsafe { cuStreamQuery(hung) }.0, NOT_READY);
        ok!(cuStreamQuery(other));
    });
}
