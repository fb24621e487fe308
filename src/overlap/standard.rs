//! The standard registry: every optimizer of the crate by its name in `torch.optim`, and its keywords.
//!
//! Names, keywords and defaults come from the optimizers' descriptors, so no second list can differ from them.

use super::registry::{Keywords, Registry};
use crate::error::Result;
use crate::optim::{ALL, Descriptor, Optimizer};

impl Registry {
    /// Returns a registry of the optimizers of this crate, under the names that they have in `torch.optim`, or in
    /// their papers if it has none; [`names`](Self::names) lists them.
    ///
    /// Hyperparameters have the names of their fields. A pair has two keywords: `betas` are `beta1` and `beta2`,
    /// `etas` are `eta_minus` and `eta_plus`, `step_sizes` are `step_size_min` and `step_size_max`. Defaults are
    /// `torch.optim`'s; the functional classes of PyTorch's own map have others (lr of SGD 1e-2, of Adamax 1e-3).
    pub fn standard() -> Registry {
        let mut registry = Registry::new();
        for descriptor in ALL {
            registry
                .insert(descriptor.name, (descriptor.type_of)(), |keywords| construct(descriptor, keywords));
        }
        registry
    }
}

fn construct(descriptor: &Descriptor, keywords: &mut Keywords<'_>) -> Result<Box<dyn Optimizer>> {
    let mut optimizer = descriptor.build();
    for field in descriptor.fields {
        let defaults = field.default.numbers();
        let parts = field.parts.iter().zip(defaults);
        let numbers: Vec<f64> = parts.map(|(part, default)| keywords.number(part.keyword, default)).collect();
        optimizer.set(field.name, field.value(&numbers)?)?;
    }
    Ok(optimizer)
}
