//! Tensor files in the safetensors format: a header that is checked in full before a byte of data is read.
//!
//! Stricter than the `safetensors` crate, which takes duplicate names and needs the whole file in memory; its reader
//! is the judge in the tests. Must never allocate more than the header's own length justifies, whatever it claims.
//!
//! Source: <https://huggingface.co/docs/safetensors>, "Format".

mod header;
mod write;

pub use header::{Header, Tensor};
pub use write::{Values, write};

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use crate::Failure;

/// Bytes read or written at a time.
const CHUNK_BYTES: usize = 1 << 16;

/// The data of a tensor file, to be read piece by piece.
pub struct Data<R> {
    source: R,
    chunk: Vec<u8>,
}

/// Opens a regular file: a pipe or a device has no length to hold its header to.
///
/// # Errors
/// `File` if it cannot be opened or read, `Tensors` if it is not a file of this format.
pub fn open_file(path: &Path) -> Result<(Header, Data<File>), Failure> {
    let file = regular_file(path)?;
    open(file).map_err(|failure| failure.inside(path))
}

/// Reads and checks the header.
///
/// # Errors
/// `Tensors` if it is broken or does not describe exactly the bytes that follow.
pub fn open<R: Read + Seek>(mut source: R) -> Result<(Header, Data<R>), Failure> {
    let header = Header::read(&mut source)?;
    let chunk = vec![0; CHUNK_BYTES.min(usize::try_from(header.data_bytes()).unwrap_or(CHUNK_BYTES))];
    Ok((header, Data { source, chunk }))
}

impl<R: Read + Seek> Data<R> {
    /// Reads elements of a tensor from number `first` on, until `values` is full.
    ///
    /// # Errors
    /// `Tensors` if the file has changed since its header was read, or cannot be read any more.
    pub fn read(&mut self, tensor: &Tensor, first: u64, values: &mut [f32]) -> Result<(), Failure> {
        let lost = |error| Failure::Tensors(format!("the data could not be read: {error}"));
        if values.is_empty() {
            return Ok(());
        }
        self.source.seek(SeekFrom::Start(tensor.start_bytes() + 4 * first)).map_err(lost)?;
        for part in values.chunks_mut(CHUNK_BYTES / 4) {
            let bytes = &mut self.chunk[..4 * part.len()];
            self.source.read_exact(bytes).map_err(lost)?;
            for (value, bytes) in part.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*bytes);
            }
        }
        Ok(())
    }
}

/// Opens what is a file and nothing else.
pub(crate) fn regular_file(path: &Path) -> Result<File, Failure> {
    // Asked first, because opening a named pipe would wait for its other end.
    let is_file = std::fs::metadata(path).map_err(Failure::file(path))?.is_file();
    if !is_file {
        return Err(Failure::Tensors(format!("{}: is not a regular file", path.display())));
    }
    File::open(path).map_err(Failure::file(path))
}
