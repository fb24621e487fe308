//! Checks that a short training reaches nearly the same accuracy in every precision as in f32.
//!
//! The check uses two ranks and one epoch, because tests run in a debug build. CI runs full trainings. The check
//! compares accuracy on held-out images and not the loss, because accuracy is the network's purpose.

use std::error::Error;

use clap::{Parser, ValueEnum};
use instep::in_process;

use crate::data::Samples;
use crate::report::Progress;
use crate::train::train_rank;
use crate::{Flags, PrecisionName};

/// The allowed difference in accuracy, as a share of the 360 held-out images. Rounding alone has changed the accuracy
/// by 0.6 %; a wrong step would change it far more.
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
        let trained =
            in_process(flags.ranks, |comm| train_rank(&flags, mode, &training, &held_out, &progress, comm))?;
        let accuracy = trained[0].accuracy;
        let expected = *in_f32.get_or_insert(accuracy);
        assert!((accuracy - expected).abs() <= LEEWAY, "{precision:?}: {accuracy}, the first {expected}");
        assert!(accuracy > 0.8 && trained.iter().all(|rank| rank.hazards.is_empty()));
    }
    Ok(())
}
