//! Random trainings with separate buckets agree with a stepper that never moves a tensor.
//!
//! Before every step the parameters are put into other buckets, in another order, at other addresses. A parameter's
//! counts and tensors move with it, as when PyTorch's reducer rebuilds its buckets. `PROPTEST_CASES` raises the number
//! of cases.

use std::collections::HashMap;

use instep::layout::{ForeignBucket, Storage};
use instep::{BucketStep, Isa, Layout, Mode, ParamId, Pool, Scaling, Solo};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

use super::memory::Own;
use crate::schedule::property::for_all;
use crate::support::stored::{DTYPES, EMA_DECAY, Stored, accepted, dyadic, with};
use crate::support::{Optim, Options, Presummed, layout, optimizers, pass};

/// The way a step is taken.
#[derive(Clone, Debug)]
struct Cut {
    /// The bucket of each parameter; if there are more buckets than parameters, some stay empty.
    buckets: Vec<Index>,
    /// Sorts buckets, and parameters inside a bucket.
    order: Vec<u32>,
    /// For each bucket, whether it has one run for all parameters, and the elements between an allocation and a run.
    places: Vec<(bool, usize)>,
    threads: usize,
    isa: Index,
}

#[derive(Clone, Debug)]
struct Case {
    lens: Vec<usize>,
    storage: Storage,
    optim: Optim,
    world_size: u32,
    cuts: Vec<Cut>,
}

const MAX_PARAMS: usize = 7;

fn cut() -> impl Strategy<Value = Cut> {
    let per_param = (vec(any::<Index>(), MAX_PARAMS), vec(any::<u32>(), MAX_PARAMS));
    (per_param, vec((any::<bool>(), 0..9usize), MAX_PARAMS), 1..4usize, any::<Index>())
        .prop_map(|((buckets, order), places, threads, isa)| Cut { buckets, order, places, threads, isa })
}

fn case() -> impl Strategy<Value = Case> {
    let len = prop_oneof![Just(0usize), Just(1), 2..40usize, 250..520usize, Just(2049)];
    let storage =
        (select(accepted().collect::<Vec<_>>()), prop::option::of(select(&DTYPES[..])), any::<bool>());
    let storage = storage.prop_map(|(precision, copy, ema)| Storage { precision, copy, ema });
    (vec(len, 1..=MAX_PARAMS), storage, any::<Index>(), 1..5u32, vec(cut(), 1..5)).prop_map(
        |(lens, storage, optim, world_size, cuts)| {
            let takes = |optim: &Optim| {
                let layout = Layout::builder().param("w", 1).build().unwrap();
                let builder = with(optim.builder(&layout), &storage).mode(Mode::Sequential);
                builder.host(Solo::default()).is_ok()
            };
            let optims: Vec<Optim> = optimizers().into_iter().filter(takes).collect();
            Case { lens, storage, optim: optims[optim.index(optims.len())], world_size, cuts }
        },
    )
}

fn gradient(step: usize, param: usize, len: usize) -> Vec<f32> {
    (0..len).map(|k| dyadic(step, 0, param, k)).collect()
}

fn first_values(param: usize, len: usize) -> Vec<f32> {
    (0..len).map(|k| dyadic(7, 1, param, k)).collect()
}

/// Returns the outcome of the same training by one stepper.
fn expected(case: &Case, layout: &Layout) -> Stored {
    let builder = with(case.optim.builder(layout), &case.storage).mode(Mode::Sequential).threads(1);
    let mut stepper = builder.host(Presummed(case.world_size)).unwrap();
    for ((param, id), len) in layout.ids().enumerate().zip(&case.lens) {
        stepper.write(id, &first_values(param, *len)).unwrap();
    }
    for step in 0..case.cuts.len() {
        pass(&mut stepper, &Options::default(), |param, values| {
            values.copy_from_slice(&gradient(step, param, values.len()));
            true
        })
        .unwrap();
    }
    Stored::of(&stepper).unwrap()
}

/// One bucket, and its parameters.
struct Part {
    step: BucketStep,
    own: Own,
    params: Vec<usize>,
}

/// The state that moves with a parameter from one bucket to another.
type Left = HashMap<usize, (usize, u64, f64)>;

fn parts(case: &Case, cut: &Cut, layout: &Layout) -> Vec<Part> {
    let ids: Vec<ParamId> = layout.ids().collect();
    let count = case.lens.len();
    let mut in_buckets: Vec<Vec<usize>> = vec![Vec::new(); count];
    (0..count).for_each(|param| in_buckets[cut.buckets[param].index(count)].push(param));
    in_buckets.iter_mut().for_each(|params| params.sort_by_key(|param| cut.order[*param]));
    in_buckets.retain(|params| !params.is_empty());
    in_buckets.sort_by_key(|params| cut.order[params[0]].reverse_bits());
    let states = case.optim.boxed().state_names().len();
    let part = |(at, params): (usize, Vec<usize>)| {
        let of_bucket: Vec<ParamId> = params.iter().map(|param| ids[*param]).collect();
        let (is_whole, shift) = cut.places[at];
        let own = Own::new(layout, &of_bucket, (&case.storage, states), is_whole, shift);
        let listed = of_bucket.iter().zip(&own.offsets);
        let bucket = listed.fold(ForeignBucket::new(own.len), |b, (id, at)| b.gradient(*id, *at));
        let isas = Isa::available();
        let builder = BucketStep::builder(layout, case.optim.boxed())
            .bucket(bucket)
            .pool(Pool::new(cut.threads).unwrap());
        let mut builder = builder.precision(case.storage.precision).isa(isas[cut.isa.index(isas.len())]);
        builder = case.storage.copy.map_or(builder.clone(), |dtype| builder.copy_params(dtype));
        builder = if case.storage.ema { builder.ema(EMA_DECAY) } else { builder };
        Part { step: builder.host().unwrap(), own, params }
    };
    in_buckets.into_iter().enumerate().map(part).collect()
}

#[test]
fn buckets_cut_anew_before_every_step_give_the_bits_of_one_stepper() {
    for_all(300, case(), |case| {
        let layout = layout(&case.lens);
        let (mut old, mut left): (Vec<Part>, Left) = (Vec::new(), Left::new());
        for (step, cut) in case.cuts.iter().enumerate() {
            let mut new = parts(&case, cut, &layout);
            for part in &mut new {
                for (index, param) in part.params.iter().enumerate() {
                    let id = part.own.ids[index];
                    match left.get(param) {
                        None => part.own.write(index, &first_values(*param, case.lens[*param]), false),
                        Some((from, count, carried)) => {
                            let from = &old[*from];
                            let place = from.params.iter().position(|p| p == param).unwrap();
                            part.own.take(index, &from.own, place);
                            part.step.set_step_count(id, (*count, *carried)).unwrap();
                        }
                    }
                    part.own.write(index, &gradient(step, *param, case.lens[*param]), true);
                }
                let Part { step, own, .. } = part;
                own.lend(|tensors| step.step(tensors, Scaling::mean(case.world_size))).unwrap();
            }
            left.clear();
            for (at, part) in new.iter().enumerate() {
                for (param, id) in part.params.iter().zip(&part.own.ids) {
                    let (count, carried) =
                        (part.step.step_count(*id).unwrap(), part.step.carried(*id).unwrap());
                    left.insert(*param, (at, count, carried.unwrap_or(1.0)));
                }
            }
            old = new;
        }
        let expected = expected(&case, &layout);
        old.iter().for_each(|part| part.own.assert_same(&part.params, &part.step, &expected, &case));
    });
}
