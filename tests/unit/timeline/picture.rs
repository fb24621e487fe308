//! Tests of the picture of a timeline.
//!
//! Its exposed strips add up to the exposure that the report gives.

use super::*;
use crate::timeline::block::samples;

fn count(text: &str, class: &str) -> usize {
    text.matches(&format!("<rect class=\"{class}\"")).count()
}

#[test]
fn a_picture_has_a_box_for_all_that_lies_in_its_window() {
    let (ran, blocked) = samples::two_passes();
    let lane = Lane { rank: 0, ran: &ran, blocked: &blocked };
    let draw = |lanes: &[Lane], start_ns, end_ns| draw_picture("a < b", lanes, Interval { start_ns, end_ns });
    let whole = draw(&[lane, lane], 0, 20_000);
    let classes = ["trainer", "waiting", "collective", "control", "norm", "step", "zero"];
    assert_eq!(classes.map(|class| count(&whole, class)), [2, 4, 6, 8, 2, 6, 2]);
    assert_eq!(whole, draw(&[lane, lane], 0, 20_000));
    assert!(whole.contains("a &lt; b") && whole.contains(">pass 9<") && whole.contains(">step 1<"));
    let part = draw(&[lane], 4_100, 9_050);
    assert_eq!(classes.map(|class| count(&part, class)), [1, 1, 0, 2, 0, 2, 0]);
    assert!(!part.contains(">norm<"), "the legend lists what is there");
    assert!(draw(&[], 5, 5).ends_with("</svg>\n"));
}

#[test]
fn the_exposed_strips_add_up_to_the_exposure() {
    let (ran, blocked) = samples::two_passes();
    let optim = ran.iter().filter(|ran| ran.op.stream == Stream::Optim);
    let busy: Vec<Interval> = optim.map(|ran| ran.interval).collect();
    let window = Interval { start_ns: 0, end_ns: 20_000 };
    let text = draw_picture("strips", &[Lane { rank: 0, ran: &ran, blocked: &blocked }], window);
    let strips = text.split("<title>exposed, ").skip(1).map(|rest| rest.split(' ').next().unwrap());
    let lengths: Vec<u64> = strips.map(|micros| micros.replace('.', "").parse().unwrap()).collect();
    assert_eq!(lengths, [1_000, 500, 500]);
    assert_eq!(lengths.iter().sum::<u64>(), exposure(&busy, &blocked).exposed_ns);
    assert_eq!(count(&text, "exposed"), lengths.len());
}
