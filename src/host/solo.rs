//! A group of one rank, whose gradients are the sums already.
//!
//! Its calls copy at most, from the source to another destination.

use std::sync::Arc;

use crate::collective::{Call, Collective, CollectiveKind};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::handle::Place;

/// One rank: training in a single process. Buckets launch as soon as they are complete, in any order. A framework of
/// several ranks that sums gradients itself builds with [`Sums::by_caller`](crate::Sums::by_caller).
#[derive(Clone, Copy, Debug, Default)]
pub struct Solo(());

impl Collective for Solo {
    fn rank(&self) -> u32 {
        0
    }

    fn world_size(&self) -> u32 {
        1
    }

    /// Reaches every place, because it never touches a buffer that is reduced in place.
    fn reaches(&self, _: Place) -> bool {
        true
    }

    fn sums(&self, _: DType) -> bool {
        true
    }

    fn knows(&self, _: CollectiveKind) -> bool {
        true
    }

    fn duplicate(&self) -> Result<Arc<dyn Collective>> {
        Ok(Arc::new(*self))
    }

    fn enqueue(&self, call: &mut Call<'_>) -> Result<()> {
        // On a GPU, where the call has a stream, steppers sum in place.
        if call.stream().is_none() {
            call.in_place()?;
        }
        Ok(())
    }

    fn abort(&self, _: &Error) {}
}
