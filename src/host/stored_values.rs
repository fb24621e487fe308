//! A tensor's elements on the host in the format in which they are stored, for the kernels' conversions to f32 and back.
//!
//! The conversions read and write as many bytes as [`StoredValues::argument`] has checked.

use std::ptr;

use crate::abi::{
    INSTEP_DTYPE_BF16, INSTEP_DTYPE_F16, INSTEP_DTYPE_F32, INSTEP_MASTER_NONE, INSTEP_MASTER_REMAINDER8,
    INSTEP_MASTER_REMAINDER16, INSTEP_MOMENTS_8BIT, INSTEP_QUANTUM, InstepStored,
};

/// Stored elements, in memory that is aligned for any of them.
pub(crate) struct StoredValues<'a> {
    pub(crate) values: &'a mut [u32],
    /// The remainders of parameters, or the scales of 8-bit states.
    pub(crate) second: Option<&'a mut [u32]>,
    /// The kernels' code of an element type, or of 8-bit states.
    pub(crate) format: u32,
    /// The kernels' code of remainders, if `second` holds them.
    pub(crate) master_kind: u32,
    /// Whether 8-bit states have signs.
    pub(crate) is_signed: bool,
}

impl StoredValues<'_> {
    /// Returns the kernels' argument for so many elements.
    ///
    /// # Panics
    /// If there are fewer, or the format is unknown.
    pub(super) fn argument(&mut self, count: usize) -> InstepStored {
        let bytes = match self.format {
            INSTEP_DTYPE_F32 => 4 * count,
            INSTEP_DTYPE_BF16 | INSTEP_DTYPE_F16 => 2 * count,
            INSTEP_MOMENTS_8BIT => count,
            other => panic!("format {other}"),
        };
        let second_bytes = match self.master_kind {
            _ if self.format == INSTEP_MOMENTS_8BIT => 4 * count.div_ceil(INSTEP_QUANTUM as usize),
            INSTEP_MASTER_REMAINDER16 => 2 * count,
            INSTEP_MASTER_REMAINDER8 => count,
            INSTEP_MASTER_NONE => 0,
            other => panic!("master {other}"),
        };
        let there = [size_of_val(self.values), self.second.as_deref().map_or(0, size_of_val)];
        assert!(there[0] >= bytes && there[1] >= second_bytes, "{there:?} bytes for {count} elements");
        InstepStored {
            values: self.values.as_mut_ptr().cast(),
            second: self.second.as_deref_mut().map_or(ptr::null_mut(), |second| second.as_mut_ptr().cast()),
            count: count as u64,
            format: self.format,
            master_kind: self.master_kind,
            is_signed: self.is_signed.into(),
            reserved: 0,
        }
    }
}
