//! Converts a lane to blocks. A block is one operation or one wait, with its stream, its name and its pass.
//!
//! The trace and the picture both show these blocks, so they use the same names. A block has no pass if the recording
//! does not prove to which pass it belongs.

use std::collections::HashMap;

use crate::op::{Action, Group, Op, Phase, Stream};
use crate::timeline::{Interval, Lane};

/// The kind of a block. It determines the block's colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Waiting,
    Collective,
    Control,
    Norm,
    Step,
    Copy,
    Zero,
}

impl Kind {
    /// All kinds, in the order of the legend.
    pub(super) const ALL: [Kind; 7] =
        [Kind::Waiting, Kind::Collective, Kind::Control, Kind::Norm, Kind::Step, Kind::Copy, Kind::Zero];

    /// Returns the kind's name, used as a trace category and as an SVG class.
    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Waiting => "waiting",
            Kind::Collective => "collective",
            Kind::Control => "control",
            Kind::Norm => "norm",
            Kind::Step => "step",
            Kind::Copy => "copy",
            Kind::Zero => "zero",
        }
    }
}

/// One operation or one wait on a stream.
#[derive(Clone, Debug)]
pub(super) struct Block {
    pub(super) stream: Stream,
    pub(super) kind: Kind,
    pub(super) interval: Interval,
    /// The name. The name consists of words and numbers, so it needs no escapes in any output format.
    pub(super) name: String,
    pub(super) pass: Option<u64>,
    pub(super) bucket: Option<u32>,
}

/// Returns all blocks of a lane: the trainer's waits, then the streams' operations in the order of their starts.
pub(super) fn collect_blocks(lane: &Lane) -> Vec<Block> {
    let waits = lane.blocked.iter().map(|wait| Block {
        stream: Stream::Compute,
        kind: Kind::Waiting,
        interval: *wait,
        name: "waiting".to_owned(),
        pass: None,
        bucket: None,
    });
    let mut ran: Vec<_> = lane.ran.iter().collect();
    ran.sort_by_key(|ran| ran.interval.start_ns);
    let ops: Vec<Op> = ran.iter().map(|ran| ran.op).collect();
    let passes = find_passes(&ops);
    let worked = ran.iter().zip(passes).filter_map(|(ran, pass)| {
        let (kind, bucket) = describe(&ran.op.action)?;
        let name = name(&ran.op.action, bucket);
        Some(Block { stream: ran.op.stream, kind, interval: ran.interval, name, pass, bucket })
    });
    waits.chain(worked).collect()
}

/// Returns the interval from the start of one pass to the start of the pass that comes `count` passes later. Returns
/// `None` if the lane does not contain both starts. A pass starts when the optim stream opens it.
pub fn window_of_passes(lane: &Lane, first: u64, count: u64) -> Option<Interval> {
    let blocks = collect_blocks(lane);
    let find = |pass: u64| {
        let opened = blocks.iter().find(|block| block.opens_pass() && block.pass == Some(pass));
        opened.map(|block| block.interval.start_ns)
    };
    Some(Interval { start_ns: find(first)?, end_ns: find(first + count)? })
}

impl Block {
    pub(super) fn opens_pass(&self) -> bool {
        self.kind == Kind::Control && self.name == "begin"
    }
}

/// Returns the kind of work and its bucket, or `None` if the action does no work.
fn describe(action: &Action) -> Option<(Kind, Option<u32>)> {
    match *action {
        Action::Wait(_) | Action::Record(_) | Action::AwaitSum { .. } => None,
        Action::Control(Phase::DecideBucket { bucket }) => Some((Kind::Control, Some(bucket))),
        Action::Control(_) | Action::Leave { .. } => Some((Kind::Control, None)),
        Action::Norm { bucket } => Some((Kind::Norm, Some(bucket))),
        Action::Measure { bucket, .. } | Action::Step { bucket, .. } => Some((Kind::Step, Some(bucket))),
        Action::Collective { bucket, .. } => Some((Kind::Collective, bucket)),
        Action::Copy { bucket, .. } | Action::Add { bucket, .. } => Some((Kind::Copy, Some(bucket))),
        Action::Count(_) | Action::Zero(_) | Action::Release(_) => Some((Kind::Zero, None)),
    }
}

fn name(action: &Action, bucket: Option<u32>) -> String {
    let what = match action {
        Action::Step { bucket, count } if *count > 1 => {
            return format!("step {bucket}-{}", bucket + count - 1);
        }
        Action::Control(Phase::Begin) => "begin".to_owned(),
        Action::Control(Phase::Decide | Phase::DecideBucket { .. }) => "decide".to_owned(),
        Action::Control(Phase::Publish) => "publish".to_owned(),
        Action::Norm { .. } => "norm".to_owned(),
        Action::Measure { .. } => "measure".to_owned(),
        Action::Collective { kind, group: Group::Replicas, .. } => format!("{kind} among replicas"),
        Action::Collective { kind, .. } => kind.to_string(),
        Action::Leave { .. } => "leave".to_owned(),
        Action::Copy { .. } => "copy".to_owned(),
        Action::Add { .. } => "add".to_owned(),
        Action::Count(_) => "count".to_owned(),
        Action::Zero(_) => "zero".to_owned(),
        Action::Release(_) => "release".to_owned(),
        _ => "step".to_owned(),
    };
    bucket.map_or(what.clone(), |bucket| format!("{what} {bucket}"))
}

/// Finds the passes of ops, which are in order of their starts. Of all ops, only collectives store the number of their
/// pass. The passes of norms, steps, decisions and openings follow from these three rules. A bucket's norm and step
/// come after its reduce and before its next reduce. A decision comes between the last reduce of its pass and the first
/// reduce of the next pass. A pass is opened before its first op. Any other op has the result `None`.
fn find_passes(ops: &[Op]) -> Vec<Option<u64>> {
    let mut reduced = HashMap::new();
    let mut latest = None;
    let mut passes: Vec<Option<u64>> = Vec::with_capacity(ops.len());
    for op in ops {
        passes.push(match op.action {
            Action::Collective { pass, bucket, .. } => {
                reduced.insert(bucket, pass);
                latest = latest.max(Some(pass));
                Some(pass)
            }
            Action::Norm { bucket }
            | Action::Control(Phase::DecideBucket { bucket })
            | Action::Measure { bucket, .. }
            | Action::Step { bucket, .. } => reduced.get(&Some(bucket)).copied(),
            Action::Control(Phase::Decide) => latest,
            _ => None,
        });
    }
    let mut next: Option<u64> = None;
    for (op, pass) in ops.iter().zip(&mut passes).rev().filter(|(op, _)| op.stream == Stream::Optim) {
        if op.action == Action::Control(Phase::Begin) {
            *pass = next;
            // If two openings follow each other, the pass of the first opening was abandoned.
            next = next.and_then(|pass| pass.checked_sub(1));
        } else {
            next = *pass;
        }
    }
    passes
}

/// Hand-made lanes for the tests of this module and its neighbours.
#[cfg(test)]
#[path = "../../tests/unit/timeline/samples.rs"]
pub(super) mod samples;

#[cfg(test)]
#[path = "../../tests/unit/timeline/block.rs"]
mod tests;
