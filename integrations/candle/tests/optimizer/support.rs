//! Models, gradients and comparisons for the tests.
//!
//! Values look random and are the same in each run.

use std::collections::HashMap;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Linear, Module, VarBuilder, VarMap, linear, loss};

/// Returns values from -1 to 1.
pub(crate) fn spread(seed: u32, len: usize) -> Vec<f32> {
    let hash = |k: u32| {
        let mixed = (k ^ (seed << 20)).wrapping_add(1).wrapping_mul(0x9e37_79b9);
        mixed.rotate_left(15).wrapping_mul(0x85eb_ca6b)
    };
    (0..len as u32).map(|k| hash(k) as f32 / (u32::MAX / 2) as f32 - 1.0).collect()
}

pub(crate) fn var(seed: u32, len: usize) -> Result<Var> {
    Var::from_vec(spread(seed, len), len, &Device::Cpu)
}

pub(crate) fn values(var: &Tensor) -> Vec<f32> {
    var.flatten_all().and_then(|flat| flat.to_vec1()).expect("an f32 tensor")
}

pub(crate) fn bits(vars: &[Var]) -> Vec<Vec<u32>> {
    vars.iter().map(|var| values(var).into_iter().map(f32::to_bits).collect()).collect()
}

/// Returns a store of these gradients. `None` stands for a missing gradient.
pub(crate) fn grads(vars: &[Var], grads: &[Option<Vec<f32>>]) -> Result<GradStore> {
    let mut store = Var::zeros(1, DType::F32, &Device::Cpu)?.sum_all()?.backward()?;
    for (var, grad) in vars.iter().zip(grads) {
        if let Some(grad) = grad {
            store.insert(var, Tensor::from_slice(grad, var.shape(), &Device::Cpu)?);
        }
    }
    Ok(store)
}

/// A network of two layers and its data.
pub(crate) struct Net {
    pub(crate) varmap: VarMap,
    layers: [Linear; 2],
    inputs: Tensor,
    targets: Tensor,
}

impl Net {
    /// Returns the network with the same values at each call.
    pub(crate) fn new() -> Result<Net> {
        let (varmap, cpu) = (VarMap::new(), Device::Cpu);
        let builder = VarBuilder::from_varmap(&varmap, DType::F32, &cpu);
        let layers = [linear(8, 33, builder.pp("first"))?, linear(33, 1, builder.pp("second"))?];
        let net = Net {
            varmap,
            layers,
            inputs: Tensor::from_vec(spread(1, 512), (64, 8), &cpu)?,
            targets: Tensor::from_vec(spread(2, 64), (64, 1), &cpu)?,
        };
        for (k, (_, var)) in net.named().into_iter().enumerate() {
            let start = spread(k as u32 + 3, var.elem_count()).into_iter().map(|value| value / 3.0).collect();
            var.set(&Tensor::from_vec::<_, f32>(start, var.shape(), &cpu)?)?;
        }
        Ok(net)
    }

    /// Returns the variables by name.
    pub(crate) fn named(&self) -> Vec<(String, Var)> {
        let vars: HashMap<_, _> = self.varmap.data().lock().expect("a lock").clone();
        let mut vars: Vec<_> = vars.into_iter().collect();
        vars.sort_by(|a, b| a.0.cmp(&b.0));
        vars
    }

    pub(crate) fn vars(&self) -> Vec<Var> {
        self.named().into_iter().map(|(_, var)| var).collect()
    }

    pub(crate) fn loss(&self) -> Result<Tensor> {
        let hidden = self.layers[0].forward(&self.inputs)?.tanh()?;
        loss::mse(&self.layers[1].forward(&hidden)?, &self.targets)
    }
}
