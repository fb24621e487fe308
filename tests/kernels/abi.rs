//! Do both sides of the C boundary mean the same bytes?
//!
//! The C compiler's own table of sizes and offsets (`kernels/abi_layout.c`) against what the Rust compiler makes of
//! `src/abi.rs`. Every row of the C table must be known here, so a struct or field cannot be forgotten on one side.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char};
use std::mem::{offset_of, size_of};

use instep::abi::*;

#[repr(C)]
struct Row {
    name: *const c_char,
    value: u64,
}

unsafe extern "C" {
    static instep_abi_layout: [Row; 1];
}

/// The table as the C compiler laid it out.
fn c_side() -> BTreeMap<String, u64> {
    let mut rows = BTreeMap::new();
    // SAFETY: the table is constant and ends in a row without a name.
    unsafe {
        let mut row = &raw const instep_abi_layout as *const Row;
        while !(*row).name.is_null() {
            rows.insert(CStr::from_ptr((*row).name).to_str().unwrap().to_owned(), (*row).value);
            row = row.add(1);
        }
    }
    rows
}

macro_rules! rust_side {
    ($($name:ident { $($field:ident),* })*) => {{
        let mut rows = BTreeMap::new();
        $(
            rows.insert(stringify!($name).to_owned(), size_of::<$name>() as u64);
            $(rows.insert(
                format!("{}.{}", stringify!($name), stringify!($field)),
                offset_of!($name, $field) as u64,
            );)*
        )*
        rows
    }};
}

#[test]
fn sizes_and_offsets_are_the_c_compilers() {
    let rust = rust_side! {
        InstepHyper {}
        InstepScalars {}
        InstepSgdHyper { lr, momentum, dampening, weight_decay, nesterov, maximize }
        InstepAdamHyper { lr, beta1, beta2, eps, weight_decay, decoupled, amsgrad, maximize, reserved }
        InstepAdagradHyper { lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize, reserved }
        InstepRmsPropHyper { lr, alpha, eps, weight_decay, momentum, centered, maximize }
        InstepAdadeltaHyper { lr, rho, eps, weight_decay, maximize, reserved }
        InstepAdamaxHyper { lr, beta1, beta2, eps, weight_decay, maximize, reserved }
        InstepRpropHyper { lr, eta_minus, eta_plus, step_size_min, step_size_max, maximize, reserved }
        InstepLionHyper { lr, beta1, beta2, weight_decay, maximize, reserved }
        InstepNAdamHyper { lr, beta1, beta2, eps, weight_decay, momentum_decay, decoupled, maximize }
        InstepRAdamHyper { lr, beta1, beta2, eps, weight_decay, decoupled, maximize }
        InstepLambHyper { lr, beta1, beta2, eps, weight_decay, maximize, reserved }
        InstepCustomHyper { lr }
        InstepCustomScalars { lr, step, multiplier, action }
        InstepSgdScalars { lr, momentum, one_minus_dampening, weight_decay, has_momentum, first, nesterov, maximize }
        InstepAdamScalars { weight1, weight2, step_size, inv_sqrt_bias_correction2, eps, weight_decay, lr_weight_decay, from_sample1, from_sample2, amsgrad, maximize, reserved }
        InstepAdagradScalars { step_size, eps, weight_decay, initial_sum, first, maximize }
        InstepRmsPropScalars { weight, lr, eps, weight_decay, momentum, from_sample, has_momentum, centered, maximize }
        InstepAdadeltaScalars { weight, lr, eps, weight_decay, from_sample, maximize }
        InstepAdamaxScalars { weight1, weight2, step_size, eps, weight_decay, from_sample1, from_sample2, maximize }
        InstepRpropScalars { lr, eta_minus, eta_plus, step_size_min, step_size_max, first, maximize, reserved }
        InstepLionScalars { weight1, weight2, lr, lr_weight_decay, from_sample1, from_sample2, maximize, reserved }
        InstepNAdamScalars { weight1, weight2, gradient_rate, average_rate, inv_sqrt_bias_correction2, eps, weight_decay, lr_weight_decay, from_sample1, from_sample2, maximize, reserved }
        InstepRAdamScalars { weight1, weight2, step_size, eps, weight_decay, lr_weight_decay, from_sample1, from_sample2, rectified, maximize }
        InstepLambScalars { lr, weight1, weight2, inv_bias_correction1, inv_sqrt_bias_correction2, eps, weight_decay, from_sample1, from_sample2, maximize, reserved }
        InstepNorms { limbs, nonfinite }
        InstepSegment { steps, stepped, group, action, optimizer, tail, contributors, carried, scalars }
        InstepControl { next_loss_scale, growth_tracker, limbs, passes, norm, previous_norm, clip, divisor, loss_scale, multiplier, average_multiplier, local_multiplier, reserved, max_abs_bits, first_nonfinite_bucket, skip, decided }
        InstepTile { param, grad_offset, state_offset, element, count, segment, first, first_record, reserved }
        InstepBeginArgs { control, segments, groups, lr_multipliers, actions, segment_count, norms, ring, slot_words, slot_count, divisor, loss_scale, previous_max_norm, bucket_controls, bucket_count, grad_dtype, reserved }
        InstepDecideArgs { control, contributors, max_norm, growth_factor, backoff_factor, largest_loss_scale, skip_nonfinite, growth_interval, pass_control, bucket, grad_dtype }
        InstepStepArgs { control, segments, tiles, tile_count, param_base, grads, master, copy, ema, states, scales, norms, seed, optimizer, state_count, bucket, param_dtype, grad_dtype, copy_dtype, master_kind, moments, stochastic, zero_grads, local, ema_from_sample, ema_weight, part }
        InstepStatus { sequence, norm, clip, loss_scale, decided, skipped, first_nonfinite_bucket, reserved }
        InstepPublishArgs { control, ring, slot_count }
        InstepStored { values, second, count, format, master_kind, is_signed, reserved }
        InstepKernels { self_test, begin, decide, norm, step, custom, sum, narrow, widen, decode, encode, ceiling, signed_states }
    };
    let c = c_side();
    assert!(c.len() > 60, "the table has rows");
    assert_eq!(c, rust);
}
