//! A whole overlapped pass as a CUDA graph: captured once, replayed with one launch.
//!
//! Every stream forks from the trainer's and joins it again, so the graph holds the same waits as the list. What changes
//! from pass to pass (counts, learning rates, clip) is read on the device, so nothing is baked in. Must leave the streams
//! behind the graph, because positions recorded inside it mean nothing outside.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::CudaDevice;
use super::driver::{Driver, Entered, Graph};
use crate::error::{Error, Result};
use crate::op::Stream;

/// A captured pass of one stepper. Dropping it frees the graph.
pub struct CapturedPass {
    driver: Arc<dyn Driver>,
    graph: Graph,
    /// The stepper's own, to tell its graphs from another's.
    owner: *const (),
}

// SAFETY: the address is compared and never followed; drivers' handles may be used from any thread.
unsafe impl Send for CapturedPass {}

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
        let compute = self.queues.stream(Stream::Compute);
        if compute.0 <= 1 {
            let what = "capturing the legacy default stream".to_owned();
            return Err(Error::Unsupported {
                what,
                have: "capture on a stream given to Cuda::compute_stream".into(),
            });
        }
        self.guarded("the start of a capture", |device| {
            // SAFETY: the trainer's stream, alive by the promise of whoever named it.
            unsafe { device.driver.begin_capture(compute)? };
            device.is_capturing = true;
            Ok(())
        })
    }

    /// Ends the capture, even of a pass that failed.
    pub(crate) fn end_capture(&mut self) -> Result<CapturedPass> {
        self.is_capturing = false;
        let owner = Arc::as_ptr(&self.plan).cast();
        let compute = self.queues.stream(Stream::Compute);
        self.guarded("the end of a capture", |device| {
            // SAFETY: as in `begin_capture`.
            let graph = unsafe { device.driver.end_capture(compute)? };
            Ok(CapturedPass { driver: Arc::clone(&device.driver), graph, owner })
        })
    }

    /// Runs a captured pass on the trainer's stream.
    pub(crate) fn replay(&mut self, captured: &CapturedPass) -> Result<()> {
        if captured.owner != Arc::as_ptr(&self.plan).cast() {
            return Err(Error::Order("the captured pass is another stepper's".into()));
        }
        let compute = self.queues.stream(Stream::Compute);
        self.guarded("a replay", |device| {
            device.fill_slot()?;
            // SAFETY: the graph refers to memory of this device alone, and to what the trainer captured, which the trainer
            // keeps alive.
            unsafe { device.driver.launch_graph(captured.graph, compute)? };
            device.settings.mark_read(device.begun, compute)?;
            device.begun += 1;
            Ok(())
        })
    }
}
