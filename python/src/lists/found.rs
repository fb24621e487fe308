//! Reads and checks the tensors of a call, one by one.
//!
//! `Reader` reads each tensor. This file never writes to a tensor.
#![allow(unsafe_code)]

use std::ptr::with_exposed_provenance_mut;

use instep::optim::{Descriptor, Value};
use pyo3::exceptions::{PyNotImplementedError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::arguments::Addresses;
use crate::tensors::{Reader, View, Word};

// The index of each list of a call.
pub(super) const PARAMS: usize = 0;
pub(super) const GRADS: usize = 1;
pub(super) const COUNTS: usize = 2;
pub(super) const COPIES: usize = 3;
/// The list of the carried numbers. Some optimizers have one number per parameter in addition to the step count.
pub(super) const CARRIED: usize = 4;
/// The index of the first state's list. The lists of further states follow.
pub(super) const STATES: usize = 5;

/// The types of one parameter's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Format {
    pub(super) param: Word,
    pub(super) grad: Word,
    pub(super) state: Word,
    pub(super) copy: Option<Word>,
    pub(super) carried: Word,
}

/// The formats, lengths, addresses and counts of a call's tensors.
#[derive(Default)]
pub(super) struct Found {
    pub(super) formats: Vec<Format>,
    pub(super) lens: Vec<u64>,
    /// For each list, the addresses of its tensors, or no addresses if the list was not given. An address of 0 means
    /// that the gradient or the copy is missing.
    pub(super) addresses: Vec<Addresses>,
    pub(super) progress: Vec<(u64, f64)>,
}

/// Reads and checks the lists of one optimizer.
pub(super) struct Finder {
    pub(super) descriptor: &'static Descriptor,
    /// The names of all states that the optimizer may have, in the order of their lists.
    pub(super) states: Vec<&'static str>,
    pub(super) reader: Reader,
}

impl Finder {
    /// Replaces the address of an empty tensor. PyTorch's address of an empty tensor may be 0, which would mean that
    /// the tensor is missing.
    const EMPTY: usize = 64;

    pub(super) fn hyper(&self, values: &Bound<'_, PyTuple>) -> PyResult<Vec<Value>> {
        let fields = self.descriptor.fields.iter().zip(values);
        fields
            .map(|(field, value)| {
                Ok(match field.default {
                    Value::Pair(_) => Value::Pair(value.extract()?),
                    Value::Flag(_) => Value::Flag(value.is_truthy()?),
                    Value::Number(_) => Value::Number(value.extract()?),
                })
            })
            .collect()
    }

    /// Checks that the call has exactly the lists that this optimizer needs, with one tensor for each parameter.
    /// Returns copies of the lists, so that no other thread changes them during the call.
    pub(super) fn lists<'py>(
        &self,
        lists: &Bound<'py, PyTuple>,
        kept: u32,
    ) -> PyResult<Vec<Option<Bound<'py, PyList>>>> {
        let mut taken = Vec::with_capacity(lists.len());
        for (k, list) in lists.iter().enumerate() {
            let list = if list.is_none() { None } else { Some(self.list(&list, k)?) };
            let is_kept = match k {
                COPIES => list.is_some(),
                CARRIED => self.descriptor.carried.is_some(),
                _ => k < STATES || kept >> k & 1 == 1,
            };
            if list.is_some() != is_kept {
                let name = self.list_name(k);
                let optimizer = self.descriptor.name;
                return Err(PyValueError::new_err(if is_kept {
                    format!(
                        "{name}: missing, but {optimizer} keeps them with these hyperparameters; give a list"
                    )
                } else {
                    format!(
                        "{name}: given, but {optimizer} keeps none with these hyperparameters; leave them out"
                    )
                }));
            }
            taken.push(list);
        }
        let count = |list: &Option<Bound<'_, PyList>>| list.as_ref().map_or(0, |list| list.len());
        for (k, list) in taken.iter().enumerate() {
            if list.is_some() && count(list) != count(&taken[PARAMS]) {
                let (name, own, params) = (self.list_name(k), count(list), count(&taken[PARAMS]));
                let text = format!("{name}: {own} tensors for {params} parameters; give one for each");
                return Err(PyValueError::new_err(text));
            }
        }
        Ok(taken)
    }

    pub(super) fn list<'py>(&self, list: &Bound<'py, PyAny>, k: usize) -> PyResult<Bound<'py, PyList>> {
        self.list_of(&self.list_name(k), list)
    }

    /// Copies a list, so that no other thread changes it during the call.
    pub(super) fn list_of<'py>(&self, name: &str, list: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        if let Ok(list) = list.cast::<PyList>() {
            return Ok(list.get_slice(0, list.len()));
        }
        match list.try_iter() {
            Ok(items) if !self.reader.is_tensor(list)? => {
                PyList::new(list.py(), items.collect::<PyResult<Vec<_>>>()?)
            }
            _ => Err(PyTypeError::new_err(format!("{name}: not a list; give a list of tensors"))),
        }
    }

    fn list_name(&self, list: usize) -> String {
        match list {
            PARAMS => "params".to_owned(),
            GRADS => "grads".to_owned(),
            COUNTS => "state_steps".to_owned(),
            COPIES => "copies".to_owned(),
            CARRIED => format!("{}s", self.descriptor.carried.unwrap_or_default()),
            state => format!("{}s", self.states[state - STATES]),
        }
    }

    pub(super) fn name(&self, list: usize, k: usize) -> String {
        format!("{}[{k}]", self.list_name(list))
    }

    /// Reads and checks every tensor.
    pub(super) fn find(&self, lists: &[Option<Bound<'_, PyList>>], found: &mut Found) -> PyResult<()> {
        let count = lists[PARAMS].as_ref().map_or(0, |params| params.len());
        (0..count).try_for_each(|k| self.find_one(lists, k, found))
    }

    /// Reads and checks the tensors of one parameter.
    fn find_one(&self, lists: &[Option<Bound<'_, PyList>>], k: usize, found: &mut Found) -> PyResult<()> {
        let item = |list: usize| lists[list].as_ref().map(|list| list.get_item(k)).transpose();
        let Some(param) = item(PARAMS)? else { return Ok(()) };
        let own = self.reader.read(&param, || self.name(PARAMS, k))?;
        refuse_unfit(&own, &param, || self.name(PARAMS, k), |word| word.dtype().is_some())?;
        refuse_negative(&own, &param, || self.name(PARAMS, k))?;
        let len = own.len();
        found.addresses[PARAMS].push(own.address);
        let mut format =
            Format { param: own.word, grad: own.word, state: Word::F32, copy: None, carried: Word::F64 };
        let mut progress = (None, 0);
        let mut first_state = None;
        for list in GRADS..lists.len() {
            let Some(tensor) = item(list)? else { continue };
            let name = || self.name(list, k);
            if tensor.is_none() && matches!(list, GRADS | COPIES) {
                found.addresses[list].push(0);
                continue;
            }
            let view = self.reader.read(&tensor, name)?;
            if matches!(list, COUNTS | CARRIED) {
                refuse_unfit(&view, &tensor, name, |word| {
                    word == Word::F32 || list == CARRIED && word == Word::F64
                })?;
                if view.len() != 1 {
                    let text = format!("{}: {} elements; give a tensor of one number", name(), view.len());
                    return Err(PyValueError::new_err(text));
                }
                found.addresses[list].push(view.address);
                if list == COUNTS {
                    progress.1 = view.address;
                } else {
                    progress.0 = Some((view.address, view.word));
                    format.carried = view.word;
                }
                continue;
            }
            if view.shape != own.shape {
                let text = format!(
                    "{}: of shape {:?}, where {} has {:?}; give one of its shape",
                    name(),
                    view.shape,
                    self.name(PARAMS, k),
                    own.shape
                );
                return Err(PyValueError::new_err(text));
            }
            refuse_unfit(&view, &tensor, name, |word| match list {
                GRADS | COPIES => word.dtype().is_some(),
                _ => matches!(word, Word::F32 | Word::BF16),
            })?;
            refuse_negative(&view, &tensor, name)?;
            if !view.lies_as(&own) {
                let text = format!(
                    "{}: strides {:?}, where {} has {:?}; give one with its order of elements",
                    name(),
                    view.strides,
                    self.name(PARAMS, k),
                    own.strides
                );
                return Err(PyValueError::new_err(text));
            }
            match list {
                GRADS => format.grad = view.word,
                COPIES => format.copy = Some(view.word),
                _ if *first_state.get_or_insert(view.word) == view.word => format.state = view.word,
                _ => {
                    let first =
                        lists[STATES..].iter().position(Option::is_some).map_or(STATES, |k| k + STATES);
                    let first = self.name(first, k);
                    let text = format!("{}: of another type than {first}; give states of one type", name());
                    return Err(PyNotImplementedError::new_err(text));
                }
            }
            found.addresses[list].push(if len == 0 { Self::EMPTY } else { view.address });
        }
        // SAFETY: a tensor of one number of this type, as checked above.
        let progress = unsafe { read_progress(progress.1, progress.0) };
        found.progress.push(progress.ok_or_else(|| refused_count(&self.name(COUNTS, k)))?);
        found.lens.push(len);
        found.formats.push(format);
        Ok(())
    }
}

impl Format {
    /// Returns the size in bytes of a tensor in this list, for a parameter of `len` elements.
    pub(super) fn bytes(&self, list: usize, len: u64) -> usize {
        let (word, len) = match list {
            PARAMS => (self.param, len as usize),
            GRADS => (self.grad, len as usize),
            COUNTS => (Word::F32, 1),
            COPIES => (self.copy.unwrap_or(Word::F32), len as usize),
            CARRIED => (self.carried, 1),
            _ => (self.state, len as usize),
        };
        word.size() * len
    }
}

/// Reads a step count and the optimizer's carried number. Returns `None` if the count is negative, above 2^62 or not a
/// whole number.
///
/// # Safety
/// `count` is the address of an initialised f32. `carried` has the address and the type of an initialised number.
pub(super) unsafe fn read_progress(count: usize, carried: Option<(usize, Word)>) -> Option<(u64, f64)> {
    // SAFETY: the caller's promise.
    unsafe {
        let count = with_exposed_provenance_mut::<f32>(count).read_unaligned();
        let carried = carried.map(|(at, word)| match word {
            Word::F32 => f64::from(with_exposed_provenance_mut::<f32>(at).read_unaligned()),
            _ => with_exposed_provenance_mut::<f64>(at).read_unaligned(),
        });
        // Most counts fit into 32 bits, and the conversion of 32 bits is fast and exact.
        let short = count as u32;
        let is_whole =
            short as f32 == count || count >= 0.0 && count <= (1u64 << 62) as f32 && count.fract() == 0.0;
        is_whole.then_some((count as u64, carried.unwrap_or(1.0)))
    }
}

pub(super) fn refused_count(name: &str) -> PyErr {
    PyValueError::new_err(format!("{name}: not a count; give a whole number of 0 or more"))
}

/// Refuses a tensor that no kernel supports, because of its type, its device, its strides or its address.
pub(super) fn refuse_unfit(
    view: &View<'_>,
    tensor: &Bound<'_, PyAny>,
    name: impl Fn() -> String,
    has: impl Fn(Word) -> bool,
) -> PyResult<()> {
    let unsupported = |text: String| Err(PyNotImplementedError::new_err(format!("{}: {text}", name())));
    if !has(view.word) {
        let known = [
            (Word::F32, "float32"),
            (Word::BF16, "bfloat16"),
            (Word::F16, "float16"),
            (Word::F64, "float64"),
        ];
        let known: Vec<&str> = known.iter().filter(|(word, _)| has(*word)).map(|(_, name)| *name).collect();
        let dtype = tensor.getattr("dtype")?.str()?;
        return unsupported(format!("of {dtype}; use {}", known.join(", ")));
    }
    if !view.is_on_cpu {
        return unsupported(format!("on {}; give a tensor on the CPU", tensor.getattr("device")?.str()?));
    }
    if !view.is_dense() {
        let strides = &view.strides;
        return unsupported(format!(
            "strides {strides:?} of shape {:?} leave gaps or overlap; give its clone()",
            view.shape
        ));
    }
    if view.len() > 0 && (view.address == 0 || !view.address.is_multiple_of(view.word.size())) {
        return unsupported(
            "without memory of its own that is aligned to its elements; give a plain tensor".to_owned(),
        );
    }
    Ok(())
}

/// Refuses a tensor if its memory stores the negated values (torch's `is_neg`). Only tensors of one element are
/// checked. A longer tensor of this kind skips every second number of a complex tensor, so it is not dense and is
/// refused for its strides.
pub(super) fn refuse_negative(
    view: &View<'_>,
    tensor: &Bound<'_, PyAny>,
    name: impl Fn() -> String,
) -> PyResult<()> {
    if view.len() != 1 || !tensor.call_method0(intern!(tensor.py(), "is_neg"))?.is_truthy()? {
        return Ok(());
    }
    let text = format!("{}: a view whose memory has the other sign; give its resolve_neg()", name());
    Err(PyNotImplementedError::new_err(text))
}
