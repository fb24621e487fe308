//! Optimizers by name, with their hyperparameters as names and numbers.
//!
//! Names, defaults and ranges come only from `instep::optim::ALL`.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char};
use std::sync::{Mutex, PoisonError};

use instep::Optimizer;
use instep::optim::{ALL, Value};
use instep::overlap::Registry;

use crate::arguments::{Growing, Out, list, read, text};
use crate::entry::call;
use crate::status::{Fault, INSTEP_CONFIG, INSTEP_UNSUPPORTED, Result, instep_status};

/// One hyperparameter.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct instep_hyper {
    /// The hyperparameter's name in torch.optim, such as "lr" or "weight_decay". A pair such as betas is two
    /// hyperparameters with two names, "beta1" and "beta2".
    pub name: *const c_char,
    /// Its value. Flags are 0 or 1.
    pub value: f64,
}

/// An optimizer and its hyperparameters. A call that receives this struct reads the struct, its list and its texts only
/// before the call returns. The library never frees this memory.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct instep_optimizer {
    /// sizeof(instep_optimizer).
    pub size: usize,
    /// The optimizer's name in torch.optim or in its paper, in upper or lower case, such as "AdamW", "sgd" or "lamb".
    pub name: *const c_char,
    /// The given hyperparameters. All others have their defaults.
    pub hypers: *const instep_hyper,
    /// The number of hyperparameters in `hypers`.
    pub hyper_count: usize,
}

// SAFETY: all fields are sizes and pointers, for which zeros are valid.
unsafe impl Growing for instep_optimizer {
    const NAME: &'static str = "instep_optimizer";
}

/// Writes the name of one of the optimizer's states to `*out_name`. `index` counts the states from 0. The names are
/// those of torch.optim. If there is no state with this index, the call writes null. The text lives as long as the
/// process. In instep_tensors, the states are in the order of `index`. Checkpoints use the same names.
///
/// Any thread may call this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_optimizer_state_name(
    optimizer: *const instep_optimizer,
    index: usize,
    out_name: *mut *const c_char,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract.
        let (optimizer, out) = unsafe { (build(optimizer)?, Out::new(out_name, "out_name")?) };
        let name = optimizer.state_names().get(index).map(|name| kept(name));
        out.put(name.map_or(std::ptr::null(), CStr::as_ptr));
        Ok(())
    })
}

/// Builds an optimizer.
///
/// # Safety
/// The struct, its list and its texts meet instep.h's contract.
pub(crate) unsafe fn build(optimizer: *const instep_optimizer) -> Result<Box<dyn Optimizer>> {
    // SAFETY: guaranteed by the caller.
    let (name, keywords) = unsafe {
        let given = read(optimizer)?;
        (text(given.name, "optimizer's name")?, keywords(given.hypers, given.hyper_count)?)
    };
    let known = ALL.iter().find(|descriptor| descriptor.name.eq_ignore_ascii_case(name));
    let name = known.map_or(name, |descriptor| descriptor.name);
    Ok(Registry::standard().resolve(name)?.build(&keywords)?)
}

/// Reads a list of hyperparameters.
///
/// # Safety
/// The list and its texts meet instep.h's contract during `'a`.
pub(crate) unsafe fn keywords<'a>(hypers: *const instep_hyper, count: usize) -> Result<Vec<(&'a str, f64)>> {
    // SAFETY: guaranteed by the caller, here and below.
    let hypers = unsafe { list(hypers, count, "hypers")? };
    let named = |hyper: &instep_hyper| {
        // SAFETY: guaranteed by the caller.
        Ok((unsafe { text(hyper.name, "hyperparameter's name")? }, hyper.value))
    };
    hypers.iter().map(named).collect()
}

/// Converts changes of C's hyperparameters (`beta1`) into changes of the optimizer's fields (`betas`). If only one part
/// of a pair is named, the other part keeps its value.
pub(crate) fn changes(of: &dyn Optimizer, keywords: &[(&str, f64)]) -> Result<Vec<(&'static str, Value)>> {
    let fields = of.descriptor().map(|descriptor| descriptor.fields).unwrap_or_default();
    let known = || fields.iter().flat_map(|field| field.parts).map(|part| part.keyword);
    for (k, (name, _)) in keywords.iter().enumerate() {
        if !known().any(|keyword| keyword == *name) {
            let all: Vec<&str> = known().collect();
            let text = format!(
                "`{name}`: {} has no such hyperparameter; use one of {}",
                name_of(of),
                all.join(", ")
            );
            return Err(Fault::new(INSTEP_UNSUPPORTED, text));
        }
        if keywords[..k].iter().any(|(earlier, _)| earlier == name) {
            return Err(Fault::new(INSTEP_CONFIG, format_args!("`{name}`: given twice; give it once")));
        }
    }
    let mut changes = Vec::new();
    for field in fields {
        let given =
            |keyword: &str| keywords.iter().find(|(name, _)| *name == keyword).map(|(_, value)| *value);
        if field.parts.iter().any(|part| given(part.keyword).is_some()) {
            let current = of.get(field.name).into_iter().flat_map(Value::numbers);
            let parts = field.parts.iter().zip(current);
            let numbers: Vec<f64> = parts.map(|(part, now)| given(part.keyword).unwrap_or(now)).collect();
            changes.push((field.name, field.value(&numbers)?));
        }
    }
    Ok(changes)
}

/// Refuses to replace a group's optimizer by an optimizer with another name. The names must be compared, because two
/// optimizers such as Adam and AdamW may have the same hyperparameters.
pub(crate) fn refuse_other(group: &str, old: &str, new: &dyn Optimizer) -> Result<()> {
    let new = name_of(new);
    if old == new {
        return Ok(());
    }
    let text =
        format_args!("group `{group}`: its optimizer is {old}, not {new}; create another object for {new}");
    Err(Fault::new(INSTEP_CONFIG, text))
}

pub(crate) fn name_of(optimizer: &dyn Optimizer) -> &'static str {
    optimizer.descriptor().map_or("custom", |descriptor| descriptor.name)
}

/// Returns a name as a C string that is never freed. Optimizers have few states, so this takes little memory.
fn kept(name: &str) -> &'static CStr {
    static ALL: Mutex<Vec<&CStr>> = Mutex::new(Vec::new());
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let known = all.iter().find(|known| known.to_bytes() == name.as_bytes()).copied();
    known.unwrap_or_else(|| {
        let new: &'static CStr = Box::leak(CString::new(name).unwrap_or_default().into_boxed_c_str());
        all.push(new);
        new
    })
}
