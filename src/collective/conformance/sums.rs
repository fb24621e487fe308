//! Tests sums, broadcasts and comparisons. Results must have the same bits on every rank, and sums of small integers
//! must be exact.
//!
//! Every rank can compute every other rank's values, so it computes the expected results without communication. A
//! broadcast must copy the bytes of every element type, without rounding values or changing NaN.

use crate::collective::CollectiveKind;
use crate::collective::conformance::rank::{FORMS, IN_PLACE, Rank, decode, encode, hash, whole_number};
use crate::dtype::DType;

/// Returns a positive or negative value with one of 13 exponents. A sum of such values depends on the order in which
/// they are added.
fn rough_number(rank: u32, element: usize) -> f32 {
    let bits = hash(rank.into(), element as u64);
    let fraction = 1.0 + (bits >> 41) as f32 / (1 << 23) as f32;
    let scale = f32::powi(2.0, (bits % 13) as i32 - 6);
    if bits & 0x10000 == 0 { fraction * scale } else { -fraction * scale }
}

pub(super) fn count_ranks(rank: &Rank) -> Result<(), String> {
    if rank.rank >= rank.ranks {
        return Err(format!("rank {} is not below world_size, {}", rank.rank, rank.ranks));
    }
    // Each rank marks the element at its own number. If two ranks have the same number, an element stays unmarked.
    let own = |element| if element == rank.rank { 1.0 } else { 0.0 };
    let marks: Vec<f32> = (0..rank.ranks).map(own).collect();
    let summed = rank.sum(DType::F32, &marks, IN_PLACE)?;
    if summed.iter().all(|mark| *mark == 1.0) {
        return Ok(());
    }
    Err(format!("each rank adds 1 at its own number, and the sums are {summed:?}"))
}

pub(super) fn add_whole_numbers(rank: &Rank) -> Result<(), String> {
    let ranks = rank.ranks as usize;
    for dtype in rank.summed_types() {
        for elements in [0, 1, ranks - 1, ranks + 1, 255, 256 * ranks, 1003] {
            for form in FORMS {
                let values = |of: u32| (0..elements).map(move |at| whole_number(of, rank.ranks, at));
                let summed = rank.sum(dtype, &values(rank.rank).collect::<Vec<f32>>(), form)?;
                let what = format_args!("{dtype}, {elements} elements, {form:?}").to_string();
                compare(
                    &summed,
                    |at| (0..rank.ranks).map(|of| whole_number(of, rank.ranks, at)).sum(),
                    &what,
                )?;
            }
        }
    }
    Ok(())
}

pub(super) fn equal_bits(rank: &Rank) -> Result<(), String> {
    for dtype in rank.summed_types() {
        let value = |of: u32, at: usize| dtype.round(rough_number(of, at));
        let own: Vec<f32> = (0..5003).map(|at| value(rank.rank, at)).collect();
        let summed = rank.sum(dtype, &own, IN_PLACE)?;
        for (at, sum) in summed.iter().enumerate() {
            let terms = || (0..rank.ranks).map(|of| f64::from(value(of, at)));
            // The bound is wide, because a ring rounds at every hop, and a communicator may send bf16.
            let bound = f64::from(rank.ranks) / 128.0 * terms().map(f64::abs).sum::<f64>();
            let error = (f64::from(*sum) - terms().sum::<f64>()).abs();
            if error.is_nan() || error > bound {
                return Err(format!(
                    "{dtype}: element {at} is {sum:e}, and the sum is {:e}",
                    terms().sum::<f64>()
                ));
            }
        }
        let ours = encode(dtype, &summed);
        let first = rank.run(CollectiveKind::Broadcast, dtype, &ours, IN_PLACE)?;
        if let Some(at) = (0..ours.len()).find(|at| ours[*at] != first[*at]) {
            let element = at / dtype.bytes() as usize;
            return Err(format!("{dtype}: element {element} of the sum has other bits than on rank 0"));
        }
    }
    Ok(())
}

pub(super) fn special_values(rank: &Rank) -> Result<(), String> {
    let value = |of: u32, at: usize| match at % 7 {
        0 if of + 1 == rank.ranks => f32::NAN,
        1 if of == 0 => f32::INFINITY,
        2 if of == 0 => f32::NEG_INFINITY,
        3 if of == 0 => f32::INFINITY,
        3 if of + 1 == rank.ranks => f32::NEG_INFINITY,
        _ => whole_number(of, rank.ranks, at),
    };
    for dtype in rank.summed_types() {
        for form in FORMS {
            let own: Vec<f32> = (0..67).map(|at| value(rank.rank, at)).collect();
            let summed = rank.sum(dtype, &own, form)?;
            compare(
                &summed,
                |at| (0..rank.ranks).map(|of| value(of, at)).sum(),
                &format!("{dtype}, {form:?}"),
            )?;
        }
    }
    Ok(())
}

pub(super) fn large_buffer(rank: &Rank) -> Result<(), String> {
    let elements = (8 << 20) / 4 + 1;
    let own: Vec<f32> = (0..elements).map(|at| whole_number(rank.rank, rank.ranks, at)).collect();
    let summed = rank.sum(DType::F32, &own, IN_PLACE)?;
    let expected = |at| (0..rank.ranks).map(|of| whole_number(of, rank.ranks, at)).sum();
    compare(&summed, expected, &format!("f32, {elements} elements"))
}

fn compare(summed: &[f32], expected: impl Fn(usize) -> f32, what: &str) -> Result<(), String> {
    for (at, sum) in summed.iter().enumerate() {
        let expected = expected(at);
        if *sum != expected && !(sum.is_nan() && expected.is_nan()) {
            return Err(format!("{what}: element {at} is {sum}, and the sum is {expected}"));
        }
    }
    Ok(())
}

/// Returns bytes in which every second group of four is an f32 NaN with a payload. About half of these NaNs are
/// signalling.
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
        // A value repeats only after 120 rounds, so a sum that is left over from a recent round is detected.
        let value = (round % 120 + 1) as f32;
        let own = if rank.rank == 0 { value } else { 0.0 };
        let summed = rank.sum(DType::F32, &vec![own; elements], IN_PLACE)?;
        if let Some(sum) = summed.iter().find(|sum| **sum != value) {
            return Err(format!("call {round}, an all-reduce, gives {sum} where it sums to {value}"));
        }
    }
    Ok(())
}

/// Makes several calls together. The lengths of the calls are not in order, because an implementation may sort the
/// calls by length.
pub(super) fn calls_together(rank: &Rank) -> Result<(), String> {
    const LENGTHS: [usize; 5] = [7, 1003, 1, 0, 4099];
    let exact = |of: u32, call: usize, elements: usize| -> Vec<f32> {
        (0..elements).map(|at| whole_number(of, rank.ranks, at + call)).collect()
    };
    for dtype in rank.summed_types() {
        for several in 1..=LENGTHS.len() {
            let call = |(at, elements): (usize, &usize)| match at % 3 {
                2 => (CollectiveKind::Broadcast, dtype, encode(dtype, &exact(rank.rank, at, *elements))),
                _ => (CollectiveKind::AllReduce, dtype, encode(dtype, &exact(rank.rank, at, *elements))),
            };
            let calls: Vec<_> = LENGTHS[..several].iter().enumerate().map(call).collect();
            let results = rank.run_together(&calls)?;
            for (at, ((kind, _, _), result)) in calls.iter().zip(&results).enumerate() {
                let ranks = if *kind == CollectiveKind::Broadcast { 1 } else { rank.ranks };
                let expected =
                    |element| (0..ranks).map(|of| whole_number(of, rank.ranks, element + at)).sum();
                let what = format!("call {at} of {several} made together, {kind} of {dtype}");
                compare(&decode(dtype, result), expected, &what)?;
            }
        }
    }
    Ok(())
}
