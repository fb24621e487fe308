//! Tests the calls that a sharded stepper makes: reduce-scatter, all-gather and reductions of integers, also on a
//! second communicator and in groups of ranks.
//!
//! A collective need not support reduce-scatter, all-gather and reductions of integers. A collective passes the tests
//! without such a kind of call if [`Collective::supports`] is false for this kind, and such a call returns
//! `Unsupported`.

use std::sync::Arc;
use std::thread;

use crate::collective::conformance::rank::{
    Buffer, FORMS, IN_PLACE, Rank, decode, encode, hash, whole_number,
};
use crate::collective::{Collective, CollectiveKind};
use crate::dtype::DType;
use crate::error::Error;

const LENGTHS: [usize; 4] = [0, 1, 256, 1003];

pub(super) fn reduce_scatter(rank: &Rank) -> Result<(), String> {
    let kind = CollectiveKind::ReduceScatter;
    if !rank.comm.supports(kind) {
        return Ok(());
    }
    let (own, ranks) = (rank.rank as usize, rank.ranks as usize);
    for dtype in rank.summed_types() {
        for part in LENGTHS {
            for form in FORMS {
                let values: Vec<f32> =
                    (0..part * ranks).map(|at| whole_number(rank.rank, rank.ranks, at)).collect();
                let summed = decode(dtype, &rank.run(kind, dtype, &encode(dtype, &values), form)?);
                for (k, sum) in summed.iter().enumerate() {
                    let at = own * part + k;
                    let expected = (0..rank.ranks).map(|of| whole_number(of, rank.ranks, at)).sum::<f32>();
                    if *sum != expected {
                        let what = format!("{dtype}, parts of {part}, {form:?}");
                        return Err(format!("{what}: element {at} is {sum}, and the sum is {expected}"));
                    }
                }
            }
        }
    }
    Ok(())
}

pub(super) fn all_gather(rank: &Rank) -> Result<(), String> {
    let kind = CollectiveKind::AllGather;
    if !rank.comm.supports(kind) {
        return Ok(());
    }
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for part in LENGTHS {
            for form in FORMS {
                let len = part * dtype.bytes() as usize;
                let bytes = |of: u32| (0..len).map(move |at| hash(of.into(), at as u64) as u8);
                let got = rank.run(kind, dtype, &bytes(rank.rank).collect::<Vec<u8>>(), form)?;
                let expected: Vec<u8> = (0..rank.ranks).flat_map(bytes).collect();
                if let Some(at) = (0..expected.len()).find(|at| got[*at] != expected[*at]) {
                    let (what, of) = (format!("parts of {part} {dtype}, {form:?}"), at / len);
                    return Err(format!("{what}: byte {} of rank {of}'s part differs", at % len));
                }
            }
        }
    }
    Ok(())
}

pub(super) fn whole_numbers(rank: &Rank) -> Result<(), String> {
    let number = |of: u32, at: usize| hash(u64::from(of) + 1, at as u64);
    let all = |at| (0..rank.ranks).map(move |of| number(of, at));
    for count in [0, 1, 22, 257] {
        let wide: Vec<u8> = (0..count).flat_map(|at| number(rank.rank, at).to_ne_bytes()).collect();
        let narrow: Vec<u8> =
            (0..count).flat_map(|at| (number(rank.rank, at) as u32).to_ne_bytes()).collect();
        let narrowed = |at| all(at).map(|number| number as u32);
        let sums = (0..count).flat_map(|at| all(at).fold(0, u64::wrapping_add).to_ne_bytes());
        let largest = (0..count).flat_map(|at| narrowed(at).max().unwrap_or(0).to_ne_bytes());
        let smallest = (0..count).flat_map(|at| narrowed(at).min().unwrap_or(0).to_ne_bytes());
        let cases = [
            (CollectiveKind::Sum64, &wide, sums.collect::<Vec<u8>>()),
            (CollectiveKind::Max32, &narrow, largest.collect()),
            (CollectiveKind::Min32, &narrow, smallest.collect()),
        ];
        for (kind, own, expected) in cases {
            for form in FORMS {
                if rank.comm.supports(kind) && rank.run(kind, DType::F32, own, form)? != expected {
                    return Err(format!("{kind} of {count} numbers, {form:?}: another result"));
                }
            }
        }
    }
    Ok(())
}

pub(super) fn unknown_kinds(rank: &Rank) -> Result<(), String> {
    for kind in CollectiveKind::ALL.into_iter().filter(|kind| !rank.comm.supports(*kind)) {
        let mut buffer = Buffer::new(&vec![0; 8 * rank.ranks as usize], 0);
        let key = rank.key(kind, DType::F32, 8 * rank.ranks as usize);
        match rank.enqueue(key, &mut buffer, None, rank.patience) {
            Err(Error::Unsupported(_)) => {}
            outcome => return Err(format!("a {kind}, which is unknown, ends with {outcome:?}")),
        }
    }
    Ok(())
}

/// Checks sums and broadcasts in groups, and on a duplicate of each group. Even ranks form one group and odd ranks
/// another. Then each group is split into two groups in the same way.
pub(super) fn groups(rank: &Rank) -> Result<(), String> {
    let (mut comm, mut members) = (Arc::clone(&rank.comm), (0..rank.ranks).collect::<Vec<u32>>());
    for round in 0..2 {
        let (own, ranks) = (comm.rank(), comm.world_size());
        let group: Vec<u32> = (0..ranks).rev().filter(|other| other % 2 == own % 2).collect();
        comm = match comm.subgroup(&group) {
            Ok(group) => group,
            Err(Error::Unsupported(_)) if round == 0 => return Ok(()),
            Err(error) => return Err(format!("there is no group of ranks {group:?}: {error}")),
        };
        members = group.iter().map(|place| members[*place as usize]).collect();
        let at = members.get(comm.rank() as usize);
        if (at, comm.world_size() as usize) != (Some(&rank.rank), members.len()) {
            return Err(format!("this is rank {} of {} in {members:?}", comm.rank(), comm.world_size()));
        }
        let second = if rank.comm.supports(CollectiveKind::AllGather) {
            comm.duplicate()
        } else {
            Ok(Arc::clone(&comm))
        };
        let second =
            second.map_err(|error| format!("there is no second communicator of a group: {error}"))?;
        for comm in [&comm, &second] {
            let sums = Rank::new(Arc::clone(comm), rank.patience);
            let expected: f32 = members.iter().map(|member| *member as f32).sum();
            let summed = sums.sum(DType::F32, &[rank.rank as f32; 300], IN_PLACE)?;
            if summed.iter().any(|sum| *sum != expected) {
                return Err(format!("the sum over {members:?} is {}", summed[0]));
            }
            let first =
                sums.run(CollectiveKind::Broadcast, DType::F32, &rank.rank.to_ne_bytes(), IN_PLACE)?;
            if first != members[0].to_ne_bytes() {
                return Err(format!("a broadcast in {members:?} carries {first:?}"));
            }
        }
    }
    Ok(())
}

/// Makes calls on two communicators of the same ranks, in different orders. Odd ranks begin with the second
/// communicator, and even ranks begin with the first.
pub(super) fn second_order(rank: &Rank) -> Result<(), String> {
    let second = match rank.comm.duplicate() {
        Ok(second) => second,
        Err(Error::Unsupported(_)) if !rank.comm.supports(CollectiveKind::AllGather) => return Ok(()),
        Err(error) => return Err(format!("there is no second communicator: {error}")),
    };
    if (second.rank(), second.world_size()) != (rank.rank, rank.ranks) {
        return Err(format!(
            "the second communicator is of rank {} of {}",
            second.rank(),
            second.world_size()
        ));
    }
    let patience = rank.patience;
    let sums = move |comm: Arc<dyn Collective>, value: f32| {
        let rank = Rank::new(comm, patience);
        for _ in 0..20 {
            let summed = rank.sum(DType::F32, &[value; 64], IN_PLACE)?;
            if summed.iter().any(|sum| *sum != value * rank.ranks as f32) {
                return Err(format!("the sum of {value} over ranks is {}", summed[0]));
            }
        }
        Ok::<(), String>(())
    };
    let first = Arc::clone(&rank.comm);
    let beside = thread::scope(|scope| {
        let late = rank.rank % 2 == 1;
        let other = scope.spawn(move || {
            if late {
                thread::sleep(patience / 200);
            }
            sums(first, 1.0)
        });
        if !late {
            thread::sleep(patience / 200);
        }
        let own = sums(second, 2.0);
        own.and(other.join().unwrap_or_else(|_| Err("a call panicked".to_owned())))
    });
    beside.map_err(|why| format!("two communicators at a time: {why}"))
}
