//! Moves values between registers and bytes, for all lanes of a warp: lane after lane in the bytes, row after row in
//! registers.
//!
//! Each width has a separate loop, so that no loop has a branch per lane.

use super::registers::{LANES, Registers};
use super::{Lanes, Trap};
use crate::decode::{Instruction, Shape};

/// Stores loaded values; the bytes of a lane start at its number times their count.
pub(super) fn keep(
    registers: &mut Registers,
    instruction: &Instruction,
    shape: Shape,
    active: Lanes,
    bytes: &[u8],
) {
    let size = usize::from(shape.bytes);
    let stride = size * usize::from(shape.count);
    for (k, row) in instruction.rows[..usize::from(shape.count)].iter().enumerate() {
        let lanes = bytes.chunks_exact(stride).map(|lane| &lane[k * size..][..size]);
        let mut words = [0u32; LANES];
        match (size, shape.is_wide) {
            (4, false) => {
                words.iter_mut().zip(lanes).for_each(|(word, lane)| *word = small::<4>(lane));
                registers.set_word(*row, active, &words);
            }
            (_, false) => {
                words
                    .iter_mut()
                    .zip(lanes)
                    .for_each(|(word, lane)| *word = extended(lane, shape.signed) as u32);
                registers.set_word(*row, active, &words);
            }
            (_, true) => {
                let mut doubles = [0; LANES];
                doubles
                    .iter_mut()
                    .zip(lanes)
                    .for_each(|(double, lane)| *double = extended(lane, shape.signed));
                registers.set_double(*row, active, &doubles);
            }
        }
    }
}

/// Stores the value that all lanes have loaded from one place.
pub(super) fn keep_for_all(
    registers: &mut Registers,
    instruction: &Instruction,
    shape: Shape,
    active: Lanes,
    bytes: &[u8],
) {
    for (row, value) in instruction.rows.iter().zip(bytes.chunks_exact(shape.bytes.into())) {
        let value = extended(value, shape.signed);
        if shape.is_wide {
            registers.set_double(*row, active, &[value; LANES]);
        } else {
            registers.set_word(*row, active, &[value as u32; LANES]);
        }
    }
}

/// Returns the bytes that a store writes. The bytes of inactive lanes have no meaning.
pub(super) fn gather(
    registers: &Registers,
    instruction: &Instruction,
    shape: Shape,
    active: Lanes,
    bytes: &mut [u8],
) -> Result<(), Box<Trap>> {
    let size = usize::from(shape.bytes);
    let stride = size * usize::from(shape.count);
    for (k, row) in instruction.rows[..usize::from(shape.count)].iter().enumerate() {
        let lanes = bytes.chunks_exact_mut(stride).map(|lane| &mut lane[k * size..][..size]);
        match (size, shape.is_wide) {
            (4, false) => {
                let words = registers.word(*row, active)?;
                lanes.zip(words).for_each(|(lane, word)| lane.copy_from_slice(&word.to_le_bytes()));
            }
            (_, false) => {
                let words = registers.word(*row, active)?;
                lanes.zip(words).for_each(|(lane, word)| lane.copy_from_slice(&word.to_le_bytes()[..size]));
            }
            (_, true) => {
                let doubles = registers.double(*row, active)?;
                lanes
                    .zip(doubles)
                    .for_each(|(lane, double)| lane.copy_from_slice(&double.to_le_bytes()[..size]));
            }
        }
    }
    Ok(())
}

/// Reads a value of a known width.
#[inline(always)]
fn small<const BYTES: usize>(bytes: &[u8]) -> u32 {
    let mut whole = [0; 4];
    whole[..BYTES].copy_from_slice(&bytes[..BYTES]);
    u32::from_le_bytes(whole)
}

/// Reads a value of any width. A signed value of 1 or 2 bytes is sign-extended.
#[inline(always)]
fn extended(bytes: &[u8], signed: bool) -> u64 {
    match (bytes.len(), signed) {
        (1, false) => bytes[0].into(),
        (1, true) => bytes[0] as i8 as u64,
        (2, false) => small::<2>(bytes).into(),
        (2, true) => small::<2>(bytes) as i16 as u64,
        (4, _) => small::<4>(bytes).into(),
        _ => u64::from(small::<4>(bytes)) | u64::from(small::<4>(&bytes[4..])) << 32,
    }
}
