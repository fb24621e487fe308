//! Tensors move before every pass and buckets are rebuilt: the training keeps the bits of memory that does not move.
//!
//! The reference is the same training in the stepper's own memory. Memory is freed as soon as no tensor uses it, and
//! every recording is judged by its own plan.

use instep::layout::{DEFAULT_GROUP, Storage};
use instep::{
    AdamW, Borrowed, Clip, Device, Error, ForeignBucket, Layout, LossScaler, LrSchedule, Mode, Precision,
    Recording, Result, SegmentAction, Sgd, Solo, Stepper, StepperBuilder, Unused, in_process,
};

use crate::support::device::cuda;
use crate::support::lent::{Ground, Lent, Random};
use crate::support::stored::{Stored, cases, dyadic, with};
use crate::support::{
    MODES, Optim, Options, Outcome, assert_same_bits, few_optimizers, layout, optimizers, paint_params, pass,
};

const LENGTHS: [usize; 9] = [300, 0, 1, 2049, 17, 256, 5, 700, 4500];
const STEPS: usize = 5;

/// Makes one pass with sums that are exact in every type; a different parameter is missing each time, and there are a
/// few orders.
fn train_a_pass<D: Device>(stepper: &mut Stepper<D>, step: usize) -> Result<()> {
    let count = stepper.layout().ids().count();
    let order = (0..count).map(|k| (k * (2 + step % 3) + step) % count).collect::<Vec<_>>();
    let mut seen = vec![false; count];
    let mut order: Vec<usize> =
        order.into_iter().filter(|k| !std::mem::replace(&mut seen[*k], true)).collect();
    order.extend((0..count).filter(|k| !seen[*k]));
    let layout = stepper.layout().clone();
    let frozen: Vec<bool> = layout.ids().map(|id| stepper.is_frozen(id).unwrap()).collect();
    pass(stepper, &Options { order: Some(order), ..Options::default() }, |param, values| {
        values.iter_mut().enumerate().for_each(|(k, g)| *g = dyadic(step, 0, param, k));
        param != step && !frozen[param]
    })
}

/// Moves the tensors before each pass after the first; `train` makes the pass.
fn moving<D: Device>(
    stepper: &mut Stepper<D>,
    lent: &mut Lent,
    random: &mut Random,
    mut train: impl FnMut(&mut Stepper<D>, usize) -> Result<()>,
) -> Result<()> {
    let mut recorded = Recording::default();
    for step in 0..STEPS {
        if step > 0 {
            // The list of buckets that are cut anew starts anew; that of others goes on.
            recorded.list.extend(stepper.take_recording().unwrap().list);
            assert_eq!(stepper.check(&recorded), [], "before pass {step}");
            if lent.move_some(stepper, random)? {
                recorded = Recording::default();
            }
        }
        let optimizers = stepper.optimizers().count();
        train(stepper, step)?;
        if stepper.optimizers().count() > optimizers {
            recorded = Recording::default();
        }
    }
    recorded.list.extend(stepper.take_recording().unwrap().list);
    assert_eq!(stepper.check(&recorded), []);
    lent.assert_bands_stand();
    Ok(())
}

#[test]
fn every_precision_trains_on_with_the_same_bits_wherever_its_tensors_move() {
    let layout = layout(&LENGTHS);
    for (case, (storage, optim)) in cases().enumerate() {
        let mode = MODES[case % 3];
        let builder =
            || with(optim.builder(&layout), &storage).mode(mode).unused(Unused::StepZero).threads(1);
        let mut owned = builder().host(Solo::default()).unwrap();
        paint_params(&mut owned);
        (0..STEPS).for_each(|step| train_a_pass(&mut owned, step).unwrap());
        let mut random = Random(case as u64);
        let mut lent = Lent::new(Ground::Host, &layout, storage.precision, &mut random);
        // SAFETY: `lent` keeps what is borrowed until the stepper has let go of it.
        let mut stepper =
            unsafe { builder().record(true).host_borrowing(Solo::default(), lent.lend()) }.unwrap();
        paint_params(&mut stepper);
        moving(&mut stepper, &mut lent, &mut random, train_a_pass).unwrap();
        let what = (case, storage, optim, mode);
        Stored::of(&stepper).unwrap().assert_same(&Stored::of(&owned).unwrap(), &what);
        for id in layout.ids() {
            let mut grads = [&owned, &stepper].map(|stepper| {
                let mut values = vec![0.0; layout.parameter(id).unwrap().len as usize];
                stepper.read(id.grad(), &mut values).unwrap();
                values
            });
            let [owned, moved] = &mut grads;
            assert_same_bits(moved, owned, &format!("{what:?}"));
        }
        stepper.close().unwrap();
    }
}

/// Sets all that a stepper keeps beside tensors: rates, a schedule, frozen parameters, a scaler, a clip by the previous
/// norm.
fn with_everything<D: Device>(stepper: &mut Stepper<D>, step: usize) -> Result<()> {
    let ids: Vec<_> = stepper.layout().clone().ids().collect();
    match step {
        1 => stepper.set_frozen(ids[7], true)?,
        2 => stepper.set_lr_multiplier(ids[3], 0.5)?,
        3 => stepper.set_lr_schedule(DEFAULT_GROUP, Some(LrSchedule::step(0.01, 1, 0.5)))?,
        4 => stepper.set_frozen(ids[7], false)?,
        _ => {}
    }
    train_a_pass(stepper, step)
}

fn in_any_way<'a>(layout: &'a Layout, optim: Optim, case: usize) -> StepperBuilder<'a> {
    let mode = MODES[case % 3];
    let builder = optim.builder(layout).mode(mode).unused(Unused::StepZero);
    match mode {
        Mode::Eager => builder.clip(Clip::Previous(0.5)),
        Mode::Normed => builder.loss_scale(LossScaler { growth_interval: 2, ..LossScaler::default() }),
        Mode::Sequential => builder.clip(Clip::Global(0.5)),
    }
}

#[test]
fn every_optimizer_keeps_states_counts_rates_and_decisions_on_the_host_and_on_a_gpu() {
    let layout = layout(&LENGTHS);
    for (case, optim) in optimizers().into_iter().enumerate() {
        let mut owned = in_any_way(&layout, optim, case).host(Solo::default()).unwrap();
        paint_params(&mut owned);
        (0..STEPS).for_each(|step| with_everything(&mut owned, step).unwrap());
        let owned = Outcome::of(&owned).unwrap();
        let what = format!("{optim:?}, case {case}");
        let mut random = Random(case as u64);
        let mut lent = Lent::new(Ground::Host, &layout, Precision::F32, &mut random);
        let builder = in_any_way(&layout, optim, case).record(true);
        // SAFETY: as above.
        let mut stepper = unsafe { builder.host_borrowing(Solo::default(), lent.lend()) }.unwrap();
        paint_params(&mut stepper);
        moving(&mut stepper, &mut lent, &mut random, with_everything).unwrap();
        let outcome = Outcome::of(&stepper).unwrap();
        outcome.assert_same(&owned, &what);
        assert_eq!(outcome.status, owned.status, "{what}");
        stepper.close().unwrap();

        let cuda = cuda();
        let mut lent = Lent::new(Ground::of(&cuda), &layout, Precision::F32, &mut random);
        let builder = in_any_way(&layout, optim, case).record(true);
        // SAFETY: as above; the trainer's stream is the default one, or the stand-in's, which is a number.
        let mut stepper = unsafe { builder.cuda_borrowing(Solo::default(), lent.lend(), &cuda) }.unwrap();
        paint_params(&mut stepper);
        moving(&mut stepper, &mut lent, &mut random, with_everything).unwrap();
        let outcome = Outcome::of(&stepper).unwrap();
        outcome.assert_same(&owned, &format!("GPU, {what}"));
        assert_eq!(outcome.status, owned.status, "GPU, {what}");
        stepper.close().unwrap();
    }
}

/// Returns a builder with groups, several optimizers, one that is added later, and an averaged parameter.
fn several(layout: &Layout) -> StepperBuilder<'_> {
    let ids: Vec<_> = layout.ids().collect();
    let builder = Stepper::builder(layout, AdamW { lr: 0.01, ..AdamW::default() });
    let builder = builder.optimizer_for(&[ids[0], ids[4]], Sgd { lr: 0.05, momentum: 0.9, ..Sgd::default() });
    builder.then_for(&[ids[0]], Optim::of(instep::Lamb::default()).boxed()).unused(Unused::StepZero)
}

fn adding_later<D: Device>(stepper: &mut Stepper<D>, step: usize) -> Result<()> {
    let ids: Vec<_> = stepper.layout().clone().ids().collect();
    if step == 2 {
        let before = stepper.optimizers().count();
        stepper.add_optimizer_for(&[ids[3], ids[8]], Sgd { lr: 0.02, momentum: 0.5, ..Sgd::default() })?;
        assert_eq!(stepper.optimizers().count(), before + 1);
    }
    train_a_pass(stepper, step)
}

#[test]
fn optimizers_are_added_later_to_borrowed_tensors_as_to_owned_ones() {
    let layout = LENGTHS.into_iter().enumerate().fold(Layout::builder(), |builder, (k, len)| {
        let builder = builder.param(format!("p{k}"), len);
        if k == 6 { builder.action(SegmentAction::Average) } else { builder }
    });
    let layout = layout.build().unwrap();
    let mut owned = several(&layout).host(Solo::default()).unwrap();
    paint_params(&mut owned);
    (0..STEPS).for_each(|step| adding_later(&mut owned, step).unwrap());
    let owned = Outcome::of(&owned).unwrap();
    for seed in 0..8 {
        let mut random = Random(seed);
        let mut lent = Lent::new(Ground::Host, &layout, Precision::F32, &mut random);
        // SAFETY: as above.
        let mut stepper =
            unsafe { several(&layout).record(true).host_borrowing(Solo::default(), lent.lend()) }.unwrap();
        paint_params(&mut stepper);
        moving(&mut stepper, &mut lent, &mut random, adding_later).unwrap();
        Outcome::of(&stepper).unwrap().assert_same(&owned, &format!("seed {seed}"));
        stepper.close().unwrap();
    }
}

#[test]
fn ranks_move_to_addresses_of_their_own_and_change_their_buckets_together() {
    let layout = layout(&LENGTHS);
    for (mode, optim) in MODES.into_iter().zip(few_optimizers()) {
        let train = |stepper: &mut Stepper, step: usize| train_a_pass(stepper, step);
        let builder = || optim.builder(&layout).mode(mode).unused(Unused::StepZero);
        let run = |moves: bool| {
            in_process(3, |comm| {
                // Ranks draw alike, so that their buckets do; their memory lies elsewhere all the same.
                let mut random = Random(mode as u64);
                let mut lent = Lent::new(Ground::Host, &layout, Precision::F32, &mut random);
                // SAFETY: as above.
                let mut stepper = unsafe { builder().record(true).host_borrowing(comm, lent.lend())? };
                paint_params(&mut stepper);
                if moves {
                    moving(&mut stepper, &mut lent, &mut random, train)?
                } else {
                    (0..STEPS).try_for_each(|step| train(&mut stepper, step))?
                }
                let outcome = Outcome::of(&stepper)?;
                stepper.close()?;
                Ok::<_, Error>(outcome)
            })
            .unwrap()
        };
        let (moved, stayed) = (run(true), run(false));
        moved.iter().zip(&stayed).for_each(|(a, b)| a.assert_same(b, &format!("{mode:?}")));
    }
}

/// Two parameters in one array, with room to move.
struct Room {
    memory: Vec<f32>,
    layout: Layout,
}

impl Room {
    fn new() -> Room {
        let layout = Layout::builder().param("a", 4).param("b", 4).build().unwrap();
        Room { memory: vec![0.5; 64], layout }
    }

    fn at(&mut self, element: usize) -> *mut f32 {
        self.memory.as_mut_ptr().wrapping_add(element)
    }

    fn bucket(&self, swapped: bool) -> ForeignBucket {
        let [a, b] = ["a", "b"].map(|name| self.layout.id(name).unwrap());
        let (first, second) = if swapped { (b, a) } else { (a, b) };
        ForeignBucket::new(8).gradient(first, 0).gradient(second, 4)
    }

    fn lend(&mut self) -> Borrowed {
        let [a, b] = ["a", "b"].map(|name| self.layout.id(name).unwrap());
        let (bucket, [first, second, grads]) = (self.bucket(false), [0, 4, 8].map(|k| self.at(k)));
        Borrowed::new().param(a, first).param(b, second).bucket(bucket, grads)
    }
}

#[test]
fn a_rank_that_changes_its_buckets_alone_is_told() {
    let outcome = in_process(2, |comm| {
        let (alone, mut room) = (comm.rank() == 1, Room::new());
        let (layout, lent) = (room.layout.clone(), room.lend());
        let builder = Stepper::builder(&layout, Sgd::default()).unused(Unused::StepZero);
        // SAFETY: the room outlives the stepper, which alone touches it.
        let mut stepper = unsafe { builder.host_borrowing(comm, lent)? };
        train_a_pass(&mut stepper, 0)?;
        if alone {
            let memory = Borrowed::new().bucket(room.bucket(true), room.at(8));
            // SAFETY: as above.
            assert!(unsafe { stepper.rebind(memory)? });
        }
        train_a_pass(&mut stepper, 1)?;
        stepper.close()
    });
    match outcome.unwrap_err().cause() {
        Error::Mismatch { differs, .. } => assert!(differs.contains("layout"), "{differs}"),
        other => panic!("{other}"),
    }
}

#[test]
fn a_refused_binding_leaves_the_stepper_where_it_was() {
    let mut room = Room::new();
    let (layout, lent) = (room.layout.clone(), room.lend());
    let [a, b] = ["a", "b"].map(|name| layout.id(name).unwrap());
    let builder = Stepper::builder(&layout, AdamW::default()).unused(Unused::StepZero);
    // SAFETY: as above.
    let mut stepper = unsafe { builder.host_borrowing(Solo::default(), lent) }.unwrap();
    train_a_pass(&mut stepper, 0).unwrap();
    let (before, plan) = (Outcome::of(&stepper).unwrap(), stepper.plan().clone());
    let other = layout_of_another();
    let cases = [
        (Borrowed::new().param(a, room.at(5)), "`b` and `a`: overlap in memory"),
        (Borrowed::new().param(a, room.at(10)), "bucket 0 and `a`: overlap in memory"),
        (Borrowed::new().param(a, room.at(20)).param(a, room.at(24)), "`a`: has two addresses"),
        (Borrowed::new().param(a, room.at(20).wrapping_byte_add(1)), "aligned"),
        (Borrowed::new().param(b, std::ptr::null_mut::<f32>()), "null"),
        (Borrowed::new().param(b, room.at(20).cast::<instep::bf16>()), "is bf16"),
        (Borrowed::new().bucket(ForeignBucket::new(4).gradient(a, 0), room.at(20)), "`b`: in no bucket"),
        (Borrowed::new().bucket(ForeignBucket::new(8).gradient(a, 0).gradient(b, 3), room.at(20)), "overlap"),
        (Borrowed::new().bucket(ForeignBucket::new(8).gradient(a, 0).gradient(a, 4), room.at(20)), "twice"),
        (Borrowed::new().param(other, room.at(20)), "another layout"),
    ];
    for (memory, word) in cases {
        // SAFETY: refused before anything is touched.
        let error = unsafe { stepper.rebind(memory) }.unwrap_err();
        assert!(matches!(error, Error::Layout(_)) && error.to_string().contains(word), "{word}: {error}");
        assert_eq!(*stepper.plan(), plan);
        Outcome::of(&stepper).unwrap().assert_same(&before, word);
    }
    // The next pass goes on as if nothing had been asked.
    train_a_pass(&mut stepper, 1).unwrap();
    let mut same = Room::new();
    let lent = same.lend();
    let builder = Stepper::builder(&layout, AdamW::default()).unused(Unused::StepZero);
    // SAFETY: as above.
    let mut never = unsafe { builder.host_borrowing(Solo::default(), lent) }.unwrap();
    (0..2).for_each(|step| train_a_pass(&mut never, step).unwrap());
    Outcome::of(&stepper).unwrap().assert_same(&Outcome::of(&never).unwrap(), "refused");
    std::mem::forget(stepper.begin().unwrap());
    // SAFETY: as above.
    assert!(matches!(unsafe { stepper.rebind(Borrowed::new()) }, Err(Error::Order(_))));
    stepper.abandon().unwrap();
    let mut owned = Stepper::host(&layout, Sgd::default(), Solo::default()).unwrap();
    // SAFETY: as above.
    assert!(matches!(unsafe { owned.rebind(Borrowed::new()) }, Err(Error::Unsupported { .. })));
}

fn layout_of_another() -> instep::ParamId {
    let other = Layout::builder().param("elsewhere", 4).build().unwrap();
    other.id("elsewhere").unwrap()
}

#[test]
fn the_same_buckets_stay_and_others_are_recognised_by_their_parameters() {
    let mut room = Room::new();
    let (layout, lent) = (room.layout.clone(), room.lend());
    let builder = Stepper::builder(&layout, Sgd::default()).unused(Unused::StepZero);
    // SAFETY: the room outlives the stepper, which alone touches it.
    let mut stepper = unsafe { builder.host_borrowing(Solo::default(), lent) }.unwrap();
    let mut swaps = |stepper: &mut Stepper, swapped, at| {
        let memory = Borrowed::new().bucket(room.bucket(swapped), room.at(at));
        // SAFETY: as above.
        unsafe { stepper.rebind(memory) }.unwrap()
    };
    assert!(!swaps(&mut stepper, false, 16));
    assert!(swaps(&mut stepper, true, 24));
    assert!(!swaps(&mut stepper, true, 16));
    let order: Vec<u32> = stepper.plan().segments().iter().map(|segment| segment.param).collect();
    assert_eq!(order, [1, 0]);
    // SAFETY: as above.
    assert!(!unsafe { stepper.rebind(Borrowed::new()) }.unwrap());
}

#[test]
fn storage_of_a_stepper_that_moves_is_the_one_it_was_built_with() {
    let layout = layout(&[300, 5]);
    let storage = Storage { ema: true, ..Storage::default() };
    let mut random = Random(3);
    let mut lent = Lent::new(Ground::Host, &layout, Precision::F32, &mut random);
    let builder = with(few_optimizers()[2].builder(&layout), &storage).unused(Unused::StepZero);
    // SAFETY: as above.
    let mut stepper = unsafe { builder.host_borrowing(Solo::default(), lent.lend()) }.unwrap();
    let before = stepper.memory();
    while !lent.move_some(&mut stepper, &mut random).unwrap() {}
    let of = |memory: &[(instep::op::Memory, u64)], wanted| {
        memory.iter().find(|(known, _)| *known == wanted).unwrap().1
    };
    assert_eq!(of(&before, instep::op::Memory::Ema), of(&stepper.memory(), instep::op::Memory::Ema));
}
