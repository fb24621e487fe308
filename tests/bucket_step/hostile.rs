//! Callers make calls that nobody should make: extreme lengths, wrong types of the right size, threads that share
//! everything.
//!
//! Every error is returned before an address is read.

use std::thread;

use instep::bucket_step::{Lent, StepTensors};
use instep::layout::ForeignBucket;
use instep::{
    AdamW, BucketStep, DType, Error, GradNorm, Layout, Master, Moments, Pool, Precision, Scaling, Sgd,
};

use super::refusals::refused;
use crate::support::paint;

#[test]
fn lengths_at_the_end_of_numbers_are_refused_and_wrap_nowhere() {
    for lens in [[usize::MAX, usize::MAX], [usize::MAX, 1], [1 << 62, 1 << 62], [1 << 56, 0]] {
        let layout = Layout::builder().param("a", lens[0]).param("b", lens[1]).build();
        let built = layout.and_then(|layout| BucketStep::builder(&layout, Sgd::default()).host());
        assert!(matches!(built, Err(Error::Layout(_))), "{lens:?}: {built:?}");
    }
    let layout = Layout::builder().param("a", 4).build().unwrap();
    let a = layout.id("a").unwrap();
    for (len, offset) in [(usize::MAX, 0), (4, usize::MAX), (4, usize::MAX - 3), (1 << 56, 0), (3, 0), (4, 1)]
    {
        let bucket = ForeignBucket::new(len).gradient(a, offset);
        let built = BucketStep::builder(&layout, Sgd::default()).bucket(bucket).host();
        assert!(matches!(built, Err(Error::Layout(_))), "{len} elements, offset {offset}: {built:?}");
    }
}

/// A bucket that is larger than this machine's memory still takes separate runs per parameter.
#[test]
fn a_parameter_at_the_end_of_a_vast_bucket_is_stepped_where_it_lies() {
    let layout = Layout::builder().param("a", 4).build().unwrap();
    let bucket = ForeignBucket::new((1 << 56) - 1).gradient(layout.id("a").unwrap(), (1 << 56) - 5);
    let sgd = Sgd { lr: 1.0, ..Default::default() };
    let mut step = BucketStep::builder(&layout, sgd).bucket(bucket).host().unwrap();
    let (mut params, grads) = ([1f32; 4], [0.5f32; 4]);
    let (runs, sums): (&mut [&mut [f32]], &[&[f32]]) = (&mut [&mut params], &[&grads]);
    step.step(&StepTensors::new(Lent::slices_mut(runs), Lent::slices(sums)), Scaling::NONE).unwrap();
    assert_eq!(params, [0.5; 4]);
    let whole = StepTensors::new(Lent::slice_mut(&mut params), Lent::slice(&grads));
    refused(step.step(&whole, Scaling::NONE), "where the bucket has 72057594037927935");
}

#[test]
fn a_type_of_the_right_size_that_is_another_one_is_refused() {
    let layout = Layout::builder().param("w", 4).build().unwrap();
    let precision =
        Precision { param: DType::BF16, grad: DType::BF16, moments: Moments::BF16, ..Precision::F32 };
    let sgd = Sgd { lr: 0.5, momentum: 0.9, ..Default::default() };
    let mut step = BucketStep::builder(&layout, sgd).precision(precision).host().unwrap();
    let (mut halves, grads) = ([half::f16::ONE; 4], [half::f16::ONE; 4]);
    let (mut params, sums, mut state) = ([half::bf16::ONE; 4], [half::bf16::ONE; 4], [half::bf16::ZERO; 4]);
    let mut try_step =
        |tensors: StepTensors<'_>, words: &str| refused(step.step(&tensors, Scaling::NONE), words);
    let tensors = StepTensors::new(Lent::slice_mut(&mut halves), Lent::slice(&sums));
    try_step(
        tensors.states([Lent::slice_mut(&mut state)]),
        "parameters: elements of f16, where the precision has bf16",
    );
    let tensors = StepTensors::new(Lent::slice_mut(&mut params), Lent::slice(&grads));
    try_step(
        tensors.states([Lent::slice_mut(&mut state)]),
        "gradients: elements of f16, where the precision has bf16",
    );
    let tensors = StepTensors::new(Lent::slice_mut(&mut params), Lent::slice(&sums));
    try_step(tensors.states([Lent::slice_mut(&mut halves)]), "(group `default`): elements of f16");
    // The bits of a number are no number.
    let mut bits = [half::bf16::ONE.to_bits(); 4];
    let tensors = StepTensors::new(Lent::slice_mut(&mut bits), Lent::slice(&sums));
    try_step(
        tensors.states([Lent::slice_mut(&mut state)]),
        "parameters: elements of u16, where the precision has bf16",
    );
}

#[test]
fn only_remainders_are_bits_of_16_and_8_and_only_codes_are_bits_of_8() {
    let layout = Layout::builder().param("w", 256).build().unwrap();
    let bf16 = Precision { param: DType::BF16, ..Precision::F32 };
    let precisions = [
        Precision { master: Master::Remainder16, ..bf16 },
        Precision { master: Master::Remainder8, ..bf16 },
        Precision { master: Master::F32, moments: Moments::EightBit, ..bf16 },
    ];
    for (precision, of_master, of_states) in precisions
        .into_iter()
        .zip([("u16", "f32"), ("u8", "f32"), ("f32", "u8")])
        .map(|(p, (m, s))| (p, m, s))
    {
        let sgd = Sgd { lr: 0.5, momentum: 0.9, ..Default::default() };
        let mut step = BucketStep::builder(&layout, sgd).precision(precision).host().unwrap();
        let (mut params, sums, mut scales) = ([half::bf16::ONE; 256], [1f32; 256], [0f32; 1]);
        let [mut words, mut more_words] = [[0u16; 256]; 2];
        let [mut bytes, mut more_bytes] = [[0u8; 256]; 2];
        let [mut floats, mut more_floats] = [[1f32; 256], [0f32; 256]];
        for master in ["u16", "u8", "f32"] {
            for state in ["u16", "u8", "f32"] {
                let lent = match master {
                    "u16" => Lent::slice_mut(&mut words),
                    "u8" => Lent::slice_mut(&mut bytes),
                    _ => Lent::slice_mut(&mut floats),
                };
                let of_state = match state {
                    "u16" => Lent::slice_mut(&mut more_words),
                    "u8" => Lent::slice_mut(&mut more_bytes),
                    _ => Lent::slice_mut(&mut more_floats),
                };
                let tensors = StepTensors::new(Lent::slice_mut(&mut params), Lent::slice(&sums));
                let mut tensors = tensors.master(lent).states([of_state]);
                if of_states == "u8" {
                    tensors = tensors.scales([Lent::slice_mut(&mut scales)]);
                }
                let outcome = step.step(&tensors, Scaling::NONE);
                let fits = (master, state) == (of_master, of_states);
                assert_eq!(outcome.is_ok(), fits, "{precision:?}, {master}, {state}: {outcome:?}");
            }
        }
    }
}

#[test]
fn a_scaler_at_an_odd_address_is_refused() {
    let layout = Layout::builder().param("w", 1).build().unwrap();
    let mut step = BucketStep::builder(&layout, Sgd::default()).host().unwrap();
    let (mut params, grads, numbers) = ([1f32], [1f32], [1f32, 0.0]);
    let odd = numbers.as_ptr().wrapping_byte_add(1);
    for (scale, found_inf, words) in [(odd, numbers.as_ptr(), "scale"), (numbers.as_ptr(), odd, "found_inf")]
    {
        // SAFETY: refused before it is read.
        let scaling = unsafe { Scaling::NONE.grad_scaler(scale, found_inf) };
        let tensors = StepTensors::new(Lent::slice_mut(&mut params), Lent::slice(&grads));
        refused(step.step(&tensors, scaling), words);
    }
    assert_eq!(params, [1.0]);
}

#[test]
fn nothing_to_step_needs_no_address() {
    let layout = Layout::builder().param("a", 0).param("b", 0).build().unwrap();
    let mut step = BucketStep::builder(&layout, Sgd::default()).host().unwrap();
    let null = std::ptr::null_mut();
    let nowhere = [null; 2];
    // SAFETY: there is no element.
    let (params, grads, apart) = unsafe { (Lent::at(null), Lent::at(null), Lent::at_each(&nowhere)) };
    step.step(&StepTensors::new(params, grads), Scaling::NONE).unwrap();
    let mut norm = GradNorm::host().unwrap();
    norm.begin(Scaling::NONE).unwrap();
    step.add_norm(&apart, &mut norm).unwrap();
    assert_eq!(norm.decide(None, true).unwrap().norm, 0.0);
    for id in layout.ids() {
        assert!(step.step_count(id).unwrap() <= 1);
    }
}

#[test]
fn a_norm_outlives_gradients_that_it_refused() {
    let layout = Layout::builder().param("w", 2).build().unwrap();
    let mut step = BucketStep::builder(&layout, Sgd::default()).host().unwrap();
    let mut norm = GradNorm::host().unwrap();
    norm.begin(Scaling::NONE).unwrap();
    refused(step.add_norm(&Lent::slice(&[3f32]), &mut norm), "gradients");
    step.add_norm(&Lent::slice(&[3f32, 4.0]), &mut norm).unwrap();
    assert_eq!(norm.decide(None, true).unwrap().norm, 5.0);
}

/// Trains one bucket for some steps.
fn train(pool: Pool, seed: usize) -> Vec<f32> {
    let layout = Layout::builder().param("w", 20_000).build().unwrap();
    let mut step = BucketStep::builder(&layout, AdamW::default()).pool(pool).host().unwrap();
    let [mut params, mut first, mut second] = [(); 3].map(|()| vec![0f32; 20_000]);
    for round in 0..60 {
        let grads: Vec<f32> = (0..20_000).map(|k| paint(seed + round, k)).collect();
        let states = [Lent::slice_mut(&mut first), Lent::slice_mut(&mut second)];
        let tensors = StepTensors::new(Lent::slice_mut(&mut params), Lent::slice(&grads)).states(states);
        step.step(&tensors, Scaling::mean(2)).unwrap();
    }
    params
}

#[test]
fn threads_that_share_a_pool_keep_their_own_bits_while_others_come_and_go() {
    let pool = Pool::new(3).unwrap();
    let shared: Vec<Vec<f32>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..6).map(|seed| (seed, pool.clone())).collect();
        drop(pool);
        let threads: Vec<_> =
            threads.into_iter().map(|(seed, pool)| scope.spawn(move || train(pool, seed))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (seed, bits) in shared.into_iter().enumerate() {
        assert!(bits == train(Pool::new(1).unwrap(), seed), "thread {seed}");
    }
}
