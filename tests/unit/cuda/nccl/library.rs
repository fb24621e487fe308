//! Tests of how NCCL's library is found, in builds with and without CUDA.
//!
//! An error names each place where the library was looked for.

use super::*;

fn refusal(named: Option<&str>) -> String {
    match Library::find(named.map(OsString::from)) {
        Err(Error::NcclUnavailable { why }) => why,
        Err(other) => panic!("{other}"),
        Ok(library) => panic!("found {}", library.version),
    }
}

#[test]
fn a_library_that_is_named_and_not_there_or_not_nccl_is_refused_by_name() {
    let why = refusal(Some("/nowhere/libnccl.so.2"));
    assert!(why.starts_with("INSTEP_NCCL=/nowhere/libnccl.so.2: "), "{why}");
    let why = refusal(Some("libc.so.6"));
    let expected = if cfg!(feature = "cuda") { "no ncclGetVersion" } else { "rebuild with" };
    assert!(why.contains(expected), "{why}");
}

#[test]
fn a_machine_without_the_library_is_told_what_was_tried() {
    match Library::find(None) {
        Ok(library) => assert!(library.version >= OLDEST),
        Err(Error::NcclUnavailable { why }) if cfg!(feature = "cuda") => {
            for tried in ["this process", "libnccl.so.2: ", "libnccl.so: ", "No such file", "INSTEP_NCCL"] {
                assert!(why.contains(tried), "{why}");
            }
        }
        Err(Error::NcclUnavailable { why }) => assert!(why.contains("--features cuda"), "{why}"),
        Err(other) => panic!("{other}"),
    }
}
