//! The configuration of a replay: an optimizer, its parameter groups, and how gradients are scaled.
//!
//! Keys and defaults are those of `torch.optim`. This file checks the spelling of keys, and the library checks values.
//! A key that the optimizer does not have must be refused, because an ignored option would give a wrong result.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Display;

use instep::checkpoint::safetensors::quoted;
use instep::checkpoint::safetensors::{Object, Unique};
use instep::optim::{ALL, Descriptor};
use instep::{Clip, DType, LossScale, Precision};
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};

use super::dtypes::{Dtypes, FLOATS, look_up};
use super::groups::{self, Group};
use super::scales;
use crate::Failure;

/// The largest number of ranks that a configuration with dynamic loss scaling may have. There is a limit because every
/// bucket is padded to a multiple of the number of ranks.
const MOST_SCALED_RANKS: u32 = 4096;

/// A valid configuration.
#[derive(Debug)]
pub struct Config {
    /// The parameter groups, at least one.
    pub groups: Vec<Group>,
    /// The number of ranks over which gradients were summed, at least 1.
    pub world_size: u32,
    /// The kind of clipping, and the norm to which gradients are clipped.
    pub clip: Option<Clip>,
    /// The number by which steps divide the gradients. The value of a dynamic scale comes from the checkpoint.
    pub loss_scale: LossScale,
    /// Whether a pass with a NaN or infinite gradient changes nothing.
    pub skip_nonfinite: bool,
    /// Element types of all tensors.
    pub precision: Precision,
    /// The type of a copy of each parameter, if copies are written.
    pub copy: Option<DType>,
    /// Decay rate of the parameters' moving averages, if there are averages.
    pub ema: Option<f64>,
    /// Parameters that are not stepped.
    pub frozen: HashSet<String>,
    /// Factors of the learning rates of some parameters.
    pub lr_multipliers: BTreeMap<String, f64>,
}

impl Config {
    /// Reads and checks a configuration.
    ///
    /// # Errors
    /// Returns `Config` with a text that names the fault and its place.
    pub fn parse(text: &[u8]) -> Result<Config, Failure> {
        let Object(Kind { optimizer }) = serde_json::from_slice(text).map_err(spelled)?;
        let Some(descriptor) = ALL.iter().find(|descriptor| descriptor.key() == optimizer) else {
            let names: Vec<String> = ALL.iter().map(|descriptor| descriptor.key()).collect();
            let remedy = format_args!("use one of {}", names.join(", "));
            return Err(Failure::config(format_args!("optimizer = {optimizer:?}"), "unknown", remedy));
        };
        let config = read(text, descriptor)?;
        config.check()?;
        Ok(config)
    }

    /// Returns the names of parameters in order of registration, each with the index of its group.
    pub fn params(&self) -> impl Iterator<Item = (&String, usize)> {
        let groups = self.groups.iter().enumerate();
        groups.flat_map(|(index, group)| group.params.iter().map(move |name| (name, index)))
    }

    fn check(&self) -> Result<(), Failure> {
        if self.world_size == 0 {
            return Err(Failure::config("world_size = 0", "out of range", "use 1 or more"));
        }
        if let LossScale::Constant(loss_scale) = self.loss_scale
            && !(loss_scale as f32).is_finite()
        {
            let thing = format_args!("loss_scale = {loss_scale}");
            return Err(Failure::config(thing, "out of range", "use a number that f32 can hold"));
        }
        let clip = self.clip.map(|clip| match clip {
            Clip::Global(max_norm) => ("clip.global", max_norm),
            Clip::Previous(max_norm) => ("clip.previous", max_norm),
            Clip::PerBucket(max_norm) => ("clip.per_bucket", max_norm),
        });
        if let Some((key, max_norm)) = clip
            && !(max_norm > 0.0 && (max_norm as f32).is_finite())
        {
            let thing = format_args!("{key} = {max_norm}");
            return Err(Failure::config(thing, "out of range", "use a number above 0 that f32 can hold"));
        }
        if matches!(self.loss_scale, LossScale::Dynamic(_)) && self.world_size > MOST_SCALED_RANKS {
            let thing = format_args!("world_size = {}", self.world_size);
            let remedy = format_args!("use at most {MOST_SCALED_RANKS} with a dynamic `loss_scale`");
            return Err(Failure::config(thing, "out of range", remedy));
        }
        if self.groups.is_empty() {
            return Err(Failure::config("groups", "empty", "add one with parameters"));
        }
        if let Some(empty) = self.groups.iter().position(|group| group.params.is_empty()) {
            let thing = format_args!("groups[{empty}].params");
            return Err(Failure::config(thing, "missing or empty", "name a parameter"));
        }
        let mut names = HashSet::new();
        if let Some((name, group)) = self.params().find(|(name, _)| !names.insert(name.as_str())) {
            return Err(twice(format_args!("groups[{group}]"), name));
        }
        let unknown = |name: &&String| !names.contains(name.as_str());
        if let Some(name) = self.frozen.iter().filter(unknown).min() {
            return Err(in_no_group("frozen", name));
        }
        match self.lr_multipliers.keys().find(unknown) {
            Some(name) => Err(in_no_group("lr_multipliers", name)),
            None => Ok(()),
        }
    }
}

fn twice(key: impl Display, name: &str) -> Failure {
    Failure::config(key, format_args!("names {} a second time", quoted(name)), "name it once")
}

fn in_no_group(key: &str, name: &str) -> Failure {
    let wrong = format_args!("names {}, which is in no group", quoted(name));
    Failure::config(key, wrong, "add it to a group or leave it out")
}

fn spelled(error: serde_json::Error) -> Failure {
    Failure::json(&error)
}

/// The key that determines how the other keys are read.
#[derive(Deserialize)]
struct Kind {
    optimizer: String,
}

/// The configuration file. [`groups::read`] reads its groups.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Spelled {
    #[serde(rename = "optimizer")]
    _optimizer: String,
    #[serde(default = "one_rank")]
    world_size: u32,
    #[serde(default, deserialize_with = "scales::clip")]
    clip: Option<Clip>,
    #[serde(default = "scales::unscaled", deserialize_with = "scales::loss_scale")]
    loss_scale: LossScale,
    #[serde(default)]
    skip_nonfinite: bool,
    #[serde(default, deserialize_with = "object")]
    dtypes: Dtypes,
    #[serde(default)]
    copy: Option<String>,
    #[serde(default)]
    ema: Option<f64>,
    #[serde(default)]
    frozen: Vec<String>,
    #[serde(default = "none")]
    lr_multipliers: Unique<f64>,
    #[serde(rename = "groups")]
    _groups: IgnoredAny,
}

fn one_rank() -> u32 {
    1
}

fn none() -> Unique<f64> {
    Unique(BTreeMap::new())
}

fn read(text: &[u8], descriptor: &'static Descriptor) -> Result<Config, Failure> {
    let Object(spelled) = serde_json::from_slice::<Object<Spelled>>(text).map_err(spelled)?;
    let groups = groups::read(text, descriptor).map_err(self::spelled)?;
    let Spelled { world_size, clip, loss_scale, skip_nonfinite, dtypes, ema, .. } = spelled;
    let precision = dtypes.precision()?;
    let copy = spelled.copy.map(|word| look_up("copy", &word, FLOATS)).transpose()?;
    let mut frozen = HashSet::new();
    for name in spelled.frozen {
        if let Some(name) = frozen.replace(name) {
            return Err(twice("frozen", &name));
        }
    }
    Ok(Config {
        groups,
        world_size,
        clip,
        loss_scale,
        skip_nonfinite,
        precision,
        copy,
        ema,
        frozen,
        lr_multipliers: spelled.lr_multipliers.0,
    })
}

fn object<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<T, D::Error> {
    Object::deserialize(deserializer).map(|object| object.0)
}
