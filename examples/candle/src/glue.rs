//! instep's AdamW for candle's variables on the CPU: one launch steps all of them where they lie.
//!
//! candle lends memory for writing only to an operation in place, one tensor at a time. So the operation takes the memory
//! out, and the same operation puts it back after the step, also after an error.

use std::{cell::Cell, error::Error, mem};

use candle_core::{CpuStorage, InplaceOp1, Tensor, Var, backprop::GradStore};
use instep::bucket_step::{Tensor as Run, Tensors};
use instep::{AdamW, BucketStep, Layout, Scaling};

pub type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Memory that changes places with a tensor's.
struct Exchange(Cell<Vec<f32>>);

impl InplaceOp1 for Exchange {
    fn name(&self) -> &'static str {
        "exchange"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &candle_core::Layout) -> candle_core::Result<()> {
        if let CpuStorage::F32(memory) = storage {
            *memory = self.0.replace(mem::take(memory));
        }
        Ok(())
    }
}

/// Returns what steps these variables, given their gradients and a learning rate.
pub fn stepper(vars: Vec<Var>, adamw: AdamW) -> Result<impl FnMut(&GradStore, f64) -> Result<()>> {
    let params = vars.iter().map(|var| (format!("{:?}", var.id()), var.elem_count()));
    let layout = params.fold(Layout::builder(), |layout, (name, len)| layout.param(name, len));
    let mut bucket = BucketStep::builder(&layout.build()?, adamw.clone()).host()?;
    let mut states = [(); 2].map(|()| vec![0.0f32; bucket.elements() as usize]);
    Ok(move |grads: &GradStore, lr| {
        bucket.set_optimizer("default", &AdamW { lr, ..adamw.clone() })?;
        let grad = |var| Ok(grads.get(var).ok_or("a variable has no gradient")?.contiguous()?);
        let grads = vars.iter().map(|var| grad(var)).collect::<Result<Vec<_>>>()?;
        let tensors = vars.iter().map(Var::as_tensor).chain(&grads);
        let mut lent: Vec<_> = tensors.map(|tensor| (tensor, Exchange(Cell::default()))).collect();
        // What is not f32 on the CPU stays where it is, and the step refuses its empty run.
        let exchange = |(tensor, memory): &(&Tensor, Exchange)| drop(tensor.inplace_op1(memory));
        lent.iter().for_each(exchange);
        let mut runs: Vec<_> = lent.iter_mut().map(|(_, memory)| memory.0.get_mut().as_mut_slice()).collect();
        let (params, grads) = runs.split_at_mut(vars.len());
        let tensors = Tensors::new(Run::slices_mut(params), Run::slices_mut(grads));
        let states = states.each_mut().map(|state| Run::slice_mut(state));
        let stepped = bucket.step(&tensors.states(states), Scaling::NONE);
        lent.iter().rev().for_each(exchange);
        Ok(stepped?)
    })
}
