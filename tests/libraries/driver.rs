//! Drivers that are older or newer than the crate's list of functions: sufficient drivers are used, and others are
//! refused by name.
//!
//! The stand-in of `tests/support` replaces the calls to the driver; these tests check the calls themselves.

use std::path::Path;

use instep::cuda::{Cuda, device_count};
use instep::{Error, StreamHandle};

use crate::{alone, compile, compile_as};

const STREAM: StreamHandle = StreamHandle(0x10);

/// Runs a test's body in a process whose driver is compiled with these definitions.
fn with_driver(defines: &[&str], body: impl FnOnce()) {
    alone(|folder| vec![("INSTEP_CUDA", compile("cuda.c", defines, folder))], body);
}

/// Returns the time between two events as the driver reports it, in milliseconds.
fn elapsed_ms() -> f64 {
    let cuda = Cuda::open(0).unwrap();
    let driver = cuda.driver();
    let entered = driver.enter().unwrap();
    let [from, to] = [(); 2].map(|()| driver.create_event(true).unwrap());
    // SAFETY: the driver's own events.
    let elapsed = unsafe { driver.elapsed_ns(from, to).unwrap() };
    if entered {
        driver.leave();
    }
    elapsed / 1e6
}

/// Returns why there is no usable driver.
fn refusal() -> String {
    match device_count() {
        Err(Error::DriverUnavailable { why }) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_driver_before_cuda_12_8_times_events_by_the_older_function() {
    with_driver(&["ELAPSED_V1"], || assert_eq!(elapsed_ms(), 1.0));
}

#[test]
fn a_driver_that_has_both_functions_uses_the_newer_one() {
    with_driver(&["ELAPSED_V1", "ELAPSED_V2"], || assert_eq!(elapsed_ms(), 2.0));
}

#[test]
fn a_driver_with_only_the_newer_function_serves() {
    with_driver(&["ELAPSED_V2"], || {
        assert_eq!(elapsed_ms(), 2.0);
    });
}

#[test]
fn a_driver_without_a_function_is_refused_by_its_name_and_the_version_that_has_it() {
    with_driver(&[], || {
        let why = refusal();
        assert!(why.starts_with("INSTEP_CUDA=/"), "{why}");
        let rest = "of CUDA 12.2, has no cuEventElapsedTime, which every driver since CUDA 12.0 has";
        assert!(why.ends_with(rest), "{why}");
        assert_eq!(refusal(), why, "asked again");
        assert!(matches!(Cuda::open(0), Err(Error::DriverUnavailable { .. })));
    });
}

#[test]
fn a_driver_without_stream_ordered_memory_is_refused_by_the_functions_name() {
    with_driver(&["ELAPSED_V1", "NO_POOLS"], || {
        let why = refusal();
        assert!(why.contains("has no cuMemPoolCreate, which every driver since CUDA 12.0 has"), "{why}");
    });
}

#[test]
fn an_answer_that_no_list_has_is_an_error_with_call_and_number() {
    with_driver(&["ELAPSED_V1", "QUERY=99999"], || {
        let cuda = Cuda::open(0).unwrap();
        let driver = cuda.driver();
        let entered = driver.enter().unwrap();
        let event = driver.create_event(false).unwrap();
        // SAFETY: the driver's own event.
        let error = unsafe { driver.is_passed(event) }.unwrap_err();
        if entered {
            driver.leave();
        }
        assert!(matches!(&error, Error::Device { call: "cuEventQuery", code: 99999, .. }), "{error}");
        assert_eq!(
            error.to_string(),
            "cuEventQuery: failed with a code that the driver does not name (99999)"
        );
    });
}

#[test]
fn an_answer_that_the_driver_names_is_an_error_with_that_name_and_work_in_progress_is_none() {
    with_driver(&["ELAPSED_V1", "QUERY=600"], || {
        let cuda = Cuda::open(0).unwrap();
        let driver = cuda.driver();
        let entered = driver.enter().unwrap();
        let event = driver.create_event(false).unwrap();
        // SAFETY: the driver's own event; the streams are numbers to it.
        unsafe {
            driver.record(event, STREAM).unwrap();
            let error = driver.record(event, StreamHandle::default()).unwrap_err();
            let named = "cuEventRecord: failed with CUDA_ERROR_ILLEGAL_ADDRESS (700)";
            assert_eq!(error.to_string(), named);
            assert!(!driver.is_passed(event).unwrap());
        }
        if entered {
            driver.leave();
        }
    });
}

#[test]
fn a_driver_that_does_not_start_is_refused_with_its_answer() {
    with_driver(&["ELAPSED_V1", "INIT=99999"], || {
        let why = refusal();
        assert!(why.starts_with("cuInit: ") && why.ends_with("(99999)"), "{why}");
    });
}

#[test]
fn a_file_that_is_named_and_not_there_is_refused_with_the_loaders_reason() {
    alone(
        |_| vec![("INSTEP_CUDA", "/nowhere/libcuda.so.1".into())],
        || {
            let why = refusal();
            assert!(why.starts_with("INSTEP_CUDA=/nowhere/libcuda.so.1: "), "{why}");
        },
    );
}

#[test]
fn a_named_driver_is_refused_where_cudarc_finds_another() {
    let prepare = |folder: &Path| {
        let named = folder.join("named.so");
        compile_as("named.so", "cuda.c", &["ELAPSED_V1"], &named);
        compile("cuda.c", &["ELAPSED_V1"], folder);
        vec![("INSTEP_CUDA", named), ("LD_LIBRARY_PATH", folder.to_owned())]
    };
    alone(prepare, || {
        let why = refusal();
        assert!(why.starts_with("INSTEP_CUDA=/"), "{why}");
        assert!(why.contains("named.so is not the driver that cudarc finds"), "{why}");
        assert!(why.contains("libcuda.so"), "{why}");
    });
}

#[test]
fn a_named_driver_is_refused_where_cudarc_would_find_none() {
    let prepare = |folder: &Path| {
        let named = folder.join("named.so");
        compile_as("named.so", "cuda.c", &["ELAPSED_V1"], &named);
        vec![("INSTEP_CUDA", named)]
    };
    alone(prepare, || {
        let why = refusal();
        assert!(why.contains("named.so is not the driver that cudarc finds"), "{why}");
    });
}

#[test]
fn a_named_driver_serves_by_either_name_inside_it_before_one_of_the_librarys_path() {
    for name in ["libcuda.so", "libcuda.so.1"] {
        let prepare = |folder: &Path| {
            let named = folder.join("named.so");
            compile_as(name, "cuda.c", &["ELAPSED_V2"], &named);
            let other = folder.join("libcuda.so.1");
            compile_as("libcuda.so.1", "cuda.c", &["ELAPSED_V1"], &other);
            vec![("INSTEP_CUDA", named), ("LD_LIBRARY_PATH", folder.to_owned())]
        };
        alone(prepare, || assert_eq!(elapsed_ms(), 2.0));
    }
}

#[test]
fn without_a_named_driver_the_librarys_path_is_searched_and_what_a_driver_lacks_is_still_an_error() {
    let prepare = |folder: &Path| {
        compile("cuda.c", &["ELAPSED_V1", "NO_POOLS"], folder);
        vec![("LD_LIBRARY_PATH", folder.to_owned())]
    };
    alone(prepare, || {
        let why = refusal();
        let text = "libcuda.so, of CUDA 12.2, has no cuMemPoolCreate, which every driver since CUDA 12.0 has";
        assert_eq!(why, text);
    });
}

#[test]
fn a_program_whose_cudarc_has_found_a_driver_uses_the_same() {
    with_driver(&["ELAPSED_V1", "ELAPSED_V2"], || {
        assert_eq!(device_count().unwrap(), 1);
        assert_eq!(instep::cuda::cudarc::driver::CudaContext::device_count().unwrap(), 1);
    });
}
