//! A product of matrices on tensor cores, blocks inside a body, and the clock.
//!
//! Products of small whole numbers are exact, so their order does not matter.

use crate::arena::Arena;
use crate::launches::{kernel, run};

const SIDE: usize = 16;

/// Returns an element from 1 to 7 in an irregular order, exact as bf16.
fn element(seed: usize, row: usize, column: usize) -> f32 {
    ((row * 5 + column * 3 + seed * 7) % 7 + 1) as f32
}

fn bf16(values: impl Iterator<Item = f32>) -> Vec<u8> {
    values.flat_map(|value| (value.to_bits() >> 16).to_le_bytes()[..2].to_vec()).collect()
}

#[test]
fn a_product_of_two_matrices_is_added_to_a_third() {
    let all = |seed| (0..SIDE * SIDE).map(move |k| element(seed, k / SIDE, k % SIDE));
    // `a` in shared memory by its generic address, `b` in global memory; the sums begin with 0 and 1 in turn.
    let body = ".shared .align 16 .b8 s[512];
mov.u32 %r2, s;
{ .reg .b64 %tmp; cvt.u64.u32 %tmp, %r2; cvta.shared.u64 %rd4, %tmp; }
shl.b32 %r3, %r1, 4; add.s32 %r4, %r2, %r3; mul.wide.u32 %rd5, %r1, 16; add.s64 %rd6, %rd1, %rd5;
ld.global.cg.v4.u32 {%r5, %r6, %r7, %r8}, [%rd6]; st.shared.v4.u32 [%r4], {%r5, %r6, %r7, %r8};
bar.sync 0;
{ .reg .b64 %tmp; mov.u64 %tmp, 512; add.s64 %rd7, %rd1, %tmp; }
mov.u32 %r9, 16;
wmma.load.a.sync.aligned.row.m16n16k16.bf16 {%r10, %r11, %r12, %r13}, [%rd4], %r9;
wmma.load.b.sync.aligned.row.m16n16k16.bf16 {%r14, %r15, %r16, %r17}, [%rd7], %r9;
mov.f32 %f0, 0f00000000; mov.f32 %f1, 0f3F800000;
wmma.mma.sync.aligned.row.row.m16n16k16.f32.bf16.bf16.f32 {%r20, %r21, %r22, %r23, %r24, %r25, %r26, %r27},
    {%r10, %r11, %r12, %r13}, {%r14, %r15, %r16, %r17}, {%f0, %f1, %f0, %f1, %f0, %f1, %f0, %f1};
wmma.store.d.sync.aligned.row.m16n16k16.global.f32 [%rd7+512], {%r20, %r21, %r22, %r23, %r24, %r25, %r26, %r27}, %r9;";
    for seed in 0..4 {
        let bytes = [bf16(all(1)), bf16(all(2)), vec![0; 4 * SIDE * SIDE]].concat();
        let mut arena = Arena::of(bytes);
        run(&kernel(body), (1, 32), &mut arena, seed).unwrap();
        for (at, made) in arena.words()[256..].iter().enumerate() {
            let (row, column) = (at / SIDE, at % SIDE);
            let sum: f32 = (0..SIDE).map(|k| element(1, row, k) * element(2, k, column)).sum();
            assert_eq!(f32::from_bits(*made), sum + (column % 2) as f32, "row {row}, column {column}");
        }
    }
}

#[test]
fn a_block_that_hides_a_register_is_refused_by_name() {
    let hidden = kernel("{ .reg .b32 %r<9>; }");
    let changed = kernel("{ .reg .b64 %tmp; mov.u64 %tmp, 0; } { .reg .b32 %tmp; mov.u32 %tmp, 0; }");
    for (text, name) in [(hidden, "%r: "), (changed, "%tmp: ")] {
        let refused = run(&text, (1, 32), &mut Arena::of(vec![0; 4]), 0).unwrap_err().to_string();
        assert!(refused.contains(name), "{refused}");
    }
}

#[test]
fn a_branch_over_a_product_finds_its_label() {
    let body = "mov.u32 %r2, 16; mov.u32 %r4, 1; setp.eq.u32 %p1, %r2, 16; @%p1 bra $end;
wmma.load.a.sync.aligned.row.m16n16k16.bf16 {%r10, %r11, %r12, %r13}, [%rd1], %r2;
mov.u32 %r4, 2;
$end: st.global.u32 [%rd3], %r4;";
    let mut arena = Arena::of(vec![0; 128]);
    run(&kernel(body), (1, 32), &mut arena, 0).unwrap();
    assert_eq!(arena.words(), [1; 32]);
}

#[test]
fn a_wait_for_the_clock_ends() {
    let body = "mov.u64 %rd4, %globaltimer;
$again: nanosleep.u32 200; mov.u64 %rd5, %globaltimer; sub.s64 %rd6, %rd5, %rd4;
setp.lt.u64 %p1, %rd6, 100000; @%p1 bra $again; mov.u32 %r2, 1; st.global.u32 [%rd3], %r2;";
    let mut arena = Arena::of(vec![0; 128]);
    run(&kernel(body), (1, 32), &mut arena, 1).unwrap();
    assert_eq!(arena.words(), [1; 32]);
}
