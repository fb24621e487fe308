//! Checks and converts arguments from C: structs that may be of another version, lists, texts, and addresses for
//! results.
//!
//! Each error names its argument. The library cannot check that a pointer points to as many bytes as the header
//! requires. The caller must guarantee that length for every pointer that is not null.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;
use std::ptr::NonNull;

use crate::status::{Fault, INSTEP_NULL, Result};

/// A struct of the header that begins with its size, so that later versions may add fields at its end.
///
/// # Safety
/// The struct is `repr(C)` and has no padding. Its first field is `size: usize`. A struct with zeros in all bytes is
/// valid.
pub(crate) unsafe trait Growing: Copy {
    /// The struct's name in the header.
    const NAME: &'static str;
}

/// The largest size, in bytes, that a struct may have in any version. A larger size means that the struct was not
/// initialised, so the struct is refused.
const LARGEST: usize = 4096;

/// Reads a struct of any version. Fields that the caller's version lacks become zeros, which stand for defaults. If the
/// caller's version has more fields than the library's version, the additional fields must be zeros. Otherwise the
/// struct is refused.
///
/// # Safety
/// `from` is null, or points to a struct. At least the first field exists, and the struct has as many bytes as this
/// field says.
pub(crate) unsafe fn read<T: Growing>(from: *const T) -> Result<T> {
    if from.is_null() {
        return Err(null(T::NAME));
    }
    // SAFETY: guaranteed by the caller. The address may be misaligned, so this reads unaligned.
    let size = unsafe { from.cast::<usize>().read_unaligned() };
    let known = size_of::<T>();
    if size <= size_of::<usize>() || size > LARGEST || !size.is_multiple_of(align_of::<T>()) {
        let remedy = format_args!("set it to sizeof({})", T::NAME);
        return Err(Fault::argument(T::NAME, format_args!("its size is {size}"), remedy));
    }
    // SAFETY: guaranteed by the caller.
    let given = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), size) };
    if given[known.min(size)..].iter().any(|byte| *byte != 0) {
        let wrong = format_args!("its size is {size}, and fields after the {known}th byte are set");
        return Err(Fault::argument(T::NAME, wrong, "leave them zero, or use a newer library"));
    }
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: both sides have `size.min(known)` bytes. By the trait's contract, zeros overwritten with the caller's
    // fields are a valid value.
    Ok(unsafe {
        value.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(given.as_ptr(), size.min(known));
        value.assume_init()
    })
}

/// Does the same as [`read`], but returns `None` if `from` is null.
///
/// # Safety
/// `from` meets the conditions of [`read`].
pub(crate) unsafe fn read_any<T: Growing>(from: *const T) -> Result<Option<T>> {
    // SAFETY: guaranteed by the caller.
    if from.is_null() { Ok(None) } else { unsafe { read(from) }.map(Some) }
}

/// Writes a result to a struct of any version. Only the fields that fit into the caller's size are written.
///
/// # Safety
/// `to` is null, or points to a struct. At least the first field exists, and the struct has as many bytes as this field
/// says. Nothing else touches the struct.
pub(crate) unsafe fn write_growing<T: Growing>(to: *mut T, value: T) -> Result<()> {
    // SAFETY: guaranteed by the caller.
    unsafe {
        read(to.cast_const())?;
        let (first, given) = (size_of::<usize>(), to.cast::<usize>().read_unaligned());
        let from = std::ptr::from_ref(&value).cast::<u8>().add(first);
        to.cast::<u8>().add(first).copy_from_nonoverlapping(from, given.min(size_of::<T>()) - first);
    }
    Ok(())
}

/// Returns a list from C as a slice. `first` may be null if the list is empty.
///
/// # Safety
/// `first` is null, or points to `count` initialised elements that do not change during `'a`.
pub(crate) unsafe fn list<'a, T>(first: *const T, count: usize, name: &str) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    refuse_odd(first, count, name)?;
    // SAFETY: guaranteed by the caller and by the checks above.
    Ok(unsafe { std::slice::from_raw_parts(first, count) })
}

/// Returns a list from C as a mutable slice. `first` may be null if the list is empty.
///
/// # Safety
/// `first` meets the conditions of [`list`], and no other code accesses the elements during `'a`.
pub(crate) unsafe fn list_mut<'a, T>(first: *mut T, count: usize, name: &str) -> Result<&'a mut [T]> {
    if count == 0 {
        return Ok(&mut []);
    }
    refuse_odd(first, count, name)?;
    // SAFETY: guaranteed by the caller and by the checks above.
    Ok(unsafe { std::slice::from_raw_parts_mut(first, count) })
}

/// Returns a text from C.
///
/// # Safety
/// `text` is null, or points to bytes that end in a zero and do not change during `'a`.
pub(crate) unsafe fn text<'a>(text: *const c_char, name: &str) -> Result<&'a str> {
    if text.is_null() {
        return Err(null(name));
    }
    // SAFETY: guaranteed by the caller.
    let bytes = unsafe { CStr::from_ptr(text) };
    bytes.to_str().map_err(|_| Fault::argument(name, "not UTF-8", "encode it so"))
}

/// The address to which a result is written.
pub(crate) struct Out<T>(NonNull<T>);

impl<T> Out<T> {
    /// # Safety
    /// `place` is null, or valid for writing one `T` until the call ends.
    pub(crate) unsafe fn new(place: *mut T, name: &str) -> Result<Out<T>> {
        refuse_odd(place, 1, name)?;
        NonNull::new(place).map(Out).ok_or_else(|| null(name))
    }

    /// Does the same as [`new`](Self::new), but returns `None` if `place` is null.
    ///
    /// # Safety
    /// `place` meets the conditions of [`new`](Self::new).
    pub(crate) unsafe fn optional(place: *mut T, name: &str) -> Result<Option<Out<T>>> {
        // SAFETY: guaranteed by the caller.
        if place.is_null() { Ok(None) } else { unsafe { Out::new(place, name) }.map(Some) }
    }

    pub(crate) fn put(self, value: T) {
        // SAFETY: the address is valid by the contract of `new`, which has checked its alignment.
        unsafe { self.0.write(value) }
    }
}

fn refuse_odd<T>(first: *const T, count: usize, name: &str) -> Result<()> {
    if first.is_null() {
        return Err(null(name));
    }
    if !first.is_aligned() {
        let remedy = format_args!("align it to {} bytes", align_of::<T>());
        return Err(Fault::argument(name, format_args!("{first:p} is misaligned"), remedy));
    }
    if count.checked_mul(size_of::<T>().max(1)).is_none_or(|bytes| bytes > isize::MAX as usize) {
        return Err(Fault::argument(
            name,
            format_args!("{count} elements fit no memory"),
            "correct the count",
        ));
    }
    Ok(())
}

fn null(name: &str) -> Fault {
    Fault::new(INSTEP_NULL, format_args!("{name}: null; pass an address"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::INSTEP_ARGUMENT;

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Old {
        size: usize,
        first: u64,
    }

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct New {
        size: usize,
        first: u64,
        second: u64,
    }

    // SAFETY: all fields are numbers, for which zeros are valid.
    unsafe impl Growing for Old {
        const NAME: &'static str = "options";
    }
    // SAFETY: all fields are numbers, for which zeros are valid.
    unsafe impl Growing for New {
        const NAME: &'static str = "options";
    }

    fn as_new(old: &Old) -> Result<New> {
        // SAFETY: the first field of the struct is its own size.
        unsafe { read(std::ptr::from_ref(old).cast()) }
    }

    fn as_old(new: &New) -> Result<Old> {
        // SAFETY: the first field of the struct is its own size.
        unsafe { read(std::ptr::from_ref(new).cast()) }
    }

    #[test]
    fn fields_that_an_older_caller_lacks_are_zeros() {
        let new = as_new(&Old { size: 16, first: 7 }).unwrap();
        assert_eq!(new, New { size: 16, first: 7, second: 0 });
    }

    #[test]
    fn fields_of_a_newer_caller_are_refused_unless_they_are_zeros() {
        assert_eq!(as_old(&New { size: 24, first: 7, second: 0 }).unwrap(), Old { size: 24, first: 7 });
        let fault = as_old(&New { size: 24, first: 7, second: 1 << 63 }).unwrap_err();
        assert_eq!(fault.status, INSTEP_ARGUMENT);
        assert!(fault.text.starts_with("options: its size is 24, and fields after the 16th byte are set;"));
    }

    #[test]
    fn sizes_that_no_version_has_are_refused() {
        for size in [0, 1, 8, 12, 17, 4104, usize::MAX - 7] {
            let fault = as_new(&Old { size, first: 7 }).unwrap_err();
            assert_eq!(fault.text, format!("options: its size is {size}; set it to sizeof(options)"));
        }
    }

    #[test]
    fn null_odd_and_endless_lists_are_refused_and_empty_ones_may_be_null() {
        let numbers = [1u32, 2];
        let status = |first, count| {
            // SAFETY: a count beyond two is refused before anything is read.
            unsafe { list::<u32>(first, count, "numbers") }
                .map_or_else(|fault| fault.status, |list| list[0] as i32)
        };
        assert_eq!(status(numbers.as_ptr(), 2), 1);
        assert_eq!(status(std::ptr::null(), 2), INSTEP_NULL);
        assert_eq!(status(numbers.as_ptr(), usize::MAX / 2), INSTEP_ARGUMENT);
        assert_eq!(status(numbers.as_ptr().wrapping_byte_add(1), 1), INSTEP_ARGUMENT);
        // SAFETY: nothing is read.
        assert!(unsafe { list::<u32>(std::ptr::null(), 0, "numbers") }.unwrap().is_empty());
    }
}
