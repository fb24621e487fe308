//! Tests of texts of errors: numbers, mismatches, and names that resemble the one that was given.
//!
//! An error says what to change.

use super::{Error, one_of, readable};

#[test]
fn a_number_of_many_digits_is_written_with_an_exponent() {
    let shown =
        [1e300, 1e-300, -1.0, 0.1, f64::NAN, f64::INFINITY].map(|number| readable(number.to_string()));
    assert_eq!(shown, ["1e300", "1e-300", "-1", "0.1", "NaN", "inf"]);
    assert_eq!(readable("param.weight.of.a.long.name".into()), "param.weight.of.a.long.name");
}

#[test]
fn a_mismatch_says_which_calls_to_make_equal() {
    let told = |ours: &str, theirs: &str, differs: &str| {
        let [ours, theirs, differs] = [ours, theirs, differs].map(str::to_owned);
        Error::Mismatch { rank: 1, ours, other_rank: 0, theirs, differs }.to_string()
    };
    let (whole, bucket) = ("all-gather, pass 1, 64 bytes", "all-gather, pass 1, bucket 2, 64 bytes");
    for (text, advice) in [
        (
            told(whole, "reduce-scatter, pass 2, bucket 0, 64 bytes", "kind and pass"),
            "on all ranks or on none",
        ),
        (told(whole, whole, "length"), "the same tensors in the same order"),
        (told(bucket, bucket, "bucket and length"), "; unshard the same buckets in the same order"),
        (told(bucket, bucket, "loaded values [`b` was written on rank 1]"), "; write the same on all ranks"),
        (
            told(
                bucket,
                bucket,
                "frozen, unused or written parameters, loaded values, or how many micro-batches",
            ),
            "; freeze, name as unused, write and load the same",
        ),
        (told("all-reduce, pass 1, bucket 2", "broadcast, pass 1", "kind"), "; make calls, layouts"),
    ] {
        assert!(text.contains(advice), "{text}");
    }
}

#[test]
fn known_names_are_listed_up_to_eight() {
    assert_eq!(one_of("q", []), "no name, since none is known");
    assert_eq!(one_of("q", ["a"]), "a");
    assert_eq!(one_of("b", ["a", "b"]), "one of a, b");
    assert_eq!(one_of("q", ["x"; 8]), "one of x, x, x, x, x, x, x, x");
    assert_eq!(one_of("q", ["x"; 10]), "one of x, x, x, x, x, x, x, x or 2 more");
}

#[test]
fn of_many_names_the_closest_come_first() {
    let names: Vec<String> =
        (0..100).flat_map(|k| [format!("layer{k}.weight"), format!("layer{k}.bias")]).collect();
    let first = |given| {
        let listed = one_of(given, names.iter().map(String::as_str));
        listed.strip_prefix("one of ").unwrap().split(", ").next().unwrap().to_owned()
    };
    for given in ["layer42.wieght", "Layer42.Weight", "module.layer42.weight", "layer42.weights"] {
        assert_eq!(first(given), "layer42.weight", "{given}");
    }
    assert_eq!(first("layer42.bais"), "layer42.bias");
    assert_eq!(first("layer?.weight"), "layer0.weight", "the first of those that are equally close");
}
