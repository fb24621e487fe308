//! Reads the parameter groups of a configuration.
//!
//! The descriptor of the optimizer defines the keys of a group and their defaults. A key that the optimizer does not
//! have is refused, because an ignored option would give a wrong result.

use std::fmt;

use instep::optim::{Descriptor, Field, Optimizer, Value};
use serde::Deserializer;
use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Parameters that share hyperparameters.
#[derive(Debug)]
pub struct Group {
    /// The names of the group's parameters. There is at least one name, and each name is in only one group.
    pub params: Vec<String>,
    /// The optimizer of these parameters. All groups have the same kind of optimizer.
    pub optimizer: Box<dyn Optimizer>,
    /// `Some(Some(norm))`: the group is clipped alone to this norm. `Some(None)`: the group is not clipped. `None`: the
    /// file's `clip` applies to the group.
    pub max_norm: Option<Option<f64>>,
}

const PARAMS: &str = "params";
const MAX_NORM: &str = "max_norm";

/// Returns the file's groups, without reading other keys of the file.
pub(super) fn read(text: &[u8], descriptor: &'static Descriptor) -> serde_json::Result<Vec<Group>> {
    serde_json::Deserializer::from_slice(text).deserialize_map(OfFile(descriptor))
}

struct OfFile(&'static Descriptor);

impl<'de> Visitor<'de> for OfFile {
    type Value = Vec<Group>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vec<Group>, A::Error> {
        let mut groups = Vec::new();
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "groups" => groups = map.next_value_seed(List(self.0))?,
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(groups)
    }
}

struct List(&'static Descriptor);

impl<'de> DeserializeSeed<'de> for List {
    type Value = Vec<Group>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<Group>, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for List {
    type Value = Vec<Group>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a sequence")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<Group>, A::Error> {
        let mut groups = Vec::new();
        while let Some(group) = list.next_element_seed(Keys(self.0))? {
            groups.push(group);
        }
        Ok(groups)
    }
}

struct Keys(&'static Descriptor);

impl<'de> DeserializeSeed<'de> for Keys {
    type Value = Group;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Group, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Keys {
    type Value = Group;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Group, A::Error> {
        let mut params: Option<Vec<String>> = None;
        let mut optimizer = self.0.build();
        let mut max_norm: Option<Option<f64>> = None;
        let mut given: Vec<&str> = Vec::new();
        while let Some(key) = map.next_key::<String>()? {
            if key == PARAMS {
                if params.replace(map.next_value()?).is_some() {
                    return Err(Error::duplicate_field(PARAMS));
                }
                continue;
            }
            if key == MAX_NORM {
                if max_norm.replace(map.next_value()?).is_some() {
                    return Err(Error::duplicate_field(MAX_NORM));
                }
                continue;
            }
            let Some(field) = self.0.field(&key) else { return Err(unknown(&key, self.0)) };
            if given.contains(&field.name) {
                return Err(Error::duplicate_field(field.name));
            }
            given.push(field.name);
            let value = value(field, &mut map)?;
            optimizer.set(field.name, value).map_err(Error::custom)?;
        }
        Ok(Group { params: params.unwrap_or_default(), optimizer, max_norm })
    }
}

fn unknown<E: Error>(key: &str, descriptor: &Descriptor) -> E {
    let keys: Vec<&str> =
        [PARAMS, MAX_NORM].into_iter().chain(descriptor.fields.iter().map(|field| field.name)).collect();
    E::custom(format_args!("unknown field `{key}`, expected one of `{}`", keys.join("`, `")))
}

fn value<'de, A: MapAccess<'de>>(field: &Field, map: &mut A) -> Result<Value, A::Error> {
    match field.default {
        Value::Number(_) => map.next_value().map(Value::Number),
        Value::Flag(_) => map.next_value().map(Value::Flag),
        // If the numbers were read as a tuple, the message about a third number would not name the field.
        Value::Pair(_) => match map.next_value::<Vec<f64>>()?[..] {
            [first, second] => Ok(Value::Pair((first, second))),
            ref numbers => {
                let (name, count) = (field.name, numbers.len());
                Err(Error::custom(format_args!("{name} are two numbers, not {count}")))
            }
        },
    }
}
