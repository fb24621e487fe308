//! Detects whether this process was forked from a process that uses the library.
//!
//! A child process has none of its parent's threads, so a lock may be held by a thread that no longer exists. A fork
//! handler therefore sets a flag in the child, and every call reads the flag before it takes a lock.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::status::{Fault, INSTEP_FORKED, Result};

static IS_FORKED: AtomicBool = AtomicBool::new(false);

unsafe extern "C" {
    fn pthread_atfork(
        prepare: Option<extern "C" fn()>,
        parent: Option<extern "C" fn()>,
        child: Option<extern "C" fn()>,
    ) -> c_int;
}

extern "C" fn in_child() {
    IS_FORKED.store(true, Ordering::Relaxed);
}

/// Refuses to run in a child of a process that uses the library.
pub(crate) fn refuse_child() -> Result<()> {
    if IS_FORKED.load(Ordering::Relaxed) {
        let text = "process: forked from one that uses instep, so it has no threads of it; fork before the first handle \
                    is made, or start a new program with exec";
        return Err(Fault::new(INSTEP_FORKED, text));
    }
    Ok(())
}

/// Registers the fork handler. The handler sets the flag in every child that is forked later. The library calls this
/// function when the first handle is created. If a process forks before its first handle, both parent and child may use
/// the library.
pub(crate) fn watch() {
    static WATCHED: OnceLock<c_int> = OnceLock::new();
    // SAFETY: the handler only stores to an atomic of this library, and the library is never unloaded (`build.rs`).
    WATCHED.get_or_init(|| unsafe { pthread_atfork(None, None, Some(in_child)) });
}
