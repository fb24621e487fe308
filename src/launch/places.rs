//! Refuses tensors of the caller's that lie where the device cannot reach them.
//!
//! Depends on addresses alone; the driver says who owns them.

use crate::error::{Error, Result};
use crate::handle::{DevicePtr, Place};
use crate::launch::region::Piece;

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
