//! Checks that the tensors of each call are complete, of the right length, aligned and writable.
//!
//! All tensors of a call are checked before a stored address changes, so a refused call changes nothing. This file
//! computes addresses and touches no element.

use std::ffi::c_void;

use super::element::Stored;
use super::tensors::{Lent, Location, Run, STATES, StepTensors};
use crate::abi::INSTEP_QUANTUM;
use crate::error::{Error, Result};
use crate::launch::Bases;
use crate::layout::{Gradients, Plan, Segment, SegmentAction};
use crate::op::{Memory, Span};

/// The largest number of tensors in a call: parameters, gradients, masters, copies, averages, states and their scales.
const KINDS: usize = 5 + 2 * STATES;

/// One kind of tensor.
#[derive(Clone, Debug)]
struct Kind {
    memory: Memory,
    /// The tensor's name in errors.
    name: String,
    /// The size of a unit in bytes. A unit is an element, or the scale of a block.
    bytes: u64,
    stored: Stored,
    /// The base-2 logarithm of the number of elements per unit.
    log2_elements: u32,
    is_written: bool,
}

impl Kind {
    /// Returns the number of units that contain `elements` elements.
    fn units(&self, elements: u64) -> u64 {
        elements.div_ceil(1 << self.log2_elements)
    }

    /// Returns true if an address is not a multiple of the unit's size.
    fn is_misaligned(&self, address: usize) -> bool {
        // The number of bytes is a power of two, and a mask is faster than a division.
        address as u64 & (self.bytes - 1) != 0
    }
}

/// The elements of one parameter in the bucket.
#[derive(Clone, Copy, Debug)]
struct Extent {
    /// The parameter's index in the bucket's list.
    place: usize,
    start: u64,
    /// Number of elements of the parameter and of its gradient. `state_len` is the number of elements of each state,
    /// and of every tensor that has the states' layout.
    len: u64,
    state_len: u64,
}

/// The kinds of tensors that a step uses, and the extents of its parameters.
#[derive(Debug)]
pub(super) struct Shape {
    len: u64,
    extents: Vec<Extent>,
    kinds: Vec<Kind>,
    is_on_gpu: bool,
}

impl Shape {
    /// Returns the `Shape` for the tensors of a plan. `places` has the index of each segment's parameter in the
    /// bucket's list. `states` has a label for each state. Errors use the label as the state's name.
    pub(super) fn new(plan: &Plan, places: &[usize], states: &[String], is_on_gpu: bool) -> Shape {
        let averages = |segment: &Segment| segment.action == SegmentAction::Average;
        let ends = matches!(plan.gradients(), Gradients::Zero | Gradients::Average);
        let writes_grads = ends || plan.segments().iter().any(averages);
        let kind = |memory| {
            let elements = if matches!(memory, Memory::Scales(_)) { INSTEP_QUANTUM.into() } else { 1 };
            let bytes = Span::elements(memory, plan, 0, elements).bytes();
            let (name, stored) = (name_of(memory, states), Stored::of(memory, &plan.buckets()[0].storage));
            let is_written = memory != Memory::Grads || writes_grads;
            Kind { memory, name, bytes, stored, log2_elements: elements.ilog2(), is_written }
        };
        let extent = |(segment, place): (&Segment, &usize)| Extent {
            place: *place,
            start: segment.start,
            len: segment.len,
            state_len: segment.state_len(),
        };
        Shape {
            len: plan.arena_len(),
            extents: plan.segments().iter().zip(places).map(extent).collect(),
            kinds: Memory::of_tensors(plan, states.len()).map(kind).collect(),
            is_on_gpu,
        }
    }

    /// Returns the number of elements of a run that covers the whole bucket.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Checks a step's tensors and writes their addresses to `bases`. `bases` gets one entry for all segments, or one
    /// entry per segment. Returns whether a gradient is missing.
    pub(super) fn bind(&self, tensors: &StepTensors<'_>, bases: &mut Vec<Bases>) -> Result<bool> {
        let (mut is_whole, mut lacks_some) = (true, false);
        for kind in &self.kinds {
            let Some(tensor) = tensors.get(kind.memory) else {
                if self.len == 0 {
                    continue;
                }
                let wrong = "missing, but this step has it";
                return Err(Error::layout(&kind.name, wrong, "add it to the tensors of the call"));
            };
            lacks_some |= self.check(kind, tensor)?;
            is_whole &= matches!(tensor.location, Location::Whole(_));
        }
        self.refuse_superfluous(tensors)?;
        self.refuse_overlap(tensors)?;
        self.clear(bases, is_whole);
        for kind in &self.kinds {
            // A tensor with elements is present, as checked above.
            tensors.get(kind.memory).into_iter().for_each(|tensor| self.fill(kind, tensor, bases));
        }
        Ok(lacks_some)
    }

    /// Checks the gradients and writes their addresses to `bases`. A norm reads no other tensor. Returns whether a
    /// gradient is missing.
    pub(super) fn bind_grads(&self, grads: &Lent<'_>, bases: &mut Vec<Bases>) -> Result<bool> {
        let Some(kind) = self.kinds.iter().find(|kind| kind.memory == Memory::Grads) else {
            return Ok(false);
        };
        let lacks_some = self.check_lent(kind, grads)?;
        self.clear(bases, matches!(grads.location, Location::Whole(_)));
        self.fill(kind, grads, bases);
        Ok(lacks_some)
    }

    /// Returns whether a segment's parameter has no gradient among the checked `grads`.
    pub(super) fn is_missing(&self, grads: &Lent<'_>, segment: usize) -> bool {
        match &grads.location {
            Location::Whole(_) => false,
            Location::Each(runs) => runs.run(self.extents[segment].place).is_none(),
        }
    }

    /// Resets the addresses to one empty entry for all segments, or to one empty entry per segment.
    fn clear(&self, bases: &mut Vec<Bases>, is_whole: bool) {
        bases.clear();
        bases.resize(if is_whole { 1 } else { self.extents.len() }, Bases::default());
    }

    /// For one kind of tensor, stores the base address of each segment. The segment's tiles add their offsets to this
    /// address.
    fn fill(&self, kind: &Kind, tensor: &Lent<'_>, bases: &mut [Bases]) {
        let runs = match &tensor.location {
            Location::Whole(run) => return bases.iter_mut().for_each(|of| of.set(kind.memory, run.address)),
            Location::Each(runs) => runs,
        };
        let addresses = runs.addresses();
        for (extent, of) in self.extents.iter().zip(bases) {
            let offset = (extent.start >> kind.log2_elements) * kind.bytes;
            let address = match addresses {
                Some(addresses) => addresses[extent.place].expose_provenance(),
                None => runs.run(extent.place).address,
            };
            of.set(kind.memory, address.wrapping_sub(offset as usize));
        }
    }

    /// Checks a tensor, and returns whether a gradient is missing. This function creates strings only for errors,
    /// because a string allocates memory.
    fn check(&self, kind: &Kind, tensor: &Lent<'_>) -> Result<bool> {
        if kind.is_written && !tensor.is_writable {
            let wrong = "only lent for reading, but this step writes it";
            return Err(Error::layout(&kind.name, wrong, "lend it mutably"));
        }
        self.check_lent(kind, tensor)
    }

    /// Makes all checks of a tensor except one: whether the step may write the tensor.
    fn check_lent(&self, kind: &Kind, tensor: &Lent<'_>) -> Result<bool> {
        let refuse = |wrong: &str, remedy| Err(Error::layout(&kind.name, wrong, remedy));
        if self.is_on_gpu {
            refuse_unreached(kind, tensor)?;
        } else if tensor.is_on_gpu {
            return Err(Error::unsupported(&kind.name, "a slice of a GPU's memory", "step it on that GPU"));
        }
        if let Some(lent) = tensor.element.filter(|lent| *lent != kind.stored) {
            let wrong = format!("elements of {lent}, where the precision has {}", kind.stored);
            return refuse(&wrong, "use the precision's type");
        }
        match &tensor.location {
            Location::Whole(run) => self.check_run(kind, run, None, self.len).map(|()| false),
            Location::Each(runs) => {
                if runs.count != self.extents.len() {
                    let wrong = format!("{} runs for {} parameters", runs.count, self.extents.len());
                    return refuse(&wrong, "give one run per parameter of the bucket");
                }
                let is_fit = |at: &*mut c_void| !at.is_null() && !kind.is_misaligned(at.addr());
                if runs.addresses().is_some_and(|all| all.iter().all(is_fit)) {
                    return Ok(false);
                }
                let mut lacks_some = false;
                for at in &self.extents {
                    let run = runs.run(at.place);
                    if kind.memory == Memory::Grads && run.is_none() {
                        lacks_some = true;
                    } else {
                        let is_dense = matches!(kind.memory, Memory::Params | Memory::Grads);
                        let len = if is_dense { at.len } else { at.state_len };
                        self.check_run(kind, &run, Some(at.place), len)?;
                    }
                }
                Ok(lacks_some)
            }
        }
    }

    /// Checks the run of the whole bucket, or the run of the parameter at index `place` in the bucket's list.
    fn check_run(&self, kind: &Kind, run: &Run, place: Option<usize>, len: u64) -> Result<()> {
        let refuse = |wrong: &dyn std::fmt::Display, remedy| {
            let place = place.map(|place| format!(", run {place}")).unwrap_or_default();
            Err(Error::layout(format_args!("{}{place}", kind.name), wrong, remedy))
        };
        let units = kind.units(len);
        if let Some(elements) = run.elements.filter(|elements| *elements as u64 != units) {
            let of = if place.is_some() { "its parameter" } else { "the bucket" };
            let wrong = format_args!("a run of {elements} elements, where {of} has {units}");
            return refuse(&wrong, "lend exactly as many");
        }
        if units > 0 && run.address == 0 {
            return refuse(&"the address is null", "give the address of its elements");
        }
        if units > 0 && kind.is_misaligned(run.address) {
            let wrong = format_args!("the address {:#x} is not a multiple of {}", run.address, kind.bytes);
            return refuse(&wrong, "align it to an element");
        }
        Ok(())
    }

    fn refuse_superfluous(&self, tensors: &StepTensors<'_>) -> Result<()> {
        let is_needed = |memory: &Memory| self.kinds.iter().any(|kind| kind.memory == *memory);
        let Some(extra) = tensors.memories().find(|memory| !is_needed(memory)) else { return Ok(()) };
        let is_alike = |kind: &&Kind| std::mem::discriminant(&kind.memory) == std::mem::discriminant(&extra);
        let (wrong, remedy) = match self.kinds.iter().filter(is_alike).count() {
            0 => {
                ("given, but this step has none".to_owned(), "leave them out, or build a step that has them")
            }
            count => (format!("more than the {count} of this step"), "leave the others out"),
        };
        let thing = match extra {
            Memory::State(_) => "states".to_owned(),
            Memory::Scales(_) => "scales".to_owned(),
            extra => name_of(extra, &[]),
        };
        Err(Error::layout(thing, wrong, remedy))
    }

    /// Returns an error if two runs overlap. Compares only runs that cover the whole bucket.
    fn refuse_overlap(&self, tensors: &StepTensors<'_>) -> Result<()> {
        let mut runs = [(0, 0, 0); KINDS];
        let mut count = 0;
        for (index, kind) in self.kinds.iter().enumerate() {
            let Some(Lent { location: Location::Whole(run), .. }) = tensors.get(kind.memory) else {
                continue;
            };
            let bytes = kind.units(self.len) * kind.bytes;
            if bytes > 0 {
                runs[count] = (run.address as u64, bytes, index);
                count += 1;
            }
        }
        let runs = &mut runs[..count];
        runs.sort_unstable();
        match runs.windows(2).find(|pair| pair[1].0 - pair[0].0 < pair[0].1) {
            None => Ok(()),
            Some(pair) => {
                // The error names the two tensors in the order of their kinds, not in the order of their addresses.
                let [one, other] = [pair[0].2.min(pair[1].2), pair[0].2.max(pair[1].2)];
                let thing = format_args!("{} and {}", self.kinds[one].name, self.kinds[other].name);
                Err(Error::layout(thing, "overlap", "give each its own memory"))
            }
        }
    }
}

/// Returns an error if a GPU cannot access the tensor.
fn refuse_unreached(kind: &Kind, tensor: &Lent<'_>) -> Result<()> {
    if tensor.element.is_some() && !tensor.is_on_gpu {
        let remedy = "give device addresses";
        return Err(Error::unsupported(&kind.name, "a slice of the host's memory", remedy));
    }
    let is_apart = matches!(&tensor.location, Location::Each(runs) if runs.count > 1);
    if is_apart && !matches!(kind.memory, Memory::Params | Memory::Grads) {
        let wrong = "on a GPU, only parameters and gradients may lie apart";
        return Err(Error::unsupported(&kind.name, wrong, "give one run for the whole bucket"));
    }
    Ok(())
}

fn name_of(memory: Memory, states: &[String]) -> String {
    let state = |k: u8| states.get(usize::from(k)).cloned().unwrap_or_else(|| format!("state {k}"));
    match memory {
        Memory::Params => "parameters".to_owned(),
        Memory::Grads => "gradients".to_owned(),
        Memory::Master => "masters".to_owned(),
        Memory::Copy => "copies".to_owned(),
        Memory::Ema => "moving averages".to_owned(),
        Memory::State(k) => state(k),
        Memory::Scales(k) => format!("scales of {}", state(k)),
        Memory::HostParams | Memory::HostGrads => unreachable!("no stepper offloads a bucket alone"),
        Memory::Sums => unreachable!("a bucket alone has no micro-batches"),
        Memory::Control | Memory::Settings => unreachable!("no tensor"),
    }
}
