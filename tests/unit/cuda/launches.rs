//! Tests of the shares of tiles that a launch's blocks take.
//!
//! All tiles have a block, and no block has more than its share.

use super::{LARGE_TILE_BYTES, LEAST_TURNS, SHARE_BYTES, even_shares, share, short_shares};

#[test]
fn short_shares_move_no_more_than_they_should_and_give_each_resident_block_its_turns() {
    let tile_bytes = SHARE_BYTES / 8;
    assert!(tile_bytes < LARGE_TILE_BYTES, "a large tile is a share of its own");
    for resident in [1, 7, 528] {
        for tiles in 0..9000u64 {
            let blocks = short_shares(tiles, resident, tiles * tile_bytes);
            let taken = share(tiles, blocks);
            let fits = taken <= 8 && u64::from(blocks) * taken >= tiles;
            assert!(
                fits && u64::from(blocks) >= tiles.min(LEAST_TURNS * u64::from(resident)),
                "{tiles} tiles, {resident} resident"
            );
        }
    }
}

#[test]
fn a_large_tile_is_a_share_of_its_own() {
    for tiles in [1, 528, 3200, 1 << 17] {
        assert_eq!(u64::from(short_shares(tiles, 528, tiles * LARGE_TILE_BYTES)), tiles);
        assert!(tiles < 3200 || u64::from(short_shares(tiles, 528, tiles * LARGE_TILE_BYTES - 1)) < tiles);
    }
}

#[test]
fn a_cut_tile_leaves_the_shares_of_full_ones() {
    let full = 20 * 2048;
    assert_eq!(short_shares(3200, 528, 3199 * full + 20), 3200);
}

#[test]
fn blocks_share_the_tiles_in_shares_of_the_least_size() {
    for most in [1, 2, 7, 8, 528] {
        for tiles in 0..3300 {
            let blocks = even_shares(tiles, most);
            let (case, own) = (format!("{tiles} tiles, at most {most}: {blocks}"), u64::from(blocks));
            assert!(blocks <= most && own <= tiles, "{case}");
            assert_eq!(tiles.div_ceil(own.max(1)), tiles.div_ceil(most.into()), "{case}");
        }
    }
}
