//! Reads the address, type, shape and strides of each tensor that Python passes.
//!
//! PyTorch 2.9 and later versions have a table of C functions. One of these functions describes a tensor by DLPack's
//! struct. With older versions, the attributes of the Python object are read one by one. A call stores nothing about a
//! tensor for later calls.
#![allow(unsafe_code)]

use std::borrow::Cow;
use std::ffi::{c_int, c_void};

use instep::DType;
use pyo3::exceptions::{PyNotImplementedError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyType;
use pyo3::{ffi, intern};

/// DLPack's `DLTensor`.
#[repr(C)]
struct Described {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

type Describe = unsafe extern "C" fn(*mut ffi::PyObject, *mut Described) -> c_int;

/// The first fields of DLPack's `DLPackExchangeAPI`. Later fields are not used here.
#[repr(C)]
struct Exchange {
    major: u32,
    minor: u32,
    previous: *const c_void,
    others: [*const c_void; 3],
    describe: Option<Describe>,
}

/// The type of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    F32,
    BF16,
    F16,
    F64,
    Other,
}

/// One tensor.
pub(crate) struct View<'a> {
    pub(crate) address: usize,
    pub(crate) word: Word,
    pub(crate) is_on_cpu: bool,
    pub(crate) shape: Cow<'a, [i64]>,
    pub(crate) strides: Cow<'a, [i64]>,
}

/// Reads tensors.
pub(crate) struct Reader {
    tensor: Py<PyType>,
    /// The addresses of the types `torch.Tensor` and `torch.nn.Parameter`. An object of one of these types needs no
    /// further check that it is a tensor.
    plain: [usize; 2],
    describe: Option<Describe>,
}

impl Word {
    /// Returns the size of an element in bytes.
    pub(crate) fn size(self) -> usize {
        match self {
            Word::F32 => 4,
            Word::BF16 | Word::F16 => 2,
            Word::F64 | Word::Other => 8,
        }
    }

    /// Returns the library's corresponding type, if there is one.
    pub(crate) fn dtype(self) -> Option<DType> {
        match self {
            Word::F32 => Some(DType::F32),
            Word::BF16 => Some(DType::BF16),
            Word::F16 => Some(DType::F16),
            Word::F64 | Word::Other => None,
        }
    }

    fn named(name: &str) -> Word {
        match name {
            "torch.float32" => Word::F32,
            "torch.bfloat16" => Word::BF16,
            "torch.float16" => Word::F16,
            "torch.float64" => Word::F64,
            _ => Word::Other,
        }
    }
}

impl Described {
    const CPU: i32 = 1;
    const PINNED: i32 = 3;

    const NONE: Described = Described {
        data: std::ptr::null_mut(),
        device_type: 0,
        device_id: 0,
        ndim: 0,
        code: 0,
        bits: 0,
        lanes: 0,
        shape: std::ptr::null(),
        strides: std::ptr::null(),
        byte_offset: 0,
    };

    fn word(&self) -> Word {
        match (self.code, self.bits, self.lanes) {
            (2, 32, 1) => Word::F32,
            (2, 16, 1) => Word::F16,
            (2, 64, 1) => Word::F64,
            (4, 16, 1) => Word::BF16,
            _ => Word::Other,
        }
    }
}

impl View<'_> {
    /// Returns the number of elements.
    pub(crate) fn len(&self) -> u64 {
        self.shape.iter().map(|size| *size as u64).product()
    }

    /// Returns whether the elements lie in memory in the same order as the elements of `other`, which has the same
    /// shape. The strides of dimensions of size 1 do not matter.
    pub(crate) fn lies_as(&self, other: &View<'_>) -> bool {
        let pairs = self.strides.iter().zip(&*other.strides);
        pairs.zip(&*self.shape).all(|((own, stride), size)| own == stride || *size <= 1)
    }

    /// Returns whether the elements fill one range of memory without gaps. The dimensions may be in any order.
    pub(crate) fn is_dense(&self) -> bool {
        let sizes = || self.shape.iter().copied().zip(self.strides.iter().copied());
        let mut expected = 1;
        if sizes().rev().all(|(size, stride)| {
            let fits = size == 1 || stride == expected;
            expected *= size;
            fits
        }) {
            return true;
        }
        let mut by_stride: Vec<(i64, i64)> = sizes().filter(|(size, _)| *size != 1).collect();
        by_stride.sort_by_key(|(size, stride)| (*stride, *size));
        expected = 1;
        self.len() == 0
            || by_stride.iter().all(|(size, stride)| {
                let fits = *stride == expected;
                expected *= size;
                fits
            })
    }
}

impl Reader {
    /// Makes a reader. `tensor` is the type `torch.Tensor`, and `parameter` is the type `torch.nn.Parameter`.
    /// `exchange` is the attribute `__dlpack_c_exchange_api__` of `torch.Tensor`, if it has this attribute.
    pub(crate) fn new(
        tensor: Py<PyType>,
        parameter: &Bound<'_, PyType>,
        exchange: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Reader> {
        let plain = [tensor.as_ptr() as usize, parameter.as_ptr() as usize];
        let describe = exchange.map(|capsule| Self::function(capsule)).transpose()?.flatten();
        Ok(Reader { tensor, plain, describe })
    }

    fn function(capsule: &Bound<'_, PyAny>) -> PyResult<Option<Describe>> {
        // SAFETY: Python checks that this is a capsule of this name. By DLPack's contract for the name, the contents
        // live as long as the process and begin with the fields of `Exchange`. The function is used only in version 1.
        unsafe {
            let exchange = ffi::PyCapsule_GetPointer(capsule.as_ptr(), c"dlpack_exchange_api".as_ptr());
            match exchange.cast::<Exchange>().as_ref() {
                None => Err(PyErr::fetch(capsule.py())),
                Some(exchange) => Ok(exchange.describe.filter(|_| exchange.major == 1)),
            }
        }
    }

    /// Returns whether an object is a tensor.
    pub(crate) fn is_tensor(&self, object: &Bound<'_, PyAny>) -> PyResult<bool> {
        let is_plain = self.plain.contains(&(object.get_type_ptr() as usize));
        Ok(is_plain || object.is_instance(self.tensor.bind(object.py()))?)
    }

    /// Reads a tensor. `name` returns the tensor's name for error texts.
    pub(crate) fn read<'a>(
        &self,
        tensor: &'a Bound<'_, PyAny>,
        name: impl Fn() -> String,
    ) -> PyResult<View<'a>> {
        let py = tensor.py();
        if !self.is_tensor(tensor)? {
            let text = format!("{}: of type {}; give a tensor", name(), tensor.get_type().name()?);
            return Err(PyTypeError::new_err(text));
        }
        let read = match self.describe {
            Some(describe) => Self::described(describe, tensor),
            None => Self::asked(tensor),
        };
        read.map_err(|error| {
            let why = error.value(py).to_string();
            let why = why.lines().next().unwrap_or_default();
            PyNotImplementedError::new_err(format!(
                "{}: no plain memory ({why}); give a dense tensor",
                name()
            ))
        })
    }

    fn described<'a>(describe: Describe, tensor: &'a Bound<'_, PyAny>) -> PyResult<View<'a>> {
        let mut found = Described::NONE;
        // SAFETY: the tensor has the type that the table belongs to, and `found` is the struct. The arrays that the
        // struct points to live as long as the tensor. Nothing changes them while this thread holds the interpreter.
        unsafe {
            if describe(tensor.as_ptr(), &raw mut found) != 0 {
                return Err(PyErr::fetch(tensor.py()));
            }
            let list = |at: *const i64| match found.ndim {
                0 => &[],
                ndim => std::slice::from_raw_parts(at, ndim as usize),
            };
            let shape = list(found.shape);
            let strides =
                if found.strides.is_null() { contiguous(shape) } else { Cow::Borrowed(list(found.strides)) };
            Ok(View {
                address: found.data.expose_provenance() + found.byte_offset as usize,
                word: found.word(),
                is_on_cpu: matches!(found.device_type, Described::CPU | Described::PINNED),
                shape: Cow::Borrowed(shape),
                strides,
            })
        }
    }

    fn asked<'a>(tensor: &'a Bound<'_, PyAny>) -> PyResult<View<'a>> {
        let py = tensor.py();
        let word = Word::named(&tensor.getattr(intern!(py, "dtype"))?.str()?.to_cow()?);
        let device = tensor.getattr(intern!(py, "device"))?.getattr(intern!(py, "type"))?;
        Ok(View {
            address: tensor.call_method0(intern!(py, "data_ptr"))?.extract()?,
            word,
            is_on_cpu: device.extract::<&str>().is_ok_and(|device| device == "cpu"),
            shape: Cow::Owned(tensor.getattr(intern!(py, "shape"))?.extract()?),
            strides: Cow::Owned(tensor.call_method0(intern!(py, "stride"))?.extract()?),
        })
    }
}

/// Returns the strides of a contiguous tensor: neighbours in the last dimension are neighbours in memory.
fn contiguous(shape: &[i64]) -> Cow<'static, [i64]> {
    let mut next = 1;
    let mut strides = vec![1; shape.len()];
    for (stride, size) in strides.iter_mut().zip(shape).rev() {
        *stride = next;
        next *= size;
    }
    Cow::Owned(strides)
}
