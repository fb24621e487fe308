//! Loads and stores of every width, vector and space, and atomics, compared with bytes that are moved by hand.
//!
//! Lanes read consecutive places, one place for all lanes, and places in an irregular order.

use software_gpu_ptx::Error;

use crate::arena::Arena;
use crate::launches::{kernel, run};

const THREADS: usize = 64;

type Place = fn(usize) -> usize;

/// The place that a thread reads, as instructions from `%r1` to `%r3`, and as a function.
const ORDERS: [(&str, Place); 4] = [
    ("mov.u32 %r3, %r1;", |k| k),
    ("mov.u32 %r3, 5;", |_| 5),
    ("sub.s32 %r3, 63, %r1;", |k| 63 - k),
    ("mul.lo.s32 %r3, %r1, 7; and.b32 %r3, %r3, 63;", |k| 7 * k % 64),
];

fn input() -> Vec<u8> {
    (0..THREADS * 16).map(|k| (k * 151 + 77) as u8).chain([0xee; THREADS * 16]).collect()
}

/// Returns the bytes that a kernel leaves after its input.
fn output(body: &str) -> Vec<u8> {
    let mut arena = Arena::of(input());
    run(&kernel(body), (1, THREADS as u32), &mut arena, 3).unwrap_or_else(|e| panic!("{body}: {e}"));
    arena.bytes.split_off(THREADS * 16)
}

fn names(kind: &str, count: usize) -> String {
    let prefix = if kind.ends_with("64") { "%rd1" } else { "%r1" };
    let list: Vec<String> = (0..count).map(|k| format!("{prefix}{k}")).collect();
    if count == 1 { list[0].clone() } else { format!("{{{}}}", list.join(", ")) }
}

#[test]
fn every_load_and_store_moves_the_bytes_of_its_lane() {
    let kinds = ["u8", "b8", "u16", "b16", "u32", "s32", "b32", "f32", "u64", "s64", "b64", "f64"];
    for kind in kinds {
        let bytes = kind[1..].parse::<usize>().unwrap() / 8;
        for (vector, count) in [("", 1), ("v2.", 2), ("v4.", 4)] {
            let each = bytes * count;
            if each > 16 {
                continue;
            }
            for (order, from) in ORDERS {
                for (load, store) in [
                    ("global.", "global."),
                    ("", ""),
                    ("volatile.global.", "volatile.global."),
                    ("global.nc.", ""),
                ] {
                    let (load, store) =
                        (format!("ld.{load}{vector}{kind}"), format!("st.{store}{vector}{kind}"));
                    let values = names(kind, count);
                    let body = format!(
                        "{order} mul.wide.u32 %rd4, %r3, {each}; add.s64 %rd5, %rd1, %rd4; {load} {values}, [%rd5];
mul.wide.u32 %rd6, %r1, {each}; add.s64 %rd7, %rd1, %rd6; {store} [%rd7+1024], {values};"
                    );
                    let (made, input) = (output(&body), input());
                    for k in 0..THREADS {
                        let expected = &input[from(k) * each..][..each];
                        assert_eq!(
                            &made[k * each..][..each],
                            expected,
                            "{load}, {store}, thread {k}, {order}"
                        );
                    }
                    assert!(
                        made[THREADS * each..].iter().all(|byte| *byte == 0xee),
                        "{store} writes beside its lane"
                    );
                }
            }
        }
    }
}

#[test]
fn shared_memory_keeps_every_width() {
    for (kind, bytes) in [("u8", 1), ("u16", 2), ("u32", 4), ("f32", 4), ("u64", 8), ("f64", 8)] {
        for (vector, count) in [("", 1), ("v2.", 2), ("v4.", 4)] {
            let (each, values) = (bytes * count, names(kind, count));
            if each > 16 {
                continue;
            }
            let body = format!(
                ".shared .align 16 .b8 s[1024];
mov.u32 %r4, s; mad.lo.s32 %r5, %r1, {each}, %r4; mul.wide.u32 %rd4, %r1, {each}; add.s64 %rd5, %rd1, %rd4;
ld.global.{vector}{kind} {values}, [%rd5]; st.shared.{vector}{kind} [%r5], {values};
bar.sync 0;
sub.s32 %r6, 63, %r1; mad.lo.s32 %r5, %r6, {each}, %r4; ld.shared.{vector}{kind} {values}, [%r5];
st.global.{vector}{kind} [%rd5+1024], {values};"
            );
            let (made, input) = (output(&body), input());
            for k in 0..THREADS {
                assert_eq!(
                    made[k * each..][..each],
                    input[(63 - k) * each..][..each],
                    "{vector}{kind}, thread {k}"
                );
            }
        }
    }
}

#[test]
fn loads_extend_to_the_width_of_their_register() {
    for (kind, extend) in [
        ("u8", (|bits| bits & 0xff) as fn(u64) -> u64),
        ("s8", |bits| bits as i8 as u64),
        ("u16", |bits| bits & 0xffff),
        ("s16", |bits| bits as i16 as u64),
        ("u32", |bits| bits & 0xffff_ffff),
    ] {
        let body = format!(
            "add.s64 %rd5, %rd3, %rd2; ld.global.{kind} %rd6, [%rd5]; st.global.u64 [%rd5+1024], %rd6;"
        );
        let (made, input) = (output(&body), input());
        for k in 0..THREADS {
            let word = |bytes: &[u8]| u64::from_le_bytes(bytes[8 * k..][..8].try_into().unwrap());
            assert_eq!(word(&made), extend(word(&input)), "{kind}, thread {k}");
        }
    }
}

#[test]
fn atomics_return_what_was_there_and_leave_what_they_made() {
    type Change = fn(u64, u64) -> u64;
    let rows: [(&str, &str, Change); 4] = [
        ("atom.global.add.u64", "64", u64::wrapping_add),
        ("atom.global.add.u32", "32", |a, b| (a + b) & 0xffff_ffff),
        ("atom.global.max.u32", "32", u64::max),
        ("atom.global.min.u32", "32", u64::min),
    ];
    for (atomic, bits, change) in rows {
        let (old, value) = if bits == "64" { ("%rd8", "%rd9") } else { ("%r8", "%r9") };
        let body = format!(
            "add.s64 %rd5, %rd3, %rd2; ld.global.u{bits} {value}, [%rd5+-8]; {atomic} {old}, [%rd5], {value};
st.global.u{bits} [%rd5+1024], {old};"
        );
        // One thread, so that its operand is not what another has changed.
        let body = body.replace("[%rd5+-8]", "[%rd5+8]");
        let mut arena = Arena::of(input());
        run(&kernel(&body), (1, 1), &mut arena, 3).unwrap();
        let word = |bytes: &[u8], at: usize| {
            let whole = u64::from_le_bytes(bytes[at..][..8].try_into().unwrap());
            if bits == "64" { whole } else { whole & 0xffff_ffff }
        };
        let input = input();
        assert_eq!(word(&arena.bytes, 0), change(word(&input, 0), word(&input, 8)), "{atomic}");
        assert_eq!(word(&arena.bytes, 1024), word(&input, 0), "{atomic}");
    }
}

#[test]
fn votes_and_fences_and_packed_registers() {
    let body = "setp.eq.u32 %p1, %r1, 40; vote.sync.any.pred %p2, %p1, -1; selp.u32 %r2, 1, 0, %p2;
membar.sys; membar.gl; membar.cta;
mov.b32 {%rs1, %rs2}, %r1; mov.b32 %r3, {%rs2, %rs1}; mov.b64 %rd4, {%r2, %r3}; mov.b64 {%r4, %r5}, %rd4;
add.s64 %rd5, %rd3, %rd2; @%p1 st.global.u32 [%rd5+1024], %r4; @!%p1 st.global.v2.u32 [%rd5+1024], {%r4, %r5};";
    let made = output(body);
    for k in 0..THREADS as u32 {
        let word = |at: usize| u32::from_le_bytes(made[8 * k as usize + at..][..4].try_into().unwrap());
        let upper = if k == 40 { 0xeeee_eeee } else { k << 16 };
        assert_eq!((word(0), word(4)), (u32::from(k >= 32), upper), "thread {k}");
    }
}

#[test]
fn a_parameter_is_read_at_its_offset_and_not_beside_it() {
    let text = |at: &str| {
        kernel(&format!("mov.b64 %rd4, k_param_0; ld.param.u32 %r2, [{at}]; st.global.u32 [%rd1], %r2;"))
    };
    let mut arena = Arena::of(vec![0; 4]);
    run(&text("%rd4+4"), (1, 1), &mut arena, 0).unwrap();
    assert_eq!(arena.words(), [(arena.base >> 32) as u32]);
    assert!(matches!(run(&text("%rd4+8"), (1, 1), &mut arena, 0), Err(Error::Fault(_))));
    assert!(matches!(run(&text("k_param_0+8"), (1, 1), &mut arena, 0), Err(Error::Fault(_))));
}
