//! A closure replaces the all-reduce: what it sees, when it runs, what it cannot break, and how it fails.
//!
//! The reference is the same training without a hook, or a rank that gets the sums. A hook's own arithmetic depends
//! only on the bucket and the pass.

use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use instep::overlap::{Compressed, GradBucket, Hooked};
use instep::{
    Collective, Divisor, Error, InProcess, Layout, Mode, Result, SegmentAction, Sgd, Solo, Stepper, Unused,
    in_process,
};

use crate::support::{
    MODES, Optim, Options, Outcome, Presummed, few_optimizers, layout, one_per_state_count, paint_gradient,
    paint_params, pass,
};

const LENGTHS: [usize; 6] = [300, 17, 0, 2050, 257, 5];

fn all_reduce(bucket: &mut GradBucket<'_>) -> Result<()> {
    bucket.all_reduce()
}

/// Returns multiples of 1/64 below 2: sums of eight are exact in f32.
fn dyadic(step: usize, rank: usize, param: usize, element: usize) -> f32 {
    ((step * 31 + rank * 57 + param * 17 + element * 13) % 251) as f32 / 64.0 - 125.0 / 64.0
}

/// Four of the six parameters are stepped, one is averaged for another optimizer, and one is left as the sum.
fn subset() -> Layout {
    let named = LENGTHS.iter().enumerate();
    let builder = named.fold(Layout::builder(), |builder, (k, len)| {
        let action = [SegmentAction::Average, SegmentAction::Step, SegmentAction::Leave][(k + 2) % 6 % 3];
        builder.param(format!("p{k}"), *len).action(if k % 2 == 1 { SegmentAction::Step } else { action })
    });
    builder.build().unwrap()
}

/// Returns the outcome of every rank after some passes of two micro-batches, and asserts that nothing raced.
fn train<C: Collective + 'static>(
    layout: &Layout,
    ranks: u32,
    passes: usize,
    options: &Options,
    optim: Optim,
    wrap: impl Fn(InProcess) -> Result<C> + Sync,
) -> Vec<Outcome> {
    let outcomes = in_process(ranks, |comm| {
        let rank = comm.rank() as usize;
        let mut stepper = options.builder(layout, optim).record(true).host(wrap(comm)?)?;
        paint_params(&mut stepper);
        let ids: Vec<_> = layout.ids().collect();
        for step in 0..passes {
            let mut pass = stepper.begin_accumulating(2.try_into().unwrap())?;
            for micro_batch in 0..2 {
                if micro_batch > 0 {
                    pass.next_micro_batch()?;
                }
                for (param, id) in ids.iter().enumerate().rev() {
                    // One that some ranks do not use, one that none does.
                    if step % 3 == 1 && (param == 3 && rank % 2 == 1 || param == 4) {
                        continue;
                    }
                    let len = layout.parameter(*id)?.len as usize;
                    let values: Vec<f32> = (0..len).map(|k| dyadic(step, rank, param, k) / 2.0).collect();
                    pass.grads().add(*id, &values)?;
                    pass.grad_ready(*id)?;
                }
            }
            pass.finish()?;
        }
        let outcome = Outcome::of(&stepper)?;
        let recording = stepper.take_recording().unwrap();
        assert_eq!(stepper.check(&recording), []);
        Ok::<_, Error>(outcome)
    });
    outcomes.unwrap()
}

fn assert_all_same(ours: &[Outcome], theirs: &[Outcome], what: &str) {
    for (ours, theirs) in ours.iter().zip(theirs) {
        ours.assert_same(theirs, what);
        for (a, b) in ours.grads.iter().zip(&theirs.grads) {
            crate::support::assert_same_bits(a, b, what);
        }
    }
}

#[test]
fn a_hook_that_only_all_reduces_is_the_built_in() {
    for ranks in 1..=8 {
        let options = Options { mode: Mode::Eager, cap: Some(4096), ..Options::default() };
        let optim = few_optimizers()[ranks as usize % 4];
        let plain = train(&subset(), ranks, 100, &options, optim, Ok);
        let hooked = train(&subset(), ranks, 100, &options, optim, |comm| Ok(Hooked::new(comm, all_reduce)));
        assert_all_same(&hooked, &plain, &format!("{ranks} ranks"));
    }
}

#[test]
fn hooks_give_the_same_bits_in_every_mode_at_every_cap_with_every_tail() {
    for (mode, cap) in MODES.into_iter().zip([Some(1), None, Some(3000)]) {
        for uneven in [None, Some(Divisor::ContributingRanks)] {
            let options = Options { mode, cap, uneven, ..Options::default() };
            for optim in one_per_state_count() {
                let what = format!("{mode:?}, {cap:?}, {uneven:?}, {optim:?}");
                let plain = train(&subset(), 3, 6, &options, optim, Ok);
                let wrap = |comm| Ok(Hooked::new(comm, all_reduce));
                assert_all_same(&train(&subset(), 3, 6, &options, optim, wrap), &plain, &what);
                // In parts, in a buffer of its own, and after another hook.
                let parts = |bucket: &mut GradBucket<'_>| {
                    let half = bucket.values().len() / 2;
                    bucket.all_reduce_range(0..half)?;
                    let mut own = bucket.values()[half..].to_vec();
                    bucket.all_reduce_buffer(&mut own)?;
                    bucket.values_mut()[half..].copy_from_slice(&own);
                    Ok(())
                };
                let wrap = |comm| Ok(Hooked::new(Hooked::new(comm, parts), all_reduce));
                assert_all_same(&train(&subset(), 3, 6, &options, optim, wrap), &plain, &what);
            }
        }
    }
}

#[test]
fn averages_are_exactly_the_sum_of_the_ranks_over_their_number() {
    for ranks in 1..=8u32 {
        let layout = Layout::builder().param("w", 300).build().unwrap();
        let values = in_process(ranks, |comm| {
            let rank = comm.rank() as f32;
            let comm = Hooked::new(comm, all_reduce);
            let mut stepper = Stepper::host(&layout, Sgd { lr: 1.0, ..Default::default() }, comm)?;
            let w = layout.id("w")?;
            for _ in 0..100 {
                stepper.view_mut::<f32>(w)?.fill(0.0);
                let mut pass = stepper.begin()?;
                pass.grads().get_mut(w)?.fill(rank);
                pass.grad_ready(w)?;
                pass.finish()?;
                let mean = (ranks - 1) as f32 / 2.0;
                // The mean's factor is 1/ranks rounded, so the mean is exact where that is: for powers of two.
                let exact = |x: &f32| {
                    (x + mean).abs() <= if ranks.is_power_of_two() { 0.0 } else { mean * 2f32.powi(-23) }
                };
                assert!(stepper.view::<f32>(w)?.iter().all(exact), "{ranks} ranks");
            }
            Ok::<_, Error>(())
        });
        values.unwrap();
    }
}

/// The scale is fl(1/n), with a relative error of 2^-24, and the product adds as much: the result is within 2^-23 of
/// the mean.
#[test]
fn the_mean_over_three_and_six_ranks_is_off_by_an_ulp_of_its_scale_at_most() {
    for ranks in [3u32, 6] {
        for compress in [false, true] {
            let layout = Layout::builder().param("w", 4096).build().unwrap();
            // Sums of as many equal ones of six bits have eight at most: bf16 holds them.
            let value = |k: usize| (k % 42 + 1) as f32 * [1.0, 0.125][k / 42 % 2];
            let run = |comm: Box<dyn FnOnce(Sgd) -> Result<Stepper> + '_>| {
                let mut stepper = comm(Sgd { lr: 1.0, ..Default::default() })?;
                let w = layout.id("w")?;
                let mut pass = stepper.begin()?;
                pass.grads().get_mut(w)?.iter_mut().enumerate().for_each(|(k, g)| *g = value(k));
                pass.grad_ready(w)?;
                pass.finish()?;
                Ok::<_, Error>(stepper.view::<f32>(w)?.to_vec())
            };
            let values = in_process(ranks, |comm| {
                run(Box::new(|sgd| {
                    if compress {
                        Stepper::host(&layout, sgd, Hooked::new(Compressed::bf16(comm)?, all_reduce))
                    } else {
                        Stepper::host(&layout, sgd, Hooked::new(comm, all_reduce))
                    }
                }))
            });
            let off = |k: usize, got: f32| f64::from(-got) / f64::from(value(k)) - 1.0;
            for values in values.unwrap() {
                let offs: Vec<f64> = values.iter().enumerate().map(|(k, x)| off(k, *x)).collect();
                assert!(offs.iter().all(|off| off.abs() <= 2f64.powi(-23)), "{ranks} ranks, {compress}");
                let bias = offs.iter().sum::<f64>() / offs.len() as f64;
                assert!(bias.abs() <= 2f64.powi(-23), "{ranks} ranks, {compress}: a bias of {bias:e}");
            }
        }
    }
}

#[test]
fn a_hook_sees_each_bucket_in_order_on_the_reduce_streams_thread() {
    let layout = layout(&LENGTHS);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    let hook = move |bucket: &mut GradBucket<'_>| {
        let thread = std::thread::current().name().unwrap().to_owned();
        let gradients: Vec<_> = bucket.gradients().collect();
        for (param, range) in gradients.clone() {
            let painted = |k: usize| paint_gradient(bucket.pass() as usize, param, k);
            let values = bucket.values()[range].iter().enumerate();
            values.for_each(|(k, g)| assert_eq!(*g, painted(k), "p{param}, element {k}"));
        }
        assert_eq!((bucket.rank(), bucket.world_size()), (0, 2));
        let params: Vec<usize> = gradients.iter().map(|(param, _)| *param).collect();
        log.lock().unwrap().push((bucket.pass(), bucket.index(), bucket.is_last(), params, thread));
        Ok(())
    };
    // Nobody sums counts here.
    let unused = Unused::Refuse;
    let options = Options { cap: Some(2000), mode: Mode::Eager, unused, ..Options::default() };
    let mut stepper = options.stepper(&layout, few_optimizers()[0], Hooked::new(Presummed(2), hook)).unwrap();
    for step in 1..=2 {
        pass(&mut stepper, &options, |param, values| {
            values.iter_mut().enumerate().for_each(|(k, g)| *g = paint_gradient(step, param, k));
            true
        })
        .unwrap();
    }
    stepper.close().unwrap();
    let seen = seen.lock().unwrap();
    let expected = [(0, false, vec![5, 4, 3]), (1, true, vec![2, 1, 0])];
    let expected =
        (1..=2).flat_map(|pass| expected.clone().map(|(index, last, params)| (pass, index, last, params)));
    let got: Vec<_> =
        seen.iter().map(|(pass, index, last, params, _)| (*pass, *index, *last, params.clone())).collect();
    assert_eq!(got, expected.collect::<Vec<_>>());
    assert!(seen.iter().all(|x| x.4 == "instep-0-reduce"), "{seen:?}");
}

#[test]
fn what_a_hook_writes_between_gradients_adds_up_nowhere_and_reaches_no_count() {
    let layout = layout(&[5, 300]);
    let outcomes = in_process(3, |comm| {
        let hook = |bucket: &mut GradBucket<'_>| {
            let taken: Vec<_> = bucket.gradients().map(|(_, range)| range).collect();
            for (k, value) in bucket.values_mut().iter_mut().enumerate() {
                let is_padding = !taken.iter().any(|range| range.contains(&k));
                assert!(!is_padding || value.to_bits() == 0, "element {k} is {value}");
                *value = 1e30;
            }
            bucket.all_reduce()?;
            bucket.values_mut().fill(3.0); // gossip may end anywhere
            Ok(())
        };
        let options = Options { mode: Mode::Normed, max_norm: Some(1e9), ..Options::default() };
        let optim = Optim::of(Sgd { lr: 1.0, ..Sgd::default() });
        let mut stepper = options.stepper(&layout, optim, Hooked::new(comm, hook))?;
        for _ in 0..20 {
            // The second parameter is used by nobody.
            pass(&mut stepper, &options, |param, _| param == 0)?;
        }
        let norm = stepper.status()?.norm.unwrap();
        assert!((norm - 5f64.sqrt()).abs() < 1e-6, "five means of one: {norm}");
        Outcome::of(&stepper)
    });
    for outcome in outcomes.unwrap() {
        assert_eq!(outcome.step_counts, [20, 0]);
        assert!(outcome.params[0].iter().all(|p| *p == -20.0) && outcome.params[1].iter().all(|p| *p == 0.0));
    }
}

/// Runs three ranks, of which rank 1's hook misbehaves in its third pass; returns the group's error and those of ranks
/// 0 and 2.
fn misbehave(act: fn(&mut GradBucket<'_>) -> Result<()>) -> (Error, Vec<Error>) {
    let layout = layout(&[300, 300]);
    let seen = Mutex::new(Vec::new());
    let outcome = in_process(3, |comm| {
        let rank = comm.rank();
        let hook = move |bucket: &mut GradBucket<'_>| {
            let misbehaves = rank == 1 && bucket.pass() == 3 && bucket.is_last();
            if misbehaves { act(bucket) } else { bucket.all_reduce() }
        };
        let builder = Stepper::builder(&layout, Sgd::default()).bucket_cap_bytes(1);
        // Long: a panic may write its backtrace first, which takes a busy machine a second.
        let mut stepper = builder.deadline(Duration::from_secs(30)).host(Hooked::new(comm, hook))?;
        for _ in 0..1000 {
            let stepped = pass(&mut stepper, &Options::default(), |_, _| true);
            if let Err(error) = stepped.and_then(|()| stepper.status().map(|_| ())) {
                seen.lock().unwrap().push((rank, error.clone()));
                return Err(error);
            }
        }
        Ok(())
    });
    let seen = seen.into_inner().unwrap().into_iter();
    let seen: Vec<Error> = seen.filter(|(rank, _)| *rank != 1).map(|(_, error)| error).collect();
    assert_eq!(seen.len(), 2, "both other ranks end with an error");
    (outcome.unwrap_err(), seen)
}

#[test]
fn a_hook_that_errs_ends_the_group_in_its_own_words() {
    let (cause, seen) = misbehave(|_| Err(Error::Hook("out of noise".into())));
    assert_eq!(*cause.cause(), Error::Hook("out of noise".into()));
    let told =
        |e: &Error| matches!(e.cause(), Error::PeerLost { rank: 1, why } if why.contains("out of noise"));
    assert!(seen.iter().all(told), "{seen:?}");
}

#[test]
fn a_hook_that_panics_ends_the_group_with_its_message() {
    let (cause, seen) = misbehave(|_| panic!("no such rank"));
    assert!(
        matches!(cause.cause(), Error::Rank { rank: 1, message } if message == "no such rank"),
        "{cause}"
    );
    assert!(seen.iter().all(|e| matches!(e.cause(), Error::PeerLost { rank: 1, .. })), "{seen:?}");
}

#[test]
fn a_hook_that_returns_early_or_sums_too_often_on_one_rank_ends_the_group() {
    let acts: [fn(&mut GradBucket<'_>) -> Result<()>; 3] = [
        |_| Ok(()),
        |bucket| bucket.all_reduce().and_then(|()| bucket.all_reduce()),
        |bucket| bucket.all_reduce_range(0..7),
    ];
    for act in acts {
        let (cause, seen) = misbehave(act);
        for error in seen.iter().chain([&cause]) {
            let told = matches!(error.cause(), Error::Mismatch { .. } | Error::PeerLost { .. });
            assert!(told, "{error}");
        }
    }
}

#[test]
fn a_sum_that_failed_poisons_whatever_the_hook_makes_of_it() {
    let layout = layout(&[300]);
    let outcome = in_process(2, |comm| {
        let rank = comm.rank();
        let hook = move |bucket: &mut GradBucket<'_>| {
            let len = if rank == 0 { 8 } else { 9 };
            let _ = bucket.all_reduce_buffer(&mut [0.0; 9][..len]);
            assert!(bucket.all_reduce().is_err(), "and so do later ones");
            Ok(())
        };
        let mut stepper = Stepper::host(&layout, Sgd::default(), Hooked::new(comm, hook))?;
        stepper.begin()?.finish()?;
        stepper.close()
    });
    let error = outcome.unwrap_err();
    assert!(matches!(error.cause(), Error::Mismatch { .. }), "{error}");
}

#[test]
fn what_a_hook_cannot_do_is_an_error_by_name() {
    let layout = layout(&[300]);
    let run = |comm: &mut dyn FnMut() -> Result<Stepper>| {
        let mut stepper = comm().unwrap();
        stepper.begin().unwrap().finish().unwrap();
        stepper.close().unwrap_err()
    };
    let beyond = |bucket: &mut GradBucket<'_>| bucket.all_reduce_range(500..513);
    let error = run(&mut || Stepper::host(&layout, Sgd::default(), Hooked::new(Solo::default(), beyond)));
    assert!(matches!(error.cause(), Error::Hook(why) if why.contains("500..513")), "{error}");
    let part = |bucket: &mut GradBucket<'_>| bucket.all_reduce_range(0..7);
    let inner = || Hooked::new(Solo::default(), all_reduce);
    let error = run(&mut || Stepper::host(&layout, Sgd::default(), Hooked::new(inner(), part)));
    assert!(matches!(error.cause(), Error::Order(why) if why.wrong.contains("whole buckets")), "{error}");
    assert!(!inner().reaches(instep::Place::Cuda(0)));
}

#[test]
fn a_hook_around_compression_sends_what_it_sums_as_sixteen_bits() {
    let options = Options { mode: Mode::Normed, max_norm: Some(0.5), ..Options::default() };
    let optim = few_optimizers()[3];
    let alone = train(&subset(), 4, 5, &options, optim, Compressed::bf16);
    let hooked =
        train(&subset(), 4, 5, &options, optim, |comm| Ok(Hooked::new(Compressed::bf16(comm)?, all_reduce)));
    assert_all_same(&hooked, &alone, "bf16");
    // Sums of these gradients have few bits; a thousandth more gives them all there are.
    let scaled = |bucket: &mut GradBucket<'_>| {
        bucket.values_mut().iter_mut().for_each(|g| *g *= 1.001);
        bucket.all_reduce()
    };
    let rounded =
        train(&subset(), 4, 5, &options, optim, |comm| Ok(Hooked::new(Compressed::bf16(comm)?, scaled)));
    let plain = train(&subset(), 4, 5, &options, optim, |comm| Ok(Hooked::new(comm, scaled)));
    assert!(rounded[0].params != plain[0].params);
}

#[test]
fn a_pass_has_a_last_bucket_beside_parameters_that_are_each_ranks_own() {
    let layout = Layout::builder().param("own", 4).local().param("a", 4).param("b", 4).build().unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    let comm = Hooked::new(Solo::default(), move |bucket: &mut GradBucket<'_>| {
        log.lock().unwrap().push(bucket.is_last());
        bucket.all_reduce()
    });
    let mut stepper = Stepper::builder(&layout, Sgd::default()).bucket_cap_bytes(1).host(comm).unwrap();
    stepper.begin().unwrap().finish().unwrap();
    stepper.status().unwrap();
    assert_eq!(*seen.lock().unwrap(), [false, true]);
}

/// A sum over ranks that no communicator of a stepper makes, such as a framework's own.
struct Elsewhere {
    total: Mutex<Vec<f32>>,
    met: Barrier,
}

impl Elsewhere {
    fn all_reduce(&self, values: &mut [f32]) {
        let mut total = self.total.lock().unwrap();
        total.resize(values.len(), 0.0);
        total.iter_mut().zip(&*values).for_each(|(total, value)| *total += value);
        drop(total);
        self.met.wait();
        values.copy_from_slice(&self.total.lock().unwrap());
        if self.met.wait().is_leader() {
            self.total.lock().unwrap().clear();
        }
        self.met.wait();
    }
}

#[test]
fn ranks_whose_counts_nobody_sums_are_told_instead_of_skipping_different_parameters() {
    let layout = layout(&[300, 17]);
    let outcomes = |unused: Unused, uneven: Option<Divisor>| -> Vec<Result<Outcome>> {
        let elsewhere = Elsewhere { total: Mutex::default(), met: Barrier::new(2) };
        let elsewhere = Arc::new(elsewhere);
        let run = |rank: usize| {
            let sums = Arc::clone(&elsewhere);
            let hook = move |bucket: &mut GradBucket<'_>| {
                sums.all_reduce(bucket.values_mut());
                Ok(())
            };
            let options = Options { unused, uneven, ..Options::default() };
            let mut stepper =
                options.stepper(&layout, few_optimizers()[1], Hooked::new(Presummed(2), hook))?;
            paint_params(&mut stepper);
            // Only one of the ranks uses the second parameter.
            pass(&mut stepper, &options, |param, values| {
                values.fill(1.0);
                param != rank
            })?;
            Outcome::of(&stepper)
        };
        std::thread::scope(|scope| {
            let run = &run;
            let ranks = [0, 1].map(|rank| scope.spawn(move || run(rank)));
            ranks.map(|rank| rank.join().unwrap()).into()
        })
    };
    for (unused, uneven) in [(Unused::Skip, None), (Unused::StepZero, Some(Divisor::ContributingRanks))] {
        for outcome in outcomes(unused, uneven) {
            let error = outcome.unwrap_err();
            assert!(matches!(error.cause(), Error::Unsupported(_)), "{unused:?}: {error}");
        }
    }
    let equal: Vec<Outcome> = outcomes(Unused::StepZero, None).into_iter().collect::<Result<_>>().unwrap();
    equal[0].assert_same(&equal[1], "without counts");
}

#[test]
fn a_hook_that_says_it_left_means_has_the_bits_of_sums() {
    let options = Options { cap: Some(4096), ..Options::default() };
    let means = |bucket: &mut GradBucket<'_>| {
        bucket.all_reduce()?;
        // A quarter is exact, and so is its inverse.
        bucket.values_mut().iter_mut().for_each(|sum| *sum *= 0.25);
        bucket.means_to_sums();
        Ok(())
    };
    let optim = few_optimizers()[2];
    let plain = train(&subset(), 4, 5, &options, optim, Ok);
    let hooked = train(&subset(), 4, 5, &options, optim, |comm| Ok(Hooked::new(comm, means)));
    assert_all_same(&hooked, &plain, "means");
}
