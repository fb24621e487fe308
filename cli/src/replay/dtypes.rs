//! What a configuration calls element types, and the check that nothing is rounded that a file says exactly.
//!
//! The words are checked here, their combinations by the library. Must refuse an unknown word by its key and with the
//! list of those that there are.

use instep::{DType, Master, Moments, Precision, Rounding};
use serde::Deserialize;

use crate::Failure;

/// What the library calls a word.
type Words<T> = [(&'static str, T)];

/// Of parameters, gradients and copies.
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

/// The object `dtypes`, as it is spelled.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Dtypes {
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
    /// What they mean together.
    ///
    /// # Errors
    /// `Config`, naming the key.
    pub(super) fn precision(&self) -> Result<Precision, Failure> {
        let rounding = match (look_up("dtypes.rounding", &self.rounding, ROUNDINGS)?, self.seed) {
            (true, seed) => Rounding::Stochastic { seed: seed.unwrap_or(0) },
            (false, None) => Rounding::Nearest,
            (false, Some(seed)) => {
                let why = "only stochastic rounding draws numbers";
                return Err(Failure::Config(format!("dtypes.seed = {seed}: {why}")));
            }
        };
        let precision = Precision {
            param: look_up("dtypes.param", &self.param, FLOATS)?,
            grad: look_up("dtypes.grad", &self.grad, FLOATS)?,
            master: look_up("dtypes.master", &self.master, MASTERS)?,
            moments: look_up("dtypes.moments", &self.moments, MOMENTS)?,
            rounding,
        };
        precision.validate().map_err(|error| Failure::Config(format!("dtypes.{error}")))?;
        Ok(precision)
    }
}

/// What a word under this key stands for.
///
/// # Errors
/// `Config` with the words that there are.
pub(super) fn look_up<T: Copy>(key: &str, word: &str, words: &Words<T>) -> Result<T, Failure> {
    let found = words.iter().find(|(known, _)| *known == word);
    found.map(|(_, value)| *value).ok_or_else(|| {
        let known: Vec<&str> = words.iter().map(|(known, _)| *known).collect();
        Failure::Config(format!("{key} = {word:?} is none of {}", known.join(", ")))
    })
}

/// Holds what is stored to what was given; NaN is one value.
///
/// # Errors
/// `Tensors`, naming the first one that differs.
pub(super) fn refuse_rounded(
    key: &str,
    given: &[f32],
    stored: impl IntoIterator<Item = f32>,
) -> Result<(), Failure> {
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    let mut pairs = given.iter().zip(stored).enumerate();
    match pairs.find(|(_, (given, stored))| !same(**given, *stored)) {
        Some((index, (given, stored))) => {
            let why = format!("`{key}` holds {given:?} at {index}, which `dtypes` would round to {stored:?}");
            Err(Failure::Tensors(why))
        }
        None => Ok(()),
    }
}
