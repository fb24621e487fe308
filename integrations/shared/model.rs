//! Steps all parameters of a framework's model in one launch, and keeps their states between steps.
//!
//! This file uses instep's public interface and depends on no framework. A refused call changes nothing.

use std::collections::BTreeMap;
use std::ops::Range;

use instep::bucket_step::{Decision, Lent, StepTensors};
use instep::{
    BucketStep, DEFAULT_GROUP, ForeignBucket, GradNorm, Layout, Moments, Optimizer, ParamId, Pool, Precision,
    Scaling,
};

/// The number of elements of an 8-bit state that share one scale.
const BLOCK: usize = 256;

/// An optimizer of instep, and the options of its steps.
#[derive(Clone, Debug)]
pub struct Config {
    optimizer: Box<dyn Optimizer>,
    max_norm: Option<f64>,
    skip_nonfinite: bool,
    is_eight_bit: bool,
    threads: Option<usize>,
}

/// A refused call. Nothing has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// instep refuses a hyperparameter, an option or a tensor.
    #[error(transparent)]
    Step(#[from] instep::Error),
    /// A parameter, a gradient, the module or the optimizer cannot be used.
    #[error("{thing}: {wrong}; {remedy}")]
    Tensor {
        /// What cannot be used.
        thing: String,
        /// What is wrong.
        wrong: String,
        /// How to avoid the error.
        remedy: &'static str,
    },
    /// A loaded state does not fit the model or the optimizer.
    #[error("state `{name}`: {wrong}; load what the same model and the same options have saved")]
    State {
        /// The tensor's name in the loaded state.
        name: String,
        /// What is wrong.
        wrong: String,
    },
    /// A record cannot be written or read.
    #[error("record: {0}; check the path and the file")]
    Record(Box<dyn std::error::Error + Send + Sync>),
}

impl Config {
    /// Makes a configuration from an optimizer: [`instep::AdamW`], or any other except [`instep::optim::Custom`].
    pub fn new(optimizer: impl Optimizer + 'static) -> Config {
        let optimizer = Box::new(optimizer);
        Config { optimizer, max_norm: None, skip_nonfinite: false, is_eight_bit: false, threads: None }
    }

    /// Clips all gradients together by the global norm of the same step.
    pub fn max_norm(self, max_norm: f64) -> Config {
        Config { max_norm: Some(max_norm), ..self }
    }

    /// Skips a step if a gradient is not finite. A skipped step changes nothing and is not counted.
    pub fn skip_nonfinite(self) -> Config {
        Config { skip_nonfinite: true, ..self }
    }

    /// Keeps the optimizer's states in 8 bits, with an f32 scale for each 256 elements.
    pub fn eight_bit(self) -> Config {
        Config { is_eight_bit: true, ..self }
    }

    /// Sets the largest number of threads of a step. The default is `INSTEP_THREADS`, or else one per core.
    pub fn threads(self, threads: usize) -> Config {
        Config { threads: Some(threads), ..self }
    }

    /// Returns the optimizer, with the hyperparameters of the first step.
    pub fn optimizer(&self) -> &dyn Optimizer {
        &*self.optimizer
    }
}

/// The values of one state, in one contiguous array for all parameters.
enum Values {
    F32(Vec<f32>),
    EightBit { codes: Vec<u8>, scales: Vec<f32> },
}

/// One entry of a saved state.
#[derive(Clone)]
pub(crate) enum Saved {
    F32(Vec<f32>),
    U8(Vec<u8>),
    Count(u64),
    Carried(f64),
}

/// A parameter's step count, and the additional number that some optimizers carry from step to step.
type Count = (u64, Option<f64>);

/// Steps all parameters. The parameters are in the order of the names that `new` received.
pub(crate) struct Model {
    step: BucketStep,
    ids: Vec<ParamId>,
    names: Vec<String>,
    /// The index range of each parameter's elements in a state's array.
    places: Vec<Range<usize>>,
    states: Vec<(&'static str, Values)>,
    norm: Option<GradNorm>,
    max_norm: Option<f64>,
    skip_nonfinite: bool,
}

impl Model {
    pub(crate) fn new(params: Vec<(String, usize)>, config: &Config) -> Result<Model, Error> {
        let builder = params.iter().fold(Layout::builder(), |layout, (name, len)| layout.param(name, *len));
        let layout = builder.build()?;
        let ids: Vec<ParamId> = layout.ids().collect();
        let quantum = if config.is_eight_bit { BLOCK } else { 1 };
        let mut end = 0;
        let mut place = |len: usize| {
            let start = end;
            end += len.next_multiple_of(quantum);
            start..start + len
        };
        let places: Vec<_> = params.iter().map(|(_, len)| place(*len)).collect();
        let bucket = ForeignBucket::new(end);
        let bucket = ids.iter().zip(&places).fold(bucket, |bucket, (id, at)| bucket.gradient(*id, at.start));

        let moments = if config.is_eight_bit { Moments::EightBit } else { Moments::F32 };
        let step = BucketStep::builder(&layout, config.optimizer.clone())
            .bucket(bucket)
            .precision(Precision { moments, ..Precision::F32 })
            .pool(config.threads.map_or_else(Pool::from_environment, Pool::new)?)
            .host()?;
        let zeros = |name: &&'static str| {
            let values = if config.is_eight_bit {
                Values::EightBit { codes: vec![0; end], scales: vec![0.0; end / BLOCK] }
            } else {
                Values::F32(vec![0.0; end])
            };
            (*name, values)
        };
        let states = step.state_names(DEFAULT_GROUP)?.iter().map(zeros).collect();
        let has_norm = config.max_norm.is_some() || config.skip_nonfinite;
        let mut norm = has_norm.then(GradNorm::host).transpose()?;
        if let Some(norm) = &mut norm {
            // Makes a decision without gradients, so that a wrong `max_norm` is refused here and not in the first step.
            norm.begin(Scaling::NONE)?;
            norm.sum()?;
            norm.decide(config.max_norm, config.skip_nonfinite)?;
        }
        let names = params.into_iter().map(|(name, _)| name).collect();
        let (max_norm, skip_nonfinite) = (config.max_norm, config.skip_nonfinite);
        Ok(Model { step, ids, names, places, states, norm, max_norm, skip_nonfinite })
    }

    /// Steps each parameter that has a gradient. Returns the norm and the decision to clip or skip, or `None` if the
    /// options need no norm.
    ///
    /// # Shapes
    /// One slice per parameter and one per gradient. A slice has as many elements as its parameter.
    pub(crate) fn step<'a>(
        &mut self,
        lr: f64,
        params: &'a mut [&'a mut [f32]],
        grads: &'a [Option<&'a [f32]>],
    ) -> Result<Option<Decision>, Error> {
        self.step.set_lr(DEFAULT_GROUP, lr)?;
        let (mut states, mut all_scales) = (Vec::new(), Vec::new());
        for (_, values) in &mut self.states {
            match values {
                Values::F32(values) => states.push(Lent::slice_mut(values)),
                Values::EightBit { codes, scales } => {
                    states.push(Lent::slice_mut(codes));
                    all_scales.push(Lent::slice_mut(scales));
                }
            }
        }
        let tensors = StepTensors::new(Lent::slices_mut(params), Lent::optional_slices(grads));
        let tensors = tensors.states(states).scales(all_scales);
        let Some(norm) = &mut self.norm else {
            self.step.step(&tensors, Scaling::NONE)?;
            return Ok(None);
        };
        norm.begin(Scaling::NONE)?;
        self.step.add_norm(&Lent::optional_slices(grads), norm)?;
        let decision = norm.decide(self.max_norm, self.skip_nonfinite)?;
        self.step.step_decided(&tensors, norm)?;
        Ok(Some(decision))
    }

    /// Returns a parameter's step count, and the number that its optimizer carries from step to step, if any.
    pub(crate) fn count(&self, param: usize) -> Result<Count, Error> {
        let id = self.ids[param];
        Ok((self.step.step_count(id)?, self.step.carried(id)?))
    }

    pub(crate) fn set_count(&mut self, param: usize, count: Count) -> Result<(), Error> {
        let id = self.ids[param];
        match count {
            (count, Some(carried)) => self.step.set_step_count(id, (count, carried))?,
            (count, None) => self.step.set_step_count(id, count)?,
        }
        Ok(())
    }

    /// Returns all states by name, `PARAMETER.STATE`, with each parameter's step count as `PARAMETER.step`.
    pub(crate) fn save(&self) -> Result<BTreeMap<String, Saved>, Error> {
        let mut saved = BTreeMap::new();
        for (k, (param, at)) in self.names.iter().zip(&self.places).enumerate() {
            for (state, values) in &self.states {
                let name = format!("{param}.{state}");
                match values {
                    Values::F32(values) => drop(saved.insert(name, Saved::F32(values[at.clone()].to_vec()))),
                    Values::EightBit { codes, scales } => {
                        saved.insert(format!("{name}.scales"), Saved::F32(scales[blocks(at)].to_vec()));
                        saved.insert(name, Saved::U8(codes[at.clone()].to_vec()));
                    }
                }
            }
            let (count, carried) = self.count(k)?;
            saved.insert(format!("{param}.step"), Saved::Count(count));
            if let Some(carried) = carried {
                saved.insert(format!("{param}.mu_product"), Saved::Carried(carried));
            }
        }
        Ok(saved)
    }

    /// Loads the result of [`save`](Self::save), completely or not at all.
    pub(crate) fn load(&mut self, mut saved: BTreeMap<String, Saved>) -> Result<(), Error> {
        let mut take = |name: String| saved.remove(&name).ok_or_else(|| wrong(name, "missing"));
        let (mut loaded, mut counts) = (Vec::new(), Vec::new());
        for ((param, id), at) in self.names.iter().zip(&self.ids).zip(&self.places) {
            for (state, values) in &self.states {
                let name = format!("{param}.{state}");
                loaded.push(match values {
                    Values::F32(_) => (f32s(take(name.clone())?, name, at.len())?, Vec::new()),
                    Values::EightBit { .. } => {
                        let scales = format!("{name}.scales");
                        let scales = f32s(take(scales.clone())?, scales, blocks(at).len())?;
                        match take(name.clone())? {
                            Saved::U8(codes) if codes.len() == at.len() => (scales, codes),
                            _ => return Err(wrong(name, format!("not {} values of u8", at.len()))),
                        }
                    }
                });
            }
            let name = format!("{param}.step");
            let Saved::Count(count) = take(name.clone())? else { return Err(wrong(name, "no step count")) };
            let carried = match self.step.carried(*id)? {
                None => None,
                Some(_) => match take(format!("{param}.mu_product"))? {
                    Saved::Carried(carried) => Some(carried),
                    _ => return Err(wrong(format!("{param}.mu_product"), "not an f64")),
                },
            };
            counts.push((count, carried));
        }
        if let Some((name, _)) = saved.pop_first() {
            return Err(wrong(name, "no state of this model and optimizer"));
        }
        self.set_counts(&counts)?;
        let mut loaded = loaded.into_iter();
        for at in &self.places {
            for ((_, values), (floats, bytes)) in self.states.iter_mut().zip(&mut loaded) {
                match values {
                    Values::F32(values) => values[at.clone()].copy_from_slice(&floats),
                    Values::EightBit { codes, scales } => {
                        codes[at.clone()].copy_from_slice(&bytes);
                        scales[blocks(at)].copy_from_slice(&floats);
                    }
                }
            }
        }
        Ok(())
    }

    /// Sets all step counts, or leaves all of them unchanged if one is refused.
    fn set_counts(&mut self, counts: &[Count]) -> Result<(), Error> {
        let before = (0..counts.len()).map(|k| self.count(k)).collect::<Result<Vec<_>, _>>()?;
        let mut set =
            |counts: &[Count]| counts.iter().enumerate().try_for_each(|(k, count)| self.set_count(k, *count));
        set(counts).or_else(|refused| set(&before).and(Err(refused)))
    }
}

/// Converts an index range of elements to the index range of their scales.
fn blocks(at: &Range<usize>) -> Range<usize> {
    at.start / BLOCK..at.end.div_ceil(BLOCK)
}

fn f32s(saved: Saved, name: String, len: usize) -> Result<Vec<f32>, Error> {
    match saved {
        Saved::F32(values) if values.len() == len => Ok(values),
        _ => Err(wrong(name, format!("not {len} values of f32"))),
    }
}

fn wrong(name: String, wrong: impl Into<String>) -> Error {
    Error::State { name, wrong: wrong.into() }
}
