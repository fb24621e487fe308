//! A checkpoint that is damaged, belongs to another model or cannot be read completely is refused by name, and changes
//! nothing.
//!
//! The tests damage files byte by byte and, with corrected checksums, tensor by tensor. After every error all bits are
//! compared.

use std::io::{self, Cursor, Read, Seek, SeekFrom};

use instep::checkpoint::safetensors::{Dtype, Entry, header};
use instep::checkpoint::{self, Extras, Scalar};
use instep::{Error, Layout, Result, Stepper};

use crate::checkpoint::round_trip::bytes_of;
use crate::support::{self, Options, Outcome, few_optimizers, layout, painted};

const LENGTHS: [usize; 3] = [7, 0, 3];

/// A tensor of a file that a test writes.
pub(crate) type Made = (&'static str, Dtype, &'static [u64], Vec<u8>);

/// Returns a file of these tensors.
pub(crate) fn file(tensors: &[Made], metadata: &[(&str, &str)]) -> Vec<u8> {
    let entry =
        |(name, dtype, shape, _): &Made| Entry { name: (*name).into(), dtype: *dtype, shape: shape.to_vec() };
    let metadata = metadata.iter().map(|(key, value)| (String::from(*key), String::from(*value))).collect();
    let mut bytes = header(&tensors.iter().map(entry).collect::<Vec<_>>(), &metadata).unwrap();
    tensors.iter().for_each(|(.., data)| bytes.extend(data));
    bytes
}

/// Returns a file of these tensors followed by their true checksums, with this version.
fn checkpoint_of(tensors: &[Made], version: &str) -> Vec<u8> {
    let with_data = || tensors.iter().filter(|(.., data)| !data.is_empty());
    // The length of the shape is known, its content belongs to the test.
    let shape: &'static [u64] = Box::leak(Box::new([1 + with_data().count() as u64]));
    let mut all = tensors.to_vec();
    all.push(("crc32", Dtype::U32, shape, Vec::new()));
    let mut bytes = file(&all, &[("instep.checkpoint", version)]);
    let end = 8 + u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let first = crc32fast::hash(&bytes[..end]);
    bytes.extend(first.to_le_bytes());
    bytes.extend(with_data().flat_map(|(.., data)| crc32fast::hash(data).to_le_bytes()));
    bytes
}

pub(crate) fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn trained(layout: &Layout) -> Stepper {
    let options = Options::default();
    let mut stepper = support::open(layout, few_optimizers()[2], &options);
    let gradient = painted(&options);
    for step in 0..2 {
        support::pass(&mut stepper, &options, |param, values| gradient(step, param, values)).unwrap();
    }
    stepper
}

fn refused(stepper: &mut Stepper, bytes: &[u8]) -> Option<Error> {
    checkpoint::read(stepper, Cursor::new(bytes)).err()
}

#[test]
fn every_flipped_bit_and_every_cut_is_noticed_and_changes_nothing() {
    let layout = layout(&LENGTHS);
    let extras = Extras {
        scalars: [("random.seed".to_owned(), Scalar::U64(3))].into(),
        metadata: [("a".into(), "b".into())].into(),
    };
    let bytes = bytes_of(&trained(&layout), &extras);
    let mut stepper = support::open(&layout, few_optimizers()[2], &Options::default());
    let before = Outcome::of(&stepper).unwrap();
    let mut broken = bytes.clone();
    for at in 0..bytes.len() {
        for bit in 0..8 {
            broken[at] ^= 1 << bit;
            let error =
                refused(&mut stepper, &broken).unwrap_or_else(|| panic!("bit {bit} of byte {at} may flip"));
            assert!(matches!(error, Error::Checkpoint { .. }), "{error:?}");
            broken[at] = bytes[at];
        }
        let error =
            refused(&mut stepper, &bytes[..at]).unwrap_or_else(|| panic!("it may be cut to {at} bytes"));
        assert!(matches!(error, Error::Checkpoint { .. }), "{error:?}");
        if at % 64 == 0 {
            Outcome::of(&stepper).unwrap().assert_same(&before, &format!("after byte {at}"));
        }
    }
    broken.push(0);
    assert!(refused(&mut stepper, &broken).is_some(), "a byte may be added");
    Outcome::of(&stepper).unwrap().assert_same(&before, "refused");
    assert_eq!(
        checkpoint::read(&mut stepper, Cursor::new(&bytes)).unwrap(),
        extras,
        "and the whole file is fine"
    );
}

#[test]
fn flipped_data_are_named_with_their_tensor_and_place() {
    let layout = layout(&LENGTHS);
    let mut stepper = trained(&layout);
    let mut bytes = bytes_of(&stepper, &Extras::default());
    // The last tensor but the checksums (header, 3 counts, the schedule's step, 3 x 2 with data).
    let crc = 4 * (1 + 3 + 1 + 3 * 2);
    let at = bytes.len() - crc - 1;
    bytes[at] ^= 1;
    let error = refused(&mut stepper, &bytes).unwrap();
    let place = format!("tensor `state.p2.exp_avg_sq` (bytes {}..{} of the file)", at - 11, at + 1);
    assert_eq!(
        error.to_string(),
        format!("{place}: damaged, as its checksum differs; load another checkpoint")
    );
}

#[test]
fn a_checkpoint_of_another_model_is_refused_by_name() {
    let ours = layout(&LENGTHS);
    let mut stepper = trained(&ours);
    let before = Outcome::of(&stepper).unwrap();
    let theirs = |lengths: &[usize], optim: usize| {
        let layout = layout(lengths);
        bytes_of(&support::open(&layout, few_optimizers()[optim], &Options::default()), &Extras::default())
    };
    const OTHER_STATES: &str = "missing; load a file that was saved with this optimizer and precision";
    for (bytes, place, why) in [
        (theirs(&LENGTHS[..2], 2), "tensor `param.p2`", "missing"),
        (theirs(&[7, 0, 3, 1], 2), "tensor `param.p3`", "has no place in this stepper"),
        (theirs(&[7, 0, 4], 2), "tensor `param.p2`", "has 4 elements, and `p2` has 3"),
        (theirs(&[7, 1, 3], 2), "tensor `param.p1`", "has 1 elements, and `p1` has 0"),
        (theirs(&LENGTHS, 0), "tensor `state.p0.exp_avg`", OTHER_STATES),
        (theirs(&LENGTHS, 1), "tensor `state.p0.exp_avg`", OTHER_STATES),
        (theirs(&LENGTHS, 3), "tensor `state.p0.max_exp_avg_sq`", "has no place in this stepper"),
    ] {
        let text = refused(&mut stepper, &bytes).unwrap().to_string();
        assert!(
            text.starts_with(&format!("{place}: {why}")) && text.contains("; load a file that "),
            "{text}"
        );
        Outcome::of(&stepper).unwrap().assert_same(&before, why);
    }
}

#[test]
fn tensors_of_another_kind_are_refused_by_name_even_with_true_checksums() {
    let layout = layout(&[2]);
    let sgd = few_optimizers()[1];
    let mut stepper = support::open(&layout, sgd, &Options::default());
    let before = Outcome::of(&stepper).unwrap();
    let fine: [Made; 3] = [
        ("state.p0.step", Dtype::U64, &[], 5u64.to_le_bytes().into()),
        ("param.p0", Dtype::F32, &[2], f32s(&[1.0, f32::NAN])),
        ("state.p0.momentum_buffer", Dtype::F32, &[1, 2], f32s(&[f32::INFINITY, -0.0])),
    ];
    let replaced = |at: usize, made: Made| {
        let mut all = fine.clone();
        all[at] = made;
        checkpoint_of(&all, "1")
    };
    let half = |name| (name, Dtype::Bf16, &[2u64][..], vec![0; 4]);
    let with = |made: Made| checkpoint_of(&[&fine[..], &[made]].concat(), "1");
    let rows = [
        (replaced(0, ("state.p0.step", Dtype::I64, &[], 5u64.to_le_bytes().into())), "I64, not U64"),
        (replaced(0, ("state.p0.step", Dtype::F32, &[], f32s(&[5.0]))), "F32, not U64"),
        (replaced(0, ("state.p0.step", Dtype::U64, &[0], vec![])), "0 elements"),
        (replaced(0, ("state.p0.step", Dtype::U64, &[2], vec![0; 16])), "2 elements"),
        (
            replaced(0, ("state.p0.step", Dtype::U64, &[], (1u64 << 63).to_le_bytes().into())),
            "not a whole number",
        ),
        (replaced(1, half("param.p0")), "BF16, not F32"),
        (replaced(2, half("state.p0.momentum_buffer")), "BF16, not F32"),
        (replaced(1, ("param.p0", Dtype::U32, &[2], vec![0; 8])), "U32, not F32"),
        (replaced(1, ("param.x", Dtype::F32, &[2], vec![0; 8])), "`param.p0`: missing"),
        (with(("epoch", Dtype::F32, &[], vec![0; 4])), "`epoch`: has no place"),
        (with(("epoch", Dtype::U64, &[1], vec![0; 8])), "`epoch`: has no place"),
        (with(("param.x", Dtype::U64, &[], vec![0; 8])), "`param.x`: has no place"),
        (with(("state.x", Dtype::F64, &[], vec![0; 8])), "`state.x`: has no place"),
        (with(("ema.x", Dtype::F64, &[], vec![0; 8])), "`ema.x`: has no place"),
        (checkpoint_of(&fine, "2"), "version `2`"),
        (file(&fine, &[("instep.checkpoint", "1")]), "lost its checksums"),
        (file(&fine, &[]), "not a checkpoint of this library"),
    ];
    for (bytes, word) in rows {
        let error = refused(&mut stepper, &bytes).unwrap();
        assert!(
            matches!(error, Error::Checkpoint { .. }) && error.to_string().contains(word),
            "{error}, not {word}"
        );
        Outcome::of(&stepper).unwrap().assert_same(&before, word);
    }
    assert_eq!(
        refused(&mut stepper, &checkpoint_of(&fine, "1")),
        None,
        "the file that the rows break is fine"
    );
    let after = Outcome::of(&stepper).unwrap();
    assert_eq!(after.step_counts, [5]);
    support::assert_same_bits(&after.params[0], &[1.0, f32::NAN], "NaN is a value");
    support::assert_same_bits(&after.states[0][0], &[f32::INFINITY, -0.0], "shapes are the framework's own");
}

#[test]
fn a_load_waits_for_its_turn() {
    let layout = layout(&LENGTHS);
    let mut stepper = trained(&layout);
    let bytes = bytes_of(&stepper, &Extras::default());
    let before = Outcome::of(&stepper).unwrap();
    std::mem::forget(stepper.begin().unwrap());
    assert!(matches!(refused(&mut stepper, &bytes), Some(Error::Order(_))));
    let unsaved = checkpoint::write(&stepper, io::sink());
    assert!(matches!(unsaved, Err(Error::Order(_))));
    stepper.abandon().unwrap();
    Outcome::of(&stepper).unwrap().assert_same(&before, "refused inside a pass");
}

/// A reader that fails after some bytes.
struct Failing {
    bytes: Cursor<Vec<u8>>,
    left_bytes: usize,
}

impl Read for Failing {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.bytes.read(into)?;
        self.left_bytes =
            self.left_bytes.checked_sub(read).ok_or_else(|| io::Error::other("the disk is gone"))?;
        Ok(read)
    }
}

impl Seek for Failing {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.bytes.seek(to)
    }
}

#[test]
fn a_disk_that_fails_leaves_whole_tensors_and_says_how_many_are_new() {
    let layout = layout(&LENGTHS);
    let source = trained(&layout);
    let (new, bytes) = (Outcome::of(&source).unwrap(), bytes_of(&source, &Extras::default()));
    let old = Outcome::of(&support::open(&layout, few_optimizers()[2], &Options::default())).unwrap();
    let tensors = |outcome: &Outcome| -> Vec<Vec<f32>> {
        let own = outcome.params.iter().zip(&outcome.states);
        own.flat_map(|(param, states)| [&[param.clone()][..], states].concat()).collect()
    };
    let mut seen = Vec::new();
    let mut left_bytes = 0;
    loop {
        let mut stepper = support::open(&layout, few_optimizers()[2], &Options::default());
        let source = Failing { bytes: Cursor::new(bytes.clone()), left_bytes };
        let outcome: Result<Extras> = checkpoint::read(&mut stepper, source);
        let now = Outcome::of(&stepper).unwrap();
        let loaded = match outcome {
            Ok(_) => break,
            Err(Error::File { .. }) => 0,
            Err(Error::PartlyLoaded { loaded, tensors: 9, why }) => {
                assert!(matches!(*why, Error::File { .. }), "{why}");
                loaded
            }
            Err(other) => panic!("{other:?}"),
        };
        for (at, now) in tensors(&now).iter().enumerate() {
            let expected = if at < loaded { tensors(&new) } else { tensors(&old) };
            support::assert_same_bits(now, &expected[at], &format!("tensor {at} with {loaded} loaded"));
        }
        assert_eq!(now.step_counts, old.step_counts);
        if seen.last() != Some(&loaded) {
            seen.push(loaded);
        }
        left_bytes += 1;
    }
    // The three empty tensors in the middle cannot fail.
    assert_eq!(seen, [0, 1, 2, 6, 7, 8]);
}
