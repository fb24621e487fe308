//! The user's own code in place of a step kernel: one call per parameter, which enqueues on the optim stream.
//!
//! The launch before it makes the GPU decide what to do and store that in the parameter's record, because the host
//! knows neither skips nor tails. This module hands out only addresses of the launch's own tiles.

use std::sync::Arc;

use super::gpu_memory::address;
use crate::abi::{INSTEP_MAX_STATES, InstepRecord, InstepStepArgs, InstepTile};
use crate::error::Result;
use crate::handle::{DevicePtr, StreamHandle};
use crate::launch::{Assignment, Regions};
use crate::layout::Plan;
use crate::op::{Memory, Span};
use crate::optim::{EnqueuedStep, StepParam};

const ELEMENT_BYTES: u64 = size_of::<f32>() as u64;

/// The calls of one launch.
pub(super) struct EnqueuedParams {
    params: Vec<EnqueuedParam>,
}

struct EnqueuedParam {
    rule: Arc<dyn StepParam>,
    name: String,
    segment: usize,
    len: u64,
    param: DevicePtr,
    grad: DevicePtr,
    states: [DevicePtr; INSTEP_MAX_STATES as usize],
    state_count: usize,
    scalars: DevicePtr,
}

impl EnqueuedParams {
    pub(super) fn new(
        args: &InstepStepArgs,
        tiles: &[InstepTile],
        plan: &Plan,
        assignment: &Assignment,
    ) -> EnqueuedParams {
        const SCALARS_AT: u64 = std::mem::offset_of!(InstepRecord, scalars) as u64;
        let call = |tile: &InstepTile| {
            let (record, segments) = (tile.record as usize, plan.segments().len());
            let (rule, name, state_count) = assignment.custom(record / segments, record % segments)?;
            let at = |base: usize, offset: u64| DevicePtr(base as u64 + offset * ELEMENT_BYTES);
            let record_at = args.records.addr() as u64 + (record * size_of::<InstepRecord>()) as u64;
            Some(EnqueuedParam {
                rule: Arc::clone(rule),
                name: name.to_owned(),
                segment: record % segments,
                len: plan.segments()[record % segments].len,
                param: DevicePtr(tile.param),
                grad: at(args.grads.addr(), tile.grad_offset),
                states: args.states.map(|base| at(base.addr(), tile.state_offset)),
                state_count,
                scalars: DevicePtr(record_at + SCALARS_AT),
            })
        };
        let params = tiles.iter().filter(|tile| tile.first != 0).filter_map(call).collect();
        EnqueuedParams { params }
    }

    /// Follows the caller's tensors to other addresses.
    pub(super) fn rebind(&mut self, plan: &Plan, regions: &Regions) {
        for param in &mut self.params {
            let segment = &plan.segments()[param.segment];
            let at = |memory| address(regions.resolve(Span::segment(memory, plan, segment)));
            (param.param, param.grad) = (at(Memory::Params), at(Memory::Grads));
        }
    }

    /// Calls the user's code for every parameter.
    pub(super) fn enqueue(&self, stream: StreamHandle) -> Result<()> {
        for param in &self.params {
            param.rule.enqueue_param(&EnqueuedStep {
                name: &param.name,
                stream,
                len: param.len,
                param: param.param,
                grad_sum: param.grad,
                states: &param.states[..param.state_count],
                scalars: param.scalars,
            })?;
        }
        Ok(())
    }
}
