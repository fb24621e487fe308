//! Contexts, and which one is current on each thread.
//!
//! A device has one primary context, which all libraries of a program share. Each context has a legacy default stream.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::thread::{self, ThreadId};

use crate::codes::Answer;
use crate::gpu::Gpu;
use crate::header::cudaError_enum as Code;
use crate::objects::{Context, Joins};
use crate::report;

thread_local! {
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

fn number(thread: ThreadId) -> usize {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    thread.hash(&mut hasher);
    hasher.finish() as usize
}

impl Gpu {
    pub(crate) fn device(&self, device: i32) -> Answer<()> {
        let known = (0..self.settings.devices).contains(&device);
        known.then_some(()).ok_or(Code::CUDA_ERROR_INVALID_DEVICE)
    }

    pub(crate) fn create_context(&mut self, device: i32, is_primary: bool) -> Answer<usize> {
        self.device(device)?;
        let context = Context { device, is_primary, retained: 0, legacy: 0, per_thread: BTreeMap::new() };
        let handle = self.contexts.insert(context);
        self.contexts.get(handle)?.legacy = self.create_stream(handle, Joins::Legacy);
        Ok(handle)
    }

    pub(crate) fn retain_primary(&mut self, device: i32) -> Answer<usize> {
        let handle = match self.primaries.get(&device) {
            Some(handle) => *handle,
            None => {
                let made = self.create_context(device, true)?;
                self.primaries.insert(device, made);
                made
            }
        };
        self.contexts.get(handle)?.retained += 1;
        Ok(handle)
    }

    pub(crate) fn release_primary(&mut self, device: i32) -> Answer<()> {
        let handle = *self.primaries.get(&device).ok_or(Code::CUDA_ERROR_INVALID_CONTEXT)?;
        let context = self.contexts.get(handle)?;
        if context.retained == 0 {
            return Err(Code::CUDA_ERROR_INVALID_CONTEXT);
        }
        // The real driver destroys it with the last release. Here memory and streams stay, and the next retain finds them.
        context.retained -= 1;
        Ok(())
    }

    pub(crate) fn destroy_context(&mut self, handle: usize) -> Answer<()> {
        if self.contexts.get(handle)?.is_primary {
            return Err(Code::CUDA_ERROR_INVALID_CONTEXT);
        }
        CURRENT.with_borrow_mut(|stack| stack.pop_if(|top| *top == handle));
        self.contexts.remove(handle).map(drop)
    }

    /// Returns the context that is current on the calling thread.
    pub(crate) fn current(&mut self) -> Answer<usize> {
        let top = CURRENT.with_borrow(|stack| stack.last().copied()).filter(|top| *top != 0);
        let handle = top.ok_or(Code::CUDA_ERROR_INVALID_CONTEXT)?;
        self.contexts.get(handle)?;
        Ok(handle)
    }

    pub(crate) fn push_current(&mut self, handle: usize) -> Answer<()> {
        self.contexts.get(handle).map_err(|_| Code::CUDA_ERROR_INVALID_CONTEXT)?;
        CURRENT.with_borrow_mut(|stack| stack.push(handle));
        Ok(())
    }

    pub(crate) fn pop_current(&mut self) -> Answer<usize> {
        CURRENT.with_borrow_mut(Vec::pop).ok_or(Code::CUDA_ERROR_INVALID_CONTEXT)
    }

    /// Replaces the current context; null leaves the thread without one.
    pub(crate) fn set_current(&mut self, handle: usize) -> Answer<()> {
        if handle != 0 {
            self.contexts.get(handle)?;
        }
        CURRENT.with_borrow_mut(|stack| {
            stack.pop();
            if handle != 0 {
                stack.push(handle);
            }
        });
        Ok(())
    }

    /// Returns the stream that the number of a default stream means on this thread.
    pub(crate) fn default_stream(&mut self, number_of_stream: usize) -> Answer<usize> {
        let current = self.current()?;
        if number_of_stream < 2 {
            return Ok(self.contexts.get(current)?.legacy);
        }
        let thread = number(thread::current().id());
        if let Some(stream) = self.contexts.get(current)?.per_thread.get(&thread) {
            return Ok(*stream);
        }
        let made = self.create_stream(current, Joins::Blocking);
        self.contexts.get(current)?.per_thread.insert(thread, made);
        Ok(made)
    }
}

/// Returns the current context without the lock.
pub(crate) fn current_handle() -> usize {
    CURRENT.with_borrow(|stack| stack.last().copied()).unwrap_or(0)
}

/// Ends the program if an object of one context is used with an object of another.
pub(crate) fn same(context: usize, other: usize, what: &str) -> Answer<()> {
    if context == other {
        return Ok(());
    }
    report::fault("another context", &format!("{what} belongs to context {other:#x}, not to {context:#x}"))
}
