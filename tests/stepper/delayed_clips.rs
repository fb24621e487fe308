//! Clipping by the norm of the previous pass: the same bits in every mode, and those of a trainer that multiplies by
//! hand.
//!
//! The test computes each coefficient from the status of the previous pass, and compares bits.

use instep::{Clip, Divisor, Mode, Result, Solo, Stepper};

use crate::support::device::cuda;
use crate::support::reference::clip_coefficient;
use crate::support::{
    MODES, Options, Outcome, Presummed, few_optimizers, layout, one_per_state_count, open, paint_gradient,
    paint_params, painted, pass,
};

const LENGTHS: [usize; 4] = [300, 5, 0, 2049];
const MAX_NORM: f64 = 3.0;

fn options(mode: Mode) -> Options {
    Options { mode, cap: Some(1), world_size: 3, ..Options::default() }
}

fn clipping(options: &Options, optim: usize) -> Stepper {
    let layout = layout(&LENGTHS);
    let builder = options.builder(&layout, few_optimizers()[optim]).clip(Clip::Previous(MAX_NORM));
    let mut stepper = builder.host(Presummed(options.world_size)).unwrap();
    paint_params(&mut stepper);
    stepper
}

#[test]
fn each_pass_is_clipped_by_the_norm_before_it_with_the_same_bits_in_every_mode() {
    for optim in 0..one_per_state_count().len() {
        let outcomes = MODES.map(|mode| {
            let options = options(mode);
            let mut stepper = clipping(&options, optim);
            // Fed what is left when the factor has been multiplied in, as the step's kernel does.
            let plain = Options { mode: Mode::Sequential, world_size: 1, ..Options::default() };
            let mut by_hand = open(&layout(&LENGTHS), few_optimizers()[optim], &plain);
            let paint = painted(&options);
            let (mut norm, mut clipped) = (None::<f64>, 0);
            for step in 0..8 {
                let clip = norm.map_or(1.0, |norm| clip_coefficient(norm, MAX_NORM));
                let factor = (1.0 / 3.0 * clip) as f32;
                pass(&mut stepper, &options, |param, values| paint(step, param, values)).unwrap();
                let fed = |param: usize, values: &mut [f32]| {
                    paint(step, param, values);
                    values.iter_mut().for_each(|g| *g *= factor);
                    true
                };
                pass(&mut by_hand, &plain, fed).unwrap();
                let status = stepper.status().unwrap();
                assert_eq!(status.clip, clip, "{mode:?}, step {step}");
                clipped += u32::from(clip < 1.0);
                norm = status.norm;
                assert_eq!(stepper.previous_norm().unwrap(), norm);
            }
            assert!(clipped > 3, "{clipped}: {norm:?}");
            let outcome = Outcome::of(&stepper).unwrap();
            outcome.assert_same(&Outcome::of(&by_hand).unwrap(), &format!("{mode:?} by hand"));
            outcome
        });
        outcomes[1].assert_same(&outcomes[0], "Eager and Sequential");
        outcomes[2].assert_same(&outcomes[0], "Normed and Sequential");
    }
}

#[test]
fn a_norm_that_is_not_finite_or_was_given_up_is_passed_over() {
    for mode in MODES {
        let options = options(mode);
        let mut stepper = clipping(&options, 0);
        let give = |value: f32| {
            move |_: usize, values: &mut [f32]| {
                values.fill(value);
                true
            }
        };
        pass(&mut stepper, &options, give(3.0)).unwrap();
        let norm = stepper.previous_norm().unwrap().unwrap();
        assert!((norm - 2354f64.sqrt()).abs() < 1e-9, "{norm}");
        stepper.begin().unwrap().abandon().unwrap();
        assert_eq!(stepper.previous_norm().unwrap(), Some(norm), "{mode:?}");
        pass(&mut stepper, &options, give(f32::INFINITY)).unwrap();
        assert_eq!(stepper.previous_norm().unwrap(), Some(norm), "{mode:?}");
        pass(&mut stepper, &options, give(1.0)).unwrap();
        assert_eq!(stepper.status().unwrap().clip, clip_coefficient(norm, MAX_NORM), "{mode:?}");
    }
}

#[test]
fn a_loaded_norm_gives_the_bits_of_the_uninterrupted_run() {
    let options = options(Mode::Eager);
    let paint = painted(&options);
    let mut whole = clipping(&options, 0);
    pass(&mut whole, &options, |param, values| paint(0, param, values)).unwrap();
    let mut loaded = clipping(&options, 0);
    loaded.set_previous_norm(whole.previous_norm().unwrap()).unwrap();
    for (id, from) in loaded.layout().clone().ids().zip(Outcome::of(&whole).unwrap().params) {
        loaded.write(id, &from).unwrap();
    }
    for stepper in [&mut whole, &mut loaded] {
        pass(stepper, &options, |param, values| paint(1, param, values)).unwrap();
    }
    assert_eq!(Outcome::of(&loaded).unwrap().params, Outcome::of(&whole).unwrap().params);
    assert!(loaded.set_previous_norm(Some(f64::NAN)).is_err());
}

#[test]
fn a_gpu_and_uneven_inputs_clip_with_the_hosts_bits() {
    for (mode, uneven) in MODES.into_iter().flat_map(|m| [(m, None), (m, Some(Divisor::ContributingRanks))]) {
        let options = Options { uneven, world_size: 1, ..options(mode) };
        let layout = layout(&LENGTHS);
        let mut host = clipping(&options, 3);
        let builder = options.builder(&layout, few_optimizers()[3]).clip(Clip::Previous(MAX_NORM));
        // SAFETY: the stream outlives the stepper, or is the stand-in's, which is a number.
        let mut gpu = unsafe { builder.cuda(Solo::default(), &cuda()).unwrap() };
        paint_params(&mut gpu);
        let gradient = |step: usize| {
            move |param: usize, values: &mut [f32]| {
                values.iter_mut().enumerate().for_each(|(k, g)| *g = paint_gradient(step, param, k));
                true
            }
        };
        for step in 0..5 {
            pass(&mut host, &options, gradient(step)).unwrap();
            pass(&mut gpu, &options, gradient(step)).unwrap();
        }
        assert_eq!(gpu.previous_norm().unwrap(), host.previous_norm().unwrap());
        let (host, gpu) = (Outcome::of(&host).unwrap(), Outcome::of(&gpu).unwrap());
        assert!(host.status.clip < 1.0);
        gpu.assert_same(&host, &format!("{mode:?} {uneven:?}"));
        assert_eq!(gpu.status, host.status);
    }
}

#[test]
fn norms_out_of_range_are_refused() {
    let layout = layout(&[3]);
    let build = |max_norm: f64| -> Result<Stepper> {
        let options = Options { mode: Mode::Normed, ..Options::default() };
        options.builder(&layout, few_optimizers()[0]).clip(Clip::Previous(max_norm)).host(Solo::default())
    };
    assert!(build(1.0).is_ok());
    for max_norm in [0.0, f64::NAN, f64::INFINITY] {
        let error = build(max_norm).unwrap_err().to_string();
        assert!(error.starts_with("clip = Previous("), "{error}");
    }
}

/// The sequence that `Clip::Global` promises: backward, then the norm of everything, then the steps, to the bit. The
/// squares are whole numbers, so the norm is known without the library.
#[test]
fn the_exact_clip_is_the_norm_after_backward_and_the_step_after_it_bit_for_bit() {
    let layout = layout(&LENGTHS);
    for (mode, optim) in
        [Mode::Sequential, Mode::Normed].into_iter().flat_map(|m| [0, 1, 2, 3].map(|k| (m, k)))
    {
        let options = Options { max_norm: Some(MAX_NORM), ..options(mode) };
        let plain = Options { mode: Mode::Sequential, world_size: 1, ..Options::default() };
        let mut clipped = open(&layout, few_optimizers()[optim], &options);
        let mut by_hand = open(&layout, few_optimizers()[optim], &plain);
        for step in 0..5 {
            let whole = |param: usize, k: usize| ((k * 7 + param * 3 + step) % 23) as f32 - 11.0;
            let squares: f64 = (0..LENGTHS.len())
                .flat_map(|param| (0..LENGTHS[param]).map(move |k| (param, k)))
                .map(|(param, k)| f64::from(whole(param, k)).powi(2))
                .sum();
            let norm = (1.0 / 3.0) * squares.sqrt();
            let clip = clip_coefficient(norm, MAX_NORM);
            let factor = (1.0 / 3.0 * clip) as f32;
            let feed = |factor: f32| {
                move |param: usize, values: &mut [f32]| {
                    values.iter_mut().enumerate().for_each(|(k, g)| *g = whole(param, k) * factor);
                    true
                }
            };
            pass(&mut clipped, &options, feed(1.0)).unwrap();
            pass(&mut by_hand, &plain, feed(factor)).unwrap();
            let status = clipped.status().unwrap();
            assert_eq!((status.norm, status.clip), (Some(norm), clip), "{mode:?}, step {step}");
            assert!(clip < 1.0);
        }
        let by_hand = Outcome::of(&by_hand).unwrap();
        Outcome::of(&clipped).unwrap().assert_same(&by_hand, &format!("{mode:?}, optimizer {optim}"));
    }
}
