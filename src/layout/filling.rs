//! Fills buckets with parameters of one precision, in the order given, up to a cap.
//!
//! The assignment is DDP's: each type keeps an open bucket of its own, and a bucket closes at the parameter that reaches
//! its cap. Buckets follow each other in the order of their last parameters, so backward completes them in that order.

use crate::layout::element_types::Resolved;
use crate::layout::{BucketCaps, Parameter};

/// See the module.
pub(super) struct Filling<'a> {
    resolved: &'a Resolved,
    caps: BucketCaps,
    /// One for each storage.
    open: Vec<Open>,
}

/// A bucket that is being filled.
#[derive(Clone, Debug, Default)]
struct Open {
    params: Vec<u32>,
    bytes: u64,
    /// The place of the last parameter in the order.
    last: usize,
    /// Whether a bucket of this storage has been closed before.
    has_first: bool,
}

/// A full bucket, or the last one of its storage.
pub(super) struct Filled {
    pub(super) params: Vec<u32>,
    /// Its place among the storages.
    pub(super) kind: u32,
    last: usize,
}

impl<'a> Filling<'a> {
    pub(super) fn new(resolved: &'a Resolved, caps: BucketCaps) -> Filling<'a> {
        Filling { resolved, caps, open: vec![Open::default(); resolved.kinds.len()] }
    }

    /// Returns the buckets of these parameters, in order; none stays open.
    pub(super) fn fill(&mut self, order: &[u32], parameters: &[Parameter]) -> Vec<Filled> {
        let mut filled = Vec::new();
        for (place, param) in order.iter().enumerate() {
            let kind = self.resolved.of[*param as usize];
            let (open, caps) = (&mut self.open[kind as usize], self.caps);
            let grad_bytes = self.resolved.kinds[kind as usize].precision.grad.bytes();
            open.params.push(*param);
            open.last = place;
            // Only compared with the cap.
            let bytes = parameters[*param as usize].len.saturating_mul(grad_bytes);
            open.bytes = open.bytes.saturating_add(bytes);
            if open.bytes >= if open.has_first { caps.rest_bytes } else { caps.first_bytes } {
                filled.push(open.close(kind));
            }
        }
        let rest = self.open.iter_mut().zip(0..).filter(|(open, _)| !open.params.is_empty());
        filled.extend(rest.map(|(open, kind)| open.close(kind)));
        filled.sort_by_key(|bucket| bucket.last);
        filled
    }
}

impl Open {
    fn close(&mut self, kind: u32) -> Filled {
        let closed = std::mem::take(self);
        self.has_first = true;
        Filled { params: closed.params, kind, last: closed.last }
    }
}
