//! The register files of a warp: a row of 32 lanes per register, and which lanes have written it.
//!
//! Results are computed for all lanes, because loops of fixed length are fast. They are stored only for the active
//! lanes.

use super::{Lanes, Trap};
use crate::What;
use crate::decode::{File, Files, Rows};

pub(crate) const LANES: usize = 32;
pub(crate) const ALL: u32 = u32::MAX;

#[derive(Debug)]
pub(crate) struct Registers {
    pub words: Vec<[u32; LANES]>,
    pub doubles: Vec<[u64; LANES]>,
    /// A bit per lane.
    pub predicates: Vec<u32>,
    words_written: Vec<u32>,
    doubles_written: Vec<u32>,
    predicates_written: Vec<u32>,
}

impl Registers {
    pub(crate) fn new(files: &Files) -> Registers {
        let written = |rows: &Rows| vec![ALL; rows.count()];
        Registers {
            words: vec![[0; LANES]; files.words.count()],
            doubles: vec![[0; LANES]; files.doubles.count()],
            predicates: vec![0; files.predicates.count()],
            words_written: written(&files.words),
            doubles_written: written(&files.doubles),
            predicates_written: written(&files.predicates),
        }
    }

    /// Forgets which lanes have written; constants stay.
    pub(crate) fn clear(&mut self, files: &Files) {
        self.words_written[..files.words.registers as usize].fill(0);
        self.doubles_written[..files.doubles.registers as usize].fill(0);
        self.predicates_written[..files.predicates.registers as usize].fill(0);
    }

    fn unwritten(file: File, row: u32, lanes: u32) -> Box<Trap> {
        let what = What::UninitialisedRegister(String::new());
        Box::new(Trap { lane: lanes.trailing_zeros(), address: None, what, register: Some((file, row)) })
    }

    #[inline(always)]
    pub(crate) fn word(&self, row: u32, active: Lanes) -> Result<&[u32; LANES], Box<Trap>> {
        let missing = active & !self.words_written[row as usize];
        if missing != 0 {
            return Err(Self::unwritten(File::Words, row, missing));
        }
        Ok(&self.words[row as usize])
    }

    #[inline(always)]
    pub(crate) fn double(&self, row: u32, active: Lanes) -> Result<&[u64; LANES], Box<Trap>> {
        let missing = active & !self.doubles_written[row as usize];
        if missing != 0 {
            return Err(Self::unwritten(File::Doubles, row, missing));
        }
        Ok(&self.doubles[row as usize])
    }

    #[inline(always)]
    pub(crate) fn predicate(&self, row: u32, active: Lanes) -> Result<u32, Box<Trap>> {
        let missing = active & !self.predicates_written[row as usize];
        if missing != 0 {
            return Err(Self::unwritten(File::Predicates, row, missing));
        }
        Ok(self.predicates[row as usize])
    }

    #[inline(always)]
    pub(crate) fn set_word(&mut self, row: u32, active: Lanes, value: &[u32; LANES]) {
        let row = row as usize;
        self.words_written[row] |= active;
        keep(&mut self.words[row], active, value);
    }

    #[inline(always)]
    pub(crate) fn set_double(&mut self, row: u32, active: Lanes, value: &[u64; LANES]) {
        let row = row as usize;
        self.doubles_written[row] |= active;
        keep(&mut self.doubles[row], active, value);
    }

    #[inline(always)]
    pub(crate) fn set_predicate(&mut self, row: u32, active: Lanes, value: u32) {
        let row = row as usize;
        self.predicates_written[row] |= active;
        self.predicates[row] = (self.predicates[row] & !active) | (value & active);
    }
}

#[inline(always)]
fn keep<T: Copy>(row: &mut [T; LANES], active: Lanes, value: &[T; LANES]) {
    if active == ALL {
        *row = *value;
        return;
    }
    for (k, (place, value)) in row.iter_mut().zip(value).enumerate() {
        *place = if active >> k & 1 != 0 { *value } else { *place };
    }
}
