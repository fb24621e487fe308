//! A launch steps several buckets: it has the bits, the states and the named bucket of separate launches.
//!
//! The host steps each bucket separately, so a GPU, or the stand-in for its driver, is compared with the host.
//! `cuda::driver_calls` and `cuda::gpu::calls` count the launches.

use instep::op::{Action, Op};
use instep::{AdamW, DType, Mode, Moments, Precision, StepperBuilder, Unused};

use crate::support::device::cuda;
use crate::support::{
    Optim, Options, Outcome, Presummed, few_optimizers, layout, paint_params, painted, pass,
};

/// Each parameter is one bucket, except the empty one. Most lengths are multiples of neither a tile nor an aligned
/// word.
const LENGTHS: [usize; 7] = [300, 5000, 0, 2049, 7, 4096, 1021];
const PASSES: usize = 4;
/// A parameter that is frozen in the second and third pass; its bucket ends a shared launch.
const FROZEN: usize = 3;

type Build = for<'a> fn(StepperBuilder<'a>) -> StepperBuilder<'a>;

fn options(mode: Mode) -> Options {
    let max_norm = (mode == Mode::Normed).then_some(0.5);
    Options {
        mode,
        max_norm,
        cap: Some(1),
        world_size: 3,
        record: true,
        unused: Unused::Skip,
        ..Options::default()
    }
}

/// Trains on the host and on the GPU, and compares both after each pass. Returns how many steps shared a launch.
fn shared(
    optim: Optim,
    options: &Options,
    build: Build,
    gradient: impl Fn(usize, usize, &mut [f32]) -> bool,
    what: &str,
) -> usize {
    let layout = layout(&LENGTHS);
    let sums = || Presummed(options.world_size);
    let mut host = build(options.builder(&layout, optim)).host(sums()).unwrap();
    // SAFETY: the trainer's stream is the default one, or the stand-in's, which is a number.
    let mut gpu = unsafe { build(options.builder(&layout, optim)).cuda(sums(), &cuda()) }.unwrap();
    paint_params(&mut host);
    paint_params(&mut gpu);
    let frozen = layout.ids().nth(FROZEN).unwrap();
    for step in 0..PASSES {
        if step % 2 == 1 {
            host.set_frozen(frozen, step == 1).unwrap();
            gpu.set_frozen(frozen, step == 1).unwrap();
        }
        let is_given = |param: usize| param != FROZEN || !host.is_frozen(frozen).unwrap();
        let given: Vec<bool> = (0..LENGTHS.len()).map(is_given).collect();
        let gradient = |param: usize, values: &mut [f32]| given[param] && gradient(step, param, values);
        pass(&mut host, options, gradient).unwrap();
        pass(&mut gpu, options, gradient).unwrap();
        let (host, gpu) = (Outcome::of(&host).unwrap(), Outcome::of(&gpu).unwrap());
        gpu.assert_same(&host, &format!("{what}, pass {step}"));
        assert_eq!(gpu.status, host.status, "{what}, pass {step}");
    }
    let ran = gpu.take_recording().unwrap().ran;
    let several = |op: &Op| matches!(op.action, Action::Step { count: 2.., .. });
    ran.iter().filter(|ran| several(&ran.op)).count()
}

#[test]
fn a_shared_launch_gives_the_bits_of_a_launch_per_bucket() {
    let low: Build = |builder| {
        let bf16 = Precision { param: DType::BF16, grad: DType::BF16, ..Precision::F32 };
        builder.precision(bf16).copy_params(DType::F16).ema(0.9)
    };
    let codes: Build =
        |builder| builder.precision(Precision { moments: Moments::EightBit, ..Precision::F32 });
    let plain: Build = |builder| builder;
    let adamw = Optim::of(AdamW { lr: 0.01, ..AdamW::default() });
    let of_rules = few_optimizers().into_iter().map(|optim| (optim, plain));
    for mode in [Mode::Sequential, Mode::Normed] {
        for (optim, build) in of_rules.clone().chain([(adamw, low), (adamw, codes)]) {
            let options = options(mode);
            let what = format!("{optim:?}, {mode:?}");
            assert!(shared(optim, &options, build, painted(&options), &what) >= PASSES, "{what}");
        }
    }
}

#[test]
fn a_shared_launch_names_the_first_bucket_that_is_not_finite() {
    for (param, len) in LENGTHS.into_iter().enumerate().filter(|(_, len)| *len > 0) {
        let options = options(Mode::Sequential);
        let gradient = |step: usize, at: usize, values: &mut [f32]| {
            values.fill(1.0);
            // The first parameter's bucket is the last.
            if step == 0 && (at == param || at == 0) {
                values[if at == param { len - 1 } else { 0 }] = f32::INFINITY;
            }
            true
        };
        shared(few_optimizers()[0], &options, |builder| builder, gradient, &format!("p{param} is infinite"));
    }
}
