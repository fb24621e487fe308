//! Runs a bucket's Begin on the host, and passes the results in the arguments of the step's launch. A step then needs
//! no separate launch for Begin.
//!
//! The host counts updates until the first call that it cannot count. The host cannot count a call if the call needs a
//! value that only the GPU has (a norm's decision, or a scaler's scale or flag), or if the records of the call differ
//! too much to fit into an argument. A copy on the stream then moves the counts to the GPU, which counts all later
//! updates.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::driver::Driver;
use super::gpu_memory::{address, bytes_of};
use super::launches::nothing_given;
use super::owned::OwnedMapped;
use crate::abi::{
    INSTEP_ACTION_STEP, INSTEP_GIVEN_INDICES, INSTEP_GIVEN_RECORDS, INSTEP_PART_WHOLE, InstepBeginArgs,
    InstepGiven, InstepRecord, InstepScalars, InstepStepArgs, InstepTile,
};
use crate::error::Result;
use crate::handle::StreamHandle;
use crate::host::Isa;
use crate::host::kernels::Kernels;
use crate::host::memories::Memories;
use crate::launch::{
    Assignment, Progress, Region, Regions, Settings, StepConstants, begin_args, first_control, first_records,
};
use crate::layout::Plan;

/// The records of a bucket while the host counts its updates.
pub(super) struct HostRecords {
    memories: Memories,
    kernels: Kernels,
    constants: StepConstants,
    /// For each record, whether a launch steps its segment. An empty segment has no tile, so no launch steps it.
    is_stepped: Vec<bool>,
    /// Two allocations: first the control memory, then the settings.
    mapped: Vec<OwnedMapped>,
}

impl HostRecords {
    /// Makes the records for a step's launches. Returns `None` if there are too many records, or if the step has
    /// several rounds. Also returns `None` if a launch needs parts of control memory besides the records, or if the CPU
    /// kernels fail their self-test.
    pub(super) fn new<'a>(
        driver: &Arc<dyn Driver>,
        plan: &Plan,
        assignment: &Assignment,
        settings: &Settings,
        launches: impl Iterator<Item = (InstepStepArgs, &'a [InstepTile])>,
    ) -> Result<Option<HostRecords>> {
        let counts = assignment.counts(plan);
        let mut is_stepped = vec![false; counts.records];
        let mut fits = assignment.rounds() == 1 && counts.records <= INSTEP_GIVEN_INDICES as usize;
        for (args, tiles) in launches {
            fits &= args.part == INSTEP_PART_WHOLE && args.local == 0;
            tiles.iter().for_each(|tile| is_stepped[tile.record as usize] = true);
        }
        if !fits {
            return Ok(None);
        }
        let mut mapped = Vec::new();
        let regions = Regions::without_tensors(counts, |_, bytes| {
            let memory = OwnedMapped::new(driver, bytes as usize)?;
            let region = Region::whole(memory.host(), bytes);
            mapped.push(memory);
            Ok(region)
        })?;
        let records = first_records(plan, &regions, assignment).collect::<Vec<_>>();
        let memories = Memories::at(regions);
        // SAFETY: nothing runs on this memory yet.
        unsafe {
            memories.write_control(first_control(&assignment.constants), records.into_iter());
            memories.write_settings(settings);
        }
        // The kernels of every instruction set give the same bits. If the baseline kernels fail their self-test, the
        // GPU runs Begin.
        let kernels = Kernels::load(Isa::Baseline).ok();
        let constants = assignment.constants;
        Ok(kernels.map(|kernels| HostRecords { memories, kernels, constants, is_stepped, mapped }))
    }

    pub(super) fn set(&mut self, settings: &Settings) {
        // SAFETY: a Begin runs only in `begin`, which needs `&mut self` too.
        unsafe { self.memories.write_settings(settings) }
    }

    /// Begins and counts an update, and returns the results that its launches need. If the update needs a decision of
    /// the GPU, or its records do not fit into an argument, this call counts nothing and returns `None`.
    pub(super) fn begin(&mut self, scale: impl FnOnce(&mut InstepBeginArgs)) -> Option<InstepGiven> {
        let mut args = begin_args(self.memories.regions(), &self.constants);
        scale(&mut args);
        let asks_gpu = !args.grad_scale.is_null() || !args.found_inf.is_null();
        if asks_gpu || args.divisor <= 0.0 || args.loss_scale <= 0.0 || args.previous_max_norm >= 0.0 {
            return None;
        }
        // SAFETY: control memory has as many records as `args` says. The builder has checked the optimizer of each.
        // Nothing else has this memory.
        unsafe { self.kernels.begin(&args) };
        let given = self.given()?;
        for record in (0..self.is_stepped.len()).filter(|record| self.is_stepped[*record]) {
            // SAFETY: this is one of the records, and nothing else touches it.
            let record = unsafe { &mut *self.memories.regions().records().add(record) };
            record.stepped = (record.action == INSTEP_ACTION_STEP).into();
        }
        Some(given)
    }

    fn given(&self) -> Option<InstepGiven> {
        let mut given = nothing_given();
        let mut different = 0;
        for k in (0..self.is_stepped.len()).filter(|k| self.is_stepped[*k]) {
            // SAFETY: only `begin` and `write_progress` write the record, and neither writes it during this read.
            let record = as_read(unsafe { self.memories.read_record(k) });
            let known =
                given.records[..different].iter().position(|known| bytes_of(known) == bytes_of(&record));
            given.record_of[k] = match known {
                Some(known) => known as u8,
                None if different == INSTEP_GIVEN_RECORDS as usize => return None,
                None => {
                    given.records[different] = record;
                    different += 1;
                    different as u8 - 1
                }
            };
        }
        // SAFETY: only the kernel of `begin` writes the block, and that kernel does not run now.
        let control = unsafe { self.memories.read_control() };
        (given.multiplier, given.average_multiplier) = (control.multiplier, control.average_multiplier);
        Some(given)
    }

    /// Enqueues the copy of all counts to the GPU's own memory, and returns how many updates have begun so far.
    ///
    /// # Safety
    /// The regions are in the GPU's memory, and have as many control blocks, records and norms as the host's memory.
    /// `self` lives until the stream has passed the copy. No later call changes the records.
    pub(super) unsafe fn send(&self, driver: &dyn Driver, to: &Regions, stream: StreamHandle) -> Result<u64> {
        let bytes = to.counts().control_bytes() as u64;
        // SAFETY: both ranges have this length and do not overlap. The stream orders the copy with the launches that
        // use the memory.
        unsafe {
            driver.copy(address(to.control()), self.mapped[0].device(), bytes, stream)?;
            Ok(self.memories.read_control().passes)
        }
    }

    pub(super) fn read_progress(&self, record: usize) -> Progress {
        // SAFETY: only `begin` and `write_progress` write the record.
        Progress::of(&unsafe { self.memories.read_record(record) })
    }

    pub(super) fn write_progress(&mut self, record: usize, progress: Progress) {
        // SAFETY: a Begin runs only in `begin`, which needs `&mut self` too.
        unsafe { self.memories.write_progress(record, progress) }
    }
}

/// Returns a copy of a record, with zeros in the fields that a launch does not read. A launch that does not step the
/// segment reads only the record's action.
fn as_read(record: InstepRecord) -> InstepRecord {
    let read = InstepRecord { hyper: 0, carried: [0.0; 2], ..record };
    if record.action == INSTEP_ACTION_STEP {
        return read;
    }
    InstepRecord { steps: 0, scalars: InstepScalars { words: [0; 6] }, ..read }
}
