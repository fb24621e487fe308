//! The header of a tensor file: the names, types, shapes and places of the tensors. The tensors fill the rest of the
//! file exactly.
//!
//! For any input, a read returns either a header that matches the file or an error of one line. Every length is
//! compared with the file's length before it is used. No error quotes more than a line of the file.

use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};

use super::convert::Tensor;
use super::entries::{Entries, Entry};
use crate::error::{Error, Result};
use crate::text::{quoted, sentence};

/// The size of the file's first field, which contains the header's length.
const LENGTH_BYTES: u64 = 8;

/// The format's limit on the length of a header.
pub(super) const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The contents of a file's header.
#[derive(Debug)]
pub struct Header {
    /// The tensors by name.
    pub tensors: BTreeMap<String, Tensor>,
    /// Free text by key.
    pub metadata: BTreeMap<String, String>,
    data_bytes: u64,
    checksum: u32,
}

impl Header {
    pub(super) fn read<R: Read + Seek>(source: &mut R) -> Result<Header> {
        let unreadable = |error| Error::file("the header")(error);
        let file_bytes = source.seek(SeekFrom::End(0)).map_err(unreadable)?;
        source.seek(SeekFrom::Start(0)).map_err(unreadable)?;
        if file_bytes < LENGTH_BYTES {
            return refuse(
                "the file",
                format!("has {file_bytes} bytes, too few for a safetensors header"),
                "check the path",
            );
        }
        let mut length = [0; LENGTH_BYTES as usize];
        source.read_exact(&mut length).map_err(unreadable)?;
        let header_bytes = u64::from_le_bytes(length);
        let rest_bytes = file_bytes - LENGTH_BYTES;
        let limit = rest_bytes.min(MAX_HEADER_BYTES);
        if header_bytes > limit {
            let wrong = format!(
                "not a safetensors file, as it claims a header of {header_bytes} bytes where {limit} are possible"
            );
            return refuse("the file", wrong, "check the path");
        }
        // The length is bounded by the file's length and by the format's limit, so it fits in a `usize`.
        let mut text = vec![0; header_bytes as usize];
        source.read_exact(&mut text).map_err(unreadable)?;
        if text.first() != Some(&b'{') {
            return refuse("the file", "its header is not a JSON object".into(), "check the path");
        }
        let entries: Entries = serde_json::from_slice(&text).map_err(|error| {
            Error::checkpoint("the header", format_args!("broken, {}", sentence(error.to_string())), DAMAGED)
        })?;
        let data_bytes = rest_bytes - header_bytes;
        let start_bytes = LENGTH_BYTES + header_bytes;
        check_cover(&entries.tensors, data_bytes)?;
        let mut tensors = BTreeMap::new();
        for (name, entry) in entries.tensors {
            let tensor = entry.tensor(start_bytes).map_err(|wrong| in_tensor(&name, wrong, DAMAGED))?;
            tensors.insert(name, tensor);
        }
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&length);
        hasher.update(&text);
        let metadata = entries.metadata.map(|all| all.0).unwrap_or_default();
        Ok(Header { tensors, metadata, data_bytes, checksum: hasher.finalize() })
    }

    /// Returns the CRC-32 of the length and the header.
    pub fn checksum(&self) -> u32 {
        self.checksum
    }

    /// Returns an error if a tensor has an element type that the tensors of a step cannot have.
    ///
    /// # Errors
    /// `Checkpoint` with the name of the first tensor that has such a type.
    pub fn require_stepped(&self) -> Result<()> {
        match self.tensors.iter().find(|(_, tensor)| !tensor.dtype.is_stepped()) {
            Some((name, tensor)) => {
                let wrong = format_args!("has dtype {}, not F32, BF16 or F16", tensor.dtype);
                Err(in_tensor(name, wrong, "convert it"))
            }
            None => Ok(()),
        }
    }

    /// Returns the number of bytes after the header.
    pub(super) fn data_bytes(&self) -> u64 {
        self.data_bytes
    }
}

/// Checks that every byte of the data belongs to exactly one tensor.
fn check_cover(tensors: &BTreeMap<String, Entry>, data_bytes: u64) -> Result<()> {
    let mut places: Vec<_> = tensors.iter().map(|(name, entry)| (entry.data_offsets, name)).collect();
    places.sort_unstable();
    let mut covered = 0;
    for ([start, end], name) in places {
        if start != covered || end < start || end > data_bytes {
            let wrong = if start == covered && end > data_bytes {
                format!("lies at {start}..{end} of the data, but the file ends after {data_bytes} bytes")
            } else {
                format!("lies at {start}..{end} of the data, but the tensors before it end at {covered}")
            };
            return Err(in_tensor(name, wrong, DAMAGED));
        }
        covered = end;
    }
    if covered != data_bytes {
        return refuse(
            "the file",
            format!("has {data_bytes} bytes of data, and tensors for {covered}"),
            DAMAGED,
        );
    }
    Ok(())
}

const DAMAGED: &str = "write the file again";

fn refuse<T>(place: &str, wrong: String, remedy: &str) -> Result<T> {
    Err(Error::checkpoint(place, wrong, remedy))
}

/// Returns an error about a tensor of a file.
pub(in crate::checkpoint) fn in_tensor(name: &str, wrong: impl ToString, remedy: impl ToString) -> Error {
    Error::checkpoint(format_args!("tensor {}", quoted(name)), wrong, remedy)
}
