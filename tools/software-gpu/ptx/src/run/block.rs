//! The blocks of a launch, one after the other. Their warps run in turns, up to the barriers at which they meet.
//!
//! A warp runs until it waits, leaves, or has had its turn. Nothing of a block is left for the next one except global
//! memory.

use super::journal::Journal;
use super::order::Choices;
use super::registers::LANES;
use super::shared::Shared;
use super::together::{self, lanes};
use super::warp::Warp;
use super::{Lanes, Trap};
use crate::What;
use crate::decode::{ALWAYS, Instruction, NEGATED, Op};
use crate::memory::Memory;

/// The time by which each read of the clock advances it. Times mean nothing here, but a wait for a time must end.
const TICK_NS: u64 = 1000;

/// The memory and state that the warps of a block reach.
pub(super) struct Machine<'a> {
    pub instructions: &'a [Instruction],
    pub memory: &'a mut dyn Memory,
    pub params: &'a [u8],
    pub shared: Shared,
    pub choices: Choices,
    pub journal: Journal,
    /// The number of the block that runs.
    pub block: u32,
    /// Barriers that this block has met.
    pub barriers: u32,
    /// The clock of the GPU, which advances only when it is read.
    pub clock_ns: u64,
    /// The most instructions that a warp may take.
    pub budget: u64,
    /// Instructions of all lanes, for the tally.
    pub lane_instructions: u64,
}

/// A trap, and the place of the warp.
pub(super) struct Stopped {
    pub trap: Box<Trap>,
    pub warp: u32,
    pub line: u32,
}

impl Machine<'_> {
    /// Runs a block from the first instruction of all its warps.
    pub(super) fn run(&mut self, warps: &mut [Warp]) -> Result<(), Stopped> {
        self.shared.clear();
        self.barriers = 0;
        loop {
            let turns = self.choices.permutation(warps.len());
            let mut progress = false;
            for k in turns {
                let warp = &mut warps[k as usize];
                if warp.is_done() || warp.at_barrier {
                    continue;
                }
                progress = true;
                let length = 1 << self.choices.below(16);
                if let Err(trap) = self.turn(warp, length) {
                    let line = self.instructions[warp.now.at as usize].line;
                    return Err(Stopped { trap, warp: warp.index, line });
                }
            }
            if progress {
                continue;
            }
            let Some(waiting) = warps.iter().find(|warp| warp.at_barrier) else { return Ok(()) };
            if let Some(left) = warps.iter().find(|warp| warp.is_done()) {
                let what = format!("warp {} waits, and warp {} has returned", waiting.index, left.index);
                let line = self.instructions[waiting.now.at as usize - 1].line;
                let trap = Trap::at(0, What::BarrierDivergence(what));
                return Err(Stopped { trap, warp: waiting.index, line });
            }
            self.barriers += 1;
            warps.iter_mut().for_each(|warp| warp.at_barrier = false);
        }
    }

    /// Runs a warp for `length` instructions, or until it waits or is done.
    fn turn(&mut self, warp: &mut Warp, length: u64) -> Result<(), Box<Trap>> {
        let end = warp.taken + length;
        if warp.taken > self.budget {
            return Err(Trap::at(warp.now.lanes.trailing_zeros(), What::Endless(warp.taken)));
        }
        while warp.taken < end && !warp.at_barrier {
            if warp.now.lanes == 0 || warp.now.at >= warp.limit {
                warp.choose()?;
                if warp.now.lanes == 0 {
                    return Ok(());
                }
            }
            warp.taken += 1;
            self.step(warp)?;
        }
        Ok(())
    }

    fn step(&mut self, warp: &mut Warp) -> Result<(), Box<Trap>> {
        let instruction = &self.instructions[warp.now.at as usize];
        let mut active = warp.now.lanes;
        if instruction.guard != ALWAYS {
            let value = warp.registers.predicate(instruction.guard & !NEGATED, active)?;
            active &= if instruction.guard & NEGATED != 0 { !value } else { value };
        }
        self.lane_instructions += if active == u32::MAX { 32 } else { active.count_ones().into() };
        match instruction.op {
            Op::Branch | Op::BranchUniform => {
                branch(warp, active, instruction)?;
                return Ok(());
            }
            _ if active == 0 => {}
            Op::Alu(alu) => {
                let registers = &mut warp.registers;
                super::lanes::Run { registers, rows: instruction.rows, active }.alu(alu)?;
            }
            Op::Load(place, shape) => self.load(warp, instruction, active, place, shape)?,
            Op::Store(place, shape) => self.store(warp, instruction, active, place, shape)?,
            Op::Atomic(atomic) => self.atomic(warp, instruction, active, atomic)?,
            Op::CopyAsync => self.copy(warp, instruction, active)?,
            Op::CopyCommit => self.commit(warp, active),
            Op::CopyWait => self.wait(warp, active, instruction.number as usize)?,
            // Memory is sequentially consistent here: blocks take turns.
            Op::Fence => {}
            Op::Timer => {
                self.clock_ns += TICK_NS;
                warp.registers.set_double(instruction.rows[0], active, &[self.clock_ns; LANES]);
            }
            Op::Return => {
                let copies = warp.asked.iter().chain(warp.committed.iter().flatten());
                if let Some(copy) = copies.into_iter().find(|copy| active >> copy.lane & 1 != 0) {
                    return Err(Trap::access(copy.lane, copy.to, What::CopyInFlight));
                }
                warp.leave(active);
            }
            Op::BlockBarrier => {
                if active != warp.now.lanes || warp.exited != 0 {
                    let what = format!("a part of warp {} is not at it", warp.index);
                    return Err(Trap::at(active.trailing_zeros(), What::BarrierDivergence(what)));
                }
                if !warp.gather(warp.members)? {
                    return Ok(());
                }
                warp.at_barrier = true;
            }
            Op::WarpBarrier | Op::ShuffleXor | Op::ReduceMax | Op::VoteAny => {
                if !together::exchange(warp, instruction, active)? {
                    return Ok(());
                }
            }
        }
        warp.now.at += 1;
        Ok(())
    }
}

fn branch(warp: &mut Warp, active: Lanes, instruction: &Instruction) -> Result<(), Box<Trap>> {
    let target = instruction.number as u32;
    let staying = warp.now.lanes & !active;
    if staying == 0 {
        warp.now.at = target;
    } else if active == 0 {
        warp.now.at += 1;
    } else if instruction.op == Op::BranchUniform {
        return Err(Trap::at(
            active.trailing_zeros(),
            What::Undefined("lanes that part at a uniform branch"),
        ));
    } else {
        warp.now.at += 1;
        warp.split(active, target);
    }
    Ok(())
}

/// Returns the lanes of a warp that a block of `threads` threads has.
pub(super) fn members(warp: u32, threads: u32) -> Lanes {
    let left = threads - warp * LANES as u32;
    lanes(u32::MAX).take(left as usize).fold(0, |all, lane| all | 1 << lane)
}
