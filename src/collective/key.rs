//! The part of a call that must be equal on all ranks. It is a plain value that can be printed, and processes exchange
//! it as 32 bytes.
//!
//! A key has no address, so ranks of different processes can compare keys. `from_bytes` accepts only bytes that
//! `to_bytes` makes, because the sender is not trusted.

use std::fmt;

use crate::dtype::DType;
use crate::error::Error;
use crate::op::{CollectiveKind, difference};

/// The part of a [`Call`](super::Call) that must be equal on all ranks.
///
/// ```
/// use instep::DType;
/// use instep::collective::{CallKey, CollectiveKind};
///
/// let kind = CollectiveKind::AllReduce;
/// let ours = CallKey { kind, pass: 7, bucket: Some(2), dtype: DType::F32, bytes: 4096, agreement: 1 };
/// let theirs = CallKey::from_bytes(&CallKey { bytes: 2048, ..ours }.to_bytes()).ok_or("no key")?;
/// assert_eq!(theirs.to_string(), "all-reduce, pass 7, bucket 2, 2048 bytes of f32, agreement 0000000000000001");
/// assert!(ours.mismatch(&theirs, 0, 1).to_string().contains("differs in length"));
/// # Ok::<(), &str>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallKey {
    /// The kind of the collective.
    pub kind: CollectiveKind,
    /// The number of the call's pass, counted from the stepper's first pass.
    pub pass: u64,
    /// The bucket of the call, if it has one.
    pub bucket: Option<u32>,
    /// Element type.
    pub dtype: DType,
    /// Length of the buffers; of the longer buffer, if their lengths differ.
    pub bytes: u64,
    /// One number for layout, options, hyperparameters and frozen parameters. [`difference`](crate::op::difference)
    /// says which of these differs between two such numbers.
    pub agreement: u64,
}

impl CallKey {
    /// Length of the byte form.
    pub const BYTES: usize = 32;

    /// Returns the byte form, which is the same on every machine.
    ///
    /// # Shapes
    /// The kind, the element type, whether there is a bucket, and a zero have one byte each. The bucket has four bytes.
    /// Pass, length and agreement have eight bytes each. Numbers are little-endian.
    pub fn to_bytes(&self) -> [u8; CallKey::BYTES] {
        let mut bytes = [0; CallKey::BYTES];
        bytes[0] = self.kind as u8;
        bytes[1] = self.dtype as u8;
        bytes[2] = self.bucket.is_some().into();
        bytes[4..8].copy_from_slice(&self.bucket.unwrap_or(0).to_le_bytes());
        for (at, number) in [(8, self.pass), (16, self.bytes), (24, self.agreement)] {
            bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    /// Reads the byte form; `None` if [`to_bytes`](Self::to_bytes) never makes these bytes, or if the length is not a
    /// whole number of elements.
    pub fn from_bytes(bytes: &[u8; CallKey::BYTES]) -> Option<CallKey> {
        let [kind, dtype, has_bucket, zero, rest @ ..] = bytes;
        let (bucket, numbers) = rest.split_first_chunk()?;
        let bucket = u32::from_le_bytes(*bucket);
        let (numbers, _) = numbers.as_chunks();
        let [pass, length, agreement] = *numbers else { return None };
        let [pass, length, agreement] = [pass, length, agreement].map(u64::from_le_bytes);
        let key = CallKey {
            kind: CollectiveKind::ALL.get(usize::from(*kind)).copied()?,
            pass,
            bucket: match (has_bucket, bucket) {
                (0, 0) => None,
                (1, bucket) => Some(bucket),
                _ => return None,
            },
            dtype: [DType::F32, DType::BF16, DType::F16].get(usize::from(*dtype)).copied()?,
            bytes: length,
            agreement,
        };
        (*zero == 0 && length.is_multiple_of(key.dtype.bytes())).then_some(key)
    }

    /// Returns whether the call gathers tensors outside passes, as [`Stepper::gather`](crate::Stepper::gather) does.
    fn is_of_tensors(&self) -> bool {
        self.kind == CollectiveKind::AllGather && self.bucket.is_none()
    }

    /// Returns the error for two ranks whose calls differ: `rank` made this call, and `other_rank` made `theirs`. It is
    /// `LeftPass` if only the number of the pass differs, and `Mismatch` otherwise.
    pub fn mismatch(&self, theirs: &CallKey, rank: u32, other_rank: u32) -> Error {
        let agreement = difference(self.agreement, theirs.agreement);
        self.explained(theirs, [rank, other_rank], agreement.map(str::to_owned))
    }

    /// Returns the same error with the difference of the two ranks' agreements.
    pub(crate) fn explained(
        &self,
        theirs: &CallKey,
        [rank, other_rank]: [u32; 2],
        agreement: Option<String>,
    ) -> Error {
        // A call on whole tensors outside passes has an agreement of only those parts that never change. Compared with
        // another call's, it would seem to differ in the other parts.
        let is_comparable = self.is_of_tensors() == theirs.is_of_tensors();
        let agreement = agreement.filter(|_| is_comparable);
        if is_comparable && self.kind == theirs.kind && self.pass != theirs.pass && agreement.is_none() {
            // Ranks that agree on everything make the same sums in a pass, unless one of them leaves the pass.
            if self.pass > theirs.pass {
                return Error::LeftPass { rank, pass: theirs.pass, other_rank, theirs: theirs.to_string() };
            }
            let theirs = self.to_string();
            return Error::LeftPass { rank: other_rank, pass: self.pass, other_rank: rank, theirs };
        }
        let fields = [
            ("kind", self.kind != theirs.kind),
            ("pass", self.pass != theirs.pass),
            ("bucket", self.bucket != theirs.bucket),
            ("type", self.dtype != theirs.dtype),
            ("length", self.bytes != theirs.bytes),
            (agreement.as_deref().unwrap_or_default(), agreement.is_some()),
        ];
        let differing: Vec<&str> =
            fields.iter().filter(|(_, differs)| *differs).map(|(name, _)| *name).collect();
        Error::Mismatch {
            rank,
            ours: self.to_string(),
            other_rank,
            theirs: theirs.to_string(),
            differs: differing.join(" and "),
        }
    }
}

impl fmt::Display for CallKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, pass {}", self.kind, self.pass)?;
        if let Some(bucket) = self.bucket {
            write!(f, ", bucket {bucket}")?;
        }
        write!(f, ", {} bytes of {}, agreement {:016x}", self.bytes, self.dtype, self.agreement)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Only the options' lane equals that of `keys()[0]`.
    const OTHER_OPTIONS: u64 = !0x0001_0001_0000_0001;

    fn keys() -> Vec<CallKey> {
        let mut keys = Vec::new();
        for kind in CollectiveKind::ALL {
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                for bucket in [None, Some(0), Some(3), Some(u32::MAX)] {
                    for number in [0, 0x0123_4567_89ab_cdec, u64::MAX - 3] {
                        keys.push(CallKey {
                            kind,
                            pass: number,
                            bucket,
                            dtype,
                            bytes: number,
                            agreement: !number,
                        });
                    }
                }
            }
        }
        keys
    }

    #[test]
    fn every_key_is_read_from_its_own_bytes_and_no_two_keys_share_bytes() {
        let mut seen = std::collections::HashMap::new();
        for key in keys() {
            assert_eq!(CallKey::from_bytes(&key.to_bytes()), Some(key));
            assert_eq!(seen.insert(key.to_bytes(), key), None);
        }
    }

    #[test]
    fn bytes_that_no_key_has_are_refused() {
        let key = CallKey { bytes: 8, bucket: None, ..keys()[0] };
        assert_eq!(CallKey::from_bytes(&key.to_bytes()), Some(key));
        // An unknown kind, type and flag, the byte that stays zero, a bucket without a flag, half an element.
        for (at, value) in [(0, 7), (1, 3), (2, 2), (3, 1), (4, 1), (16, 6)] {
            let mut bytes = key.to_bytes();
            bytes[at] = value;
            assert_eq!(CallKey::from_bytes(&bytes), None, "byte {at}");
        }
    }

    #[test]
    fn a_rank_that_left_a_pass_is_named_whichever_rank_notices() {
        let (ours, theirs) = (keys()[0], CallKey { pass: 1, bucket: Some(3), bytes: 4, ..keys()[0] });
        for error in [ours.mismatch(&theirs, 2, 1), theirs.mismatch(&ours, 1, 2)] {
            assert!(matches!(error, Error::LeftPass { rank: 1, pass: 0, other_rank: 2, .. }), "{error}");
        }
        let error = ours.mismatch(&CallKey { kind: CollectiveKind::Broadcast, ..theirs }, 2, 1);
        assert!(matches!(error, Error::Mismatch { .. }), "a rebuild outside a pass is none that was left");
    }

    #[test]
    fn a_mismatch_names_every_field_that_differs_and_no_other() {
        let key = keys()[0];
        let cases = [
            (CallKey { kind: CollectiveKind::Broadcast, ..key }, "kind"),
            (CallKey { bucket: Some(0), ..key }, "bucket"),
            (CallKey { dtype: DType::F16, ..key }, "type"),
            (CallKey { bytes: 4, ..key }, "length"),
            (CallKey { agreement: OTHER_OPTIONS, ..key }, "options"),
            (CallKey { pass: 1, agreement: OTHER_OPTIONS, ..key }, "pass and options"),
            (CallKey { dtype: DType::F16, bytes: 4, ..key }, "type and length"),
            (CallKey { kind: CollectiveKind::AllGather, agreement: OTHER_OPTIONS, ..key }, "kind"),
        ];
        for (theirs, named) in cases {
            match key.mismatch(&theirs, 2, 1) {
                Error::Mismatch { rank: 2, other_rank: 1, differs, .. } => assert_eq!(differs, named),
                other => panic!("{other}"),
            }
        }
    }
}
