//! Ranks have different amounts of data: all end with the same bits, which are those of a plain rank that gets the
//! sums.
//!
//! The plain rank is built again for each pass, with as many ranks as the divisor says, and loaded by name. The mean
//! over any number of ranks is therefore compared exactly. Gradients are dyadic, so every sum is exact. A rank's data
//! and its learning rate must depend only on the pass.

use instep::layout::DEFAULT_GROUP;
use instep::{
    Adam, Divisor, Error, InProcess, Layout, Mode, OffloadPolicy, ParamId, Result, SegmentAction, Sgd, Solo,
    Status, Stepper, Strategy, Unused, in_process,
};

use crate::stepper::resume::load;
use crate::support::{
    MODES, Optim, Options, Outcome, Presummed, assert_same_bits, few_optimizers, layout, paint_params,
};

const LENGTHS: [usize; 6] = [300, 17, 0, 2050, 257, 5];
const AVERAGED: usize = 1;
const DIVISORS: [Divisor; 2] = [Divisor::WorldSize, Divisor::ContributingRanks];
const CAPS: [Option<u64>; 3] = [None, Some(1500), Some(1)];

/// Returns a layout with one averaged parameter.
fn mixed() -> Layout {
    let mut builder = Layout::builder();
    for (k, len) in LENGTHS.iter().enumerate() {
        builder = builder.param(format!("p{k}"), *len);
        if k == AVERAGED {
            builder = builder.action(SegmentAction::Average);
        }
    }
    builder.build().unwrap()
}

/// Returns multiples of 1/64 below 2, or none if a rank does not use the parameter.
fn gradient(at: usize, rank: usize, param: usize, element: usize) -> Option<f32> {
    let unused = (at == 1 && param == 3 && rank.is_multiple_of(2)) || (at == 2 && param == 4);
    let n = (at * 31 + rank * 57 + param * 17 + element * 13) % 251;
    (!unused).then_some((n as f32 - 125.0) / 64.0)
}

fn rate(at: usize) -> f64 {
    0.05 / (at + 1) as f64
}

/// The pass that one rank poisons, if passes that are not finite are skipped.
const POISONED: usize = 1;

#[derive(Clone, Copy, Debug)]
struct Case<'a> {
    options: &'a Options,
    optim: Optim,
    /// The number of batches of each rank.
    batches: &'a [usize],
}

impl Case<'_> {
    fn with_data(&self, at: usize) -> Vec<usize> {
        (0..self.batches.len()).filter(|rank| at < self.batches[*rank]).collect()
    }

    fn passes(&self) -> usize {
        self.batches.iter().copied().max().unwrap()
    }

    /// Fills in the sum of these ranks' gradients.
    fn fill(&self, at: usize, ranks: &[usize], param: usize, values: &mut [f32]) -> bool {
        let mut used = false;
        values.fill(0.0);
        for &rank in ranks {
            for (element, value) in values.iter_mut().enumerate() {
                if let Some(g) = gradient(at, rank, param, element) {
                    *value += g * self.options.loss_scale as f32;
                    used = true;
                }
            }
        }
        let poisons = self.options.skip_nonfinite && at == POISONED && ranks.contains(&self.with_data(at)[0]);
        if poisons && param == 0 {
            values[299] = f32::INFINITY;
        }
        used
    }

    fn pass(&self, stepper: &mut Stepper, at: usize, ranks: &[usize]) -> Result<()> {
        let ids: Vec<ParamId> = stepper.layout().ids().collect();
        let mut pass = stepper.begin()?;
        for param in (0..ids.len()).rev() {
            pass.params().get(ids[param])?;
            let mut values = vec![0.0; LENGTHS[param]];
            if self.fill(at, ranks, param, &mut values) {
                pass.grads().write(ids[param], &values)?;
                pass.grad_ready(ids[param])?;
            }
        }
        crate::support::finish(pass)
    }

    /// Returns the outcome of one rank after each pass; in the last one no rank has data. With `watched`, the test
    /// reads after each pass, which prevents overlap.
    fn rank(&self, comm: InProcess, watched: bool) -> Result<Vec<Outcome>> {
        let rank = instep::Collective::rank(&comm) as usize;
        let mut stepper = self.options.stepper(&mixed(), self.optim, comm)?;
        paint_params(&mut stepper);
        let mut outcomes = Vec::new();
        for at in 0.. {
            stepper.set_lr(DEFAULT_GROUP, rate(at))?;
            let goes_on = if at < self.batches[rank] {
                self.pass(&mut stepper, at, &[rank])?;
                true
            } else {
                stepper.join()?
            };
            if watched || !goes_on {
                outcomes.push(Outcome::of(&stepper)?);
            }
            assert_eq!(goes_on, at < self.passes(), "one round after the last batch of all ranks");
            if !goes_on {
                break;
            }
        }
        let recording = stepper.take_recording().unwrap();
        assert_eq!(stepper.check(&recording), [], "{self:?}");
        stepper.close()?;
        Ok(outcomes)
    }

    /// Returns the start, and the outcomes of the same passes by one rank that gets the sums, with as many ranks as the
    /// divisor says.
    fn expected(&self) -> Vec<Outcome> {
        let world_size = self.batches.len() as u32;
        let plain = Options {
            uneven: None,
            mode: Mode::Sequential,
            cap: None,
            record: false,
            ..self.options.clone()
        };
        let alone = |ranks| plain.stepper(&mixed(), self.optim, Presummed(ranks)).unwrap();
        let mut stepper = alone(world_size);
        paint_params(&mut stepper);
        let mut outcomes = vec![Outcome::of(&stepper).unwrap()];
        for at in 0..self.passes() {
            let ranks = self.with_data(at);
            let mut next = match self.options.uneven.unwrap() {
                Divisor::WorldSize => alone(world_size),
                Divisor::ContributingRanks => alone(ranks.len() as u32),
            };
            load(&stepper, &mut next).unwrap();
            next.set_lr(DEFAULT_GROUP, rate(at)).unwrap();
            self.pass(&mut next, at, &ranks).unwrap();
            outcomes.push(Outcome::of(&next).unwrap());
            stepper = next;
        }
        outcomes
    }

    fn assert_ranks_train_as_one(&self) {
        let what = format!("{self:?}");
        let ranks = in_process(self.batches.len() as u32, |comm| self.rank(comm, true)).unwrap();
        let expected = self.expected();
        for (rank, outcomes) in ranks.iter().enumerate() {
            let what = format!("rank {rank}, {what}");
            let (last, passes) = outcomes.split_last().unwrap();
            assert_eq!(passes.len(), self.passes(), "{what}");
            for (at, (outcome, expected)) in passes.iter().zip(&expected[1..]).enumerate() {
                let what = format!("pass {at}, {what}");
                outcome.assert_same(expected, &what);
                for param in 0..LENGTHS.len() {
                    assert_same_bits(
                        &outcome.grads[param],
                        &expected.grads[param],
                        &format!("gradient, {what}"),
                    );
                }
                assert_eq!(decided(outcome.status, self), decided(expected.status, self), "{what}");
            }
            last.assert_same(expected.last().unwrap(), &format!("nothing is stepped, {what}"));
            assert_eq!(last.status.pass, self.passes() as u64 + 1, "{what}");
            assert!(!last.status.skipped, "{what}");
        }
        // Overlapped, without a look in between.
        let ranks = in_process(self.batches.len() as u32, |comm| self.rank(comm, false)).unwrap();
        for outcomes in &ranks {
            outcomes[0].assert_same(expected.last().unwrap(), &format!("unwatched, {what}"));
        }
    }
}

/// Returns the part of a pass's status that is equal in all modes with these options.
fn decided(status: Status, case: &Case) -> (bool, u64, Option<u64>, bool) {
    let wants_norm = case.options.max_norm.is_some() || case.options.skip_nonfinite;
    let norm = status.norm.filter(|_| wants_norm).map(f64::to_bits);
    (status.skipped, status.clip.to_bits(), norm, status.first_nonfinite_bucket.is_some())
}

/// Returns modes, divisors, and treatments of unused parameters; `norm` asks for clipping and skipping.
fn ways(norm: bool) -> Vec<Options> {
    let mut ways = Vec::new();
    for mode in MODES.into_iter().filter(|mode| !norm || *mode != Mode::Eager) {
        for divisor in DIVISORS {
            for (unused, cap) in
                [Unused::Skip, Unused::StepZero].into_iter().flat_map(|u| CAPS.map(|c| (u, c)))
            {
                let (uneven, record) = (Some(divisor), true);
                let (max_norm, loss_scale) = if norm { (Some(0.5), 128.0) } else { (None, 1.0) };
                let skip_nonfinite = norm;
                ways.push(Options {
                    mode,
                    cap,
                    unused,
                    uneven,
                    max_norm,
                    loss_scale,
                    skip_nonfinite,
                    record,
                    ..Options::default()
                });
            }
        }
    }
    ways
}

#[test]
fn ranks_with_different_amounts_of_data_end_with_the_bits_of_one_rank_that_is_fed_the_sums() {
    let few = few_optimizers();
    let (sgd, adam) = (few[1], few[2]);
    for options in ways(false) {
        for batches in [&[2][..], &[3, 1], &[2, 3, 0], &[0, 0, 2, 3], &[1, 1, 4, 2]] {
            let optim = if batches.len() % 2 == 0 { sgd } else { adam };
            Case { options: &options, optim, batches }.assert_ranks_train_as_one();
        }
    }
}

#[test]
fn clip_and_skip_are_decided_alike_on_ranks_with_and_without_data() {
    let [_, sgd, ..] = few_optimizers();
    for options in ways(true) {
        for batches in [&[1, 3][..], &[3, 2, 4, 0, 2]] {
            Case { options: &options, optim: sgd, batches }.assert_ranks_train_as_one();
        }
    }
}

#[test]
fn ranks_with_the_same_amount_of_data_need_one_round_more_and_none_steps_nothing_at_all() {
    for options in ways(false) {
        for batches in [&[2, 2, 2][..], &[0, 0], &[0]] {
            Case { options: &options, optim: few_optimizers()[3], batches }.assert_ranks_train_as_one();
        }
    }
}

#[test]
fn joining_ends_also_where_the_bucket_that_counts_or_everything_is_frozen() {
    let layout = layout(&LENGTHS);
    for mut options in ways(false) {
        options.cap = Some(1);
        for all in [false, true] {
            let outcomes = in_process(3, |comm| {
                let rank = instep::Collective::rank(&comm) as usize;
                let mut stepper = options.stepper(&layout, few_optimizers()[1], comm)?;
                let ids: Vec<ParamId> = layout.ids().collect();
                let frozen = if all { &ids[..] } else { &ids[5..] };
                frozen.iter().try_for_each(|id| stepper.set_frozen(*id, true))?;
                let train = |stepper: &mut Stepper| {
                    for _ in 0..rank {
                        let mut pass = stepper.begin()?;
                        for id in ids.iter().rev().filter(|id| !frozen.contains(id)) {
                            pass.grads().get_mut(*id)?.fill(1.0);
                            pass.grad_ready(*id)?;
                        }
                        pass.finish()?;
                    }
                    let mut joined = 0;
                    while stepper.join()? {
                        joined += 1;
                        assert!(rank + joined <= 2, "rank 2 has two batches: {options:?}");
                    }
                    assert_eq!(rank + joined, 2, "{options:?}");
                    Result::Ok(())
                };
                train(&mut stepper)?;
                let first = Outcome::of(&stepper)?;
                // Data again, and the carrier is stepped and read right after its last reduce.
                stepper.set_frozen(ids[5], false)?;
                let mut pass = stepper.begin()?;
                pass.grads().write(ids[5], &[1.0; 5])?;
                pass.finish()?;
                assert!(stepper.view::<f32>(ids[5])?.iter().all(|x| *x != 0.0));
                stepper.set_frozen(ids[5], true)?;
                train(&mut stepper)?;
                let recording = stepper.take_recording().unwrap();
                assert_eq!(stepper.check(&recording), [], "{options:?}");
                Ok::<_, Error>((first, Outcome::of(&stepper)?))
            });
            let outcomes = outcomes.unwrap();
            let stepped = if all { 0 } else { 2 };
            assert_eq!(outcomes[0].0.step_counts, [stepped, stepped, 0, stepped, stepped, 0], "{options:?}");
            for (first, second) in &outcomes {
                first.assert_same(&outcomes[0].0, &format!("{options:?}"));
                second.assert_same(&outcomes[0].1, &format!("{options:?}"));
            }
        }
    }
}

#[test]
fn a_frozen_parameter_whose_bucket_counts_ranks_is_read_after_the_copies_of_its_last_step() {
    let layout = Layout::builder().param("w", 300).build().unwrap();
    let w = layout.id("w").unwrap();
    for (strategy, offloads) in
        [(Strategy::Replicated, true), (Strategy::Zero, false), (Strategy::Zero, true)]
    {
        for mode in MODES {
            in_process(2, |comm| {
                let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Sgd::default() }).record(true);
                let builder = builder.uneven_inputs(Divisor::WorldSize).strategy(strategy).mode(mode);
                let builder = if offloads { builder.offload(OffloadPolicy::default()) } else { builder };
                let mut stepper = builder.host(comm)?;
                let mut pass = stepper.begin()?;
                pass.grads().write(w, &[1.0f32; 300])?;
                pass.finish()?;
                stepper.set_frozen(w, true)?;
                stepper.begin()?.finish()?; // the counts of ranks alone
                assert_eq!(stepper.view::<f32>(w)?, [-1.0; 300], "{strategy:?}, {mode:?}");
                let recording = stepper.take_recording().unwrap();
                assert_eq!(stepper.check(&recording), [], "{strategy:?}, {mode:?}, offload: {offloads}");
                Result::Ok(())
            })
            .unwrap();
        }
    }
}

#[test]
fn joining_is_refused_without_the_option_without_elements_and_inside_a_pass() {
    let is_config = |outcome: Result<bool>| {
        assert!(matches!(outcome, Err(Error::Config { field: "uneven_inputs", .. })), "{outcome:?}");
    };
    let optim = Optim::of(Adam::default());
    let mut without = Options::default().stepper(&layout(&[3]), optim, Solo::default()).unwrap();
    is_config(without.join());
    without.begin().unwrap().finish().unwrap();
    for divisor in DIVISORS {
        let options = Options { uneven: Some(divisor), ..Options::default() };
        is_config(options.stepper(&layout(&[0, 0]), optim, Solo::default()).map(|_| true));
        let mut stepper = options.stepper(&layout(&[0, 3]), optim, Solo::default()).unwrap();
        std::mem::forget(stepper.begin().unwrap());
        assert!(matches!(stepper.join(), Err(Error::Order(_))));
        stepper.abandon().unwrap();
        stepper.begin().unwrap().abandon().unwrap();
        // What is alone has nobody to go on with, which a Solo rank cannot know: its sums are made elsewhere.
        assert!(!stepper.join().unwrap());
        assert_eq!(stepper.step_count(stepper.layout().id("p1").unwrap()).unwrap(), 0);
    }
}

#[test]
fn a_loss_scale_must_fit_every_number_of_contributing_ranks() {
    // Over eight ranks 2^-128 leaves 2^125, but over one it overflows; 2^124 leaves a subnormal over eight.
    let scales =
        [(2f64.powi(-128), [true, false]), (2f64.powi(124), [false, false]), (2f64.powi(-124), [true, true])];
    for (loss_scale, accepted) in scales {
        for (divisor, accepted) in DIVISORS.into_iter().zip(accepted) {
            let options = Options { uneven: Some(divisor), loss_scale, ..Options::default() };
            let built = options.stepper(&layout(&[3]), few_optimizers()[0], Presummed(8));
            let refused = matches!(built, Err(Error::Config { field: "loss_scale", .. }));
            assert_eq!((built.is_ok(), refused), (accepted, !accepted), "{loss_scale:e}, {divisor:?}");
        }
    }
}

#[test]
fn ranks_that_count_differently_are_told_at_the_first_collective() {
    for (ours, theirs) in [(Some(DIVISORS[0]), Some(DIVISORS[1])), (None, Some(DIVISORS[0]))] {
        let outcome = in_process(2, |comm| {
            let uneven = if instep::Collective::rank(&comm) == 0 { ours } else { theirs };
            let options = Options { uneven, ..Options::default() };
            let mut stepper = options.stepper(&layout(&LENGTHS), few_optimizers()[0], comm)?;
            stepper.begin()?.finish()?;
            stepper.close()
        });
        let error = outcome.unwrap_err();
        assert!(matches!(error.cause(), Error::Mismatch { .. }), "{error}");
    }
}
