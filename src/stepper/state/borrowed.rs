//! A stepper on the caller's memory: gradients in flat buckets of any alignment, each parameter in its own allocation.
//!
//! For frameworks that own their tensors. The plan keeps its own offsets, so the checker judges the same list; only the
//! addresses are the caller's. Tensors that overlap are refused, because the checker takes memories for disjoint.

use std::ptr::NonNull;

use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::handle::{DevicePtr, Place};
use crate::launch::{BorrowedPieces, Piece};
use crate::layout::{ForeignBucket, Layout, ParamId, Plan, Storage};
use crate::op::{Memory, Span};

/// The caller's tensors, for [`StepperBuilder::host_borrowing`](crate::StepperBuilder::host_borrowing).
#[derive(Clone, Debug, Default)]
pub struct Borrowed {
    params: Vec<(ParamId, Address)>,
    buckets: Vec<(ForeignBucket, Address)>,
}

/// First byte of a tensor, and its kind.
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
    /// Starts without any tensor.
    pub fn new() -> Borrowed {
        Borrowed::default()
    }

    /// Sets the address of a parameter: as many elements as registered, of the type that the stepper's
    /// [precision](crate::StepperBuilder::precision) says. Every parameter of the layout needs one, empty ones too,
    /// whose address may be null.
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

    /// The buckets as a plan.
    pub(crate) fn plan(&self, layout: &Layout, storage: Storage) -> Result<Plan> {
        let buckets: Vec<ForeignBucket> = self.buckets.iter().map(|(bucket, _)| bucket.clone()).collect();
        Plan::foreign(layout, &buckets, storage)
    }

    /// The addresses, one piece per tensor, held against the plan and against each other.
    pub(crate) fn pieces(&self, layout: &Layout, plan: &Plan) -> Result<BorrowedPieces> {
        let mut params = Vec::with_capacity(self.params.len());
        let mut names = Vec::new();
        let mut addresses = vec![None; plan.segments().len()];
        for (id, address) in &self.params {
            let place = &mut addresses[plan.segment_index(layout.index(*id)?)];
            if place.replace(*address).is_some() {
                let thing = format_args!("`{}`", layout.parameter(*id)?.name);
                return Err(Error::layout(thing, "has two addresses", "lend it once"));
            }
        }
        for (segment, address) in plan.segments().iter().zip(addresses) {
            let name = &layout.parameters()[segment.param as usize].name;
            let missing =
                || Error::layout(format_args!("`{name}`"), "has no address", "add `Borrowed::param`");
            let address = address.ok_or_else(missing)?;
            let span = Span::segment(Memory::Params, plan, segment);
            let name = || format!("`{name}`");
            let found = piece(plan, span, address, name)?;
            names.extend(found.is_some().then(name));
            params.extend(found);
        }
        let mut grads = Vec::with_capacity(self.buckets.len());
        for (index, (bucket, (_, address))) in plan.buckets().iter().zip(&self.buckets).enumerate() {
            let span = Span::bucket(plan, bucket);
            let name = || format!("bucket {index}");
            let found = piece(plan, span, *address, name)?;
            names.extend(found.is_some().then(name));
            grads.extend(found);
        }
        refuse_overlap(params.iter().chain(&grads).zip(&names))?;
        Ok(BorrowedPieces { params, grads })
    }
}

/// Refuses tensors that begin or end somewhere else; where an address lies `inspect` knows.
pub(crate) fn refuse_other_places(
    pieces: &BorrowedPieces,
    place: Place,
    inspect: impl Fn(DevicePtr) -> Result<Place>,
) -> Result<()> {
    for piece in pieces.params.iter().chain(&pieces.grads) {
        let start = piece.base.addr().get() as u64;
        for (verb, address) in [("lies", start), ("ends", start + piece.bytes - 1)] {
            let found = inspect(DevicePtr(address));
            if found != Ok(place) {
                let found = found
                    .map_or_else(|e| format!("no memory of any device ({e})"), |place| place.to_string());
                return Err(Error::layout(
                    format_args!("address {address:#x}"),
                    format_args!("a tensor {verb} there, in {found}"),
                    format_args!("lend tensors in {place}"),
                ));
            }
        }
    }
    Ok(())
}

/// A span at an address, unless it is empty.
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
    Ok(Some(Piece { start: span.start, bytes: span.bytes(), base }))
}

fn refuse_overlap<'a>(pieces: impl Iterator<Item = (&'a Piece, &'a String)>) -> Result<()> {
    let mut runs: Vec<(u64, u64, &str)> =
        pieces.map(|(piece, name)| (piece.base.addr().get() as u64, piece.bytes, &**name)).collect();
    runs.sort_unstable();
    match runs.windows(2).find(|pair| pair[0].0 + pair[0].1 > pair[1].0) {
        None => Ok(()),
        Some(pair) => Err(Error::layout(
            format_args!("{} and {}", pair[0].2, pair[1].2),
            format_args!("overlap in memory at {:#x}", pair[1].0),
            "give each its own memory",
        )),
    }
}
