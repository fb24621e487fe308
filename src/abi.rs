//! Structs and constants that cross the C boundary, generated from `kernels/abi.h`.
//!
//! Written by `cargo run -p bindings`; must not be edited by hand. Plain data only; the static assertions
//! below each struct are the compiler's word that its layout is the C side's.
#![allow(missing_docs, non_camel_case_types, non_upper_case_globals, unreachable_pub)]
#![allow(unsafe_code, clippy::all)]

impl InstepHyper {
    /// Its bytes as words, all of which were set when it was made: that begins with `words`.
    pub fn to_words(&self) -> [f64; 8] {
        // SAFETY: every bit pattern is a number.
        unsafe { self.words }
    }
}

pub const INSTEP_QUANTUM: u32 = 256;
pub const INSTEP_TILE_ELEMENTS: u32 = 2048;
pub const INSTEP_LONGEST_RUN: u32 = 524288;
pub const INSTEP_GPU_THREADS: u32 = 256;
pub const INSTEP_NORM_LIMBS: u32 = 22;
pub const INSTEP_MAX_STATES: u32 = 3;
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepSgdHyper"][::core::mem::size_of::<InstepSgdHyper>() - 40usize];
    ["Alignment of InstepSgdHyper"][::core::mem::align_of::<InstepSgdHyper>() - 8usize];
    ["Offset of field: InstepSgdHyper::lr"][::core::mem::offset_of!(InstepSgdHyper, lr) - 0usize];
    ["Offset of field: InstepSgdHyper::momentum"][::core::mem::offset_of!(InstepSgdHyper, momentum) - 8usize];
    ["Offset of field: InstepSgdHyper::dampening"]
        [::core::mem::offset_of!(InstepSgdHyper, dampening) - 16usize];
    ["Offset of field: InstepSgdHyper::weight_decay"]
        [::core::mem::offset_of!(InstepSgdHyper, weight_decay) - 24usize];
    ["Offset of field: InstepSgdHyper::nesterov"]
        [::core::mem::offset_of!(InstepSgdHyper, nesterov) - 32usize];
    ["Offset of field: InstepSgdHyper::maximize"]
        [::core::mem::offset_of!(InstepSgdHyper, maximize) - 36usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepAdamHyper"][::core::mem::size_of::<InstepAdamHyper>() - 56usize];
    ["Alignment of InstepAdamHyper"][::core::mem::align_of::<InstepAdamHyper>() - 8usize];
    ["Offset of field: InstepAdamHyper::lr"][::core::mem::offset_of!(InstepAdamHyper, lr) - 0usize];
    ["Offset of field: InstepAdamHyper::beta1"][::core::mem::offset_of!(InstepAdamHyper, beta1) - 8usize];
    ["Offset of field: InstepAdamHyper::beta2"][::core::mem::offset_of!(InstepAdamHyper, beta2) - 16usize];
    ["Offset of field: InstepAdamHyper::eps"][::core::mem::offset_of!(InstepAdamHyper, eps) - 24usize];
    ["Offset of field: InstepAdamHyper::weight_decay"]
        [::core::mem::offset_of!(InstepAdamHyper, weight_decay) - 32usize];
    ["Offset of field: InstepAdamHyper::decoupled"]
        [::core::mem::offset_of!(InstepAdamHyper, decoupled) - 40usize];
    ["Offset of field: InstepAdamHyper::amsgrad"]
        [::core::mem::offset_of!(InstepAdamHyper, amsgrad) - 44usize];
    ["Offset of field: InstepAdamHyper::maximize"]
        [::core::mem::offset_of!(InstepAdamHyper, maximize) - 48usize];
    ["Offset of field: InstepAdamHyper::reserved"]
        [::core::mem::offset_of!(InstepAdamHyper, reserved) - 52usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepAdagradHyper"][::core::mem::size_of::<InstepAdagradHyper>() - 48usize];
    ["Alignment of InstepAdagradHyper"][::core::mem::align_of::<InstepAdagradHyper>() - 8usize];
    ["Offset of field: InstepAdagradHyper::lr"][::core::mem::offset_of!(InstepAdagradHyper, lr) - 0usize];
    ["Offset of field: InstepAdagradHyper::lr_decay"]
        [::core::mem::offset_of!(InstepAdagradHyper, lr_decay) - 8usize];
    ["Offset of field: InstepAdagradHyper::weight_decay"]
        [::core::mem::offset_of!(InstepAdagradHyper, weight_decay) - 16usize];
    ["Offset of field: InstepAdagradHyper::initial_accumulator_value"]
        [::core::mem::offset_of!(InstepAdagradHyper, initial_accumulator_value) - 24usize];
    ["Offset of field: InstepAdagradHyper::eps"][::core::mem::offset_of!(InstepAdagradHyper, eps) - 32usize];
    ["Offset of field: InstepAdagradHyper::maximize"]
        [::core::mem::offset_of!(InstepAdagradHyper, maximize) - 40usize];
    ["Offset of field: InstepAdagradHyper::reserved"]
        [::core::mem::offset_of!(InstepAdagradHyper, reserved) - 44usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepRmsPropHyper"][::core::mem::size_of::<InstepRmsPropHyper>() - 48usize];
    ["Alignment of InstepRmsPropHyper"][::core::mem::align_of::<InstepRmsPropHyper>() - 8usize];
    ["Offset of field: InstepRmsPropHyper::lr"][::core::mem::offset_of!(InstepRmsPropHyper, lr) - 0usize];
    ["Offset of field: InstepRmsPropHyper::alpha"]
        [::core::mem::offset_of!(InstepRmsPropHyper, alpha) - 8usize];
    ["Offset of field: InstepRmsPropHyper::eps"][::core::mem::offset_of!(InstepRmsPropHyper, eps) - 16usize];
    ["Offset of field: InstepRmsPropHyper::weight_decay"]
        [::core::mem::offset_of!(InstepRmsPropHyper, weight_decay) - 24usize];
    ["Offset of field: InstepRmsPropHyper::momentum"]
        [::core::mem::offset_of!(InstepRmsPropHyper, momentum) - 32usize];
    ["Offset of field: InstepRmsPropHyper::centered"]
        [::core::mem::offset_of!(InstepRmsPropHyper, centered) - 40usize];
    ["Offset of field: InstepRmsPropHyper::maximize"]
        [::core::mem::offset_of!(InstepRmsPropHyper, maximize) - 44usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepAdadeltaHyper"][::core::mem::size_of::<InstepAdadeltaHyper>() - 40usize];
    ["Alignment of InstepAdadeltaHyper"][::core::mem::align_of::<InstepAdadeltaHyper>() - 8usize];
    ["Offset of field: InstepAdadeltaHyper::lr"][::core::mem::offset_of!(InstepAdadeltaHyper, lr) - 0usize];
    ["Offset of field: InstepAdadeltaHyper::rho"][::core::mem::offset_of!(InstepAdadeltaHyper, rho) - 8usize];
    ["Offset of field: InstepAdadeltaHyper::eps"]
        [::core::mem::offset_of!(InstepAdadeltaHyper, eps) - 16usize];
    ["Offset of field: InstepAdadeltaHyper::weight_decay"]
        [::core::mem::offset_of!(InstepAdadeltaHyper, weight_decay) - 24usize];
    ["Offset of field: InstepAdadeltaHyper::maximize"]
        [::core::mem::offset_of!(InstepAdadeltaHyper, maximize) - 32usize];
    ["Offset of field: InstepAdadeltaHyper::reserved"]
        [::core::mem::offset_of!(InstepAdadeltaHyper, reserved) - 36usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepAdamaxHyper"][::core::mem::size_of::<InstepAdamaxHyper>() - 48usize];
    ["Alignment of InstepAdamaxHyper"][::core::mem::align_of::<InstepAdamaxHyper>() - 8usize];
    ["Offset of field: InstepAdamaxHyper::lr"][::core::mem::offset_of!(InstepAdamaxHyper, lr) - 0usize];
    ["Offset of field: InstepAdamaxHyper::beta1"][::core::mem::offset_of!(InstepAdamaxHyper, beta1) - 8usize];
    ["Offset of field: InstepAdamaxHyper::beta2"]
        [::core::mem::offset_of!(InstepAdamaxHyper, beta2) - 16usize];
    ["Offset of field: InstepAdamaxHyper::eps"][::core::mem::offset_of!(InstepAdamaxHyper, eps) - 24usize];
    ["Offset of field: InstepAdamaxHyper::weight_decay"]
        [::core::mem::offset_of!(InstepAdamaxHyper, weight_decay) - 32usize];
    ["Offset of field: InstepAdamaxHyper::maximize"]
        [::core::mem::offset_of!(InstepAdamaxHyper, maximize) - 40usize];
    ["Offset of field: InstepAdamaxHyper::reserved"]
        [::core::mem::offset_of!(InstepAdamaxHyper, reserved) - 44usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepRpropHyper"][::core::mem::size_of::<InstepRpropHyper>() - 48usize];
    ["Alignment of InstepRpropHyper"][::core::mem::align_of::<InstepRpropHyper>() - 8usize];
    ["Offset of field: InstepRpropHyper::lr"][::core::mem::offset_of!(InstepRpropHyper, lr) - 0usize];
    ["Offset of field: InstepRpropHyper::eta_minus"]
        [::core::mem::offset_of!(InstepRpropHyper, eta_minus) - 8usize];
    ["Offset of field: InstepRpropHyper::eta_plus"]
        [::core::mem::offset_of!(InstepRpropHyper, eta_plus) - 16usize];
    ["Offset of field: InstepRpropHyper::step_size_min"]
        [::core::mem::offset_of!(InstepRpropHyper, step_size_min) - 24usize];
    ["Offset of field: InstepRpropHyper::step_size_max"]
        [::core::mem::offset_of!(InstepRpropHyper, step_size_max) - 32usize];
    ["Offset of field: InstepRpropHyper::maximize"]
        [::core::mem::offset_of!(InstepRpropHyper, maximize) - 40usize];
    ["Offset of field: InstepRpropHyper::reserved"]
        [::core::mem::offset_of!(InstepRpropHyper, reserved) - 44usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepLionHyper"][::core::mem::size_of::<InstepLionHyper>() - 40usize];
    ["Alignment of InstepLionHyper"][::core::mem::align_of::<InstepLionHyper>() - 8usize];
    ["Offset of field: InstepLionHyper::lr"][::core::mem::offset_of!(InstepLionHyper, lr) - 0usize];
    ["Offset of field: InstepLionHyper::beta1"][::core::mem::offset_of!(InstepLionHyper, beta1) - 8usize];
    ["Offset of field: InstepLionHyper::beta2"][::core::mem::offset_of!(InstepLionHyper, beta2) - 16usize];
    ["Offset of field: InstepLionHyper::weight_decay"]
        [::core::mem::offset_of!(InstepLionHyper, weight_decay) - 24usize];
    ["Offset of field: InstepLionHyper::maximize"]
        [::core::mem::offset_of!(InstepLionHyper, maximize) - 32usize];
    ["Offset of field: InstepLionHyper::reserved"]
        [::core::mem::offset_of!(InstepLionHyper, reserved) - 36usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepNAdamHyper"][::core::mem::size_of::<InstepNAdamHyper>() - 56usize];
    ["Alignment of InstepNAdamHyper"][::core::mem::align_of::<InstepNAdamHyper>() - 8usize];
    ["Offset of field: InstepNAdamHyper::lr"][::core::mem::offset_of!(InstepNAdamHyper, lr) - 0usize];
    ["Offset of field: InstepNAdamHyper::beta1"][::core::mem::offset_of!(InstepNAdamHyper, beta1) - 8usize];
    ["Offset of field: InstepNAdamHyper::beta2"][::core::mem::offset_of!(InstepNAdamHyper, beta2) - 16usize];
    ["Offset of field: InstepNAdamHyper::eps"][::core::mem::offset_of!(InstepNAdamHyper, eps) - 24usize];
    ["Offset of field: InstepNAdamHyper::weight_decay"]
        [::core::mem::offset_of!(InstepNAdamHyper, weight_decay) - 32usize];
    ["Offset of field: InstepNAdamHyper::momentum_decay"]
        [::core::mem::offset_of!(InstepNAdamHyper, momentum_decay) - 40usize];
    ["Offset of field: InstepNAdamHyper::decoupled"]
        [::core::mem::offset_of!(InstepNAdamHyper, decoupled) - 48usize];
    ["Offset of field: InstepNAdamHyper::maximize"]
        [::core::mem::offset_of!(InstepNAdamHyper, maximize) - 52usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepRAdamHyper"][::core::mem::size_of::<InstepRAdamHyper>() - 48usize];
    ["Alignment of InstepRAdamHyper"][::core::mem::align_of::<InstepRAdamHyper>() - 8usize];
    ["Offset of field: InstepRAdamHyper::lr"][::core::mem::offset_of!(InstepRAdamHyper, lr) - 0usize];
    ["Offset of field: InstepRAdamHyper::beta1"][::core::mem::offset_of!(InstepRAdamHyper, beta1) - 8usize];
    ["Offset of field: InstepRAdamHyper::beta2"][::core::mem::offset_of!(InstepRAdamHyper, beta2) - 16usize];
    ["Offset of field: InstepRAdamHyper::eps"][::core::mem::offset_of!(InstepRAdamHyper, eps) - 24usize];
    ["Offset of field: InstepRAdamHyper::weight_decay"]
        [::core::mem::offset_of!(InstepRAdamHyper, weight_decay) - 32usize];
    ["Offset of field: InstepRAdamHyper::decoupled"]
        [::core::mem::offset_of!(InstepRAdamHyper, decoupled) - 40usize];
    ["Offset of field: InstepRAdamHyper::maximize"]
        [::core::mem::offset_of!(InstepRAdamHyper, maximize) - 44usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepLambHyper"][::core::mem::size_of::<InstepLambHyper>() - 48usize];
    ["Alignment of InstepLambHyper"][::core::mem::align_of::<InstepLambHyper>() - 8usize];
    ["Offset of field: InstepLambHyper::lr"][::core::mem::offset_of!(InstepLambHyper, lr) - 0usize];
    ["Offset of field: InstepLambHyper::beta1"][::core::mem::offset_of!(InstepLambHyper, beta1) - 8usize];
    ["Offset of field: InstepLambHyper::beta2"][::core::mem::offset_of!(InstepLambHyper, beta2) - 16usize];
    ["Offset of field: InstepLambHyper::eps"][::core::mem::offset_of!(InstepLambHyper, eps) - 24usize];
    ["Offset of field: InstepLambHyper::weight_decay"]
        [::core::mem::offset_of!(InstepLambHyper, weight_decay) - 32usize];
    ["Offset of field: InstepLambHyper::maximize"]
        [::core::mem::offset_of!(InstepLambHyper, maximize) - 40usize];
    ["Offset of field: InstepLambHyper::reserved"]
        [::core::mem::offset_of!(InstepLambHyper, reserved) - 44usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepAdEmaMixHyper"][::core::mem::size_of::<InstepAdEmaMixHyper>() - 64usize];
    ["Alignment of InstepAdEmaMixHyper"][::core::mem::align_of::<InstepAdEmaMixHyper>() - 8usize];
    ["Offset of field: InstepAdEmaMixHyper::lr"][::core::mem::offset_of!(InstepAdEmaMixHyper, lr) - 0usize];
    ["Offset of field: InstepAdEmaMixHyper::beta1"]
        [::core::mem::offset_of!(InstepAdEmaMixHyper, beta1) - 8usize];
    ["Offset of field: InstepAdEmaMixHyper::beta2"]
        [::core::mem::offset_of!(InstepAdEmaMixHyper, beta2) - 16usize];
    ["Offset of field: InstepAdEmaMixHyper::beta3"]
        [::core::mem::offset_of!(InstepAdEmaMixHyper, beta3) - 24usize];
    ["Offset of field: InstepAdEmaMixHyper::alpha"]
        [::core::mem::offset_of!(InstepAdEmaMixHyper, alpha) - 32usize];
    ["Offset of field: InstepAdEmaMixHyper::eps"]
        [::core::mem::offset_of!(InstepAdEmaMixHyper, eps) - 40usize];
    ["Offset of field: InstepAdEmaMixHyper::weight_decay"]
        [::core::mem::offset_of!(InstepAdEmaMixHyper, weight_decay) - 48usize];
    ["Offset of field: InstepAdEmaMixHyper::maximize"]
        [::core::mem::offset_of!(InstepAdEmaMixHyper, maximize) - 56usize];
    ["Offset of field: InstepAdEmaMixHyper::reserved"]
        [::core::mem::offset_of!(InstepAdEmaMixHyper, reserved) - 60usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepCustomHyper {
    pub lr: f64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepCustomHyper"][::core::mem::size_of::<InstepCustomHyper>() - 8usize];
    ["Alignment of InstepCustomHyper"][::core::mem::align_of::<InstepCustomHyper>() - 8usize];
    ["Offset of field: InstepCustomHyper::lr"][::core::mem::offset_of!(InstepCustomHyper, lr) - 0usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepHyper"][::core::mem::size_of::<InstepHyper>() - 64usize];
    ["Alignment of InstepHyper"][::core::mem::align_of::<InstepHyper>() - 8usize];
    ["Offset of field: InstepHyper::sgd"][::core::mem::offset_of!(InstepHyper, sgd) - 0usize];
    ["Offset of field: InstepHyper::adam"][::core::mem::offset_of!(InstepHyper, adam) - 0usize];
    ["Offset of field: InstepHyper::adagrad"][::core::mem::offset_of!(InstepHyper, adagrad) - 0usize];
    ["Offset of field: InstepHyper::rmsprop"][::core::mem::offset_of!(InstepHyper, rmsprop) - 0usize];
    ["Offset of field: InstepHyper::adadelta"][::core::mem::offset_of!(InstepHyper, adadelta) - 0usize];
    ["Offset of field: InstepHyper::adamax"][::core::mem::offset_of!(InstepHyper, adamax) - 0usize];
    ["Offset of field: InstepHyper::rprop"][::core::mem::offset_of!(InstepHyper, rprop) - 0usize];
    ["Offset of field: InstepHyper::lion"][::core::mem::offset_of!(InstepHyper, lion) - 0usize];
    ["Offset of field: InstepHyper::nadam"][::core::mem::offset_of!(InstepHyper, nadam) - 0usize];
    ["Offset of field: InstepHyper::radam"][::core::mem::offset_of!(InstepHyper, radam) - 0usize];
    ["Offset of field: InstepHyper::lamb"][::core::mem::offset_of!(InstepHyper, lamb) - 0usize];
    ["Offset of field: InstepHyper::ademamix"][::core::mem::offset_of!(InstepHyper, ademamix) - 0usize];
    ["Offset of field: InstepHyper::custom"][::core::mem::offset_of!(InstepHyper, custom) - 0usize];
    ["Offset of field: InstepHyper::words"][::core::mem::offset_of!(InstepHyper, words) - 0usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepCustomScalars {
    pub lr: f64,
    pub step: u64,
    pub multiplier: f32,
    pub action: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepCustomScalars"][::core::mem::size_of::<InstepCustomScalars>() - 24usize];
    ["Alignment of InstepCustomScalars"][::core::mem::align_of::<InstepCustomScalars>() - 8usize];
    ["Offset of field: InstepCustomScalars::lr"][::core::mem::offset_of!(InstepCustomScalars, lr) - 0usize];
    ["Offset of field: InstepCustomScalars::step"]
        [::core::mem::offset_of!(InstepCustomScalars, step) - 8usize];
    ["Offset of field: InstepCustomScalars::multiplier"]
        [::core::mem::offset_of!(InstepCustomScalars, multiplier) - 16usize];
    ["Offset of field: InstepCustomScalars::action"]
        [::core::mem::offset_of!(InstepCustomScalars, action) - 20usize];
};
#[repr(C)]
#[derive(Copy, Clone)]
pub union InstepScalars {
    pub custom: InstepCustomScalars,
    pub words: [u64; 6usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepScalars"][::core::mem::size_of::<InstepScalars>() - 48usize];
    ["Alignment of InstepScalars"][::core::mem::align_of::<InstepScalars>() - 8usize];
    ["Offset of field: InstepScalars::custom"][::core::mem::offset_of!(InstepScalars, custom) - 0usize];
    ["Offset of field: InstepScalars::words"][::core::mem::offset_of!(InstepScalars, words) - 0usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepRecord"][::core::mem::size_of::<InstepRecord>() - 104usize];
    ["Alignment of InstepRecord"][::core::mem::align_of::<InstepRecord>() - 8usize];
    ["Offset of field: InstepRecord::steps"][::core::mem::offset_of!(InstepRecord, steps) - 0usize];
    ["Offset of field: InstepRecord::stepped"][::core::mem::offset_of!(InstepRecord, stepped) - 8usize];
    ["Offset of field: InstepRecord::hyper"][::core::mem::offset_of!(InstepRecord, hyper) - 12usize];
    ["Offset of field: InstepRecord::action"][::core::mem::offset_of!(InstepRecord, action) - 16usize];
    ["Offset of field: InstepRecord::optimizer"][::core::mem::offset_of!(InstepRecord, optimizer) - 20usize];
    ["Offset of field: InstepRecord::grad_dtype"]
        [::core::mem::offset_of!(InstepRecord, grad_dtype) - 22usize];
    ["Offset of field: InstepRecord::tail"][::core::mem::offset_of!(InstepRecord, tail) - 24usize];
    ["Offset of field: InstepRecord::contributors"]
        [::core::mem::offset_of!(InstepRecord, contributors) - 32usize];
    ["Offset of field: InstepRecord::carried"][::core::mem::offset_of!(InstepRecord, carried) - 40usize];
    ["Offset of field: InstepRecord::scalars"][::core::mem::offset_of!(InstepRecord, scalars) - 56usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepNorms {
    pub limbs: [[u64; 22usize]; 2usize],
    pub nonfinite: [u32; 2usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepNorms"][::core::mem::size_of::<InstepNorms>() - 360usize];
    ["Alignment of InstepNorms"][::core::mem::align_of::<InstepNorms>() - 8usize];
    ["Offset of field: InstepNorms::limbs"][::core::mem::offset_of!(InstepNorms, limbs) - 0usize];
    ["Offset of field: InstepNorms::nonfinite"][::core::mem::offset_of!(InstepNorms, nonfinite) - 352usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepControl"][::core::mem::size_of::<InstepControl>() - 264usize];
    ["Alignment of InstepControl"][::core::mem::align_of::<InstepControl>() - 8usize];
    ["Offset of field: InstepControl::next_loss_scale"]
        [::core::mem::offset_of!(InstepControl, next_loss_scale) - 0usize];
    ["Offset of field: InstepControl::growth_tracker"]
        [::core::mem::offset_of!(InstepControl, growth_tracker) - 4usize];
    ["Offset of field: InstepControl::limbs"][::core::mem::offset_of!(InstepControl, limbs) - 8usize];
    ["Offset of field: InstepControl::passes"][::core::mem::offset_of!(InstepControl, passes) - 184usize];
    ["Offset of field: InstepControl::norm"][::core::mem::offset_of!(InstepControl, norm) - 192usize];
    ["Offset of field: InstepControl::previous_norm"]
        [::core::mem::offset_of!(InstepControl, previous_norm) - 200usize];
    ["Offset of field: InstepControl::clip"][::core::mem::offset_of!(InstepControl, clip) - 208usize];
    ["Offset of field: InstepControl::divisor"][::core::mem::offset_of!(InstepControl, divisor) - 216usize];
    ["Offset of field: InstepControl::loss_scale"]
        [::core::mem::offset_of!(InstepControl, loss_scale) - 224usize];
    ["Offset of field: InstepControl::multiplier"]
        [::core::mem::offset_of!(InstepControl, multiplier) - 232usize];
    ["Offset of field: InstepControl::average_multiplier"]
        [::core::mem::offset_of!(InstepControl, average_multiplier) - 236usize];
    ["Offset of field: InstepControl::local_multiplier"]
        [::core::mem::offset_of!(InstepControl, local_multiplier) - 240usize];
    ["Offset of field: InstepControl::reserved"][::core::mem::offset_of!(InstepControl, reserved) - 244usize];
    ["Offset of field: InstepControl::max_abs_bits"]
        [::core::mem::offset_of!(InstepControl, max_abs_bits) - 248usize];
    ["Offset of field: InstepControl::first_nonfinite_bucket"]
        [::core::mem::offset_of!(InstepControl, first_nonfinite_bucket) - 252usize];
    ["Offset of field: InstepControl::skip"][::core::mem::offset_of!(InstepControl, skip) - 256usize];
    ["Offset of field: InstepControl::decided"][::core::mem::offset_of!(InstepControl, decided) - 260usize];
};
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
    pub reserved: [u32; 3usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepTile"][::core::mem::size_of::<InstepTile>() - 64usize];
    ["Alignment of InstepTile"][::core::mem::align_of::<InstepTile>() - 8usize];
    ["Offset of field: InstepTile::param"][::core::mem::offset_of!(InstepTile, param) - 0usize];
    ["Offset of field: InstepTile::grad_offset"][::core::mem::offset_of!(InstepTile, grad_offset) - 8usize];
    ["Offset of field: InstepTile::state_offset"]
        [::core::mem::offset_of!(InstepTile, state_offset) - 16usize];
    ["Offset of field: InstepTile::element"][::core::mem::offset_of!(InstepTile, element) - 24usize];
    ["Offset of field: InstepTile::count"][::core::mem::offset_of!(InstepTile, count) - 32usize];
    ["Offset of field: InstepTile::record"][::core::mem::offset_of!(InstepTile, record) - 36usize];
    ["Offset of field: InstepTile::first"][::core::mem::offset_of!(InstepTile, first) - 40usize];
    ["Offset of field: InstepTile::first_record"]
        [::core::mem::offset_of!(InstepTile, first_record) - 44usize];
    ["Offset of field: InstepTile::run"][::core::mem::offset_of!(InstepTile, run) - 48usize];
    ["Offset of field: InstepTile::reserved"][::core::mem::offset_of!(InstepTile, reserved) - 52usize];
};
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
    pub bucket_controls: *mut InstepControl,
    pub bucket_count: u64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepBeginArgs"][::core::mem::size_of::<InstepBeginArgs>() - 144usize];
    ["Alignment of InstepBeginArgs"][::core::mem::align_of::<InstepBeginArgs>() - 8usize];
    ["Offset of field: InstepBeginArgs::control"][::core::mem::offset_of!(InstepBeginArgs, control) - 0usize];
    ["Offset of field: InstepBeginArgs::records"][::core::mem::offset_of!(InstepBeginArgs, records) - 8usize];
    ["Offset of field: InstepBeginArgs::hypers"][::core::mem::offset_of!(InstepBeginArgs, hypers) - 16usize];
    ["Offset of field: InstepBeginArgs::lr_multipliers"]
        [::core::mem::offset_of!(InstepBeginArgs, lr_multipliers) - 24usize];
    ["Offset of field: InstepBeginArgs::actions"]
        [::core::mem::offset_of!(InstepBeginArgs, actions) - 32usize];
    ["Offset of field: InstepBeginArgs::record_count"]
        [::core::mem::offset_of!(InstepBeginArgs, record_count) - 40usize];
    ["Offset of field: InstepBeginArgs::norms"][::core::mem::offset_of!(InstepBeginArgs, norms) - 48usize];
    ["Offset of field: InstepBeginArgs::ring"][::core::mem::offset_of!(InstepBeginArgs, ring) - 56usize];
    ["Offset of field: InstepBeginArgs::slot_words"]
        [::core::mem::offset_of!(InstepBeginArgs, slot_words) - 64usize];
    ["Offset of field: InstepBeginArgs::slot_count"]
        [::core::mem::offset_of!(InstepBeginArgs, slot_count) - 72usize];
    ["Offset of field: InstepBeginArgs::divisor"]
        [::core::mem::offset_of!(InstepBeginArgs, divisor) - 80usize];
    ["Offset of field: InstepBeginArgs::loss_scale"]
        [::core::mem::offset_of!(InstepBeginArgs, loss_scale) - 88usize];
    ["Offset of field: InstepBeginArgs::previous_max_norm"]
        [::core::mem::offset_of!(InstepBeginArgs, previous_max_norm) - 96usize];
    ["Offset of field: InstepBeginArgs::clip"][::core::mem::offset_of!(InstepBeginArgs, clip) - 104usize];
    ["Offset of field: InstepBeginArgs::grad_scale"]
        [::core::mem::offset_of!(InstepBeginArgs, grad_scale) - 112usize];
    ["Offset of field: InstepBeginArgs::found_inf"]
        [::core::mem::offset_of!(InstepBeginArgs, found_inf) - 120usize];
    ["Offset of field: InstepBeginArgs::bucket_controls"]
        [::core::mem::offset_of!(InstepBeginArgs, bucket_controls) - 128usize];
    ["Offset of field: InstepBeginArgs::bucket_count"]
        [::core::mem::offset_of!(InstepBeginArgs, bucket_count) - 136usize];
};
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
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepDecideArgs"][::core::mem::size_of::<InstepDecideArgs>() - 80usize];
    ["Alignment of InstepDecideArgs"][::core::mem::align_of::<InstepDecideArgs>() - 8usize];
    ["Offset of field: InstepDecideArgs::control"]
        [::core::mem::offset_of!(InstepDecideArgs, control) - 0usize];
    ["Offset of field: InstepDecideArgs::contributors"]
        [::core::mem::offset_of!(InstepDecideArgs, contributors) - 8usize];
    ["Offset of field: InstepDecideArgs::max_norm"]
        [::core::mem::offset_of!(InstepDecideArgs, max_norm) - 16usize];
    ["Offset of field: InstepDecideArgs::growth_factor"]
        [::core::mem::offset_of!(InstepDecideArgs, growth_factor) - 24usize];
    ["Offset of field: InstepDecideArgs::backoff_factor"]
        [::core::mem::offset_of!(InstepDecideArgs, backoff_factor) - 32usize];
    ["Offset of field: InstepDecideArgs::largest_loss_scale"]
        [::core::mem::offset_of!(InstepDecideArgs, largest_loss_scale) - 40usize];
    ["Offset of field: InstepDecideArgs::skip_nonfinite"]
        [::core::mem::offset_of!(InstepDecideArgs, skip_nonfinite) - 48usize];
    ["Offset of field: InstepDecideArgs::growth_interval"]
        [::core::mem::offset_of!(InstepDecideArgs, growth_interval) - 52usize];
    ["Offset of field: InstepDecideArgs::pass_control"]
        [::core::mem::offset_of!(InstepDecideArgs, pass_control) - 56usize];
    ["Offset of field: InstepDecideArgs::bucket"]
        [::core::mem::offset_of!(InstepDecideArgs, bucket) - 64usize];
    ["Offset of field: InstepDecideArgs::grad_dtype"]
        [::core::mem::offset_of!(InstepDecideArgs, grad_dtype) - 68usize];
    ["Offset of field: InstepDecideArgs::found_inf"]
        [::core::mem::offset_of!(InstepDecideArgs, found_inf) - 72usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepStepArgs"][::core::mem::size_of::<InstepStepArgs>() - 200usize];
    ["Alignment of InstepStepArgs"][::core::mem::align_of::<InstepStepArgs>() - 8usize];
    ["Offset of field: InstepStepArgs::control"][::core::mem::offset_of!(InstepStepArgs, control) - 0usize];
    ["Offset of field: InstepStepArgs::records"][::core::mem::offset_of!(InstepStepArgs, records) - 8usize];
    ["Offset of field: InstepStepArgs::tiles"][::core::mem::offset_of!(InstepStepArgs, tiles) - 16usize];
    ["Offset of field: InstepStepArgs::tile_count"]
        [::core::mem::offset_of!(InstepStepArgs, tile_count) - 24usize];
    ["Offset of field: InstepStepArgs::param_base"]
        [::core::mem::offset_of!(InstepStepArgs, param_base) - 32usize];
    ["Offset of field: InstepStepArgs::grads"][::core::mem::offset_of!(InstepStepArgs, grads) - 40usize];
    ["Offset of field: InstepStepArgs::master"][::core::mem::offset_of!(InstepStepArgs, master) - 48usize];
    ["Offset of field: InstepStepArgs::copy"][::core::mem::offset_of!(InstepStepArgs, copy) - 56usize];
    ["Offset of field: InstepStepArgs::ema"][::core::mem::offset_of!(InstepStepArgs, ema) - 64usize];
    ["Offset of field: InstepStepArgs::states"][::core::mem::offset_of!(InstepStepArgs, states) - 72usize];
    ["Offset of field: InstepStepArgs::scales"][::core::mem::offset_of!(InstepStepArgs, scales) - 96usize];
    ["Offset of field: InstepStepArgs::norms"][::core::mem::offset_of!(InstepStepArgs, norms) - 120usize];
    ["Offset of field: InstepStepArgs::seed"][::core::mem::offset_of!(InstepStepArgs, seed) - 128usize];
    ["Offset of field: InstepStepArgs::optimizer"]
        [::core::mem::offset_of!(InstepStepArgs, optimizer) - 136usize];
    ["Offset of field: InstepStepArgs::state_count"]
        [::core::mem::offset_of!(InstepStepArgs, state_count) - 140usize];
    ["Offset of field: InstepStepArgs::bucket"][::core::mem::offset_of!(InstepStepArgs, bucket) - 144usize];
    ["Offset of field: InstepStepArgs::param_dtype"]
        [::core::mem::offset_of!(InstepStepArgs, param_dtype) - 148usize];
    ["Offset of field: InstepStepArgs::grad_dtype"]
        [::core::mem::offset_of!(InstepStepArgs, grad_dtype) - 152usize];
    ["Offset of field: InstepStepArgs::copy_dtype"]
        [::core::mem::offset_of!(InstepStepArgs, copy_dtype) - 156usize];
    ["Offset of field: InstepStepArgs::master_kind"]
        [::core::mem::offset_of!(InstepStepArgs, master_kind) - 160usize];
    ["Offset of field: InstepStepArgs::moments"][::core::mem::offset_of!(InstepStepArgs, moments) - 164usize];
    ["Offset of field: InstepStepArgs::stochastic"]
        [::core::mem::offset_of!(InstepStepArgs, stochastic) - 168usize];
    ["Offset of field: InstepStepArgs::gradients"]
        [::core::mem::offset_of!(InstepStepArgs, gradients) - 172usize];
    ["Offset of field: InstepStepArgs::local"][::core::mem::offset_of!(InstepStepArgs, local) - 176usize];
    ["Offset of field: InstepStepArgs::ema_from_sample"]
        [::core::mem::offset_of!(InstepStepArgs, ema_from_sample) - 180usize];
    ["Offset of field: InstepStepArgs::ema_weight"]
        [::core::mem::offset_of!(InstepStepArgs, ema_weight) - 184usize];
    ["Offset of field: InstepStepArgs::part"][::core::mem::offset_of!(InstepStepArgs, part) - 188usize];
    ["Offset of field: InstepStepArgs::share"][::core::mem::offset_of!(InstepStepArgs, share) - 192usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepStatus"][::core::mem::size_of::<InstepStatus>() - 64usize];
    ["Alignment of InstepStatus"][::core::mem::align_of::<InstepStatus>() - 8usize];
    ["Offset of field: InstepStatus::sequence"][::core::mem::offset_of!(InstepStatus, sequence) - 0usize];
    ["Offset of field: InstepStatus::norm"][::core::mem::offset_of!(InstepStatus, norm) - 8usize];
    ["Offset of field: InstepStatus::clip"][::core::mem::offset_of!(InstepStatus, clip) - 16usize];
    ["Offset of field: InstepStatus::loss_scale"]
        [::core::mem::offset_of!(InstepStatus, loss_scale) - 24usize];
    ["Offset of field: InstepStatus::decided"][::core::mem::offset_of!(InstepStatus, decided) - 32usize];
    ["Offset of field: InstepStatus::skipped"][::core::mem::offset_of!(InstepStatus, skipped) - 36usize];
    ["Offset of field: InstepStatus::first_nonfinite_bucket"]
        [::core::mem::offset_of!(InstepStatus, first_nonfinite_bucket) - 40usize];
    ["Offset of field: InstepStatus::reserved"][::core::mem::offset_of!(InstepStatus, reserved) - 44usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepPublishArgs {
    pub control: *const InstepControl,
    pub ring: *mut InstepStatus,
    pub slot_count: u64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepPublishArgs"][::core::mem::size_of::<InstepPublishArgs>() - 24usize];
    ["Alignment of InstepPublishArgs"][::core::mem::align_of::<InstepPublishArgs>() - 8usize];
    ["Offset of field: InstepPublishArgs::control"]
        [::core::mem::offset_of!(InstepPublishArgs, control) - 0usize];
    ["Offset of field: InstepPublishArgs::ring"][::core::mem::offset_of!(InstepPublishArgs, ring) - 8usize];
    ["Offset of field: InstepPublishArgs::slot_count"]
        [::core::mem::offset_of!(InstepPublishArgs, slot_count) - 16usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepAddArgs {
    pub from: *const ::core::ffi::c_void,
    pub to: *mut ::core::ffi::c_void,
    pub count: u64,
    pub dtype: u32,
    pub reserved: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepAddArgs"][::core::mem::size_of::<InstepAddArgs>() - 32usize];
    ["Alignment of InstepAddArgs"][::core::mem::align_of::<InstepAddArgs>() - 8usize];
    ["Offset of field: InstepAddArgs::from"][::core::mem::offset_of!(InstepAddArgs, from) - 0usize];
    ["Offset of field: InstepAddArgs::to"][::core::mem::offset_of!(InstepAddArgs, to) - 8usize];
    ["Offset of field: InstepAddArgs::count"][::core::mem::offset_of!(InstepAddArgs, count) - 16usize];
    ["Offset of field: InstepAddArgs::dtype"][::core::mem::offset_of!(InstepAddArgs, dtype) - 24usize];
    ["Offset of field: InstepAddArgs::reserved"][::core::mem::offset_of!(InstepAddArgs, reserved) - 28usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepCastArgs {
    pub from: *const ::core::ffi::c_void,
    pub to: *mut ::core::ffi::c_void,
    pub count: u64,
    pub from_dtype: u32,
    pub to_dtype: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepCastArgs"][::core::mem::size_of::<InstepCastArgs>() - 32usize];
    ["Alignment of InstepCastArgs"][::core::mem::align_of::<InstepCastArgs>() - 8usize];
    ["Offset of field: InstepCastArgs::from"][::core::mem::offset_of!(InstepCastArgs, from) - 0usize];
    ["Offset of field: InstepCastArgs::to"][::core::mem::offset_of!(InstepCastArgs, to) - 8usize];
    ["Offset of field: InstepCastArgs::count"][::core::mem::offset_of!(InstepCastArgs, count) - 16usize];
    ["Offset of field: InstepCastArgs::from_dtype"]
        [::core::mem::offset_of!(InstepCastArgs, from_dtype) - 24usize];
    ["Offset of field: InstepCastArgs::to_dtype"]
        [::core::mem::offset_of!(InstepCastArgs, to_dtype) - 28usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepStored"][::core::mem::size_of::<InstepStored>() - 40usize];
    ["Alignment of InstepStored"][::core::mem::align_of::<InstepStored>() - 8usize];
    ["Offset of field: InstepStored::values"][::core::mem::offset_of!(InstepStored, values) - 0usize];
    ["Offset of field: InstepStored::second"][::core::mem::offset_of!(InstepStored, second) - 8usize];
    ["Offset of field: InstepStored::count"][::core::mem::offset_of!(InstepStored, count) - 16usize];
    ["Offset of field: InstepStored::format"][::core::mem::offset_of!(InstepStored, format) - 24usize];
    ["Offset of field: InstepStored::master_kind"]
        [::core::mem::offset_of!(InstepStored, master_kind) - 28usize];
    ["Offset of field: InstepStored::is_signed"][::core::mem::offset_of!(InstepStored, is_signed) - 32usize];
    ["Offset of field: InstepStored::reserved"][::core::mem::offset_of!(InstepStored, reserved) - 36usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct InstepKernels {
    pub self_test: ::core::option::Option<unsafe extern "C" fn() -> u32>,
    pub begin: ::core::option::Option<unsafe extern "C" fn(args: *const InstepBeginArgs)>,
    pub decide: ::core::option::Option<unsafe extern "C" fn(args: *const InstepDecideArgs)>,
    pub norm: ::core::option::Option<
        unsafe extern "C" fn(args: *const InstepStepArgs, first_tile: u64, last_tile: u64),
    >,
    pub step: ::core::option::Option<
        unsafe extern "C" fn(args: *const InstepStepArgs, first_tile: u64, last_tile: u64, ahead_bytes: u64),
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of InstepKernels"][::core::mem::size_of::<InstepKernels>() - 192usize];
    ["Alignment of InstepKernels"][::core::mem::align_of::<InstepKernels>() - 8usize];
    ["Offset of field: InstepKernels::self_test"][::core::mem::offset_of!(InstepKernels, self_test) - 0usize];
    ["Offset of field: InstepKernels::begin"][::core::mem::offset_of!(InstepKernels, begin) - 8usize];
    ["Offset of field: InstepKernels::decide"][::core::mem::offset_of!(InstepKernels, decide) - 16usize];
    ["Offset of field: InstepKernels::norm"][::core::mem::offset_of!(InstepKernels, norm) - 24usize];
    ["Offset of field: InstepKernels::step"][::core::mem::offset_of!(InstepKernels, step) - 32usize];
    ["Offset of field: InstepKernels::custom"][::core::mem::offset_of!(InstepKernels, custom) - 40usize];
    ["Offset of field: InstepKernels::sum"][::core::mem::offset_of!(InstepKernels, sum) - 48usize];
    ["Offset of field: InstepKernels::narrow"][::core::mem::offset_of!(InstepKernels, narrow) - 56usize];
    ["Offset of field: InstepKernels::widen"][::core::mem::offset_of!(InstepKernels, widen) - 64usize];
    ["Offset of field: InstepKernels::decode"][::core::mem::offset_of!(InstepKernels, decode) - 72usize];
    ["Offset of field: InstepKernels::encode"][::core::mem::offset_of!(InstepKernels, encode) - 80usize];
    ["Offset of field: InstepKernels::ceiling"][::core::mem::offset_of!(InstepKernels, ceiling) - 88usize];
    ["Offset of field: InstepKernels::signed_states"]
        [::core::mem::offset_of!(InstepKernels, signed_states) - 96usize];
    ["Offset of field: InstepKernels::scaled"][::core::mem::offset_of!(InstepKernels, scaled) - 144usize];
};
