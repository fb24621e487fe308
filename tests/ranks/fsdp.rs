//! Ranks shard parameters: the bytes that each holds, the calls that it makes, and refusals.
//!
//! `zero.rs` compares the bits with those of ranks that step whole parameters, for both strategies.

use std::num::NonZeroU32;
use std::time::Duration;

use instep::collective::CollectiveKind;
use instep::hazard::Traced;
use instep::op::{Action, Memory, Op, Stream};
use instep::{
    Adam, AdamW, DType, Divisor, Error, Gradients, InProcess, Layout, Mode, ParamId, Result, Sgd, Stepper,
    StepperBuilder, Strategy, in_process,
};

use crate::ranks::zero::bucket_of;

/// Length of each parameter: four buckets of 4 MiB, in shards of many pages.
const ELEMENTS: usize = 1 << 20;
const BUCKETS: u32 = 4;

fn layout() -> Layout {
    let add = |layout: instep::LayoutBuilder, k| layout.param(format!("p{k}"), ELEMENTS);
    (0..BUCKETS).fold(Layout::builder(), add).build().unwrap()
}

fn builder(layout: &Layout) -> StepperBuilder<'_> {
    Stepper::builder(layout, Sgd { lr: 1.0, ..Sgd::default() })
        .strategy(Strategy::Fsdp)
        .unused(instep::Unused::StepZero)
        .bucket_cap_bytes(1)
}

fn ids(layout: &Layout) -> Vec<ParamId> {
    layout.ids().collect()
}

fn bytes(stepper: &Stepper, memory: Memory) -> u64 {
    stepper.memory().into_iter().find(|(known, _)| *known == memory).map_or(0, |(_, bytes)| bytes)
}

/// Prevents the kernel from filling freed pages: its collector (khugepaged) makes a huge page of one present page and
/// 511 missing ones. The setting holds for the process, so tests that run beside it do not change it.
#[cfg(target_os = "linux")]
pub(crate) fn without_huge_pages() {
    unsafe extern "C" {
        fn prctl(option: i32, value: usize, zero: usize, zeros: usize, nil: usize) -> i32;
    }
    const PR_SET_THP_DISABLE: i32 = 41;
    // SAFETY: it changes how the kernel backs memory, and no byte of it.
    assert_eq!(unsafe { prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) }, 0);
}

/// Returns the bytes of a tensor whose pages are in this process's memory.
#[cfg(target_os = "linux")]
pub(crate) fn resident(values: &[f32]) -> u64 {
    unsafe extern "C" {
        fn mincore(address: *mut std::ffi::c_void, length: usize, pages: *mut u8) -> i32;
    }
    const PAGE: usize = 4096;
    let (start, end) = (values.as_ptr().addr(), values.as_ptr_range().end.addr());
    let first = values.as_ptr().cast::<u8>().wrapping_sub(start % PAGE);
    let mut pages = vec![0u8; (end - first.addr()).div_ceil(PAGE)];
    // SAFETY: it asks about pages of this process, one byte for each.
    let outcome = unsafe { mincore(first.cast_mut().cast(), end - first.addr(), pages.as_mut_ptr()) };
    assert_eq!(outcome, 0);
    pages.iter().map(|page| u64::from(page & 1) * PAGE as u64).sum()
}

#[test]
fn a_rank_holds_its_shard_and_what_is_unsharded_and_says_so() {
    #[cfg(target_os = "linux")]
    without_huge_pages();
    const RANKS: u64 = 4;
    let layout = layout();
    in_process(RANKS as u32, |comm| {
        let mut stepper = builder(&layout).gradients(Gradients::Release).host(comm)?;
        let ids = ids(&layout);
        for id in &ids {
            stepper.write(*id, &vec![1.0; ELEMENTS])?;
        }
        let (bucket, shard) = (4 * ELEMENTS as u64, 4 * ELEMENTS as u64 / RANKS);
        assert_eq!(bytes(&stepper, Memory::Params), u64::from(BUCKETS) * shard);
        let mut addresses = Vec::new();
        for pass in 0..2 {
            for id in &ids {
                let at = bucket_of(&stepper, *id)?;
                stepper.unshard(at)?;
                assert_eq!(bytes(&stepper, Memory::Params), u64::from(BUCKETS - 1) * shard + bucket);
                let view = stepper.view::<f32>(*id)?;
                assert!(view.iter().all(|x| *x == 1.0 - pass as f32));
                #[cfg(target_os = "linux")]
                assert_eq!(resident(view), bucket);
                addresses.push(view.as_ptr_range());
                stepper.reshard(at)?;
            }
            let mut open = stepper.begin()?;
            for id in ids.iter().rev() {
                let at = bucket_of(&open, *id)?;
                open.unshard(at)?;
                open.view::<f32>(*id)?;
                open.grads().get_mut(*id)?.fill(1.0);
                open.grad_ready(*id)?;
            }
            open.finish()?;
            assert_eq!(bytes(&stepper, Memory::Params), u64::from(BUCKETS) * shard);
        }
        // Addresses stay, and only the shard's pages have content.
        assert_eq!(addresses[..BUCKETS as usize], addresses[BUCKETS as usize..]);
        stepper.gather(ids[0], &mut vec![0.0; ELEMENTS])?;
        #[cfg(target_os = "linux")]
        for range in &addresses[..BUCKETS as usize] {
            // SAFETY: the stepper's own memory, which nothing writes now; pages that are given up read as zeros.
            let values = unsafe { std::slice::from_raw_parts(range.start, ELEMENTS) };
            let resident = resident(values);
            assert!((shard..=shard + 2 * 4096).contains(&resident), "{resident} of {bucket}");
        }
        stepper.close()
    })
    .unwrap();
}

#[test]
fn a_pass_makes_one_reduce_scatter_per_bucket_and_an_all_gather_per_unshard() {
    let layout = Layout::builder().param("a", 700).param("b", 300).param("c", 600).build().unwrap();
    for mode in [Mode::Sequential, Mode::Eager, Mode::Normed] {
        let lists = in_process(3, |comm| {
            let mut stepper = builder(&layout).mode(mode).record(true).host(comm)?;
            for _ in 0..4 {
                for id in layout.ids() {
                    let bucket = bucket_of(&stepper, id)?;
                    stepper.unshard(bucket)?;
                    stepper.unshard(bucket)?;
                    stepper.view::<f32>(id)?;
                    // The last one of forward is the first one of backward.
                    if bucket > 0 {
                        stepper.reshard(bucket)?;
                    }
                }
                let mut pass = stepper.begin()?;
                for id in layout.ids().rev() {
                    let bucket = bucket_of(&pass, id)?;
                    pass.unshard(bucket)?;
                    pass.view::<f32>(id)?;
                    pass.grads().get_mut(id)?.fill(1.0);
                    pass.grad_ready(id)?;
                }
                pass.finish()?;
            }
            let recording = stepper.take_recording().unwrap();
            assert_eq!(stepper.check(&recording), []);
            Ok(recording.list)
        });
        for list in lists.unwrap() {
            let count = |stream, kind| {
                let is_it = |entry: &&Traced| {
                    matches!(entry, Traced::Op(Op { stream: on, action: Action::Collective { kind: of, .. } })
                        if (*on, *of) == (stream, kind))
                };
                list.iter().filter(is_it).count()
            };
            assert_eq!(count(Stream::Reduce, CollectiveKind::ReduceScatter), 4 * 3, "{mode:?}");
            assert_eq!(count(Stream::Gather, CollectiveKind::AllGather), 4 * (3 + 2), "{mode:?}");
            assert_eq!(count(Stream::Reduce, CollectiveKind::Broadcast), 0, "{mode:?}");
        }
    }
}

#[test]
fn what_is_not_here_is_refused_and_the_refusal_says_what_to_call() {
    let layout = Layout::builder().param("w", 600).param("b", 3).build().unwrap();
    in_process(2, |comm: InProcess| {
        let told = |outcome: Result<()>| outcome.unwrap_err().to_string();
        let most = NonZeroU32::MIN;
        let mut stepper = builder(&layout).max_unsharded(most).host(comm.split())?;
        let (w, b) = (layout.id("w")?, layout.id("b")?);
        for read in [stepper.view::<f32>(w).map(drop), stepper.read(w, &mut [0.0; 600])] {
            let told = told(read);
            assert!(told.contains("`w`") && told.contains("call unshard(1) on all ranks"), "{told}");
        }
        stepper.unshard(1)?;
        assert_eq!(stepper.view::<f32>(w)?.len(), 600);
        let full = told(stepper.unshard(0));
        let words =
            ["bucket 0: would be one more than max_unsharded allows, which is 1", "bucket 1 unsharded"];
        assert!(words.iter().all(|words| full.contains(words)), "{full}");
        let slice = stepper.view_mut::<f32>(w).map(drop).unwrap_err();
        assert!(matches!(slice, Error::Unsupported(_)), "{slice}");
        assert!(matches!(stepper.unshard(2), Err(Error::Layout(_))));
        assert!(matches!(stepper.reshard(2), Err(Error::Layout(_))));
        stepper.reshard(1)?;
        let mut pass = stepper.begin()?;
        pass.unshard(0)?;
        pass.grads().get_mut(b)?.fill(1.0);
        pass.grad_ready(b)?;
        let late = told(pass.unshard(0));
        assert!(late.contains("handed over in this pass"), "{late}");
        assert!(pass.view::<f32>(b).is_err());
        pass.finish()?;
        stepper.unshard(0)?;
        assert_eq!(stepper.view::<f32>(b)?, [-1.0; 3]);
        stepper.close()?;

        let uneven = builder(&layout).uneven_inputs(Divisor::WorldSize).unused(instep::Unused::Skip);
        let uneven = uneven.host(comm.split()).unwrap_err().to_string();
        assert!(uneven.contains("uneven_inputs"), "{uneven}");
        let whole = Stepper::builder(&layout, Adam::default()).max_unsharded(most).host(comm);
        assert!(whole.unwrap_err().to_string().contains("use Strategy::Fsdp"));
        Ok(())
    })
    .unwrap();
}

#[test]
fn ranks_that_write_other_parameters_or_unshard_other_buckets_are_told() {
    let layout = Layout::builder().param("w", 600).param("b", 300).build().unwrap();
    let written = in_process(2, |comm| {
        let rank = comm.rank() as f32;
        let mut stepper = builder(&layout).host(comm)?;
        stepper.write(layout.id("w")?, &[rank; 600])?;
        stepper.unshard(1)?;
        Ok(stepper.view::<f32>(layout.id("w")?).map(drop).unwrap_err().to_string())
    });
    for told in written.unwrap() {
        let named = ["0 than on rank 1", "1 than on rank 0"].map(|ranks| {
            format!("`w` was written with other values on rank {ranks}]; write the same on all ranks")
        });
        assert!(named.iter().any(|named| told.contains(named)), "{told}");
    }
    let alone = in_process(2, |comm| {
        let is_odd = comm.rank() == 1;
        let mut stepper = builder(&layout).host(comm)?;
        for name in ["w", "b"] {
            let id = layout.id(name)?;
            if name == "w" || is_odd {
                stepper.write(id, &vec![0.5; layout.parameter(id)?.len as usize])?;
            }
        }
        stepper.begin()?.finish()?;
        Ok(stepper.status().unwrap_err().to_string())
    });
    for told in alone.unwrap() {
        assert!(told.contains("`b` was written on rank 1 and not on rank 0]; write the same"), "{told}");
    }
    let other = in_process(2, |comm| {
        let rank = comm.rank();
        let mut stepper = builder(&layout).deadline(Duration::from_secs(20)).host(comm)?;
        stepper.unshard(rank)?;
        let name = ["b", "w"][rank as usize];
        Ok(stepper.view::<f32>(layout.id(name)?).map(drop).unwrap_err().to_string())
    });
    for told in other.unwrap() {
        assert!(told.contains("bucket 0") && told.contains("bucket 1"), "{told}");
        assert!(told.ends_with("; unshard the same buckets in the same order on all ranks"), "{told}");
    }
}

#[test]
fn a_rank_that_fills_parameters_alone_is_told_which_calls_to_make_together() {
    let layout = Layout::builder().param("w", 600).param("b", 300).build().unwrap();
    let told = in_process(2, |comm| {
        let is_odd = comm.rank() == 1;
        let mut stepper = builder(&layout).host(comm)?;
        if is_odd {
            return Ok(stepper.fill_params(|_, _| {}).unwrap_err().to_string());
        }
        let _ = stepper.begin()?.finish();
        Ok(stepper.status().unwrap_err().to_string())
    });
    for told in told.unwrap() {
        assert!(told.contains("call gather, fill_params, and checkpoint's functions on all ranks"), "{told}");
        assert!(told.contains("all-gather") && !told.contains("several of"), "{told}");
    }
}

/// A framework sets the first values of a training with [`Stepper::fill_params`], on all ranks.
#[test]
fn parameters_that_are_filled_in_and_copies_are_those_of_whole_ranks() {
    let layout = Layout::builder().param("w", 700).param("b", 3).build().unwrap();
    let run = |strategy| {
        in_process(3, |comm| {
            let builder = Stepper::builder(&layout, AdamW::default()).copy_params(DType::BF16);
            let mut stepper = builder.strategy(strategy).bucket_cap_bytes(1).host(comm)?;
            for round in 0..2 {
                stepper.fill_params(|name, values| {
                    let from = if name == "w" { 1.0 } else { -1.0 };
                    values.iter_mut().enumerate().for_each(|(k, x)| *x = 0.5 * *x + from * k as f32);
                })?;
                let mut pass = stepper.begin()?;
                for id in layout.ids() {
                    pass.grads().get_mut(id)?.fill(round as f32 - 0.25);
                }
                pass.finish()?;
            }
            let mut all = Vec::new();
            for id in layout.ids() {
                let bucket = bucket_of(&stepper, id)?;
                stepper.unshard(bucket)?;
                let mut values = vec![0.0; layout.parameter(id)?.len as usize];
                for tensor in [id.into(), id.copy()] {
                    stepper.read(tensor, &mut values)?;
                    all.push(values.clone());
                }
            }
            Ok(all)
        })
        .unwrap()
    };
    let (whole, shared) = (run(Strategy::Replicated), run(Strategy::Fsdp));
    assert_eq!(whole, shared);
    assert!(whole[0].iter().flatten().any(|x| *x != 0.0));
}
