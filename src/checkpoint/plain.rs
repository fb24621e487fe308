//! Reads and writes files that have only parameters, for other programs. Names, shapes and types are those of the
//! trainer.
//!
//! This module depends on the reader and the writer of checkpoints. These files have no states, so a training cannot
//! resume from them.

use std::collections::BTreeMap;
use std::io::{BufWriter, Read, Seek, Write};
use std::path::Path;

use super::plan::{Part, Piece, Plan, missing};
use super::restore::restore;
use super::safetensors::{Entry, Header, header, in_tensor, write_values};
use super::save_file;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result, one_of};
use crate::layout::ParamId;
use crate::stepper::Stepper;

/// The values that [`export`] writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Export {
    /// Writes [moving averages](crate::StepperBuilder::ema) instead of parameters. A parameter without an update has no
    /// average yet, so the parameter's value is written.
    pub averages: bool,
    /// Writes everything in f32. If a parameter has a [master](crate::Master), the master's value is written. If this
    /// field is false, each tensor has its parameter's type.
    pub f32: bool,
}

/// The tensor name that the safetensors format reserves for metadata.
const METADATA: &str = "__metadata__";

/// Writes only the parameters, or their moving averages, to a safetensors file at `path`. An existing file is replaced
/// atomically. Names and shapes are those of the layout, and types are those of the stepper or f32. PyTorch's
/// `safetensors.torch.load_file` and candle's `VarBuilder::from_mmaped_safetensors` load the file as it is. As with
/// [`save`](super::save), all ranks make this call and **only rank 0 writes**.
///
/// ```
/// use instep::checkpoint::{self, Export};
/// # use instep::{AdamW, Layout, Solo, Stepper};
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("model.safetensors");
/// let layout = Layout::builder().param("linear.weight", 6).shape([3, 2]).build()?;
/// let mut stepper = Stepper::host(&layout, AdamW::default(), Solo::default())?;
/// checkpoint::export(&stepper, Export::default(), &path)?;
/// checkpoint::import_params(&mut stepper, std::fs::File::open(&path).unwrap())?;
/// # Ok::<(), instep::Error>(())
/// ```
///
/// # Ordering
/// Waits for all steps. Allocates space for one tensor.
///
/// # Errors
/// Errors as for [`save`](super::save). `Unsupported` if `values` selects moving averages and the stepper keeps none.
/// `Layout` for a parameter called `__metadata__`.
pub fn export<D: Device>(stepper: &Stepper<D>, values: Export, path: impl AsRef<Path>) -> Result<()> {
    save_file(stepper, path.as_ref(), |out| write(stepper, values, out))
}

fn write<D: Device>(stepper: &Stepper<D>, Export { averages, f32 }: Export, out: impl Write) -> Result<()> {
    if averages && !stepper.keeps_ema() {
        let remedy = "build it with StepperBuilder::ema";
        return Err(Error::unsupported("moving averages", "this stepper keeps none", remedy));
    }
    let layout = stepper.layout();
    let mut all = Vec::with_capacity(layout.ids().len());
    for id in layout.ids() {
        let parameter = layout.parameter(id)?;
        if parameter.name == METADATA {
            let wrong = "the file's format keeps this name for itself";
            return Err(Error::layout(format_args!("`{METADATA}`"), wrong, "use another name"));
        }
        let dtype = if f32 { DType::F32 } else { stepper.precision_of(id)?.param };
        let entry =
            Entry { name: parameter.name.clone(), dtype: dtype.into(), shape: parameter.shape.clone() };
        all.push((entry, dtype, id));
    }
    // Tensors with wide elements come first, so that each tensor is aligned to its elements.
    all.sort_by_key(|(_, dtype, _)| std::cmp::Reverse(dtype.bytes()));
    let entries: Vec<Entry> = all.iter().map(|(entry, _, _)| entry.clone()).collect();
    // Without this key, Hugging Face's transformers refuses the file.
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    let failed = |error| Error::file("the parameters")(error);
    let mut out = BufWriter::new(out);
    out.write_all(&header(&entries, &metadata)?).map_err(failed)?;
    let mut values = Vec::new();
    for (_, dtype, id) in all {
        values.resize(layout.parameter(id)?.len as usize, 0.0);
        if averages && stepper.step_count(id)? > 0 {
            stepper.gather(id.ema(), &mut values)?;
        } else if f32 {
            stepper.gather(id, &mut values)?;
        } else {
            stepper.gather_stored_param(id, &mut values)?;
        }
        write_values(&mut out, dtype, &values).map_err(failed)?;
    }
    out.flush().map_err(failed)
}

/// Loads parameters from a safetensors file in which each tensor has the name of its parameter. [`export`] and
/// PyTorch's `save_file(model.state_dict())` write such files. States and step counts do not change. Moving averages
/// are set to the loaded parameters. As with [`Stepper::write`], every rank must load the file, and the next pass
/// broadcasts the parameters of rank 0.
///
/// For a parameter of any type, values may be F32, F16 or BF16. F64 is accepted if f32 represents every value exactly.
/// If the parameter's type has fewer bits than a value needs, the value is rounded to nearest.
///
/// # Ordering
/// Ordering as for [`load`](super::load).
///
/// # Errors
/// Errors as for [`load`](super::load). Also returns `Checkpoint` if the file lacks a parameter, or has a tensor that
/// is not a parameter.
pub fn import_params<D: Device>(stepper: &mut Stepper<D>, source: impl Read + Seek) -> Result<()> {
    restore(stepper, source, false, |header, stepper| sort(header, stepper)).map(drop)
}

fn sort<'h, D: Device>(header: &'h Header, stepper: &Stepper<D>) -> Result<Plan<'h>> {
    let layout = stepper.layout();
    let mut plan = Plan { begins_emas: stepper.keeps_ema(), ..Plan::default() };
    for (name, tensor) in &header.tensors {
        let found: Option<ParamId> = layout.find(name);
        let id = found.ok_or_else(|| {
            let known = layout.parameters().iter().map(|parameter| parameter.name.as_str());
            in_tensor(name, "belongs to no parameter", format_args!("use {}", one_of(name, known)))
        })?;
        plan.pieces.push(Piece::new((name.as_str(), tensor), stepper, id, Part::Value)?);
    }
    match layout.parameters().iter().find(|parameter| !header.tensors.contains_key(&parameter.name)) {
        Some(parameter) => Err(missing(&parameter.name)),
        None => Ok(plan),
    }
}
