//! Gradients end as means: each is the value that was stepped, and every other gradient is unchanged.
//!
//! A second stepper that keeps its sums gives the expected values: one multiplication in f32, rounded once to the
//! gradient's type. The same calls run on the host and on a GPU, or its stand-in.

use half::bf16;
use instep::optim::Custom;
use instep::{
    AdamW, Clip, DType, Device, Gradients, Lamb, Layout, LossScaler, Master, Mode, Moments, ParamId,
    Precision, Result, Rounding, SegmentAction, Sgd, Status, Stepper, StepperBuilder, in_process,
};

use crate::stepper::several_optimizers::Descent;
use crate::support::device::cuda;
use crate::support::{MODES, Presummed, paint_gradient};

const LOSS_SCALE: f64 = 8.0;
const PASSES: usize = 3;

/// The treatment of a parameter in a pass.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Stepped,
    /// Its optimizer is the user's own code.
    Custom,
    /// No rank has a gradient.
    Unused,
    Frozen,
    Averaged,
    Left,
    Local,
}

const FATES: [(Fate, usize); 9] = [
    (Fate::Stepped, 5000),
    (Fate::Custom, 301),
    (Fate::Averaged, 300),
    (Fate::Unused, 17),
    (Fate::Stepped, 2049),
    (Fate::Left, 40),
    (Fate::Frozen, 9),
    (Fate::Local, 33),
    (Fate::Stepped, 1),
];

fn layout() -> Layout {
    let mut builder = Layout::builder();
    for (k, (fate, len)) in FATES.into_iter().enumerate() {
        builder = builder.param(format!("p{k}"), len);
        builder = match fate {
            Fate::Averaged => builder.action(SegmentAction::Average),
            Fate::Left => builder.action(SegmentAction::Leave),
            Fate::Local => builder.local(),
            _ => builder,
        };
    }
    builder.build().unwrap()
}

fn ids_of(layout: &Layout, fate: Fate) -> Vec<ParamId> {
    layout.ids().zip(FATES).filter(|(_, (known, _))| *known == fate).map(|(id, _)| id).collect()
}

/// The first stepped parameter has two optimizers, the last of which takes two launches; the third parameter has
/// another optimizer.
fn builder(layout: &Layout, mode: Mode, is_custom: bool) -> StepperBuilder<'_> {
    let stepped = ids_of(layout, Fate::Stepped);
    let plain = ids_of(layout, Fate::Unused).into_iter().chain(ids_of(layout, Fate::Frozen));
    let plain: Vec<_> = plain.chain(ids_of(layout, Fate::Local)).chain([stepped[1]]).collect();
    let mut builder = Stepper::builder_without_optimizer(layout)
        .optimizer_for(&stepped[..1], Sgd::default())
        .then_for(&stepped[..1], Lamb::default())
        .optimizer_for(&stepped[2..], Sgd { momentum: 0.9, maximize: true, ..Sgd::default() })
        .optimizer_for(&plain, AdamW::default())
        .mode(mode)
        .bucket_cap_bytes(16 << 10)
        .loss_scale(LOSS_SCALE);
    let own = ids_of(layout, Fate::Custom);
    builder = if is_custom {
        builder.optimizer_for(&own, Custom::new(Descent))
    } else {
        builder.optimizer_for(&own, Sgd::default())
    };
    if mode == Mode::Eager { builder } else { builder.clip(Clip::Global(0.5)) }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// After each pass: the bits of all stepped tensors, each parameter's gradient, and the decision.
type Left = Vec<(Vec<Vec<u32>>, Vec<Vec<f32>>, Status)>;

fn train<D: Device>(mut stepper: Stepper<D>, rank: usize) -> Result<Left> {
    let layout = stepper.layout().clone();
    let mut left = Vec::new();
    for frozen in ids_of(&layout, Fate::Frozen) {
        stepper.set_frozen(frozen, true)?;
    }
    for step in 0..PASSES {
        let mut pass = stepper.begin()?;
        for (param, (id, (fate, len))) in layout.ids().zip(FATES).enumerate().rev().collect::<Vec<_>>() {
            if matches!(fate, Fate::Unused | Fate::Frozen) {
                continue;
            }
            let values: Vec<f32> = (0..len).map(|k| paint_gradient(step, param + 10 * rank, k)).collect();
            pass.write(id.grad(), &values)?;
            pass.grad_ready(id)?;
        }
        crate::support::finish(pass)?;
        let (mut params, mut grads) = (Vec::new(), Vec::new());
        for (id, (_, len)) in layout.ids().zip(FATES) {
            let mut values = vec![0.0; len];
            stepper.read(id, &mut values)?;
            params.push(bits(&values));
            stepper.read(id.grad(), &mut values)?;
            grads.push(values);
        }
        left.push((params, grads, stepper.status()?));
    }
    Ok(left)
}

fn assert_means(kept: &Left, means: &Left, ranks: u32, grad: DType, what: &str) {
    let rounded = |value: f32| if grad == DType::BF16 { bf16::from_f32(value).to_f32() } else { value };
    for (pass, (kept, means)) in kept.iter().zip(means).enumerate() {
        assert_eq!((&kept.0, &kept.2), (&means.0, &means.2), "{what}, pass {pass}: what is stepped");
        for ((fate, len), (sums, left)) in FATES.into_iter().zip(kept.1.iter().zip(&means.1)) {
            let multiplier = match fate {
                Fate::Stepped | Fate::Custom => 1.0 / (f64::from(ranks) * LOSS_SCALE) * kept.2.clip,
                Fate::Local => 1.0 / LOSS_SCALE,
                Fate::Unused | Fate::Frozen | Fate::Averaged | Fate::Left => 1.0,
            };
            let expected: Vec<f32> = sums.iter().map(|sum| rounded(sum * multiplier as f32)).collect();
            assert_eq!(bits(left), bits(&expected), "{what}, pass {pass}, {fate:?} of {len}");
            let is_zero = matches!(fate, Fate::Unused | Fate::Frozen);
            let all_zero = left.iter().all(|x| x.to_bits() == 0);
            assert!(if is_zero { all_zero } else { !all_zero || len == 1 }, "{what}, {fate:?} of {len}");
        }
    }
}

#[test]
fn a_gradient_ends_as_the_value_that_was_stepped() {
    let layout = layout();
    for (ranks, mode) in [1, 2, 3].into_iter().flat_map(|ranks| MODES.map(|mode| (ranks, mode))) {
        let run = |gradients| {
            let train = |comm: instep::InProcess| {
                let rank = comm.rank() as usize;
                train(builder(&layout, mode, true).gradients(gradients).host(comm)?, rank)
            };
            in_process(ranks, train).unwrap()
        };
        let what = format!("{ranks} ranks, {mode:?}");
        for (kept, means) in run(Gradients::Keep).iter().zip(&run(Gradients::Average)) {
            assert_means(kept, means, ranks, DType::F32, &what);
        }
    }
}

#[test]
fn a_gpu_leaves_the_hosts_means_in_every_type() {
    let layout = layout();
    let precision = |grad, master, moments| {
        let param = if master == Master::None { grad } else { DType::BF16 };
        Precision { param, grad, master, moments, rounding: Rounding::Nearest }
    };
    let precisions = [
        Precision::F32,
        precision(DType::BF16, Master::None, Moments::BF16),
        precision(DType::BF16, Master::Remainder16, Moments::F32),
    ];
    for (mode, precision) in MODES.into_iter().flat_map(|mode| precisions.map(|precision| (mode, precision)))
    {
        let is_custom = precision == Precision::F32;
        let build = |gradients| builder(&layout, mode, is_custom).precision(precision).gradients(gradients);
        let what = format!("{mode:?}, {precision:?}");
        let kept = train(build(Gradients::Keep).host(Presummed(2)).unwrap(), 0).unwrap();
        let host = train(build(Gradients::Average).host(Presummed(2)).unwrap(), 0).unwrap();
        assert_means(&kept, &host, 2, precision.grad, &what);
        // SAFETY: the trainer's stream is the default one, or the stand-in's, which is a number.
        let gpu = unsafe { build(Gradients::Average).cuda(Presummed(2), &cuda()) }.unwrap();
        let gpu = train(gpu, 0).unwrap();
        assert_means(&kept, &gpu, 2, precision.grad, &format!("{what} on a GPU"));
    }
}

/// As in PyTorch, the scaler divides gradients in place before it finds that the step is to be skipped.
#[test]
fn a_skipped_pass_leaves_means_too_with_their_infinities() {
    let layout = Layout::builder().param("a", 3000).param("b", 5).build().unwrap();
    let [a, b] = ["a", "b"].map(|name| layout.id(name).unwrap());
    for mode in [Mode::Sequential, Mode::Normed] {
        let builder = Stepper::builder(&layout, Sgd::default()).mode(mode);
        let builder = builder.loss_scale(LossScaler { initial_scale: 4.0, ..LossScaler::default() });
        let mut stepper = builder.gradients(Gradients::Average).host(Presummed(2)).unwrap();
        let mut pass = stepper.begin().unwrap();
        pass.write(a.grad(), &[1.0; 3000]).unwrap();
        pass.write(b.grad(), &[f32::INFINITY, 2.0, -8.0, f32::NEG_INFINITY, 0.0]).unwrap();
        crate::support::finish(pass).unwrap();
        assert!(stepper.status().unwrap().skipped);
        let mut values = [0.0; 3000];
        stepper.read(a, &mut values).unwrap();
        assert_eq!(values, [0.0; 3000]);
        stepper.read(a.grad(), &mut values).unwrap();
        assert_eq!(values, [0.125; 3000], "{mode:?}");
        stepper.read(b.grad(), &mut values[..5]).unwrap();
        assert_eq!(values[..5], [f32::INFINITY, 0.25, -1.0, f32::NEG_INFINITY, 0.0], "{mode:?}");
    }
}
