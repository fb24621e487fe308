//! The register files of a kernel while it is decoded: the row of each name, constant or symbol.
//!
//! The rows of a file are its registers in the order of their declaration. Then come constants and special registers in
//! the order of their use.

use std::collections::HashMap;

use crate::Error;
use crate::error::syntax;
use crate::syntax::Register;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum File {
    /// Registers of 16 and 32 bits.
    Words,
    /// Registers of 64 bits.
    Doubles,
    Predicates,
}

/// A value that a launch or a warp fills in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Special {
    /// A component (x, y, z) of `%tid`, `%ntid`, `%ctaid` or `%nctaid`.
    Thread(u8),
    Threads(u8),
    Block(u8),
    Blocks(u8),
    Lane,
    Warp,
}

/// The value of a row before the first instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Fixed {
    Bits(u64),
    Special(Special),
    /// An address inside a variable of the module: its index, and an offset.
    Variable(u32, u64),
}

/// The rows of one file.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rows {
    pub registers: u32,
    pub fixed: Vec<Fixed>,
    places: HashMap<Fixed, u32>,
}

impl Rows {
    pub(crate) fn fixed(&mut self, value: Fixed) -> u32 {
        *self.places.entry(value).or_insert_with(|| {
            self.fixed.push(value);
            self.registers + self.fixed.len() as u32 - 1
        })
    }

    pub(crate) fn count(&self) -> usize {
        self.registers as usize + self.fixed.len()
    }
}

/// Registers that were declared together.
#[derive(Clone, Debug)]
struct Range {
    prefix: String,
    /// The number of registers; `None` for a single register with the name of the prefix.
    count: Option<u32>,
    file: File,
    first: u32,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Files {
    pub words: Rows,
    pub doubles: Rows,
    pub predicates: Rows,
    ranges: Vec<Range>,
    /// The registers that rows had at first, once several registers share a row.
    renamed: HashMap<(File, u32), u32>,
}

impl Files {
    pub(crate) fn declare(registers: &[Register]) -> Result<Files, Error> {
        let mut files = Files::default();
        for register in registers {
            let file = match register.kind {
                ".b16" | ".u16" | ".s16" | ".f16" | ".b32" | ".u32" | ".s32" | ".f32" => File::Words,
                ".b64" | ".u64" | ".s64" | ".f64" => File::Doubles,
                ".pred" => File::Predicates,
                other => return Err(syntax(register.line, format!("{other}: unknown type of a register"))),
            };
            let rows = &mut files.of(file).registers;
            let range = Range { prefix: register.name.to_owned(), count: register.count, file, first: *rows };
            *rows = rows
                .checked_add(register.count.unwrap_or(1))
                .filter(|rows| *rows < 1 << 24)
                .ok_or_else(|| syntax(register.line, "more registers than this crate keeps"))?;
            files.ranges.push(range);
        }
        Ok(files)
    }

    pub(crate) fn of(&mut self, file: File) -> &mut Rows {
        match file {
            File::Words => &mut self.words,
            File::Doubles => &mut self.doubles,
            File::Predicates => &mut self.predicates,
        }
    }

    pub(crate) fn register(&self, name: &str) -> Option<(File, u32)> {
        let prefix = name.trim_end_matches(|digit: char| digit.is_ascii_digit());
        let index: Option<u32> = name[prefix.len()..].parse().ok();
        self.ranges.iter().find_map(|range| match range.count {
            Some(count) if range.prefix == prefix => {
                Some((range.file, range.first + index.filter(|index| *index < count)?))
            }
            None if range.prefix == name => Some((range.file, range.first)),
            _ => None,
        })
    }

    pub(super) fn rename(&mut self, file: File, row: u32, register: u32) {
        self.renamed.insert((file, row), register);
    }

    /// Returns the name of a register that is alive from the start, for messages.
    pub(crate) fn name(&self, file: File, row: u32) -> String {
        let row = self.renamed.get(&(file, row)).copied().unwrap_or(row);
        let of = self.ranges.iter().find(|range| {
            range.file == file && (range.first..range.first + range.count.unwrap_or(1)).contains(&row)
        });
        match of {
            Some(range) if range.count.is_some() => format!("{}{}", range.prefix, row - range.first),
            Some(range) => range.prefix.clone(),
            None => format!("{file:?} {row}"),
        }
    }
}

/// Returns the special register of this name.
pub(crate) fn special(name: &str) -> Option<Special> {
    let axis = |name: &str| match name {
        ".x" => Some(0),
        ".y" => Some(1),
        ".z" => Some(2),
        _ => None,
    };
    match name {
        "%laneid" => return Some(Special::Lane),
        "%warpid" => return Some(Special::Warp),
        _ => {}
    }
    let (kind, along) = name.split_at_checked(name.len().checked_sub(2)?)?;
    let along = axis(along)?;
    match kind {
        "%tid" => Some(Special::Thread(along)),
        "%ntid" => Some(Special::Threads(along)),
        "%ctaid" => Some(Special::Block(along)),
        "%nctaid" => Some(Special::Blocks(along)),
        _ => None,
    }
}
