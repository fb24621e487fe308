//! Runs the body of every function that returns a status. This module refuses calls in forked children and in
//! callbacks, catches panics, and stores the last error.
//!
//! [`call`] turns a panic into a status, so no panic reaches C.
#![allow(unsafe_code)]

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::fork::refuse_child;
use crate::status::{Fault, INSTEP_BUSY, INSTEP_OK, INSTEP_PANIC, Result, instep_status, name};

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
    static IS_IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// Returns the version of the library, such as "0.1.0". The text lives as long as the process.
///
/// Any thread may call this function at any time, also in callbacks and in forked children.
#[unsafe(no_mangle)]
pub extern "C" fn instep_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Returns the name of a status, such as "INSTEP_OK". The text lives as long as the process.
///
/// Any thread may call this function at any time, also in callbacks and in forked children.
#[unsafe(no_mangle)]
pub extern "C" fn instep_status_name(status: instep_status) -> *const c_char {
    name(status).as_ptr()
}

/// Returns the error of the last failed call on the calling thread: `<thing>: <what is wrong>; <what to do>`. The text
/// is empty if no call has failed. The library owns the text. The text is valid until another call on this thread
/// fails.
///
/// Any thread may call this function at any time, also in callbacks and in forked children.
#[unsafe(no_mangle)]
pub extern "C" fn instep_last_error() -> *const c_char {
    let text = LAST_ERROR.try_with(|last| last.try_borrow().map(|text| text.as_ptr()));
    text.ok().and_then(|text| text.ok()).unwrap_or(c"".as_ptr())
}

/// Runs the body of a function of the header.
pub(crate) fn call(body: impl FnOnce() -> Result<()>) -> instep_status {
    let checked = || {
        refuse_child()?;
        refuse_callback()?;
        body()
    };
    let outcome = catch_unwind(AssertUnwindSafe(checked));
    match outcome.unwrap_or_else(|panic| Err(Fault::new(INSTEP_PANIC, message(&*panic)))) {
        Ok(()) => INSTEP_OK,
        Err(fault) => {
            let text = CString::new(fault.text.replace('\0', "\\0")).unwrap_or_default();
            // A thread that is ending may have dropped its text already.
            let _ = LAST_ERROR.try_with(|last| last.try_borrow_mut().map(|mut last| *last = text));
            fault.status
        }
    }
}

/// Runs a callback. Until the callback returns, [`call`] refuses every call on this thread.
pub(crate) fn in_callback<T>(callback: impl FnOnce() -> T) -> T {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            let _ = IS_IN_CALLBACK.try_with(|flag| flag.set(self.0));
        }
    }
    let _restore = Restore(IS_IN_CALLBACK.try_with(|flag| flag.replace(true)).unwrap_or_default());
    callback()
}

fn refuse_callback() -> Result<()> {
    if IS_IN_CALLBACK.try_with(Cell::get).unwrap_or_default() {
        let text = "library: called by a callback, which the library waits for; call it after the callback has returned";
        return Err(Fault::new(INSTEP_BUSY, text));
    }
    Ok(())
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
    format!("instep: panicked with `{}`; report it", text.unwrap_or("no text"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    fn last_error() -> String {
        // SAFETY: the text ends in a zero byte, and is valid until the next failure of this thread.
        unsafe { CStr::from_ptr(instep_last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_becomes_a_status_with_its_text() {
        assert_eq!(call(|| panic!("broken {}", 7)), INSTEP_PANIC);
        assert_eq!(last_error(), "instep: panicked with `broken 7`; report it");
    }

    #[test]
    fn a_success_leaves_the_last_error_of_this_thread_and_other_threads_have_their_own() {
        assert_eq!(call(|| Err(Fault::new(INSTEP_BUSY, "one\0two"))), INSTEP_BUSY);
        assert_eq!(call(|| Ok(())), INSTEP_OK);
        assert_eq!(last_error(), "one\\0two");
        std::thread::spawn(|| assert_eq!(last_error(), "")).join().unwrap();
    }

    #[test]
    fn calls_are_refused_until_the_outermost_callback_has_returned() {
        in_callback(|| {
            in_callback(|| assert_eq!(call(|| Ok(())), INSTEP_BUSY));
            assert_eq!(call(|| Ok(())), INSTEP_BUSY);
        });
        assert_eq!(call(|| Ok(())), INSTEP_OK);
    }
}
