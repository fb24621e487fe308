//! Names of tensors in inputs and outputs, and their meanings.
//!
//! A name has at most one meaning, and two names never have the same meaning.

use instep::Master;

use super::Config;

/// A tensor that a parameter has in addition to its value, if the configuration requests this tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Companion {
    /// Its master weight, in f32.
    Master,
    /// The parameter in another type.
    Copy,
    /// Its moving average.
    Ema,
}

impl Companion {
    const ALL: [Companion; 3] = [Companion::Master, Companion::Copy, Companion::Ema];

    /// Returns the part of the tensor's name before the name of the parameter.
    pub fn prefix(self) -> &'static str {
        match self {
            Companion::Master => "master",
            Companion::Copy => "copy",
            Companion::Ema => "ema",
        }
    }

    /// Returns the configuration's key that requests this tensor.
    pub(super) fn option(self) -> &'static str {
        match self {
            Companion::Master => "dtypes.master",
            Companion::Copy => "copy",
            Companion::Ema => "ema",
        }
    }

    /// Returns the additional tensors (master, average, copy) that this configuration needs.
    pub fn kept(config: &Config) -> impl Iterator<Item = Companion> {
        let is_kept = |companion: &Companion| match companion {
            Companion::Master => config.precision.master != Master::None,
            Companion::Copy => config.copy.is_some(),
            Companion::Ema => config.ema.is_some(),
        };
        Companion::ALL.into_iter().filter(is_kept)
    }
}

/// The meaning of a tensor's name.
pub(super) enum Place<'a> {
    Value(&'a str),
    Companion(Companion, &'a str),
    Gradient(u64, &'a str),
    State(&'a str, &'a str),
}

impl<'a> Place<'a> {
    /// Returns the meaning of a name. Names of parameters may contain dots. Numbers of passes and names of states
    /// contain no dots.
    pub(super) fn of(key: &'a str) -> Option<Place<'a>> {
        let (kind, rest) = key.split_once('.')?;
        match kind {
            "param" => Some(Place::Value(rest)),
            "grad" => {
                let (pass, name) = rest.split_once('.')?;
                Some(Place::Gradient(whole_number(pass)?, name))
            }
            "state" => {
                let (name, state) = rest.rsplit_once('.')?;
                Some(Place::State(name, state))
            }
            _ => {
                let companion = Companion::ALL.into_iter().find(|companion| companion.prefix() == kind)?;
                Some(Place::Companion(companion, rest))
            }
        }
    }
}

/// Parses a number without sign and leading zeros, so that two names never mean the same pass.
pub(super) fn whole_number(text: &str) -> Option<u64> {
    let number: u64 = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}
