//! Structs and constants that cross the C boundary, generated from `kernels/abi.h`.
//!
//! Written by `cargo run -p bindings`; must not be edited by hand. Plain data only; `layout!` below each struct is the
//! compiler's word that its layout is the C side's.
#![allow(missing_docs, non_camel_case_types, non_upper_case_globals, unreachable_pub)]
#![allow(unsafe_code, clippy::all)]

impl InstepHyper {
    /// Its bytes as words, all of which were set when it was made: that begins with `words`.
    pub fn to_words(&self) -> [f64; 8] {
        // SAFETY: every bit pattern is a number.
        unsafe { self.words }
    }
}

/// Holds a type to the header's size, alignment and offset of every field.
macro_rules! layout {
    ($name:ident: $size:literal bytes, aligned to $alignment:literal; $($field:ident at $offset:literal),*) => {
        const _: () = {
            assert!(size_of::<$name>() == $size);
            assert!(align_of::<$name>() == $alignment);
            $(assert!(core::mem::offset_of!($name, $field) == $offset);)*
        };
    };
}
pub(crate) use layout;

pub const INSTEP_QUANTUM: u32 = 256;
pub const INSTEP_TILE_ELEMENTS: u32 = 2048;
pub const INSTEP_LONGEST_RUN: u32 = 524288;
pub const INSTEP_GPU_THREADS: u32 = 256;
pub const INSTEP_NORM_LIMBS: u32 = 22;
pub const INSTEP_MAX_STATES: u32 = 3;
pub const INSTEP_GIVEN_RECORDS: u32 = 24;
pub const INSTEP_GIVEN_INDICES: u32 = 1392;
pub const INSTEP_NO_BUCKET: u32 = 4294967295;
pub const INSTEP_F32_INFINITY_BITS: u32 = 2139095040;
pub const INSTEP_OPTIMIZER_sgd: InstepOptimizer = 0;
pub const INSTEP_OPTIMIZER_adam: InstepOptimizer = 1;
pub const INSTEP_OPTIMIZER_adagrad: InstepOptimizer = 2;
pub const INSTEP_OPTIMIZER_rmsprop: InstepOptimizer = 3;
pub const INSTEP_OPTIMIZER_adadelta: InstepOptimizer = 4;
pub const INSTEP_OPTIMIZER_adamax: InstepOptimizer = 5;
pub const INSTEP_OPTIMIZER_rprop: InstepOptimizer = 6;
pub const INSTEP_OPTIMIZER_lion: InstepOptimizer = 7;
pub const INSTEP_OPTIMIZER_nadam: InstepOptimizer = 8;
pub const INSTEP_OPTIMIZER_radam: InstepOptimizer = 9;
pub const INSTEP_OPTIMIZER_lamb: InstepOptimizer = 10;
pub const INSTEP_OPTIMIZER_ademamix: InstepOptimizer = 11;
pub const INSTEP_OPTIMIZER_COUNT: InstepOptimizer = 12;
pub const INSTEP_OPTIMIZER_CUSTOM: InstepOptimizer = 12;
pub type InstepOptimizer = ::core::ffi::c_uint;
pub const INSTEP_DTYPE_F32: InstepDtype = 0;
pub const INSTEP_DTYPE_BF16: InstepDtype = 1;
pub const INSTEP_DTYPE_F16: InstepDtype = 2;
pub type InstepDtype = ::core::ffi::c_uint;
pub const INSTEP_MASTER_NONE: InstepMaster = 0;
pub const INSTEP_MASTER_F32: InstepMaster = 1;
pub const INSTEP_MASTER_REMAINDER16: InstepMaster = 2;
pub const INSTEP_MASTER_REMAINDER8: InstepMaster = 3;
pub type InstepMaster = ::core::ffi::c_uint;
pub const INSTEP_MOMENTS_F32: InstepMoments = 0;
pub const INSTEP_MOMENTS_BF16: InstepMoments = 1;
pub const INSTEP_MOMENTS_8BIT: InstepMoments = 3;
pub type InstepMoments = ::core::ffi::c_uint;
pub const INSTEP_ACTION_STEP: InstepSegmentAction = 0;
pub const INSTEP_ACTION_AVERAGE: InstepSegmentAction = 1;
pub const INSTEP_ACTION_LEAVE: InstepSegmentAction = 2;
pub type InstepSegmentAction = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepSgdHyper {
    pub lr: f64,
    pub momentum: f64,
    pub dampening: f64,
    pub weight_decay: f64,
    pub nesterov: u32,
    pub maximize: u32,
}
layout!(InstepSgdHyper: 40 bytes, aligned to 8; lr at 0, momentum at 8, dampening at 16, weight_decay at 24,
    nesterov at 32, maximize at 36);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepAdamHyper {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub decoupled: u32,
    pub amsgrad: u32,
    pub maximize: u32,
    pub reserved: u32,
}
layout!(InstepAdamHyper: 56 bytes, aligned to 8; lr at 0, beta1 at 8, beta2 at 16, eps at 24, weight_decay at 32,
    decoupled at 40, amsgrad at 44, maximize at 48, reserved at 52);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepAdagradHyper {
    pub lr: f64,
    pub lr_decay: f64,
    pub weight_decay: f64,
    pub initial_accumulator_value: f64,
    pub eps: f64,
    pub maximize: u32,
    pub reserved: u32,
}
layout!(InstepAdagradHyper: 48 bytes, aligned to 8; lr at 0, lr_decay at 8, weight_decay at 16,
    initial_accumulator_value at 24, eps at 32, maximize at 40, reserved at 44);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepRmsPropHyper {
    pub lr: f64,
    pub alpha: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub momentum: f64,
    pub centered: u32,
    pub maximize: u32,
}
layout!(InstepRmsPropHyper: 48 bytes, aligned to 8; lr at 0, alpha at 8, eps at 16, weight_decay at 24, momentum at 32,
    centered at 40, maximize at 44);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepAdadeltaHyper {
    pub lr: f64,
    pub rho: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub maximize: u32,
    pub reserved: u32,
}
layout!(InstepAdadeltaHyper: 40 bytes, aligned to 8; lr at 0, rho at 8, eps at 16, weight_decay at 24, maximize at 32,
    reserved at 36);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepAdamaxHyper {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub maximize: u32,
    pub reserved: u32,
}
layout!(InstepAdamaxHyper: 48 bytes, aligned to 8; lr at 0, beta1 at 8, beta2 at 16, eps at 24, weight_decay at 32,
    maximize at 40, reserved at 44);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepRpropHyper {
    pub lr: f64,
    pub eta_minus: f64,
    pub eta_plus: f64,
    pub step_size_min: f64,
    pub step_size_max: f64,
    pub maximize: u32,
    pub reserved: u32,
}
layout!(InstepRpropHyper: 48 bytes, aligned to 8; lr at 0, eta_minus at 8, eta_plus at 16, step_size_min at 24,
    step_size_max at 32, maximize at 40, reserved at 44);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepLionHyper {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub weight_decay: f64,
    pub maximize: u32,
    pub reserved: u32,
}
layout!(InstepLionHyper: 40 bytes, aligned to 8; lr at 0, beta1 at 8, beta2 at 16, weight_decay at 24, maximize at 32,
    reserved at 36);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepNAdamHyper {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub momentum_decay: f64,
    pub decoupled: u32,
    pub maximize: u32,
}
layout!(InstepNAdamHyper: 56 bytes, aligned to 8; lr at 0, beta1 at 8, beta2 at 16, eps at 24, weight_decay at 32,
    momentum_decay at 40, decoupled at 48, maximize at 52);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepRAdamHyper {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub decoupled: u32,
    pub maximize: u32,
}
layout!(InstepRAdamHyper: 48 bytes, aligned to 8; lr at 0, beta1 at 8, beta2 at 16, eps at 24, weight_decay at 32,
    decoupled at 40, maximize at 44);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepLambHyper {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub maximize: u32,
    pub reserved: u32,
}
layout!(InstepLambHyper: 48 bytes, aligned to 8; lr at 0, beta1 at 8, beta2 at 16, eps at 24, weight_decay at 32,
    maximize at 40, reserved at 44);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepAdEmaMixHyper {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub beta3: f64,
    pub alpha: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub maximize: u32,
    pub reserved: u32,
}
layout!(InstepAdEmaMixHyper: 64 bytes, aligned to 8; lr at 0, beta1 at 8, beta2 at 16, beta3 at 24, alpha at 32,
    eps at 40, weight_decay at 48, maximize at 56, reserved at 60);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepCustomHyper {
    pub lr: f64,
}
layout!(InstepCustomHyper: 8 bytes, aligned to 8; lr at 0);
#[repr(C)]
#[derive(Copy, Clone)]
pub union InstepHyper {
    pub sgd: InstepSgdHyper,
    pub adam: InstepAdamHyper,
    pub adagrad: InstepAdagradHyper,
    pub rmsprop: InstepRmsPropHyper,
    pub adadelta: InstepAdadeltaHyper,
    pub adamax: InstepAdamaxHyper,
    pub rprop: InstepRpropHyper,
    pub lion: InstepLionHyper,
    pub nadam: InstepNAdamHyper,
    pub radam: InstepRAdamHyper,
    pub lamb: InstepLambHyper,
    pub ademamix: InstepAdEmaMixHyper,
    pub custom: InstepCustomHyper,
    pub words: [f64; 8usize],
}
layout!(InstepHyper: 64 bytes, aligned to 8; sgd at 0, adam at 0, adagrad at 0, rmsprop at 0, adadelta at 0,
    adamax at 0, rprop at 0, lion at 0, nadam at 0, radam at 0, lamb at 0, ademamix at 0, custom at 0, words at 0);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepCustomScalars {
    pub lr: f64,
    pub step: u64,
    pub multiplier: f32,
    pub action: u32,
}
layout!(InstepCustomScalars: 24 bytes, aligned to 8; lr at 0, step at 8, multiplier at 16, action at 20);
#[repr(C)]
#[derive(Copy, Clone)]
pub union InstepScalars {
    pub custom: InstepCustomScalars,
    pub words: [u64; 6usize],
}
layout!(InstepScalars: 48 bytes, aligned to 8; custom at 0, words at 0);
#[repr(C)]
#[derive(Copy, Clone)]
pub struct InstepRecord {
    pub steps: u64,
    pub stepped: u32,
    pub hyper: u32,
    pub action: u32,
    pub optimizer: u16,
    pub grad_dtype: u16,
    pub tail: u64,
    pub contributors: u64,
    pub carried: [f64; 2usize],
    pub scalars: InstepScalars,
}
layout!(InstepRecord: 104 bytes, aligned to 8; steps at 0, stepped at 8, hyper at 12, action at 16, optimizer at 20,
    grad_dtype at 22, tail at 24, contributors at 32, carried at 40, scalars at 56);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepNorms {
    pub limbs: [[u64; 22usize]; 2usize],
    pub nonfinite: [u32; 2usize],
}
layout!(InstepNorms: 360 bytes, aligned to 8; limbs at 0, nonfinite at 352);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepControl {
    pub next_loss_scale: f32,
    pub growth_tracker: u32,
    pub limbs: [u64; 22usize],
    pub passes: u64,
    pub norm: f64,
    pub previous_norm: f64,
    pub clip: f64,
    pub max_norm: f64,
    pub divisor: f64,
    pub loss_scale: f64,
    pub multiplier: f32,
    pub average_multiplier: f32,
    pub local_multiplier: f32,
    pub reserved: u32,
    pub max_abs_bits: u32,
    pub first_nonfinite_bucket: u32,
    pub skip: u32,
    pub decided: u32,
}
layout!(InstepControl: 272 bytes, aligned to 8; next_loss_scale at 0, growth_tracker at 4, limbs at 8, passes at 184,
    norm at 192, previous_norm at 200, clip at 208, max_norm at 216, divisor at 224, loss_scale at 232,
    multiplier at 240, average_multiplier at 244, local_multiplier at 248, reserved at 252, max_abs_bits at 256,
    first_nonfinite_bucket at 260, skip at 264, decided at 268);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepTile {
    pub param: u64,
    pub grad_offset: u64,
    pub state_offset: u64,
    pub element: u64,
    pub count: u32,
    pub record: u32,
    pub first: u32,
    pub first_record: u32,
    pub run: u32,
    pub bucket: u32,
    pub reserved: [u32; 2usize],
}
layout!(InstepTile: 64 bytes, aligned to 8; param at 0, grad_offset at 8, state_offset at 16, element at 24,
    count at 32, record at 36, first at 40, first_record at 44, run at 48, bucket at 52, reserved at 56);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepBeginArgs {
    pub control: *mut InstepControl,
    pub records: *mut InstepRecord,
    pub hypers: *mut InstepHyper,
    pub lr_multipliers: *mut f64,
    pub actions: *mut u32,
    pub record_count: u64,
    pub norms: *mut InstepNorms,
    pub ring: *const u32,
    pub slot_words: u64,
    pub slot_count: u64,
    pub divisor: f64,
    pub loss_scale: f64,
    pub previous_max_norm: f64,
    pub clip: f64,
    pub grad_scale: *const f32,
    pub found_inf: *const f32,
    pub further_controls: *mut InstepControl,
    pub further_count: u64,
}
layout!(InstepBeginArgs: 144 bytes, aligned to 8; control at 0, records at 8, hypers at 16, lr_multipliers at 24,
    actions at 32, record_count at 40, norms at 48, ring at 56, slot_words at 64, slot_count at 72, divisor at 80,
    loss_scale at 88, previous_max_norm at 96, clip at 104, grad_scale at 112, found_inf at 120,
    further_controls at 128, further_count at 136);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepDecideArgs {
    pub control: *mut InstepControl,
    pub contributors: *const ::core::ffi::c_void,
    pub max_norm: f64,
    pub growth_factor: f64,
    pub backoff_factor: f64,
    pub largest_loss_scale: f64,
    pub skip_nonfinite: u32,
    pub growth_interval: u32,
    pub pass_control: *mut InstepControl,
    pub bucket: u32,
    pub grad_dtype: u32,
    pub found_inf: *mut f32,
    pub set_controls: *mut InstepControl,
    pub set_count: u64,
}
layout!(InstepDecideArgs: 96 bytes, aligned to 8; control at 0, contributors at 8, max_norm at 16, growth_factor at 24,
    backoff_factor at 32, largest_loss_scale at 40, skip_nonfinite at 48, growth_interval at 52, pass_control at 56,
    bucket at 64, grad_dtype at 68, found_inf at 72, set_controls at 80, set_count at 88);
pub const INSTEP_PART_WHOLE: InstepStepPart = 0;
pub const INSTEP_PART_MEASURE: InstepStepPart = 1;
pub const INSTEP_PART_APPLY: InstepStepPart = 2;
pub const INSTEP_PART_END: InstepStepPart = 3;
pub type InstepStepPart = ::core::ffi::c_uint;
pub const INSTEP_GRADIENTS_KEEP: InstepGradients = 0;
pub const INSTEP_GRADIENTS_ZERO: InstepGradients = 1;
pub const INSTEP_GRADIENTS_AVERAGE: InstepGradients = 2;
pub type InstepGradients = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepStepArgs {
    pub control: *mut InstepControl,
    pub records: *mut InstepRecord,
    pub tiles: *const InstepTile,
    pub tile_count: u64,
    pub param_base: *mut ::core::ffi::c_void,
    pub grads: *mut ::core::ffi::c_void,
    pub master: *mut ::core::ffi::c_void,
    pub copy: *mut ::core::ffi::c_void,
    pub ema: *mut f32,
    pub states: [*mut ::core::ffi::c_void; 3usize],
    pub scales: [*mut f32; 3usize],
    pub norms: *mut InstepNorms,
    pub seed: u64,
    pub optimizer: u32,
    pub state_count: u32,
    pub bucket: u32,
    pub param_dtype: u32,
    pub grad_dtype: u32,
    pub copy_dtype: u32,
    pub master_kind: u32,
    pub moments: u32,
    pub stochastic: u32,
    pub gradients: u32,
    pub local: u32,
    pub ema_from_sample: u32,
    pub ema_weight: f32,
    pub part: u32,
    pub share: u64,
}
layout!(InstepStepArgs: 200 bytes, aligned to 8; control at 0, records at 8, tiles at 16, tile_count at 24,
    param_base at 32, grads at 40, master at 48, copy at 56, ema at 64, states at 72, scales at 96, norms at 120,
    seed at 128, optimizer at 136, state_count at 140, bucket at 144, param_dtype at 148, grad_dtype at 152,
    copy_dtype at 156, master_kind at 160, moments at 164, stochastic at 168, gradients at 172, local at 176,
    ema_from_sample at 180, ema_weight at 184, part at 188, share at 192);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepBases {
    pub param_base: *mut ::core::ffi::c_void,
    pub grads: *mut ::core::ffi::c_void,
    pub master: *mut ::core::ffi::c_void,
    pub copy: *mut ::core::ffi::c_void,
    pub ema: *mut f32,
    pub states: [*mut ::core::ffi::c_void; 3usize],
    pub scales: [*mut f32; 3usize],
}
layout!(InstepBases: 88 bytes, aligned to 8; param_base at 0, grads at 8, master at 16, copy at 24, ema at 32,
    states at 40, scales at 64);
#[repr(C)]
#[derive(Copy, Clone)]
pub struct InstepGiven {
    pub multiplier: f32,
    pub average_multiplier: f32,
    pub records: [InstepRecord; 24usize],
    pub record_of: [u8; 1392usize],
}
layout!(InstepGiven: 3896 bytes, aligned to 8; multiplier at 0, average_multiplier at 4, records at 8,
    record_of at 2504);
#[repr(C)]
#[derive(Copy, Clone)]
pub struct InstepStepLaunch {
    pub args: InstepStepArgs,
    pub given: InstepGiven,
}
layout!(InstepStepLaunch: 4096 bytes, aligned to 8; args at 0, given at 200);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepStatus {
    pub sequence: u64,
    pub norm: f64,
    pub clip: f64,
    pub loss_scale: f64,
    pub decided: u32,
    pub skipped: u32,
    pub first_nonfinite_bucket: u32,
    pub reserved: [u32; 5usize],
}
layout!(InstepStatus: 64 bytes, aligned to 8; sequence at 0, norm at 8, clip at 16, loss_scale at 24, decided at 32,
    skipped at 36, first_nonfinite_bucket at 40, reserved at 44);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepPublishArgs {
    pub control: *const InstepControl,
    pub ring: *mut InstepStatus,
    pub slot_count: u64,
}
layout!(InstepPublishArgs: 24 bytes, aligned to 8; control at 0, ring at 8, slot_count at 16);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepAddArgs {
    pub from: *const ::core::ffi::c_void,
    pub to: *mut ::core::ffi::c_void,
    pub count: u64,
    pub dtype: u32,
    pub reserved: u32,
}
layout!(InstepAddArgs: 32 bytes, aligned to 8; from at 0, to at 8, count at 16, dtype at 24, reserved at 28);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepCastArgs {
    pub from: *const ::core::ffi::c_void,
    pub to: *mut ::core::ffi::c_void,
    pub count: u64,
    pub from_dtype: u32,
    pub to_dtype: u32,
}
layout!(InstepCastArgs: 32 bytes, aligned to 8; from at 0, to at 8, count at 16, from_dtype at 24, to_dtype at 28);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepStored {
    pub values: *mut ::core::ffi::c_void,
    pub second: *mut ::core::ffi::c_void,
    pub count: u64,
    pub format: u32,
    pub master_kind: u32,
    pub is_signed: u32,
    pub reserved: u32,
}
layout!(InstepStored: 40 bytes, aligned to 8; values at 0, second at 8, count at 16, format at 24, master_kind at 28,
    is_signed at 32, reserved at 36);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepKernels {
    pub self_test: ::core::option::Option<unsafe extern "C" fn() -> u32>,
    pub begin: ::core::option::Option<unsafe extern "C" fn(args: *const InstepBeginArgs)>,
    pub decide: ::core::option::Option<unsafe extern "C" fn(args: *const InstepDecideArgs)>,
    pub norm: ::core::option::Option<
        unsafe extern "C" fn(
            args: *const InstepStepArgs,
            bases: *const InstepBases,
            first_tile: u64,
            last_tile: u64,
        ),
    >,
    pub step: ::core::option::Option<
        unsafe extern "C" fn(
            args: *const InstepStepArgs,
            bases: *const InstepBases,
            first_tile: u64,
            last_tile: u64,
            ahead_bytes: u64,
        ),
    >,
    pub custom: ::core::option::Option<unsafe extern "C" fn(args: *const InstepStepArgs)>,
    pub sum: ::core::option::Option<
        unsafe extern "C" fn(
            ranks: *const *mut ::core::ffi::c_void,
            rank_count: u64,
            dtype: u32,
            first: u64,
            last: u64,
            to: *mut ::core::ffi::c_void,
        ),
    >,
    pub narrow: ::core::option::Option<
        unsafe extern "C" fn(from: *const f32, to: *mut u16, dtype: u32, factor: f32, count: u64),
    >,
    pub widen: ::core::option::Option<
        unsafe extern "C" fn(from: *const u16, to: *mut f32, dtype: u32, factor: f32, count: u64),
    >,
    pub decode: ::core::option::Option<unsafe extern "C" fn(from: *const InstepStored, to: *mut f32)>,
    pub encode: ::core::option::Option<unsafe extern "C" fn(from: *const f32, to: *const InstepStored)>,
    pub ceiling: ::core::option::Option<
        unsafe extern "C" fn(
            arrays: *const *mut f32,
            array_count: u64,
            factor: f32,
            first: u64,
            last: u64,
            ahead_bytes: u64,
        ),
    >,
    pub signed_states: [u32; 12usize],
    pub scaled: [u32; 12usize],
}
layout!(InstepKernels: 192 bytes, aligned to 8; self_test at 0, begin at 8, decide at 16, norm at 24, step at 32,
    custom at 40, sum at 48, narrow at 56, widen at 64, decode at 72, encode at 80, ceiling at 88, signed_states at 96,
    scaled at 144);
