//! Sends a group's id in a file. Rank 0 writes the file in a folder that all ranks see. The other ranks read it.
//!
//! A reader sees the complete file or no file. Rank 0 removes the file once all ranks have joined. A rank may first
//! read an old file, from an earlier run with the same name. Once rank 0 has replaced the old file, the rank joins
//! again with the new id.

use std::cell::Cell;
use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::{Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use crate::cuda::nccl::shared::lock;
use crate::cuda::nccl::{Options, UniqueId};
use crate::error::{Error, Result};

const POLL: Duration = Duration::from_millis(10);

/// Each id with which a rank of this process, other than rank 0, has joined or tried to join, together with that rank.
/// Later groups and later tries of this process have other ids.
static TRIED: Mutex<Vec<(UniqueId, u32)>> = Mutex::new(Vec::new());

/// The first id that this process has written. Every file that this process writes contains this id. Files of other
/// processes do not contain this id.
static FIRST: OnceLock<UniqueId> = OnceLock::new();

#[derive(Clone, Copy, Debug, PartialEq)]
struct Found {
    /// The value of `FIRST` in the process that wrote this file.
    run: UniqueId,
    id: UniqueId,
}

/// Joins the ranks that read the file. `connect` takes the id, the time that is left, and a check. `connect` stops
/// waiting if the check returns an error.
pub(super) fn meet<T>(
    options: &Options,
    path: &Path,
    make_id: impl FnOnce() -> Result<UniqueId>,
    connect: impl Fn(&UniqueId, Duration, &dyn Fn() -> Result<()>) -> Result<T>,
) -> Result<T> {
    if options.rank == 0 {
        let id = make_id()?;
        let run = *FIRST.get_or_init(|| id);
        write(path, &text(options, &Found { run, id })).map_err(Error::file(path.display()))?;
        let outcome = connect(&id, options.deadline, &|| Ok(()));
        // After a success, all ranks have read the file. After a failure, no rank should read it. The file of a later
        // run is kept.
        if read(options, path).is_ok_and(|now| now.id == id) {
            let _ = fs::remove_file(path);
        }
        return outcome;
    }
    let begun = Instant::now();
    let left = || options.deadline.saturating_sub(begun.elapsed());
    let mut refused = None;
    loop {
        let found = match (read_until(options, path, left, &refused), refused) {
            (Err(_), Some((_, error))) => return Err(error),
            (found, _) => found?,
        };
        let looked = Cell::new(Instant::now());
        let wanted = || {
            if looked.get().elapsed() < POLL {
                return Ok(());
            }
            looked.set(Instant::now());
            // Rank 0 may know earlier than this rank that all ranks have joined, and may have begun the next group.
            let is_stale = read(options, path).is_ok_and(|now| now.run != found.run);
            let why = || "it has written another id".to_owned();
            if is_stale { Err(Error::PeerLost { rank: 0, why: why() }) } else { Ok(()) }
        };
        let outcome = connect(&found.id, left(), &wanted);
        lock(&TRIED).push((found.id, options.rank));
        match outcome {
            // If no rank answers, the id may be left over from another run, and rank 0 may still write a new one.
            Err(error @ (Error::Collective { .. } | Error::PeerLost { .. })) if !left().is_zero() => {
                refused = Some((found, error));
            }
            outcome => return outcome,
        }
    }
}

/// Waits for a file of this job that differs from the refused file. The id in the file must be new to this rank.
fn read_until(
    options: &Options,
    path: &Path,
    left: impl Fn() -> Duration,
    refused: &Option<(Found, Error)>,
) -> Result<Found> {
    loop {
        let why = match read(options, path) {
            Ok(found) if refused.as_ref().is_some_and(|(refused, _)| *refused == found) => {
                "nobody answers by its id".to_owned()
            }
            Ok(found) if lock(&TRIED).contains(&(found.id, options.rank)) => {
                "it has the id of an earlier group or try".to_owned()
            }
            Ok(found) => return Ok(found),
            Err(why) => why,
        };
        if left().is_zero() {
            let call = format!("reading {}: {why}", path.display());
            return Err(Error::deadline(options.rank, call, options.deadline, vec![0]));
        }
        thread::sleep(POLL);
    }
}

/// Returns the first line of the file, by which ranks recognise the file of their job.
fn title(options: &Options) -> String {
    format!("instep's NCCL id, version 1, job {:?}, {} ranks\n", options.job, options.world_size)
}

fn text(options: &Options, found: &Found) -> String {
    let line = |id: &UniqueId| id.iter().map(|byte| format!("{byte:02x}")).chain(["\n".to_owned()]).collect();
    [title(options), line(&found.run), line(&found.id)].concat()
}

fn read(options: &Options, path: &Path) -> Result<Found, String> {
    let text = fs::read_to_string(path).map_err(|error| error.to_string())?;
    let lines =
        text.strip_prefix(&title(options)).ok_or("it is another job's, or of another number of ranks")?;
    let mut ids = lines.lines().map(|line| {
        let byte = |pair: &[u8; 2]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        let bytes: Option<Vec<u8>> = line.as_bytes().as_chunks().0.iter().map(byte).collect();
        bytes.and_then(|bytes| bytes.try_into().ok())
    });
    match (ids.next().flatten(), ids.next().flatten()) {
        (Some(run), Some(id)) => Ok(Found { run, id }),
        _ => Err("it has no id of 128 bytes".to_owned()),
    }
}

/// Writes the complete file or nothing. Only this user can read the file.
fn write(path: &Path, text: &str) -> io::Result<()> {
    let mut beside = OsString::from(path);
    beside.push(format!(".{}", std::process::id()));
    let beside = Path::new(&beside);
    // A killed process with the same process id may have left a partial file.
    let _ = fs::remove_file(beside);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(beside)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    written.and_then(|()| fs::rename(beside, path)).inspect_err(|_| drop(fs::remove_file(beside)))
}

#[cfg(test)]
#[path = "../../../tests/unit/cuda/nccl/file.rs"]
mod tests;
