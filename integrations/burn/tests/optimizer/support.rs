//! Models, gradients and comparisons for the tests.
//!
//! Values look random and are the same in each run.

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor, TensorData};

/// Returns values from -1 to 1.
pub(crate) fn spread(seed: u32, len: usize) -> Vec<f32> {
    let hash = |k: u32| {
        let mixed = (k ^ (seed << 20)).wrapping_add(1).wrapping_mul(0x9e37_79b9);
        mixed.rotate_left(15).wrapping_mul(0x85eb_ca6b)
    };
    (0..len as u32).map(|k| hash(k) as f32 / (u32::MAX / 2) as f32 - 1.0).collect()
}

pub(crate) fn device() -> Device {
    Device::flex().autodiff()
}

pub(crate) fn tensor<const D: usize>(seed: u32, shape: [usize; D]) -> Tensor<D> {
    let values = spread(seed, shape.iter().product());
    Tensor::from_data(TensorData::new(values, shape), &device())
}

/// A network of two layers.
#[derive(Module, Debug)]
pub(crate) struct Net {
    pub(crate) first: Linear,
    pub(crate) second: Linear,
}

impl Net {
    /// Returns a network with the same values at each call, and new ids.
    pub(crate) fn new() -> Net {
        let layer = |seed, inputs, outputs| {
            let mut layer = LinearConfig::new(inputs, outputs).init(&device());
            layer.weight = Param::from_tensor((tensor(seed, [inputs, outputs]) / 3.0).require_grad());
            layer.bias = Some(Param::from_tensor((tensor(seed + 1, [outputs]) / 3.0).require_grad()));
            layer
        };
        Net { first: layer(3, 8, 33), second: layer(5, 33, 1) }
    }

    pub(crate) fn loss(&self) -> Tensor<1> {
        let outputs = self.second.forward(self.first.forward(tensor(1, [64, 8])).tanh());
        (outputs - tensor(2, [64, 1])).square().mean()
    }

    pub(crate) fn grads(&self) -> GradientsParams {
        GradientsParams::from_grads(self.loss().backward(), self)
    }

    /// Returns a gradient for each parameter: `factor` times its values.
    pub(crate) fn own_values(&self, factor: f32) -> GradientsParams {
        struct Own(f32, GradientsParams);
        impl ModuleVisitor for Own {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                self.1.register(param.id, param.val().inner() * self.0);
            }
        }
        let mut own = Own(factor, GradientsParams::new());
        self.visit(&mut own);
        own.1
    }
}

/// Returns the values of each parameter, in the order of a walk.
pub(crate) fn values<M: Module>(module: &M) -> Vec<Vec<f32>> {
    struct Values(Vec<Vec<f32>>);
    impl ModuleVisitor for Values {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push(param.base().to_data().try_into_vec().expect("f32"));
        }
    }
    let mut values = Values(Vec::new());
    module.visit(&mut values);
    values.0
}

pub(crate) fn bits<M: Module>(module: &M) -> Vec<Vec<u32>> {
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    values(module).into_iter().map(bits).collect()
}

/// Returns the values of each parameter's gradient, and new `GradientsParams` with the same gradients.
pub(crate) fn copied<M: Module>(
    module: &M,
    grads: &GradientsParams,
) -> (Vec<Option<Vec<f32>>>, GradientsParams) {
    struct Copy<'a> {
        from: &'a GradientsParams,
        to: GradientsParams,
        values: Vec<Option<Vec<f32>>>,
    }
    impl ModuleVisitor for Copy<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let grad = self.from.get::<D>(param.id);
            self.values.push(grad.as_ref().map(|grad| grad.to_data().try_into_vec().expect("f32")));
            if let Some(grad) = grad {
                self.to.register(param.id, grad);
            }
        }
    }
    let mut copy = Copy { from: grads, to: GradientsParams::new(), values: Vec::new() };
    module.visit(&mut copy);
    (copy.values, copy.to)
}
