//! Options of a stepper, and how they are set on the Rust library's builder.
//!
//! This module converts the integers of C into options of the Rust library. The Rust library checks whether options can
//! be combined.
#![allow(unsafe_code)]

use std::time::Duration;

use instep::{Clip, DType, Divisor, LossScaler, StepperBuilder};

use crate::arguments::{Growing, read_any};
use crate::codes::{
    INSTEP_CLIP_GLOBAL, INSTEP_CLIP_NONE, INSTEP_CLIP_PER_BUCKET, INSTEP_CLIP_PREVIOUS,
    INSTEP_INPUTS_BY_CONTRIBUTORS, INSTEP_INPUTS_BY_WORLD_SIZE, INSTEP_INPUTS_EVEN, code, flag, gradients,
    mode, unused, zero,
};
use crate::collective::instep_collective;
use crate::layout::instep_layout;
use crate::memory::instep_memory;
use crate::optimizer::instep_optimizer;
use crate::options::{instep_cuda, instep_group, instep_precision};
use crate::status::{Fault, Result};

/// A dynamic loss scale with the policy of torch.amp.GradScaler. A field that is 0 has the default given below.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct instep_loss_scaler {
    /// sizeof(instep_loss_scaler).
    pub size: usize,
    /// The first pass's scale. Default: 65536.
    pub initial_scale: f64,
    /// The scale is multiplied by this factor after growth_interval consecutive passes without a skip. Default: 2.
    pub growth_factor: f64,
    /// The scale is multiplied by this factor after a skipped pass. Default: 0.5.
    pub backoff_factor: f64,
    /// The scale grows after this number of consecutive passes without a skip. Default: 2000.
    pub growth_interval: u32,
    /// Zero. Anything else is refused.
    pub reserved: u32,
}

// SAFETY: all fields are numbers, for which zeros are valid.
unsafe impl Growing for instep_loss_scaler {
    const NAME: &'static str = "instep_loss_scaler";
}

/// Options of a stepper. A field that is 0 or null has its default, but `layout` and `optimizer` must be given. The
/// library reads these options, and the structs, lists and texts in them, only until instep_stepper_create returns. The
/// library never frees this memory. The library uses the caller's tensors, the collective's data and the stream until
/// the stepper is freed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct instep_stepper_options {
    /// sizeof(instep_stepper_options).
    pub size: usize,
    /// The model's parameters.
    pub layout: *mut instep_layout,
    /// The optimizer of all groups that `groups` does not name.
    pub optimizer: *const instep_optimizer,
    /// Groups with their own optimizers.
    pub groups: *const instep_group,
    /// The number of groups.
    pub group_count: usize,
    /// Element types. Null: f32.
    pub precision: *const instep_precision,
    /// When steps run: INSTEP_MODE_EAGER, INSTEP_MODE_NORMED or INSTEP_MODE_SEQUENTIAL. All modes give each parameter
    /// the same bits if nothing is clipped or skipped.
    pub mode: u32,
    /// INSTEP_GRADIENTS_KEEP, _ZERO, _AVERAGE or _RELEASE.
    pub gradients: u32,
    /// INSTEP_UNUSED_DEFAULT, INSTEP_UNUSED_SKIP, INSTEP_UNUSED_STEP_ZERO or INSTEP_UNUSED_REFUSE.
    pub unused: u32,
    /// INSTEP_CLIP_NONE, _GLOBAL, _PREVIOUS or _PER_BUCKET.
    pub clip: u32,
    /// If `clip` is set, gradients with a larger norm than this value are clipped to this value.
    pub max_norm: f64,
    /// 1: a pass with an infinite or NaN gradient changes nothing. Refused in INSTEP_MODE_EAGER.
    pub skip_nonfinite: u32,
    /// Element type of copies. A step writes a copy of each parameter that it steps. 0: there are no copies.
    pub copy: u32,
    /// Decay rate of the parameters' moving averages. 0: there are no averages.
    pub ema_decay: f64,
    /// The loss scale, by which steps divide the gradients. 0 means 1.
    pub loss_scale: f64,
    /// A dynamic loss scale instead of loss_scale. Null: none.
    pub loss_scaler: *const instep_loss_scaler,
    /// Bytes of gradients per bucket. 0: 1 MiB for the first bucket, 25 MiB for all others. This option is only for
    /// buckets in the stepper's own memory.
    pub bucket_cap_bytes: u64,
    /// How long a collective waits for other ranks, in milliseconds. 0: the value of the environment variable
    /// INSTEP_DEADLINE_MS, or 60,000 if it is not set.
    pub deadline_ms: u64,
    /// Number of threads on which kernels run. 0: the value of the environment variable INSTEP_THREADS. If the variable
    /// is not set, there is one thread per core, but at most 1024.
    pub threads: u32,
    /// 1: the stepper's work runs on the thread that calls the stepper. Kernels still use further threads, unless
    /// `threads` is 1. If `threads` is 1 too, the stepper starts no thread.
    pub is_inline: u32,
    /// This rank, below world_size.
    pub rank: u32,
    /// Number of ranks over which gradients are summed. 0 means 1. Steps divide the sums by this number.
    pub world_size: u32,
    /// The collective that sums gradients over the ranks. Null: there is only one rank, or sums_by_caller is 1.
    pub collective: *const instep_collective,
    /// 1: the caller sums each bucket over all ranks, in place. On the CPU, the caller hands a bucket over once the sum
    /// is complete. On a GPU, the caller calls instep_stepper_bucket_ready_after with an event that was recorded after
    /// the sum. With this option, the library broadcasts nothing, so parameters must be equal on all ranks.
    pub sums_by_caller: u32,
    /// Zero. Anything else is refused.
    pub reserved: u32,
    /// The caller's tensors. Null: the stepper allocates its own tensors.
    pub memory: *const instep_memory,
    /// The GPU. Null: the CPU.
    pub cuda: *const instep_cuda,
    /// Whether some ranks may run out of data before others: INSTEP_INPUTS_EVEN, _BY_WORLD_SIZE or _BY_CONTRIBUTORS.
    pub inputs: u32,
    /// Zero. Anything else is refused.
    pub reserved_too: u32,
}

// SAFETY: all fields are numbers and pointers, for which zeros are valid.
unsafe impl Growing for instep_stepper_options {
    const NAME: &'static str = "instep_stepper_options";
}

/// # Safety
/// The structs that the options point to meet instep.h's contract.
pub(crate) unsafe fn configured<'a>(
    builder: StepperBuilder<'a>,
    options: &instep_stepper_options,
    copy: Option<DType>,
) -> Result<StepperBuilder<'a>> {
    zero("reserved", options.reserved)?;
    zero("reserved_too", options.reserved_too)?;
    let mut builder = builder
        .mode(mode(options.mode)?)
        .gradients(gradients(options.gradients)?)
        .skip_nonfinite(flag("skip_nonfinite", options.skip_nonfinite)?);
    if let Some(unused) = unused(options.unused)? {
        builder = builder.unused(unused);
    }
    let clips = [INSTEP_CLIP_NONE, INSTEP_CLIP_GLOBAL, INSTEP_CLIP_PREVIOUS, INSTEP_CLIP_PER_BUCKET];
    builder = match code("clip", options.clip, &clips.map(|clip| (clip, clip)))? {
        INSTEP_CLIP_GLOBAL => builder.clip(Clip::Global(options.max_norm)),
        INSTEP_CLIP_PREVIOUS => builder.clip(Clip::Previous(options.max_norm)),
        INSTEP_CLIP_PER_BUCKET => builder.clip(Clip::PerBucket(options.max_norm)),
        _ if options.max_norm != 0.0 => {
            let remedy = "set clip, or leave it 0";
            return Err(Fault::argument("max_norm", "set, but clip is INSTEP_CLIP_NONE", remedy));
        }
        _ => builder,
    };
    if let Some(copy) = copy {
        builder = builder.copy_params(copy);
    }
    if options.ema_decay != 0.0 {
        builder = builder.ema(options.ema_decay);
    }
    if options.loss_scale != 0.0 {
        builder = builder.loss_scale(options.loss_scale);
    }
    // SAFETY: guaranteed by the caller.
    if let Some(given) = unsafe { read_any(options.loss_scaler)? } {
        if options.loss_scale != 0.0 {
            return Err(Fault::argument("loss_scale", "set beside loss_scaler", "leave it 0"));
        }
        zero("reserved", given.reserved)?;
        let or = |number: f64, default: f64| if number == 0.0 { default } else { number };
        let default = LossScaler::default();
        builder = builder.loss_scale(LossScaler {
            initial_scale: or(given.initial_scale, default.initial_scale),
            growth_factor: or(given.growth_factor, default.growth_factor),
            backoff_factor: or(given.backoff_factor, default.backoff_factor),
            growth_interval: if given.growth_interval == 0 {
                default.growth_interval
            } else {
                given.growth_interval
            },
        });
    }
    let inputs = [
        (INSTEP_INPUTS_EVEN, None),
        (INSTEP_INPUTS_BY_WORLD_SIZE, Some(Divisor::WorldSize)),
        (INSTEP_INPUTS_BY_CONTRIBUTORS, Some(Divisor::ContributingRanks)),
    ];
    if let Some(divisor) = code("inputs", options.inputs, &inputs)? {
        builder = builder.uneven_inputs(divisor);
    }
    if options.bucket_cap_bytes != 0 {
        builder = builder.bucket_cap_bytes(options.bucket_cap_bytes);
    }
    if options.deadline_ms != 0 {
        builder = builder.deadline(Duration::from_millis(options.deadline_ms));
    }
    if options.threads != 0 {
        builder = builder.threads(options.threads as usize);
    }
    Ok(if flag("is_inline", options.is_inline)? { builder.inline() } else { builder })
}
