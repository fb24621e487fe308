//! Takes the memory of a variable out for a step, and puts it back after the step.
//!
//! candle gives write access to memory only to an in-place operation, one tensor at a time. A step writes all tensors
//! at once. An in-place operation therefore moves each `Vec` out of its tensor. When `Taken` is dropped, the same
//! operation puts the `Vec` back, also after an error or a panic. No element is copied.

use std::cell::Cell;
use std::mem;

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Tensor};

/// A variable's memory. The variable is empty until this value is dropped.
pub(crate) struct Taken<'a> {
    tensor: &'a Tensor,
    memory: Exchange,
}

/// An in-place operation that exchanges its `Vec` with the memory of a tensor.
struct Exchange(Cell<Vec<f32>>);

impl InplaceOp1 for Exchange {
    fn name(&self) -> &'static str {
        "exchange"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        if let CpuStorage::F32(memory) = storage {
            *memory = self.0.replace(mem::take(memory));
        }
        Ok(())
    }
}

impl<'a> Taken<'a> {
    pub(crate) fn of(tensor: &'a Tensor) -> Result<Taken<'a>> {
        let memory = Exchange(Cell::default());
        tensor.inplace_op1(&memory)?;
        Ok(Taken { tensor, memory })
    }

    pub(crate) fn memory(&mut self) -> &mut [f32] {
        self.memory.0.get_mut()
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        // The same call has succeeded before, so its result is ignored.
        let _ = self.tensor.inplace_op1(&self.memory);
    }
}
