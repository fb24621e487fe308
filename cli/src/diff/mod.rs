//! `instep diff`: compares two tensor files. The command prints whether the files are equal or within a tolerance, and
//! where they differ most.
//!
//! The files are outputs of `instep replay` or checkpoints. The files are read in pieces, because a file can be as
//! large as a model.

mod elements;
mod report;
mod tolerance;

pub use report::{Compared, Count, Located, Report, Worst};
pub use tolerance::Tolerance;

use std::collections::BTreeSet;
use std::io::{Read, Seek};
use std::path::PathBuf;
use std::process::ExitCode;

use instep::checkpoint::safetensors::{Data, Dtype, Header, Tensor};
use instep::checkpoint::{CHECKSUMS, VERSION_KEY, open_checked};

use crate::Failure;
use crate::console::{print, print_json};
use crate::replay::{COUNT_PREFIX, PRODUCT_PREFIX};
use elements::{Element, read_bits};
use report::size;

/// The number of elements that are compared at a time.
const PIECE: usize = 1 << 14;

/// Compare two outputs of `instep replay` or two checkpoints, bit by bit or within a tolerance
///
/// The exit status is 0 if every element is equal or accepted by the tolerance, 1 if not, and 2 if a file cannot be
/// read. Names, types, shapes and whole numbers such as step counts must always be equal. With a tolerance, NaN equals
/// NaN, and an infinity equals only itself.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// First file
    pub a: PathBuf,
    /// Second file
    pub b: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// How far values may differ
    #[command(flatten)]
    pub tolerance: Tolerance,
}

/// Runs the command. The exit status is 0 if the files are equal or within the tolerance and 1 if not.
///
/// # Errors
/// `File` or `Tensors` if one of the files cannot be used.
pub fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let Arguments { a, b, json, tolerance } = arguments;
    let report = compare(open_checked(a)?, open_checked(b)?, tolerance)?;
    if *json {
        print_json(&report)?
    } else {
        print(&report.text(tolerance))?
    }
    Ok(if report.within { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// Compares two opened files.
///
/// # Errors
/// `Tensors` if a file cannot be read to its end.
pub fn compare<A: Read + Seek, B: Read + Seek>(
    (mut header_a, mut data_a): (Header, Data<A>),
    (mut header_b, mut data_b): (Header, Data<B>),
    tolerance: &Tolerance,
) -> Result<Report, Failure> {
    for header in [&mut header_a, &mut header_b] {
        // If anything else differs, the checksums differ too, so they are not compared.
        if header.metadata.contains_key(VERSION_KEY) {
            header.tensors.remove(CHECKSUMS);
        }
    }
    let mut report = Report::default();
    for (name, a) in &header_a.tensors {
        let Some(b) = header_b.tensors.get(name) else {
            report.only_in_a.push(name.clone());
            continue;
        };
        let mut compared = Compared {
            name: name.clone(),
            dtype_a: a.dtype.name(),
            dtype_b: b.dtype.name(),
            shape_a: a.shape.clone(),
            shape_b: b.shape.clone(),
            different: 0,
            outside: 0,
            worst: None,
        };
        if compared.has_same_form() {
            compare_values(&mut compared, (a, &mut data_a), (b, &mut data_b), tolerance)?;
        }
        report.tensors.push(compared);
    }
    let lacks = |name: &&String| !header_a.tensors.contains_key(*name);
    report.only_in_b = header_b.tensors.keys().filter(lacks).cloned().collect();
    let keys: BTreeSet<&String> = header_a.metadata.keys().chain(header_b.metadata.keys()).collect();
    let counts = |key: &&String| [COUNT_PREFIX, PRODUCT_PREFIX].iter().any(|prefix| key.starts_with(prefix));
    for key in keys.into_iter().filter(counts) {
        let (a, b) = (header_a.metadata.get(key).cloned(), header_b.metadata.get(key).cloned());
        if a != b && !(key.starts_with(PRODUCT_PREFIX) && accepts_product(tolerance, &a, &b)) {
            report.counts.push(Count { key: key.clone(), a, b });
        }
    }
    report.conclude();
    Ok(report)
}

/// Returns whether the tolerance accepts the difference of two products of momenta. `a` and `b` are their texts in the
/// metadata.
fn accepts_product(tolerance: &Tolerance, a: &Option<String>, b: &Option<String>) -> bool {
    let element = |text: &Option<String>| {
        Some(Element { dtype: Dtype::F64, bits: text.as_ref()?.parse::<f64>().ok()?.to_bits() })
    };
    matches!((element(a), element(b)), (Some(a), Some(b)) if tolerance.accepts(a, b))
}

/// Counts the elements that differ, and finds the largest difference.
fn compare_values<A: Read + Seek, B: Read + Seek>(
    compared: &mut Compared,
    (a, data_a): (&Tensor, &mut Data<A>),
    (b, data_b): (&Tensor, &mut Data<B>),
    tolerance: &Tolerance,
) -> Result<(), Failure> {
    let piece = PIECE.min(usize::try_from(a.elements).unwrap_or(PIECE));
    let (mut bits_a, mut bits_b) = (vec![0; piece], vec![0; piece]);
    let dtype = a.dtype;
    for first in (0..a.elements).step_by(PIECE) {
        let length = (a.elements - first).min(piece as u64) as usize;
        let (bits_a, bits_b) = (&mut bits_a[..length], &mut bits_b[..length]);
        read_bits(data_a, a, first, bits_a)?;
        read_bits(data_b, b, first, bits_b)?;
        let pairs = (first..).zip(bits_a.iter().zip(bits_b));
        for (index, (bits_a, bits_b)) in pairs.filter(|(_, (a, b))| a != b) {
            let (a, b) = (Element { dtype, bits: *bits_a }, Element { dtype, bits: *bits_b });
            let is_outside = !tolerance.accepts(a, b);
            compared.different += 1;
            compared.outside += u64::from(is_outside);
            let ulp = a.distance(b);
            if compared.worst.as_ref().is_none_or(|worst| size(is_outside, ulp) > worst.size()) {
                compared.worst = Some(Worst { index, ulp, a: a.to_string(), b: b.to_string(), is_outside });
            }
        }
    }
    Ok(())
}
