//! Plans of extreme sizes: each is exactly what arithmetic without a bound says, or an error.
//!
//! The oracle computes in u128 and shares no code with the library. Nothing here allocates a tensor.

use instep::layout::{BucketCaps, Plan, Storage, Tails};
use instep::{DType, Error, ForeignBucket, Layout, Precision};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use crate::schedule::property::for_all;

/// Neither layouts nor plans may hold so many elements.
const TOO_MANY: u128 = 1 << 56;

const QUANTUM: u128 = 256;

/// What a plan is cut from.
#[derive(Clone, Debug)]
struct Case {
    /// Length, and whether the parameter is local.
    params: Vec<(u64, bool)>,
    world_size: u32,
    caps: (u64, u64),
    tails: (bool, bool),
    grad: DType,
}

/// Numbers near every power of two, so that sums and products land on both sides of each bound.
fn around_powers(bits: std::ops::Range<u32>) -> impl Strategy<Value = u64> {
    (bits, -2i64..=2).prop_map(|(bit, off)| (1u64 << bit).saturating_add_signed(off))
}

fn case() -> impl Strategy<Value = Case> {
    let length = prop_oneof![
        4 => 0u64..5000,
        3 => around_powers(20..54),
        3 => around_powers(54..57),
        1 => around_powers(57..64),
    ];
    let ranks = prop_oneof![1u32..=8, 1u32..=u32::MAX, Just(u32::MAX), Just(1 << 31), Just(1 << 24)];
    let cap = prop_oneof![Just(1u64), 1..=1u64 << 20, around_powers(2..64), Just(u64::MAX)];
    (
        vec((length, prop::bool::weighted(0.2)), 1..7),
        ranks,
        (cap.clone(), cap),
        (any::<bool>(), any::<bool>()),
        select(vec![DType::F32, DType::BF16]),
    )
        .prop_map(|(params, world_size, caps, tails, grad)| Case {
            params,
            world_size,
            caps,
            tails,
            grad,
        })
}

fn layout(params: &[(u64, bool)]) -> Result<Layout, Error> {
    let add = |layout: instep::LayoutBuilder, (k, (len, local)): (usize, &(u64, bool))| {
        let layout = layout.param(format!("p{k}"), *len as usize);
        if *local { layout.local() } else { layout }
    };
    params.iter().enumerate().fold(Layout::builder(), add).build()
}

/// A bucket by the definition: start, length, and the parameters with their offsets.
type Expected = (u128, u128, Vec<(usize, u128)>);

fn expected(case: &Case) -> Vec<Expected> {
    let bytes = u128::from(case.grad.bytes());
    let (mut order, local): (Vec<usize>, Vec<usize>) =
        (0..case.params.len()).rev().partition(|param| !case.params[*param].1);
    let summed = order.len();
    order.extend(local);
    let (mut buckets, mut open, mut gathered): (Vec<Expected>, Vec<usize>, u128) = Default::default();
    for (place, param) in order.iter().enumerate() {
        open.push(*param);
        gathered += u128::from(case.params[*param].0) * bytes;
        let cap = if buckets.is_empty() { case.caps.0 } else { case.caps.1 };
        if gathered < u128::from(cap) && place + 1 != summed && place + 1 != order.len() {
            continue;
        }
        let start = buckets.last().map_or(0, |(start, len, _)| start + len);
        let (mut next, mut offsets) = (start, Vec::new());
        for param in open.drain(..) {
            offsets.push((param, next));
            next += u128::from(case.params[param].0).next_multiple_of(QUANTUM);
        }
        if next > start {
            let is_local = case.params[*param].1;
            next += u128::from(case.tails.1 && !is_local);
            next += if case.tails.0 { offsets.len() as u128 } else { 0 };
        }
        let len = (next - start).next_multiple_of(QUANTUM * u128::from(case.world_size));
        buckets.push((start, len, offsets));
        gathered = 0;
    }
    buckets
}

#[test]
fn a_plan_is_what_arithmetic_without_a_bound_says_or_an_error() {
    for_all(4000, case(), |case| {
        let elements: u128 = case.params.iter().map(|(len, _)| u128::from(*len)).sum();
        let layout = match layout(&case.params) {
            Ok(layout) => layout,
            Err(Error::Layout(why)) => {
                assert!(elements >= TOO_MANY && why.wrong.contains("2^56"), "{why}");
                return;
            }
            Err(other) => panic!("{other}"),
        };
        assert!(elements < TOO_MANY);
        let (used, contributors) = case.tails;
        let caps = BucketCaps { first_bytes: case.caps.0, rest_bytes: case.caps.1 };
        let storage = Storage::from(Precision { grad: case.grad, ..Precision::F32 });
        let plan = Plan::new(&layout, case.world_size, caps, Tails { used, contributors }, storage);
        let largest_count = if case.grad == DType::F32 { 1 << 24 } else { 1 << 8 };
        if (used || contributors) && case.world_size > largest_count {
            assert!(matches!(plan, Err(Error::Config { field: "grad", .. })), "{plan:?}");
            return;
        }
        let buckets = expected(&case);
        let end = buckets.last().map_or(0, |(start, len, _)| start + len);
        let plan = match plan {
            Ok(plan) => plan,
            Err(Error::Layout(why)) => {
                assert!(end >= TOO_MANY && why.wrong.contains("2^56") && why.thing.contains("`p"), "{why}");
                return;
            }
            Err(other) => panic!("{other}"),
        };
        assert!(end < TOO_MANY, "the plan has {end} elements");
        assert_eq!(u128::from(plan.arena_len()), end);
        let seen: Vec<Expected> = plan
            .buckets()
            .iter()
            .map(|bucket| {
                let offset = |s: &instep::layout::Segment| (s.param as usize, s.start.into());
                let offsets = plan.segments_of(bucket).iter().map(offset).collect();
                (bucket.start.into(), bucket.len.into(), offsets)
            })
            .collect();
        assert_eq!(seen, buckets);
    });
}

#[test]
fn many_small_buckets_of_many_ranks_are_refused_and_never_share_a_span() {
    // Each bucket is padded to 2^40 - 256 elements: 2^16 of them fit below 2^56, a few more do not.
    let plan = |count: usize| {
        let layout = layout(&vec![(1, false); count]).unwrap();
        let caps = BucketCaps { first_bytes: 1, rest_bytes: 1 };
        Plan::new(&layout, u32::MAX, caps, Tails::default(), Storage::default()).map(|plan| plan.arena_len())
    };
    assert_eq!(plan(1 << 16).unwrap(), (1 << 56) - (1 << 24));
    let refused = plan((1 << 16) + 1).unwrap_err().to_string();
    assert!(refused.contains("`p0`") && refused.contains("4294967295 ranks"), "{refused}");
}

#[test]
fn another_order_of_the_same_parameters_may_be_refused() {
    // Buckets are multiples of 2^39 elements. The small parameters fit only if they share a bucket.
    let big = (1u64 << 56) - (2 << 39);
    let layout = layout(&[(big, false), (1, false), (1, false)]).unwrap();
    let caps = BucketCaps { first_bytes: 8, rest_bytes: 8 };
    let plan = Plan::new(&layout, 1 << 31, caps, Tails::default(), Storage::default()).unwrap();
    assert_eq!(plan.reordered(&layout, &[1, 2, 0]).unwrap().arena_len(), (1 << 56) - (1 << 39));
    let refused = plan.reordered(&layout, &[1, 0, 2]).unwrap_err().to_string();
    assert!(refused.contains("`p2`") && refused.contains("2^56"), "{refused}");
}

#[test]
fn callers_buckets_of_extreme_sizes_are_placed_or_refused() {
    for_all(2000, vec((around_powers(0..57), around_powers(0..64)), 1..5), |params| {
        let lens: Vec<(u64, bool)> = params.iter().map(|(len, _)| (*len, false)).collect();
        let Ok(layout) = layout(&lens) else { return };
        let buckets: Vec<ForeignBucket> = layout
            .ids()
            .zip(&params)
            .map(|(id, (_, len))| ForeignBucket::new(*len as usize).gradient(id, 0))
            .collect();
        let fits = params.iter().all(|(len, bucket)| len <= bucket);
        let grads: u128 = params.iter().map(|(_, bucket)| u128::from(*bucket)).sum();
        let arena: u128 = params.iter().map(|(len, _)| u128::from(*len).next_multiple_of(QUANTUM)).sum();
        match Plan::foreign(&layout, &buckets, Storage::default()) {
            Ok(plan) => {
                assert!(fits && grads < TOO_MANY && arena < TOO_MANY);
                assert_eq!((u128::from(plan.grads_len()), u128::from(plan.arena_len())), (grads, arena));
            }
            Err(Error::Layout(why)) => assert!(!fits || grads >= TOO_MANY || arena >= TOO_MANY, "{why}"),
            Err(other) => panic!("{other}"),
        }
    });
}
