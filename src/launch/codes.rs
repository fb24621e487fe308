//! The numbers by which the kernels know element types, storage formats, actions and parts of a step.
//!
//! Every match is exhaustive, so a new variant does not compile until it has a code.

use crate::abi::{
    INSTEP_ACTION_AVERAGE, INSTEP_ACTION_LEAVE, INSTEP_ACTION_STEP, INSTEP_DTYPE_BF16, INSTEP_DTYPE_F16,
    INSTEP_DTYPE_F32, INSTEP_GRADIENTS_AVERAGE, INSTEP_GRADIENTS_KEEP, INSTEP_GRADIENTS_ZERO,
    INSTEP_MASTER_F32, INSTEP_MASTER_NONE, INSTEP_MASTER_REMAINDER8, INSTEP_MASTER_REMAINDER16,
    INSTEP_MOMENTS_8BIT, INSTEP_MOMENTS_BF16, INSTEP_MOMENTS_F32, INSTEP_PART_APPLY, INSTEP_PART_END,
    INSTEP_PART_MEASURE, INSTEP_PART_WHOLE,
};
use crate::dtype::DType;
use crate::layout::{Gradients, Master, Moments, SegmentAction};
use crate::op::Part;

/// Returns the kernels' code of an element type.
pub(crate) fn dtype_code(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => INSTEP_DTYPE_F32,
        DType::BF16 => INSTEP_DTYPE_BF16,
        DType::F16 => INSTEP_DTYPE_F16,
    }
}

pub(super) fn part_code(part: Part) -> u32 {
    match part {
        Part::Whole => INSTEP_PART_WHOLE,
        Part::Measure => INSTEP_PART_MEASURE,
        Part::Apply => INSTEP_PART_APPLY,
        Part::End => INSTEP_PART_END,
    }
}

/// Returns the kernels' code for what a launch does with stepped gradients. Released gradients stay until an op
/// releases them.
pub(super) fn gradients_code(gradients: Gradients, is_last: bool) -> u32 {
    match gradients {
        Gradients::Zero if is_last => INSTEP_GRADIENTS_ZERO,
        Gradients::Average if is_last => INSTEP_GRADIENTS_AVERAGE,
        Gradients::Keep | Gradients::Zero | Gradients::Average | Gradients::Release => INSTEP_GRADIENTS_KEEP,
    }
}

pub(crate) fn master_code(master: Master) -> u32 {
    match master {
        Master::None => INSTEP_MASTER_NONE,
        Master::F32 => INSTEP_MASTER_F32,
        Master::Remainder16 => INSTEP_MASTER_REMAINDER16,
        Master::Remainder8 => INSTEP_MASTER_REMAINDER8,
    }
}

pub(crate) fn moments_code(moments: Moments) -> u32 {
    match moments {
        Moments::F32 => INSTEP_MOMENTS_F32,
        Moments::BF16 => INSTEP_MOMENTS_BF16,
        Moments::EightBit => INSTEP_MOMENTS_8BIT,
    }
}

pub(crate) fn action_code(action: SegmentAction) -> u32 {
    match action {
        SegmentAction::Step => INSTEP_ACTION_STEP,
        SegmentAction::Average => INSTEP_ACTION_AVERAGE,
        SegmentAction::Leave => INSTEP_ACTION_LEAVE,
    }
}
