//! Writes a stepper to a stream of bytes: the header, the data tensor by tensor, then the checksums.
//!
//! Checksums come last because the data are seen once. One tensor is in memory at a time. The same training gives the
//! same bytes with any buckets.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, BufWriter, Write};

use super::extras::{Extras, Scalar};
use super::keys::{
    CHECKSUMS, EMA, GROWTH_TRACKER, PARAM, PREVIOUS_NORM, SCALE, SCHEDULE_STEP, STATE, VERSION, VERSION_KEY,
};
use super::plan::{carried_key, counted};
use super::safetensors::{Dtype, Entry, header, write_values};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::layout::ParamId;
use crate::optim::ScalerState;
use crate::stepper::Stepper;

/// The source of a tensor's data.
enum Content {
    Scalar([u8; 8]),
    Param(ParamId),
    State(ParamId, Cow<'static, str>),
    Ema(ParamId),
}

/// A writer that keeps the checksum of the bytes that it has passed on.
struct Summed<W> {
    out: W,
    hasher: crc32fast::Hasher,
}

pub(super) fn write<D: Device>(stepper: &Stepper<D>, extras: &Extras, out: impl Write) -> Result<()> {
    let own = own_scalars(stepper)?;
    refuse_reserved(extras, &own)?;
    let contents = contents(stepper, &own, extras)?;
    let (mut entries, contents): (Vec<Entry>, Vec<Content>) = contents.into_iter().unzip();
    let with_data = entries.iter().filter(|entry| !entry.shape.contains(&0)).count();
    entries.push(Entry { name: CHECKSUMS.into(), dtype: Dtype::U32, shape: vec![1 + with_data as u64] });
    let mut metadata = extras.metadata.clone();
    metadata.insert(VERSION_KEY.into(), VERSION.into());

    let failed = |error| Error::file("the checkpoint")(error);
    let mut out = Summed { out: BufWriter::new(out), hasher: crc32fast::Hasher::new() };
    out.write_all(&header(&entries, &metadata)?).map_err(failed)?;
    let mut checksums = vec![out.take_checksum()];
    let mut values = Vec::new();
    for (entry, content) in entries.iter().zip(contents) {
        values.resize(entry.shape.iter().product::<u64>() as usize, 0.0);
        match content {
            Content::Scalar(bytes) => out.write_all(&bytes),
            Content::Param(id) => {
                stepper.gather(id, &mut values)?;
                write_values(&mut out, DType::F32, &values)
            }
            Content::State(id, name) => {
                stepper.gather(id.state(&name), &mut values)?;
                write_values(&mut out, DType::F32, &values)
            }
            Content::Ema(id) => {
                stepper.gather(id.ema(), &mut values)?;
                write_values(&mut out, DType::F32, &values)
            }
        }
        .map_err(failed)?;
        if !entry.shape.contains(&0) {
            checksums.push(out.take_checksum());
        }
    }
    let checksums: Vec<u8> = checksums.iter().flat_map(|checksum| checksum.to_le_bytes()).collect();
    out.write_all(&checksums).and_then(|()| out.flush()).map_err(failed)
}

/// All tensors in the order of their data, 8-byte ones first, so that each is aligned to its elements.
fn contents<D: Device>(
    stepper: &Stepper<D>,
    own: &BTreeMap<String, Scalar>,
    extras: &Extras,
) -> Result<Vec<(Entry, Content)>> {
    let layout = stepper.layout();
    let entry = |name: String, dtype, shape| Entry { name, dtype, shape };
    let mut all = Vec::new();
    for (name, scalar) in own.iter().chain(&extras.scalars) {
        let (dtype, bytes) = match scalar {
            Scalar::F64(value) => (Dtype::F64, value.to_le_bytes()),
            Scalar::U64(value) => (Dtype::U64, value.to_le_bytes()),
        };
        all.push((entry(name.clone(), dtype, vec![]), Content::Scalar(bytes)));
    }
    for id in layout.ids() {
        for (key, optimizer) in counted(stepper, id)? {
            let key = format!("{STATE}{}.{key}", layout.parameter(id)?.name);
            let count = match optimizer {
                None => stepper.step_count(id)?,
                Some(optimizer) => stepper.step_count((id, optimizer))?,
            };
            all.push((entry(key, Dtype::U64, vec![]), Content::Scalar(count.to_le_bytes())));
            if let (Some(optimizer), Some(key)) = (optimizer, carried_key(stepper, id, optimizer)?) {
                let key = format!("{STATE}{}.{key}", layout.parameter(id)?.name);
                let carried = stepper.carried((id, optimizer))?.unwrap_or(1.0);
                all.push((entry(key, Dtype::F64, vec![]), Content::Scalar(carried.to_le_bytes())));
            }
        }
    }
    for id in layout.ids() {
        let parameter = layout.parameter(id)?;
        let (name, shape) = (&parameter.name, parameter.shape.clone());
        all.push((entry(format!("{PARAM}{name}"), Dtype::F32, shape.clone()), Content::Param(id)));
        for state in stepper.state_names(id)? {
            let key = format!("{STATE}{name}.{state}");
            all.push((entry(key, Dtype::F32, shape.clone()), Content::State(id, state)));
        }
        if stepper.keeps_ema() {
            all.push((entry(format!("{EMA}{name}"), Dtype::F32, shape), Content::Ema(id)));
        }
    }
    Ok(all)
}

/// The stepper's scalars beside its tensors.
fn own_scalars<D: Device>(stepper: &Stepper<D>) -> Result<BTreeMap<String, Scalar>> {
    let mut own = BTreeMap::from([(SCHEDULE_STEP.into(), Scalar::U64(stepper.schedule_step()))]);
    if let Some(norm) = stepper.previous_norm()? {
        own.insert(PREVIOUS_NORM.into(), Scalar::F64(norm));
    }
    if let Some(ScalerState { scale, growth_tracker }) = stepper.scaler_state_if_any()? {
        own.insert(SCALE.into(), Scalar::F64(scale));
        own.insert(GROWTH_TRACKER.into(), Scalar::U64(growth_tracker.into()));
    }
    Ok(own)
}

fn refuse_reserved(extras: &Extras, own: &BTreeMap<String, Scalar>) -> Result<()> {
    let why = "checkpoints use this name themselves";
    let reserved = |name: &&String| {
        [CHECKSUMS, "__metadata__"].contains(&name.as_str())
            || own.contains_key(*name)
            || [PARAM, STATE, EMA].iter().any(|p| name.starts_with(p))
    };
    if let Some(name) = extras.scalars.keys().find(reserved) {
        return Err(Error::config("scalars", name, why, "use another name"));
    }
    match extras.metadata.contains_key(VERSION_KEY) {
        true => Err(Error::config("metadata", VERSION_KEY, why, "use another name")),
        false => Ok(()),
    }
}

impl<W> Summed<W> {
    /// Returns the checksum of all bytes since the last call.
    fn take_checksum(&mut self) -> u32 {
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
