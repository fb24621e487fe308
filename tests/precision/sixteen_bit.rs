//! The kernels of every instruction set must treat bf16 and f16 as their values, rounded once at the store.
//!
//! The tests call the kernels directly, through the linked C tables, so that no stepper stands between. The meaning of
//! a 16-bit float must come from its definition, not from `kernels/numeric/math.h`.

use instep::Isa;
use instep::abi::*;

use crate::support::entries::kernels;

/// The definition of a 16-bit format: the values of its non-negative bit patterns up to infinity, in order.
pub(crate) struct Format {
    pub dtype: u32,
    values: Vec<f64>,
}

impl Format {
    pub(crate) fn both() -> [Format; 2] {
        [Format::new(INSTEP_DTYPE_BF16, 7, 127), Format::new(INSTEP_DTYPE_F16, 10, 15)]
    }

    fn new(dtype: u32, fraction_bits: u32, bias: i32) -> Format {
        let value = |bits: u32| {
            let (exponent, fraction) = ((bits >> fraction_bits) as i32, bits & ((1 << fraction_bits) - 1));
            let fraction = f64::from(fraction) / f64::from(1 << fraction_bits);
            match exponent {
                0 => fraction * 2f64.powi(1 - bias),
                e => (1.0 + fraction) * 2f64.powi(e - bias),
            }
        };
        // As its bits stand, infinity is the power of two after the largest value: what rounding takes it for.
        let infinity = ((2 * bias + 1) as u32) << fraction_bits;
        Format { dtype, values: (0..=infinity).map(value).collect() }
    }

    pub(crate) fn value(&self, bits: u16) -> f32 {
        let (magnitude, infinity) = (usize::from(bits & 0x7fff), self.values.len() - 1);
        let value = match magnitude.cmp(&infinity) {
            std::cmp::Ordering::Less => self.values[magnitude] as f32,
            std::cmp::Ordering::Equal => f32::INFINITY,
            std::cmp::Ordering::Greater => f32::NAN,
        };
        if bits >> 15 == 0 { value } else { -value }
    }

    /// Rounds to nearest, ties to even; there is one NaN.
    pub(crate) fn nearest(&self, x: f32) -> u16 {
        if x.is_nan() {
            return 0x7fff;
        }
        let (magnitude, infinity) = (f64::from(x.abs()), self.values.len() - 1);
        let below = self.values.partition_point(|&value| value <= magnitude) - 1;
        let up = below < infinity && {
            let (low, high) = (self.values[below], self.values[below + 1]);
            let (down, up) = (magnitude - low, high - magnitude);
            up < down || (up == down && below % 2 == 1)
        };
        (below + usize::from(up)) as u16 | if x.is_sign_negative() { 0x8000 } else { 0 }
    }
}

/// One bucket of one segment; gradients are bits, and 16-bit formats use the low half.
struct Bucket<'a> {
    action: u32,
    lr: f64,
    grad_dtype: u32,
    grads: &'a [u32],
    param_dtype: u32,
    weights: &'a [f32],
}

/// All that Begin, Norm and Step wrote.
#[derive(Debug, PartialEq)]
struct Left {
    weights: Vec<u32>,
    states: [Vec<u32>; 2],
    limbs: [u64; INSTEP_NORM_LIMBS as usize],
    /// The same number for every NaN, whatever its payload.
    max_abs_bits: u32,
    first_nonfinite_bucket: u32,
}

impl Bucket<'_> {
    /// Returns the outcome with the 16-bit parameters and the gradients after the step.
    fn run(&self, isa: Isa) -> (Left, Vec<u16>, Vec<u32>) {
        let count = self.weights.len();
        let mut weights = self.weights.to_vec();
        let mut states = [vec![0.5f32; count], vec![0.25f32; count]];
        let (mut params, mut wide_grads) = (vec![0u16; count], self.grads.to_vec());
        let mut narrow_grads: Vec<u16> = self.grads.iter().map(|&bits| bits as u16).collect();
        let narrow_params = self.param_dtype != INSTEP_DTYPE_F32;
        let narrow = self.grad_dtype != INSTEP_DTYPE_F32;
        let param = if narrow_params { params.as_mut_ptr().cast() } else { weights.as_mut_ptr() };
        let tile = InstepTile {
            param: param.expose_provenance() as u64,
            grad_offset: 0,
            state_offset: 0,
            element: 0,
            count: count as u32,
            record: 0,
            first: 1,
            first_record: 0,
            run: 1,
            bucket: 0,
            reserved: [0; 2],
        };
        // SAFETY: plain data, for which zeros are a value; every pointer leads to memory of this function that is as
        // long as the one tile says, and all instruction sets asked for are available.
        let control = unsafe {
            let (mut control, mut segment): (InstepControl, InstepRecord) = std::mem::zeroed();
            (segment.optimizer, segment.grad_dtype) = (INSTEP_OPTIMIZER_adam as u16, self.grad_dtype as u16);
            let adam =
                InstepAdamHyper { lr: self.lr, beta1: 0.9, beta2: 0.99, eps: 1e-8, ..std::mem::zeroed() };
            let begin = InstepBeginArgs {
                control: &mut control,
                records: &mut segment,
                hypers: &mut InstepHyper { adam },
                lr_multipliers: &mut 1.0,
                actions: &mut { self.action },
                record_count: 1,
                norms: std::ptr::null_mut(),
                ring: std::ptr::null(),
                slot_words: 0,
                slot_count: 0,
                divisor: 2.0,
                loss_scale: 1.0,
                previous_max_norm: -1.0,
                clip: 1.0,
                grad_scale: std::ptr::null(),
                found_inf: std::ptr::null(),
                further_controls: std::ptr::null_mut(),
                further_count: 0,
            };
            let step = InstepStepArgs {
                control: &mut control,
                records: &mut segment,
                tiles: &tile,
                tile_count: 1,
                param_base: std::ptr::null_mut(),
                grads: if narrow { narrow_grads.as_mut_ptr().cast() } else { wide_grads.as_mut_ptr().cast() },
                master: if narrow_params { weights.as_mut_ptr().cast() } else { std::ptr::null_mut() },
                copy: std::ptr::null_mut(),
                ema: std::ptr::null_mut(),
                scales: [std::ptr::null_mut(); INSTEP_MAX_STATES as usize],
                seed: 0,
                states: [states[0].as_mut_ptr().cast(), states[1].as_mut_ptr().cast(), std::ptr::null_mut()],
                optimizer: INSTEP_OPTIMIZER_adam,
                state_count: 2,
                bucket: 5,
                param_dtype: self.param_dtype,
                grad_dtype: self.grad_dtype,
                copy_dtype: INSTEP_DTYPE_F32,
                gradients: INSTEP_GRADIENTS_KEEP,
                local: 0,
                master_kind: if narrow_params { INSTEP_MASTER_F32 } else { INSTEP_MASTER_NONE },
                moments: INSTEP_MOMENTS_F32,
                stochastic: 0,
                ema_from_sample: 0,
                ema_weight: 0.0,
                norms: std::ptr::null_mut(),
                part: INSTEP_PART_WHOLE,
                share: 0,
            };
            kernels(isa).begin.unwrap()(&begin);
            kernels(isa).norm.unwrap()(&step, std::ptr::null(), 0, 1);
            kernels(isa).step.unwrap()(&step, std::ptr::null(), 0, 1, 0);
            control
        };
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
        let left = Left {
            weights: bits(&weights),
            states: [bits(&states[0]), bits(&states[1])],
            limbs: control.limbs,
            max_abs_bits: control.max_abs_bits,
            first_nonfinite_bucket: control.first_nonfinite_bucket,
        };
        let grads = if narrow { narrow_grads.into_iter().map(u32::from).collect() } else { wide_grads };
        (left, params, grads)
    }
}

/// Returns every bit pattern of 16 bits, first in runs of odd lengths, then in whole tiles.
fn runs() -> impl Iterator<Item = Vec<u32>> {
    let mut start = 0;
    [1, 3, 255, 257, 700].into_iter().chain([INSTEP_TILE_ELEMENTS; 32]).map(move |count| {
        start += count;
        (start - count..start).map(|bits| bits & 0xffff).collect()
    })
}

#[test]
fn a_sixteen_bit_gradient_steps_and_counts_in_the_norm_as_its_value_does_in_f32() {
    for (isa, format) in Isa::available().into_iter().flat_map(|isa| Format::both().map(|f| (isa, f))) {
        for narrow in runs() {
            let wide: Vec<u32> = narrow.iter().map(|&bits| format.value(bits as u16).to_bits()).collect();
            let weights: Vec<f32> = (0..narrow.len()).map(|i| i as f32 * 0.25 - 99.0).collect();
            for action in [INSTEP_ACTION_STEP, INSTEP_ACTION_AVERAGE] {
                let bucket = |grad_dtype, grads| Bucket {
                    action,
                    lr: 0.125,
                    grad_dtype,
                    grads,
                    param_dtype: INSTEP_DTYPE_F32,
                    weights: &weights,
                };
                let (ours, _, our_grads) = bucket(format.dtype, &narrow).run(isa);
                let (theirs, _, their_grads) = bucket(INSTEP_DTYPE_F32, &wide).run(isa);
                assert_eq!(ours, theirs, "{isa}, dtype {}, from {:#x}", format.dtype, narrow[0]);
                if action == INSTEP_ACTION_AVERAGE {
                    let rounded = their_grads.iter().map(|&bits| format.nearest(f32::from_bits(bits)).into());
                    assert_eq!(our_grads, rounded.collect::<Vec<u32>>(), "{isa}, dtype {}", format.dtype);
                } else {
                    assert_eq!(our_grads, narrow, "a step leaves gradients alone");
                }
            }
        }
    }
}

#[test]
fn a_sixteen_bit_parameter_is_its_f32_master_rounded_to_nearest_even() {
    for (isa, format) in Isa::available().into_iter().flat_map(|isa| Format::both().map(|f| (isa, f))) {
        for patterns in runs() {
            // Around every 16-bit value, half-way to the next one among them, and with it every exponent of f32.
            let near = |&bits: &u32| {
                let value = format.value(bits as u16).to_bits();
                let half_way = if format.dtype == INSTEP_DTYPE_BF16 { 0x8000 } else { 0x1000 };
                f32::from_bits(
                    [value, value | half_way, value | (half_way + 1), bits << 16 | 0x8001][bits as usize % 4],
                )
            };
            let weights: Vec<f32> = patterns.iter().map(near).collect();
            let grads = vec![0u32; weights.len()];
            // A rate of zero leaves the weights where they are, ties included; the other one moves them.
            for lr in [0.0, 0.125] {
                let bucket = |param_dtype| Bucket {
                    action: INSTEP_ACTION_STEP,
                    lr,
                    grad_dtype: INSTEP_DTYPE_F32,
                    grads: &grads,
                    param_dtype,
                    weights: &weights,
                };
                let (ours, params, _) = bucket(format.dtype).run(isa);
                let (theirs, ..) = bucket(INSTEP_DTYPE_F32).run(isa);
                assert_eq!(ours, theirs, "{isa}, dtype {}: the master is stepped as f32", format.dtype);
                let rounded = theirs.weights.iter().map(|&bits| format.nearest(f32::from_bits(bits)));
                assert_eq!(params, rounded.collect::<Vec<u16>>(), "{isa}, dtype {}", format.dtype);
            }
        }
    }
}

#[test]
fn the_definition_of_the_formats_knows_its_own_edges() {
    let [bf16, f16] = Format::both();
    assert_eq!(
        (bf16.nearest(f32::MAX), bf16.nearest(1.0 + 2f32.powi(-8)), bf16.nearest(-0.0)),
        (0x7f80, 0x3f80, 0x8000)
    );
    assert_eq!(
        (f16.nearest(65519.0), f16.nearest(65520.0), f16.nearest(2f32.powi(-25))),
        (0x7bff, 0x7c00, 0)
    );
    assert_eq!((f16.value(1), f16.value(0x7bff), bf16.value(0xc000)), (2f32.powi(-24), 65504.0, -2.0));
}
