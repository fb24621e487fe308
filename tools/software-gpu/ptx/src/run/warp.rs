//! The control of a warp: where each lane is, and which lanes run next.
//!
//! Lanes at the same place run together. If there are several places, the first in the text runs, so that diverged
//! lanes meet again where their paths join.

use super::registers::Registers;
use super::{Lanes, Trap};
use crate::What;

/// Lanes that stand at the same instruction.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group {
    pub at: u32,
    pub lanes: Lanes,
    /// Whether the lanes wait there for other lanes.
    pub waits: bool,
}

/// An asynchronous copy of a lane.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copy {
    pub lane: u32,
    pub to: u64,
    pub from: u64,
    pub bytes: u32,
    /// The data, if the copy has read its source already.
    pub read: Option<[u8; 16]>,
}

#[derive(Debug)]
pub(super) struct Warp {
    pub index: u32,
    pub registers: Registers,
    /// The lanes that the launch gave the warp.
    pub members: Lanes,
    pub exited: Lanes,
    pub now: Group,
    others: Vec<Group>,
    /// The first place of another group, at which the running group must stop.
    pub limit: u32,
    pub at_barrier: bool,
    /// Number of barriers of the warp that each lane has met.
    pub barriers: [u32; 32],
    /// Copies that were not committed, and the copies of each committed group, in order.
    pub asked: Vec<Copy>,
    pub committed: Vec<Vec<Copy>>,
    pub taken: u64,
}

const NOWHERE: u32 = u32::MAX;

impl Warp {
    pub(super) fn new(index: u32, registers: Registers) -> Warp {
        Warp {
            index,
            registers,
            members: 0,
            exited: 0,
            now: Group { at: 0, lanes: 0, waits: false },
            others: Vec::new(),
            limit: NOWHERE,
            at_barrier: false,
            barriers: [0; 32],
            asked: Vec::new(),
            committed: Vec::new(),
            taken: 0,
        }
    }

    /// Puts all lanes at the first instruction.
    pub(super) fn begin(&mut self, members: Lanes) {
        self.members = members;
        self.exited = 0;
        self.now = Group { at: 0, lanes: members, waits: false };
        self.others.clear();
        self.limit = NOWHERE;
        self.at_barrier = false;
        self.barriers = [0; 32];
        self.asked.clear();
        self.committed.clear();
        self.taken = 0;
    }

    pub(super) fn is_done(&self) -> bool {
        self.exited == self.members
    }

    pub(super) fn living(&self) -> Lanes {
        self.members & !self.exited
    }

    fn set_limit(&mut self) {
        self.limit = self.others.iter().map(|group| group.at).min().unwrap_or(NOWHERE);
    }

    fn put(&mut self, group: Group) {
        if group.lanes == 0 {
            return;
        }
        match self.others.iter_mut().find(|other| other.at == group.at) {
            Some(other) => {
                other.lanes |= group.lanes;
                // With more lanes, what was waited for may be there.
                other.waits = false;
            }
            None => self.others.push(group),
        }
    }

    /// Moves some of the running lanes to another place.
    pub(super) fn split(&mut self, lanes: Lanes, at: u32) {
        self.put(Group { at, lanes, waits: false });
        self.now.lanes &= !lanes;
        self.set_limit();
    }

    /// Joins the running lanes to others that stand at the same place, and lets the first ones run.
    pub(super) fn choose(&mut self) -> Result<(), Box<Trap>> {
        let now = self.now;
        self.now.lanes = 0;
        self.put(now);
        let ready = self.others.iter().enumerate().filter(|(_, group)| !group.waits);
        match ready.min_by_key(|(_, group)| group.at).map(|(k, _)| k) {
            Some(k) => {
                self.now = self.others.swap_remove(k);
                self.set_limit();
                Ok(())
            }
            None if self.others.is_empty() => Ok(()),
            None => {
                let lanes: Vec<String> =
                    self.others.iter().map(|group| format!("{:#010x}", group.lanes)).collect();
                let what =
                    format!("lanes {} of warp {} wait for each other", lanes.join(" and "), self.index);
                let first = self.others.first().map_or(0, |group| group.lanes.trailing_zeros());
                self.now = self.others.swap_remove(0);
                Err(Trap::at(first, What::BarrierDivergence(what)))
            }
        }
    }

    /// Waits until these lanes have caught up with the running lanes. Returns false if they wait and other lanes run.
    pub(super) fn gather(&mut self, needed: Lanes) -> Result<bool, Box<Trap>> {
        let missing = needed & self.living() & !self.now.lanes;
        if missing == 0 {
            return Ok(true);
        }
        self.now.waits = true;
        let now = self.now;
        self.now.lanes = 0;
        match self.others.iter_mut().find(|other| other.at == now.at) {
            Some(other) => {
                other.lanes |= now.lanes;
                other.waits = false;
            }
            None => self.others.push(now),
        }
        self.choose()?;
        Ok(false)
    }

    /// Ends the running lanes, which have returned.
    pub(super) fn leave(&mut self, lanes: Lanes) {
        self.exited |= lanes;
        self.now.lanes &= !lanes;
        // Those that waited for them need wait no longer.
        self.others.iter_mut().for_each(|group| group.waits = false);
    }
}
