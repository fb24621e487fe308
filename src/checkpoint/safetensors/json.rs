//! Two strict shapes of JSON that serde's derives leave open: objects that are spelled as objects, without duplicates.
//!
//! A derived struct also takes an array of its fields, and a map keeps the last of two equal keys: both would let a
//! broken file pass for another one. These types refuse, and never repair.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};

use crate::text::quoted;

/// A derived struct that must be spelled as an object.
pub struct Object<T>(pub T);

/// Keys of one object. More would take far more memory than the text that spells them.
pub const MAX_KEYS: usize = 1 << 16;

/// An object with at most [`MAX_KEYS`] free keys, none of them twice.
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
