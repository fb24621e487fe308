//! Graphs: work with its order, made by a capture, launched as often as the program likes.
//!
//! Each branch of a graph is a lane, so branches that nothing joins run in any order. Two launches of one executable
//! graph never overlap.

use crate::codes::Answer;
use crate::gpu::Gpu;
use crate::header::cudaError_enum as Code;
use crate::objects::Executable;
use crate::queue::Mark;
use crate::work::Work;

impl Gpu {
    pub(crate) fn instantiate(&mut self, graph: usize) -> Answer<usize> {
        let context = self.current()?;
        let nodes = self.graphs.get(graph)?.nodes.clone();
        for node in &nodes {
            if let Work::Allocated(_) | Work::Freed(_) = node.work {
                // Nodes that allocate have rules of their own, which nothing here keeps yet.
                return Err(Code::CUDA_ERROR_NOT_SUPPORTED);
            }
        }
        let branches = nodes.iter().map(|node| node.branch + 1).max().unwrap_or(0);
        let lanes = (0..branches)
            .map(|branch| self.queue.open_lane(context, |lane| format!("graph branch {branch}, lane {lane}")))
            .collect();
        Ok(self.executables.insert(Executable { context, nodes, lanes, last: None }))
    }

    /// Enqueues all nodes after the work of a stream. Later work of the stream comes after all of them.
    pub(crate) fn launch_graph(&mut self, handle: usize, stream: usize) -> Answer<()> {
        let stream = self.stream(stream)?;
        let executable = self.executables.get(handle)?;
        let (nodes, lanes) = (executable.nodes.clone(), executable.lanes.clone());
        let (context, last) = (executable.context, executable.last.clone());
        if self.streams.get(stream)?.context != context {
            return Err(Code::CUDA_ERROR_INVALID_CONTEXT);
        }
        if self.streams.get(stream)?.capture.is_some() {
            // A graph as a node of a graph.
            return Err(Code::CUDA_ERROR_NOT_SUPPORTED);
        }
        let before: Vec<Mark> = last.into_iter().collect();
        let Some(begin) = self.enqueue(stream, "graph launch", Work::Marker, &before)? else { return Ok(()) };
        let mut marks: Vec<Mark> = Vec::new();
        for node in &nodes {
            let mut after: Vec<Mark> = node.after.iter().map(|k| marks[*k].clone()).collect();
            after.push(begin.clone());
            marks.push(self.queue.add(lanes[node.branch], &node.what, node.work.clone(), &after));
        }
        let end = self.enqueue(stream, "graph's end", Work::Marker, &marks)?;
        self.executables.get(handle)?.last = end;
        Ok(())
    }
}
