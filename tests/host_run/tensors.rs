//! A step stores these tensors: parameters, their masters or remainders, states, copy and average.
//!
//! Offsets are in elements and equal for all tensors, as in a layout; scales are per block of elements. Copy and
//! average start as NaN, because a first update only writes them.

use std::ptr;

use instep::abi::*;
use instep::{DType, Master, Moments, Precision, Rounding};

use super::case::{Case, rule};
use super::memory::Bands;

/// Number of elements that share a scale.
const BLOCK: usize = INSTEP_QUANTUM as usize;

pub(crate) struct Tensors {
    pub params: Bands,
    /// The tensor, and the size of its elements.
    master: Option<(Bands, usize)>,
    states: Vec<(Bands, usize)>,
    /// The scales of 8-bit states.
    scales: Vec<Bands>,
    copy: Option<(Bands, usize)>,
    ema: Option<(Bands, usize)>,
}

/// Returns a pointer that lies `shift` elements before its tensor.
pub(crate) fn earlier<T>(pointer: *mut T, shift: u64, element_bytes: usize) -> *mut T {
    pointer.wrapping_byte_sub(shift as usize * element_bytes)
}

pub(crate) fn dtype_code(dtype: DType) -> InstepDtype {
    match dtype {
        DType::BF16 => INSTEP_DTYPE_BF16,
        DType::F16 => INSTEP_DTYPE_F16,
        _ => INSTEP_DTYPE_F32,
    }
}

fn master_code(master: Master) -> InstepMaster {
    match master {
        Master::None => INSTEP_MASTER_NONE,
        Master::F32 => INSTEP_MASTER_F32,
        Master::Remainder16 => INSTEP_MASTER_REMAINDER16,
        Master::Remainder8 => INSTEP_MASTER_REMAINDER8,
    }
}

fn moments_code(moments: Moments) -> InstepMoments {
    match moments {
        Moments::F32 => INSTEP_MOMENTS_F32,
        Moments::BF16 => INSTEP_MOMENTS_BF16,
        Moments::EightBit => INSTEP_MOMENTS_8BIT,
    }
}

impl Tensors {
    pub(crate) fn new(case: &Case, lens: &[usize]) -> Tensors {
        let m = case.misalignment;
        let Precision { param, master, moments, .. } = case.precision;
        let bands = |name, bytes: u64, misalignment: usize| {
            (Bands::new(name, lens, bytes as usize, misalignment % 16), bytes as usize)
        };
        let states = 0..rule(case.optim).2;
        let coded = states.clone().filter(|_| moments == Moments::EightBit);
        let mut tensors = Tensors {
            params: bands("the parameters", param.bytes(), m * 3).0,
            master: (master != Master::None).then(|| bands("the master", master.bytes(), m * 5)),
            states: states.map(|k| bands("a state", moments.bytes(), m * 5 + (k + 1) * m.min(1))).collect(),
            scales: coded.map(|k| Bands::per_block("scales", lens, BLOCK, (m + k) % 16)).collect(),
            copy: case.copy.map(|dtype| bands("the copy", dtype.bytes(), m * 7)),
            ema: case.ema.map(|_| bands("the average", DType::F32.bytes(), m * 11)),
        };
        for (k, len) in lens.iter().enumerate() {
            (0..*len).for_each(|at| tensors.set_param(case, k, at));
        }
        tensors.states.iter_mut().for_each(|(bands, _)| bands.clear_runs());
        tensors.scales.iter_mut().for_each(Bands::clear_runs);
        tensors
    }

    /// 16-bit parameters and remainders take parts of the value's bits; beside an f32 master, the parameter has no
    /// effect.
    fn set_param(&mut self, case: &Case, segment: usize, at: usize) {
        let Precision { param, master, .. } = case.precision;
        let bits = (case.param)(segment, at).to_bits();
        match (param, master) {
            (DType::F32, _) => self.params.set(segment, at, bits),
            (_, Master::F32) => self.params.set(segment, at, 0u16),
            _ => self.params.set(segment, at, (bits >> 16) as u16),
        }
        let Some((rest, _)) = &mut self.master else { return };
        match master {
            Master::Remainder16 => rest.set(segment, at, bits as u16),
            Master::Remainder8 => rest.set(segment, at, (bits >> 8) as u8),
            _ => rest.set(segment, at, bits),
        }
    }

    pub(crate) fn all(&mut self) -> impl Iterator<Item = &mut Bands> {
        let Tensors { params, master, states, scales, copy, ema } = self;
        let sized = master.iter_mut().chain(states).chain(copy).chain(ema);
        std::iter::once(params).chain(sized.map(|(bands, _)| bands)).chain(scales)
    }

    /// Returns the arguments of a step that describe these tensors; all other arguments are zero.
    pub(crate) fn args(&mut self, case: &Case) -> InstepStepArgs {
        let Precision { param, grad, master, moments, rounding } = case.precision;
        let base = |(bands, bytes): &mut (Bands, usize)| {
            earlier(bands.address::<u8>(0), case.shift, *bytes).cast::<std::ffi::c_void>()
        };
        let optional = |tensor: &mut Option<_>| tensor.as_mut().map_or(ptr::null_mut(), base);
        let mut states = [ptr::null_mut(); INSTEP_MAX_STATES as usize];
        states.iter_mut().zip(&mut self.states).for_each(|(pointer, state)| *pointer = base(state));
        let mut scales = [ptr::null_mut(); INSTEP_MAX_STATES as usize];
        for (pointer, bands) in scales.iter_mut().zip(&mut self.scales) {
            *pointer = earlier(bands.address::<f32>(0), case.shift / BLOCK as u64, size_of::<f32>());
        }
        let decay = case.ema.unwrap_or(0.0);
        let from_sample = 1.0 - decay >= 0.5;
        let seed = if let Rounding::Stochastic { seed } = rounding { Some(seed) } else { None };
        InstepStepArgs {
            master: optional(&mut self.master),
            copy: optional(&mut self.copy),
            ema: optional(&mut self.ema).cast(),
            states,
            scales,
            seed: seed.unwrap_or(0),
            param_dtype: dtype_code(param),
            grad_dtype: dtype_code(grad),
            copy_dtype: dtype_code(case.copy.unwrap_or(DType::F32)),
            master_kind: master_code(master),
            moments: moments_code(moments),
            stochastic: seed.is_some().into(),
            ema_from_sample: from_sample.into(),
            ema_weight: if from_sample { -decay } else { 1.0 - decay } as f32,
            // SAFETY: zeros are a value of it.
            ..unsafe { std::mem::zeroed() }
        }
    }
}
