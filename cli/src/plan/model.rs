//! The description of a model: its parameters, in order of registration, and how they are stepped.
//!
//! Layers that repeat are written once. Every unknown key is refused, because an ignored option would give a wrong
//! plan.

use instep::optim::{ALL, Optimizer};
use instep::{Layout, Precision};
use serde::Deserialize;

use crate::Failure;
use crate::replay::Dtypes;

/// The largest number of parameters in a plan. Every repetition of a parameter counts.
const MOST_PARAMS: usize = 1 << 20;

/// A valid description.
pub(super) struct Model {
    pub(super) layout: Layout,
    /// For each parameter, the number of its repetition, counted from 1 over all entries; 0 if the parameter is not
    /// repeated.
    pub(super) repetitions: Vec<usize>,
    pub(super) optimizer: Box<dyn Optimizer>,
    pub(super) precision: Precision,
    /// The optimizer's name.
    pub(super) name: &'static str,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Spelled {
    params: Vec<Entry>,
    #[serde(default = "adamw")]
    optimizer: String,
    #[serde(default)]
    dtypes: Dtypes,
}

/// A parameter, or a list of parameters that is repeated. One struct is used for both cases, because the error about an
/// unknown key then contains the key.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: Option<String>,
    shape: Option<Vec<usize>>,
    repeat: Option<usize>,
    params: Option<Vec<Param>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Param {
    name: String,
    shape: Vec<usize>,
}

/// Parameters that are repeated. `{}` in a name is replaced by the number of the repetition within the entry, counted
/// from 0. Names of parameters that are not repeated are unchanged.
struct Repeated {
    repeat: Option<usize>,
    params: Vec<Param>,
}

impl Entry {
    /// Checks an entry, which is at index `place` of the list.
    fn check(self, place: usize) -> Result<Repeated, Failure> {
        let Entry { name, shape, repeat, params } = self;
        let thing = match &name {
            Some(name) => format!("entry {place} of params, {name:?}"),
            None => format!("entry {place} of params"),
        };
        let missing = |wrong| {
            Err(Failure::config(&thing, wrong, "give a parameter name and shape, or repeat and params"))
        };
        match (name, shape, repeat, params) {
            (Some(name), Some(shape), None, None) => {
                Ok(Repeated { repeat: None, params: vec![Param { name, shape }] })
            }
            (None, None, Some(repeat), Some(params)) => Ok(Repeated { repeat: Some(repeat), params }),
            (Some(_), None, None, None) => missing("has no shape"),
            (None, Some(_), None, None) => missing("has no name"),
            (None, None, Some(_), None) => missing("repeats no params"),
            (None, None, None, Some(_)) => missing("has params without repeat"),
            (None, None, None, None) => missing("is empty"),
            _ => missing("is a parameter and a repetition at once"),
        }
    }
}

fn adamw() -> String {
    "adamw".into()
}

impl Model {
    /// Reads and checks a description.
    ///
    /// # Errors
    /// Returns `Config` with a text that names what is wrong.
    pub(super) fn parse(text: &[u8]) -> Result<Model, Failure> {
        let spelled: Spelled = serde_json::from_slice(text).map_err(|error| Failure::json(&error))?;
        let Some(descriptor) = ALL.iter().find(|descriptor| descriptor.key() == spelled.optimizer) else {
            let names: Vec<String> = ALL.iter().map(|descriptor| descriptor.key()).collect();
            let remedy = format_args!("use one of {}", names.join(", "));
            return Err(Failure::config(
                format_args!("optimizer = {:?}", spelled.optimizer),
                "unknown",
                remedy,
            ));
        };
        let entries = spelled.params.into_iter().enumerate().map(|(place, entry)| entry.check(place));
        let entries = entries.collect::<Result<Vec<Repeated>, Failure>>()?;
        let counts = entries.iter().map(|entry| entry.repeat.unwrap_or(1).saturating_mul(entry.params.len()));
        let count = counts.fold(0, usize::saturating_add);
        if count == 0 {
            return Err(Failure::config("params", "empty", "describe a parameter"));
        }
        if count > MOST_PARAMS {
            let remedy = format_args!("describe at most {MOST_PARAMS}");
            return Err(Failure::config("params", format_args!("{count} parameters"), remedy));
        }
        let mut builder = Layout::builder();
        let (mut repetitions, mut count) = (Vec::new(), 0);
        for Repeated { repeat, params } in &entries {
            for time in 0..repeat.unwrap_or(1) {
                count += usize::from(repeat.is_some());
                repetitions.extend(params.iter().map(|_| if repeat.is_some() { count } else { 0 }));
                for Param { name, shape } in params {
                    let numbered = repeat.map(|_| name.replace("{}", &time.to_string()));
                    builder = add(builder, numbered.as_ref().unwrap_or(name), shape)?;
                }
            }
        }
        Ok(Model {
            layout: builder.build()?,
            repetitions,
            optimizer: descriptor.build(),
            precision: spelled.dtypes.precision()?,
            name: descriptor.name,
        })
    }

    /// Returns the lengths of all parameters.
    pub(super) fn lengths(&self) -> impl Iterator<Item = u64> + '_ {
        self.layout.ids().filter_map(|id| self.layout.parameter(id).ok()).map(|parameter| parameter.len)
    }
}

fn add(
    builder: instep::LayoutBuilder,
    name: &str,
    shape: &[usize],
) -> Result<instep::LayoutBuilder, Failure> {
    let elements = shape.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
    let Some(elements) = elements else {
        let thing = format_args!("shape of {name:?}");
        return Err(Failure::config(thing, "has more elements than can be addressed", "use a smaller one"));
    };
    Ok(builder.param(name, elements).shape(shape.iter().copied()))
}
