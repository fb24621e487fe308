//! A test of the runs of tiles in a step's launch.
//!
//! A run has full tiles only, unless it has one tile.

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
