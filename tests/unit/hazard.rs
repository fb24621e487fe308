//! Tests of the checker of orders, on schedules of a few ops.
//!
//! Two accesses race if they overlap and one of them writes, unless a record and a wait, or an awaited sum, orders them.

use super::*;
use crate::layout::{BucketCaps, Layout, Storage, Tails};
use crate::op::{CollectiveKind, Group};

fn plan() -> Plan {
    let layout = Layout::builder().param("a", 256).build().unwrap();
    Plan::new(&layout, 1, BucketCaps::default(), Tails::default(), Storage::default()).unwrap()
}

fn zero(stream: Stream, start: u64, end: u64) -> Traced {
    let span = Span { memory: Memory::Grads, start, end };
    Traced::Op(Op { stream, action: Action::Zero(span) })
}

#[test]
fn unordered_writes_race_exactly_where_they_overlap() {
    let race = [zero(Stream::Reduce, 0, 100), zero(Stream::Optim, 60, 200)];
    let found = check(&plan(), 0, &race);
    assert_eq!(found, [Hazard::Race { first: 0, second: 1, memory: Memory::Grads, byte: 60 }]);
    let apart = [zero(Stream::Reduce, 0, 60), zero(Stream::Optim, 60, 200)];
    assert_eq!(check(&plan(), 0, &apart), []);
}

#[test]
fn collectives_that_may_be_one_launch_race_where_they_overlap() {
    let sum = |start, end| {
        let (kind, span) = (CollectiveKind::AllReduce, Span { memory: Memory::Grads, start, end });
        let (group, pass, bucket) = (Group::World, 1, None);
        let action = Action::Collective { kind, group, pass, agreement: 0, bucket, src: span, dst: span };
        Traced::Op(Op { stream: Stream::Reduce, action })
    };
    // Its read and its write.
    let races = [Hazard::Race { first: 0, second: 2, memory: Memory::Grads, byte: 8 }; 2];
    assert_eq!(check(&plan(), 0, &[sum(0, 16), sum(16, 24), sum(8, 16)]), races);
    let ticket = Ticket { stream: Stream::Reduce, tick: 1 };
    let record = Traced::Op(Op { stream: Stream::Reduce, action: Action::Record(ticket) });
    assert_eq!(check(&plan(), 0, &[sum(0, 16), record, sum(8, 16)]), []);
}

#[test]
fn a_wait_for_the_record_orders_them_and_an_earlier_record_does_not() {
    let ticket = Ticket { stream: Stream::Reduce, tick: 1 };
    let record = Traced::Op(Op { stream: Stream::Reduce, action: Action::Record(ticket) });
    let wait = Traced::Op(Op { stream: Stream::Optim, action: Action::Wait(ticket) });
    let (write, read) = (zero(Stream::Reduce, 0, 8), zero(Stream::Optim, 0, 8));
    assert_eq!(check(&plan(), 0, &[write, record, wait, read]), []);
    assert_eq!(check(&plan(), 0, &[record, write, wait, read]).len(), 1);
    assert_eq!(check(&plan(), 0, &[wait, record]), [Hazard::UnrecordedWait { at: 0 }]);
}

#[test]
fn the_callers_sum_of_a_bucket_comes_after_the_trainers_use_of_it_and_of_nothing_else() {
    let layout = Layout::builder().param("a", 256).param("b", 256).build().unwrap();
    let caps = BucketCaps { first_bytes: 1, rest_bytes: 1 };
    let plan = Plan::new(&layout, 1, caps, Tails::default(), Storage::default()).unwrap();
    let spans = |bucket: usize| {
        let bucket = &plan.buckets()[bucket];
        [Span::bucket(bucket), Span::within(Memory::Params, bucket, bucket.params.start, bucket.params.end)]
    };
    let trainer = |bucket| {
        spans(bucket).map(|span| Traced::Trainer(Access { span, writes: span.memory == Memory::Grads }))
    };
    let on = |stream, action| Traced::Op(Op { stream, action });
    let awaits = on(Stream::Optim, Action::AwaitSum { bucket: 0 });
    let step = |stream, bucket| on(stream, Action::Step { bucket, count: 1 });
    let [write, read] = trainer(0);
    assert_eq!(check(&plan, 0, &[write, read, awaits, step(Stream::Optim, 0)]), []);
    // If AwaitSum is missing, comes before the trainer's last use, or names another bucket, the gradient and the
    // parameter race.
    let raced = |list: &[Traced]| {
        let races = check(&plan, 0, list).into_iter().map(|hazard| match hazard {
            Hazard::Race { memory, .. } => memory,
            other => panic!("{other}"),
        });
        races.collect::<Vec<_>>()
    };
    assert_eq!(raced(&[write, read, step(Stream::Optim, 0)]), [Memory::Grads, Memory::Params]);
    assert_eq!(raced(&[write, awaits, read, step(Stream::Optim, 0)]), [Memory::Params]);
    let [other, _] = trainer(1);
    assert_eq!(raced(&[other, awaits, step(Stream::Optim, 1)]), [Memory::Grads]);
    // A stream that is not ordered after AwaitSum gains nothing from it; a stream that is gains all of it.
    assert_eq!(raced(&[read, awaits, step(Stream::Gather, 0)]), [Memory::Grads, Memory::Params]);
    let ticket = Ticket { stream: Stream::Optim, tick: 1 };
    let (record, wait) =
        (on(Stream::Optim, Action::Record(ticket)), on(Stream::Gather, Action::Wait(ticket)));
    assert_eq!(check(&plan, 0, &[write, read, awaits, record, wait, step(Stream::Gather, 0)]), []);
}

#[test]
fn a_position_is_recorded_once_in_order_and_by_its_own_stream() {
    let record =
        |stream, of, tick| Traced::Op(Op { stream, action: Action::Record(Ticket { stream: of, tick }) });
    let own = |tick| record(Stream::Reduce, Stream::Reduce, tick);
    assert_eq!(check(&plan(), 0, &[own(1), own(2)]), []);
    assert_eq!(check(&plan(), 0, &[own(1), own(1)]), [Hazard::MisplacedRecord { at: 1 }]);
    assert_eq!(check(&plan(), 0, &[own(2), own(1)]), [Hazard::MisplacedRecord { at: 1 }]);
    let foreign = record(Stream::Optim, Stream::Reduce, 1);
    assert_eq!(check(&plan(), 0, &[foreign]), [Hazard::MisplacedRecord { at: 0 }]);
}

#[test]
fn two_reads_never_race_but_a_write_races_with_each_of_them() {
    let read = |stream| Access { span: Span { memory: Memory::Params, start: 0, end: 8 }, writes: stream };
    let trainer = Traced::Trainer(read(false));
    let span = Span { memory: Memory::Params, start: 4, end: 6 };
    let write = Traced::Op(Op { stream: Stream::Optim, action: Action::Zero(span) });
    assert_eq!(check(&plan(), 0, &[trainer, trainer, write]).len(), 1);
}
