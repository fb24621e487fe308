//! Decodes loads, stores, atomics and asynchronous copies.
//!
//! Generic addresses count as global. No kernel here takes the generic address of shared memory or of a parameter; if
//! one did, its access would be out of bounds.

use super::{Atomic, Decoder, File, Fixed, NO_ROW, Op, Place, Shape};
use crate::Error;
use crate::syntax::Operand;

type Decoded = (Op, [u32; 6], i64);

impl Decoder<'_> {
    /// Returns `None` if the opcode is not an access to memory.
    pub(super) fn access(&mut self, opcode: &str, operands: &[Operand]) -> Result<Option<Decoded>, Error> {
        if let Some((is_load, place, mut shape)) = plain(opcode) {
            let (values, address) = match (is_load, operands) {
                (true, [values, address]) | (false, [address, values]) => (values, address),
                _ => return Err(self.wrong(opcode, "two operands belong here")),
            };
            // A register may be wider than the value: what is loaded is extended, what is stored is cut.
            let first = match values {
                Operand::Vector(names) => names.first().copied(),
                Operand::Name(name) => Some(*name),
                _ => None,
            };
            if let Some((File::Doubles, _)) = first.and_then(|name| self.files.register(name)) {
                shape.is_wide = true;
            }
            let file = if shape.is_wide { File::Doubles } else { File::Words };
            let mut rows = [NO_ROW; 6];
            match (values, shape.count) {
                (Operand::Vector(names), count) if names.len() == usize::from(count) && count > 1 => {
                    for (k, name) in names.iter().enumerate() {
                        rows[k] = self.row(&Operand::Name(name), file, is_load)?;
                    }
                }
                (operand, 1) => rows[0] = self.row(operand, file, is_load)?,
                _ => return Err(self.wrong(opcode, "another number of values")),
            }
            let (row, offset) = self.address(address, place)?;
            rows[4] = row;
            let op = if is_load { Op::Load(place, shape) } else { Op::Store(place, shape) };
            return Ok(Some((op, rows, offset)));
        }
        let atomic = match opcode {
            "atom.global.add.u32" => Atomic::AddU32,
            "atom.global.add.u64" => Atomic::AddU64,
            "atom.global.max.u32" => Atomic::MaxU32,
            "atom.global.min.u32" => Atomic::MinU32,
            "cp.async.ca.shared.global" => return self.copy(opcode, operands).map(Some),
            _ => return Ok(None),
        };
        let [old, address, value] = operands else {
            return Err(self.wrong(opcode, "three operands belong here"));
        };
        let file = if atomic == Atomic::AddU64 { File::Doubles } else { File::Words };
        let (row, offset) = self.address(address, Place::Global)?;
        let old = self.row(old, file, true)?;
        let value = self.row(value, file, false)?;
        Ok(Some((Op::Atomic(atomic), [old, value, NO_ROW, NO_ROW, row, NO_ROW], offset)))
    }

    fn copy(&mut self, opcode: &str, operands: &[Operand]) -> Result<Decoded, Error> {
        let [to, from, Operand::Integer(bytes @ (4 | 8 | 16)), rest @ ..] = operands else {
            return Err(self.wrong(opcode, "not 4, 8 or 16 bytes"));
        };
        if !matches!(rest, [] | [Operand::Integer(_)])
            || rest.first().is_some_and(|r| *r != Operand::Integer(*bytes))
        {
            return Err(self.wrong(opcode, "a source that is shorter than the copy is unknown here"));
        }
        match (self.address(to, Place::Shared)?, self.address(from, Place::Global)?) {
            ((to, 0), (from, 0)) => {
                Ok((Op::CopyAsync, [to, from, NO_ROW, NO_ROW, NO_ROW, NO_ROW], *bytes as i64))
            }
            _ => Err(self.wrong(opcode, "an offset is unknown here")),
        }
    }

    /// Returns the row that has an address, and the offset to add to it.
    pub(super) fn address(&mut self, operand: &Operand, place: Place) -> Result<(u32, i64), Error> {
        let Operand::Address(base, offset) = operand else {
            return Err(self.wrong("operand", &format!("{operand:?} is no address")));
        };
        let file = if place == Place::Shared { File::Words } else { File::Doubles };
        if self.files.register(base).is_some() {
            return Ok((self.row(&Operand::Name(base), file, false)?, *offset));
        }
        let symbol = *self.symbols.get(base).ok_or_else(|| self.wrong(base, "unknown name"))?;
        let fixed: Fixed = self.symbol(base, symbol, file, *offset as u64)?;
        Ok((self.files.of(file).fixed(fixed), 0))
    }
}

/// Reads `ld.volatile.global.v2.f32`: whether it loads, from where, and its values.
fn plain(opcode: &str) -> Option<(bool, Place, Shape)> {
    let mut parts = opcode.split('.');
    let is_load = match parts.next()? {
        "ld" => true,
        "st" => false,
        _ => return None,
    };
    let mut parts = parts.peekable();
    let is_volatile = parts.next_if_eq(&"volatile").is_some();
    let place = match *parts.peek()? {
        "shared" => Place::Shared,
        "param" if is_load && !is_volatile => Place::Param,
        _ => Place::Global,
    };
    parts.next_if(|part| matches!(*part, "global" | "shared" | "param"));
    if is_load && place == Place::Global {
        parts.next_if_eq(&"nc");
    }
    if place == Place::Global && !is_volatile {
        // Hints to the caches.
        parts.next_if(|part| matches!(*part, "ca" | "cg" | "cs" | "lu" | "wb" | "wt"));
    }
    let count = match *parts.peek()? {
        "v2" => 2,
        "v4" => 4,
        _ => 1,
    };
    if count > 1 {
        parts.next();
    }
    let (bytes, signed) = match parts.next()? {
        "b8" | "u8" => (1, false),
        "s8" => (1, true),
        "b16" | "u16" => (2, false),
        "s16" => (2, true),
        "b32" | "u32" | "s32" | "f32" => (4, false),
        "b64" | "u64" | "s64" | "f64" => (8, false),
        _ => return None,
    };
    let is_known = parts.next().is_none() && count * bytes <= 16;
    is_known.then_some((is_load, place, Shape { count, bytes, signed, is_wide: bytes == 8 }))
}
