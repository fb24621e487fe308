//! Steps run in the host's memory: the bytes of each memory, the copies of a pass, the waits between them, and
//! refusals.
//!
//! `zero.rs` compares the bits with those of steps in place, for each strategy; `zero_failures.rs`, `fsdp_hostile.rs`
//! and `rescue.rs` test failures.

use instep::hazard::Traced;
use instep::layout::ForeignBucket;
use instep::op::{Action, Memory, Op, Stream};
use instep::{
    AdamW, Borrowed, Clip, DType, Error, Gradients, Layout, Mode, OffloadPolicy, Result, SegmentAction, Sgd,
    Solo, Stepper, StepperBuilder, Strategy, Unused, in_process,
};

use crate::ranks::zero::{bucket_of, gradient, layout};
use crate::support::MODES;
use crate::support::waits::{assert_each_is_missed, middle_passes};

const STRATEGIES: [Strategy; 3] = [Strategy::Replicated, Strategy::Zero, Strategy::Fsdp];

fn adamw(layout: &Layout) -> StepperBuilder<'_> {
    Stepper::builder(layout, AdamW::default()).offload(OffloadPolicy::default())
}

fn bytes(memory: &[(Memory, u64)], which: Memory) -> u64 {
    memory.iter().find(|(known, _)| *known == which).map_or(0, |(_, bytes)| *bytes)
}

/// There are four buckets of 4 MiB. The test counts the expected bytes from tensors, without the plan.
#[test]
fn the_host_holds_what_is_stepped_and_the_device_what_forward_and_backward_need() {
    #[cfg(target_os = "linux")]
    crate::ranks::fsdp::without_huge_pages();
    const RANKS: u64 = 4;
    const BUCKETS: u64 = 4;
    const BUCKET: u64 = 4 << 20;
    let add = |layout: instep::LayoutBuilder, k| layout.param(format!("p{k}"), BUCKET as usize / 4);
    let layout = (0..BUCKETS).fold(Layout::builder(), add).build().unwrap();
    for strategy in STRATEGIES {
        in_process(RANKS as u32, |comm| {
            let builder = adamw(&layout).strategy(strategy).unused(Unused::StepZero).bucket_cap_bytes(1);
            let mut stepper = builder.ema(0.5).host(comm)?;
            for id in layout.ids() {
                stepper.write(id, &vec![1.0; BUCKET as usize / 4])?;
            }
            let kept =
                if strategy == Strategy::Replicated { BUCKETS * BUCKET } else { BUCKETS * BUCKET / RANKS };
            let on_device = |unsharded| match strategy {
                Strategy::Fsdp => unsharded * BUCKET,
                _ => BUCKETS * BUCKET,
            };
            for _ in 0..2 {
                let memory = stepper.memory();
                assert_eq!(bytes(&memory, Memory::Params), on_device(0), "{strategy:?}");
                assert_eq!(bytes(&memory, Memory::Grads), BUCKETS * BUCKET, "{strategy:?}");
                for host in
                    [Memory::HostParams, Memory::HostGrads, Memory::State(0), Memory::State(1), Memory::Ema]
                {
                    assert_eq!(bytes(&memory, host), kept, "{strategy:?}, {host:?}");
                    assert!(host.is_offloaded(stepper.plan()));
                }
                assert!(![Memory::Params, Memory::Grads].iter().any(|m| m.is_offloaded(stepper.plan())));
                let mut pass = stepper.begin()?;
                for id in layout.ids().rev() {
                    let bucket = bucket_of(&pass, id)?;
                    pass.unshard(bucket)?;
                    assert_eq!(bytes(&pass.memory(), Memory::Params), on_device(1), "{strategy:?}");
                    let view = pass.view::<f32>(id)?;
                    assert!(view.iter().all(|x| *x == view[0]));
                    pass.grads().get_mut(id)?.fill(1.0);
                    pass.grad_ready(id)?;
                }
                pass.finish()?;
            }
            #[cfg(target_os = "linux")]
            if strategy == Strategy::Fsdp {
                stepper.unshard(0)?;
                let id = layout.ids().next_back().unwrap();
                let range = stepper.view::<f32>(id)?.as_ptr_range();
                stepper.reshard(0)?;
                stepper.gather(id, &mut vec![0.0; BUCKET as usize / 4])?;
                // SAFETY: the stepper's own memory, which nothing writes now; pages that are given up read as zeros.
                let values = unsafe { std::slice::from_raw_parts(range.start, BUCKET as usize / 4) };
                let resident = crate::ranks::fsdp::resident(values);
                assert!(resident <= 2 * 4096, "{resident} bytes of a bucket that is on the host");
            }
            stepper.close()
        })
        .unwrap();
    }
}

#[test]
fn a_forecast_has_the_bytes_that_are_allocated() {
    let layout = layout();
    for strategy in STRATEGIES {
        for ranks in [1, 3] {
            let build =
                || adamw(layout).strategy(strategy).clip(Clip::PerBucket(1.0)).bucket_cap_bytes(20_000);
            in_process(ranks, |comm| {
                let foreseen = build().forecast(comm.rank(), ranks, |_, _| 1)?.memory();
                let stepper = build().host(comm)?;
                assert_eq!(stepper.memory(), foreseen, "{strategy:?}");
                assert_eq!(bytes(&foreseen, Memory::HostParams), bytes(&foreseen, Memory::State(1)));
                assert!(bytes(&foreseen, Memory::HostGrads) > 0);
                Ok(())
            })
            .unwrap();
        }
    }
}

/// Trains at least four passes, and returns the recorded list.
fn record(mut stepper: Stepper) -> Result<(Stepper, Vec<Traced>)> {
    let layout = stepper.layout().clone();
    for step in 0..5 {
        let mut pass = stepper.begin()?;
        for (param, id) in layout.ids().enumerate().rev() {
            let bucket = bucket_of(&pass, id)?;
            pass.unshard(bucket)?;
            pass.view::<f32>(id)?;
            pass.grads().get_mut(id)?.fill(gradient(step, 0, param, 0));
            pass.grad_ready(id)?;
        }
        pass.finish()?;
    }
    let list = stepper.take_recording().unwrap().list;
    Ok((stepper, list))
}

#[test]
fn a_pass_copies_each_bucket_down_and_up_once_and_every_wait_is_needed() {
    for (mode, strategy) in MODES.into_iter().flat_map(|mode| STRATEGIES.map(|strategy| (mode, strategy))) {
        for unused in [Unused::Skip, Unused::StepZero] {
            in_process(2, |comm| {
                let builder = adamw(layout()).mode(mode).strategy(strategy).unused(unused).bucket_cap_bytes(1000);
                let (stepper, list) = record(builder.record(true).host(comm)?)?;
                let what = format!("{mode:?}, {strategy:?}, {unused:?}");
                let middle = middle_passes(&list);
                let in_middle: Vec<Op> = list[middle.clone()]
                    .iter()
                    .filter_map(|entry| if let Traced::Op(op) = entry { Some(*op) } else { None })
                    .collect();
                assert_each_is_missed(stepper.plan(), 2, &list, middle, 8, &what);
                let count = |stream, from: Memory, to: Memory| {
                    let is_it = |op: &&Op| {
                        op.stream == stream
                            && matches!(op.action, Action::Copy { src, dst, .. } if (src.memory, dst.memory) == (from, to))
                    };
                    in_middle.iter().filter(is_it).count()
                };
                // Of an empty bucket there is nothing to copy; with counts, those are a copy more.
                let buckets = stepper.plan().buckets().iter().filter(|bucket| bucket.len > 0).count();
                let down = 3 * buckets * if unused == Unused::Skip { 2 } else { 1 };
                assert_eq!(count(Stream::Download, Memory::Grads, Memory::HostGrads), down, "{what}");
                let up = count(Stream::Upload, Memory::HostParams, Memory::Params);
                assert_eq!(up, 3 * buckets, "{what}");
                let copies = in_middle.iter().filter(|op| matches!(op.action, Action::Copy { .. })).count();
                assert_eq!(copies, up + down, "{what}: nothing else is copied");
                Ok(())
            })
            .unwrap();
        }
    }
}

/// Any rank may write parameters first, as without offload: all ranks take rank 0's, and step them.
#[test]
fn the_host_steps_the_parameters_that_ranks_have_taken_from_rank_0() {
    let layout = Layout::builder().param("a", 700).param("b", 300).build().unwrap();
    for strategy in [Strategy::Replicated, Strategy::Zero] {
        let ends = in_process(3, |comm| {
            let sgd = Sgd { lr: 1.0, ..Sgd::default() };
            let builder = Stepper::builder(&layout, sgd).offload(OffloadPolicy { pin_memory: false });
            let mut stepper = builder.strategy(strategy).bucket_cap_bytes(1).host(comm)?;
            for round in 0..2 {
                let own = 10.0 * (stepper.rank() + round + 1) as f32;
                stepper.write(layout.id("b")?, &[own; 300])?;
                let mut pass = stepper.begin()?;
                assert_eq!(pass.view::<f32>(layout.id("b")?)?[299], 10.0 * (round + 1) as f32);
                for id in layout.ids() {
                    pass.grads().get_mut(id)?.fill(0.5);
                }
                pass.finish()?;
                assert_eq!(stepper.view::<f32>(layout.id("b")?)?[299], 10.0 * (round + 1) as f32 - 0.5);
            }
            Ok(stepper.view::<f32>(layout.id("a")?)?[0])
        });
        assert_eq!(ends.unwrap(), [-1.0; 3], "{strategy:?}");
    }
}

#[test]
fn what_would_stay_with_the_host_is_refused_by_name() {
    let layout = Layout::builder().param("w", 600).build().unwrap();
    let averaged = Layout::builder().param("w", 600).action(SegmentAction::Average).build().unwrap();
    let refused = |builder: StepperBuilder<'_>| builder.host(Solo::default()).unwrap_err().to_string();
    for (told, words) in [
        (refused(adamw(&layout).copy_params(DType::BF16)), "copies of parameters would stay with the host"),
        (
            refused(adamw(&layout).gradients(Gradients::Average)),
            "averaged gradients would stay with the host",
        ),
        (refused(adamw(&averaged)), "offload with `w`: its averaged gradient would stay with the host"),
    ] {
        assert!(told.contains(words) && !told.contains("pin_memory"), "{told}");
    }
    let id = layout.id("w").unwrap();
    let mut tensors = [vec![0.0f32; 600], vec![0.0f32; 600]];
    let [param, grads] = tensors.each_mut().map(|tensor| tensor.as_mut_ptr());
    let bucket = ForeignBucket::new(600).gradient(id, 0);
    // SAFETY: the tensors outlive the call, which returns no stepper.
    let lent = unsafe {
        let memory = Borrowed::new().param(id, param).bucket(bucket, grads);
        adamw(&layout).unused(Unused::StepZero).host_borrowing(Solo::default(), memory).unwrap_err()
    };
    assert!(lent.to_string().contains("the caller's tensors are not copied yet"), "{lent}");

    let mut stepper = adamw(&layout).host(Solo::default()).unwrap();
    let unsupported = |outcome: Result<()>| {
        assert!(matches!(outcome, Err(Error::Unsupported(_))), "{outcome:?}");
    };
    unsupported(stepper.view_mut::<f32>(id).map(drop));
    unsupported(stepper.rebuild_buckets().map(drop));
    unsupported(stepper.add_optimizer_for(&[id], AdamW::default()).map(drop));
    stepper.view_mut::<f32>(id.state("exp_avg")).unwrap().fill(1.0);
}

#[test]
fn ranks_that_do_not_all_offload_are_told() {
    let layout = Layout::builder().param("w", 600).build().unwrap();
    let outcome = in_process(2, |comm| {
        let builder = Stepper::builder(&layout, AdamW::default()).mode(Mode::Eager);
        let builder = if comm.rank() == 0 { builder.offload(OffloadPolicy::default()) } else { builder };
        let mut stepper = builder.host(comm)?;
        stepper.begin()?.finish()?;
        stepper.close()
    });
    let told = outcome.unwrap_err().to_string();
    assert!(told.contains("options"), "{told}");
}
