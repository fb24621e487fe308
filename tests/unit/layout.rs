//! Tests of a layout: what it refuses, and how it finds names and ids.
//!
//! An id belongs to one layout, and no other takes it.

use super::*;

#[test]
fn a_layout_refuses_what_it_cannot_address() {
    let cases: [(LayoutBuilder, &str); 10] = [
        (Layout::builder().uses(2).param("a", 1), "before the first"),
        (Layout::builder(), "has no parameters"),
        (Layout::builder().param("", 1), "empty name"),
        (Layout::builder().param("a", 1).param("a", 2), "twice"),
        (Layout::builder().param("a", 1).uses(0), "zero uses"),
        (Layout::builder().shape([1]), "`shape`: called before the first"),
        (Layout::builder().param("a", 6).shape([2, 4]), "`a`: shape [2, 4] does not fit 6 elements"),
        (Layout::builder().param("a", 0).shape([usize::MAX, 2]), "does not fit 0 elements"),
        (Layout::builder().param("a", 1).shape([1; 65]), "use at most 64 dimensions"),
        (Layout::builder().param("a", 1 << 55).param("b", 1 << 55), "2^56"),
    ];
    for (builder, word) in cases {
        let error = builder.build().unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
}

#[test]
fn a_hundred_thousand_parameters_in_as_many_groups_are_found_by_name() {
    let names: Vec<String> = (0..100_000).map(|k| format!("layer{k}.weight")).collect();
    let add = |builder: LayoutBuilder, name: &String| builder.param(name, 1).in_group(name);
    let layout = names.iter().fold(Layout::builder(), add).build().unwrap();
    for (k, name) in names.iter().enumerate() {
        let id = layout.id(name).unwrap();
        assert_eq!((layout.index(id).unwrap(), layout.group(name)), (k, Some(k + 1)));
    }
    let missed = layout.id("layer777.wieght").unwrap_err().to_string();
    assert!(missed.contains("use one of layer777.weight, "), "{missed}");
    assert_eq!(layout.find("layer100000.weight"), None);
    assert_eq!((layout.group(DEFAULT_GROUP), layout.group("layer")), (Some(0), None));
}

#[test]
fn an_id_of_another_layout_is_refused() {
    let ours = Layout::builder().param("a", 1).build().unwrap();
    let theirs = Layout::builder().param("a", 2).build().unwrap();
    assert!(matches!(ours.parameter(theirs.id("a").unwrap()), Err(Error::Layout(_))));
}
