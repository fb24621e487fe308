//! The agreement: a number computed from all values that must be equal on all ranks, and a text that describes how two
//! ranks differ.
//!
//! The number has four lanes of 16 bits, one for each part of the agreement. A part's hash has 48 bits and fills the
//! three lanes that belong to the other parts. The number is the exclusive OR (XOR) of all parts' hashes. If exactly
//! one part differs between two ranks, the two numbers are equal only in that part's own lane. The numbers therefore
//! show which part differs. A difference stays undetected with a probability of 2^-48.
//!
//! `Words` holds the text of each part, with a line for each value. Each collective call of a stepper carries the
//! stepper's `Words`. If ranks are threads of one process, an error can therefore quote both ranks' values. If each
//! rank is a process, each rank adds only its own text to its error. The text is written to buffers that are allocated
//! once.

use std::fmt::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::Error;

const LANE_BITS: u32 = 16;
const LANE_MASK: u64 = (1 << LANE_BITS) - 1;
const HASH_MASK: u64 = (1 << (3 * LANE_BITS)) - 1;

/// A part of the agreement. Each variant's discriminant is the number of the part's lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Agreed {
    /// Parameters, buckets, and the optimizers that step them.
    Layout,
    /// Options of the stepper, and the type in which gradients are sent.
    Options,
    /// Learning rates and all other hyperparameters.
    Hyperparameters,
    /// Frozen, unused and written parameters, values that were loaded or set by hand, and the number of micro-batches
    /// if each micro-batch is summed.
    Loaded,
}

impl Agreed {
    const ALL: [Agreed; 4] = [Agreed::Layout, Agreed::Options, Agreed::Hyperparameters, Agreed::Loaded];

    fn name(self) -> &'static str {
        match self {
            Agreed::Layout => "layout: parameters, buckets, or the optimizers that step them",
            Agreed::Options => "options",
            Agreed::Hyperparameters => "learning rates or other hyperparameters",
            Agreed::Loaded => {
                "frozen, unused or written parameters, loaded values, or how many micro-batches"
            }
        }
    }

    /// Returns the parts that the error text `text` names at its end, in the words of [`difference`].
    pub(super) fn named_by(text: &str) -> impl Iterator<Item = Agreed> {
        Agreed::ALL.into_iter().filter(move |part| text.ends_with(SEVERAL) || text.ends_with(part.name()))
    }

    /// Returns what a part with this hash contributes to the agreement's number.
    pub(crate) fn share(self, hash: u64) -> u64 {
        let at = self as u32 * LANE_BITS;
        let below = (1u64 << at) - 1;
        let hash = mixed(hash) & HASH_MASK;
        // The last lane has no lane above it.
        let above = (hash & !below).checked_shl(LANE_BITS).unwrap_or(0);
        hash & below | above
    }
}

/// Compares the [agreements](crate::collective::CallKey::agreement) of two ranks. Returns the name of the part that
/// differs, or `None` if the agreements are equal.
///
/// ```
/// use instep::op::difference;
/// assert_eq!(difference(7, 7), None);
/// ```
pub fn difference(ours: u64, theirs: u64) -> Option<&'static str> {
    match differing(ours, theirs)[..] {
        _ if ours == theirs => None,
        // A rank that fails to build its stepper sends the complement of the number.
        _ if ours == !theirs => Some("whether it was built"),
        [part] => Some(part.name()),
        _ => Some(SEVERAL),
    }
}

const SEVERAL: &str = "several of layout, options, hyperparameters, frozen, unused or written parameters, loaded values, and micro-batches";

/// Returns the part that differs, or all parts if more than one part differs.
pub(super) fn differing(ours: u64, theirs: u64) -> Vec<Agreed> {
    let is_equal = |part: &Agreed| (ours ^ theirs) >> (*part as u32 * LANE_BITS) & LANE_MASK == 0;
    let own: Vec<Agreed> = Agreed::ALL.into_iter().filter(is_equal).collect();
    if own.len() == 1 { own } else { Agreed::ALL.to_vec() }
}

/// Spreads a change of any bit over all bits (the finaliser of SplitMix64), because FNV-1a mixes the low bits poorly.
fn mixed(hash: u64) -> u64 {
    let hash = (hash ^ hash >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let hash = (hash ^ hash >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ hash >> 31
}

/// Limits on the text of one part: at most `KEPT` bytes are stored, and an error quotes at most `SAID` characters.
const KEPT: usize = 16 << 10;
const SAID: usize = 400;

/// The text of one stepper's agreement.
#[derive(Debug, Default)]
pub struct Words {
    layout: String,
    options: String,
    /// The agreement's number for layout and options alone. Ranks compare this number when they build a stepper.
    fixed: u64,
    /// The last two agreement numbers and their texts. Two entries are needed, because the trainer may be one pass
    /// ahead of the collectives that compare the numbers.
    recent: Mutex<[Recent; 2]>,
}

/// The texts of the parts that may change between passes, and the number that includes these parts.
#[derive(Debug, Default)]
struct Recent {
    number: u64,
    assigned: String,
    hyperparameters: String,
    loaded: String,
}

/// A writer to one of the buffers of a [`Words`]. The writer drops text that does not fit into the buffer.
pub(crate) struct Line<'a>(&'a mut String);

impl Line<'_> {
    /// Returns another writer to the same buffer.
    pub(crate) fn again(&mut self) -> Line<'_> {
        Line(self.0)
    }
}

impl Write for Line<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let fits = self.0.len() + text.len() <= KEPT;
        if fits {
            self.0.push_str(text);
        }
        fits.then_some(()).ok_or(fmt::Error)
    }
}

/// A line of [`Words`] about a parameter that a rank has written and that no pass broadcasts. The line has a hash of
/// the written values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WrittenValues<'a> {
    /// The parameter's index. Lines are sorted by this index.
    pub(crate) param: usize,
    pub(crate) hash: u64,
    pub(crate) name: &'a str,
}

const VALUES: &str = "values of parameter ";

impl fmt::Display for WrittenValues<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let WrittenValues { param, hash, name } = self;
        write!(f, "{VALUES}{param}: {hash:016x} of `{name}`")
    }
}

impl<'a> WrittenValues<'a> {
    /// Parses a line. Returns `None` if the end of the line was cut off.
    fn parse(line: &'a str) -> Option<Self> {
        let (param, rest) = line.strip_prefix(VALUES)?.split_once(": ")?;
        let (hash, name) = rest.split_once(" of `")?;
        let hash = u64::from_str_radix(hash, 16).ok()?;
        Some(WrittenValues { param: param.parse().ok()?, hash, name: name.strip_suffix('`')? })
    }
}

/// Returns a text about the first parameter that only one of two ranks wrote, or to which the two ranks wrote different
/// values.
fn written_apart(ours: &str, theirs: &str, rank: u32, other_rank: u32) -> Option<String> {
    let (ours, theirs) = ours.lines().zip(theirs.lines()).find(|(ours, theirs)| ours != theirs)?;
    let alone = |written: WrittenValues<'_>, rank, other| {
        format!("`{}` was written on rank {rank} and not on rank {other}", written.name)
    };
    match (WrittenValues::parse(ours), WrittenValues::parse(theirs)) {
        (Some(ours), Some(theirs)) if ours.param == theirs.param => {
            let name = ours.name;
            Some(format!("`{name}` was written with other values on rank {rank} than on rank {other_rank}"))
        }
        (Some(ours), Some(theirs)) if theirs.param < ours.param => Some(alone(theirs, other_rank, rank)),
        (Some(ours), _) => Some(alone(ours, rank, other_rank)),
        (None, Some(theirs)) => Some(alone(theirs, other_rank, rank)),
        (None, None) => None,
    }
}

impl Words {
    pub(crate) fn new(fixed: u64, layout: fmt::Arguments<'_>, options: &str) -> Arc<Words> {
        let mut words = Words { fixed, options: options.to_owned(), ..Words::default() };
        // Text that does not fit is left out.
        let _ = Line(&mut words.layout).write_fmt(layout);
        Arc::new(words)
    }

    /// Returns the agreement's number for layout and options alone. It never changes.
    pub(crate) fn fixed(&self) -> u64 {
        self.fixed
    }

    /// Calls `write` with the buffers of the parts that may change, and stores the number that `write` returns.
    pub(crate) fn update(&self, write: impl FnOnce([Line<'_>; 3]) -> u64) -> u64 {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        recent.swap(0, 1);
        let Recent { number, assigned, hyperparameters, loaded } = &mut recent[0];
        let parts = [assigned, hyperparameters, loaded];
        *number = write(parts.map(|part| {
            part.clear();
            Line(part)
        }));
        *number
    }

    /// Returns the text of one part of the agreement with this number, or `None` if no such agreement is stored.
    fn part(&self, number: u64, part: Agreed) -> Option<String> {
        let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let recent = recent.iter().find(|recent| recent.number == number);
        if recent.is_none() && self.fixed != number {
            return None;
        }
        let of_recent = |text: fn(&Recent) -> &String| recent.map(text).cloned().unwrap_or_default();
        Some(match part {
            Agreed::Layout => format!("{}\n{}", self.layout, of_recent(|recent| &recent.assigned)),
            Agreed::Options => self.options.clone(),
            Agreed::Hyperparameters => of_recent(|recent| &recent.hyperparameters),
            Agreed::Loaded => of_recent(|recent| &recent.loaded),
        })
    }

    /// Adds this rank's text to an error that only names the part that differs. `ours` is the number that this rank
    /// sent.
    pub(crate) fn add_to(&self, error: Error, ours: u64) -> Error {
        let Error::Mismatch { rank, ours: first, other_rank, theirs: other, differs } = error else {
            return error;
        };
        let mut told = differs.clone();
        let number = format!("{ours:016x}");
        let sides = [(rank, &first), (other_rank, &other)];
        if let Some((rank, _)) = sides.into_iter().find(|(_, said)| said.ends_with(&number)) {
            // The number includes unused parameters, but the words do not. An error with only one rank's words could
            // therefore name values that are equal.
            for part in Agreed::named_by(&differs).filter(|part| *part != Agreed::Loaded) {
                let words = self.part(ours, part).map(|words| said(&words, 0)).unwrap_or_default();
                if !words.is_empty() {
                    told.push_str(&format!(" [rank {rank} has `{words}`]"));
                }
            }
        }
        Error::Mismatch { rank, ours: first, other_rank, theirs: other, differs: told }
    }
}

/// The number of one rank's agreement, and that rank's [`Words`] if this process has them.
pub(crate) type Said<'a> = (u64, Option<&'a Arc<Words>>);

/// Describes how two ranks' agreements differ. The text quotes both ranks' values if this process has the [`Words`] of
/// both. Returns `None` if the agreements are equal.
pub(crate) fn explain(ours: Said<'_>, theirs: Said<'_>, [rank, other_rank]: [u32; 2]) -> Option<String> {
    let mut text = difference(ours.0, theirs.0)?.to_owned();
    let (Some(our_words), Some(their_words)) = (ours.1, theirs.1) else { return Some(text) };
    for part in differing(ours.0, theirs.0) {
        let (Some(ours), Some(theirs)) = (our_words.part(ours.0, part), their_words.part(theirs.0, part))
        else {
            continue;
        };
        let named =
            (part == Agreed::Loaded).then(|| written_apart(&ours, &theirs, rank, other_rank)).flatten();
        let values = || {
            let (ours, theirs) = first_differing(&ours, &theirs)?;
            Some(format!("rank {rank} has `{ours}`, rank {other_rank} `{theirs}`"))
        };
        if let Some(told) = named.or_else(values) {
            text.push_str(&format!(" [{told}]"));
        }
    }
    Some(text)
}

/// Returns the first pair of lines in which two texts differ. If the difference is far from the start of the lines,
/// their start is cut off. If one text has fewer lines, an empty line replaces the missing line.
fn first_differing(ours: &str, theirs: &str) -> Option<(String, String)> {
    let (mut ours, mut theirs) = (ours.lines(), theirs.lines());
    loop {
        match (ours.next(), theirs.next()) {
            (None, None) => return None,
            (ours, theirs) if ours == theirs => {}
            (ours, theirs) => {
                let (ours, theirs) = (ours.unwrap_or_default(), theirs.unwrap_or_default());
                let [ours, theirs] = [short(ours, theirs), short(theirs, ours)];
                let equal = ours.chars().zip(theirs.chars()).take_while(|(a, b)| a == b).count();
                let from = if equal > SAID / 2 { equal - SAID / 4 } else { 0 };
                return Some((said(&ours, from), said(&theirs, from)));
            }
        }
    }
}

/// If `line` ends with fields in braces, keeps only the first field that differs from the corresponding field of
/// `other`.
fn short(line: &str, other: &str) -> String {
    let (Some((name, fields)), Some((_, others))) = (line.split_once("{ "), other.split_once("{ ")) else {
        return line.to_owned();
    };
    let differs = |(field, other): &(&str, &str)| field != other;
    match fields.split(", ").zip(others.split(", ")).find(differs) {
        Some((field, _)) => format!("{name}{{ {} }}", field.trim_end_matches(" }")),
        None => line.to_owned(),
    }
}

/// Returns a part of a text on one line: at most `SAID` characters, starting at character `from`.
fn said(words: &str, from: usize) -> String {
    let characters = words.trim_end().chars().skip(from);
    let line: String = characters.take(SAID).collect::<String>().replace('\n', ", ");
    let (before, after) = (if from > 0 { "..." } else { "" }, words.trim_end().chars().nth(from + SAID));
    format!("{before}{line}{}", after.map_or("", |_| "..."))
}

#[cfg(test)]
#[path = "../../tests/unit/op/agreement.rs"]
mod tests;
