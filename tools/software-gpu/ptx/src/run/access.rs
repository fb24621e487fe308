//! Loads, stores and atomics of a warp.
//!
//! Lanes whose addresses follow each other reach the caller's memory in one call, as a GPU would coalesce them.

use super::block::Machine;
use super::journal::{Kind, Record};
use super::registers::{ALL, LANES};
use super::shared::Party;
use super::together::lanes;
use super::values;
use super::warp::Warp;
use super::{Lanes, Trap};
use crate::What;
use crate::decode::{Atomic, Instruction, PARAM_BASE, Place, SHARED_WINDOW, Shape};
use crate::memory::Refusal;

pub(super) type Done = Result<(), Box<Trap>>;

/// Returns the addresses of the lanes. The addresses of inactive lanes have no meaning.
fn addresses(
    warp: &Warp,
    instruction: &Instruction,
    place: Place,
    active: Lanes,
) -> Result<[u64; LANES], Box<Trap>> {
    let (row, offset) = (instruction.rows[4], instruction.number);
    let mut addresses = [0; LANES];
    if place == Place::Shared {
        for (address, base) in addresses.iter_mut().zip(warp.registers.word(row, active)?) {
            *address = u64::from(base.wrapping_add(offset as u32));
        }
    } else {
        for (address, base) in addresses.iter_mut().zip(warp.registers.double(row, active)?) {
            *address = base.wrapping_add(offset as u64);
        }
    }
    Ok(addresses)
}

/// Returns the space of generic addresses, and converts the addresses to that space.
fn settled(place: Place, addresses: &mut [u64; LANES], active: Lanes) -> Result<Place, Box<Trap>> {
    let is_shared = |address: u64| address >> 32 == SHARED_WINDOW >> 32;
    if place != Place::Generic || !lanes(active).any(|lane| is_shared(addresses[lane as usize])) {
        return Ok(if place == Place::Generic { Place::Global } else { place });
    }
    if let Some(lane) = lanes(active).find(|lane| !is_shared(addresses[*lane as usize])) {
        return Err(Trap::at(lane, What::Undefined("lanes that load from different spaces")));
    }
    addresses.iter_mut().for_each(|address| *address &= 0xffff_ffff);
    Ok(Place::Shared)
}

fn is_uniform(addresses: &[u64; LANES], active: Lanes) -> bool {
    let first = addresses[active.trailing_zeros() as usize];
    if active == ALL {
        return addresses.iter().fold(0, |differ, address| differ | (address ^ first)) == 0;
    }
    lanes(active).all(|lane| addresses[lane as usize] == first)
}

/// Returns the lanes from `first` on whose places of `bytes` bytes follow each other.
fn run_of(addresses: &[u64; LANES], active: Lanes, first: u32, bytes: u64) -> u32 {
    let start = addresses[first as usize];
    if active == ALL && first == 0 {
        let differ = (0..LANES as u64).zip(addresses);
        let differ = differ.fold(0, |all, (k, address)| all | (address ^ start.wrapping_add(k * bytes)));
        if differ == 0 {
            return LANES as u32;
        }
    }
    let mut count = 1;
    let follows = |lane: u32, count: u32| {
        active >> lane & 1 != 0 && addresses[lane as usize] == start.wrapping_add(u64::from(count) * bytes)
    };
    while first + count < LANES as u32 && follows(first + count, count) {
        count += 1;
    }
    count
}

pub(super) fn aligned(addresses: &[u64; LANES], active: Lanes, bytes: u64) -> Done {
    if addresses.iter().fold(0, |all, address| all | address) & (bytes - 1) == 0 {
        return Ok(());
    }
    match lanes(active).find(|lane| addresses[*lane as usize] & (bytes - 1) != 0) {
        Some(lane) => Err(Trap::access(lane, addresses[lane as usize], What::Misaligned(bytes as u32))),
        None => Ok(()),
    }
}

/// Returns the lane of a run to which the refusal applies.
pub(super) fn refused(refusal: Refusal, first: u32, count: u32, address: u64, bytes: u64) -> Box<Trap> {
    let lane = refusal.address.wrapping_sub(address) / bytes;
    let lane = first + u32::try_from(lane).unwrap_or(0).min(count - 1);
    Trap::access(lane, refusal.address, What::Memory(refusal.why))
}

pub(super) fn party(warp: &Warp, barriers: u32) -> Party<'_> {
    Party { warp: warp.index, barriers, warp_barriers: &warp.barriers }
}

/// Returns these lanes without `count` of them from `first` on.
fn without(lanes: Lanes, first: u32, count: u32) -> Lanes {
    lanes & !(u32::MAX >> (LANES as u32 - count) << first)
}

/// Returns whether these lanes have met equally many barriers of the warp.
fn lanes_are_level(warp: &Warp, active: Lanes) -> bool {
    let first = warp.barriers[active.trailing_zeros() as usize];
    lanes(active).all(|lane| warp.barriers[lane as usize] == first)
}

impl Machine<'_> {
    pub(super) fn load(
        &mut self,
        warp: &mut Warp,
        instruction: &Instruction,
        active: Lanes,
        place: Place,
        shape: Shape,
    ) -> Done {
        let bytes = u64::from(shape.count) * u64::from(shape.bytes);
        let size = bytes as usize;
        let mut addresses = addresses(warp, instruction, place, active)?;
        let place = settled(place, &mut addresses, active)?;
        aligned(&addresses, active, bytes)?;
        let first = active.trailing_zeros();
        if is_uniform(&addresses, active) && (place != Place::Shared || lanes_are_level(warp, active)) {
            let (mut buffer, address) = ([0; 16], addresses[first as usize]);
            self.read(warp, place, first, 1, active & (active - 1) != 0, address, &mut buffer[..size])?;
            values::keep_for_all(&mut warp.registers, instruction, shape, active, &buffer[..size]);
            return Ok(());
        }
        let mut buffer = [0; 16 * LANES];
        let mut left = active;
        while left != 0 {
            let lane = left.trailing_zeros();
            let count = if place == Place::Shared { 1 } else { run_of(&addresses, active, lane, bytes) };
            let place_of_lanes = size * lane as usize..size * (lane + count) as usize;
            let address = addresses[lane as usize];
            self.read(warp, place, lane, count, false, address, &mut buffer[place_of_lanes])?;
            left = without(left, lane, count);
        }
        values::keep(&mut warp.registers, instruction, shape, active, &buffer);
        Ok(())
    }

    /// Reads the places of `count` lanes, or one place for several.
    #[expect(clippy::too_many_arguments, reason = "an access is all of these")]
    fn read(
        &mut self,
        warp: &Warp,
        place: Place,
        lane: u32,
        count: u32,
        for_all: bool,
        address: u64,
        into: &mut [u8],
    ) -> Done {
        match place {
            Place::Shared => self.shared.load(party(warp, self.barriers), lane, for_all, address, into),
            Place::Param => {
                let at = address.wrapping_sub(PARAM_BASE) as usize;
                match at.checked_add(into.len()).and_then(|end| self.params.get(at..end)) {
                    Some(bytes) => into.copy_from_slice(bytes),
                    None => return Err(Trap::access(lane, address, What::OutOfBounds("parameter"))),
                }
                Ok(())
            }
            Place::Global | Place::Generic => {
                let each = into.len() as u64 / u64::from(count);
                let refuse = |refusal| refused(refusal, lane, count, address, each);
                self.memory.load(address, into).map_err(refuse)?;
                self.note(warp, Kind::Read, lane, for_all, address, (each, count), &[]);
                Ok(())
            }
        }
    }

    /// Adds an access to global memory to the journal: places of `count` lanes with `each` bytes.
    #[expect(clippy::too_many_arguments, reason = "an access is all of these")]
    pub(super) fn note(
        &mut self,
        warp: &Warp,
        kind: Kind,
        lane: u32,
        for_all: bool,
        start: u64,
        (each, count): (u64, u32),
        stored: &[u8],
    ) {
        let record = Record {
            start,
            bytes: each as u32 * count,
            each: each as u32,
            kind,
            for_all,
            lane: lane as u8,
            warp: warp.index as u8,
            block: self.block,
            barriers: self.barriers,
            warp_barriers: warp.barriers[lane as usize],
            line: self.instructions[warp.now.at as usize].line,
            data: 0,
        };
        self.journal.note(record, stored);
    }

    pub(super) fn store(
        &mut self,
        warp: &mut Warp,
        instruction: &Instruction,
        active: Lanes,
        place: Place,
        shape: Shape,
    ) -> Done {
        let bytes = u64::from(shape.count) * u64::from(shape.bytes);
        let size = bytes as usize;
        let addresses = addresses(warp, instruction, place, active)?;
        aligned(&addresses, active, bytes)?;
        let mut buffer = [0; 16 * LANES];
        values::gather(&warp.registers, instruction, shape, active, &mut buffer)?;
        let mut left = active;
        while left != 0 {
            let lane = left.trailing_zeros();
            let count = if place == Place::Shared { 1 } else { run_of(&addresses, active, lane, bytes) };
            let from = &buffer[size * lane as usize..size * (lane + count) as usize];
            let address = addresses[lane as usize];
            match place {
                Place::Shared => self.shared.store(party(warp, self.barriers), lane, address, from)?,
                Place::Param => return Err(Trap::access(lane, address, What::OutOfBounds("parameter"))),
                Place::Global | Place::Generic => {
                    let refuse = |refusal| refused(refusal, lane, count, address, bytes);
                    self.memory.store(address, from).map_err(refuse)?;
                    self.note(warp, Kind::Write, lane, false, address, (bytes, count), from);
                }
            }
            left = without(left, lane, count);
        }
        Ok(())
    }

    pub(super) fn atomic(
        &mut self,
        warp: &mut Warp,
        instruction: &Instruction,
        active: Lanes,
        atomic: Atomic,
    ) -> Done {
        let bytes = if atomic == Atomic::AddU64 { 8 } else { 4 };
        let addresses = addresses(warp, instruction, Place::Global, active)?;
        aligned(&addresses, active, bytes)?;
        let is_wide = bytes == 8;
        let values = if is_wide {
            *warp.registers.double(instruction.rows[1], active)?
        } else {
            warp.registers.word(instruction.rows[1], active)?.map(u64::from)
        };
        let mut old = [0; LANES];
        for lane in lanes(active) {
            let (address, value) = (addresses[lane as usize], values[lane as usize]);
            let mut change = |old: u64| match atomic {
                Atomic::AddU64 => old.wrapping_add(value),
                Atomic::AddU32 => (old as u32).wrapping_add(value as u32).into(),
                Atomic::MaxU32 => old.max(value),
                Atomic::MinU32 => old.min(value),
            };
            let found = self.memory.update(address, bytes as usize, &mut change);
            old[lane as usize] = found.map_err(|refusal| refused(refusal, lane, 1, address, bytes))?;
            self.note(warp, Kind::Atomic, lane, false, address, (bytes, 1), &[]);
        }
        if is_wide {
            warp.registers.set_double(instruction.rows[0], active, &old)
        } else {
            warp.registers.set_word(instruction.rows[0], active, &old.map(|value| value as u32))
        }
        Ok(())
    }
}
