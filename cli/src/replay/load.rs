//! Loads parameters, masters, averages, states and counts from a file into a stepper.
//!
//! Parameters, masters and states are read back and compared with the file. If a value was rounded, the file is
//! refused, because the output would differ from that of the uninterrupted run. A copy is not loaded, but a copy with
//! values that would be rounded is refused too. Averages and counts are not compared.

use std::io::{Read, Seek};

use instep::checkpoint::safetensors::{Data, Tensor};
use instep::{DType, Element, Error, ParamId, Result, Stepper, bf16, f16};

use super::build::set_exceptions;
use super::dtypes::refuse_rounded;
use super::{Companion, Config, Input, Param};
use crate::Failure;

pub(super) fn load<R: Read + Seek>(
    config: &Config,
    input: &Input,
    data: &mut Data<R>,
    stepper: &mut Stepper,
) -> Result<(), Failure> {
    let layout = stepper.layout().clone();
    let (mut values, mut stored) = (Vec::new(), Vec::new());
    for (param, id) in input.params.iter().zip(layout.ids()) {
        let Param { name, group, value, companions, states, .. } = param;
        values.resize(value.elements as usize, 0.0);
        stored.resize(value.elements as usize, 0.0);
        let mut read = |tensor: &Tensor, into: &mut [f32]| data.read(tensor, 0, into);
        // A master weight is more precise than its parameter, and must round to it.
        let master = companions.get(&Companion::Master);
        let key = if master.is_some() { format!("master.{name}") } else { format!("param.{name}") };
        read(master.unwrap_or(value), &mut values)?;
        stepper.write(id, &values)?;
        stepper.read(id, &mut stored)?;
        refuse_rounded(&key, &values, stored.iter().copied())?;
        if master.is_some() {
            read(value, &mut values)?;
            read_stored(stepper, id, config.precision.param, &mut stored)?;
            refuse_rounded(&format!("param.{name}"), &values, stored.iter().copied())?;
        }
        for (state, tensor) in states {
            read(tensor, &mut values)?;
            stepper.write(id.state(state), &values)?;
            stepper.read(id.state(state), &mut stored)?;
            refuse_rounded(&format!("state.{name}.{state}"), &values, stored.iter().copied())?;
        }
        if let (Some(tensor), Some(dtype)) = (companions.get(&Companion::Copy), config.copy) {
            read(tensor, &mut values)?;
            refuse_rounded(&format!("copy.{name}"), &values, values.iter().map(|value| dtype.round(*value)))?;
        }
        let count = param.first_count(config.groups[*group].optimizer.state_names());
        if config.ema.is_some() && count > 0 {
            match companions.get(&Companion::Ema) {
                Some(tensor) => read(tensor, &mut values)?,
                None => stepper.read(id, &mut values)?,
            }
            stepper.write(id.ema(), &values)?;
        }
        match param.product {
            // The stepper counts no updates of a parameter without elements, and the output has the file's count.
            _ if layout.parameter(id)?.len == 0 => {}
            Some(product) => {
                let only = stepper.optimizers_of(id)?[0];
                stepper.set_step_count((id, only), (count, product))?;
            }
            None => stepper.set_step_count(id, count)?,
        }
    }
    set_exceptions(config, stepper)
}

/// Reads the stored parameters, and not their masters.
pub(super) fn read_stored(stepper: &Stepper, id: ParamId, dtype: DType, into: &mut [f32]) -> Result<()> {
    match dtype {
        DType::F32 => widen::<f32>(stepper, id, into),
        DType::BF16 => widen::<bf16>(stepper, id, into),
        DType::F16 => widen::<f16>(stepper, id, into),
        other => {
            Err(Error::unsupported(format_args!("{other} parameters"), "not stepped", "use f32, bf16 or f16"))
        }
    }
}

fn widen<T: Element>(stepper: &Stepper, id: ParamId, into: &mut [f32]) -> Result<()> {
    let stored = stepper.view::<T>(id)?;
    into.iter_mut().zip(stored).for_each(|(place, value)| *place = value.to_f32());
    Ok(())
}
