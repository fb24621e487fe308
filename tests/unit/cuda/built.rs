//! Tests of the list of kernels in a build, and of the reader of the file that holds them.
//!
//! No file that is cut off or changed in a byte panics.

use super::*;

#[test]
fn a_build_lists_its_kernels_or_says_how_to_get_them() {
    match built_kernels() {
        Ok(kernels) => {
            assert!(kernels.names.iter().any(|name| name == "instep_step_adam"));
            let last = kernels.images.last().unwrap();
            assert!(last.architecture.starts_with("compute_"), "{last:?}");
            assert!(kernels.images.iter().all(|image| image.bytes > 1_000));
        }
        Err(Error::KernelsNotBuilt { how }) => {
            assert_ne!(std::env::var("INSTEP_REQUIRE_KERNELS").as_deref(), Ok("1"), "not built: {how}");
            assert!(how.contains("rebuild"), "{how}");
            assert_eq!(cfg!(feature = "cuda"), !how.contains("--features cuda"), "{how}");
        }
        Err(other) => panic!("{other}"),
    }
}

/// A container with one PTX and one machine code entry of eight bytes each.
fn container() -> Vec<u8> {
    let mut entries = Vec::new();
    for (kind, architecture) in [(PTX, 120u32), (MACHINE_CODE, 90)] {
        let mut entry = vec![0u8; 72];
        entry[..2].copy_from_slice(&(kind as u16).to_le_bytes());
        entry[4..8].copy_from_slice(&64u32.to_le_bytes());
        entry[8..16].copy_from_slice(&8u64.to_le_bytes());
        entry[28..32].copy_from_slice(&architecture.to_le_bytes());
        entries.extend(entry);
    }
    let mut fatbin = (MAGIC as u32).to_le_bytes().to_vec();
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
