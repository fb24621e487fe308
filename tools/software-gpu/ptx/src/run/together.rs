//! The instructions in which the lanes of a warp exchange values: shuffles, maxima, votes, barriers of the warp.
//!
//! All lanes that the mask names must be at this instruction; otherwise the values of the missing lanes would be
//! undefined.

use super::registers::LANES;
use super::warp::Warp;
use super::{Lanes, Trap};
use crate::What;
use crate::decode::{Instruction, NO_ROW, Op};

/// Returns false if the lanes wait for other lanes that the mask names.
pub(super) fn exchange(warp: &mut Warp, instruction: &Instruction, active: Lanes) -> Result<bool, Box<Trap>> {
    let rows = instruction.rows;
    let mask_row = match instruction.op {
        Op::WarpBarrier => rows[0],
        Op::ShuffleXor => rows[5],
        _ => rows[2],
    };
    let masks = *warp.registers.word(mask_row, active)?;
    // Lanes that name each other; several such parts may stand here at once.
    let part = |first: u32| {
        let named = masks[first as usize];
        let same = lanes(active).filter(|lane| masks[*lane as usize] == named);
        (named, same.fold(0, |all, lane| all | 1 << lane))
    };
    let mut left = active;
    while left != 0 {
        let first = left.trailing_zeros();
        let (named, present) = part(first);
        if present & !named != 0 {
            return Err(Trap::at(first, What::Undefined("a lane that its own mask does not name")));
        }
        if named & warp.exited != 0 && instruction.op != Op::WarpBarrier {
            return Err(Trap::at(first, What::Undefined("a value of a lane that has returned")));
        }
        if !warp.gather(named)? {
            return Ok(false);
        }
        if present != named & warp.living() {
            return Err(Trap::at(first, What::Undefined("lanes that disagree about who takes part")));
        }
        left &= !present;
    }
    let mut left = active;
    while left != 0 {
        let (_, present) = part(left.trailing_zeros());
        perform(warp, instruction, present)?;
        left &= !present;
    }
    Ok(true)
}

fn perform(warp: &mut Warp, instruction: &Instruction, active: Lanes) -> Result<(), Box<Trap>> {
    let rows = instruction.rows;
    match instruction.op {
        Op::WarpBarrier => lanes(active).for_each(|lane| warp.barriers[lane as usize] += 1),
        Op::ShuffleXor => {
            let values = *warp.registers.word(rows[2], active)?;
            let distances = *warp.registers.word(rows[3], active)?;
            let clamps = *warp.registers.word(rows[4], active)?;
            let (mut taken, mut valid) = ([0; LANES], 0);
            for lane in lanes(active) {
                // The clamp says which lanes form a segment, and the last lane of one.
                let (segment, last) = (clamps[lane as usize] >> 8 & 31, clamps[lane as usize] & 31);
                let mut other = (lane ^ distances[lane as usize]) & 31;
                if other > lane & segment | last & !segment {
                    other = lane;
                } else {
                    valid |= 1 << lane;
                }
                if active >> other & 1 == 0 {
                    return Err(Trap::at(lane, What::Undefined("a value of a lane that takes no part")));
                }
                taken[lane as usize] = values[other as usize];
            }
            warp.registers.set_word(rows[0], active, &taken);
            if rows[1] != NO_ROW {
                warp.registers.set_predicate(rows[1], active, valid);
            }
        }
        Op::ReduceMax => {
            let values = warp.registers.word(rows[1], active)?;
            let largest = lanes(active).map(|lane| values[lane as usize]).max().unwrap_or(0);
            warp.registers.set_word(rows[0], active, &[largest; LANES]);
        }
        _ => {
            let any = warp.registers.predicate(rows[1], active)? & active != 0;
            warp.registers.set_predicate(rows[0], active, if any { u32::MAX } else { 0 });
        }
    }
    Ok(())
}

/// Returns the numbers of these lanes.
pub(super) fn lanes(active: Lanes) -> impl Iterator<Item = u32> {
    (0..LANES as u32).filter(move |lane| active >> lane & 1 != 0)
}
