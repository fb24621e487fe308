//! The results of whole launches: indices, divergence, barriers, exchanges, atomics, copies.
//!
//! The result must be the same for every seed.

use software_gpu_ptx::{Error, Launch, Module, Tally};

use crate::arena::Arena;

/// Returns a kernel `k` with a pointer as its parameter, in `%rd1`, and these declarations and instructions.
pub(crate) fn kernel(body: &str) -> String {
    format!(
        ".version 9.0
.target sm_90
.address_size 64
.visible .entry k(.param .u64 k_param_0) .maxntid 256, 1, 1
{{
.reg .pred %p<8>; .reg .b16 %rs<8>; .reg .b32 %r<32>; .reg .b64 %rd<32>; .reg .f32 %f<8>;
ld.param.u64 %rd1, [k_param_0];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd2, %r1, 4;
add.s64 %rd3, %rd1, %rd2;
{body}
ret;
}}"
    )
}

pub(crate) fn run(text: &str, shape: (u32, u32), arena: &mut Arena, seed: u64) -> Result<Tally, Error> {
    let module = Module::parse(text)?;
    let params = arena.base.to_le_bytes();
    let launch = Launch {
        grid: [shape.0, 1, 1],
        block: [shape.1, 1, 1],
        dynamic_shared_bytes: 0,
        params: &params,
        variables: &[],
        seed,
    };
    module.kernel("k").unwrap().launch(&launch, arena)
}

/// Returns the words after a launch. They must not depend on the seed.
fn words(body: &str, shape: (u32, u32), count: usize) -> Vec<u32> {
    let made: Vec<Vec<u32>> = (0..8)
        .map(|seed| {
            let mut arena = Arena::of(vec![0; 4 * count]);
            run(&kernel(body), shape, &mut arena, seed).unwrap();
            arena.words()
        })
        .collect();
    assert!(made.iter().all(|words| *words == made[0]), "{made:?}");
    made[0].clone()
}

#[test]
fn each_thread_of_each_block_knows_its_index() {
    let body = "mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mad.lo.s32 %r4, %r2, %r3, %r1;
mul.wide.u32 %rd4, %r4, 4; add.s64 %rd5, %rd1, %rd4; st.global.u32 [%rd5], %r4;";
    assert_eq!(words(body, (5, 70), 350), (0..350).collect::<Vec<u32>>());
}

#[test]
fn lanes_that_part_meet_again() {
    // Each lane counts to its own number, then the warp agrees on the largest.
    let body = "mov.u32 %r2, 0; and.b32 %r3, %r1, 7;
$again: setp.ge.u32 %p1, %r2, %r3; @%p1 bra $end; add.s32 %r2, %r2, 1; bra.uni $again;
$end: redux.sync.max.u32 %r4, %r2, -1; mad.lo.s32 %r5, %r4, 100, %r2; st.global.u32 [%rd3], %r5;";
    assert_eq!(words(body, (1, 64), 64), (0..64).map(|k| 700 + k % 8).collect::<Vec<u32>>());
}

#[test]
fn warps_meet_at_a_barrier_and_see_each_others_shared_memory() {
    let body = ".shared .align 4 .b8 s[1024];
mov.u32 %r2, s; shl.b32 %r3, %r1, 2; add.s32 %r4, %r2, %r3; st.shared.u32 [%r4], %r1;
bar.sync 0;
sub.s32 %r5, 255, %r1; shl.b32 %r6, %r5, 2; add.s32 %r7, %r2, %r6; ld.shared.u32 %r8, [%r7];
st.global.u32 [%rd3], %r8;";
    assert_eq!(words(body, (1, 256), 256), (0..256).rev().collect::<Vec<u32>>());
}

#[test]
fn a_butterfly_of_shuffles_sums_a_warp() {
    let step = |distance: u32| {
        format!("shfl.sync.bfly.b32 %r3|%p1, %r2, {distance}, 31, -1; add.s32 %r2, %r2, %r3;")
    };
    let body =
        format!("mov.u32 %r2, %r1; {} st.global.u32 [%rd3], %r2;", [16, 8, 4, 2, 1].map(step).join(" "));
    assert_eq!(words(&body, (1, 32), 32), vec![496; 32]);
}

#[test]
fn halves_of_a_warp_exchange_by_masks_of_their_own() {
    let body = "setp.lt.u32 %p1, %r1, 16; selp.b32 %r2, 65535, -65536, %p1;
redux.sync.max.u32 %r3, %r1, %r2; st.global.u32 [%rd3], %r3;";
    let expected: Vec<u32> = (0..32).map(|k| if k < 16 { 15 } else { 31 }).collect();
    assert_eq!(words(body, (1, 32), 32), expected);
}

#[test]
fn atomics_of_all_blocks_add_up() {
    let body =
        "mov.u64 %rd4, 3; atom.global.add.u64 %rd5, [%rd1], %rd4; atom.global.max.u32 %r2, [%rd1+8], %r1;";
    assert_eq!(words(body, (7, 100), 3), [2100, 0, 99]);
}

#[test]
fn an_asynchronous_copy_is_there_after_its_wait() {
    let body = ".shared .align 16 .b8 s[512];
mov.u32 %r2, s; shl.b32 %r3, %r1, 2; add.s32 %r4, %r2, %r3;
st.global.u32 [%rd3], %r1;
cp.async.ca.shared.global [%r4], [%rd3], 4, 4; cp.async.commit_group; cp.async.wait_group 0;
bar.sync 0; xor.b32 %r5, %r4, 4; ld.shared.u32 %r6, [%r5]; st.global.u32 [%rd3+512], %r6;";
    assert_eq!(words(body, (1, 128), 256)[128..], (0..128).map(|k| k ^ 1).collect::<Vec<u32>>());
}

#[test]
fn a_tally_counts_warps_and_lanes() {
    let mut arena = Arena::of(vec![0; 4]);
    let text = ".version 9.0 .target sm_90 .address_size 64 .entry k(.param .u64 a) { ret; }";
    let tally = run(text, (3, 40), &mut arena, 0).unwrap();
    assert_eq!(tally, Tally { warp_instructions: 6, lane_instructions: 120 });
}
