//! Simulates training with `instep.torch.offload`: the buckets, the queues, and the stepping thread.
//!
//! The work has the same order as in `python/instep/torch/_offload_engine.py` and `_offload_ring.py`. The caller
//! divides the parameters into buckets.

use std::collections::{BTreeSet, VecDeque};

use instep::op::Memory;
use instep::{Layout, OffloadPolicy, Precision, Stepper, Unused};

use super::model::Model;
use super::report::Held;
use super::{Arguments, PASSES};
use crate::Failure;
use crate::replay::refused;

/// Parameters that are copied to the host, stepped and copied back together.
#[derive(Default)]
pub(super) struct Bucket {
    /// The parameters' indices in the layout, in the order in which backward makes the gradients.
    pub(super) params: Vec<usize>,
    pub(super) param_bytes: u64,
    pub(super) gradient_bytes: u64,
    pub(super) sum_ns: u64,
    pub(super) down_ns: u64,
    pub(super) norm_ns: u64,
    pub(super) step_ns: u64,
    pub(super) up_ns: u64,
    /// The time to upload the shards of a unit and to all-gather them.
    pub(super) gather_ns: u64,
}

impl Bucket {
    /// Sets the durations of the bucket's norm and step. `kept` is the number of bytes of states and masters per
    /// element.
    pub(super) fn time(&mut self, arguments: &Arguments, model: &Model, lengths: &[u64], kept: f64) {
        let elements = self.params.iter().filter_map(|place| lengths.get(*place)).sum::<u64>() as f64;
        let of = |bytes: u64| elements * bytes as f64;
        let (params, grads) = (of(model.precision.param.bytes()), of(model.precision.grad.bytes()));
        let speed = arguments.speeds.host_memory;
        self.norm_ns = (grads / speed) as u64;
        self.step_ns = ((grads + 2.0 * params + 2.0 * kept * elements) / speed) as u64;
    }
}

/// Returns the number of bytes of each state and of the masters. Each state is one contiguous array, in which every
/// parameter starts at a multiple of 256 elements.
pub(super) fn states_of(model: &Model, layout: &Layout, precision: Precision) -> Result<Vec<Held>, Failure> {
    let builder = Stepper::builder(layout, model.optimizer.clone()).precision(precision);
    let builder = builder.unused(Unused::StepZero);
    let stepper = builder.offload(OffloadPolicy::default()).forecast(0, 1, |_, _| 0).map_err(refused)?;
    let names = layout.ids().next().and_then(|id| stepper.state_names(id).ok()).unwrap_or_default();
    let kept = stepper.memory().into_iter().filter(|(memory, bytes)| {
        *bytes > 0 && matches!(memory, Memory::State(_) | Memory::Scales(_) | Memory::Master)
    });
    Ok(kept.map(|(memory, bytes)| Held::on_host(&super::report::kind(memory, &names), bytes)).collect())
}

/// A task of the stepping thread.
pub(super) enum Task {
    /// Waits for the copy of a bucket. Then adds the bucket's norm, or marks the bucket as ready to be stepped.
    Arrival(usize),
    /// Steps one ready bucket. Before this step, the arrivals of all buckets that have already been sent are processed.
    Next,
    /// Decides the clip coefficient and whether to skip the step, then steps all buckets.
    Decide,
}

/// A simulated training: the time at which each queue becomes free, and the tasks of the stepping thread. All times are
/// in nanoseconds.
pub(super) struct Run<'a> {
    pub(super) buckets: &'a [Bucket],
    pub(super) decides: bool,
    ring: Ring,
    sums_free: u64,
    downloads_free: u64,
    uploads_free: u64,
    worker_free: u64,
    pub(super) busy: u64,
    tasks: VecDeque<(u64, Task)>,
    /// The ready buckets. The bucket with the largest index is stepped first, because the next forward pass needs it
    /// first.
    ready: BTreeSet<usize>,
    copied: Vec<u64>,
    /// The predicted end of each bucket's last upload.
    uploaded: Vec<Option<u64>>,
    /// The time at which each stepped bucket frees its range of the ring, and the bucket's index.
    freed: VecDeque<(u64, usize)>,
}

impl<'a> Run<'a> {
    pub(super) fn new(buckets: &'a [Bucket], decides: bool, ring_bytes: u64) -> Run<'a> {
        let [sums_free, downloads_free, uploads_free, worker_free, busy] = [0; 5];
        Run {
            buckets,
            decides,
            ring: Ring { size: ring_bytes, taken: VecDeque::new() },
            sums_free,
            downloads_free,
            uploads_free,
            worker_free,
            busy,
            tasks: VecDeque::new(),
            ready: BTreeSet::new(),
            copied: vec![0; buckets.len()],
            uploaded: vec![Some(0); buckets.len()],
            freed: VecDeque::new(),
        }
    }

    /// Predicts passes. Returns the duration of the last pass, the duration of its forward and backward, and the total
    /// time of its steps.
    pub(super) fn train(mut self, arguments: &Arguments, lengths: &[u64]) -> (u64, u64, u64) {
        let speeds = &arguments.speeds;
        let mut bucket_of = vec![0; lengths.len()];
        for (index, bucket) in self.buckets.iter().enumerate() {
            bucket.params.iter().for_each(|place| bucket_of[*place] = index);
        }
        let (mut now, mut began, mut busy) = (0, 0, 0);
        for _ in 0..PASSES {
            (began, busy) = (now, self.busy);
            for micro_batch in 1..=arguments.micro_batches.get() {
                for (place, len) in lengths.iter().enumerate() {
                    now = now.max(self.up(bucket_of[place])) + speeds.compute_ns(2, *len);
                }
                for (index, bucket) in self.buckets.iter().enumerate() {
                    now +=
                        bucket.params.iter().map(|place| speeds.compute_ns(4, lengths[*place])).sum::<u64>();
                    if micro_batch == arguments.micro_batches.get() {
                        now = self.send(index, now, arguments.world_size == 1);
                    }
                }
            }
            now = now.max(self.sums_free);
            if self.decides {
                self.give(now, Task::Decide);
            }
        }
        let once: u64 =
            lengths.iter().map(|len| speeds.compute_ns(2, *len) + speeds.compute_ns(4, *len)).sum();
        (now - began, once * u64::from(arguments.micro_batches.get()), self.busy - busy)
    }

    /// Returns the time at which the upload of a bucket's parameters ends. For a unit of shards, returns the time at
    /// which the unit's step ends, because FSDP's upload counts as part of the gather.
    pub(super) fn up(&mut self, bucket: usize) -> u64 {
        loop {
            match self.uploaded[bucket] {
                Some(uploaded) => return uploaded,
                None => self.work(),
            }
        }
    }

    /// Sends a bucket to the host. The bucket is complete at time `now`. Returns the time at which backward continues.
    /// With several ranks, backward does not wait. With one rank, backward waits until the ring has room.
    fn send(&mut self, index: usize, now: u64, is_alone: bool) -> u64 {
        let Bucket { sum_ns, down_ns, gradient_bytes, .. } = self.buckets[index];
        self.sums_free = self.sums_free.max(now) + sum_ns;
        let sent = self.take(index, gradient_bytes, self.sums_free);
        self.sums_free = sent;
        self.downloads_free = self.downloads_free.max(sent) + down_ns;
        self.copied[index] = self.downloads_free;
        self.uploaded[index] = None;
        self.give(sent, Task::Arrival(index));
        if is_alone { sent } else { now }
    }

    /// Reduces a unit of shards, copies it to the host, and hands it over. Backward waits for the reduction and the
    /// copy. Returns the time at which backward continues.
    pub(super) fn hand_over(&mut self, index: usize, now: u64) -> u64 {
        let Bucket { sum_ns, down_ns, .. } = self.buckets[index];
        self.copied[index] = now + sum_ns + down_ns;
        self.uploaded[index] = None;
        self.give(self.copied[index], Task::Arrival(index));
        self.copied[index]
    }

    /// Returns the time at which all steps have ended.
    pub(super) fn finish(&mut self) -> u64 {
        (0..self.buckets.len()).map(|bucket| self.up(bucket)).max().unwrap_or_default()
    }

    /// Takes memory in the ring for a bucket. Returns the time at which the ring has room.
    fn take(&mut self, index: usize, bytes: u64, mut now: u64) -> u64 {
        loop {
            while self.tasks.front().is_some_and(|(given, _)| self.worker_free.max(*given) < now) {
                self.work();
            }
            while let Some((_, freed)) = self.freed.front().copied().filter(|(at, _)| *at <= now) {
                self.freed.pop_front();
                self.ring.give_back(freed);
            }
            if self.ring.take(index, bytes) {
                return now;
            }
            while self.freed.is_empty() && !self.tasks.is_empty() {
                self.work();
            }
            let Some((at, _)) = self.freed.front() else { return now };
            now = *at;
        }
    }

    /// Queues a task that the stepping thread may begin at time `at`. Tasks run in the order of these times.
    pub(super) fn give(&mut self, at: u64, task: Task) {
        let later = self.tasks.partition_point(|(given, _)| *given <= at);
        self.tasks.insert(later, (at, task));
    }

    /// Runs the stepping thread's next task.
    fn work(&mut self) {
        let Some((given, task)) = self.tasks.pop_front() else { return };
        self.worker_free = self.worker_free.max(given);
        match task {
            Task::Arrival(index) => {
                while self.copied[index] > self.worker_free && self.step_next() {}
                self.worker_free = self.worker_free.max(self.copied[index]);
                if self.decides {
                    self.spend(self.buckets[index].norm_ns);
                } else {
                    self.ready.insert(index);
                    self.give(self.worker_free, Task::Next);
                }
            }
            Task::Next => {
                let is_coming = |(given, task): &(u64, Task)| {
                    *given <= self.worker_free && matches!(task, Task::Arrival(_))
                };
                if self.tasks.iter().any(is_coming) {
                    self.give(self.worker_free, Task::Next);
                } else {
                    self.step_next();
                }
            }
            Task::Decide => (0..self.buckets.len()).rev().for_each(|index| self.step(index)),
        }
    }

    fn step_next(&mut self) -> bool {
        let next = self.ready.pop_last();
        next.into_iter().for_each(|index| self.step(index));
        next.is_some()
    }

    fn step(&mut self, index: usize) {
        self.spend(self.buckets[index].step_ns);
        self.uploads_free = self.uploads_free.max(self.worker_free) + self.buckets[index].up_ns;
        self.uploaded[index] = Some(self.uploads_free);
        self.freed.push_back((self.worker_free, index));
    }

    fn spend(&mut self, ns: u64) {
        self.worker_free += ns;
        self.busy += ns;
    }
}

/// The ring buffer of page-locked memory. Ranges of bytes are returned in any order, but become free in the order in
/// which they were taken.
struct Ring {
    size: u64,
    /// Start, end and bucket of each range, and whether the range was returned.
    taken: VecDeque<(u64, u64, usize, bool)>,
}

impl Ring {
    /// Takes a range for a bucket, if there is room.
    fn take(&mut self, bucket: usize, bytes: u64) -> bool {
        let start =
            match (self.taken.front(), self.taken.back()) {
                (Some((first, ..)), Some((start, last, ..))) if start >= first => {
                    if last + bytes <= self.size { Some(*last) } else { (bytes <= *first).then_some(0) }
                }
                (Some((first, ..)), Some((_, last, ..))) => (last + bytes <= *first).then_some(*last),
                _ => Some(0),
            };
        self.taken.extend(start.map(|start| (start, start + bytes, bucket, false)));
        start.is_some()
    }

    fn give_back(&mut self, bucket: usize) {
        self.taken.iter_mut().filter(|taken| taken.2 == bucket).for_each(|taken| taken.3 = true);
        while self.taken.front().is_some_and(|taken| taken.3) {
            self.taken.pop_front();
        }
    }
}
