//! Random bits follow an element's whole number: bits of elements on both sides of number 2^32, and far past it, equal
//! their definition.
//!
//! The definition is repeated in `precision::eight_bit_thresholds`. What is rounded is the f32 result of the same step
//! without rounding. No stepper has so many elements, so the tests call the kernels directly.

use half::bf16;
use instep::Isa;
use instep::abi::*;

use crate::precision::eight_bit_thresholds::{code, random_bits};
use crate::support::entries::kernels;
use crate::support::{paint, paint_gradient};

const LEN: usize = INSTEP_TILE_ELEMENTS as usize;
const BLOCK: usize = INSTEP_QUANTUM as usize;
const SEED: u64 = 0x5eed;
/// The tile's first element: far from a multiple of 2^32, before, at and past one.
const FIRST: [u64; 5] = [2600, (1 << 32) - 700, 3 << 32, (3 << 32) - LEN as u64, (5 << 32) - 1];

#[derive(Clone, Copy, PartialEq)]
struct Format {
    param: InstepDtype,
    moments: InstepMoments,
}

const F32: Format = Format { param: INSTEP_DTYPE_F32, moments: INSTEP_MOMENTS_F32 };
const ROUNDED: [Format; 5] = [
    Format { param: INSTEP_DTYPE_F32, moments: INSTEP_MOMENTS_8BIT },
    Format { param: INSTEP_DTYPE_F32, moments: INSTEP_MOMENTS_BF16 },
    Format { param: INSTEP_DTYPE_BF16, moments: INSTEP_MOMENTS_F32 },
    Format { param: INSTEP_DTYPE_BF16, moments: INSTEP_MOMENTS_BF16 },
    Format { param: INSTEP_DTYPE_BF16, moments: INSTEP_MOMENTS_8BIT },
];

/// Returns the bytes of values in a type.
fn stored(dtype: InstepDtype, values: impl Iterator<Item = f32>) -> Vec<u8> {
    match dtype {
        INSTEP_DTYPE_F32 => values.flat_map(f32::to_ne_bytes).collect(),
        _ => values.flat_map(|x| bf16::from_f32(x).to_ne_bytes()).collect(),
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_ne_bytes(bytes.try_into().unwrap())).collect()
}

/// What a step of Adam leaves: the bytes of the parameter and of both states.
fn step(isa: Isa, format: Format, first: u64) -> [Vec<u8>; 3] {
    let exact = |x: f32| bf16::from_f32(x).to_f32();
    let mut params = stored(format.param, (0..LEN).map(|k| exact(paint(0, k))));
    let mut grads = stored(format.param, (0..LEN).map(|k| exact(paint_gradient(1, 0, k))));
    // Long enough for every format.
    let mut states = [vec![0u8; LEN * 4], vec![0u8; LEN * 4]];
    let mut scales = [[0f32; LEN / BLOCK]; 2];
    // SAFETY: plain data, for which zeros are a value; every pointer leads to memory of this function that is as long
    // as the tile says, and the instruction set is available. What stays zero means: nothing else is done.
    unsafe {
        let tile = InstepTile {
            param: params.as_mut_ptr().expose_provenance() as u64,
            element: first,
            count: LEN as u32,
            first: 1,
            run: 1,
            ..std::mem::zeroed()
        };
        let mut control: InstepControl = std::mem::zeroed();
        let mut record: InstepRecord = std::mem::zeroed();
        (record.optimizer, record.grad_dtype) = (INSTEP_OPTIMIZER_adam as u16, format.param as u16);
        let one = stored(format.param, [1f32].into_iter());
        record.tail = one.as_ptr().expose_provenance() as u64;
        let adam = InstepAdamHyper { lr: 0.01, beta1: 0.5, beta2: 0.75, eps: 1e-8, ..std::mem::zeroed() };
        let begin = InstepBeginArgs {
            control: &mut control,
            records: &mut record,
            hypers: &mut InstepHyper { adam },
            lr_multipliers: &mut 1.0,
            actions: &mut INSTEP_ACTION_STEP.clone(),
            record_count: 1,
            divisor: 1.0,
            loss_scale: 1.0,
            previous_max_norm: -1.0,
            clip: 1.0,
            ..std::mem::zeroed()
        };
        let step = InstepStepArgs {
            control: &mut control,
            records: &mut record,
            tiles: &tile,
            tile_count: 1,
            grads: grads.as_mut_ptr().cast(),
            scales: [scales[0].as_mut_ptr(), scales[1].as_mut_ptr(), std::ptr::null_mut()],
            seed: SEED,
            states: [states[0].as_mut_ptr().cast(), states[1].as_mut_ptr().cast(), std::ptr::null_mut()],
            optimizer: INSTEP_OPTIMIZER_adam,
            state_count: 2,
            param_dtype: format.param,
            grad_dtype: format.param,
            moments: format.moments,
            stochastic: (format != F32).into(),
            ..std::mem::zeroed()
        };
        kernels(isa).begin.unwrap()(&begin);
        kernels(isa).step.unwrap()(&step, std::ptr::null(), 0, 1, 0);
    }
    let [first_state, second_state] = states;
    [params, first_state, second_state]
}

/// Returns the bytes that rounding leaves of one tensor's f32 values; `random` gives an element's bits.
fn rounded(
    is_param: bool,
    format: Format,
    is_signed: bool,
    values: &[f32],
    random: impl Fn(usize) -> u32,
) -> Vec<u8> {
    let is_f32 =
        if is_param { format.param == INSTEP_DTYPE_F32 } else { format.moments == INSTEP_MOMENTS_F32 };
    if is_f32 {
        return stored(INSTEP_DTYPE_F32, values.iter().copied());
    }
    if is_param || format.moments == INSTEP_MOMENTS_BF16 {
        let word = |(k, x): (usize, &f32)| (((x.to_bits() + random(k)) >> 16) as u16).to_ne_bytes();
        return values.iter().enumerate().flat_map(word).collect();
    }
    let block = |(b, block): (usize, &[f32])| {
        let scale = block.iter().fold(0f32, |scale, x| scale.max(x.abs()));
        let element = |(k, x): (usize, &f32)| code(is_signed, *x, scale, Some(random(b * BLOCK + k)));
        block.iter().enumerate().map(element).collect::<Vec<u8>>()
    };
    values.chunks(BLOCK).enumerate().flat_map(block).collect()
}

#[test]
fn elements_past_number_four_billion_are_rounded_by_the_bits_of_their_whole_number() {
    for isa in Isa::available() {
        let results = step(isa, F32, 0).map(|bytes| floats(&bytes));
        for (format, first) in ROUNDED.into_iter().flat_map(|format| FIRST.map(|first| (format, first))) {
            let got = step(isa, format, first);
            for (tensor, (got, values)) in got.iter().zip(&results).enumerate() {
                let random = |k: usize| random_bits(SEED, 1, first + k as u64, tensor as u32);
                let want = rounded(tensor == 0, format, tensor == 1, values, random);
                let what = format!("{isa}, dtype {}, moments {}", format.param, format.moments);
                assert_eq!(got[..want.len()], want[..], "{what}, tensor {tensor} from element {first}");
            }
        }
    }
}
