//! instep's AdamW for candle's variables on the CPU: one launch steps all of them where they lie.
//!
//! candle lends memory for writing only to an operation in place, one tensor at a time. So the operation takes the memory
//! out, and the same operation puts it back after the step, also after an error.

use std::{cell::Cell, error::Error, mem};

use candle_core::{CpuStorage, DType, InplaceOp1, Tensor, Var, backprop::GradStore};
use instep::bucket_step::{Lent, StepTensors};
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

/// Returns what steps these variables, given their gradients and a learning rate. One without a gradient is passed over.
pub fn stepper(vars: Vec<Var>, adamw: AdamW) -> Result<impl FnMut(&GradStore, f64) -> Result<()>> {
    if let Some(var) = vars.iter().find(|var| var.dtype() != DType::F32 || !var.device().is_cpu()) {
        let (dtype, place) = (var.dtype(), var.device().location());
        return Err(format!("variable of {dtype:?} on {place:?}: only F32 on the CPU is stepped here").into());
    }
    let params = vars.iter().map(|var| (format!("{:?}", var.id()), var.elem_count()));
    let layout = params.fold(Layout::builder(), |layout, (name, len)| layout.param(name, len));
    let mut bucket = BucketStep::builder(&layout.build()?, adamw).host()?;
    let mut states = [(); 2].map(|()| vec![0.0f32; bucket.elements() as usize]);
    Ok(move |grads: &GradStore, lr| {
        bucket.set_lr("default", lr)?;
        let grad = |var: &Var| grads.get(var).map(Tensor::contiguous).transpose();
        let grads = vars.iter().map(grad).collect::<candle_core::Result<Vec<_>>>()?;
        let tensors = vars.iter().map(|var| Some(var.as_tensor())).chain(grads.iter().map(Option::as_ref));
        let lend = |tensor| (tensor, Exchange(Cell::default()));
        let mut lent: Vec<Option<(&Tensor, Exchange)>> = tensors.map(|tensor| tensor.map(lend)).collect();
        let exchange = |(tensor, memory): &(&Tensor, Exchange)| drop(tensor.inplace_op1(memory));
        lent.iter().flatten().for_each(exchange);
        let run =
            |lent| Option::as_mut(lent).map(|(_, memory): &mut (_, Exchange)| &mut memory.0.get_mut()[..]);
        let mut runs: Vec<_> = lent.iter_mut().map(run).collect();
        let (params, grads) = runs.split_at_mut(vars.len());
        let tensors = StepTensors::new(Lent::optional_slices_mut(params), Lent::optional_slices_mut(grads));
        let states = states.each_mut().map(|state| Lent::slice_mut(state));
        let stepped = bucket.step(&tensors.states(states), Scaling::NONE);
        lent.iter().flatten().rev().for_each(exchange);
        Ok(stepped?)
    })
}
