//! A driver call as a value that tests compare.
//!
//! It has handles and sizes but no addresses, which differ between runs. Every call that orders work, shapes it or
//! creates an object (a module, an event, memory) has a variant. A pass in a steady state creates no object.

use instep::cuda::driver::Shape;
use instep::{EventHandle, StreamHandle};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Make { what: &'static str },
    CreateStream { stream: StreamHandle, priority: i32 },
    Record { event: EventHandle, stream: StreamHandle },
    Wait { stream: StreamHandle, event: EventHandle },
    Query { event: EventHandle },
    Fill { stream: StreamHandle, bytes: u64 },
    Copy { stream: StreamHandle, bytes: usize },
    CopyOnDevice { stream: StreamHandle, bytes: u64 },
    CopyDown { stream: StreamHandle, bytes: u64 },
    CopyUp { stream: StreamHandle, bytes: u64 },
    OnHost { stream: StreamHandle },
    Launch { kernel: &'static str, shape: Shape, stream: StreamHandle },
    LaunchForeign { kernel: usize, shape: Shape, stream: StreamHandle },
    BeginCapture { stream: StreamHandle },
    EndCapture { stream: StreamHandle },
    LaunchGraph { stream: StreamHandle },
}
