//! Writes a tensor file: header and data in order of names, so that equal content is equal bytes.
//!
//! Must not depend on hashing or on the order in which tensors were made: outputs are compared byte by byte.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde_json::{Map, Value, json};

use super::CHUNK_BYTES;

/// A tensor to be written.
#[derive(Clone, Copy, Debug)]
pub struct Values<'a> {
    /// Its dimensions.
    pub shape: &'a [u64],
    /// As many values as their product.
    pub values: &'a [f32],
}

/// Writes tensors and metadata, the data aligned to 8 bytes as the format asks for.
///
/// # Errors
/// What `out` says.
pub fn write(
    out: &mut impl Write,
    tensors: &BTreeMap<String, Values<'_>>,
    metadata: &BTreeMap<String, String>,
) -> io::Result<()> {
    let mut header = Map::new();
    if !metadata.is_empty() {
        header.insert("__metadata__".into(), json!(metadata));
    }
    let mut end_bytes = 0;
    for (name, tensor) in tensors {
        let start_bytes = end_bytes;
        end_bytes += 4 * tensor.values.len() as u64;
        let entry = json!({"dtype": "F32", "shape": tensor.shape, "data_offsets": [start_bytes, end_bytes]});
        header.insert(name.clone(), entry);
    }
    let mut text = Value::Object(header).to_string();
    let padding = text.len().next_multiple_of(8) - text.len();
    text.extend(std::iter::repeat_n(' ', padding));
    out.write_all(&(text.len() as u64).to_le_bytes())?;
    out.write_all(text.as_bytes())?;
    let mut chunk = Vec::new();
    for part in tensors.values().flat_map(|tensor| tensor.values.chunks(CHUNK_BYTES / 4)) {
        chunk.clear();
        chunk.extend(part.iter().flat_map(|value| value.to_le_bytes()));
        out.write_all(&chunk)?;
    }
    Ok(())
}
