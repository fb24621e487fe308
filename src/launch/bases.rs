//! The addresses of a bucket's tensors as a launch takes them: bases to which a tile's offsets are added.
//!
//! Numbers, not pointers: a base may lie outside its tensor where only base and offset together lead inside. This module
//! computes addresses and touches no memory.

use crate::abi::{INSTEP_MAX_STATES, InstepStepArgs};
use crate::op::Memory;

/// Addresses of all tensors of one bucket, or of one segment; 0 for a tensor that a step does not have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bases {
    params: usize,
    grads: usize,
    master: usize,
    copy: usize,
    ema: usize,
    states: [usize; INSTEP_MAX_STATES as usize],
    scales: [usize; INSTEP_MAX_STATES as usize],
}

impl Bases {
    /// Sets the address of one kind of tensor.
    ///
    /// # Panics
    /// If the memory is not one of tensors.
    pub(crate) fn set(&mut self, memory: Memory, address: usize) {
        let base = match memory {
            Memory::Params => &mut self.params,
            Memory::Grads => &mut self.grads,
            Memory::Master => &mut self.master,
            Memory::Copy => &mut self.copy,
            Memory::Ema => &mut self.ema,
            Memory::State(k) => &mut self.states[usize::from(k)],
            Memory::Scales(k) => &mut self.scales[usize::from(k)],
            Memory::HostParams | Memory::HostGrads | Memory::Sums | Memory::Control | Memory::Settings => {
                panic!("{memory:?} holds no tensor of a bucket alone")
            }
        };
        *base = address;
    }

    /// Returns the address to which a tile adds its offset of parameters.
    pub(crate) fn params(&self) -> usize {
        self.params
    }

    /// Returns the address to which a tile adds its offset of gradients.
    pub(crate) fn grads(&self) -> usize {
        self.grads
    }

    /// Completes the arguments of an [unbound](super::Launch::unbound) launch.
    pub(crate) fn put(&self, args: &mut InstepStepArgs) {
        args.param_base = pointer(self.params);
        args.grads = pointer(self.grads);
        args.master = pointer(self.master);
        args.copy = pointer(self.copy);
        args.ema = pointer(self.ema);
        args.states = self.states.map(pointer);
        args.scales = self.scales.map(pointer);
    }
}

/// The caller has exposed the provenance of its address.
fn pointer<T>(address: usize) -> *mut T {
    std::ptr::with_exposed_provenance_mut(address)
}
