//! `--offload=torch`: foresees training by `instep.torch.offload`, whose order is not a schedule's but that of its threads.
//!
//! Buckets, bytes and order are those of `python/instep/torch/` (`offload.py`, `_offload_engine.py`, `_offload_ring.py`).
//! `cli/tests/offload_plans.json` holds the bytes of both sides; `python/benches/offload.py --plan` compares times.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;

use instep::collective::CollectiveKind;
use instep::op::Memory;
use instep::{Layout, OffloadPolicy, Precision, Stepper, Unused};
use serde::Serialize;

use super::model::Model;
use super::report::{Held, mebibytes, milliseconds};
use super::shards::Shards;
use super::speeds::bus_bytes;
use super::{Arguments, PASSES, Sharing};
use crate::Failure;
use crate::replay::refused;

/// Bytes at which tensors start in page-locked memory.
const ALIGNMENT: u64 = 64;

/// Parameters that go down, are stepped and come up together.
#[derive(Default)]
pub(super) struct Bucket {
    /// Places in the layout, in the order in which backward has their gradients.
    pub(super) params: Vec<usize>,
    pub(super) param_bytes: u64,
    pub(super) gradient_bytes: u64,
    pub(super) sum_ns: u64,
    pub(super) down_ns: u64,
    norm_ns: u64,
    step_ns: u64,
    up_ns: u64,
    /// What makes a unit of shards whole: copies up and an all-gather.
    pub(super) gather_ns: u64,
}

/// The plan of one rank.
#[derive(Serialize)]
pub(super) struct Plan {
    world_size: u32,
    parameters: usize,
    elements: u64,
    buckets: usize,
    optimizer: &'static str,
    /// On the host, by kind.
    memory: Vec<Held>,
    /// Mirrors, the ring and a loss scale: what `page_locked_bytes()` returns.
    page_locked_bytes: u64,
    host_bytes: u64,
    pass_ns: u64,
    /// The part of it that forward and backward do not take.
    blocked_ns: u64,
    /// What the thread of the steps does in a pass.
    optimizer_busy_ns: u64,
}

impl Plan {
    pub(super) fn new(arguments: &Arguments, model: &Model) -> Result<Plan, Failure> {
        let decides = arguments.max_norm.is_some() || arguments.grad_scaler;
        let lengths: Vec<u64> = model.lengths().collect();
        let shards = match arguments.strategy {
            Sharing::Fsdp => Some(Shards::new(arguments, model)?),
            _ => None,
        };
        let (states, mut buckets, stepped) = match &shards {
            Some(shards) => (shards.states(model)?, shards.cut(arguments, model), shards.lengths()),
            None => {
                let states = states_of(model, &model.layout, model.precision)?;
                (states, cut(arguments, model, &lengths), lengths.clone())
            }
        };
        let kept: u64 = states.iter().map(|held| held.bytes).sum();
        let kept = kept as f64 / stepped.iter().sum::<u64>().max(1) as f64;
        buckets.iter_mut().for_each(|bucket| bucket.time(arguments, model, &stepped, kept));
        let gradients = || buckets.iter().map(|bucket| bucket.gradient_bytes);
        let most = gradients().max().unwrap_or_default();
        let ring = match arguments.ring_mib {
            Some(mebibytes) if !decides => mebibytes << 20,
            _ => gradients().sum(),
        };
        if ring < most {
            let wrong = format_args!("the largest bucket has {most} bytes");
            return Err(Failure::config(
                format_args!("--ring-mib {}", ring >> 20),
                wrong,
                "give at least that",
            ));
        }
        // FSDP's copies of gradients are page-locked if no hook takes them.
        let (params, of_ring, of_fsdp) = match shards {
            None => ("mirrors of parameters", ring, 0),
            Some(_) => ("shards of parameters", 0, gradients().sum()),
        };
        let page_locked = [
            (params, buckets.iter().map(|bucket| bucket.param_bytes).sum()),
            ("ring of gradients", of_ring),
            ("loss scale", if arguments.grad_scaler { ALIGNMENT } else { 0 }),
        ];
        let page_locked_bytes = page_locked.iter().map(|(_, bytes)| bytes).sum();
        let held = page_locked.into_iter().chain([("gradients", of_fsdp)]).filter(|(_, bytes)| *bytes > 0);
        let memory: Vec<Held> = held.map(|(what, bytes)| Held::on_host(what, bytes)).chain(states).collect();
        let run = Run::new(&buckets, decides, ring);
        let (pass_ns, compute_ns, optimizer_busy_ns) = match &shards {
            Some(shards) => shards.train(run, arguments, model),
            None => run.train(arguments, &lengths),
        };
        Ok(Plan {
            world_size: arguments.world_size,
            parameters: lengths.len(),
            elements: lengths.iter().sum(),
            buckets: buckets.len(),
            optimizer: model.name,
            page_locked_bytes,
            host_bytes: memory.iter().map(|held| held.bytes).sum(),
            memory,
            pass_ns,
            blocked_ns: pass_ns - compute_ns,
            optimizer_busy_ns,
        })
    }
}

/// Bytes of states and masters, which lie in one run each, every parameter at a multiple of 256 elements.
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

impl Bucket {
    /// Sets what its norm and its step take. `kept` are the bytes of states for each element.
    fn time(&mut self, arguments: &Arguments, model: &Model, lengths: &[u64], kept: f64) {
        let elements = self.params.iter().filter_map(|place| lengths.get(*place)).sum::<u64>() as f64;
        let of = |bytes: u64| elements * bytes as f64;
        let (params, grads) = (of(model.precision.param.bytes()), of(model.precision.grad.bytes()));
        let speed = arguments.speeds.host_memory;
        self.norm_ns = (grads / speed) as u64;
        self.step_ns = ((grads + 2.0 * params + 2.0 * kept * elements) / speed) as u64;
    }
}

/// Cuts parameters into buckets, from the last one back.
fn cut(arguments: &Arguments, model: &Model, lengths: &[u64]) -> Vec<Bucket> {
    let cap = arguments.bucket_cap_mib << 20;
    let (of_param, of_grad) = (model.precision.param.bytes(), model.precision.grad.bytes());
    let (mut buckets, mut size) = (Vec::<Bucket>::new(), cap);
    for (place, len) in lengths.iter().enumerate().rev() {
        if size >= cap {
            buckets.push(Bucket::default());
            size = 0;
        }
        let Some(bucket) = buckets.last_mut() else { break };
        bucket.params.push(place);
        bucket.param_bytes += (len * of_param).next_multiple_of(ALIGNMENT);
        bucket.gradient_bytes += (len * of_grad).next_multiple_of(ALIGNMENT);
        size += len * of_param;
    }
    let speeds = &arguments.speeds;
    for bucket in &mut buckets {
        let elements = bucket.params.iter().filter_map(|place| lengths.get(*place)).sum::<u64>() as f64;
        let (params, grads) = (elements * of_param as f64, elements * of_grad as f64);
        let copy_ns = |bytes: f64| (1e3 * speeds.launch + bytes / speeds.host_link) as u64;
        if arguments.world_size > 1 {
            let sent = bus_bytes(CollectiveKind::AllReduce, grads as u64, arguments.world_size);
            bucket.sum_ns = (1e3 * speeds.latency + sent / speeds.bus) as u64;
        }
        bucket.down_ns = copy_ns(grads);
        bucket.up_ns = copy_ns(params);
    }
    buckets
}

/// A task of the thread that steps, and when it was given.
pub(super) enum Task {
    /// Waits for the copy of a bucket; then adds its norm, or lets it be stepped.
    Arrival(usize),
    /// Steps one of the buckets that may be, after those that were sent meanwhile have come.
    Next,
    /// Decides, and steps all.
    Decide,
}

/// A run: when each queue is free, and what the thread that steps has to do. All times are in nanoseconds.
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
    /// What may be stepped. The last one is stepped first: the next forward pass asks for it first.
    ready: BTreeSet<usize>,
    copied: Vec<u64>,
    /// By bucket, when its last upload ends, once that is foreseen.
    uploaded: Vec<Option<u64>>,
    /// Buckets whose place in the ring is given back, and when.
    freed: VecDeque<(u64, usize)>,
}

impl<'a> Run<'a> {
    fn new(buckets: &'a [Bucket], decides: bool, ring_bytes: u64) -> Run<'a> {
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

    /// Foresees passes. Returns what the last one takes, what forward and backward take of that, and the work of its steps.
    fn train(mut self, arguments: &Arguments, lengths: &[u64]) -> (u64, u64, u64) {
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

    /// When a bucket's parameters have come up, or its shards are stepped.
    pub(super) fn up(&mut self, bucket: usize) -> u64 {
        loop {
            match self.uploaded[bucket] {
                Some(uploaded) => return uploaded,
                None => self.work(),
            }
        }
    }

    /// Sends a bucket down that is complete `now`. Returns when backward goes on; a sum over ranks does not stop it.
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

    /// Sums a unit of shards and copies it down, both of which backward waits for, and sends it. Returns when it goes on.
    pub(super) fn hand_over(&mut self, index: usize, now: u64) -> u64 {
        let Bucket { sum_ns, down_ns, .. } = self.buckets[index];
        self.copied[index] = now + sum_ns + down_ns;
        self.uploaded[index] = None;
        self.give(self.copied[index], Task::Arrival(index));
        self.copied[index]
    }

    /// When all steps have ended.
    pub(super) fn finish(&mut self) -> u64 {
        (0..self.buckets.len()).map(|bucket| self.up(bucket)).max().unwrap_or_default()
    }

    /// When the ring has room for a bucket.
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

    /// Gives the thread that steps a task. Tasks run in the order in which they were given.
    pub(super) fn give(&mut self, at: u64, task: Task) {
        let later = self.tasks.partition_point(|(given, _)| *given <= at);
        self.tasks.insert(later, (at, task));
    }

    /// Runs the next task of the thread that steps.
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

/// The ring of page-locked memory: runs of bytes that are given back in any order, and are free in the order of taking.
struct Ring {
    size: u64,
    /// Start, end, bucket, and whether it was given back.
    taken: VecDeque<(u64, u64, usize, bool)>,
}

impl Ring {
    /// Takes a run for a bucket, if there is room.
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

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Plan { parameters, elements, buckets, optimizer, world_size, .. } = self;
        writeln!(
            f,
            "{parameters} parameters of {elements} elements in {buckets} buckets, {optimizer}, one rank of {world_size}\n"
        )?;
        writeln!(f, "{:<24}{:>12}", "on the host", "MiB")?;
        for Held { what, bytes, .. } in &self.memory {
            writeln!(f, "  {what:<22}{:>12.2}", mebibytes(*bytes))?;
        }
        writeln!(f, "  {:<22}{:>12.2}", "all", mebibytes(self.host_bytes))?;
        writeln!(f, "  {:<22}{:>12.2}\n", "page-locked", mebibytes(self.page_locked_bytes))?;
        writeln!(f, "one pass, as foreseen          {:>12.3} ms", milliseconds(self.pass_ns))?;
        writeln!(f, "  the model waits              {:>12.3} ms", milliseconds(self.blocked_ns))?;
        writeln!(f, "  steps and norms run          {:>12.3} ms", milliseconds(self.optimizer_busy_ns))
    }
}
