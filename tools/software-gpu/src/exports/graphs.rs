//! Graphs that a capture has made.
//!
//! An executable graph keeps a copy of its work, so the graph may be destroyed first.

use std::ffi::c_ulonglong;

use super::{exported, handle, pointer, put};
use crate::header::{CUgraph, CUgraphExec, CUstream, cudaError_enum as Code};

exported! {
    call cuGraphInstantiateWithFlags(gpu, executable: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong) {
        if flags != 0 {
            return Err(Code::CUDA_ERROR_NOT_SUPPORTED);
        }
        let made = gpu.instantiate(handle(graph))?;
        put(executable, pointer(made))
    }

    call cuGraphDestroy(gpu, graph: CUgraph) { gpu.graphs.remove(handle(graph)).map(drop) }

    call cuGraphLaunch(gpu, executable: CUgraphExec, stream: CUstream) {
        gpu.launch_graph(handle(executable), handle(stream))
    }

    call cuGraphExecDestroy(gpu, executable: CUgraphExec) { gpu.executables.remove(handle(executable)).map(drop) }
}
