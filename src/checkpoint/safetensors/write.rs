//! Writes the header of a tensor file with its entries in the given order, and writes the values of tensors.
//!
//! Files are compared byte by byte, so equal content must give equal bytes. The order of entries therefore must not
//! depend on hashing.

use std::collections::BTreeMap;
use std::io::{self, Write};

use half::{bf16, f16};
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use super::CHUNK_BYTES;
use super::convert::Dtype;
use super::entries::MAX_KEYS;
use super::header::MAX_HEADER_BYTES;
use crate::dtype::DType;
use crate::error::{Error, Result};

/// A tensor to be written.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Unique in the file.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its dimensions. A scalar has none.
    pub shape: Vec<u64>,
}

/// An entry in the JSON form of the header.
#[derive(Serialize)]
struct Spelled<'a> {
    dtype: &'static str,
    shape: &'a [u64],
    data_offsets: [u64; 2],
}

struct Spelling<'a> {
    entries: &'a [Entry],
    metadata: &'a BTreeMap<String, String>,
}

/// Returns the start of a file: the header's length, then the header. The caller must then write the tensors' data, in
/// the order of `entries`. Padding makes the data start at a multiple of 8 bytes, as the format requires.
///
/// # Errors
/// `Checkpoint` if the header is too long, or if there are too many metadata entries.
pub fn header(entries: &[Entry], metadata: &BTreeMap<String, String>) -> Result<Vec<u8>> {
    let refuse =
        |wrong: String| Error::checkpoint("the header", wrong, "save fewer or shorter names and metadata");
    if metadata.len() > MAX_KEYS {
        return Err(refuse(format!("would have {} metadata of at most {MAX_KEYS}", metadata.len())));
    }
    let mut bytes = vec![0; size_of::<u64>()];
    serde_json::to_writer(&mut bytes, &Spelling { entries, metadata })
        .map_err(|error| refuse(error.to_string()))?;
    bytes.resize(bytes.len().next_multiple_of(8), b' ');
    let length_bytes = (bytes.len() - size_of::<u64>()) as u64;
    if length_bytes > MAX_HEADER_BYTES {
        return Err(refuse(format!("would take {length_bytes} bytes of at most {MAX_HEADER_BYTES}")));
    }
    bytes[..size_of::<u64>()].copy_from_slice(&length_bytes.to_le_bytes());
    Ok(bytes)
}

/// Rounds values to the nearest value of `dtype` and writes them, at most 64 KiB at a time.
///
/// # Errors
/// The error of `out`.
pub fn write_values(out: &mut impl Write, dtype: DType, values: &[f32]) -> io::Result<()> {
    let mut chunk = Vec::with_capacity(CHUNK_BYTES.min(size_of_val(values)));
    for part in values.chunks(CHUNK_BYTES / size_of::<f32>()) {
        chunk.clear();
        match dtype {
            DType::F32 => chunk.extend(part.iter().flat_map(|value| value.to_le_bytes())),
            DType::BF16 => chunk.extend(part.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes())),
            DType::F16 => chunk.extend(part.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes())),
        }
        out.write_all(&chunk)?;
    }
    Ok(())
}

impl Serialize for Spelling<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        if !self.metadata.is_empty() {
            map.serialize_entry("__metadata__", self.metadata)?;
        }
        let mut end_bytes = 0;
        for Entry { name, dtype, shape } in self.entries {
            let start_bytes = end_bytes;
            end_bytes += dtype.bytes() * shape.iter().product::<u64>();
            let data_offsets = [start_bytes, end_bytes];
            map.serialize_entry(name, &Spelled { dtype: dtype.name(), shape, data_offsets })?;
        }
        map.end()
    }
}
