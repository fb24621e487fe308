//! The caller's collective: a table of functions. The library calls them where it would call the methods of the Rust
//! trait.
//!
//! While a function of the table runs, its thread must not call the library, because the call could wait for that
//! function to return. `entry::in_callback` refuses such calls.
#![allow(unsafe_code)]

use std::ffi::{CString, c_char, c_void};

use instep::collective::{Call, CollectiveKind};
use instep::{Collective, DType, Error, Place};

use crate::arguments::{Growing, read};
use crate::codes::{INSTEP_ALL_REDUCE, INSTEP_BROADCAST, flag, of_dtype, zero};
use crate::entry::in_callback;
use crate::status::{Fault, INSTEP_NULL, INSTEP_OK, INSTEP_THREW, Result, instep_status, name};

/// One collective call of one rank.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct instep_call {
    /// The size of instep_call in the library. This size may exceed the one in the caller's header.
    pub size: usize,
    /// INSTEP_ALL_REDUCE or INSTEP_BROADCAST.
    pub kind: u32,
    /// Element type: INSTEP_F32, INSTEP_BF16 or INSTEP_F16.
    pub dtype: u32,
    /// The source, a range of `bytes` bytes.
    pub src: *const c_void,
    /// The destination, a range of `bytes` bytes. The destination may be the same range as the source.
    pub dst: *mut c_void,
    /// Length of the source and of the destination, in bytes.
    pub bytes: u64,
    /// The number of the pass, counted from the stepper's first pass.
    pub pass: u64,
    /// The number of the bucket, or -1 if the call is not for a bucket.
    pub bucket: i64,
    /// How long the call may wait for other ranks, in milliseconds.
    pub deadline_ms: u64,
    /// On a GPU, the stream on which `enqueue` must enqueue its work. Null on the CPU.
    pub stream: *mut c_void,
    /// 32 bytes that must be equal on all ranks. If these bytes differ between ranks, return a failure, because the
    /// ranks make different calls and would hang later.
    pub key: [u8; 32],
}

/// One rank's part in the caller's collective. The library copies this struct, and passes `data` to each function.
///
/// A function of this struct may call only instep_version, instep_status_name and instep_last_error. Any other library
/// call from such a function returns INSTEP_BUSY. An exception that leaves a function of this struct ends the process.
/// instep::caught, at the end of this header, turns an exception into a status.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct instep_collective {
    /// sizeof(instep_collective).
    pub size: usize,
    /// The caller's data. The data must be usable on any thread until instep_stepper_free has returned. If
    /// instep_stepper_create fails, the library does not use the data.
    pub data: *mut c_void,
    /// Takes part in one collective call, and returns INSTEP_OK. Any other return value ends the stepper. On the CPU,
    /// the library makes one call at a time, on its own thread or, with is_inline, on the thread that calls the
    /// stepper. On the CPU, the function may block until all ranks are done, and must write the result to `dst` before
    /// it returns. On a GPU, the thread that calls the stepper makes the call. On a GPU, the function must enqueue its
    /// work on the call's stream, and must not wait for that work. Every rank makes the same calls in the same order.
    /// Not null.
    pub enqueue:
        Option<unsafe extern "C-unwind" fn(data: *mut c_void, call: *const instep_call) -> instep_status>,
    /// Ends the group: every rank's current call and all later calls must then fail. It must not block. `cause` is
    /// valid during the call. The library may call this function on any thread, also during `enqueue`. The function may
    /// be null if there is only one rank.
    pub abort: Option<unsafe extern "C-unwind" fn(data: *mut c_void, cause: *const c_char)>,
    /// instep_stepper_free calls this function once, when the library no longer uses `data`. The function may be null.
    pub release: Option<unsafe extern "C-unwind" fn(data: *mut c_void)>,
    /// 1: the collective can also sum bf16.
    pub sums_bf16: u32,
    /// 1: the collective can also sum f16.
    pub sums_f16: u32,
    /// 1: the collective works on the memory of GPUs. 0: it works on the memory of the CPU.
    pub reaches_gpus: u32,
    /// Zero. Anything else is refused.
    pub reserved: u32,
}

// SAFETY: all fields are numbers, pointers and optional functions, for which zeros are valid.
unsafe impl Growing for instep_collective {
    const NAME: &'static str = "instep_collective";
}

/// The caller's collective. For a short time after a stepper is freed, its threads may still have a clone of this
/// struct, but they no longer call the functions.
#[derive(Clone)]
pub(crate) struct Foreign {
    table: instep_collective,
    rank: u32,
    world_size: u32,
    sums: [bool; 2],
    reaches_gpus: bool,
}

// SAFETY: the header asks for functions and data that any thread may use.
unsafe impl Send for Foreign {}
// SAFETY: the header asks for functions and data that any thread may use.
unsafe impl Sync for Foreign {}

impl Foreign {
    /// # Safety
    /// The table meets instep.h's contract until [`Foreign::release`] is called.
    pub(crate) unsafe fn read(from: *const instep_collective, rank: u32, world_size: u32) -> Result<Foreign> {
        // SAFETY: guaranteed by the caller.
        let table = unsafe { read(from)? };
        if table.enqueue.is_none() || (table.abort.is_none() && world_size > 1) {
            let which = if table.enqueue.is_none() { "enqueue" } else { "abort" };
            return Err(Fault::new(
                INSTEP_NULL,
                format_args!("instep_collective: {which} is null; name a function"),
            ));
        }
        zero("reserved", table.reserved)?;
        Ok(Foreign {
            table,
            rank,
            world_size,
            sums: [flag("sums_bf16", table.sums_bf16)?, flag("sums_f16", table.sums_f16)?],
            reaches_gpus: flag("reaches_gpus", table.reaches_gpus)?,
        })
    }

    /// Calls the function `release`, after which the library calls no function of the table.
    pub(crate) fn release(&self) {
        if let Some(release) = self.table.release {
            // SAFETY: the function and its data meet instep.h's contract.
            in_callback(|| unsafe { release(self.table.data) });
        }
    }
}

impl Collective for Foreign {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn world_size(&self) -> u32 {
        self.world_size
    }

    fn reaches(&self, place: Place) -> bool {
        (place != Place::Host) == self.reaches_gpus
    }

    fn sums(&self, dtype: DType) -> bool {
        match dtype {
            DType::F32 => true,
            DType::BF16 => self.sums[0],
            DType::F16 => self.sums[1],
            _ => false,
        }
    }

    fn enqueue(&self, call: &mut Call<'_>) -> instep::Result<()> {
        let failed = |code, message: String| {
            Err(Error::Collective { rank: self.rank, call: "enqueue", code, message })
        };
        if !self.supports(call.kind) {
            return Err(call.unknown_kind());
        }
        let Ok(dtype) = of_dtype(call.dtype) else {
            return failed(-1, "an element type without a code".into());
        };
        let given = instep_call {
            size: size_of::<instep_call>(),
            kind: if call.kind == CollectiveKind::AllReduce { INSTEP_ALL_REDUCE } else { INSTEP_BROADCAST },
            dtype,
            src: call.src().cast(),
            dst: call.dst().cast(),
            bytes: call.bytes,
            pass: call.pass,
            bucket: call.bucket.map_or(-1, i64::from),
            deadline_ms: call.deadline().as_millis().try_into().unwrap_or(u64::MAX),
            stream: call
                .stream()
                .map_or(std::ptr::null_mut(), |stream| std::ptr::with_exposed_provenance_mut(stream.0)),
            key: call.key().to_bytes(),
        };
        let Some(enqueue) = self.table.enqueue else { return failed(-1, "it is null".into()) };
        // SAFETY: the function and its data meet instep.h's contract, and the buffers belong to the call.
        match in_callback(|| unsafe { enqueue(self.table.data, &given) }) {
            INSTEP_OK => Ok(()),
            INSTEP_THREW => failed(INSTEP_THREW, "the callback threw an exception".into()),
            status => failed(status, name(status).to_string_lossy().into_owned()),
        }
    }

    fn abort(&self, cause: &Error) {
        if let Some(abort) = self.table.abort {
            let cause = CString::new(cause.to_string().replace('\0', "\\0")).unwrap_or_default();
            // SAFETY: the function and its data meet instep.h's contract.
            in_callback(|| unsafe { abort(self.table.data, cause.as_ptr()) });
        }
    }
}
