//! Describes an optimizer as data: its hyperparameters with defaults and ranges, its states, and its source.
//!
//! Validation, the registry, `instep replay`, the benches and the documentation read these descriptors, so each fact
//! about an optimizer is written once. The macro `optimizer!` (`declare.rs`) creates the descriptors. This module never
//! computes an update.

use std::any::TypeId;
use std::fmt;

use super::Optimizer;
use crate::error::{Error, Result};

/// The value of a hyperparameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// One number.
    Number(f64),
    /// Two numbers, such as `betas`.
    Pair((f64, f64)),
    /// A switch.
    Flag(bool),
}

impl From<f64> for Value {
    fn from(number: f64) -> Value {
        Value::Number(number)
    }
}

impl From<(f64, f64)> for Value {
    fn from(pair: (f64, f64)) -> Value {
        Value::Pair(pair)
    }
}

impl From<bool> for Value {
    fn from(flag: bool) -> Value {
        Value::Flag(flag)
    }
}

impl Value {
    /// Returns the value's numbers: one, or two for a pair. A flag is returned as 0 or 1.
    ///
    /// This function allocates nothing, because it runs in every pass that has a new learning rate.
    pub fn numbers(self) -> impl Iterator<Item = f64> {
        let (numbers, count) = match self {
            Value::Number(number) => ([number, 0.0], 1),
            Value::Pair((first, second)) => ([first, second], 2),
            Value::Flag(flag) => ([f64::from(u8::from(flag)), 0.0], 1),
        };
        numbers.into_iter().take(count)
    }

    /// Returns whether this value is zero or false. Such a value switches off the options that depend on it.
    pub(super) fn is_off(self) -> bool {
        self.numbers().all(|number| number == 0.0)
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Number(number) => write!(f, "{}", short(*number)),
            Value::Pair((first, second)) => write!(f, "[{}, {}]", short(*first), short(*second)),
            Value::Flag(flag) => write!(f, "{flag}"),
        }
    }
}

/// Formats a number as people write it: with an exponent if it is small or large.
pub(crate) fn short(number: f64) -> String {
    let is_plain = number == 0.0 || !number.is_finite() || (1e-3..1e9).contains(&number.abs());
    if is_plain { format!("{number}") } else { format!("{number:e}") }
}

/// The numbers that one part of a hyperparameter accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Range {
    /// The value is at least 0 and finite as f32. A value above 0 must not round to 0 as f32.
    NonNegative,
    /// The value is at least 0 and finite. The value is used only in f64.
    NonNegativeF64,
    /// The value is finite as f32.
    Finite,
    /// The value is at least 0 and below 1.
    BelowOne,
    /// The value is at least 0 and at most 1.
    UpToOne,
    /// The value is above 0 and below 1, and does not round to 0 as f32.
    InsideOne,
    /// The value is above 1, and finite as f32.
    AboveOne,
    /// The value is true or false.
    Flag,
}

impl Range {
    /// Checks one number. An error refers to the number by `label`.
    pub(super) fn check(self, label: &'static str, value: f64) -> Result<()> {
        let rounded = value as f32;
        let is_inside = match self {
            Range::NonNegative => value >= 0.0 && rounded.is_finite(),
            Range::NonNegativeF64 => value >= 0.0 && value.is_finite(),
            Range::Finite => rounded.is_finite(),
            Range::BelowOne => (0.0..1.0).contains(&value),
            Range::UpToOne | Range::Flag => (0.0..=1.0).contains(&value),
            Range::InsideOne => value > 0.0 && value < 1.0,
            Range::AboveOne => value > 1.0 && rounded.is_finite(),
        };
        if !is_inside {
            return Err(Error::range(label, short(value), self.words()));
        }
        let is_of_f32 = matches!(self, Range::NonNegative | Range::InsideOne);
        if is_of_f32 && value > 0.0 && rounded == 0.0 {
            return Err(Error::config(label, short(value), "vanishes as f32", "use 0 if that is meant"));
        }
        Ok(())
    }

    /// Returns a description of the valid numbers, for the advice in an error.
    fn words(self) -> &'static str {
        match self {
            Range::NonNegative => "a number of at least 0 that f32 can hold",
            Range::NonNegativeF64 => "a finite number of at least 0",
            Range::Finite => "a number that f32 can hold",
            Range::BelowOne => "a number of at least 0 and below 1",
            Range::UpToOne => "a number from 0 to 1",
            Range::InsideOne => "a number above 0 and below 1",
            Range::AboveOne => "a number above 1 that f32 can hold",
            Range::Flag => "0 or 1, since it is a flag",
        }
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Range::NonNegative | Range::NonNegativeF64 => ">= 0",
            Range::Finite => "finite",
            Range::BelowOne => "[0, 1)",
            Range::UpToOne => "[0, 1]",
            Range::InsideOne => "(0, 1)",
            Range::AboveOne => "> 1",
            Range::Flag => "true, false",
        })
    }
}

/// One number of a hyperparameter. A pair has two parts.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Keyword of this part in a [`Registry`](crate::overlap::Registry), such as `beta1`.
    pub keyword: &'static str,
    /// Name of this part in an error, such as `betas.0`.
    pub label: &'static str,
    /// The numbers that this part accepts.
    pub range: Range,
}

/// One hyperparameter.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Its name, as in `torch.optim`.
    pub name: &'static str,
    /// Its default.
    pub default: Value,
    /// Its numbers.
    pub parts: &'static [Part],
    /// Meaning of the option.
    pub doc: &'static str,
}

impl Field {
    /// Makes a value of this field's kind from one number per part.
    ///
    /// # Errors
    /// `Config` if the count of numbers is wrong, or if a flag is not 0 or 1.
    pub fn value(&self, numbers: &[f64]) -> Result<Value> {
        match (self.default, numbers) {
            (Value::Number(_), [number]) => Ok(Value::Number(*number)),
            (Value::Pair(_), [first, second]) => Ok(Value::Pair((*first, *second))),
            (Value::Flag(_), [flag]) if *flag == 0.0 || *flag == 1.0 => Ok(Value::Flag(*flag == 1.0)),
            (Value::Flag(_), [flag]) => Err(Error::range(self.name, flag, Range::Flag.words())),
            (_, numbers) => {
                let expected = format_args!("{} values", self.parts.len());
                Err(Error::range(self.name, format_args!("{} values", numbers.len()), expected))
            }
        }
    }
}

/// The states that an optimizer has if certain hyperparameters are on. A hyperparameter is on unless it is 0 or false.
#[derive(Clone, Copy, Debug)]
pub struct States {
    /// The names of the states, in the kernel's order. A state has one value per element.
    pub names: &'static [&'static str],
    /// The hyperparameters that must all be on for these states.
    pub on: &'static [&'static str],
}

/// One optimizer of this crate.
#[derive(Clone, Copy, Debug)]
pub struct Descriptor {
    /// The optimizer's name, as in `torch.optim` or in the optimizer's paper.
    pub name: &'static str,
    /// The optimizer's hyperparameters, starting with the learning rate.
    pub fields: &'static [Field],
    /// The optimizer's states for different values of its hyperparameters. If several entries apply, the last entry is
    /// used.
    pub states: &'static [States],
    /// Publication of the algorithm.
    pub source: &'static str,
    /// Number of the optimizer's kernel. Adam and AdamW share one kernel.
    pub kernel: u32,
    /// Whether the update is scaled by norms of the full parameter. Such a step takes two launches.
    pub is_scaled: bool,
    /// Name of a number that the optimizer stores for each parameter, in addition to the step count. Each update
    /// changes this number.
    pub carried: Option<&'static str>,
    /// The reason why the optimizer refuses 8-bit states, or `None` if it supports them. 8-bit codes share one exponent
    /// per block, and some optimizers need an exponent for each value.
    pub needs_floats: Option<&'static str>,
    /// The name of a hyperparameter that requires f32 states while it is on, and the reason for this requirement.
    pub needs_f32_states: Option<(&'static str, &'static str)>,
    pub(crate) make: fn() -> Box<dyn Optimizer>,
    pub(crate) type_of: fn() -> (TypeId, &'static str),
}

impl Descriptor {
    /// Builds the optimizer with its defaults.
    pub fn build(&self) -> Box<dyn Optimizer> {
        (self.make)()
    }

    /// Returns the optimizer's name in lower case, for configurations and command lines.
    pub fn key(&self) -> String {
        self.name.to_lowercase()
    }

    /// Returns the hyperparameter called `name`.
    pub fn field(&self, name: &str) -> Option<&'static Field> {
        self.fields.iter().find(|field| field.name == name)
    }

    /// Returns the names of the optimizer's states for the hyperparameter values that `get` returns.
    pub(super) fn kept(&self, get: impl Fn(&str) -> Option<Value>) -> &'static [&'static str] {
        let is_on = |name: &&str| get(name).is_some_and(|value| !value.is_off());
        let applies = |states: &&States| states.on.iter().all(is_on);
        self.states.iter().rev().find(applies).map_or(&[], |states| states.names)
    }

    /// Returns an error for the first value that is outside its range.
    pub(super) fn check(&self, get: impl Fn(&str) -> Option<Value>) -> Result<()> {
        for field in self.fields {
            let numbers = get(field.name).into_iter().flat_map(Value::numbers);
            field.parts.iter().zip(numbers).try_for_each(|(part, x)| part.range.check(part.label, x))?;
        }
        Ok(())
    }
}
