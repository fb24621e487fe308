//! A closure runs after each bucket's sum: what it sees with each strategy, that norms and steps use its changes, and
//! how it fails.
//!
//! The reference is the replicated training, where the hook sees full buckets. Gradients are dyadic, so sums are exact
//! in any order.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};

use instep::overlap::{BucketSum, GradBucket, Hooked, SumHooked};
use instep::{AdamW, Clip, Divisor, Error, InProcess, Layout, Mode, Result, Stepper, Strategy, in_process};

use crate::support::MODES;

const LENS: [usize; 5] = [17 * 257, 17, 64 * 312, 1, 0];

fn layout() -> Layout {
    let named = LENS.iter().enumerate();
    named.fold(Layout::builder(), |builder, (k, len)| builder.param(format!("p{k}"), *len)).build().unwrap()
}

/// Returns multiples of 1/64 below 2: sums of eight are exact in f32.
fn gradient(pass: usize, rank: u32, param: usize, element: usize) -> f32 {
    ((pass * 31 + rank as usize * 57 + param * 17 + element * 13) % 251) as f32 / 64.0 - 125.0 / 64.0
}

/// What a hook received: pass, bucket, parameter, and the first element of the parameter in the bucket.
type Seen = ((u64, u32, usize, u64), Vec<f32>);

/// A strategy, and the number of ranks that shard tensors.
type Way = (Strategy, Option<NonZeroU32>);

/// The outcome of a rank: its parameters, and what its hook received.
type Ended = (Vec<Vec<f32>>, Vec<Seen>);

/// Trains with this number of ranks. The hook halves some sums, depending on parameter and element, and writes between
/// parameters.
fn train(ranks: u32, (strategy, shard_size): Way, mode: Mode, is_counted: bool) -> Vec<Ended> {
    let layout = layout();
    let ended = in_process(ranks, |comm: InProcess| {
        let (rank, seen) = (comm.rank(), Arc::new(Mutex::new(Vec::new())));
        let shown = Arc::clone(&seen);
        let comm = SumHooked::new(comm, move |sum: &mut BucketSum<'_>| {
            assert_eq!((sum.rank(), sum.world_size()), (rank, ranks));
            let parts: Vec<_> = sum.gradients().collect();
            let halved: Vec<f32> = sum.values().iter().map(|value| value * 0.5).collect();
            let before = sum.values().to_vec();
            let is_parameter = |k: usize| parts.iter().any(|(_, _, range)| range.contains(&k));
            assert!(
                (0..before.len()).all(|k| before[k] == 0.0 || is_parameter(k)),
                "data between parameters"
            );
            sum.values_mut().fill(1e6); // between parameters, nothing of this may stay
            for (param, first, range) in parts {
                let at = ((sum.pass(), sum.index(), param, first), before[range.clone()].to_vec());
                shown.lock().unwrap().push(at);
                let kept = |element: u64| (element + param as u64).is_multiple_of(3);
                for (element, k) in (first..).zip(range) {
                    sum.values_mut()[k] = if kept(element) { before[k] } else { halved[k] };
                }
            }
            Ok(())
        });
        let mut builder = Stepper::builder(&layout, AdamW::default()).mode(mode).strategy(strategy);
        builder = builder.bucket_cap_bytes(40_000).record(true);
        if let Some(size) = shard_size {
            builder = builder.shard_size(size);
        }
        if mode != Mode::Eager {
            builder = builder.clip(Clip::Global(0.5));
        }
        if is_counted {
            builder = builder.uneven_inputs(Divisor::WorldSize);
        }
        let mut stepper = builder.host(comm)?;
        stepper.fill_params(|_, values| values.fill(0.5))?;
        for step in 0..4 {
            let mut pass = stepper.begin()?;
            for (param, id) in layout.ids().enumerate().rev() {
                let values: Vec<f32> = (0..LENS[param]).map(|k| gradient(step, rank, param, k)).collect();
                pass.grads().write(id, &values)?;
                pass.grad_ready(id)?;
            }
            pass.finish()?;
        }
        let mut params = Vec::new();
        for (id, len) in layout.ids().zip(LENS) {
            let mut values = vec![0.0; len];
            stepper.gather(id, &mut values)?;
            params.push(values);
        }
        let recording = stepper.take_recording().unwrap();
        assert_eq!(stepper.check(&recording), []);
        let seen = std::mem::take(&mut *seen.lock().unwrap());
        Ok::<_, Error>((params, seen))
    });
    ended.unwrap()
}

/// Asserts that the parts belong to the full parameters and together cover them.
fn assert_covers(whole: &[Seen], parts: &[&[Seen]], replicas: usize, way: &str) {
    let mut covered = 0;
    for ((pass, bucket, param, first), values) in parts.iter().copied().flatten() {
        let found = whole.iter().find(|((p, b, q, _), _)| (p, b, q) == (pass, bucket, param));
        let (_, sums) = found.unwrap_or_else(|| panic!("{way}: bucket {bucket} has no parameter {param}"));
        let first = *first as usize;
        assert_eq!(values[..], sums[first..first + values.len()], "{way}: parameter {param} from {first}");
        covered += values.len();
    }
    assert_eq!(covered, replicas * whole.iter().map(|(_, sums)| sums.len()).sum::<usize>(), "{way}");
}

#[test]
fn a_hook_sees_the_sums_that_its_rank_steps_and_steps_take_what_it_leaves() {
    let courses = [2, 3, 4].into_iter().zip(MODES);
    for (ranks, mode, is_counted) in
        courses.flat_map(|(ranks, mode)| [(ranks, mode, false), (ranks, mode, true)])
    {
        let whole = train(ranks, (Strategy::Replicated, None), mode, is_counted);
        assert!(whole.iter().all(|ended| ended == &whole[0]), "replicas differ");
        let unhooked_sum: f32 = (0..ranks).map(|rank| gradient(0, rank, 2, 5)).sum();
        let first = whole[0].1.iter().find(|((pass, _, param, _), _)| (*pass, *param) == (1, 2)).unwrap();
        assert_eq!(first.1[5], unhooked_sum);
        let mut ways = vec![(Strategy::Zero, None), (Strategy::Fsdp, None)];
        if ranks == 4 {
            ways.extend([Strategy::Zero, Strategy::Fsdp].map(|strategy| (strategy, NonZeroU32::new(2))));
        }
        if is_counted {
            ways.retain(|(strategy, _)| *strategy == Strategy::Zero); // the other one is refused
        }
        for way in ways {
            let (name, shards) =
                (format!("{way:?}, {mode:?}, {ranks} ranks"), train(ranks, way, mode, is_counted));
            assert!(shards.iter().all(|(params, _)| params == &whole[0].0), "{name}: other bits");
            let parts: Vec<&[Seen]> = shards.iter().map(|(_, seen)| &seen[..]).collect();
            assert_covers(&whole[0].1, &parts, way.1.map_or(1, |size| (ranks / size.get()) as usize), &name);
        }
    }
}

#[test]
fn an_error_of_the_hook_ends_every_rank() {
    let layout = layout();
    for strategy in [Strategy::Replicated, Strategy::Zero, Strategy::Fsdp] {
        let outcomes = in_process(3, |comm: InProcess| {
            let rank = comm.rank();
            let comm = SumHooked::new(comm, move |sum: &mut BucketSum<'_>| match (rank, sum.index()) {
                (1, 0) => Err(Error::Hook("no second opinion".into())),
                _ => Ok(()),
            });
            let mut stepper = Stepper::builder(&layout, AdamW::default()).strategy(strategy).host(comm)?;
            let run = || -> Result<()> {
                // The other ranks have the first sum before they hear of the error.
                for _ in 0..2 {
                    let mut pass = stepper.begin()?;
                    for id in layout.ids() {
                        pass.grads().get_mut(id)?.fill(1.0);
                    }
                    pass.finish()?;
                }
                stepper.close()
            };
            Ok::<_, Error>(run().unwrap_err().to_string())
        });
        let outcomes = outcomes.unwrap();
        assert!(outcomes[1].contains("no second opinion"), "{strategy:?}: {outcomes:?}");
        assert!(outcomes.iter().all(|text| !text.is_empty()), "{strategy:?}: {outcomes:?}");
    }
}

/// An outer hook may sum a buffer that is not a bucket, so the inner hook cannot say where gradients lie.
#[test]
fn a_buffer_of_an_outer_hook_that_is_no_bucket_is_refused() {
    let layout = layout();
    let outcomes = in_process(2, |comm: InProcess| {
        let inner = SumHooked::new(comm, |_: &mut BucketSum<'_>| Ok(()));
        let comm = Hooked::new(inner, |bucket: &mut GradBucket<'_>| {
            let mut own = vec![1.0; bucket.values().len() / 2 + 1];
            bucket.all_reduce_buffer(&mut own)
        });
        let mut stepper = Stepper::builder(&layout, AdamW::default()).host(comm)?;
        let run = || -> Result<()> {
            let mut pass = stepper.begin()?;
            for id in layout.ids() {
                pass.grads().get_mut(id)?.fill(1.0);
            }
            pass.finish()?;
            stepper.close()
        };
        Ok::<_, Error>(run().unwrap_err().to_string())
    });
    let outcomes = outcomes.unwrap();
    assert!(outcomes.iter().any(|text| text.contains("whole buckets")), "{outcomes:?}");
}
