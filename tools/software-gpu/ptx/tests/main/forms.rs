//! Each instruction that computes on registers, compared with its expected result in `expected`.
//!
//! A launch per instruction takes its operands from memory: special values in all pairs, and random bits. A form
//! without an expected result fails.

use software_gpu_ptx::{Launch, Module, forms};

use crate::arena::Arena;
use crate::expected::{Files, expected};

/// Threads of a launch, one per set of operands.
const THREADS: usize = 256;
const BLOCKS: usize = 16;
/// Bytes of a set of four operands, and of a result after it.
const STRIDE: usize = 40;

/// Operands whose low 16, 32 or 64 bits are a special value of some type.
const SPECIAL: [u64; 48] = [
    0,
    1,
    2,
    7,
    8,
    15,
    16,
    31,
    32,
    33,
    63,
    64,
    65,
    127,
    128,
    255,
    0x7fff,
    0x8000,
    0xffff,
    0x1_0000,
    0x7c00,
    0xfc00,
    0x3c00,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    0xffff_ffff_ffff_ffff,
    0x7f80_0000,
    0xff80_0000,
    0x7fc0_0001,
    0x3f80_0000,
    0xbf80_0000,
    0x0080_0000,
    0x007f_ffff,
    0x3f80_8000,
    0x3f81_8000,
    0x7f7f_ffff,
    0x477f_f000,
    0x3380_0000,
    0x7ff0_0000_0000_0000,
    0xfff0_0000_0000_0000,
    0x7ff8_0000_0000_0001,
    0x3ff0_0000_0000_0000,
    0x3810_0000_0000_0000,
    0x43f0_0000_0000_0000,
    0x0010_0000_0000_0000,
];

/// The finalizer of splitmix64 over a counter.
fn random(counter: u64) -> u64 {
    let z = counter.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Returns the operands of a thread: first pairs of special values, then mixtures.
fn operands(thread: usize) -> [u64; 4] {
    let special = |k: usize| SPECIAL[k % SPECIAL.len()];
    let bits = |k: u64| random(thread as u64 * 8 + k);
    if thread < SPECIAL.len() * SPECIAL.len() {
        let third = special(bits(2) as usize);
        return [special(thread), special(thread / SPECIAL.len()), third, bits(3) % 80];
    }
    match thread % 3 {
        0 => [bits(0), bits(1), bits(2), bits(3)],
        // Floats of similar size, so that sums cancel.
        1 => {
            [bits(0) & 0x807f_ffff | 0x3f80_0000, bits(1) & 0x80ff_ffff | 0x3f00_0000, bits(2), bits(3) % 70]
        }
        _ => [bits(0), special(bits(1) as usize), bits(2) % 70, bits(3) % 70],
    }
}

/// Returns a kernel that reads operands, runs this instruction, and writes the result.
fn kernel(opcode: &str, files: &Files) -> String {
    let name = |file: char, k: usize| match file {
        'w' => format!("%r{}", k + 10),
        'd' => format!("%rd{}", k + 10),
        _ => format!("%p{}", k + 1),
    };
    let mut body = String::new();
    for (k, file) in files.sources.chars().enumerate() {
        let place = format!("[%rd3+{}]", 8 * k);
        match file {
            'w' => body += &format!("ld.global.u32 %r{}, {place};\n", k + 10),
            'd' => body += &format!("ld.global.u64 %rd{}, {place};\n", k + 10),
            _ => {
                body += &format!(
                    "ld.global.u32 %r9, {place}; and.b32 %r9, %r9, 1; setp.eq.u32 %p{}, %r9, 1;\n",
                    k + 1
                )
            }
        }
    }
    let sources: Vec<String> = files.sources.chars().enumerate().map(|(k, file)| name(file, k)).collect();
    body += &format!("{opcode} {}, {};\n", name(files.result, 20), sources.join(", "));
    body += match files.result {
        'w' => "cvt.u64.u32 %rd9, %r30;",
        'd' => "mov.b64 %rd9, %rd30;",
        _ => "selp.b64 %rd9, 1, 0, %p21;",
    };
    format!(
        ".version 9.0
.target sm_90
.address_size 64
.entry k(.param .u64 a) {{
.reg .pred %p<32>; .reg .b32 %r<40>; .reg .b64 %rd<40>;
ld.param.u64 %rd1, [a]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.s32 %r3, %r2, {THREADS}, %r1;
mul.wide.u32 %rd2, %r3, {STRIDE}; add.s64 %rd3, %rd1, %rd2;
{body}
st.global.u64 [%rd3+32], %rd9; ret; }}"
    )
}

#[test]
fn every_form_computes_what_its_statement_says() {
    let mut input = Vec::new();
    for thread in 0..THREADS * BLOCKS {
        operands(thread).iter().for_each(|operand| input.extend(operand.to_le_bytes()));
        input.extend([0xee; 8]);
    }
    for opcode in forms() {
        let (files, statement) = expected(&opcode).unwrap_or_else(|| panic!("{opcode} has no statement"));
        let module = Module::parse(&kernel(&opcode, &files)).unwrap_or_else(|e| panic!("{opcode}: {e}"));
        // What a division by zero gives is undefined, and refused.
        let mut input = input.clone();
        if opcode.starts_with("div.u") || opcode.starts_with("rem.u") {
            for set in input.chunks_exact_mut(STRIDE) {
                set[8] |= 1;
            }
        }
        let mut arena = Arena::of(input.clone());
        let launch = Launch {
            grid: [BLOCKS as u32, 1, 1],
            block: [THREADS as u32, 1, 1],
            dynamic_shared_bytes: 0,
            params: &arena.base.to_le_bytes(),
            variables: &[],
            seed: 0,
        };
        module.kernel("k").unwrap().launch(&launch, &mut arena).unwrap_or_else(|e| panic!("{opcode}: {e}"));
        for (set, made) in input.chunks_exact(STRIDE).zip(arena.bytes.chunks_exact(STRIDE)) {
            let word = |k: usize| u64::from_le_bytes(set[8 * k..8 * k + 8].try_into().unwrap());
            let source = |k: usize| match files.sources.as_bytes().get(k) {
                Some(b'w') => word(k) & 0xffff_ffff,
                Some(b'p') => word(k) & 1,
                _ => word(k),
            };
            let sources = [0, 1, 2, 3].map(source);
            let result = u64::from_le_bytes(made[32..].try_into().unwrap());
            let cut = u64::MAX >> (64 - files.bits);
            assert_eq!(result & cut, statement(sources) & cut, "{opcode} of {sources:x?}: {result:#x}");
        }
    }
}
