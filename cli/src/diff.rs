//! `instep diff`: says whether two outputs have the same bits, and where they differ most.
//!
//! Distances are in ulp, the number of steps between representable values of the tensor's type. Both files are read in
//! pieces, because outputs are as large as models.

use std::collections::BTreeSet;
use std::io::{Read, Seek};
use std::path::PathBuf;
use std::process::ExitCode;

use instep::checkpoint::safetensors::{Data, Dtype, Header, Tensor, open_file};
use instep::{bf16, f16};
use serde::Serialize;

use crate::Failure;
use crate::console::{print, print_json};
use crate::replay::{COUNT_PREFIX, PRODUCT_PREFIX};

/// Elements compared at a time.
const PIECE: usize = 1 << 14;

/// Compare two outputs of `instep replay`, bit by bit
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// First output file
    pub a: PathBuf,
    /// Second output file
    pub b: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// The comparison of two files.
#[derive(Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Same tensors, same types, same shapes, same bits, same step counts and products of momenta.
    pub equal: bool,
    /// Tensors that both files have, by name.
    pub tensors: Vec<Compared>,
    /// Names of tensors that only the first file has.
    pub only_in_a: Vec<String>,
    /// Names of tensors that only the second file has.
    pub only_in_b: Vec<String>,
    /// Step counts and products of momenta that differ.
    pub counts: Vec<Count>,
}

/// A tensor of both files.
#[derive(Debug, PartialEq, Serialize)]
pub struct Compared {
    /// Its name.
    pub name: String,
    /// Its type in the first file.
    pub dtype_a: &'static str,
    /// Its type in the second file.
    pub dtype_b: &'static str,
    /// Its shape in the first file.
    pub shape_a: Vec<u64>,
    /// Its shape in the second file.
    pub shape_b: Vec<u64>,
    /// Number of elements that differ in a bit; 0 if shapes or types differ, because none are compared then.
    pub different: u64,
    /// The largest difference.
    pub worst: Option<Worst>,
}

/// The largest difference within a tensor, the first of several.
#[derive(Debug, PartialEq, Serialize)]
pub struct Worst {
    /// Row-major.
    pub index: u64,
    /// The distance; none if one of them is NaN. It is 0 between the two zeros.
    pub ulp: Option<u64>,
    /// The first file's value, as text because JSON has no NaN.
    pub a: String,
    /// The second file's value.
    pub b: String,
}

/// A step count that differs; none where a file has none.
#[derive(Debug, PartialEq, Serialize)]
pub struct Count {
    /// Its metadata key.
    pub key: String,
    /// In the first file.
    pub a: Option<String>,
    /// In the second file.
    pub b: Option<String>,
}

/// Runs the command. The exit status is 0 if the files are equal and 1 if not.
///
/// # Errors
/// `File` or `Tensors` if one of the files cannot be used.
pub fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let report = compare(open_file(&arguments.a)?, open_file(&arguments.b)?)?;
    match arguments.json {
        true => print_json(&report)?,
        false => print(&report.text())?,
    }
    Ok(if report.equal { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// Compares two opened files.
///
/// # Errors
/// `Tensors` if one of them cannot be read to its end.
pub fn compare<A: Read + Seek, B: Read + Seek>(
    (header_a, mut data_a): (Header, Data<A>),
    (header_b, mut data_b): (Header, Data<B>),
) -> Result<Report, Failure> {
    header_a.require_stepped()?;
    header_b.require_stepped()?;
    let mut report = Report::default();
    for (name, a) in &header_a.tensors {
        let Some(b) = header_b.tensors.get(name) else {
            report.only_in_a.push(name.clone());
            continue;
        };
        let (different, worst) = match (&a.shape, a.dtype) == (&b.shape, b.dtype) {
            true => compare_values(a, &mut data_a, b, &mut data_b)?,
            false => (0, None),
        };
        report.tensors.push(Compared {
            name: name.clone(),
            dtype_a: a.dtype.name(),
            dtype_b: b.dtype.name(),
            shape_a: a.shape.clone(),
            shape_b: b.shape.clone(),
            different,
            worst,
        });
    }
    let lacks = |name: &&String| !header_a.tensors.contains_key(*name);
    report.only_in_b = header_b.tensors.keys().filter(lacks).cloned().collect();
    let keys: BTreeSet<&String> = header_a.metadata.keys().chain(header_b.metadata.keys()).collect();
    let counts = |key: &&String| [COUNT_PREFIX, PRODUCT_PREFIX].iter().any(|prefix| key.starts_with(prefix));
    for key in keys.into_iter().filter(counts) {
        let (a, b) = (header_a.metadata.get(key).cloned(), header_b.metadata.get(key).cloned());
        if a != b {
            report.counts.push(Count { key: key.clone(), a, b });
        }
    }
    let same = |tensor: &Compared| {
        tensor.shape_a == tensor.shape_b && tensor.dtype_a == tensor.dtype_b && tensor.different == 0
    };
    let names_agree = report.only_in_a.is_empty() && report.only_in_b.is_empty();
    report.equal = names_agree && report.counts.is_empty() && report.tensors.iter().all(same);
    Ok(report)
}

/// Counts the elements that differ, and finds the largest difference.
fn compare_values<A: Read + Seek, B: Read + Seek>(
    a: &Tensor,
    data_a: &mut Data<A>,
    b: &Tensor,
    data_b: &mut Data<B>,
) -> Result<(u64, Option<Worst>), Failure> {
    let piece = PIECE.min(usize::try_from(a.elements).unwrap_or(PIECE));
    let (mut bits_a, mut bits_b) = (vec![0; piece], vec![0; piece]);
    let (mut different, mut worst) = (0, None::<Worst>);
    let dtype = a.dtype;
    for first in (0..a.elements).step_by(PIECE) {
        let length = (a.elements - first).min(piece as u64) as usize;
        let (bits_a, bits_b) = (&mut bits_a[..length], &mut bits_b[..length]);
        read_bits(data_a, a, first, bits_a)?;
        read_bits(data_b, b, first, bits_b)?;
        let pairs = (first..).zip(bits_a.iter().zip(bits_b));
        for (index, (bits_a, bits_b)) in pairs.filter(|(_, (a, b))| a != b) {
            different += 1;
            let (a, b) = (value(dtype, *bits_a), value(dtype, *bits_b));
            let ulp = (!a.is_nan() && !b.is_nan()).then(|| distance(dtype, *bits_a, *bits_b));
            // A NaN counts as the largest distance.
            let size = |ulp: Option<u64>| ulp.unwrap_or(u64::MAX);
            if worst.as_ref().is_none_or(|worst| size(ulp) > size(worst.ulp)) {
                worst = Some(Worst { index, ulp, a: format!("{a:?}"), b: format!("{b:?}") });
            }
        }
    }
    Ok((different, worst))
}

/// Reads elements of up to 32 bits into the lower bits of each number.
fn read_bits<R: Read + Seek>(
    data: &mut Data<R>,
    tensor: &Tensor,
    first: u64,
    into: &mut [u32],
) -> Result<(), Failure> {
    let elements = first..first + into.len() as u64;
    let mut rest = into.iter_mut();
    data.stream(tensor, elements, |bytes| {
        for (bytes, place) in bytes.chunks_exact(tensor.dtype.bytes() as usize).zip(&mut rest) {
            *place = bytes.iter().rev().fold(0, |bits, byte| bits << 8 | u32::from(*byte));
        }
        Ok(())
    })?;
    Ok(())
}

fn value(dtype: Dtype, bits: u32) -> f32 {
    match dtype {
        Dtype::Bf16 => bf16::from_bits(bits as u16).to_f32(),
        Dtype::F16 => f16::from_bits(bits as u16).to_f32(),
        _ => f32::from_bits(bits),
    }
}

/// Returns the number of steps from `a` to `b` through the representable values of a type.
fn distance(dtype: Dtype, a: u32, b: u32) -> u64 {
    let sign = 1 << (8 * dtype.bytes() - 1);
    let place = |bits: u32| {
        let magnitude = i64::from(bits & (sign - 1));
        if bits & sign != 0 { -magnitude } else { magnitude }
    };
    place(a).abs_diff(place(b))
}

impl Report {
    fn text(&self) -> String {
        let mut lines = Vec::new();
        for tensor in &self.tensors {
            let Compared { name, dtype_a, dtype_b, shape_a, shape_b, different, worst } = tensor;
            lines.push(match worst {
                _ if shape_a != shape_b => format!("{name}: shape {shape_a:?} and {shape_b:?}"),
                _ if dtype_a != dtype_b => format!("{name}: {dtype_a} and {dtype_b}"),
                None => format!("{name}: equal"),
                Some(Worst { index, ulp, a, b }) => {
                    let elements: u64 = shape_a.iter().product();
                    let ulp = ulp.map_or("no number of".into(), |ulp| ulp.to_string());
                    format!(
                        "{name}: {different} of {elements} differ, most by {ulp} ulp at {index}: {a} and {b}"
                    )
                }
            });
        }
        lines.extend(self.only_in_a.iter().map(|name| format!("{name}: only in the first file")));
        lines.extend(self.only_in_b.iter().map(|name| format!("{name}: only in the second file")));
        for Count { key, a, b } in &self.counts {
            let shown = |count: &Option<String>| count.clone().unwrap_or_else(|| "none".into());
            lines.push(format!("{key}: {} and {}", shown(a), shown(b)));
        }
        lines.push(if self.equal { "equal" } else { "different" }.into());
        lines.join("\n") + "\n"
    }
}
