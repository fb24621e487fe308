//! The functions of NCCL that this crate calls, generated from its `nccl.h`: a table that is filled at run time.
//!
//! `cargo run -p bindings` writes this file; do not edit it by hand. A call panics if the loaded library lacks the
//! function, so `library.rs` first checks that each function exists. Result codes are numbers in a newtype, because a
//! newer library may return a new code.
#![allow(missing_docs, non_camel_case_types, non_snake_case, non_upper_case_globals, unreachable_pub)]
#![allow(dead_code, unsafe_code, unsafe_op_in_unsafe_fn, clippy::all, clippy::expect_used)]

/// A stream, as the driver and the runtime pass it.
pub type cudaStream_t = *mut ::core::ffi::c_void;

use crate::abi::layout;

pub const NCCL_VERSION_CODE: u32 = 23203;
pub const NCCL_API_MAGIC: u32 = 3405692655;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclComm {
    _unused: [u8; 0],
}
pub type ncclComm_t = *mut ncclComm;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclUniqueId {
    pub internal: [::core::ffi::c_char; 128usize],
}
layout!(ncclUniqueId: 128 bytes, aligned to 1; internal at 0);
impl ncclResult_t {
    pub const ncclSuccess: ncclResult_t = ncclResult_t(0);
    pub const ncclInProgress: ncclResult_t = ncclResult_t(7);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclResult_t(pub ::core::ffi::c_uint);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclConfig_v23100 {
    pub size: usize,
    pub magic: ::core::ffi::c_uint,
    pub version: ::core::ffi::c_uint,
    pub blocking: ::core::ffi::c_int,
    pub cgaClusterSize: ::core::ffi::c_int,
    pub minCTAs: ::core::ffi::c_int,
    pub maxCTAs: ::core::ffi::c_int,
    pub netName: *const ::core::ffi::c_char,
    pub splitShare: ::core::ffi::c_int,
    pub trafficClass: ::core::ffi::c_int,
    pub commName: *const ::core::ffi::c_char,
    pub collnetEnable: ::core::ffi::c_int,
    pub CTAPolicy: ::core::ffi::c_int,
    pub shrinkShare: ::core::ffi::c_int,
    pub nvlsCTAs: ::core::ffi::c_int,
    pub nChannelsPerNetPeer: ::core::ffi::c_int,
    pub nvlinkCentricSched: ::core::ffi::c_int,
    pub graphUsageMode: ::core::ffi::c_int,
    pub numRmaCtx: ::core::ffi::c_int,
    pub maxP2pPeers: ::core::ffi::c_int,
    pub graphStreamOrdering: ::core::ffi::c_int,
    pub launchOrderImplicit: ::core::ffi::c_int,
    pub numRmaSig: ::core::ffi::c_int,
    pub rmaEagerInit: ::core::ffi::c_int,
    pub hostCftMode: ::core::ffi::c_int,
    pub nvlsHostMode: ::core::ffi::c_int,
}
layout!(ncclConfig_v23100: 120 bytes, aligned to 8; size at 0, magic at 8, version at 12, blocking at 16,
    cgaClusterSize at 20, minCTAs at 24, maxCTAs at 28, netName at 32, splitShare at 40, trafficClass at 44,
    commName at 48, collnetEnable at 56, CTAPolicy at 60, shrinkShare at 64, nvlsCTAs at 68, nChannelsPerNetPeer at 72,
    nvlinkCentricSched at 76, graphUsageMode at 80, numRmaCtx at 84, maxP2pPeers at 88, graphStreamOrdering at 92,
    launchOrderImplicit at 96, numRmaSig at 100, rmaEagerInit at 104, hostCftMode at 108, nvlsHostMode at 112);
pub type ncclConfig_t = ncclConfig_v23100;
impl ncclRedOp_t {
    pub const ncclSum: ncclRedOp_t = ncclRedOp_t(0);
    pub const ncclMax: ncclRedOp_t = ncclRedOp_t(2);
    pub const ncclMin: ncclRedOp_t = ncclRedOp_t(3);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclRedOp_t(pub ::core::ffi::c_uint);
impl ncclDataType_t {
    pub const ncclUint32: ncclDataType_t = ncclDataType_t(3);
    pub const ncclUint64: ncclDataType_t = ncclDataType_t(5);
    pub const ncclFloat16: ncclDataType_t = ncclDataType_t(6);
    pub const ncclFloat32: ncclDataType_t = ncclDataType_t(7);
    pub const ncclBfloat16: ncclDataType_t = ncclDataType_t(9);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclDataType_t(pub ::core::ffi::c_uint);

use ::core::ffi::{c_char, c_int, c_void};

/// Looks each function up once. A call panics if the library lacks the function.
macro_rules! functions {
    ($(pub fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        pub struct Functions {
            $(pub $name: Option<unsafe extern "C" fn($($type),*) -> $result>,)*
        }

        impl Functions {
            pub unsafe fn new(address_of: impl Fn(&str) -> *const c_void) -> Functions {
                Functions { $($name: ::core::mem::transmute(address_of(stringify!($name))),)* }
            }

            $(pub unsafe fn $name(&self, $($argument: $type),*) -> $result {
                (self.$name.as_ref().expect("asked for before it is called"))($($argument),*)
            })*
        }
    };
}

functions! {
    pub fn ncclMemAlloc(ptr: *mut *mut c_void, size: usize) -> ncclResult_t;
    pub fn ncclMemFree(ptr: *mut c_void) -> ncclResult_t;
    pub fn ncclGetVersion(version: *mut c_int) -> ncclResult_t;
    pub fn ncclGetUniqueId(uniqueId: *mut ncclUniqueId) -> ncclResult_t;
    pub fn ncclCommInitRankConfig(comm: *mut ncclComm_t, nranks: c_int, commId: ncclUniqueId, rank: c_int,
        config: *mut ncclConfig_t) -> ncclResult_t;
    pub fn ncclCommFinalize(comm: ncclComm_t) -> ncclResult_t;
    pub fn ncclCommDestroy(comm: ncclComm_t) -> ncclResult_t;
    pub fn ncclCommAbort(comm: ncclComm_t) -> ncclResult_t;
    pub fn ncclGetErrorString(result: ncclResult_t) -> *const c_char;
    pub fn ncclGetLastError(comm: ncclComm_t) -> *const c_char;
    pub fn ncclCommGetAsyncError(comm: ncclComm_t, asyncError: *mut ncclResult_t) -> ncclResult_t;
    pub fn ncclCommCount(comm: ncclComm_t, count: *mut c_int) -> ncclResult_t;
    pub fn ncclCommCuDevice(comm: ncclComm_t, device: *mut c_int) -> ncclResult_t;
    pub fn ncclCommUserRank(comm: ncclComm_t, rank: *mut c_int) -> ncclResult_t;
    pub fn ncclCommRegister(comm: ncclComm_t, buff: *mut c_void, size: usize, handle: *mut *mut c_void) -> ncclResult_t;
    pub fn ncclCommDeregister(comm: ncclComm_t, handle: *mut c_void) -> ncclResult_t;
    pub fn ncclBroadcast(sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
        root: c_int, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
    pub fn ncclAllReduce(sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
        op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
    pub fn ncclReduceScatter(sendbuff: *const c_void, recvbuff: *mut c_void, recvcount: usize, datatype: ncclDataType_t,
        op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
    pub fn ncclAllGather(sendbuff: *const c_void, recvbuff: *mut c_void, sendcount: usize, datatype: ncclDataType_t,
        comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
    pub fn ncclGroupStart() -> ncclResult_t;
    pub fn ncclGroupEnd() -> ncclResult_t;
}
