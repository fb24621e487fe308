//! A steady state allocates nothing, on any thread of the process.
//!
//! This is a separate binary, because it replaces the global allocator with one that counts. It holds only one test,
//! because the allocator would count a second test beside it.
#![allow(clippy::unwrap_used, missing_docs, unsafe_code)]

use std::alloc::{GlobalAlloc, Layout as AllocLayout, System};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::Duration;

use instep::bucket_step::{Lent, StepTensors};
use instep::layout::DEFAULT_GROUP;
use instep::overlap::{Compressed, GradBucket, Hooked};
use instep::{
    AdamW, BucketStep, Clip, GradNorm, Layout, LossScaler, LrSchedule, Mode, ParamId, Pool, Result, Scaling,
    Stepper, in_process,
};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: forwards to the system's allocator and counts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: AllocLayout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract is the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: AllocLayout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn train(stepper: &mut Stepper, ids: &[ParamId], passes: usize) -> Result<()> {
    for k in 0..passes {
        if k % 2 == 0 {
            stepper.set_lr("own", 1e-3 / (k + 1) as f64)?;
        }
        let mut pass = stepper.begin_accumulating(2.try_into().unwrap())?;
        for micro_batch in 0..2 {
            if micro_batch > 0 {
                pass.next_micro_batch()?;
            }
            for id in ids {
                let (params, mut grads) = pass.split();
                let value = params.get(*id)?[0];
                grads.get_mut(*id)?.fill(value);
                pass.loss_scale()?;
                pass.grad_ready(*id)?;
            }
        }
        pass.finish()?;
        stepper.latest_status();
    }
    stepper.status()?;
    Ok(())
}

/// A thread that has not started yet is ready to run, and a thread that has started waits for work. Ranks also wait for
/// each other. On a system without /proc the test sleeps instead.
fn wait_until_all_other_threads_sleep() {
    static ONE_RANK_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _looking = ONE_RANK_AT_A_TIME.lock().unwrap();
    let Ok(own) = fs::read_link("/proc/thread-self") else {
        return thread::sleep(Duration::from_millis(300));
    };
    let sleeps = |task: &Path| {
        // The state follows the name, which is in parentheses; a thread that has ended has no file.
        let line = fs::read_to_string(task.join("stat")).unwrap_or_default();
        line.rsplit_once(") ").is_none_or(|(_, fields)| fields.starts_with('S'))
    };
    let tasks = || fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    while !tasks().all(|task| task.file_name() == own.file_name() || sleeps(&task)) {
        thread::sleep(Duration::from_millis(1));
    }
}

/// Steps buckets on separate threads, on tensors whose addresses change each time.
fn step_buckets(
    buckets: &mut [(BucketStep, [Vec<f32>; 8])],
    norm: &mut GradNorm,
    steps: usize,
) -> Result<()> {
    for k in 0..steps {
        for (step, memory) in &mut *buckets {
            step.set_lr(DEFAULT_GROUP, 1e-3 / (k + 1) as f64)?;
            let (front, back) = memory.split_at_mut(4);
            let [params, grads, first, second] = (if k % 2 == 0 { front } else { back }) else {
                unreachable!()
            };
            let states = [Lent::slice_mut(first), Lent::slice_mut(second)];
            let tensors = StepTensors::new(Lent::slice_mut(params), Lent::slice(grads)).states(states);
            norm.begin(Scaling::mean(3))?;
            step.add_norm(&Lent::slice(grads), norm)?;
            norm.decide(Some(1.0), true)?;
            step.step_decided(&tensors, norm)?;
            step.step(&tensors, Scaling::mean(3))?;
        }
    }
    Ok(())
}

#[test]
fn steady_state_allocates_nothing_in_any_mode() {
    // Some tiles for the pool's helpers, some buckets for the schedule.
    let mut builder = Layout::builder();
    for k in 0..6 {
        builder = builder.param(format!("p{k}"), 80_000);
        if k % 2 == 0 {
            builder = builder.in_group("own");
        }
    }
    let layout = builder.build().unwrap();
    let mut norm = GradNorm::host().unwrap();
    let mut buckets = [1, 2].map(|threads| {
        let step =
            BucketStep::builder(&layout, AdamW::default()).pool(Pool::new(threads).unwrap()).host().unwrap();
        let elements = step.elements() as usize;
        (step, [(); 8].map(|()| vec![0.5f32; elements]))
    });
    // A pool's helper starts, and the bases grow to their size.
    step_buckets(&mut buckets, &mut norm, 20).unwrap();
    wait_until_all_other_threads_sleep();
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    step_buckets(&mut buckets, &mut norm, 20).unwrap();
    assert_eq!(ALLOCATIONS.load(Ordering::Relaxed) - before, 0, "BucketStep");
    drop(buckets);
    for mode in [Mode::Sequential, Mode::Eager, Mode::Normed] {
        for ranks in [1, 3] {
            let barrier = Barrier::new(ranks as usize);
            let counts = in_process(ranks, |comm| {
                let builder = || {
                    let mut builder = Stepper::builder(&layout, AdamW::default()).mode(mode);
                    builder = builder.lr_schedule(DEFAULT_GROUP, LrSchedule::cosine(1e-3, 50, 0.0));
                    builder = match mode {
                        Mode::Eager => builder.clip(Clip::Previous(1.0)),
                        _ => builder
                            .clip(Clip::Global(1.0))
                            .group_clip("own", 2.0)
                            .loss_scale(LossScaler::default()),
                    };
                    builder.bucket_cap_bytes(1 << 18)
                };
                let all_reduce = |bucket: &mut GradBucket<'_>| bucket.all_reduce();
                // Several steppers, so that the calls of a split are counted like those of the first communicator.
                let mut steppers = [
                    builder().host(Compressed::bf16(comm.split())?)?,
                    builder().host(Hooked::new(Compressed::f16(comm.split())?, all_reduce))?,
                    builder().host(comm)?,
                ];
                for stepper in &mut steppers {
                    stepper.set_frozen(layout.id("p0")?, true)?;
                }
                let ids: Vec<ParamId> = layout.ids().skip(1).collect();
                // Forward's order is not that of the first buckets.
                for stepper in &mut steppers {
                    train(stepper, &ids, 1)?;
                    assert!(stepper.rebuild_buckets()?);
                }
                let mut train =
                    |passes| steppers.iter_mut().try_for_each(|stepper| train(stepper, &ids, passes));
                // Threads start and queues grow to their size.
                train(20)?;
                // A pool's helper may be slow to start, and the start of a thread allocates.
                barrier.wait();
                wait_until_all_other_threads_sleep();
                barrier.wait();
                train(20)?;
                barrier.wait();
                let before = ALLOCATIONS.load(Ordering::Relaxed);
                barrier.wait();
                train(30)?;
                barrier.wait();
                let after = ALLOCATIONS.load(Ordering::Relaxed);
                barrier.wait();
                Ok::<_, instep::Error>(after - before)
            });
            assert_eq!(counts.unwrap(), vec![0; ranks as usize], "{mode:?}, {ranks} ranks");
        }
    }
}
