//! The GPU of tests that run on either: the real one with `INSTEP_REQUIRE_GPU=1`, else a stand-in for its driver.
//!
//! It depends on `hardware` and `stand_in`. With `INSTEP_HOST_RUN` the stand-in runs the kernels' own source on fibers.

use instep::cuda::Cuda;

use super::hardware;
use super::stand_in::{COMPUTE, StandIn};

/// Returns the real device if it is asked for, else a stand-in.
pub(crate) fn cuda() -> Cuda {
    if hardware::is_required() {
        return hardware::open();
    }
    let fibers = std::env::var_os("INSTEP_HOST_RUN").is_some();
    let driver = if fibers { StandIn::with_fibers() } else { StandIn::new() };
    Cuda::on(driver).compute_stream(COMPUTE)
}
