//! The work of a call as a value that a graph can keep: a launch with a copy of its arguments, a copy, or a fill.
//!
//! It runs on the CPU, with the CPU's kernels or as fibers, and gives the GPU kernels' results for every grid.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::LazyLock;

use instep::abi::*;
use instep::cuda::driver::Shape;
use instep::{DevicePtr, Isa};

use super::super::entries;

/// The host device does not prefetch in tests of this size, so the tests compare bits with and without prefetches.
const PREFETCHES: u64 = 2048;
const COMMON: [&str; 7] = [
    "instep_begin",
    "instep_decide",
    "instep_publish",
    "instep_norm",
    "instep_custom",
    "instep_add",
    "instep_cast",
];

/// The names of all kernels; a kernel's index is its handle.
pub(crate) static KERNELS: LazyLock<Vec<&str>> = LazyLock::new(|| {
    let table = include_str!("../../../kernels/optimizers.def").lines();
    let rows = table.filter_map(|line| line.strip_prefix("OPTIMIZER(")?.split_once(','));
    let steps =
        rows.flat_map(|(name, _)| ["", "_8bit"].map(|moments| format!("instep_step_{name}{moments}")));
    let steps: Vec<&str> = steps.map(|name| &*name.leak()).collect();
    [&COMMON[..], &steps].concat()
});

#[derive(Clone)]
pub(crate) enum Command {
    Fill { address: DevicePtr, bytes: Vec<u8> },
    Copy { to: DevicePtr, from: DevicePtr, bytes: u64 },
    Launch { kernel: &'static str, shape: Shape, args: Box<Args> },
    CallHost { function: unsafe extern "C" fn(*mut c_void), argument: usize },
}

#[derive(Clone)]
pub(crate) enum Args {
    Begin(InstepBeginArgs),
    Decide(InstepDecideArgs),
    Publish(InstepPublishArgs),
    Add(InstepAddArgs),
    Cast(InstepCastArgs),
    Bucket(InstepStepArgs),
    Step(Box<InstepStepLaunch>),
}

// SAFETY: the addresses are in the stand-in's memory, which every thread may use.
unsafe impl Send for Command {}

impl Command {
    /// # Safety
    /// `args` is the struct that the kernel takes.
    pub(crate) unsafe fn launch(kernel: &'static str, shape: Shape, args: *const c_void) -> Command {
        // SAFETY: the caller's promise.
        let args = unsafe {
            match kernel {
                "instep_begin" => Args::Begin(args.cast::<InstepBeginArgs>().read()),
                "instep_decide" => Args::Decide(args.cast::<InstepDecideArgs>().read()),
                "instep_publish" => Args::Publish(args.cast::<InstepPublishArgs>().read()),
                "instep_add" => Args::Add(args.cast::<InstepAddArgs>().read()),
                "instep_cast" => Args::Cast(args.cast::<InstepCastArgs>().read()),
                "instep_norm" | "instep_custom" => Args::Bucket(args.cast::<InstepStepArgs>().read()),
                _ => Args::Step(Box::new(args.cast::<InstepStepLaunch>().read())),
            }
        };
        Command::Launch { kernel, shape, args: Box::new(args) }
    }
}

/// Returns a device address as a pointer.
pub(crate) fn pointer(address: DevicePtr) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(address.0 as usize)
}

/// Runs a command whose memory nothing else uses meanwhile.
pub(crate) fn run(command: &Command, fibers: bool) {
    match command {
        // SAFETY: memory of the stand-in, as long as the call said.
        Command::Fill { address, bytes } => unsafe {
            pointer(*address).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
        },
        // SAFETY: as above; the caller says that they do not overlap.
        Command::Copy { to, from, bytes } => unsafe {
            pointer(*to).copy_from_nonoverlapping(pointer(*from), *bytes as usize)
        },
        // SAFETY: the caller of the driver says that it may be called with this argument.
        Command::CallHost { function, argument } => unsafe {
            function(std::ptr::with_exposed_provenance_mut(*argument))
        },
        Command::Launch { kernel, shape, args } if fibers => as_fibers(kernel, *shape, args),
        Command::Launch { kernel, shape, args } => on_cpu(kernel, *shape, args),
    }
}

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn as_fibers(kernel: &str, shape: Shape, args: &Args) {
    use std::ffi::CString;

    use crate::host_run::launch::launch;
    let (name, blocks) = (CString::new(kernel).unwrap(), shape.blocks);
    // Fibers come as whole warps; the first of a warp does the work of a single thread.
    let threads = shape.threads.next_multiple_of(32);
    // SAFETY: each kernel's own struct, whose addresses are in the stand-in's memory.
    unsafe {
        match args {
            Args::Begin(args) => launch(&name, args, blocks, threads, 2),
            Args::Decide(args) => launch(&name, args, blocks, threads, 2),
            Args::Publish(args) => launch(&name, args, blocks, threads, 2),
            Args::Add(args) => launch(&name, args, blocks, threads, 2),
            Args::Cast(args) => launch(&name, args, blocks, threads, 2),
            Args::Bucket(args) => launch(&name, args, blocks, threads, 2),
            Args::Step(args) => launch(&name, &**args, blocks, threads, 2),
        }
    }
}

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
fn as_fibers(kernel: &str, _: Shape, _: &Args) {
    unreachable!("{kernel} as fibers is for Linux on x86-64");
}

fn on_cpu(kernel: &str, shape: Shape, args: &Args) {
    let cpu = entries::kernels(Isa::best());
    // SAFETY: as in `as_fibers`; the CPU's entries exist in every table.
    unsafe {
        match args {
            Args::Begin(args) => {
                assert_eq!((shape.blocks, shape.threads), (1, INSTEP_GPU_THREADS), "{kernel}");
                // The GPU's kernel first takes its slot of the ring, if there is one.
                if !args.ring.is_null() {
                    let slot = (*args.control).passes % args.slot_count * args.slot_words;
                    let words = args.slot_words as usize;
                    args.ring.add(slot as usize).copy_to_nonoverlapping(args.hypers.cast(), words);
                }
                cpu.begin.unwrap()(args);
            }
            Args::Decide(args) => cpu.decide.unwrap()(args),
            Args::Publish(args) => {
                let control = &*args.control;
                let mut status: InstepStatus = MaybeUninit::zeroed().assume_init();
                (status.sequence, status.norm, status.clip) = (control.passes, control.norm, control.clip);
                status.loss_scale = control.loss_scale;
                (status.decided, status.skipped) = (control.decided, control.skip);
                status.first_nonfinite_bucket = control.first_nonfinite_bucket;
                args.ring.add((control.passes % args.slot_count) as usize).write(status);
            }
            Args::Add(args) => {
                let both = [args.to, args.from.cast_mut()];
                cpu.sum.unwrap()(both.as_ptr(), 2, args.dtype, 0, args.count, args.to);
            }
            Args::Cast(args) => {
                let (mut wide, count) = (vec![0.0f32; args.count as usize], args.count);
                match args.from_dtype {
                    INSTEP_DTYPE_F32 => {
                        args.from.cast::<f32>().copy_to_nonoverlapping(wide.as_mut_ptr(), wide.len())
                    }
                    dtype => cpu.widen.unwrap()(args.from.cast(), wide.as_mut_ptr(), dtype, 1.0, count),
                }
                match args.to_dtype {
                    INSTEP_DTYPE_F32 => {
                        args.to.cast::<f32>().copy_from_nonoverlapping(wide.as_ptr(), wide.len())
                    }
                    dtype => cpu.narrow.unwrap()(wide.as_ptr(), args.to.cast(), dtype, 1.0, count),
                }
            }
            Args::Bucket(args) if kernel == "instep_norm" => {
                cpu.norm.unwrap()(args, std::ptr::null(), 0, args.tile_count)
            }
            Args::Bucket(args) if kernel == "instep_custom" => cpu.custom.unwrap()(args),
            Args::Bucket(_) => unreachable!("{kernel}"),
            Args::Step(launch) => {
                let InstepStepLaunch { args, given } = &**launch;
                let coded = args.moments == INSTEP_MOMENTS_8BIT;
                let own = COMMON.len() + 2 * args.optimizer as usize + usize::from(coded);
                assert_eq!(KERNELS[own], kernel, "the optimizer's own kernel");
                let (mut records, mut control, mut args) = (given_records(given), *args.control, *args);
                if args.records.is_null() {
                    (control.multiplier, control.average_multiplier) =
                        (given.multiplier, given.average_multiplier);
                    (control.divisor, control.skip, control.decided) = (1.0, 0, 0);
                    (args.records, args.control) = (records.as_mut_ptr(), &mut control);
                }
                cpu.step.unwrap()(&args, std::ptr::null(), 0, args.tile_count, PREFETCHES);
            }
        }
    }
}

/// Returns the records that a launch gets, each at its place.
fn given_records(given: &InstepGiven) -> Vec<InstepRecord> {
    given.record_of.iter().map(|known| given.records[usize::from(*known)]).collect()
}
