//! Maps each tensor of a file to a tensor of a stepper, using only the file's header.
//!
//! A checkpoint of this library must have every tensor of the stepper, but may have no moving averages at all. All
//! other tensors of the checkpoint, except the checksums, must be scalars. This module reads no data.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::keys::{CHECKSUMS, EMA, PARAM, STATE, STEP};
use super::safetensors::convert::is_float;
use super::safetensors::{Dtype, Header, Tensor, in_tensor};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::layout::ParamId;
use crate::stepper::{OptimizerId, Stepper};

pub(super) type Named<'h> = (&'h str, &'h Tensor);

/// All assignments and conversions of a load.
#[derive(Default)]
pub(super) struct Plan<'h> {
    pub(super) pieces: Vec<Piece<'h>>,
    /// States that the load sets to zero.
    pub(super) zeros: Vec<(ParamId, Cow<'static, str>)>,
    pub(super) counts: Vec<Counted<'h>>,
    pub(super) scalars: Vec<Named<'h>>,
    /// Whether the averages start with the parameters' values. This is the case if the stepper keeps averages and the
    /// file has none.
    pub(super) begins_emas: bool,
}

/// A tensor of one parameter.
pub(super) struct Piece<'h> {
    pub(super) from: Named<'h>,
    pub(super) id: ParamId,
    pub(super) part: Part,
}

pub(super) enum Part {
    Value,
    State(Cow<'static, str>),
    Ema,
}

/// A step count of a parameter: the count of `optimizer`, or the parameter's own count if `optimizer` is `None`.
pub(super) struct Counted<'h> {
    pub(super) id: ParamId,
    pub(super) optimizer: Option<OptimizerId>,
    pub(super) count: Count<'h>,
    /// The number that the optimizer carries besides its step count, if any. NAdam carries `mu_product`, for example.
    pub(super) carried: Option<Named<'h>>,
}

/// The source of a step count: a tensor of the file, or a number.
#[derive(Clone, Copy)]
pub(super) enum Count<'h> {
    Stored(Named<'h>),
    Given(u64),
}

impl<'h> Plan<'h> {
    /// Makes the plan for a file that this library wrote.
    pub(super) fn exact<D: Device>(header: &'h Header, stepper: &Stepper<D>) -> Result<Plan<'h>> {
        let mut rest: BTreeMap<&str, &Tensor> =
            header.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        rest.remove(CHECKSUMS);
        let mut take = |key: String| rest.remove_entry(key.as_str()).ok_or_else(|| missing(&key));
        let mut plan = Plan::default();
        let layout = stepper.layout();
        let has_emas = header.tensors.keys().any(|key| key.starts_with(EMA));
        plan.begins_emas = stepper.keeps_ema() && !has_emas;
        for id in layout.ids() {
            let name = &layout.parameter(id)?.name;
            let mut piece = |key: String, part| {
                let from = take(key)?;
                refuse_type(from, from.1.dtype == Dtype::F32, "F32")?;
                Piece::new(from, stepper, id, part)
            };
            plan.pieces.push(piece(format!("{PARAM}{name}"), Part::Value)?);
            for state in stepper.state_names(id)? {
                plan.pieces.push(piece(format!("{STATE}{name}.{state}"), Part::State(state))?);
            }
            if stepper.keeps_ema() && has_emas {
                plan.pieces.push(piece(format!("{EMA}{name}"), Part::Ema)?);
            }
            for (key, optimizer) in counted(stepper, id)? {
                let from = take(format!("{STATE}{name}.{key}"))?;
                refuse_type(from, from.1.dtype == Dtype::U64, "U64")?;
                let count = Count::new(from)?;
                let carried = match carried_key(stepper, id, optimizer)? {
                    Some(key) => Some(carried(take(format!("{STATE}{name}.{key}"))?)?),
                    None => None,
                };
                plan.counts.push(Counted { id, optimizer, count, carried });
            }
        }
        for from in rest {
            plan.add_scalar(from)?;
        }
        Ok(plan)
    }

    /// Adds a tensor to the trainer's scalars, because it does not belong to the stepper. Returns an error if the
    /// tensor cannot be a scalar of the trainer.
    pub(super) fn add_scalar(&mut self, from: Named<'h>) -> Result<()> {
        let (key, Tensor { dtype, shape, .. }) = from;
        let is_scalar = matches!(dtype, Dtype::F64 | Dtype::U64) && shape.is_empty();
        if !is_scalar || [PARAM, STATE, EMA].iter().any(|prefix| key.starts_with(prefix)) {
            return Err(in_tensor(key, "has no place in this stepper", SAME_MODEL));
        }
        self.scalars.push(from);
        Ok(())
    }
}

impl<'h> Piece<'h> {
    /// Checks that the tensor has real numbers and as many elements as the parameter. Its shape may differ.
    pub(super) fn new<D: Device>(
        from: Named<'h>,
        stepper: &Stepper<D>,
        id: ParamId,
        part: Part,
    ) -> Result<Piece<'h>> {
        let (key, tensor) = from;
        let parameter = stepper.layout().parameter(id)?;
        refuse_type(from, is_float(tensor.dtype), "one of real numbers")?;
        if tensor.elements != parameter.len {
            let wrong = format_args!(
                "has {} elements, and `{}` has {}",
                tensor.elements, parameter.name, parameter.len
            );
            return Err(in_tensor(key, wrong, SAME_MODEL));
        }
        Ok(Piece { from, id, part })
    }
}

impl<'h> Count<'h> {
    /// Checks that the tensor has one element, in any shape.
    pub(super) fn new(from: Named<'h>) -> Result<Count<'h>> {
        require_one(from, "save the step count as one number").map(Count::Stored)
    }
}

/// Checks the tensor in which a file stores the number that an optimizer carries. The tensor must be F32 or F64 and
/// must have one element.
pub(super) fn carried(from: Named<'_>) -> Result<Named<'_>> {
    refuse_type(from, matches!(from.1.dtype, Dtype::F32 | Dtype::F64), "F64 or F32")?;
    require_one(from, "save the product as one number")
}

fn require_one<'h>(from: Named<'h>, remedy: &str) -> Result<Named<'h>> {
    match from.1.elements {
        1 => Ok(from),
        several => Err(in_tensor(from.0, format_args!("has {several} elements instead of 1"), remedy)),
    }
}

/// Returns the name of the number that the optimizer carries, if any.
pub(super) fn carried_key<D: Device>(
    stepper: &Stepper<D>,
    id: ParamId,
    optimizer: Option<OptimizerId>,
) -> Result<Option<String>> {
    optimizer.map_or(Ok(None), |optimizer| stepper.carried_name(id, optimizer))
}

/// Returns the names of a parameter's step counts, each with its optimizer. The names are `step` for the first
/// optimizer, then `step#1`, `step#2` and so on. The name `step` is returned even if no optimizer steps the parameter.
pub(super) fn counted<D: Device>(
    stepper: &Stepper<D>,
    id: ParamId,
) -> Result<Vec<(String, Option<OptimizerId>)>> {
    let mut stepping = stepper.stepping(id)?.into_iter();
    let first = (STEP.to_owned(), stepping.next());
    let further = (1..).zip(stepping).map(|(k, optimizer)| (format!("{STEP}#{k}"), Some(optimizer)));
    Ok([first].into_iter().chain(further).collect())
}

fn refuse_type((key, tensor): Named<'_>, fine: bool, wanted: &str) -> Result<()> {
    if fine {
        Ok(())
    } else {
        Err(in_tensor(key, format_args!("has dtype {}, not {wanted}", tensor.dtype), "convert it"))
    }
}

const SAME_MODEL: &str = "load a file that was saved with these parameters, options and optimizers";

pub(super) fn missing(key: &str) -> Error {
    let remedy = if key.starts_with(STATE) {
        "load a file that was saved with this optimizer and precision"
    } else {
        SAME_MODEL
    };
    in_tensor(key, "missing", remedy)
}
