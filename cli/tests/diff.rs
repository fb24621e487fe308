//! `instep diff`: exit codes, distances, and what it says of every kind of difference.
//!
//! Must compare the JSON and the exit status, since scripts read those; of the text only what a reader looks for.

use instep::DType;
use serde_json::{Value, json};

use crate::support::{Content, Folder, assert_refused, stdout};

fn diff(a: &Content, b: &Content) -> (Option<i32>, Value, String) {
    let folder = Folder::new();
    folder.write("A", &a.bytes());
    folder.write("B", &b.bytes());
    let text = folder.run(&["diff", "A", "B"]);
    let json = folder.run(&["diff", "A", "B", "--json"]);
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
