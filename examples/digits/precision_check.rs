//! Does a short training come as far in every precision as it does in f32?
//!
//! On two ranks, one epoch, since this is a debug build; whole trainings are run by CI. Must compare what was held out,
//! not the loss: it is what the network is for.

use std::error::Error;

use clap::{Parser, ValueEnum};
use instep::in_process;

use crate::data::Samples;
use crate::report::Progress;
use crate::train::train_rank;
use crate::{Flags, PrecisionName};

/// Of 360 images; above what rounding alone has been seen to change (0.6 %), far below what a wrong step would.
const LEEWAY: f64 = 0.02;

#[test]
fn every_precision_learns_what_f32_learns() -> Result<(), Box<dyn Error>> {
    let (training, held_out) = Samples::load()?.split();
    let mut flags = Flags::parse_from(["digits", "--ranks", "2", "--epochs", "1"]);
    let progress = Progress::new(&flags, flags.mode.into());
    let mut in_f32 = None;
    for precision in PrecisionName::value_variants() {
        flags.precision = *precision;
        let mode = flags.mode.into();
        let trained = in_process(flags.ranks, |comm| match precision {
            PrecisionName::F32 => train_rank::<f32>(&flags, mode, &training, &held_out, &progress, comm),
            _ => train_rank::<half::bf16>(&flags, mode, &training, &held_out, &progress, comm),
        })?;
        let accuracy = trained[0].accuracy;
        let expected = *in_f32.get_or_insert(accuracy);
        assert!((accuracy - expected).abs() <= LEEWAY, "{precision:?}: {accuracy}, the first {expected}");
        assert!(accuracy > 0.8 && trained.iter().all(|rank| rank.hazards.is_empty()));
    }
    Ok(())
}
