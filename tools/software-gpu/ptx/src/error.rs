//! The reason why a text, a launch or an access was refused.
//!
//! A fault names the thread, the block and the line of the PTX, so that it can be found without a rerun.

use std::fmt;

/// The reason why a module, a launch or an access of a thread is refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The text is not PTX that this crate knows.
    #[error("line {line}: {what}")]
    Syntax {
        /// The line of the PTX text, counted from 1.
        line: u32,
        /// The part of the text, and what is wrong with it.
        what: String,
    },
    /// No instruction of this name is known here.
    #[error("line {line}: {opcode}: unknown instruction; add it to the table of forms")]
    UnknownInstruction {
        /// The line of the PTX text, counted from 1.
        line: u32,
        /// The instruction as it is written, with all modifiers.
        opcode: String,
    },
    /// The launch itself is wrong: its shape, its parameters, its addresses.
    #[error("{0}")]
    Launch(String),
    /// A thread did what no thread may.
    #[error(transparent)]
    Fault(Box<Fault>),
}

/// What a thread did, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Name of the kernel.
    pub kernel: String,
    /// Index of the block in the grid.
    pub block: [u32; 3],
    /// Index of the thread in its block.
    pub thread: [u32; 3],
    /// The line of the PTX text, counted from 1.
    pub line: u32,
    /// The text of that line.
    pub instruction: String,
    /// The first wrong address, if the fault is about one.
    pub address: Option<u64>,
    /// The rule that was broken.
    pub what: What,
}

/// The rule that a thread broke.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum What {
    /// The caller's memory refused the access, with this text.
    #[error("{0}")]
    Memory(String),
    /// An address is not a multiple of the access's size.
    #[error("misaligned access of {0} bytes")]
    Misaligned(u32),
    /// An access outside every array of this address space.
    #[error("{0} access out of bounds")]
    OutOfBounds(&'static str),
    /// A register that this thread has not written.
    #[error("register {0} is read before it is written")]
    UninitialisedRegister(String),
    /// Shared memory that no thread of the block has written.
    #[error("shared memory is read before it is written")]
    UninitialisedShared,
    /// Two threads touch the same byte, one of them writes, and no barrier lies between.
    #[error("race in {space} memory with {other}: no barrier lies between")]
    Race {
        /// The address space.
        space: &'static str,
        /// The other thread, in words.
        other: String,
    },
    /// Shared memory is touched while an asynchronous copy into it may be in progress.
    #[error("shared memory is touched before the asynchronous copy into it was waited for")]
    CopyInFlight,
    /// Lanes of a warp, or warps of a block, never meet at the barrier.
    #[error("divergent barrier: {0}")]
    BarrierDivergence(String),
    /// A use that PTX leaves undefined.
    #[error("undefined: {0}")]
    Undefined(&'static str),
    /// More instructions than a launch may take.
    #[error("the launch does not end: {0} instructions of one warp")]
    Endless(u64),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Fault { kernel, block, thread, line, instruction, address, what } = self;
        write!(f, "{kernel}: block {block:?}, thread {thread:?}")?;
        if let Some(address) = address {
            write!(f, ", address {address:#x}")?;
        }
        write!(f, ": {what}; line {line}: {instruction}")
    }
}

impl std::error::Error for Fault {}

pub(crate) fn syntax(line: u32, what: impl Into<String>) -> Error {
    Error::Syntax { line, what: what.into() }
}
