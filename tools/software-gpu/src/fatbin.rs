//! Finds the PTX in an image of kernels: a fat binary as nvcc makes it, or PTX as text.
//!
//! The format has no public description; the offsets are those that nvcc 13.0 writes. Machine code is skipped.

use crate::header::cudaError_enum as Code;

pub(crate) const MAGIC: u32 = 0xba55_ed50;
const PTX: u16 = 1;
/// Flags of an entry that is compressed with LZ4, or with Zstandard.
const LZ4: u64 = 0x2000;
const ZSTANDARD: u64 = 0x8000;

/// Returns the bytes of a fat binary, header included, from its first 16.
pub(crate) fn length(start: &[u8; 16]) -> usize {
    number(start, 6, 2) as usize + number(start, 8, 8) as usize
}

/// Returns the PTX of a fat binary.
///
/// # Errors
/// `NO_BINARY_FOR_GPU` if it has none, `INVALID_IMAGE` if it is cut off or packed in an unknown way.
pub(crate) fn ptx(image: &[u8]) -> Result<String, Code> {
    let mut at = number(image, 6, 2) as usize;
    while at < image.len() {
        let header = image.get(at..at + 64).ok_or(Code::CUDA_ERROR_INVALID_IMAGE)?;
        let (header_bytes, bytes) = (number(header, 4, 4) as usize, number(header, 8, 8) as usize);
        let start = at + header_bytes;
        let content = image.get(start..start + bytes).ok_or(Code::CUDA_ERROR_INVALID_IMAGE)?;
        if number(header, 0, 2) as u16 == PTX {
            let packed = &content[..(number(header, 16, 4) as usize).min(bytes)];
            return unpacked(content, packed, number(header, 40, 8), number(header, 56, 8) as usize);
        }
        at = start + bytes;
    }
    Err(Code::CUDA_ERROR_NO_BINARY_FOR_GPU)
}

fn unpacked(content: &[u8], packed: &[u8], flags: u64, bytes: usize) -> Result<String, Code> {
    let invalid = Code::CUDA_ERROR_INVALID_IMAGE;
    let text = if flags & ZSTANDARD != 0 {
        let mut text = Vec::with_capacity(bytes);
        let mut decoder = ruzstd::decoding::StreamingDecoder::new(packed).map_err(|_| invalid)?;
        std::io::Read::read_to_end(&mut decoder, &mut text).map_err(|_| invalid)?;
        text
    } else if flags & LZ4 != 0 {
        return Err(invalid);
    } else {
        content.to_vec()
    };
    let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
    String::from_utf8(text[..end].to_vec()).map_err(|_| invalid)
}

fn number(bytes: &[u8], at: usize, count: usize) -> u64 {
    bytes[at..at + count].iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes an image with machine code and then PTX.
    fn image(text: &[u8]) -> Vec<u8> {
        let entry = |kind: u16, content: &[u8]| {
            let mut entry = [0; 64];
            entry[0..2].copy_from_slice(&kind.to_le_bytes());
            entry[4..8].copy_from_slice(&64u32.to_le_bytes());
            entry[8..16].copy_from_slice(&(content.len() as u64).to_le_bytes());
            [&entry[..], content].concat()
        };
        let entries = [entry(2, b"machine!"), entry(1, text)].concat();
        let mut image = MAGIC.to_le_bytes().to_vec();
        image.extend([1, 0, 16, 0]);
        image.extend((entries.len() as u64).to_le_bytes());
        image.extend(entries);
        image
    }

    #[test]
    fn the_ptx_is_found_after_machine_code_and_a_cut_image_is_refused() {
        let whole = image(b".version 9.0\0\0");
        assert_eq!(length(whole[..16].try_into().unwrap()), whole.len());
        assert_eq!(ptx(&whole).unwrap(), ".version 9.0");
        assert_eq!(ptx(&whole[..whole.len() - 4]), Err(Code::CUDA_ERROR_INVALID_IMAGE));
        assert_eq!(ptx(&whole[..16 + 72]), Err(Code::CUDA_ERROR_NO_BINARY_FOR_GPU));
    }
}
