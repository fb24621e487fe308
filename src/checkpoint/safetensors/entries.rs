//! Parses the JSON of a tensor file's header. The entries are validated later, but their size is limited while they are
//! parsed.
//!
//! For any content, the memory for a header is at most a small multiple of the header's length. To ensure this limit,
//! the parser limits the numbers of dimensions and of metadata entries, and shortens the names of unknown types.
//! serde's derives accept two forms that are errors here. A derived struct accepts an array of its fields instead of an
//! object, and a map accepts a key that occurs twice. With either form, a broken file could be read as a different
//! valid file. The types here therefore refuse both forms.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

use crate::checkpoint::safetensors::convert::{Dtype, Tensor};
use crate::text::{quoted, sentence};

/// The largest number of dimensions that numpy and PyTorch allow.
const MAX_DIMENSIONS: usize = 64;

/// All entries of a header: the metadata and the tensors.
pub(super) struct Entries {
    pub(super) metadata: Option<Unique<String>>,
    pub(super) tensors: BTreeMap<String, Entry>,
}

/// A tensor's entry in the JSON header, before validation.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Entry {
    dtype: Spelled,
    shape: Shape,
    pub(super) data_offsets: [u64; 2],
}

/// A type's name, shortened if this crate does not read the type.
enum Spelled {
    Known(Dtype),
    Unknown(Box<str>),
}

struct Shape(Vec<u64>);

impl Entry {
    /// Returns the tensor, or an error if its dtype is unknown or its shape does not match its number of bytes.
    pub(super) fn tensor(self, start_bytes: u64) -> Result<Tensor, String> {
        let Entry { dtype, shape: Shape(shape), data_offsets: [start, end] } = self;
        let dtype = match dtype {
            Spelled::Known(dtype) => dtype,
            Spelled::Unknown(name) => {
                let known = Dtype::ALL.map(Dtype::name).join(", ");
                return Err(format!("has dtype {name}, which is none of {known}"));
            }
        };
        let elements = shape.iter().try_fold(1u64, |product, dim| product.checked_mul(*dim));
        match elements {
            Some(elements) if elements.checked_mul(dtype.bytes()) == Some(end - start) => {
                Ok(Tensor { dtype, shape, elements, start_bytes: start_bytes + start })
            }
            _ => {
                let shape = sentence(format_args!("{shape:?}"));
                Err(format!("has shape {shape} and {} bytes, which do not agree", end - start))
            }
        }
    }
}

impl<'de> Deserialize<'de> for Spelled {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Name;
        impl Visitor<'_> for Name {
            type Value = Spelled;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of a type")
            }

            fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<Spelled, E> {
                let known = Dtype::ALL.into_iter().find(|dtype| dtype.name() == name);
                Ok(known.map_or_else(|| Spelled::Unknown(quoted(name).into()), Spelled::Known))
            }
        }
        deserializer.deserialize_str(Name)
    }
}

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Dimensions;
        impl<'de> Visitor<'de> for Dimensions {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
                let mut shape = Vec::new();
                while let Some(dimension) = seq.next_element()? {
                    if shape.len() == MAX_DIMENSIONS {
                        let why = format_args!("a shape has more than {MAX_DIMENSIONS} dimensions");
                        return Err(A::Error::custom(why));
                    }
                    shape.push(dimension);
                }
                Ok(Shape(shape))
            }
        }
        deserializer.deserialize_seq(Dimensions)
    }
}

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct All;
        impl<'de> Visitor<'de> for All {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Entries { metadata: None, tensors: BTreeMap::new() };
                while let Some(name) = map.next_key::<String>()? {
                    let known = entries.tensors.contains_key(&name);
                    let is_metadata = name == "__metadata__";
                    if known || (is_metadata && entries.metadata.is_some()) {
                        return Err(A::Error::custom(format_args!("{} occurs twice", quoted(&name))));
                    }
                    if is_metadata {
                        entries.metadata = Some(map.next_value()?);
                    } else {
                        entries.tensors.insert(name, map.next_value::<Object<Entry>>()?.0);
                    }
                }
                Ok(entries)
            }
        }
        deserializer.deserialize_map(All)
    }
}

/// Wraps a struct that uses serde's derive, so that the struct is read only from a JSON object and not from an array.
pub struct Object<T>(pub T);

/// The largest number of keys in one [`Unique`] object. Without this limit, the keys could occupy far more memory than
/// their text in the file.
pub(super) const MAX_KEYS: usize = 1 << 16;

/// An object with at most 65,536 keys of any name. An object in which a key occurs twice is refused.
pub struct Unique<V>(pub BTreeMap<String, V>);

struct ObjectVisitor<T>(PhantomData<T>);
struct UniqueVisitor<V>(PhantomData<V>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ObjectVisitor(PhantomData))
    }
}

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Unique<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(UniqueVisitor(PhantomData))
    }
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
    type Value = Object<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Object<T>, A::Error> {
        T::deserialize(MapAccessDeserializer::new(map)).map(Object)
    }
}

impl<'de, V: Deserialize<'de>> Visitor<'de> for UniqueVisitor<V> {
    type Value = Unique<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Unique<V>, A::Error> {
        let mut entries = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            if entries.contains_key(&key) {
                return Err(A::Error::custom(format_args!("{} occurs twice", quoted(&key))));
            }
            if entries.len() == MAX_KEYS {
                return Err(A::Error::custom(format_args!("an object has more than {MAX_KEYS} keys")));
            }
            entries.insert(key, map.next_value()?);
        }
        Ok(Unique(entries))
    }
}
