//! Plans of extreme sizes: each is exactly what unbounded arithmetic says, or an error.
//!
//! The reference computes in u128 and shares no code with the library. The tests allocate no tensor.

use std::collections::HashSet;

use instep::layout::{BucketCaps, Plan, Storage, Tails};
use instep::op::{Memory, Span};
use instep::{DType, Error, ForeignBucket, Layout, Precision};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use crate::schedule::property::for_all;

/// Neither layouts nor plans may have this number of elements.
const TOO_MANY: u128 = 1 << 56;

const QUANTUM: u128 = 256;

/// The input of a plan.
#[derive(Clone, Debug)]
struct Case {
    /// Length, whether the parameter is local, and the type that it may have.
    params: Vec<(u64, bool, Option<DType>)>,
    world_size: u32,
    caps: (u64, u64),
    tails: (bool, bool),
    grad: DType,
}

/// Draws numbers near every power of two, so that sums and products lie on both sides of each bound.
fn around_powers(bits: std::ops::Range<u32>) -> impl Strategy<Value = u64> {
    (bits, -2i64..=2).prop_map(|(bit, off)| (1u64 << bit).saturating_add_signed(off))
}

const TYPES: [Option<DType>; 4] = [None, Some(DType::F32), Some(DType::BF16), Some(DType::F16)];

fn is_local() -> impl Strategy<Value = bool> {
    prop::bool::weighted(0.2)
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
        prop_oneof![
            vec((length.clone(), is_local(), Just(None)), 1..7),
            vec((length, is_local(), select(TYPES.to_vec())), 1..12),
        ],
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

impl Case {
    /// Returns the types of a parameter and of its gradient.
    fn types(&self, param: usize) -> (DType, DType) {
        self.params[param].2.map_or((DType::F32, self.grad), |own| (own, own))
    }
}

fn layout(params: &[(u64, bool, Option<DType>)]) -> Result<Layout, Error> {
    let add = |layout: instep::LayoutBuilder,
               (k, (len, local, dtype)): (usize, &(u64, bool, Option<DType>))| {
        let layout = layout.param(format!("p{k}"), *len as usize);
        let layout = match dtype {
            Some(dtype) => layout.dtype(*dtype),
            None => layout,
        };
        if *local { layout.local() } else { layout }
    };
    params.iter().enumerate().fold(Layout::builder(), add).build()
}

/// A bucket by the definition: start, length, and the parameters with their offsets.
type Expected = (u128, u128, Vec<(usize, u128)>);

/// Returns buckets without offsets, as lists of parameters: parameters of one type fill buckets in order, and the last
/// parameter of a bucket decides its place.
fn filled(case: &Case) -> Vec<Vec<usize>> {
    let backward = || (0..case.params.len()).rev();
    let types: HashSet<(DType, DType)> = backward().map(|param| case.types(param)).collect();
    let mut buckets: Vec<Vec<usize>> = Vec::new();
    let mut full: Vec<(DType, DType)> = Vec::new();
    for is_local in [false, true] {
        let mut of_section: Vec<Vec<usize>> = Vec::new();
        for own in &types {
            let (mut open, mut gathered): (Vec<usize>, u128) = Default::default();
            for param in backward().filter(|k| case.types(*k) == *own && case.params[*k].1 == is_local) {
                open.push(param);
                gathered += u128::from(case.params[param].0) * u128::from(own.1.bytes());
                let cap = if full.contains(own) { case.caps.1 } else { case.caps.0 };
                if gathered >= u128::from(cap) {
                    of_section.push(std::mem::take(&mut open));
                    full.push(*own);
                    gathered = 0;
                }
            }
            if !open.is_empty() {
                of_section.push(open);
                full.push(*own);
            }
        }
        of_section.sort_by_key(|params| std::cmp::Reverse(params.last().copied()));
        buckets.extend(of_section);
    }
    buckets
}

fn expected(case: &Case) -> Vec<Expected> {
    let mut buckets: Vec<Expected> = Vec::new();
    for params in filled(case) {
        let start = buckets.last().map_or(0, |(start, len, _)| start + len);
        let (mut next, mut offsets, is_local) = (start, Vec::new(), case.params[params[0]].1);
        for param in params {
            offsets.push((param, next));
            next += u128::from(case.params[param].0).next_multiple_of(QUANTUM);
        }
        if next > start {
            next += u128::from(case.tails.1 && !is_local);
            next += if case.tails.0 { offsets.len() as u128 } else { 0 };
        }
        let len = (next - start).next_multiple_of(QUANTUM * u128::from(case.world_size));
        buckets.push((start, len, offsets));
    }
    buckets
}

/// Asserts that bytes follow each other without gaps, bucket by bucket, in every memory.
fn assert_bytes(plan: &Plan) {
    for memory in Memory::of_tensors(plan, 2) {
        let mut next = 0;
        for bucket in plan.buckets() {
            let (start, end) = match memory {
                Memory::Grads => (bucket.start, bucket.start + bucket.len),
                _ => (bucket.params.start, bucket.params.end),
            };
            let span = Span::within(memory, bucket, start, end);
            assert_eq!((span.start, span), (next, Span::elements(memory, plan, start, end)));
            let precision = bucket.storage.precision;
            let bytes = match memory {
                Memory::Params => precision.param.bytes(),
                Memory::Grads => precision.grad.bytes(),
                _ => 4,
            };
            assert_eq!(span.bytes(), (end - start) * bytes, "{memory:?}");
            next = span.end;
        }
        assert_eq!(Span::whole(memory, plan), Span { memory, start: 0, end: next });
    }
}

#[test]
fn a_plan_is_what_arithmetic_without_a_bound_says_or_an_error() {
    for_all(4000, case(), |case| {
        let elements: u128 = case.params.iter().map(|(len, ..)| u128::from(*len)).sum();
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
        let counts = |param| match case.types(param).1 {
            DType::F32 => 1 << 24,
            DType::F16 => 1 << 11,
            _ => 1 << 8,
        };
        let largest_count = (0..case.params.len()).map(counts).min();
        if (used || contributors) && Some(case.world_size) > largest_count {
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
        assert_bytes(&plan);
        for bucket in plan.buckets() {
            let types = (bucket.storage.precision.param, bucket.storage.precision.grad);
            assert!(plan.segments_of(bucket).iter().all(|s| case.types(s.param as usize) == types));
        }
    });
}

#[test]
fn many_small_buckets_of_many_ranks_are_refused_and_never_share_a_span() {
    // Each bucket is padded to 2^40 - 256 elements: 2^16 of them fit below 2^56, a few more do not.
    let plan = |count: usize| {
        let layout = layout(&vec![(1, false, None); count]).unwrap();
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
    let layout = layout(&[(big, false, None), (1, false, None), (1, false, None)]).unwrap();
    let caps = BucketCaps { first_bytes: 8, rest_bytes: 8 };
    let plan = Plan::new(&layout, 1 << 31, caps, Tails::default(), Storage::default()).unwrap();
    assert_eq!(plan.reordered(&layout, &[1, 2, 0]).unwrap().arena_len(), (1 << 56) - (1 << 39));
    let refused = plan.reordered(&layout, &[1, 0, 2]).unwrap_err().to_string();
    assert!(refused.contains("`p2`") && refused.contains("2^56"), "{refused}");
}

#[test]
fn callers_buckets_of_extreme_sizes_are_placed_or_refused() {
    for_all(2000, vec((around_powers(0..57), around_powers(0..64)), 1..5), |params| {
        let lens: Vec<_> = params.iter().map(|(len, _)| (*len, false, None)).collect();
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
