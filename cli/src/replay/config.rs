//! The configuration of a replay: an optimizer, its parameter groups, and how gradients are scaled.
//!
//! Keys and defaults are those of `torch.optim`. What is spelled is checked here, what values mean is the library's to
//! check. Must refuse every key that the optimizer does not have: an ignored option is a wrong result.

use std::collections::{BTreeMap, HashSet};

use instep::checkpoint::safetensors::json::{Object, Unique};
use instep::{
    Adadelta, Adagrad, Adam, AdamW, Adamax, DType, Lamb, Layout, Lion, NAdam, Optimizer, Precision, RAdam,
    RmsProp, Rprop, Sgd, Stepper, StepperBuilder,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};

use super::dtypes::{Dtypes, FLOATS, look_up};
use crate::Failure;

/// A configuration that is spelled correctly.
#[derive(Debug)]
pub struct Config {
    /// At least one.
    pub groups: Vec<Group>,
    /// Ranks that gradients were summed over, at least one.
    pub world_size: u32,
    /// Largest norm of the averaged gradients.
    pub max_norm: Option<f64>,
    /// Factor in the loss, divided out of the gradients.
    pub loss_scale: f64,
    /// Whether a pass with a NaN or infinite gradient changes nothing.
    pub skip_nonfinite: bool,
    /// Element types of everything.
    pub precision: Precision,
    /// Each parameter once more, in this type.
    pub copy: Option<DType>,
    /// Decay rate of the parameters' moving averages, if they are kept.
    pub ema: Option<f64>,
    /// Parameters that are not stepped.
    pub frozen: HashSet<String>,
    /// What the learning rates of some parameters are multiplied by.
    pub lr_multipliers: BTreeMap<String, f64>,
}

/// Parameters that share hyperparameters.
#[derive(Debug)]
pub struct Group {
    /// Their names, at least one, none of them in another group.
    pub params: Vec<String>,
    /// Their optimizer; the same kind in every group.
    pub rule: Rule,
}

/// One of the library's optimizers.
#[derive(Clone, Copy, Debug)]
pub enum Rule {
    /// `sgd`
    Sgd(Sgd),
    /// `adam`
    Adam(Adam),
    /// `adamw`
    AdamW(AdamW),
    /// `adagrad`
    Adagrad(Adagrad),
    /// `rmsprop`
    RmsProp(RmsProp),
    /// `adadelta`
    Adadelta(Adadelta),
    /// `adamax`
    Adamax(Adamax),
    /// `rprop`
    Rprop(Rprop),
    /// `lion`
    Lion(Lion),
    /// `nadam`
    NAdam(NAdam),
    /// `radam`
    RAdam(RAdam),
    /// `lamb`
    Lamb(Lamb),
}

/// What a configuration calls them.
const NAMES: [&str; 12] = [
    "sgd", "adam", "adamw", "adagrad", "rmsprop", "adadelta", "adamax", "rprop", "lion", "nadam", "radam",
    "lamb",
];

impl Rule {
    /// States of a parameter with these hyperparameters.
    pub fn state_names(&self) -> &'static [&'static str] {
        match self {
            Rule::Sgd(sgd) => sgd.state_names(),
            Rule::Adam(adam) => adam.state_names(),
            Rule::AdamW(adamw) => adamw.state_names(),
            Rule::Adagrad(adagrad) => adagrad.state_names(),
            Rule::RmsProp(rmsprop) => rmsprop.state_names(),
            Rule::Adadelta(adadelta) => adadelta.state_names(),
            Rule::Adamax(adamax) => adamax.state_names(),
            Rule::Rprop(rprop) => rprop.state_names(),
            Rule::Lion(lion) => lion.state_names(),
            Rule::NAdam(nadam) => nadam.state_names(),
            Rule::RAdam(radam) => radam.state_names(),
            Rule::Lamb(lamb) => lamb.state_names(),
        }
    }

    /// Whether it carries a product of momenta beside a parameter's step count.
    pub fn has_product(&self) -> bool {
        matches!(self, Rule::NAdam(_))
    }

    /// Options of a stepper with this rule.
    pub fn builder(self, layout: &Layout) -> StepperBuilder<'_> {
        match self {
            Rule::Sgd(sgd) => Stepper::builder(layout, sgd),
            Rule::Adam(adam) => Stepper::builder(layout, adam),
            Rule::AdamW(adamw) => Stepper::builder(layout, adamw),
            Rule::Adagrad(adagrad) => Stepper::builder(layout, adagrad),
            Rule::RmsProp(rmsprop) => Stepper::builder(layout, rmsprop),
            Rule::Adadelta(adadelta) => Stepper::builder(layout, adadelta),
            Rule::Adamax(adamax) => Stepper::builder(layout, adamax),
            Rule::Rprop(rprop) => Stepper::builder(layout, rprop),
            Rule::Lion(lion) => Stepper::builder(layout, lion),
            Rule::NAdam(nadam) => Stepper::builder(layout, nadam),
            Rule::RAdam(radam) => Stepper::builder(layout, radam),
            Rule::Lamb(lamb) => Stepper::builder(layout, lamb),
        }
    }

    /// The same options, with this rule for one group.
    pub fn in_group<'a>(self, builder: StepperBuilder<'a>, name: &str) -> StepperBuilder<'a> {
        match self {
            Rule::Sgd(sgd) => builder.group(name, sgd),
            Rule::Adam(adam) => builder.group(name, adam),
            Rule::AdamW(adamw) => builder.group(name, adamw),
            Rule::Adagrad(adagrad) => builder.group(name, adagrad),
            Rule::RmsProp(rmsprop) => builder.group(name, rmsprop),
            Rule::Adadelta(adadelta) => builder.group(name, adadelta),
            Rule::Adamax(adamax) => builder.group(name, adamax),
            Rule::Rprop(rprop) => builder.group(name, rprop),
            Rule::Lion(lion) => builder.group(name, lion),
            Rule::NAdam(nadam) => builder.group(name, nadam),
            Rule::RAdam(radam) => builder.group(name, radam),
            Rule::Lamb(lamb) => builder.group(name, lamb),
        }
    }
}

impl Config {
    /// Reads and checks a configuration.
    ///
    /// # Errors
    /// `Config`, naming what is wrong and where.
    pub fn parse(text: &[u8]) -> Result<Config, Failure> {
        let Object(Kind { optimizer }) = serde_json::from_slice(text).map_err(spelled)?;
        let config = match optimizer.as_str() {
            "sgd" => read::<SgdGroup>(text)?,
            "adam" => read::<AdamGroup>(text)?,
            "adamw" => read::<AdamWGroup>(text)?,
            "adagrad" => read::<AdagradGroup>(text)?,
            "rmsprop" => read::<RmsPropGroup>(text)?,
            "adadelta" => read::<AdadeltaGroup>(text)?,
            "adamax" => read::<AdamaxGroup>(text)?,
            "rprop" => read::<RpropGroup>(text)?,
            "lion" => read::<LionGroup>(text)?,
            "nadam" => read::<NAdamGroup>(text)?,
            "radam" => read::<RAdamGroup>(text)?,
            "lamb" => read::<LambGroup>(text)?,
            other => {
                return refuse(format!("optimizer = {other:?} is not known; there are {}", NAMES.join(", ")));
            }
        };
        config.check()?;
        Ok(config)
    }

    /// Names in order of registration, each with the index of its group.
    pub fn params(&self) -> impl Iterator<Item = (&String, usize)> {
        let groups = self.groups.iter().enumerate();
        groups.flat_map(|(index, group)| group.params.iter().map(move |name| (name, index)))
    }

    fn check(&self) -> Result<(), Failure> {
        if self.world_size == 0 {
            return refuse("world_size = 0: there is at least one rank".into());
        }
        let scales = [("loss_scale", Some(self.loss_scale)), ("max_norm", self.max_norm)];
        for (key, value) in scales.into_iter().filter_map(|(key, value)| Some((key, value?))) {
            if !(value as f32).is_finite() {
                return refuse(format!("{key} = {value}: must be finite as f32"));
            }
        }
        if self.groups.is_empty() {
            return refuse("groups is empty: there are no parameters to step".into());
        }
        if let Some(empty) = self.groups.iter().position(|group| group.params.is_empty()) {
            return refuse(format!("groups[{empty}].params is missing or empty"));
        }
        let mut names = HashSet::new();
        if let Some((name, group)) = self.params().find(|(name, _)| !names.insert(name.as_str())) {
            return refuse(format!("groups[{group}] names `{name}` a second time"));
        }
        let unknown = |name: &&String| !names.contains(name.as_str());
        if let Some(name) = self.frozen.iter().filter(unknown).min() {
            return refuse(format!("frozen names `{name}`, which is in no group"));
        }
        match self.lr_multipliers.keys().find(unknown) {
            Some(name) => refuse(format!("lr_multipliers names `{name}`, which is in no group")),
            None => Ok(()),
        }
    }
}

fn refuse<T>(why: String) -> Result<T, Failure> {
    Err(Failure::Config(why))
}

fn spelled(error: serde_json::Error) -> Failure {
    Failure::Config(error.to_string())
}

/// The one key that says how the others are to be read.
#[derive(Deserialize)]
struct Kind {
    optimizer: String,
}

/// The file, with groups of one optimizer's keys.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, bound = "G: DeserializeOwned")]
struct Spelled<G> {
    #[serde(rename = "optimizer")]
    _optimizer: String,
    #[serde(default = "one_rank")]
    world_size: u32,
    #[serde(default)]
    max_norm: Option<f64>,
    #[serde(default = "unscaled")]
    loss_scale: f64,
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
    groups: Vec<Object<G>>,
}

fn one_rank() -> u32 {
    1
}

fn none() -> Unique<f64> {
    Unique(BTreeMap::new())
}

fn unscaled() -> f64 {
    1.0
}

fn read<G: DeserializeOwned + Into<Group>>(text: &[u8]) -> Result<Config, Failure> {
    let Object(spelled) = serde_json::from_slice::<Object<Spelled<G>>>(text).map_err(spelled)?;
    let Spelled { world_size, max_norm, loss_scale, skip_nonfinite, dtypes, ema, groups, .. } = spelled;
    let precision = dtypes.precision()?;
    let copy = spelled.copy.map(|word| look_up("copy", &word, FLOATS)).transpose()?;
    let mut frozen = HashSet::new();
    for name in spelled.frozen {
        if let Some(name) = frozen.replace(name) {
            return refuse(format!("frozen names `{name}` a second time"));
        }
    }
    let groups = groups.into_iter().map(|group| group.0.into()).collect();
    Ok(Config {
        groups,
        world_size,
        max_norm,
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

/// A struct per optimizer: the optimizer's own fields as keys, with its own defaults.
macro_rules! group {
    ($name:ident, $rule:ident { $($key:ident: $kind:ty),* }) => {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields, default)]
        struct $name {
            params: Vec<String>,
            $($key: $kind,)*
        }

        impl Default for $name {
            fn default() -> Self {
                let $rule { $($key),* } = $rule::default();
                $name { params: Vec::new(), $($key: $key.into()),* }
            }
        }

        impl From<$name> for Group {
            fn from(group: $name) -> Group {
                let $name { params, $($key),* } = group;
                Group { params, rule: Rule::$rule($rule { $($key: $key.into()),* }) }
            }
        }
    };
}

group!(
    SgdGroup,
    Sgd { lr: f64, momentum: f64, dampening: f64, weight_decay: f64, nesterov: bool, maximize: bool }
);
group!(AdamGroup, Adam { lr: f64, betas: Pair, eps: f64, weight_decay: f64, amsgrad: bool, maximize: bool });
group!(
    AdamWGroup,
    AdamW { lr: f64, betas: Pair, eps: f64, weight_decay: f64, amsgrad: bool, maximize: bool }
);
group!(RpropGroup, Rprop { lr: f64, etas: Pair, step_sizes: Pair, maximize: bool });
group!(LionGroup, Lion { lr: f64, betas: Pair, weight_decay: f64, maximize: bool });
group!(
    NAdamGroup,
    NAdam {
        lr: f64,
        betas: Pair,
        eps: f64,
        weight_decay: f64,
        momentum_decay: f64,
        decoupled_weight_decay: bool,
        maximize: bool
    }
);
group!(
    RAdamGroup,
    RAdam { lr: f64, betas: Pair, eps: f64, weight_decay: f64, decoupled_weight_decay: bool, maximize: bool }
);
group!(LambGroup, Lamb { lr: f64, betas: Pair, eps: f64, weight_decay: f64, maximize: bool });

group!(
    AdagradGroup,
    Adagrad {
        lr: f64,
        lr_decay: f64,
        weight_decay: f64,
        initial_accumulator_value: f64,
        eps: f64,
        maximize: bool
    }
);
group!(
    RmsPropGroup,
    RmsProp {
        lr: f64,
        alpha: f64,
        eps: f64,
        weight_decay: f64,
        momentum: f64,
        centered: bool,
        maximize: bool
    }
);
group!(AdadeltaGroup, Adadelta { lr: f64, rho: f64, eps: f64, weight_decay: f64, maximize: bool });
group!(AdamaxGroup, Adamax { lr: f64, betas: Pair, eps: f64, weight_decay: f64, maximize: bool });

/// Two numbers. A tuple would do but for its message about a third one, which names nothing.
#[derive(Deserialize)]
#[serde(try_from = "Vec<f64>")]
struct Pair(f64, f64);

impl TryFrom<Vec<f64>> for Pair {
    type Error = String;

    fn try_from(numbers: Vec<f64>) -> Result<Self, String> {
        match numbers[..] {
            [first, second] => Ok(Pair(first, second)),
            _ => Err(format!("betas, etas and step_sizes are two numbers, not {}", numbers.len())),
        }
    }
}

impl From<(f64, f64)> for Pair {
    fn from((first, second): (f64, f64)) -> Self {
        Pair(first, second)
    }
}

impl From<Pair> for (f64, f64) {
    fn from(Pair(first, second): Pair) -> Self {
        (first, second)
    }
}
