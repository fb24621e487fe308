//! 8-bit codes equal their definition by roots bit for bit, above all near the thresholds between codes.
//!
//! Some of the kernels' loops compare with thresholds instead of taking roots. The definition is repeated here in Rust,
//! whose root and division are correctly rounded as well. The tests must compare codes, not values: a code beside the
//! right one is within the bounds of `precision::eight_bit`.

use std::thread;

use instep::{
    Adagrad, DType, Isa, Master, Moments, Optimizer as _, ParamId, Precision, Rounding, Sgd, Solo, Stepper,
    StepperBuilder,
};

use crate::precision::eight_bit::{Coded, KINDS};
use crate::precision::low_precision_states::is_refused;
use crate::support::reference::Rule;
use crate::support::stored::stored_param;
use crate::support::{Optim, layout, optimizers, paint, paint_gradient};

const BLOCK: usize = 256;

fn largest_code(is_signed: bool) -> f32 {
    if is_signed { 127.0 } else { 255.0 }
}

/// Returns the scale for which a value equals the power of its code.
fn scale_of_powers(is_signed: bool) -> f32 {
    if is_signed { 16129.0 } else { 65536.0 }
}

fn root(is_signed: bool, power: f32) -> f32 {
    if is_signed { power.sqrt() } else { power.sqrt().sqrt() * 15.9375 }
}

/// Rounds to the nearest whole number, ties to even; the constant leaves no bit for a fraction.
fn whole(x: f32) -> f32 {
    (x + 12_582_912.0) - 12_582_912.0
}

fn whole_below(x: f32) -> f32 {
    whole(if x < 0.5 { 0.0 } else { x - 0.5 })
}

fn power(is_signed: bool, code: f32) -> f32 {
    if is_signed {
        return code * code;
    }
    let root = code * f32::from_bits(0x3d80_8081);
    (root * root) * (root * root)
}

/// Computes a code by the definition in kernels/numeric/codes.h.
pub(crate) fn code(is_signed: bool, x: f32, scale: f32, random: Option<u32>) -> u8 {
    let size = if is_signed { x.abs() } else { x };
    let of_x = size * (scale_of_powers(is_signed) / scale);
    let root = root(is_signed, of_x);
    let drawn = |random: u32| {
        let below = whole_below(root);
        let [low, high] = [below, below + 1.0].map(|code| power(is_signed, code));
        if of_x - low > random as f32 / 65536.0 * (high - low) { below + 1.0 } else { below }
    };
    let code = random.map_or_else(|| whole(root), drawn);
    let most = largest_code(is_signed);
    let code = if size == scale { most } else { code.min(most) };
    match is_signed {
        true if x.is_sign_negative() => -(code as i8) as u8,
        true => code as u8,
        false => (code as u8).max((x > 0.0).into()),
    }
}

/// Computes the bits of kernels/numeric/random.h.
pub(crate) fn random_bits(seed: u64, update: u64, element: u64, stream: u32) -> u32 {
    let mut x = seed.wrapping_add(update.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^= x >> 31;
    let upper_word = (element >> 32) as u32;
    let mut y = element as u32 ^ upper_word.wrapping_mul(0x9e37_79b9).wrapping_add(x as u32);
    y = (y ^ y >> 16).wrapping_mul(0x7feb_352d);
    y ^= ((x >> 32) as u32).wrapping_add(stream.wrapping_mul(0x85eb_ca6b));
    (y ^ y >> 15).wrapping_mul(0x846c_a68b) >> 16
}

/// Returns the smallest power for which `reaches` holds; it then holds for all larger ones.
fn least(reaches: impl Fn(f32) -> bool) -> u32 {
    let (mut low, mut high) = (0, 65537f32.to_bits());
    while low < high {
        let middle = low.midpoint(high);
        if reaches(f32::from_bits(middle)) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}

/// Returns the points where the rounded root, or its floor, changes.
fn thresholds(is_signed: bool, of_floor: bool) -> Vec<u32> {
    let rounded = |power: f32| match root(is_signed, power) {
        root if of_floor => whole_below(root),
        root => whole(root),
    };
    (1..=largest_code(is_signed) as u32 - 1)
        .map(|code| least(|power| rounded(power) >= code as f32))
        .collect()
}

/// Returns values next to thresholds, one in each vector of sixteen, in a changing lane; a block's first element is the
/// scale.
fn next_to(thresholds: &[u32], scale: f32, values: usize) -> Vec<f32> {
    let mut next = (0..).flat_map(|at: usize| {
        let threshold = thresholds[at % thresholds.len()];
        (threshold - 12..threshold + 12).map(f32::from_bits)
    });
    let value = |k: usize| match k % BLOCK {
        0 => scale,
        at if at % 16 == k / BLOCK % 15 + 1 => next.next().unwrap(),
        _ => paint(3, k).abs() * scale,
    };
    (0..values).map(value).collect()
}

#[test]
fn codes_next_to_every_threshold_are_those_of_the_roots() {
    for is_signed in KINDS {
        let scale = scale_of_powers(is_signed);
        let mut values = next_to(&thresholds(is_signed, false), scale, 420 * BLOCK + 85);
        for x in values.iter_mut().skip(1).step_by(2).filter(|_| is_signed) {
            *x = -*x;
        }
        let codes: Vec<u8> = values.iter().map(|x| code(is_signed, *x, scale, None)).collect();
        for isa in Isa::available() {
            let got = Coded::encode(isa, is_signed, &values).codes;
            let wrong = (0..values.len()).find(|k| got[*k] != codes[*k]);
            assert_eq!(
                wrong,
                None,
                "{isa}, signed: {is_signed}, {:?}",
                wrong.map(|k| (values[k], got[k], codes[k]))
            );
        }
    }
}

/// Returns a state after the first step from these gradients.
fn first_state(
    builder: StepperBuilder<'_>,
    id: ParamId,
    name: &str,
    isa: Isa,
    gradients: &[f32],
) -> Vec<f32> {
    let mut stepper = builder.isa(isa).host(Solo::default()).unwrap();
    let mut pass = stepper.begin().unwrap();
    pass.write(id.grad(), gradients).unwrap();
    pass.finish().unwrap();
    let mut state = vec![0.0; gradients.len()];
    stepper.read(id.state(name), &mut state).unwrap();
    state
}

/// Some of a million draws are so extreme that a threshold and the exact root could differ.
#[test]
fn draws_next_to_every_code_are_those_of_the_roots() {
    const ELEMENTS: usize = 4096 * BLOCK;
    let layout = layout(&[ELEMENTS]);
    let id = layout.id("p0").unwrap();
    let seed = 0x5eed;
    let precision =
        Precision { moments: Moments::EightBit, rounding: Rounding::Stochastic { seed }, ..Precision::F32 };
    let (sgd, adagrad) = (Sgd { momentum: 0.9, lr: 0.0, ..Sgd::default() }, Adagrad::default());
    for is_signed in KINDS {
        let scale = scale_of_powers(is_signed);
        let powers = next_to(&thresholds(is_signed, true), scale, ELEMENTS);
        // Adagrad's first sum is the gradient's square.
        let gradients: Vec<f32> = powers.iter().map(|x| if is_signed { *x } else { x.sqrt() }).collect();
        let values: Vec<f32> = gradients.iter().map(|g| if is_signed { *g } else { g * g }).collect();
        let stored = |k: usize| {
            let code = code(is_signed, values[k], scale, Some(random_bits(seed, 1, k as u64, 1)));
            let root = if is_signed {
                f32::from(code as i8) * (1.0 / 127.0)
            } else {
                f32::from(code) * (1.0 / 255.0)
            };
            if is_signed { root * root.abs() * scale } else { (root * root) * (root * root) * scale }
        };
        for isa in Isa::available() {
            let state = if is_signed {
                (Stepper::builder(&layout, sgd), sgd.state_names()[0])
            } else {
                (Stepper::builder(&layout, adagrad), adagrad.state_names()[0])
            };
            let got = first_state(state.0.precision(precision), id, state.1, isa, &gradients);
            let wrong = (0..ELEMENTS).find(|k| got[*k] != stored(*k));
            assert_eq!(
                wrong,
                None,
                "{isa}, signed: {is_signed}, {:?}",
                wrong.map(|k| (values[k], got[k], stored(k)))
            );
        }
    }
}

/// The kernels' loops draw the code of a block's largest element as every other code, without a case for it.
#[test]
fn every_draw_gives_the_largest_element_the_largest_code() {
    for is_signed in KINDS {
        let most = largest_code(is_signed);
        let [low, high] = [most - 1.0, most].map(|code| power(is_signed, code));
        // Another exponent changes no rounding.
        for scale in (0..1 << 23).map(|mantissa| f32::from_bits(1f32.to_bits() | mantissa)) {
            let of_largest = scale * (scale_of_powers(is_signed) / scale);
            assert!(whole_below(root(is_signed, of_largest)) >= most - 1.0, "signed: {is_signed}, {scale:e}");
            assert!(of_largest - low > 65535.0 / 65536.0 * (high - low), "signed: {is_signed}, {scale:e}");
        }
    }
}

/// Trains a parameter of `length` elements, and returns the first `kept` elements of the parameter, its master and each
/// state. The last gradient of one block has a NaN, and that of another an infinity.
fn trained(builder: StepperBuilder<'_>, isa: Isa, param: DType, length: usize, kept: usize) -> Vec<Vec<u32>> {
    let mut stepper = builder.isa(isa).host(Solo::default()).unwrap();
    let id = stepper.layout().id("p0").unwrap();
    stepper.write(id, &(0..length).map(|k| paint(0, k)).collect::<Vec<f32>>()).unwrap();
    for at in 0..8 {
        // Of one block the gradients are zeros, and of another they are so small that its states are.
        let size = |k: usize| [1.0, 0.0, 1e-30, 3.0][k / BLOCK % 4];
        let mut gradient: Vec<f32> = (0..length).map(|k| paint_gradient(at, 0, k) * size(k)).collect();
        if at == 7 {
            (gradient[BLOCK / 2], gradient[4 * BLOCK - 1]) = (f32::NAN, f32::NEG_INFINITY);
        }
        let mut pass = stepper.begin().unwrap();
        pass.write(id.grad(), &gradient).unwrap();
        pass.finish().unwrap();
        assert_eq!(stepper.status().unwrap().first_nonfinite_bucket.is_some(), at == 7);
    }
    let names = stepper.state_names(id).unwrap();
    let mut values = vec![0.0f32; length];
    let mut tensors = vec![stored_param(&stepper, id, param).unwrap()[..kept].to_vec()];
    stepper.read(id, &mut values).unwrap();
    tensors.push(values[..kept].iter().map(|x| x.to_bits()).collect());
    for name in names {
        stepper.read(id.state(&name), &mut values).unwrap();
        tensors.push(values[..kept].iter().map(|x| x.to_bits()).collect());
    }
    tensors
}

/// Whole blocks may have a special loop, which a tile with a partial block does not use. The loop reads and writes some
/// 16-bit tensors itself.
#[test]
fn whole_blocks_are_stepped_to_the_bits_of_a_tile_that_ends_in_a_partial_block() {
    let nearest = Precision { moments: Moments::EightBit, ..Precision::F32 };
    let stochastic = Precision { rounding: Rounding::Stochastic { seed: 9 }, ..nearest };
    let bf16 = |precision| Precision { param: DType::BF16, grad: DType::BF16, ..precision };
    let remainders = Precision { master: Master::Remainder16, ..bf16(nearest) };
    let precisions = [nearest, stochastic, remainders, bf16(stochastic), bf16(nearest)];
    // LAMB's step depends on norms of the whole parameter.
    let takes =
        |optim: &Optim| !is_refused(*optim, Moments::EightBit) && !matches!(optim.rule(), Rule::Lamb(_));
    for optim in optimizers().into_iter().filter(takes) {
        for (precision, isa) in
            precisions.into_iter().flat_map(|p| Isa::available().into_iter().map(move |isa| (p, isa)))
        {
            let kept = 7 * BLOCK;
            let [whole, partial] = [kept + BLOCK, kept + BLOCK - 1].map(|length| {
                let layout = layout(&[length]);
                trained(optim.builder(&layout).precision(precision), isa, precision.param, length, kept)
            });
            assert!(whole == partial, "{optim:?}, {precision:?}, {isa}");
        }
    }
}

#[test]
#[ignore = ".ci/run: a lane of its own, since this takes a minute"]
fn every_f32_gets_the_code_of_its_root() {
    let threads = thread::available_parallelism().map_or(1, |threads| threads.get() as u32);
    for (isa, is_signed) in Isa::available().into_iter().flat_map(|isa| KINDS.map(|kind| (isa, kind))) {
        let scale = scale_of_powers(is_signed);
        // Blocks of the scale and 255 powers. A code depends on the power and on the sign alone.
        let run = |part: u32| {
            let mut values = vec![scale; 64 * BLOCK];
            let per_run = 64 * (BLOCK as u32 - 1);
            let last = scale.to_bits();
            for first in (0..last).step_by(per_run as usize).filter(|first| first / per_run % threads == part)
            {
                let mut bits = first;
                for block in values.chunks_mut(BLOCK) {
                    for x in &mut block[1..] {
                        *x = f32::from_bits(bits.min(last));
                        bits += 1;
                    }
                }
                let codes = Coded::encode(isa, is_signed, &values).codes;
                for (x, got) in values.iter().zip(&codes) {
                    let expected = code(is_signed, *x, scale, None);
                    assert_eq!(*got, expected, "{isa}, signed: {is_signed}, {x:e}");
                }
            }
        };
        thread::scope(|scope| (0..threads).for_each(|part| drop(scope.spawn(move || run(part)))));
    }
}
