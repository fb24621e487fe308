//! Finds the range of the text in which each register holds a value that is still read.
//!
//! If some path reaches a register without a write, the register is alive from the start. No other register takes its
//! row then, and its first read finds that it was never written.

use super::instruction::{ALWAYS, Instruction, Op};
use super::operands::{Operand, guard, operands};
use super::rows::{File, Files};

/// A set of small numbers.
#[derive(Clone, Debug, PartialEq)]
struct Set(Vec<u64>);

impl Set {
    fn new(count: usize) -> Set {
        Set(vec![0; count.div_ceil(64)])
    }

    fn insert(&mut self, k: usize) {
        self.0[k / 64] |= 1 << (k % 64);
    }

    fn remove(&mut self, k: usize) {
        self.0[k / 64] &= !(1 << (k % 64));
    }

    /// Adds another set, and returns whether this changed the set.
    fn add(&mut self, other: &Set) -> bool {
        let mut changed = false;
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            changed |= *theirs & !*mine != 0;
            *mine |= theirs;
        }
        changed
    }

    fn subtract(&mut self, other: &Set) {
        self.0.iter_mut().zip(&other.0).for_each(|(mine, theirs)| *mine &= !theirs);
    }

    fn members(&self) -> impl Iterator<Item = usize> {
        let bits = |word: u64| (0..64).filter(move |bit| word >> bit & 1 != 0);
        self.0.iter().enumerate().flat_map(move |(k, word)| bits(*word).map(move |bit| 64 * k + bit))
    }
}

/// The registers of all files, numbered consecutively.
#[derive(Clone, Copy, Debug)]
pub(super) struct Numbers {
    words: usize,
    doubles: usize,
    predicates: usize,
}

impl Numbers {
    pub(super) fn of(files: &Files) -> Numbers {
        Numbers {
            words: files.words.registers as usize,
            doubles: files.doubles.registers as usize,
            predicates: files.predicates.registers as usize,
        }
    }

    pub(super) fn count(self) -> usize {
        self.words + self.doubles + self.predicates
    }

    /// Returns `None` if the row is a constant.
    pub(super) fn number(self, file: File, row: u32) -> Option<usize> {
        let (before, count) = match file {
            File::Words => (0, self.words),
            File::Doubles => (self.words, self.doubles),
            File::Predicates => (self.words + self.doubles, self.predicates),
        };
        ((row as usize) < count).then_some(before + row as usize)
    }
}

/// Instructions that run one after the other.
struct Run {
    first: usize,
    end: usize,
    next: Vec<usize>,
    /// The registers that are alive at its start.
    live: Set,
    /// The registers that it writes before any read. Their earlier values do not matter.
    written: Set,
}

/// Returns, for each register, the first and the last instruction at which it is alive; `None` if it is never used.
pub(super) fn intervals(instructions: &[Instruction], numbers: Numbers) -> Vec<Option<(usize, usize)>> {
    let mut runs = runs(instructions, numbers);
    loop {
        let mut changed = false;
        for k in (0..runs.len()).rev() {
            let mut live = leaving(&runs, k, numbers);
            live.subtract(&runs[k].written);
            changed |= runs[k].live.add(&live);
        }
        if !changed {
            break;
        }
    }
    let mut found = vec![None; numbers.count()];
    let mut extend = |number: usize, at: usize| {
        let (first, last) = found[number].get_or_insert((at, at));
        (*first, *last) = (at.min(*first), at.max(*last));
    };
    for (k, run) in runs.iter().enumerate() {
        run.live.members().for_each(|number| extend(number, run.first));
        leaving(&runs, k, numbers).members().for_each(|number| extend(number, run.end - 1));
        for (at, instruction) in instructions.iter().enumerate().take(run.end).skip(run.first) {
            let used = operands(instruction).filter_map(|operand| numbers.number(operand.file, operand.row));
            let guard = guard(instruction).and_then(|row| numbers.number(File::Predicates, row));
            used.chain(guard).for_each(|number| extend(number, at));
        }
    }
    found
}

/// Returns the registers that are alive after a run.
fn leaving(runs: &[Run], k: usize, numbers: Numbers) -> Set {
    let mut live = Set::new(numbers.count());
    for next in &runs[k].next {
        live.add(&runs[*next].live);
    }
    live
}

/// Returns the registers that instructions read before they write them, and those that they certainly write.
fn effects(instructions: &[Instruction], numbers: Numbers) -> (Set, Set) {
    let (mut read, mut written) = (Set::new(numbers.count()), Set::new(numbers.count()));
    for instruction in instructions.iter().rev() {
        let number = |operand: Operand| numbers.number(operand.file, operand.row);
        // A guarded write may not happen.
        if instruction.guard == ALWAYS {
            for number in operands(instruction).filter(|operand| operand.is_written).filter_map(number) {
                read.remove(number);
                written.insert(number);
            }
        }
        let sources = operands(instruction).filter(|operand| !operand.is_written).filter_map(number);
        let guard = guard(instruction).and_then(|row| numbers.number(File::Predicates, row));
        sources.chain(guard).for_each(|number| read.insert(number));
    }
    (read, written)
}

fn runs(instructions: &[Instruction], numbers: Numbers) -> Vec<Run> {
    let mut starts = vec![false; instructions.len() + 1];
    starts[0] = true;
    for (at, instruction) in instructions.iter().enumerate() {
        if let Op::Branch | Op::BranchUniform = instruction.op {
            starts[instruction.number as usize] = true;
        }
        if matches!(instruction.op, Op::Branch | Op::BranchUniform | Op::Return) {
            starts[at + 1] = true;
        }
    }
    let firsts: Vec<usize> = (0..instructions.len()).filter(|at| starts[*at]).collect();
    let run_at = |at: usize| firsts.binary_search(&at).ok();
    let run = |k: usize| {
        let end = firsts.get(k + 1).copied().unwrap_or(instructions.len());
        let last = &instructions[end - 1];
        let target = match last.op {
            Op::Branch | Op::BranchUniform => run_at(last.number as usize),
            _ => None,
        };
        let is_end = last.guard == ALWAYS && matches!(last.op, Op::Branch | Op::BranchUniform | Op::Return);
        let after = if is_end { None } else { run_at(end) };
        let (live, written) = effects(&instructions[firsts[k]..end], numbers);
        Run { first: firsts[k], end, next: target.into_iter().chain(after).collect(), live, written }
    };
    (0..firsts.len()).map(run).collect()
}
