//! A reader of nvcc's fat binaries that lists the architectures inside.
//!
//! NVIDIA does not document the format; this follows what nvcc 13.0 writes. The driver, not this file, decides which
//! image is loaded. Malformed input gives `None`, never a panic.

/// All kernels, compiled for one architecture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// nvcc's name: `sm_90` for machine code, `compute_90` for PTX that a driver compiles for newer GPUs.
    pub architecture: String,
    /// Compressed size in this build.
    pub bytes: u64,
}

const MAGIC: u32 = 0xba55_ed50;
const PTX: u16 = 1;
const MACHINE_CODE: u16 = 2;

/// Returns the images, PTX last, or `None` if this is not a fat binary.
pub(super) fn images(fatbin: &[u8]) -> Option<Vec<Image>> {
    if word(fatbin, 0)? != MAGIC {
        return None;
    }
    let header = half(fatbin, 6)?;
    let end = usize::from(header).checked_add(long(fatbin, 8)?)?;
    let (mut at, mut found) = (usize::from(header), Vec::new());
    while at < end {
        let entry = fatbin.get(at..end)?;
        let (header, bytes) = (word(entry, 4)? as usize, long(entry, 8)?);
        let prefix = match half(entry, 0)? {
            PTX => "compute",
            MACHINE_CODE => "sm",
            _ => return None,
        };
        found.push(Image { architecture: format!("{prefix}_{}", word(entry, 28)?), bytes: bytes as u64 });
        let next = at.checked_add(header)?.checked_add(bytes)?;
        at = if next > at { next } else { return None };
    }
    found.sort_by_key(|image| image.architecture.starts_with("compute"));
    (!found.is_empty()).then_some(found)
}

fn bytes<const N: usize>(data: &[u8], at: usize) -> Option<[u8; N]> {
    data.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn half(data: &[u8], at: usize) -> Option<u16> {
    bytes(data, at).map(u16::from_le_bytes)
}

fn word(data: &[u8], at: usize) -> Option<u32> {
    bytes(data, at).map(u32::from_le_bytes)
}

fn long(data: &[u8], at: usize) -> Option<usize> {
    bytes(data, at).map(u64::from_le_bytes).and_then(|value| value.try_into().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A container with one PTX and one machine code entry of eight bytes each.
    fn container() -> Vec<u8> {
        let mut entries = Vec::new();
        for (kind, architecture) in [(PTX, 120u32), (MACHINE_CODE, 90)] {
            let mut entry = vec![0u8; 72];
            entry[..2].copy_from_slice(&kind.to_le_bytes());
            entry[4..8].copy_from_slice(&64u32.to_le_bytes());
            entry[8..16].copy_from_slice(&8u64.to_le_bytes());
            entry[28..32].copy_from_slice(&architecture.to_le_bytes());
            entries.extend(entry);
        }
        let mut fatbin = MAGIC.to_le_bytes().to_vec();
        fatbin.extend([1, 0, 16, 0]);
        fatbin.extend((entries.len() as u64).to_le_bytes());
        fatbin.extend(entries);
        fatbin
    }

    #[test]
    fn machine_code_comes_first_and_ptx_last() {
        let image = |architecture: &str| Image { architecture: architecture.to_owned(), bytes: 8 };
        assert_eq!(images(&container()), Some(vec![image("sm_90"), image("compute_120")]));
    }

    #[test]
    fn no_damage_panics() {
        let whole = container();
        for length in 0..whole.len() {
            assert_eq!(images(&whole[..length]), None, "cut to {length} bytes");
        }
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] = 0xff;
            let _ = images(&damaged);
        }
    }
}
