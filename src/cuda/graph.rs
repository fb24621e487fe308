//! A pass as a CUDA graph, with all its overlap. The pass is captured once, and each replay is one launch.
//!
//! Every stream forks from the trainer's stream and joins it again, so the graph holds the same waits as the schedule.
//! The graph's work reads from memory all values that change between passes (counts, learning rates, clip), so a replay
//! uses current values. After a capture, all streams wait for the trainer's stream, because a position that was
//! recorded inside the capture has no meaning outside it.

use std::any::Any;
use std::sync::Arc;

use super::CudaDevice;
use super::driver::Entered;
use super::order::on_device;
use super::owned::OwnedGraph;
use crate::error::{Error, Result};
use crate::layout::Plan;
use crate::op::{STREAMS, Stream};

/// A captured pass of one stepper. Dropping it frees the graph.
pub struct CapturedPass {
    graph: OwnedGraph,
    /// The plan of the stepper that captured the pass. A replay compares this plan with the stepper's plan by address.
    /// This field keeps the plan alive, so no later plan can get the same address.
    owner: Arc<Plan>,
    bindings: u64,
    /// Keeps open the communicators that the graph's calls use. This field is dropped after the graph.
    holds: Vec<Box<dyn Any + Send + Sync>>,
}

impl std::fmt::Debug for CapturedPass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CapturedPass").field("graph", &self.graph.handle()).finish_non_exhaustive()
    }
}

impl CudaDevice {
    /// Begins a capture of the trainer's stream and the streams that fork from it.
    pub(crate) fn begin_capture(&mut self) -> Result<()> {
        let compute = self.cuda.compute;
        let refused = |wrong, remedy| Err(Error::unsupported("capture", wrong, remedy));
        if compute.0 <= 1 {
            let remedy = "name another stream with Cuda::compute_stream";
            return refused("the legacy default stream cannot be captured", remedy);
        }
        if self.host.as_ref().is_some_and(|host| !host.is_pinned) {
            let wrong = "copies of pageable memory cannot be captured";
            return refused(wrong, "set OffloadPolicy::pin_memory");
        }
        if self.host.is_some() && self.assignment.constants.loss_scale.external().is_some() {
            let wrong = "the trainer's thread would have to wait for the decision on its scaler";
            return refused(wrong, "leave grad_scaler or offload out");
        }
        self.notice_host();
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let _entered = Entered::new(&*self.cuda.driver)?;
        // If the stream is being captured already, the call is refused, which is not a failure of the device.
        OwnedGraph::begin(&*self.cuda.driver, compute)?;
        self.is_capturing = true;
        self.forked = [false; STREAMS];
        // The capture may record the ring's events. An event that was recorded in a capture cannot be queried
        // afterwards.
        self.recorded = Default::default();
        Ok(())
    }

    /// Ends the capture. A failure inside the capture is not sticky, because none of the captured work has run.
    pub(crate) fn end_capture(&mut self) -> Result<CapturedPass> {
        self.is_capturing = false;
        let failed = self.failed.take();
        let compute = self.cuda.compute;
        let captured = Entered::new(&*self.cuda.driver).and_then(|_entered| {
            if failed.is_some() {
                // A failed device puts no more waits on its streams, so some streams may not have joined the capture.
                // CUDA does not document whether the end of the capture then releases these streams.
                let _ = self.streams.gather(Stream::Compute, |other| self.forked[other.index()]);
            }
            let holds = self.comms.iter().filter_map(|comm| comm.hold()).collect();
            let graph = OwnedGraph::end(&self.cuda.driver, compute)?;
            Ok(CapturedPass { graph, owner: Arc::clone(&self.plan), bindings: self.bindings, holds })
        });
        failed.map_or(captured, |error| Err(error.cause().clone()))
    }

    /// Returns a function that ends the capture and discards the captured work. The function holds no
    /// reference to this device, so it works even if the trainer drops the stepper during the capture.
    pub(crate) fn capture_breaker(&self) -> impl FnOnce() + use<> {
        let (driver, compute) = (Arc::clone(&self.cuda.driver), self.cuda.compute);
        move || {
            if let Ok(_entered) = Entered::new(&*driver) {
                drop(OwnedGraph::end(&driver, compute));
            }
        }
    }

    pub(crate) fn replay(&mut self, captured: &CapturedPass) -> Result<()> {
        let refused = |wrong| Err(Error::order("captured pass", wrong, "capture it again"));
        if !Arc::ptr_eq(&captured.owner, &self.plan) {
            return refused("made by another stepper, or before its buckets were rebuilt");
        }
        if captured.bindings != self.bindings {
            return refused("made before Stepper::rebind, with the tensors' old addresses");
        }
        let compute = self.cuda.compute;
        self.guarded("a replay", |device| {
            device.fill_slot()?;
            let launch = || captured.graph.launch(compute);
            if captured.holds.is_empty() {
                launch()?;
            } else {
                let driver = &device.cuda.driver;
                on_device(driver.ordinal()).enqueue(None, driver, compute, launch)?;
            }
            device.replayed = Some(device.engine.settings.mark_read(compute)?.clone());
            Ok(())
        })
    }
}
