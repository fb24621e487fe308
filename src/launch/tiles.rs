//! Cuts the segments of a bucket into tiles, the unit of work of a kernel launch.
//!
//! Depends on the plan alone. No tile leaves its segment, or its row where blocks of states end there, so padding belongs to
//! none.

use crate::abi::{INSTEP_LONGEST_RUN, INSTEP_TILE_ELEMENTS, InstepTile};
use crate::layout::{Bucket, Gradients, Plan};

/// Segments of a bucket, cut into tiles; `record` and `first_record` give the places of a segment's records. All offsets
/// are relative to this rank's part of the bucket. With `counts_absent`, a segment without a part here has a tile without
/// elements.
pub(super) fn tiles(
    plan: &Plan,
    bucket: &Bucket,
    segments: &[u32],
    [record, first_record]: [&dyn Fn(u32) -> u32; 2],
    counts_absent: bool,
) -> Vec<InstepTile> {
    // A mean is written once its run is stepped, while a tile's gradients are still in a GPU's cache.
    let longest = if plan.gradients() == Gradients::Average { 1 } else { INSTEP_LONGEST_RUN };
    let kept = |index: &u32| bucket.shard_of_segment(&plan.segments()[*index as usize]);
    let counts =
        segments.iter().map(kept).map(|kept| (kept.end - kept.start) / u64::from(INSTEP_TILE_ELEMENTS) + 1);
    let mut tiles = Vec::with_capacity(counts.sum::<u64>() as usize);
    for index in segments {
        let segment = &plan.segments()[*index as usize];
        let kept = bucket.shard_of_segment(segment);
        let tile = |at: u64, count: u64| InstepTile {
            param: (segment.start + at - bucket.params.start) * bucket.storage.precision.param.bytes(),
            // Of a segment without a part here, both would lie outside.
            grad_offset: (segment.grad_start + at).saturating_sub(bucket.summed().start),
            state_offset: (segment.start + segment.state_at(at)).saturating_sub(bucket.shard.start),
            element: segment.element + at,
            count: count as u32,
            record: record(*index),
            first: (at == kept.start).into(),
            first_record: first_record(*index),
            run: run_of(segment.run_end(at, kept.end) - at, longest),
            reserved: [0; 3],
        };
        let mut at = kept.start;
        while at < kept.end {
            let count = (segment.run_end(at, kept.end) - at).min(INSTEP_TILE_ELEMENTS.into());
            tiles.push(tile(at, count));
            at += count;
        }
        if counts_absent && kept.is_empty() && segment.len > 0 {
            // Another rank has all of it. A tile without elements counts the update here too.
            tiles.push(InstepTile { grad_offset: 0, state_offset: 0, ..tile(kept.start, 0) });
        }
    }
    tiles
}

/// Returns how many full tiles follow one another, if so many elements of a segment are left.
fn run_of(elements: u64, longest: u32) -> u32 {
    (elements / u64::from(INSTEP_TILE_ELEMENTS)).clamp(1, longest.into()) as u32
}

#[cfg(test)]
mod tests {
    use super::run_of;
    use crate::abi::{INSTEP_LONGEST_RUN, INSTEP_TILE_ELEMENTS};

    #[test]
    fn a_run_has_full_tiles_alone_unless_its_one_tile_is_cut_off() {
        let tile = u64::from(INSTEP_TILE_ELEMENTS);
        for (elements, run) in
            [(1, 1), (tile - 1, 1), (tile, 1), (2 * tile - 1, 1), (2 * tile, 2), (3 * tile + 5, 3)]
        {
            assert_eq!(run_of(elements, INSTEP_LONGEST_RUN), run, "{elements} elements");
        }
        assert_eq!([1, INSTEP_LONGEST_RUN].map(|longest| run_of(1 << 50, longest)), [1, INSTEP_LONGEST_RUN]);
        assert!(u64::from(INSTEP_LONGEST_RUN) * tile <= 1 << 31);
    }
}
