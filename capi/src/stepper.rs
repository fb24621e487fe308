//! Creates and frees steppers.
//!
//! A handle stands for a `Stepper` on the host or on a GPU. Each function of this module, `pass.rs` and `access.rs`
//! works for both, except instep_stepper_bucket_ready_after, which requires a GPU.
#![allow(unsafe_code)]

use instep::cuda::{Cuda, CudaDevice};
use instep::{DType, Solo, Stepper, StepperBuilder, Sums};

use crate::arguments::{Out, read};
use crate::codes::{dtype, flag};
use crate::collective::Foreign;
use crate::entry::call;
use crate::handles::{Kind, Table};
use crate::layout::{Ids, close};
use crate::memory::memory;
use crate::options::{Groups, Types, cuda as open};
use crate::status::{Fault, Result, instep_status};
use crate::stepper_options::{configured, instep_stepper_options};

/// The training of one rank: its parameters, gradients and states, and the passes that step the parameters.
///
/// The caller owns the stepper until instep_stepper_free. Any thread may use the stepper, but only one thread at a
/// time: a second thread gets INSTEP_BUSY. If compute_stream is the per-thread default stream (the value 2), only the
/// thread that created the stepper may use the stepper.
pub struct instep_stepper;

pub(crate) static STEPPERS: Table<Training> = Table::new(Kind::Stepper);

/// A stepper, and the facts about it that the C functions need.
pub(crate) struct Training {
    pub(crate) engine: Engine,
    pub(crate) ids: Ids,
    pub(crate) types: Vec<Types>,
    pub(crate) copy: Option<DType>,
    /// The name of each group, and the name of its optimizer.
    pub(crate) optimizers: Vec<(String, &'static str)>,
    /// The caller's collective. instep_stepper_free releases it.
    collective: Option<Foreign>,
}

pub(crate) enum Engine {
    Host(Box<Stepper>),
    Cuda(Box<Stepper<CudaDevice>>),
}

/// Evaluates the same expression for a stepper on the host and for a stepper on a GPU.
macro_rules! on_any {
    ($engine:expr, $stepper:ident => $body:expr) => {
        match $engine {
            $crate::stepper::Engine::Host($stepper) => $body,
            $crate::stepper::Engine::Cuda($stepper) => $body,
        }
    };
}

pub(crate) use on_any;

/// Creates a stepper. If the call succeeds, it writes the handle to `*out_stepper`.
///
/// Any thread may call this function. No other thread may use the layout during the call. The library starts its
/// threads at the first pass.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_create(
    options: *const instep_stepper_options,
    out_stepper: *mut *mut instep_stepper,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract.
        let (options, out) = unsafe { (read(options)?, Out::new(out_stepper, "out_stepper")?) };
        // SAFETY: the caller meets the header's contract.
        let training = unsafe { create(&options)? };
        out.put(STEPPERS.insert(training)?);
        Ok(())
    })
}

/// Waits for all steps, frees the stepper, and reports failures. If the call returns INSTEP_BUSY, INSTEP_HANDLE or
/// INSTEP_FORKED, nothing is freed. If the call returns INSTEP_ORDER, a pass was open: the stepper is freed, and the
/// other ranks' steppers end with an error. If the handle is null, the call does nothing.
///
/// Any thread may call this function, one thread at a time per stepper. If a queued sum needs other ranks, the call
/// waits for them up to the deadline.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_free(stepper: *mut instep_stepper) -> instep_status {
    call(|| {
        if stepper.is_null() {
            return Ok(());
        }
        let Training { engine, collective, .. } = STEPPERS.remove(stepper)?;
        let outcome = match engine {
            Engine::Host(host) => host.close(),
            Engine::Cuda(gpu) => gpu.close(),
        };
        collective.iter().for_each(Foreign::release);
        Ok(outcome?)
    })
}

/// # Safety
/// The options meet the header's contract.
unsafe fn create(options: &instep_stepper_options) -> Result<Training> {
    let layout = close(options.layout)?;
    let ids = Ids::of(&layout);
    // SAFETY: guaranteed by the caller, here and below.
    let (groups, gpu) = unsafe {
        (
            Groups::read(options.optimizer, options.precision, options.groups, options.group_count)?,
            open(options.cuda)?,
        )
    };
    let (names, types) = (groups.names(&layout), groups.types(&layout)?);
    let mut builder = Stepper::builder(&layout, groups.optimizer).precision(groups.precision);
    for (group, optimizer) in groups.optimizers {
        builder = builder.group(group, optimizer);
    }
    for (group, precision) in groups.precisions {
        builder = builder.group_precision(group, precision);
    }
    for (group, max_norm) in groups.clips {
        builder = builder.group_clip(group, max_norm);
    }
    let copy = dtype("copy", options.copy)?;
    // SAFETY: guaranteed by the caller.
    let builder = unsafe { configured(builder, options, copy)? };
    let borrowed = if options.memory.is_null() {
        None
    } else {
        // SAFETY: guaranteed by the caller.
        Some(unsafe { memory(options.memory, &ids, &types)? })
    };
    let world_size = options.world_size.max(1);
    let mut collective = None;
    let sums = if flag("sums_by_caller", options.sums_by_caller)? {
        if !options.collective.is_null() {
            return Err(Fault::argument("sums_by_caller", "1 beside a collective", "leave one of them out"));
        }
        Sums::by_caller(options.rank, world_size)
    } else if !options.collective.is_null() {
        // SAFETY: guaranteed by the caller.
        let foreign = unsafe { Foreign::read(options.collective, options.rank, world_size)? };
        collective = Some(foreign.clone());
        foreign.into()
    } else if options.rank != 0 || world_size != 1 {
        let field = if world_size != 1 { "world_size" } else { "rank" };
        let remedy = "name a collective, or set sums_by_caller";
        return Err(Fault::argument(field, "of several ranks, which nobody sums over", remedy));
    } else {
        Solo::default().into()
    };
    // SAFETY: guaranteed by the caller.
    let engine = unsafe { engine(builder, sums, borrowed, gpu.as_ref())? };
    Ok(Training { engine, ids, types, copy, optimizers: names, collective })
}

/// # Safety
/// The memory, the stream and the collective meet instep.h's contract.
unsafe fn engine(
    builder: StepperBuilder<'_>,
    sums: Sums,
    borrowed: Option<instep::Borrowed>,
    gpu: Option<&Cuda>,
) -> Result<Engine> {
    // SAFETY: guaranteed by the caller.
    Ok(unsafe {
        match (gpu, borrowed) {
            (None, None) => Engine::Host(Box::new(builder.host(sums)?)),
            (None, Some(memory)) => Engine::Host(Box::new(builder.host_borrowing(sums, memory)?)),
            (Some(gpu), None) => Engine::Cuda(Box::new(builder.cuda(sums, gpu)?)),
            (Some(gpu), Some(memory)) => Engine::Cuda(Box::new(builder.cuda_borrowing(sums, memory, gpu)?)),
        }
    })
}
