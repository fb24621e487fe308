//! Groups are clipped together, alone or not at all: the bits are those of steppers that have only the parameters of
//! one clip.
//!
//! Groups are interleaved in the layout, and two groups with separate clips have the same largest norm. `ranks::zero`
//! and `cuda::shards` shard tensors; `cuda::bitexact` replays a captured pass.

use instep::layout::ForeignBucket;
use instep::{
    Adam, AdamW, Borrowed, Clip, Error, Lamb, Layout, LossScaler, Mode, Moments, ParamId, Precision, Result,
    ScalerState, Sgd, Solo, Stepper, StepperBuilder, in_process,
};

use crate::support::{Optim, Outcome, assert_same_bits, paint};

const LENS: [usize; 9] = [700, 257, 5 * 312, 1, 2049, 300, 5, 0, 90];
/// Groups are clipped together, alone, and not at all; parameter `k` is in group `k % 4`.
const GROUPS: [&str; 4] = ["default", "expert", "router", "norms"];
const CLIPS: [Option<f64>; 4] = [Some(0.5), Some(0.25), Some(0.25), None];
const MODES: [Mode; 2] = [Mode::Sequential, Mode::Normed];
const STEPS: usize = 4;

/// Returns the parameters of these groups, under their numbers in the complete layout.
fn layout(groups: &[usize]) -> Layout {
    let all = (0..LENS.len()).filter(|param| groups.contains(&(param % 4)));
    let add = |layout: instep::LayoutBuilder, param: usize| {
        layout.param(format!("p{param}"), LENS[param]).in_group(GROUPS[param % 4])
    };
    all.fold(Layout::builder(), add).build().unwrap()
}

fn clipped(builder: StepperBuilder<'_>) -> StepperBuilder<'_> {
    let builder = builder.clip(Clip::Global(0.5)).group_clip("expert", CLIPS[1]);
    builder.group_clip("norms", None).group_clip("router", 0.25)
}

/// Returns small dyadic numbers, whose sums over ranks are exact. In the third pass no norm exceeds its limit.
fn gradient(step: usize, rank: usize, param: usize, element: usize) -> f32 {
    let n = (step * 31 + rank * 57 + param * 17 + element * 13) % 251;
    (n as f32 - 125.0) / if step == 2 { 1048576.0 } else { 64.0 }
}

fn ids(stepper: &Stepper) -> Vec<(usize, ParamId)> {
    let layout = stepper.layout();
    let number = |id| layout.parameter(id).unwrap().name[1..].parse().unwrap();
    layout.ids().map(|id| (number(id), id)).collect()
}

fn fill(stepper: &mut Stepper) {
    for (param, id) in ids(stepper) {
        let values: Vec<f32> = (0..LENS[param]).map(|k| paint(param, k)).collect();
        stepper.write(id, &values).unwrap();
    }
}

/// Makes one pass; `spoils` may change a gradient before its hand-over.
fn advance(stepper: &mut Stepper, step: usize, spoils: impl Fn(usize, &mut Vec<f32>)) -> Result<()> {
    let (ids, rank) = (ids(stepper), stepper.rank() as usize);
    let mut pass = stepper.begin()?;
    for (param, id) in ids.into_iter().rev() {
        let mut values = (0..LENS[param]).map(|k| gradient(step, rank, param, k)).collect();
        spoils(param, &mut values);
        pass.grads().write(id, &values)?;
        pass.grad_ready(id)?;
    }
    pass.finish()
}

/// The outcome of a training, with the norm of each of these groups and the clip coefficient after each pass.
type Trained = (Outcome, Vec<(Vec<Option<f64>>, f64)>);

fn train(mut stepper: Stepper, groups: &[usize]) -> Result<Trained> {
    fill(&mut stepper);
    let mut decided = Vec::new();
    for step in 0..STEPS {
        advance(&mut stepper, step, |_, _| ())?;
        let norms = groups.iter().map(|group| stepper.group_norm(GROUPS[*group]));
        decided.push((norms.collect::<Result<_>>()?, stepper.status()?.clip));
    }
    if let Some(recording) = stepper.take_recording() {
        assert_eq!(stepper.check(&recording), []);
    }
    Ok((Outcome::of(&stepper)?, decided))
}

fn optims() -> [Optim; 4] {
    [
        Optim::of(Adam { lr: 0.01, ..Adam::default() }),
        Optim::of(AdamW { lr: 0.01, ..AdamW::default() }),
        Optim::of(Sgd { lr: 0.125, momentum: 0.9, ..Sgd::default() }),
        Optim::of(Lamb { lr: 0.125, weight_decay: 0.0625, ..Lamb::default() }),
    ]
}

#[test]
fn each_group_has_the_bits_of_a_stepper_with_its_clip_and_its_parameters_alone() {
    let eight_bit = Precision { moments: Moments::EightBit, ..Precision::F32 };
    let cases = optims().map(|optim| (optim, Precision::F32)).into_iter();
    for (optim, precision) in cases.chain([(optims()[1], eight_bit), (optims()[3], eight_bit)]) {
        for (ranks, mode) in (1..=3).flat_map(|ranks| MODES.map(|mode| (ranks, mode))) {
            let what = format!("{optim:?}, {precision:?}, {mode:?}, {ranks} ranks");
            // Without a norm, the clips of all groups.
            let run = |groups: &[usize], max_norm: Option<f64>| {
                let layout = layout(groups);
                let builder =
                    || optim.builder(&layout).precision(precision).mode(mode).bucket_cap_bytes(4000);
                let clipped = || match max_norm {
                    Some(max_norm) => builder().clip(Clip::Global(max_norm)),
                    None => clipped(builder()),
                };
                let one = |comm| train(clipped().record(true).host(comm)?, groups);
                in_process(ranks, one).unwrap_or_else(|error| panic!("{what}: {error}"))
            };
            let all = run(&[0, 1, 2, 3], None);
            for (group, max_norm) in CLIPS.into_iter().enumerate() {
                // A norm that is never reached clips nothing.
                let alone = run(&[group], max_norm.or(Some(f64::MAX)));
                for (rank, ((ours, decided), (theirs, expected))) in all.iter().zip(&alone).enumerate() {
                    let what = format!("{}, rank {rank}, {what}", GROUPS[group]);
                    for (place, param) in (group..LENS.len()).step_by(4).enumerate() {
                        ours.assert_same_param(param, theirs, place, &what);
                    }
                    for (step, ((norms, clip), (alone, expected))) in decided.iter().zip(expected).enumerate()
                    {
                        assert_eq!(norms[group], alone[0], "{what}, pass {step}");
                        assert!(group != 0 || clip == expected, "{what}, pass {step}");
                        assert_eq!(
                            *expected < 1.0,
                            CLIPS[group].is_some() && step != 2,
                            "{what}, pass {step}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_bucket_holds_parameters_of_one_clip_set_and_without_sets_nothing_differs() {
    let layout = layout(&[0, 1, 2, 3]);
    let stepper = |builder: StepperBuilder<'_>| builder.mode(Mode::Normed).host(Solo::default()).unwrap();
    let plain = stepper(Stepper::builder(&layout, Sgd::default()).clip(Clip::Global(0.5)));
    assert_eq!((plain.plan().buckets().len(), plain.plan().max_norms()), (1, &[][..]));
    let sets = stepper(clipped(Stepper::builder(&layout, Sgd::default())));
    let plan = sets.plan();
    assert_eq!(plan.max_norms(), [Some(0.25), None, Some(0.25)]);
    for segment in plan.segments() {
        let expected = [0, 1, 3, 2][segment.param as usize % 4];
        assert_eq!(plan.buckets()[segment.bucket as usize].clip_set, expected, "p{}", segment.param);
    }
}

#[test]
fn a_gradient_that_is_not_finite_in_any_group_skips_the_steps_of_all() {
    let scaler = LossScaler { initial_scale: 4.0, growth_interval: 2, ..LossScaler::default() };
    let layout = layout(&[0, 1, 2, 3]);
    for (mode, bad) in MODES.into_iter().flat_map(|mode| [(mode, f32::NAN), (mode, f32::INFINITY)]) {
        for (spoiled, scales) in (0..4).flat_map(|param| [(param, false), (param, true)]) {
            let what = format!("p{spoiled} is {bad}, {mode:?}, scaled {scales}");
            let builder = clipped(Stepper::builder(&layout, AdamW::default()).mode(mode));
            let builder = if scales { builder.loss_scale(scaler) } else { builder.skip_nonfinite(true) };
            let mut stepper = builder.host(Solo::default()).unwrap();
            fill(&mut stepper);
            advance(&mut stepper, 0, |_, _| ()).unwrap();
            let before = Outcome::of(&stepper).unwrap();
            assert!(!before.status.skipped && before.status.clip < 1.0, "{what}");
            advance(&mut stepper, 1, |param, values| {
                values.last_mut().filter(|_| param == spoiled).into_iter().for_each(|value| *value = bad);
            })
            .unwrap();
            let after = Outcome::of(&stepper).unwrap();
            after.assert_same(&before, &what);
            let bucket = stepper.plan().segment_of(spoiled).bucket;
            assert!(after.status.skipped && after.status.clip == 1.0, "{what}");
            assert_eq!(after.status.first_nonfinite_bucket, Some(bucket), "{what}");
            assert!(!stepper.group_norm(GROUPS[spoiled]).unwrap().unwrap().is_finite(), "{what}");
            if scales {
                let state = stepper.scaler_state().unwrap();
                assert_eq!(state, ScalerState { scale: 2.0, growth_tracker: 0 }, "{what}");
            }
            advance(&mut stepper, 2, |_, _| ()).unwrap();
            let resumed = Outcome::of(&stepper).unwrap();
            assert!(!resumed.status.skipped && resumed.step_counts[0] == 2, "{what}");
            assert_eq!(resumed.status.loss_scale, if scales { 2.0 } else { 1.0 }, "{what}");
        }
    }
}

#[test]
fn where_nothing_is_skipped_a_nan_spoils_its_own_clip_set_alone() {
    let layout = layout(&[0, 1, 2, 3]);
    let run = |spoiled: Option<usize>| {
        let builder = clipped(Stepper::builder(&layout, AdamW::default()).mode(Mode::Normed));
        let mut stepper = builder.host(Solo::default()).unwrap();
        fill(&mut stepper);
        advance(&mut stepper, 0, |param, values| {
            values.first_mut().filter(|_| Some(param) == spoiled).into_iter().for_each(|g| *g = f32::NAN);
        })
        .unwrap();
        Outcome::of(&stepper).unwrap()
    };
    let (finite, spoiled) = (run(None), run(Some(5)));
    assert!(!spoiled.status.skipped && spoiled.status.first_nonfinite_bucket.is_some());
    for param in 0..LENS.len() {
        match param % 4 {
            1 => assert!(spoiled.params[param].iter().all(|value| value.is_nan()), "p{param}"),
            _ => spoiled.assert_same_param(param, &finite, param, "another set's NaN"),
        }
    }
}

#[test]
fn groups_are_clipped_without_a_clip_for_the_others_and_a_rebuild_keeps_that() {
    let layout = layout(&[0, 1, 2, 3]);
    let builder = Stepper::builder(&layout, Sgd { lr: 0.125, ..Sgd::default() }).mode(Mode::Sequential);
    let mut stepper =
        builder.bucket_cap_bytes(4000).group_clip("router", 0.25).host(Solo::default()).unwrap();
    fill(&mut stepper);
    assert_eq!(stepper.group_norm("router").unwrap(), None);
    advance(&mut stepper, 0, |_, _| ()).unwrap();
    let (before, first) = (Outcome::of(&stepper).unwrap(), stepper.group_norm("router").unwrap());
    assert_eq!((before.status.clip, first.is_some()), (1.0, true));
    assert_eq!(stepper.group_norm("norms").unwrap(), before.status.norm);
    for param in [0, 1, 3, 4, 5, 7, 8] {
        let stepped = |k: usize| paint(param, k) - 0.125 * gradient(0, 0, param, k);
        let expected: Vec<f32> = (0..LENS[param]).map(stepped).collect();
        assert_same_bits(&before.params[param], &expected, &format!("p{param} is not clipped"));
    }
    // Handed over from the first to the last, so buckets change.
    let mut pass = stepper.begin().unwrap();
    for (param, id) in (0..LENS.len()).zip(layout.ids()) {
        pass.grads()
            .write(id, &(0..LENS[param]).map(|k| gradient(0, 0, param, k)).collect::<Vec<_>>())
            .unwrap();
        pass.grad_ready(id).unwrap();
    }
    pass.finish().unwrap();
    assert_eq!(stepper.group_norm("router").unwrap(), first);
    assert!(stepper.rebuild_buckets().unwrap());
    assert_eq!(stepper.group_norm("router").unwrap(), None);
    advance(&mut stepper, 0, |_, _| ()).unwrap();
    assert_eq!(stepper.group_norm("router").unwrap(), first);
}

#[test]
fn clips_of_groups_that_cannot_be_exact_are_refused_by_name() {
    let layout = layout(&[0, 1, 2, 3]);
    type Build = fn(StepperBuilder<'_>) -> StepperBuilder<'_>;
    let cases: [(Build, &str); 9] = [
        (|b| b.mode(Mode::Eager).group_clip("norms", None), "group_clip = norms: Eager steps"),
        (
            |b| b.clip(Clip::Previous(1.0)).group_clip("norms", 1.0),
            "group_clip = norms: cannot be combined with Previous",
        ),
        (
            |b| b.clip(Clip::PerBucket(1.0)).group_clip("norms", 1.0),
            "group_clip = norms: cannot be combined with PerBucket",
        ),
        (|b| b.group_clip("norm", 1.0), "group_clip = norm: not a group of the layout; use one of default"),
        (|b| b.group_clip("norms", 1.0).group_clip("norms", None), "group_clip = norms: has a clip already"),
        (|b| b.group_clip("norms", 0.0), "group_clip = norms: 0 is out of range"),
        (|b| b.group_clip("norms", -1.0), "group_clip = norms: -1 is out of range"),
        (|b| b.group_clip("norms", f64::NAN), "group_clip = norms: NaN is out of range"),
        (|b| b.group_clip("norms", f64::INFINITY), "group_clip = norms: inf is out of range"),
    ];
    for (build, told) in cases {
        let error = build(Stepper::builder(&layout, Sgd::default()).mode(Mode::Normed)).host(Solo::default());
        let error = error.err().unwrap().to_string();
        assert!(error.contains(told), "{error}");
    }
    let stepper = Stepper::host(&layout, Sgd::default(), Solo::default()).unwrap();
    assert!(matches!(stepper.group_norm("norm"), Err(Error::Config { .. })));
}

#[test]
fn ranks_that_clip_a_group_differently_are_told_before_anything_is_stepped() {
    let layout = layout(&[0, 1, 2, 3]);
    let errors = in_process(2, |comm| {
        let max_norm = if instep::Collective::rank(&comm) == 0 { 0.25 } else { 0.5 };
        let builder = Stepper::builder(&layout, Sgd::default()).mode(Mode::Normed);
        let mut stepper = builder.group_clip("router", max_norm).host(comm)?;
        Ok(advance(&mut stepper, 0, |_, _| ())
            .and_then(|()| stepper.status().map(drop))
            .unwrap_err()
            .to_string())
    });
    let errors = errors.unwrap();
    assert!(errors.iter().all(|error| error.contains("clip of group \"router\"")), "{errors:?}");
}

#[test]
fn a_borrowed_bucket_of_two_clip_sets_is_refused_and_one_of_each_is_stepped() {
    let layout = Layout::builder().param("a", 4).param("b", 2).in_group("b").build().unwrap();
    let [a, b] = ["a", "b"].map(|name| layout.id(name).unwrap());
    let (mut params, mut grads) = ([[0f32; 4]; 2], [[0f32; 6]; 2]);
    let mut stepper = |buckets: Vec<ForeignBucket>| {
        let [of_a, of_b] = &mut params;
        let mut memory = Borrowed::new().param(a, of_a.as_mut_ptr()).param(b, of_b.as_mut_ptr());
        for (bucket, grads) in buckets.into_iter().zip(&mut grads) {
            memory = memory.bucket(bucket, grads.as_mut_ptr());
        }
        let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Sgd::default() }).mode(Mode::Normed);
        // SAFETY: the arrays are as long as the layout and the buckets say, and outlive the stepper.
        unsafe { builder.group_clip("b", 1.0).host_borrowing(Solo::default(), memory) }
    };
    let mixed = vec![ForeignBucket::new(6).gradient(a, 0).gradient(b, 4)];
    let error = stepper(mixed).err().unwrap().to_string();
    assert!(
        error.contains("gradients of `a` and `b`: are not clipped together, but share bucket 0"),
        "{error}"
    );
    let apart = vec![ForeignBucket::new(4).gradient(a, 0), ForeignBucket::new(2).gradient(b, 0)];
    let mut stepper = stepper(apart).unwrap();
    let mut pass = stepper.begin().unwrap();
    for id in [b, a] {
        pass.grads().get_mut(id).unwrap().fill(8.0);
        pass.grad_ready(id).unwrap();
    }
    pass.finish().unwrap();
    assert_eq!(stepper.group_norm("b").unwrap(), Some(128f64.sqrt()));
    drop(stepper);
    let clip = 1.0 / (128f64.sqrt() + 1e-6);
    assert_eq!((params[0], params[1][0]), ([-8.0; 4], -(8.0 * (clip as f32))));
}
