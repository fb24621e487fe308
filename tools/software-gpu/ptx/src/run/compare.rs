//! Comparisons: two rows to a predicate of 32 bits.
//!
//! An unordered comparison is the opposite ordered one, negated, so a NaN fulfils it.
// The lints' proposals are true of integers only: a NaN is neither less nor greater.
#![allow(clippy::neg_cmp_op_on_partial_ord, clippy::double_comparisons)]

use super::lanes::{Done, Run};
use super::registers::LANES;
use crate::decode::{Comparison, Kind};

impl Run<'_> {
    #[inline(always)]
    fn compare_w<T: Copy>(&mut self, read: impl Fn(u32) -> T, holds: impl Fn(T, T) -> bool) -> Done {
        let (a, b) = (self.w(1)?, self.w(2)?);
        let mut value = [0; LANES];
        for k in 0..LANES {
            value[k] = u32::from(holds(read(a[k]), read(b[k]))) << k;
        }
        let bits = value.iter().fold(0, |all, bit| all | bit);
        self.registers.set_predicate(self.rows[0], self.active, bits);
        Ok(())
    }

    #[inline(always)]
    fn compare_d<T: Copy>(&mut self, read: impl Fn(u64) -> T, holds: impl Fn(T, T) -> bool) -> Done {
        let (a, b) = (self.d(1)?, self.d(2)?);
        let mut bits = 0;
        for k in 0..LANES {
            bits |= u32::from(holds(read(a[k]), read(b[k]))) << k;
        }
        self.registers.set_predicate(self.rows[0], self.active, bits);
        Ok(())
    }

    #[inline(always)]
    fn integers_w<T: Ord + Copy>(&mut self, comparison: Comparison, read: impl Fn(u32) -> T) -> Done {
        match comparison {
            Comparison::Eq => self.compare_w(read, |a, b| a == b),
            Comparison::Ne => self.compare_w(read, |a, b| a != b),
            Comparison::Lt => self.compare_w(read, |a, b| a < b),
            Comparison::Le => self.compare_w(read, |a, b| a <= b),
            Comparison::Gt => self.compare_w(read, |a, b| a > b),
            _ => self.compare_w(read, |a, b| a >= b),
        }
    }

    #[inline(always)]
    fn integers_d<T: Ord + Copy>(&mut self, comparison: Comparison, read: impl Fn(u64) -> T) -> Done {
        match comparison {
            Comparison::Eq => self.compare_d(read, |a, b| a == b),
            Comparison::Ne => self.compare_d(read, |a, b| a != b),
            Comparison::Lt => self.compare_d(read, |a, b| a < b),
            Comparison::Le => self.compare_d(read, |a, b| a <= b),
            Comparison::Gt => self.compare_d(read, |a, b| a > b),
            _ => self.compare_d(read, |a, b| a >= b),
        }
    }

    pub(super) fn compare(&mut self, comparison: Comparison, kind: Kind) -> Done {
        use Comparison::*;
        match kind {
            Kind::U16 => self.integers_w(comparison, |a| a as u16),
            Kind::S16 => self.integers_w(comparison, |a| a as i16),
            Kind::U32 => self.integers_w(comparison, |a| a),
            Kind::S32 => self.integers_w(comparison, |a| a as i32),
            Kind::U64 => self.integers_d(comparison, |a| a),
            Kind::S64 => self.integers_d(comparison, |a| a as i64),
            Kind::F32 => match comparison {
                Eq => self.compare_w(f32::from_bits, |a, b| a == b),
                Ne => self.compare_w(f32::from_bits, |a, b| a < b || a > b),
                Lt => self.compare_w(f32::from_bits, |a, b| a < b),
                Le => self.compare_w(f32::from_bits, |a, b| a <= b),
                Gt => self.compare_w(f32::from_bits, |a, b| a > b),
                Ge => self.compare_w(f32::from_bits, |a, b| a >= b),
                Num => self.compare_w(f32::from_bits, |a, b| !a.is_nan() && !b.is_nan()),
                Nan => self.compare_w(f32::from_bits, |a, b| a.is_nan() || b.is_nan()),
                Equ => self.compare_w(f32::from_bits, |a, b| !(a < b || a > b)),
                Neu => self.compare_w(f32::from_bits, |a, b| a != b),
                Ltu => self.compare_w(f32::from_bits, |a, b| !(a >= b)),
                Leu => self.compare_w(f32::from_bits, |a, b| !(a > b)),
                Gtu => self.compare_w(f32::from_bits, |a, b| !(a <= b)),
                Geu => self.compare_w(f32::from_bits, |a, b| !(a < b)),
            },
            Kind::F64 => self.compare_d(f64::from_bits, |a, b| match comparison {
                Eq => a == b,
                Ne => a < b || a > b,
                Lt => a < b,
                Le => a <= b,
                Gt => a > b,
                Ge => a >= b,
                Num => !a.is_nan() && !b.is_nan(),
                Nan => a.is_nan() || b.is_nan(),
                Equ => !(a < b || a > b),
                Neu => a != b,
                Ltu => !(a >= b),
                Leu => !(a > b),
                Gtu => !(a <= b),
                Geu => !(a < b),
            }),
        }
    }
}
