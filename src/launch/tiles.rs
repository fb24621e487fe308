//! Cuts the segments of a bucket into tiles, the unit of work of a kernel launch.
//!
//! Depends on the plan alone. No tile leaves its segment, so padding belongs to none.

use crate::abi::{INSTEP_LONGEST_RUN, INSTEP_TILE_ELEMENTS, InstepTile};
use crate::layout::{Bucket, Plan};

/// Segments of a bucket, cut into tiles; `record` and `first_record` give the places of a segment's records. All offsets
/// are relative to the bucket. Padding belongs to none.
pub(super) fn tiles(
    plan: &Plan,
    bucket: &Bucket,
    segments: &[u32],
    [record, first_record]: [&dyn Fn(u32) -> u32; 2],
) -> Vec<InstepTile> {
    let mut tiles = Vec::new();
    for index in segments {
        let segment = &plan.segments()[*index as usize];
        let (grad, state) = (segment.grad_start - bucket.start, segment.start - bucket.params.start);
        assert!(grad + segment.len <= bucket.len, "a segment leaves its bucket");
        let mut done = 0;
        while done < segment.len {
            let count = (segment.len - done).min(INSTEP_TILE_ELEMENTS.into());
            tiles.push(InstepTile {
                param: (state + done) * plan.storage().precision.param.bytes(),
                grad_offset: grad + done,
                state_offset: state + done,
                element: segment.element + done,
                count: count as u32,
                record: record(*index),
                first: (done == 0).into(),
                first_record: first_record(*index),
                run: run_of(segment.len - done),
                reserved: [0; 3],
            });
            done += count;
        }
    }
    tiles
}

/// Returns how many full tiles follow one another, if so many elements of a segment are left.
fn run_of(elements: u64) -> u32 {
    (elements / u64::from(INSTEP_TILE_ELEMENTS)).clamp(1, INSTEP_LONGEST_RUN.into()) as u32
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
            assert_eq!(run_of(elements), run, "{elements} elements");
        }
        assert_eq!(run_of(1 << 50), INSTEP_LONGEST_RUN);
        assert!(u64::from(INSTEP_LONGEST_RUN) * tile <= 1 << 31);
    }
}
