//! A driver function that receives claims. A claim lists the bytes that the work of a stream may touch.
//!
//! Only the software GPU of the tests has this function, and only builds with debug assertions look it up. A claim
//! covers the calls of one op, and ends when it is dropped.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char};
use std::ptr;

use crate::handle::StreamHandle;

/// The type of the function. The arguments are a stream, the name of the claimant, ranges, and the number of ranges. A
/// null name ends the claim.
pub(super) type Take = unsafe extern "C" fn(usize, *const c_char, *const Range, usize) -> i32;

/// A driver function that receives claims.
#[derive(Clone, Copy, Debug)]
pub struct Judge(pub(super) Take);

#[repr(C)]
pub(super) struct Range {
    address: u64,
    bytes: u64,
    kind: u64,
}

/// The permitted accesses to a range.
#[derive(Clone, Copy)]
#[repr(u64)]
pub(super) enum Kind {
    Read,
    Write,
    /// The work may touch these bytes only if another range allows it. If a claim has guarded ranges, the work may
    /// touch all memory outside them.
    Guarded,
}

impl Range {
    pub(super) fn new(address: usize, bytes: u64, kind: Kind) -> Range {
        Range { address: address as u64, bytes, kind: kind as u64 }
    }
}

/// A claim on a stream's work. The claim ends when this value is dropped.
pub(super) struct Claim {
    judge: Judge,
    stream: StreamHandle,
}

impl Judge {
    /// Makes the driver check the stream's work against these ranges, until the returned claim is dropped.
    pub(super) fn hold(self, stream: StreamHandle, name: &CStr, ranges: &[Range]) -> Claim {
        // SAFETY: the name is a string, and there are as many ranges as the call says. The driver copies both.
        unsafe { (self.0)(stream.0, name.as_ptr(), ranges.as_ptr(), ranges.len()) };
        Claim { judge: self, stream }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // SAFETY: without a name, the function reads nothing.
        unsafe { (self.judge.0)(self.stream.0, ptr::null(), ptr::null(), 0) };
    }
}
