//! What a launch cannot take: element types that would break an optimizer's states, and tensors out of the device's reach.
//!
//! Each is refused by name, from data alone; the driver says who owns an address.

use crate::error::{Error, Result};
use crate::handle::{DevicePtr, Place};
use crate::launch::region::Piece;
use crate::layout::{Moments, Precision, Storage};
use crate::optim::Optimizer;

/// A block of second moments below 2^-90 is zero in codes (`kernels/numeric/codes.h`): their roots must not matter beside eps.
const SMALLEST_EPS_OF_CODES: f64 = 1.0 / (1u64 << 45) as f64;
const TOO_SMALL_FOR_CODES: &str =
    "8-bit codes lose second moments below 2^-90, so eps must be at least 2^-45";

/// Refuses element types and options that this optimizer does not take.
pub(crate) fn refuse_storage(optimizer: &dyn Optimizer, storage: &Storage) -> Result<()> {
    let (rule, precision) = (optimizer.as_rule(), storage.precision);
    if let Some(custom) = rule.custom() {
        let thing = format_args!("optimizer `{}`", custom.name());
        if precision != Precision::F32 {
            let remedy = "use Precision::F32 or an optimizer of this crate";
            return Err(Error::unsupported(thing, "custom code steps only f32 tensors", remedy));
        }
        if let Some(what) = storage.copy.map(|_| "copies").or(storage.ema.then_some("moving averages")) {
            let wrong = format_args!("custom code writes no {what} of parameters");
            let remedy = "leave them out or use an optimizer of this crate";
            return Err(Error::unsupported(thing, wrong, remedy));
        }
    }
    let of_floats = rule.needs_f32_states().filter(|_| precision.moments != Moments::F32);
    let tiny = rule.eps().filter(|eps| *eps < SMALLEST_EPS_OF_CODES);
    let of_codes = rule.needs_floats().or(tiny.map(|_| TOO_SMALL_FOR_CODES));
    let of_codes = of_codes.filter(|_| precision.moments == Moments::EightBit);
    match of_floats.or(of_codes) {
        None => Ok(()),
        Some(wrong) => {
            let value = format!("{:?}", precision.moments);
            Err(Error::config("moments", value, wrong, "keep states in f32"))
        }
    }
}

/// Refuses tensors that begin or end somewhere else; where an address lies `inspect` knows.
pub(crate) fn refuse_other_places<'a>(
    pieces: impl IntoIterator<Item = &'a Piece>,
    place: Place,
    inspect: impl Fn(DevicePtr) -> Result<Place>,
) -> Result<()> {
    for piece in pieces {
        let start = piece.base.get();
        for (verb, address) in [("lies", start), ("ends", start + piece.bytes - 1)] {
            let found = inspect(DevicePtr(address));
            if found != Ok(place) {
                let found = found
                    .map_or_else(|e| format!("no memory of any device ({e})"), |place| place.to_string());
                return Err(Error::layout(
                    format_args!("address {address:#x}"),
                    format_args!("a tensor {verb} there, in {found}"),
                    format_args!("lend tensors in {place}"),
                ));
            }
        }
    }
    Ok(())
}
