//! Steps of single buckets on the host, and loops that move as many bytes as these steps.
//!
//! A step is one call of [`BucketStep::step`], as in a user's program. The tensors of all steps have the layout of one
//! plan. This file only runs the steps, and the benches time them. A call with the wrong element type is refused, so no
//! safe call touches bytes outside the launcher's memory.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::{Arc, Barrier};
use std::thread;

use super::{constants, plan};
use crate::abi::{INSTEP_TILE_ELEMENTS, InstepStored};
use crate::bucket_step::{BucketStep, Lent, Scaling, StepTensors};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::host::Isa;
use crate::host::bucket_job::AHEAD_BYTES;
use crate::host::kernels::Kernels;
use crate::host::memories::Memories;
use crate::launch::Assignment;
use crate::layout::{Bucket, ForeignBucket, Layout, Master, Moments, Plan, Precision, Storage};
use crate::op::{Memory, Part, Span, step_bytes};
use crate::optim::Optimizer;
use crate::pool::Pool;

/// A layout's memory on the host, stepped bucket by bucket on the calling thread and a pool of threads.
pub struct Launcher {
    /// One step for each bucket of the plan.
    steps: Vec<BucketStep>,
    scaling: Scaling,
    memories: Arc<Memories>,
    plan: Arc<Plan>,
    kernels: Kernels,
    states: usize,
    parts: &'static [Part],
    threads: usize,
}

impl Launcher {
    /// Builds buckets of `cap_bytes`. Gradients are sums over `world_size` ranks.
    ///
    /// # Errors
    /// Errors as for `BucketStepBuilder::host`.
    pub fn new(
        layout: &Layout,
        optimizer: &dyn Optimizer,
        cap_bytes: u64,
        world_size: u32,
        storage: Storage,
        isa: Isa,
        threads: usize,
    ) -> Result<Launcher> {
        let plan = plan(layout, cap_bytes, world_size, storage)?;
        let (kernels, constants) = (Kernels::load(isa)?, constants(world_size));
        let assignment = Assignment::uniform(layout, &plan, constants, optimizer)?;
        let memories = Arc::new(Memories::new(&plan, &assignment, None, None)?);
        let (ids, pool) = (layout.ids().collect::<Vec<_>>(), Pool::with_threads(threads)?);
        let step = |bucket: &Bucket| {
            let described = ForeignBucket::new((bucket.params.end - bucket.params.start) as usize);
            let described = plan.segments_of(bucket).iter().fold(described, |described, segment| {
                described
                    .gradient(ids[segment.param as usize], (segment.start - bucket.params.start) as usize)
            });
            let builder = BucketStep::builder(layout, optimizer.as_rule().boxed()).bucket(described);
            let builder = builder.precision(storage.precision).isa(isa).pool(pool.clone());
            let builder = if storage.ema { builder.ema(constants.ema_decay) } else { builder };
            match storage.copy {
                Some(dtype) => builder.copy_params(dtype).host(),
                None => builder.host(),
            }
        };
        Ok(Launcher {
            steps: plan.buckets().iter().map(step).collect::<Result<_>>()?,
            scaling: Scaling::mean(world_size),
            states: assignment.state_count(),
            parts: Part::all(optimizer.as_rule().is_scaled()),
            memories,
            plan,
            kernels,
            threads,
        })
    }

    /// Returns the plan: buckets and offsets.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Returns a slice of the elements of `memory` in all buckets, padding included.
    ///
    /// # Panics
    /// Panics if the optimizer does not have this state, or if `memory` has no elements or elements other than f32.
    pub fn elements(&mut self, memory: Memory) -> &mut [f32] {
        let span = Span::elements(memory, &self.plan, 0, self.plan.arena_len());
        assert_eq!(span.bytes(), self.plan.arena_len() * 4, "{memory:?} is not f32");
        let first = self.memories.resolve(span).cast::<f32>();
        // SAFETY: `resolve` has checked the bounds, and the memory was zeroed when it was allocated. `&mut self`
        // excludes every launch.
        unsafe { std::slice::from_raw_parts_mut(first, self.plan.arena_len() as usize) }
    }

    /// Returns a slice of the bytes of `memory` in one bucket, padding included.
    ///
    /// # Panics
    /// Panics if the optimizer does not have this state, or if `memory` has no elements.
    pub fn bytes(&mut self, memory: Memory, bucket: usize) -> &mut [u8] {
        let bucket = &self.plan.buckets()[bucket];
        let span = Span::elements(memory, &self.plan, bucket.start, bucket.start + bucket.len);
        // SAFETY: `resolve` has checked the bounds, and the memory was zeroed when it was allocated. `&mut self`
        // excludes every launch.
        unsafe { std::slice::from_raw_parts_mut(self.memories.resolve(span), span.bytes() as usize) }
    }

    /// Sets each element of the gradients, or of the parameters and their masters. `value` returns the new value for an
    /// element's index in the arena.
    ///
    /// # Errors
    /// Returns `Config` for any other kind of tensor, because this call supports only parameters and gradients.
    pub fn fill(&mut self, memory: Memory, value: impl Fn(usize) -> f32) -> Result<()> {
        let precision = self.precision();
        let (dtype, master) = match memory {
            Memory::Grads => (precision.grad, Master::None),
            Memory::Params => (precision.param, precision.master),
            _ => {
                let wrong = "holds neither parameters nor gradients";
                return Err(Error::config("memory", format!("{memory:?}"), wrong, "write it with `bytes`"));
            }
        };
        let len = self.plan.arena_len();
        let at = |memory, first: u64| {
            let span = Span::elements(memory, &self.plan, first, len);
            self.memories.resolve(span).cast::<std::ffi::c_void>()
        };
        for first in (0..len).step_by(INSTEP_TILE_ELEMENTS as usize) {
            let count = (len - first).min(INSTEP_TILE_ELEMENTS.into());
            let values: Vec<f32> = (0..count).map(|k| value((first + k) as usize)).collect();
            let master_at =
                if master == Master::None { std::ptr::null_mut() } else { at(Memory::Master, first) };
            let mut stored = InstepStored {
                values: at(memory, first),
                second: if master == Master::F32 { std::ptr::null_mut() } else { master_at },
                count,
                format: dtype as u32,
                master_kind: master as u32,
                is_signed: 1,
                reserved: 0,
            };
            // SAFETY: each address is that of `count` elements in this launcher's memory, which only `&mut self`
            // reaches.
            unsafe {
                self.kernels.encode_at(values.as_ptr(), &stored);
                if master == Master::F32 {
                    (stored.values, stored.format) = (master_at, DType::F32 as u32);
                    self.kernels.encode_at(values.as_ptr(), &stored);
                }
            }
        }
        Ok(())
    }

    /// Returns the precision, which is the same in all buckets.
    fn precision(&self) -> Precision {
        self.plan.buckets()[0].storage.precision
    }

    /// Steps one bucket.
    ///
    /// # Errors
    /// Errors as for `BucketStep::step`. No error is possible today.
    pub fn step(&mut self, bucket: u32) -> Result<()> {
        let Bucket { params, .. } = &self.plan.buckets()[bucket as usize];
        let tensor = |memory| {
            let span = Span::elements(memory, &self.plan, params.start, params.end);
            // SAFETY: `resolve` returns the address of elements of the type that the step expects. They are
            // initialised, and only `&mut self` reaches them.
            unsafe { Lent::at(self.memories.resolve(span).cast()) }
        };
        let mut tensors = StepTensors::new(tensor(Memory::Params), tensor(Memory::Grads));
        Memory::of_tensors(&self.plan, self.states).for_each(|memory| tensors.put(memory, tensor(memory)));
        self.steps[bucket as usize].step(&tensors, self.scaling)
    }

    /// Returns the number of bytes that one step of a bucket reads and writes. The number is the sum over the memory
    /// accesses of the step's op, without control memory.
    pub fn step_bytes(&self, bucket: u32) -> u64 {
        step_bytes(&self.plan, self.states, self.parts, bucket)
    }

    /// Moves as many bytes as `rounds` steps of these buckets. The loop only multiplies each gradient by 0 and adds the
    /// product to the parameter and to each state, so finite values do not change. The loop has two variants, with and
    /// without prefetches. The faster variant is the upper limit for the speed of a step. Each thread moves its own
    /// contiguous part of each bucket. Each thread is started once for all rounds, so during the rounds a thread waits
    /// only for memory.
    ///
    /// # Errors
    /// Returns `Config` if parameters, gradients or states are not f32, because the loop reads and writes only f32.
    pub fn ceiling(&mut self, buckets: Range<usize>, rounds: usize, prefetches: bool) -> Result<()> {
        let precision = self.precision();
        let is_f32 =
            (precision.param, precision.grad, precision.moments) == (DType::F32, DType::F32, Moments::F32);
        if !is_f32 {
            let remedy = "time it on a launcher of Precision::F32";
            return Err(Error::config(
                "precision",
                format!("{precision:?}"),
                "the ceiling streams f32 alone",
                remedy,
            ));
        }
        let ahead_bytes = if prefetches { AHEAD_BYTES } else { 0 };
        let start = Barrier::new(self.threads);
        let this = &*self;
        thread::scope(|scope| {
            for part in 1..this.threads {
                let (start, buckets) = (&start, buckets.clone());
                scope.spawn(move || {
                    start.wait();
                    this.ceiling_part(buckets, rounds, part, ahead_bytes);
                });
            }
            start.wait();
            this.ceiling_part(buckets.clone(), rounds, 0, ahead_bytes);
        });
        Ok(())
    }

    fn ceiling_part(&self, buckets: Range<usize>, rounds: usize, part: usize, ahead_bytes: u64) {
        let states = (0..self.states).map(|k| Memory::State(k as u8));
        let memories = [Memory::Grads, Memory::Params].into_iter().chain(states);
        let whole =
            |memory| self.memories.resolve(Span::elements(memory, &self.plan, 0, self.plan.arena_len()));
        let arrays: Vec<*mut f32> = memories.map(|memory| whole(memory).cast()).collect();
        for _ in 0..rounds {
            for bucket in &self.plan.buckets()[buckets.clone()] {
                // Parts end at cache lines, so two threads never write the same line.
                let cut =
                    |part: usize| bucket.start + (bucket.len / 16) * part as u64 / self.threads as u64 * 16;
                // SAFETY: `ceiling` has checked that the elements are f32, and `resolve` that they lie in the memory.
                // Parts are disjoint. `ceiling` borrows the launcher mutably, so no step runs.
                unsafe { self.kernels.ceiling(&arrays, 0.0, cut(part)..cut(part + 1), ahead_bytes) }
            }
        }
    }
}
