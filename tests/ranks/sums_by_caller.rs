//! An engine sums by itself on the host, in any order: the bits are those of ranks whose stepper sums.
//!
//! Each rank is a thread. The ranks sum buckets by hand, in rank order and each in a different order of buckets. Every
//! rank hands a bucket over as soon as it finds the sum.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, mpsc};

use instep::{
    AdamW, Borrowed, Error, ForeignBucket, Layout, Mode, ParamId, Result, Solo, Stepper, StepperBuilder,
    Sums, Unused, in_process,
};

use crate::support::lent::Random;
use crate::support::{MODES, Outcome, layout, paint_gradient, paint_params};

const LENGTHS: [usize; 7] = [300, 1, 2049, 17, 256, 5, 700];
/// The parameters of each bucket.
const BUCKETS: [&[usize]; 4] = [&[6, 2], &[3], &[5, 0, 1], &[4]];
const RANKS: usize = 3;
const STEPS: usize = 4;
/// The parameter that is frozen in the third pass, and that no rank uses in the second and the last.
const FROZEN: usize = 0;
const UNUSED: usize = 4;

fn is_unused(step: usize, param: usize) -> bool {
    step % 2 == 1 && param == UNUSED
}

fn builder(layout: &Layout, mode: Mode) -> StepperBuilder<'_> {
    Stepper::builder(layout, AdamW { lr: 0.01, ..AdamW::default() }).mode(mode).record(true)
}

fn bucket_len(bucket: usize) -> usize {
    BUCKETS[bucket].iter().map(|param| LENGTHS[*param]).sum()
}

fn gradients(step: usize, rank: usize, param: usize) -> Vec<f32> {
    (0..LENGTHS[param]).map(|k| paint_gradient(step + 5 * rank, param, k)).collect()
}

/// What the ranks share: an address per rank and bucket, and whether each bucket's sum is ready in each step.
struct Engine {
    addresses: Vec<Vec<AtomicUsize>>,
    is_summed: Vec<Vec<AtomicBool>>,
    written: Barrier,
}

impl Engine {
    fn new() -> Engine {
        let flags = || BUCKETS.iter().map(|_| AtomicBool::new(false)).collect();
        Engine {
            addresses: (0..RANKS).map(|_| BUCKETS.iter().map(|_| AtomicUsize::new(0)).collect()).collect(),
            is_summed: (0..STEPS).map(|_| flags()).collect(),
            written: Barrier::new(RANKS),
        }
    }

    /// Sums this rank's share of the buckets, each for all ranks.
    fn sum(&self, step: usize, rank: usize, random: &mut Random) {
        self.written.wait();
        let mut share: Vec<usize> = (0..BUCKETS.len()).filter(|bucket| bucket % RANKS == rank).collect();
        random.shuffle(&mut share);
        for bucket in share {
            let buffers: Vec<*mut f32> = { &self.addresses }
                .iter()
                .map(|of| std::ptr::with_exposed_provenance_mut(of[bucket].load(Ordering::Acquire)))
                .collect();
            for k in 0..bucket_len(bucket) {
                // SAFETY: every rank has asked for its gradients, written them, and steps them after the flag alone.
                unsafe {
                    let sum =
                        buffers[1..].iter().fold(*buffers[0].add(k), |sum, buffer| sum + *buffer.add(k));
                    buffers.iter().for_each(|buffer| *buffer.add(k) = sum);
                }
            }
            self.is_summed[step][bucket].store(true, Ordering::Release);
        }
    }
}

fn of_an_engine(engine: &Arc<Engine>, layout: &Layout, rank: usize, mode: Mode) -> Result<Outcome> {
    let ids: Vec<ParamId> = layout.ids().collect();
    let mut random = Random(rank as u64 + 100);
    let mut params: Vec<Vec<f32>> = LENGTHS.iter().map(|len| vec![0.0; *len]).collect();
    let mut buckets: Vec<Vec<f32>> = (0..BUCKETS.len()).map(|bucket| vec![0.0; bucket_len(bucket)]).collect();
    let mut memory = Borrowed::new();
    for (id, values) in ids.iter().zip(&mut params) {
        memory = memory.param(*id, values.as_mut_ptr());
    }
    for (bucket, values) in buckets.iter_mut().enumerate() {
        let (mut next, mut described) = (0, ForeignBucket::new(values.len()));
        for param in BUCKETS[bucket] {
            described = described.gradient(ids[*param], next);
            next += LENGTHS[*param];
        }
        let at = values.as_mut_ptr();
        engine.addresses[rank][bucket].store(at.expose_provenance(), Ordering::Release);
        memory = memory.bucket(described, at);
    }
    let builder = builder(layout, mode).unused(Unused::Refuse);
    // SAFETY: the vectors outlive the stepper, and gradients are touched between `get_mut` and the hand-over alone.
    let mut stepper = unsafe { builder.host_borrowing(Sums::by_caller(rank as u32, RANKS as u32), memory)? };
    assert_eq!((stepper.rank(), stepper.world_size()), (rank as u32, RANKS as u32));
    paint_params(&mut stepper);
    for step in 0..STEPS {
        stepper.set_frozen(ids[FROZEN], step == 2)?;
        let mut pass = stepper.begin()?;
        for (param, id) in ids.iter().enumerate() {
            if step == 2 && param == FROZEN {
                continue;
            }
            let mut grads = pass.grads();
            let to = grads.get_mut(*id)?;
            if is_unused(step, param) {
                to.fill(0.0)
            } else {
                to.copy_from_slice(&gradients(step, rank, param))
            }
        }
        if is_unused(step, UNUSED) {
            pass.set_unused(&[ids[UNUSED]])?;
        }
        let mut left: Vec<usize> = (0..BUCKETS.len()).collect();
        if step % 2 == 1 {
            // Handed over before the sums are there.
            random.shuffle(&mut left);
            for bucket in left.drain(..) {
                let engine = Arc::clone(engine);
                let sum = move || {
                    while !engine.is_summed[step][bucket].load(Ordering::Acquire) {
                        std::thread::yield_now();
                    }
                    Ok(())
                };
                pass.bucket_ready_after(bucket as u32, sum)?;
            }
        }
        engine.sum(step, rank, &mut random);
        while !left.is_empty() {
            let at = random.below(left.len());
            if engine.is_summed[step][left[at]].load(Ordering::Acquire) {
                pass.bucket_ready(left.remove(at) as u32)?;
            } else {
                std::thread::yield_now();
            }
        }
        pass.finish()?;
        // The next pass's gradients must not be written while others still sum this one's.
        engine.written.wait();
    }
    let recording = stepper.take_recording().unwrap();
    assert_eq!(stepper.check(&recording), []);
    let outcome = Outcome::of(&stepper)?;
    stepper.close()?;
    Ok(outcome)
}

fn of_steppers_that_sum(layout: &Layout, mode: Mode) -> Vec<Outcome> {
    let train = |comm: instep::InProcess| {
        let (rank, ids) = (comm.rank() as usize, layout.ids().collect::<Vec<_>>());
        let mut stepper = builder(layout, mode).unused(Unused::Skip).host(comm)?;
        paint_params(&mut stepper);
        for step in 0..STEPS {
            stepper.set_frozen(ids[FROZEN], step == 2)?;
            let mut pass = stepper.begin()?;
            for (param, id) in ids.iter().enumerate() {
                let is_frozen = step == 2 && param == FROZEN;
                if !is_frozen && !is_unused(step, param) {
                    pass.write(id.grad(), &gradients(step, rank, param))?;
                }
            }
            pass.finish()?;
        }
        let outcome = Outcome::of(&stepper)?;
        stepper.close()?;
        Ok::<_, Error>(outcome)
    };
    in_process(RANKS as u32, train).unwrap()
}

#[test]
fn sums_of_an_engines_own_that_end_in_any_order_give_the_bits_of_a_steppers_sums() {
    let layout = layout(&LENGTHS);
    for mode in MODES {
        let expected = of_steppers_that_sum(&layout, mode);
        let engine = Arc::new(Engine::new());
        let outcomes: Vec<Outcome> = std::thread::scope(|scope| {
            let (engine, layout) = (&engine, &layout);
            let start = |rank| scope.spawn(move || of_an_engine(engine, layout, rank, mode).unwrap());
            let ranks: Vec<_> = (0..RANKS).map(start).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        for (rank, (outcome, expected)) in outcomes.iter().zip(&expected).enumerate() {
            outcome.assert_same(expected, &format!("{mode:?}, rank {rank}"));
            assert_eq!(outcome.step_counts[UNUSED], STEPS as u64 / 2);
        }
    }
}

#[test]
fn a_gradient_that_nobody_asked_for_is_refused_and_overwritten_by_nothing() {
    let layout = Layout::builder().param("a", 2).param("b", 2).build().unwrap();
    let [a, b] = ["a", "b"].map(|name| layout.id(name).unwrap());
    let build = |unused| Stepper::builder(&layout, AdamW::default()).unused(unused);
    let (mut weights, mut bucket) = ([1.0f32; 4], [5.0f32; 4]);
    let (at, grads) = (weights.as_mut_ptr(), bucket.as_mut_ptr());
    let lend = || {
        let described = ForeignBucket::new(4).gradient(a, 0).gradient(b, 2);
        Borrowed::new().param(a, at).param(b, at.wrapping_add(2)).bucket(described, grads)
    };
    // SAFETY: the arrays outlive both steppers, which alone touch them until they are closed.
    let mut stepper =
        unsafe { build(Unused::StepZero).host_borrowing(Sums::by_caller(0, 2), lend()) }.unwrap();
    let mut pass = stepper.begin().unwrap();
    pass.grads().get_mut(a).unwrap();
    let refused = pass.finish().unwrap_err();
    assert!(matches!(&refused, Error::Order(why) if why.thing == "`b`"), "{refused}");
    assert!(refused.to_string().contains("set_unused"), "{refused}");
    // Frozen, or named as unused, it is left alone: value, step count, and what the engine has in the bucket.
    stepper.set_frozen(a, true).unwrap();
    let mut pass = stepper.begin().unwrap();
    pass.set_unused(&[b]).unwrap();
    pass.finish().unwrap();
    assert_eq!((stepper.step_count(a).unwrap(), stepper.step_count(b).unwrap()), (0, 0));
    stepper.close().unwrap();
    assert_eq!((weights, bucket), ([1.0; 4], [5.0; 4]));
    let counted = build(Unused::Skip).host(Sums::by_caller(0, 2)).map(drop);
    assert!(matches!(counted, Err(Error::Config { field: "unused", .. })), "{counted:?}");
    assert!(Stepper::builder(&layout, AdamW::default()).host(Solo::default()).is_ok());
}

/// Makes two buckets of one parameter each; the caller forgets the sum of the second.
fn forget(sums: impl Into<Sums>, borrows: bool, mode: Mode) -> (Result<()>, [f32; 2]) {
    let layout = Layout::builder().param("a", 1).param("b", 1).build().unwrap();
    let ids: Vec<ParamId> = layout.ids().collect();
    let (mut params, mut grads) = ([1.0f32; 2], [0.0f32; 2]);
    let sgd = instep::Sgd { lr: 1.0, ..Default::default() };
    let builder = Stepper::builder(&layout, sgd).mode(mode).bucket_cap_bytes(1);
    let mut stepper = if borrows {
        let mut memory = Borrowed::new();
        for (k, id) in ids.iter().enumerate() {
            // SAFETY: in bounds. The arrays outlive the stepper.
            let (param, grad) = unsafe { (params.as_mut_ptr().add(k), grads.as_mut_ptr().add(k)) };
            memory = memory.param(*id, param).bucket(ForeignBucket::new(1).gradient(*id, 0), grad);
        }
        // SAFETY: as above, and touched through the stepper alone.
        unsafe { Stepper::builder(&layout, sgd).mode(mode).host_borrowing(sums, memory).unwrap() }
    } else {
        let mut stepper = builder.host(sums).unwrap();
        ids.iter().for_each(|id| stepper.write(*id, &[1.0]).unwrap());
        stepper
    };
    let mut pass = stepper.begin().unwrap();
    for id in &ids {
        pass.write(id.grad(), &[2.0]).unwrap();
    }
    let bucket = pass.plan().segment_of(0).bucket;
    pass.bucket_ready(1 - bucket).unwrap();
    let outcome = pass.finish();
    if mode != Mode::Eager || outcome.is_ok() {
        stepper.status().unwrap();
    }
    let values = [0, 1].map(|k| stepper.view::<f32>(ids[k]).unwrap()[0]);
    stepper.close().unwrap();
    (outcome, values)
}

#[test]
fn the_end_of_a_pass_claims_no_sum_that_only_the_caller_knows_of() {
    for (mode, borrows) in MODES.into_iter().flat_map(|mode| [false, true].map(|borrows| (mode, borrows))) {
        let bucket = if borrows { 0 } else { 1 };
        let refused = |outcome: Result<()>| {
            let text = outcome.unwrap_err().to_string();
            let named = format!("bucket {bucket}: not handed over");
            assert!(text.contains(&named) && text.contains(&format!("bucket_ready({bucket})")), "{text}");
        };
        let (outcome, values) = forget(Sums::by_caller(0, 2), borrows, mode);
        refused(outcome);
        assert_eq!(values[0], 1.0, "{mode:?}: the forgotten one is not stepped");
        // The sum of one rank is its gradient.
        let (outcome, values) = forget(Solo::default(), borrows, mode);
        outcome.unwrap();
        assert_eq!(values, [-1.0; 2]);
    }
}

#[test]
fn a_sum_that_fails_poisons_and_one_that_is_not_the_callers_is_refused() {
    let layout = Layout::builder().param("a", 1).param("b", 1).build().unwrap();
    let [a, b] = ["a", "b"].map(|name| layout.id(name).unwrap());
    for mode in MODES {
        let build = |sums: Sums| {
            let builder = Stepper::builder(&layout, AdamW::default()).mode(mode).bucket_cap_bytes(1);
            builder.unused(Unused::Refuse).record(true).host(sums).unwrap()
        };
        for panics in [false, true] {
            let mut stepper = build(Sums::by_caller(1, 2));
            let mut pass = stepper.begin().unwrap();
            for id in [a, b] {
                pass.write(id.grad(), &[1.0]).unwrap();
            }
            pass.bucket_ready_after(1, move || {
                if panics { panic!("lost a peer") } else { Err("lost a peer".into()) }
            })
            .unwrap();
            pass.bucket_ready_after(0, || Ok(())).unwrap();
            let error = pass.finish().and_then(|()| stepper.status().map(drop)).unwrap_err();
            let text = error.to_string();
            assert!(text.contains("lost a peer") && text.contains("sum of bucket 1"), "{mode:?}: {text}");
            assert!(stepper.close().is_err());
        }
        // What waits for a sum is no optimizer's time, and nothing races with what is awaited.
        let mut stepper = build(Sums::by_caller(0, 2));
        let mut pass = stepper.begin().unwrap();
        for id in [a, b] {
            pass.write(id.grad(), &[1.0]).unwrap();
        }
        let (summed, sum) = mpsc::channel();
        pass.bucket_ready_after(0, move || Ok(sum.recv()?)).unwrap();
        assert!(matches!(pass.view::<f32>(b.grad()), Err(Error::Order(_))));
        assert!(matches!(pass.bucket_ready(0), Err(Error::Order(_))));
        pass.bucket_ready(1).unwrap();
        summed.send(()).unwrap();
        pass.finish().unwrap();
        let recording = stepper.take_recording().unwrap();
        assert_eq!(stepper.check(&recording), [], "{mode:?}");
        assert!(recording.ran.iter().all(|ran| ran.op.action.is_work()));
        stepper.close().unwrap();
        let mut summing = build(Solo::default().into());
        let mut pass = summing.begin().unwrap();
        let refused = pass.bucket_ready_after(0, || Ok(())).unwrap_err().to_string();
        assert!(refused.contains("Sums::by_caller"), "{refused}");
    }
}

#[test]
fn the_sum_of_a_frozen_bucket_is_waited_for() {
    for mode in MODES {
        let layout = layout(&[3]);
        let id = layout.ids().next().unwrap();
        let (mut values, mut gradients) = ([1.0f32; 3], [0.0f32; 3]);
        let memory = Borrowed::new()
            .param(id, values.as_mut_ptr())
            .bucket(ForeignBucket::new(3).gradient(id, 0), gradients.as_mut_ptr());
        // SAFETY: the arrays outlive the stepper, and are touched as its rules say.
        let mut stepper =
            unsafe { builder(&layout, mode).host_borrowing(Sums::by_caller(0, 2), memory) }.unwrap();
        stepper.set_frozen(id, true).unwrap();
        let (summed, sum) = mpsc::channel();
        let mut pass = stepper.begin().unwrap();
        pass.bucket_ready_after(0, move || Ok(sum.recv()?)).unwrap();
        pass.finish().unwrap();
        summed.send(()).expect("the stepper waits");
        let recorded = stepper.take_recording().unwrap();
        assert_eq!(stepper.check(&recorded), []);
        stepper.close().unwrap();
        assert_eq!(values, [1.0; 3]);
    }
}
