//! All state of the driver: one value, under one lock.
//!
//! Other files add the calls on its objects. It is made by `cuInit` and never dropped.

use std::collections::BTreeMap;

use crate::handles::Table;
use crate::header::cudaError_enum as Code;
use crate::heap::Heap;
use crate::objects::{Capture, Context, Event, Executable, Function, Graph, Module, Pools, Stream};
use crate::queue::Queue;
use crate::random::Random;
use crate::settings::{Plant, Settings};

pub(crate) struct Gpu {
    pub(crate) settings: Settings,
    pub(crate) random: Random,
    pub(crate) queue: Queue,
    pub(crate) heap: Heap,
    pub(crate) contexts: Table<Context>,
    pub(crate) streams: Table<Stream>,
    pub(crate) events: Table<Event>,
    pub(crate) modules: Table<Module>,
    pub(crate) functions: Table<Function>,
    pub(crate) graphs: Table<Graph>,
    pub(crate) executables: Table<Executable>,
    pub(crate) captures: Table<Capture>,
    pub(crate) pools: Pools,
    /// The primary context of each device.
    pub(crate) primaries: BTreeMap<i32, usize>,
    /// An error of work, which every later call returns.
    pub(crate) failed: Option<Code>,
    /// How often each call that may fail on request was made.
    counts: BTreeMap<String, u64>,
    pub(crate) launches: u64,
    /// For each order of another library's work, the position of the last work.
    pub(crate) orders: BTreeMap<u64, (usize, u64)>,
}

impl Gpu {
    pub(crate) fn new(settings: Settings) -> Gpu {
        Gpu {
            random: Random::new(settings.seed),
            settings,
            queue: Queue::default(),
            heap: Heap::new(),
            contexts: Table::new("context"),
            streams: Table::new("stream"),
            events: Table::new("event"),
            modules: Table::new("module"),
            functions: Table::new("function"),
            graphs: Table::new("graph"),
            executables: Table::new("executable graph"),
            captures: Table::new("capture"),
            pools: Pools::new(),
            primaries: BTreeMap::new(),
            failed: None,
            counts: BTreeMap::new(),
            launches: 0,
            orders: BTreeMap::new(),
        }
    }

    /// Counts a call, and returns the code with which it must fail, if the settings say so.
    pub(crate) fn injected(&mut self, call: &str) -> Option<u32> {
        let call = call.split("_v").next().unwrap_or(call);
        if self.settings.failures.iter().all(|failure| failure.call != call) {
            return None;
        }
        let count = self.counts.entry(call.to_owned()).or_default();
        *count += 1;
        let now = *count;
        let hit = self.settings.failures.iter().find(|failure| failure.call == call && failure.nth == now);
        hit.map(|failure| failure.code)
    }

    /// Counts a call into which a mistake may be planted, and returns whether this call gets it.
    pub(crate) fn planted(&mut self, plant: Plant) -> bool {
        if self.settings.plants.iter().all(|(known, _)| *known != plant) {
            return false;
        }
        let count = self.counts.entry(format!("{plant:?}")).or_default();
        *count += 1;
        self.settings.plants.contains(&(plant, *count))
    }

    /// Returns the live objects that belong to the program, one line each.
    pub(crate) fn leaks(&self) -> Vec<String> {
        let handles = |kind: &str, count: usize| (count > 0).then(|| format!("{count} {kind}"));
        let open_captures = self.captures.iter().filter(|(_, capture)| !capture.has_ended());
        let own_streams = self.streams.iter().filter(|(_, stream)| stream.made_by_the_program).count();
        let mut found: Vec<String> = [
            handles("streams", own_streams),
            handles("events", self.events.len()),
            handles("modules", self.modules.len()),
            handles("graphs", self.graphs.len() + self.executables.len()),
            handles("captures that were not ended", open_captures.count()),
            handles("memory pools", self.pools.len()),
        ]
        .into_iter()
        .flatten()
        .collect();
        found.extend(self.heap.alive().map(|memory| memory.describe()));
        found
    }
}
