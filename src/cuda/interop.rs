//! cudarc's types as handles of ours, for programs that use the same version of it.
//!
//! Conversions only. cudarc breaks its interface several times a year, so nothing else here may name its types.

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
