//! Finds the instruction sets that this machine can run, and calls the compiled CPU kernels.
//!
//! Only this file calls the kernels. The host device's other foreign calls are `madvise` and `getpagesize`
//! (`memories.rs`), and calls of MPI. Every build of the kernels passes a self-test of the numerics contract before its
//! first use. If a requested instruction set is not available, an error is returned, and no other instruction set is
//! used instead.
#![allow(unsafe_code)]

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

#[cfg(feature = "bench")]
use crate::abi::InstepStored;
use crate::abi::{InstepBases, InstepBeginArgs, InstepDecideArgs, InstepKernels, InstepStepArgs};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::host::memories::StoredValues;

/// An instruction set for which the kernels are built. All instruction sets give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// The instructions that every CPU of this architecture has (SSE2 on x86-64, NEON on aarch64).
    Baseline,
    /// x86-64 with AVX2.
    Avx2,
    /// x86-64 with AVX-512 F, BW, CD, DQ and VL.
    Avx512,
}

impl Isa {
    /// All instruction sets, narrowest first.
    pub const ALL: [Isa; 3] = [Isa::Baseline, Isa::Avx2, Isa::Avx512];

    /// Returns the name that `INSTEP_ISA` and the command line use.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Baseline => "baseline",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        }
    }

    /// Returns whether this machine can run this instruction set.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return match self {
            Isa::Baseline => true,
            Isa::Avx2 => is_x86_feature_detected!("avx2"),
            Isa::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512cd")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    // -march=x86-64-v4 includes v3, so the compiler may use v3's instructions too.
                    && is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("bmi1")
                    && is_x86_feature_detected!("bmi2")
                    && is_x86_feature_detected!("f16c")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("lzcnt")
                    && is_x86_feature_detected!("movbe")
            }
        };
        #[cfg(not(target_arch = "x86_64"))]
        return self == Isa::Baseline;
    }

    /// Returns the instruction sets that this machine can run, narrowest first.
    pub fn available() -> Vec<Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// Returns the widest instruction set that this machine can run.
    pub fn best() -> Isa {
        Isa::ALL.into_iter().rfind(|isa| isa.is_available()).unwrap_or(Isa::Baseline)
    }

    /// Returns the instruction set that the environment variable `INSTEP_ISA` names. If the variable is unset, returns
    /// the widest set that this machine can run.
    ///
    /// # Errors
    /// `Config` if the variable is not the name of an instruction set.
    pub fn from_environment() -> Result<Isa> {
        match std::env::var_os("INSTEP_ISA") {
            Some(name) => Isa::named("INSTEP_ISA", &name.to_string_lossy()),
            None => Ok(Isa::best()),
        }
    }

    fn named(field: &'static str, name: &str) -> Result<Isa> {
        let found = Isa::ALL.into_iter().find(|isa| isa.name() == name);
        found.ok_or_else(|| Error::config(field, name, "unknown", "use baseline, avx2 or avx512"))
    }
}

impl FromStr for Isa {
    type Err = Error;

    fn from_str(name: &str) -> Result<Isa> {
        Isa::named("isa", name)
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

unsafe extern "C" {
    static instep_kernels_baseline: InstepKernels;
    #[cfg(target_arch = "x86_64")]
    static instep_kernels_avx2: InstepKernels;
    #[cfg(target_arch = "x86_64")]
    static instep_kernels_avx512: InstepKernels;
}

/// A build of the kernels for one instruction set. The build runs on this machine and has passed its self-test.
#[derive(Clone, Copy)]
pub(crate) struct Kernels {
    isa: Isa,
    table: &'static InstepKernels,
}

impl Kernels {
    /// Returns the build for `isa`.
    ///
    /// # Errors
    /// `Unsupported` if the machine lacks the instruction set. `Arithmetic` if the build fails its self-test.
    pub(crate) fn load(isa: Isa) -> Result<Kernels> {
        if !isa.is_available() {
            let available = Isa::available().iter().map(|isa| isa.name()).collect::<Vec<_>>().join(", ");
            let remedy = format_args!("use one of {available}");
            return Err(Error::unsupported(
                format_args!("instruction set {isa}"),
                "this machine lacks it",
                remedy,
            ));
        }
        static TESTED: [OnceLock<u32>; 3] = [const { OnceLock::new() }; 3];
        let table = table(isa);
        let broken = TESTED[isa as usize].get_or_init(|| match table.self_test {
            // SAFETY: the table's functions are compiled for this instruction set, which is available.
            Some(test) => unsafe { test() },
            None => u32::MAX,
        });
        match *broken {
            0 => Ok(Kernels { isa, table }),
            property => Err(Error::Arithmetic { isa: isa.name(), property }),
        }
    }

    pub(crate) fn isa(self) -> Isa {
        self.isa
    }

    /// Runs the kernel `begin` on control memory. The kernel derives the scalars of a pass.
    ///
    /// # Safety
    /// Every pointer in `args` is valid for the data that its field describes. Nothing else touches that memory during
    /// the call.
    pub(crate) unsafe fn begin(&self, args: &InstepBeginArgs) {
        // SAFETY: the entry exists in every build. The rest is the caller's contract.
        unsafe { self.table.begin.unwrap_unchecked()(args) }
    }

    /// Decides from the norm whether to clip and whether to skip the step.
    ///
    /// # Safety
    /// The conditions of `begin` hold.
    pub(crate) unsafe fn decide(&self, args: &InstepDecideArgs) {
        // SAFETY: the entry exists in every build. The rest is the caller's contract.
        unsafe { self.table.decide.unwrap_unchecked()(args) }
    }

    /// Adds the squared gradients of tiles `first_tile..last_tile` to the norm. `bases` has the addresses of each
    /// segment's tensors, or is null if `args` has them.
    ///
    /// # Safety
    /// Every pointer in `args` and `bases` is valid, and `first_tile..last_tile` lies in the table of tiles. Nothing
    /// writes the gradients or the segments during the call. Calls for other tiles may add to the same control block at
    /// the same time.
    pub(crate) unsafe fn norm(
        &self,
        args: &InstepStepArgs,
        bases: *const InstepBases,
        first_tile: u64,
        last_tile: u64,
    ) {
        // SAFETY: the entry exists in every build. The rest is the caller's contract.
        unsafe { self.table.norm.unwrap_unchecked()(args, bases, first_tile, last_tile) }
    }

    /// Steps tiles `first_tile..last_tile`, and prefetches `ahead_bytes` bytes ahead. 0 means no prefetches.
    ///
    /// # Safety
    /// The conditions of `norm` hold, and nothing else touches the parameters and states of these tiles.
    pub(crate) unsafe fn step(
        &self,
        args: &InstepStepArgs,
        bases: *const InstepBases,
        first_tile: u64,
        last_tile: u64,
        ahead_bytes: u64,
    ) {
        // SAFETY: the entry exists in every build. The rest is the caller's contract.
        unsafe { self.table.step.unwrap_unchecked()(args, bases, first_tile, last_tile, ahead_bytes) }
    }

    /// Decides, for a custom optimizer, what to do with each segment that starts in the tiles of `args`.
    ///
    /// # Safety
    /// The conditions of `norm` hold for the whole table of tiles.
    pub(crate) unsafe fn custom(&self, args: &InstepStepArgs) {
        // SAFETY: the entry exists in every build. The rest is the caller's contract.
        unsafe { self.table.custom.unwrap_unchecked()(args) }
    }

    /// Adds elements `first..last` of all ranks' buffers element by element, in rank order, and writes the sums to
    /// every buffer. 16-bit elements are added as f32 and rounded once.
    ///
    /// # Safety
    /// Every buffer is valid up to `last`. Buffers do not overlap, and nothing else touches this range of a buffer.
    pub(crate) unsafe fn sum(&self, ranks: &[*mut u8], dtype: DType, first: u64, last: u64) {
        // SAFETY: by the contract.
        unsafe { self.sum_to(ranks, dtype, first, last, std::ptr::null_mut()) }
    }

    /// Adds elements `first..last` of all ranks' buffers like [`sum`](Self::sum), and writes the sums to `to`. `to` may
    /// point to these elements in one of the buffers. If `to` is null, the sums go into every buffer.
    ///
    /// # Safety
    /// Every buffer is valid up to `last`. Nothing else writes this range of a buffer, and nothing else touches `to`.
    pub(crate) unsafe fn sum_to(&self, ranks: &[*mut u8], dtype: DType, first: u64, last: u64, to: *mut u8) {
        // SAFETY: the entry exists in every build. The rest is the caller's contract.
        unsafe {
            let (buffers, count) = (ranks.as_ptr().cast(), ranks.len() as u64);
            self.table.sum.unwrap_unchecked()(buffers, count, dtype as u32, first, last, to.cast())
        }
    }

    /// Multiplies each element by `factor`, and writes the product as `dtype`, a 16-bit type.
    ///
    /// # Panics
    /// If the lengths differ.
    pub(crate) fn narrow(&self, from: &[f32], to: &mut [u16], dtype: DType, factor: f32) {
        assert_eq!(from.len(), to.len());
        let (format, count) = (dtype as u32, from.len() as u64);
        // SAFETY: the entry exists in every build. The slices have the same length, and nothing else touches the
        // result.
        unsafe { self.table.narrow.unwrap_unchecked()(from.as_ptr(), to.as_mut_ptr(), format, factor, count) }
    }

    /// Multiplies each element of `from` by `factor`, and writes the product as f32. The elements of `from` have the
    /// 16-bit type `dtype`.
    ///
    /// # Panics
    /// If the lengths differ.
    pub(crate) fn widen(&self, from: &[u16], to: &mut [f32], dtype: DType, factor: f32) {
        assert_eq!(from.len(), to.len());
        let (format, count) = (dtype as u32, from.len() as u64);
        // SAFETY: the entry exists in every build. The slices have the same length, and nothing else touches the
        // result.
        unsafe { self.table.widen.unwrap_unchecked()(from.as_ptr(), to.as_mut_ptr(), format, factor, count) }
    }

    /// Converts stored values to f32.
    ///
    /// # Panics
    /// Panics if `from` has fewer values than `to` has elements.
    pub(crate) fn decode(&self, from: &mut StoredValues<'_>, to: &mut [f32]) {
        let stored = from.argument(to.len());
        // SAFETY: `argument` has checked the number of values, and nothing else reaches either slice.
        unsafe { self.table.decode.unwrap_unchecked()(&stored, to.as_mut_ptr()) }
    }

    /// Stores f32 values, rounded to nearest.
    ///
    /// # Panics
    /// Panics if `to` has room for fewer values than `from` has.
    pub(crate) fn encode(&self, from: &[f32], to: &mut StoredValues<'_>) {
        let stored = to.argument(from.len());
        // SAFETY: `argument` has checked the number of values, and nothing else reaches either slice.
        unsafe { self.table.encode.unwrap_unchecked()(from.as_ptr(), &stored) }
    }

    /// Stores f32 values at an address, rounded to nearest.
    ///
    /// # Safety
    /// Source and destination are valid for `to.count` elements. Source and destination do not overlap, and nothing
    /// else touches them.
    #[cfg(feature = "bench")]
    pub(crate) unsafe fn encode_at(&self, from: *const f32, to: &InstepStored) {
        // SAFETY: the entry exists in every build. The rest is the caller's contract.
        unsafe { self.table.encode.unwrap_unchecked()(from, to) }
    }

    /// Returns whether an optimizer's state may have negative values.
    pub(crate) fn is_signed(optimizer: u32, state: usize) -> bool {
        let signed_states = &table(Isa::Baseline).signed_states;
        signed_states.get(optimizer as usize).is_none_or(|signed| signed >> state & 1 == 1)
    }
}

/// Loops limited only by memory bandwidth. The benches compare the speed of a step with the speed of these loops.
#[cfg(feature = "bench")]
impl Kernels {
    /// Moves as many bytes as a step, with almost no computation: reads `arrays[0]`, and updates the other arrays in
    /// place.
    ///
    /// # Safety
    /// There are 2 to 5 arrays. Each array is valid for the range `elements`. Arrays do not overlap, and nothing else
    /// touches this range of an array.
    pub(crate) unsafe fn ceiling(
        &self,
        arrays: &[*mut f32],
        factor: f32,
        elements: std::ops::Range<u64>,
        ahead_bytes: u64,
    ) {
        let (pointers, count) = (arrays.as_ptr(), arrays.len() as u64);
        // SAFETY: the entry exists in every build. The rest is the caller's contract.
        unsafe {
            self.table.ceiling.unwrap_unchecked()(
                pointers,
                count,
                factor,
                elements.start,
                elements.end,
                ahead_bytes,
            )
        }
    }

    /// Reads these arrays and writes all of them except the first, like a step of an optimizer with two states. No
    /// value changes.
    pub(crate) fn stream(&self, arrays: &mut [&mut [f32]; 4], ahead_bytes: u64) {
        let length = arrays.iter().map(|array| array.len()).min().unwrap_or(0) as u64;
        let pointers = arrays.each_mut().map(|array| array.as_mut_ptr());
        // SAFETY: the four arrays have at least that length, do not overlap, and belong to this call.
        unsafe { self.ceiling(&pointers, 0.0, 0..length, ahead_bytes) }
    }
}

#[cfg(target_arch = "x86_64")]
fn table(isa: Isa) -> &'static InstepKernels {
    // SAFETY: these are constants of the linked kernel objects, and reading a function pointer executes nothing.
    unsafe {
        match isa {
            Isa::Baseline => &instep_kernels_baseline,
            Isa::Avx2 => &instep_kernels_avx2,
            Isa::Avx512 => &instep_kernels_avx512,
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn table(_: Isa) -> &'static InstepKernels {
    // SAFETY: this is a constant of the linked kernel object.
    unsafe { &instep_kernels_baseline }
}

#[cfg(test)]
#[path = "../../tests/unit/host/kernels.rs"]
mod tests;
