//! Writes a stepper to a stream of bytes: the header, the data tensor by tensor, then the checksums.
//!
//! Checksums come last because each tensor is read only once. Only one tensor is in memory at a time. The bytes do not
//! depend on the buckets.

use std::collections::BTreeMap;
use std::io::{self, BufWriter, Write};

use super::extras::{Extras, Scalar};
use super::keys::{
    CHECKSUMS, EMA, GROWTH_TRACKER, PARAM, PREVIOUS_NORM, SCALE, SCHEDULE_STEP, STATE, VERSION, VERSION_KEY,
};
use super::plan::{Part, carried_key, counted};
use super::restore::OwnScalars;
use super::safetensors::{Dtype, Entry, header, write_values};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::layout::ParamId;
use crate::optim::ScalerState;
use crate::stepper::{Stepper, TensorId};

/// The start of a file, up to the tensors' data, and the list of the tensors in the order of their data.
pub(super) struct Outline {
    /// Length and header.
    pub(super) header: Vec<u8>,
    pub(super) scalars: Vec<[u8; 8]>,
    pub(super) tensors: Vec<Tensor>,
}

pub(super) struct Tensor {
    entry: Entry,
    pub(super) elements: u64,
    id: ParamId,
    part: Part,
}

/// A writer that passes all bytes on to `out` and computes their checksum.
pub(super) struct Summed<W> {
    out: W,
    hasher: crc32fast::Hasher,
}

pub(super) fn write<D: Device>(stepper: &Stepper<D>, extras: &Extras, out: impl Write) -> Result<()> {
    let outline = Outline::new(stepper, extras)?;
    let mut out = Summed::new(BufWriter::new(out));
    let mut checksums = outline.write(&mut out).map_err(failed)?;
    let mut values = Vec::new();
    for tensor in &outline.tensors {
        values.resize(tensor.elements as usize, 0.0);
        stepper.gather(tensor.name(), &mut values)?;
        write_values(&mut out, DType::F32, &values).map_err(failed)?;
        if tensor.elements > 0 {
            checksums.push(out.take_checksum());
        }
    }
    out.write_all(&checksum_bytes(&checksums)).and_then(|()| out.flush()).map_err(failed)
}

pub(super) fn failed(error: io::Error) -> Error {
    Error::file("the checkpoint")(error)
}

/// Returns the checksums as bytes. These bytes are the data of the last tensor in the file.
pub(super) fn checksum_bytes(checksums: &[u32]) -> Vec<u8> {
    checksums.iter().flat_map(|checksum| checksum.to_le_bytes()).collect()
}

impl Outline {
    pub(super) fn new<D: Device>(stepper: &Stepper<D>, extras: &Extras) -> Result<Outline> {
        let own = own_scalars(stepper)?;
        refuse_reserved(stepper, extras, &own)?;
        let (mut entries, scalars): (Vec<Entry>, _) = scalars(stepper, &own, extras)?.into_iter().unzip();
        let tensors = tensors(stepper)?;
        let with_data = entries.len() + tensors.iter().filter(|tensor| tensor.elements > 0).count();
        entries.extend(tensors.iter().map(|tensor| tensor.entry.clone()));
        entries.push(Entry { name: CHECKSUMS.into(), dtype: Dtype::U32, shape: vec![1 + with_data as u64] });
        let mut metadata = extras.metadata.clone();
        metadata.insert(VERSION_KEY.into(), VERSION.into());
        Ok(Outline { header: header(&entries, &metadata)?, scalars, tensors })
    }

    /// Writes the header and the scalars, and returns one checksum for the header and one for each scalar.
    pub(super) fn write(&self, out: &mut Summed<impl Write>) -> io::Result<Vec<u32>> {
        out.write_all(&self.header)?;
        let mut checksums = vec![out.take_checksum()];
        for scalar in &self.scalars {
            out.write_all(scalar)?;
            checksums.push(out.take_checksum());
        }
        Ok(checksums)
    }
}

impl Tensor {
    pub(super) fn name(&self) -> TensorId<'_> {
        match &self.part {
            Part::Value => self.id.into(),
            Part::State(name) => self.id.state(name),
            Part::Ema => self.id.ema(),
        }
    }
}

/// Returns the scalars, which are the first tensors in the file. Each scalar has 8 bytes, so every later tensor is
/// aligned to its elements.
fn scalars<D: Device>(
    stepper: &Stepper<D>,
    own: &BTreeMap<String, Scalar>,
    extras: &Extras,
) -> Result<Vec<(Entry, [u8; 8])>> {
    let layout = stepper.layout();
    let entry = |name: String, dtype| Entry { name, dtype, shape: vec![] };
    let mut all = Vec::new();
    for (name, scalar) in own.iter().chain(&extras.scalars) {
        let (dtype, bytes) = match scalar {
            Scalar::F64(value) => (Dtype::F64, value.to_le_bytes()),
            Scalar::U64(value) => (Dtype::U64, value.to_le_bytes()),
        };
        all.push((entry(name.clone(), dtype), bytes));
    }
    for id in layout.ids() {
        for (key, optimizer) in counted(stepper, id)? {
            let key = format!("{STATE}{}.{key}", layout.parameter(id)?.name);
            let count = match optimizer {
                None => stepper.step_count(id)?,
                Some(optimizer) => stepper.step_count((id, optimizer))?,
            };
            all.push((entry(key, Dtype::U64), count.to_le_bytes()));
            if let (Some(optimizer), Some(key)) = (optimizer, carried_key(stepper, id, optimizer)?) {
                let key = format!("{STATE}{}.{key}", layout.parameter(id)?.name);
                let carried = stepper.carried((id, optimizer))?.unwrap_or(1.0);
                all.push((entry(key, Dtype::F64), carried.to_le_bytes()));
            }
        }
    }
    Ok(all)
}

/// Returns the list of all tensors that belong to parameters. The list is the same on every rank.
pub(super) fn tensors<D: Device>(stepper: &Stepper<D>) -> Result<Vec<Tensor>> {
    let layout = stepper.layout();
    let mut all = Vec::new();
    for id in layout.ids() {
        let parameter = layout.parameter(id)?;
        let mut push = |name: String, part| {
            let entry = Entry { name, dtype: Dtype::F32, shape: parameter.shape.clone() };
            all.push(Tensor { entry, elements: parameter.len, id, part });
        };
        let name = &parameter.name;
        push(format!("{PARAM}{name}"), Part::Value);
        for state in stepper.state_names(id)? {
            push(format!("{STATE}{name}.{state}"), Part::State(state));
        }
        if stepper.keeps_ema() {
            push(format!("{EMA}{name}"), Part::Ema);
        }
    }
    Ok(all)
}

fn own_scalars<D: Device>(stepper: &Stepper<D>) -> Result<BTreeMap<String, Scalar>> {
    let mut own = BTreeMap::from([(SCHEDULE_STEP.into(), Scalar::U64(stepper.schedule_step()))]);
    if stepper.clips_by_previous_norm()
        && let Some(norm) = stepper.previous_norm()?
    {
        own.insert(PREVIOUS_NORM.into(), Scalar::F64(norm));
    }
    if let Some(ScalerState { scale, growth_tracker }) = stepper.scaler_state_if_any()? {
        own.insert(SCALE.into(), Scalar::F64(scale));
        own.insert(GROWTH_TRACKER.into(), Scalar::U64(growth_tracker.into()));
    }
    Ok(own)
}

/// Returns an error for extras that a load would refuse, or would mistake for data of the stepper.
fn refuse_reserved<D: Device>(
    stepper: &Stepper<D>,
    extras: &Extras,
    own: &BTreeMap<String, Scalar>,
) -> Result<()> {
    let why = "checkpoints use this name themselves";
    let reserved = |name: &&String| {
        [CHECKSUMS, "__metadata__"].contains(&name.as_str())
            || own.contains_key(*name)
            || name.as_str() == PREVIOUS_NORM && stepper.clips_by_previous_norm()
            || [PARAM, STATE, EMA].iter().any(|p| name.starts_with(p))
    };
    if let Some(name) = extras.scalars.keys().find(reserved) {
        return Err(Error::config("scalars", name, why, "use another name"));
    }
    // Scalars that another stepper would write itself are allowed if their types and values are valid for that stepper.
    if OwnScalars::of(&extras.scalars).is_err() {
        let names = [SCALE, GROWTH_TRACKER, PREVIOUS_NORM].into_iter();
        let names: Vec<&str> = names.filter(|name| extras.scalars.contains_key(*name)).collect();
        let wrong = "checkpoints use this name themselves, and no load takes this value";
        return Err(Error::config("scalars", names.join(", "), wrong, "use another name"));
    }
    if extras.metadata.contains_key(VERSION_KEY) {
        Err(Error::config("metadata", VERSION_KEY, why, "use another name"))
    } else {
        Ok(())
    }
}

impl<W> Summed<W> {
    pub(super) fn new(out: W) -> Summed<W> {
        Summed { out, hasher: crc32fast::Hasher::new() }
    }

    /// Returns the checksum of all bytes that were written since this function was last called.
    pub(super) fn take_checksum(&mut self) -> u32 {
        std::mem::take(&mut self.hasher).finalize()
    }
}

impl<W: Write> Write for Summed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
