//! Reads a tensor file. If the file has checksums, every read verifies them.
//!
//! The header's checksum is compared when the file is opened. A tensor's checksum is compared after the tensor has been
//! read. This module never reports success for a tensor before its checksum has been compared.

use std::collections::HashMap;
use std::io::{Read, Seek};

use super::keys::CHECKSUMS;
use super::safetensors::{Data, Dtype, Header, Tensor, open};
use crate::error::{Error, Result};
use crate::text::quoted;

const ANOTHER: &str = "load another checkpoint";

pub(super) struct Verified<R> {
    pub(super) data: Data<R>,
    /// The checksum of each tensor, by the tensor's offset in the file. `None` if the file has no checksums.
    checksums: Option<HashMap<u64, u32>>,
}

impl<R: Read + Seek> Verified<R> {
    pub(super) fn open(source: R) -> Result<(Header, Verified<R>)> {
        let (header, data) = open(source)?;
        let verified = Verified::new(&header, data)?;
        Ok((header, verified))
    }

    /// Reads the checksums of an open file, if the file has checksums.
    pub(super) fn new(header: &Header, data: Data<R>) -> Result<Verified<R>> {
        let mut verified = Verified { data, checksums: None };
        if let Some(tensor) = header.tensors.get(CHECKSUMS) {
            verified.checksums = Some(verified.read_checksums(header, tensor)?);
        }
        Ok(verified)
    }

    pub(super) fn has_checksums(&self) -> bool {
        self.checksums.is_some()
    }

    /// Passes all of a tensor's bytes to `take`, in pieces of whole elements.
    ///
    /// The data are verified only after this function has returned `Ok`.
    pub(super) fn stream(
        &mut self,
        key: &str,
        tensor: &Tensor,
        mut take: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut hasher = crc32fast::Hasher::new();
        let hold = self.checksums.as_ref().and_then(|all| all.get(&tensor.start_bytes()));
        self.data.stream(tensor, 0..tensor.elements, |bytes| {
            if hold.is_some() {
                hasher.update(bytes);
            }
            take(bytes)
        })?;
        match hold {
            Some(expected) if tensor.elements > 0 && *expected != hasher.finalize() => {
                let bytes = tensor.start_bytes()..tensor.end_bytes();
                let place = format!("tensor {} (bytes {bytes:?} of the file)", quoted(key));
                Err(Error::checkpoint(place, "damaged, as its checksum differs", ANOTHER))
            }
            _ => Ok(()),
        }
    }

    fn read_checksums(&mut self, header: &Header, tensor: &Tensor) -> Result<HashMap<u64, u32>> {
        let refuse =
            |wrong: String| Err(Error::checkpoint(format_args!("tensor `{CHECKSUMS}`"), wrong, ANOTHER));
        let held = header.tensors.iter().filter(|(name, tensor)| *name != CHECKSUMS && tensor.elements > 0);
        let mut places: Vec<u64> = held.map(|(_, tensor)| tensor.start_bytes()).collect();
        places.sort_unstable();
        let expected = [1 + places.len() as u64];
        if tensor.dtype != Dtype::U32 || tensor.shape != expected {
            let Tensor { dtype, shape, .. } = tensor;
            return refuse(format!("is {dtype} of shape {shape:?}, not U32 of {expected:?}"));
        }
        let mut checksums = Vec::with_capacity(1 + places.len());
        self.data.stream(tensor, 0..tensor.elements, |bytes| {
            checksums.extend(bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)));
            Ok(())
        })?;
        match checksums.split_first() {
            Some((first, rest)) if *first == header.checksum() => {
                Ok(places.into_iter().zip(rest.iter().copied()).collect())
            }
            _ => Err(Error::checkpoint("the header", "damaged, as its checksum differs", ANOTHER)),
        }
    }
}
