//! The work that a call enqueues, as a value that a graph can keep and launch again.
//!
//! It is plain data; `run.rs` runs it.

use std::sync::Arc;

use software_gpu_ptx::Kernel;

use crate::claims::Claim;
use crate::foreign::Foreign;

/// One piece of work.
#[derive(Clone)]
pub(crate) enum Work {
    /// No work: the position of an event, or of a wait.
    Marker,
    Copy {
        to: Side,
        from: Side,
        bytes: u64,
    },
    /// Repeats a pattern up to a number of bytes.
    Fill {
        to: u64,
        pattern: Vec<u8>,
        bytes: u64,
    },
    Kernel(Arc<Launch>),
    /// A function of the program, with its argument.
    Host {
        function: usize,
        data: usize,
    },
    /// Memory exists from here on.
    Allocated(u64),
    /// Memory is freed here.
    Freed(u64),
    /// Work of another library, such as a collective.
    Foreign(Arc<Foreign>),
    /// Work that may touch only the memory of a claim.
    Claimed(Arc<Claim>, Box<Work>),
}

/// One end of a copy.
#[derive(Clone)]
pub(crate) enum Side {
    /// Memory of this driver: on a GPU, or pinned.
    Known(u64),
    /// Pageable memory of the host, whose values the call has read.
    Staged(Arc<[u8]>),
    /// Pageable memory of the host; the call waits for the copy.
    Pageable(usize),
}

/// A kernel with its grid and its arguments.
pub(crate) struct Launch {
    pub(crate) kernel: Kernel,
    pub(crate) blocks: [u32; 3],
    pub(crate) threads: [u32; 3],
    pub(crate) shared_bytes: u32,
    pub(crate) arguments: Vec<u8>,
    /// Addresses of the module's variables.
    pub(crate) variables: Arc<[u64]>,
    /// Whether it never ends, because `INSTEP_GPU_HANG` says so.
    pub(crate) hangs: bool,
}
