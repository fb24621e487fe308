//! The header of a tensor file: names, shapes and places of f32 tensors that fill the rest of the file exactly.
//!
//! Whatever the bytes, the answer is a header that is true of the file or one line that says what is not. Must not
//! trust a length before it is held to the file's.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{Read, Seek, SeekFrom};

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, Visitor};

use crate::Failure;
use crate::json::{Object, Unique};

/// Bytes of the length in front of the header.
const LENGTH_BYTES: u64 = 8;

/// The format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// What a file holds.
#[derive(Debug)]
pub struct Header {
    /// By name.
    pub tensors: BTreeMap<String, Tensor>,
    /// Free text by key.
    pub metadata: BTreeMap<String, String>,
    data_bytes: u64,
}

/// An f32 tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Its dimensions; none for a scalar.
    pub shape: Vec<u64>,
    /// Their product.
    pub elements: u64,
    start_bytes: u64,
}

impl Tensor {
    /// Offset in the file.
    pub(super) fn start_bytes(&self) -> u64 {
        self.start_bytes
    }
}

/// An entry as the file spells it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// All entries; one key among them is not a tensor.
struct Entries {
    metadata: Option<Unique<String>>,
    tensors: BTreeMap<String, Entry>,
}

impl Header {
    pub(super) fn read<R: Read + Seek>(source: &mut R) -> Result<Header, Failure> {
        let unreadable = |error| Failure::Tensors(format!("cannot be read: {error}"));
        let file_bytes = source.seek(SeekFrom::End(0)).map_err(unreadable)?;
        source.seek(SeekFrom::Start(0)).map_err(unreadable)?;
        if file_bytes < LENGTH_BYTES {
            return refuse(format!("has {file_bytes} bytes, too few for a safetensors header"));
        }
        let mut length = [0; LENGTH_BYTES as usize];
        source.read_exact(&mut length).map_err(unreadable)?;
        let header_bytes = u64::from_le_bytes(length);
        let rest_bytes = file_bytes - LENGTH_BYTES;
        if header_bytes > rest_bytes.min(MAX_HEADER_BYTES) {
            return refuse(format!("claims a header of {header_bytes} bytes in {rest_bytes}"));
        }
        // Bounded by the file's length and by the format's limit, so it fits.
        let mut text = vec![0; header_bytes as usize];
        source.read_exact(&mut text).map_err(unreadable)?;
        if text.first() != Some(&b'{') {
            return refuse("has a header that is no JSON object".into());
        }
        let entries: Entries =
            serde_json::from_slice(&text).map_err(|error| Failure::Tensors(format!("header: {error}")))?;
        let data_bytes = rest_bytes - header_bytes;
        let start_bytes = LENGTH_BYTES + header_bytes;
        check_cover(&entries.tensors, data_bytes)?;
        let mut tensors = BTreeMap::new();
        for (name, entry) in entries.tensors {
            let tensor = entry.tensor(start_bytes).map_err(|why| in_tensor(&name, &why))?;
            tensors.insert(name, tensor);
        }
        Ok(Header { tensors, metadata: entries.metadata.map(|all| all.0).unwrap_or_default(), data_bytes })
    }

    /// Bytes behind the header.
    pub(super) fn data_bytes(&self) -> u64 {
        self.data_bytes
    }
}

impl Entry {
    /// The tensor, if its dtype is f32 and its shape is as long as its bytes.
    fn tensor(self, start_bytes: u64) -> Result<Tensor, String> {
        if self.dtype != "F32" {
            return Err(format!("has dtype {}, not F32", self.dtype));
        }
        let elements = self.shape.iter().try_fold(1u64, |product, dim| product.checked_mul(*dim));
        let [start, end] = self.data_offsets;
        match elements {
            Some(elements) if elements.checked_mul(4) == Some(end - start) => {
                Ok(Tensor { shape: self.shape, elements, start_bytes: start_bytes + start })
            }
            _ => Err(format!("has shape {:?} and {} bytes, which do not agree", self.shape, end - start)),
        }
    }
}

/// Every byte of the data belongs to exactly one tensor.
fn check_cover(tensors: &BTreeMap<String, Entry>, data_bytes: u64) -> Result<(), Failure> {
    let mut places: Vec<_> = tensors.iter().map(|(name, entry)| (entry.data_offsets, name)).collect();
    places.sort_unstable();
    let mut covered = 0;
    for ([start, end], name) in places {
        if start != covered || end < start || end > data_bytes {
            let why = format!("lies at {start}..{end}, where {covered}.. of {data_bytes} bytes comes next");
            return Err(in_tensor(name, &why));
        }
        covered = end;
    }
    if covered != data_bytes {
        return refuse(format!("has {data_bytes} bytes of data, and tensors for {covered}"));
    }
    Ok(())
}

fn refuse<T>(why: String) -> Result<T, Failure> {
    Err(Failure::Tensors(why))
}

fn in_tensor(name: &str, why: &str) -> Failure {
    Failure::Tensors(format!("tensor `{name}` {why}"))
}

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(EntriesVisitor)
    }
}

struct EntriesVisitor;

impl<'de> Visitor<'de> for EntriesVisitor {
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
                return Err(A::Error::custom(format_args!("`{name}` occurs twice")));
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
