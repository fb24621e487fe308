//! A test of the index of parameters by name.
//!
//! The number of comparisons of a search does not grow with the number of parameters.

use std::cell::Cell;

use super::*;

#[test]
fn every_name_is_found_with_few_comparisons_however_many_there_are() {
    for count in [1_000u32, 100_000] {
        let names: Vec<String> =
            (0..count).map(|k| format!("encoder.layer.{}.weight{}", k / 7, k % 7)).collect();
        let comparisons = Cell::new(0u64);
        let name_at = |index: u32| {
            comparisons.set(comparisons.get() + 1);
            names[index as usize].as_str()
        };
        let mut index = NameIndex::default();
        assert!(names.iter().all(|name| index.insert(name, name_at).is_none()));
        comparisons.set(0);
        for (place, name) in (0..count).zip(&names) {
            assert_eq!(index.find(name, name_at), Some(place));
        }
        assert!(comparisons.get() < 3 * u64::from(count), "{} for {count}", comparisons.get());
        assert_eq!(index.insert(&names[7], name_at), Some(7));
        assert_eq!(index.find("decoder", name_at), None);
    }
    assert_eq!(NameIndex::default().find("w", |_| ""), None);
}
