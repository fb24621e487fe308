//! The body of a kernel: its registers, its shared arrays, and its labels and instructions in order.
//!
//! Names stay text here; their meaning is found when the kernel is decoded.

use std::collections::HashMap;

use super::tokens::{Tokens, integer};
use super::{Array, array};
use crate::Error;
use crate::error::syntax;

/// One statement of a body.
#[derive(Clone, Debug)]
pub(crate) struct Statement<'a> {
    pub line: u32,
    pub guard: Option<Guard<'a>>,
    pub opcode: &'a str,
    pub operands: Vec<Operand<'a>>,
}

/// `@%p1` or `@!%p1`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Guard<'a> {
    pub name: &'a str,
    pub negated: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Operand<'a> {
    /// A register, a special register, a symbol or a label.
    Name(&'a str),
    /// An integer, in two's complement.
    Integer(u64),
    /// `0f...`: the bits of an f32.
    Single(u32),
    /// `0d...`: the bits of an f64.
    Double(u64),
    /// `[base + offset]`.
    Address(&'a str, i64),
    /// `{a, b}`.
    Vector(Vec<&'a str>),
    /// `a|b`: a destination and a predicate.
    Both(&'a str, &'a str),
}

/// A declaration `.reg .b32 %r<64>;`, or of a single name without a count.
#[derive(Clone, Debug)]
pub(crate) struct Register<'a> {
    pub kind: &'a str,
    pub name: &'a str,
    pub count: Option<u32>,
    pub line: u32,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Body<'a> {
    pub registers: Vec<Register<'a>>,
    /// The registers that blocks inside the body have declared.
    inner: Vec<usize>,
    pub shared: Vec<Array<'a>>,
    pub statements: Vec<Statement<'a>>,
    /// Index of the statement after each label.
    pub labels: HashMap<&'a str, u32>,
}

impl<'a> Body<'a> {
    /// Reads up to the brace that closes the body. The opening brace has been read.
    pub(crate) fn read(tokens: &mut Tokens<'a>) -> Result<Body<'a>, Error> {
        let mut body = Body::default();
        while !tokens.take("}") {
            body.entry(tokens, false)?;
        }
        Ok(body)
    }

    /// Declares a register of a block inside the body. Blocks beside each other may declare the same register. None of
    /// them reads it before it has written it.
    fn declare(&mut self, register: Register<'a>, is_inside: bool) -> Result<(), Error> {
        let known = self.registers.iter().position(|known| known.name == register.name);
        match known.map(|k| (self.inner.contains(&k), self.registers[k].kind)) {
            Some((true, kind)) if is_inside && kind == register.kind => return Ok(()),
            Some(_) if is_inside => {
                let why = format!("{}: hides a register, or has another type than before", register.name);
                return Err(syntax(register.line, why));
            }
            _ if is_inside => self.inner.push(self.registers.len()),
            _ => {}
        }
        self.registers.push(register);
        Ok(())
    }

    fn entry(&mut self, tokens: &mut Tokens<'a>, is_inside: bool) -> Result<(), Error> {
        let line = tokens.line();
        if tokens.take("{") {
            while !tokens.take("}") {
                self.entry(tokens, true)?;
            }
            return Ok(());
        }
        if tokens.take("@") {
            let negated = tokens.take("!");
            let guard = Guard { name: tokens.word()?, negated };
            let opcode = tokens.word()?;
            return self.statement(tokens, line, Some(guard), opcode);
        }
        match tokens.word()? {
            ".reg" => {
                let kind = tokens.word()?;
                loop {
                    let name = tokens.word()?;
                    let mut count = None;
                    if tokens.take("<") {
                        count = Some(tokens.small()?);
                        tokens.expect(">")?;
                    }
                    self.declare(Register { kind, name, count, line }, is_inside)?;
                    if !tokens.take(",") {
                        break;
                    }
                }
                tokens.expect(";")
            }
            ".shared" => {
                let array = array(tokens)?;
                if array.unsized_ || !array.initial.is_empty() {
                    return Err(syntax(
                        line,
                        format!("{}: a shared array without a size, or with values", array.name),
                    ));
                }
                self.shared.push(array);
                tokens.expect(";")
            }
            // Hints to the assembler alone.
            ".pragma" => {
                tokens.next()?;
                tokens.expect(";")
            }
            directive if directive.starts_with('.') => {
                Err(syntax(line, format!("{directive}: unknown directive in a kernel")))
            }
            label if tokens.take(":") => match self.labels.insert(label, self.statements.len() as u32) {
                None => Ok(()),
                Some(_) => Err(syntax(line, format!("{label}: a second label of this name"))),
            },
            opcode => self.statement(tokens, line, None, opcode),
        }
    }

    fn statement(
        &mut self,
        tokens: &mut Tokens<'a>,
        line: u32,
        guard: Option<Guard<'a>>,
        opcode: &'a str,
    ) -> Result<(), Error> {
        let mut operands = Vec::new();
        while !tokens.take(";") {
            if !operands.is_empty() {
                tokens.expect(",")?;
            }
            operands.push(operand(tokens)?);
        }
        self.statements.push(Statement { line, guard, opcode, operands });
        Ok(())
    }
}

fn operand<'a>(tokens: &mut Tokens<'a>) -> Result<Operand<'a>, Error> {
    let line = tokens.line();
    if tokens.take("[") {
        let base = tokens.word()?;
        let offset = if tokens.take("]") {
            return Ok(Operand::Address(base, 0));
        } else {
            tokens.take("+");
            tokens.integer()? as i64
        };
        tokens.expect("]")?;
        return Ok(Operand::Address(base, offset));
    }
    if tokens.take("{") {
        let mut names = Vec::new();
        while !tokens.take("}") {
            if !names.is_empty() {
                tokens.expect(",")?;
            }
            names.push(tokens.word()?);
        }
        return Ok(Operand::Vector(names));
    }
    if tokens.peek() == Some("-") {
        return tokens.integer().map(Operand::Integer);
    }
    let word = tokens.word()?;
    if let Some((bits, bytes)) = float_bits(word) {
        return Ok(if bytes == 4 { Operand::Single(bits as u32) } else { Operand::Double(bits) });
    }
    if word.starts_with(|first: char| first.is_ascii_digit()) {
        let value = integer(word).ok_or_else(|| syntax(line, format!("{word}: no number")))?;
        return Ok(Operand::Integer(value));
    }
    if tokens.take("|") {
        return Ok(Operand::Both(word, tokens.word()?));
    }
    Ok(Operand::Name(word))
}

/// Returns the bits of `0f3F800000` or `0d3FF0000000000000`, and their number of bytes.
pub(super) fn float_bits(word: &str) -> Option<(u64, u32)> {
    let (digits, bytes) = match word.split_at_checked(2)? {
        ("0f" | "0F", digits) => (digits, 4),
        ("0d" | "0D", digits) => (digits, 8),
        _ => return None,
    };
    let is_whole = digits.len() == 2 * bytes as usize;
    u64::from_str_radix(digits, 16).ok().filter(|_| is_whole).map(|bits| (bits, bytes))
}
