//! Tests of the builds of the host's kernels, one for each instruction set.
//!
//! Each build passes its own self-test, and its entries do not depend on the thread's floating-point environment.

use super::*;

#[test]
fn every_available_build_keeps_the_contract_and_has_all_entries() {
    for isa in Isa::available() {
        let table = Kernels::load(isa).unwrap().table;
        assert!(table.begin.is_some() && table.decide.is_some() && table.norm.is_some());
        assert!(table.step.is_some() && table.custom.is_some() && table.sum.is_some());
        assert!(table.narrow.is_some() && table.widen.is_some() && table.ceiling.is_some());
        assert!(table.decode.is_some() && table.encode.is_some());
    }
}

/// Elsewhere kernels run on other threads, so only a direct call shows whether an entry restores the IEEE
/// environment.
#[test]
#[cfg(target_arch = "x86_64")]
fn an_entry_computes_in_the_ieee_environment_and_restores_the_callers() {
    use std::arch::asm;
    const FLUSH_AND_ZERO: u32 = 0x9fc0;
    for isa in Isa::available() {
        let kernels = Kernels::load(isa).unwrap();
        let (mut one, mut two) = ([f32::from_bits(1); 64], [f32::from_bits(2); 64]);
        let (mut halves, mut wide) = ([0u16; 64], [0f32; 64]);
        let (mut saved, mut after) = (0u32, 0u32);
        // SAFETY: MXCSR is saved and restored; the buffers are 64 long and belong to this thread.
        unsafe {
            asm!("stmxcsr [{}]", in(reg) &mut saved);
            asm!("ldmxcsr [{}]", in(reg) &FLUSH_AND_ZERO);
            kernels.sum(&[one.as_mut_ptr().cast(), two.as_mut_ptr().cast()], DType::F32, 0, 64);
            // The values are scaled by 2^18, so three units of 2^-149 become three units of 2^-131, which is 12
            // units of a bf16 subnormal (2^-133).
            kernels.narrow(&one, &mut halves, DType::BF16, 262_144.0);
            kernels.widen(&halves, &mut wide, DType::BF16, 0.5);
            asm!("stmxcsr [{}]", in(reg) &mut after);
            asm!("ldmxcsr [{}]", in(reg) &saved);
        }
        assert_eq!(after & 0xffc0, FLUSH_AND_ZERO, "{isa}: the caller's control bits");
        assert!(one.iter().chain(&two).all(|x| x.to_bits() == 3), "{isa}: subnormals are added, not flushed");
        assert!(halves.iter().all(|x| *x == 12), "{isa}: subnormals are rounded, not flushed");
        assert!(wide.iter().all(|x| x.to_bits() == 6 << 16), "{isa}: subnormals are widened, not flushed");
    }
}

#[test]
fn an_unknown_name_is_refused() {
    assert!(matches!("sse9".parse::<Isa>(), Err(Error::Config { field: "isa", .. })));
}
