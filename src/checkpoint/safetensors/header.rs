//! The header of a tensor file: names, types, shapes and places of tensors that fill the rest of the file exactly.
//!
//! Any bytes give either a header that is true of the file or an error of one line. No length is trusted before it has
//! been compared with the file's, and no error repeats more than a line of the file.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{Read, Seek, SeekFrom};

use super::entries::{Entries, Entry};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::text::{quoted, sentence};

/// Bytes of the length before the header.
const LENGTH_BYTES: u64 = 8;

/// The format's own limit.
pub(super) const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The contents of a file.
#[derive(Debug)]
pub struct Header {
    /// By name.
    pub tensors: BTreeMap<String, Tensor>,
    /// Free text by key.
    pub metadata: BTreeMap<String, String>,
    data_bytes: u64,
    checksum: u32,
}

/// Element types that the format has and something here reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// IEEE 754 binary16.
    F16,
    /// The upper half of an f32.
    Bf16,
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary64.
    F64,
    /// Unsigned, 32 bits.
    U32,
    /// Signed, 64 bits.
    I64,
    /// Unsigned, 64 bits.
    U64,
}

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Its element type.
    pub dtype: Dtype,
    /// Its dimensions; none for a scalar.
    pub shape: Vec<u64>,
    /// Their product.
    pub elements: u64,
    pub(super) start_bytes: u64,
}

impl Dtype {
    pub(super) const ALL: [Dtype; 7] =
        [Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64, Dtype::U32, Dtype::I64, Dtype::U64];

    /// Returns the size of one element.
    pub const fn bytes(self) -> u64 {
        match self {
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::F32 | Dtype::U32 => 4,
            Dtype::F64 | Dtype::I64 | Dtype::U64 => 8,
        }
    }

    /// Returns whether tensors of a step may be of this type.
    pub const fn is_stepped(self) -> bool {
        matches!(self, Dtype::F32 | Dtype::Bf16 | Dtype::F16)
    }

    /// Returns the name in the format.
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::F16 => "F16",
            Dtype::Bf16 => "BF16",
            Dtype::F32 => "F32",
            Dtype::F64 => "F64",
            Dtype::U32 => "U32",
            Dtype::I64 => "I64",
            Dtype::U64 => "U64",
        }
    }
}

impl From<DType> for Dtype {
    fn from(dtype: DType) -> Dtype {
        match dtype {
            DType::F32 => Dtype::F32,
            DType::BF16 => Dtype::Bf16,
            DType::F16 => Dtype::F16,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Tensor {
    /// Returns the offset in the file.
    pub fn start_bytes(&self) -> u64 {
        self.start_bytes
    }

    /// Offset of the first byte after it.
    pub fn end_bytes(&self) -> u64 {
        self.start_bytes + self.elements * self.dtype.bytes()
    }
}

impl Header {
    pub(super) fn read<R: Read + Seek>(source: &mut R) -> Result<Header> {
        let unreadable = |error| Error::file("the header")(error);
        let file_bytes = source.seek(SeekFrom::End(0)).map_err(unreadable)?;
        source.seek(SeekFrom::Start(0)).map_err(unreadable)?;
        if file_bytes < LENGTH_BYTES {
            return refuse("the file", format!("has {file_bytes} bytes, too few for a safetensors header"));
        }
        let mut length = [0; LENGTH_BYTES as usize];
        source.read_exact(&mut length).map_err(unreadable)?;
        let header_bytes = u64::from_le_bytes(length);
        let rest_bytes = file_bytes - LENGTH_BYTES;
        if header_bytes > rest_bytes.min(MAX_HEADER_BYTES) {
            return refuse("the file", format!("claims a header of {header_bytes} bytes in {rest_bytes}"));
        }
        // Bounded by the file's length and by the format's limit, so it fits.
        let mut text = vec![0; header_bytes as usize];
        source.read_exact(&mut text).map_err(unreadable)?;
        if text.first() != Some(&b'{') {
            return refuse("the file", "has a header that is no JSON object".into());
        }
        let entries: Entries = serde_json::from_slice(&text).map_err(|error| {
            Error::checkpoint("the header", format!("is broken: {}", sentence(&error.to_string())))
        })?;
        let data_bytes = rest_bytes - header_bytes;
        let start_bytes = LENGTH_BYTES + header_bytes;
        check_cover(&entries.tensors, data_bytes)?;
        let mut tensors = BTreeMap::new();
        for (name, entry) in entries.tensors {
            let tensor = entry.tensor(start_bytes).map_err(|why| in_tensor(&name, why))?;
            tensors.insert(name, tensor);
        }
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&length);
        hasher.update(&text);
        let metadata = entries.metadata.map(|all| all.0).unwrap_or_default();
        Ok(Header { tensors, metadata, data_bytes, checksum: hasher.finalize() })
    }

    /// CRC-32 of the length and the header.
    pub fn checksum(&self) -> u32 {
        self.checksum
    }

    /// Refuses any type but those that steps work on.
    ///
    /// # Errors
    /// `Checkpoint`, naming the first tensor of another one.
    pub fn require_stepped(&self) -> Result<()> {
        match self.tensors.iter().find(|(_, tensor)| !tensor.dtype.is_stepped()) {
            Some((name, tensor)) => {
                let why = format!("has dtype {}, not F32, BF16 or F16", tensor.dtype);
                Err(in_tensor(name, why))
            }
            None => Ok(()),
        }
    }

    /// Bytes after the header.
    pub(super) fn data_bytes(&self) -> u64 {
        self.data_bytes
    }
}

/// Every byte of the data belongs to exactly one tensor.
fn check_cover(tensors: &BTreeMap<String, Entry>, data_bytes: u64) -> Result<()> {
    let mut places: Vec<_> = tensors.iter().map(|(name, entry)| (entry.data_offsets, name)).collect();
    places.sort_unstable();
    let mut covered = 0;
    for ([start, end], name) in places {
        if start != covered || end < start || end > data_bytes {
            let why = format!("lies at {start}..{end}, where {covered}.. of {data_bytes} bytes comes next");
            return Err(in_tensor(name, why));
        }
        covered = end;
    }
    if covered != data_bytes {
        return refuse("the file", format!("has {data_bytes} bytes of data, and tensors for {covered}"));
    }
    Ok(())
}

fn refuse<T>(place: &str, why: String) -> Result<T> {
    Err(Error::checkpoint(place, why))
}

/// An error about a tensor of a file.
pub(in crate::checkpoint) fn in_tensor(name: &str, why: impl ToString) -> Error {
    Error::checkpoint(format_args!("tensor {}", quoted(name)), why)
}
