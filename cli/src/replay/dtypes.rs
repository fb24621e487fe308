//! Names of element types in a configuration, and the check that no value of a file is rounded.
//!
//! This file checks the words, and the library checks their combinations. The error about an unknown word names its key
//! and all known words.

use instep::checkpoint::safetensors::quoted;
use instep::{DType, Error, Master, Moments, Precision, Rounding};
use serde::Deserialize;

use crate::Failure;

/// Known words, with their values in the library.
type Words<T> = [(&'static str, T)];

/// Types of parameters, gradients and copies.
pub(super) const FLOATS: &Words<DType> = &[("f32", DType::F32), ("bf16", DType::BF16), ("f16", DType::F16)];

const MASTERS: &Words<Master> = &[
    ("none", Master::None),
    ("f32", Master::F32),
    ("remainder16", Master::Remainder16),
    ("remainder8", Master::Remainder8),
];

const MOMENTS: &Words<Moments> =
    &[("f32", Moments::F32), ("bf16", Moments::BF16), ("8bit", Moments::EightBit)];

const ROUNDINGS: &Words<bool> = &[("nearest", false), ("stochastic", true)];

/// The object `dtypes` of a configuration, with its words as text.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Dtypes {
    param: String,
    grad: String,
    master: String,
    moments: String,
    rounding: String,
    seed: Option<u64>,
}

impl Default for Dtypes {
    fn default() -> Self {
        let [f32, none, nearest] = ["f32", "none", "nearest"].map(String::from);
        Dtypes {
            param: f32.clone(),
            grad: f32.clone(),
            master: none,
            moments: f32,
            rounding: nearest,
            seed: None,
        }
    }
}

impl Dtypes {
    /// Returns the precision that the words describe.
    ///
    /// # Errors
    /// Returns `Config` with the name of the key.
    pub(crate) fn precision(&self) -> Result<Precision, Failure> {
        let rounding = match (look_up("dtypes.rounding", &self.rounding, ROUNDINGS)?, self.seed) {
            (true, seed) => Rounding::Stochastic { seed: seed.unwrap_or(0) },
            (false, None) => Rounding::Nearest,
            (false, Some(seed)) => {
                let (thing, wrong) =
                    (format_args!("dtypes.seed = {seed}"), "only stochastic rounding uses a seed");
                return Err(Failure::config(
                    thing,
                    wrong,
                    "set rounding to stochastic, or leave the seed out",
                ));
            }
        };
        let precision = Precision {
            param: look_up("dtypes.param", &self.param, FLOATS)?,
            grad: look_up("dtypes.grad", &self.grad, FLOATS)?,
            master: look_up("dtypes.master", &self.master, MASTERS)?,
            moments: look_up("dtypes.moments", &self.moments, MOMENTS)?,
            rounding,
        };
        precision.validate().map_err(refused)?;
        Ok(precision)
    }
}

/// Returns the library's value for `word`, which the configuration has under `key`.
///
/// # Errors
/// Returns `Config` with the list of known words.
pub(super) fn look_up<T: Copy>(key: &str, word: &str, words: &Words<T>) -> Result<T, Failure> {
    let found = words.iter().find(|(known, _)| *known == word);
    found.map(|(_, value)| *value).ok_or_else(|| {
        let known: Vec<&str> = words.iter().map(|(known, _)| *known).collect();
        let thing = format_args!("{key} = {word:?}");
        Failure::config(thing, "unknown", format_args!("use one of {}", known.join(", ")))
    })
}

/// Translates an error about a precision, so that it names keys and words of the configuration.
pub(crate) fn refused(error: Error) -> Failure {
    match error {
        Error::Config {
            field: field @ ("param" | "grad" | "master" | "moments" | "rounding"),
            value,
            wrong,
            remedy,
        } => Failure::config(format_args!("dtypes.{field} = {}", in_words(&value)), wrong, in_words(&remedy)),
        other => other.into(),
    }
}

/// Replaces Rust's names of types with the words of a configuration.
fn in_words(text: &str) -> String {
    let masters = MASTERS.iter().map(|(word, master)| ("Master", format!("{master:?}"), word));
    let moments = MOMENTS.iter().map(|(word, moments)| ("Moments", format!("{moments:?}"), word));
    let roundings = [("Rounding", "Nearest".to_owned(), &ROUNDINGS[0].0)];
    let mut text = text.to_owned();
    if text.starts_with("Stochastic") {
        return ROUNDINGS[1].0.to_owned();
    }
    // The longest names first, because one may begin with another.
    let mut names: Vec<(&str, String, &&str)> = masters.chain(moments).chain(roundings).collect();
    names.sort_by_key(|(_, name, _)| std::cmp::Reverse(name.len()));
    for (path, name, word) in names {
        if text == name {
            return (*word).to_owned();
        }
        text = text.replace(&format!("{path}::{name}"), word);
    }
    text
}

/// Compares stored values with given values, bit by bit. All NaNs count as equal.
///
/// # Errors
/// `Tensors` with the first difference.
pub(super) fn refuse_rounded(
    key: &str,
    given: &[f32],
    stored: impl IntoIterator<Item = f32>,
) -> Result<(), Failure> {
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    let mut pairs = given.iter().zip(stored).enumerate();
    match pairs.find(|(_, (given, stored))| !same(**given, *stored)) {
        Some((index, (given, stored))) => {
            let wrong = format_args!("holds {given:?} at {index}, which `dtypes` would round to {stored:?}");
            let remedy = "round it before, or choose a type that holds it";
            Err(Failure::tensors(quoted(key), wrong, remedy))
        }
        None => Ok(()),
    }
}
