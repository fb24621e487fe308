//! The description of a model: its parameters, in order of registration, and how they are stepped.
//!
//! Layers that repeat are written once. Every unknown key is refused: an ignored option is a wrong plan.

use instep::optim::{ALL, Optimizer};
use instep::{Layout, Precision};
use serde::Deserialize;

use crate::Failure;
use crate::replay::Dtypes;

/// The most parameters that are planned, after repetition.
const MOST_PARAMS: usize = 1 << 20;

/// A description that is spelled correctly.
pub(super) struct Model {
    pub(super) layout: Layout,
    pub(super) optimizer: Box<dyn Optimizer>,
    pub(super) precision: Precision,
    /// What the optimizer is called.
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

#[derive(Deserialize)]
#[serde(untagged)]
enum Entry {
    Param(Param),
    Repeated(Repeated),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Param {
    name: String,
    shape: Vec<usize>,
}

/// Entries that come several times, `{}` in their names being the number of the time.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Repeated {
    repeat: usize,
    params: Vec<Param>,
}

fn adamw() -> String {
    "adamw".into()
}

impl Model {
    /// Reads and checks a description.
    ///
    /// # Errors
    /// `Config`, naming what is wrong.
    pub(super) fn parse(text: &[u8]) -> Result<Model, Failure> {
        let spelled: Spelled =
            serde_json::from_slice(text).map_err(|error| Failure::Config(error.to_string()))?;
        let Some(descriptor) = ALL.iter().find(|descriptor| descriptor.key() == spelled.optimizer) else {
            let names: Vec<String> = ALL.iter().map(|descriptor| descriptor.key()).collect();
            let remedy = format_args!("use one of {}", names.join(", "));
            return Err(Failure::config(
                format_args!("optimizer = {:?}", spelled.optimizer),
                "unknown",
                remedy,
            ));
        };
        let params = spelled.params.iter().map(|entry| match entry {
            Entry::Param(_) => 1,
            Entry::Repeated(Repeated { repeat, params }) => repeat.saturating_mul(params.len()),
        });
        let count = params.fold(0, usize::saturating_add);
        if count > MOST_PARAMS {
            let remedy = format_args!("describe at most {MOST_PARAMS}");
            return Err(Failure::config("params", format_args!("{count} parameters"), remedy));
        }
        let mut builder = Layout::builder();
        for entry in &spelled.params {
            match entry {
                Entry::Param(Param { name, shape }) => builder = add(builder, name, shape)?,
                Entry::Repeated(Repeated { repeat, params }) => {
                    for time in 0..*repeat {
                        for Param { name, shape } in params {
                            builder = add(builder, &name.replace("{}", &time.to_string()), shape)?;
                        }
                    }
                }
            }
        }
        Ok(Model {
            layout: builder.build()?,
            optimizer: descriptor.build(),
            precision: spelled.dtypes.precision()?,
            name: descriptor.name,
        })
    }

    /// The lengths of all parameters.
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
