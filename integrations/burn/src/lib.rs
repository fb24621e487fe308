//! Steps burn's modules with instep, in one launch for all parameters.
//!
//! [`FusedOptimizer::step`] takes the same arguments as burn's optimizers: learning rate, module and
//! [`GradientsParams`]:
//!
//! ```
//! use burn::module::Module;
//! use burn::nn::LinearConfig;
//! use burn::optim::GradientsParams;
//! use burn::tensor::{Device, Tensor};
//! use instep_burn::{Config, FusedOptimizer};
//!
//! let device = Device::flex().autodiff();
//! let mut model = LinearConfig::new(2, 1).init(&device);
//! let config = Config::new(instep::AdamW::default()).max_norm(1.0);
//! let mut optimizer = FusedOptimizer::new(config)?;
//! let inputs = Tensor::<2>::from_data([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], &device);
//! let targets = Tensor::<2>::from_data([[1.0], [2.0], [3.0]], &device);
//! for _ in 0..300 {
//!     let loss = (model.forward(inputs.clone()) - targets.clone()).square().mean();
//!     let grads = GradientsParams::from_grads(loss.backward(), &model);
//!     model = optimizer.step(0.05, model, grads);
//! }
//! let loss = (model.forward(inputs) - targets).square().mean().into_scalar::<f32>();
//! assert!(loss < 0.01, "{loss}");
//! # Ok::<(), instep_burn::Error>(())
//! ```

mod model;
mod record;
mod walk;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ParamId};
use burn::optim::{GradientsParams, LearningRate};
use burn::tensor::Bytes;
use instep::bucket_step::Decision;

pub use model::{Config, Error};
use model::{Model, Saved};
use walk::{Found, PutBack, TakeOut, Taken};

/// An optimizer of instep for the f32 parameters of a module.
///
/// As in burn's optimizers, a step skips a parameter without a gradient, and each parameter counts its own steps. The
/// steps run on the CPU. Parameters on another device are copied to the CPU and back.
pub struct FusedOptimizer {
    config: Config,
    progress: Progress,
    decision: Option<Decision>,
}

enum Progress {
    /// No step has run yet. The map has the states to resume from, and is empty for a new training.
    Ready(BTreeMap<String, Saved>),
    Running {
        params: Vec<Found>,
        model: Box<Model>,
    },
}

/// A refused step. It returns the unchanged module. The gradients are lost.
pub struct Refused<M> {
    /// The module.
    pub module: M,
    /// Why the step was refused.
    pub error: Error,
}

impl FusedOptimizer {
    /// Makes an optimizer. The optimizer's first step allocates the states for the module's parameters.
    ///
    /// # Errors
    /// Returns an [`Error`] if instep refuses an option or a hyperparameter.
    pub fn new(config: Config) -> Result<FusedOptimizer, Error> {
        // A model of one parameter, so that wrong options are refused here and not in the first step.
        Model::new(vec![("parameter".to_owned(), 1)], &config)?;
        Ok(FusedOptimizer { config, progress: Progress::Ready(BTreeMap::new()), decision: None })
    }

    /// Steps every parameter that has a gradient, and returns the module.
    ///
    /// # Panics
    /// Panics if [`try_step`](Self::try_step) would refuse the step. The module is then lost.
    pub fn step<M: Module>(
        &mut self,
        lr: impl Into<ModuleLearningRate>,
        module: M,
        grads: GradientsParams,
    ) -> M {
        match self.try_step(lr, module, grads) {
            Ok(module) => module,
            Err(Refused { error, .. }) => panic!("{error}"),
        }
    }

    /// Steps every parameter that has a gradient, and returns the module. A refused step returns the module with the
    /// error.
    ///
    /// # Errors
    /// Returns [`Refused`] if a parameter with a gradient is not f32, if a gradient has another type or shape than its
    /// parameter, or if the module has other parameters than in the first step. Also returns [`Refused`] if loaded
    /// states do not fit the module, if the optimizer refuses the learning rate, or if there are several learning
    /// rates. A refused step changes neither the module nor the states.
    pub fn try_step<M: Module>(
        &mut self,
        lr: impl Into<ModuleLearningRate>,
        module: M,
        mut grads: GradientsParams,
    ) -> Result<M, Refused<M>> {
        let lr = match self.prepare(&module, &grads, &lr.into()) {
            Ok(lr) => lr,
            Err(error) => return Err(Refused { module, error }),
        };
        let Progress::Running { params, model } = &mut self.progress else {
            unreachable!("`prepare` has made the model")
        };
        let ids: Vec<ParamId> = params.iter().map(|param| param.id).collect();
        let mut taken = Vec::with_capacity(ids.len());
        let module = module.map(&mut TakeOut { ids: &ids, grads: &mut grads, taken: &mut taken });
        let stepped = launch(model, lr, &mut taken);
        let module = module.map(&mut PutBack { taken: taken.into_iter().peekable() });
        match stepped {
            Ok(decision) => {
                self.decision = decision;
                Ok(module)
            }
            Err(error) => Err(Refused { module, error }),
        }
    }

    /// Checks the step before the module is consumed, and returns the learning rate. The first call also makes the
    /// model.
    fn prepare<M: Module>(
        &mut self,
        module: &M,
        grads: &GradientsParams,
        rates: &ModuleLearningRate,
    ) -> Result<LearningRate, Error> {
        let (found, lr) = walk::find(module, grads, rates)?;
        match &mut self.progress {
            Progress::Running { params, .. } if *params == found => Ok(lr),
            Progress::Running { .. } => Err(Error::Tensor {
                thing: "module".to_owned(),
                wrong: "has other f32 parameters than in the first step".to_owned(),
                remedy: "make an optimizer for each module",
            }),
            Progress::Ready(saved) => {
                let named = found.iter().map(|param| (param.id.val().to_string(), param.len));
                let mut model = Model::new(named.collect(), &self.config)?;
                if !saved.is_empty() {
                    model.load(saved.clone())?;
                }
                self.progress = Progress::Running { params: found, model: Box::new(model) };
                Ok(lr)
            }
        }
    }

    /// Returns the norm of the last step's gradients, and whether the step was clipped or skipped. Returns `None`
    /// before the first step, and if the options need no norm.
    pub fn decision(&self) -> Option<Decision> {
        self.decision
    }

    /// Returns the states in burn's own format, without the module and the learning rate.
    ///
    /// # Errors
    /// Returns `Record` if burn's writer fails.
    pub fn into_bytes(&self) -> Result<Bytes, Error> {
        record::into_bytes(self.saved()?)
    }

    /// Resumes from the states of [`into_bytes`](Self::into_bytes). The first step checks that the states fit the
    /// module. The parameters get the same bits as without the interruption.
    ///
    /// # Errors
    /// Returns `Record` if the bytes are not a record, and `State` if a value of the record has a type that no state
    /// has.
    pub fn from_bytes(self, bytes: Bytes) -> Result<FusedOptimizer, Error> {
        let progress = Progress::Ready(record::from_bytes(bytes)?);
        Ok(FusedOptimizer { progress, decision: None, ..self })
    }

    /// Saves the states to a file, as [`into_bytes`](Self::into_bytes) returns them.
    ///
    /// # Errors
    /// Returns `Record` if the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        record::save(self.saved()?, path.as_ref())
    }

    /// Resumes from the states in a file, like [`from_bytes`](Self::from_bytes).
    ///
    /// # Errors
    /// Returns `Record` if the file cannot be read or is not a record, and `State` if a value of the record has a type
    /// that no state has.
    pub fn load(self, path: impl AsRef<Path>) -> Result<FusedOptimizer, Error> {
        let progress = Progress::Ready(record::load(path.as_ref())?);
        Ok(FusedOptimizer { progress, decision: None, ..self })
    }

    fn saved(&self) -> Result<BTreeMap<String, Saved>, Error> {
        match &self.progress {
            Progress::Ready(saved) => Ok(saved.clone()),
            Progress::Running { model, .. } => model.save(),
        }
    }
}

/// Steps parameters in one launch. `taken` is the memory that was taken out of the module.
fn launch(model: &mut Model, lr: f64, taken: &mut [Taken]) -> Result<Option<Decision>, Error> {
    let (mut params, mut grads) = (Vec::with_capacity(taken.len()), Vec::with_capacity(taken.len()));
    for Taken { id, value, grad, .. } in taken {
        let unreadable = |error| walk::refused(*id, format!("{error}"), "keep it in memory that can be read");
        params.push(value.as_mut_slice::<f32>().map_err(unreadable)?);
        let grad = grad.as_ref().map(|grad| grad.as_slice::<f32>()).transpose();
        grads.push(grad.map_err(unreadable)?);
    }
    model.step(lr, &mut params, &grads)
}

impl fmt::Debug for FusedOptimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FusedOptimizer").field("config", &self.config).finish_non_exhaustive()
    }
}

impl<M> fmt::Debug for Refused<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Refused").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<M> fmt::Display for Refused<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<M> std::error::Error for Refused<M> {}
