//! The walks over a module find its parameters, take the parameters' memory out for a step, and put this memory back.
//!
//! burn moves a module by value. On burn's CPU backend `flex` a walk copies no element, if no other tensor shares the
//! parameter's memory. Otherwise the parameter gets new memory, as in every operation of burn.

use std::collections::HashSet;
use std::iter::Peekable;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, LearningRate};
use burn::tensor::{DType, Device, GradientCheckpointingStrategy, Tensor, TensorData};

use crate::Error;

/// An f32 parameter of a module.
#[derive(PartialEq)]
pub(crate) struct Found {
    pub(crate) id: ParamId,
    pub(crate) len: usize,
}

/// A parameter's memory during a step.
pub(crate) struct Taken {
    pub(crate) id: ParamId,
    pub(crate) value: TensorData,
    pub(crate) grad: Option<TensorData>,
    device: Device,
    /// `None` if the parameter is not tracked for gradients.
    tracking: Option<Tracking>,
}

struct Tracking {
    strategy: GradientCheckpointingStrategy,
    requires_grad: bool,
    is_distributed: bool,
}

/// Returns a module's f32 parameters in the order of a walk, each once. Also returns the learning rate of the
/// parameters that have a gradient.
///
/// # Errors
/// Returns `Tensor` if a gradient has another type or shape than its parameter, or if its parameter is not f32. Also
/// returns `Tensor` if parameters with gradients have different learning rates.
pub(crate) fn find<M: Module>(
    module: &M,
    grads: &GradientsParams,
    rates: &ModuleLearningRate,
) -> Result<(Vec<Found>, LearningRate), Error> {
    let (path, known) = (Vec::new(), HashSet::new());
    let mut find = Find { grads, rates, path, known, found: Vec::new(), rate: None, refused: None };
    module.visit(&mut find);
    match find.refused {
        Some(refused) => Err(refused),
        None => Ok((find.found, find.rate.unwrap_or_else(|| rates.base()))),
    }
}

struct Find<'a> {
    grads: &'a GradientsParams,
    rates: &'a ModuleLearningRate,
    /// The names of the modules that contain the parameter. burn's groups may choose parameters by these names.
    path: Vec<String>,
    known: HashSet<ParamId>,
    found: Vec<Found>,
    rate: Option<LearningRate>,
    refused: Option<Error>,
}

impl ModuleVisitor for Find<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let (id, value) = (param.id, param.base());
        if !self.known.insert(id) {
            return;
        }
        let is_f32 = value.dtype() == DType::F32;
        if let Some(grad) = self.grads.get::<D>(id) {
            let rate = self.rates.lr_from_param(id, Some(&self.path.join(".")));
            let first = *self.rate.get_or_insert(rate);
            let refused = if !is_f32 || grad.dtype() != DType::F32 || grad.shape() != value.shape() {
                let of = |tensor: &Tensor<D>| format!("{:?} {:?}", tensor.dtype(), tensor.dims());
                let wrong = format!("{} with a gradient {}", of(&value), of(&grad));
                Some(refused(id, wrong, "only F32 with a gradient of its shape is stepped here"))
            } else if rate.to_bits() != first.to_bits() {
                let wrong = format!("has the learning rate {rate}, where another one has {first}");
                Some(refused(id, wrong, "give all parameters one learning rate"))
            } else {
                None
            };
            self.refused = self.refused.take().or(refused);
        }
        if is_f32 {
            self.found.push(Found { id, len: value.shape().num_elements() });
        }
    }
}

/// Moves the memory of parameters and gradients out of a module, in the order of the walk. Empty tensors remain.
pub(crate) struct TakeOut<'a> {
    pub(crate) ids: &'a [ParamId],
    pub(crate) grads: &'a mut GradientsParams,
    pub(crate) taken: &'a mut Vec<Taken>,
}

impl ModuleMapper for TakeOut<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        // A parameter that occurs again, or is not f32, stays.
        if self.ids.get(self.taken.len()) != Some(&param.id) {
            return param;
        }
        let (id, tensor, mapper) = param.consume();
        let tracking = tensor.gradient_checkpointing_strategy().map(|strategy| Tracking {
            strategy,
            requires_grad: tensor.is_require_grad(),
            is_distributed: tensor.is_distributed(),
        });
        let grad = self.grads.remove::<D>(id).map(|grad| grad.inner().into_data());
        let tensor = tensor.inner();
        let device = tensor.device();
        let value = tensor.into_data();
        let empty = Tensor::empty([0; D], &device);
        self.taken.push(Taken { id, value, grad, device, tracking });
        Param::from_mapped_value(id, empty, mapper)
    }
}

/// Puts the parameters' memory back into a module, after [`TakeOut`] has moved it out.
pub(crate) struct PutBack<I: Iterator<Item = Taken>> {
    pub(crate) taken: Peekable<I>,
}

impl<I: Iterator<Item = Taken>> ModuleMapper for PutBack<I> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(taken) = self.taken.next_if(|taken| taken.id == param.id) else { return param };
        let (id, _, mapper) = param.consume();
        let mut tensor = Tensor::from_data(taken.value, (&taken.device, DType::F32));
        if let Some(Tracking { strategy, requires_grad, is_distributed }) = taken.tracking {
            tensor = tensor.autodiff().with_gradient_checkpointing_strategy(strategy);
            if requires_grad {
                tensor = tensor.require_grad();
            }
            if is_distributed {
                tensor = tensor.set_distributed(id);
            }
        }
        Param::from_mapped_value(id, tensor, mapper)
    }
}

pub(crate) fn refused(id: ParamId, wrong: String, remedy: &'static str) -> Error {
    Error::Tensor { thing: format!("parameter {id}"), wrong, remedy }
}
