//! Tests of how names and errors of other ranks are written.
//!
//! Nothing in a name steers a terminal or ends the quotation.

use super::*;

#[test]
fn plain_names_are_repeated_as_they_are() {
    assert_eq!(quoted("layers.0.weight"), "`layers.0.weight`");
    assert_eq!(quoted("l'état \"ß\" 重み"), "`l'état \"ß\" 重み`");
    assert_eq!(quoted(""), "``");
}

#[test]
fn nothing_in_a_name_steers_a_terminal_or_ends_the_quotation() {
    assert_eq!(quoted("\x1b[31mred\u{9b}2J"), "`\\u{1b}[31mred\\u{9b}2J`");
    assert_eq!(quoted("a\nb\r\t\0"), "`a\\nb\\r\\t\\0`");
    assert_eq!(quoted("a` b \\"), "`a\\` b \\\\`");
    // The characters are right-to-left override and zero-width space.
    assert_eq!(quoted("\u{202e}\u{200b}"), "`\\u{202e}\\u{200b}`");
    for char in '\0'..=char::MAX {
        let escaped = escaped(char);
        assert!(!escaped.contains(char::is_control), "{char:?} is repeated");
    }
}

#[test]
fn another_ranks_error_is_safe_to_print_and_does_not_change_when_it_is_passed_on() {
    let once = sentence("`a\\b` \"c\" it's\n\x1b[31m");
    assert_eq!(once, "`a\\b` \"c\" it's\\n\\u{1b}[31m");
    assert_eq!(sentence(&once), once);
    assert_eq!(sentence("x".repeat(1_000_000)).len(), 500 + "... (999500 more bytes)".len());
}

#[test]
fn a_long_text_is_cut_between_characters_and_says_how_much_is_missing() {
    assert_eq!(escaped("x".repeat(120)), "x".repeat(120));
    assert_eq!(escaped("ß".repeat(1_000_000)), format!("{}... (1999760 more bytes)", "ß".repeat(120)));
    assert_eq!(escaped(format_args!("{}{}", "x".repeat(119), "yz")), "x".repeat(119) + "y... (1 more bytes)");
    assert!(escaped("\u{1}".repeat(1_000_000)).len() < 1000);
}
