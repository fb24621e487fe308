//! A driver call as a value, to be compared.
//!
//! Handles and sizes, no addresses: where memory lies differs from run to run. Must hold whatever orders work or shapes
//! it, and whatever makes something (a module, an event, memory), which a pass in a steady state must not need.

use instep::cuda::driver::Shape;
use instep::{EventHandle, StreamHandle};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Make { what: &'static str },
    CreateStream { stream: StreamHandle, priority: i32 },
    Record { event: EventHandle, stream: StreamHandle },
    Wait { stream: StreamHandle, event: EventHandle },
    Query { event: EventHandle },
    Zero { stream: StreamHandle, bytes: u64 },
    Copy { stream: StreamHandle, bytes: usize },
    CopyOnDevice { stream: StreamHandle, bytes: u64 },
    Launch { kernel: &'static str, shape: Shape, stream: StreamHandle },
    LaunchForeign { kernel: usize, shape: Shape, stream: StreamHandle },
    BeginCapture { stream: StreamHandle },
    EndCapture { stream: StreamHandle },
    LaunchGraph { stream: StreamHandle },
}
