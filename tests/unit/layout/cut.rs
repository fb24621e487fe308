//! Tests of how parameters are cut into buckets.
//!
//! Buckets fill from the last parameter, or in the order that is given.

use super::*;
use crate::layout::{Gradients, SegmentAction, Storage};

const NO_TAILS: Tails = Tails { used: false, contributors: false };
const ALL_TAILS: Tails = Tails { used: true, contributors: true };

fn plan(lens: &[usize], world_size: u32, cap: u64, tails: Tails) -> Plan {
    let mut builder = Layout::builder();
    for (k, len) in lens.iter().enumerate() {
        builder = builder.param(format!("p{k}"), *len);
    }
    let caps = BucketCaps { first_bytes: cap, rest_bytes: cap };
    Plan::new(&builder.build().unwrap(), world_size, caps, tails, Storage::default()).unwrap()
}

#[test]
fn buckets_fill_from_the_last_parameter_and_close_at_the_cap() {
    let plan = plan(&[100, 300, 10, 20], 1, 1024, NO_TAILS);
    let params: Vec<Vec<u32>> =
        plan.buckets().iter().map(|b| plan.segments_of(b).iter().map(|s| s.param).collect()).collect();
    assert_eq!(params, [vec![3, 2, 1], vec![0]]);
}

#[test]
fn segments_start_on_quanta_and_buckets_are_padded_to_the_world() {
    for world_size in 1..=8 {
        for tails in [NO_TAILS, Tails { used: true, ..NO_TAILS }, ALL_TAILS] {
            let plan = plan(&[1, 0, 255, 256, 257, 5000, 0], world_size, 2000, tails);
            let mut next = 0;
            for bucket in plan.buckets() {
                assert_eq!(bucket.start, next);
                assert_eq!(bucket.len % (u64::from(world_size) * QUANTUM), 0);
                next += bucket.len;
                let mut free = bucket.start;
                for segment in plan.segments_of(bucket) {
                    assert!(segment.start % QUANTUM == 0 && segment.start >= free);
                    free = segment.start + segment.len;
                    assert_eq!(segment.tail.is_some(), tails.used && bucket.len > 0);
                    let tail = segment.tail.unwrap_or(bucket.tail.start);
                    assert!(bucket.tail.is_empty() || bucket.tail.contains(&tail));
                }
                let first = (!bucket.tail.is_empty()).then_some(bucket.tail.start);
                assert_eq!(bucket.contributors, first.filter(|_| tails.contributors));
                assert!(free <= bucket.tail.start && bucket.tail.end <= bucket.start + bucket.len);
            }
            assert_eq!(plan.arena_len(), next);
        }
    }
}

#[test]
fn buckets_fill_in_the_order_that_is_given_and_in_no_other() {
    let cut = plan(&[100, 300, 10, 20], 1, 1024, NO_TAILS).with_gradients(Gradients::Zero);
    let lens = [100, 300, 10, 20].into_iter().enumerate();
    let layout = lens.fold(Layout::builder(), |layout, (k, len)| layout.param(format!("p{k}"), len));
    let layout = layout.build().unwrap();
    let same = cut.reordered(&layout, &[3, 2, 1, 0]).unwrap();
    assert_eq!(same, cut);
    let plan = cut.reordered(&layout, &[1, 0, 3, 2]).unwrap();
    let params: Vec<Vec<u32>> =
        plan.buckets().iter().map(|b| plan.segments_of(b).iter().map(|s| s.param).collect()).collect();
    assert_eq!(params, [vec![1], vec![0, 3, 2]]);
    assert!((0..4).all(|param| plan.segment_of(param).param == param as u32));
    for order in [&[0, 1, 2][..], &[0, 1, 2, 2], &[0, 1, 2, 4], &[0, 1, 2, 3, 3]] {
        assert!(matches!(cut.reordered(&layout, order), Err(Error::Layout(_))), "{order:?}");
    }
}

#[test]
fn runs_of_stepped_gradients_leave_out_what_stays() {
    let layout = Layout::builder().param("a", 300).param("b", 5).action(SegmentAction::Average);
    let layout = layout.param("c", 0).param("d", 256).param("e", 1).build().unwrap();
    let plan = Plan::new(&layout, 1, BucketCaps::default(), ALL_TAILS, Storage::default()).unwrap();
    let runs: Vec<_> = plan.stepped_gradients(&plan.buckets()[0]).collect();
    assert_eq!(runs, [0..512, 768..1280]);
}

#[test]
fn zero_length_parameters_alone_make_a_bucket_without_bytes() {
    let plan = plan(&[0, 0], 4, 1, ALL_TAILS);
    assert_eq!((plan.buckets().len(), plan.buckets()[0].len), (1, 0));
    assert!(plan.segments().iter().all(|s| s.tail.is_none()) && plan.carrier().is_none());
}
