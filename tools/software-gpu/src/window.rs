//! The memory of all GPUs: one file, mapped twice. Nothing may be read or written at the device's addresses.
//!
//! A program that uses a device address as a host address therefore ends, as it would on a real GPU. The driver itself
//! uses the second mapping. Kernels that are compiled for the CPU use the first mapping. It is opened while one of them
//! runs.
#![allow(unsafe_code)]

use std::ptr;

use crate::report;

/// The size of the address range. No address is used twice.
const SPAN: usize = 1 << 40;
const PAGE: u64 = 4096;

pub(crate) struct Window {
    file: i32,
    device: u64,
    driver: *mut u8,
    /// How many bytes of the span have been given out.
    used: u64,
}

// SAFETY: the mapping is used under the lock of the GPU alone.
unsafe impl Send for Window {}

impl Window {
    pub(crate) fn open() -> Window {
        // SAFETY: new mappings of a new file, which nothing else knows; failures are checked.
        unsafe {
            let file = libc::memfd_create(c"software-gpu".as_ptr(), libc::MFD_CLOEXEC);
            let sized = file >= 0 && libc::ftruncate(file, SPAN as libc::off_t) == 0;
            let map = |access| {
                let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
                libc::mmap(ptr::null_mut(), SPAN, access, flags, file, 0)
            };
            let (device, driver) = (map(libc::PROT_NONE), map(libc::PROT_READ | libc::PROT_WRITE));
            if !sized || device == libc::MAP_FAILED || driver == libc::MAP_FAILED {
                report::misuse("this machine gives no memory for the GPU's");
            }
            Window { file, device: device.expose_provenance() as u64, driver: driver.cast(), used: 0 }
        }
    }

    /// Returns the address of new memory, aligned to 256 bytes and not more.
    pub(crate) fn allocate(&mut self, bytes: u64) -> Option<u64> {
        let at = self.used + 256;
        let end = (at + bytes).next_multiple_of(PAGE) + PAGE;
        (end <= SPAN as u64).then(|| {
            self.used = end;
            self.device + at
        })
    }

    /// Returns the pages to the machine; the addresses are never reused.
    pub(crate) fn free(&self, address: u64, bytes: u64) {
        let at = (address - self.device) / PAGE * PAGE;
        let flags = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let length = (address - self.device + bytes).next_multiple_of(PAGE) - at;
        // SAFETY: pages that no living allocation shares, since each begins on a page of its own.
        unsafe { libc::fallocate(self.file, flags, at as libc::off_t, length as libc::off_t) };
    }

    /// Returns where the driver reaches a device's address.
    pub(crate) fn at(&self, address: u64) -> *mut u8 {
        self.driver.wrapping_add((address - self.device) as usize)
    }

    /// Opens the device's addresses while `work` runs on them.
    pub(crate) fn opened<T>(&self, work: impl FnOnce() -> T) -> T {
        let allow = |access| {
            let start = ptr::with_exposed_provenance_mut(self.device as usize);
            // SAFETY: a part of the first mapping.
            unsafe { libc::mprotect(start, self.used as usize, access) };
        };
        if self.used > 0 {
            allow(libc::PROT_READ | libc::PROT_WRITE);
        }
        let outcome = work();
        if self.used > 0 {
            allow(libc::PROT_NONE);
        }
        outcome
    }
}
