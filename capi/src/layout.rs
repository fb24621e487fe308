//! Layouts. The caller adds one parameter after the other. The first use of a layout closes it, and no parameter can be
//! added after that.
//!
//! In C a number identifies a parameter. Parameters are numbered in the order in which they are added.
#![allow(unsafe_code)]

use std::ffi::c_char;

use instep::{Layout, LayoutBuilder, ParamId};

use crate::arguments::{Growing, Out, list, read, text};
use crate::codes::{action, dtype, flag};
use crate::entry::call;
use crate::handles::{Kind, Table};
use crate::status::{Fault, INSTEP_LAYOUT, INSTEP_ORDER, Result, instep_status};

/// The names, shapes and groups of a model's parameters.
///
/// The caller owns the layout until instep_layout_free. Bucket steps and steppers copy what they need from the layout,
/// so the layout may be freed once they are created. Any thread may use the layout, but only one thread at a time: a
/// second thread gets INSTEP_BUSY.
pub struct instep_layout;

/// One parameter.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct instep_param {
    /// sizeof(instep_param).
    pub size: usize,
    /// The parameter's name. Checkpoints use it too. No two parameters may have the same name.
    pub name: *const c_char,
    /// The lengths of the parameter's dimensions. The product of these lengths is the number of elements. A parameter
    /// without dimensions is a scalar and has one element.
    pub shape: *const usize,
    /// The number of dimensions.
    pub dimensions: usize,
    /// The parameter's group. The group's optimizer steps the parameter. Null: "default".
    pub group: *const c_char,
    /// How often the parameter is handed over in a pass. 0 and 1 mean once. A parameter that several modules share is
    /// handed over once for each use.
    pub uses: u32,
    /// INSTEP_ACTION_STEP, INSTEP_ACTION_AVERAGE or INSTEP_ACTION_LEAVE.
    pub action: u32,
    /// 1: each rank has its own parameter, and the gradient is not summed. 0: all ranks have the same parameter.
    pub is_local: u32,
    /// Element type of the parameter and of its gradient. 0: the precision of the parameter's group gives both types.
    pub dtype: u32,
}

// SAFETY: all fields are numbers and pointers, for which zeros are valid.
unsafe impl Growing for instep_param {
    const NAME: &'static str = "instep_param";
}

pub(crate) static LAYOUTS: Table<Open> = Table::new(Kind::Layout);

/// A layout: a builder until the first use, and the built layout from then on.
pub(crate) struct Open {
    builder: Option<LayoutBuilder>,
    count: u32,
    built: Option<Layout>,
}

/// Creates a layout without parameters. If the call succeeds, it writes the handle to `*out_layout`.
///
/// Any thread may call this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_layout_create(out_layout: *mut *mut instep_layout) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract.
        let out = unsafe { Out::new(out_layout, "out_layout")? };
        let open = Open { builder: Some(Layout::builder()), count: 0, built: None };
        out.put(LAYOUTS.insert(open)?);
        Ok(())
    })
}

/// Adds a parameter and writes its number to `*out_param`: 0, 1, 2 and so on. `out_param` may be null. Add parameters
/// in the order in which the forward pass uses them. The first use of the layout closes it. Once the layout is closed,
/// this call returns INSTEP_ORDER.
///
/// Any thread may call this function, one thread at a time per layout. The struct is copied. If a name is used twice,
/// or a shape is too large, the first use of the layout fails.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_layout_add(
    layout: *mut instep_layout,
    param: *const instep_param,
    out_param: *mut u32,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract.
        let (param, name, shape, group) = unsafe {
            let param = read(param)?;
            let group = if param.group.is_null() { None } else { Some(text(param.group, "group")?) };
            (param, text(param.name, "name")?, list(param.shape, param.dimensions, "shape")?, group)
        };
        // SAFETY: the caller meets the header's contract.
        let out = unsafe { Out::optional(out_param, "out_param")? };
        let (action, is_local) = (action(param.action)?, flag("is_local", param.is_local)?);
        let dtype = dtype("dtype", param.dtype)?;
        let number = LAYOUTS.with(layout, |open| {
            let Some(builder) = open.builder.take() else {
                let text = "layout: in use, so it is closed; add all parameters first";
                return Err(Fault::new(INSTEP_ORDER, text));
            };
            let len = shape.iter().try_fold(1usize, |product, next| product.checked_mul(*next));
            // A length that overflows becomes the largest number. `build` refuses this length, and names the parameter.
            let added = builder.param(name, len.unwrap_or(usize::MAX)).shape(shape.iter().copied());
            let added = added.uses(param.uses.max(1)).action(action);
            let added = if is_local { added.local() } else { added };
            let added = match dtype {
                Some(dtype) => added.dtype(dtype),
                None => added,
            };
            open.builder = Some(match group {
                Some(group) => added.in_group(group),
                None => added,
            });
            open.count += 1;
            Ok(open.count - 1)
        })?;
        if let Some(out) = out {
            out.put(number);
        }
        Ok(())
    })
}

/// Finds the number of a parameter by its name. If no parameter has the name, the call returns INSTEP_LAYOUT, and
/// instep_last_error lists similar names. This call closes the layout.
///
/// Any thread may call this function, one thread at a time per layout.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_layout_find(
    layout: *mut instep_layout,
    name: *const c_char,
    out_param: *mut u32,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract.
        let (name, out) = unsafe { (text(name, "name")?, Out::new(out_param, "out_param")?) };
        let layout = close(layout)?;
        let id = layout.id(name)?;
        // The parameter exists, and its number fits into a u32.
        let number = layout.ids().position(|known| known == id).unwrap_or_default();
        out.put(number as u32);
        Ok(())
    })
}

/// Frees a layout. If the handle is null, the call does nothing.
///
/// Any thread may call this function, one thread at a time per layout. If another thread is using the layout, the call
/// returns INSTEP_BUSY and does not free the layout.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_layout_free(layout: *mut instep_layout) -> instep_status {
    call(|| if layout.is_null() { Ok(()) } else { LAYOUTS.remove(layout).map(drop) })
}

/// Closes a layout, if it is still open, and returns it.
pub(crate) fn close(layout: *const instep_layout) -> Result<Layout> {
    LAYOUTS.with(layout, |open| {
        if let Some(built) = &open.built {
            return Ok(built.clone());
        }
        let builder = open.builder.clone().unwrap_or_else(Layout::builder);
        let built = builder.build()?;
        (open.builder, open.built) = (None, Some(built.clone()));
        Ok(built)
    })
}

/// The Rust library's ids of a layout's parameters. The index is the parameter's number in C.
#[derive(Clone)]
pub(crate) struct Ids(Vec<ParamId>);

impl Ids {
    pub(crate) fn of(layout: &Layout) -> Ids {
        Ids(layout.ids().collect())
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn get(&self, param: u32) -> Result<ParamId> {
        self.0.get(param as usize).copied().ok_or_else(|| {
            let text =
                format_args!("parameter {param}: the layout has {}; use a smaller number", self.0.len());
            Fault::new(INSTEP_LAYOUT, text)
        })
    }
}
