//! Tests of the numbers by which ranks compare what they were built with.
//!
//! A difference is named by its part, with the values of the ranks that are known.

use super::*;

fn number(hashes: [u64; 4]) -> u64 {
    Agreed::ALL.into_iter().zip(hashes).fold(0, |number, (part, hash)| number ^ part.share(hash))
}

#[test]
fn one_part_that_differs_is_named_and_several_are_not_taken_for_one() {
    let words = ["layout", "options", "learning rates", "frozen, unused"];
    let mut several = 0;
    for k in 0..1000u64 {
        let ours = [k, k + 1, 7, k << 40];
        assert_eq!(difference(number(ours), number(ours)), None);
        for (part, word) in words.into_iter().enumerate() {
            let mut theirs = ours;
            theirs[part] += 1;
            let told = difference(number(ours), number(theirs)).unwrap();
            assert!(told.starts_with(word), "{k}, {part}: {told}");
            theirs[(part + 1) % 4] ^= 1;
            let told = difference(number(ours), number(theirs)).unwrap();
            several += u32::from(told.starts_with("several"));
        }
    }
    // A lane of 16 bits is equal by chance once in 2^16.
    assert!(several > 3990, "{several}");
    assert!(difference(5, !5).unwrap().contains("built"));
}

#[test]
fn each_part_leaves_its_own_lane_empty_and_fills_the_others() {
    for (lane, part) in Agreed::ALL.into_iter().enumerate() {
        let seen = (0..100).fold(0, |seen, hash| seen | part.share(hash));
        assert_eq!(seen, !(0xffff << (16 * lane)), "{part:?}");
    }
}

fn agreement(options: &str, rate: &str) -> (u64, Arc<Words>) {
    let hash = |text: &str| crate::layout::fold(7, text.as_bytes());
    let fixed = Agreed::Layout.share(1) ^ Agreed::Options.share(hash(options));
    let words = Words::new(fixed, format_args!("w of 3"), options);
    let number = words.update(|[_, mut hyperparameters, _]| {
        hyperparameters.write_str(rate).unwrap();
        fixed ^ Agreed::Hyperparameters.share(hash(rate))
    });
    (number, words)
}

#[test]
fn what_differs_is_told_with_the_values_of_both_ranks() {
    let (ours, words) = agreement("mode: Eager\nclip: None", "group a: lr 0.5\ngroup b: lr 0.25");
    let (theirs, kept) = agreement("mode: Eager\nclip: Some(1.0)", "group a: lr 0.5\ngroup b: lr 0.25");
    let told = explain((ours, Some(&words)), (theirs, Some(&kept)), [2, 1]).unwrap();
    assert_eq!(told, "options [rank 2 has `clip: None`, rank 1 `clip: Some(1.0)`]");
    let (theirs, kept) = agreement("mode: Eager\nclip: None", "group a: lr 0.5\ngroup b: lr 0.125");
    let told = explain((ours, Some(&words)), (theirs, Some(&kept)), [0, 1]).unwrap();
    assert!(told.ends_with("[rank 0 has `group b: lr 0.25`, rank 1 `group b: lr 0.125`]"), "{told}");
    assert_eq!(explain((ours, Some(&words)), (ours, None), [0, 1]), None);
}

#[test]
fn a_rank_adds_its_own_values_where_it_said_what_differs_and_nowhere_else() {
    let (ours, words) = agreement("mode: Eager\nclip: None", "group a: lr 0.5\ngroup b: lr 0.25");
    let (theirs, _) = agreement("mode: Eager\nclip: None", "group a: lr 0.5");
    let error = |first: u64, other: u64| {
        let differs = explain((first, None), (other, None), [3, 1]).unwrap();
        let [ours, theirs] = [first, other].map(|number| format!("a call, agreement {number:016x}"));
        Error::Mismatch { rank: 3, ours, other_rank: 1, theirs, differs }
    };
    let told = |error| match words.add_to(error, ours) {
        Error::Mismatch { differs, .. } => differs,
        other => panic!("{other}"),
    };
    let named = "learning rates or other hyperparameters";
    let values = "has `group a: lr 0.5, group b: lr 0.25`]";
    assert_eq!(told(error(ours, theirs)), format!("{named} [rank 3 {values}"));
    assert_eq!(told(error(theirs, ours)), format!("{named} [rank 1 {values}"));
    // The error may be of two other ranks, or already have the words of both.
    assert_eq!(told(error(theirs, theirs ^ Agreed::Options.share(9))), "options");
    let Error::Mismatch { differs, .. } = words.add_to(error(ours, theirs), ours) else { panic!() };
    let known = |differs: &str| Error::Mismatch {
        rank: 3,
        ours: format!("{ours:016x}"),
        other_rank: 1,
        theirs: String::new(),
        differs: differs.to_owned(),
    };
    assert_eq!(told(known(&differs)), differs);
}

#[test]
fn the_first_parameter_that_ranks_wrote_apart_is_named() {
    let lines = |written: &[(usize, u64)]| {
        let name = |param| format!("p{param}");
        let line = |(param, hash): &(usize, u64)| {
            format!("{}\n", WrittenValues { param: *param, hash: *hash, name: &name(*param) })
        };
        written.iter().map(line).collect::<String>() + "loss scaler: None"
    };
    let told = |ours: &[(usize, u64)], theirs: &[(usize, u64)]| {
        written_apart(&lines(ours), &lines(theirs), 3, 1).unwrap()
    };
    let other = "`p10` was written with other values on rank 3 than on rank 1";
    assert_eq!(told(&[(9, 5), (10, 6), (11, 1)], &[(9, 5), (10, 7)]), other);
    assert_eq!(told(&[(9, 5), (10, 6)], &[(10, 7)]), "`p9` was written on rank 3 and not on rank 1");
    assert_eq!(told(&[(10, 6)], &[(9, 5), (10, 6)]), "`p9` was written on rank 1 and not on rank 3");
    assert_eq!(told(&[(9, 5)], &[]), "`p9` was written on rank 3 and not on rank 1");
    assert_eq!(told(&[], &[(9, 5)]), "`p9` was written on rank 1 and not on rank 3");
    assert_eq!(written_apart(&lines(&[(9, 5)]), &lines(&[(9, 5)]), 3, 1), None);
    assert_eq!(WrittenValues::parse("values of parameter 7: 00000000000000ff of `half a na"), None);
}

#[test]
fn a_long_line_is_cut_around_the_difference() {
    let line = |value| format!("{}{value}{}", "x".repeat(900), "y".repeat(900));
    let (ours, theirs) = first_differing(&line("5"), &line("6")).unwrap();
    let shown = |value| format!("...{}{value}{}...", "x".repeat(100), "y".repeat(299));
    assert_eq!((ours, theirs), (shown("5"), shown("6")));
}

#[test]
fn of_fields_in_braces_only_the_one_that_differs_is_told() {
    let line = |eps| format!("group a: AdamW {{ lr: 0.1, betas: (0.9, 0.99), eps: {eps} }}");
    let (ours, theirs) = first_differing(&line("1e-8"), &line("1e-6")).unwrap();
    assert_eq!((&*ours, &*theirs), ("group a: AdamW { eps: 1e-8 }", "group a: AdamW { eps: 1e-6 }"));
}

#[test]
fn a_buffer_keeps_no_more_than_its_bound() {
    let words = Words::new(0, format_args!("{}{}", "a".repeat(KEPT), "b"), "");
    assert_eq!(words.part(0, Agreed::Layout).unwrap().trim_end(), "a".repeat(KEPT));
}
