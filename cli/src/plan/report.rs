//! The contents of a plan: bytes of memory, bytes sent, ops and times of one pass.
//!
//! The reported pass lasts from the beginning of one pass to the beginning of the next. This interval contains a
//! backward, and then the forward of the next pass. With several micro-batches, it contains the backwards of all
//! micro-batches and the forwards between them, and then the first forward of the next pass.

use std::collections::BTreeMap;
use std::fmt;

use instep::Foresight;
use instep::Recording;
use instep::op::{Action, Group, Interval, Memory, Stream};
use instep::timeline::exposure;
use serde::Serialize;

use super::model::Model;
use super::speeds::{Ranks, bus_bytes};
use super::trainer::Peaks;

/// The plan of one rank.
#[derive(Serialize)]
pub(super) struct Report {
    world_size: u32,
    /// The number of ranks in a group that shards tensors; 1 without shards.
    shard_size: u32,
    parameters: usize,
    elements: u64,
    buckets: usize,
    optimizer: &'static str,
    /// The peak number of bytes of each kind of tensor, including padding.
    memory: Vec<Held>,
    memory_bytes: u64,
    /// The part of `memory_bytes` that is in the host's memory; 0 without offload.
    host_bytes: u64,
    /// The ops of one pass by kind, in order of their streams.
    work: Vec<Work>,
    /// Bytes sent over each link of a ring in one pass.
    bus_bytes: u64,
    /// The part of `bus_bytes` that is sent by collectives among all ranks or among replicas. Only these bytes can
    /// cross from one shard group to another.
    bus_bytes_between_groups: u64,
    pass_ns: u64,
    /// The part of the pass in which the trainer waited.
    blocked_ns: u64,
    optimizer_busy_ns: u64,
    optimizer_exposed_ns: u64,
}

#[derive(Serialize)]
pub(super) struct Held {
    pub(super) what: String,
    place: Place,
    pub(super) bytes: u64,
}

impl Held {
    pub(super) fn on_host(what: &str, bytes: u64) -> Held {
        Held { what: what.into(), place: Place::Host, bytes }
    }
}

/// The memory in which the tensors of one kind are stored. With offload, some kinds are on the host.
#[derive(Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Place {
    Device,
    Host,
}

#[derive(Serialize)]
struct Work {
    stream: String,
    what: String,
    count: u64,
    ns: u64,
}

impl Report {
    pub(super) fn new(
        model: &Model,
        ranks: Ranks,
        (stepper, peaks): (&Foresight, &Peaks),
        run: &Recording,
        pass: Option<Interval>,
    ) -> Report {
        let window = pass.unwrap_or(Interval { start_ns: 0, end_ns: stepper.now_ns() });
        let inside = |list: &[Interval]| -> Vec<Interval> {
            list.iter().filter_map(|interval| interval.overlap(&window)).collect()
        };
        let mut work = BTreeMap::<(usize, String), (u64, u64)>::new();
        let (mut bus, mut between) = (0.0, 0.0);
        for ran in &run.ran {
            // A pass holds the ops that end in it.
            if ran.interval.end_ns <= window.start_ns || ran.interval.end_ns > window.end_ns {
                continue;
            }
            if let Action::Collective { kind, group, src, dst, .. } = ran.op.action {
                let sent = bus_bytes(kind, src.bytes().max(dst.bytes()), ranks.of(group));
                bus += sent;
                between += if group == Group::Shards { 0.0 } else { sent };
            }
            let (count, ns) = work.entry((ran.op.stream as usize, name(&ran.op.action))).or_default();
            (*count, *ns) = (*count + 1, *ns + ran.interval.ns());
        }
        let blocked = inside(&run.blocked);
        let busy: Vec<Interval> =
            run.ran.iter().filter(|ran| ran.op.stream == Stream::Optim).map(|ran| ran.interval).collect();
        let optimizer = exposure(&inside(&busy), &blocked);
        let states =
            model.layout.ids().next().and_then(|id| stepper.state_names(id).ok()).unwrap_or_default();
        let held = stepper
            .memory()
            .into_iter()
            .map(|(memory, now)| (memory, peaks.of(memory, now, stepper.plan(), &run.ran)));
        let held = held.filter(|(_, bytes)| *bytes > 0);
        let place =
            |memory: Memory| if memory.is_offloaded(stepper.plan()) { Place::Host } else { Place::Device };
        let held =
            held.map(|(memory, bytes)| Held { what: kind(memory, &states), place: place(memory), bytes });
        let memory: Vec<Held> = held.collect();
        let on_host = memory.iter().filter(|held| held.place == Place::Host);
        Report {
            world_size: ranks.world_size,
            shard_size: stepper.plan().shards().0,
            parameters: model.layout.ids().len(),
            elements: model.lengths().sum(),
            buckets: stepper.plan().buckets().len(),
            optimizer: model.name,
            host_bytes: on_host.map(|held| held.bytes).sum(),
            memory_bytes: memory.iter().map(|held| held.bytes).sum(),
            memory,
            work: work
                .into_iter()
                .map(|((stream, what), (count, ns))| {
                    let stream = format!("{:?}", Stream::ALL[stream]).to_lowercase();
                    Work { stream, what, count, ns }
                })
                .collect(),
            bus_bytes: bus as u64,
            bus_bytes_between_groups: between as u64,
            pass_ns: window.ns(),
            blocked_ns: blocked.iter().map(Interval::ns).sum(),
            optimizer_busy_ns: optimizer.busy_ns,
            optimizer_exposed_ns: optimizer.exposed_ns,
        }
    }
}

fn name(action: &Action) -> String {
    match action {
        Action::Control(_) => "control".into(),
        Action::Norm { .. } => "norm".into(),
        Action::Measure { .. } => "measure".into(),
        Action::Step { .. } => "step".into(),
        Action::Collective { group: Group::Replicas, .. } => "replicas' sum".into(),
        Action::Collective { kind, .. } => kind.to_string(),
        Action::Copy { .. } => "copy".into(),
        Action::Add { .. } => "add".into(),
        Action::Zero(_) => "zero".into(),
        _ => "other".into(),
    }
}

pub(super) fn kind(memory: Memory, states: &[std::borrow::Cow<'static, str>]) -> String {
    let state = |number: u8| {
        states.get(usize::from(number)).map_or_else(|| format!("state {number}"), |name| name.to_string())
    };
    match memory {
        Memory::Params => "parameters".into(),
        Memory::Grads => "gradients".into(),
        Memory::Control => "control".into(),
        Memory::Settings => "settings".into(),
        Memory::Master => "masters".into(),
        Memory::State(number) => state(number),
        Memory::Scales(number) => format!("scales of {}", state(number)),
        Memory::Copy => "copies".into(),
        Memory::Ema => "averages".into(),
        Memory::HostParams => "stepped parameters".into(),
        Memory::HostGrads => "summed gradients".into(),
        Memory::Sums => "sums of micro-batches".into(),
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { world_size, parameters, elements, buckets, optimizer, .. } = self;
        let plural = |count: usize| if count == 1 { "" } else { "s" };
        writeln!(
            f,
            "{parameters} parameter{} of {elements} elements in {buckets} bucket{}, {optimizer}, one rank of {world_size}\n",
            plural(*parameters),
            plural(*buckets),
        )?;
        writeln!(f, "{:<24}{:>12}", "held by this rank", "MiB")?;
        for Held { what, place, bytes } in &self.memory {
            let place = if *place == Place::Host { " on the host" } else { "" };
            writeln!(f, "  {what:<22}{:>12.2}{place}", mebibytes(*bytes))?;
        }
        if self.host_bytes > 0 {
            writeln!(f, "  {:<22}{:>12.2}", "all on the host", mebibytes(self.host_bytes))?;
        }
        writeln!(f, "  {:<22}{:>12.2}\n", "all", mebibytes(self.memory_bytes))?;
        writeln!(f, "{:<10}{:<14}{:>12}{:>12}", "stream", "in one pass", "count", "ms")?;
        for Work { stream, what, count, ns } in &self.work {
            writeln!(f, "{stream:<10}{what:<14}{count:>12}{:>12.3}", milliseconds(*ns))?;
        }
        writeln!(f, "\nsent over each link of a ring  {:>12.2} MiB", mebibytes(self.bus_bytes))?;
        if (2..*world_size).contains(&self.shard_size) {
            let between = mebibytes(self.bus_bytes_between_groups);
            writeln!(f, "  between groups of {:<4}        {between:>12.2} MiB", self.shard_size)?;
        }
        writeln!(f, "one pass, as foreseen          {:>12.3} ms", milliseconds(self.pass_ns))?;
        writeln!(f, "  the trainer waits            {:>12.3} ms", milliseconds(self.blocked_ns))?;
        writeln!(f, "  the optimizer works          {:>12.3} ms", milliseconds(self.optimizer_busy_ns))?;
        writeln!(f, "  of that, exposed             {:>12.3} ms", milliseconds(self.optimizer_exposed_ns))
    }
}

pub(super) fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

pub(super) fn milliseconds(ns: u64) -> f64 {
    ns as f64 / 1e6
}
