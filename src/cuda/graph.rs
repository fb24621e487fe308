//! A whole overlapped pass as a CUDA graph: captured once, replayed with one launch.
//!
//! Every stream forks from the trainer's and joins it again, so the graph holds the same waits as the schedule. The
//! device reads what changes between passes (counts, learning rates, clip), so a replay uses current values. After a
//! capture all streams wait for the trainer's, because positions recorded inside a graph mean nothing outside.
#![allow(unsafe_code)]

use std::any::Any;
use std::sync::Arc;

use super::CudaDevice;
use super::driver::{Driver, Entered, Graph};
use crate::error::{Error, Result};
use crate::layout::Plan;
use crate::op::Stream;

/// A captured pass of one stepper. Dropping it frees the graph.
pub struct CapturedPass {
    driver: Arc<dyn Driver>,
    graph: Graph,
    /// The plan of the stepper that made it. The graph keeps the plan, so no later plan can have its address.
    owner: Arc<Plan>,
    /// Keeps the communicator open, whose calls the graph has. Dropped after the graph.
    _hold: Option<Box<dyn Any + Send + Sync>>,
}

impl std::fmt::Debug for CapturedPass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CapturedPass").field("graph", &self.graph).finish_non_exhaustive()
    }
}

impl Drop for CapturedPass {
    fn drop(&mut self) {
        if let Ok(_entered) = Entered::new(&*self.driver) {
            // SAFETY: instantiated by `end_capture`; what is in flight runs on.
            unsafe { self.driver.destroy_graph(self.graph) }
        }
    }
}

impl CudaDevice {
    /// Begins a capture of the trainer's stream and the streams that fork from it.
    pub(crate) fn begin_capture(&mut self) -> Result<()> {
        let compute = self.streams.stream(Stream::Compute);
        if compute.0 <= 1 {
            let remedy = "name another stream with Cuda::compute_stream";
            return Err(Error::unsupported(
                "capture",
                "the legacy default stream cannot be captured",
                remedy,
            ));
        }
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let _entered = Entered::new(&*self.driver)?;
        // SAFETY: the trainer's stream, alive by the promise of the caller who named it. If it is being captured
        // already, this is refused and nothing has failed.
        unsafe { self.driver.begin_capture(compute)? };
        self.is_capturing = true;
        // The capture may record events of the ring, and those cannot be queried afterwards.
        self.recorded = Default::default();
        Ok(())
    }

    /// Ends the capture. A failure inside it is not sticky, because nothing has run.
    pub(crate) fn end_capture(&mut self) -> Result<CapturedPass> {
        self.is_capturing = false;
        let failed = self.failed.take();
        let compute = self.streams.stream(Stream::Compute);
        let captured = Entered::new(&*self.driver).and_then(|_entered| {
            if failed.is_some() {
                // A failed device puts no more waits on its streams. CUDA does not document that a capture whose
                // streams have not joined takes all of them out when it ends.
                let _ = self.streams.gather(Stream::Compute);
            }
            let hold = self.comm.hold();
            // SAFETY: as in `begin_capture`.
            let graph = unsafe { self.driver.end_capture(compute)? };
            let (driver, owner) = (Arc::clone(&self.driver), Arc::clone(&self.plan));
            Ok(CapturedPass { driver, graph, owner, _hold: hold })
        });
        failed.map_or(captured, |error| Err(error.cause().clone()))
    }

    /// Runs a captured pass on the trainer's stream.
    pub(crate) fn replay(&mut self, captured: &CapturedPass) -> Result<()> {
        if !Arc::ptr_eq(&captured.owner, &self.plan) {
            let wrong = "made by another stepper, or before its buckets were rebuilt";
            return Err(Error::order("captured pass", wrong, "capture it again"));
        }
        let compute = self.streams.stream(Stream::Compute);
        self.guarded("a replay", |device| {
            device.fill_slot()?;
            // SAFETY: the graph refers to memory of this device alone, and to what the trainer captured, which the
            // trainer keeps alive.
            unsafe { device.driver.launch_graph(captured.graph, compute)? };
            device.settings.mark_read(device.begun, compute)?;
            device.replayed = device.settings.reader(device.begun);
            device.begun += 1;
            Ok(())
        })
    }
}
