//! Planted faults: each must be an error with the right name, thread and line.
//!
//! Every seed must find it.

use software_gpu_ptx::{Error, Fault, Module, What};

use crate::arena::Arena;
use crate::launches::{kernel, run};

/// Runs eight seeds, asserts that they find the same kind of fault, and returns the faults.
fn faults(body: &str, threads: u32) -> Vec<Fault> {
    let one = |seed| match run(&kernel(body), (1, threads), &mut Arena::of(vec![0; 1024]), seed) {
        Err(Error::Fault(fault)) => *fault,
        other => panic!("{other:?}"),
    };
    (0..8).map(one).collect()
}

const SWAP: &str = ".shared .align 4 .b8 s[1024];
mov.u32 %r2, s; shl.b32 %r3, %r1, 2; add.s32 %r4, %r2, %r3; st.shared.u32 [%r4], %r1;
BARRIER
xor.b32 %r5, %r3, 128; add.s32 %r6, %r2, %r5; ld.shared.u32 %r8, [%r6]; st.global.u32 [%rd3], %r8;";

#[test]
fn a_missing_barrier_is_a_race() {
    let body = SWAP.replace("BARRIER", "bar.sync 0; add.s32 %r9, %r1, 1; st.shared.u32 [%r4], %r9; BARRIER");
    run(&kernel(&body.replace("BARRIER", "bar.sync 0;")), (1, 64), &mut Arena::of(vec![0; 256]), 1).unwrap();
    for fault in faults(&body.replace("BARRIER", ""), 64) {
        assert!(matches!(fault.what, What::Race { space: "shared", .. }), "{fault}");
    }
    // Without any barrier, a thread may even come before the first value.
    for fault in faults(&SWAP.replace("BARRIER", ""), 64) {
        assert!(matches!(fault.what, What::Race { .. } | What::UninitialisedShared), "{fault}");
    }
}

#[test]
fn a_missing_barrier_of_the_warp_is_a_race() {
    let body = SWAP.replace("%r3, 128", "%r3, 4");
    run(&kernel(&body.replace("BARRIER", "bar.warp.sync -1;")), (1, 64), &mut Arena::of(vec![0; 256]), 1)
        .unwrap();
    for fault in faults(&body.replace("BARRIER", ""), 64) {
        assert!(matches!(fault.what, What::Race { space: "shared", .. }), "{fault}");
    }
}

#[test]
fn threads_of_several_blocks_or_warps_race_in_global_memory() {
    let race = |body: &str, grid, threads| match run(
        &kernel(body),
        (grid, threads),
        &mut Arena::of(vec![0; 1024]),
        1,
    ) {
        Err(Error::Fault(fault)) if matches!(fault.what, What::Race { space: "global", .. }) => true,
        Ok(_) => false,
        other => panic!("{body}: {other:?}"),
    };
    let store = "mov.u32 %r9, %ctaid.x; add.s32 %r9, %r9, %r1; st.global.u32 [%rd3], %r9;";
    assert!(!race(store, 1, 256) && race(store, 2, 1));
    let shift = |barrier: &str, bytes: u32| format!("{store} {barrier} ld.global.u32 %r2, [%rd3+{bytes}];");
    assert!(race(&shift("", 128), 1, 64) && !race(&shift("bar.sync 0;", 128), 1, 64));
    assert!(race(&shift("bar.warp.sync -1;", 128), 1, 64) && !race(&shift("bar.warp.sync -1;", 4), 1, 32));
    assert!(race(&shift("", 4), 1, 32) && !race(&shift("", 0), 1, 64));
    assert!(!race("ld.global.u32 %r2, [%rd1];", 9, 64) && race("st.global.u32 [%rd1], %r1;", 1, 2));
    assert!(!race("st.global.u32 [%rd1], 7;", 9, 64));
    let atomic = "atom.global.add.u32 %r2, [%rd1], 1;";
    assert!(!race(atomic, 9, 64) && race(&format!("{atomic} ld.global.u32 %r3, [%rd1];"), 2, 32));
}

#[test]
fn a_store_beside_the_allocation_names_thread_line_and_address() {
    for fault in faults("add.s64 %rd4, %rd3, 1020; st.global.u32 [%rd4], %r1;", 2) {
        assert_eq!(
            (fault.thread, fault.line, fault.address),
            ([1, 0, 0], 11, Some(0x7f00_0000_1400)),
            "{fault}"
        );
        assert_eq!(fault.what, What::Memory("beside every allocation".to_owned()));
        assert_eq!(fault.kernel, "k");
    }
}

#[test]
fn shared_memory_has_bounds_alignment_and_a_first_write() {
    let access =
        |end: &str| format!(".shared .align 4 .b8 s[8]; .shared .align 4 .b8 t[8]; mov.u32 %r2, s; {end}");
    let what = |end: &str| faults(&access(end), 1)[0].what.clone();
    assert_eq!(what("st.shared.u32 [%r2+8], %r1;"), What::OutOfBounds("shared"));
    assert_eq!(what("st.shared.u32 [%r2+-4], %r1;"), What::OutOfBounds("shared"));
    assert_eq!(what("st.shared.u32 [%r2+2], %r1;"), What::Misaligned(4));
    assert_eq!(what("ld.shared.u32 %r3, [%r2];"), What::UninitialisedShared);
}

#[test]
fn a_register_that_only_some_lanes_wrote_is_named() {
    let body = "setp.eq.u32 %p1, %r1, 5; @%p1 bra $skip; mov.u32 %r7, 1; $skip: add.s32 %r8, %r7, 1;";
    for fault in faults(body, 32) {
        assert_eq!(fault.what, What::UninitialisedRegister("%r7".to_owned()));
        assert_eq!(fault.thread, [5, 0, 0]);
    }
}

#[test]
fn barriers_that_not_all_meet_are_divergent() {
    for part in ["16", "32"] {
        let body = format!(
            "setp.lt.u32 %p1, %r1, {part}; @%p1 bra $skip; bar.sync 0; $skip: st.global.u32 [%rd3], %r1;"
        );
        for fault in faults(&body, 64) {
            assert!(matches!(fault.what, What::BarrierDivergence(_)), "{fault}");
        }
    }
    let body = "setp.lt.u32 %p1, %r1, 16; @%p1 bra $skip; bar.warp.sync -1; $skip: bar.sync 0;";
    assert!(matches!(faults(body, 64)[0].what, What::BarrierDivergence(_)));
}

#[test]
fn a_copy_that_nobody_waited_for_is_in_flight() {
    let body = ".shared .align 4 .b8 s[512]; mov.u32 %r2, s; shl.b32 %r3, %r1, 2; add.s32 %r4, %r2, %r3;
cp.async.ca.shared.global [%r4], [%rd3], 4, 4; cp.async.commit_group; ld.shared.u32 %r5, [%r4];";
    assert!(faults(body, 32).iter().all(|fault| fault.what == What::CopyInFlight));
    let body = body.replace("ld.shared.u32 %r5, [%r4];", "");
    assert!(faults(&body, 32).iter().all(|fault| fault.what == What::CopyInFlight));
}

#[test]
fn an_unknown_instruction_is_refused_by_name_when_the_text_is_parsed() {
    for opcode in
        ["fma.rn.f32", "add.f32", "add.ftz.f32", "ex2.approx.f32", "setp.lo.u32", "ld.global.v8.f32"]
    {
        let text = kernel(&format!("{opcode} %f1, %f2, %f3;"));
        match Module::parse(&text) {
            Err(Error::UnknownInstruction { opcode: named, line: 11 }) => assert_eq!(named, opcode),
            other => panic!("{opcode}: {other:?}"),
        }
    }
}

#[test]
fn a_division_by_zero_and_a_uniform_branch_that_parts_are_undefined() {
    for body in
        ["rem.u32 %r2, %r1, %r1;", "setp.eq.u32 %p1, %r1, 3; @%p1 bra.uni $end; $end: mov.u32 %r2, 1;"]
    {
        assert!(faults(body, 8).iter().all(|fault| matches!(fault.what, What::Undefined(_))));
    }
}

#[test]
fn a_launch_of_another_shape_or_with_other_parameters_is_refused() {
    let mut arena = Arena::of(vec![0; 16]);
    let refused =
        |shape, arena: &mut Arena| matches!(run(&kernel(""), shape, arena, 0), Err(Error::Launch(_)));
    assert!(refused((1, 257), &mut arena) && refused((0, 32), &mut arena));
    let text = kernel("").replace(".param .u64 k_param_0", ".param .align 8 .b8 k_param_0[16]");
    assert!(matches!(run(&text, (1, 32), &mut arena, 0), Err(Error::Launch(_))));
}
