//! Sums in rank order, by the type of the elements: 16-bit types add in f32 and round once. It also has the maximum and
//! the minimum of 32-bit integers.
//!
//! This file is pure arithmetic on bytes in the machine's order.

use half::{bf16, f16};

use crate::header::{ncclDataType_t as DataType, ncclRedOp_t as Operation};

/// Returns the bytes of an element, or `None` for a type without a known sum.
pub(crate) fn bytes_of(dtype: DataType) -> Option<usize> {
    match dtype {
        DataType::ncclInt8 | DataType::ncclUint8 => Some(1),
        DataType::ncclFloat16 | DataType::ncclBfloat16 => Some(2),
        DataType::ncclInt32 | DataType::ncclUint32 | DataType::ncclFloat32 => Some(4),
        DataType::ncclInt64 | DataType::ncclUint64 | DataType::ncclFloat64 => Some(8),
        _ => None,
    }
}

/// Returns whether ranks' elements of this type can be combined by this operation.
pub(crate) fn knows(operation: Operation, dtype: DataType) -> bool {
    let is_extremum = matches!(operation, Operation::ncclMax | Operation::ncclMin);
    operation == Operation::ncclSum || is_extremum && dtype == DataType::ncclUint32
}

/// Writes the combination of all ranks' elements.
pub(crate) fn combine(operation: Operation, dtype: DataType, ranks: &[&[u8]], into: &mut [u8]) {
    match operation {
        Operation::ncclMax => extremum(ranks, into, u32::max),
        Operation::ncclMin => extremum(ranks, into, u32::min),
        _ => sum(dtype, ranks, into),
    }
}

fn extremum(ranks: &[&[u8]], into: &mut [u8], choose: fn(u32, u32) -> u32) {
    into.copy_from_slice(ranks[0]);
    for values in &ranks[1..] {
        for (chosen, value) in into.chunks_exact_mut(4).zip(values.chunks_exact(4)) {
            let [a, b] =
                [&*chosen, value].map(|bytes| u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
            chosen.copy_from_slice(&choose(a, b).to_ne_bytes());
        }
    }
}

/// Writes the sum of all ranks' elements, which come in the order of the ranks.
fn sum(dtype: DataType, ranks: &[&[u8]], into: &mut [u8]) {
    match dtype {
        DataType::ncclFloat32 => each(ranks, into, f32::from_ne_bytes, f32::to_ne_bytes),
        DataType::ncclFloat64 => each(ranks, into, f64::from_ne_bytes, f64::to_ne_bytes),
        DataType::ncclFloat16 => {
            each(
                ranks,
                into,
                |bytes| f16::from_ne_bytes(bytes).to_f32(),
                |sum| f16::from_f32(sum).to_ne_bytes(),
            );
        }
        DataType::ncclBfloat16 => {
            each(
                ranks,
                into,
                |bytes| bf16::from_ne_bytes(bytes).to_f32(),
                |sum| bf16::from_f32(sum).to_ne_bytes(),
            );
        }
        // Sums of integers wrap, so the sign makes no difference.
        DataType::ncclInt8 | DataType::ncclUint8 => wrapping(ranks, into, 1),
        DataType::ncclInt32 | DataType::ncclUint32 => wrapping(ranks, into, 4),
        _ => wrapping(ranks, into, 8),
    }
}

fn each<const N: usize, T: Copy + std::ops::Add<Output = T>>(
    ranks: &[&[u8]],
    into: &mut [u8],
    read: impl Fn([u8; N]) -> T,
    write: impl Fn(T) -> [u8; N],
) {
    let element = |values: &[u8], at: usize| {
        let mut bytes = [0; N];
        bytes.copy_from_slice(&values[at..at + N]);
        read(bytes)
    };
    for at in (0..into.len()).step_by(N) {
        let rest = ranks[1..].iter().map(|values| element(values, at));
        let sum = rest.fold(element(ranks[0], at), |sum, value| sum + value);
        into[at..at + N].copy_from_slice(&write(sum));
    }
}

fn wrapping(ranks: &[&[u8]], into: &mut [u8], bytes: usize) {
    for at in (0..into.len()).step_by(bytes) {
        let sum = ranks.iter().fold(0u64, |sum, values| {
            let mut whole = [0; 8];
            whole[..bytes].copy_from_slice(&values[at..at + bytes]);
            sum.wrapping_add(u64::from_le_bytes(whole))
        });
        into[at..at + bytes].copy_from_slice(&sum.to_le_bytes()[..bytes]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_in_rank_order_and_wrap_or_round_once() {
        let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_ne_bytes()).collect::<Vec<_>>();
        let rows = [bytes(&[1e8, 1.0]), bytes(&[1.0, 2.0]), bytes(&[-1e8, 3.0])];
        let mut into = [0; 8];
        sum(DataType::ncclFloat32, &rows.each_ref().map(|row| &row[..]), &mut into);
        assert_eq!(into.to_vec(), bytes(&[0.0, 6.0]));
        let mut into = [0; 2];
        sum(DataType::ncclUint8, &[&[200, 1], &[100, 2]], &mut into);
        assert_eq!(into, [44, 3]);
        let halves = [256.0, 1.0, 1.0].map(|value| bf16::from_f32(value).to_ne_bytes());
        sum(DataType::ncclBfloat16, &halves.each_ref().map(|row| &row[..]), &mut into);
        assert_eq!(bf16::from_ne_bytes(into).to_f32(), 258.0);
    }

    #[test]
    fn the_largest_and_the_smallest_whole_number_have_no_sign() {
        let rows = [[1u32, u32::MAX], [1 << 31, 7]].map(|row| row.map(u32::to_ne_bytes).concat());
        let rows = rows.each_ref().map(|row| &row[..]);
        let mut into = [0; 8];
        combine(Operation::ncclMax, DataType::ncclUint32, &rows, &mut into);
        assert_eq!(into[..], [1u32 << 31, u32::MAX].map(u32::to_ne_bytes).concat());
        combine(Operation::ncclMin, DataType::ncclUint32, &rows, &mut into);
        assert_eq!(into[..], [1u32, 7].map(u32::to_ne_bytes).concat());
        assert!(!knows(Operation::ncclMax, DataType::ncclFloat32));
    }
}
