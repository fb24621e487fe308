//! The driver's calls in a shorter form, each asserting success.
//!
//! A test begins with [`open`], which makes device 0 current.

use std::ptr::null_mut;

use software_gpu::exports::*;

/// The result of a query whose work has not ended.
pub(crate) const NOT_READY: u32 = 600;

macro_rules! ok {
    ($call:expr) => {
        assert_eq!(unsafe { $call }.0, 0, stringify!($call))
    };
}
pub(crate) use ok;

/// Returns the value that a call writes.
macro_rules! made {
    ($start:expr, $place:ident => $call:expr) => {{
        let mut $place = $start;
        $crate::calls::ok!($call);
        $place
    }};
}
pub(crate) use made;

pub(crate) fn open() {
    ok!(cuInit(0));
    let context = made!(null_mut(), place => cuDevicePrimaryCtxRetain(&mut place, 0));
    ok!(cuCtxPushCurrent_v2(context));
}

pub(crate) fn allocate(bytes: usize) -> u64 {
    made!(0, place => cuMemAlloc_v2(&mut place, bytes))
}

/// Allocates memory filled with one value, which is written when the call returns.
pub(crate) fn filled(bytes: usize, value: u8) -> u64 {
    let memory = allocate(bytes);
    ok!(cuMemsetD8_v2(memory, value, bytes));
    ok!(cuCtxSynchronize());
    memory
}

pub(crate) fn read(from: u64, bytes: usize) -> Vec<u8> {
    let mut values = vec![0; bytes];
    ok!(cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), from, bytes));
    values
}

/// Makes a stream that waits for no other stream.
macro_rules! stream {
    () => {
        $crate::calls::made!(std::ptr::null_mut(), place => cuStreamCreate(&mut place, 1))
    };
}
pub(crate) use stream;

/// Makes an event without timing.
macro_rules! event {
    () => {
        $crate::calls::made!(std::ptr::null_mut(), place => cuEventCreate(&mut place, 2))
    };
}
pub(crate) use event;

/// Begins a capture that forbids only the thread's own calls.
macro_rules! begin {
    ($stream:expr) => {{
        let mut mode = unsafe { std::mem::zeroed() };
        $crate::calls::set(&mut mode);
        $crate::calls::ok!(cuStreamBeginCapture_v2($stream, mode));
    }};
}

pub(crate) use begin;

/// Writes the number of the mode; the crate has no name for its type.
pub(crate) fn set<T>(mode: &mut T) {
    assert_eq!(size_of::<T>(), 4);
    unsafe { std::ptr::from_mut(mode).cast::<u32>().write(1) };
}
