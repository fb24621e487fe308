//! All memory that the driver has given out, on GPUs and pinned on the host, with the history of every byte.
//!
//! Freed memory stays in the list and its address is never reused, so a late access is reported with the memory's name.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ops::Bound;
use std::ptr;

use crate::shadow::Shadow;
use crate::window::Window;

/// Where memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// On a GPU, in a context.
    Device { context: usize },
    /// On the host, pinned; the GPU reaches it under the same address.
    Pinned,
}

pub(crate) struct Allocation {
    /// The number of the allocation, counted from 1.
    pub(crate) number: usize,
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    pub(crate) kind: Kind,
    /// The call that made it.
    pub(crate) made_by: &'static str,
    /// The operation or call that freed it.
    pub(crate) freed_by: Option<String>,
    pub(crate) shadow: Shadow,
}

impl Allocation {
    pub(crate) fn describe(&self) -> String {
        format!("{:#x} ({} bytes of {})", self.start, self.bytes, self.made_by)
    }
}

pub(crate) struct Heap {
    window: Window,
    memory: BTreeMap<u64, Allocation>,
    /// Bytes in use on GPUs.
    pub(crate) in_use: u64,
}

/// The reason why an address may not be touched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stray {
    pub(crate) rule: &'static str,
    pub(crate) what: String,
}

impl Heap {
    pub(crate) fn new() -> Heap {
        Heap { window: Window::open(), memory: BTreeMap::new(), in_use: 0 }
    }

    /// Allocates memory, or returns `None` if there is none left.
    pub(crate) fn allocate(&mut self, bytes: u64, kind: Kind, made_by: &'static str) -> Option<u64> {
        let (start, written) = match kind {
            Kind::Device { .. } => (self.window.allocate(bytes)?, false),
            // The host writes it unseen.
            Kind::Pinned => (pinned(bytes)?, true),
        };
        if kind != Kind::Pinned {
            self.in_use += bytes;
        }
        let (number, shadow) = (self.memory.len() + 1, Shadow::new(bytes, written));
        self.memory.insert(start, Allocation { number, start, bytes, kind, made_by, freed_by: None, shadow });
        Some(start)
    }

    /// Allocates memory with these values, for a variable of a module.
    pub(crate) fn place(&mut self, values: &[u8], context: usize) -> Option<u64> {
        let (bytes, kind) = (values.len() as u64, Kind::Device { context });
        let start = self.allocate(bytes.max(1), kind, "a module's variable")?;
        let memory = self.memory.get_mut(&start)?;
        memory.shadow = Shadow::new(memory.bytes, true);
        // SAFETY: new memory of that length.
        unsafe { self.window.at(start).copy_from_nonoverlapping(values.as_ptr(), values.len()) };
        Some(start)
    }

    /// Marks memory as freed and returns its pages to the system.
    pub(crate) fn free(&mut self, start: u64, freed_by: String) {
        let Some(memory) = self.memory.get_mut(&start) else { return };
        memory.freed_by = Some(freed_by);
        memory.shadow = Shadow::new(0, false);
        if let Kind::Device { .. } = memory.kind {
            self.in_use -= memory.bytes;
            self.window.free(start, memory.bytes);
        } else {
            close_pinned(start, memory.bytes);
        }
    }

    /// Returns the memory that begins at an address and has not been freed.
    pub(crate) fn starting_at(&mut self, address: u64) -> Option<&mut Allocation> {
        self.memory.get_mut(&address).filter(|memory| memory.freed_by.is_none())
    }

    /// Returns the live memory around an address.
    pub(crate) fn around(&self, address: u64) -> Option<&Allocation> {
        self.last_from(address)
            .filter(|memory| memory.freed_by.is_none() && address < memory.start + memory.bytes)
    }

    /// Returns memory that has all of these bytes.
    pub(crate) fn holding(&self, address: u64, bytes: u64) -> Result<&Allocation, Stray> {
        let stray = |rule, why: &str| Stray { rule, what: format!("{bytes} bytes at {address:#x}: {why}") };
        let beyond = "out of bounds";
        let Some(memory) = self.last_from(address) else {
            return Err(stray(beyond, "no memory of this driver"));
        };
        let (past, name) = (address - memory.start, memory.describe());
        match &memory.freed_by {
            Some(by) if past < memory.bytes => {
                Err(stray("freed in use", &format!("{name} was freed by {by}")))
            }
            _ if past >= memory.bytes => {
                let past = past - memory.bytes;
                Err(stray(beyond, &format!("no memory; {past} bytes past the end of {name}")))
            }
            _ if past + bytes > memory.bytes => Err(stray(beyond, &format!("beyond the end of {name}"))),
            _ => Ok(memory),
        }
    }

    /// Returns the history of memory that was found before.
    pub(crate) fn shadow(&mut self, start: u64) -> Option<&mut Shadow> {
        self.memory.get_mut(&start).map(|memory| &mut memory.shadow)
    }

    /// Returns where the driver reaches a byte of an allocation.
    pub(crate) fn at(&self, memory: &Allocation, address: u64) -> *mut u8 {
        match memory.kind {
            Kind::Device { .. } => self.window.at(address),
            Kind::Pinned => ptr::with_exposed_provenance_mut(address as usize),
        }
    }

    pub(crate) fn window(&self) -> &Window {
        &self.window
    }

    /// Returns all memory that has not been freed.
    pub(crate) fn alive(&self) -> impl Iterator<Item = &Allocation> {
        self.memory.values().filter(|memory| memory.freed_by.is_none())
    }

    fn last_from(&self, address: u64) -> Option<&Allocation> {
        self.memory.range((Bound::Unbounded, Bound::Included(address))).next_back().map(|(_, memory)| memory)
    }
}

fn pinned(bytes: u64) -> Option<u64> {
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping.
    let memory = unsafe { libc::mmap(ptr::null_mut(), bytes as usize, access, flags, -1, 0) };
    (memory != libc::MAP_FAILED).then(|| memory.expose_provenance() as u64)
}

/// Closes the pages for good. A late access of the host then ends the program, and the address is never reused.
fn close_pinned(start: u64, bytes: u64) {
    let start = ptr::with_exposed_provenance_mut(start as usize);
    // SAFETY: a mapping of `pinned`, which the program has freed.
    unsafe {
        libc::madvise(start, bytes as usize, libc::MADV_DONTNEED);
        libc::mprotect(start, bytes as usize, libc::PROT_NONE);
    }
}
