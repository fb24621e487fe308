//! Element types of every tensor, and the precision of each parameter. Groups and single parameters may have a
//! precision other than the default.
//!
//! Arithmetic is f32 for every storage type. A value is rounded once, when it is stored. Before any step runs, this
//! module rejects a combination of types that no kernel supports. The error names the option, the group or the
//! parameter.

use std::collections::HashMap;

use crate::abi::{
    INSTEP_MASTER_F32, INSTEP_MASTER_NONE, INSTEP_MASTER_REMAINDER8, INSTEP_MASTER_REMAINDER16,
    INSTEP_MOMENTS_8BIT, INSTEP_MOMENTS_BF16, INSTEP_MOMENTS_F32, INSTEP_QUANTUM,
};
use crate::dtype::DType;
use crate::error::{Error, Result, refuse};
use crate::layout::Layout;

/// How the low bits of a 16-bit parameter's f32 value are stored. Stored low bits preserve updates that are too small
/// for 16 bits. The discriminants equal the kernels' constants.
#[repr(u32)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Master {
    /// The low bits are not stored.
    #[default]
    None = INSTEP_MASTER_NONE,
    /// The value is stored as a separate f32 weight, 4 bytes per element. The parameter is this weight rounded to
    /// nearest even.
    F32 = INSTEP_MASTER_F32,
    /// The parameter is a master value rounded to the nearest bf16, ties away from zero. Master values have the same
    /// bits as with [`F32`](Self::F32). The low bits are stored as a remainder:
    /// `bits(master) - (bits(parameter) << 16)`. The remainder is a signed number of 16 bits (two's complement), 2
    /// bytes per element. If the parameter was rounded away from zero, the remainder is negative, and the upper 16 bits
    /// of the master value differ from the parameter.
    Remainder16 = INSTEP_MASTER_REMAINDER16,
    /// Like [`Remainder16`](Self::Remainder16), but each master value is first rounded to a fraction of 15 bits. The
    /// lower 8 bits of the remainder are then zeros. Only the upper 8 bits are stored, 1 byte per element.
    Remainder8 = INSTEP_MASTER_REMAINDER8,
}

/// Storage of optimizer states. The discriminants equal the kernels' constants.
#[repr(u32)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Moments {
    /// 4 bytes per element.
    #[default]
    F32 = INSTEP_MOMENTS_F32,
    /// 2 bytes per element. Unless rounding is [stochastic](Rounding::Stochastic), an average stays unchanged if the
    /// change would be less than 1/512 of its value. With a decay rate of 0.999, the second moment therefore never
    /// falls.
    BF16 = INSTEP_MOMENTS_BF16,
    /// An 8-bit code per element, and an f32 scale per block of 256 elements. The first block begins at the start of
    /// the parameter. With rounding to nearest, an average stays unchanged if the change would be less than half the
    /// gap between two neighbouring codes. Near the largest value of the block, half the gap is about 1/125 of the
    /// value. A second moment with decay rate 0.999 then falls too late, and steps are too small until it falls. Use
    /// [stochastic](Rounding::Stochastic) rounding, which does not change the mean. Second moments below 2^-90 may
    /// become zero, so an eps below 2^-45 is refused.
    EightBit = INSTEP_MOMENTS_8BIT,
}

/// How some values are rounded that are stored in fewer bits than f32: states of 16 or 8 bits, [24-bit
/// masters](Master::Remainder8), and 16-bit parameters without a master.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// Rounds to the nearest value, ties to even.
    #[default]
    Nearest,
    /// Rounds up or down at random, so that the expected result is the exact value. The random bits depend on the seed,
    /// the parameter's number of updates and the element's position in the layout. The random bits do not depend on
    /// buckets, ranks, threads or device. The result therefore has the same bits everywhere, and a resumed run computes
    /// the same bits as an uninterrupted run.
    Stochastic {
        /// The seed of the random bits. The seed must be the same on all ranks.
        seed: u64,
    },
}

/// Element types of one stepper's tensors.
///
/// A master requires 16-bit parameters, and a remainder requires bf16 parameters. Stochastic rounding requires bf16
/// parameters without a master, bf16 parameters with [`Remainder8`](Master::Remainder8), or states that are not f32.
/// Stochastic rounding is refused for f16 parameters without a master. [Adadelta](crate::Adadelta) and
/// [Rprop](crate::Rprop) refuse 8-bit states, and centered [RMSprop](crate::RmsProp) supports only f32 states.
///
/// ```
/// use instep::{DType, Layout, Master, Moments, Precision, Rounding, Solo, Stepper};
///
/// let layout = Layout::builder().param("w", 2).build()?;
/// let w = layout.id("w")?;
/// let precision = Precision {
///     param: DType::BF16,
///     grad: DType::BF16,
///     master: Master::Remainder16,
///     moments: Moments::EightBit,
///     rounding: Rounding::Stochastic { seed: 1 },
///     ..Precision::default()
/// };
/// let builder = Stepper::builder(&layout, instep::AdamW::default()).precision(precision);
/// let mut stepper = builder.host(Solo::default())?;
/// stepper.write(w, &[1.0, 2.0])?;
/// let mut pass = stepper.begin()?;
/// pass.write(w.grad(), &[0.5, -0.5])?;
/// pass.finish()?;
/// assert_eq!(stepper.view::<half::bf16>(w)?[0], half::bf16::from_f32(0.999));
/// # Ok::<(), instep::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Precision {
    /// The type of parameters.
    pub param: DType,
    /// The type of gradients, which is also the type in which ranks reduce gradients.
    pub grad: DType,
    /// How the low bits of 16-bit parameters are stored.
    pub master: Master,
    /// The type of optimizer states.
    pub moments: Moments,
    /// The rounding of values that are stored in fewer bits than f32.
    pub rounding: Rounding,
}

impl Default for Precision {
    /// f32 throughout.
    fn default() -> Self {
        Precision::F32
    }
}

impl Precision {
    /// f32 throughout.
    pub const F32: Precision = Precision {
        param: DType::F32,
        grad: DType::F32,
        master: Master::None,
        moments: Moments::F32,
        rounding: Rounding::Nearest,
    };

    /// Returns an error if no kernel supports this precision.
    ///
    /// # Errors
    /// `Config` with the name of the field that does not fit the others.
    pub fn validate(&self) -> Result<()> {
        let is_remainder = matches!(self.master, Master::Remainder16 | Master::Remainder8);
        let is_stochastic = self.rounding != Rounding::Nearest;
        let rounds_params =
            self.param != DType::F32 && matches!(self.master, Master::None | Master::Remainder8);
        refuse! {
            "master" = format_args!("{:?}", self.master), if self.master != Master::None && self.param == DType::F32
                => "f32 parameters need no master", "leave the master out";
            "master" = format_args!("{:?}", self.master), if is_remainder && self.param != DType::BF16
                => "remainders exist only for bf16 parameters", "use an f32 master";
            "rounding" = format_args!("{:?}", self.rounding),
                if is_stochastic && rounds_params && self.param == DType::F16
                => "stochastic rounding of parameters supports bf16 only", "use bf16, a master or rounding to nearest";
            "rounding" = format_args!("{:?}", self.rounding),
                if is_stochastic && !rounds_params && self.moments == Moments::F32
                => "neither parameters nor states lose bits in this precision", "round to nearest";
        }
        Ok(())
    }
}

/// How a plan stores a parameter and the tensors that belong to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Storage {
    /// Element types.
    pub precision: Precision,
    /// The type of a copy of each parameter, if there is one.
    pub copy: Option<DType>,
    /// Whether each parameter has an exponential moving average in f32.
    pub ema: bool,
}

impl From<Precision> for Storage {
    fn from(precision: Precision) -> Self {
        Storage { precision, ..Storage::default() }
    }
}

impl Master {
    /// Returns the size of one element in bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            Master::None => 0,
            Master::F32 => 4,
            Master::Remainder16 => 2,
            Master::Remainder8 => 1,
        }
    }
}

impl Moments {
    /// Returns the size of one element in bytes, without the scales of blocks.
    pub const fn bytes(self) -> u64 {
        match self {
            Moments::F32 => 4,
            Moments::BF16 => 2,
            Moments::EightBit => 1,
        }
    }

    /// Returns the size in bytes of the scales of `elements` elements.
    pub(crate) const fn scale_bytes(self, elements: u64) -> u64 {
        match self {
            Moments::F32 | Moments::BF16 => 0,
            Moments::EightBit => elements.div_ceil(INSTEP_QUANTUM as u64) * DType::F32.bytes(),
        }
    }
}

/// The storage of all parameters of a layout: a default, and the precisions that are set for individual groups. This
/// struct also stores the group clips, because all parameters of a bucket must have one precision and be clipped
/// together.
///
/// A parameter with its [own type](crate::LayoutBuilder::dtype) uses that type for itself and for its gradient. All
/// other fields of its group's precision still apply, with one exception: an f32 parameter has no [master](Master), so
/// only its states can be rounded stochastically.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Storages {
    common: Storage,
    groups: Vec<(String, Precision)>,
    clips: Vec<(String, Option<f64>)>,
}

impl From<Storage> for Storages {
    fn from(common: Storage) -> Self {
        Storages { common, ..Storages::default() }
    }
}

impl From<Precision> for Storages {
    fn from(precision: Precision) -> Self {
        Storage::from(precision).into()
    }
}

/// The kinds of buckets that a layout needs, and the kind of each parameter's bucket.
pub(super) struct Resolved {
    pub(super) kinds: Vec<Kind>,
    /// The index of each parameter's kind in `kinds`.
    pub(super) of: Vec<u32>,
    /// The `max_norm` of each clip set except set 0, or `None` for a set that is not clipped.
    pub(super) max_norms: Vec<Option<f64>>,
}

/// The properties that all parameters of a bucket have in common.
#[derive(Clone, Copy, Default, PartialEq)]
pub(super) struct Kind {
    pub(super) storage: Storage,
    /// See [`Bucket::clip_set`](super::Bucket::clip_set).
    pub(super) clip_set: u32,
}

impl Storages {
    /// Sets the precision of one group.
    pub fn group(mut self, name: impl Into<String>, precision: Precision) -> Self {
        self.groups.push((name.into(), precision));
        self
    }

    /// Clips one group separately to `max_norm`. With `None` the group is not clipped.
    pub fn group_clip(mut self, name: impl Into<String>, max_norm: Option<f64>) -> Self {
        self.clips.push((name.into(), max_norm));
        self
    }

    pub(super) fn copy(&self) -> Option<DType> {
        self.common.copy
    }

    pub(super) fn ema(&self) -> bool {
        self.common.ema
    }

    /// Returns the storage of each parameter.
    ///
    /// # Errors
    /// `Config` for a precision without a kernel, an unknown group, or a group that is named twice. `Layout` for a
    /// parameter with a type that does not fit its group's precision.
    pub(super) fn resolve(&self, layout: &Layout) -> Result<Resolved> {
        let of_group = self.of_groups(layout)?;
        let (clip_set_of_group, max_norms) = self.clip_sets(layout)?;
        let of = Vec::with_capacity(layout.parameters().len());
        let mut resolved = Resolved { kinds: Vec::new(), of, max_norms };
        let mut known = HashMap::new();
        for parameter in layout.parameters() {
            let key = (parameter.group, parameter.dtype);
            let index = match known.get(&key) {
                Some(index) => *index,
                None => {
                    let of_group = of_group[parameter.group as usize];
                    let precision = parameter.dtype.map_or(of_group, |dtype| of_group.with_type(dtype));
                    precision.validate().map_err(|error| refused(&parameter.name, error))?;
                    let storage = Storage { precision, ..self.common };
                    let clip_set = clip_set_of_group[parameter.group as usize];
                    let index = resolved.index(Kind { storage, clip_set });
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
        for (group, precision) in by_group("group_precision", "a precision", layout, &self.groups)? {
            precision.validate()?;
            of_group[group] = *precision;
        }
        Ok(of_group)
    }

    /// Returns the clip set of each group, and the `max_norm` of each set except set 0. The groups that are not clipped
    /// form one set.
    pub(crate) fn clip_sets(&self, layout: &Layout) -> Result<(Vec<u32>, Vec<Option<f64>>)> {
        let (mut of_group, mut max_norms) = (vec![0; layout.groups().len()], Vec::new());
        for (group, max_norm) in by_group("group_clip", "a clip", layout, &self.clips)? {
            let known = max_norms.iter().position(|known| max_norm.is_none() && known == max_norm);
            of_group[group] = 1 + known.unwrap_or(max_norms.len()) as u32;
            if known.is_none() {
                max_norms.push(*max_norm);
            }
        }
        Ok((of_group, max_norms))
    }
}

/// Finds the group of each entry in a list of options for groups. If a group is named twice, returns an error.
fn by_group<'a, T>(
    option: &'static str,
    what: &str,
    layout: &Layout,
    given: &'a [(String, T)],
) -> Result<Vec<(usize, &'a T)>> {
    let mut found: Vec<(usize, &T)> = Vec::with_capacity(given.len());
    for (name, of_group) in given {
        let group = layout.require_group(option, name)?;
        if found.iter().any(|(known, _)| *known == group) {
            return Err(Error::config(option, name, format_args!("has {what} already"), "set it once"));
        }
        found.push((group, of_group));
    }
    Ok(found)
}

impl Resolved {
    fn index(&mut self, kind: Kind) -> u32 {
        let known = self.kinds.iter().position(|known| *known == kind);
        known.unwrap_or_else(|| {
            self.kinds.push(kind);
            self.kinds.len() - 1
        }) as u32
    }

    /// Returns the kind of a parameter's bucket.
    pub(super) fn kind(&self, param: usize) -> Kind {
        self.kinds[self.of[param] as usize]
    }
}

impl Precision {
    /// Returns the precision of a parameter that has its own type `dtype` and is in a group with this precision.
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

/// Returns the error for a parameter with a type that does not fit its group's precision. The error names the
/// parameter.
fn refused(name: &str, error: Error) -> Error {
    match error {
        Error::Config { field, value, wrong, remedy } => {
            Error::layout(format_args!("`{name}`"), format_args!("{field} = {value}: {wrong}"), remedy)
        }
        other => other,
    }
}

/// The types in which a model computes, reduces gradients, takes inputs and returns outputs. The optimizer steps
/// parameters in their original type. A policy works with every [strategy](crate::Strategy).
///
/// ```
/// use instep::{DType, Layout, MixedPrecisionPolicy, Solo, Stepper, bf16};
///
/// let policy = MixedPrecisionPolicy {
///     param_dtype: Some(DType::BF16),
///     reduce_dtype: Some(DType::F32),
///     ..MixedPrecisionPolicy::default()
/// };
/// let layout = Layout::builder().param("w", 2).build()?;
/// let w = layout.id("w")?;
/// let builder = Stepper::builder(&layout, instep::Sgd { lr: 1.0, ..Default::default() });
/// let mut stepper = builder.precision(policy.precision(DType::F32)?).host(Solo::default())?;
/// stepper.write(w, &[1.0, 2.0])?; // the f32 parameter
/// let mut pass = stepper.begin()?;
/// pass.grads().write(w, &[bf16::from_f32(1.0 / 1024.0); 2])?; // one micro-batch, as bf16 backward leaves it
/// pass.grads().add(w, &[bf16::from_f32(1.0); 2])?; // the next one; the sum is f32
/// pass.finish()?;
/// let mut exact = [0.0; 2];
/// stepper.read(w, &mut exact)?;
/// assert_eq!(exact, [-1.0 / 1024.0, 1.0 - 1.0 / 1024.0]);
/// assert_eq!(stepper.view::<bf16>(w)?[1], bf16::from_f32(exact[1]));
/// # Ok::<(), instep::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MixedPrecisionPolicy {
    /// The type of parameters in forward, in backward and in collectives. `None` means their original type.
    pub param_dtype: Option<DType>,
    /// The type in which gradients are accumulated and reduced. `None` means the type of
    /// [`param_dtype`](Self::param_dtype).
    pub reduce_dtype: Option<DType>,
    /// The type of forward's outputs. `None` means the type in which forward computes.
    pub output_dtype: Option<DType>,
    /// Whether forward's inputs are cast to [`param_dtype`](Self::param_dtype).
    pub cast_forward_inputs: bool,
}

impl Default for MixedPrecisionPolicy {
    /// Returns the policy in which every type is the parameters' original type.
    fn default() -> Self {
        MixedPrecisionPolicy {
            param_dtype: None,
            reduce_dtype: None,
            output_dtype: None,
            cast_forward_inputs: true,
        }
    }
}

impl MixedPrecisionPolicy {
    /// Returns the precision for a stepper, a [group](crate::StepperBuilder::group_precision) or a bucket. The
    /// optimizer steps parameters of type `original`. If `original` is f32 and `param_dtype` has 16 bits, parameters
    /// get an f32 master. A [strategy](crate::Strategy) may shard the master.
    ///
    /// PyTorch rounds a reduced gradient to `original` before the step. instep does not round the gradient.
    ///
    /// # Errors
    /// `Config` if `original` cannot represent all values of `param_dtype`.
    pub fn precision(&self, original: DType) -> Result<Precision> {
        let param = self.param_dtype.unwrap_or(original);
        let master = match (original, param) {
            (DType::F32, DType::BF16 | DType::F16) => Master::F32,
            (original, param) if original == param => Master::None,
            _ => {
                let wrong = format_args!("parameters of {original} cannot hold it");
                return Err(Error::config(
                    "param_dtype",
                    param,
                    wrong,
                    "leave it out, or keep f32 parameters",
                ));
            }
        };
        Ok(Precision { param, grad: self.reduce_dtype.unwrap_or(param), master, ..Precision::F32 })
    }

    /// Returns the type to which a forward input of type `input` is [cast](crate::cast()).
    pub fn forward_input(&self, input: DType) -> DType {
        self.param_dtype.filter(|_| self.cast_forward_inputs).unwrap_or(input)
    }

    /// Returns the type to which a forward output of type `output` is [cast](crate::cast()).
    pub fn forward_output(&self, output: DType) -> DType {
        self.output_dtype.unwrap_or(output)
    }
}

#[cfg(test)]
#[path = "../../tests/unit/layout/element_types.rs"]
mod tests;
