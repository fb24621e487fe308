//! Runs one piece of work: checks what it touches, then moves the bytes or runs the kernel.
//!
//! It runs with the lock of the GPU held, in the call that lets work run. A failed kernel makes every later call fail.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr;

use crate::engine;
use crate::entry;
use crate::foreign::{Foreign, ForeignWork};
use crate::gpu::Gpu;
use crate::header::cudaError_enum as Code;
use crate::judge::Judge;
use crate::queue::Operation;
use crate::report;
use crate::work::{Side, Work};

impl Gpu {
    /// Runs the first piece of work of a lane, and returns whether it could end.
    pub(crate) fn run_first_of(&mut self, lane: usize) -> bool {
        let Some(operation) = self.queue.take(lane) else { return false };
        if self.failed.is_none() && !self.run(&operation) {
            self.queue.put_back(operation);
            return false;
        }
        self.queue.set_done(&operation.touch);
        true
    }

    fn run(&mut self, operation: &Operation) -> bool {
        let context = self.queue.context_of(operation.touch.lane);
        let (claim, work) = match &operation.work {
            Work::Claimed(claim, work) => (Some(&**claim), &**work),
            work => (None, work),
        };
        let mut judge = Judge { heap: &mut self.heap, operation, context, claim };
        match work {
            Work::Claimed(..) => report::misuse("a claim on a claim"),
            Work::Marker => {}
            Work::Copy { to, from, bytes } => copy(&mut judge, to, from, *bytes),
            Work::Fill { to, pattern, bytes } => {
                judge.write(*to, *bytes);
                let at = judge.heap.at(judge.bounds(*to, *bytes), *to);
                for (k, byte) in (0..*bytes as usize).zip(pattern.iter().cycle()) {
                    // SAFETY: inside the allocation, as the judge says.
                    unsafe { at.add(k).write(*byte) };
                }
            }
            Work::Kernel(launch) if launch.hangs => return false,
            Work::Kernel(launch) => {
                let choice = match self.settings.seed {
                    0 => 0,
                    _ => self.random.below(1 << 16) as u64,
                };
                engine::launch(&mut judge, launch, choice);
                if let Some(code) = self.injected("kernel") {
                    self.failed = Some(Code(code));
                }
            }
            Work::Host { function, data } => {
                if let Some(claim) = claim {
                    judge.claimed(claim);
                }
                type Function = unsafe extern "C" fn(*mut c_void);
                let function = ptr::with_exposed_provenance::<c_void>(*function);
                entry::in_host_function(|| {
                    // SAFETY: the program gave this function for this argument.
                    unsafe {
                        std::mem::transmute::<*const c_void, Function>(function)(
                            ptr::with_exposed_provenance_mut(*data),
                        );
                    }
                });
            }
            Work::Allocated(start) => judge.own(*start, "used before it was allocated"),
            Work::Freed(start) => {
                if judge.heap.starting_at(*start).is_none() {
                    report::fault("double free", &format!("{} of {start:#x}", operation.touch.name));
                }
                judge.own(*start, "freed in use");
                judge.heap.free(*start, operation.touch.name.to_string());
            }
            Work::Foreign(foreign) => return go_on(&mut judge, foreign),
        }
        true
    }
}

/// Continues work of another library, and returns whether it has ended.
fn go_on(judge: &mut Judge<'_>, foreign: &Foreign) -> bool {
    let touch = &judge.operation.touch;
    let ticket = (touch.lane as u64) << 40 | touch.position;
    let ForeignWork { source, target, step, call, .. } = foreign.work;
    let (source_bytes, target_bytes) = (foreign.work.source_bytes as u64, foreign.work.target_bytes as u64);
    if foreign.is_new(ticket) {
        if source_bytes > 0 {
            judge.read(source, source_bytes);
        }
        judge.write(target, target_bytes);
    }
    // A rank that gives nothing may name any source.
    let from = if source_bytes > 0 { source } else { target };
    let from = judge.heap.at(judge.bounds(from, source_bytes), from);
    let to = judge.heap.at(judge.bounds(target, target_bytes), target);
    // SAFETY: memory of the lengths that the library gave, judged above.
    unsafe { step(call, ticket, from, to) != 0 }
}

fn copy(judge: &mut Judge<'_>, to: &Side, from: &Side, bytes: u64) {
    let mut without = Vec::new();
    let source = match from {
        // What lands in memory of the host is used there.
        Side::Known(address) if matches!(to, Side::Pageable(_)) => {
            judge.read(*address, bytes);
            judge.heap.at(judge.bounds(*address, bytes), *address).cast_const()
        }
        Side::Known(address) => {
            without = judge.pass_on(*address, bytes);
            judge.heap.at(judge.bounds(*address, bytes), *address).cast_const()
        }
        Side::Staged(values) => values.as_ptr(),
        Side::Pageable(address) => ptr::with_exposed_provenance(*address),
    };
    let target = match to {
        Side::Known(address) => {
            judge.write_except(*address, bytes, &without);
            judge.heap.at(judge.bounds(*address, bytes), *address)
        }
        Side::Pageable(address) => ptr::with_exposed_provenance_mut(*address),
        Side::Staged(_) => report::misuse("a copy into staged values"),
    };
    // SAFETY: the judge has checked this driver's memory; the program gave the other side for as many bytes.
    unsafe { ptr::copy(source, target, bytes as usize) };
}
