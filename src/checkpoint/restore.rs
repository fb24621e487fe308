//! Loads a file into a stepper by reading it twice. The first reading checks the file, and the second changes the
//! stepper.
//!
//! Nothing in the stepper changes before the first reading has ended. The second reading checks each parameter, state
//! and average again, and changes the stepper's tensor only after this check. Scalars are read only once.

use std::collections::BTreeMap;
use std::io::{Read, Seek};

use super::extras::{Extras, Scalar};
use super::keys::{GROWTH_TRACKER, PREVIOUS_NORM, SCALE, SCHEDULE_STEP, VERSION, VERSION_KEY};
use super::plan::{Count, Counted, Named, Part, Piece, Plan, missing};
use super::safetensors::{self, Data, Dtype, Header, convert, in_tensor};
use super::verified::Verified;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::launch::{CARRIED_RANGE, carried_fits};
use crate::optim::ScalerState;
use crate::stepper::Stepper;
use crate::text::quoted;

/// Calls `sort` to plan the load, checks the file, and loads it. If `own` is true, the file must be a checkpoint of
/// this library.
pub(super) fn restore<D: Device, R: Read + Seek>(
    stepper: &mut Stepper<D>,
    source: R,
    own: bool,
    sort: impl for<'h> FnOnce(&'h Header, &Stepper<D>) -> Result<Plan<'h>>,
) -> Result<Extras> {
    // Reading the file may take long. An open pass or a failed stepper is therefore refused first.
    if let Some(first) = stepper.layout().ids().next() {
        stepper.step_count(first)?;
    }
    let (header, mut source) = Verified::open(source)?;
    let mut metadata = header.metadata.clone();
    refuse_foreign(metadata.remove(VERSION_KEY).as_deref(), own, source.has_checksums())?;
    let plan = sort(&header, stepper)?;

    for Piece { from, .. } in &plan.pieces {
        read(&mut source, *from, |_| ())?;
    }
    let mut counts = Vec::with_capacity(plan.counts.len());
    for Counted { id, optimizer, count, carried } in &plan.counts {
        let count = match count {
            Count::Given(count) => *count,
            Count::Stored(from) => stored(&mut source, *from, convert::count)?.ok_or_else(|| {
                in_tensor(from.0, "not a whole number below 2^63", "save the number of updates")
            })?,
        };
        let mut fitting = None;
        if let Some(from) = carried {
            fitting =
                stored(&mut source, *from, convert::real)?.filter(|number| carried_fits(count, *number));
            if fitting.is_none() {
                return Err(in_tensor(from.0, "out of range", format_args!("use {CARRIED_RANGE}")));
            }
        }
        counts.push((*id, *optimizer, count, fitting));
    }
    let mut scalars = BTreeMap::new();
    for from in &plan.scalars {
        scalars.extend(stored(&mut source, *from, scalar)?.map(|scalar| (from.0.to_owned(), scalar)));
    }
    let own_scalars = OwnScalars::take(stepper, &mut scalars)?;

    load(stepper, &mut source, &plan)?;
    for (id, optimizer, count, carried) in counts {
        match (optimizer, carried) {
            (None, _) => stepper.set_step_count(id, count)?,
            (Some(optimizer), None) => stepper.set_step_count((id, optimizer), count)?,
            (Some(optimizer), Some(carried)) => {
                stepper.set_step_count((id, optimizer), (count, carried))?;
            }
        }
    }
    own_scalars.set(stepper, own)?;
    Ok(Extras { scalars, metadata })
}

/// Opens a tensor file. A checkpoint of this library is read completely, and its checksums are verified.
pub(super) fn open_checked<R: Read + Seek>(source: R) -> Result<(Header, Data<R>)> {
    let (header, data) = safetensors::open(source)?;
    let Some(version) = header.metadata.get(VERSION_KEY) else { return Ok((header, data)) };
    let mut source = Verified::new(&header, data)?;
    refuse_foreign(Some(version), true, source.has_checksums())?;
    for (key, tensor) in &header.tensors {
        source.stream(key, tensor, |_| Ok(()))?;
    }
    Ok((header, source.data))
}

/// The stepper's scalars in a checkpoint.
pub(super) struct OwnScalars {
    scaler: Option<ScalerState>,
    schedule_step: Option<u64>,
    previous_norm: Option<f64>,
}

impl OwnScalars {
    /// Finds the stepper's scalars in `scalars`. The type and the value of each scalar must be valid for the scalar's
    /// name.
    pub(super) fn of(scalars: &BTreeMap<String, Scalar>) -> Result<OwnScalars> {
        let number = |name: &str| match scalars.get(name) {
            None => Ok(None),
            Some(Scalar::F64(number)) => Ok(Some(*number)),
            Some(_) => Err(in_tensor(name, "not an F64 scalar", REPEAT)),
        };
        let count = |name: &str| match scalars.get(name) {
            None => Ok(None),
            Some(Scalar::U64(count)) => Ok(Some(*count)),
            Some(_) => Err(in_tensor(name, "not a U64 scalar", REPEAT)),
        };
        let (schedule_step, previous_norm) = (count(SCHEDULE_STEP)?, number(PREVIOUS_NORM)?);
        if schedule_step.is_some_and(|step| step >= 1 << 63) {
            return Err(in_tensor(SCHEDULE_STEP, "2^63 or more", REPEAT));
        }
        if previous_norm.is_some_and(|norm| !(norm >= 0.0 && norm.is_finite())) {
            return Err(in_tensor(PREVIOUS_NORM, "negative or not finite", REPEAT));
        }
        let scaler = match (number(SCALE)?, count(GROWTH_TRACKER)?) {
            (None, None) => None,
            (Some(scale), Some(tracker)) => {
                let tracker =
                    u32::try_from(tracker).map_err(|_| in_tensor(GROWTH_TRACKER, "2^32 or more", REPEAT))?;
                Some(ScalerState { scale, growth_tracker: tracker })
            }
            (Some(_), None) => return Err(missing(GROWTH_TRACKER)),
            (None, Some(_)) => return Err(missing(SCALE)),
        };
        Ok(OwnScalars { scaler, schedule_step, previous_norm })
    }

    /// Removes from `scalars` the entries that the stepper uses and accepts, and returns these entries.
    fn take<D: Device>(stepper: &Stepper<D>, scalars: &mut BTreeMap<String, Scalar>) -> Result<OwnScalars> {
        let mut own = OwnScalars::of(scalars)?;
        if let Some(state) = own.scaler {
            own.scaler = stepper.accepts_scaler_state(state)?.then_some(state);
        }
        let clips = stepper.clips_by_previous_norm();
        own.previous_norm = own.previous_norm.filter(|_| clips);
        let taken = |name: &str| match name {
            SCHEDULE_STEP => true,
            PREVIOUS_NORM => clips,
            SCALE | GROWTH_TRACKER => own.scaler.is_some(),
            _ => false,
        };
        scalars.retain(|name, _| !taken(name));
        Ok(own)
    }

    /// Sets these scalars in the stepper. A checkpoint has no previous norm if it was saved before the first pass with
    /// a norm. Loading such a checkpoint removes the stepper's previous norm.
    fn set<D: Device>(self, stepper: &mut Stepper<D>, own: bool) -> Result<()> {
        if let Some(step) = self.schedule_step {
            stepper.set_schedule_step(step)?;
        }
        if stepper.clips_by_previous_norm() && (own || self.previous_norm.is_some()) {
            stepper.set_previous_norm(self.previous_norm)?;
        }
        match self.scaler {
            Some(state) => stepper.set_scaler_state(state),
            None => Ok(()),
        }
    }
}

/// Reads the file a second time, and changes the stepper.
fn load<D: Device, R: Read + Seek>(
    stepper: &mut Stepper<D>,
    source: &mut Verified<R>,
    plan: &Plan<'_>,
) -> Result<()> {
    let zeroed = plan.zeros.iter().map(|(id, _)| *id);
    let averaged = stepper.layout().ids().filter(|_| plan.begins_emas);
    let mut longest = 0;
    for id in plan.pieces.iter().map(|piece| piece.id).chain(zeroed).chain(averaged) {
        longest = longest.max(stepper.layout().parameter(id)?.len as usize);
    }
    // This memory is allocated before anything is changed.
    let mut values = Vec::with_capacity(longest);
    for (loaded, Piece { from, id, part }) in plan.pieces.iter().enumerate() {
        values.clear();
        if let Err(error) = read(source, *from, |value| values.push(value)) {
            let (tensors, why) = (plan.pieces.len(), error.clone().into());
            return Err(if loaded == 0 { error } else { Error::PartlyLoaded { loaded, tensors, why } });
        }
        match part {
            Part::Value => stepper.write(*id, &values)?,
            Part::State(state) => stepper.write(id.state(state), &values)?,
            Part::Ema => stepper.write(id.ema(), &values)?,
        }
    }
    for (id, state) in &plan.zeros {
        values.clear();
        values.resize(stepper.layout().parameter(*id)?.len as usize, 0.0);
        stepper.write(id.state(state), &values)?;
    }
    if plan.begins_emas {
        for id in stepper.layout().clone().ids() {
            values.resize(stepper.layout().parameter(id)?.len as usize, 0.0);
            stepper.gather(id, &mut values)?;
            stepper.write(id.ema(), &values)?;
        }
    }
    Ok(())
}

const REPEAT: &str = "load another checkpoint, or save this one again";

fn refuse_foreign(version: Option<&str>, own: bool, has_checksums: bool) -> Result<()> {
    let refuse = |wrong: String, remedy| Err(Error::checkpoint("the file", wrong, remedy));
    match version {
        Some(VERSION) if !has_checksums => refuse("has lost its checksums".into(), REPEAT),
        Some(VERSION) => Ok(()),
        Some(other) => refuse(
            format!("has version {}, not {}", quoted(other), quoted(VERSION)),
            "use the library that wrote it",
        ),
        None if own => refuse(
            "not a checkpoint of this library, or without its metadata".into(),
            "use `import_params` for parameters alone, `import` for a state of torch.optim",
        ),
        None => Ok(()),
    }
}

fn read<R: Read + Seek>(
    source: &mut Verified<R>,
    (key, tensor): Named<'_>,
    mut take: impl FnMut(f32),
) -> Result<()> {
    let inexact = |value: f64| {
        in_tensor(
            key,
            format_args!("holds {value:e}, which f32 cannot represent"),
            "round it to f32 before saving",
        )
    };
    source.stream(key, tensor, |bytes| convert::floats(tensor.dtype, bytes, &mut take).map_err(inexact))
}

/// Reads the number that a tensor stores. [`Plan`] has checked that the tensor has one element.
fn stored<R: Read + Seek, T>(
    source: &mut Verified<R>,
    (key, tensor): Named<'_>,
    convert: impl Fn(Dtype, &[u8]) -> Option<T>,
) -> Result<Option<T>> {
    let mut number = None;
    source.stream(key, tensor, |bytes| {
        number = convert(tensor.dtype, bytes);
        Ok(())
    })?;
    Ok(number)
}

/// Converts the 8 bytes of a scalar.
fn scalar(dtype: Dtype, bytes: &[u8]) -> Option<Scalar> {
    let bits = u64::from_le_bytes(*bytes.first_chunk()?);
    Some(if dtype == Dtype::F64 { Scalar::F64(f64::from_bits(bits)) } else { Scalar::U64(bits) })
}
