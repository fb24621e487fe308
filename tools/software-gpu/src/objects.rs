//! The objects of handles: contexts, streams, events, modules, graphs, captures and pools.
//!
//! These are the rows of the tables in `gpu.rs`. The calls on them are in a file for each kind, above `gpu.rs`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::ThreadId;
use std::time::Instant;

use software_gpu_ptx as ptx;

use crate::claims::Claim;
use crate::codes::Answer;
use crate::handles::Table;
use crate::header::cudaError_enum as Code;
use crate::queue::Mark;
use crate::work::Work;

pub(crate) struct Context {
    pub(crate) device: i32,
    pub(crate) is_primary: bool,
    /// How often a primary context is retained.
    pub(crate) retained: u64,
    pub(crate) legacy: usize,
    pub(crate) per_thread: BTreeMap<usize, usize>,
}

/// The streams for which a stream waits at each call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Joins {
    /// The legacy default stream, which waits for all blocking streams.
    Legacy,
    /// A blocking stream, which waits for the legacy default stream.
    Blocking,
    /// A stream that waits for no other.
    Nothing,
}

pub(crate) struct Stream {
    pub(crate) context: usize,
    pub(crate) lane: usize,
    pub(crate) joins: Joins,
    /// The capture in which it takes part.
    pub(crate) capture: Option<usize>,
    /// Whether the program made the stream; otherwise a context made it.
    pub(crate) made_by_the_program: bool,
    /// The green context in which it was made; `context` is then the device's primary context.
    pub(crate) green: Option<usize>,
    /// The memory that its next work may touch, if the program says so.
    pub(crate) claim: Option<Arc<Claim>>,
}

/// The position or nodes of an event.
#[derive(Clone, Default)]
pub(crate) enum Recorded {
    #[default]
    Never,
    /// A position on a stream, with the time of the call.
    At(Mark, Instant),
    /// Nodes of a capture.
    Captured(usize, Vec<usize>),
}

pub(crate) struct Event {
    pub(crate) context: usize,
    pub(crate) is_timed: bool,
    pub(crate) recorded: Recorded,
}

pub(crate) struct Module {
    pub(crate) context: usize,
    pub(crate) image: Arc<ptx::Module>,
    pub(crate) variables: Arc<[u64]>,
    pub(crate) functions: Vec<usize>,
}

pub(crate) struct Function {
    pub(crate) context: usize,
    pub(crate) kernel: ptx::Kernel,
    pub(crate) variables: Arc<[u64]>,
}

/// One piece of work of a graph.
#[derive(Clone)]
pub(crate) struct Node {
    pub(crate) what: String,
    pub(crate) work: Work,
    /// The nodes before it.
    pub(crate) after: Vec<usize>,
    /// The stream on which it was captured, numbered among those of the capture.
    pub(crate) branch: usize,
}

pub(crate) struct Graph {
    pub(crate) nodes: Vec<Node>,
}

pub(crate) struct Executable {
    pub(crate) context: usize,
    pub(crate) nodes: Vec<Node>,
    /// The lane of each branch.
    pub(crate) lanes: Vec<usize>,
    /// The end of the last launch.
    pub(crate) last: Option<Mark>,
}

/// The other calls that a capture forbids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Unsafe calls of every thread.
    Global,
    /// Unsafe calls of the thread that began it.
    ThreadLocal,
    /// No calls.
    Relaxed,
}

impl Mode {
    /// Returns the mode with this number in `cuda.h`.
    pub(crate) fn of(number: u32) -> Answer<Mode> {
        [Mode::Global, Mode::ThreadLocal, Mode::Relaxed]
            .into_iter()
            .find(|mode| mode.number() == number)
            .ok_or(Code::CUDA_ERROR_INVALID_VALUE)
    }

    pub(crate) fn number(self) -> u32 {
        self as u32
    }
}

pub(crate) struct Capture {
    pub(crate) origin: usize,
    pub(crate) mode: Mode,
    pub(crate) thread: ThreadId,
    pub(crate) nodes: Vec<Node>,
    /// For each stream that takes part, the nodes before its next node.
    pub(crate) last: BTreeMap<usize, Vec<usize>>,
    /// The streams that have nodes, in the order of their first node.
    pub(crate) branches: Vec<usize>,
    pub(crate) invalid: Option<Code>,
}

impl Capture {
    /// Adds a node after the last ones of a stream.
    pub(crate) fn add(&mut self, stream: usize, what: &str, work: Work) {
        let known = self.branches.iter().position(|branch| *branch == stream);
        let branch = known.unwrap_or_else(|| {
            self.branches.push(stream);
            self.branches.len() - 1
        });
        let node = Node { what: what.to_owned(), work, after: self.last_of(stream), branch };
        self.nodes.push(node);
        self.last.insert(stream, vec![self.nodes.len() - 1]);
    }

    pub(crate) fn last_of(&self, stream: usize) -> Vec<usize> {
        self.last.get(&stream).cloned().unwrap_or_default()
    }

    /// Returns whether it was ended although streams that were not joined are still in it.
    pub(crate) fn has_ended(&self) -> bool {
        self.invalid == Some(Code::CUDA_ERROR_STREAM_CAPTURE_UNJOINED)
    }

    /// Returns whether every node comes before the end of the first stream.
    pub(crate) fn is_joined(&self) -> bool {
        let (mut reached, mut open) = (vec![false; self.nodes.len()], self.last_of(self.origin));
        while let Some(node) = open.pop() {
            if !std::mem::replace(&mut reached[node], true) {
                open.extend(&self.nodes[node].after);
            }
        }
        reached.iter().all(|reached| *reached)
    }
}

/// The memory of one pool, in bytes.
#[derive(Default)]
pub(crate) struct Pool {
    threshold: u64,
    pub(crate) in_use: u64,
    pub(crate) mapped: u64,
}

pub(crate) struct Pools {
    pub(crate) table: Table<Pool>,
    /// The pool that a context's calls use if they name none.
    usual: BTreeMap<usize, usize>,
    /// The pool of each allocation, by address.
    pub(crate) origins: BTreeMap<u64, usize>,
}

impl Pools {
    pub(crate) fn new() -> Pools {
        Pools { table: Table::new("memory pool"), usual: BTreeMap::new(), origins: BTreeMap::new() }
    }

    pub(crate) fn create(&mut self) -> usize {
        self.table.insert(Pool::default())
    }

    /// Destroys a pool; its memory may outlive it.
    pub(crate) fn destroy(&mut self, pool: usize) -> Answer<()> {
        self.table.remove(pool).map(drop)
    }

    pub(crate) fn set_threshold(&mut self, pool: usize, bytes: u64) -> Answer<()> {
        self.table.get(pool).map(|pool| pool.threshold = bytes)
    }

    pub(crate) fn usual(&mut self, context: usize) -> usize {
        *self.usual.entry(context).or_insert_with(|| self.table.insert(Pool::default()))
    }

    /// Returns the number of the program's own pools.
    pub(crate) fn len(&self) -> usize {
        self.table.len() - self.usual.len()
    }

    /// Returns a handle's number among the pools.
    pub(crate) fn number(&self, pool: usize) -> Option<usize> {
        self.table.number(pool)
    }

    pub(crate) fn free(&mut self, address: u64, bytes: u64) {
        let Some(origin) = self.origins.remove(&address) else { return };
        if self.table.peek(origin).is_some()
            && let Ok(pool) = self.table.get(origin)
        {
            pool.in_use -= bytes;
        }
    }

    pub(crate) fn trim(&mut self) {
        self.table.iter_mut().for_each(|pool| pool.mapped = pool.mapped.min(pool.in_use.max(pool.threshold)));
    }
}
