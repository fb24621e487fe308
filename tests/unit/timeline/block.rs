//! Tests of the blocks of a timeline: their names, passes and windows.
//!
//! A block belongs to at most one pass.

use super::*;

#[test]
fn every_block_is_named_and_finds_its_pass() {
    let (ran, blocked) = samples::two_passes();
    let lane = Lane { rank: 0, ran: &ran, blocked: &blocked };
    let blocks = collect_blocks(&lane);
    let found: Vec<_> = blocks[3..].iter().map(|block| (block.name.as_str(), block.pass)).collect();
    let (seven, nine) = (Some(7), Some(9));
    let expected = [
        ("begin", seven),
        ("zero", None),
        ("all-reduce 0", seven),
        ("norm 0", seven),
        ("all-reduce 1", seven),
        ("decide", seven),
        ("step 1", seven),
        ("step 0", seven),
        ("begin", Some(8)),
        ("begin", nine),
        ("all-reduce 0", nine),
        ("step 0", nine),
    ];
    assert_eq!(found, expected);
    assert!(blocks[..3].iter().all(|block| block.kind == Kind::Waiting && block.stream == Stream::Compute));
}

#[test]
fn a_decision_on_one_bucket_is_named_by_it_and_belongs_to_its_reduce() {
    let (mut ran, blocked) = samples::two_passes();
    for block in &mut ran {
        if let Action::Norm { bucket } = block.op.action {
            block.op.action = Action::Control(Phase::DecideBucket { bucket });
        }
    }
    let lane = Lane { rank: 0, ran: &ran, blocked: &blocked };
    let decided = collect_blocks(&lane).into_iter().find(|block| block.name == "decide 0").unwrap();
    assert_eq!((decided.kind, decided.bucket, decided.pass), (Kind::Control, Some(0), Some(7)));
}

#[test]
fn a_window_reaches_from_one_opening_to_another() {
    let (ran, blocked) = samples::two_passes();
    let lane = Lane { rank: 0, ran: &ran, blocked: &blocked };
    assert_eq!(window_of_passes(&lane, 7, 2), Some(Interval { start_ns: 500, end_ns: 10_000 }));
    assert_eq!(window_of_passes(&lane, 7, 3), None);
    // A recording that begins after a step's reduce does not say which pass the step belongs to.
    let cut = Lane { ran: &ran[7..8], ..lane };
    assert_eq!(collect_blocks(&cut)[3].pass, None);
}
