//! Some parameters are local to each rank, beside those that all ranks share.
//!
//! A local parameter follows only its own rank's gradients, and nothing else changes with it. The same calls run on the
//! host and on a GPU, or its stand-in.

use instep::hazard::Traced;
use instep::layout::ForeignBucket;
use instep::op::{Action, Op};
use instep::{
    Borrowed, Clip, Device, Divisor, Error, Layout, Mode, Result, Sgd, Solo, Stepper, StepperBuilder, Unused,
    in_process,
};

use crate::ranks::zero::offloading;
use crate::stepper::several_optimizers::bits;
use crate::support::device::cuda;
use crate::support::waits::{assert_each_is_missed, middle_passes};
use crate::support::{MODES, Presummed, paint_gradient};

const PASSES: usize = 5;

/// In this pass no rank has a gradient for local parameters, which must stay unchanged, with momentum or without.
const UNUSED_IN: usize = 2;

const OWN_LEN: usize = 700;

const HEAVY: Sgd =
    Sgd { lr: 0.05, momentum: 0.9, dampening: 0.0, weight_decay: 0.01, nesterov: true, maximize: false };

fn layout(with_local: bool) -> Layout {
    let layout = Layout::builder().param("first", 300);
    let layout = if with_local { layout.param("own", OWN_LEN).local() } else { layout };
    layout.param("last", 2049).build().unwrap()
}

fn own_gradient(step: usize, rank: usize) -> Vec<f32> {
    (0..OWN_LEN).map(|k| paint_gradient(step, 7 + rank, k)).collect()
}

/// Makes one pass with gradients by rank and by name.
fn pass<D: Device>(stepper: &mut Stepper<D>, step: usize, rank: usize) -> Result<()> {
    let layout = stepper.layout().clone();
    let mut pass = stepper.begin()?;
    for id in layout.ids().rev() {
        let parameter = layout.parameter(id)?;
        if parameter.local && step == UNUSED_IN {
            continue;
        }
        let common = || (0..parameter.len as usize).map(|k| paint_gradient(step, rank, k)).collect();
        pass.write(id.grad(), &if parameter.local { own_gradient(step, rank) } else { common() })?;
        pass.grad_ready(id)?;
    }
    crate::support::finish(pass)
}

fn builder(layout: &Layout, mode: Mode) -> StepperBuilder<'_> {
    let builder = Stepper::builder(layout, HEAVY).mode(mode).bucket_cap_bytes(2 << 10);
    if mode == Mode::Eager { builder } else { builder.clip(Clip::Global(0.5)) }
}

/// Makes the same passes with a stepper that has no other parameter and no other rank.
fn alone(rank: usize, passes: impl Iterator<Item = usize>, unused: Unused) -> Stepper {
    let layout = Layout::builder().param("own", OWN_LEN).build().unwrap();
    let mut stepper = Stepper::builder(&layout, HEAVY).unused(unused).host(Solo::default()).unwrap();
    for step in passes {
        let mut pass = stepper.begin().unwrap();
        if step != UNUSED_IN {
            pass.write(layout.id("own").unwrap().grad(), &own_gradient(step, rank)).unwrap();
        }
        pass.finish().unwrap();
    }
    stepper
}

type Bits = (Vec<Vec<u32>>, Vec<String>, u64);

fn own_bits(stepper: &Stepper) -> Bits {
    bits(stepper, stepper.layout().id("own").unwrap()).unwrap()
}

#[test]
fn local_parameters_follow_their_own_rank_and_change_nothing_for_the_others() {
    for (mode, offloads) in MODES.into_iter().flat_map(|mode| [(mode, false), (mode, true)]) {
        let run = |with_local: bool| {
            let layout = layout(with_local);
            in_process(2, |comm| {
                let rank = comm.rank() as usize;
                let builder = offloading(builder(&layout, mode).record(true), offloads);
                let mut stepper = builder.host(comm)?;
                (0..PASSES).try_for_each(|step| pass(&mut stepper, step, rank))?;
                let list = stepper.take_recording().unwrap().list;
                assert_each_is_missed(
                    stepper.plan(),
                    1,
                    &list,
                    middle_passes(&list),
                    6,
                    &format!("{mode:?}"),
                );
                let is_sum = |entry: &&Traced| {
                    matches!(entry, Traced::Op(Op { action: Action::Collective { .. }, .. }))
                };
                let of = |name: &str| bits(&stepper, layout.id(name)?);
                let common =
                    (of("first")?, of("last")?, list.iter().filter(is_sum).count(), stepper.status()?.norm);
                Ok::<_, Error>((common, of("own").ok()))
            })
            .unwrap()
        };
        let (with, without) = (run(true), run(false));
        for rank in 0..2 {
            assert_eq!(with[rank].0, without[rank].0, "{mode:?}");
            assert_eq!(with[rank].1, Some(own_bits(&alone(rank, 0..PASSES, Unused::Skip))), "{mode:?}");
        }
        assert_ne!(with[0].1, with[1].1);
    }
}

#[test]
fn a_joined_rank_keeps_its_own_parameters() {
    for (mode, unused) in MODES.into_iter().flat_map(|mode| [(mode, Unused::Skip), (mode, Unused::StepZero)])
    {
        let layout = layout(true);
        let ends = in_process(2, |comm| {
            let rank = comm.rank() as usize;
            let mut stepper = Stepper::builder(&layout, HEAVY)
                .mode(mode)
                .unused(unused)
                .uneven_inputs(Divisor::ContributingRanks)
                .host(comm)?;
            (0..PASSES - 3 * rank).try_for_each(|step| pass(&mut stepper, step, rank))?;
            while stepper.join()? {}
            Ok::<_, Error>(own_bits(&stepper))
        });
        for (rank, own) in ends.unwrap().into_iter().enumerate() {
            let expected = own_bits(&alone(rank, 0..PASSES - 3 * rank, unused));
            assert_eq!(own, expected, "{mode:?}, {unused:?}, rank {rank}");
        }
    }
}

/// The factor is not 1/world_size on a GPU either; skipped passes and the loss scale have their effect.
#[test]
fn a_gpu_gives_the_same_bits_with_scale_and_skipped_passes() {
    let layout = layout(true);
    for mode in [Mode::Sequential, Mode::Normed] {
        let builder = || builder(&layout, mode).loss_scale(4.0).skip_nonfinite(true);
        let mut host = builder().host(Presummed(3)).unwrap();
        // SAFETY: the trainer's stream is the default one, or the stand-in's, which is a number.
        let mut gpu = unsafe { builder().cuda(Presummed(3), &cuda()).unwrap() };
        for step in 0..PASSES {
            pass(&mut host, step, 0).unwrap();
            pass(&mut gpu, step, 0).unwrap();
        }
        for id in layout.ids() {
            assert_eq!(bits(&gpu, id).unwrap(), bits(&host, id).unwrap(), "{mode:?}");
        }
        let before = own_bits(&host);
        let mut skipped = host.begin().unwrap();
        skipped.write(layout.id("own").unwrap().grad(), &[1.0; OWN_LEN]).unwrap();
        skipped.write(layout.id("first").unwrap().grad(), &[f32::NAN; 300]).unwrap();
        crate::support::finish(skipped).unwrap();
        assert!(host.status().unwrap().skipped);
        assert_eq!(own_bits(&host), before, "{mode:?}");
    }
}

#[test]
fn a_bucket_of_the_callers_is_summed_so_it_holds_nothing_local() {
    let layout = Layout::builder().param("own", 4).local().build().unwrap();
    let own = layout.id("own").unwrap();
    let (mut values, mut gradients) = ([0.0f32; 4], [0.0f32; 4]);
    let memory = Borrowed::new()
        .param(own, values.as_mut_ptr())
        .bucket(ForeignBucket::new(4).gradient(own, 0), gradients.as_mut_ptr());
    let builder = Stepper::builder(&layout, HEAVY).unused(Unused::StepZero);
    // SAFETY: the arrays outlive the stepper, of which none is built.
    let refused = unsafe { builder.host_borrowing(Solo::default(), memory) };
    assert!(
        matches!(refused, Err(Error::Layout(why)) if why.thing.contains("`own`") && why.wrong.contains("local"))
    );
}
