//! The kernels' C tables as they are linked, for tests that call an entry directly.
//!
//! The crate's own table is private, because it checks the kernels and the CPU first. Only available instruction sets
//! may be asked for.
#![allow(unsafe_code)]

use instep::Isa;
use instep::abi::InstepKernels;

unsafe extern "C" {
    static instep_kernels_baseline: InstepKernels;
    #[cfg(target_arch = "x86_64")]
    static instep_kernels_avx2: InstepKernels;
    #[cfg(target_arch = "x86_64")]
    static instep_kernels_avx512: InstepKernels;
}

pub(crate) fn kernels(isa: Isa) -> &'static InstepKernels {
    assert!(isa.is_available(), "{isa} cannot run here");
    // SAFETY: constants of the linked objects.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &instep_kernels_avx512,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &instep_kernels_avx2,
            _ => &instep_kernels_baseline,
        }
    }
}
