//! The compact form of an instruction: its operation, and rows of the register files.
//!
//! Constants, symbols and special registers are rows too, and are filled before a launch, so no operand needs special
//! treatment.

use super::forms::Alu;

/// A guard that always holds.
pub(crate) const ALWAYS: u32 = u32::MAX;
/// The bit of a negated guard.
pub(crate) const NEGATED: u32 = 1 << 31;
/// The row of an unused destination.
pub(crate) const NO_ROW: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Instruction {
    pub op: Op,
    /// A row of the predicates, perhaps with [`NEGATED`], or [`ALWAYS`].
    pub guard: u32,
    /// Rows, the destination first. The address of an access is in the fifth row.
    pub rows: [u32; 6],
    /// The offset of an address, the target of a branch, the count of a copy.
    pub number: i64,
    /// The line of the PTX text, counted from 1.
    pub line: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Alu(Alu),
    Load(Place, Shape),
    Store(Place, Shape),
    Atomic(Atomic),
    /// Copies 4, 8 or 16 bytes from global to shared memory.
    CopyAsync,
    CopyCommit,
    /// Waits until at most `number` groups are in progress.
    CopyWait,
    Fence,
    Branch,
    /// Branches; all active lanes must agree.
    BranchUniform,
    Return,
    BlockBarrier,
    WarpBarrier,
    ShuffleXor,
    ReduceMax,
    VoteAny,
    /// Reads the clock of the GPU.
    Timer,
}

/// The address space of an access; a generic address of a load or store counts as global.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Global,
    Shared,
    Param,
    /// Global or shared memory, depending on the address.
    Generic,
}

/// The values of an access: how many, and how long each is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub count: u8,
    pub bytes: u8,
    pub signed: bool,
    /// Whether the registers have 64 bits, and thus may be longer than the values.
    pub is_wide: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Atomic {
    AddU32,
    AddU64,
    MaxU32,
    MinU32,
}
