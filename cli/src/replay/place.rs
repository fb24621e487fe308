//! Which place the name of a tensor stands for, in an input and in an output.
//!
//! Must give one place at most to every name, and two names never the same one.

use instep::Master;

use super::Config;

/// A tensor beside a parameter's value, if the configuration asks for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Companion {
    /// What stands behind it, in f32.
    Master,
    /// The parameter in another type.
    Copy,
    /// Its moving average.
    Ema,
}

impl Companion {
    const ALL: [Companion; 3] = [Companion::Master, Companion::Copy, Companion::Ema];

    /// In front of the parameter's name.
    pub fn prefix(self) -> &'static str {
        match self {
            Companion::Master => "master",
            Companion::Copy => "copy",
            Companion::Ema => "ema",
        }
    }

    /// Those that there are with this configuration.
    pub fn kept(config: &Config) -> impl Iterator<Item = Companion> {
        let is_kept = |companion: &Companion| match companion {
            Companion::Master => config.precision.master != Master::None,
            Companion::Copy => config.copy.is_some(),
            Companion::Ema => config.ema.is_some(),
        };
        Companion::ALL.into_iter().filter(is_kept)
    }
}

/// Which place a tensor's name stands for.
pub(super) enum Place<'a> {
    Value(&'a str),
    Companion(Companion, &'a str),
    Gradient(u64, &'a str),
    State(&'a str, &'a str),
}

impl<'a> Place<'a> {
    /// Names may contain dots; pass numbers and states never do.
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

/// A number in the one spelling that it has, so that two names are never the same pass.
pub(super) fn whole_number(text: &str) -> Option<u64> {
    let number: u64 = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}
