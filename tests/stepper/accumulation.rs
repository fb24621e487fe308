//! Passes of several micro-batches: gradients add up, and no bucket is reduced before the last micro-batch.
//!
//! The reference is a pass of one micro-batch that gets the sum. Bits are compared, because both sides make the same
//! additions.

use std::num::NonZeroU32;

use instep::hazard::{Traced, check};
use instep::op::{Action, Op};
use instep::{Adam, Error, Layout, Mode, Solo, Stepper, in_process};

const MICRO_BATCHES: u32 = 3;

fn layout() -> Layout {
    Layout::builder()
        .param("a", 300)
        .param("tied", 257)
        .uses(2)
        .param("c", 1000)
        .param("none", 5)
        .build()
        .unwrap()
}

fn gradient(pass: usize, micro_batch: u32, rank: u32, param: usize, element: usize) -> f32 {
    let n = (pass * 31 + micro_batch as usize * 7 + rank as usize * 57 + param * 17 + element * 13) % 251;
    (n as f32 - 125.0) / 64.0
}

/// Trains four passes; each parameter skips a different micro-batch.
fn train(mut stepper: Stepper, rank: u32, accumulate: bool, reverse: bool) -> (Vec<u32>, Vec<Traced>) {
    let layout = stepper.layout().clone();
    let ids: Vec<_> = layout.ids().collect();
    let uses = |param: usize| if param == 1 { 2 } else { 1 };
    for pass_index in 0..4 {
        let micro_batches = if accumulate { MICRO_BATCHES } else { 1 };
        let mut pass = stepper.begin_accumulating(NonZeroU32::new(micro_batches).unwrap()).unwrap();
        for micro_batch in 0..micro_batches {
            if micro_batch > 0 {
                pass.next_micro_batch().unwrap();
            }
            let mut order = vec![0, 1, 2];
            if reverse {
                order.reverse();
            }
            for param in order {
                let len = pass.params().get(ids[param]).unwrap().len();
                let taken = if accumulate { micro_batch..micro_batch + 1 } else { 0..MICRO_BATCHES };
                let mut wrote = false;
                for part in taken.filter(|part| *part != param as u32 || pass_index % 2 == 0) {
                    let values: Vec<f32> =
                        (0..len).map(|k| gradient(pass_index, part, rank, param, k)).collect();
                    pass.grads().add(ids[param], &values).unwrap();
                    wrote = true;
                }
                for _ in 0..if wrote { uses(param) } else { 0 } {
                    pass.grad_ready(ids[param]).unwrap();
                }
            }
        }
        pass.finish().unwrap();
    }
    let mut bits = Vec::new();
    for id in ids {
        bits.extend(stepper.view::<f32>(id).unwrap().iter().map(|x| x.to_bits()));
        bits.extend(stepper.view::<f32>(id.state("exp_avg_sq")).unwrap().iter().map(|x| x.to_bits()));
        bits.push(stepper.step_count(id).unwrap() as u32);
    }
    let list = stepper.take_recording().unwrap().list;
    assert_eq!(check(stepper.plan(), 2, &list), []);
    (bits, list)
}

#[test]
fn micro_batches_give_the_bits_of_one_pass_with_their_sum_in_every_mode() {
    let layout = layout();
    for ranks in [1, 3] {
        let run = |mode: Mode, cap: u64, accumulate: bool, reverse: bool| {
            let outcome = in_process(ranks, |comm| {
                let rank = comm.rank();
                let builder = Stepper::builder(&layout, Adam::default()).mode(mode).bucket_cap_bytes(cap);
                Ok::<_, Error>(train(builder.record(true).host(comm)?, rank, accumulate, reverse).0)
            });
            outcome.unwrap()
        };
        let expected = run(Mode::Sequential, 1 << 20, false, false);
        for mode in [Mode::Sequential, Mode::Eager, Mode::Normed] {
            for (cap, reverse) in [(1, false), (2000, true), (1 << 20, true)] {
                assert!(run(mode, cap, true, reverse) == expected, "{mode:?}, cap {cap}, {ranks} ranks");
            }
        }
    }
}

#[test]
fn nothing_is_launched_before_the_last_micro_batch() {
    let layout = layout();
    let builder = Stepper::builder(&layout, Adam::default()).mode(Mode::Eager).bucket_cap_bytes(1);
    let (_, list) = train(builder.record(true).host(Solo::default()).unwrap(), 0, true, true);
    let is_touch = |entry: &Traced| matches!(entry, Traced::Trainer(_));
    let is_collective = |entry: &Traced| {
        matches!(entry, Traced::Op(Op { action: Action::Collective { bucket: Some(_), .. }, .. }))
    };
    // Three parameters are read and written in each micro-batch; two thirds come before anything is launched.
    let first = list.iter().position(is_collective).unwrap();
    assert!(list[..first].iter().filter(|entry| is_touch(entry)).count() >= 2 * 6);
}

#[test]
fn a_pass_is_not_finished_before_its_last_micro_batch_nor_extended_after_it() {
    let layout = layout();
    let a = layout.id("a").unwrap();
    let mut stepper = Stepper::host(&layout, Adam::default(), Solo::default()).unwrap();
    let two = NonZeroU32::new(2).unwrap();
    let mut pass = stepper.begin_accumulating(two).unwrap();
    pass.grads().get_mut(a).unwrap().fill(1.0);
    pass.grad_ready(a).unwrap();
    assert!(matches!(pass.params().get(a), Err(Error::Order(_))), "out of reach until the next micro-batch");
    pass.next_micro_batch().unwrap();
    assert!(!pass.is_first(a).unwrap(), "what was written stays");
    assert!(pass.params().get(a).is_ok());
    assert!(matches!(pass.next_micro_batch(), Err(Error::Order(_))));
    pass.finish().unwrap();
    assert_eq!(stepper.step_count(a).unwrap(), 1);

    let mut pass = stepper.begin_accumulating(two).unwrap();
    pass.grads().get_mut(a).unwrap().fill(1.0);
    assert!(matches!(pass.finish(), Err(Error::Order(_))));
    assert_eq!(stepper.step_count(a).unwrap(), 1, "the pass was given up");
    stepper.begin().unwrap().finish().unwrap();
}
