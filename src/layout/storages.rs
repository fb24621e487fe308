//! The storage of each parameter: one precision for all, others for groups, and types of single parameters.
//!
//! It depends on the layout and on `storage.rs`. A combination that no kernel has is refused by the name of the group or
//! of the parameter that asks for it.

use std::collections::HashMap;

use crate::dtype::DType;
use crate::error::{Error, Result, one_of};
use crate::layout::{Layout, Master, Moments, Precision, Rounding, Storage};

/// The storage of all parameters of a layout: that of the whole, and precisions of single groups.
///
/// A parameter with a [type of its own](crate::LayoutBuilder::dtype) takes that type for itself and its gradient, and the
/// rest of its group's precision as far as it applies: in f32 it has no [master](Master), and values that lose no bits
/// are not rounded stochastically.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Storages {
    common: Storage,
    groups: Vec<(String, Precision)>,
}

impl From<Storage> for Storages {
    fn from(common: Storage) -> Self {
        Storages { common, groups: Vec::new() }
    }
}

impl From<Precision> for Storages {
    fn from(precision: Precision) -> Self {
        Storage::from(precision).into()
    }
}

/// The storages that the parameters of a layout differ in, and which of them each parameter has.
pub(super) struct Resolved {
    pub(super) kinds: Vec<Storage>,
    /// Per parameter, an index into `kinds`.
    pub(super) of: Vec<u32>,
}

impl Storages {
    /// Sets the precision of one group.
    pub fn group(mut self, name: impl Into<String>, precision: Precision) -> Self {
        self.groups.push((name.into(), precision));
        self
    }

    pub(super) fn copy(&self) -> Option<DType> {
        self.common.copy
    }

    pub(super) fn ema(&self) -> bool {
        self.common.ema
    }

    /// The storage of each parameter.
    ///
    /// # Errors
    /// `Config` for a precision that no kernel has, an unknown group, or a group that is named twice; `Layout` for a
    /// parameter whose own type does not go with its group's precision.
    pub(super) fn resolve(&self, layout: &Layout) -> Result<Resolved> {
        let of_group = self.of_groups(layout)?;
        let mut resolved = Resolved { kinds: Vec::new(), of: Vec::with_capacity(layout.parameters().len()) };
        let mut known = HashMap::new();
        for parameter in layout.parameters() {
            let key = (parameter.group, parameter.dtype);
            let index = match known.get(&key) {
                Some(index) => *index,
                None => {
                    let of_group = of_group[parameter.group as usize];
                    let precision = parameter.dtype.map_or(of_group, |dtype| of_group.with_type(dtype));
                    precision.validate().map_err(|error| refused(&parameter.name, error))?;
                    let index = resolved.index(Storage { precision, ..self.common });
                    known.insert(key, index);
                    index
                }
            };
            resolved.of.push(index);
        }
        Ok(resolved)
    }

    fn of_groups(&self, layout: &Layout) -> Result<Vec<Precision>> {
        self.common.precision.validate()?;
        let mut of_group = vec![self.common.precision; layout.groups().len()];
        let mut is_set = vec![false; of_group.len()];
        for (name, precision) in &self.groups {
            let Some(group) = layout.group(name) else {
                let known = one_of(name, layout.groups().iter().map(String::as_str));
                let wrong = "not a group of the layout";
                return Err(Error::config("group_precision", name, wrong, format_args!("use {known}")));
            };
            if std::mem::replace(&mut is_set[group], true) {
                return Err(Error::config("group_precision", name, "has a precision already", "set it once"));
            }
            precision.validate()?;
            of_group[group] = *precision;
        }
        Ok(of_group)
    }
}

impl Resolved {
    fn index(&mut self, storage: Storage) -> u32 {
        let known = self.kinds.iter().position(|known| *known == storage);
        known.unwrap_or_else(|| {
            self.kinds.push(storage);
            self.kinds.len() - 1
        }) as u32
    }

    /// The storage of a parameter.
    pub(super) fn storage(&self, param: usize) -> Storage {
        self.kinds[self.of[param] as usize]
    }
}

impl Precision {
    /// The precision of a parameter of this type in a group of this one.
    fn with_type(self, dtype: DType) -> Precision {
        let mut precision = Precision { param: dtype, grad: dtype, ..self };
        if dtype == DType::F32 {
            precision.master = Master::None;
            if precision.moments == Moments::F32 {
                precision.rounding = Rounding::Nearest;
            }
        }
        precision
    }
}

/// Names the parameter whose type its group's precision has no kernel for.
fn refused(name: &str, error: Error) -> Error {
    match error {
        Error::Config { field, value, wrong, remedy } => {
            Error::layout(format_args!("`{name}`"), format_args!("{field} = {value}: {wrong}"), remedy)
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_type_of_its_own_takes_what_applies_of_the_groups_precision() {
        let stochastic = Rounding::Stochastic { seed: 3 };
        let precision = |param, master, moments, rounding| Precision {
            param,
            grad: DType::BF16,
            master,
            moments,
            rounding,
        };
        let low = precision(DType::BF16, Master::Remainder8, Moments::F32, stochastic);
        assert_eq!(low.with_type(DType::F32), Precision::F32);
        let codes = precision(DType::BF16, Master::F32, Moments::EightBit, stochastic);
        let expected = Precision { moments: Moments::EightBit, rounding: stochastic, ..Precision::F32 };
        assert_eq!(codes.with_type(DType::F32), expected);
        let half = Precision { param: DType::F16, grad: DType::F16, ..codes };
        assert_eq!(codes.with_type(DType::F16), half);
        let wide = Precision { grad: DType::F32, ..low };
        assert_eq!(wide.with_type(DType::BF16), low);
    }

    #[test]
    fn what_no_kernel_has_is_refused_by_name() {
        let layout = Layout::builder().param("w", 4).in_group("low").param("half", 4).in_group("low");
        let layout = layout.dtype(DType::F16).build().unwrap();
        let low = Precision { param: DType::BF16, grad: DType::BF16, ..Precision::F32 };
        let remainders = Precision { master: Master::Remainder16, ..low };
        let rounded = Precision { rounding: Rounding::Stochastic { seed: 1 }, ..low };
        let common = || Storages::from(Precision::F32);
        let cases = [
            (
                common().group("lwo", low),
                "group_precision = lwo: not a group of the layout; use one of default, low",
            ),
            (common().group("low", low).group("low", low), "group_precision = low: has a precision already"),
            (
                common().group("default", Precision { master: Master::F32, ..Precision::F32 }),
                "f32 parameters need no master",
            ),
            (
                common().group("low", remainders),
                "`half`: master = Remainder16: remainders exist only for bf16",
            ),
            (
                common().group("low", rounded),
                "`half`: rounding = Stochastic { seed: 1 }: stochastic rounding",
            ),
        ];
        for (storages, wrong) in cases {
            let error = storages.resolve(&layout).err().unwrap().to_string();
            assert!(error.contains(wrong), "{error}");
        }
        let resolved = common().group("low", low).resolve(&layout).unwrap();
        let types: Vec<DType> = resolved.kinds.iter().map(|storage| storage.precision.param).collect();
        assert_eq!((types, resolved.of), (vec![DType::BF16, DType::F16], vec![0, 1]));
    }
}
