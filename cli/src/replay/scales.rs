//! Reads the keys `clip` and `loss_scale` of a configuration. A configuration has each key at most once, so it cannot
//! ask for two loss scales, or for two values of `clip`. `groups.rs` reads a group's own clip, `max_norm`.
//!
//! `clip` is an object with one norm. `loss_scale` is a number, or an object with the policy of a dynamic scale.

use std::fmt;

use instep::checkpoint::safetensors::Unique;
use instep::{Clip, LossScale, LossScaler};
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// A policy of dynamic loss scaling, with the names of `torch.amp.GradScaler`.
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

/// Reads the key `clip`. A replay chooses its own buckets, so it cannot repeat the training's clipping per bucket.
pub(super) fn clip<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Clip>, D::Error> {
    let Some(Unique(spelled)) = Option::<Unique<f64>>::deserialize(deserializer)? else { return Ok(None) };
    let mut spelled = spelled.into_iter();
    match (spelled.next(), spelled.next()) {
        (Some((key, max_norm)), None) if key == "global" => Ok(Some(Clip::Global(max_norm))),
        (Some((key, max_norm)), None) if key == "previous" => Ok(Some(Clip::Previous(max_norm))),
        _ => {
            Err(D::Error::custom("clip: not one known norm; use {\"global\": NORM} or {\"previous\": NORM}"))
        }
    }
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
