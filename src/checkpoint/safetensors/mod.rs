//! Reads and writes tensor files in the safetensors format. The header is checked in full before any data are read.
//!
//! This module is stricter than the `safetensors` crate. That crate accepts duplicate names, needs the whole file in
//! memory and writes metadata in random order. The tests also read this library's files with the `safetensors` crate.
//! This module never allocates more than a small multiple of the header's length.
//!
//! Source: <https://huggingface.co/docs/safetensors>, "Format".

pub(in crate::checkpoint) mod convert;
mod entries;
mod header;
mod write;

pub use convert::{Dtype, Tensor};
pub use entries::{Object, Unique};
pub use header::Header;
pub(in crate::checkpoint) use header::in_tensor;
pub use write::{Entry, header, write_values};

pub use crate::text::quoted;

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

use convert::floats;

use crate::error::{Error, Result};

/// The number of bytes that are read or written at a time.
const CHUNK_BYTES: usize = 1 << 16;

/// The data of a tensor file, to be read piece by piece.
pub struct Data<R> {
    source: R,
    chunk: Vec<u8>,
}

/// Opens a regular file. Refuses pipes and devices, because the header is checked against the file's length.
///
/// # Errors
/// `File` if the file cannot be opened or its header cannot be read, `Checkpoint` if the file is not a regular file or
/// is not in the safetensors format. Both errors name the path.
pub fn open_file(path: &Path) -> Result<(Header, Data<File>)> {
    open(regular_file(path)?).map_err(|error| inside(path, error))
}

/// Reads and checks the header.
///
/// # Errors
/// `Checkpoint` if the header is broken or does not describe exactly the bytes that follow. `File` if the header cannot
/// be read.
pub fn open<R: Read + Seek>(mut source: R) -> Result<(Header, Data<R>)> {
    let header = Header::read(&mut source)?;
    let chunk = vec![0; CHUNK_BYTES.min(usize::try_from(header.data_bytes()).unwrap_or(CHUNK_BYTES))];
    Ok((header, Data { source, chunk }))
}

impl<R: Read + Seek> Data<R> {
    /// Passes the bytes of a range of a tensor's elements to `take`, in order and in pieces of complete elements.
    ///
    /// # Errors
    /// `File` if the bytes cannot be read. Also returns any error that `take` returns.
    pub fn stream(
        &mut self,
        tensor: &Tensor,
        elements: Range<u64>,
        mut take: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        if elements.is_empty() {
            return Ok(());
        }
        let size = tensor.dtype.bytes();
        let start = tensor.start_bytes() + size * elements.start;
        self.source.seek(SeekFrom::Start(start)).map_err(Error::file("the data"))?;
        let mut left_bytes = size * (elements.end - elements.start);
        let piece_bytes = self.chunk.len() as u64 / size * size;
        while left_bytes > 0 {
            let bytes = &mut self.chunk[..left_bytes.min(piece_bytes) as usize];
            self.source.read_exact(bytes).map_err(Error::file("the data"))?;
            left_bytes -= bytes.len() as u64;
            take(bytes)?;
        }
        Ok(())
    }

    /// Fills `values` with elements of an F32, BF16 or F16 tensor, starting with element `first`.
    ///
    /// # Errors
    /// `Checkpoint` if the tensor is of another type. Other errors as for [`stream`](Self::stream).
    pub fn read(&mut self, tensor: &Tensor, first: u64, values: &mut [f32]) -> Result<()> {
        let refused = || {
            Error::checkpoint(
                "a tensor",
                format_args!("has dtype {}", tensor.dtype),
                "convert it to F32, BF16 or F16",
            )
        };
        let mut rest = values.iter_mut();
        let elements = first..first + rest.len() as u64;
        self.stream(tensor, elements, |bytes| {
            let fill = |value| rest.next().into_iter().for_each(|place| *place = value);
            if tensor.dtype.is_stepped() {
                floats(tensor.dtype, bytes, fill).map_err(|_| refused())
            } else {
                Err(refused())
            }
        })
    }
}

/// Opens a regular file. Returns an error for any other file, without opening it.
///
/// # Errors
/// Errors as for [`open_file`].
pub fn regular_file(path: &Path) -> Result<File> {
    // The type of the file is checked first, because opening a named pipe would wait for its other end.
    let is_file = std::fs::metadata(path).map_err(Error::file(path.display()))?.is_file();
    if !is_file {
        return Err(Error::checkpoint(path.display(), "not a regular file", "name a file"));
    }
    File::open(path).map_err(Error::file(path.display()))
}

/// Adds the path of a file to an error about this file.
pub(crate) fn inside(path: &Path, error: Error) -> Error {
    let path = path.display();
    match error {
        Error::Checkpoint(mut refusal) => {
            refusal.thing = format!("{path}: {}", refusal.thing);
            Error::Checkpoint(refusal)
        }
        Error::File { what, kind, why } => Error::File { what: format!("{path}: {what}"), kind, why },
        Error::PartlyLoaded { loaded, tensors, why } => Error::PartlyLoaded {
            loaded,
            tensors,
            why: inside(path.to_string().as_ref(), (*why).clone()).into(),
        },
        other => other,
    }
}
