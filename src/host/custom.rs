//! Runs a custom optimizer instead of a kernel. The user's code is called once per parameter, on the thread of the
//! optim stream.
//!
//! Before these calls, `instruct` in control.h decides the action for each segment. `instruct` considers skipped
//! passes, the counts in tail blocks, and frozen parameters. User code gets only slices of the launch's tiles, so the
//! checker has checked every byte that user code touches.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::sync::Arc;

use crate::abi::{INSTEP_ACTION_STEP, INSTEP_MAX_STATES, InstepStepArgs, InstepTile};
use crate::error::Result;
use crate::host::kernels::Kernels;
use crate::host::memories::Memories;
use crate::launch::{Assignment, CustomParam, Launch};
use crate::layout::Plan;
use crate::optim::ParamStep;

/// The calls to user code in one launch of a bucket.
pub(super) struct CustomStep {
    args: InstepStepArgs,
    tiles: Vec<InstepTile>,
    params: UnsafeCell<Vec<CustomParam>>,
    kernels: Kernels,
    memories: Arc<Memories>,
}

// SAFETY: the pointers lead into `memories`, which is shareable. One thread at a time runs the step.
unsafe impl Send for CustomStep {}
// SAFETY: only the optim stream's thread calls `run`.
unsafe impl Sync for CustomStep {}

impl CustomStep {
    pub(super) fn new(
        launch: Launch,
        plan: &Plan,
        assignment: &Assignment,
        kernels: Kernels,
        memories: &Arc<Memories>,
    ) -> CustomStep {
        let Launch { mut args, tiles, .. } = launch;
        args.tiles = tiles.as_ptr();
        let params = CustomParam::all(&args, &tiles, plan, assignment);
        let (params, memories) = (UnsafeCell::new(params), Arc::clone(memories));
        CustomStep { args, tiles, params, kernels, memories }
    }

    /// Replaces the addresses of the caller's tensors. The addresses in `args` stay as they are, because only
    /// `instruct` gets `args`, and `instruct` reads no tensor.
    ///
    /// # Safety
    /// The step is not running, and no other thread calls this function.
    pub(super) unsafe fn rebind(&self, plan: &Plan) {
        // SAFETY: by the contract, nothing else refers to the list now.
        let params = unsafe { &mut *self.params.get() };
        params.iter_mut().for_each(|param| param.rebind(plan, self.memories.regions()));
    }

    /// Updates every parameter of the launch, except skipped parameters.
    pub(super) fn run(&self) -> Result<()> {
        debug_assert!(std::ptr::eq(self.args.tiles, self.tiles.as_ptr()));
        // SAFETY: the arguments were resolved from the op's accesses, and the tiles are this step's own. By the
        // schedule, no other op touches control memory now.
        unsafe { self.kernels.custom(&self.args) };
        // SAFETY: only `rebind` changes the list, and never while the step runs.
        let params = unsafe { &*self.params.get() };
        for param in params {
            // SAFETY: the record is of this launch, and by the schedule no other op touches control memory now. Every
            // bit pattern is a valid value of each member of the union.
            let scalars = unsafe { self.memories.read_record(param.record).scalars.custom };
            if scalars.action != INSTEP_ACTION_STEP {
                continue;
            }
            // The segment has been allocated, so its length fits in a usize.
            let len = param.len as usize;
            let mut states: [&mut [f32]; INSTEP_MAX_STATES as usize] =
                std::array::from_fn(|_| Default::default());
            // SAFETY: by the launch's own checks, all addresses are valid for the segment's elements. Parameter,
            // gradient and states do not overlap. By the schedule, no other op touches this bucket while its step runs.
            let (values, grad) = unsafe {
                for (slice, state) in states.iter_mut().zip(&param.states[..param.state_count]) {
                    *slice = std::slice::from_raw_parts_mut(*state, len);
                }
                let values = std::slice::from_raw_parts_mut(param.param, len);
                (values, std::slice::from_raw_parts(param.grad, len))
            };
            param.rule.step_param(ParamStep {
                name: &param.name,
                param: values,
                grad_sum: grad,
                states: &mut states[..param.state_count],
                multiplier: scalars.multiplier,
                lr: scalars.lr,
                step: scalars.step,
            })?;
        }
        Ok(())
    }
}
