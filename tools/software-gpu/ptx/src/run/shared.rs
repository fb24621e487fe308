//! The shared memory of a block: its bytes, and the last access to each.
//!
//! Two accesses to a byte race if they are by different threads, one of them writes, and no barrier of the block lies
//! between. Inside a warp, a barrier of the warp orders them too. A store that changes nothing is allowed, because in
//! any order it gives the same bits.

use super::Trap;
use super::registers::LANES;
use crate::What;
use crate::module::SHARED_BASE;

/// An access: its thread counted from 1, its warp, and the number of barriers before it. 0 means no access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp(u64);

const THREAD_BITS: u32 = 12;
const WARP_BITS: u32 = 6;
const BARRIER_BITS: u32 = 23;
const SEVERAL_THREADS: u64 = (1 << THREAD_BITS) - 1;
const SEVERAL_WARPS: u64 = (1 << WARP_BITS) - 1;
const COUNT: u64 = (1 << BARRIER_BITS) - 1;

impl Stamp {
    fn new(thread: u64, warp: u64, barriers: u32, warp_barriers: u32) -> Stamp {
        let barriers = u64::from(barriers) & COUNT | (u64::from(warp_barriers) & COUNT) << BARRIER_BITS;
        Stamp(thread | warp << THREAD_BITS | barriers << (THREAD_BITS + WARP_BITS))
    }

    fn thread(self) -> u64 {
        self.0 & SEVERAL_THREADS
    }

    fn warp(self) -> u64 {
        self.0 >> THREAD_BITS & SEVERAL_WARPS
    }

    /// Whether this access and another may happen at the same time.
    fn is_concurrent(self, now: Stamp) -> bool {
        if self.thread() == 0 || self.thread() == now.thread() && now.thread() != SEVERAL_THREADS {
            return false;
        }
        let differ = (self.0 ^ now.0) >> (THREAD_BITS + WARP_BITS);
        differ & COUNT == 0 && (self.warp() != now.warp() || differ >> BARRIER_BITS == 0)
    }

    fn with(self, now: Stamp) -> Stamp {
        let warp = if self.warp() == now.warp() { now.warp() } else { SEVERAL_WARPS };
        let cleared = now.0 >> (THREAD_BITS + WARP_BITS) << (THREAD_BITS + WARP_BITS);
        Stamp(cleared | SEVERAL_THREADS | warp << THREAD_BITS)
    }

    fn described(self) -> String {
        match self.thread() {
            SEVERAL_THREADS => "several threads of the block".to_owned(),
            thread => format!("thread {} of the block", thread - 1),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The byte belongs to no array.
    Gap,
    Unwritten,
    Written,
    /// The target of an asynchronous copy.
    InFlight,
}

#[derive(Clone, Copy, Debug)]
struct Byte {
    written: Stamp,
    read: Stamp,
}

/// The origin of an access: the warp, its first thread, and the barriers before.
#[derive(Clone, Copy, Debug)]
pub(super) struct Party<'a> {
    pub warp: u32,
    pub barriers: u32,
    pub warp_barriers: &'a [u32; LANES],
}

impl Party<'_> {
    fn stamp(&self, lane: u32) -> Stamp {
        let thread = u64::from(self.warp) * LANES as u64 + u64::from(lane) + 1;
        Stamp::new(thread, self.warp.into(), self.barriers, self.warp_barriers[lane as usize])
    }

    /// Returns the stamp of all lanes together. All of them have met the same number of barriers.
    fn stamp_of_all(&self, lane: u32) -> Stamp {
        Stamp::new(SEVERAL_THREADS, self.warp.into(), self.barriers, self.warp_barriers[lane as usize])
    }
}

#[derive(Debug)]
pub(super) struct Shared {
    bytes: Vec<u8>,
    states: Vec<State>,
    /// The states when a block begins.
    fresh: Vec<State>,
    history: Vec<Byte>,
}

impl Shared {
    /// Makes the memory of arrays, each with its address and bytes.
    pub(super) fn new(arrays: impl Iterator<Item = (u32, u32)>) -> Shared {
        let mut fresh = Vec::new();
        for (address, bytes) in arrays.filter(|(_, bytes)| *bytes != 0) {
            let first = (address - SHARED_BASE) as usize;
            let end = first + bytes as usize;
            if fresh.len() < end {
                fresh.resize(end, State::Gap);
            }
            fresh[first..end].fill(State::Unwritten);
        }
        let nobody = Byte { written: Stamp(0), read: Stamp(0) };
        Shared {
            bytes: vec![0; fresh.len()],
            states: fresh.clone(),
            history: vec![nobody; fresh.len()],
            fresh,
        }
    }

    /// Clears the memory, so that a new block finds no value of the last one.
    pub(super) fn clear(&mut self) {
        self.bytes.fill(0xa5);
        self.states.copy_from_slice(&self.fresh);
        self.history.fill(Byte { written: Stamp(0), read: Stamp(0) });
    }

    fn place(&self, lane: u32, address: u64, bytes: usize) -> Result<usize, Box<Trap>> {
        if !address.is_multiple_of(bytes as u64) {
            return Err(Trap::access(lane, address, What::Misaligned(bytes as u32)));
        }
        let at = (address as usize).wrapping_sub(SHARED_BASE as usize);
        let states = at.checked_add(bytes).and_then(|end| self.states.get(at..end));
        match states {
            None => Err(Trap::access(lane, address, What::OutOfBounds("shared"))),
            Some(states) => match states.iter().position(|state| *state == State::Gap) {
                Some(k) => Err(Trap::access(lane, address + k as u64, What::OutOfBounds("shared"))),
                None => Ok(at),
            },
        }
    }

    fn race(lane: u32, at: usize, other: Stamp) -> Box<Trap> {
        let what = What::Race { space: "shared", other: other.described() };
        Trap::access(lane, at as u64 + u64::from(SHARED_BASE), what)
    }

    /// Reads for one lane, or for all lanes of the party that read the same place.
    pub(super) fn load(
        &mut self,
        party: Party,
        lane: u32,
        for_all: bool,
        address: u64,
        into: &mut [u8],
    ) -> Result<(), Box<Trap>> {
        let at = self.place(lane, address, into.len())?;
        let now = if for_all { party.stamp_of_all(lane) } else { party.stamp(lane) };
        for k in at..at + into.len() {
            match self.states[k] {
                State::Written => {}
                State::InFlight => {
                    return Err(Trap::access(lane, k as u64 + u64::from(SHARED_BASE), What::CopyInFlight));
                }
                _ => {
                    return Err(Trap::access(
                        lane,
                        k as u64 + u64::from(SHARED_BASE),
                        What::UninitialisedShared,
                    ));
                }
            }
            let byte = &mut self.history[k];
            if byte.written.is_concurrent(now) {
                return Err(Self::race(lane, k, byte.written));
            }
            byte.read = if byte.read.is_concurrent(now) { byte.read.with(now) } else { now };
        }
        into.copy_from_slice(&self.bytes[at..at + into.len()]);
        Ok(())
    }

    pub(super) fn store(
        &mut self,
        party: Party,
        lane: u32,
        address: u64,
        from: &[u8],
    ) -> Result<(), Box<Trap>> {
        let at = self.place(lane, address, from.len())?;
        let now = party.stamp(lane);
        for (k, value) in (at..).zip(from) {
            if self.states[k] == State::InFlight {
                return Err(Trap::access(lane, k as u64 + u64::from(SHARED_BASE), What::CopyInFlight));
            }
            if self.states[k] == State::Written && self.bytes[k] == *value {
                continue;
            }
            let byte = &mut self.history[k];
            for other in [byte.written, byte.read] {
                if other.is_concurrent(now) {
                    return Err(Self::race(lane, k, other));
                }
            }
            byte.written = now;
            self.states[k] = State::Written;
            self.bytes[k] = *value;
        }
        Ok(())
    }

    /// Marks these bytes, so that nothing may touch them until the copy into them has ended.
    pub(super) fn open_copy(
        &mut self,
        party: Party,
        lane: u32,
        address: u64,
        bytes: usize,
    ) -> Result<(), Box<Trap>> {
        let at = self.place(lane, address, bytes)?;
        let now = party.stamp(lane);
        for k in at..at + bytes {
            if self.states[k] == State::InFlight {
                return Err(Trap::access(lane, k as u64 + u64::from(SHARED_BASE), What::CopyInFlight));
            }
            let byte = &mut self.history[k];
            for other in [byte.written, byte.read] {
                if other.is_concurrent(now) {
                    return Err(Self::race(lane, k, other));
                }
            }
            byte.written = now;
            self.states[k] = State::InFlight;
        }
        Ok(())
    }

    /// Ends a copy. It counts as written by its thread, which has just waited for it.
    pub(super) fn land_copy(&mut self, party: Party, lane: u32, address: u64, from: &[u8]) {
        let at = (address - u64::from(SHARED_BASE)) as usize;
        let now = party.stamp(lane);
        for (k, value) in (at..).zip(from) {
            self.history[k].written = now;
            self.states[k] = State::Written;
            self.bytes[k] = *value;
        }
    }
}
