//! Compares the accesses of an operation with the order of the calls: bounds, frees, values, and races.
//!
//! A fault ends the program with the names of both operations and the address. Bounds are checked before a byte moves.

use std::ops::Range;

use crate::claims::Claim;
use crate::heap::{Allocation, Heap, Kind, Stray};
use crate::queue::Operation;
use crate::report::fault;
use crate::shadow::{Access, Conflict};

/// Memory as one operation sees it.
pub(crate) struct Judge<'a> {
    pub(crate) heap: &'a mut Heap,
    pub(crate) operation: &'a Operation,
    /// The context of the operation's stream.
    pub(crate) context: usize,
    /// The memory that the program says that the operation may touch.
    pub(crate) claim: Option<&'a Claim>,
}

impl Judge<'_> {
    /// Checks that the operation may reach these bytes, and returns their allocation.
    pub(crate) fn bounds(&self, address: u64, bytes: u64) -> &Allocation {
        let name = &self.operation.touch.name;
        self.find(address, bytes)
            .unwrap_or_else(|stray| fault(stray.rule, &format!("{name} touches {}", stray.what)))
    }

    /// Finds the allocation as [`bounds`](Self::bounds) does, for callers that know more about the access.
    pub(crate) fn find(&self, address: u64, bytes: u64) -> Result<&Allocation, Stray> {
        let memory = self.heap.holding(address, bytes)?;
        match memory.kind {
            Kind::Device { context } if context != self.context => {
                let what = format!("{}, which is memory of another context", memory.describe());
                Err(Stray { rule: "another context", what })
            }
            _ => Ok(memory),
        }
    }

    /// Records a read. All its bytes must have values.
    pub(crate) fn read(&mut self, address: u64, bytes: u64) {
        let (start, _) = self.touch(address, bytes, Access::Read);
        let unwritten = self.unwritten(start, address, bytes);
        if let Some(first) = unwritten.first() {
            let (name, at) = (&self.operation.touch.name, start + first.start);
            let count = first.end - first.start;
            let memory = self.bounds(address, bytes).describe();
            fault(
                "no value",
                &format!("{name} reads {count} bytes at {at:#x} of {memory}, which nobody wrote"),
            );
        }
    }

    /// Records a read that moves values without using them. Returns the offsets of bytes without a value.
    pub(crate) fn pass_on(&mut self, address: u64, bytes: u64) -> Vec<Range<u64>> {
        let (start, first) = self.touch(address, bytes, Access::Read);
        let parts = self.unwritten(start, address, bytes).into_iter();
        parts.map(|part| part.start - first..part.end - first).collect()
    }

    pub(crate) fn write(&mut self, address: u64, bytes: u64) {
        self.touch(address, bytes, Access::Write);
    }

    /// Records the allocation or the release of memory at this point. Nothing may touch it at the same time.
    pub(crate) fn own(&mut self, start: u64, rule: &str) {
        let bytes = self.bounds(start, 1).bytes;
        let operation = self.operation;
        let outcome = self.heap.shadow(start).map_or(Ok(()), |shadow| {
            shadow.touch(0..bytes, Access::Write, &operation.touch, &operation.clock)
        });
        if let Err(conflict) = outcome {
            self.race(start, Access::Write, &conflict, rule);
        }
        if let Some(shadow) = self.heap.shadow(start) {
            shadow.set_unwritten(0..bytes);
        }
    }

    /// Records a write that leaves some bytes, given by their offsets, without a value.
    pub(crate) fn write_except(&mut self, address: u64, bytes: u64, without: &[Range<u64>]) {
        let (start, first) = self.touch(address, bytes, Access::Write);
        let Some(shadow) = self.heap.shadow(start) else { return };
        without.iter().for_each(|part| shadow.set_unwritten(part.start + first..part.end + first));
    }

    /// Records all memory that a host function claims, because nobody sees what it touches. The memory is pinned, and
    /// never a GPU's memory. The function may move its bytes even if they have no known value. Memory that is not of
    /// this driver belongs to the program.
    pub(crate) fn claimed(&mut self, claim: &Claim) {
        let [read, written] = claim.whole();
        for (ranges, access) in [(read, Access::Read), (written, Access::Write)] {
            for range in ranges {
                let Some(memory) = self.heap.around(range.start) else { continue };
                if let Kind::Device { .. } = memory.kind {
                    let (name, memory) = (&self.operation.touch.name, memory.describe());
                    fault("a GPU's memory", &format!("{name} claims {memory}, which the host cannot reach"));
                }
                self.touch(range.start, range.end - range.start, access);
            }
        }
    }

    fn unwritten(&mut self, start: u64, address: u64, bytes: u64) -> Vec<Range<u64>> {
        let range = address - start..address - start + bytes;
        self.heap.shadow(start).map_or_else(Vec::new, |shadow| shadow.unwritten(range))
    }

    /// Records an access, and returns the start of the allocation and the offset of the address.
    fn touch(&mut self, address: u64, bytes: u64, access: Access) -> (u64, u64) {
        let start = self.bounds(address, bytes).start;
        if let Some(claim) = self.claim
            && let Some(range) = claim.lacks(address..address + bytes, access)
        {
            self.unclaimed(range, access, &claim.name);
        }
        let (first, operation) = (address - start, self.operation);
        let outcome = self.heap.shadow(start).map_or(Ok(()), |shadow| {
            shadow.touch(first..first + bytes, access, &operation.touch, &operation.clock)
        });
        if let Err(conflict) = outcome {
            self.race(start, access, &conflict, "race");
        }
        (start, first)
    }

    fn unclaimed(&self, range: Range<u64>, access: Access, by: &str) -> ! {
        let did = if access == Access::Read { "reads" } else { "writes" };
        let (name, memory) = (&self.operation.touch.name, self.bounds(range.start, 1).describe());
        let (at, bytes) = (range.start, range.end - range.start);
        fault(
            "unclaimed",
            &format!("{name} {did} {bytes} bytes at {at:#x} of {memory}, which {by:?} does not claim"),
        )
    }

    fn race(&self, start: u64, access: Access, conflict: &Conflict, rule: &str) -> ! {
        let did = |access| if access == Access::Read { "reads" } else { "writes" };
        let (name, earlier) = (&self.operation.touch.name, &conflict.earlier.name);
        let (at, bytes) = (start + conflict.range.start, conflict.range.end - conflict.range.start);
        let memory = self.bounds(at, 1).describe();
        let (now, then) = (did(access), did(conflict.earlier_access));
        fault(
            rule,
            &format!(
                "{name} {now} {bytes} bytes at {at:#x} of {memory} that {earlier} {then}; nothing orders them"
            ),
        )
    }
}
