//! The functions of the driver, under the names and with the types of `cuda.h`.
//!
//! Each function reads its arguments, and passes the rest to the state (`gpu.rs` and the files that add to it).
//! `prototypes.rs` compares every signature with the header.
#![allow(unsafe_code, non_snake_case)]

mod contexts;
mod copies;
mod devices;
mod events;
mod graphs;
mod kernels;
mod memory;
mod streams;

pub use contexts::*;
pub use copies::*;
pub use devices::*;
pub use events::*;
pub use graphs::*;
pub use kernels::*;
pub use memory::*;
pub use streams::*;

// A test names it.
pub use crate::header::CUmemPool_attribute_enum;

use crate::codes::Answer;
use crate::header::cudaError_enum as Code;
use crate::trace::{self, Shown};

/// Exported functions: each body runs with the lock held, and returns a value or a code.
macro_rules! exported {
    ($($kind:ident $name:ident($gpu:ident $(, $argument:ident: $type:ty)* $(,)?) $body:block)*) => {$(
        #[doc = concat!("`", stringify!($name), "` of `cuda.h`.")]
        ///
        /// # Safety
        /// The arguments are those that `cuda.h` documents.
        #[unsafe(no_mangle)]
        #[allow(unused_unsafe, clippy::too_many_arguments)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> crate::header::CUresult {
            let arguments = [$((stringify!($argument), crate::trace::Shown::shown($argument))),*];
            let call = crate::trace::Call { name: stringify!($name), arguments: Some(&arguments) };
            // SAFETY: the caller keeps to `cuda.h`: pointers lead to as many values as the call reads or writes.
            crate::entry::$kind(&call, |$gpu| unsafe { $body })
        }
    )*};
}
pub(crate) use exported;

/// Writes a result to the caller's address.
///
/// # Safety
/// `place` is null, or an address for one value.
unsafe fn put<T: Copy + Shown>(place: *mut T, value: T) -> Answer<()> {
    if place.is_null() {
        return Err(Code::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: by the contract.
    unsafe { place.write(value) };
    trace::answered(value.shown());
    Ok(())
}

/// Returns a handle as the number in the tables.
fn handle<T>(pointer: *mut T) -> usize {
    pointer.expose_provenance()
}

/// Returns a number of the tables as a handle.
fn pointer<T>(handle: usize) -> *mut T {
    std::ptr::with_exposed_provenance_mut(handle)
}
