//! Keeping, zeroing or releasing gradients after a step changes no bit of what is stepped.
//!
//! The reference is `Keep`. The test asks the operating system, page by page, whether memory was released; the number
//! for the whole process would include other tests.

use std::num::NonZeroU32;

use instep::cuda::Cuda;
use instep::layout::{BucketCaps, ForeignBucket, Plan, Precision, Tails};
use instep::op::{Access, Action, Frozen, Memory, Op, Stream};
use instep::{
    AdamW, Borrowed, Clip, Collective, Error, Gradients, Layout, Mode, ParamId, Result, SegmentAction, Sgd,
    Solo, Stepper, Unused, in_process,
};

use crate::support::stand_in::{COMPUTE, StandIn};
use crate::support::waits::{assert_each_is_missed, middle_passes};
use crate::support::{
    MODES, Options, Outcome, assert_same_bits, few_optimizers, paint_gradient, paint_params,
};

const ALL: [Gradients; 4] = [Gradients::Keep, Gradients::Zero, Gradients::Release, Gradients::Average];

/// Tensors have whole pages, and an averaged parameter and one with `SegmentAction::Leave` are between stepped
/// neighbours.
fn mixed() -> Layout {
    let builder = Layout::builder().param("a", 5000).param("averaged", 3000).action(SegmentAction::Average);
    let builder = builder.param("b", 9000).in_group("slow").param("empty", 0).param("c", 2049).uses(2);
    let builder = builder.param("left", 1500).action(SegmentAction::Leave);
    builder.param("sometimes", 4100).param("d", 6000).in_group("slow").build().unwrap()
}

/// All that lasts, and the gradients that every policy keeps.
#[derive(Debug, PartialEq)]
struct Bits {
    params: Vec<Vec<u32>>,
    states: Vec<Vec<u32>>,
    step_counts: Vec<u64>,
    kept: Vec<Vec<u32>>,
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn is_kept(layout: &Layout, id: ParamId) -> bool {
    layout.parameter(id).unwrap().action != SegmentAction::Step
}

/// Makes five passes of two micro-batches; one parameter has a gradient only in even passes, and one is frozen in the
/// third.
fn train(comm: impl Collective + 'static, mode: Mode, gradients: Gradients) -> Result<Bits> {
    let (layout, rank) = (mixed(), comm.rank() as usize);
    let slow = AdamW { lr: 1e-4, ..AdamW::default() };
    let mut builder = Stepper::builder(&layout, AdamW::default()).group("slow", slow).mode(mode);
    if mode != Mode::Eager {
        builder = builder.clip(Clip::Global(0.5));
    }
    let mut stepper = builder.bucket_cap_bytes(48 << 10).gradients(gradients).record(true).host(comm)?;
    paint_params(&mut stepper);
    let ids: Vec<_> = layout.ids().collect();
    let (frozen, sometimes) = (layout.id("d")?, layout.id("sometimes")?);
    for step in 0..5 {
        stepper.set_frozen(frozen, step == 2)?;
        let mut pass = stepper.begin_accumulating(NonZeroU32::new(2).unwrap())?;
        for micro_batch in 0..2 {
            for (param, id) in ids.iter().enumerate().rev() {
                if *id == frozen && step == 2 || *id == sometimes && step % 2 == 1 {
                    continue;
                }
                let len = layout.parameter(*id)?.len as usize;
                let gradient = |k| paint_gradient(4 * step + micro_batch, param + 10 * rank, k);
                assert_eq!(pass.is_first(*id)?, micro_batch == 0);
                pass.grads().add(*id, &(0..len).map(gradient).collect::<Vec<_>>())?;
                (0..layout.parameter(*id)?.uses).try_for_each(|_| pass.grad_ready(*id))?;
            }
            if micro_batch == 0 {
                pass.next_micro_batch()?;
            }
        }
        pass.finish()?;
    }
    for id in ids.iter().filter(|id| !is_kept(&layout, **id) && layout.parameter(**id).unwrap().len > 0) {
        match (gradients, stepper.view::<f32>(id.grad())) {
            (Gradients::Keep | Gradients::Average, Ok(left)) => {
                assert!(*id == frozen || left.iter().any(|x| *x != 0.0))
            }
            (Gradients::Zero, Ok(left)) => assert!(left.iter().all(|x| x.to_bits() == 0), "{mode:?}"),
            (Gradients::Release, Err(Error::Order(refusal))) => {
                assert!(refusal.wrong.contains("released"), "{refusal}")
            }
            (_, other) => panic!("{mode:?}, {gradients:?}: {other:?}"),
        }
    }
    let recording = stepper.take_recording().unwrap();
    assert_eq!(stepper.check(&recording), [], "{mode:?}, {gradients:?}");
    let params = stepper.params();
    let state = |id: ParamId, name: std::borrow::Cow<str>| Ok(bits(stepper.view::<f32>(id.state(&name))?));
    Ok(Bits {
        params: ids.iter().map(|id| Ok(bits(params.get(*id)?))).collect::<Result<_>>()?,
        states: ids
            .iter()
            .flat_map(|id| stepper.state_names(*id).unwrap().into_iter().map(move |name| state(*id, name)))
            .collect::<Result<_>>()?,
        step_counts: ids.iter().map(|id| stepper.step_count(*id)).collect::<Result<_>>()?,
        kept: ids
            .iter()
            .filter(|id| is_kept(&layout, **id))
            .map(|id| Ok(bits(stepper.view::<f32>(id.grad())?)))
            .collect::<Result<_>>()?,
    })
}

#[test]
fn what_is_stepped_averaged_or_left_is_the_same_bits_whatever_becomes_of_gradients() {
    for (ranks, mode) in (1..=4).flat_map(|ranks| MODES.map(|mode| (ranks, mode))) {
        let run = |gradients| in_process(ranks, |comm| train(comm, mode, gradients)).unwrap();
        let kept = run(Gradients::Keep);
        assert!(kept[0].kept.iter().all(|gradient| gradient.iter().any(|x| *x != 0)));
        for gradients in [Gradients::Zero, Gradients::Release, Gradients::Average] {
            assert!(run(gradients) == kept, "{ranks} ranks, {mode:?}, {gradients:?}");
        }
    }
}

#[test]
fn every_wait_is_needed_whatever_becomes_of_gradients() {
    for (mode, gradients) in MODES.into_iter().flat_map(|mode| ALL.map(|gradients| (mode, gradients))) {
        let layout = mixed();
        let builder = Stepper::builder(&layout, AdamW::default()).mode(mode).gradients(gradients);
        let mut stepper = builder.bucket_cap_bytes(40 << 10).record(true).host(Solo::default()).unwrap();
        for _ in 0..6 {
            let mut pass = stepper.begin().unwrap();
            layout.ids().for_each(|id| assert!(pass.params().get(id).is_ok()));
            for id in layout.ids().rev() {
                let (params, mut grads) = pass.split();
                let _ = params.get(id).unwrap();
                grads.get_mut(id).unwrap().fill(0.25);
                (0..layout.parameter(id).unwrap().uses).for_each(|_| pass.grad_ready(id).unwrap());
            }
            pass.finish().unwrap();
        }
        stepper.status().unwrap();
        let list = stepper.take_recording().unwrap().list;
        let what = format!("{mode:?}, {gradients:?}");
        assert_each_is_missed(stepper.plan(), 2, &list, middle_passes(&list), 12, &what);
    }
}

#[test]
fn a_step_that_zeroes_claims_its_gradients_as_written_and_a_release_its_span() {
    let layout = Layout::builder().param("a", 300).build().unwrap();
    let cut = Plan::new(&layout, 1, BucketCaps::default(), Tails::default(), Precision::F32).unwrap();
    let claims = |gradients, action| {
        let (plan, mut claims) = (cut.clone().with_gradients(gradients), Vec::new());
        let op = Op { stream: Stream::Optim, action };
        op.accesses(&plan, 0, &Frozen::default(), &mut |access: Access| {
            claims.extend((access.span.memory == Memory::Grads).then_some((access.span, access.writes)));
        });
        claims
    };
    let whole = instep::op::Span::elements(Memory::Grads, &cut, 0, 512);
    for (gradients, writes) in ALL.into_iter().zip([false, true, false, true]) {
        assert_eq!(
            claims(gradients, Action::Step { bucket: 0, count: 1 }),
            [(whole, writes)],
            "{gradients:?}"
        );
        assert_eq!(claims(gradients, Action::Release(whole)), [(whole, true)]);
    }
}

#[test]
fn a_skipped_pass_leaves_zeros_too_and_steps_nothing() {
    let layout = Layout::builder().param("a", 3000).param("b", 5).build().unwrap();
    let [a, b] = ["a", "b"].map(|name| layout.id(name).unwrap());
    for mode in [Mode::Sequential, Mode::Normed] {
        let builder = Stepper::builder(&layout, Sgd::default()).mode(mode).skip_nonfinite(true);
        let mut stepper = builder.gradients(Gradients::Zero).host(Solo::default()).unwrap();
        let mut pass = stepper.begin().unwrap();
        pass.grads().get_mut(a).unwrap().fill(1.0);
        pass.grads().get_mut(b).unwrap().fill(f32::NAN);
        pass.finish().unwrap();
        assert!(stepper.status().unwrap().skipped);
        assert!(stepper.view::<f32>(a).unwrap().iter().all(|x| *x == 0.0));
        assert_same_bits(stepper.view::<f32>(a.grad()).unwrap(), &[0.0; 3000], "a");
        assert_same_bits(stepper.view::<f32>(b.grad()).unwrap(), &[0.0; 5], "b");
    }
}

/// The abandoned pass has stepped nothing, so its gradients stay, and the next pass replaces them.
#[test]
fn released_memory_serves_passes_after_an_abandoned_one() {
    let (layout, run) = (mixed(), |gradients| {
        let options = Options { mode: Mode::Normed, gradients, ..Options::default() };
        let mut stepper = crate::support::open(&mixed(), few_optimizers()[2], &options);
        for step in 0..4 {
            let ids: Vec<_> = stepper.layout().ids().collect();
            let mut pass = stepper.begin().unwrap();
            for (param, id) in ids.iter().enumerate().rev() {
                let slice = pass.grads().get_mut(*id).unwrap().len();
                pass.write(id.grad(), &vec![0.5 + (step + param) as f32; slice]).unwrap();
            }
            if step == 1 { pass.abandon().map(drop) } else { pass.finish() }.unwrap();
        }
        stepper
    });
    let (kept, released) = (run(Gradients::Keep), run(Gradients::Release));
    for id in layout.ids() {
        let get = |stepper: &Stepper| bits(stepper.view::<f32>(id).unwrap());
        assert_eq!(get(&kept), get(&released));
        assert_eq!(kept.step_count(id).unwrap(), released.step_count(id).unwrap());
    }
}

#[test]
fn memory_that_cannot_be_given_back_is_refused_by_name() {
    let layout = Layout::builder().param("w", 4).build().unwrap();
    let w = layout.id("w").unwrap();
    let cuda = Cuda::on(StandIn::new()).compute_stream(COMPUTE);
    let release = || Stepper::builder(&layout, Sgd::default()).gradients(Gradients::Release);
    // SAFETY: the stream is the stand-in's; nothing is built.
    let on_gpu = unsafe { release().cuda(Solo::default(), &cuda) }.map(drop).unwrap_err();
    assert!(
        matches!(&on_gpu, Error::Unsupported(refusal) if refusal.thing == "Gradients::Release"),
        "{on_gpu}"
    );
    let (mut weights, mut bucket) = ([1.0f32; 4], [0.0f32; 4]);
    let memory = Borrowed::new()
        .param(w, weights.as_mut_ptr())
        .bucket(ForeignBucket::new(4).gradient(w, 0), bucket.as_mut_ptr());
    let builder = release().unused(Unused::StepZero);
    // SAFETY: the arrays outlive the stepper, which is not built.
    let borrowed = unsafe { builder.host_borrowing(Solo::default(), memory) }.map(drop).unwrap_err();
    assert!(matches!(borrowed, Error::Config { field: "gradients", .. }), "{borrowed}");
}

#[test]
fn zeros_are_left_in_buckets_of_the_callers_and_between_its_gradients_nothing_is_touched() {
    let layout = Layout::builder().param("a", 300).param("b", 5).build().unwrap();
    let [a, b] = ["a", "b"].map(|name| layout.id(name).unwrap());
    for mode in MODES {
        let (mut first, mut second, mut bucket) = ([1.0f32; 300], [1.0f32; 5], [7.0f32; 310]);
        let place = ForeignBucket::new(310).gradient(b, 1).gradient(a, 8);
        let memory = Borrowed::new().param(a, first.as_mut_ptr()).param(b, second.as_mut_ptr());
        let memory = memory.bucket(place, bucket.as_mut_ptr());
        let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Sgd::default() }).mode(mode);
        let builder = builder.unused(Unused::StepZero).gradients(Gradients::Zero);
        // SAFETY: the arrays outlive the stepper, which alone touches them until it is closed.
        let mut stepper = unsafe { builder.host_borrowing(Solo::default(), memory) }.unwrap();
        let mut pass = stepper.begin().unwrap();
        pass.grads().get_mut(a).unwrap().fill(1.0);
        pass.grads().get_mut(b).unwrap().fill(0.5);
        pass.finish().unwrap();
        stepper.close().unwrap();
        assert_eq!((first, second), ([0.0; 300], [0.5; 5]));
        let mut expected = [0.0; 310];
        [0, 6, 7, 308, 309].into_iter().for_each(|gap: usize| expected[gap] = 7.0);
        assert_eq!(bucket, expected, "{mode:?}");
    }
}

#[test]
fn a_gpu_leaves_the_hosts_zeros() {
    for mode in MODES {
        let options = Options { mode, cap: Some(8 << 10), gradients: Gradients::Zero, ..Options::default() };
        let layout = crate::support::layout(&[300, 5, 2049]);
        let cuda = crate::support::device::cuda();
        let mut stepper = options.stepper_on(&cuda, &layout, few_optimizers()[3], Solo::default()).unwrap();
        let mut host = crate::support::open(&layout, few_optimizers()[3], &options);
        paint_params(&mut stepper);
        let gradient = crate::support::painted(&options);
        for step in 0..3 {
            crate::support::pass(&mut stepper, &options, |p, values| gradient(step, p, values)).unwrap();
            crate::support::pass(&mut host, &options, |p, values| gradient(step, p, values)).unwrap();
        }
        let (gpu, host) = (Outcome::of(&stepper).unwrap(), Outcome::of(&host).unwrap());
        gpu.assert_same(&host, &format!("{mode:?}"));
        assert!(gpu.grads.concat().iter().all(|x| x.to_bits() == 0), "{mode:?}");
    }
}

#[cfg(target_os = "linux")]
mod pages {
    use std::time::{Duration, Instant};

    use super::*;

    const PARAMS: usize = 8;
    const LEN: usize = 1 << 20;

    unsafe extern "C" {
        fn mincore(address: *mut std::ffi::c_void, length: usize, pages: *mut u8) -> i32;
        fn getpagesize() -> i32;
    }

    fn page_bytes() -> usize {
        // SAFETY: a question.
        unsafe { getpagesize() as usize }
    }

    /// Returns whether each page of a run of whole pages is in memory.
    fn residency(first: usize, length: usize) -> Vec<bool> {
        let mut pages = vec![0; length / page_bytes()];
        // SAFETY: one byte per page; what is mapped there is not touched.
        let answer =
            unsafe { mincore(std::ptr::with_exposed_provenance_mut(first), length, pages.as_mut_ptr()) };
        assert_eq!(answer, 0, "mincore");
        pages.into_iter().map(|page| page & 1 == 1).collect()
    }

    /// Returns the bytes of a gradient's whole pages that are in memory.
    fn resident_bytes(gradient: usize) -> usize {
        let page = page_bytes();
        let first = gradient.next_multiple_of(page);
        let length = (gradient + 4 * LEN - first) / page * page;
        residency(first, length).into_iter().filter(|is_there| *is_there).count() * page
    }

    /// Memory has `above`, which stays, then `stepped`, then `below`, which stays too. Only `stepped` is released.
    #[test]
    fn a_release_gives_back_every_page_that_it_shares_with_nothing_that_stays() {
        let page_elements = page_bytes() / 4;
        // From a page's start to an end inside a page, and so on; segments start on multiples of 256 elements.
        for (above, stepped) in
            [(512, 4096), (1024, 8192), (256, 300 * 1024 + 512), (1280, LEN), (3328, 1024)]
        {
            let layout = Layout::builder().param("below", LEN).action(SegmentAction::Average);
            let layout =
                layout.param("stepped", stepped).param("above", above).action(SegmentAction::Average);
            let layout = layout.build().unwrap();
            let builder = Stepper::builder(&layout, Sgd::default()).gradients(Gradients::Release);
            let mut stepper = builder.bucket_cap_bytes(u64::MAX).host(Solo::default()).unwrap();
            let mut pass = stepper.begin().unwrap();
            for id in layout.ids() {
                pass.grads().get_mut(id).unwrap().fill(1.0);
            }
            let [above_at, stepped_at, below_at] = ["above", "stepped", "below"].map(|name| {
                let mut grads = pass.grads();
                grads.get_mut(layout.id(name).unwrap()).unwrap().as_ptr().expose_provenance()
            });
            pass.finish().unwrap();
            stepper.status().unwrap();
            assert!(above_at < stepped_at && stepped_at < below_at);
            assert_eq!(below_at - stepped_at, 4 * stepped.next_multiple_of(256));
            let page = page_bytes();
            let first = stepped_at / page * page;
            let found = residency(first, below_at.next_multiple_of(page) - first);
            let expected: Vec<bool> = (0..found.len())
                .map(|k| first + k * page)
                .map(|start| start < stepped_at || start + page > below_at)
                .collect();
            assert_eq!(found, expected, "{above} and {stepped} elements, pages of {page_elements}");
            assert!(stepped < 2 * page_elements || expected.contains(&false));
        }
    }

    /// Returns the most bytes of gradients that were in memory during a pass, and those after it. In Eager the trainer
    /// waits until a bucket is stepped if it expects the release of its memory.
    fn peak_and_rest(mode: Mode, gradients: Gradients) -> (usize, usize) {
        let names = (0..PARAMS).map(|k| format!("p{k}"));
        let layout = names.fold(Layout::builder(), |layout, name| layout.param(name, LEN)).build().unwrap();
        let builder = Stepper::builder(&layout, Sgd::default()).mode(mode).gradients(gradients);
        let mut stepper = builder.bucket_cap_bytes(4 << 20).host(Solo::default()).unwrap();
        assert_eq!(stepper.plan().buckets().len(), PARAMS);
        let (mut places, mut peak) = (Vec::new(), 0);
        let all = |places: &[usize]| places.iter().map(|place| resident_bytes(*place)).sum::<usize>();
        for _ in 0..2 {
            let mut pass = stepper.begin().unwrap();
            for id in layout.ids().rev() {
                let mut grads = pass.grads();
                let gradient = grads.get_mut(id).unwrap();
                gradient.fill(1.0);
                let place = gradient.as_ptr().expose_provenance();
                places.retain(|known| *known != place);
                places.push(place);
                peak = peak.max(all(&places));
                pass.grad_ready(id).unwrap();
                let begun = Instant::now();
                while mode == Mode::Eager && gradients == Gradients::Release && resident_bytes(place) > LEN {
                    assert!(begun.elapsed() < Duration::from_secs(60), "a stepped bucket keeps its memory");
                    std::thread::sleep(Duration::from_micros(200));
                }
            }
            pass.finish().unwrap();
        }
        stepper.status().unwrap();
        (peak, all(&places))
    }

    #[test]
    fn buckets_that_are_stepped_beside_backward_never_hold_all_gradients_at_once() {
        let whole = 4 * LEN * PARAMS;
        let (peak, rest) = peak_and_rest(Mode::Eager, Gradients::Release);
        assert!(peak >= 4 * LEN * 9 / 10, "{peak} bytes: one gradient was there at least");
        assert!(peak < whole / 2 && rest < whole / 8, "{peak} at most, {rest} in the end, of {whole} bytes");
        for mode in [Mode::Sequential, Mode::Normed] {
            let (peak, rest) = peak_and_rest(mode, Gradients::Release);
            assert!(peak > whole * 9 / 10 && rest < whole / 8, "{mode:?}: {peak}, {rest} of {whole} bytes");
        }
        let (peak, rest) = peak_and_rest(Mode::Eager, Gradients::Keep);
        assert!(peak > whole * 9 / 10 && rest > whole * 9 / 10, "Keep: {peak}, {rest} of {whole} bytes");
    }
}
