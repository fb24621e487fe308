//! Every kind of f32 goes through every build of the kernels: zeros, subnormals, huge values, infinities, NaNs, noise.
//!
//! Most updates have no meaning, but they must be the same everywhere, and stored NaNs must be the canonical pattern.
//! Inputs are bit patterns, so a thread that flushes subnormals passes the same inputs.

use instep::abi::{InstepControl, InstepDecideArgs};
use instep::{Adadelta, Adagrad, Adam, AdamW, Adamax, Isa, RmsProp, Sgd};

use crate::support::entries::kernels;
use crate::support::{Optim, Options, Outcome, Presummed, layout, optimizers, pass};

pub(crate) const SPECIAL: [u32; 24] = [
    0x0000_0000, // 0
    0x8000_0000, // -0
    0x0000_0001, // the smallest subnormal
    0x8000_0001,
    0x0040_0000, // a subnormal in the middle
    0x007f_ffff, // the largest subnormal
    0x807f_ffff,
    0x0080_0000, // the smallest normal
    0x8080_0000,
    0x1f80_0000, // 2^-64: its square is subnormal
    0x2000_0001, // 2^-63 and an ulp
    0x3f80_0000, // 1
    0xbf80_0000,
    0x3f80_0001,
    0x5f80_0000, // 2^64: its square overflows
    0xdf80_0000,
    0x7f7f_ffff, // the largest
    0xff7f_ffff,
    0x7f80_0000, // infinity
    0xff80_0000,
    0x7fc0_0000, // NaN, quiet
    0xffc0_0000, // NaN as x86 makes it
    0x7f80_0001, // NaN, signalling
    0xffff_ffff,
];

const CANONICAL_NAN: u32 = 0x7fff_ffff;
const SEED: u64 = 0x1257_e9b1_7c0d_e5ed;
const RANDOM: usize = 1 << 20;

/// The bits of the parameters, and those of the gradients of each step.
struct Inputs {
    params: Vec<u32>,
    gradients: Vec<Vec<u32>>,
}

impl Inputs {
    /// Pairs every special parameter with every special gradient; later steps shift the gradients, so that every pair
    /// of successive gradients occurs.
    fn special() -> Inputs {
        let n = SPECIAL.len();
        let pairs = || (0..n * n).map(move |k| (k / n, k % n));
        let gradient = |step: usize| pairs().map(|(p, g)| SPECIAL[(g + step * (p + 1)) % n]).collect();
        Inputs {
            params: pairs().map(|(p, _)| SPECIAL[p]).collect(),
            gradients: (0..4).map(gradient).collect(),
        }
    }

    /// Returns uniform bits: every exponent is equally frequent. The generator is splitmix64 (Steele et al., 2014).
    fn random() -> Inputs {
        let mut state = SEED;
        let mut next = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((z ^ (z >> 31)) >> 32) as u32
        };
        let mut draw = || (0..RANDOM).map(|_| next()).collect();
        Inputs { params: draw(), gradients: vec![draw(), draw()] }
    }

    fn run(&self, optim: Optim, isa: Isa) -> Outcome {
        let options = Options { isa: Some(isa), threads: Some(2), world_size: 3, ..Options::default() };
        let layout = layout(&[self.params.len()]);
        let mut stepper = options.stepper(&layout, optim, Presummed(options.world_size)).unwrap();
        copy_bits(&self.params, stepper.view_mut::<f32>(layout.id("p0").unwrap()).unwrap());
        for gradient in &self.gradients {
            let feed = |_: usize, values: &mut [f32]| {
                copy_bits(gradient, values);
                true
            };
            pass(&mut stepper, &options, feed).unwrap();
        }
        Outcome::of(&stepper).unwrap()
    }
}

fn copy_bits(bits: &[u32], values: &mut [f32]) {
    values.iter_mut().zip(bits).for_each(|(value, bits)| *value = f32::from_bits(*bits));
}

/// Returns all values and states that the step stores.
fn stored(outcome: &Outcome) -> impl Iterator<Item = &f32> {
    outcome.params.iter().chain(outcome.states.iter().flatten()).flatten()
}

fn assert_same_everywhere(inputs: &Inputs, optims: impl IntoIterator<Item = Optim>, what: &str) {
    for optim in optims {
        let expected = inputs.run(optim, Isa::Baseline);
        let canonical = |x: &f32| !x.is_nan() || x.to_bits() == CANONICAL_NAN;
        assert!(stored(&expected).all(canonical), "a NaN is not canonical: {optim:?}, {what}");
        for isa in Isa::available().into_iter().filter(|isa| *isa != Isa::Baseline) {
            inputs.run(optim, isa).assert_same(&expected, &format!("{isa}, {optim:?}, {what}"));
        }
    }
}

#[test]
fn special_values_give_the_same_bits_on_every_instruction_set() {
    assert_same_everywhere(&Inputs::special(), optimizers(), "special values");
}

#[test]
fn random_bit_patterns_give_the_same_bits_on_every_instruction_set() {
    let everything = [
        Optim::of(Sgd { lr: 0.05, momentum: 0.9, dampening: 0.3, weight_decay: 0.04, ..Sgd::default() }),
        Optim::of(Adam { weight_decay: 0.04, maximize: true, ..Adam::default() }),
        Optim::of(AdamW { amsgrad: true, ..AdamW::default() }),
        Optim::of(Adagrad { initial_accumulator_value: 0.5, weight_decay: 0.04, ..Adagrad::default() }),
        Optim::of(RmsProp { momentum: 0.9, centered: true, weight_decay: 0.04, ..RmsProp::default() }),
        Optim::of(Adadelta { weight_decay: 0.04, ..Adadelta::default() }),
        Optim::of(Adamax { weight_decay: 0.04, ..Adamax::default() }),
    ];
    assert_same_everywhere(&Inputs::random(), everything, &format!("splitmix64 from seed {SEED:#x}"));
}

#[test]
fn subnormals_are_neither_flushed_nor_read_as_zero() {
    let sgd = Optim::of(Sgd { lr: 0.5, ..Sgd::default() });
    let tiny =
        Inputs { params: vec![0x0000_0005, 0x0080_0000], gradients: vec![vec![0x0000_000c, 0x0080_0000]] };
    // World 3: p - 0.5 * (g / 3), and 2^-126 - 0.5 * 2^-126/3 with its quotient and half rounded as subnormals.
    let third = 2_796_203; // 2^23 / 3, rounded
    for isa in Isa::available() {
        let outcome = tiny.run(sgd, isa);
        let bits: Vec<u32> = outcome.params[0].iter().map(|p| p.to_bits()).collect();
        assert_eq!(bits, [3, (1 << 23) - third / 2 - 1], "{isa}"); // half of an odd number, rounded to even
    }
}

/// A machine whose NaNs differ must publish the canonical NaN.
#[test]
fn what_decide_stores_for_a_nan_is_canonical_too() {
    for isa in Isa::available() {
        // The first is clipped by a NaN norm, the second has infinity divided by infinity.
        for (max_abs_bits, max_norm) in [(0x7f80_0001, 0.5), (0x7f80_0000, f64::INFINITY)] {
            // SAFETY: zeros are a value of the block, the entry touches nothing else, and the set is available.
            let control = unsafe {
                let mut control =
                    InstepControl { max_abs_bits, divisor: 2.0, loss_scale: 1.0, ..std::mem::zeroed() };
                let (contributors, skip_nonfinite) = (std::ptr::null(), 0);
                kernels(isa).decide.unwrap()(&InstepDecideArgs {
                    control: &mut control,
                    contributors,
                    max_norm,
                    skip_nonfinite,
                    growth_factor: 1.0,
                    backoff_factor: 1.0,
                    largest_loss_scale: 0.0,
                    growth_interval: 0,
                    pass_control: std::ptr::null_mut(),
                    bucket: 0,
                    grad_dtype: instep::abi::INSTEP_DTYPE_F32,
                    found_inf: std::ptr::null_mut(),
                    set_controls: std::ptr::null_mut(),
                    set_count: 0,
                });
                control
            };
            let stored = (control.clip.to_bits(), control.multiplier.to_bits());
            assert_eq!(stored, (0x7ff8_0000_0000_0000, CANONICAL_NAN), "{isa}, {max_abs_bits:#x}");
        }
    }
}

/// SSE's control and status register: a test may change how its own thread computes.
#[cfg(target_arch = "x86_64")]
mod mxcsr {
    use super::*;
    use std::arch::asm;
    use std::hint::black_box;

    const FLUSH_TO_ZERO_AND_DENORMALS_ARE_ZERO: u32 = 0x8040;
    const ROUND_TOWARDS_ZERO: u32 = 0x6000;

    fn get() -> u32 {
        let mut value = 0u32;
        // SAFETY: stores four bytes to a live u32.
        unsafe { asm!("stmxcsr [{}]", in(reg) &mut value, options(nostack, preserves_flags)) };
        value
    }

    fn set(value: u32) {
        // SAFETY: loads four bytes from a live u32; only documented bits are ever set. The compiler assumes the
        // default environment, which is why callers do no arithmetic of their own in between.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &value, options(nostack, preserves_flags, readonly)) };
    }

    /// Runs `work` in a separate thread with these bits set, as a library linked with -ffast-math would set them.
    fn with_bits<T: Send>(bits: u32, work: impl FnOnce() -> T + Send) -> T {
        let in_thread = || {
            let default = get();
            set(default | bits);
            let result = work();
            let after = get();
            set(default);
            assert_eq!(after & bits, bits, "the caller's environment is the caller's");
            result
        };
        std::thread::scope(|scope| scope.spawn(in_thread).join().unwrap())
    }

    #[test]
    fn the_trick_of_these_tests_does_flush_and_does_round() {
        // The outer black_box keeps the operation from sinking below the restored environment.
        let half_of_smallest_normal = || black_box(black_box(f32::MIN_POSITIVE) * black_box(0.5)).to_bits();
        let two_thirds = || black_box(black_box(2f32) / black_box(3f32)).to_bits();
        assert_eq!(with_bits(0, half_of_smallest_normal), 0x0040_0000);
        assert_eq!(with_bits(FLUSH_TO_ZERO_AND_DENORMALS_ARE_ZERO, half_of_smallest_normal), 0);
        assert_eq!(with_bits(0, two_thirds), with_bits(ROUND_TOWARDS_ZERO, two_thirds) + 1);
    }

    #[test]
    fn the_callers_floating_point_environment_reaches_no_kernel() {
        let inputs = Inputs::special();
        for optim in optimizers() {
            for isa in Isa::available() {
                let expected = inputs.run(optim, isa);
                for bits in [FLUSH_TO_ZERO_AND_DENORMALS_ARE_ZERO, ROUND_TOWARDS_ZERO] {
                    // The stepper is built, run and dropped inside: its threads inherit these bits.
                    let got = with_bits(bits, || inputs.run(optim, isa));
                    got.assert_same(&expected, &format!("MXCSR with {bits:#x}, {isa}, {optim:?}"));
                }
            }
        }
    }
}
