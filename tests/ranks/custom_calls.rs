//! A user's own calls replace those of a communicator. They are made on every stream and in every group, and give the
//! same bits.
//!
//! Calls of other kinds make up the replacements here, so a call that skipped its replacement would show. Gradients are
//! dyadic.

use crate::support::Presummed;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use instep::checkpoint;
use instep::collective::{Call, CallKey, CollectiveKind};
use instep::overlap::CustomCalls;
use instep::{
    AdamW, Clip, Collective, Error, InProcess, Layout, Mode, Result, Solo, Stepper, Strategy, in_process,
};

const LENS: [usize; 5] = [17 * 257, 17, 64 * 312, 1, 0];
const KINDS: [CollectiveKind; 2] = [CollectiveKind::ReduceScatter, CollectiveKind::AllGather];

fn layout() -> Layout {
    let named = LENS.iter().enumerate();
    named.fold(Layout::builder(), |builder, (k, len)| builder.param(format!("p{k}"), *len)).build().unwrap()
}

/// Sums the whole buffer and takes this rank's part.
fn reduce_scatter(comm: &dyn Collective, call: &mut Call<'_>) -> Result<()> {
    let mut whole: Vec<f32> = bytemuck::cast_slice(call.source()?).to_vec();
    let key = CallKey { kind: CollectiveKind::AllReduce, ..call.key() };
    let bytes = bytemuck::cast_slice_mut(&mut whole);
    comm.enqueue(&mut Call::on_host(comm, key, None, bytes, call.deadline())?)?;
    let part: &mut [f32] = bytemuck::cast_slice_mut(call.target()?);
    let first = comm.rank() as usize * part.len();
    part.copy_from_slice(&whole[first..first + part.len()]);
    Ok(())
}

/// Sums bits: each word is nonzero only on one rank.
fn all_gather(comm: &dyn Collective, call: &mut Call<'_>) -> Result<()> {
    let part: Vec<u64> = bytemuck::cast_slice(call.source()?).to_vec();
    let mut whole = vec![0u64; part.len() * comm.world_size() as usize];
    let first = comm.rank() as usize * part.len();
    whole[first..first + part.len()].copy_from_slice(&part);
    let key = CallKey { kind: CollectiveKind::Sum64, ..call.key() };
    let bytes = bytemuck::cast_slice_mut(&mut whole);
    comm.enqueue(&mut Call::on_host(comm, key, None, bytes, call.deadline())?)?;
    call.target()?.copy_from_slice(bytemuck::cast_slice(&whole));
    Ok(())
}

/// Returns a communicator that counts the replaced calls of both kinds.
fn custom(comm: InProcess, made: &Arc<[AtomicU64; 2]>) -> CustomCalls {
    let ways = [reduce_scatter as fn(&dyn Collective, &mut Call<'_>) -> Result<()>, all_gather];
    (0..2).fold(CustomCalls::new(comm), |comm, k| {
        let (made, way) = (Arc::clone(made), ways[k]);
        comm.with(KINDS[k], move |comm, call| {
            made[k].fetch_add(1, Ordering::Relaxed);
            way(comm, call)
        })
    })
}

/// Trains, and returns the parameters' bits and the number of replaced calls of both kinds.
fn train(
    ranks: u32,
    strategy: Strategy,
    shard_size: Option<u32>,
    is_custom: bool,
) -> Vec<(Vec<u32>, [u64; 2])> {
    let layout = layout();
    let trained = in_process(ranks, |comm: InProcess| {
        let (rank, made) = (comm.rank() as usize, Arc::new([const { AtomicU64::new(0) }; 2]));
        let comm: Box<dyn Collective> =
            if is_custom { Box::new(custom(comm, &made)) } else { Box::new(comm) };
        let builder = Stepper::builder(&layout, AdamW::default()).mode(Mode::Normed).clip(Clip::Global(0.5));
        let mut builder = builder.bucket_cap_bytes(40_000).strategy(strategy).record(true);
        if let Some(ranks) = shard_size {
            builder = builder.shard_size(NonZeroU32::new(ranks).unwrap());
        }
        let mut stepper = builder.host(comm)?;
        stepper.fill_params(|_, values| values.fill(-0.5))?;
        made.iter().for_each(|made| made.store(0, Ordering::Relaxed));
        for step in 0..3 {
            for k in 0..stepper.plan().buckets().len() as u32 {
                stepper.unshard(k)?;
            }
            let mut pass = stepper.begin()?;
            for (param, id) in layout.ids().enumerate().rev() {
                let value = |k: usize| ((step * 31 + rank * 57 + param * 17 + k * 13) % 251) as f32 / 64.0;
                let values: Vec<f32> = (0..LENS[param]).map(|k| value(k) - 125.0 / 64.0).collect();
                pass.grads().write(id, &values)?;
                pass.grad_ready(id)?;
            }
            pass.finish()?;
        }
        stepper.status()?;
        let made = [0, 1].map(|k| made[k].load(Ordering::Relaxed));
        let mut bits = Vec::new();
        for (param, id) in layout.ids().enumerate() {
            let mut values = vec![0.0; LENS[param]];
            stepper.gather(id, &mut values)?;
            bits.extend(values.iter().map(|value| value.to_bits()));
        }
        let recording = stepper.take_recording().unwrap();
        assert_eq!(stepper.check(&recording), []);
        Ok((bits, made))
    });
    trained.unwrap()
}

#[test]
fn calls_of_ones_own_serve_every_stream_and_group_with_the_bits_of_the_communicators() {
    let whole = |ranks| train(ranks, Strategy::Replicated, None, false)[0].0.clone();
    for (ranks, shard_size) in [(1, None), (2, None), (3, None), (4, Some(2))] {
        let expected = whole(ranks);
        for strategy in [Strategy::Zero, Strategy::Fsdp] {
            let what = format!("{strategy:?}, {ranks} ranks in groups of {shard_size:?}");
            for (bits, [scattered, gathered]) in train(ranks, strategy, shard_size, true) {
                assert!(bits == expected, "{what}");
                assert!(scattered >= 3 && scattered == gathered, "{what}: {scattered} and {gathered}");
            }
        }
        assert!(train(ranks, Strategy::Replicated, None, true).iter().all(|(_, made)| *made == [0, 0]));
    }
}

#[test]
fn a_kind_that_a_communicator_does_not_know_is_known_with_a_way_and_an_error_of_it_ends_all_ranks() {
    let solo = CustomCalls::new(Presummed(2));
    assert!(!solo.supports(CollectiveKind::ReduceScatter));
    assert!(solo.with(CollectiveKind::ReduceScatter, reduce_scatter).supports(CollectiveKind::ReduceScatter));
    let layout = layout();
    for panics in [false, true] {
        let told = in_process(3, |comm: InProcess| {
            let is_broken = comm.rank() == 1;
            let comm = CustomCalls::new(comm).with(KINDS[0], move |comm, call| match (is_broken, panics) {
                (true, true) => panic!("the link is down"),
                (true, false) => Err(Error::Hook("the link is down".into())),
                (false, _) => comm.enqueue(call),
            });
            let mut stepper =
                Stepper::builder(&layout, AdamW::default()).strategy(Strategy::Zero).host(comm)?;
            let mut pass = stepper.begin()?;
            for id in layout.ids() {
                pass.grads().get_mut(id)?.fill(1.0);
            }
            pass.finish()?;
            Ok(stepper.status().unwrap_err().to_string())
        });
        for told in told.unwrap() {
            assert!(told.contains("the link is down"), "{told}");
        }
    }
}

/// The rank of a group of one has everything. It makes no call, because a call would write over gradients that a reader
/// may be using.
#[test]
fn a_group_of_one_gathers_and_saves_beside_a_slice_of_its_gradient_without_a_call() {
    let layout = Layout::builder().param("w", 4096).build().unwrap();
    let w = layout.id("w").unwrap();
    let folder = tempfile::tempdir().unwrap();
    for strategy in [Strategy::Zero, Strategy::Fsdp] {
        let made = Arc::new(AtomicU64::new(0));
        let kinds = [CollectiveKind::AllGather, CollectiveKind::Broadcast];
        let comm = kinds.into_iter().fold(CustomCalls::new(Solo::default()), |comm, kind| {
            let made = Arc::clone(&made);
            comm.with(kind, move |comm, call| {
                made.fetch_add(1, Ordering::Relaxed);
                comm.enqueue(call)
            })
        });
        let mut stepper = Stepper::builder(&layout, AdamW::default()).strategy(strategy).host(comm).unwrap();
        let mut pass = stepper.begin().unwrap();
        pass.write(w.grad(), &[0.5; 4096]).unwrap();
        pass.finish().unwrap();
        let gradient = stepper.view::<f32>(w.grad()).unwrap();
        let before = made.load(Ordering::Relaxed);
        let mut moments = [0.0; 4096];
        stepper.gather(w.state("exp_avg"), &mut moments).unwrap();
        checkpoint::save_together(&stepper, folder.path().join("last")).unwrap();
        assert_eq!(made.load(Ordering::Relaxed), before, "{strategy:?}");
        assert!(moments.iter().all(|moment| (moment - 0.05).abs() < 1e-6), "{strategy:?}");
        assert_eq!(gradient, [0.5; 4096]);
    }
}
