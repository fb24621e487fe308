//! One file that ranks write together: each rank writes its own part of every tensor.
//!
//! Rank 0 creates the file, and the other ranks find it by a random number in its name. Each rank reports its failures
//! to the others, so all ranks make the same collective calls. The file is renamed only after all ranks have written
//! and flushed.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use super::extras::Extras;
use super::file::{open_partial, replace_together};
use super::safetensors::write_values;
use super::save_with;
use super::write::{Outline, Summed, Tensor, checksum_bytes, failed, tensors};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::stepper::{Stepper, WORD_BYTES};

/// The length of the fixed part of rank 0's message. The fixed part has four numbers: a flag that says whether rank 0
/// has failed, and the fields of [`Start`].
const WORD_FRONT_BYTES: usize = 4 * size_of::<u64>();

/// Bytes of an element in the file.
const ELEMENT_BYTES: u64 = DType::F32.bytes();

/// The data that rank 0 sends to all ranks before they write their parts.
#[derive(Clone, Copy, Default)]
struct Start {
    /// The random number in the name of the file.
    number: u64,
    /// The offset of the first tensor.
    first_bytes: u64,
    /// If true, only rank 0 writes the parameters that are full on every rank and have no master, because their values
    /// may differ between ranks.
    rank_0s: bool,
}

/// The part of one tensor that a rank wrote.
struct Written {
    checksum: u32,
    bytes: u64,
}

/// Saves to one file that all ranks write **together**: each rank writes its own [shards](crate::Strategy), so no rank
/// gathers the shards of other ranks. The file has the same bytes as a file of [`save`](super::save), and
/// [`load`](super::load) reads it with any strategy. All ranks must make this call, each with a path to the same file.
/// All ranks must be able to reach the file system of this path. With
/// [`shard_size`](crate::StepperBuilder::shard_size), only the ranks of the first group write, and the other ranks
/// wait. Without shards, this call is the same as `save`.
///
/// ```
/// use instep::checkpoint;
/// # use instep::{AdamW, Layout, Stepper, Strategy, in_process};
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("last.safetensors");
/// let layout = Layout::builder().param("w", 4096).build()?;
/// in_process(4, |comm| {
///     let builder = Stepper::builder(&layout, AdamW::default()).strategy(Strategy::Fsdp);
///     let mut stepper = builder.host(comm)?;
///     checkpoint::save_together(&stepper, &path)?; // each rank writes a quarter
///     checkpoint::load(&mut stepper, &path)
/// })?;
/// # Ok::<(), instep::Error>(())
/// ```
///
/// Rank 0 creates the same kind of hidden file as [`save`](super::save), and gives it the length of everything before
/// the checksums. Rank 0 writes the scalars, and the tensors that have no shards. Rank 0 also combines the checksums of
/// all ranks' parts and writes the combined checksums. Each rank flushes its parts to disk. Then rank 0 flushes the
/// whole file, renames it, and flushes the folder. No rank returns `Ok` before rank 0 has flushed the folder. The file
/// system must allow several hosts to write different bytes of one file. Loading checks every byte.
///
/// # Ordering
/// Waits for all steps and for all ranks. The [deadline](crate::StepperBuilder::deadline) must leave the slowest rank
/// time to write and flush its parts. Allocates space for the longest part of a tensor.
///
/// # Errors
/// Errors as for [`save`](super::save), on **all** ranks if one rank fails. The failed rank returns its own error, and
/// the others return a `Checkpoint` error that names the failed rank. A rank that does not find rank 0's file also
/// returns `Checkpoint`. After these errors, the old file is unchanged, the partial file is removed, and the stepper
/// still works. `PeerLost`, `Mismatch` or `Deadline` if a rank does not take part. If a rank is lost at the very end,
/// the new file may already have replaced the old file. In this case, the new file is complete.
pub fn save_together<D: Device>(stepper: &Stepper<D>, path: impl AsRef<Path>) -> Result<()> {
    save_together_with(stepper, &Extras::default(), path)
}

/// Does the same as [`save_together`], and also saves the trainer's own scalars and texts. Only the scalars and texts
/// of rank 0 are saved.
///
/// # Ordering
/// Ordering as for [`save_together`].
///
/// # Errors
/// Errors as for [`save`](super::save), on all ranks if one rank fails. `PeerLost`, `Mismatch` or `Deadline` if a rank
/// does not take part. `Config` for a name in `extras` that the checkpoint uses itself.
pub fn save_together_with<D: Device>(
    stepper: &Stepper<D>,
    extras: &Extras,
    path: impl AsRef<Path>,
) -> Result<()> {
    if !stepper.has_parts() {
        return save_with(stepper, extras, path);
    }
    stepper.settle_together()?;
    match stepper.rank() {
        0 => lead(stepper, extras, path.as_ref()),
        _ => follow(stepper, path.as_ref()),
    }
}

/// Makes rank 0's collective calls. The first call starts the other ranks, or reports that rank 0 has failed. The later
/// calls collect the checksums of the parts, and tell the other ranks whether the save has succeeded.
fn lead<D: Device>(stepper: &Stepper<D>, extras: &Extras, path: &Path) -> Result<()> {
    let rank_0s = stepper.is_broadcast_due();
    let outcome = Outline::new(stepper, extras).and_then(|outline| {
        replace_together(path, |file, number| {
            let mut out = Summed::new(&mut *file);
            let mut checksums = outline.write(&mut out).map_err(failed)?;
            let first_bytes = file.stream_position().map_err(failed)?;
            let elements: u64 = outline.tensors.iter().map(|tensor| tensor.elements).sum();
            let end = first_bytes + ELEMENT_BYTES * elements;
            file.set_len(end).map_err(failed)?;
            let start = Start { number, first_bytes, rank_0s };
            broadcast_start(stepper, Ok(start))?;
            let own = write_parts(stepper, file, start, &outline.tensors);
            let all = stepper.gather_messages(&report(&own))?;
            let own = own?;
            checksums.extend(joined(&outline.tensors, own, &all)?);
            file.seek(SeekFrom::Start(end)).map_err(failed)?;
            file.write_all(&checksum_bytes(&checksums)).map_err(failed)
        })
    });
    // If this rank failed before its first message, this message is its first. If the group has failed, no rank
    // receives the message.
    let sent = broadcast_start(stepper, outcome.clone().map(|()| Start::default()));
    outcome.and(sent.map(drop))
}

/// Makes the collective calls of a rank that is not rank 0.
fn follow<D: Device>(stepper: &Stepper<D>, path: &Path) -> Result<()> {
    let start = receive(stepper)?;
    let mut own = Ok(Vec::new());
    if stepper.is_of_first_group() {
        own = tensors(stepper).and_then(|tensors| {
            let mut file = open_partial(path, start.number)?;
            let written = write_parts(stepper, &mut file, start, &tensors)?;
            file.sync_all().map_err(failed)?;
            Ok(written)
        });
        stepper.gather_messages(&report(&own))?;
    }
    let end = receive(stepper);
    own.and(end.map(drop))
}

/// Writes this rank's part of each tensor.
fn write_parts<D: Device>(
    stepper: &Stepper<D>,
    file: &mut File,
    Start { first_bytes, rank_0s, .. }: Start,
    tensors: &[Tensor],
) -> Result<Vec<Written>> {
    let (mut at, mut values, mut all) = (first_bytes, Vec::new(), Vec::with_capacity(tensors.len()));
    for tensor in tensors {
        let part = stepper.read_part(tensor.name(), rank_0s, &mut values)?;
        file.seek(SeekFrom::Start(at + ELEMENT_BYTES * part.start)).map_err(failed)?;
        let mut out = Summed::new(&mut *file);
        write_values(&mut out, DType::F32, &values).map_err(failed)?;
        all.push(Written { checksum: out.take_checksum(), bytes: ELEMENT_BYTES * values.len() as u64 });
        at += ELEMENT_BYTES * tensor.elements;
    }
    Ok(all)
}

/// Combines the checksums of all ranks' parts. The parts of a tensor follow one another in the order of the ranks.
fn joined(tensors: &[Tensor], own: Vec<Written>, all: &[Vec<u8>]) -> Result<Vec<u32>> {
    let mut parts = vec![own];
    for (rank, report) in all.iter().enumerate().skip(1) {
        parts.push(reported(report).map_err(|why| Error::checkpoint(format_args!("rank {rank}"), why, ""))?);
    }
    let mut checksums = Vec::with_capacity(tensors.len());
    for (k, tensor) in tensors.iter().enumerate() {
        let (mut hasher, mut bytes) = (crc32fast::Hasher::new(), 0);
        for part in parts.iter().filter_map(|parts| parts.get(k)) {
            hasher.combine(&crc32fast::Hasher::new_with_initial_len(part.checksum, part.bytes));
            bytes += part.bytes;
        }
        if bytes != ELEMENT_BYTES * tensor.elements {
            let wrong = format_args!("ranks wrote {bytes} bytes of {}", ELEMENT_BYTES * tensor.elements);
            return Err(Error::checkpoint("the parts of a tensor", wrong, "give all ranks one layout"));
        }
        if bytes > 0 {
            checksums.push(hasher.finalize());
        }
    }
    Ok(checksums)
}

/// Encodes a rank's parts, or the reason for its failure, as bytes. The first byte is 0 if parts follow, and 1 if the
/// reason for a failure follows.
fn report(own: &Result<Vec<Written>>) -> Vec<u8> {
    match own {
        Ok(all) => {
            let bytes = |part: &Written| [u64::from(part.checksum), part.bytes].map(u64::to_le_bytes);
            [0].into_iter().chain(all.iter().flat_map(bytes).flatten()).collect()
        }
        Err(error) => [1].into_iter().chain(error.to_string().into_bytes()).collect(),
    }
}

fn reported(bytes: &[u8]) -> Result<Vec<Written>, String> {
    let (kind, rest) = bytes.split_first().ok_or("said nothing")?;
    if *kind != 0 {
        return Err(String::from_utf8_lossy(rest).into_owned());
    }
    let (numbers, _) = rest.as_chunks();
    let numbers: Vec<u64> = numbers.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
    let (parts, _) = numbers.as_chunks();
    Ok(parts.iter().map(|[checksum, bytes]| Written { checksum: *checksum as u32, bytes: *bytes }).collect())
}

/// Broadcasts a `Start`, or rank 0's error if rank 0 has failed.
fn broadcast_start<D: Device>(stepper: &Stepper<D>, said: Result<Start>) -> Result<()> {
    let (numbers, text) = match said {
        Ok(Start { number, first_bytes, rank_0s }) => {
            ([0, number, first_bytes, rank_0s.into()], String::new())
        }
        Err(error) => ([1, 0, 0, 0], error.to_string()),
    };
    let mut word = [b' '; WORD_BYTES];
    let (front, rest) = word.split_at_mut(WORD_FRONT_BYTES);
    front.copy_from_slice(numbers.map(u64::to_le_bytes).as_flattened());
    let shown = text.len().min(rest.len());
    rest[..shown].copy_from_slice(&text.as_bytes()[..shown]);
    stepper.broadcast_message(&mut word)
}

/// Receives rank 0's message.
fn receive<D: Device>(stepper: &Stepper<D>) -> Result<Start> {
    let mut word = [0; WORD_BYTES];
    stepper.broadcast_message(&mut word)?;
    let (front, text) = word.split_at(WORD_FRONT_BYTES);
    let mut numbers = front.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
    let mut next = || numbers.next().unwrap_or(0);
    match next() {
        0 => Ok(Start { number: next(), first_bytes: next(), rank_0s: next() != 0 }),
        _ => {
            let why = String::from_utf8_lossy(text);
            Err(Error::checkpoint("the checkpoint", why.trim_end(), ""))
        }
    }
}
