//! A trainer that only passes time: forward in order of registration, backward in the reverse.
//!
//! It depends on the calls that a real trainer makes, in the same order.

use instep::Foresight;
use instep::{Layout, ParamId};

use super::speeds::Speeds;
use crate::Failure;

/// Foresees one pass.
pub(super) fn train(stepper: &mut Foresight, layout: &Layout, speeds: &Speeds) -> Result<(), Failure> {
    let elements = |id: ParamId| Ok::<u64, Failure>(layout.parameter(id)?.len);
    for id in layout.ids() {
        stepper.touch(id)?;
        stepper.compute(speeds.compute_ns(2, elements(id)?));
    }
    stepper.begin()?.detach();
    for id in layout.ids().rev() {
        stepper.compute(speeds.compute_ns(4, elements(id)?));
        stepper.touch(id.grad())?;
        stepper.grad_ready(id)?;
    }
    stepper.finish()?;
    Ok(())
}
