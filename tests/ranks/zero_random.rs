//! Random trainings on ranks that step shards, or step in the host's memory, against one plain rank that gets their
//! sums.
//!
//! `PROPTEST_CASES` raises the number of cases.

use std::num::NonZeroU32;

use instep::{SegmentAction, Strategy, in_process};
use proptest::prelude::any;

use crate::ranks::zero::WAYS;
use crate::schedule::property::{abandon_early, for_all};
use crate::support::arbitrary::{Setup, setup, training};
use crate::support::training::Feed;

#[test]
fn shards_in_any_setup_give_the_bits_of_one_plain_rank_that_is_fed_their_sums() {
    for_all(160, (training(), setup(), 0..WAYS.len(), any::<u32>()), |drawn| {
        let (mut training, mut setup, way, size) = drawn;
        abandon_early(&mut training);
        // Averaged gradients are refused with shards, and with offload.
        for (_, _, action) in &mut training.params {
            if *action == SegmentAction::Average {
                *action = SegmentAction::Step;
            }
        }
        (setup.strategy, setup.offloads) = WAYS[way];
        if setup.strategy == Strategy::Fsdp {
            training.data = None;
        }
        // Of every third training all ranks share tensors out among them, of the others groups of ranks.
        let divisors: Vec<u32> =
            (1..=training.world_size).filter(|k| training.world_size.is_multiple_of(*k)).collect();
        let drawn = divisors[size as usize / 3 % divisors.len()];
        setup.shard_size =
            NonZeroU32::new(drawn).filter(|_| size % 3 != 0 && setup.strategy != Strategy::Replicated);
        training.summed_by = setup.shard_size.map_or(training.world_size, NonZeroU32::get) as usize;
        let ranks = in_process(training.world_size, |comm| {
            let rank = comm.rank() as usize;
            training.run(&setup, comm, Feed::Rank(rank), None)
        });
        let ranks = ranks.unwrap();
        let plain = training.run_alone(&Setup::plain(), Some(&ranks[0].kept)).unwrap();
        for (rank, trained) in ranks.iter().enumerate() {
            trained.assert_same(&plain, &format!("rank {rank}, {setup:?}"));
        }
    });
}
