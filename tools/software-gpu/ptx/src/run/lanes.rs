//! One instruction over the 32 lanes of a warp: reads rows, computes each lane, and stores the active lanes.
//!
//! A method is named after the files of its operands, the destination first: `w` means 32 bits, `d` means 64 bits. Its
//! loops have a fixed length, so that the compiler can vectorise them.

use super::Trap;
use super::float::{canonical, settled};
use super::registers::{LANES, Registers};
use crate::What;

pub(super) type Done = Result<(), Box<Trap>>;

/// Rows of results and sources, and the lanes that take part.
pub(super) struct Run<'a> {
    pub registers: &'a mut Registers,
    pub rows: [u32; 6],
    pub active: u32,
}

impl Run<'_> {
    #[inline(always)]
    pub(super) fn w(&self, k: usize) -> Result<&[u32; LANES], Box<Trap>> {
        self.registers.word(self.rows[k], self.active)
    }

    #[inline(always)]
    pub(super) fn d(&self, k: usize) -> Result<&[u64; LANES], Box<Trap>> {
        self.registers.double(self.rows[k], self.active)
    }

    #[inline(always)]
    pub(super) fn ww(&mut self, f: impl Fn(u32) -> u32) -> Done {
        let a = self.w(1)?;
        let mut value = [0; LANES];
        for k in 0..LANES {
            value[k] = f(a[k]);
        }
        self.registers.set_word(self.rows[0], self.active, &value);
        Ok(())
    }

    #[inline(always)]
    pub(super) fn www(&mut self, f: impl Fn(u32, u32) -> u32) -> Done {
        let (a, b) = (self.w(1)?, self.w(2)?);
        let mut value = [0; LANES];
        for k in 0..LANES {
            value[k] = f(a[k], b[k]);
        }
        self.registers.set_word(self.rows[0], self.active, &value);
        Ok(())
    }

    #[inline(always)]
    pub(super) fn wwww(&mut self, f: impl Fn(u32, u32, u32) -> u32) -> Done {
        let (a, b, c) = (self.w(1)?, self.w(2)?, self.w(3)?);
        let mut value = [0; LANES];
        for k in 0..LANES {
            value[k] = f(a[k], b[k], c[k]);
        }
        self.registers.set_word(self.rows[0], self.active, &value);
        Ok(())
    }

    #[inline(always)]
    pub(super) fn wd(&mut self, f: impl Fn(u64) -> u32) -> Done {
        let a = self.d(1)?;
        let mut value = [0; LANES];
        for k in 0..LANES {
            value[k] = f(a[k]);
        }
        self.registers.set_word(self.rows[0], self.active, &value);
        Ok(())
    }

    #[inline(always)]
    pub(super) fn dw(&mut self, f: impl Fn(u32) -> u64) -> Done {
        let a = self.w(1)?;
        let mut value = [0; LANES];
        for k in 0..LANES {
            value[k] = f(a[k]);
        }
        self.registers.set_double(self.rows[0], self.active, &value);
        Ok(())
    }

    #[inline(always)]
    pub(super) fn dww(&mut self, f: impl Fn(u32, u32) -> u64) -> Done {
        let (a, b) = (self.w(1)?, self.w(2)?);
        let mut value = [0; LANES];
        for k in 0..LANES {
            value[k] = f(a[k], b[k]);
        }
        self.registers.set_double(self.rows[0], self.active, &value);
        Ok(())
    }

    #[inline(always)]
    pub(super) fn dd(&mut self, f: impl Fn(u64) -> u64) -> Done {
        let a = self.d(1)?;
        let mut value = [0; LANES];
        for k in 0..LANES {
            value[k] = f(a[k]);
        }
        self.registers.set_double(self.rows[0], self.active, &value);
        Ok(())
    }

    #[inline(always)]
    pub(super) fn ddd(&mut self, f: impl Fn(u64, u64) -> u64) -> Done {
        let (a, b) = (self.d(1)?, self.d(2)?);
        let mut value = [0; LANES];
        for k in 0..LANES {
            value[k] = f(a[k], b[k]);
        }
        self.registers.set_double(self.rows[0], self.active, &value);
        Ok(())
    }

    #[inline(always)]
    pub(super) fn f32_2(&mut self, f: impl Fn(f32, f32) -> f32) -> Done {
        self.www(|a, b| canonical(f(f32::from_bits(a), f32::from_bits(b))))
    }

    #[inline(always)]
    pub(super) fn f64_2(&mut self, f: impl Fn(f64, f64) -> f64) -> Done {
        self.ddd(|a, b| settled(f(f64::from_bits(a), f64::from_bits(b))))
    }

    #[inline(always)]
    pub(super) fn f64_3(&mut self, f: impl Fn(f64, f64, f64) -> f64) -> Done {
        let (a, b, c) = (self.d(1)?, self.d(2)?, self.d(3)?);
        let mut value = [0; LANES];
        for k in 0..LANES {
            value[k] = settled(f(f64::from_bits(a[k]), f64::from_bits(b[k]), f64::from_bits(c[k])));
        }
        self.registers.set_double(self.rows[0], self.active, &value);
        Ok(())
    }

    /// Usually all lanes shift by the same amount. That is one CPU instruction for several lanes.
    #[inline(always)]
    pub(super) fn shift_w(&mut self, f: impl Fn(u32, u32) -> u32) -> Done {
        let b = *self.w(2)?;
        if b == [b[0]; LANES] {
            return self.ww(|a| f(a, b[0]));
        }
        self.www(f)
    }

    #[inline(always)]
    pub(super) fn shift_d(&mut self, f: impl Fn(u64, u32) -> u64) -> Done {
        let b = *self.w(2)?;
        if b == [b[0]; LANES] {
            return self.dd(|a| f(a, b[0]));
        }
        let a = self.d(1)?;
        let mut value = [0; LANES];
        for k in 0..LANES {
            value[k] = f(a[k], b[k]);
        }
        self.registers.set_double(self.rows[0], self.active, &value);
        Ok(())
    }

    /// Refuses a division by zero, whose result PTX does not define.
    pub(super) fn divisor(&self, is_zero: impl Fn(usize) -> bool) -> Done {
        match (0..LANES as u32).find(|lane| self.active >> lane & 1 != 0 && is_zero(*lane as usize)) {
            Some(lane) => Err(Trap::at(lane, What::Undefined("an integer division by zero"))),
            None => Ok(()),
        }
    }

    pub(super) fn divide_w(&mut self, f: impl Fn(u32, u32) -> u32) -> Done {
        let b = self.w(2)?;
        self.divisor(|lane| b[lane] == 0)?;
        self.www(|a, b| f(a, b.max(1)))
    }

    pub(super) fn divide_d(&mut self, f: impl Fn(u64, u64) -> u64) -> Done {
        let b = self.d(2)?;
        self.divisor(|lane| b[lane] == 0)?;
        self.ddd(|a, b| f(a, b.max(1)))
    }

    pub(super) fn p(&mut self, f: impl Fn(u32) -> u32) -> Done {
        let a = self.registers.predicate(self.rows[1], self.active)?;
        self.registers.set_predicate(self.rows[0], self.active, f(a));
        Ok(())
    }

    pub(super) fn pp(&mut self, f: impl Fn(u32, u32) -> u32) -> Done {
        let a = self.registers.predicate(self.rows[1], self.active)?;
        let b = self.registers.predicate(self.rows[2], self.active)?;
        self.registers.set_predicate(self.rows[0], self.active, f(a, b));
        Ok(())
    }

    pub(super) fn select_w(&mut self) -> Done {
        let (a, b) = (self.w(1)?, self.w(2)?);
        let choice = self.registers.predicate(self.rows[3], self.active)?;
        let mut value = [0; LANES];
        for k in 0..LANES {
            value[k] = if choice >> k & 1 != 0 { a[k] } else { b[k] };
        }
        self.registers.set_word(self.rows[0], self.active, &value);
        Ok(())
    }

    pub(super) fn select_d(&mut self) -> Done {
        let (a, b) = (self.d(1)?, self.d(2)?);
        let choice = self.registers.predicate(self.rows[3], self.active)?;
        let mut value = [0; LANES];
        for k in 0..LANES {
            value[k] = if choice >> k & 1 != 0 { a[k] } else { b[k] };
        }
        self.registers.set_double(self.rows[0], self.active, &value);
        Ok(())
    }

    /// Writes the halves of a word to the first two rows. `_` is not supported as a row, because no compiler of kernels
    /// writes it here.
    pub(super) fn unpack_w(&mut self) -> Done {
        let whole = *self.w(2)?;
        self.halves(|lane| whole[lane] & 0xffff, |lane| whole[lane] >> 16)
    }

    pub(super) fn unpack_d(&mut self) -> Done {
        let whole = *self.d(2)?;
        self.halves(|lane| whole[lane] as u32, |lane| (whole[lane] >> 32) as u32)
    }

    #[inline(always)]
    fn halves(&mut self, low: impl Fn(usize) -> u32, high: impl Fn(usize) -> u32) -> Done {
        let (mut lows, mut highs) = ([0; LANES], [0; LANES]);
        for k in 0..LANES {
            lows[k] = low(k);
            highs[k] = high(k);
        }
        self.registers.set_word(self.rows[0], self.active, &lows);
        self.registers.set_word(self.rows[1], self.active, &highs);
        Ok(())
    }

    /// Puts the low `length` bits of one word into another from bit `position` on.
    pub(super) fn insert_w(&mut self) -> Done {
        let (from, into, position, length) = (self.w(1)?, self.w(2)?, self.w(3)?, self.w(4)?);
        let mut value = [0; LANES];
        for k in 0..LANES {
            let inserted = insert(from[k].into(), into[k].into(), position[k], length[k]);
            value[k] = inserted as u32;
        }
        self.registers.set_word(self.rows[0], self.active, &value);
        Ok(())
    }

    pub(super) fn insert_d(&mut self) -> Done {
        let (from, into, position, length) = (self.d(1)?, self.d(2)?, self.w(3)?, self.w(4)?);
        let mut value = [0; LANES];
        for k in 0..LANES {
            value[k] = insert(from[k], into[k], position[k], length[k]);
        }
        self.registers.set_double(self.rows[0], self.active, &value);
        Ok(())
    }
}

/// Inserts bits; positions and lengths have 8 bits.
fn insert(from: u64, into: u64, position: u32, length: u32) -> u64 {
    let ones = 1u64.checked_shl(length & 0xff).map_or(u64::MAX, |bit| bit - 1);
    let mask = ones.checked_shl(position & 0xff).unwrap_or(0);
    into & !mask | from.checked_shl(position & 0xff).unwrap_or(0) & mask
}
