//! Ways to break a pair: bits, cuts and splices anywhere; numbers, names and lengths that a parser would trust.
//!
//! The JSON parser refuses nearly all bit flips, so most changes follow the syntax and correct the header's length. The
//! mutations must be deterministic in their random numbers: a finding is a seed and a number.

use std::ops::Range;

use instep::optim::ALL;
use rand::Rng;
use rand::rngs::SmallRng;

use crate::seeds::Pair;

/// Numbers with which arithmetic goes wrong.
const NUMBERS: [&str; 22] = [
    "0",
    "1",
    "-1",
    "2",
    "3",
    "4",
    "8",
    "12",
    "255",
    "1e-46",
    "1e39",
    "1e309",
    "0.99999999999999999",
    "4294967295",
    "4294967296",
    "1152921504606846976",
    "4611686018427387904",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "null",
    "true",
];

/// Texts that have a meaning somewhere.
const WORDS: [&str; 50] = [
    "a",
    "layer.0.b",
    "c",
    "",
    "lr_multipliers",
    "mu_product.a",
    "state.0.mu_product",
    "F32",
    "F16",
    "param.a",
    "param.c",
    "grad.0.a",
    "grad.1.a",
    "grad.9.c",
    "state.a.exp_avg",
    "state.c.momentum_buffer",
    "step.a",
    "__metadata__",
    "momentum",
    "amsgrad",
    "\\n\\u0000",
    "world_size",
    "U64",
    "F64",
    "BF16",
    "crc32",
    "epoch",
    "state.a.step",
    "state.0.step",
    "state.0.exp_avg",
    "param.layer.0.b",
    "instep.checkpoint",
    "dtypes",
    "grad",
    "master",
    "moments",
    "rounding",
    "seed",
    "copy",
    "ema",
    "frozen",
    "f32",
    "bf16",
    "f16",
    "remainder8",
    "8bit",
    "stochastic",
    "master.a",
    "copy.a",
    "ema.a",
];

/// Pieces of syntax.
const SYNTAX: [&str; 14] =
    ["{", "}", "[", "]", ",", ":", "\"", "{}", "[]", " ", "\\", "-", "[[[[[[[[[[[[", "\u{e9}"];

/// Breaks a pair in one place, or in up to four.
pub(crate) fn mutate(pair: &mut Pair, others: &[Pair], random: &mut SmallRng) {
    let places = if random.random() { 1 } else { random.random_range(1..=4) };
    for _ in 0..places {
        let other = &others[random.random_range(0..others.len())];
        // A checkpoint comes alone.
        if !pair.config.is_empty() && random.random_ratio(1, 3) {
            text(&mut pair.config, &other.config, random);
        } else {
            input(&mut pair.input, &other.input, random);
        }
    }
}

fn input(bytes: &mut Vec<u8>, other: &[u8], random: &mut SmallRng) {
    match random.random_range(0..10) {
        0 => raw(bytes, other, random),
        1 => length(bytes, random),
        2 => {
            let end = bytes.len() + random.random_range(1..64);
            bytes.resize(end, random.random());
        }
        _ => {
            // The header alone, with its length made true again, and the old data after it.
            let Some(mut header) = header(bytes) else {
                return raw(bytes, other, random);
            };
            let data = bytes[8 + header.len()..].to_vec();
            let other = self::header(other).unwrap_or_default();
            text(&mut header, &other, random);
            *bytes = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
        }
    }
}

fn header(bytes: &[u8]) -> Option<Vec<u8>> {
    let length = u64::from_le_bytes(*bytes.first_chunk::<8>()?);
    let end = usize::try_from(length).ok()?.checked_add(8)?;
    bytes.get(8..end).map(<[u8]>::to_vec)
}

/// Changes the length before the header.
fn length(bytes: &mut [u8], random: &mut SmallRng) {
    let Some(field) = bytes.first_chunk_mut::<8>() else {
        return;
    };
    let old = u64::from_le_bytes(*field);
    let new = match random.random_range(0..5) {
        0 => random.random(),
        1 => 1 << random.random_range(0..64),
        2 => u64::MAX - random.random_range(0..16),
        3 => old.wrapping_add(random.random_range(0..16)),
        _ => old.wrapping_sub(random.random_range(0..16)),
    };
    *field = new.to_le_bytes();
}

/// Changes bytes, whatever they mean.
fn raw(bytes: &mut Vec<u8>, other: &[u8], random: &mut SmallRng) {
    let at = random.random_range(0..=bytes.len());
    match random.random_range(0..4) {
        0 if at < bytes.len() => bytes[at] ^= 1 << random.random_range(0..8),
        1 if at < bytes.len() => bytes[at] = random.random(),
        2 => bytes.truncate(at),
        _ => {
            let from = random.random_range(0..=other.len());
            let tail = other[from..].to_vec();
            bytes.splice(at.., tail);
        }
    }
}

/// Changes JSON text: a token is replaced, doubled or dropped, or a piece of another text is inserted.
fn text(bytes: &mut Vec<u8>, other: &[u8], random: &mut SmallRng) {
    let numbers = tokens(bytes, |byte| byte.is_ascii_digit());
    let words = tokens(bytes, |byte| byte.is_ascii_alphanumeric() || b"._".contains(&byte));
    let pick =
        |list: &[&str], random: &mut SmallRng| list[random.random_range(0..list.len())].as_bytes().to_vec();
    match random.random_range(0..8) {
        0 => raw(bytes, other, random),
        1 | 2 if !numbers.is_empty() => {
            let new = pick(&NUMBERS, random);
            bytes.splice(numbers[random.random_range(0..numbers.len())].clone(), new);
        }
        3 if !words.is_empty() => {
            let new = match random.random_range(0..WORDS.len() + ALL.len()) {
                k if k < WORDS.len() => WORDS[k].as_bytes().to_vec(),
                k => ALL[k - WORDS.len()].key().into_bytes(),
            };
            bytes.splice(words[random.random_range(0..words.len())].clone(), new);
        }
        4 => {
            let at = random.random_range(0..=bytes.len());
            bytes.splice(at..at, pick(&SYNTAX, random));
        }
        5 if words.len() > 1 => {
            // Two tokens change places, or one overwrites the other.
            let (a, b) = (random.random_range(0..words.len()), random.random_range(0..words.len()));
            let (first, second) = (words[a.min(b)].clone(), words[a.max(b)].clone());
            let copy = bytes[first.clone()].to_vec();
            let moved = bytes.splice(second, copy).collect::<Vec<u8>>();
            if random.random() {
                bytes.splice(first, moved);
            }
        }
        _ => {
            // A run between two commas or brackets, from here or from the other text: entries, doubled or dropped.
            let source = if random.random() { other.to_vec() } else { bytes.clone() };
            let piece = run(&source, random);
            let place = run(bytes, random);
            let place = if random.random() { place.start..place.start } else { place };
            let piece = if random.random_ratio(1, 4) { Vec::new() } else { source[piece].to_vec() };
            bytes.splice(place, piece);
        }
    }
}

fn tokens(bytes: &[u8], belongs: impl Fn(u8) -> bool) -> Vec<Range<usize>> {
    let mut found: Vec<Range<usize>> = Vec::new();
    for at in (0..bytes.len()).filter(|at| belongs(bytes[*at])) {
        match found.last_mut() {
            Some(last) if last.end == at => last.end += 1,
            _ => found.push(at..at + 1),
        }
    }
    found
}

/// Returns the range from one comma or bracket to a later one.
fn run(bytes: &[u8], random: &mut SmallRng) -> Range<usize> {
    let ends: Vec<usize> =
        (0..bytes.len()).filter(|at| b",{}[]".contains(&bytes[*at])).map(|at| at + 1).collect();
    if ends.is_empty() {
        return 0..bytes.len();
    }
    let first = random.random_range(0..ends.len());
    let last = (first + random.random_range(0..12)).min(ends.len() - 1);
    ends[first]..ends[last]
}
