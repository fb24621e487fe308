//! Tests of a picture's canvas: its ticks, and what is too thin to see.
//!
//! Nothing is drawn outside the window.

use super::*;

#[test]
fn ticks_are_round_and_not_too_many() {
    let windows = [0, 12_999, 13_000, 30_000, 7_400_000, 19_999_999];
    let expected = [1_000, 1_000, 2_000, 5_000, 1_000_000, 2_000_000];
    assert_eq!(windows.map(|window_ns| find_tick(window_ns, 1_000)), expected);
    assert!(u64::MAX / find_tick(u64::MAX, 1_000_000) <= TICKS);
}

#[test]
fn only_what_lies_in_the_window_is_drawn_and_nothing_is_too_thin_to_see() {
    let mut canvas = Canvas::open(Interval { start_ns: 1_000, end_ns: 2_000 }, 10.0).unwrap();
    for (start_ns, end_ns) in [(0, 1_000), (1_500, 1_501), (1_900, 5_000), (2_000, 2_100)] {
        canvas.draw_interval("step", &Interval { start_ns, end_ns }, 0.0, 5.0, "").unwrap();
    }
    let text = canvas.close();
    let widths = text.split("class=\"step\"").skip(1).map(|rest| rest.split('"').nth(5).unwrap());
    let tenth = format!("{:.1}", (RIGHT - LEFT) / 10.0);
    assert_eq!(widths.collect::<Vec<_>>(), [format!("{:.1}", (RIGHT - LEFT) / 1_000.0), tenth]);
}
