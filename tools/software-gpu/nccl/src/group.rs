//! `ncclGroupStart` and `ncclGroupEnd`: collectives of one thread that become one launch.
//!
//! A call inside a group puts nothing on its stream. At the end of the outermost group a communicator gets all of its calls
//! as one task, the largest first, as the real library sorts them: ranks whose groups differ run other calls together. A call
//! that failed lets the whole group fail. Two calls of a group that touch the same bytes, one of them writing, end the program:
//! the real library gives no order to them.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::ops::Range;
use std::sync::Arc;

use crate::communicator::{Communicator, Task, release};
use crate::driver::Work;
use crate::header::ncclResult_t as Code;

#[derive(Default)]
struct Group {
    depth: usize,
    error: Option<Code>,
    calls: Vec<(Arc<Communicator>, usize, Work)>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

pub(crate) fn start() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// Keeps an error of a call inside a group for the end of the group.
pub(crate) fn fails(code: Code) {
    GROUP.with_borrow_mut(|group| {
        if group.depth > 0 {
            group.error.get_or_insert(code);
        }
    });
}

/// Takes a call: into the thread's group, or at once.
pub(crate) fn add(communicator: Arc<Communicator>, stream: usize, work: Work) -> Code {
    let is_alone = GROUP.with_borrow(|group| group.depth == 0);
    if is_alone {
        return begin(&communicator, vec![(stream, work)]);
    }
    GROUP.with_borrow_mut(|group| group.calls.push((communicator, stream, work)));
    Code::ncclSuccess
}

/// Ends a group; the outermost one begins its calls.
pub(crate) fn end() -> Code {
    let ended = GROUP.with_borrow_mut(|group| {
        group.depth = group.depth.checked_sub(1)?;
        Some(if group.depth == 0 { std::mem::take(group) } else { Group::default() })
    });
    let Some(Group { error, mut calls, .. }) = ended else { return Code::ncclInvalidUsage };
    let mut outcome = Code::ncclSuccess;
    while let Some(communicator) = calls.first().map(|(communicator, ..)| Arc::clone(communicator)) {
        let is_its = |call: &mut (Arc<Communicator>, usize, Work)| Arc::ptr_eq(&call.0, &communicator);
        let mut works: Vec<_> =
            calls.extract_if(.., is_its).map(|(_, stream, work)| (stream, work)).collect();
        if let Some(code) = error {
            release(&works);
            communicator.fail(code);
            outcome = code;
            continue;
        }
        refuse_overlaps(&works);
        works.sort_by_key(|(_, work)| Reverse(work.source_bytes.max(work.target_bytes)));
        let count = works.len();
        works.iter_mut().for_each(|(_, work)| work.together = count);
        match begin(&communicator, works) {
            Code::ncclSuccess => {}
            code => outcome = code,
        }
    }
    error.unwrap_or(outcome)
}

/// Gives a communicator work as one task.
fn begin(communicator: &Communicator, works: Vec<(usize, Work)>) -> Code {
    match communicator.begin(Task::Enqueue(works)) {
        Ok(()) => communicator.begun(),
        Err((code, task)) => {
            if let Task::Enqueue(works) = task {
                release(&works);
            }
            code
        }
    }
}

/// What a call reads, and what it writes.
type Ranges = [Range<u64>; 2];

fn refuse_overlaps(works: &[(usize, Work)]) {
    let source = |work: &Work| work.source..work.source + work.source_bytes as u64;
    let target = |work: &Work| work.target..work.target + work.target_bytes as u64;
    let ranges: Vec<Ranges> = works.iter().map(|(_, work)| [source(work), target(work)]).collect();
    if have_overlaps(&ranges) {
        eprintln!("software nccl: two calls of a group touch the same bytes, and have no order");
        std::process::abort()
    }
}

/// Returns whether a call writes what another one touches.
fn have_overlaps(calls: &[Ranges]) -> bool {
    let meet = |a: &Range<u64>, b: &Range<u64>| a.start.max(b.start) < a.end.min(b.end);
    calls.iter().enumerate().any(|(at, [source, target])| {
        let with = |[other_source, other_target]: &Ranges| {
            meet(target, other_target) || meet(target, other_source) || meet(source, other_target)
        };
        calls[..at].iter().any(with)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_a_group_may_read_the_same_bytes_and_write_none_that_others_touch() {
        let in_place = |range: Range<u64>| [range.clone(), range];
        assert!(!have_overlaps(&[in_place(0..8), in_place(8..16), [16..20, 20..24], [16..20, 24..28]]));
        assert!(have_overlaps(&[in_place(0..8), in_place(4..12)]));
        assert!(have_overlaps(&[[0..8, 8..16], [16..24, 4..6]]));
        assert!(have_overlaps(&[[0..8, 8..16], [12..13, 16..24]]));
    }
}
