//! `instep diff`: exit codes, distances, and the report of every kind of difference.
//!
//! These tests compare the JSON and the exit status, because scripts read them. Of the printed text, these tests
//! compare only the parts that a reader looks for.

use instep::DType;
use serde_json::{Value, json};

use crate::support::{Content, Folder, assert_refused, stdout};

fn diff(a: &Content, b: &Content) -> (Option<i32>, Value, String) {
    diff_within(a, b, &[])
}

fn diff_within(a: &Content, b: &Content, tolerance: &[&str]) -> (Option<i32>, Value, String) {
    let folder = Folder::new();
    folder.write("A", &a.bytes());
    folder.write("B", &b.bytes());
    let text = folder.run(&[&["diff", "A", "B"], tolerance].concat());
    let json = folder.run(&[&["diff", "A", "B", "--json"], tolerance].concat());
    assert_eq!(text.status.code(), json.status.code());
    (json.status.code(), serde_json::from_slice(&json.stdout).unwrap(), stdout(&text))
}

fn one(values: &[f32]) -> Content {
    Content::default().with("param.w", &[values.len()], values)
}

#[test]
fn equal_files_are_equal_nan_and_emptiness_included() {
    let content = one(&[1.0, f32::NAN, -0.0]).with("param.empty", &[0, 3], &[]).with_count("w", "7");
    let (status, report, text) = diff(&content, &content);
    assert_eq!((status, &report["equal"]), (Some(0), &json!(true)));
    assert_eq!(text, "param.empty: equal\nparam.w: equal\nequal\n");
}

#[test]
fn the_largest_distance_is_found_wherever_it_is() {
    let a = vec![1.0f32; 40_000];
    let mut b = a.clone();
    b[3] = f32::from_bits(1.0f32.to_bits() + 2);
    b[39_999] = f32::from_bits(1.0f32.to_bits() - 9);
    let (status, report, text) = diff(&one(&a), &one(&b));
    assert_eq!(status, Some(1));
    assert_eq!(report["tensors"][0]["different"], 2);
    let worst = json!({"index": 39_999, "ulp": 9, "a": "1.0", "b": "0.99999946"});
    assert_eq!(report["tensors"][0]["worst"], worst);
    assert!(
        text.contains("param.w: 2 of 40000 differ, most by 9 ulp at 39999: 1.0 and 0.99999946"),
        "{text}"
    );
}

#[test]
fn distances_cross_zero_and_nan_is_farther_than_any_number() {
    let ulp = |a: f32, b: f32| diff(&one(&[a]), &one(&[b])).1["tensors"][0]["worst"]["ulp"].clone();
    assert_eq!(ulp(f32::from_bits(1), -f32::from_bits(2)), 3);
    assert_eq!(ulp(0.0, -0.0), 0);
    assert_eq!(ulp(f32::MAX, f32::INFINITY), 1);
    assert_eq!(ulp(f32::INFINITY, f32::NEG_INFINITY), 2 * 0x7f80_0000u64);
    assert_eq!(ulp(1.0, f32::NAN), Value::Null);
    let (_, report, _) = diff(&one(&[1.0, f32::NAN, 1.0]), &one(&[f32::MAX, 1.0, 9.0]));
    assert_eq!(report["tensors"][0]["worst"]["index"], 1);
}

#[test]
fn distances_are_counted_in_the_type_of_the_tensors() {
    for dtype in [DType::BF16, DType::F16] {
        let of = |values: &[f32]| one(values).retyped("param.w", dtype);
        let next = |place: &mut u32| *place += 3;
        let (a, mut b) = (of(&[1.0, -0.0, f32::INFINITY]), of(&[1.0, -0.0, f32::INFINITY]));
        next(&mut b.tensors.get_mut("param.w").unwrap().1[0]);
        assert_eq!(diff(&a, &b).1["tensors"][0]["worst"]["ulp"], 3, "{dtype}");
        assert_eq!(diff(&of(&[0.0]), &of(&[-0.0])).1["tensors"][0]["worst"]["ulp"], 0);
        assert_eq!(diff(&of(&[f32::NAN]), &of(&[1.0])).1["tensors"][0]["worst"]["ulp"], Value::Null);
        assert_eq!(diff(&a, &a).0, Some(0));
    }
}

#[test]
fn equal_values_of_different_types_are_a_difference() {
    let (status, report, text) = diff(&one(&[1.0]), &one(&[1.0]).retyped("param.w", DType::BF16));
    assert_eq!((status, &report["tensors"][0]["different"]), (Some(1), &json!(0)));
    assert_eq!([&report["tensors"][0]["dtype_a"], &report["tensors"][0]["dtype_b"]], ["F32", "BF16"]);
    assert!(text.contains("param.w: F32 and BF16"), "{text}");
}

#[test]
fn names_shapes_and_counts_that_differ_are_listed() {
    let a = one(&[1.0, 2.0]).with("state.w.x", &[1], &[0.0]).with_count("w", "7").with_count("v", "1");
    let b =
        Content::default().with("param.w", &[2, 1], &[1.0, 2.0]).with("z", &[1], &[0.0]).with_count("w", "8");
    let (status, report, text) = diff(&a, &b);
    assert_eq!(status, Some(1));
    assert_eq!(report["only_in_a"], json!(["state.w.x"]));
    assert_eq!(report["only_in_b"], json!(["z"]));
    let counts = json!([{"key": "step.v", "a": "1", "b": null}, {"key": "step.w", "a": "7", "b": "8"}]);
    assert_eq!(report["counts"], counts);
    assert!(text.contains("param.w: shape [2] and [2, 1]") && text.ends_with("different\n"), "{text}");
}

#[test]
fn files_that_cannot_be_read_are_refused() {
    let folder = Folder::new();
    folder.write("A", &one(&[1.0]).bytes());
    folder.write("broken", b"12345678{}");
    assert_refused(&folder.run(&["diff", "A", "nowhere"]), "nowhere");
    assert_refused(&folder.run(&["diff", "broken", "A"]), "broken");
    assert_refused(&folder.run(&["diff", "A"]), "<B>");
    assert_refused(&folder.run(&["diff", "A", "."]), "regular file");
}

/// Returns whether `diff` accepts `a` in place of `b`. The compared tensors are `[1, a, 2]` and `[1, b, 2]`.
fn accepts(tolerance: &[&str], a: f32, b: f32) -> bool {
    let (status, report, text) = diff_within(&one(&[1.0, a, 2.0]), &one(&[1.0, b, 2.0]), tolerance);
    assert_eq!(report["within"], json!(status == Some(0)), "{text}");
    status == Some(0)
}

#[test]
fn a_tolerance_in_ulp_accepts_that_many_steps_and_no_more() {
    let next = |value: f32, steps: u32| f32::from_bits(value.to_bits() + steps);
    assert!(
        accepts(&["--max-ulp", "3"], 1.0, next(1.0, 3)) && !accepts(&["--max-ulp", "2"], 1.0, next(1.0, 3))
    );
    assert!(accepts(&["--max-ulp", "3"], -f32::from_bits(1), f32::from_bits(2)));
    assert!(accepts(&["--max-ulp", "0"], 0.0, -0.0) && !accepts(&["--max-ulp", "0"], 1.0, next(1.0, 1)));
    for dtype in [DType::BF16, DType::F16] {
        let a = one(&[1.0]).retyped("param.w", dtype);
        let mut b = a.clone();
        b.tensors.get_mut("param.w").unwrap().1[0] += 2;
        assert_eq!(diff_within(&a, &b, &["--max-ulp", "2"]).0, Some(0), "{dtype}");
        assert_eq!(diff_within(&a, &b, &["--max-ulp", "1"]).0, Some(1), "{dtype}");
    }
}

#[test]
fn absolute_and_relative_tolerances_add_up_over_the_second_file() {
    assert!(accepts(&["--atol", "0.5"], 1.0, 1.5) && !accepts(&["--atol", "0.25"], 1.0, 1.5));
    // |1 - 2| is half of 2 and all of 1.
    assert!(accepts(&["--rtol", "0.5"], 1.0, 2.0) && !accepts(&["--rtol", "0.5"], 2.0, 1.0));
    assert!(accepts(&["--rtol", "0.5", "--atol", "0.5"], 2.0, 1.0));
    assert!(accepts(&["--atol", "0"], 0.0, -0.0) && !accepts(&[], 0.0, -0.0));
}

#[test]
fn either_kind_of_tolerance_is_enough_for_an_element() {
    let both = ["--max-ulp", "1", "--atol", "1e-6"];
    let next = f32::from_bits(1e20f32.to_bits() + 1);
    assert!(accepts(&both, 1e20, next) && accepts(&both, 1e-9, -1e-9));
    assert!(!accepts(&both[..2], 1e-9, -1e-9) && !accepts(&both[2..], 1e20, next));
}

#[test]
fn within_a_tolerance_nan_is_nan_and_an_infinity_only_itself() {
    let wide = ["--max-ulp", "18446744073709551615", "--atol", "1e300", "--rtol", "1e300"];
    let other_nan = f32::from_bits(f32::NAN.to_bits() + 5);
    assert!(accepts(&wide, f32::NAN, other_nan) && !accepts(&[], f32::NAN, other_nan));
    for (a, b) in [(f32::NAN, 1.0), (f32::INFINITY, f32::MAX), (f32::INFINITY, f32::NEG_INFINITY)] {
        assert!(!accepts(&wide, a, b) && !accepts(&wide, b, a), "{a} and {b}");
    }
    assert!(accepts(&wide, f32::INFINITY, f32::INFINITY) && accepts(&wide, f32::MAX, f32::MIN));
}

#[test]
fn the_summary_names_the_worst_element_of_all_tensors() {
    let a = one(&[1.0, 1.0, 1e-30]).with("param.a", &[1], &[1.0]);
    let b = one(&[1.0, 1.000_001, 2e-30]).with("param.a", &[1], &[1.0]);
    let (_, report, text) = diff(&a, &b);
    assert_eq!((&report["worst"]["tensor"], &report["worst"]["index"]), (&json!("param.w"), &json!(2)));
    assert!(text.ends_with("different; worst: param.w at 2: 1e-30 and 2e-30, 8388608 ulp\n"), "{text}");
    // The absolute tolerance accepts the element with the larger distance, so the other element is the worst.
    let (status, report, text) = diff_within(&a, &b, &["--atol", "1e-9"]);
    assert_eq!(
        (status, &report["tensors"][1]["outside"], &report["tensors"][1]["different"]),
        (Some(1), &json!(1), &json!(2))
    );
    assert!(
        text.ends_with("outside the tolerance; worst: param.w at 1: 1.0 and 1.000001, 8 ulp\n"),
        "{text}"
    );
    let (status, report, text) = diff_within(&a, &b, &["--atol", "1e-5"]);
    assert_eq!((status, &report["equal"], &report["within"]), (Some(0), &json!(false), &json!(true)));
    assert!(text.contains("\nwithin the tolerance; worst: param.w at 2: "), "{text}");
    assert_eq!(diff_within(&a, &a, &["--atol", "1e-5"]).2.lines().last(), Some("equal"));
}

#[test]
fn no_tolerance_accepts_another_name_type_shape_or_count() {
    let wide = ["--max-ulp", "1000000", "--atol", "1e300"];
    let counted = one(&[1.0]).with_count("w", "7");
    for other in [
        one(&[1.0]).with_count("w", "8"),
        one(&[1.0]),
        counted.clone().retyped("param.w", DType::BF16),
        Content::default().with("param.w", &[1, 1], &[1.0]).with_count("w", "7"),
        counted.clone().with("param.v", &[1], &[1.0]),
    ] {
        assert_eq!(diff_within(&counted, &other, &wide).0, Some(1), "{other:?}");
    }
    let product = |digits: &str| {
        let mut content = counted.clone();
        content.metadata.insert("mu_product.w".into(), digits.into());
        content
    };
    assert_eq!(diff_within(&product("0.9"), &product("0.9000000001"), &["--atol", "1e-9"]).0, Some(0));
    assert_eq!(diff_within(&product("0.9"), &product("0.90001"), &["--atol", "1e-9"]).0, Some(1));
    assert_eq!(diff(&product("0.9"), &product("0.9000000001")).0, Some(1));
}

#[test]
fn tolerances_that_are_no_bounds_are_refused() {
    let folder = Folder::new();
    folder.write("A", &one(&[1.0]).bytes());
    for (option, bad) in [
        ("--atol", "-1"),
        ("--rtol", "-0.5"),
        ("--atol", "nan"),
        ("--rtol", "inf"),
        ("--atol", "x"),
        ("--max-ulp", "1.5"),
    ] {
        assert_refused(&folder.run(&["diff", "A", "A", option, bad]), option);
    }
}
