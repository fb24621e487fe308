//! Broadcasts, comparisons, and many calls one after the other.
//!
//! A broadcast is a copy for every element type: it rounds nothing and changes no NaN.

use crate::collective::CollectiveKind;
use crate::collective::conformance::rank::{FORMS, IN_PLACE, Rank, hash};
use crate::dtype::DType;

/// Bytes in which every other four are an f32 NaN with a payload; half of them are signalling.
fn arbitrary_bytes(of: u64, len: usize) -> Vec<u8> {
    let word = |at: usize| {
        let bits = hash(of, at as u64) as u32;
        if at.is_multiple_of(2) { bits | 0x7f80_0001 } else { bits }
    };
    (0..len.div_ceil(4)).flat_map(|at| word(at).to_ne_bytes()).take(len).collect()
}

pub(super) fn agree(rank: &Rank) -> Result<(), String> {
    let agree =
        |number| rank.comm.agree(number, rank.patience).map_err(|error| format!("{number} fails: {error}"));
    agree(7)?;
    agree(8)
}

pub(super) fn broadcast_bits(rank: &Rank) -> Result<(), String> {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for elements in [0, 1, 7, 1003] {
            for form in FORMS {
                let len = elements * dtype.bytes() as usize;
                let contents = |of: u32| arbitrary_bytes(u64::from(of), len);
                let got = rank.run(CollectiveKind::Broadcast, dtype, &contents(rank.rank), form)?;
                let expected = contents(0);
                if let Some(at) = (0..len).find(|at| got[*at] != expected[*at]) {
                    let (got, expected) = (got[at], expected[at]);
                    let what = format!("{elements} elements of {dtype}, {form:?}");
                    return Err(format!("{what}: byte {at} is {got:#x}, and {expected:#x} on rank 0"));
                }
            }
        }
    }
    Ok(())
}

pub(super) fn many_calls(rank: &Rank) -> Result<(), String> {
    for round in 0..200 {
        let elements = round * 37 % 301;
        if round % 3 == 2 {
            let contents = |of: u32| arbitrary_bytes(hash(of.into(), round as u64), 4 * elements);
            let got = rank.run(CollectiveKind::Broadcast, DType::F32, &contents(rank.rank), IN_PLACE)?;
            if got != contents(0) {
                return Err(format!("call {round}, a broadcast, carries other bytes than rank 0 sent in it"));
            }
            continue;
        }
        // Of this round, so that the sum of another one is noticed.
        let value = (round % 120 + 1) as f32;
        let own = if rank.rank == 0 { value } else { 0.0 };
        let summed = rank.sum(DType::F32, &vec![own; elements], IN_PLACE)?;
        if let Some(sum) = summed.iter().find(|sum| **sum != value) {
            return Err(format!("call {round}, an all-reduce, gives {sum} where it sums to {value}"));
        }
    }
    Ok(())
}
