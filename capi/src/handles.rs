//! Handles, and the tables of the objects that they stand for. C sees a handle as a pointer, but it is only a number.
//!
//! A handle is never dereferenced. A handle contains its kind, the index of its entry in that kind's table, and the
//! generation of the entry. The library can therefore refuse a handle that was freed or is of another kind, and a
//! number that is not a handle. Each object has a lock. A call that would have to wait for an object's lock is refused
//! too.

use std::sync::{Arc, Mutex, PoisonError, RwLock, TryLockError};

use crate::fork;
use crate::status::{Fault, INSTEP_BUSY, INSTEP_HANDLE, INSTEP_NULL, INSTEP_PANIC, Result};

const PLACE_BITS: u32 = 24;
const GENERATION_BITS: u32 = 32;
/// The low bits of every handle. The address of a C object is usually a multiple of 8. Its low bits are then zeros, so
/// the library does not mistake the address for a handle.
const MARK: u64 = 0b101;
const MARK_BITS: u32 = 3;

const _: () = assert!(usize::BITS == 64, "a handle has the size of a pointer");

/// The kinds of handles. The highest bits of a handle give its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Layout = 1,
    BucketStep = 2,
    Norm = 3,
    Stepper = 4,
}

/// The live objects of one kind.
pub(crate) struct Table<T> {
    kind: Kind,
    slots: RwLock<Slots<T>>,
}

struct Slots<T> {
    all: Vec<Slot<T>>,
    free: Vec<usize>,
}

struct Slot<T> {
    generation: u32,
    /// The object, or `None` if the entry is free.
    object: Option<Arc<Object<T>>>,
}

/// An object with its lock. A call that frees the object replaces it by `None`. Another thread may have looked up the
/// object just before that call, and then finds `None`.
type Object<T> = Mutex<Option<T>>;

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Layout => "layout",
            Kind::BucketStep => "bucket step",
            Kind::Norm => "norm",
            Kind::Stepper => "stepper",
        }
    }

    /// Returns the kind that is stored in a handle, or `None` if the number is not a handle.
    fn of(handle: u64) -> Option<Kind> {
        let kinds = [Kind::Layout, Kind::BucketStep, Kind::Norm, Kind::Stepper];
        let kind = handle >> (MARK_BITS + PLACE_BITS + GENERATION_BITS);
        kinds.into_iter().find(|known| *known as u64 == kind).filter(|_| handle & 0b111 == MARK)
    }
}

impl<T> Table<T> {
    pub(crate) const fn new(kind: Kind) -> Table<T> {
        Table { kind, slots: RwLock::new(Slots { all: Vec::new(), free: Vec::new() }) }
    }

    /// Adds an object and returns its handle.
    pub(crate) fn insert<H>(&self, object: T) -> Result<*mut H> {
        fork::watch();
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let place = match slots.free.pop() {
            Some(place) => place,
            None if slots.all.len() >= 1 << PLACE_BITS => {
                let text = format_args!("{}: 2^{PLACE_BITS} of them are alive; free some", self.kind.name());
                return Err(Fault::new(INSTEP_HANDLE, text));
            }
            None => {
                slots.all.push(Slot { generation: 0, object: None });
                slots.all.len() - 1
            }
        };
        let slot = &mut slots.all[place];
        slot.object = Some(Arc::new(Mutex::new(Some(object))));
        let generation = u64::from(slot.generation);
        let kind = (self.kind as u64) << (MARK_BITS + PLACE_BITS + GENERATION_BITS);
        let handle = kind | generation << (MARK_BITS + PLACE_BITS) | (place as u64) << MARK_BITS | MARK;
        Ok(std::ptr::without_provenance_mut(handle as usize))
    }

    /// Locks the object of a handle and calls `body` with it.
    pub(crate) fn with<H, R>(&self, handle: *const H, body: impl FnOnce(&mut T) -> Result<R>) -> Result<R> {
        let object = self.find(handle.addr() as u64)?;
        let mut locked = match object.try_lock() {
            Ok(locked) => locked,
            Err(TryLockError::WouldBlock) => return Err(self.busy()),
            Err(TryLockError::Poisoned(_)) => {
                let text = format!("{}: an earlier call on it panicked; free it", self.kind.name());
                return Err(Fault::new(INSTEP_PANIC, text));
            }
        };
        locked.as_mut().map_or_else(|| Err(self.dead()), body)
    }

    /// Removes an object from the table and returns it.
    pub(crate) fn remove<H>(&self, handle: *const H) -> Result<T> {
        let handle = handle.addr() as u64;
        let object = self.find(handle)?;
        let taken = match object.try_lock() {
            Ok(mut locked) => locked.take(),
            Err(TryLockError::WouldBlock) => return Err(self.busy()),
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner().take(),
        };
        let taken = taken.ok_or_else(|| self.dead())?;
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let place = place_of(handle);
        let slot = &mut slots.all[place];
        slot.object = None;
        // An entry that has used all its generations stays empty, so no handle is ever used twice.
        if let Some(generation) = slot.generation.checked_add(1) {
            slot.generation = generation;
            slots.free.push(place);
        }
        Ok(taken)
    }

    fn find(&self, handle: u64) -> Result<Arc<Object<T>>> {
        let name = self.kind.name();
        if handle == 0 {
            return Err(Fault::new(
                INSTEP_NULL,
                format_args!("{name}: the handle is null; create one first"),
            ));
        }
        match Kind::of(handle) {
            Some(kind) if kind == self.kind => {}
            Some(other) => {
                let text = format_args!("{name}: the handle is that of a {}; pass a {name}", other.name());
                return Err(Fault::new(INSTEP_HANDLE, text));
            }
            None => {
                let text =
                    format_args!("{name}: the handle is not one of this library; pass one that it made");
                return Err(Fault::new(INSTEP_HANDLE, text));
            }
        }
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        let generation = (handle >> (MARK_BITS + PLACE_BITS)) as u32;
        let slot = slots.all.get(place_of(handle)).filter(|slot| slot.generation == generation);
        slot.and_then(|slot| slot.object.clone()).ok_or_else(|| self.dead())
    }

    fn busy(&self) -> Fault {
        let text = "another thread is in a call on it; use a handle on one thread at a time";
        Fault::new(INSTEP_BUSY, format_args!("{}: {text}", self.kind.name()))
    }

    fn dead(&self) -> Fault {
        let text = "the handle was freed; drop every copy of it then";
        Fault::new(INSTEP_HANDLE, format_args!("{}: {text}", self.kind.name()))
    }
}

fn place_of(handle: u64) -> usize {
    (handle >> MARK_BITS) as usize & ((1 << PLACE_BITS) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    type Handle = *mut u8;

    fn status<T>(outcome: Result<T>) -> i32 {
        outcome.map_or_else(|fault| fault.status, |_| 0)
    }

    #[test]
    fn a_freed_handle_stays_dead_when_its_place_is_used_again() {
        let table = Table::new(Kind::Norm);
        let first: Handle = table.insert(1).unwrap();
        assert_eq!(table.remove(first).unwrap(), 1);
        assert_eq!(status(table.remove(first)), INSTEP_HANDLE);
        let second: Handle = table.insert(2).unwrap();
        assert_eq!(place_of(first.addr() as u64), place_of(second.addr() as u64));
        assert_eq!(status(table.with(first, |_| Ok(()))), INSTEP_HANDLE);
        assert_eq!(table.with(second, |object| Ok(*object)).unwrap(), 2);
    }

    #[test]
    fn no_number_but_a_live_handle_of_the_kind_is_taken() {
        let (norms, layouts) = (Table::new(Kind::Norm), Table::new(Kind::Layout));
        let alive: Handle = norms.insert(()).unwrap();
        let _: Handle = layouts.insert(()).unwrap();
        assert_eq!(status(norms.with(std::ptr::null::<u8>(), |_| Ok(()))), INSTEP_NULL);
        assert_eq!(status(layouts.with(alive, |_| Ok(()))), INSTEP_HANDLE);
        for bit in 0..u64::BITS {
            assert_eq!(
                status(norms.with(alive.map_addr(|handle| handle ^ 1 << bit), |_| Ok(()))),
                INSTEP_HANDLE,
                "bit {bit}"
            );
        }
    }

    #[test]
    fn an_object_in_use_is_busy_and_neither_waited_for_nor_freed() {
        let table = Table::new(Kind::Stepper);
        let one: Handle = table.insert(()).unwrap();
        table
            .with(one, |_| {
                assert_eq!(status(table.with(one, |_| Ok(()))), INSTEP_BUSY);
                assert_eq!(status(table.remove(one)), INSTEP_BUSY);
                Ok(())
            })
            .unwrap();
        table.remove(one).unwrap();
    }

    #[test]
    fn an_object_whose_call_panicked_can_only_be_freed() {
        let table = Table::new(Kind::Stepper);
        let one: Handle = table.insert(5).unwrap();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _ = table.with::<_, ()>(one, |_| panic!("on purpose"));
        }));
        assert!(panicked.is_err());
        assert_eq!(status(table.with(one, |_| Ok(()))), INSTEP_PANIC);
        assert_eq!(table.remove(one).unwrap(), 5);
    }
}
