//! Options that bucket steps and steppers share: the optimizers of groups, element types, and the GPU.
//!
//! Each option is read into the Rust library's own type.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_void};

use instep::cuda::Cuda;
use instep::{DType, Layout, Optimizer, Precision, Rounding, StreamHandle};

use crate::arguments::{Growing, list, read_any, text};
use crate::codes::{
    INSTEP_GROUP_CLIP_ALONE, INSTEP_GROUP_CLIP_NONE, INSTEP_GROUP_CLIP_TOGETHER, code, dtype, flag, master,
    states, zero,
};
use crate::optimizer::{build, instep_optimizer, name_of};
use crate::status::{Fault, Result};

/// The optimizer and the precision of one group of parameters.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct instep_group {
    /// The group's name.
    pub name: *const c_char,
    /// Its optimizer. Null: the default optimizer of the options.
    pub optimizer: *const instep_optimizer,
    /// Its element types. Null: the default precision of the options. This field must be null for a bucket step,
    /// because a bucket step has only one precision.
    pub precision: *const instep_precision,
    /// INSTEP_GROUP_CLIP_TOGETHER, _ALONE or _NONE. This field must be 0 for a bucket step, because an instep_norm
    /// decides the clip of bucket steps.
    pub clip: u32,
    /// Zero. Anything else is refused.
    pub reserved: u32,
    /// If the group is clipped alone, the norm to which its gradients are limited. Otherwise 0.
    pub max_norm: f64,
}

/// Element types of the tensors. Arithmetic is in f32 for all element types.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct instep_precision {
    /// sizeof(instep_precision).
    pub size: usize,
    /// Type of parameters. 0: INSTEP_F32.
    pub param: u32,
    /// Type in which gradients are stored and summed. 0: INSTEP_F32.
    pub grad: u32,
    /// How the low bits of 16-bit parameters are stored: INSTEP_MASTER_NONE, _F32, _REMAINDER16 or _REMAINDER8.
    pub master: u32,
    /// Storage of optimizer states: INSTEP_STATES_F32, _BF16 or _8BIT.
    pub states: u32,
    /// 1: values that are stored in fewer bits than f32 are rounded stochastically. 0: they are rounded to nearest.
    pub is_stochastic: u32,
    /// Zero. Anything else is refused.
    pub reserved: u32,
    /// Seed of stochastic rounding, equal on all ranks.
    pub seed: u64,
}

// SAFETY: all fields are numbers, for which zeros are valid.
unsafe impl Growing for instep_precision {
    const NAME: &'static str = "instep_precision";
}

/// A GPU and its options.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct instep_cuda {
    /// sizeof(instep_cuda).
    pub size: usize,
    /// The number of the CUDA device.
    pub ordinal: u32,
    /// CUDA priority of the stream on which a stepper's steps run. A lower number is a higher priority.
    pub optim_priority: i32,
    /// The stream (cudaStream_t or CUstream) of the caller's own work on a stepper's tensors, such as forward and
    /// backward. Null: the legacy default stream. Bucket steps and norms ignore this field, because each of their calls
    /// takes a stream.
    pub compute_stream: *mut c_void,
    /// Largest number of thread blocks of a step. A step is divided into tiles of elements. 0: each block steps one
    /// tile if the step of a tile reads and writes at least 38 KiB on average, and otherwise so many tiles that the
    /// block reads and writes about 224 KiB, or fewer tiles if the launch would have too few blocks for the GPU.
    pub max_blocks: u32,
    /// Zero. Anything else is refused.
    pub reserved: u32,
}

// SAFETY: all fields are numbers and a pointer, for which zeros are valid.
unsafe impl Growing for instep_cuda {
    const NAME: &'static str = "instep_cuda";
}

/// The optimizers, precisions and clips for a layout: the defaults, and those of single groups.
pub(crate) struct Groups {
    pub(crate) optimizer: Box<dyn Optimizer>,
    pub(crate) precision: Precision,
    pub(crate) optimizers: Vec<(String, Box<dyn Optimizer>)>,
    pub(crate) precisions: Vec<(String, Precision)>,
    /// The groups that are clipped alone, each with the limit of its norm, and the groups that are not clipped, with
    /// `None`.
    pub(crate) clips: Vec<(String, Option<f64>)>,
}

impl Groups {
    /// # Safety
    /// Structs, lists and texts meet instep.h's contract.
    pub(crate) unsafe fn read(
        optimizer: *const instep_optimizer,
        precision: *const instep_precision,
        groups: *const instep_group,
        group_count: usize,
    ) -> Result<Groups> {
        // SAFETY: guaranteed by the caller, here and below.
        let (optimizer, precision, all) =
            unsafe { (build(optimizer)?, self::precision(precision)?, list(groups, group_count, "groups")?) };
        let (mut optimizers, mut precisions, mut clips) = (Vec::new(), Vec::new(), Vec::new());
        for group in all {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let name = text(group.name, "group's name")?;
                if !group.optimizer.is_null() {
                    optimizers.push((name.to_owned(), build(group.optimizer)?));
                }
                if !group.precision.is_null() {
                    precisions.push((name.to_owned(), self::precision(group.precision)?));
                }
                zero("reserved", group.reserved)?;
                let codes = [INSTEP_GROUP_CLIP_TOGETHER, INSTEP_GROUP_CLIP_ALONE, INSTEP_GROUP_CLIP_NONE];
                match code("clip", group.clip, &codes.map(|clip| (clip, clip)))? {
                    INSTEP_GROUP_CLIP_ALONE => clips.push((name.to_owned(), Some(group.max_norm))),
                    _ if group.max_norm != 0.0 => {
                        let wrong = "set, but the group's clip is not INSTEP_GROUP_CLIP_ALONE";
                        return Err(Fault::argument("max_norm", wrong, "set clip, or leave it 0"));
                    }
                    INSTEP_GROUP_CLIP_NONE => clips.push((name.to_owned(), None)),
                    _ => {}
                }
            }
        }
        Ok(Groups { optimizer, precision, optimizers, precisions, clips })
    }

    /// Returns the name of each group, and the name of its optimizer.
    pub(crate) fn names(&self, layout: &Layout) -> Vec<(String, &'static str)> {
        let name = |group: &String| {
            let own = self.optimizers.iter().rev().find(|(name, _)| name == group);
            (group.clone(), name_of(own.map_or(&*self.optimizer, |(_, own)| &**own)))
        };
        layout.groups().iter().map(name).collect()
    }

    /// Returns the element types of each parameter and its gradient.
    pub(crate) fn types(&self, layout: &Layout) -> Result<Vec<Types>> {
        let types = |id| {
            let parameter = layout.parameter(id)?;
            let group = &layout.groups()[parameter.group as usize];
            let own = self.precisions.iter().rev().find(|(name, _)| name == group);
            let precision = own.map_or(self.precision, |(_, own)| *own);
            let (param, grad) = (precision.param, precision.grad);
            Ok(Types { param: parameter.dtype.unwrap_or(param), grad: parameter.dtype.unwrap_or(grad) })
        };
        layout.ids().map(types).collect()
    }
}

/// The element types of a parameter and its gradient.
#[derive(Clone, Copy)]
pub(crate) struct Types {
    pub(crate) param: DType,
    pub(crate) grad: DType,
}

/// # Safety
/// The struct meets instep.h's contract, or the pointer is null.
unsafe fn precision(from: *const instep_precision) -> Result<Precision> {
    // SAFETY: guaranteed by the caller.
    let Some(given) = (unsafe { read_any(from)? }) else { return Ok(Precision::F32) };
    zero("reserved", given.reserved)?;
    let rounding = if flag("is_stochastic", given.is_stochastic)? {
        Rounding::Stochastic { seed: given.seed }
    } else {
        Rounding::Nearest
    };
    Ok(Precision {
        param: dtype("param", given.param)?.unwrap_or(DType::F32),
        grad: dtype("grad", given.grad)?.unwrap_or(DType::F32),
        master: master(given.master)?,
        moments: states(given.states)?,
        rounding,
    })
}

/// Opens the GPU, if one was requested.
///
/// # Safety
/// The struct meets instep.h's contract, or the pointer is null.
pub(crate) unsafe fn cuda(from: *const instep_cuda) -> Result<Option<Cuda>> {
    // SAFETY: guaranteed by the caller.
    let Some(given) = (unsafe { read_any(from)? }) else { return Ok(None) };
    zero("reserved", given.reserved)?;
    let cuda = Cuda::open(given.ordinal)?.compute_stream(stream(given.compute_stream));
    let cuda = cuda.optim_priority(given.optim_priority);
    Ok(Some(if given.max_blocks > 0 { cuda.max_blocks(given.max_blocks) } else { cuda }))
}

pub(crate) fn stream(stream: *mut c_void) -> StreamHandle {
    StreamHandle(stream.expose_provenance())
}

pub(crate) fn refuse_stream(stream: *mut c_void) -> Result<()> {
    if stream.is_null() {
        return Ok(());
    }
    Err(Fault::argument("stream", "given to a step on the CPU, which has none", "pass null"))
}
