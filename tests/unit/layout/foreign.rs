//! Tests of a layout with gradients where the caller says.
//!
//! The plan alone says where states lie.

use super::*;
use crate::layout::Storage;

#[test]
fn gradients_lie_where_the_caller_says_and_states_where_the_plan_does() {
    let layout = Layout::builder().param("a", 300).param("b", 5).param("c", 0).build().unwrap();
    let [a, b, c] = ["a", "b", "c"].map(|name| layout.id(name).unwrap());
    let buckets =
        [ForeignBucket::new(10).gradient(c, 10).gradient(b, 3), ForeignBucket::new(301).gradient(a, 1)];
    let plan = Plan::foreign(&layout, &buckets, Storage::default()).unwrap();
    let places: Vec<_> = (0..3).map(|p| plan.segment_of(p)).map(|s| (s.start, s.grad_start)).collect();
    assert_eq!(places, [(256, 11), (0, 3), (0, 10)]);
    assert_eq!((plan.arena_len(), plan.grads_len()), (256 + 512, 311));
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let layout = Layout::builder().param("a", 4).param("b", 4).build().unwrap();
    let [a, b] = ["a", "b"].map(|name| layout.id(name).unwrap());
    let bucket = |len: usize| ForeignBucket::new(len);
    let cases = [
        (vec![bucket(8).gradient(a, 0)], "gradient of `b`: in no bucket"),
        (vec![bucket(8).gradient(a, 0).gradient(b, 4), bucket(4)], "bucket 1: holds no gradient"),
        (vec![bucket(8).gradient(a, 0).gradient(b, 3)], "overlap"),
        (vec![bucket(8).gradient(a, 0).gradient(b, 5)], "`b`: ends outside bucket 0"),
        (vec![bucket(8).gradient(a, 0), bucket(usize::MAX).gradient(b, usize::MAX - 4)], "past 2^56"),
        (vec![bucket(8).gradient(a, usize::MAX).gradient(b, 0)], "`a`: ends outside"),
        (
            vec![bucket(8).gradient(a, 0).gradient(b, 4), bucket(4).gradient(a, 0)],
            "gradient of `a`: listed twice",
        ),
        (vec![bucket(12).gradient(a, 0).gradient(a, 4).gradient(b, 8)], "gradient of `a`: listed twice"),
    ];
    for (buckets, word) in cases {
        let error = Plan::foreign(&layout, &buckets, Storage::default()).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
}
