//! A closure runs after each bucket's sum on a GPU: its work on the sum's stream changes gradients before norms and
//! steps, as on the host.
//!
//! The hook zeroes the sums of some parameters. `ranks::sum_hooks` has the hook of the host, which does the same here.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};

use instep::overlap::{BucketSum, EnqueuedSum, SumHooked};
use instep::{
    Clip, Collective, Error, InProcess, Mode, Result, Solo, Stepper, StepperBuilder, Strategy, in_process,
};

use super::shard_cases::{PLAIN, builder};
use super::shards::{LENS, OnStandIn, shapes};
use crate::support::device::cuda;
use crate::support::{Outcome, hardware, paint};

/// A strategy, and the number of neighbouring ranks that shard tensors, if not all.
type Way = (Strategy, Option<NonZeroU32>);

/// What a hook received for a parameter: pass, bucket, the parameter's number, its first element in the bucket, and
/// their number.
type Seen = Vec<(u64, u32, usize, u64, usize)>;

fn is_zeroed(pass: u64, param: usize) -> bool {
    (param as u64 + pass).is_multiple_of(2)
}

fn build((strategy, size): Way) -> StepperBuilder<'static> {
    let builder = builder(&PLAIN, strategy).mode(Mode::Normed).clip(Clip::Global(0.5));
    if let Some(size) = size { builder.shard_size(size) } else { builder }
}

fn train<D: instep::Device>(mut stepper: Stepper<D>) -> Result<Outcome> {
    for (param, id) in shapes().ids().enumerate() {
        stepper.write(id, &(0..LENS[param]).map(|k| paint(param, k)).collect::<Vec<f32>>())?;
    }
    for step in 0..3 {
        let rank = stepper.rank() as usize;
        let mut pass = stepper.begin()?;
        for (param, id) in shapes().ids().enumerate().rev() {
            let number = |k: usize| (step * 31 + rank * 57 + param * 17 + k * 13) % 251;
            let values: Vec<f32> = (0..LENS[param]).map(|k| number(k) as f32 / 64.0).collect();
            pass.write(id.grad(), &values)?;
            pass.grad_ready(id)?;
        }
        pass.finish()?;
    }
    let outcome = Outcome::of(&stepper)?;
    stepper.close()?;
    Ok(outcome)
}

fn on_host(comm: impl Collective + 'static, way: Way) -> Result<(Outcome, Seen)> {
    let seen = Arc::new(Mutex::new(Seen::new()));
    let shown = Arc::clone(&seen);
    let comm = SumHooked::new(comm, move |sum: &mut BucketSum<'_>| {
        let (pass, index) = (sum.pass(), sum.index());
        for (param, first, range) in sum.gradients().collect::<Vec<_>>() {
            shown.lock().unwrap().push((pass, index, param, first, range.len()));
            if is_zeroed(pass, param) {
                sum.values_mut()[range].fill(0.0);
            }
        }
        Ok(())
    });
    let outcome = train(build(way).host(comm)?)?;
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    Ok((outcome, seen))
}

fn on_gpu(comm: impl Collective + 'static, way: Way) -> Result<(Outcome, Seen)> {
    let (seen, cuda) = (Arc::new(Mutex::new(Seen::new())), cuda());
    let (shown, driver) = (Arc::clone(&seen), Arc::clone(cuda.driver()));
    let comm = SumHooked::on_gpu(comm, move |sum: &EnqueuedSum<'_>| {
        assert_eq!(sum.ptr(sum.len()).0 - sum.ptr(0).0, 4 * sum.len() as u64);
        for (param, first, range) in sum.gradients() {
            shown.lock().unwrap().push((sum.pass(), sum.index(), param, first, range.len()));
            if is_zeroed(sum.pass(), param) {
                // SAFETY: a part of the sum, which is the hook's on this stream. The device is current.
                unsafe { driver.fill(sum.ptr(range.start), &[0], 4 * range.len() as u64, sum.stream())? };
            }
        }
        Ok(())
    });
    // SAFETY: the trainer's stream is the default one, or the stand-in's, which is a number.
    let outcome = train(unsafe { build(way).cuda(comm, &cuda)? })?;
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    Ok((outcome, seen))
}

#[test]
fn a_hook_on_a_gpu_changes_sums_as_one_on_the_host_does() {
    let size = NonZeroU32::new(2);
    let ways = [
        (Strategy::Replicated, None),
        (Strategy::Zero, None),
        (Strategy::Fsdp, None),
        (Strategy::Fsdp, size),
    ];
    for way in ways {
        let [expected, got] = if hardware::is_required() {
            // Groups of one have the same calls.
            let way = (way.0, way.1.and(NonZeroU32::new(1)));
            [on_host(Solo::default(), way), on_gpu(Solo::default(), way)].map(|ended| vec![ended.unwrap()])
        } else {
            let ranks = if way.1.is_some() { 4 } else { 3 };
            let gpus = in_process(ranks, |comm: InProcess| on_gpu(OnStandIn(Arc::new(comm)), way));
            [in_process(ranks, |comm: InProcess| on_host(comm, way)), gpus].map(|ended| ended.unwrap())
        };
        for (rank, ((gpu, seen), (host, expected))) in got.iter().zip(&expected).enumerate() {
            gpu.assert_same(host, &format!("{way:?}, rank {rank}"));
            assert_eq!(seen, expected, "{way:?}, rank {rank}");
            assert!(!seen.is_empty() || got.len() > 1, "{way:?}");
        }
    }
}

#[test]
fn a_hook_takes_the_memory_it_is_for_and_its_error_ends_the_stepper() {
    let cuda = cuda();
    let host = SumHooked::new(Solo::default(), |_: &mut BucketSum<'_>| Ok(()));
    // SAFETY: refused, or as in `on_gpu`.
    let refused = unsafe { build((Strategy::Zero, None)).cuda(host, &cuda) }.map(drop);
    assert!(matches!(refused, Err(Error::Unsupported(_))), "{refused:?}");
    let gpu =
        || SumHooked::on_gpu(Solo::default(), |_: &EnqueuedSum<'_>| Err(Error::Hook("no kernel".into())));
    let refused = build((Strategy::Zero, None)).host(gpu()).map(drop);
    assert!(refused.is_err(), "{refused:?}");
    // SAFETY: as above.
    let stepper = unsafe { build((Strategy::Zero, None)).cuda(gpu(), &cuda) }.unwrap();
    let error = train(stepper).map(drop).unwrap_err();
    assert!(matches!(error, Error::Poisoned { .. }) && error.to_string().contains("no kernel"), "{error}");
}
