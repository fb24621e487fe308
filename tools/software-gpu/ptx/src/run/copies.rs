//! Asynchronous copies from global to shared memory.
//!
//! A copy reads its source either when it begins or when its thread waits for it, as the seed decides. Its target is
//! written at the wait. Until then, nothing may touch its target.

use super::Lanes;
use super::access::{Done, aligned, party, refused};
use super::block::Machine;
use super::journal::Kind;
use super::together::lanes;
use super::warp::{Copy, Warp};
use crate::decode::Instruction;

impl Machine<'_> {
    pub(super) fn copy(&mut self, warp: &mut Warp, instruction: &Instruction, active: Lanes) -> Done {
        let bytes = instruction.number as u32;
        let to = *warp.registers.word(instruction.rows[0], active)?;
        let from = *warp.registers.double(instruction.rows[1], active)?;
        aligned(&from, active, bytes.into())?;
        for lane in lanes(active) {
            let (to, from) = (u64::from(to[lane as usize]), from[lane as usize]);
            self.shared.open_copy(party(warp, self.barriers), lane, to, bytes as usize)?;
            let mut copy = Copy { lane, to, from, bytes, read: None };
            if self.choices.below(2) == 0 {
                self.fetch(warp, &mut copy)?;
            }
            warp.asked.push(copy);
        }
        Ok(())
    }

    fn fetch(&mut self, warp: &Warp, copy: &mut Copy) -> Done {
        let mut data = [0; 16];
        let into = &mut data[..copy.bytes as usize];
        let refuse = |refusal| refused(refusal, copy.lane, 1, copy.from, copy.bytes.into());
        self.memory.load(copy.from, into).map_err(refuse)?;
        self.note(warp, Kind::Read, copy.lane, false, copy.from, (copy.bytes.into(), 1), &[]);
        copy.read = Some(data);
        Ok(())
    }

    /// Makes the copies that these lanes have asked for one group.
    pub(super) fn commit(&mut self, warp: &mut Warp, active: Lanes) {
        let (mine, others) = warp.asked.drain(..).partition(|copy| active >> copy.lane & 1 != 0);
        warp.asked = others;
        warp.committed.push(mine);
    }

    /// Ends the copies of all groups of these lanes except the last `groups`.
    pub(super) fn wait(&mut self, warp: &mut Warp, active: Lanes, groups: usize) -> Done {
        let end = warp.committed.len().saturating_sub(groups);
        let mut landed = Vec::new();
        for group in &mut warp.committed[..end] {
            landed.extend(group.extract_if(.., |copy| active >> copy.lane & 1 != 0));
        }
        while warp.committed.first().is_some_and(Vec::is_empty) && warp.committed.len() > groups {
            warp.committed.remove(0);
        }
        for mut copy in landed {
            if copy.read.is_none() {
                self.fetch(warp, &mut copy)?;
            }
            let data = copy.read.unwrap_or_default();
            self.shared.land_copy(
                party(warp, self.barriers),
                copy.lane,
                copy.to,
                &data[..copy.bytes as usize],
            );
        }
        Ok(())
    }
}
