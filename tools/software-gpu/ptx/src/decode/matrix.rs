//! Products of small matrices on tensor cores, as simple instructions of the lanes of a warp.
//!
//! PTX does not say which lane has which element, so any layout is allowed. Here lane 2r + h has columns 8h to 8h + 7
//! of row r. Only 16 x 16 x 16 of bf16 with sums in f32, row by row, is known. Products of bf16 are exact in f32; each
//! addition is rounded.

use super::forms::Alu;
use super::rows::{File, Fixed, Special};
use super::{Decoder, Instruction, NO_ROW, Op, Place, Shape};
use crate::Error;
use crate::syntax::{Operand, Register, Statement};

/// Registers that the instructions here use; no PTX text can name them.
const SUMS: usize = 8;
const WORDS: u32 = SUMS as u32 + 6;
const DOUBLES: u32 = 2;
const WORD: &str = "%wmma.word";
const DOUBLE: &str = "%wmma.double";

/// A load or store of four registers of 32 bits.
const FOUR: Shape = Shape { count: 4, bytes: 4, signed: false, is_wide: false };

/// Declares the registers, if a statement needs them.
pub(super) fn registers<'a>(statements: &[Statement]) -> Vec<Register<'a>> {
    if !statements.iter().any(|statement| statement.opcode.starts_with("wmma.")) {
        return Vec::new();
    }
    let declare = |kind, name, count| Register { kind, name, count: Some(count), line: 0 };
    vec![declare(".b32", WORD, WORDS), declare(".b64", DOUBLE, DOUBLES)]
}

/// The instructions of one statement, in order.
struct Made {
    guard: u32,
    line: u32,
    list: Vec<Instruction>,
}

impl Made {
    fn put(&mut self, op: Op, rows: &[u32], number: i64) {
        let mut all = [NO_ROW; 6];
        all[..rows.len()].copy_from_slice(rows);
        self.list.push(Instruction { op, guard: self.guard, rows: all, number, line: self.line });
    }

    fn alu(&mut self, alu: Alu, rows: &[u32]) {
        self.put(Op::Alu(alu), rows, 0);
    }
}

impl Decoder<'_> {
    /// Returns `None` if the opcode is no such product.
    pub(super) fn matrix(
        &mut self,
        statement: &Statement,
        guard: u32,
    ) -> Result<Option<Vec<Instruction>>, Error> {
        let mut made = Made { guard, line: statement.line, list: Vec::new() };
        match (statement.opcode, statement.operands.as_slice()) {
            (
                "wmma.load.a.sync.aligned.row.m16n16k16.bf16" | "wmma.load.b.sync.aligned.row.m16n16k16.bf16",
                [Operand::Vector(parts), from, stride],
            ) => {
                let parts = self.parts::<4>(parts, true)?;
                let (at, offset) = self.place_of_lane(&mut made, from, stride, 1)?;
                let [a, b, c, d] = parts;
                made.put(Op::Load(Place::Generic, FOUR), &[a, b, c, d, at], offset);
            }
            ("wmma.store.d.sync.aligned.row.m16n16k16.global.f32", [to, Operand::Vector(parts), stride]) => {
                let parts = self.parts::<SUMS>(parts, false)?;
                let (at, offset) = self.place_of_lane(&mut made, to, stride, 2)?;
                for (k, half) in parts.chunks_exact(4).enumerate() {
                    let rows = [half[0], half[1], half[2], half[3], at];
                    made.put(Op::Store(Place::Global, FOUR), &rows, offset + 16 * k as i64);
                }
            }
            (
                "wmma.mma.sync.aligned.row.row.m16n16k16.f32.bf16.bf16.f32",
                [Operand::Vector(d), Operand::Vector(a), Operand::Vector(b), Operand::Vector(c)],
            ) => {
                let (a, b) = (self.parts::<4>(a, false)?, self.parts::<4>(b, false)?);
                let (d, c) = (self.parts::<SUMS>(d, true)?, self.parts::<SUMS>(c, false)?);
                self.product(&mut made, (a, b), (d, c))?;
            }
            _ => return Ok(None),
        }
        Ok(Some(made.list))
    }

    fn parts<const N: usize>(&mut self, names: &[&str], is_destination: bool) -> Result<[u32; N], Error> {
        let rows = names.iter().map(|name| self.row(&Operand::Name(name), File::Words, is_destination));
        let rows: Vec<u32> = rows.collect::<Result<_, _>>()?;
        rows.try_into().map_err(|_| self.wrong("operand", &format!("not {N} registers")))
    }

    fn own(&self, name: &str, k: usize) -> Result<u32, Error> {
        let found = self.files.register(&format!("{name}{k}"));
        found.map(|(_, row)| row).ok_or_else(|| self.wrong(name, "no register"))
    }

    fn word(&mut self, value: u32) -> u32 {
        self.files.of(File::Words).fixed(Fixed::Bits(value.into()))
    }

    /// Computes the address of a lane's first element, whose size is `1 << shift` bytes; returns its row and the
    /// offset.
    fn place_of_lane(
        &mut self,
        made: &mut Made,
        base: &Operand,
        stride: &Operand,
        shift: u32,
    ) -> Result<(u32, i64), Error> {
        let (base, offset) = self.address(base, Place::Generic)?;
        let stride = self.row(stride, File::Words, false)?;
        let lane = self.files.of(File::Words).fixed(Fixed::Special(Special::Lane));
        let (row, half) = (self.own(WORD, SUMS)?, self.own(WORD, SUMS + 1)?);
        let (at, column) = (self.own(DOUBLE, 0)?, self.own(DOUBLE, 1)?);
        let (one, eight, shift) = (self.word(1), self.word(8), self.word(shift));
        made.alu(Alu::ShrU32, &[row, lane, one]);
        made.alu(Alu::AndW, &[half, lane, one]);
        made.alu(Alu::WideU32, &[at, row, stride]);
        made.alu(Alu::WideU32, &[column, half, eight]);
        made.alu(Alu::AddD, &[at, at, column]);
        made.alu(Alu::ShlD, &[at, at, shift]);
        made.alu(Alu::AddD, &[at, at, base]);
        Ok((at, offset))
    }

    /// Each lane adds up its row of `a` times its columns of `b`, whose elements come from other lanes.
    fn product(
        &mut self,
        made: &mut Made,
        (a, b): ([u32; 4], [u32; 4]),
        (d, c): ([u32; SUMS], [u32; SUMS]),
    ) -> Result<(), Error> {
        let lane = self.files.of(File::Words).fixed(Fixed::Special(Special::Lane));
        let mut sums = [0; SUMS];
        for (k, sum) in sums.iter_mut().enumerate() {
            *sum = self.own(WORD, k)?;
            made.alu(Alu::MoveW, &[*sum, c[k]]);
        }
        let temporary = |k| self.own(WORD, SUMS + k);
        let (own_row, own_half, distance) = (temporary(0)?, temporary(1)?, temporary(2)?);
        let (factor, taken, value) = (temporary(3)?, temporary(4)?, temporary(5)?);
        let (segment, all) = (self.word(31), self.word(u32::MAX));
        let (one, sixteen, upper) = (self.word(1), self.word(16), self.word(0xffff_0000));
        let (even, first) = (self.word(!1), self.word(0));
        made.alu(Alu::AndW, &[own_row, lane, even]);
        made.alu(Alu::AndW, &[own_half, lane, one]);
        for k in 0..16 {
            // The element of `a`: of the lane of this row that has column k.
            let half = if k < 8 { first } else { one };
            made.alu(Alu::OrW, &[distance, own_row, half]);
            made.alu(Alu::XorW, &[distance, distance, lane]);
            made.put(Op::ShuffleXor, &[taken, NO_ROW, a[k as usize % 8 / 2], distance, segment, all], 0);
            let widened = if k % 2 == 0 { (Alu::ShlW, sixteen) } else { (Alu::AndW, upper) };
            made.alu(widened.0, &[factor, taken, widened.1]);
            let row = self.word(2 * k);
            made.alu(Alu::OrW, &[distance, own_half, row]);
            made.alu(Alu::XorW, &[distance, distance, lane]);
            for (j, pair) in b.iter().enumerate() {
                made.put(Op::ShuffleXor, &[taken, NO_ROW, *pair, distance, segment, all], 0);
                made.alu(Alu::ShlW, &[value, taken, sixteen]);
                made.alu(Alu::MulF32, &[value, factor, value]);
                made.alu(Alu::AddF32, &[sums[2 * j], sums[2 * j], value]);
                made.alu(Alu::AndW, &[value, taken, upper]);
                made.alu(Alu::MulF32, &[value, factor, value]);
                made.alu(Alu::AddF32, &[sums[2 * j + 1], sums[2 * j + 1], value]);
            }
        }
        for (to, sum) in d.iter().zip(sums) {
            made.alu(Alu::MoveW, &[*to, sum]);
        }
        Ok(())
    }
}
