//! Further work of a step, on every instruction set: it zeroes gradients, and writes the parameters a second time.
//!
//! The tests call the kernels directly, so a fault is not in a stepper. Expected values come from definitions, never
//! from a second run with the same option.

use instep::Isa;
use instep::abi::*;

use crate::precision::sixteen_bit::Format;
use crate::support::entries::kernels;
use crate::support::{paint, paint_gradient};

/// Each segment has a full tile and a part of one.
const LEN: usize = INSTEP_TILE_ELEMENTS as usize + 301;
/// The actions: stepped, averaged, frozen, and stepped without a gradient on any rank.
const ACTIONS: [u32; 4] =
    [INSTEP_ACTION_STEP, INSTEP_ACTION_AVERAGE, INSTEP_ACTION_LEAVE, INSTEP_ACTION_STEP];
const UNTOUCHED: u16 = 0x5a5a;
const RANKS: f64 = 2.0;
const LOSS_SCALE: f64 = 4.0;
const CLIP: f64 = 0.75;
/// The factor that the step applies to a sum.
const MULTIPLIER: f64 = 1.0 / (RANKS * LOSS_SCALE) * CLIP;

struct Options {
    grad_dtype: u32,
    copy_dtype: Option<u32>,
    gradients: InstepGradients,
    skip: bool,
}

/// The output of a step of plain SGD, by segment; gradients and copy are words of 16 bits.
struct Left {
    params: Vec<f32>,
    grads: Vec<Vec<u16>>,
    copy: Vec<Vec<u16>>,
}

fn words(dtype: u32) -> usize {
    if dtype == INSTEP_DTYPE_F32 { 2 } else { 1 }
}

/// Returns an f32 as words, or only its upper half. The upper half is the value as bf16; as f16 its bits are another
/// value.
fn bits(dtype: u32, value: f32) -> Vec<u16> {
    let [low, high] = [value.to_bits() as u16, (value.to_bits() >> 16) as u16];
    if dtype == INSTEP_DTYPE_F32 { vec![low, high] } else { vec![high] }
}

fn gradients(dtype: u32) -> Vec<u16> {
    (0..ACTIONS.len() * LEN).flat_map(|k| bits(dtype, paint_gradient(1, k / LEN, k % LEN))).collect()
}

fn step(isa: Isa, options: &Options) -> Left {
    let all = ACTIONS.len() * LEN;
    let copy_dtype = options.copy_dtype.unwrap_or(INSTEP_DTYPE_F32);
    let mut params: Vec<f32> = (0..all).map(|k| paint(k / LEN, k % LEN)).collect();
    let mut grads = gradients(options.grad_dtype);
    let mut copy = vec![UNTOUCHED; all * words(copy_dtype)];
    let counts = [1f32, 1.0, 1.0, 0.0].map(|count| match options.grad_dtype {
        INSTEP_DTYPE_BF16 => vec![half::bf16::from_f32(count).to_bits()],
        INSTEP_DTYPE_F16 => vec![half::f16::from_f32(count).to_bits()],
        _ => bits(INSTEP_DTYPE_F32, count),
    });
    let first_param = params.as_mut_ptr();
    let tile = |segment: usize, done: usize| InstepTile {
        param: first_param.wrapping_add(segment * LEN + done).expose_provenance() as u64,
        grad_offset: (segment * LEN + done) as u64,
        state_offset: (segment * LEN + done) as u64,
        element: 0,
        count: (LEN - done).min(INSTEP_TILE_ELEMENTS as usize) as u32,
        record: segment as u32,
        first: (done == 0).into(),
        first_record: segment as u32,
        run: 1,
        bucket: 0,
        reserved: [0; 2],
    };
    let tiles: Vec<_> =
        (0..ACTIONS.len()).flat_map(|s| [tile(s, 0), tile(s, INSTEP_TILE_ELEMENTS as usize)]).collect();
    // SAFETY: plain data, for which zeros are a value; every pointer leads to memory of this function that is as long
    // as the tiles say, and the instruction set is available.
    unsafe {
        let mut control: InstepControl = std::mem::zeroed();
        let mut segments: [InstepRecord; ACTIONS.len()] = std::mem::zeroed();
        for segment in &mut segments {
            (segment.optimizer, segment.grad_dtype) =
                (INSTEP_OPTIMIZER_sgd as u16, options.grad_dtype as u16);
        }
        let mut actions = ACTIONS;
        let mut lr_multipliers = [1.0; ACTIONS.len()];
        let sgd = InstepSgdHyper { lr: 0.5, ..std::mem::zeroed() };
        let begin = InstepBeginArgs {
            control: &mut control,
            records: segments.as_mut_ptr(),
            hypers: &mut InstepHyper { sgd },
            lr_multipliers: lr_multipliers.as_mut_ptr(),
            actions: actions.as_mut_ptr(),
            record_count: ACTIONS.len() as u64,
            norms: std::ptr::null_mut(),
            ring: std::ptr::null(),
            slot_words: 0,
            slot_count: 0,
            divisor: RANKS,
            loss_scale: LOSS_SCALE,
            previous_max_norm: -1.0,
            clip: CLIP,
            grad_scale: std::ptr::null(),
            found_inf: std::ptr::null(),
            further_controls: std::ptr::null_mut(),
            further_count: 0,
        };
        kernels(isa).begin.unwrap()(&begin);
        control.skip = options.skip.into();
        for (segment, count) in segments.iter_mut().zip(&counts) {
            segment.tail = count.as_ptr().expose_provenance() as u64;
        }
        let step = InstepStepArgs {
            control: &mut control,
            records: segments.as_mut_ptr(),
            tiles: tiles.as_ptr(),
            tile_count: tiles.len() as u64,
            param_base: std::ptr::null_mut(),
            grads: grads.as_mut_ptr().cast(),
            master: std::ptr::null_mut(),
            ema: std::ptr::null_mut(),
            scales: [std::ptr::null_mut(); INSTEP_MAX_STATES as usize],
            seed: 0,
            copy: options.copy_dtype.map_or(std::ptr::null_mut(), |_| copy.as_mut_ptr().cast()),
            states: [std::ptr::null_mut(); INSTEP_MAX_STATES as usize],
            optimizer: INSTEP_OPTIMIZER_sgd,
            state_count: 0,
            bucket: 0,
            param_dtype: INSTEP_DTYPE_F32,
            grad_dtype: options.grad_dtype,
            copy_dtype,
            gradients: options.gradients,
            local: 0,
            master_kind: INSTEP_MASTER_NONE,
            moments: INSTEP_MOMENTS_F32,
            stochastic: 0,
            ema_from_sample: 0,
            ema_weight: 0.0,
            norms: std::ptr::null_mut(),
            part: INSTEP_PART_WHOLE,
            share: 0,
        };
        kernels(isa).step.unwrap()(&step, std::ptr::null(), 0, tiles.len() as u64, 0);
    }
    let by_segment = |all: &[u16]| all.chunks(all.len() / ACTIONS.len()).map(<[u16]>::to_vec).collect();
    Left { params, grads: by_segment(&grads), copy: by_segment(&copy) }
}

#[test]
fn zeroing_leaves_zeros_where_a_segment_is_to_be_stepped_and_nowhere_else() {
    for isa in Isa::available() {
        for grad_dtype in [INSTEP_DTYPE_F32, INSTEP_DTYPE_BF16, INSTEP_DTYPE_F16] {
            for skip in [false, true] {
                let left = |gradients| step(isa, &Options { grad_dtype, copy_dtype: None, gradients, skip });
                let (kept, zeroed) = (left(INSTEP_GRADIENTS_KEEP), left(INSTEP_GRADIENTS_ZERO));
                let what = format!("{isa}, dtype {grad_dtype}, skip {skip}");
                assert_eq!(kept.params, zeroed.params, "{what}: the gradients were read first");
                assert!(zeroed.grads[0].iter().all(|word| *word == 0), "{what}");
                assert_eq!(zeroed.grads[1..], kept.grads[1..], "{what}: averaged, frozen, unused");
                let given = gradients(grad_dtype);
                let words = LEN * words(grad_dtype);
                assert_eq!(kept.grads[0], given[..words], "{what}: unasked");
                assert_eq!(kept.grads[2..].concat(), given[2 * words..], "{what}: frozen, unused");
            }
        }
    }
}

/// Returns the value of an element.
fn value(dtype: u32, words: &[u16]) -> f32 {
    match dtype {
        INSTEP_DTYPE_BF16 => half::bf16::from_bits(words[0]).to_f32(),
        INSTEP_DTYPE_F16 => half::f16::from_bits(words[0]).to_f32(),
        _ => f32::from_bits(u32::from(words[1]) << 16 | u32::from(words[0])),
    }
}

fn rounded(dtype: u32, value: f32) -> Vec<u16> {
    match dtype {
        INSTEP_DTYPE_BF16 => vec![half::bf16::from_f32(value).to_bits()],
        INSTEP_DTYPE_F16 => vec![half::f16::from_f32(value).to_bits()],
        _ => bits(dtype, value),
    }
}

#[test]
fn a_mean_is_the_value_that_was_stepped_rounded_once_in_a_skipped_pass_too() {
    for isa in Isa::available() {
        for grad_dtype in [INSTEP_DTYPE_F32, INSTEP_DTYPE_BF16, INSTEP_DTYPE_F16] {
            for skip in [false, true] {
                let left = |gradients| step(isa, &Options { grad_dtype, copy_dtype: None, gradients, skip });
                let (kept, means) = (left(INSTEP_GRADIENTS_KEEP), left(INSTEP_GRADIENTS_AVERAGE));
                let what = format!("{isa}, dtype {grad_dtype}, skip {skip}");
                assert_eq!(kept.params, means.params, "{what}: the sums were read first");
                let multiplier = MULTIPLIER as f32;
                let mean = |sum: &[u16]| rounded(grad_dtype, value(grad_dtype, sum) * multiplier);
                let expected: Vec<u16> = kept.grads[0].chunks(words(grad_dtype)).flat_map(mean).collect();
                assert_eq!(means.grads[0], expected, "{what}");
                assert_ne!(kept.grads[0], expected, "{what}");
                assert_eq!(means.grads[1..], kept.grads[1..], "{what}: averaged, frozen, unused");
            }
        }
    }
}

#[test]
fn a_copy_is_the_stepped_parameter_rounded_to_nearest_even_and_nothing_else_is_written() {
    let formats = Format::both();
    for isa in Isa::available() {
        for copy_dtype in [INSTEP_DTYPE_F32, INSTEP_DTYPE_BF16, INSTEP_DTYPE_F16] {
            for skip in [false, true] {
                let options = |copy_dtype| Options {
                    grad_dtype: INSTEP_DTYPE_F32,
                    copy_dtype,
                    gradients: INSTEP_GRADIENTS_KEEP,
                    skip,
                };
                let (plain, left) = (step(isa, &options(None)), step(isa, &options(Some(copy_dtype))));
                let what = format!("{isa}, dtype {copy_dtype}, skip {skip}");
                assert_eq!(plain.params, left.params, "{what}");
                let narrowed = |x: &f32| match formats.iter().find(|format| format.dtype == copy_dtype) {
                    Some(format) => vec![format.nearest(*x)],
                    None => bits(copy_dtype, *x),
                };
                let stepped: Vec<u16> = left.params[..LEN].iter().flat_map(narrowed).collect();
                let untouched = vec![UNTOUCHED; LEN * words(copy_dtype)];
                assert_eq!(left.copy[0], if skip { untouched.clone() } else { stepped }, "{what}");
                assert!(left.copy[1..].iter().all(|copy| *copy == untouched), "{what}: not stepped");
            }
        }
    }
}
