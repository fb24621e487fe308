//! Implements `Executor` and `Device` for a GPU. The rest of the crate uses a GPU through these traits.
//!
//! `Device::wait` makes the trainer's stream wait, not the host. A read of data makes the host wait for the work on the
//! trainer's stream, and then for the copy. Every call makes the device current. Once the device has failed, no call
//! does further work. If the caller's tensors move to other addresses, the arguments of launches change on the host,
//! and tables of tiles change on the optim stream. The host need not wait for launches that read the old addresses.
//! Each of these launches has its own copy of its arguments, and the optim stream changes the launch's table only after
//! the launch.
#![allow(unsafe_code)]

use std::sync::Arc;

use crate::abi::{InstepControl, InstepStatus};
use crate::cuda::CudaDevice;
use crate::cuda::driver::Entered;
use crate::cuda::full_buckets::is_sharded;
use crate::cuda::gpu_memory::{Reader, address, bytes_of, fetch, write_progress};
use crate::cuda::tile_tables::MovingTiles;
use crate::cuda::timing::Timing;
use crate::device::{Blueprint, Claimed, Device, Executor};
use crate::error::{Error, Result};
use crate::handle::{EventHandle, Place};
use crate::host::memories::Memories;
use crate::launch::{
    Assignment, BorrowedPieces, Kind, Launch, Piece, Progress, Settings, refuse_other_places, without_bucket,
};
use crate::layout::Plan;
use crate::op::{Interval, Memory, Op, Span, Stream, Ticket, TimedOp, Words};

impl CudaDevice {
    /// Runs `work`, a blocking copy, after the work that is on the trainer's stream. Returns an error in a capture,
    /// because a graph cannot contain a blocking copy.
    fn guarded_copy<T>(&mut self, what: &str, work: impl FnOnce(&mut CudaDevice) -> Result<T>) -> Result<T> {
        if self.is_capturing {
            return Err(Error::order(what, "a graph cannot hold it", "use addresses in a capture"));
        }
        self.guarded(what, |device| {
            device.block_on_compute()?;
            work(device)
        })
    }

    /// Blocks until the trainer's stream has run all its work.
    fn block_on_compute(&self) -> Result<()> {
        self.block_on(self.streams.here(Stream::Compute)?)
    }

    fn block_on_all(&self) -> Result<()> {
        self.streams.all().try_for_each(|stream| self.block_on(self.streams.here(stream)?))
    }

    /// Waits for all streams and returns the measured times.
    fn take_times<T>(&mut self, take: impl FnOnce(&mut Timing) -> Result<Vec<T>>) -> Result<Vec<T>> {
        self.guarded("the times of ops", |device| {
            device.block_on_all()?;
            device.timing.as_mut().map_or_else(|| Ok(Vec::new()), take)
        })
    }

    /// Reads or writes the host's part of the memory, after the work that is on the trainer's stream.
    fn on_hosts<T>(&mut self, what: &str, work: impl FnOnce(&Memories) -> T) -> Result<T> {
        self.guarded_copy(what, |device| {
            device.notice_host();
            match (&*device.host, &device.failed) {
                (Some(host), None) => Ok(work(host.memories())),
                (_, Some(failed)) => Err(failed.clone()),
                (None, None) => {
                    Err(Error::order(what, "the GPU has no host beside it", "build it with offload"))
                }
            }
        })
    }

    fn fetch<T: Copy>(&mut self, at: *const T) -> Result<T> {
        // SAFETY: this is an address in this device's control memory, which has plain numbers. By `Claimed`, nothing
        // writes it now.
        self.guarded_copy("a copy to the host", |device| unsafe {
            fetch(&*device.cuda.driver, at, device.cuda.compute)
        })
    }
}

impl Executor for CudaDevice {
    const TRAINER_IS_A_STREAM: bool = true;

    type Sum = EventHandle;

    fn place(&self) -> Place {
        Place::Cuda(self.cuda.driver.ordinal())
    }

    fn agree(&self, number: u64) -> Result<()> {
        self.comms.agree(number)
    }

    /// After a failure, a bucket that was being unsharded may have no memory. The bucket's address is then null, and no
    /// code uses the address.
    fn resolve(&self, span: Span) -> *mut u8 {
        match self.engine.memory.find(span, Reader::Trainer) {
            None if self.failed.is_some() => std::ptr::null_mut(),
            address => address.unwrap_or_else(|| panic!("{span:?} is out of bounds")),
        }
    }

    fn sizes(&self) -> Vec<(Memory, u64)> {
        let sizes = self.engine.memory.regions.sizes();
        let of_whole = |memory| self.engine.memory.unsharded.bytes_with(memory, &self.plan);
        let size =
            |(memory, bytes)| (memory, if is_sharded(memory, &self.plan) { of_whole(memory) } else { bytes });
        sizes.map(size).collect()
    }

    fn write_settings(&mut self, settings: &Settings, _: Claimed) {
        self.engine.settings.set(settings);
    }

    fn write_progress(&mut self, record: usize, progress: Progress, _: Claimed) -> Result<()> {
        if self.host.is_some() {
            // SAFETY: by `Claimed`, nothing runs on the host's memory now.
            return self.on_hosts("a write", |host| unsafe { host.write_progress(record, progress) });
        }
        let at = self.engine.memory.regions.records().wrapping_add(record);
        // SAFETY: this is a record of this device. By `Claimed`, nothing else touches it now.
        self.guarded_copy("a copy to the GPU", |device| unsafe {
            write_progress(&*device.cuda.driver, at, progress, device.cuda.compute)
        })
    }

    fn read_progress(&mut self, record: usize, _: Claimed) -> Result<Progress> {
        if self.host.is_some() {
            // SAFETY: by `Claimed`, nothing runs on the host's memory now.
            return self.on_hosts("a read", |host| unsafe { Progress::of(&host.read_record(record)) });
        }
        let at = self.engine.memory.regions.records().wrapping_add(record);
        Ok(Progress::of(&self.fetch(at.cast_const())?))
    }

    fn read_control(&mut self, _: Claimed) -> Result<InstepControl> {
        if self.host.is_some() {
            // SAFETY: by `Claimed`, nothing runs on the host's memory now.
            return self.on_hosts("a read", |host| unsafe { host.read_control() });
        }
        self.fetch(self.engine.memory.regions.control().cast_const())
    }

    fn latest(&self) -> Option<InstepStatus> {
        self.host.as_ref().map_or_else(|| self.status.latest(), |host| host.memories().latest())
    }

    fn read(&mut self, span: Span, into: &mut [u8], _: Claimed) -> Result<()> {
        debug_assert_eq!(span.bytes(), into.len() as u64);
        if span.memory.is_offloaded(&self.plan) {
            // SAFETY: by `Claimed`, nothing runs on the host's memory now.
            return self.on_hosts("a read", |host| unsafe { host.read(span, into) });
        }
        let from = address(self.resolve(span));
        // SAFETY: the span is in bounds by `resolve`. By `Claimed`, nothing writes it now.
        self.guarded_copy("a copy to the host", |device| unsafe {
            device.cuda.driver.download(into, from, device.cuda.compute)
        })
    }

    fn write(&mut self, span: Span, from: &[u8], _: Claimed) -> Result<()> {
        debug_assert_eq!(span.bytes(), from.len() as u64);
        if span.memory.is_offloaded(&self.plan) {
            // SAFETY: by `Claimed`, nothing runs on the host's memory now.
            return self.on_hosts("a write", |host| unsafe { host.write(span, from) });
        }
        let to = address(self.resolve(span));
        self.guarded_copy("a copy to the GPU", |device| {
            let (driver, compute) = (&device.cuda.driver, device.cuda.compute);
            // SAFETY: the span is in bounds by `resolve`. By `Claimed`, nothing else touches it now.
            unsafe { driver.upload(to, from, compute)? };
            let Some(part) = device.engine.memory.unsharded.also_in_shard(span) else { return Ok(()) };
            let [start, end] = [part.start, part.end].map(|at| (at - span.start) as usize);
            let shard = address(device.engine.memory.regions.resolve(part));
            // SAFETY: this is a part of that span, in bounds by `resolve`. By `Claimed`, nothing else touches it now.
            unsafe { driver.upload(shard, &from[start..end], compute) }
        })
    }

    fn rebind(&mut self, pieces: BorrowedPieces, _: Claimed) -> Result<()> {
        self.take_addresses(pieces)
    }

    fn rebuilt(
        &mut self,
        plan: &Arc<Plan>,
        assignment: &Arc<Assignment>,
        borrowed: Option<BorrowedPieces>,
        words: &Arc<Words>,
        claimed: Claimed,
    ) -> Result<Self> {
        let control = without_bucket(self.read_control(claimed)?);
        let reached = self.refuse_unreached(borrowed.iter().flat_map(BorrowedPieces::iter));
        let (plan, assignment) = (Arc::clone(plan), Arc::clone(assignment));
        let (comms, timed) = (self.comms.with_words(words), self.timing.is_some());
        let blueprint = Blueprint { plan, assignment, comms: comms.clone(), borrowed, timed };
        // The stepper refuses to rebuild an offloaded plan.
        let built = reached.and_then(|()| CudaDevice::new(self.cuda.clone(), blueprint, None));
        // A rank that has failed takes part too, with a different number. The other ranks would otherwise wait for it.
        let agreed = comms.agree(if built.is_ok() { words.fixed() } else { !words.fixed() });
        let mut device = built?;
        agreed?;
        device.engine.settings.begun = self.engine.settings.begun;
        let at = address(device.engine.memory.regions.control());
        // SAFETY: this is the new device's control block, and nothing has been submitted to that device.
        device.guarded_copy("a copy to the GPU", |device| unsafe {
            device.cuda.driver.upload(at, bytes_of(&control), device.cuda.compute)
        })?;
        Ok(device)
    }

    fn take_timed_ops(&mut self) -> Result<Vec<TimedOp>> {
        self.take_times(Timing::take_timed_ops)
    }

    fn take_stalls(&mut self) -> Result<Vec<Interval>> {
        self.take_times(Timing::take_stalls)
    }
}

impl Device for CudaDevice {
    fn submit(&mut self, ops: &[Op], sum: Option<EventHandle>) {
        self.run_all(ops, sum);
    }

    fn wait(&mut self, ticket: Ticket) -> Result<()> {
        self.order_compute(ticket)
    }

    fn synchronize(&mut self) -> Result<()> {
        self.guarded("a wait for the GPU", |device| device.block_on_compute())
    }

    fn end(&mut self) -> Result<()> {
        self.guarded("the end", |device| device.block_on_all())
    }

    fn now_ns(&self) -> u64 {
        // 2^64 ns are 584 years.
        self.origin.elapsed().as_nanos() as u64
    }
}

impl CudaDevice {
    pub(super) fn take_addresses(&mut self, pieces: BorrowedPieces) -> Result<()> {
        let regions = &self.engine.memory.regions;
        let mut moved: Vec<&Piece> = regions.moved(Memory::Params, &pieces.params).collect();
        let moves_params = !moved.is_empty();
        moved.extend(regions.moved(Memory::Grads, &pieces.grads));
        if moved.is_empty() {
            return Ok(());
        }
        self.refuse_unreached(moved)?;
        let moves_tiles = moves_params && self.host.is_none();
        // This comes before any change, because it may fail, and because it must compute the current contents of the
        // tables.
        if moves_tiles && self.moving.is_none() {
            *self.moving = Some(self.moving_tiles()?);
        }
        self.guarded("new addresses", |device| {
            device.bindings += 1;
            device.engine.memory.regions.rebind(pieces);
            let (plan, regions) = (&device.plan, &device.engine.memory.regions);
            for (kind, launches) in [(Kind::Norm, &mut device.norms), (Kind::Step, &mut device.steps)] {
                launches.iter_mut().flatten().for_each(|launch| launch.rebind(kind, plan, regions));
            }
            let stream = device.streams.stream(Stream::Optim);
            let mut moving = device.moving.iter_mut().filter(|_| moves_tiles);
            moving.try_for_each(|moving| moving.follow(&device.steps, (plan, regions), stream))
        })
    }

    /// Refuses tensors that begin or end outside this GPU's memory.
    pub(super) fn refuse_unreached<'a>(&self, pieces: impl IntoIterator<Item = &'a Piece>) -> Result<()> {
        let _entered = Entered::new(&*self.cuda.driver)?;
        let place = Place::Cuda(self.cuda.driver.ordinal());
        refuse_other_places(pieces, place, |address| self.cuda.driver.inspect_memory(address))
    }

    /// Computes the tiles of all steps again. Until a parameter moves, only the GPU has the tiles.
    fn moving_tiles(&self) -> Result<MovingTiles> {
        let _entered = Entered::new(&*self.cuda.driver)?;
        let (plan, regions) = (&self.plan, &self.engine.memory.regions);
        let buckets = 0..plan.buckets().len() as u32;
        let launches =
            buckets.flat_map(|bucket| Launch::all(Kind::Step, bucket, plan, regions, &self.assignment));
        MovingTiles::new(&self.cuda.driver, launches.map(|launch| launch.tiles).collect())
    }
}
