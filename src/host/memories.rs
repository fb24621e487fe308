//! Memory of the host device: one aligned, zeroed arena for each [`Memory`], or the caller's tensors.
//!
//! This file returns raw pointers within checked bounds, never references. Two things order all accesses through
//! these pointers: the schedule, and Rust's borrow rules for the slices of `src/stepper/views.rs`.
#![allow(unsafe_code)]

use std::alloc::{Layout as AllocLayout, alloc_zeroed, dealloc};
use std::cell::UnsafeCell;
use std::ptr::{self, NonNull};
use std::sync::PoisonError;

use crate::abi::{
    INSTEP_DTYPE_BF16, INSTEP_DTYPE_F16, INSTEP_DTYPE_F32, INSTEP_MASTER_NONE, INSTEP_MASTER_REMAINDER8,
    INSTEP_MASTER_REMAINDER16, INSTEP_MOMENTS_8BIT, INSTEP_QUANTUM, InstepControl, InstepRecord,
    InstepStatus, InstepStored,
};
use crate::collective::{Allocation, Collective, Purpose};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::handle::Place;
use crate::host::stagger::Stagger;
use crate::launch::{
    Assignment, BorrowedPieces, Counts, Progress, Region, Regions, Settings, records_of, status_of,
};
use crate::layout::{Gradients, Plan, SegmentAction};
use crate::op::{Memory, Span};
use crate::sync::Mutex;

/// The default alignment of allocators.
const ALLOCATOR_ALIGNMENT: usize = 16;

/// The page size to which short arenas are aligned, before their offset is added.
const SMALL_PAGE: usize = 4096;

/// The size of a huge page on x86-64 and aarch64. A step accesses whole arenas, so small pages would cost a TLB miss at
/// every page.
const HUGE_PAGE: usize = 2 << 20;

/// One allocation that contains an aligned range of bytes. The bytes are zero at first.
pub(crate) struct Arena {
    base: NonNull<u8>,
    bytes: u64,
    allocation: NonNull<u8>,
    layout: AllocLayout,
}

// SAFETY: an arena is an address and a size. Code that uses its raw pointers must order its own accesses.
unsafe impl Send for Arena {}
// SAFETY: no method of a shared arena touches its bytes. Code that uses its raw pointers must order its own accesses.
unsafe impl Sync for Arena {}

impl Arena {
    /// Allocates zeros that start `offset` bytes after a page boundary.
    pub(crate) fn zeroed(bytes: u64, offset: u64) -> Result<Arena> {
        let too_large = || {
            Error::layout(
                format_args!("{bytes} bytes"),
                "do not fit the address space",
                "use fewer parameters",
            )
        };
        let size = usize::try_from(bytes.max(1)).map_err(|_| too_large())?;
        let alignment = if size >= 2 * HUGE_PAGE { HUGE_PAGE } else { SMALL_PAGE };
        // This code aligns the arena itself. If an allocator is asked for a large alignment, it writes the zeros
        // itself, and would touch every page before the advice for huge pages.
        let offset = offset as usize;
        let whole = size.checked_add(alignment + offset).ok_or_else(too_large)?;
        let layout = AllocLayout::from_size_align(whole, ALLOCATOR_ALIGNMENT).map_err(|_| too_large())?;
        // SAFETY: the size is not zero.
        let allocation = unsafe { alloc_zeroed(layout) };
        let allocation = NonNull::new(allocation).ok_or_else(|| {
            Error::layout(format_args!("{bytes} bytes"), "could not be allocated", "free memory")
        })?;
        let skipped = allocation.addr().get().next_multiple_of(alignment) - allocation.addr().get();
        // SAFETY: `skipped` is less than `alignment`, and the allocation has room for `alignment` bytes in addition to
        // the arena and `offset`.
        let page = unsafe { allocation.add(skipped) };
        if alignment == HUGE_PAGE {
            advise_huge_pages(page, size);
        }
        // SAFETY: the allocation is as long as the arena, `alignment` and `offset` together, and `skipped` is less than
        // `alignment`.
        Ok(Arena { base: unsafe { page.add(offset) }, bytes: size as u64, allocation, layout })
    }
}

impl Arena {
    pub(crate) fn run(&self) -> (NonNull<u8>, u64) {
        (self.base, self.bytes)
    }

    /// Returns the bytes as f32. The slice is aligned for vectors, because offsets from a page boundary are multiples
    /// of a vector's alignment.
    #[cfg(feature = "bench")]
    pub(crate) fn f32s(&mut self) -> &mut [f32] {
        let length = self.bytes as usize / size_of::<f32>();
        // SAFETY: the bytes are allocated, initialised (with zeros or with f32 values), aligned, and borrowed
        // exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.base.cast().as_ptr(), length) }
    }
}

#[cfg(target_os = "linux")]
unsafe extern "C" {
    fn madvise(address: *mut std::ffi::c_void, length: usize, advice: i32) -> i32;
    fn getpagesize() -> i32;
}

/// Releases the whole pages in a range of bytes to the system. The pages read as zeros when they are touched again. If
/// a neighbouring page is in use, the operating system may later merge it with the range's pages into a huge page. Such
/// a merge affects at most one page at each end of the range.
///
/// # Safety
/// The range lies in one allocation of this process, and its contents are no longer needed. Nothing else touches it
/// now.
unsafe fn give_back(base: *mut u8, bytes: u64) -> Result<()> {
    #[cfg(target_os = "linux")]
    {
        const MADV_DONTNEED: i32 = 4;
        // SAFETY: this call only asks for the page size.
        let page = unsafe { getpagesize() } as usize;
        let skipped = base.addr().next_multiple_of(page) - base.addr();
        let Some(length) = (bytes as usize).checked_sub(skipped).map(|rest| rest & !(page - 1)) else {
            return Ok(());
        };
        // SAFETY: these are whole pages inside the range.
        if length == 0 || unsafe { madvise(base.wrapping_add(skipped).cast(), length, MADV_DONTNEED) } == 0 {
            return Ok(());
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (base, bytes);
    let wrong = "this system cannot give memory back (madvise MADV_DONTNEED)";
    let remedy = "use neither Gradients::Release nor Strategy::Fsdp";
    Err(Error::unsupported("released memory", wrong, remedy))
}

/// Asks for huge pages. The system may ignore this request, and small pages work too.
fn advise_huge_pages(base: NonNull<u8>, size: usize) {
    #[cfg(target_os = "linux")]
    {
        const MADV_HUGEPAGE: i32 = 14;
        // SAFETY: these are whole pages of an allocation of our own, and the advice changes no byte.
        unsafe { madvise(base.as_ptr().cast(), size & !(HUGE_PAGE - 1), MADV_HUGEPAGE) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (base, size);
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: `zeroed` has allocated the memory with this layout, and nothing refers to the arena any more.
        unsafe { dealloc(self.allocation.as_ptr(), self.layout) }
    }
}

pub(crate) struct Memories {
    /// The addresses of all memories. They change only in [`rebind`](Self::rebind).
    regions: UnsafeCell<Regions>,
    /// Keeps the stepper's own arenas alive.
    _arenas: Vec<Arena>,
    /// Keeps alive the memory that the communicator allocated.
    _lent: Vec<Allocation>,
    are_borrowed: bool,
    /// The status of the last published pass. The mutex is locked only during a copy, so a reader never waits for an
    /// op.
    published: Mutex<Option<InstepStatus>>,
}

// SAFETY: only `rebind` changes the regions, and by its contract no other code reads them meanwhile. All other fields
// are `Sync`.
unsafe impl Sync for Memories {}

impl Memories {
    /// Allocates the zeroed memory of a plan, except borrowed tensors. If `comm` allocates memory, parameters and
    /// gradients come from `comm`. All other memory comes from arenas.
    pub(crate) fn new(
        plan: &Plan,
        assignment: &Assignment,
        comm: Option<&dyn Collective>,
        borrowed: Option<BorrowedPieces>,
    ) -> Result<Memories> {
        let mut arenas = Vec::new();
        let mut stagger = Stagger::default();
        for piece in borrowed.iter().flat_map(|borrowed| borrowed.params.iter().chain(&borrowed.grads)) {
            stagger.keep_away_from(piece.base.get(), piece.start, piece.bytes);
        }
        let mut owned = |bytes: u64| {
            let arena = Arena::zeroed(bytes, stagger.next(bytes))?;
            let region = Region::whole(arena.base, arena.bytes);
            arenas.push(arena);
            Ok::<Region, Error>(region)
        };
        let are_borrowed = borrowed.is_some();
        let are_released =
            [(Memory::Grads, plan.gradients() == Gradients::Release), (Memory::Params, plan.shards_params())];
        let mut lent = Vec::new();
        let mut lent_or_owned = |memory: Memory, purpose: Purpose| {
            let bytes = Span::whole(memory, plan).bytes();
            // A communicator's memory must keep its pages. Memory that is to be released therefore never comes from the
            // communicator.
            let comm = comm.filter(|_| bytes > 0 && !are_released.contains(&(memory, true)));
            let made = comm.map_or(Ok(None), |comm| comm.allocate(purpose, Place::Host, bytes))?;
            let Some(allocation) = made else { return owned(bytes) };
            let base = NonNull::new(allocation.address()).ok_or_else(|| {
                Error::layout(
                    format_args!("{bytes} bytes"),
                    "the collective made a null address",
                    "return None",
                )
            })?;
            // SAFETY: the communicator has just allocated `bytes` bytes there, for this stepper alone.
            unsafe { base.write_bytes(0, bytes as usize) };
            lent.push(allocation);
            Ok(Region::whole(base, bytes))
        };
        let given = match borrowed {
            None => [
                lent_or_owned(Memory::Params, Purpose::Parameters)?,
                lent_or_owned(Memory::Grads, Purpose::Gradients)?,
            ],
            Some(borrowed) => [Region::scattered(borrowed.params), Region::scattered(borrowed.grads)],
        };
        let given = [Memory::Params, Memory::Grads].into_iter().zip(given);
        let regions = Regions::new(plan, assignment.counts(plan), given, |_, bytes| owned(bytes))?;
        for (memory, _) in are_released.into_iter().filter(|(_, is_released)| *is_released) {
            // If the system cannot release memory, the stepper is refused here and not after the first step.
            let whole = Span::whole(memory, plan);
            // SAFETY: these are the bytes of an arena that nothing has used yet. The builder refuses borrowed memory.
            unsafe { give_back(regions.resolve(whole), whole.bytes())? };
        }
        let published = Mutex::new(None);
        Ok(Memories {
            regions: UnsafeCell::new(regions),
            _arenas: arenas,
            _lent: lent,
            are_borrowed,
            published,
        })
    }

    /// Allocates only control memory and settings, for launches that get their tensors' addresses each time they run.
    pub(crate) fn without_tensors(counts: Counts) -> Result<Memories> {
        let mut arenas = Vec::new();
        let regions = Regions::without_tensors(counts, |_, bytes| {
            let arena = Arena::zeroed(bytes, 0)?;
            let region = Region::whole(arena.base, arena.bytes);
            arenas.push(arena);
            Ok(region)
        })?;
        let (regions, published) = (UnsafeCell::new(regions), Mutex::new(None));
        Ok(Memories { regions, _arenas: arenas, _lent: Vec::new(), are_borrowed: false, published })
    }

    /// Makes a `Memories` from existing addresses, for ops that run on the host. Another owner allocates and frees the
    /// memory.
    pub(crate) fn at(regions: Regions) -> Memories {
        let (regions, published) = (UnsafeCell::new(regions), Mutex::new(None));
        Memories { regions, _arenas: Vec::new(), _lent: Vec::new(), are_borrowed: false, published }
    }

    /// Returns the addresses of all memories.
    pub(crate) fn regions(&self) -> &Regions {
        // SAFETY: by the contract of `rebind`, the regions do not change while the reference lives.
        unsafe { &*self.regions.get() }
    }

    /// Replaces the addresses of the caller's tensors.
    ///
    /// # Safety
    /// No op is running or queued, and nothing else uses this memory during the call.
    pub(crate) unsafe fn rebind(&self, pieces: BorrowedPieces) {
        // SAFETY: by the contract, nothing else refers to the regions now.
        unsafe { (*self.regions.get()).rebind(pieces) }
    }

    pub(crate) fn are_borrowed(&self) -> bool {
        self.are_borrowed
    }

    /// Returns the address of a span. The span must lie inside one piece of its memory.
    pub(crate) fn resolve(&self, span: Span) -> *mut u8 {
        self.regions().resolve(span)
    }

    /// Releases the whole pages of a span to the system. The pages read as zeros afterwards.
    ///
    /// # Safety
    /// Nothing else touches the span, and its contents are no longer needed.
    pub(crate) unsafe fn release(&self, span: Span) -> Result<()> {
        assert!(!self.are_borrowed, "what is borrowed is not given back");
        // SAFETY: `resolve` has checked that the span lies in one arena. The rest is the contract.
        unsafe { give_back(self.resolve(span), span.bytes()) }
    }

    /// Sets every element of a span to the number 1 in the type `dtype`.
    ///
    /// # Safety
    /// Nothing else touches the span.
    pub(crate) unsafe fn count(&self, span: Span, dtype: DType) {
        let one = dtype.one();
        let first = self.resolve(span);
        for at in (0..span.bytes() as usize).step_by(one.len()) {
            // SAFETY: `resolve` has checked the bounds, and the span has whole elements. The rest is the contract.
            unsafe { first.add(at).copy_from_nonoverlapping(one.as_ptr(), one.len()) }
        }
    }

    /// Writes the control block and all records.
    ///
    /// # Safety
    /// No op has been submitted.
    pub(crate) unsafe fn write_control(
        &self,
        control: InstepControl,
        records: impl Iterator<Item = InstepRecord>,
    ) {
        // SAFETY: control memory was made for one block and that many records, and is aligned. By the contract, nothing
        // else touches it.
        unsafe {
            self.regions().control().write(control);
            for (k, record) in records.take(self.regions().counts().records).enumerate() {
                self.regions().records().add(k).write(record);
            }
        }
    }

    /// Sets the control blocks of all clip sets except set 0.
    ///
    /// # Safety
    /// No op has been submitted, and control memory has one of these blocks for each item of `sets`.
    pub(crate) unsafe fn write_sets(&self, sets: impl Iterator<Item = InstepControl>) {
        let first = self.regions().further_controls().0;
        // SAFETY: control memory was made for these blocks and is aligned. By the contract, nothing else touches it.
        sets.enumerate().for_each(|(k, set)| unsafe { first.add(k).write(set) });
    }

    /// Sets only the control block. `control` has the results of passes that ran on other memory.
    ///
    /// # Safety
    /// No op has been submitted.
    pub(crate) unsafe fn write_control_block(&self, control: InstepControl) {
        // SAFETY: control memory was made for one block and is aligned. By the contract, nothing else touches it.
        unsafe { self.regions().control().write(control) }
    }

    /// Makes the steps of the open pass leave a segment unchanged. The next `Begin` op writes the segment's own action
    /// again.
    ///
    /// # Safety
    /// No other op that touches control memory is running.
    pub(crate) unsafe fn leave(&self, plan: &Plan, segment: u32) {
        for record in records_of(plan, self.regions(), segment) {
            // SAFETY: the record is in bounds, aligned and initialised. By the contract, no thread touches it now.
            unsafe { (*self.regions().records().add(record)).action = SegmentAction::Leave as u32 }
        }
    }

    /// Replaces the settings.
    ///
    /// # Safety
    /// No `Begin` op is running or queued.
    pub(crate) unsafe fn write_settings(&self, settings: &Settings) {
        let words = settings.words();
        assert_eq!(size_of_val(words), self.regions().counts().settings_bytes());
        // SAFETY: by the assertion, the memory is as long as the words, and it is aligned. By the contract, no thread
        // reads it now.
        unsafe { self.regions().settings().copy_from_nonoverlapping(words.as_ptr(), words.len()) }
    }

    /// Returns a copy of the control block.
    ///
    /// # Safety
    /// No op that writes control memory is running.
    pub(crate) unsafe fn read_control(&self) -> InstepControl {
        // SAFETY: the memory is aligned and allocated for the block, and zero bytes are a valid block. By the contract,
        // nothing writes it now.
        unsafe { self.regions().control().read() }
    }

    /// Stores the status of the pass for [`latest`](Self::latest).
    ///
    /// # Safety
    /// The conditions of [`read_control`](Self::read_control) hold.
    pub(crate) unsafe fn publish(&self) {
        // SAFETY: the caller promises that no op writes control memory now.
        let status = status_of(&unsafe { self.read_control() });
        *self.published.lock().unwrap_or_else(PoisonError::into_inner) = Some(status);
    }

    /// Sets the published status to the last status that another device has published.
    pub(crate) fn set_latest(&self, status: Option<InstepStatus>) {
        *self.published.lock().unwrap_or_else(PoisonError::into_inner) = status;
    }

    pub(crate) fn latest(&self) -> Option<InstepStatus> {
        *self.published.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a copy of one record.
    ///
    /// # Safety
    /// No op that writes control memory is running.
    pub(crate) unsafe fn read_record(&self, record: usize) -> InstepRecord {
        assert!(record < self.regions().counts().records);
        // SAFETY: by the assertion, the record is in bounds. The other conditions are those of `read_control`.
        unsafe { self.regions().records().add(record).read() }
    }

    /// Copies a span to `into`.
    ///
    /// # Safety
    /// No op or copy that writes the span is running.
    pub(crate) unsafe fn read(&self, span: Span, into: &mut [u8]) {
        assert_eq!(span.bytes(), into.len() as u64);
        // SAFETY: `resolve` has checked the bounds, and the span is as long as the slice. By the contract, nothing
        // writes it now.
        unsafe { ptr::copy_nonoverlapping(self.resolve(span), into.as_mut_ptr(), into.len()) }
    }

    /// Copies `from` to a span.
    ///
    /// # Safety
    /// Nothing else touches the span.
    pub(crate) unsafe fn write(&self, span: Span, from: &[u8]) {
        assert_eq!(span.bytes(), from.len() as u64);
        // SAFETY: `resolve` has checked the bounds, and the span is as long as the slice. By the contract, nothing else
        // touches it.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), self.resolve(span), from.len()) }
    }

    /// Sets a record's number of updates, and the number that its optimizer carries from update to update.
    ///
    /// # Safety
    /// No op that touches control memory is running or queued.
    pub(crate) unsafe fn write_progress(&self, record: usize, progress: Progress) {
        assert!(record < self.regions().counts().records);
        // SAFETY: by the assertion, the record is in bounds. It is aligned and initialised. By the contract, no thread
        // touches it now.
        unsafe { progress.set(&mut *self.regions().records().add(record)) }
    }
}

/// Stored elements of any format, in memory that is aligned for u32.
pub(crate) struct StoredValues<'a> {
    pub(crate) values: &'a mut [u32],
    /// The remainders of parameters, or the scales of 8-bit states.
    pub(crate) second: Option<&'a mut [u32]>,
    /// The kernels' number for the element type, or for 8-bit states.
    pub(crate) format: u32,
    /// The kernels' number for the kind of remainders, if `second` holds remainders.
    pub(crate) master_kind: u32,
    /// Whether 8-bit states are signed.
    pub(crate) is_signed: bool,
}

impl StoredValues<'_> {
    /// Returns the kernels' argument for `count` elements.
    ///
    /// # Panics
    /// Panics if there are fewer elements, remainders or scales, or if the format or the kind of remainders is unknown.
    pub(super) fn argument(&mut self, count: usize) -> InstepStored {
        let bytes = match self.format {
            INSTEP_DTYPE_F32 => 4 * count,
            INSTEP_DTYPE_BF16 | INSTEP_DTYPE_F16 => 2 * count,
            INSTEP_MOMENTS_8BIT => count,
            other => panic!("format {other}"),
        };
        let second_bytes = match self.master_kind {
            _ if self.format == INSTEP_MOMENTS_8BIT => 4 * count.div_ceil(INSTEP_QUANTUM as usize),
            INSTEP_MASTER_REMAINDER16 => 2 * count,
            INSTEP_MASTER_REMAINDER8 => count,
            INSTEP_MASTER_NONE => 0,
            other => panic!("master {other}"),
        };
        let there = [size_of_val(self.values), self.second.as_deref().map_or(0, size_of_val)];
        assert!(there[0] >= bytes && there[1] >= second_bytes, "{there:?} bytes for {count} elements");
        InstepStored {
            values: self.values.as_mut_ptr().cast(),
            second: self.second.as_deref_mut().map_or(ptr::null_mut(), |second| second.as_mut_ptr().cast()),
            count: count as u64,
            format: self.format,
            master_kind: self.master_kind,
            is_signed: self.is_signed.into(),
            reserved: 0,
        }
    }
}
