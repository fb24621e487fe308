//! The calls to a user's own code in a launch. There is one call for each parameter, with the addresses of the
//! parameter's tensors.
//!
//! All tensors are f32, because the builder refuses any other precision. This file dereferences no address.

use std::sync::Arc;

use crate::abi::{INSTEP_MAX_STATES, InstepStepArgs, InstepTile};
use crate::launch::assignment::Assignment;
use crate::launch::region::Regions;
use crate::layout::Plan;
use crate::op::{Memory, Span};
use crate::optim::StepParam;

/// One call: a parameter's tensors and the code that steps it.
pub(crate) struct CustomParam {
    pub(crate) rule: Arc<dyn StepParam>,
    pub(crate) name: String,
    /// The index of the parameter's record in control memory. The record has the step's scalars.
    pub(crate) record: usize,
    segment: usize,
    pub(crate) len: u64,
    pub(crate) param: *mut f32,
    pub(crate) grad: *mut f32,
    pub(crate) states: [*mut f32; INSTEP_MAX_STATES as usize],
    pub(crate) state_count: usize,
}

impl CustomParam {
    /// Returns the calls of a launch with these arguments and tiles.
    pub(crate) fn all(
        args: &InstepStepArgs,
        tiles: &[InstepTile],
        plan: &Plan,
        assignment: &Assignment,
    ) -> Vec<CustomParam> {
        let segments = plan.segments();
        let call = |tile: &InstepTile| {
            let record = tile.record as usize;
            let (optimizer, segment) = (record / segments.len(), record % segments.len());
            let (rule, name, state_count) = assignment.custom(optimizer, segment)?;
            Some(CustomParam {
                rule: Arc::clone(rule),
                name: name.to_owned(),
                record,
                segment,
                len: segments[segment].len,
                param: std::ptr::with_exposed_provenance_mut(tile.param as usize),
                grad: args.grads.cast::<f32>().wrapping_add(tile.grad_offset as usize),
                states: args.states.map(|base| base.cast::<f32>().wrapping_add(tile.state_offset as usize)),
                state_count,
            })
        };
        tiles.iter().filter(|tile| tile.first != 0).filter_map(call).collect()
    }

    /// Replaces the addresses of the caller's tensors.
    pub(crate) fn rebind(&mut self, plan: &Plan, regions: &Regions) {
        let segment = &plan.segments()[self.segment];
        let at = |memory| regions.resolve(Span::segment(memory, plan, segment)).cast();
        (self.param, self.grad) = (at(Memory::Params), at(Memory::Grads));
    }
}
