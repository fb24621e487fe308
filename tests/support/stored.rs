//! Every precision, and all stored tensors of a stepper, as bits.
//!
//! Values are read as f32, which is exact; the 16-bit parameter beside a master is also read as it is stored. The list
//! must come from `Precision::validate`, so that a newly accepted precision is tested at once.

use instep::dtype::{DType, Element};
use instep::layout::Storage;
use instep::{
    Adam, AdamW, Layout, Master, Moments, ParamId, Precision, Result, Rounding, Sgd, Stepper, StepperBuilder,
};

use crate::support::Optim;

pub(crate) const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
pub(crate) const SEED: u64 = 0x5eed;
pub(crate) const EMA_DECAY: f64 = 0.75;

const STOCHASTIC: Rounding = Rounding::Stochastic { seed: SEED };

/// Returns every combination of types, accepted or not.
pub(crate) fn all() -> impl Iterator<Item = Precision> {
    let masters = [Master::None, Master::F32, Master::Remainder16, Master::Remainder8];
    let moments = [Moments::F32, Moments::BF16, Moments::EightBit];
    let roundings = [Rounding::Nearest, STOCHASTIC];
    let count = DTYPES.len() * DTYPES.len() * masters.len() * moments.len() * roundings.len();
    (0..count).map(move |k| Precision {
        param: DTYPES[k % 3],
        grad: DTYPES[k / 3 % 3],
        moments: moments[k / 9 % 3],
        master: masters[k / 27 % 4],
        rounding: roundings[k / 108],
    })
}

/// Returns the combinations that a stepper accepts.
pub(crate) fn accepted() -> impl Iterator<Item = Precision> {
    all().filter(|precision| precision.validate().is_ok())
}

/// Returns optimizers without a state, with a signed one, with one of either kind, and with three.
pub(crate) fn one_per_state_count() -> [Optim; 4] {
    [
        Optim::of(Sgd { lr: 0.05, ..Sgd::default() }),
        Optim::of(Sgd { lr: 0.05, momentum: 0.9, nesterov: true, ..Sgd::default() }),
        Optim::of(AdamW { lr: 0.01, ..AdamW::default() }),
        Optim::of(Adam { amsgrad: true, weight_decay: 0.04, betas: (0.9, 0.8), ..Adam::default() }),
    ]
}

/// Returns each accepted precision with and without copy and average; the optimizers alternate, so that each meets
/// every precision.
pub(crate) fn cases() -> impl Iterator<Item = (Storage, Optim)> {
    accepted().enumerate().flat_map(|(at, precision)| {
        (0..4).map(move |extras| {
            let copy = (extras & 1 != 0).then(|| DTYPES[at % 3]);
            (Storage { precision, copy, ema: extras & 2 != 0 }, one_per_state_count()[(at + extras) % 4])
        })
    })
}

pub(crate) fn with<'a>(mut builder: StepperBuilder<'a>, storage: &Storage) -> StepperBuilder<'a> {
    builder = builder.precision(storage.precision);
    if let Some(dtype) = storage.copy {
        builder = builder.copy_params(dtype);
    }
    if storage.ema { builder.ema(EMA_DECAY) } else { builder }
}

/// The tensors of a stepper between passes: those of each parameter, by name.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stored {
    pub(crate) params: Vec<Vec<(String, Vec<u32>)>>,
}

impl Stored {
    pub(crate) fn of(stepper: &Stepper) -> Result<Stored> {
        let layout = stepper.layout().clone();
        let tensors = |id| tensors(stepper, &layout, id);
        Ok(Stored { params: layout.ids().map(tensors).collect::<Result<_>>()? })
    }

    /// Asserts the same bits in all tensors except gradients, which depend on how the ranks get their data.
    #[track_caller]
    pub(crate) fn assert_same(&self, other: &Stored, what: &dyn std::fmt::Debug) {
        assert_eq!(self.params.len(), other.params.len(), "{what:?}");
        for (param, (a, b)) in self.params.iter().zip(&other.params).enumerate() {
            assert_eq!(a.len(), b.len(), "{what:?}");
            for ((name, a), (_, b)) in a.iter().zip(b) {
                let differs = a.iter().zip(b).position(|(a, b)| a != b);
                if let Some(k) = differs {
                    panic!("{name} of p{param}[{k}] is {:#x} and {:#x}: {what:?}", a[k], b[k]);
                }
                assert_eq!(a.len(), b.len(), "{name} of p{param}: {what:?}");
            }
        }
    }
}

fn tensors(stepper: &Stepper, layout: &Layout, id: ParamId) -> Result<Vec<(String, Vec<u32>)>> {
    let len = layout.parameter(id)?.len as usize;
    let (plan, precision) = (stepper.plan(), stepper.precision_of(id)?);
    let copied = |read: &dyn Fn(&mut [f32]) -> Result<()>| {
        let mut values = vec![0.0; len];
        read(&mut values)?;
        Ok(values.iter().map(|x| x.to_bits()).collect())
    };
    let mut tensors = vec![
        ("value".to_owned(), copied(&|into| stepper.read(id, into))?),
        ("parameter as stored".to_owned(), stored_param(stepper, id, precision.param)?),
    ];
    for name in stepper.state_names(id)? {
        tensors.push((name.to_string(), copied(&|into| stepper.read(id.state(&name), into))?));
    }
    if plan.keeps_ema() {
        tensors.push(("average".to_owned(), copied(&|into| stepper.read(id.ema(), into))?));
    }
    if plan.copy().is_some() {
        tensors.push(("copy".to_owned(), copied(&|into| stepper.read(id.copy(), into))?));
    }
    tensors.push(("step count".to_owned(), vec![stepper.step_count(id)? as u32]));
    Ok(tensors)
}

/// Returns the bits of a parameter as steps leave them, with its master or remainder, if it has one.
pub(crate) fn stored_param(stepper: &Stepper, id: ParamId, dtype: DType) -> Result<Vec<u32>> {
    fn bits<T: Element>(stepper: &Stepper, id: ParamId) -> Result<Vec<u32>> {
        Ok(stepper.view::<T>(id)?.iter().map(|x| x.to_f32().to_bits()).collect())
    }
    match dtype {
        DType::BF16 => bits::<half::bf16>(stepper, id),
        DType::F16 => bits::<half::f16>(stepper, id),
        _ => bits::<f32>(stepper, id),
    }
}

/// Returns multiples of 1/8 up to 2: they have five bits, so sums of eight are exact in bf16 and in f16.
pub(crate) fn dyadic(step: usize, rank: usize, param: usize, element: usize) -> f32 {
    let n = (step * 31 + rank * 57 + param * 17 + element * 13) % 33;
    (n as f32 - 16.0) / 8.0
}
