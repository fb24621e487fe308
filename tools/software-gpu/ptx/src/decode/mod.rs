//! Turns statements into compact instructions. An unknown instruction is refused by its name.
//!
//! After this a kernel is only numbers: rows of the register files, offsets, and indices of instructions.

mod access;
mod allocate;
mod forms;
mod instruction;
mod liveness;
mod matrix;
mod operands;
mod rows;

pub use forms::forms;
pub(crate) use forms::{Alu, Comparison, Kind};
pub(crate) use instruction::{ALWAYS, Atomic, Instruction, NEGATED, NO_ROW, Op, Place, Shape};
pub(crate) use rows::{File, Files, Fixed, Rows, Special};

use std::collections::HashMap;

use crate::Error;
use crate::error::syntax;
use crate::syntax::{Body, Guard, Operand, Statement};

/// The start of the parameters' addresses, so that no address of another space is one of them.
pub(crate) const PARAM_BASE: u64 = 0x5a5a_0000_0000_0000;

/// The start of the window of generic addresses of shared memory.
pub(crate) const SHARED_WINDOW: u64 = 0x5a5b_0000_0000_0000;

/// The addresses that the names of a kernel and its module stand for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Symbol {
    Param(u64),
    Shared(u32),
    /// Index of a variable of the module.
    Variable(u32),
}

/// A kernel's instructions, and what their rows mean.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub instructions: Vec<Instruction>,
    pub files: Files,
}

impl Program {
    /// Returns the same program with as few rows as it needs.
    pub(crate) fn allocated(&self) -> Program {
        let mut program = self.clone();
        allocate::allocate(&mut program.instructions, &mut program.files);
        program
    }
}

pub(crate) fn program(body: &Body, symbols: &HashMap<&str, Symbol>) -> Result<Program, Error> {
    let mut registers = body.registers.clone();
    registers.extend(matrix::registers(&body.statements));
    let files = Files::declare(&registers)?;
    let mut decoder = Decoder { files, symbols, labels: &body.labels, line: 0 };
    let mut instructions = Vec::with_capacity(body.statements.len() + 1);
    let mut starts = Vec::with_capacity(body.statements.len() + 1);
    for statement in &body.statements {
        decoder.line = statement.line;
        starts.push(instructions.len() as i64);
        decoder.instructions(statement, &mut instructions)?;
    }
    starts.push(instructions.len() as i64);
    // A statement may be several instructions; labels count statements.
    for instruction in &mut instructions {
        if let Op::Branch | Op::BranchUniform = instruction.op {
            instruction.number = starts[instruction.number as usize];
        }
    }
    // A body may end without a return, and a label may stand at its end.
    let line = decoder.line;
    instructions.push(Instruction { op: Op::Return, guard: ALWAYS, rows: [NO_ROW; 6], number: 0, line });
    Ok(Program { instructions, files: decoder.files })
}

struct Decoder<'a> {
    files: Files,
    symbols: &'a HashMap<&'a str, Symbol>,
    labels: &'a HashMap<&'a str, u32>,
    line: u32,
}

impl Decoder<'_> {
    fn instructions(&mut self, statement: &Statement, list: &mut Vec<Instruction>) -> Result<(), Error> {
        let guard = statement.guard.map_or(Ok(ALWAYS), |guard| self.guard(guard))?;
        if let Some(several) = self.matrix(statement, guard)? {
            list.extend(several);
            return Ok(());
        }
        let (op, rows, number) = self.operation(statement)?;
        list.push(Instruction { op, guard, rows, number, line: statement.line });
        Ok(())
    }

    fn guard(&self, guard: Guard) -> Result<u32, Error> {
        match self.files.register(guard.name) {
            Some((File::Predicates, row)) => Ok(if guard.negated { row | NEGATED } else { row }),
            _ => Err(self.wrong(guard.name, "no predicate")),
        }
    }

    fn operation(&mut self, statement: &Statement) -> Result<(Op, [u32; 6], i64), Error> {
        let Statement { opcode, operands, .. } = statement;
        if let Some(access) = self.access(opcode, operands)? {
            return Ok(access);
        }
        let none = [NO_ROW; 6];
        let (op, number) = match (*opcode, operands.as_slice()) {
            ("bra", [Operand::Name(label)]) => (Op::Branch, self.label(label)?),
            ("bra.uni", [Operand::Name(label)]) => (Op::BranchUniform, self.label(label)?),
            ("ret" | "exit", []) => (Op::Return, 0),
            ("bar.sync" | "barrier.sync.aligned", [Operand::Integer(0)]) => (Op::BlockBarrier, 0),
            ("membar.sys" | "membar.gl" | "membar.cta", []) => (Op::Fence, 0),
            // How long a sleep takes is not said.
            ("nanosleep.u32", [Operand::Name(_) | Operand::Integer(_)]) => {
                self.rows(operands, "w")?;
                (Op::Fence, 0)
            }
            ("mov.u64" | "mov.b64", [_, Operand::Name("%globaltimer")]) => {
                return Ok((Op::Timer, self.rows(&operands[..1], "d")?, 0));
            }
            // A generic address of shared memory.
            ("cvta.shared.u64", [_, _]) => {
                let mut rows = self.rows(operands, "dd")?;
                rows[2] = self.files.of(File::Doubles).fixed(Fixed::Bits(SHARED_WINDOW));
                return Ok((Op::Alu(Alu::AddD), rows, 0));
            }
            ("cp.async.commit_group", []) => (Op::CopyCommit, 0),
            ("cp.async.wait_group", [Operand::Integer(groups)]) => (Op::CopyWait, *groups as i64),
            ("cp.async.wait_all", []) => (Op::CopyWait, 0),
            ("bar.warp.sync", [_]) => return Ok((Op::WarpBarrier, self.rows(operands, "w")?, 0)),
            ("redux.sync.max.u32", _) => return Ok((Op::ReduceMax, self.rows(operands, "www")?, 0)),
            ("vote.sync.any.pred", _) => return Ok((Op::VoteAny, self.rows(operands, "ppw")?, 0)),
            ("shfl.sync.bfly.b32", [first, rest @ ..]) => {
                let (value, valid) = match first {
                    Operand::Both(value, valid) => {
                        (*value, self.row(&Operand::Name(valid), File::Predicates, true)?)
                    }
                    Operand::Name(value) => (*value, NO_ROW),
                    _ => return Err(self.wrong(opcode, "a destination that is no register")),
                };
                let [a, mask, clamp, members, ..] = self.rows_of_sources(rest, "wwww")?;
                let value = self.row(&Operand::Name(value), File::Words, true)?;
                return Ok((Op::ShuffleXor, [value, valid, a, mask, clamp, members], 0));
            }
            _ => return self.alu(opcode, operands),
        };
        Ok((op, none, number))
    }

    fn alu(&mut self, opcode: &str, operands: &[Operand]) -> Result<(Op, [u32; 6], i64), Error> {
        let vector = |operand: &Operand| matches!(operand, Operand::Vector(_));
        let packed = match (opcode, operands) {
            ("mov.b32", [Operand::Vector(parts), whole]) => {
                Some((Alu::UnpackW, parts, None, whole, "ww", File::Words))
            }
            ("mov.b64", [Operand::Vector(parts), whole]) => {
                Some((Alu::UnpackD, parts, None, whole, "ww", File::Doubles))
            }
            ("mov.b32", [whole, Operand::Vector(parts)]) => {
                Some((Alu::PackW, parts, Some(()), whole, "ww", File::Words))
            }
            ("mov.b64", [whole, Operand::Vector(parts)]) => {
                Some((Alu::PackD, parts, Some(()), whole, "ww", File::Doubles))
            }
            _ => None,
        };
        if let Some((alu, parts, packs, whole, _, file)) = packed {
            let [low, high] = parts.as_slice() else { return Err(self.wrong(opcode, "not two parts")) };
            let is_destination = packs.is_none();
            let low = self.row(&Operand::Name(low), File::Words, is_destination)?;
            let high = self.row(&Operand::Name(high), File::Words, is_destination)?;
            let whole = self.row(whole, file, !is_destination)?;
            let rows = if is_destination { [low, high, whole] } else { [whole, low, high] };
            return Ok((Op::Alu(alu), [rows[0], rows[1], rows[2], NO_ROW, NO_ROW, NO_ROW], 0));
        }
        let (alu, files) = match forms::form(opcode) {
            Some(form) if !operands.iter().any(vector) => form,
            _ => return Err(Error::UnknownInstruction { line: self.line, opcode: opcode.to_owned() }),
        };
        Ok((Op::Alu(alu), self.rows(operands, files)?, 0))
    }

    /// Returns the rows of operands. The first row may be a destination.
    fn rows(&mut self, operands: &[Operand], files: &str) -> Result<[u32; 6], Error> {
        self.rows_from(operands, files, files.len() > 1)
    }

    fn rows_of_sources(&mut self, operands: &[Operand], files: &str) -> Result<[u32; 6], Error> {
        self.rows_from(operands, files, false)
    }

    fn rows_from(&mut self, operands: &[Operand], files: &str, first: bool) -> Result<[u32; 6], Error> {
        if operands.len() != files.len() {
            return Err(self.wrong("operands", &format!("{} where {} belong", operands.len(), files.len())));
        }
        let mut rows = [NO_ROW; 6];
        for (k, (operand, file)) in operands.iter().zip(files.bytes()).enumerate() {
            let file = match file {
                b'w' => File::Words,
                b'd' => File::Doubles,
                _ => File::Predicates,
            };
            rows[k] = self.row(operand, file, first && k == 0)?;
        }
        Ok(rows)
    }

    /// Returns the row of an operand in this file.
    fn row(&mut self, operand: &Operand, file: File, is_destination: bool) -> Result<u32, Error> {
        let bits = match (operand, file) {
            (Operand::Name(name), _) => {
                if let Some((found, row)) = self.files.register(name) {
                    return if found == file {
                        Ok(row)
                    } else {
                        Err(self.wrong(name, "a register of another width"))
                    };
                }
                match (rows::special(name), self.symbols.get(name), file) {
                    (Some(special), _, File::Words) => Fixed::Special(special),
                    (_, Some(symbol), _) => self.symbol(name, *symbol, file, 0)?,
                    _ => return Err(self.wrong(name, "unknown name")),
                }
            }
            (Operand::Integer(value), File::Words) => Fixed::Bits(value & 0xffff_ffff),
            (Operand::Integer(value), File::Doubles) => Fixed::Bits(*value),
            (Operand::Integer(value), File::Predicates) => Fixed::Bits(u64::from(*value != 0)),
            (Operand::Single(bits), File::Words) => Fixed::Bits(u64::from(*bits)),
            (Operand::Double(bits), File::Doubles) => Fixed::Bits(*bits),
            _ => return Err(self.wrong("operand", &format!("{operand:?} does not fit here"))),
        };
        if is_destination {
            return Err(self.wrong("destination", &format!("{operand:?} is no register")));
        }
        Ok(self.files.of(file).fixed(bits))
    }

    fn symbol(&self, name: &str, symbol: Symbol, file: File, offset: u64) -> Result<Fixed, Error> {
        match (symbol, file) {
            (Symbol::Param(at), File::Doubles) => {
                Ok(Fixed::Bits(PARAM_BASE.wrapping_add(at).wrapping_add(offset)))
            }
            (Symbol::Shared(at), File::Words) => Ok(Fixed::Bits(u64::from(at.wrapping_add(offset as u32)))),
            (Symbol::Variable(index), File::Doubles) => Ok(Fixed::Variable(index, offset)),
            _ => Err(self.wrong(name, "its address has another width")),
        }
    }

    fn label(&self, label: &str) -> Result<i64, Error> {
        self.labels.get(label).map(|at| i64::from(*at)).ok_or_else(|| self.wrong(label, "no such label"))
    }

    fn wrong(&self, what: &str, why: &str) -> Error {
        syntax(self.line, format!("{what}: {why}"))
    }
}
