//! A whole overlapped pass as a CUDA graph: captured once, replayed with one launch.
//!
//! Every stream forks from the trainer's and joins it again, so the graph holds the same waits as the list. What
//! changes from pass to pass (counts, learning rates, clip) is read on the device, so nothing is baked in. Must leave
//! the streams behind the graph, because positions recorded inside it mean nothing outside.
#![allow(unsafe_code)]

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
    /// The stepper's own, to tell its graphs from another's; kept, so that no later stepper's can lie at its address.
    owner: Arc<Plan>,
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
    /// From here on the trainer's stream, and those that fork from it, are written down.
    pub(crate) fn begin_capture(&mut self) -> Result<()> {
        let compute = self.streams.stream(Stream::Compute);
        if compute.0 <= 1 {
            let what = "capturing the legacy default stream".to_owned();
            return Err(Error::Unsupported {
                what,
                have: "capture on a stream given to Cuda::compute_stream".into(),
            });
        }
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let _entered = Entered::new(&*self.driver)?;
        // SAFETY: the trainer's stream, alive by the promise of whoever named it. If somebody captures it already, this
        // is refused and nothing has failed.
        unsafe { self.driver.begin_capture(compute)? };
        self.is_capturing = true;
        // Events of the ring may be recorded in the capture next, and then nobody can ask for them.
        self.recorded = Default::default();
        Ok(())
    }

    /// Ends the capture, whatever has failed in it: nothing of it has run, so none of that counts any more.
    pub(crate) fn end_capture(&mut self) -> Result<CapturedPass> {
        self.is_capturing = false;
        let failed = self.failed.take();
        let compute = self.streams.stream(Stream::Compute);
        let captured = Entered::new(&*self.driver).and_then(|_entered| {
            // SAFETY: as in `begin_capture`.
            let graph = unsafe { self.driver.end_capture(compute)? };
            Ok(CapturedPass { driver: Arc::clone(&self.driver), graph, owner: Arc::clone(&self.plan) })
        });
        failed.map_or(captured, |error| Err(error.cause().clone()))
    }

    /// Runs a captured pass on the trainer's stream.
    pub(crate) fn replay(&mut self, captured: &CapturedPass) -> Result<()> {
        if !Arc::ptr_eq(&captured.owner, &self.plan) {
            return Err(Error::Order(
                "the captured pass is of other buckets: another stepper's, or these before they were rebuilt"
                    .into(),
            ));
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
