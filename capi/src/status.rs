//! Status codes. A code tells a C program which kind of error occurred.
//!
//! Each variant of `instep::Error` has one code. Codes keep their numbers in all later versions. New codes come last.

use instep::Error;

use crate::words::in_c;

/// The outcome of a call. INSTEP_OK is 0. Any other value is a failure, which instep_last_error describes. Later
/// versions may add codes, but do not change the numbers of existing codes.
pub type instep_status = i32;

/// The call succeeded.
pub const INSTEP_OK: instep_status = 0;
/// A pointer is null but must not be null. Nothing has changed.
pub const INSTEP_NULL: instep_status = 1;
/// A handle was freed, is of another kind, or never came from this library. Nothing has changed.
pub const INSTEP_HANDLE: instep_status = 2;
/// Another thread is in a call on the same handle, or the call was made by a callback. Nothing has changed; call again.
pub const INSTEP_BUSY: instep_status = 3;
/// This process was forked from a process that uses the library, and does not have the library's threads. Nothing has
/// changed.
pub const INSTEP_FORKED: instep_status = 4;
/// An integer has no meaning, a text is not UTF-8, a length is wrong, or a struct has a wrong size. Nothing has
/// changed.
pub const INSTEP_ARGUMENT: instep_status = 5;
/// An option or hyperparameter is out of range, or two options exclude each other. Nothing has changed.
pub const INSTEP_CONFIG: instep_status = 6;
/// A parameter or tensor is unknown, named twice, missing, of another length, or misaligned. Nothing has changed.
pub const INSTEP_LAYOUT: instep_status = 7;
/// The call is out of order, for example at the wrong point of a pass. Nothing has changed, except that
/// instep_stepper_free has freed the stepper.
pub const INSTEP_ORDER: instep_status = 8;
/// This machine, this build, or a part such as the collective does not support the call. Nothing has changed.
pub const INSTEP_UNSUPPORTED: instep_status = 9;
/// The GPU kernels, the GPU's driver or its communication library is missing. Nothing has changed.
pub const INSTEP_UNAVAILABLE: instep_status = 10;
/// A call into the GPU's driver failed.
pub const INSTEP_DEVICE: instep_status = 11;
/// A collective failed, ranks differ, a rank is lost, or the deadline has passed.
pub const INSTEP_COLLECTIVE: instep_status = 12;
/// The self-test of the compiled kernels failed, because they do not round as the library requires. Nothing has
/// changed.
pub const INSTEP_ARITHMETIC: instep_status = 13;
/// A checkpoint is damaged, or belongs to another model. The text of instep_last_error says whether anything has
/// changed.
pub const INSTEP_CHECKPOINT: instep_status = 14;
/// A file could not be opened, read or written.
pub const INSTEP_FILE: instep_status = 15;
/// An earlier failure ended this stepper or bucket step. The text of instep_last_error names that failure. Free the
/// handle.
pub const INSTEP_POISONED: instep_status = 16;
/// The library has a bug that caused a panic in this call or in an earlier call on this handle. Free the handle, and
/// report the bug.
pub const INSTEP_PANIC: instep_status = 17;
/// A callback threw a C++ exception, and instep::caught of this header has caught it.
pub const INSTEP_THREW: instep_status = 18;
/// A failure for which this version has no code. The text of instep_last_error describes the failure.
pub const INSTEP_OTHER: instep_status = 19;

/// The names of the codes, in the order of their numbers.
const NAMES: [&std::ffi::CStr; 20] = [
    c"INSTEP_OK",
    c"INSTEP_NULL",
    c"INSTEP_HANDLE",
    c"INSTEP_BUSY",
    c"INSTEP_FORKED",
    c"INSTEP_ARGUMENT",
    c"INSTEP_CONFIG",
    c"INSTEP_LAYOUT",
    c"INSTEP_ORDER",
    c"INSTEP_UNSUPPORTED",
    c"INSTEP_UNAVAILABLE",
    c"INSTEP_DEVICE",
    c"INSTEP_COLLECTIVE",
    c"INSTEP_ARITHMETIC",
    c"INSTEP_CHECKPOINT",
    c"INSTEP_FILE",
    c"INSTEP_POISONED",
    c"INSTEP_PANIC",
    c"INSTEP_THREW",
    c"INSTEP_OTHER",
];

/// Returns the name of a code.
pub(crate) fn name(status: instep_status) -> &'static std::ffi::CStr {
    usize::try_from(status).ok().and_then(|index| NAMES.get(index)).copied().unwrap_or(c"unknown status")
}

/// The status and the text of a call that failed.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(crate) status: instep_status,
    pub(crate) text: String,
}

pub(crate) type Result<T, E = Fault> = std::result::Result<T, E>;

impl Fault {
    pub(crate) fn new(status: instep_status, text: impl ToString) -> Fault {
        Fault { status, text: text.to_string() }
    }

    /// Returns a fault that reports a wrong argument. Its text is `<thing>: <what is wrong>; <what to do>`.
    pub(crate) fn argument(
        thing: &str,
        wrong: impl std::fmt::Display,
        remedy: impl std::fmt::Display,
    ) -> Fault {
        Fault::new(INSTEP_ARGUMENT, format_args!("{thing}: {wrong}; {remedy}"))
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Fault {
        Fault::new(code(&error), in_c(error.to_string()))
    }
}

fn code(error: &Error) -> instep_status {
    match error {
        Error::Config { .. } => INSTEP_CONFIG,
        Error::Layout(_) => INSTEP_LAYOUT,
        Error::Order(_) => INSTEP_ORDER,
        Error::Unsupported(_) => INSTEP_UNSUPPORTED,
        Error::KernelsNotBuilt { .. } | Error::DriverUnavailable { .. } | Error::NcclUnavailable { .. } => {
            INSTEP_UNAVAILABLE
        }
        Error::Device { .. } => INSTEP_DEVICE,
        Error::Collective { .. }
        | Error::Hook(_)
        | Error::Mismatch { .. }
        | Error::LeftPass { .. }
        | Error::PeerLost { .. }
        | Error::Deadline { .. }
        | Error::Rank { .. } => INSTEP_COLLECTIVE,
        Error::Arithmetic { .. } => INSTEP_ARITHMETIC,
        Error::Checkpoint(_) | Error::PartlyLoaded { .. } => INSTEP_CHECKPOINT,
        Error::File { .. } => INSTEP_FILE,
        Error::Poisoned { .. } => INSTEP_POISONED,
        _ => INSTEP_OTHER,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_the_name_of_its_constant() {
        let source = include_str!("status.rs");
        let mut checked = 0;
        for line in source.lines().filter_map(|line| line.strip_prefix("pub const ")) {
            let (constant, value) = line.split_once(": instep_status = ").unwrap();
            let value = value.trim_end_matches(';').parse().unwrap();
            assert_eq!(name(value).to_str().unwrap(), constant);
            checked += 1;
        }
        assert_eq!(checked, NAMES.len());
        assert_eq!(name(-1), c"unknown status");
        assert_eq!(name(20), c"unknown status");
    }
}
