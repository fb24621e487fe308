//! Buckets that are full for a while on a GPU: their addresses, their memory, writes meanwhile, and a lack of memory.
//!
//! Two ranks are threads. Each has a stand-in that counts allocations.

use std::sync::Arc;

use instep::cuda::{Cuda, CudaDevice};
use instep::op::Memory;
use instep::{Collective, Error, OffloadPolicy, Result, Stepper, Strategy, in_process};

use crate::cuda::shard_cases::{PLAIN, builder};
use crate::cuda::shards::{LENS, OnStandIn, shapes};
use crate::support::stand_in::{COMPUTE, StandIn};
use crate::support::{assert_same_bits, paint};

fn fsdp(comm: impl Collective + 'static, cuda: &Cuda, offloads: bool) -> Result<Stepper<CudaDevice>> {
    let builder = builder(&PLAIN, Strategy::Fsdp);
    let builder = if offloads { builder.offload(OffloadPolicy::default()) } else { builder };
    // SAFETY: the trainer's stream is the stand-in's, which is a number.
    unsafe { builder.cuda(comm, cuda) }
}

#[test]
fn a_whole_bucket_has_one_address_from_unshard_to_reshard_and_its_memory_comes_and_goes() {
    comes_and_goes(false);
}

#[test]
fn with_offload_the_gpu_has_nothing_of_a_bucket_that_is_not_whole() {
    comes_and_goes(true);
}

fn comes_and_goes(offloads: bool) {
    in_process(2, |comm| {
        let stand_in = StandIn::new();
        let cuda = Cuda::on(stand_in.clone()).compute_stream(COMPUTE);
        let mut stepper = fsdp(OnStandIn(Arc::new(comm)), &cuda, offloads)?;
        let params = |stepper: &Stepper<CudaDevice>| {
            stepper.memory().into_iter().find(|(memory, _)| *memory == Memory::Params).unwrap().1
        };
        let (ids, values) = (shapes().ids().collect::<Vec<_>>(), |param: usize| {
            (0..LENS[param]).map(|k| paint(param, k)).collect::<Vec<f32>>()
        });
        for (param, id) in ids.iter().enumerate() {
            stepper.write(*id, &values(param))?;
        }
        let (shards, allocated) = (params(&stepper), stand_in.allocated_bytes());
        assert_eq!(shards == 0, offloads);
        let whole = |bucket: u32| {
            let described = &stepper.plan().buckets()[bucket as usize];
            4 * (described.params.end - described.params.start)
        };
        let buckets: Vec<u64> = (0..stepper.plan().buckets().len() as u32).map(whole).collect();
        assert!(buckets.len() > 2);
        // Tail blocks of counts have no parameters.
        assert!(shards <= buckets.iter().sum::<u64>() / 2, "{shards} of {buckets:?}");
        for round in 0..2 {
            for bucket in (0..buckets.len() as u32).filter(|bucket| buckets[*bucket as usize] > 0) {
                stepper.unshard(bucket)?;
                let taken = stand_in.allocated_bytes() - allocated;
                assert!(taken as u64 + 8 * 256 * 4 >= buckets[bucket as usize], "{taken}, round {round}");
                assert_eq!(params(&stepper) - shards, taken as u64 - 64, "{bucket}");
                let starts: Vec<u64> = (0..LENS.len()).map(|p| stepper.plan().segment_of(p).start).collect();
                let is_here = |p: &usize| stepper.plan().segment_of(*p).bucket == bucket && LENS[*p] > 0;
                let of_bucket: Vec<usize> = (0..LENS.len()).filter(is_here).collect();
                for param in of_bucket.iter().copied() {
                    // One flat bucket, and the same address however often it is asked for.
                    let other = of_bucket[0];
                    let apart = (4 * starts[param]).wrapping_sub(4 * starts[other]);
                    let at = stepper.ptr(ids[other])?.0.wrapping_add(apart);
                    assert_eq!([stepper.ptr(ids[param])?.0, stepper.ptr(ids[param])?.0], [at; 2], "p{param}");
                    let mut read = vec![0.0; LENS[param]];
                    stepper.read(ids[param], &mut read)?;
                    assert_same_bits(&read, &values(param), &format!("p{param}, round {round}"));
                    // What is written meanwhile lasts: on all ranks, as ever.
                    let changed: Vec<f32> = values(param).iter().map(|value| value + 1.0).collect();
                    stepper.write(ids[param], &changed)?;
                    stepper.read(ids[param], &mut read)?;
                    assert_same_bits(&read, &changed, &format!("p{param}, written, round {round}"));
                    stepper.reshard(bucket)?;
                    let refused = stepper.ptr(ids[param]).map(drop);
                    assert!(matches!(&refused, Err(Error::Order(_))), "{refused:?}");
                    let mut gathered = vec![0.0; LENS[param]];
                    stepper.gather(ids[param], &mut gathered)?;
                    assert_same_bits(&gathered, &changed, &format!("p{param}, gathered, round {round}"));
                    stepper.write(ids[param], &values(param))?;
                    stepper.unshard(bucket)?;
                }
                stepper.reshard(bucket)?;
                assert_eq!((params(&stepper), stand_in.allocated_bytes()), (shards, allocated));
            }
        }
        for bucket in 0..buckets.len() as u32 {
            stepper.unshard(bucket)?;
        }
        // A capture would keep addresses that come and go.
        let mut pass = stepper.begin()?;
        for (param, id) in ids.iter().enumerate() {
            pass.write(id.grad(), &values(param))?;
        }
        pass.finish()?;
        let refused = stepper.capture(|pass| pass.finish()).map(drop);
        assert!(
            matches!(&refused, Err(Error::Unsupported(told)) if told.thing.contains("Fsdp")),
            "{refused:?}"
        );
        // What is whole when a stepper goes is given back too.
        stepper.unshard(1)?;
        drop(stepper);
        assert_eq!(stand_in.allocated_bytes(), 0);
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_bucket_for_which_there_is_no_memory_fails_its_stepper_and_nothing_else() {
    in_process(2, |comm| {
        let stand_in = StandIn::new();
        let cuda = Cuda::on(stand_in.clone()).compute_stream(COMPUTE);
        let mut stepper = fsdp(OnStandIn(Arc::new(comm)), &cuda, false)?;
        stand_in.break_call("allocate");
        stepper.unshard(0)?;
        let id = shapes().id("p5")?;
        for outcome in [stepper.ptr(id).map(drop), stepper.read(id, &mut [0.0; 700])] {
            assert!(matches!(outcome, Err(Error::Poisoned { .. })), "{outcome:?}");
        }
        assert!(!stepper.memory().is_empty());
        drop(stepper);
        stand_in.forget_memory();
        Ok(())
    })
    .unwrap();
}
