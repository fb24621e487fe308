//! Memory as a kernel sees it while it runs: each access is checked against the bounds and noted.
//!
//! Both engines use it. The last touched allocation is cached, because most accesses stay in it.
#![allow(unsafe_code)]

use std::ops::Range;

use software_gpu_ptx::{Memory, Refusal};

use crate::accesses::Accesses;
use crate::heap::Stray;
use crate::judge::Judge;

pub(crate) struct Seen<'a, 'b> {
    judge: &'a Judge<'b>,
    pub(crate) accesses: Accesses,
    recent: Range<u64>,
    /// Where the driver reaches the start of the cached allocation.
    start: *mut u8,
    /// The rule that the refused access broke.
    pub(crate) broken: Option<&'static str>,
}

impl<'a, 'b> Seen<'a, 'b> {
    pub(crate) fn new(judge: &'a Judge<'b>) -> Seen<'a, 'b> {
        Seen { judge, accesses: Accesses::default(), recent: 0..0, start: std::ptr::null_mut(), broken: None }
    }

    /// Checks the bounds, and returns where the driver reaches the bytes.
    pub(crate) fn find(&mut self, address: u64, bytes: u64) -> Result<*mut u8, Stray> {
        if !self.recent.contains(&address) || address + bytes > self.recent.end {
            let memory = self.judge.find(address, bytes)?;
            self.recent = memory.start..memory.start + memory.bytes;
            self.start = self.judge.heap.at(memory, memory.start);
        }
        Ok(self.start.wrapping_add((address - self.recent.start) as usize))
    }

    fn found(&mut self, address: u64, bytes: usize) -> Result<*mut u8, Refusal> {
        self.find(address, bytes as u64).map_err(|stray| {
            self.broken = Some(stray.rule);
            Refusal { address, why: stray.what }
        })
    }
}

impl Memory for Seen<'_, '_> {
    fn load(&mut self, address: u64, into: &mut [u8]) -> Result<(), Refusal> {
        let from = self.found(address, into.len())?;
        self.accesses.read(address, into.len() as u64);
        // SAFETY: inside an allocation; only this kernel runs.
        unsafe { from.copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    fn store(&mut self, address: u64, from: &[u8]) -> Result<(), Refusal> {
        let to = self.found(address, from.len())?;
        self.accesses.write(address, from.len() as u64);
        // SAFETY: inside an allocation; only this kernel runs.
        unsafe { to.copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        Ok(())
    }

    fn update(
        &mut self,
        address: u64,
        bytes: usize,
        change: &mut dyn FnMut(u64) -> u64,
    ) -> Result<u64, Refusal> {
        let mut value = [0; 8];
        self.load(address, &mut value[..bytes])?;
        let before = u64::from_le_bytes(value);
        self.store(address, &change(before).to_le_bytes()[..bytes])?;
        Ok(before)
    }
}
