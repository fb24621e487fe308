//! Buckets share a launch depending on what waits for them.
//!
//! The plans have real sizes, but no memory: a bucket has 25 MiB of gradients, as in PyTorch.

use std::sync::Arc;

use instep::layout::{BucketCaps, Plan, Precision, Tails};
use instep::op::{Action, Op};
use instep::schedule::{Decision, Opening, Policy, Schedule};
use instep::{Layout, Mode};

const BUCKETS: usize = 24;
const BUCKET_BYTES: u64 = 25 << 20;

/// Returns the first bucket of each launch and how many it steps, in order; asserts that each launch has one mark.
fn launches(ops: &[Op]) -> Vec<(u32, u32)> {
    let steps = ops.iter().enumerate().filter_map(|(at, op)| match op.action {
        Action::Step { bucket, count } => Some((at, (bucket, count))),
        _ => None,
    });
    steps
        .map(|(at, launch)| {
            assert!(matches!(ops[at + 1].action, Action::Record(_)), "{}", ops[at + 1]);
            launch
        })
        .collect()
}

struct Asked {
    mode: Mode,
    decision: Decision,
    sharded: bool,
    shards_params: bool,
    frozen: &'static [usize],
}

const PLAIN: Asked =
    Asked { mode: Mode::Normed, decision: Decision::None, sharded: false, shards_params: false, frozen: &[] };

/// Returns the launches of a pass over buckets of these sizes; bucket k has parameter `lengths.len() - 1 - k`.
fn of_pass(lengths: &[u64], asked: &Asked, with_next: impl Fn(usize) -> bool) -> Vec<(u32, u32)> {
    let builder = lengths
        .iter()
        .enumerate()
        .fold(Layout::builder(), |builder, (k, len)| builder.param(format!("p{k}"), *len as usize));
    let layout = builder.build().unwrap();
    let caps = BucketCaps { first_bytes: 1, rest_bytes: 1 };
    let mut plan = Plan::new(&layout, 4, caps, Tails::default(), Precision::F32).unwrap();
    if asked.sharded {
        plan = plan.sharded(&layout, 1).unwrap();
    }
    if asked.shards_params {
        plan = plan.with_sharded_params();
    }
    let plan = Arc::new(plan);
    assert_eq!(plan.buckets().len(), lengths.len());
    let policy = Policy::new(asked.mode, asked.decision);
    let mut schedule = Schedule::new(&layout, Arc::clone(&plan), policy);
    schedule.share_launches((0..lengths.len()).map(with_next).collect());
    for param in asked.frozen {
        schedule.touch_frozen(*param, true);
        schedule.set_frozen(*param, true);
    }
    schedule.begin(Opening::default()).unwrap();
    schedule.finish().unwrap();
    launches(&schedule.drain().collect::<Vec<_>>())
}

#[test]
fn a_launch_steps_128_mib_at_most_and_the_first_needed_bucket_has_its_own() {
    let lengths = [BUCKET_BYTES / 4; BUCKETS];
    let few = [(23, 1), (18, 5), (13, 5), (8, 5), (3, 5), (0, 3)];
    let each: Vec<_> = (0..24).rev().map(|bucket| (bucket, 1)).collect();
    let of = |asked: &Asked| of_pass(&lengths, asked, |_| true);
    let sequential = Asked { mode: Mode::Sequential, ..PLAIN };
    assert_eq!(of(&PLAIN), few);
    assert_eq!(of(&Asked { sharded: true, ..PLAIN }), few);
    assert_eq!(of(&Asked { sharded: true, shards_params: true, ..PLAIN }), few);
    // Nothing waits for a bucket alone, unless its parameters are gathered.
    assert_eq!(of(&sequential), [(0, 24)]);
    assert_eq!(of(&Asked { sharded: true, ..sequential }), few);
    assert_eq!(of(&Asked { sharded: true, shards_params: true, ..sequential }), [(0, 24)]);
    // A decision on each bucket comes before its step.
    assert_eq!(of(&Asked { decision: Decision::EachBucket, ..PLAIN }), each);
    let eager: Vec<_> = each.iter().rev().copied().collect();
    assert_eq!(of(&Asked { mode: Mode::Eager, ..PLAIN }), eager);
}

#[test]
fn buckets_that_may_not_share_and_frozen_ones_end_a_launch() {
    let lengths = [1000; 8];
    let sequential = Asked { mode: Mode::Sequential, ..PLAIN };
    assert_eq!(of_pass(&lengths, &PLAIN, |bucket| bucket != 3), [(7, 1), (4, 3), (0, 4)]);
    assert_eq!(of_pass(&lengths, &sequential, |bucket| bucket != 3), [(4, 4), (0, 4)]);
    // Parameters lie from the last bucket on: buckets 7, 4 and 3 are frozen, so 6 is needed first.
    let frozen = &[0, 3, 4];
    assert_eq!(of_pass(&lengths, &Asked { frozen, ..PLAIN }, |_| true), [(6, 1), (5, 1), (0, 3)]);
    assert_eq!(of_pass(&lengths, &Asked { frozen, ..sequential }, |_| true), [(5, 2), (0, 3)]);
    // One that is larger than a launch may be has its own.
    let large = [1000, 1000, 1000, 40 << 20, 1000, 1000];
    assert_eq!(of_pass(&large, &PLAIN, |_| true), [(5, 1), (3, 2), (2, 1), (0, 2)]);
}
