//! Gives registers that are never alive together the same row, so that the files of a warp fit into a cache.
//!
//! The compiler writes a new register for each value, thousands in a kernel. Some hundred rows are enough for them.

use super::instruction::{ALWAYS, Instruction, NEGATED};
use super::liveness::{Numbers, intervals};
use super::operands::{guard, operands};
use super::rows::{File, Files};

/// Replaces the rows of all instructions, and updates the sizes of the files.
pub(super) fn allocate(instructions: &mut [Instruction], files: &mut Files) {
    let numbers = Numbers::of(files);
    let intervals = intervals(instructions, numbers);
    let mut places = vec![0; numbers.count()];
    let mut counts = [File::Words, File::Doubles, File::Predicates].map(|file| {
        let registers = files.of(file).registers;
        let mine = (0..registers).filter_map(|row| {
            let number = numbers.number(file, row)?;
            intervals[number].map(|interval| (interval, number, row))
        });
        let mut mine: Vec<_> = mine.collect();
        mine.sort_unstable();
        let (mut used, mut free, mut taken) = (0, Vec::new(), Vec::<(usize, u32)>::new());
        for ((first, last), number, old) in mine {
            taken.retain(|(end, place)| {
                let is_alive = *end >= first;
                if !is_alive {
                    free.push(*place);
                }
                is_alive
            });
            let place = free.pop().unwrap_or_else(|| {
                used += 1;
                used - 1
            });
            // What is alive at the start may be read before it is written, and then needs its name.
            if first == 0 {
                files.rename(file, place, old);
            }
            places[number] = place;
            taken.push((last, place));
        }
        (file, registers, used)
    });
    let place = |file: File, row: u32| match numbers.number(file, row) {
        Some(number) => places[number],
        None => {
            let count = counts.iter().find(|(other, ..)| *other == file);
            count.map_or(row, |(_, registers, used)| row - registers + used)
        }
    };
    for instruction in instructions.iter_mut() {
        for operand in operands(instruction).collect::<Vec<_>>() {
            instruction.rows[operand.slot] = place(operand.file, operand.row);
        }
        if let Some(row) = guard(instruction) {
            debug_assert!(instruction.guard != ALWAYS);
            instruction.guard = instruction.guard & NEGATED | place(File::Predicates, row);
        }
    }
    for (file, _, used) in &mut counts {
        files.of(*file).registers = *used;
    }
}

#[cfg(test)]
mod tests {
    use crate::{Kernel, Module};

    fn kernel(body: &str) -> Kernel {
        let text = format!(
            ".version 9.0 .target sm_90 .address_size 64
.entry k() {{ .reg .pred %p<4>; .reg .b32 %r<99>; .reg .b64 %rd<9>; {body} ret; }}"
        );
        Module::parse(&text).unwrap().kernel("k").unwrap().clone()
    }

    #[test]
    fn values_that_follow_each_other_share_rows() {
        let chain: String = (1..90).map(|k| format!("add.s32 %r{}, %r{k}, 1; ", k + 1)).collect();
        let kernel = kernel(&format!("mov.u32 %r1, 0; {chain}"));
        assert_eq!(kernel.0.program().files.words.registers, 2);
    }

    #[test]
    fn a_value_that_a_loop_needs_again_keeps_its_row() {
        let body = "mov.u32 %r1, 5; mov.u32 %r2, 0;
$again: add.s32 %r3, %r1, %r2; mov.u32 %r4, %r3; add.s32 %r2, %r4, 1;
setp.lt.u32 %p1, %r2, 9; @%p1 bra $again; mov.u32 %r5, %r2; mov.u32 %r6, %r5;";
        let kernel = kernel(body);
        let rows: Vec<[u32; 6]> = kernel.0.program().instructions.iter().map(|i| i.rows).collect();
        let kept = rows[0][0];
        assert!(rows[1..5].iter().all(|row| row[0] != kept), "{rows:?}");
        assert_eq!(rows[2][1], kept);
    }

    #[test]
    fn a_register_that_some_way_never_writes_shares_its_row_with_none_before_its_last_read() {
        let body = "mov.u32 %r9, 1; setp.eq.u32 %p1, %tid.x, 0; @%p1 bra $skip; mov.u32 %r7, %r9;
$skip: mov.u32 %r8, %r7;";
        let kernel = kernel(body);
        let rows: Vec<[u32; 6]> = kernel.0.program().instructions.iter().map(|i| i.rows).collect();
        assert_ne!(rows[0][0], rows[4][1]);
        assert_eq!(rows[3][0], rows[4][1]);
    }
}
