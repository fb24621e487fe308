//! Conversions to and from 16 bits on a GPU equal those on the CPU, for every value.
//!
//! The kernels use the GPU's instructions where the CPU computes with integers (`kernels/numeric/math.h`). `compare.cu`
//! compares both, and checks stochastic rounding and split masters against their definitions. It tries all inputs: 2^32
//! f32 and 2^16 f16. A conversion from bf16 only shifts on either device.

use std::path::PathBuf;

use crate::support::hardware::Kernels;

#[repr(C)]
struct CompareArgs {
    differences: *mut u64,
    first: u64,
    count: u64,
}

const KINDS: [&str; 7] = [
    "f32 to bf16",
    "f32 to f16",
    "f16 to f32",
    "f32 to bf16 by an even chance",
    "f32 to 24 bits by an even chance",
    "f32 through bf16 and a 16-bit remainder",
    "24 bits through bf16 and an 8-bit remainder",
];

#[test]
#[ignore = "benches/gpu/run.sh runs it: needs a GPU and what scripts/gpu-bundle.sh compiles"]
fn every_f32_becomes_the_cpus_bf16_and_f16_and_every_f16_its_f32() {
    let path = PathBuf::from(std::env::var_os("INSTEP_GPU_CONVERSIONS").expect("scripts/gpu-bundle.sh"));
    let kernels = Kernels::load(Some(&std::fs::read(path).unwrap()));
    // Counts, then lowest inputs.
    let mut found = kernels.words(0, 2 * KINDS.len());
    found[KINDS.len()..].fill(u64::MAX);
    let args = CompareArgs { differences: found.as_mut_ptr(), first: 0, count: 1 << 32 };
    // SAFETY: the kernel's struct, with that many words at an address that the GPU can reach.
    unsafe { kernels.launch(c"instep_compare_conversions", &args, 4096, 256) };
    for (kind, name) in KINDS.into_iter().enumerate() {
        let (count, lowest) = (found[kind], found[KINDS.len() + kind]);
        println!("{name}: {count} differences");
        assert_eq!(count, 0, "{name} differs, first for the bits {lowest:#x}");
    }
}
