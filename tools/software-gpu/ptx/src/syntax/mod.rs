//! The part of PTX's grammar that compilers of kernels use: directives, labels, instructions.
//!
//! Nothing here knows the meaning of an instruction. A directive that is not listed is refused, not skipped.

mod body;
mod tokens;

pub(crate) use body::{Body, Guard, Operand, Register, Statement};
pub(crate) use tokens::Tokens;

use crate::Error;
use crate::error::syntax;

/// A variable of a module or of a kernel, or a parameter.
#[derive(Clone, Debug)]
pub(crate) struct Array<'a> {
    pub name: &'a str,
    pub align: u64,
    pub bytes: u64,
    /// Declared with `[]`: its size comes with the launch.
    pub unsized_: bool,
    pub initial: Vec<u8>,
}

/// Returns the bytes of a value of this type, such as `.b32`.
pub(crate) fn type_bytes(kind: &str) -> Option<u64> {
    match kind {
        ".b8" | ".u8" | ".s8" => Some(1),
        ".b16" | ".u16" | ".s16" | ".f16" | ".bf16" => Some(2),
        ".b32" | ".u32" | ".s32" | ".f32" => Some(4),
        ".b64" | ".u64" | ".s64" | ".f64" => Some(8),
        _ => None,
    }
}

/// Reads `.align 8 .b8 name[16] = {1, 2}`, without the text before and after it.
pub(crate) fn array<'a>(tokens: &mut Tokens<'a>) -> Result<Array<'a>, Error> {
    let line = tokens.line();
    let mut align = None;
    if tokens.take(".align") {
        align = Some(u64::from(tokens.small()?));
    }
    let kind = tokens.word()?;
    let element =
        type_bytes(kind).ok_or_else(|| syntax(line, format!("{kind}: unknown type of a variable")))?;
    let align = align.unwrap_or(element);
    if !align.is_power_of_two() {
        return Err(syntax(line, format!("alignment {align} is no power of two")));
    }
    let name = tokens.word()?;
    let (mut bytes, mut unsized_) = (element, false);
    while tokens.take("[") {
        if tokens.take("]") {
            unsized_ = true;
            bytes = 0;
            continue;
        }
        let count = u64::from(tokens.small()?);
        bytes = bytes.checked_mul(count).ok_or_else(|| syntax(line, format!("{name} is too large")))?;
        tokens.expect("]")?;
    }
    let mut initial = Vec::new();
    if tokens.take("=") {
        let braced = tokens.take("{");
        loop {
            let line = tokens.line();
            let value = value(tokens, element)
                .map_err(|_| syntax(line, format!("{name}: an initial value that is no number")))?;
            initial.extend_from_slice(&value.to_le_bytes()[..element as usize]);
            if !braced || !tokens.take(",") {
                break;
            }
        }
        if braced {
            tokens.expect("}")?;
        }
        if initial.len() as u64 > bytes {
            return Err(syntax(line, format!("{name} has more initial values than elements")));
        }
    }
    Ok(Array { name, align, bytes, unsized_, initial })
}

/// Reads a number, or the bits of a float with this number of bytes.
fn value(tokens: &mut Tokens, bytes: u64) -> Result<u64, Error> {
    let float = tokens.peek().and_then(body::float_bits);
    match float {
        Some((bits, float_bytes)) if u64::from(float_bytes) == bytes => tokens.next().map(|_| bits),
        _ => tokens.integer(),
    }
}
