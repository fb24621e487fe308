//! A checkpoint also holds a stepper's scalars: loss scaler, schedule, the norm to clip by.
//!
//! A run that is interrupted anywhere ends in the same file as an uninterrupted run. The tests use bytes only.

use std::io::Cursor;

use instep::checkpoint::{self, Extras, Scalar};
use instep::layout::DEFAULT_GROUP;
use instep::{Clip, Error, LossScaler, LrSchedule, Mode, ScalerState, Sgd, Solo, Stepper};
use safetensors::tensor::{Dtype as TensorDtype, TensorView};

use crate::checkpoint::round_trip::bytes_of;
use crate::support::{MODES, layout};

const LENGTHS: [usize; 3] = [300, 17, 40];

/// Makes a pass whose gradients are finite, or not.
fn step(stepper: &mut Stepper, value: f32) {
    let ids: Vec<_> = stepper.layout().ids().collect();
    let mut pass = stepper.begin().unwrap();
    let scale = pass.loss_scale().unwrap() as f32;
    for id in ids {
        pass.grads().get_mut(id).unwrap().fill(value * scale);
    }
    pass.finish().unwrap();
}

#[test]
fn the_loss_scaler_the_schedule_and_the_last_norm_go_on_where_they_stood() {
    let layout = layout(&LENGTHS);
    let open = |mode| {
        let scaler = LossScaler { growth_interval: 3, ..LossScaler::default() };
        let builder = Stepper::builder(&layout, Sgd { momentum: 0.9, ..Sgd::default() }).mode(mode);
        let builder = builder.loss_scale(scaler).clip(Clip::Previous(1e-3));
        builder.lr_schedule(DEFAULT_GROUP, LrSchedule::step(1.0, 2, 0.5)).host(Solo::default()).unwrap()
    };
    let values = [0.5, f32::INFINITY, 0.25, 0.125, 1.0, 0.5, f32::NAN, 2.0];
    for interrupted in 1..values.len() {
        let (mut whole, mut second) = (open(Mode::Normed), open(Mode::Sequential));
        values[..interrupted].iter().for_each(|value| step(&mut whole, *value));
        let bytes = bytes_of(&whole, &Extras::default());
        assert_eq!(checkpoint::read(&mut second, Cursor::new(&bytes)).unwrap(), Extras::default());
        assert_eq!(second.scaler_state().unwrap(), whole.scaler_state().unwrap());
        for value in &values[interrupted..] {
            step(&mut whole, *value);
            step(&mut second, *value);
        }
        let (whole, second) = (bytes_of(&whole, &Extras::default()), bytes_of(&second, &Extras::default()));
        assert!(whole == second, "interrupted after {interrupted}");
    }
}

#[test]
fn a_scalers_state_without_a_scaler_comes_back_and_half_of_one_is_refused() {
    let layout = layout(&LENGTHS);
    let scaled =
        Stepper::builder(&layout, Sgd::default()).mode(Mode::Normed).loss_scale(LossScaler::default());
    let mut scaled = scaled.host(Solo::default()).unwrap();
    let mut plain = Stepper::host(&layout, Sgd::default(), Solo::default()).unwrap();
    let kept = checkpoint::read(&mut plain, Cursor::new(bytes_of(&scaled, &Extras::default()))).unwrap();
    assert_eq!(kept.scalars["scaler.scale"], Scalar::F64(65536.0));
    let mut again = Vec::new();
    checkpoint::write_with(&plain, &kept, &mut again).unwrap();
    let mut second = Stepper::host(&layout, Sgd::default(), Solo::default()).unwrap();
    assert_eq!(checkpoint::read(&mut second, Cursor::new(again)).unwrap(), kept, "it is passed on");
    let refused = checkpoint::write_with(&scaled, &kept, Vec::new());
    assert!(matches!(refused, Err(Error::Config { field: "scalars", .. })), "a scaler writes its own");
    // What a torch file may lack, or say wrongly.
    let file = |scalars: &[(&str, Scalar)]| {
        let named: Vec<(String, [u8; 8], TensorDtype)> = scalars
            .iter()
            .map(|(name, scalar)| match scalar {
                Scalar::F64(value) => ((*name).to_owned(), value.to_le_bytes(), TensorDtype::F64),
                Scalar::U64(value) => ((*name).to_owned(), value.to_le_bytes(), TensorDtype::U64),
            })
            .collect();
        let param = [0u8; 4 * LENGTHS[0]];
        let mut tensors: Vec<(String, TensorView)> = named
            .iter()
            .map(|(name, bytes, dtype)| (name.clone(), TensorView::new(*dtype, vec![], bytes).unwrap()))
            .collect();
        tensors
            .push(("param.p0".into(), TensorView::new(TensorDtype::F32, vec![LENGTHS[0]], &param).unwrap()));
        safetensors::serialize(tensors, None).unwrap()
    };
    let (scale, tracker) = ("scaler.scale", "scaler.growth_tracker");
    let broken: [&[(&str, Scalar)]; 5] = [
        &[(scale, Scalar::F64(2.0))],
        &[(tracker, Scalar::U64(2))],
        &[(scale, Scalar::U64(2)), (tracker, Scalar::U64(2))],
        &[(scale, Scalar::F64(-2.0)), (tracker, Scalar::U64(2))],
        &[(scale, Scalar::F64(2.0)), (tracker, Scalar::U64(1 << 40))],
    ];
    for scalars in broken {
        scaled.write(layout.id("p0").unwrap(), &[7.0; LENGTHS[0]]).unwrap();
        let outcome = checkpoint::import(&mut scaled, Cursor::new(file(scalars)), None);
        assert!(outcome.is_err(), "{scalars:?}");
        assert_eq!(scaled.view::<f32>(layout.id("p0").unwrap()).unwrap(), [7.0; LENGTHS[0]]);
    }
    let fine = file(&[(scale, Scalar::F64(2.0)), (tracker, Scalar::U64(3))]);
    checkpoint::import(&mut scaled, Cursor::new(fine), None).unwrap();
    assert_eq!(scaled.scaler_state().unwrap(), ScalerState { scale: 2.0, growth_tracker: 3 });
}

/// An extra that is saved can be loaded, and never becomes an entry of the stepper.
#[test]
fn extras_that_a_load_would_refuse_or_take_for_the_steppers_own_are_not_saved() {
    let layout = layout(&LENGTHS);
    let plain = Stepper::host(&layout, Sgd::default(), Solo::default()).unwrap();
    let clipped = Stepper::builder(&layout, Sgd::default()).clip(Clip::Previous(1.0));
    let clipped = clipped.host(Solo::default()).unwrap();
    let (norm, scale, tracker) = ("clip.previous_norm", "scaler.scale", "scaler.growth_tracker");
    type Given<'a> = (&'a Stepper, &'a [(&'a str, Scalar)]);
    let refused: [Given<'_>; 8] = [
        (&clipped, &[(norm, Scalar::F64(0.5))]),
        (&plain, &[(norm, Scalar::U64(1))]),
        (&plain, &[(norm, Scalar::F64(-1.0))]),
        (&plain, &[(norm, Scalar::F64(f64::NAN))]),
        (&plain, &[(scale, Scalar::F64(2.0))]),
        (&plain, &[(tracker, Scalar::U64(2))]),
        (&plain, &[(scale, Scalar::U64(2)), (tracker, Scalar::U64(2))]),
        (&plain, &[(scale, Scalar::F64(2.0)), (tracker, Scalar::U64(1 << 40))]),
    ];
    for (stepper, scalars) in refused {
        let scalars = scalars.iter().map(|(name, scalar)| ((*name).to_owned(), *scalar)).collect();
        let extras = Extras { scalars, ..Extras::default() };
        let outcome = checkpoint::write_with(stepper, &extras, Vec::new());
        assert!(matches!(outcome, Err(Error::Config { field: "scalars", .. })), "{extras:?}: {outcome:?}");
    }
}

#[test]
fn a_run_that_goes_back_to_before_there_was_a_norm_is_not_clipped_by_a_later_one() {
    let layout = layout(&LENGTHS);
    let builder = Stepper::builder(&layout, Sgd::default()).clip(Clip::Previous(1e-3));
    let mut stepper = builder.host(Solo::default()).unwrap();
    let start = bytes_of(&stepper, &Extras::default());
    step(&mut stepper, 4.0);
    let first = bytes_of(&stepper, &Extras::default());
    checkpoint::read(&mut stepper, Cursor::new(&start)).unwrap();
    assert_eq!(stepper.previous_norm().unwrap(), None);
    step(&mut stepper, 4.0);
    assert!(bytes_of(&stepper, &Extras::default()) == first);
}

/// SGD without momentum has lr 1, and all gradients are 8: a pass that is clipped to 0.5 moves an element by less than
/// 0.5.
#[test]
fn a_norm_to_clip_by_is_in_a_checkpoint_if_the_stepper_clips_by_it_in_every_mode() {
    let layout = layout(&[1]);
    let w = layout.id("p0").unwrap();
    let sgd = Sgd { lr: 1.0, ..Sgd::default() };
    let clips = [None, Some(Clip::Global(1e9)), Some(Clip::PerBucket(1e9)), Some(Clip::Previous(1e9))];
    let builder = |clip: Option<Clip>| {
        let builder = Stepper::builder(&layout, sgd);
        clip.into_iter().fold(builder, |builder, clip| builder.clip(clip))
    };
    for (mode, clip) in MODES.into_iter().flat_map(|mode| clips.map(|clip| (mode, clip))) {
        if (mode, clip) == (Mode::Eager, Some(Clip::Global(1e9))) {
            continue;
        }
        let mut stepper = builder(clip).mode(mode).host(Solo::default()).unwrap();
        step(&mut stepper, 8.0);
        let file = bytes_of(&stepper, &Extras::default());
        let has_norm = String::from_utf8_lossy(&file).contains("clip.previous_norm");
        let is_previous = clip == Some(Clip::Previous(1e9));
        assert_eq!(has_norm, is_previous, "{mode:?}, {clip:?}");
        let asked = stepper.previous_norm();
        assert_eq!(asked.is_ok(), is_previous, "{mode:?}, {clip:?}: {asked:?}");
        // The next pass of a run that begins to clip here: as in the first pass, or by the norm of 8.
        let mut clipped = builder(Some(Clip::Previous(0.5))).host(Solo::default()).unwrap();
        checkpoint::read(&mut clipped, Cursor::new(&file)).unwrap();
        step(&mut clipped, 8.0);
        let moved = clipped.view::<f32>(w).unwrap()[0] + 8.0;
        assert!((moved + if is_previous { 0.5 } else { 8.0 }).abs() < 1e-5, "{mode:?}, {clip:?}: {moved}");
    }
}

#[test]
fn a_norm_to_clip_by_comes_back_to_a_trainer_whose_stepper_has_no_use_for_it() {
    let layout = layout(&LENGTHS);
    let clipping = Stepper::builder(&layout, Sgd::default()).clip(Clip::Previous(1.0));
    let mut clipping = clipping.host(Solo::default()).unwrap();
    step(&mut clipping, 4.0);
    let norm = clipping.previous_norm().unwrap().unwrap();
    let mut plain = Stepper::host(&layout, Sgd::default(), Solo::default()).unwrap();
    let file = bytes_of(&clipping, &Extras::default());
    let kept = checkpoint::read(&mut plain, Cursor::new(file)).unwrap();
    assert_eq!(kept.scalars, [("clip.previous_norm".to_owned(), Scalar::F64(norm))].into());
    let refused = plain.set_previous_norm(Some(1.0));
    assert!(matches!(refused, Err(Error::Config { field: "clip", .. })), "{refused:?}");
}
