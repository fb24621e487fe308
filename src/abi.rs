//! Structs and constants that cross the C boundary, generated from `kernels/abi.h`.
//!
//! `cargo run -p bindings` writes this file; do not edit it by hand. The file has only
//! plain data. The compiler checks every size, alignment and offset against the header.
#![allow(missing_docs, non_camel_case_types, non_upper_case_globals, unreachable_pub)]
#![allow(unsafe_code, clippy::all)]

impl InstepHyper {
    /// Returns the union as 8 words. Every constructor sets `words` first, so no word is uninitialised.
    pub fn to_words(&self) -> [f64; 8] {
        // SAFETY: every bit pattern is a number.
        unsafe { self.words }
    }
}

/// Asserts that a type's size, alignment and field offsets are those in the header.
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

/// Declares a type for each struct in the header. Each field is listed after its offset. Zeros are a valid value.
macro_rules! records {
    ($($kind:ident $name:ident: $size:literal bytes, aligned to $alignment:literal {
        $($at:literal => $field:ident: $type:ty,)*
    })*) => {
        $(
            #[repr(C)]
            #[derive(Copy, Clone)]
            pub $kind $name { $(pub $field: $type,)* }
            layout!($name: $size bytes, aligned to $alignment; $($field at $at),*);
            // SAFETY: numbers, pointers that may be null, and optional functions.
            unsafe impl bytemuck::Zeroable for $name {}
        )*
    };
}

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
records! {
    struct InstepSgdHyper: 40 bytes, aligned to 8 {
        0 => lr: f64,
        8 => momentum: f64,
        16 => dampening: f64,
        24 => weight_decay: f64,
        32 => nesterov: u32,
        36 => maximize: u32,
    }
    struct InstepAdamHyper: 56 bytes, aligned to 8 {
        0 => lr: f64,
        8 => beta1: f64,
        16 => beta2: f64,
        24 => eps: f64,
        32 => weight_decay: f64,
        40 => decoupled: u32,
        44 => amsgrad: u32,
        48 => maximize: u32,
        52 => reserved: u32,
    }
    struct InstepAdagradHyper: 48 bytes, aligned to 8 {
        0 => lr: f64,
        8 => lr_decay: f64,
        16 => weight_decay: f64,
        24 => initial_accumulator_value: f64,
        32 => eps: f64,
        40 => maximize: u32,
        44 => reserved: u32,
    }
    struct InstepRmsPropHyper: 48 bytes, aligned to 8 {
        0 => lr: f64,
        8 => alpha: f64,
        16 => eps: f64,
        24 => weight_decay: f64,
        32 => momentum: f64,
        40 => centered: u32,
        44 => maximize: u32,
    }
    struct InstepAdadeltaHyper: 40 bytes, aligned to 8 {
        0 => lr: f64,
        8 => rho: f64,
        16 => eps: f64,
        24 => weight_decay: f64,
        32 => maximize: u32,
        36 => reserved: u32,
    }
    struct InstepAdamaxHyper: 48 bytes, aligned to 8 {
        0 => lr: f64,
        8 => beta1: f64,
        16 => beta2: f64,
        24 => eps: f64,
        32 => weight_decay: f64,
        40 => maximize: u32,
        44 => reserved: u32,
    }
    struct InstepRpropHyper: 48 bytes, aligned to 8 {
        0 => lr: f64,
        8 => eta_minus: f64,
        16 => eta_plus: f64,
        24 => step_size_min: f64,
        32 => step_size_max: f64,
        40 => maximize: u32,
        44 => reserved: u32,
    }
    struct InstepLionHyper: 40 bytes, aligned to 8 {
        0 => lr: f64,
        8 => beta1: f64,
        16 => beta2: f64,
        24 => weight_decay: f64,
        32 => maximize: u32,
        36 => reserved: u32,
    }
    struct InstepNAdamHyper: 56 bytes, aligned to 8 {
        0 => lr: f64,
        8 => beta1: f64,
        16 => beta2: f64,
        24 => eps: f64,
        32 => weight_decay: f64,
        40 => momentum_decay: f64,
        48 => decoupled: u32,
        52 => maximize: u32,
    }
    struct InstepRAdamHyper: 48 bytes, aligned to 8 {
        0 => lr: f64,
        8 => beta1: f64,
        16 => beta2: f64,
        24 => eps: f64,
        32 => weight_decay: f64,
        40 => decoupled: u32,
        44 => maximize: u32,
    }
    struct InstepLambHyper: 48 bytes, aligned to 8 {
        0 => lr: f64,
        8 => beta1: f64,
        16 => beta2: f64,
        24 => eps: f64,
        32 => weight_decay: f64,
        40 => maximize: u32,
        44 => reserved: u32,
    }
    struct InstepAdEmaMixHyper: 64 bytes, aligned to 8 {
        0 => lr: f64,
        8 => beta1: f64,
        16 => beta2: f64,
        24 => beta3: f64,
        32 => alpha: f64,
        40 => eps: f64,
        48 => weight_decay: f64,
        56 => maximize: u32,
        60 => reserved: u32,
    }
    struct InstepCustomHyper: 8 bytes, aligned to 8 {
        0 => lr: f64,
    }
    union InstepHyper: 64 bytes, aligned to 8 {
        0 => sgd: InstepSgdHyper,
        0 => adam: InstepAdamHyper,
        0 => adagrad: InstepAdagradHyper,
        0 => rmsprop: InstepRmsPropHyper,
        0 => adadelta: InstepAdadeltaHyper,
        0 => adamax: InstepAdamaxHyper,
        0 => rprop: InstepRpropHyper,
        0 => lion: InstepLionHyper,
        0 => nadam: InstepNAdamHyper,
        0 => radam: InstepRAdamHyper,
        0 => lamb: InstepLambHyper,
        0 => ademamix: InstepAdEmaMixHyper,
        0 => custom: InstepCustomHyper,
        0 => words: [f64; 8usize],
    }
    struct InstepCustomScalars: 24 bytes, aligned to 8 {
        0 => lr: f64,
        8 => step: u64,
        16 => multiplier: f32,
        20 => action: u32,
    }
    union InstepScalars: 48 bytes, aligned to 8 {
        0 => custom: InstepCustomScalars,
        0 => words: [u64; 6usize],
    }
    struct InstepRecord: 104 bytes, aligned to 8 {
        0 => steps: u64,
        8 => stepped: u32,
        12 => hyper: u32,
        16 => action: u32,
        20 => optimizer: u16,
        22 => grad_dtype: u16,
        24 => tail: u64,
        32 => contributors: u64,
        40 => carried: [f64; 2usize],
        56 => scalars: InstepScalars,
    }
    struct InstepNorms: 360 bytes, aligned to 8 {
        0 => limbs: [[u64; 22usize]; 2usize],
        352 => nonfinite: [u32; 2usize],
    }
    struct InstepControl: 272 bytes, aligned to 8 {
        0 => next_loss_scale: f32,
        4 => growth_tracker: u32,
        8 => limbs: [u64; 22usize],
        184 => passes: u64,
        192 => norm: f64,
        200 => previous_norm: f64,
        208 => clip: f64,
        216 => max_norm: f64,
        224 => divisor: f64,
        232 => loss_scale: f64,
        240 => multiplier: f32,
        244 => average_multiplier: f32,
        248 => local_multiplier: f32,
        252 => reserved: u32,
        256 => max_abs_bits: u32,
        260 => first_nonfinite_bucket: u32,
        264 => skip: u32,
        268 => decided: u32,
    }
    struct InstepTile: 64 bytes, aligned to 8 {
        0 => param: u64,
        8 => grad_offset: u64,
        16 => state_offset: u64,
        24 => element: u64,
        32 => count: u32,
        36 => record: u32,
        40 => first: u32,
        44 => first_record: u32,
        48 => run: u32,
        52 => bucket: u32,
        56 => reserved: [u32; 2usize],
    }
    struct InstepBeginArgs: 144 bytes, aligned to 8 {
        0 => control: *mut InstepControl,
        8 => records: *mut InstepRecord,
        16 => hypers: *mut InstepHyper,
        24 => lr_multipliers: *mut f64,
        32 => actions: *mut u32,
        40 => record_count: u64,
        48 => norms: *mut InstepNorms,
        56 => ring: *const u32,
        64 => slot_words: u64,
        72 => slot_count: u64,
        80 => divisor: f64,
        88 => loss_scale: f64,
        96 => previous_max_norm: f64,
        104 => clip: f64,
        112 => grad_scale: *const f32,
        120 => found_inf: *const f32,
        128 => further_controls: *mut InstepControl,
        136 => further_count: u64,
    }
    struct InstepDecideArgs: 96 bytes, aligned to 8 {
        0 => control: *mut InstepControl,
        8 => contributors: *const ::core::ffi::c_void,
        16 => max_norm: f64,
        24 => growth_factor: f64,
        32 => backoff_factor: f64,
        40 => largest_loss_scale: f64,
        48 => skip_nonfinite: u32,
        52 => growth_interval: u32,
        56 => pass_control: *mut InstepControl,
        64 => bucket: u32,
        68 => grad_dtype: u32,
        72 => found_inf: *mut f32,
        80 => set_controls: *mut InstepControl,
        88 => set_count: u64,
    }
}
pub const INSTEP_PART_WHOLE: InstepStepPart = 0;
pub const INSTEP_PART_MEASURE: InstepStepPart = 1;
pub const INSTEP_PART_APPLY: InstepStepPart = 2;
pub const INSTEP_PART_END: InstepStepPart = 3;
pub type InstepStepPart = ::core::ffi::c_uint;
pub const INSTEP_GRADIENTS_KEEP: InstepGradients = 0;
pub const INSTEP_GRADIENTS_ZERO: InstepGradients = 1;
pub const INSTEP_GRADIENTS_AVERAGE: InstepGradients = 2;
pub type InstepGradients = ::core::ffi::c_uint;
records! {
    struct InstepStepArgs: 200 bytes, aligned to 8 {
        0 => control: *mut InstepControl,
        8 => records: *mut InstepRecord,
        16 => tiles: *const InstepTile,
        24 => tile_count: u64,
        32 => param_base: *mut ::core::ffi::c_void,
        40 => grads: *mut ::core::ffi::c_void,
        48 => master: *mut ::core::ffi::c_void,
        56 => copy: *mut ::core::ffi::c_void,
        64 => ema: *mut f32,
        72 => states: [*mut ::core::ffi::c_void; 3usize],
        96 => scales: [*mut f32; 3usize],
        120 => norms: *mut InstepNorms,
        128 => seed: u64,
        136 => optimizer: u32,
        140 => state_count: u32,
        144 => bucket: u32,
        148 => param_dtype: u32,
        152 => grad_dtype: u32,
        156 => copy_dtype: u32,
        160 => master_kind: u32,
        164 => moments: u32,
        168 => stochastic: u32,
        172 => gradients: u32,
        176 => local: u32,
        180 => ema_from_sample: u32,
        184 => ema_weight: f32,
        188 => part: u32,
        192 => share: u64,
    }
    struct InstepBases: 88 bytes, aligned to 8 {
        0 => param_base: *mut ::core::ffi::c_void,
        8 => grads: *mut ::core::ffi::c_void,
        16 => master: *mut ::core::ffi::c_void,
        24 => copy: *mut ::core::ffi::c_void,
        32 => ema: *mut f32,
        40 => states: [*mut ::core::ffi::c_void; 3usize],
        64 => scales: [*mut f32; 3usize],
    }
    struct InstepGiven: 3896 bytes, aligned to 8 {
        0 => multiplier: f32,
        4 => average_multiplier: f32,
        8 => records: [InstepRecord; 24usize],
        2504 => record_of: [u8; 1392usize],
    }
    struct InstepStepLaunch: 4096 bytes, aligned to 8 {
        0 => args: InstepStepArgs,
        200 => given: InstepGiven,
    }
    struct InstepStatus: 64 bytes, aligned to 8 {
        0 => sequence: u64,
        8 => norm: f64,
        16 => clip: f64,
        24 => loss_scale: f64,
        32 => decided: u32,
        36 => skipped: u32,
        40 => first_nonfinite_bucket: u32,
        44 => reserved: [u32; 5usize],
    }
    struct InstepPublishArgs: 24 bytes, aligned to 8 {
        0 => control: *const InstepControl,
        8 => ring: *mut InstepStatus,
        16 => slot_count: u64,
    }
    struct InstepAddArgs: 32 bytes, aligned to 8 {
        0 => from: *const ::core::ffi::c_void,
        8 => to: *mut ::core::ffi::c_void,
        16 => count: u64,
        24 => dtype: u32,
        28 => reserved: u32,
    }
    struct InstepCastArgs: 32 bytes, aligned to 8 {
        0 => from: *const ::core::ffi::c_void,
        8 => to: *mut ::core::ffi::c_void,
        16 => count: u64,
        24 => from_dtype: u32,
        28 => to_dtype: u32,
    }
    struct InstepStored: 40 bytes, aligned to 8 {
        0 => values: *mut ::core::ffi::c_void,
        8 => second: *mut ::core::ffi::c_void,
        16 => count: u64,
        24 => format: u32,
        28 => master_kind: u32,
        32 => is_signed: u32,
        36 => reserved: u32,
    }
    struct InstepKernels: 192 bytes, aligned to 8 {
        0 => self_test: ::core::option::Option<unsafe extern "C" fn() -> u32>,
        8 => begin: ::core::option::Option<unsafe extern "C" fn(args: *const InstepBeginArgs)>,
        16 => decide: ::core::option::Option<unsafe extern "C" fn(args: *const InstepDecideArgs)>,
        24 => norm: ::core::option::Option<
            unsafe extern "C" fn(
                args: *const InstepStepArgs,
                bases: *const InstepBases,
                first_tile: u64,
                last_tile: u64,
            ),
        >,
        32 => step: ::core::option::Option<
            unsafe extern "C" fn(
                args: *const InstepStepArgs,
                bases: *const InstepBases,
                first_tile: u64,
                last_tile: u64,
                ahead_bytes: u64,
            ),
        >,
        40 => custom: ::core::option::Option<unsafe extern "C" fn(args: *const InstepStepArgs)>,
        48 => sum: ::core::option::Option<
            unsafe extern "C" fn(
                ranks: *const *mut ::core::ffi::c_void,
                rank_count: u64,
                dtype: u32,
                first: u64,
                last: u64,
                to: *mut ::core::ffi::c_void,
            ),
        >,
        56 => narrow: ::core::option::Option<
            unsafe extern "C" fn(from: *const f32, to: *mut u16, dtype: u32, factor: f32, count: u64),
        >,
        64 => widen: ::core::option::Option<
            unsafe extern "C" fn(from: *const u16, to: *mut f32, dtype: u32, factor: f32, count: u64),
        >,
        72 => decode: ::core::option::Option<unsafe extern "C" fn(from: *const InstepStored, to: *mut f32)>,
        80 => encode: ::core::option::Option<unsafe extern "C" fn(from: *const f32, to: *const InstepStored)>,
        88 => ceiling: ::core::option::Option<
            unsafe extern "C" fn(
                arrays: *const *mut f32,
                array_count: u64,
                factor: f32,
                first: u64,
                last: u64,
                ahead_bytes: u64,
            ),
        >,
        96 => signed_states: [u32; 12usize],
        144 => scaled: [u32; 12usize],
    }
}
