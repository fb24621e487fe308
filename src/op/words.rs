//! The words of an agreement: what each of its parts says, a line for a value, for the error of ranks that differ.
//!
//! The steppers of this process write them down here, so ranks that are threads find each other's. Of a rank in another
//! process only the number is known. Writing keeps to buffers that it has once made.

use std::fmt::{self, Write};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::agreement::{Agreed, differing};
use super::difference;

/// Most bytes that are kept of one part, and most that an error says of it.
const KEPT: usize = 16 << 10;
const SAID: usize = 400;

/// The words of one stepper.
#[derive(Debug)]
pub(crate) struct Words(Mutex<Told>);

#[derive(Debug, Default)]
struct Told {
    layout: String,
    options: String,
    /// The number of these two parts alone, by which steppers that are built compare themselves.
    fixed: u64,
    /// The last two numbers: the trainer may be a pass ahead of the sums that are compared.
    recent: [Recent; 2],
}

/// The options that may change between passes, and their hash.
#[derive(Debug, Default)]
struct Recent {
    number: u64,
    assigned: String,
    hyperparameters: String,
    loaded: String,
}

/// A buffer for [`Words::tell`], which drops what is too long.
pub(crate) struct Line<'a>(&'a mut String);

impl Line<'_> {
    /// To be written on by two.
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

/// The values that one rank wrote to a parameter that no broadcast makes equal: a line of the agreement's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WrittenValues<'a> {
    /// Ranks list parameters in this order.
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
    /// Reads a whole line. A line that did not fit is none.
    fn parse(line: &'a str) -> Option<Self> {
        let (param, rest) = line.strip_prefix(VALUES)?.split_once(": ")?;
        let (hash, name) = rest.split_once(" of `")?;
        let hash = u64::from_str_radix(hash, 16).ok()?;
        Some(WrittenValues { param: param.parse().ok()?, hash, name: name.strip_suffix('`')? })
    }
}

/// Names the first parameter to which ranks wrote different values, or to which one of them wrote nothing.
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

/// All steppers of this process that are alive.
static KNOWN: Mutex<Vec<Weak<Words>>> = Mutex::new(Vec::new());

impl Words {
    pub(crate) fn new(fixed: u64, layout: fmt::Arguments<'_>, options: &str) -> Arc<Words> {
        let mut told = Told { fixed, options: options.to_owned(), ..Told::default() };
        // What does not fit is left out.
        let _ = Line(&mut told.layout).write_fmt(layout);
        let words = Arc::new(Words(Mutex::new(told)));
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|words| words.strong_count() > 0);
        known.push(Arc::downgrade(&words));
        words
    }

    /// Lets `write` fill the buffers of the parts that may change, and takes the number that it returns.
    pub(crate) fn tell(&self, write: impl FnOnce([Line<'_>; 3]) -> u64) -> u64 {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        told.recent.swap(0, 1);
        let Recent { number, assigned, hyperparameters, loaded } = &mut told.recent[0];
        let parts = [assigned, hyperparameters, loaded];
        *number = write(parts.map(|part| {
            part.clear();
            Line(part)
        }));
        *number
    }

    /// Returns the part of an agreement with this number.
    fn part(&self, number: u64, part: Agreed) -> Option<String> {
        let told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let recent = told.recent.iter().find(|recent| recent.number == number);
        if recent.is_none() && told.fixed != number {
            return None;
        }
        let of_recent = |text: fn(&Recent) -> &String| recent.map(text).cloned().unwrap_or_default();
        Some(match part {
            Agreed::Layout => format!("{}\n{}", told.layout, of_recent(|recent| &recent.assigned)),
            Agreed::Options => told.options.clone(),
            Agreed::Hyperparameters => of_recent(|recent| &recent.hyperparameters),
            Agreed::Loaded => of_recent(|recent| &recent.loaded),
        })
    }
}

fn known(number: u64, part: Agreed) -> Option<String> {
    let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner).clone();
    known.iter().filter_map(Weak::upgrade).find_map(|words| words.part(number, part))
}

/// Returns what two ranks' agreements differ in, with the values of each rank that this process knows; `None` if they
/// are equal.
pub(crate) fn explain(ours: u64, theirs: u64, rank: u32, other_rank: u32) -> Option<String> {
    let mut text = difference(ours, theirs)?.to_owned();
    for part in differing(ours, theirs) {
        let (ours, theirs) = (known(ours, part), known(theirs, part));
        // Writing to a string does not fail.
        let _ = match (ours, theirs) {
            (Some(ours), Some(theirs))
                if part == Agreed::Loaded
                    && let Some(named) = written_apart(&ours, &theirs, rank, other_rank) =>
            {
                write!(text, " [{named}]")
            }
            (Some(ours), Some(theirs)) => {
                let lines = first_differing(&ours, &theirs);
                lines.map_or(Ok(()), |(ours, theirs)| {
                    write!(text, " [rank {rank} has `{ours}`, rank {other_rank} `{theirs}`]")
                })
            }
            // Unused parameters are in the number, and in nobody's words: those of one rank alone would blame what is equal.
            (Some(_), None) | (None, Some(_)) if part == Agreed::Loaded => Ok(()),
            (Some(words), None) => write!(text, " [rank {rank} has `{}`]", said(&words, 0)),
            (None, Some(words)) => write!(text, " [rank {other_rank} has `{}`]", said(&words, 0)),
            (None, None) => Ok(()),
        };
    }
    Some(text)
}

/// The first lines that differ, from a little before their difference: a rank that has fewer shows nothing.
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

/// A line of fields in braces with none but the first field that differs from the other rank's.
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

/// On one line, and not too long for an error; without the first characters.
fn said(words: &str, from: usize) -> String {
    let characters = words.trim_end().chars().skip(from);
    let line: String = characters.take(SAID).collect::<String>().replace('\n', ", ");
    let (before, after) = (if from > 0 { "..." } else { "" }, words.trim_end().chars().nth(from + SAID));
    format!("{before}{line}{}", after.map_or("", |_| "..."))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agreement(options: &str, rate: &str) -> (u64, Arc<Words>) {
        let hash = |text: &str| crate::layout::fold(7, text.as_bytes());
        let fixed = Agreed::Layout.share(1) ^ Agreed::Options.share(hash(options));
        let words = Words::new(fixed, format_args!("w of 3"), options);
        let number = words.tell(|[_, mut hyperparameters, _]| {
            hyperparameters.write_str(rate).unwrap();
            fixed ^ Agreed::Hyperparameters.share(hash(rate))
        });
        (number, words)
    }

    #[test]
    fn what_differs_is_told_with_both_ranks_values_and_with_one_where_the_other_is_unknown() {
        let (ours, _words) = agreement("mode: Eager\nclip: None", "group a: lr 0.5\ngroup b: lr 0.25");
        let (theirs, _kept) = agreement("mode: Eager\nclip: Some(1.0)", "group a: lr 0.5\ngroup b: lr 0.25");
        let told = explain(ours, theirs, 2, 1).unwrap();
        assert_eq!(told, "options [rank 2 has `clip: None`, rank 1 `clip: Some(1.0)`]");
        let (theirs, gone) = agreement("mode: Eager\nclip: None", "group a: lr 0.5\ngroup b: lr 0.125");
        let told = explain(ours, theirs, 0, 1).unwrap();
        assert!(told.ends_with("[rank 0 has `group b: lr 0.25`, rank 1 `group b: lr 0.125`]"), "{told}");
        drop(gone);
        let told = explain(ours, theirs, 0, 1).unwrap();
        assert!(told.ends_with("[rank 0 has `group a: lr 0.5, group b: lr 0.25`]"), "{told}");
        assert_eq!(explain(ours, ours, 0, 1), None);
    }

    #[test]
    fn the_first_parameter_that_ranks_wrote_apart_is_named() {
        let lines = |written: &[(usize, u64)]| {
            let name = |param| format!("p{param}");
            let line = |(param, hash): &(usize, u64)| {
                format!("{}\n", WrittenValues { param: *param, hash: *hash, name: &name(*param) })
            };
            written.iter().map(line).collect::<String>() + "loss scaler: None"
        };
        let told = |ours: &[(usize, u64)], theirs: &[(usize, u64)]| {
            written_apart(&lines(ours), &lines(theirs), 3, 1).unwrap()
        };
        let other = "`p10` was written with other values on rank 3 than on rank 1";
        assert_eq!(told(&[(9, 5), (10, 6), (11, 1)], &[(9, 5), (10, 7)]), other);
        assert_eq!(told(&[(9, 5), (10, 6)], &[(10, 7)]), "`p9` was written on rank 3 and not on rank 1");
        assert_eq!(told(&[(10, 6)], &[(9, 5), (10, 6)]), "`p9` was written on rank 1 and not on rank 3");
        assert_eq!(told(&[(9, 5)], &[]), "`p9` was written on rank 3 and not on rank 1");
        assert_eq!(told(&[], &[(9, 5)]), "`p9` was written on rank 1 and not on rank 3");
        assert_eq!(written_apart(&lines(&[(9, 5)]), &lines(&[(9, 5)]), 3, 1), None);
        assert_eq!(WrittenValues::parse("values of parameter 7: 00000000000000ff of `half a na"), None);
    }

    #[test]
    fn a_long_line_is_cut_around_the_difference() {
        let line = |value| format!("{}{value}{}", "x".repeat(900), "y".repeat(900));
        let (ours, theirs) = first_differing(&line("5"), &line("6")).unwrap();
        let shown = |value| format!("...{}{value}{}...", "x".repeat(100), "y".repeat(299));
        assert_eq!((ours, theirs), (shown("5"), shown("6")));
    }

    #[test]
    fn of_fields_in_braces_only_the_one_that_differs_is_told() {
        let line = |eps| format!("group a: AdamW {{ lr: 0.1, betas: (0.9, 0.99), eps: {eps} }}");
        let (ours, theirs) = first_differing(&line("1e-8"), &line("1e-6")).unwrap();
        assert_eq!((&*ours, &*theirs), ("group a: AdamW { eps: 1e-8 }", "group a: AdamW { eps: 1e-6 }"));
    }

    #[test]
    fn a_buffer_keeps_no_more_than_its_bound() {
        let words = Words::new(0, format_args!("{}{}", "a".repeat(KEPT), "b"), "");
        assert_eq!(words.part(0, Agreed::Layout).unwrap().trim_end(), "a".repeat(KEPT));
    }
}
