//! Modules and their kernels: the contents of an image, and the memory of its variables.
//!
//! Everything comes from the PTX of the image. A known image is not read again.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError};

use software_gpu_ptx as ptx;

use crate::codes::Answer;
use crate::fatbin;
use crate::gpu::Gpu;
use crate::header::cudaError_enum as Code;
use crate::objects::{Function, Module};
use crate::report;

impl Gpu {
    pub(crate) fn load_module(&mut self, image: &[u8]) -> Answer<usize> {
        let context = self.current()?;
        self.forbid_unsafe_calls()?;
        let image = module_of(image)?;
        let place = |variable: &ptx::Variable| self.heap.place(&variable.initial, context);
        let variables: Option<Arc<[u64]>> = image.variables().iter().map(place).collect();
        let variables = variables.ok_or(Code::CUDA_ERROR_OUT_OF_MEMORY)?;
        Ok(self.modules.insert(Module { context, image, variables, functions: Vec::new() }))
    }

    pub(crate) fn function(&mut self, module: usize, name: &str) -> Answer<usize> {
        self.current()?;
        let row = self.modules.get(module)?;
        let kernel = row.image.kernel(name).ok_or(Code::CUDA_ERROR_NOT_FOUND)?.clone();
        let function = Function { context: row.context, kernel, variables: Arc::clone(&row.variables) };
        let handle = self.functions.insert(function);
        self.modules.get(module)?.functions.push(handle);
        Ok(handle)
    }

    /// Unloads a module; its functions go with it.
    pub(crate) fn unload_module(&mut self, module: usize) -> Answer<()> {
        self.current()?;
        self.forbid_unsafe_calls()?;
        let module = self.modules.remove(module)?;
        module.variables.iter().for_each(|start| self.heap.free(*start, "cuModuleUnload".to_owned()));
        module.functions.into_iter().try_for_each(|function| self.functions.remove(function).map(drop))
    }
}

/// Reads an image, which states its own length.
///
/// # Safety
/// The image is a fat binary, or PTX that ends in a zero byte.
pub(crate) unsafe fn image(start: *const c_void) -> Answer<Vec<u8>> {
    if start.is_null() {
        return Err(Code::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: by the contract.
    unsafe {
        let head = start.cast::<[u8; 4]>().read();
        let bytes = match u32::from_le_bytes(head) {
            fatbin::MAGIC => fatbin::length(&start.cast::<[u8; 16]>().read()),
            _ if head.is_ascii() => CStr::from_ptr(start.cast::<c_char>()).count_bytes(),
            _ => return Err(Code::CUDA_ERROR_INVALID_IMAGE),
        };
        Ok(std::slice::from_raw_parts(start.cast::<u8>(), bytes).to_vec())
    }
}

/// Modules by the hash of their images.
type Known = HashMap<u64, Arc<ptx::Module>>;

fn module_of(image: &[u8]) -> Answer<Arc<ptx::Module>> {
    static KNOWN: Mutex<Option<Known>> = Mutex::new(None);
    let mut hasher = DefaultHasher::new();
    image.hash(&mut hasher);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let known = known.get_or_insert_default();
    if let Some(module) = known.get(&hasher.finish()) {
        return Ok(Arc::clone(module));
    }
    let text = if image.starts_with(&fatbin::MAGIC.to_le_bytes()) {
        fatbin::ptx(image)?
    } else {
        String::from_utf8(image.to_vec()).map_err(|_| Code::CUDA_ERROR_INVALID_IMAGE)?
    };
    // Nothing but this driver is to blame for an instruction that it does not know.
    let module = ptx::Module::parse(&text).unwrap_or_else(|error| report::misuse(&format!("PTX: {error}")));
    let module = Arc::new(module);
    known.insert(hasher.finish(), Arc::clone(&module));
    Ok(module)
}
