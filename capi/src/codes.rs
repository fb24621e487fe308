//! The integers by which C selects options, and the Rust option for each integer.
//!
//! C may pass any integer, so each integer is looked up. No function takes a Rust enum from C.

use instep::{DType, Gradients, Master, Mode, Moments, SegmentAction, Unused};

use crate::status::{Fault, Result};

/// Element type: float, IEEE 754 binary32. In a field for an element type, 0 means the default that the field's comment
/// names.
pub const INSTEP_F32: u32 = 1;
/// Element type: bfloat16.
pub const INSTEP_BF16: u32 = 2;
/// Element type: IEEE 754 binary16.
pub const INSTEP_F16: u32 = 3;

/// 16-bit parameters have no master weight. The default.
pub const INSTEP_MASTER_NONE: u32 = 0;
/// Each 16-bit parameter has a separate f32 weight.
pub const INSTEP_MASTER_F32: u32 = 1;
/// The bf16 parameter is the upper 16 bits of an f32 weight. A remainder stores the lower 16 bits of the weight.
pub const INSTEP_MASTER_REMAINDER16: u32 = 2;
/// The bf16 parameter is the upper 16 bits of an f32 weight. A remainder stores bits 8 to 15 of the weight.
pub const INSTEP_MASTER_REMAINDER8: u32 = 3;

/// The stepper's clip applies to all groups with this value together. The default.
pub const INSTEP_GROUP_CLIP_TOGETHER: u32 = 0;
/// A group is clipped alone, by the exact norm of its own gradients. Refused in INSTEP_MODE_EAGER.
pub const INSTEP_GROUP_CLIP_ALONE: u32 = 1;
/// A group is not clipped. Refused in INSTEP_MODE_EAGER.
pub const INSTEP_GROUP_CLIP_NONE: u32 = 2;

/// Optimizer states are f32. The default.
pub const INSTEP_STATES_F32: u32 = 0;
/// Optimizer states are bf16.
pub const INSTEP_STATES_BF16: u32 = 1;
/// Optimizer states are 8-bit codes, with an f32 scale per 256 elements.
pub const INSTEP_STATES_8BIT: u32 = 2;

/// Steps a bucket as soon as it is reduced. The default.
pub const INSTEP_MODE_EAGER: u32 = 0;
/// Steps all buckets after the last bucket is reduced and the norm is known.
pub const INSTEP_MODE_NORMED: u32 = 1;
/// Steps all buckets after the last sum, one bucket after the other.
pub const INSTEP_MODE_SEQUENTIAL: u32 = 2;

/// A step does not change the gradients of stepped parameters: they are still the sums over the ranks. The default.
pub const INSTEP_GRADIENTS_KEEP: u32 = 0;
/// The step zeroes the gradients that it has read.
pub const INSTEP_GRADIENTS_ZERO: u32 = 1;
/// The memory of stepped gradients is returned to the system. This option requires Linux, and a stepper on the CPU that
/// owns its memory.
pub const INSTEP_GRADIENTS_RELEASE: u32 = 2;
/// The step overwrites each gradient with the value that it used: the mean over ranks, divided by the loss scale and
/// clipped.
pub const INSTEP_GRADIENTS_AVERAGE: u32 = 3;

/// Means INSTEP_UNUSED_SKIP if the stepper owns its buckets and sums them, and INSTEP_UNUSED_REFUSE otherwise.
pub const INSTEP_UNUSED_DEFAULT: u32 = 0;
/// A parameter is not stepped if no rank wrote its gradient. This option is refused if the buckets are in the caller's
/// memory, because such buckets have no room for the number of ranks that used each parameter.
pub const INSTEP_UNUSED_SKIP: u32 = 1;
/// If no rank wrote a parameter's gradient, zeros are written to the gradient's memory and the parameter is stepped
/// with them.
pub const INSTEP_UNUSED_STEP_ZERO: u32 = 2;
/// If a gradient was not written, instep_stepper_finish returns an error that names the parameter, and the pass stays
/// open.
pub const INSTEP_UNUSED_REFUSE: u32 = 3;

/// All ranks have the same number of batches. The default.
pub const INSTEP_INPUTS_EVEN: u32 = 0;
/// A rank that runs out of data calls instep_stepper_join. Summed gradients are divided by world_size.
pub const INSTEP_INPUTS_BY_WORLD_SIZE: u32 = 1;
/// A rank that runs out of data calls instep_stepper_join. Summed gradients are divided by the number of ranks that had
/// data in the pass.
pub const INSTEP_INPUTS_BY_CONTRIBUTORS: u32 = 2;

/// The optimizer steps the parameter. The default.
pub const INSTEP_ACTION_STEP: u32 = 0;
/// The library averages the parameter's gradient over the ranks, so that another optimizer can step the parameter.
pub const INSTEP_ACTION_AVERAGE: u32 = 1;
/// The library changes neither the parameter nor its summed gradient.
pub const INSTEP_ACTION_LEAVE: u32 = 2;

/// Nothing is clipped. The default.
pub const INSTEP_CLIP_NONE: u32 = 0;
/// Clips by the exact norm of all gradients. Refused in INSTEP_MODE_EAGER.
pub const INSTEP_CLIP_GLOBAL: u32 = 1;
/// Clips by the norm of the previous pass.
pub const INSTEP_CLIP_PREVIOUS: u32 = 2;
/// Clips each bucket by that bucket's norm.
pub const INSTEP_CLIP_PER_BUCKET: u32 = 3;

/// The parameter itself. If the parameter has a master weight, instep_stepper_read copies the master's values.
pub const INSTEP_PARAM: u32 = 0;
/// A parameter's gradient. After a pass with INSTEP_GRADIENTS_KEEP, the gradient of a stepped parameter is the sum over
/// the ranks (if is_local is 1, this rank's own gradient), still multiplied by the loss scale.
pub const INSTEP_GRAD: u32 = 1;
/// A state of the parameter's optimizer. The state's name must be given.
pub const INSTEP_STATE: u32 = 2;
/// The parameter's copy in another type.
pub const INSTEP_COPY: u32 = 3;
/// The parameter's moving average.
pub const INSTEP_EMA: u32 = 4;

/// The address is for reading.
pub const INSTEP_READ: u32 = 0;
/// The address is for writing and reading.
pub const INSTEP_WRITE: u32 = 1;

/// A collective call: every rank gets the sum over all ranks, with the same bits on each.
pub const INSTEP_ALL_REDUCE: u32 = 0;
/// A collective call: every rank gets rank 0's data.
pub const INSTEP_BROADCAST: u32 = 1;

/// Returns the option that an integer selects.
pub(crate) fn code<T: Copy>(field: &str, given: u32, all: &[(u32, T)]) -> Result<T> {
    all.iter().find(|(code, _)| *code == given).map(|(_, value)| *value).ok_or_else(|| {
        let codes: Vec<String> = all.iter().map(|(code, _)| code.to_string()).collect();
        let remedy = format_args!("use a constant of the header, one of {}", codes.join(", "));
        Fault::argument(field, format_args!("{given} stands for nothing"), remedy)
    })
}

/// Returns the element type that an integer selects, or `None` for 0.
pub(crate) fn dtype(field: &str, given: u32) -> Result<Option<DType>> {
    let (f32, bf16, f16) = (Some(DType::F32), Some(DType::BF16), Some(DType::F16));
    code(field, given, &[(0, None), (INSTEP_F32, f32), (INSTEP_BF16, bf16), (INSTEP_F16, f16)])
}

pub(crate) fn of_dtype(dtype: DType) -> Result<u32> {
    match dtype {
        DType::F32 => Ok(INSTEP_F32),
        DType::BF16 => Ok(INSTEP_BF16),
        DType::F16 => Ok(INSTEP_F16),
        other => Err(Fault::argument("element type", format_args!("{other} has no code"), "use another")),
    }
}

pub(crate) fn flag(field: &str, given: u32) -> Result<bool> {
    code(field, given, &[(0, false), (1, true)])
}

/// Refuses a reserved field that is not zero, because a later version may give the field a meaning.
pub(crate) fn zero(field: &str, given: u32) -> Result<()> {
    if given == 0 {
        return Ok(());
    }
    Err(Fault::argument(
        field,
        format_args!("{given}, though it has no meaning yet"),
        "set the struct to zeros first",
    ))
}

pub(crate) fn master(given: u32) -> Result<Master> {
    let all = [
        (INSTEP_MASTER_NONE, Master::None),
        (INSTEP_MASTER_F32, Master::F32),
        (INSTEP_MASTER_REMAINDER16, Master::Remainder16),
        (INSTEP_MASTER_REMAINDER8, Master::Remainder8),
    ];
    code("master", given, &all)
}

pub(crate) fn states(given: u32) -> Result<Moments> {
    let all = [
        (INSTEP_STATES_F32, Moments::F32),
        (INSTEP_STATES_BF16, Moments::BF16),
        (INSTEP_STATES_8BIT, Moments::EightBit),
    ];
    code("states", given, &all)
}

pub(crate) fn mode(given: u32) -> Result<Mode> {
    let all = [
        (INSTEP_MODE_EAGER, Mode::Eager),
        (INSTEP_MODE_NORMED, Mode::Normed),
        (INSTEP_MODE_SEQUENTIAL, Mode::Sequential),
    ];
    code("mode", given, &all)
}

pub(crate) fn gradients(given: u32) -> Result<Gradients> {
    let all = [
        (INSTEP_GRADIENTS_KEEP, Gradients::Keep),
        (INSTEP_GRADIENTS_ZERO, Gradients::Zero),
        (INSTEP_GRADIENTS_RELEASE, Gradients::Release),
        (INSTEP_GRADIENTS_AVERAGE, Gradients::Average),
    ];
    code("gradients", given, &all)
}

/// Returns what happens to unused parameters. `None` means that the library chooses.
pub(crate) fn unused(given: u32) -> Result<Option<Unused>> {
    let all = [
        (INSTEP_UNUSED_DEFAULT, None),
        (INSTEP_UNUSED_SKIP, Some(Unused::Skip)),
        (INSTEP_UNUSED_STEP_ZERO, Some(Unused::StepZero)),
        (INSTEP_UNUSED_REFUSE, Some(Unused::Refuse)),
    ];
    code("unused", given, &all)
}

pub(crate) fn action(given: u32) -> Result<SegmentAction> {
    let all = [
        (INSTEP_ACTION_STEP, SegmentAction::Step),
        (INSTEP_ACTION_AVERAGE, SegmentAction::Average),
        (INSTEP_ACTION_LEAVE, SegmentAction::Leave),
    ];
    code("action", given, &all)
}
