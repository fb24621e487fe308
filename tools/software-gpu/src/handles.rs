//! Tables of the objects that the driver has given out. A handle is never reused.
//!
//! The real driver does not define what a stale handle does. Here it ends the program, and the report says what the
//! handle was.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::header::cudaError_enum as Code;
use crate::report;

/// The first handle. Handles look like addresses at which nothing can lie.
const FIRST: usize = 0x10_0000_0000;
const STEP: usize = 0x40;

static NEXT: AtomicUsize = AtomicUsize::new(0);

/// All objects of one kind.
pub(crate) struct Table<T> {
    kind: &'static str,
    alive: BTreeMap<usize, T>,
    /// All handles, in the order in which they were given out.
    made: Vec<usize>,
}

impl<T> Table<T> {
    pub(crate) fn new(kind: &'static str) -> Table<T> {
        Table { kind, alive: BTreeMap::new(), made: Vec::new() }
    }

    pub(crate) fn insert(&mut self, object: T) -> usize {
        let handle = FIRST + STEP * NEXT.fetch_add(1, Ordering::Relaxed);
        self.alive.insert(handle, object);
        self.made.push(handle);
        handle
    }

    /// Returns an object. A null handle is an error; a destroyed handle is a fault.
    pub(crate) fn get(&mut self, handle: usize) -> Result<&mut T, Code> {
        if !self.alive.contains_key(&handle) {
            return Err(self.refuse(handle, "used"));
        }
        self.alive.get_mut(&handle).ok_or(Code::CUDA_ERROR_INVALID_HANDLE)
    }

    pub(crate) fn remove(&mut self, handle: usize) -> Result<T, Code> {
        match self.alive.remove(&handle) {
            Some(object) => Ok(object),
            None => Err(self.refuse(handle, "destroyed")),
        }
    }

    /// Returns an object without a fault; `None` if the handle has none.
    pub(crate) fn peek(&self, handle: usize) -> Option<&T> {
        self.alive.get(&handle)
    }

    /// Returns a handle's number among those of its kind, counted from 1, also if its object was destroyed.
    pub(crate) fn number(&self, handle: usize) -> Option<usize> {
        self.made.binary_search(&handle).ok().map(|index| index + 1)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        self.alive.iter().map(|(handle, object)| (*handle, object))
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.alive.values_mut()
    }

    pub(crate) fn len(&self) -> usize {
        self.alive.len()
    }

    fn refuse(&self, handle: usize, how: &str) -> Code {
        let kind = self.kind;
        if self.number(handle).is_some() {
            report::fault("stale handle", &format!("{kind} {handle:#x} is {how} after it was destroyed"));
        }
        if handle != 0 {
            report::fault("foreign handle", &format!("{handle:#x} is {how} as a {kind}, which it never was"));
        }
        Code::CUDA_ERROR_INVALID_HANDLE
    }
}
