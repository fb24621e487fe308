//! Ranks that are processes over MPI (feature `mpi`): `mpirun -n 4 digits --mpi`.
//!
//! Each process trains one rank in the chosen mode. Rank 0 then trains the same number of ranks in its own process, in
//! another mode, and compares every bit of every rank.

use std::error::Error;

use instep::Mpi;
use mpi::Threading;
use mpi::traits::{Communicator, Root};

use crate::data::Samples;
use crate::report::{self, Progress};
use crate::train::{Trained, train_rank};
use crate::{Flags, StrategyName, choose_counterpart, refuse, train_in_process};

/// Trains in all processes. Returns true if rank 0 finds the same bits as in a training in one process.
pub(crate) fn run(mut flags: Flags, training: &Samples, held_out: &Samples) -> Result<bool, Box<dyn Error>> {
    let initialized = mpi::initialize_with_threading(Threading::Serialized);
    let (universe, _) = initialized.ok_or("MPI is initialized already")?;
    let world = universe.world();
    flags.ranks = world.size() as u32;
    refuse(&flags)?;
    let flags = &flags;
    let mode = flags.mode.into();
    let trained =
        train_rank(flags, mode, training, held_out, &Progress::new(flags, mode), Mpi::new(&world)?)?;
    let own = flatten(&trained);
    let root = world.process_at_rank(0);
    if world.rank() > 0 {
        root.gather_into(&own);
        return Ok(true);
    }
    let mut all = vec![0u32; own.len() * flags.ranks as usize];
    root.gather_into_root(&own, &mut all);
    let whole = Flags { strategy: StrategyName::Ddp, offload: false, ..flags.clone() };
    let reference = train_in_process(&whole, choose_counterpart(mode, flags.max_norm), training, held_out)?;
    let differs = all.chunks(own.len()).zip(&reference).position(|(ours, theirs)| ours != flatten(theirs));
    let verdict = differs.map_or("bit-identical".to_owned(), |rank| format!("DIFFERENT, rank {rank}"));
    println!("{} processes and one: {verdict}", flags.ranks);
    Ok(report::judge_accuracy(&[trained], flags.min_accuracy) && differs.is_none())
}

/// Returns the bits of all parameters and states, and the step counts.
fn flatten(trained: &Trained) -> Vec<u32> {
    let parameters = trained.parameters.iter();
    parameters
        .flat_map(|parameter| {
            let values = parameter.tensors.iter().flat_map(|(_, values)| values.iter().map(|x| x.to_bits()));
            [parameter.steps as u32].into_iter().chain(values)
        })
        .collect()
}
