//! `instep replay` and `instep diff`, with pairs of configuration and input.
//!
//! The `safetensors` crate decides which tensor files are valid. The functions of the commands themselves are called.

use std::io::Cursor;

use ::safetensors::SafeTensors;
use instep::checkpoint::safetensors;
use instep_cli::diff::{self, Tolerance};
use instep_cli::replay::{Options, Order, replay};
use rand::rngs::SmallRng;

use crate::seeds::{self, Pair};
use crate::{Subject, mutate};

pub(crate) struct Replay;

impl Subject for Replay {
    fn seeds(&mut self) -> Vec<Pair> {
        seeds::pairs()
    }

    fn break_it(&self, pair: &mut Pair, others: &[Pair], random: &mut SmallRng) {
        mutate::mutate(pair, others, random);
    }

    /// Runs both commands on the pair, and returns whether the replay was accepted.
    fn attempt(&mut self, pair: &Pair, number: u64) -> Result<bool, String> {
        let mut out = Vec::new();
        let replayed = replay(&pair.config, Cursor::new(&pair.input), &options(number), &mut out).is_ok();
        if !replayed && !out.is_empty() {
            return Err("something was written, and then it was refused".into());
        }
        if replayed && let Err(error) = SafeTensors::deserialize(&out) {
            return Err(format!("the output is broken: {error}"));
        }
        // Its own header parser must never be more lenient than the format's.
        if let Ok(opened) = safetensors::open(Cursor::new(&pair.input)) {
            if let Err(error) = SafeTensors::deserialize(&pair.input) {
                return Err(format!("the crate refuses what was accepted: {error}"));
            }
            let exact = Tolerance::default();
            let itself =
                safetensors::open(Cursor::new(&pair.input)).map(|again| diff::compare(opened, again, &exact));
            if !itself.is_ok_and(|report| report.is_ok_and(|report| report.equal)) {
                return Err("a file differs from itself".into());
            }
        }
        Ok(replayed)
    }
}

/// Returns a mode and a bucket cap, in turn.
pub(crate) fn options(number: u64) -> Options {
    let mode = [Order::Sequential, Order::Eager, Order::Normed][number as usize % 3];
    let bucket_cap_bytes = [None, Some(1)][number as usize / 3 % 2];
    Options { mode, bucket_cap_bytes, threads: Some(1), isa: None }
}
