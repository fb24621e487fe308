//! The result of each instruction without a memory access.
//!
//! Floating point is IEEE 754 with one rounding. A NaN that f32 arithmetic makes is the canonical one, as on a GPU.

use super::float::{self, canonical, settled};
use super::lanes::{Done, Run};
use crate::decode::Alu;

/// The sign bit, and the other bits.
const SIGN: u32 = 1 << 31;
const SIGN_F64: u64 = 1 << 63;

impl Run<'_> {
    pub(super) fn alu(&mut self, alu: Alu) -> Done {
        match alu {
            Alu::MoveW => self.ww(|a| a),
            Alu::MoveD => self.dd(|a| a),
            Alu::MoveP => self.p(|a| a),
            Alu::SelectW => self.select_w(),
            Alu::SelectD => self.select_d(),
            Alu::PackW => self.www(|low, high| low & 0xffff | high << 16),
            Alu::UnpackW => self.unpack_w(),
            Alu::PackD => self.dww(|low, high| u64::from(low) | u64::from(high) << 32),
            Alu::UnpackD => self.unpack_d(),
            Alu::AddW => self.www(u32::wrapping_add),
            Alu::AddD => self.ddd(u64::wrapping_add),
            Alu::SubW => self.www(u32::wrapping_sub),
            Alu::SubD => self.ddd(u64::wrapping_sub),
            Alu::MulW => self.www(u32::wrapping_mul),
            Alu::MulD => self.ddd(u64::wrapping_mul),
            Alu::WideU16 => self.www(|a, b| (a & 0xffff) * (b & 0xffff)),
            Alu::WideS16 => self.www(|a, b| (i32::from(a as i16) * i32::from(b as i16)) as u32),
            Alu::WideU32 => self.dww(|a, b| u64::from(a) * u64::from(b)),
            Alu::WideS32 => self.dww(|a, b| (i64::from(a as i32) * i64::from(b as i32)) as u64),
            Alu::MadW => self.wwww(|a, b, c| a.wrapping_mul(b).wrapping_add(c)),
            Alu::DivU32 => self.divide_w(|a, b| a / b),
            Alu::RemU32 => self.divide_w(|a, b| a % b),
            Alu::DivU64 => self.divide_d(|a, b| a / b),
            Alu::RemU64 => self.divide_d(|a, b| a % b),
            Alu::NegW => self.ww(u32::wrapping_neg),
            Alu::NegD => self.dd(u64::wrapping_neg),
            Alu::MinU32 => self.www(u32::min),
            Alu::MaxU32 => self.www(u32::max),
            Alu::MinS32 => self.www(|a, b| (a as i32).min(b as i32) as u32),
            Alu::MaxS32 => self.www(|a, b| (a as i32).max(b as i32) as u32),
            Alu::MinU64 => self.ddd(u64::min),
            Alu::MaxU64 => self.ddd(u64::max),
            Alu::AndW => self.www(|a, b| a & b),
            Alu::OrW => self.www(|a, b| a | b),
            Alu::XorW => self.www(|a, b| a ^ b),
            Alu::NotW => self.ww(|a| !a),
            Alu::AndD => self.ddd(|a, b| a & b),
            Alu::OrD => self.ddd(|a, b| a | b),
            Alu::XorD => self.ddd(|a, b| a ^ b),
            Alu::NotD => self.dd(|a| !a),
            Alu::AndP => self.pp(|a, b| a & b),
            Alu::OrP => self.pp(|a, b| a | b),
            Alu::XorP => self.pp(|a, b| a ^ b),
            Alu::NotP => self.p(|a| !a),
            Alu::ShlW => self.shift_w(|a, by| a.checked_shl(by).unwrap_or(0)),
            Alu::ShlD => self.shift_d(|a, by| a.checked_shl(by).unwrap_or(0)),
            Alu::ShrU16 => self.shift_w(|a, by| (a & 0xffff).checked_shr(by).unwrap_or(0)),
            Alu::ShrS16 => self.shift_w(|a, by| (i32::from(a as i16) >> by.min(31)) as u32),
            Alu::ShrU32 => self.shift_w(|a, by| a.checked_shr(by).unwrap_or(0)),
            Alu::ShrS32 => self.shift_w(|a, by| (a as i32 >> by.min(31)) as u32),
            Alu::ShrU64 => self.shift_d(|a, by| a.checked_shr(by).unwrap_or(0)),
            Alu::ShrS64 => self.shift_d(|a, by| (a as i64 >> by.min(63)) as u64),
            Alu::BfiW => self.insert_w(),
            Alu::BfiD => self.insert_d(),
            Alu::Permute => self.wwww(permute),
            Alu::AddF32 => self.f32_2(|a, b| a + b),
            Alu::SubF32 => self.f32_2(|a, b| a - b),
            Alu::MulF32 => self.f32_2(|a, b| a * b),
            Alu::DivF32 => self.f32_2(|a, b| a / b),
            Alu::SqrtF32 => self.ww(|a| canonical(f32::from_bits(a).sqrt())),
            Alu::RoughSqrtF32 => self.ww(|a| canonical(float::rough_square_root(a))),
            Alu::RcpF32 => self.ww(|a| canonical(1.0 / f32::from_bits(a))),
            Alu::AbsF32 => self.ww(|a| canonical(f32::from_bits(a & !SIGN))),
            Alu::NegF32 => self.ww(|a| canonical(f32::from_bits(a ^ SIGN))),
            Alu::MaxNanF32 => self.www(|a, b| float::extreme(a, b, false)),
            Alu::MinNanF32 => self.www(|a, b| float::extreme(a, b, true)),
            Alu::AddF64 => self.f64_2(|a, b| a + b),
            Alu::SubF64 => self.f64_2(|a, b| a - b),
            Alu::MulF64 => self.f64_2(|a, b| a * b),
            Alu::FmaF64 => self.f64_3(f64::mul_add),
            Alu::DivF64 => self.f64_2(|a, b| a / b),
            Alu::SqrtF64 => self.dd(|a| settled(f64::from_bits(a).sqrt())),
            Alu::RcpF64 => self.dd(|a| settled(1.0 / f64::from_bits(a))),
            Alu::AbsF64 => self.dd(|a| a & !SIGN_F64),
            Alu::NegF64 => self.dd(|a| a ^ SIGN_F64),
            Alu::F32FromF16 => self.ww(|a| canonical(half::f16::from_bits(a as u16).to_f32())),
            Alu::F32FromBf16 => self.ww(|a| canonical(f32::from_bits(a << 16))),
            Alu::F16FromF32 => self.ww(|a| float::f16_from(f32::from_bits(a)).into()),
            Alu::Bf16FromF32 => self.ww(|a| float::bf16_from(f32::from_bits(a)).into()),
            Alu::F64FromF32 => self.dw(|a| settled(f32::from_bits(a).into())),
            Alu::F32FromF64 => self.wd(|a| canonical(f64::from_bits(a) as f32)),
            Alu::F32FromS16 => self.ww(|a| f32::from(a as i16).to_bits()),
            Alu::F32FromU16 => self.ww(|a| f32::from(a as u16).to_bits()),
            Alu::F32FromS32 => self.ww(|a| (a as i32 as f32).to_bits()),
            Alu::F32FromU32 => self.ww(|a| (a as f32).to_bits()),
            Alu::F64FromU64 => self.dd(|a| (a as f64).to_bits()),
            Alu::F64FromS64 => self.dd(|a| (a as i64 as f64).to_bits()),
            Alu::F64FromU32 => self.dw(|a| f64::from(a).to_bits()),
            Alu::F64FromS32 => self.dw(|a| f64::from(a as i32).to_bits()),
            Alu::U64FromF64 => self.dd(|a| float::u64_from(f64::from_bits(a))),
            Alu::S16FromS8 => self.ww(|a| (a as i8 as i16 as u16).into()),
            Alu::U16FromU8 => self.ww(|a| a & 0xff),
            Alu::S32FromS16 => self.ww(|a| a as i16 as i32 as u32),
            Alu::U32FromU16 | Alu::U16FromU32 => self.ww(|a| a & 0xffff),
            Alu::U32FromU64 => self.wd(|a| a as u32),
            Alu::U64FromU32 => self.dw(u64::from),
            Alu::S64FromS32 => self.dw(|a| i64::from(a as i32) as u64),
            Alu::Compare(comparison, kind) => self.compare(comparison, kind),
        }
    }
}

/// Each byte of the result is a byte of `b:a`, or the sign of one, as four bits of `how` select.
fn permute(a: u32, b: u32, how: u32) -> u32 {
    let bytes = (u64::from(a) | u64::from(b) << 32).to_le_bytes();
    let mut result = [0; 4];
    for (k, byte) in result.iter_mut().enumerate() {
        let selector = how >> (4 * k);
        let chosen = bytes[selector as usize & 7];
        *byte = if selector & 8 == 0 { chosen } else { (chosen as i8 >> 7) as u8 };
    }
    u32::from_le_bytes(result)
}
