//! The instructions that compute on registers: their names in PTX, and the files of their operands.
//!
//! An operand is a row of `w` (16 and 32 bits), `d` (64 bits) or `p` (predicates); the first is the destination.
//! Floating point without a rounding mode, such as `add.f32`, is left out on purpose, because an assembler may contract
//! it.

use std::collections::HashMap;
use std::sync::LazyLock;

/// An instruction of one lane without a memory access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Alu {
    MoveW,
    MoveD,
    MoveP,
    SelectW,
    SelectD,
    /// Two 16-bit halves into 32 bits, and back; two words into 64 bits, and back.
    PackW,
    UnpackW,
    PackD,
    UnpackD,
    AddW,
    AddD,
    SubW,
    SubD,
    MulW,
    MulD,
    WideU16,
    WideS16,
    WideU32,
    WideS32,
    MadW,
    DivU32,
    RemU32,
    DivU64,
    RemU64,
    NegW,
    NegD,
    MinU32,
    MaxU32,
    MinS32,
    MaxS32,
    MinU64,
    MaxU64,
    AndW,
    OrW,
    XorW,
    NotW,
    AndD,
    OrD,
    XorD,
    NotD,
    AndP,
    OrP,
    XorP,
    NotP,
    ShlW,
    ShlD,
    ShrU16,
    ShrS16,
    ShrU32,
    ShrS32,
    ShrU64,
    ShrS64,
    BfiW,
    BfiD,
    Permute,
    AddF32,
    SubF32,
    MulF32,
    DivF32,
    SqrtF32,
    RoughSqrtF32,
    RcpF32,
    AbsF32,
    NegF32,
    MaxNanF32,
    MinNanF32,
    AddF64,
    SubF64,
    MulF64,
    FmaF64,
    DivF64,
    SqrtF64,
    RcpF64,
    AbsF64,
    NegF64,
    F32FromF16,
    F32FromBf16,
    F16FromF32,
    Bf16FromF32,
    F64FromF32,
    F32FromF64,
    F32FromS16,
    F32FromU16,
    F32FromS32,
    F32FromU32,
    F64FromU64,
    F64FromS64,
    F64FromU32,
    F64FromS32,
    U64FromF64,
    S16FromS8,
    U16FromU8,
    S32FromS16,
    U32FromU16,
    U16FromU32,
    U32FromU64,
    U64FromU32,
    S64FromS32,
    Compare(Comparison, Kind),
}

/// `num` and `nan` ask whether both operands are numbers, or not both. A `u` before them means "or unordered".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Comparison {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    Equ,
    Neu,
    Ltu,
    Leu,
    Gtu,
    Geu,
    Num,
    Nan,
}

/// How the operands of a comparison are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    U16,
    S16,
    U32,
    S32,
    U64,
    S64,
    F32,
    F64,
}

/// Names that share a row differ only in the type that they give the same bits.
pub(crate) const ALU: &[(&str, Alu, &str)] = &[
    ("mov.b16 mov.u16 mov.s16 mov.b32 mov.u32 mov.s32 mov.f32", Alu::MoveW, "ww"),
    ("mov.b64 mov.u64 mov.s64 mov.f64 cvta.to.global.u64", Alu::MoveD, "dd"),
    ("mov.pred", Alu::MoveP, "pp"),
    ("selp.b16 selp.u16 selp.s16 selp.b32 selp.u32 selp.s32 selp.f32", Alu::SelectW, "wwwp"),
    ("selp.b64 selp.u64 selp.s64 selp.f64", Alu::SelectD, "dddp"),
    ("add.s16 add.u16 add.s32 add.u32", Alu::AddW, "www"),
    ("add.s64 add.u64", Alu::AddD, "ddd"),
    ("sub.s16 sub.u16 sub.s32 sub.u32", Alu::SubW, "www"),
    ("sub.s64 sub.u64", Alu::SubD, "ddd"),
    ("mul.lo.s16 mul.lo.u16 mul.lo.s32 mul.lo.u32", Alu::MulW, "www"),
    ("mul.lo.s64 mul.lo.u64", Alu::MulD, "ddd"),
    ("mul.wide.u16", Alu::WideU16, "www"),
    ("mul.wide.s16", Alu::WideS16, "www"),
    ("mul.wide.u32", Alu::WideU32, "dww"),
    ("mul.wide.s32", Alu::WideS32, "dww"),
    ("mad.lo.s32 mad.lo.u32", Alu::MadW, "wwww"),
    ("div.u32", Alu::DivU32, "www"),
    ("rem.u32", Alu::RemU32, "www"),
    ("div.u64", Alu::DivU64, "ddd"),
    ("rem.u64", Alu::RemU64, "ddd"),
    ("neg.s16 neg.s32", Alu::NegW, "ww"),
    ("neg.s64", Alu::NegD, "dd"),
    ("min.u32", Alu::MinU32, "www"),
    ("max.u32", Alu::MaxU32, "www"),
    ("min.s32", Alu::MinS32, "www"),
    ("max.s32", Alu::MaxS32, "www"),
    ("min.u64", Alu::MinU64, "ddd"),
    ("max.u64", Alu::MaxU64, "ddd"),
    ("and.b16 and.b32", Alu::AndW, "www"),
    ("or.b16 or.b32", Alu::OrW, "www"),
    ("xor.b16 xor.b32", Alu::XorW, "www"),
    ("not.b16 not.b32", Alu::NotW, "ww"),
    ("and.b64", Alu::AndD, "ddd"),
    ("or.b64", Alu::OrD, "ddd"),
    ("xor.b64", Alu::XorD, "ddd"),
    ("not.b64", Alu::NotD, "dd"),
    ("and.pred", Alu::AndP, "ppp"),
    ("or.pred", Alu::OrP, "ppp"),
    ("xor.pred", Alu::XorP, "ppp"),
    ("not.pred", Alu::NotP, "pp"),
    ("shl.b32", Alu::ShlW, "www"),
    ("shl.b64", Alu::ShlD, "ddw"),
    ("shr.u16 shr.b16", Alu::ShrU16, "www"),
    ("shr.s16", Alu::ShrS16, "www"),
    ("shr.u32 shr.b32", Alu::ShrU32, "www"),
    ("shr.s32", Alu::ShrS32, "www"),
    ("shr.u64 shr.b64", Alu::ShrU64, "ddw"),
    ("shr.s64", Alu::ShrS64, "ddw"),
    ("bfi.b32", Alu::BfiW, "wwwww"),
    ("bfi.b64", Alu::BfiD, "dddww"),
    ("prmt.b32", Alu::Permute, "wwww"),
    ("add.rn.f32", Alu::AddF32, "www"),
    ("sub.rn.f32", Alu::SubF32, "www"),
    ("mul.rn.f32", Alu::MulF32, "www"),
    ("div.rn.f32", Alu::DivF32, "www"),
    ("sqrt.rn.f32", Alu::SqrtF32, "ww"),
    ("sqrt.approx.ftz.f32", Alu::RoughSqrtF32, "ww"),
    ("rcp.rn.f32", Alu::RcpF32, "ww"),
    ("abs.f32", Alu::AbsF32, "ww"),
    ("neg.f32", Alu::NegF32, "ww"),
    ("max.NaN.f32", Alu::MaxNanF32, "www"),
    ("min.NaN.f32", Alu::MinNanF32, "www"),
    ("add.rn.f64", Alu::AddF64, "ddd"),
    ("sub.rn.f64", Alu::SubF64, "ddd"),
    ("mul.rn.f64", Alu::MulF64, "ddd"),
    ("fma.rn.f64", Alu::FmaF64, "dddd"),
    ("div.rn.f64", Alu::DivF64, "ddd"),
    ("sqrt.rn.f64", Alu::SqrtF64, "dd"),
    ("rcp.rn.f64", Alu::RcpF64, "dd"),
    ("abs.f64", Alu::AbsF64, "dd"),
    ("neg.f64", Alu::NegF64, "dd"),
    ("cvt.f32.f16", Alu::F32FromF16, "ww"),
    ("cvt.f32.bf16", Alu::F32FromBf16, "ww"),
    ("cvt.rn.f16.f32", Alu::F16FromF32, "ww"),
    ("cvt.rn.bf16.f32", Alu::Bf16FromF32, "ww"),
    ("cvt.f64.f32", Alu::F64FromF32, "dw"),
    ("cvt.rn.f32.f64", Alu::F32FromF64, "wd"),
    ("cvt.rn.f32.s16", Alu::F32FromS16, "ww"),
    ("cvt.rn.f32.u16", Alu::F32FromU16, "ww"),
    ("cvt.rn.f32.s32", Alu::F32FromS32, "ww"),
    ("cvt.rn.f32.u32", Alu::F32FromU32, "ww"),
    ("cvt.rn.f64.u64", Alu::F64FromU64, "dd"),
    ("cvt.rn.f64.s64", Alu::F64FromS64, "dd"),
    ("cvt.rn.f64.u32", Alu::F64FromU32, "dw"),
    ("cvt.rn.f64.s32", Alu::F64FromS32, "dw"),
    ("cvt.rzi.u64.f64", Alu::U64FromF64, "dd"),
    ("cvt.s16.s8", Alu::S16FromS8, "ww"),
    ("cvt.u16.u8", Alu::U16FromU8, "ww"),
    ("cvt.s32.s16", Alu::S32FromS16, "ww"),
    ("cvt.u32.u16", Alu::U32FromU16, "ww"),
    ("cvt.u16.u32", Alu::U16FromU32, "ww"),
    ("cvt.u32.u64", Alu::U32FromU64, "wd"),
    ("cvt.u64.u32", Alu::U64FromU32, "dw"),
    ("cvt.s64.s32", Alu::S64FromS32, "dw"),
];

/// Returns the names of all instructions that compute on registers, with every comparison.
pub fn forms() -> impl Iterator<Item = String> {
    let comparisons =
        ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"];
    let kinds = ["b16", "u16", "s16", "b32", "u32", "s32", "b64", "u64", "s64", "f32", "f64"];
    let product = comparisons.into_iter().flat_map(move |c| kinds.into_iter().map(move |kind| (c, kind)));
    let compared =
        product.filter(|(c, kind)| compare(c, kind).is_some()).map(|(c, kind)| format!("setp.{c}.{kind}"));
    ALU.iter().flat_map(|(names, _, _)| names.split(' ')).map(str::to_owned).chain(compared)
}

/// Returns the form of this name, and the files of its operands.
pub(crate) fn form(opcode: &str) -> Option<(Alu, &'static str)> {
    if let Some(rest) = opcode.strip_prefix("setp.") {
        let (comparison, kind) = rest.split_once('.')?;
        return compare(comparison, kind);
    }
    static BY_NAME: LazyLock<HashMap<&str, (Alu, &str)>> = LazyLock::new(|| {
        let rows =
            ALU.iter().flat_map(|(names, alu, files)| names.split(' ').map(|name| (name, (*alu, *files))));
        rows.collect()
    });
    BY_NAME.get(opcode).copied()
}

fn compare(comparison: &str, kind: &str) -> Option<(Alu, &'static str)> {
    use Comparison::*;
    let comparison = match comparison {
        "eq" => Eq,
        "ne" => Ne,
        "lt" => Lt,
        "le" => Le,
        "gt" => Gt,
        "ge" => Ge,
        "equ" => Equ,
        "neu" => Neu,
        "ltu" => Ltu,
        "leu" => Leu,
        "gtu" => Gtu,
        "geu" => Geu,
        "num" => Num,
        "nan" => Nan,
        _ => return None,
    };
    let (kind, is_bits) = match kind {
        "b16" => (Kind::U16, true),
        "u16" => (Kind::U16, false),
        "s16" => (Kind::S16, false),
        "b32" => (Kind::U32, true),
        "u32" => (Kind::U32, false),
        "s32" => (Kind::S32, false),
        "b64" => (Kind::U64, true),
        "u64" => (Kind::U64, false),
        "s64" => (Kind::S64, false),
        "f32" => (Kind::F32, false),
        "f64" => (Kind::F64, false),
        _ => return None,
    };
    let exists = match kind {
        Kind::F32 | Kind::F64 => true,
        _ if is_bits => matches!(comparison, Eq | Ne),
        _ => matches!(comparison, Eq | Ne | Lt | Le | Gt | Ge),
    };
    let files = match kind {
        Kind::U64 | Kind::S64 | Kind::F64 => "pdd",
        _ => "pww",
    };
    exists.then_some((Alu::Compare(comparison, kind), files))
}
