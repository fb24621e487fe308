//! Steps candle's variables on the CPU, in place and in one launch for all variables.
//!
//! [`FusedOptimizer`] is a [`candle_nn::Optimizer`]. Its configuration comes from the [`ParamsAdamW`] of
//! [`candle_nn::AdamW`], or from any optimizer of instep:
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::{Module, Optimizer, VarBuilder, VarMap, linear, loss};
//! use instep_candle::{Config, FusedOptimizer};
//!
//! fn main() -> candle_core::Result<()> {
//!     let varmap = VarMap::new();
//!     let model = linear(2, 1, VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
//!     let config = Config::new(instep::AdamW { lr: 0.05, ..Default::default() }).max_norm(1.0);
//!     let mut optimizer = FusedOptimizer::from_varmap(&varmap, config)?;
//!     let inputs = Tensor::new(&[[0f32, 1.], [1., 0.], [1., 1.]], &Device::Cpu)?;
//!     let targets = Tensor::new(&[[1f32], [2.], [3.]], &Device::Cpu)?;
//!     for _ in 0..300 {
//!         optimizer.backward_step(&loss::mse(&model.forward(&inputs)?, &targets)?)?;
//!     }
//!     assert!(loss::mse(&model.forward(&inputs)?, &targets)?.to_scalar::<f32>()? < 0.01);
//!     Ok(())
//! }
//! ```

mod exchange;
mod model;

use std::collections::{BTreeMap, HashMap, HashSet};

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, DType, Device, Result, Storage, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW, VarMap};
use instep::LrSchedule;
use instep::bucket_step::Decision;
use instep::optim::Value;

use exchange::Taken;
pub use model::{Config, Error};
use model::{Model, Saved};

/// An optimizer of instep for candle's variables in f32 on the CPU.
///
/// Like candle-nn's optimizers, this optimizer ignores integer variables and skips variables without a gradient. Every
/// step increments the step count of all variables, as in candle-nn's AdamW. The bias correction of a variable
/// therefore also counts the steps without its gradient. (Only with NAdam does each variable count its own steps.)
///
/// # Ordering
/// During a step the variables are empty, so no other code may use them.
pub struct FusedOptimizer {
    vars: Vec<Var>,
    /// `None` if there are no variables.
    model: Option<Model>,
    lr: f64,
    schedule: Option<LrSchedule>,
    /// The number of steps that were neither refused nor skipped.
    steps: u64,
    decision: Option<Decision>,
}

impl From<ParamsAdamW> for Config {
    fn from(params: ParamsAdamW) -> Config {
        let ParamsAdamW { lr, beta1, beta2, eps, weight_decay } = params;
        Config::new(instep::AdamW { lr, betas: (beta1, beta2), eps, weight_decay, ..Default::default() })
    }
}

impl Optimizer for FusedOptimizer {
    type Config = Config;

    /// Makes an optimizer for these variables. The optimizer's states are named by the positions of their variables,
    /// from 0. The order of `VarMap::all_vars` changes from run to run, so use
    /// [`from_varmap`](FusedOptimizer::from_varmap) to resume a training.
    ///
    /// # Errors
    /// Returns an [`Error`] if a variable has another float type than f32, is not on the CPU, or is given twice. Also
    /// returns an [`Error`] if instep refuses an option or a hyperparameter.
    fn new(vars: Vec<Var>, config: Config) -> Result<FusedOptimizer> {
        let named = vars.into_iter().enumerate().map(|(k, var)| (k.to_string(), var));
        FusedOptimizer::named(named.collect(), config)
    }

    /// Steps every variable that has a gradient.
    ///
    /// # Errors
    /// Returns an [`Error`] if a gradient has another type or length than its variable, or if the optimizer refuses the
    /// learning rate. After an error, nothing has changed, and the call can be repeated.
    fn step(&mut self, grads: &GradStore) -> Result<()> {
        let lr = self.learning_rate();
        let Some(model) = &mut self.model else { return Ok(()) };
        let grads = self.vars.iter().map(|var| gradient(var, grads)).collect::<Result<Vec<_>>>()?;
        let decision = {
            let mut taken = self.vars.iter().map(|var| Taken::of(var)).collect::<Result<Vec<_>>>()?;
            let mut params: Vec<_> = taken.iter_mut().map(Taken::memory).collect();
            // Declared after `taken`, so that these locks are released before the memory is put back.
            let locks: Vec<_> =
                grads.iter().map(|grad| grad.as_ref().map(Tensor::storage_and_layout)).collect();
            let mut runs = Vec::with_capacity(locks.len());
            for (lock, param) in locks.iter().zip(&params) {
                runs.push(match lock {
                    None => None,
                    Some((storage, layout)) => {
                        let start = layout.start_offset();
                        let run = f32s(storage).and_then(|values| values.get(start..start + param.len()));
                        let wrong = "shares memory with a variable";
                        Some(run.ok_or_else(|| refused("gradient", wrong, "insert a copy of it"))?)
                    }
                });
            }
            model.step(lr, &mut params, &runs).map_err(wrap)?
        };
        self.decision = decision;
        if decision.is_none_or(|decision| !decision.skipped) {
            self.steps += 1;
            for k in (0..grads.len()).filter(|k| grads[*k].is_none()) {
                if let (_, None) = model.count(k).map_err(wrap)? {
                    model.set_count(k, (self.steps, None)).map_err(wrap)?;
                }
            }
        }
        Ok(())
    }

    /// Returns the learning rate of the next step.
    fn learning_rate(&self) -> f64 {
        let lr = self.schedule.as_ref().map_or(self.lr, |schedule| schedule.lr_at(self.steps));
        // A rate that f32 rounds to zero is zero, so that a decaying schedule never ends in an error.
        if lr as f32 == 0.0 { 0.0 } else { lr }
    }

    /// Sets the learning rate from the next step on, and removes the schedule.
    fn set_learning_rate(&mut self, lr: f64) {
        (self.lr, self.schedule) = (lr, None);
    }
}

impl FusedOptimizer {
    /// Makes an optimizer for the variables of a map. The optimizer's states have the names of the variables.
    ///
    /// # Errors
    /// Errors as for [`new`](FusedOptimizer::new).
    pub fn from_varmap(varmap: &VarMap, config: Config) -> Result<FusedOptimizer> {
        let named = match varmap.data().lock() {
            Ok(vars) => vars.iter().map(|(name, var)| (name.clone(), var.clone())).collect(),
            Err(_) => candle_core::bail!("variables: a thread has panicked with their lock; make a new map"),
        };
        FusedOptimizer::named(named, config)
    }

    fn named(mut vars: Vec<(String, Var)>, config: Config) -> Result<FusedOptimizer> {
        vars.retain(|(_, var)| var.dtype().is_float());
        let mut known = HashSet::new();
        for (name, var) in &vars {
            let thing = format!("variable `{name}`");
            let (dtype, place) = (var.dtype(), var.device().location());
            if dtype != DType::F32 || !var.device().is_cpu() {
                let wrong = format!("{dtype:?} on {place:?}");
                return Err(refused(thing, wrong, "only F32 on the CPU is stepped here"));
            }
            if !known.insert(var.id()) {
                return Err(refused(thing, "given twice", "give each variable once"));
            }
            let (storage, layout) = var.storage_and_layout();
            if !layout.is_contiguous() || f32s(&storage).is_none_or(|all| all.len() != var.elem_count()) {
                return Err(refused(thing, "a part of another tensor", "make a variable of a copy"));
            }
        }
        let lens = vars.iter().map(|(name, var)| (name.clone(), var.elem_count())).collect();
        let lr = match config.optimizer().get("lr") {
            Some(Value::Number(lr)) => lr,
            _ => return Err(refused("optimizer", "has no learning rate", "use one of instep's")),
        };
        let model = (!vars.is_empty()).then(|| Model::new(lens, &config)).transpose().map_err(wrap)?;
        let vars = vars.into_iter().map(|(_, var)| var).collect();
        Ok(FusedOptimizer { vars, model, lr, schedule: None, steps: 0, decision: None })
    }

    /// Sets a schedule, which computes the learning rate from the number of steps so far.
    ///
    /// # Errors
    /// Returns an [`Error`] if a number of the schedule is out of range. After an error, nothing has changed.
    pub fn set_lr_schedule(&mut self, schedule: LrSchedule) -> Result<()> {
        schedule.validate().map_err(|error| wrap(error.into()))?;
        self.schedule = Some(schedule);
        Ok(())
    }

    /// Returns the number of steps so far. Steps that were refused or skipped do not count.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Returns the norm of the last step's gradients, and whether the step was clipped or skipped. Returns `None`
    /// before the first step, and if the options need no norm.
    pub fn decision(&self) -> Option<Decision> {
        self.decision
    }

    /// Returns a copy of the optimizer's states, for `candle_core::safetensors::save`. The copy contains neither
    /// variables nor a schedule. `VarMap::save` saves the variables.
    ///
    /// # Shapes
    /// States are flat, in f32, or in u8 with an f32 scale for each 256 elements. Counts are I64, and other numbers are
    /// F64.
    ///
    /// # Errors
    /// Errors of candle's allocation.
    pub fn state(&self) -> Result<HashMap<String, Tensor>> {
        let cpu = &Device::Cpu;
        let mut state = HashMap::new();
        state.insert("steps".to_owned(), Tensor::new(self.steps as i64, cpu)?);
        state.insert("lr".to_owned(), Tensor::new(self.lr, cpu)?);
        let saved = self.model.as_ref().map(Model::save).transpose().map_err(wrap)?;
        for (name, saved) in saved.into_iter().flatten() {
            let tensor = match saved {
                Saved::F32(values) => Tensor::from_vec(values.clone(), values.len(), cpu)?,
                Saved::U8(values) => Tensor::from_vec(values.clone(), values.len(), cpu)?,
                Saved::Count(count) => Tensor::new(count as i64, cpu)?,
                Saved::Carried(carried) => Tensor::new(carried, cpu)?,
            };
            state.insert(name, tensor);
        }
        Ok(state)
    }

    /// Loads a state that [`state`](Self::state) has returned, for example from `candle_core::safetensors::load`. The
    /// next step then gives the same bits as without the interruption.
    ///
    /// # Errors
    /// Returns an [`Error`] if a tensor is missing or superfluous, or has another type or length. The error names the
    /// tensor, and nothing has changed.
    pub fn load_state(&mut self, mut state: HashMap<String, Tensor>) -> Result<()> {
        let mut take = |name: &str| state.remove(name).ok_or_else(|| wrong(name, "missing"));
        let steps = count(&take("steps")?).ok_or_else(|| wrong("steps", "not an I64 of at least 0"))?;
        let lr = take("lr")?.to_scalar::<f64>().map_err(|_| wrong("lr", "not an F64"))?;
        let mut saved = BTreeMap::new();
        for (name, tensor) in state {
            let one = match (tensor.dtype(), tensor.rank()) {
                (DType::F32, 1) => Saved::F32(tensor.to_vec1()?),
                (DType::U8, 1) => Saved::U8(tensor.to_vec1()?),
                (DType::F64, 0) => Saved::Carried(tensor.to_scalar()?),
                (DType::I64, 0) => {
                    Saved::Count(count(&tensor).ok_or_else(|| wrong(&name, "a count below 0"))?)
                }
                (dtype, rank) => return Err(wrong(&name, format!("{dtype:?} of rank {rank}"))),
            };
            saved.insert(name, one);
        }
        match &mut self.model {
            Some(model) => model.load(saved).map_err(wrap)?,
            None if saved.is_empty() => {}
            None => return Err(wrong("steps", "of an optimizer with variables")),
        }
        (self.steps, self.lr, self.decision) = (steps, lr, None);
        Ok(())
    }

    /// Returns the variables, in the order of the states.
    pub fn into_inner(self) -> Vec<Var> {
        self.vars
    }
}

impl std::fmt::Debug for FusedOptimizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FusedOptimizer").field("vars", &self.vars.len()).finish_non_exhaustive()
    }
}

/// Returns a variable's gradient as a contiguous tensor.
fn gradient(var: &Var, grads: &GradStore) -> Result<Option<Tensor>> {
    let Some(grad) = grads.get(var) else { return Ok(None) };
    if grad.dtype() != DType::F32 || !grad.device().is_cpu() || grad.shape() != var.shape() {
        let (dtype, place) = (grad.dtype(), grad.device().location());
        let wrong = format!("{dtype:?} {:?} on {place:?} for a variable {:?}", grad.dims(), var.dims());
        return Err(refused("gradient", wrong, "give an F32 of the variable's shape on the CPU"));
    }
    grad.contiguous().map(Some)
}

fn f32s(storage: &Storage) -> Option<&[f32]> {
    match storage {
        Storage::Cpu(CpuStorage::F32(values)) => Some(values),
        _ => None,
    }
}

fn count(tensor: &Tensor) -> Option<u64> {
    tensor.to_scalar::<i64>().ok().and_then(|count| count.try_into().ok())
}

fn wrap(error: Error) -> candle_core::Error {
    candle_core::Error::wrap(error)
}

fn refused(thing: impl Into<String>, wrong: impl Into<String>, remedy: &'static str) -> candle_core::Error {
    wrap(Error::Tensor { thing: thing.into(), wrong: wrong.into(), remedy })
}

fn wrong(name: &str, wrong: impl Into<String>) -> candle_core::Error {
    wrap(Error::State { name: name.to_owned(), wrong: wrong.into() })
}
