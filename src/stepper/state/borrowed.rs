//! A stepper on the caller's memory. Gradients are stored in flat buckets, which need only the alignment of their type.
//! Each parameter may have a separate allocation.
//!
//! This module serves frameworks that own their tensors. The plan has the same offsets as for owned memory, so the
//! checker reads the same list of ops. Only the addresses come from the caller. Tensors that overlap are refused,
//! because the checker assumes that memories are disjoint.

use std::ptr::NonNull;

use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::handle;
use crate::launch::{BorrowedPieces, Piece};
use crate::layout::{ForeignBucket, Layout, ParamId, Plan, Storages};
use crate::op::{Memory, Span};

/// The caller's tensors, for [`StepperBuilder::host_borrowing`](crate::StepperBuilder::host_borrowing).
#[derive(Clone, Debug, Default)]
pub struct Borrowed {
    params: Vec<(ParamId, Address)>,
    buckets: Vec<(ForeignBucket, Address)>,
}

/// The address of a tensor's first byte, and its element type.
#[derive(Clone, Copy, Debug)]
struct Address {
    first: *mut u8,
    dtype: DType,
}

impl Address {
    fn new<T: Element>(first: *mut T) -> Address {
        Address { first: first.cast(), dtype: T::DTYPE }
    }
}

impl Borrowed {
    /// Returns an empty set, to which you add tensors.
    pub fn new() -> Borrowed {
        Borrowed::default()
    }

    /// Sets the address of a parameter. The memory has as many elements as the parameter. The stepper's
    /// [precision](crate::StepperBuilder::precision) sets the elements' type. Every parameter of the layout needs an
    /// address. The address of an empty parameter may be null.
    pub fn param<T: Element>(mut self, id: ParamId, address: *mut T) -> Borrowed {
        self.params.push((id, Address::new(address)));
        self
    }

    /// Sets the address of a bucket of gradients. Buckets are numbered in the order in which
    /// they are added.
    pub fn bucket<T: Element>(mut self, bucket: ForeignBucket, address: *mut T) -> Borrowed {
        self.buckets.push((bucket, Address::new(address)));
        self
    }

    pub(crate) fn plan(&self, layout: &Layout, storages: Storages) -> Result<Plan> {
        let buckets: Vec<ForeignBucket> = self.buckets.iter().map(|(bucket, _)| bucket.clone()).collect();
        Plan::foreign(layout, &buckets, storages)
    }

    /// Returns whether a plan's buckets stay as they are. The buckets stay if `self` names no bucket, or names the same
    /// buckets again.
    pub(crate) fn keeps_buckets(&self, layout: &Layout, plan: &Plan) -> Result<bool> {
        let named = self.buckets.iter().map(|(bucket, _)| bucket);
        Ok(self.buckets.is_empty() || plan.has_foreign(layout, named)?)
    }

    /// Checks the addresses against the plan and against each other, and returns one piece per tensor. `kept` returns
    /// the address of a parameter that the caller did not name, or of a bucket if the caller named no bucket.
    pub(crate) fn pieces(
        &self,
        layout: &Layout,
        plan: &Plan,
        kept: Option<&dyn Fn(Lent) -> *mut u8>,
    ) -> Result<BorrowedPieces> {
        let mut addresses = vec![None; plan.segments().len()];
        for (id, address) in &self.params {
            let place = &mut addresses[plan.segment_index(layout.index(*id)?)];
            if place.replace(*address).is_some() {
                let thing = format_args!("`{}`", layout.parameter(*id)?.name);
                return Err(Error::layout(thing, "has two addresses", "lend it once"));
            }
        }
        let mut pieces = BorrowedPieces {
            params: Vec::with_capacity(plan.segments().len()),
            grads: Vec::with_capacity(plan.buckets().len()),
        };
        let mut runs = Vec::with_capacity(plan.segments().len() + plan.buckets().len());
        let mut add = |pieces: &mut Vec<Piece>, lent: Lent, span, given: Option<Address>| {
            let piece = match (given, kept) {
                (Some(address), _) => piece(plan, span, address, || lent.name(layout))?,
                (None, Some(kept)) => NonNull::new(kept(lent)).filter(|_| span.bytes() > 0).map(|base| {
                    Piece { start: span.start, bytes: span.bytes(), base: handle::Address::of(base) }
                }),
                (None, None) => {
                    let remedy = "add `Borrowed::param`";
                    return Err(Error::layout(lent.name(layout), "has no address", remedy));
                }
            };
            runs.extend(piece.map(|piece| (piece.base.get(), piece.bytes, lent)));
            pieces.extend(piece);
            Ok(())
        };
        for (segment, address) in plan.segments().iter().zip(addresses) {
            let span = Span::segment(Memory::Params, plan, segment);
            add(&mut pieces.params, Lent::Param(segment.param), span, address)?;
        }
        for (index, bucket) in plan.buckets().iter().enumerate() {
            let address = self.buckets.get(index).map(|(_, address)| *address);
            add(&mut pieces.grads, Lent::Bucket(index as u32), Span::bucket(bucket), address)?;
        }
        refuse_overlap(layout, runs)?;
        Ok(pieces)
    }
}

/// One tensor that the caller owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Lent {
    /// A parameter, by its index in the layout.
    Param(u32),
    /// A bucket of gradients, by its number.
    Bucket(u32),
}

impl Lent {
    fn name(self, layout: &Layout) -> String {
        match self {
            Lent::Param(param) => format!("`{}`", layout.parameters()[param as usize].name),
            Lent::Bucket(bucket) => format!("bucket {bucket}"),
        }
    }
}

/// Returns the piece that puts a span at the `given` address, or `None` if the span is empty.
fn piece(plan: &Plan, span: Span, given: Address, what: impl Fn() -> String) -> Result<Option<Piece>> {
    let (address, dtype) = (given.first, span.dtype(plan));
    if span.bytes() == 0 {
        return Ok(None);
    }
    if given.dtype != dtype {
        let wrong = format_args!("is {}, but the stepper's precision says {dtype}", given.dtype);
        return Err(Error::layout(what(), wrong, "make them equal"));
    }
    if !(address.addr() as u64).is_multiple_of(dtype.bytes()) {
        let wrong = format_args!("lies at {address:p}, which is not aligned to {dtype}");
        return Err(Error::layout(what(), wrong, format_args!("align it to {} bytes", dtype.bytes())));
    }
    let Some(base) = NonNull::new(address) else {
        return Err(Error::layout(what(), "its address is null", "lend an address of allocated memory"));
    };
    if (address.addr() as u64).checked_add(span.bytes()).is_none() {
        let wrong = format_args!("{} bytes from {address:p} wrap around the address space", span.bytes());
        return Err(Error::layout(what(), wrong, "correct the address or the length"));
    }
    Ok(Some(Piece { start: span.start, bytes: span.bytes(), base: handle::Address::of(base) }))
}

fn refuse_overlap(layout: &Layout, mut runs: Vec<(u64, u64, Lent)>) -> Result<()> {
    runs.sort_unstable();
    match runs.windows(2).find(|pair| pair[0].0 + pair[0].1 > pair[1].0) {
        None => Ok(()),
        Some(pair) => Err(Error::layout(
            format_args!("{} and {}", pair[0].2.name(layout), pair[1].2.name(layout)),
            format_args!("overlap in memory at {:#x}", pair[1].0),
            "give each its own memory",
        )),
    }
}
