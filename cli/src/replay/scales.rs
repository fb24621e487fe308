//! How a configuration spells clipping and the loss scale: one key each, so that two of a kind cannot be given.
//!
//! `clip` is an object with one norm. `loss_scale` is a number, or an object with the policy of a dynamic scale.

use std::fmt;

use instep::{Clip, LossScale, LossScaler};
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Clipping that a replay can repeat. Buckets are cut as the command line says, so none has a norm that the run had.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Spelled {
    Global(f64),
    Previous(f64),
}

/// A policy of dynamic loss scaling, as `torch.amp.GradScaler` spells it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Scaler {
    growth_factor: f64,
    backoff_factor: f64,
    growth_interval: u32,
}

impl Default for Scaler {
    fn default() -> Self {
        let LossScaler { growth_factor, backoff_factor, growth_interval, .. } = LossScaler::default();
        Scaler { growth_factor, backoff_factor, growth_interval }
    }
}

pub(super) fn clip<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Clip>, D::Error> {
    let spelled = Option::deserialize(deserializer)?;
    Ok(spelled.map(|spelled| match spelled {
        Spelled::Global(max_norm) => Clip::Global(max_norm),
        Spelled::Previous(max_norm) => Clip::Previous(max_norm),
    }))
}

pub(super) fn unscaled() -> LossScale {
    LossScale::Constant(1.0)
}

pub(super) fn loss_scale<'de, D: Deserializer<'de>>(deserializer: D) -> Result<LossScale, D::Error> {
    deserializer.deserialize_any(NumberOrPolicy)
}

struct NumberOrPolicy;

impl<'de> Visitor<'de> for NumberOrPolicy {
    type Value = LossScale;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number, or an object for a dynamic scale")
    }

    fn visit_f64<E>(self, loss_scale: f64) -> Result<LossScale, E> {
        Ok(LossScale::Constant(loss_scale))
    }

    fn visit_u64<E>(self, loss_scale: u64) -> Result<LossScale, E> {
        Ok(LossScale::Constant(loss_scale as f64))
    }

    fn visit_i64<E>(self, loss_scale: i64) -> Result<LossScale, E> {
        Ok(LossScale::Constant(loss_scale as f64))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<LossScale, A::Error> {
        let Scaler { growth_factor, backoff_factor, growth_interval } =
            Scaler::deserialize(MapAccessDeserializer::new(map))?;
        let scaler = LossScaler { growth_factor, backoff_factor, growth_interval, ..LossScaler::default() };
        Ok(LossScale::Dynamic(scaler))
    }
}
