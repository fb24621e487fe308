//! Says which rows an instruction reads and writes, and to which file each belongs.
//!
//! Decoding and this file must agree about every slot; otherwise a register would get the row of another one.

use super::forms::{ALU, Alu, Kind};
use super::instruction::{ALWAYS, Instruction, NEGATED, NO_ROW, Op, Place, Shape};
use super::rows::File;

/// A row in a slot of an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Operand {
    pub slot: usize,
    pub file: File,
    pub row: u32,
    pub is_written: bool,
}

/// The operands in the slots of an instruction, without its guard.
pub(super) fn operands(instruction: &Instruction) -> impl Iterator<Item = Operand> + use<> {
    let rows = instruction.rows;
    files(instruction.op).into_iter().enumerate().filter_map(move |(slot, file)| {
        let (file, is_written) = file?;
        (rows[slot] != NO_ROW).then_some(Operand { slot, file, row: rows[slot], is_written })
    })
}

/// Returns the predicate of a guard.
pub(super) fn guard(instruction: &Instruction) -> Option<u32> {
    (instruction.guard != ALWAYS).then_some(instruction.guard & !NEGATED)
}

type Slot = Option<(File, bool)>;

/// Returns the files of all slots. A capital letter is a destination.
fn slots(letters: &str) -> [Slot; 6] {
    let mut slots = [None; 6];
    for (slot, letter) in slots.iter_mut().zip(letters.chars()) {
        let file = match letter.to_ascii_lowercase() {
            'w' => File::Words,
            'd' => File::Doubles,
            'p' => File::Predicates,
            _ => continue,
        };
        *slot = Some((file, letter.is_ascii_uppercase()));
    }
    slots
}

fn files(op: Op) -> [Slot; 6] {
    match op {
        Op::Alu(alu) => alu_files(alu),
        Op::Load(place, shape) => access(place, shape, true),
        Op::Store(place, shape) => access(place, shape, false),
        Op::Atomic(super::Atomic::AddU64) => slots("Dd  d"),
        Op::Atomic(_) => slots("Ww  d"),
        Op::CopyAsync => slots("wd"),
        Op::WarpBarrier => slots("w"),
        Op::ShuffleXor => slots("WPwwww"),
        Op::ReduceMax => slots("Www"),
        Op::VoteAny => slots("Ppw"),
        Op::Timer => slots("D"),
        Op::CopyCommit
        | Op::CopyWait
        | Op::Fence
        | Op::Branch
        | Op::BranchUniform
        | Op::Return
        | Op::BlockBarrier => [None; 6],
    }
}

fn alu_files(alu: Alu) -> [Slot; 6] {
    match alu {
        Alu::PackW => slots("Www"),
        Alu::UnpackW => slots("WWw"),
        Alu::PackD => slots("Dww"),
        Alu::UnpackD => slots("WWd"),
        Alu::Compare(_, Kind::U64 | Kind::S64 | Kind::F64) => slots("Pdd"),
        Alu::Compare(..) => slots("Pww"),
        other => {
            let letters = ALU.iter().find(|(_, alu, _)| *alu == other).map_or("", |(_, _, files)| files);
            let mut found = slots(letters);
            if let Some((_, is_written)) = &mut found[0] {
                *is_written = true;
            }
            found
        }
    }
}

fn access(place: Place, shape: Shape, is_load: bool) -> [Slot; 6] {
    let mut slots = [None; 6];
    let file = if shape.is_wide { File::Doubles } else { File::Words };
    slots[..usize::from(shape.count)].fill(Some((file, is_load)));
    let address = if place == Place::Shared { File::Words } else { File::Doubles };
    slots[4] = Some((address, false));
    slots
}
