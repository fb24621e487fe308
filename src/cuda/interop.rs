//! Conversions from cudarc's types to this crate's handles, for programs that use the same version of cudarc.
//!
//! cudarc breaks its interface several times a year, so no other public item names its types.

use cudarc::driver::{CudaEvent, CudaStream};

use crate::handle::{EventHandle, StreamHandle};

impl From<&CudaStream> for StreamHandle {
    fn from(stream: &CudaStream) -> StreamHandle {
        StreamHandle(stream.cu_stream().expose_provenance())
    }
}

impl From<&CudaEvent> for EventHandle {
    fn from(event: &CudaEvent) -> EventHandle {
        EventHandle(event.cu_event().expose_provenance())
    }
}
