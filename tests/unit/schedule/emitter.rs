//! Tests of the waits that a schedule emits.
//!
//! A wait is never emitted if its order already holds.

use super::*;

fn waits(emitter: &mut Emitter) -> Vec<Ticket> {
    let tickets = emitter.drain().filter_map(|op| match op.action {
        Action::Wait(ticket) => Some(ticket),
        _ => None,
    });
    tickets.collect()
}

#[test]
fn a_stream_never_waits_for_itself_nor_twice_for_the_same_mark() {
    let mut emitter = Emitter::default();
    let mark = emitter.record(Stream::Reduce);
    emitter.after(Stream::Reduce, &[Some(mark)]);
    emitter.after(Stream::Optim, &[Some(mark), Some(mark)]);
    emitter.after(Stream::Optim, &[Some(mark)]);
    assert_eq!(waits(&mut emitter), [mark.ticket]);
}

#[test]
fn a_later_mark_of_the_same_stream_stands_for_the_earlier_one() {
    let mut emitter = Emitter::default();
    let (first, second) = (emitter.record(Stream::Reduce), emitter.record(Stream::Reduce));
    emitter.after(Stream::Optim, &[Some(first), Some(second)]);
    assert_eq!(waits(&mut emitter), [second.ticket]);
}

#[test]
fn what_a_wait_brings_along_is_known_to_whoever_waits_for_the_waiter() {
    let mut emitter = Emitter::default();
    let gradient = emitter.record(Stream::Compute);
    emitter.after(Stream::Reduce, &[Some(gradient)]);
    let reduced = emitter.record(Stream::Reduce);
    emitter.after(Stream::Optim, &[Some(reduced)]);
    emitter.after(Stream::Optim, &[Some(gradient)]);
    assert_eq!(waits(&mut emitter), [gradient.ticket, reduced.ticket]);
}
