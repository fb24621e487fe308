//! The part of a call that must be equal on all ranks. The key is a plain value that can be printed. Processes exchange
//! a key as 32 bytes.
//!
//! A key contains no memory address, so ranks of different processes can compare keys. `from_bytes` accepts only bytes
//! that `to_bytes` makes, because the sender is not trusted.

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
    /// Length of the buffers in bytes. If the source and the destination differ in length, this is the length of the
    /// longer buffer.
    pub bytes: u64,
    /// A hash of the values that must be equal on all ranks, such as layout, options, hyperparameters and frozen
    /// parameters. [`difference`](crate::op::difference) compares two such hashes, and returns the name of the part
    /// that differs, or a text that lists all parts if several may differ.
    pub agreement: u64,
}

impl CallKey {
    /// The number of bytes that [`to_bytes`](Self::to_bytes) returns.
    pub const BYTES: usize = 32;

    /// Returns the key as bytes. The bytes are the same on every platform.
    ///
    /// # Shapes
    /// Bytes 0 to 3 are the kind, the element type, 1 if there is a bucket (otherwise 0), and a zero byte. Bytes 4 to 7
    /// are the bucket. Pass, length and agreement follow, with eight bytes each. Numbers are little-endian.
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

    /// Reads a key from bytes. Returns `None` if [`to_bytes`](Self::to_bytes) never returns these bytes, or if the
    /// key's length is not a whole number of elements.
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

    /// Returns whether the call gathers tensors outside a pass, for example in
    /// [`Stepper::gather`](crate::Stepper::gather).
    fn is_of_tensors(&self) -> bool {
        self.kind == CollectiveKind::AllGather && self.bucket.is_none()
    }

    /// Returns the error for two ranks that made different calls: `rank` made this call, and `other_rank` made
    /// `theirs`. The error is `LeftPass` if the two calls differ in the pass but not in the kind or the agreement.
    /// Otherwise it is `Mismatch`.
    pub fn mismatch(&self, theirs: &CallKey, rank: u32, other_rank: u32) -> Error {
        let agreement = difference(self.agreement, theirs.agreement);
        self.explained(theirs, [rank, other_rank], agreement.map(str::to_owned))
    }

    /// Returns the same error as [`mismatch`](Self::mismatch). `agreement` describes the difference between the two
    /// ranks' agreements, if any.
    pub(crate) fn explained(
        &self,
        theirs: &CallKey,
        [rank, other_rank]: [u32; 2],
        agreement: Option<String>,
    ) -> Error {
        // The agreement of a call on whole tensors outside passes covers only the parts that never change. A comparison
        // with the agreement of another call would therefore report a difference in the other parts.
        let is_comparable = self.is_of_tensors() == theirs.is_of_tensors();
        let agreement = agreement.filter(|_| is_comparable);
        if is_comparable && self.kind == theirs.kind && self.pass != theirs.pass && agreement.is_none() {
            // Ranks that agree on everything make the same sums in a pass, unless a rank leaves the pass.
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
#[path = "../../tests/unit/collective/key.rs"]
mod tests;
